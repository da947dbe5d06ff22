"""A generation that may be too large for memory: what is known of all its rows at once, and its rows one part at a time.

A first reading of the index keeps 112 bytes a row: which rows there are, and what others follow from. A second gives the rows
themselves, each once, while only a few parts are in memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import pyarrow as pa

from codec.checksums import chain
from codec.errors import DataError
from pipeline import index
from pipeline.catalogue import Broken, Roots, Row, add_root, rows_of_table
from pipeline.names import Column, Names, column
from pipeline.store import Entry, Store

KEY, ID = 32, 48


@dataclass
class Survey:
    """One target under one profile: what its rows are called, and its blobs."""

    target: bytes
    profile: bytes
    blobs: dict[bytes, Entry]
    ids: Names = field(default_factory=lambda: Names(ID))  # a key and a chain's digest each
    keys: Names = field(default_factory=lambda: Names(KEY))
    parents: Names = field(default_factory=lambda: Names(KEY))  # keys of chunks that others follow from
    disputed: set[bytes] = field(default_factory=set)  # keys of which rows say different bits
    models: set[str] = field(default_factory=set)  # names that its target had when it was stored
    formats: set[str] = field(default_factory=set)  # of its caches
    roots: Roots = field(default_factory=dict)
    unreadable: set[str] = field(default_factory=set)  # paths of parts

    @property
    def owner(self) -> tuple[bytes, bytes]:
        """Target and profile."""
        return self.target, self.profile

    @property
    def readable(self) -> bool:
        """Whether every index part could be read."""
        return not self.unreadable

    def has(self, key: bytes) -> bool:
        """Whether a chunk has a row."""
        return key in self.keys

    def chain_digest(self, key: bytes) -> bytes | None:
        """What a chunk's rows say of its chain's bits; None without a row, or where they disagree."""
        found = self.ids.beginning(key)
        return found[0][KEY:] if len(found) == 1 else None


def survey(
    store: Store, target: bytes, profile: bytes, blobs: dict[bytes, Entry], *, broken: Broken, wrong: Broken
) -> Survey:
    """Read the index of a generation once.

    broken: told of parts that cannot be read; wrong: of rows whose checksums do not give their chain digest.

    Raises:
        StorageError: the storage failed.
    """
    gen = Survey(target, profile, blobs)

    def unreadable(path: str, error: DataError) -> None:
        gen.unreadable.add(path)
        broken(path, error)

    # All columns, so that damage to any of them is noticed.
    for path, table in index.iter_parts(store, target=target, profile=profile, broken=unreadable):
        if not index.is_named_for(path, table):
            unreadable(path, DataError("it holds other rows than those it is named for"))
            continue
        _take(gen, table)
        _check_sums(path, table, wrong)
    for names in (gen.ids, gen.keys, gen.parents):
        names.seal()
    gen.disputed = _disputed(gen)
    return gen


def _take(gen: Survey, table: pa.Table) -> None:
    gen.ids.add(_ids(table))
    gen.keys.add(column(table["key"].to_pylist(), KEY))
    gen.parents.add(column(table["parent_key"].drop_null().to_pylist(), KEY))
    gen.models.update(table["model"].unique().to_pylist())
    gen.formats.update(table["cache_format"].unique().to_pylist())
    places = table.select(["tenant", "root_key", "chunk_tokens"])
    for place in places.group_by(places.column_names).aggregate([]).to_pylist():
        add_root(gen.roots, **place)


def _ids(table: pa.Table) -> Column:
    pairs = zip(table["key"].to_pylist(), table["chain_digest"].to_pylist(), strict=True)
    return column([key + digest for key, digest in pairs], ID)


def _check_sums(path: str, table: pa.Table, wrong: Broken) -> None:
    columns = (table[name].to_pylist() for name in ("key", "parent_digest", "layer_checksums", "chain_digest"))
    for key, parent, sums, digest in zip(*columns, strict=True):
        if chain(parent, sums) != digest:
            wrong(path, DataError(f"its row of chunk {key.hex()} contradicts itself"))


def _disputed(gen: Survey) -> set[bytes]:
    if len(gen.ids) == len(gen.keys):
        return set()
    return {one[:KEY] for one, other in pairwise(gen.ids) if one[:KEY] == other[:KEY]}


def rows_of(store: Store, gen: Survey) -> Iterator[list[Row]]:
    """The rows of every part that could be read, a few thousand at a time, each row once."""
    seen = np.zeros(len(gen.ids), dtype=bool)
    # Those that cannot be read were told of by the first reading.
    for path, table in index.iter_parts(store, target=gen.target, profile=gen.profile, broken=lambda *_: None):
        if path in gen.unreadable or not len(gen.ids):
            continue
        places = gen.ids.places(_ids(table))
        fresh = np.zeros(len(table), dtype=bool)
        fresh[np.unique(places, return_index=True)[1]] = True
        # A row that came after the first reading is a running job's.
        fresh &= (places >= 0) & ~seen[places]
        seen[places[fresh]] = True
        yield from rows_of_table(path, table.filter(pa.array(fresh)))
