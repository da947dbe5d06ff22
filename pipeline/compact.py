"""Index parts of one generation merged into larger ones: a million chunks in tens of objects instead of tens of thousands.

The merged part is written first. The parts that it makes superfluous stay for the grace period, and until they are deleted
their rows stand twice, which every reader allows for. Which part is superfluous follows from the rows alone, so a compaction
that was cut off, or one that runs again, does no harm and nothing twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pyarrow as pa

from pipeline import index
from pipeline.paths import index_prefix
from pipeline.store import ObjectMissing, Store

MERGE_ROWS = 16384  # of a merged part; with checksums of 32 layers about 16 MiB
SMALL_ROWS = MERGE_ROWS // 2  # parts below are merged


@dataclass(frozen=True)
class Part:
    """An index part: its path and size, when it was written, and the ids of its rows."""

    path: str
    size: int
    modified: float
    ids: frozenset[bytes]


def read_parts(store: Store, target: bytes, profile: bytes) -> list[Part]:
    """All parts of a generation. Raises DataError where one cannot be read."""
    entries = {entry.path: entry for entry in store.entries(index_prefix(target, profile))}
    columns = ["key", "chain_digest"]
    return [
        Part(path, entries[path].size, entries[path].modified, frozenset(index.row_ids(table)))
        for path, table in index.iter_parts(store, target=target, profile=profile, columns=columns)
        if path in entries
    ]


def superfluous(parts: Sequence[Part], before: float) -> list[Part]:
    """Parts all of whose rows stand in larger ones that were written before this time (seconds since 1970)."""
    kept: set[bytes] = set()
    found: list[Part] = []
    for part in sorted(parts, key=lambda part: (-len(part.ids), part.path)):
        if part.ids <= kept:
            found.append(part)
        elif part.modified < before:
            kept |= part.ids
    return found


def to_merge(parts: Sequence[Part]) -> list[list[Part]]:
    """Groups of small parts, each to become one part; those whose rows stand in others already are left out."""
    done = set(superfluous(parts, float("inf")))
    small = sorted((p for p in parts if p not in done and len(p.ids) < SMALL_ROWS), key=lambda part: part.path)
    groups: list[list[Part]] = [[]]
    for part in small:
        if groups[-1] and sum(len(p.ids) for p in groups[-1]) + len(part.ids) > MERGE_ROWS:
            groups.append([])
        groups[-1].append(part)
    return [group for group in groups if len(group) > 1]


def merge(store: Store, target: bytes, profile: bytes, group: Sequence[Part]) -> str | None:
    """Write one part with the rows of these, sorted by key; its path, or None where one of them is gone meanwhile."""
    tables = []
    for part in group:
        try:
            tables.append(index.read_part(store, part.path, target=target, profile=profile))
        except ObjectMissing:
            return None
    return index.write_table(store, without_copies(pa.concat_tables(tables)).sort_by("key"))


def without_copies(table: pa.Table) -> pa.Table:
    """The first row of every id."""
    seen: set[bytes] = set()
    chosen: list[bool] = []
    for key, chain in zip(table["key"].to_pylist(), table["chain_digest"].to_pylist(), strict=True):
        chosen.append(key + chain not in seen)
        seen.add(key + chain)
    return table.filter(pa.array(chosen, pa.bool_()))
