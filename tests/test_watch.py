"""Verification that goes on: every chunk in its turn, faults as they come, storage that fails for a while."""

from __future__ import annotations

import itertools
import json
import threading
from pathlib import Path
from typing import Any

import pytest

import pipeline.watch
from codec.errors import StorageError
from jobs.verify import main
from pipeline.audit import CORRUPT, MISSING
from pipeline.removal import drop_rows
from pipeline.store import Store
from pipeline.watch import Watched, share_of, watch
from tests.stored import CHUNK, Kept, tokens_of

PROMPTS = {"a": tokens_of(1, 5 * CHUNK), "b": tokens_of(2, 2 * CHUNK + 5)}
CHUNKS = 8
SHARES = 3


@pytest.fixture
def kept(tiny_model: Path, tmp_path: Path) -> Kept:
    found = Kept(tiny_model, tmp_path / "store", kind="static")
    found.put(PROMPTS)
    return found


def after(rounds: Any, count: int) -> Watched:
    *_, last = itertools.islice(rounds, count)
    assert isinstance(last, Watched)
    return last


def test_each_chunk_has_its_turn_also_those_that_came_later(kept: Kept) -> None:
    rounds = watch(kept.store, SHARES)
    found = after(rounds, SHARES)
    assert (found.rounds, found.decoded, found.faults) == (SHARES, CHUNKS, {})
    kept.put({"later": tokens_of(3, CHUNK)})
    assert after(rounds, SHARES).decoded == 2 * CHUNKS + 1
    assert {share_of(bytes([n]) * 32, SHARES) for n in range(40)} == set(range(SHARES))


def test_a_fault_is_told_once_and_stays_in_the_totals(kept: Kept) -> None:
    heard: list[str] = []
    rounds = watch(kept.store, SHARES, tell=heard.append)
    after(rounds, SHARES)
    blob, gone = kept.blob(PROMPTS["a"], 4), kept.blob(PROMPTS["b"], 2)
    data = bytearray(blob.read_bytes())
    data[len(data) // 2] ^= 4
    blob.write_bytes(data)
    gone.unlink()
    found = after(rounds, 2 * SHARES)
    assert {f.kind for f in found.faults.values()} == {CORRUPT, MISSING} and len(found.faults) == len(heard) == 2
    said = found.to_plain()
    assert said["failed"] == 2 and {f["path"].rpartition("/")[2] for f in said["faults"]} == {blob.name, gone.name}


def test_what_a_running_job_has_not_committed_is_no_fault(kept: Kept) -> None:
    for part in kept.store.list("index"):
        kept.store.delete(part)
    assert after(watch(kept.store, 1), 1).faults == {}


def test_what_a_collection_deletes_during_a_round_is_no_fault(kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[str] = []
    damaged, gone = kept.blob(PROMPTS["b"], 2), set(kept.keys(PROMPTS["a"]))
    real, collected = pipeline.watch.audit, threading.Event()

    def unwanted(rows: Any) -> list[bool]:
        return [key in gone for key in rows["key"].to_pylist()]

    def during(store: Store, *, selects: Any, **given: Any) -> Any:
        def collect(key: bytes) -> bool:  # asked when rows were read, and blobs were not
            if not collected.is_set():
                collected.set()
                assert drop_rows(store, kept.job.target, kept.job.profile, unwanted) == len(gone)
                for number in range(len(gone)):
                    kept.blob(PROMPTS["a"], number).unlink()
            return bool(selects(key))

        return real(store, selects=collect, **given)

    monkeypatch.setattr(pipeline.watch, "audit", during)
    damaged.write_bytes(damaged.read_bytes()[:-9])
    found = after(watch(kept.store, 1, tell=heard.append), 1)
    assert [path.rpartition("/")[2] for path in found.faults] == [damaged.name] and len(heard) == 1


def test_storage_that_fails_for_a_while_does_not_end_it(kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[str] = []
    rounds = watch(kept.store, 1, tell=heard.append)
    with monkeypatch.context() as broken:
        broken.setattr(Store, "list", lambda *_, **__: (_ for _ in ()).throw(StorageError("no answer")))
        found = after(rounds, 1)
        assert (found.unread, found.last, found.decoded) == (1, "no answer", 0) and heard
    assert after(rounds, 1).decoded == CHUNKS


def test_the_job_watches_reports_and_has_an_exit_status(
    kept: Kept, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = tmp_path / "report.json"
    asked = [
        "--store",
        kept.store.uri,
        "--watch",
        "--every",
        "0s",
        "--sample",
        "0.5",
        "--rounds",
        "2",
        "--report",
        str(report),
    ]
    assert main(asked) == 0
    said = json.loads(report.read_text())
    assert (said["rounds"], said["decoded"], said["failed"]) == (2, CHUNKS, 0)
    assert "chunks decoded" in capsys.readouterr().out
    kept.blob(PROMPTS["a"], 0).unlink()
    assert main(asked) == 1
    assert "missing: blobs/" in capsys.readouterr().out
    assert main([*asked, "--repair"]) == 2
    assert main([*asked[:-4], "--rounds", "0"]) == 2
