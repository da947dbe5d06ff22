"""How many bytes a store may have: a limit that the actors of a run share."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

from codec.errors import UserError
from pipeline.options import parse_bytes
from pipeline.paths import PROMPTS, SCALES
from pipeline.store import Store, StoreFull

UNCHARGED = (PROMPTS, SCALES)  # folders of what a run writes before it has a quota: few objects, and small
ROW_BYTES = 2048  # set aside for a chunk's index row besides its checksums
PART_BYTES = 16384  # and for the index part that the rows of a group go into: Parquet describes every column


def store_bytes(store: Store, folder: str = "") -> int:
    """Bytes of all objects in a store, or in a folder of it. It lists all of them."""
    return sum(entry.size for entry in store.entries(folder))


class Allowance:
    """What a run may still add to a store under --max-store-bytes. The store is listed once a run, when it is first asked."""

    def __init__(self, store: Store, limit: str | None) -> None:
        self._store = store
        self._limit = None if limit is None else parse_bytes(limit)
        self._charged: int | None = None  # bytes of all but UNCHARGED, as listed

    def room(self) -> int | None:
        """How many bytes may still be added; None: any number. Raises UserError where there are none left."""
        if self._limit is None:
            return None
        held = self._held()
        if held >= self._limit:
            raise UserError(
                f"the store {self._store.uri} holds {held:,} bytes and --max-store-bytes allows {self._limit:,}; raise the limit, or "
                "free space with jobs/gc.py"
            )
        return self._limit - held

    def charge(self, store: Store, path: str, size: int) -> None:
        """As `Quota.charge`, for what is written before there are actors. Raises UserError as `room`, StoreFull."""
        room = self.room()
        if room is not None and self._limit is not None and self._charged is not None:
            Quota(limit=self._limit).check(store, path, room - size)
            self._charged += size

    def quota(self) -> Quota:
        """For the actors of one run. Needs Ray. They do not tell what they write, so whoever asks later is told of a new listing."""
        room = self.room()
        if room is None or self._limit is None:
            return Quota()
        self._charged = None
        ray: Any = importlib.import_module("ray")
        return Quota(ray.remote(Budget).options(num_cpus=0).remote(room), self._limit)

    def _held(self) -> int:
        """Bytes of the store: what has not been asked for before it is written is listed again, all else was charged since."""
        if self._charged is not None:
            return self._charged + sum(store_bytes(self._store, folder) for folder in UNCHARGED)
        held = uncharged = 0
        for entry in self._store.entries():
            held += entry.size
            uncharged += entry.size if entry.path.split("/")[0] in UNCHARGED else 0
        self._charged = held - uncharged
        return held


class Budget:
    """The body of the tiny Ray actor that knows how many bytes may still be added."""

    def __init__(self, room: int) -> None:
        self._room = room

    def take(self, size: int) -> int:
        """Take so many bytes: what is left, negative where they could not be taken."""
        if size > self._room:
            return self._room - size
        self._room -= size
        return self._room


@dataclass(frozen=True)
class Quota:
    """What an actor holds: it asks before each write. Without a budget there is no limit."""

    budget: Any = None
    limit: int = 0

    def charge(self, store: Store, path: str, size: int) -> None:
        """Take the bytes of a new object. Raises StoreFull where that would pass the limit."""
        if self.budget is None:
            return
        ray: Any = importlib.import_module("ray")
        self.check(store, path, int(ray.get(self.budget.take.remote(size))))

    def check(self, store: Store, path: str, left: int) -> None:
        """Raise StoreFull where the budget says that the bytes could not be taken."""
        if left < 0:
            raise StoreFull(
                f"{store.uri}/{path} was not written: with it the store would pass --max-store-bytes {self.limit:,}; what is "
                "stored is complete, raise the limit or free space with jobs/gc.py, and run the job again"
            )
