"""Caches of an engine, encoded under a target of their own: bits, keys, and caches that do not follow from what is stored."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import pipeline
from codec.errors import UserError
from codec.keys import engine_target
from jobs import import_caches
from pipeline.engines.given import Given, store_caches
from pipeline.engines.spool import Spool, SpooledCache, read
from pipeline.model_source import resolve_model
from pipeline.store import Store
from pipeline.target import Target, load_target
from pipeline.work import Device
from tests.stored import CHUNK, Kept, same, tokens_of

DEVICE = Device("cpu", False, 1)
SHARED = tokens_of(1, 2 * CHUNK)
PROMPTS = [SHARED + tokens_of(2, 30), SHARED + tokens_of(3, 50), tokens_of(4, 90)]


@pytest.fixture(scope="module")
def target(tiny_model: Path) -> Target:
    return load_target(resolve_model(tiny_model), "bf16")


def engine_cache(target: Target, ids: list[int], step: int = 24) -> SpooledCache:
    """The cache of an "engine": transformers, in other steps, and a bit apart from what the main job computes."""
    cache = target.new_cache()
    for part in torch.tensor(ids).split(step):
        target.prefill(cache, part)
    layers = [(k.view(torch.int16) ^ 1, v.view(torch.int16) ^ 1) for k, v in target.read(cache, 0, len(ids))]
    return SpooledCache(
        torch.tensor(ids), [(k.view(torch.bfloat16), v.view(torch.bfloat16)) for k, v in layers], "bf16"
    )


@pytest.fixture(scope="module")
def spooled(target: Target, tmp_path_factory: pytest.TempPathFactory) -> Spool:
    spool = Spool(tmp_path_factory.mktemp("spool"))
    first = engine_cache(target, PROMPTS[0])
    for ids in PROMPTS:
        cache = engine_cache(target, ids)
        if ids[: len(SHARED)] == SHARED:  # an engine computes a shared prefix once
            for mine, its in zip(cache.layers, first.layers, strict=True):
                for a, b in zip(mine, its, strict=True):
                    a[:, : len(SHARED)] = b[:, : len(SHARED)]
        spool.put(cache)
    return spool


@pytest.mark.parametrize("kind", ["linear", "int8"])
def test_an_engines_caches_come_back_bit_for_bit_and_mix_with_no_others(
    tiny_model: Path, target: Target, spooled: Spool, tmp_path: Path, kind: str
) -> None:
    kept = Kept(tiny_model, tmp_path / "store", kind="linear")
    kept.put({str(n): ids for n, ids in enumerate(PROMPTS)})
    given = Given(resolve_model(tiny_model), "vllm", kind, CHUNK)
    taken = store_caches(kept.store, spooled.files(), given, DEVICE)
    assert (taken.prompts, taken.chunks, taken.diverged) == (3, 2 + 1 + 2 + 3, [])
    own = engine_target(kept.job.target, "vllm").hex()
    for cache in map(read, spooled.files()):
        ids = cache.ids.tolist()
        found = pipeline.restore(kept.store, own, ids)
        assert found.tokens == len(ids) and same(found.load(), cache.layers)
        assert same(pipeline.restore(kept.store, kept.job.target.hex(), ids).load(), kept.truth(ids))
    again = store_caches(kept.store, spooled.files(), given, DEVICE)
    assert (again.prompts, again.chunks) == (3, 0)


def test_what_follows_from_other_bits_is_not_stored(tiny_model: Path, target: Target, tmp_path: Path) -> None:
    first, other = engine_cache(target, PROMPTS[0]), engine_cache(target, PROMPTS[1])
    other.layers[1][0][1, CHUNK + 3, 5] = 7.0  # in the second chunk, which both begin with
    (tmp_path / "a").mkdir(), (tmp_path / "b").mkdir()
    store, given = Store.open(str(tmp_path / "store")), Given(resolve_model(tiny_model), "vllm", "static", CHUNK)
    assert store_caches(store, [Spool(tmp_path / "a").put(first)], given, DEVICE).chunks == 3
    heard: list[str] = []
    taken = store_caches(store, [Spool(tmp_path / "b").put(other)], given, DEVICE, heard.append)
    assert taken.chunks == 0 and len(taken.diverged) == 1 and "other bits" in heard[-1]
    own = engine_target(resolve_model(tiny_model).fingerprint("bf16"), "vllm").hex()
    assert pipeline.restore(store, own, PROMPTS[1]).tokens == 2 * CHUNK  # the first one's
    # The same where both are stored in one call.
    both = Store.open(str(tmp_path / "both"))
    files = [*Spool(tmp_path / "a").files(), *Spool(tmp_path / "b").files()]
    taken = store_caches(both, files, given, DEVICE)
    assert len(taken.diverged) == 1 and taken.chunks in (3, 4)


def test_the_job_says_what_it_did_and_what_is_wrong(
    tiny_model: Path, spooled: Spool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    common = [
        "--model",
        str(tiny_model),
        "--store",
        str(tmp_path / "store"),
        "--predictor",
        "static",
        "--chunk-tokens",
        "32",
    ]
    assert import_caches.main([*common, "--spool", str(spooled.folder)]) == 0
    said = capsys.readouterr().out
    assert "new chunks" in said and "ratio" in said
    (tmp_path / "empty").mkdir()
    assert import_caches.main([*common, "--spool", str(tmp_path / "empty")]) == 2
    assert import_caches.main([*common, "--spool", str(tmp_path / "nowhere")]) == 2
    assert import_caches.main([*common, "--spool", str(spooled.folder), "--threads", "0"]) == 2
    (tmp_path / "empty" / "x.safetensors").write_bytes(b"no")
    assert import_caches.main([*common, "--spool", str(tmp_path / "empty")]) == 1
    assert "is no saved cache" in capsys.readouterr().err


def test_nothing_given_is_a_wrong_request(tiny_model: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no saved caches"):
        store_caches(Store.open(str(tmp_path)), [], Given(resolve_model(tiny_model), "vllm"), DEVICE)
