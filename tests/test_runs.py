"""Run records: written, listed and read back; what is malformed is named."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from codec.errors import DataError
from pipeline.runs import MAX_BYTES, OK, RunRecord, list_runs, new_run, now, plain_options, read_run, write_run
from pipeline.store import Store


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store.open(str(tmp_path / "store"))


def record(**changes: Any) -> RunRecord:
    run, started = new_run()
    made = RunRecord(
        run, "compress", started, now(), OK, "a model", "ab" * 32, "ab" * 32 + "/" + "cd" * 32, "int8 closed", "bf16",
        100, 3, 1, 3, 0, 5000, 900, {"chunk_tokens": 32},
    )  # fmt: skip
    return replace(made, **changes)


def test_records_come_back_and_are_listed_by_their_start(store: Store) -> None:
    late = record(started="2026-11-30T12:00:01+00:00", health={"layers": [1.5]})
    early = record(started="2026-11-30T13:59:59+02:00")
    paths = [write_run(store, item) for item in (late, early)]
    assert paths[0] == f"runs/20261130T120001Z-{late.run}.json" and paths[1].startswith("runs/20261130T115959Z-")
    assert list(list_runs(store)) == paths[::-1]
    assert [read_run(store, path) for path in paths] == [late, early]


def test_the_schema_is_fixed() -> None:
    assert sorted(json.loads(record().to_json())) == [
        "bytes", "cache_format", "chunks_new", "chunks_reused", "chunks_verified", "ended", "fingerprint", "generation",
        "health", "job", "model", "options", "outcome", "run", "rung", "scalars", "started", "tokens",
        "verification_failures", "version",
    ]  # fmt: skip


def test_fields_of_later_releases_are_ignored_and_health_may_be_missing(store: Store) -> None:
    data = asdict(record()) | {"added": [1]}
    del data["health"]
    store.put_new("runs/a.json", json.dumps(data).encode())
    assert read_run(store, "runs/a.json").health == {}


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"{", "not valid JSON"),
        (b"[]", "no run record of version 1"),
        (json.dumps(asdict(record(version=2))).encode(), "no run record of version 1"),
        (json.dumps(asdict(record(tokens="many"))).encode(), "field tokens is 'many'"),
        (json.dumps(asdict(record(tokens=True))).encode(), "field tokens is True"),
        (b" " * (MAX_BYTES + 1), "is over"),
    ],
)
def test_what_is_no_record_is_named(store: Store, data: bytes, message: str) -> None:
    store.put_new("runs/a.json", data)
    with pytest.raises(DataError, match=f"runs/a.json.*{message}"):
        read_run(store, "runs/a.json")


def test_options_are_kept_without_credentials_and_defaults() -> None:
    given = {"corpus": "s3://me:secret@bucket/x", "limit": None, "skip_bad": False, "actors": 2}
    assert plain_options(given) == {"corpus": "s3://bucket/x", "actors": 2}
