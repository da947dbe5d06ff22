"""Verification that does not end: while jobs and services are at work, another process decodes a share of the store again and again.

A round looks at one share of all chunks, the next round at the next one, so that after as many rounds as there are shares every
chunk was decoded from stored bytes alone, whenever it came. Rounds go on when the storage fails for a while. What is wrong is looked at
twice before it is told: a collection that deletes chunks during a round takes their rows out first, and then nothing is wrong with them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from codec.errors import StorageError
from pipeline.audit import ORPHANED, Audit, Fault, audit
from pipeline.deep import decode_store, here
from pipeline.store import Store

YOUNG = float("inf")  # seconds; what has no index row is perhaps a running job's, and no round minds it


@dataclass
class Watched:
    """What the rounds so far came to. faults: by path; what was mended is not taken out again."""

    store: str
    shares: int
    rounds: int = 0
    decoded: int = 0
    faults: dict[str, Fault] = field(default_factory=dict)
    unread: int = 0  # rounds that the storage did not let end
    last: str = ""  # what it said the last time

    def to_plain(self) -> dict[str, Any]:
        """As data that JSON can say."""
        faults = [{"kind": f.kind, "path": f.path, "cause": f.cause} for f in self.faults.values()]
        known = {name: getattr(self, name) for name in ("store", "shares", "rounds", "decoded", "unread", "last")}
        return known | {"failed": len(faults), "faults": faults}


def watch(
    store: Store,
    shares: int,
    *,
    model: str | None = None,
    target: str | None = None,
    device: str = "cpu",
    tell: Callable[[str], None] = lambda text: None,
) -> Iterator[Watched]:
    """Rounds without end; yields the same totals after each. `tell` hears of every fault as it is found.

    Raises:
        UserError: `model` or `target` name nothing in the store.
        DataError: this machine computes other bits than the one that made a profile, so it can say nothing.
    """
    found = Watched(store.uri, shares)
    while True:
        selects = _in_share(found.rounds % shares, shares)
        try:
            seen = _look(store, selects, model, target, device)
            fresh = {f.path: f for f in seen.faults if f.kind != ORPHANED and f.path not in found.faults}
            if fresh:
                still = {f.path for f in _look(store, selects, model, target, device).faults if f.kind != ORPHANED}
                fresh = {path: fault for path, fault in fresh.items() if path in still}
        except StorageError as error:
            found.unread, found.last = found.unread + 1, str(error)
            tell(f"the store cannot be read: {error}")
        else:
            found.decoded += seen.decoded
            for path, fault in fresh.items():
                found.faults[path] = fault
                tell(f"{fault.kind}: {path}: {fault.cause}")
        found.rounds += 1
        yield found


def _look(store: Store, selects: Callable[[bytes], bool], model: str | None, target: str | None, device: str) -> Audit:
    """Read and decode the chunks of one share."""
    seen = audit(store, grace=YOUNG, selects=selects, model=model, target=target)
    decode_store(seen, here(store, device))
    return seen


def share_of(key: bytes, shares: int) -> int:
    """Which share a chunk is in, by its key; not by what a job's own sample goes by."""
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "big") % shares


def _in_share(share: int, shares: int) -> Callable[[bytes], bool]:
    return lambda key: share_of(key, shares) == share
