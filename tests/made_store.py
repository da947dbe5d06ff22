"""A store with a few compressed prompts, made without Ray: the bodies of the main job's stages one after another."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import codec
from codec.formats import number_format
from codec.scales import CacheScales
from pipeline.actors import EncodeActor, VerifyActor
from pipeline.cache_scales import ScaleMeter, offer_scales
from pipeline.calibration import Calibrator, choose_sample, find_profile, offer_profile
from pipeline.committed import Committed, find_committed
from pipeline.encode import ChainEncoder
from pipeline.heal import computed
from pipeline.lease import at_work
from pipeline.options import Options
from pipeline.paths import blob_path
from pipeline.plan import Plan, Prompt, admit, make_plan
from pipeline.prepare import Prepared, prepare
from pipeline.prompts import Tokenise, Tokenising, split_rows
from pipeline.recording import Ran
from pipeline.report import make_report
from pipeline.retell import Retell
from pipeline.reverify import Figures, with_unseen
from pipeline.store import Store
from pipeline.target import Target
from pipeline.truth import Prefilled
from pipeline.work import ALL, Device, GroupResult, Job, make_group, verify_groups

CHUNK = 32
DEVICE = Device("cpu", False, 1)


def numbers(seed: int, count: int) -> list[int]:
    """Random token ids."""
    return [int(n) for n in np.random.default_rng(seed).integers(3, 384, count)]


SHARED = numbers(1, 64)
# Two that share two chunks, and one of its own: 3 + 1 + 3 distinct chunks.
RECORDS: list[dict[str, Any]] = [
    {"id": "a", "token_ids": SHARED + numbers(2, 30)},
    {"id": "b", "token_ids": SHARED + numbers(3, 20)},
    {"id": "c", "token_ids": numbers(4, 70)},
]


class Silent:
    """A reporter that tells nobody."""

    def add(self, counts: object) -> None:
        """Nothing."""


def options_of(model: Path, folder: Path, records: Iterable[dict[str, Any]] = RECORDS, **changes: Any) -> Options:
    """Options of a job on these records, written into `folder`."""
    corpus = folder / "corpus.jsonl"
    corpus.write_text("".join(json.dumps(record) + "\n" for record in records))
    given = Options(str(model), str(corpus), str(folder / "store"), predictor="int8", loop="open", chunk_tokens=CHUNK)
    return replace(given, **changes)


def tokenise(prepared: Prepared) -> list[Prompt]:
    """The corpus' prompts."""
    job, retelling, options = prepared.job, prepared.retelling, prepared.options
    limit, cut, skip = options.limit, options.max_tokens, options.skip_bad
    settings = Tokenising(job.store, job.model, job.target, prepared.roots, 1024, 384, cut, limit, True)
    files = prepared.files if retelling is None else retelling.parts(job.store)
    batch = {"file": files, "index": list(range(len(files))), "shard": [0] * len(files), "shards": [1] * len(files)}
    if retelling is None:
        tables = Tokenise(settings)(batch)
    else:
        tables = retelling.rows(Retell(settings, prepared.roots.of_tenants(retelling.salts()))(batch))
    found, bad = split_rows(tables)
    return admit(found, bad, limit=limit, skip_bad=skip, corpus="corpus", one_corpus=retelling is None).prompts


def scaled(prepared: Prepared, prompts: list[Prompt], *, backwards: bool = False) -> Prepared:
    """With calibrated scales of its FP8 cache, as `calibrate_scales` makes them."""
    job, meter = prepared.job, ScaleMeter(prepared.job, DEVICE)
    samples = choose_sample(prompts, CHUNK)
    parts = [meter.measure(sample) for sample in (samples[::-1] if backwards else samples)]
    scales = CacheScales.calibrated(job.scale_mode, np.maximum.reduce(parts), number_format(job.cache_format))
    return replace(prepared, job=offer_scales(job, scales))


def admitted(prepared: Prepared) -> tuple[Job, list[Prompt]]:
    """The job, with the profile in use and with scales if its cache has some, and the prompts under their keys."""
    prompts = prepared.admitted.prompts if prepared.admitted is not None else tokenise(prepared)
    if not prepared.job.scaled:
        prepared = scaled(prepared, prompts)
        prompts = tokenise(prepared)
    return with_profile(prepared.job, prompts), prompts


def with_profile(job: Job, prompts: list[Prompt]) -> Job:
    """With the profile in use, calibrated on these prompts if there is none."""
    found = find_profile(job)
    if found is not None:
        return found
    actor, samples = Calibrator(job, DEVICE), choose_sample(prompts, CHUNK)
    actor.load(actor.build(actor.ranges(samples) if job.rung.calibrated else None, samples))
    moments: codec.Moments | None = None
    for sample in samples:
        measured = actor.measure(sample)
        if moments is None:
            moments = measured
        else:
            moments.add(measured)
    assert moments is not None
    return offer_profile(job, actor.freeze(moments))


