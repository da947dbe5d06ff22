"""The whole pipeline on caches in fp32 and FP8: scales, keys, and stores that hold several of them side by side."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from rich.console import Console

from codec.errors import DataError, UserError
from codec.formats import number_format
from codec.keys import chunk_keys
from codec.scales import CacheScales
from pipeline import ray_runtime
from pipeline.cache_scales import config_hash, find_scales, largest, offer_scales
from pipeline.calibration import config_hash as profile_hash
from pipeline.options import Options
from pipeline.paths import scales_config_path
from pipeline.prepare import prepare
from pipeline.run import Consoles, run
from pipeline.target import load_target, resolve_model

CHUNK = 32
MODES = ("tensor", "head", "none")


def prompts() -> dict[str, list[int]]:
    """Two that share two chunks, and one of its own."""
    numbers = np.random.default_rng(5).integers(3, 384, 300).tolist()
    shared = numbers[:64]
    return {"a": shared + numbers[64:150], "b": shared + numbers[150:180], "c": numbers[180:300]}


class Corpus:
    """One corpus and one store for all formats; runs on them and what they printed."""

    def __init__(self, model: Path, folder: Path) -> None:
        self.folder, self.report = folder, folder / "report.json"
        records = [json.dumps({"id": name, "token_ids": ids}) + "\n" for name, ids in prompts().items()]
        (folder / "corpus.jsonl").write_text("".join(records))
        self.options = Options(
            model=str(model),
            corpus=str(folder / "corpus.jsonl"),
            store=str(folder / "store"),
            chunk_tokens=CHUNK,
            report=str(self.report),
            predictor="int8",
        )

    def run(self, **changes: Any) -> tuple[int, dict[str, Any], str]:
        """(exit status, report, everything that was printed)."""
        text = io.StringIO()
        console = Console(file=text, width=200)
        status = run(replace(self.options, **changes), Consoles(console, console))
        return status, json.loads(self.report.read_text()), text.getvalue()

    def files(self, folder: str = "") -> list[str]:
        root = self.folder / "store"
        return sorted(str(p.relative_to(root)) for p in (root / folder).rglob("*") if p.is_file())

    def rows(self, **wanted: Any) -> dict[bytes, dict[str, Any]]:
        """Index rows with these values, by key."""
        parts = [pq.read_table(self.folder / "store" / name).to_pylist() for name in self.files("index")]
        return {row["key"]: row for part in parts for row in part if all(row[k] == v for k, v in wanted.items())}


@pytest.fixture(scope="module")
def cluster() -> Iterator[ray_runtime.Cluster]:
    """One Ray for all tests here; `run` joins what is running."""
    with ray_runtime.connected(2) as running:
        yield running


@pytest.fixture(scope="module")
def corpus(cluster: ray_runtime.Cluster, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    return Corpus(tiny_model, tmp_path_factory.mktemp("formats"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("cache", "scale", "loop"),
    [
        ("fp8_e4m3", None, "closed"),
        ("fp8_e4m3", "head", "open"),
        ("fp8_e4m3", "none", "closed"),
        ("fp8_e5m2", "tensor", "closed"),
        ("fp32", None, "closed"),
    ],
)
def test_a_corpus_is_stored_verified_and_found_again(corpus: Corpus, cache: str, scale: str | None, loop: str) -> None:
    asked = {"cache_dtype": cache, "fp8_scale": scale, "loop": loop}
    mode = (scale or "tensor") if number_format(cache).coarse else None
    calibrated = mode in ("tensor", "head")
    parts_before, rows_before = corpus.files("prompts"), set(corpus.rows())

    if calibrated and loop == "open":
        files = corpus.files()
        _, dry, text = corpus.run(**asked, dry_run=True)
        assert dry["chunks_new"] == 10 and "scales are not calibrated yet" in text and corpus.files() == files
    status, report, text = corpus.run(**asked)
    assert status == 0 and report["chunks_verified"] == report["chunks_new"] == 10 and report["chunks_shared"] == 2
    assert ("calibrating the cache's scales on 3 prompts" in text) == calibrated
    assert len(corpus.files("prompts")) == len(parts_before) + (0 if parts_before and cache == "fp8_e4m3" else 1)
    scalars = 300 * 3 * 2 * 2 * 16  # tokens of distinct chunks, layers, K and V, heads, dimensions
    assert report["raw_bytes"] == scalars * number_format(cache).item_bytes

    new = {key: row for key, row in corpus.rows().items() if key not in rows_before}
    assert all(row["cache_format"] == cache and row["fp8_scale"] == mode for row in new.values())
    prepared = prepare(replace(corpus.options, **asked))
    keys = {key for ids in prompts().values() for key in chunk_keys(prepared.root, ids, CHUNK)}
    assert new.keys() == keys and prepared.job.scaled

    if calibrated and loop == "closed":
        status, report, text = corpus.run(**asked)
        assert status == 0 and "nothing to compute" in text and "calibrating" not in text
        assert report["chunks_skipped"] == 10


@pytest.mark.slow
def test_scales_are_the_largest_values_of_the_corpus(corpus: Corpus) -> None:
    """Those that the actors stored, against one process that runs whole prompts."""
    fmt, target = number_format("fp8_e4m3"), load_target(resolve_model(corpus.options.model))
    job = prepare(replace(corpus.options, cache_dtype="fp8_e4m3", fp8_scale="head")).job
    if not job.scaled:
        corpus.run(cache_dtype="fp8_e4m3", fp8_scale="head", verify="none")
        job = prepare(replace(corpus.options, cache_dtype="fp8_e4m3", fp8_scale="head")).job
    found = [largest(target, torch.tensor(ids), CHUNK) for ids in prompts().values()]
    want = CacheScales.calibrated("head", np.maximum.reduce(found), fmt)
    assert job.cache_scales is not None and job.cache_scales.to_bytes() == want.to_bytes()
    assert len(np.unique(want.values)) > 6


# ---------------------------------------------------------------- without a run
def test_modes_formats_and_scales_have_keys_and_profiles_of_their_own(tiny_model: Path, tmp_path: Path) -> None:
    options = Corpus(tiny_model, tmp_path).options
    jobs = [prepare(replace(options, cache_dtype="fp8_e4m3", fp8_scale=mode)).job for mode in MODES]
    assert [job.scale_mode for job in jobs] == list(MODES) and [job.scaled for job in jobs] == [False, False, True]
    assert prepare(replace(options, cache_dtype="fp8_e4m3")).job.scale_mode == "tensor"
    ones, twos = (CacheScales("head", np.full((3, 2, 2), x, np.float32)).to_bytes() for x in (1, 2))
    jobs += [replace(jobs[1], scales=ones), replace(jobs[1], scales=twos), replace(jobs[0], scales=jobs[2].scales)]
    jobs += [prepare(replace(options, cache_dtype=name)).job for name in ("bf16", "fp32", "fp8_e5m2")]
    assert len({profile_hash(job) for job in jobs}) == len(jobs)


def test_of_several_jobs_that_calibrate_scales_one_wins(tiny_model: Path, tmp_path: Path) -> None:
    job = prepare(replace(Corpus(tiny_model, tmp_path).options, cache_dtype="fp8_e4m3", fp8_scale="head")).job
    assert find_scales(job) is None
    first, second = (CacheScales("head", np.full((3, 2, 2), x, np.float32)) for x in (0.5, 0.25))
    assert offer_scales(job, first).scales == first.to_bytes()
    assert offer_scales(job, second).scales == first.to_bytes()
    found = find_scales(job)
    assert found is not None and found.scaled and found.scales == first.to_bytes()


def test_stored_scales_that_are_not_what_they_must_be_are_refused(tiny_model: Path, tmp_path: Path) -> None:
    job = prepare(replace(Corpus(tiny_model, tmp_path).options, cache_dtype="fp8_e4m3", fp8_scale="head")).job
    path = scales_config_path(config_hash(job))
    for data in (b"", CacheScales.none(3, 2).to_bytes()):
        job.store.put_new(path, data)
        with pytest.raises(DataError, match=path):
            find_scales(job)
        job.store.delete(path)


def test_scales_of_a_cache_without_any_are_refused(tiny_model: Path, tmp_path: Path) -> None:
    options = Corpus(tiny_model, tmp_path).options
    for cache in (None, "bf16", "fp32"):
        with pytest.raises(UserError, match=r"--fp8-scale does not go with .* pass --cache-dtype fp8_e4m3 or fp8_e5m2"):
            replace(options, cache_dtype=cache, fp8_scale="tensor").check()
    with pytest.raises(UserError, match="row"):
        replace(options, cache_dtype="fp8_e4m3", fp8_scale="row").check()
    for mode in MODES:
        replace(options, cache_dtype="fp8_e5m2", fp8_scale=mode).check()
