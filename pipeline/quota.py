"""How many bytes a store may have: a limit that the actors of a run share."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

from codec.errors import UserError
from pipeline.options import parse_bytes
from pipeline.store import Store, StoreFull

ROW_BYTES = 2048  # set aside for a chunk's index row besides its checksums
PART_BYTES = 16384  # and for the index part that the rows of a group go into: Parquet describes every column


def store_bytes(store: Store) -> int:
    """Bytes of all objects in a store. It lists all of them."""
    return sum(entry.size for entry in store.entries())


def room(store: Store, limit: int) -> int:
    """How many bytes may still be added. Raises UserError where there are none left."""
    held = store_bytes(store)
    if held >= limit:
        raise UserError(
            f"the store {store.uri} holds {held:,} bytes and --max-store-bytes allows {limit:,}; raise the limit, or free "
            "space with jobs/gc.py"
        )
    return limit - held


def make_quota(store: Store, limit: str | None) -> Quota:
    """A quota for this run's actors, from what --max-store-bytes says and what the store holds now. Needs Ray."""
    if limit is None:
        return Quota()
    ray: Any = importlib.import_module("ray")
    size = parse_bytes(limit)
    return Quota(ray.remote(Budget).options(num_cpus=0).remote(room(store, size)), size)


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
