"""The whole pipeline on embedded Ray, with a tiny model and a local store."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from rich.console import Console

from codec.errors import DataError
from pipeline import index, ray_runtime
from pipeline.calibration import config_hash, find_profile, offer_profile
from pipeline.options import Options
from pipeline.paths import blob_prefix, parse_blob_path, profile_config_path
from pipeline.prepare import prepare
from pipeline.ray_runtime import our_error
from pipeline.run import Consoles, run
from pipeline.store import Store

CHUNK = 32
SYSTEM = "You are an agent that reads source code, calls tools and answers questions about what it has found. " * 2
REPORT_KEYS = {
    "ratio", "ratio_with_profile", "bits_per_scalar", "bits_k", "bits_v", "ideal_bits_per_scalar", "prompts", "tokens",
    "chunks_new", "chunks_shared", "chunks_skipped", "raw_bytes", "stored_bytes", "profile_bytes", "chunks_verified",
    "chunks_failed", "bad_records", "target_tokens_per_s", "tokens_per_s", "health", "per_prompt",
}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[ray_runtime.Cluster]:
    """One Ray for all tests here; `run` joins what is running."""
    with ray_runtime.connected(2) as running:
        yield running


def record(name: str, question: str) -> dict[str, Any]:
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]
    return {"id": name, "messages": messages}


def write_corpus(path: Path, records: list[dict[str, Any]], tail: str = "") -> str:
    path.write_text("".join(json.dumps(record) + "\n" for record in records) + tail)
    return str(path)


class Job:
    """One corpus, one store, and what the runs on them said."""

    def __init__(self, model: Path, folder: Path) -> None:
        self.folder = folder
        self.report = folder / "report.json"
        records = [
            record("one", "What does it do?"),
            record("two", "Is it safe?"),
            {"id": "three", "text": "The quick brown fox jumps over the lazy dog. " * 6},
            {"id": "four", "token_ids": list(range(3, 80))},
            record("one", "What does it do?"),
        ]
        self.options = Options(
            model=str(model),
            corpus=write_corpus(folder / "corpus.jsonl", records),
            store=str(folder / "store"),
            chunk_tokens=CHUNK,
            report=str(self.report),
        )

    def run(self, **changes: Any) -> tuple[int, dict[str, Any], str]:
        """(exit status, report, everything that was printed)."""
        text = io.StringIO()
        console = Console(file=text, width=200)
        status = run(replace(self.options, **changes), Consoles(console, console))
        return status, json.loads(self.report.read_text()), text.getvalue()

    def files(self) -> dict[str, bytes]:
        root = self.folder / "store"
        return {str(p.relative_to(root)): p.read_bytes() for p in sorted(root.rglob("*")) if p.is_file()}


@pytest.fixture(scope="module")
def done(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Job, tuple[int, dict[str, Any], str]]:
    job = Job(tiny_model, tmp_path_factory.mktemp("job"))
    return job, job.run()


Done = tuple[Job, tuple[int, dict[str, Any], str]]


def test_a_corpus_is_compressed_stored_and_verified(done: Done) -> None:
    _, (status, report, text) = done
    assert status == 0
    assert set(report) == REPORT_KEYS
    assert report["prompts"] == 4 and "1 identical copies left out" in text
    assert report["chunks_skipped"] == report["chunks_failed"] == report["bad_records"] == 0
    assert report["chunks_shared"] > 0
    assert report["chunks_verified"] == report["chunks_new"] > 0
    per_prompt = report["per_prompt"]
    assert [p["id"] for p in per_prompt] == ["one", "two", "three", "four"]
    assert sum(p["tokens"] for p in per_prompt) == report["tokens"]
    for kind in ("new", "shared", "skipped"):
        assert sum(p[f"chunks_{kind}"] for p in per_prompt) == report[f"chunks_{kind}"]
    assert report["tokens_per_s"] < report["target_tokens_per_s"]
    assert "\x1b" not in text and "\r" not in text


def test_sizes_are_those_on_disk(done: Done) -> None:
    job, (_, report, _) = done
    files = job.files()
    blobs = {name: data for name, data in files.items() if name.startswith("blobs/")}
    assert len(blobs) == report["chunks_new"]
    assert sum(map(len, blobs.values())) == report["stored_bytes"]
    profiles = [data for name, data in files.items() if name.startswith("profiles/") and "by-config" not in name]
    assert [len(data) for data in profiles] == [report["profile_bytes"]]
    scalars = report["raw_bytes"] / 2
    assert report["bits_per_scalar"] == pytest.approx(8 * report["stored_bytes"] / scalars)
    assert report["ratio"] == pytest.approx(report["raw_bytes"] / report["stored_bytes"])


def test_each_blob_has_a_row_and_the_rows_form_chains(done: Done) -> None:
    job, _ = done
    prepared = find_profile(prepare(job.options).job)
    assert prepared is not None
    table = index.read_rows(prepared.store, target=prepared.target, profile=prepared.profile)
    rows = {row["key"]: row for row in table.to_pylist()}
    stored = {parse_blob_path(p)[2] for p in prepared.store.list(blob_prefix(prepared.target, prepared.profile))}
    assert rows.keys() == stored
    for row in rows.values():
        if row["parent_key"] is None:
            assert row["chunk_index"] == row["first_token"] == 0 and row["parent_digest"] == bytes(16)
        else:
            assert row["parent_digest"] == rows[row["parent_key"]]["chain_digest"]
        assert row["prefill_tokens"] == row["chunk_tokens"] == CHUNK and row["tenant"] == ""


def test_a_second_run_computes_nothing_and_says_so(done: Done) -> None:
    job, (_, first, _) = done
    before = job.files()
    status, report, text = job.run()
    assert status == 0 and f"nothing to compute: all {first['chunks_new']} chunks are stored" in text
    assert "calibrating" not in text and "compressing" not in text
    assert report["chunks_new"] == report["chunks_verified"] == 0
    assert report["chunks_skipped"] == first["chunks_new"] and report["ratio"] == first["ratio"]
    assert report["target_tokens_per_s"] is None and report["tokens_per_s"] is None
    assert {
        name: data for name, data in job.files().items() if name in before or not name.startswith("runs/")
    } == before


def test_a_dry_run_writes_nothing_and_needs_no_store(done: Done, tmp_path: Path) -> None:
    job, (_, first, _) = done
    status, report, text = job.run(dry_run=True, store=str(tmp_path / "none"))
    assert status == 0 and report["dry_run"] and not (tmp_path / "none").exists()
    assert report["raw_bytes"] == first["raw_bytes"] and report["chunks_new"] == first["chunks_new"]
    assert "a guess" in text
    before = job.files()
    _, report, text = job.run(dry_run=True)
    assert report["chunks_new"] == 0 and report["chunks_skipped"] == first["chunks_new"] and job.files() == before


def test_more_prompts_and_lost_blobs_are_made_up_for(done: Done, tmp_path: Path) -> None:
    job, (_, first, _) = done
    lost = next(name for name in job.files() if name.startswith("blobs/"))
    blob = job.files()[lost]
    (job.folder / "store" / lost).unlink()
    more = [*map(json.loads, Path(job.options.corpus).read_text().splitlines()), record("five", "Something else?")]
    status, report, text = job.run(corpus=write_corpus(tmp_path / "more.jsonl", more), verify="sample:0.999999")
    assert status == 0 and "calibrating" not in text
    assert job.files()[lost] == blob
    new = report["chunks_new"]
    assert new > 1 and report["chunks_verified"] == new
    assert report["chunks_skipped"] == first["chunks_new"] - 1


def test_tenants_share_nothing_and_their_salt_is_nowhere(done: Done, monkeypatch: pytest.MonkeyPatch) -> None:
    job, (_, first, _) = done
    monkeypatch.setenv("KV_TEST_SALT", "hush-hush-secret")
    status, report, text = job.run(salt_env="KV_TEST_SALT", limit=1, verify="none")
    assert status == 0 and report["prompts"] == 1 and report["chunks_skipped"] == 0
    assert report["chunks_new"] == first["per_prompt"][0]["chunks"] and report["chunks_verified"] == 0
    everything = b"".join(job.files().values()) + text.encode() + job.report.read_bytes()
    assert b"hush-hush" not in everything


def test_parquet_with_a_bad_row_fp16_and_a_calibration_corpus(tiny_model: Path, tmp_path: Path) -> None:
    job = Job(tiny_model, tmp_path)
    texts = ["def read_file(path):\n" * 9, "", "The quick brown fox. " * 9]
    table = pa.table({"id": ["a", "bad", "b"], "text": texts})
    pq.write_table(table, tmp_path / "corpus.parquet")
    corpus = str(tmp_path / "corpus.parquet")
    status, report, text = job.run(
        corpus=corpus, calibration=job.options.corpus, cache_dtype="fp16", max_tokens=50, skip_bad=True
    )
    assert status == 0 and report["prompts"] == 2 and report["tokens"] <= 100
    assert report["bad_records"] == 1 and "corpus.parquet:2: " in text
    assert report["chunks_verified"] == report["chunks_new"] == 4
    assert any(row["cache_format"] == "fp16" for row in _rows(job))


def _rows(job: Job) -> list[dict[str, Any]]:
    names = [name for name in job.files() if name.startswith("index/")]
    return [row for name in names for row in pq.read_table(io.BytesIO(job.files()[name])).to_pylist()]


# ---------------------------------------------------------------- parts of it
def test_the_loser_of_a_calibration_race_adopts_the_winners_profile(done: Done, tmp_path: Path) -> None:
    job, _ = done
    prepared = find_profile(prepare(job.options).job)
    assert prepared is not None
    other = bytes(32)
    assert offer_profile(prepared, other).profile == prepared.profile


def test_a_profile_that_is_not_what_its_name_says_is_refused(done: Done, tmp_path: Path) -> None:
    job, _ = done
    prepared = find_profile(prepare(job.options).job)
    assert prepared is not None
    store = Store.open(str(tmp_path / "other"))
    damaged = bytearray(prepared.store.get(f"profiles/{prepared.profile.hex()}"))
    damaged[-1] ^= 1
    store.put_new(f"profiles/{prepared.profile.hex()}", bytes(damaged))
    store.put_new(profile_config_path(config_hash(prepared)), prepared.profile.hex().encode())
    with pytest.raises(DataError, match="profile"):
        find_profile(replace(prepared, store=store))


def test_an_error_of_ours_is_found_inside_what_ray_raises() -> None:
    import ray

    def fail() -> None:
        raise DataError("the blob is bent")

    with pytest.raises(Exception) as caught:
        ray.get(ray.remote(fail).remote())
    ours = our_error(caught.value)
    assert type(ours) is DataError and str(ours) == "the blob is bent"
    assert our_error(ValueError("else")) is None


def test_damage_met_by_an_actor_is_one_sentence(done: Done) -> None:
    """A stored parent that is corrupt stops the job that needs it, by name."""
    job, _ = done
    blobs = {name: data for name, data in job.files().items() if name.startswith("blobs/")}
    try:
        for name, data in blobs.items():
            (job.folder / "store" / name).write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
        more = [record("six", "And what is damaged?")]
        with pytest.raises(DataError, match=r"store/blobs/\w+/\w+/\w\w/\w+\.kv: ") as caught:
            job.run(corpus=write_corpus(job.folder / "six.jsonl", more))
        assert "\n" not in str(caught.value) and "Traceback" not in str(caught.value)
    finally:
        for name, data in blobs.items():
            (job.folder / "store" / name).write_bytes(data)
