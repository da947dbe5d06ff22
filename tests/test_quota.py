"""A store that may not grow without end: refused at once where it is full, stopped cleanly where it would be."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from codec.errors import UserError
from pipeline.actors import EncodeActor
from pipeline.audit import audit
from pipeline.calibration import Calibrator, choose_sample
from pipeline.options import Options, parse_bytes
from pipeline.paths import predictor_path, profile_path
from pipeline.prepare import prepare
from pipeline.quota import Allowance, Budget, Quota, store_bytes
from pipeline.recode import recode_job
from pipeline.replaced import find_replaced
from pipeline.store import Store, StoreFull
from tests.made_store import CHUNK, DEVICE, make, options_of, tokenise


@pytest.mark.parametrize(
    ("text", "size"),
    [("1", 1), ("500000", 500_000), ("2kB", 2000), ("1.5GiB", 3 << 29), ("20 GB", 20 * 10**9), ("2T", 2 * 10**12)],
)
def test_sizes_as_people_write_them(text: str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "0", "-5", "lots", "5 apples", "1e9", "NaN", "9" * 400, "9999999999T"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(UserError, match="is no size"):
        Options("m", "c", "s", max_store_bytes=text).check()


def test_a_budget_gives_no_more_than_it_has() -> None:
    budget = Budget(100)
    assert [budget.take(60), budget.take(60), budget.take(40), budget.take(1)] == [40, -20, 0, -1]


def test_room_is_what_the_listing_leaves(tmp_path: Path) -> None:
    store = Store.open(str(tmp_path))
    store.put_new("a", bytes(500))
    held = sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file())
    assert store_bytes(store) == held and Allowance(store, str(held + 7)).room() == 7
    assert Allowance(store, None).room() is None
    with pytest.raises(UserError, match=f"holds {held} bytes and --max-store-bytes allows {held};"):
        Allowance(store, str(held)).room()


def test_a_store_is_listed_once_and_what_is_written_uncharged_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, listed, entries = Store.open(str(tmp_path)), [], Store.entries
    monkeypatch.setattr(Store, "entries", lambda self, folder="": listed.append(folder) or entries(self, folder))
    for path in ("prompts/p0", "scales/s0", "blobs/b0"):
        store.put_new(path, bytes(50))
    allowance = Allowance(store, "10000")
    room = allowance.room()
    assert room == 10_000 - store_bytes(store) and allowance.room() == room
    store.put_new("prompts/p1", bytes(100))
    store.put_new("scales/s1", bytes(20))
    store.put_new("blobs/b1", bytes(3000))  # another job's, as far as this run knows
    assert allowance.room() == room - 120
    assert listed.count("") == 2  # one of them above
    store.put_new("prompts/p2", bytes(10_000))
    with pytest.raises(UserError, match="--max-store-bytes allows 10,000"):
        allowance.room()


class LocalQuota(Quota):
    """With a budget in this process."""

    def charge(self, store: Store, path: str, size: int) -> None:
        self.check(store, path, self.budget.take(size))


LIMIT = [0]


class LimitedActor(EncodeActor):
    """An encode actor under LIMIT."""

    def _loaded(self):  # type: ignore[no-untyped-def]
        if self._quota.budget is None:
            room = Allowance(self._job.store, str(LIMIT[0])).room()
            assert room is not None
            self._quota = LocalQuota(Budget(room), LIMIT[0])
        return super()._loaded()


def test_a_job_stops_at_the_limit_and_goes_on_when_it_is_raised(tiny_model: Path, tmp_path: Path) -> None:
    options = options_of(tiny_model, tmp_path)
    LIMIT[0] = 1  # a job that calibrates and stores nothing
    with pytest.raises(UserError, match="--max-store-bytes allows 1"):
        make(options, LimitedActor)
    before = store_bytes(Store(options.store))
    LIMIT[0] = before + 30_000
    with pytest.raises(StoreFull, match=r"blobs/.*\.kv was not written: .* would pass --max-store-bytes"):
        make(options, LimitedActor)
    store = Store(options.store)
    assert before < store_bytes(store) <= LIMIT[0] and list(store.list("running")) == []
    found = audit(store, grace=0.0, selects=lambda key: True)
    assert found.faults == [] and 0 < found.rows == found.blobs < 7
    LIMIT[0] = 10**9
    assert make(options, LimitedActor).computed() < 7 * 32
    found = audit(store, grace=0.0, selects=lambda key: True)
    assert found.faults == [] and found.rows == found.blobs == 7


def test_calibration_stops_at_the_limit_too(tiny_model: Path, tmp_path: Path) -> None:
    prepared = prepare(options_of(tiny_model, tmp_path))
    store, samples = prepared.job.store, choose_sample(tokenise(prepared), CHUNK)
    few = Calibrator(prepared.job, DEVICE, LocalQuota(Budget(10), 10))
    with pytest.raises(StoreFull, match=r"predictors/.* was not written: .* would pass --max-store-bytes 10"):
        few.build(few.ranges(samples), samples)
    assert list(store.list("predictors")) == []
    enough = Budget(10**6)
    actor = Calibrator(prepared.job, DEVICE, LocalQuota(enough, 10**6))
    predictor = actor.build(actor.ranges(samples), samples)
    left = enough.take(0)
    assert left == 10**6 - store.size(predictor_path(predictor))
    assert actor.build(actor.ranges(samples), samples) == predictor and enough.take(0) == left  # it was there


def test_the_profile_of_another_coder_is_charged_too(tiny_model: Path, tmp_path: Path) -> None:
    made = make(options_of(tiny_model, tmp_path))
    store, coder = made.store, "constriction-ans24/0.5"
    old, options = find_replaced(store, None, None, None), options_of(tiny_model, tmp_path, coder=coder)
    held, before = store_bytes(store), set(store.list())
    with pytest.raises(StoreFull, match=r"profiles/.* was not written: .* would pass --max-store-bytes"):
        recode_job(store, old, options, None, Allowance(store, str(held + 100)))
    with pytest.raises(UserError, match=r"free space with jobs/gc\.py"):
        recode_job(store, old, options, None, Allowance(store, str(held)))
    assert set(store.list()) == before
    allowance = Allowance(store, str(held + 10**6))
    job = recode_job(store, old, options, None, allowance)
    size = store.size(profile_path(job.profile))
    assert job.profile != made.job.profile and allowance.room() == 10**6 - size
    assert recode_job(store, old, options, None, Allowance(store, "1")) == job  # it is there, so nothing is written


def test_a_full_store_is_refused_before_anything_is_loaded(tiny_model: Path, tmp_path: Path) -> None:
    options = replace(options_of(tiny_model, tmp_path), max_store_bytes="10")
    with pytest.raises(UserError, match="--max-store-bytes allows 10"):
        prepare(options)
    assert [path.name for path in (tmp_path / "store").rglob("*") if path.is_file()] == ["store.json"]
    prepare(replace(options, dry_run=True))
    assert json.loads((tmp_path / "store" / "store.json").read_text()) == {"format": 1}
