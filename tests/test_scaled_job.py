"""A job on an FP8 cache without Ray: the bodies of its stages and actors one after another, as pipeline/run.py has them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import codec
from codec.formats import number_format
from codec.keys import chunk_keys
from codec.scales import CacheScales
from pipeline import index
from pipeline.actors import EncodeActor, VerifyActor
from pipeline.cache_scales import largest
from pipeline.calibration import Calibrator, choose_sample, offer_profile
from pipeline.plan import Prompt, admit, group_prompts, make_plan
from pipeline.prepare import Prepared, prepare
from pipeline.prompts import Rekey, Tokenise, Tokenising, split_rows, with_keys
from pipeline.target import load_target, resolve_model
from pipeline.work import Device, GroupResult, Job, make_group
from tests.made_store import scaled
from tests.test_pipeline_formats import CHUNK, Corpus, prompts

DEVICE = Device("cpu", False, 1)


class Silent:
    """A reporter that tells nobody."""

    def add(self, counts: object) -> None:
        """Nothing."""


@pytest.fixture(autouse=True)
def same_threads() -> Iterator[None]:
    """Actors set their process' threads."""
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def tokenised(prepared: Prepared) -> list[Prompt]:
    """The corpus' prompts, under the keys of what is known when it is tokenised."""
    job = prepared.job
    settings = Tokenising(job.store, job.model, job.target, prepared.roots, 1024, 384, None, None, True)
    item = {"file": [prepared.files[0]], "index": [0], "shard": [0], "shards": [1]}
    found, bad = split_rows(Tokenise(settings)(item))
    return admit(found, bad, limit=None, skip_bad=False, corpus="corpus").prompts


def with_profile(job: Job, sample: list[Prompt]) -> Job:
    """With a profile of the closed loop."""
    actor = Calibrator(job, DEVICE)
    samples = choose_sample(sample, CHUNK)
    actor.load(actor.build(actor.ranges(samples) if job.rung.calibrated else None, samples))
    actor.begin_closed(samples)

    def moments(layer: int, law: codec.JointLayer | None) -> list[codec.LayerMoments]:
        return [actor.layer_moments(number, layer, law) for number in range(len(samples))]

    layers, tokens = codec.fit_layers(actor.layers(), actor.rounds(), moments, actor.advance)
    return offer_profile(job, actor.freeze_closed(layers, tokens))


@pytest.mark.parametrize(("cache", "mode"), [("fp8_e4m3", "head"), ("fp8_e5m2", "tensor"), ("fp8_e4m3", "none")])
def test_an_fp8_corpus_from_tokens_to_verified_blobs(tiny_model: Path, tmp_path: Path, cache: str, mode: str) -> None:
    options = replace(Corpus(tiny_model, tmp_path).options, cache_dtype=cache, fp8_scale=mode)
    prepared = prepare(options)
    found = tokenised(prepared)
    parts = sorted(p.name for p in (tmp_path / "store" / "prompts").rglob("*.parquet"))
    if mode == "none":
        assert prepared.job.scaled
    else:
        assert not prepared.job.scaled
        provisional = found
        prepared = scaled(prepared, provisional)
        stage = Rekey(prepared.job.store, prepared.root, CHUNK)
        found = with_keys(provisional, stage({"part": sorted({p.part for p in provisional})}))
        assert [replace(p, keys=b"", root=b"") for p in found] == [replace(p, keys=b"", root=b"") for p in provisional]
        assert not {k for p in found for k in p.all_keys()} & {k for p in provisional for k in p.all_keys()}
        # A second run knows the scales from the start: it tokenises to these keys at once, into the same part.
        assert prepare(options).job.scales == prepared.job.scales
        assert tokenised(prepare(options)) == found
        assert scaled(replace(prepared), found, backwards=True).job.scales == prepared.job.scales
    assert {p.id: p.all_keys() for p in found} == {
        name: chunk_keys(prepared.root, ids, CHUNK) for name, ids in prompts().items()
    }
    assert sorted(p.name for p in (tmp_path / "store" / "prompts").rglob("*.parquet")) == parts

    job = with_profile(prepared.job, found)
    plan = make_plan(found, CHUNK, stored=frozenset())
    encoder, verifier = (kind(job, DEVICE, Silent()) for kind in (EncodeActor, VerifyActor))  # type: ignore[arg-type]
    groups = group_prompts(plan.prompts, plan.chunks, frozenset())
    results = [
        GroupResult.from_json(text)
        for group in groups
        for out in encoder({"group": [make_group(group, frozenset(), {}).to_json()]})
        for again in verifier({"result": out["result"]})
        for text in again["result"]
    ]
    assert sum(len(r.verified) for r in results) == len(plan.chunks) == 10 and not any(r.failed for r in results)
    rows = index.read_rows(job.store, target=job.target, profile=job.profile).to_pylist()
    assert {row["key"] for row in rows} == set(plan.chunks)
    assert {(row["cache_format"], row["fp8_scale"]) for row in rows} == {(cache, mode)}
    assert all(row["raw_bytes"] == row["scalars_k"] + row["scalars_v"] for row in rows)


def test_scales_are_the_largest_values_of_the_corpus(tiny_model: Path, tmp_path: Path) -> None:
    """What actors measure in a job that is not to be quantised itself, against whole prompts in one process."""
    options = replace(Corpus(tiny_model, tmp_path).options, cache_dtype="fp8_e4m3", fp8_scale="head")
    prepared = prepare(options)
    job = scaled(prepared, tokenised(prepared)).job
    target = load_target(resolve_model(tiny_model))
    found: list[Any] = [largest(target, torch.tensor(ids), CHUNK) for ids in prompts().values()]
    want = CacheScales.calibrated("head", np.maximum.reduce(found), number_format("fp8_e4m3"))
    assert job.scales == want.to_bytes() and len(np.unique(want.values)) > 6
