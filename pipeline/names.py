"""A set of byte strings of one length, at just that many bytes each: for listings of a store that is too large to be held as objects."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

Column = NDArray[Any]  # [n] of void: n strings of one length


def column(values: list[bytes], width: int) -> Column:
    """Strings of `width` bytes as a column. ValueError where one has another length."""
    joined = b"".join(values)
    if len(joined) != width * len(values) or any(len(value) != width for value in values):
        raise ValueError(f"not all of these have {width} bytes")
    return np.frombuffer(joined, dtype=f"V{width}")


class Names:
    """Filled with `add`, and asked after `seal`. Its order is that of the bytes."""

    def __init__(self, width: int) -> None:
        """`width`: bytes a name."""
        self._width = width
        self._parts: list[Column] = []
        self._sorted: Column = np.empty(0, dtype=f"V{width}")

    def __len__(self) -> int:
        return len(self._sorted)

    def __iter__(self) -> Iterator[bytes]:
        return (name.tobytes() for name in self._sorted)

    def add(self, names: Column) -> None:
        """Take these in; a name may come more than once."""
        self._parts.append(names)

    def seal(self) -> Names:
        """Sort, and keep every name once."""
        joined = np.concatenate([self._sorted, *self._parts])
        self._parts = []
        joined.sort()
        if len(joined):
            joined = joined[np.concatenate([[True], joined[1:] != joined[:-1]])]
        self._sorted = joined
        return self

    def places(self, names: Column) -> NDArray[np.int64]:
        """Where each name stands, int64; -1 for those that are not there."""
        if not len(self._sorted):
            return np.full(len(names), -1, dtype=np.int64)
        found = np.searchsorted(self._sorted, names).astype(np.int64)
        found[found == len(self._sorted)] = 0
        found[self._sorted[found] != names] = -1
        return found

    def __contains__(self, name: bytes) -> bool:
        return len(name) == self._width and bool(self.places(column([name], self._width))[0] >= 0)

    def beginning(self, start: bytes) -> list[bytes]:
        """All names that begin so."""
        low = column([start.ljust(self._width, b"\0")], self._width)
        place, found = int(np.searchsorted(self._sorted, low)[0]), list[bytes]()
        while place < len(self._sorted) and (name := self._sorted[place].tobytes()).startswith(start):
            found.append(name)
            place += 1
        return found
