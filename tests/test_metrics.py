"""Metrics of a job: what its actors report, checked against what they stored."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from pipeline import metrics
from pipeline.metrics import TAGS, Metrics, TimedStore
from pipeline.store import ObjectMissing, Store
from tests.made_store import RECORDS, make, options_of

Values = dict[tuple[str, str], list[float]]


class Kinds:
    """In the place of ray.util.metrics: keeps what is recorded, by name and the tag that tells values of one name apart."""

    def __init__(self) -> None:
        self.values: Values = defaultdict(list)
        outer = self

        class Metric:
            def __init__(self, name: str, description: str = "", tag_keys: tuple[str, ...] = (), **more: Any) -> None:
                assert name.startswith("kv_") and description and set(TAGS) <= set(tag_keys)
                self.name, self.keys = name, tag_keys

            def record(self, value: float, tags: dict[str, str]) -> None:
                assert set(tags) == set(self.keys) and all(isinstance(text, str) for text in tags.values())
                outer.tags = tags
                outer.values[self.name, tags.get("outcome") or tags.get("operation") or ""].append(value)

            inc = set = observe = record

        self.tags: dict[str, str] = {}
        self.Counter = self.Gauge = self.Histogram = Metric


@pytest.fixture
def kinds(monkeypatch: pytest.MonkeyPatch) -> Kinds:
    found = Kinds()
    monkeypatch.setattr(metrics, "_rays", lambda: found)
    return found


def test_actors_report_what_they_stored(tiny_model: Path, tmp_path: Path, kinds: Kinds) -> None:
    made = make(options_of(tiny_model, tmp_path))
    values = {key: sum(found) for key, found in kinds.values.items()}
    figures = [chunk for result in made.results for chunk in result.chunks]
    assert values["kv_chunks", "written"] == len(figures) == values["kv_chunks_verified", ""] == 7
    assert values["kv_tokens", ""] == sum(chunk.tokens for chunk in figures)
    assert values["kv_stored_bytes", ""] == sum(chunk.stored_bytes for chunk in figures)
    scalars = sum(chunk.scalars_k + chunk.scalars_v for chunk in figures)
    assert kinds.values["kv_bits_per_scalar", ""][-1] == 8 * values["kv_stored_bytes", ""] / scalars
    assert ("kv_verification_failures", "") not in values
    assert len(kinds.values["kv_store_seconds", "put"]) >= 8 and min(kinds.values["kv_store_seconds", "get"]) > 0
    assert -1 < kinds.values["kv_profile_excess_bits", ""][-1] < 1
    everything = json.dumps([kinds.tags, list(map(str, kinds.values))])
    assert kinds.tags["rung"] == "int8 open" and not any(record["id"] in kinds.tags.values() for record in RECORDS)
    assert str(tmp_path) not in everything


def test_a_failed_chunk_is_counted(tiny_model: Path, tmp_path: Path, kinds: Kinds) -> None:
    found = Metrics(make(options_of(tiny_model, tmp_path)).job)
    found.verified(0, 2)
    found.queue(3)
    assert kinds.values["kv_verification_failures", ""] == [2] and kinds.values["kv_queue_depth", ""] == [3]


def test_outside_of_ray_nothing_is_reported_and_the_store_stays_itself(tiny_model: Path, tmp_path: Path) -> None:
    made = make(options_of(tiny_model, tmp_path))
    found = Metrics(made.job)
    found.stored("written", 1, 1, 1, 1)
    assert found.store(made.store) is made.store


def test_a_timed_store_tells_of_failures_too(tmp_path: Path) -> None:
    plain, told = Store.open(str(tmp_path)), list[tuple[str, float]]()
    store = TimedStore.over(plain, lambda operation, seconds: told.append((operation, seconds)))
    assert store.put_new("a/b", b"12") and store.get("a/b", start=1) == b"2" and plain.get("a/b") == b"12"
    with pytest.raises(ObjectMissing):
        store.get("a/c")
    assert [operation for operation, _ in told] == ["put", "get", "get"] and all(seconds > 0 for _, seconds in told)