@dataclass
class Made:
    """What a job left."""

    job: Job
    plan: Plan
    results: list[GroupResult]
    notes: list[str]

    @property
    def store(self) -> Store:
        """The store it wrote to."""
        return self.job.store

    def keys(self, name: str, tenant: str = "") -> list[bytes]:
        """Keys of the prompt's chunks."""
        (found,) = (p for p in self.plan.prompts if (p.id, p.tenant) == (name, tenant))
        return found.all_keys()

    def path(self, name: str, index: int) -> str:
        """Path of a prompt's chunk."""
        return blob_path(self.job.target, self.job.profile, self.keys(name)[index])

    def computed(self) -> int:
        """Tokens that the last run put through the target."""
        return sum(result.target_tokens for result in self.results)

    def copy(self, folder: Path) -> Made:
        """The same in another folder."""
        shutil.copytree(self.store.uri.removeprefix("file://"), folder / "store")
        return replace(self, job=replace(self.job, store=Store.open(str(folder / "store"))))


Compute = Callable[[Committed, Plan], list[GroupResult]]


def computing(job: Job, encoder: type[EncodeActor] = EncodeActor) -> Compute:
    """What encodes and verifies a plan in this process."""

    def compute(before: Committed, plan: Plan) -> list[GroupResult]:
        encode, verify = (kind(job, DEVICE, Silent()) for kind in (encoder, VerifyActor))  # type: ignore[arg-type]
        return [
            GroupResult.from_json(text)
            for group in plan.groups
            for out in encode({"group": [make_group(group, plan.stored, before.lost, before.gone).to_json()]})
            for again in verify({"result": out["result"]})
            for text in again["result"]
        ]

    return compute


def make(options: Options, encoder: type[EncodeActor] = EncodeActor) -> Made:
    """Run the job on the options' corpus and store."""
    job, prompts = admitted(prepare(options))
    notes: list[str] = []
    compute = computing(job, encoder)
    with at_work(job.store):
        results, _, plan = computed(job, planned(job, prompts), compute, lambda: planned(job, prompts), notes.append)
    assert not any(result.failed for result in results)
    return Made(job, plan, results, notes)


def without_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the main job and recompression run in this process."""
    monkeypatch.setattr("pipeline.run.carry_out", carried_out)
    monkeypatch.setattr("pipeline.recompress.carry_out", carried_out)


def carried_out(prepared: Prepared, consoles: object, before_encode: Callable[[Job], None]) -> Ran:
    """What pipeline.run.carry_out does, in this process and without Ray."""
    job, prompts = admitted(prepared)
    before_encode(job)
    before, plan = planned(job, prompts)
    results = computing(job)(before, plan)

    def verify(figures: Figures) -> list[GroupResult]:
        actor = VerifyActor(replace(job, verify=ALL), DEVICE, Silent())  # type: ignore[arg-type]
        stored = [group.to_json() for group in verify_groups(plan, figures)]
        return [GroupResult.from_json(t) for found in actor({"result": stored}) for t in found["result"]]

    outcome, _ = with_unseen(job, plan, before, results, verify, whole=prepared.whole)
    figures = make_report(plan, outcome, profile_bytes=0, bad_records=0)
    assert not prepared.whole or outcome.verified | outcome.failed.keys() == plan.chunks.keys()
    scalars = sum(chunk.scalars_k + chunk.scalars_v for chunk in outcome.figures.values())
    return Ran(1 if outcome.failed else 0, job, figures, scalars)


def planned(job: Job, prompts: list[Prompt]) -> tuple[Committed, Plan]:
    """What is stored of these prompts, and what is to do."""
    before = find_committed(job, {key for prompt in prompts for key in prompt.all_keys()})
    return before, make_plan(prompts, CHUNK, stored=frozenset(before.figures), lost=frozenset(before.lost))


class ShakenTarget(Target):
    """The same model on other hardware: last bits of K differ."""

    def prefill(self, cache: Any, token_ids: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        first = self.length(cache)
        layers = [
            ((key.view(torch.int16) ^ 1).view(key.dtype), value) for key, value in super().prefill(cache, token_ids)
        ]
        self.replace(cache, first, layers)
        return layers


class ShakenActor(EncodeActor):
    """An encode actor on that hardware."""

    def _loaded(self) -> ChainEncoder:
        encoder = super()._loaded()
        assert isinstance(encoder.truth, Prefilled)
        encoder.truth.target.__class__ = ShakenTarget
        return encoder


def files(store: Store) -> dict[str, bytes]:
    """Everything in a store."""
    return {path: store.get(path) for path in store.list()}


def overwrite(store: Store, path: str, data: bytes) -> None:
    """Put other bytes in an object's place."""
    store.delete(path)
    store.put_new(path, data)


def make_old(store: Store, hours: float = 48) -> None:
    """Everything in a local store was written so long ago."""
    then = time.time() - hours * 3600
    for path in Path(store.uri.removeprefix("file://")).rglob("*"):
        os.utime(path, (then, then))
