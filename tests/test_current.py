"""Pointers to generations: what readers follow, what is hidden from them, races, damage."""

from __future__ import annotations

import multiprocessing
from pathlib import Path

import pytest

from codec.errors import DataError, UserError
from pipeline.audit import audit
from pipeline.collect import find_garbage
from pipeline.current import IN_USE, STAGED, Entry, point, point_first, read_pointers, refuse_retired, stage
from pipeline.lease import exclusive, refuse_deleting
from pipeline.store import Store

T1, T2, P1, P2, P3 = (bytes([n]) * 32 for n in range(1, 6))


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store.open(str(tmp_path / "store"))


def now(store: Store, model: str = "m") -> Entry | None:
    return read_pointers(store).current(model, "bf16")


def move(store: Store, pair: tuple[bytes, bytes], *replaces: tuple[bytes, bytes]) -> None:
    entry = now(store)
    point(store, "m", "bf16", pair, replaces=replaces, seen=[] if entry is None else [entry.pair])


def test_a_new_model_is_hidden_until_readers_are_pointed_to_it(store: Store) -> None:
    assert now(store) is None and read_pointers(store).hidden(T1) == set()
    move(store, (T1, P1))
    stage(store, "m", "bf16", (T2, P2))
    stage(store, "m", "bf16", (T2, P2))  # a rerun
    found = read_pointers(store)
    assert found.hidden(T2) == {P2} and found.hidden(T1) == set() and found.in_use == {(T1, P1)}
    assert found.retired == {}
    move(store, (T2, P2), (T1, P1))
    found = read_pointers(store)
    assert found.in_use == {(T2, P2)} and found.hidden(T2) == set() and found.staged == {}
    assert found.retired.keys() == {(T1, P1)} and found.hidden(T1) == set(), "the old model's own readers still have it"
    with pytest.raises(UserError, match="was replaced on"):
        refuse_retired(store, (T1, P1))
    refuse_retired(store, (T2, P2))


def test_another_rung_of_the_same_target_takes_its_place(store: Store) -> None:
    move(store, (T1, P1))
    stage(store, "m", "bf16", (T1, P2))
    assert read_pointers(store).hidden(T1) == {P2}
    move(store, (T1, P2), (T1, P1), (T1, P3))
    assert read_pointers(store).hidden(T1) == {P1, P3}


def test_going_back_takes_a_generation_up_again(store: Store) -> None:
    move(store, (T1, P1))
    move(store, (T2, P2), (T1, P1))
    stage(store, "m", "bf16", (T1, P1))
    found = read_pointers(store)
    assert found.retired == {} and found.hidden(T1) == set(), "readers have seen it, and no collection takes it"
    move(store, (T1, P1), (T2, P2))
    assert read_pointers(store).in_use == {(T1, P1)} and read_pointers(store).retired.keys() == {(T2, P2)}


def test_a_pointer_that_was_moved_meanwhile_is_left(store: Store) -> None:
    move(store, (T1, P1))
    seen = [(T1, P1)]
    move(store, (T2, P2), (T1, P1))
    with pytest.raises(UserError, match="were pointed to another generation meanwhile"):
        point(store, "m", "bf16", (T1, P3), replaces=[(T1, P1)], seen=seen)
    point(store, "m", "bf16", (T2, P2), replaces=[(T1, P1)], seen=seen)  # the same move again
    assert read_pointers(store).logs == point_first(store, "m", "bf16", (T1, P1)).logs, "readers follow one already"
    assert len(list(store.list("current"))) == 2
    point_first(store, "n", "bf16", (T1, P1))
    entry = now(store, "n")
    assert entry is not None and entry.pair == (T1, P1)


def test_damaged_entries_count_for_nothing_and_are_reported(store: Store) -> None:
    move(store, (T1, P1))
    good = store.get("current/m/bf16/00000001")
    for number, data in enumerate((b"{", b"[]", good, good.replace(b'"version": 1', b'"version": 9'), b"1" * 2**21)):
        store.put_new(f"current/m/bf16/{number + 5:08}", data)
    store.put_new("current/odd", good)
    found = read_pointers(store)
    assert len(found.damaged) == 6 and found.in_use == {(T1, P1)}
    faults = audit(store, grace=0.0, selects=lambda key: True).faults
    assert {fault.path for fault in faults if fault.kind == "corrupt"} == set(found.damaged)
    move(store, (T2, P2), (T1, P1))
    entry = now(store)
    assert entry is not None and entry.pair == (T2, P2) and entry.number == 10


def test_nothing_is_collected_while_a_pointer_is_damaged(store: Store) -> None:
    """An older entry counts then, and the generation in use would look like one that was only begun."""
    move(store, (T1, P1))
    store.put_new("current/m/bf16/00000002", b"{")
    with pytest.raises(DataError, match=r"current/m/bf16/00000002.*which generation is in use"):
        find_garbage(store, 0.0)
    store.delete("current/m/bf16/00000002")
    assert find_garbage(store, 0.0).items == []


def test_other_jobs_do_not_fill_what_a_recompression_has_begun(store: Store) -> None:
    move(store, (T1, P1))
    stage(store, "m", "bf16", (T2, P2))
    with pytest.raises(UserError, match="a recompression fills the generation"):
        refuse_retired(store, (T2, P2))


def test_a_recompression_waits_for_a_collection(store: Store) -> None:
    refuse_deleting(store)
    with exclusive(store), pytest.raises(UserError, match="is at work on"):
        refuse_deleting(store)
    refuse_deleting(store)


def test_entries_are_read_once(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    move(store, (T1, P1))
    known: dict[str, Entry] = {}
    first = read_pointers(store, known)
    monkeypatch.setattr(Store, "get", None)
    assert read_pointers(store, known).logs == first.logs


def _race(uri: str, number: int, barrier: object) -> None:
    store = Store.open(uri)
    barrier.wait()  # type: ignore[attr-defined]
    stage(store, "m", "bf16", (T2, bytes([number]) * 32))


def test_jobs_that_race_for_a_number_all_get_one(store: Store) -> None:
    context = multiprocessing.get_context("fork")
    barrier = context.Barrier(4)
    jobs = [context.Process(target=_race, args=(store.uri, 50 + n, barrier)) for n in range(4)]
    for job in jobs:
        job.start()
    for job in jobs:
        job.join(60)
    entries = read_pointers(store).logs["m", "bf16"]
    assert [entry.number for entry in entries] == [1, 2, 3, 4] and {entry.state for entry in entries} == {STAGED}
    assert IN_USE not in {entry.state for entry in entries} and len(read_pointers(store).staged) == 4
