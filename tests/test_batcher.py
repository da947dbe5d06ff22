"""Requests decoded together: each gets its own bits, whatever it was decoded with, and whatever becomes of the others."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from codec.errors import ChunkFailed
from pipeline.restoration import batcher
from pipeline.restoration.batcher import Batcher, Feed
from pipeline.restoration.restorer import Restoration, Restorer
from tests.stored import CHUNK, Kept, same, tokens_of
from tests.test_restoration import forge

SHARED = tokens_of(1, 2 * CHUNK)
PROMPTS = {
    "a": SHARED + tokens_of(2, 20),
    "b": SHARED + tokens_of(3, CHUNK + 5),
    "c": tokens_of(4, CHUNK + 9),
    "d": SHARED,
}


class Held:
    """decode_together, which waits for `go` at its first call and keeps how many it was called with."""

    def __init__(self) -> None:
        self.go, self.begun, self.groups = threading.Event(), threading.Event(), []  # type: ignore[var-annotated]

    def __call__(self, group: Sequence[Restoration]) -> Iterator[Any]:
        self.groups.append([restored.asked for restored in group])
        self.begun.set()
        assert self.go.wait(60)
        yield from self.real(group)

    real = staticmethod(batcher.decode_together)


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[Held]:
    found = Held()
    monkeypatch.setattr(batcher, "decode_together", found)
    yield found
    found.go.set()


@pytest.fixture
def kept(tiny_model: Path, tmp_path: Path) -> Kept:
    found = Kept(tiny_model, tmp_path / "store")
    found.put(PROMPTS)
    return found


def behind_one(held: Held, kept: Kept, decoding: Batcher, asked: Sequence[dict[str, Any]]) -> list[Feed]:
    """Feeds of requests that all wait while another one is decoded."""
    restorer = Restorer(kept.store, kept.job.target.hex())
    decoding.ask(restorer.restore(PROMPTS["c"]))
    assert held.begun.wait(60)
    feeds = [
        decoding.ask(restorer.restore(PROMPTS[one["id"]], layers=one.get("layers"), heads=one.get("heads")))
        for one in asked
    ]
    held.go.set()
    return feeds


def pairs(feed: Feed) -> list[Any]:
    return [pair for _, pair in feed.layers()]


def test_what_waits_is_decoded_together_and_each_gets_its_own(held: Held, kept: Kept) -> None:
    asked = [{"id": "a"}, {"id": "b"}, {"id": "c"}, {"id": "a", "layers": (1, 2), "heads": (1, 2)}, {"id": "d"}]
    feeds = behind_one(held, kept, Batcher(1), asked)
    for one, feed in zip(asked, feeds, strict=True):
        truth = kept.truth(PROMPTS[one["id"]])
        if "layers" in one:
            truth = [(k[1:2], v[1:2]) for k, v in truth[1:2]]
        assert same(pairs(feed), truth)
    assert [len(group) for group in held.groups] == [1, 3]  # c is being decoded, and a is asked for twice


def test_a_batch_has_a_limit_and_those_that_left_are_not_decoded(held: Held, kept: Kept) -> None:
    feeds = behind_one(held, kept, Batcher(1, tokens=len(PROMPTS["a"])), [{"id": name} for name in "abd"])
    feeds[1].close()
    for feed, one in ((feeds[0], "a"), (feeds[2], "d")):
        assert same(pairs(feed), kept.truth(PROMPTS[one]))
    assert all(len(group) == 1 for group in held.groups)
    assert len(held.groups) in (3, 4)  # b may have been begun before it was closed


def test_a_chunk_that_fails_ends_only_those_that_hold_it(held: Held, kept: Kept) -> None:
    forge(kept.blob(PROMPTS["b"], 2))
    feeds = behind_one(held, kept, Batcher(1), [{"id": "a"}, {"id": "b"}, {"id": "d"}, {"id": "c"}])
    with pytest.raises(ChunkFailed):
        pairs(feeds[1])
    for feed, name in ((feeds[0], "a"), (feeds[2], "d"), (feeds[3], "c")):
        found = list(feed.layers())
        assert [number for number, _ in found] == [0, 1, 2]
        assert same([pair for _, pair in found], kept.truth(PROMPTS[name]))


def test_a_prefix_that_is_being_decoded_is_decoded_for_who_comes_later_too(kept: Kept, held: Held) -> None:
    decoding, restorer = Batcher(2), Restorer(kept.store, kept.job.target.hex())
    part = decoding.ask(restorer.restore(PROMPTS["a"], layers=(0, 2)))
    assert held.begun.wait(60)
    later = decoding.ask(restorer.restore(PROMPTS["a"], layers=(1, 2), heads=(1, 2)))
    longer = decoding.ask(restorer.restore(PROMPTS["a"]))  # has to be decoded by itself
    held.go.set()
    truth = kept.truth(PROMPTS["a"])
    assert same(pairs(part), truth[:2]) and same(pairs(longer), truth)
    assert same(pairs(later), [(k[1:2], v[1:2]) for k, v in truth[1:2]])
    assert len(held.groups) == 2


def test_what_was_decoded_is_kept_up_to_a_limit(kept: Kept, held: Held) -> None:
    held.go.set()
    sizes = {name: sum(t.nbytes for pair in kept.truth(ids) for t in pair) for name, ids in PROMPTS.items()}
    decoding, restorer = Batcher(1, keep=sizes["a"] + sizes["d"]), Restorer(kept.store, kept.job.target.hex())

    def decoded(name: str, **ranges: Any) -> bool:
        """Ask; whether it had to be decoded."""
        before = len(held.groups)
        truth, (first, end) = kept.truth(PROMPTS[name]), ranges.get("layers", (0, 3))
        assert same(pairs(decoding.ask(restorer.restore(PROMPTS[name], **ranges))), truth[first:end])
        return len(held.groups) > before

    assert decoded("a", layers=(0, 1)) and decoded("a") and not decoded("a") and not decoded("a", layers=(1, 2))
    assert decoded("d") and not decoded("d") and not decoded("a")
    assert decoded("c")  # d was asked for before a
    assert not decoded("c") and decoded("d")
    decoding = Batcher(1, keep=sizes["b"] - 1)
    assert decoded("b") and decoded("b") and decoded("d") and not decoded("d")  # too large by itself


def test_whatever_goes_wrong_reaches_all_who_wait(kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(group: Sequence[Restoration]) -> Iterator[Any]:
        raise MemoryError("no room")

    monkeypatch.setattr(batcher, "decode_together", broken)
    decoding, restorer = Batcher(1), Restorer(kept.store, kept.job.target.hex())
    for _ in range(2):  # the thread lives on
        with pytest.raises(MemoryError):
            pairs(decoding.ask(restorer.restore(PROMPTS["a"])))
