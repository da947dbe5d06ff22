"""jobs/benchmark.py service: what it asks for, and a real service under a few clients."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from codec.errors import UserError
from jobs import benchmark
from jobs.bench import service
from tests.stored import CHUNK, Kept, tokens_of

PROMPTS = {"a": tokens_of(1, 3 * CHUNK + 5), "b": tokens_of(2, CHUNK)}


@pytest.fixture
def kept(tiny_model: Path, tmp_path: Path) -> Kept:
    found = Kept(tiny_model, tmp_path / "store", kind="static")
    found.put(PROMPTS)
    return found


def test_the_longest_whole_prompts_are_asked_for(kept: Kept) -> None:
    (one,) = service.find_prompts(kept.store, kept.job.target, 1)
    assert json.loads(one.body) == {"token_ids": PROMPTS["a"]} and len(one.sums) == 4
    kept.blob(PROMPTS["a"], 0).unlink()
    assert len(service.find_prompts(kept.store, kept.job.target, 5)) == 2  # the index is what says so
    for part in kept.store.list("index"):
        kept.store.delete(part)
    with pytest.raises(UserError, match="no whole prompt"):
        service.find_prompts(kept.store, kept.job.target, 1)


def test_numbers_that_cannot_be() -> None:
    with pytest.raises(UserError, match="--clients"):
        service.run(argparse.Namespace(clients=0, prompts=1, seconds=1.0), lambda text: None)


@pytest.mark.slow
def test_a_service_under_load(kept: Kept, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["service", "--store", kept.store.uri, "--model", kept.job.target.hex(), "--clients", "6", "--seconds", "4"]
    assert benchmark.main([*asked, "--concurrency", "2", "--requests", "20", "--json"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["verified"] and found["wrong"] == 0 and found["requests"] >= 20
    assert (
        found["p50_seconds"] <= found["p99_seconds"]
        and len(found["memory"]) >= 2
        and all(one["bytes"] for one in found["memory"])
    )
    assert "wrong" in dict(service.rows(found))["answered"]
