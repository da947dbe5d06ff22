"""What a store holds, generation by generation: index rows, blobs, and prompts that lead to them. Read only, and in memory.

A generation is one target under one profile. A row is told from others by 48 bytes, the chunk's key and the digest of its
chain's bits, and so is the row of the chunk before it: chains of rows can be followed without decoding anything.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from codec.errors import DataError, UserError
from codec.keys import ROOT_DIGEST, chunk_keys
from pipeline import index
from pipeline.paths import BLOBS, INDEX, parse_blob_path, parse_index_path, prompts_prefix
from pipeline.prompts import load_part
from pipeline.store import Entry, Store

_COLUMNS = [
    "key", "parent_key", "parent_digest", "chain_digest", "first_token", "tokens", "chunk_tokens", "stored_bytes",
    "predictor", "cache_format", "tenant", "root_key", "model",
]  # fmt: skip
BATCH_ROWS = 4096

Broken = Callable[[str, DataError], None]  # is told of what cannot be read, by path
Roots = dict[str, set[tuple[bytes, int]]]  # by tenant: keys of the empty prefix, and tokens of a full chunk


class Row(NamedTuple):
    """An index row, without what follows from the rest."""

    key: bytes
    parent_key: bytes | None
    parent_digest: bytes
    chain_digest: bytes
    first_token: int
    tokens: int
    chunk_tokens: int
    stored_bytes: int
    predictor: bytes
    cache_format: str
    tenant: str
    root_key: bytes | None
    model: str
    part: str

    @property
    def id(self) -> bytes:
        """Key and chain digest: 48 bytes."""
        return self.key + self.chain_digest

    @property
    def parent(self) -> bytes | None:
        """The id of the row that this one follows from, None for the first chunk of a prompt."""
        return None if self.parent_key is None else self.parent_key + self.parent_digest


@dataclass
class Generation:
    """One target under one profile: its rows by key (more than one where jobs met, or rows disagree), and its blobs."""

    target: bytes
    profile: bytes
    rows: dict[bytes, list[Row]] = field(default_factory=dict)
    blobs: dict[bytes, Entry] = field(default_factory=dict)

    @property
    def models(self) -> set[str]:
        """Names that its target had when it was stored."""
        return {row.model for rows in self.rows.values() for row in rows}

    @property
    def roots(self) -> Roots:
        """Where its chains begin."""
        found: Roots = {}
        for rows in self.rows.values():
            for row in rows:
                add_root(found, row.tenant, row.root_key, row.chunk_tokens)
        return found

    def parents(self) -> set[bytes]:
        """Keys of the chunks that others follow from."""
        return {row.parent_key for rows in self.rows.values() for row in rows if row.parent_key is not None}

    def descendants(self, ids: set[bytes]) -> set[bytes]:
        """These row ids and those of all rows that follow from them."""
        children: dict[bytes, list[bytes]] = {}
        for rows in self.rows.values():
            for row in rows:
                if row.parent is not None:
                    children.setdefault(row.parent, []).append(row.id)
        found, waiting = set(ids), list(ids)
        while waiting:
            fresh = [child for child in children.get(waiting.pop(), ()) if child not in found]
            found.update(fresh)
            waiting += fresh
        return found


def generations(store: Store, *, target: str | None = None) -> dict[tuple[bytes, bytes], Generation]:
    """All generations that have a blob or an index part, with their blobs and without rows.

    target: only this fingerprint, 64 hex characters or the first of them.

    Raises:
        UserError: `target` is no such text, or names none or several of the store's targets.
        DataError: something lies among blobs and index that is neither.
        StorageError: the storage failed.
    """
    found: dict[tuple[bytes, bytes], Generation] = {}
    for entry in store.entries(BLOBS):
        owner, profile, key = parse_blob_path(entry.path)
        found.setdefault((owner, profile), Generation(owner, profile)).blobs[key] = entry
    for path in store.list(INDEX):
        owner, profile = parse_index_path(path)
        found.setdefault((owner, profile), Generation(owner, profile))
    if target is None:
        return found
    names = {owner.hex() for owner, _ in found if owner.hex().startswith(target.lower())}
    if len(names) != 1:
        many = f"{len(names)} targets" if names else "no target"
        raise UserError(f"the store {store.uri} has {many} with a fingerprint that begins with {target!r}")
    return {gen: value for gen, value in found.items() if gen[0].hex() in names}


def read_generation(store: Store, gen: Generation, *, broken: Broken | None = None) -> None:
    """Read the rows of a generation into it, all of them; equal rows are kept once.

    broken: told of parts that cannot be read, or hold other rows than those they are named for.

    Raises:
        DataError: there is such a part, and `broken` was not given.
    """
    known: set[bytes] = set()
    for path, table in index.iter_parts(store, target=gen.target, profile=gen.profile, broken=broken):
        if not index.is_named_for(path, table):
            error = DataError(f"{store.uri}/{path} holds other rows than those it is named for")
            if broken is None:
                raise error
            broken(path, error)
            continue
        for rows in rows_of_table(path, table):
            for row in rows:
                if row.id not in known:
                    known.add(row.id)
                    gen.rows.setdefault(row.key, []).append(row)


def rows_of_table(path: str, table: pa.Table) -> Iterator[list[Row]]:
    """The rows of the part at `path`, some thousands at a time."""
    for batch in table.select(_COLUMNS).to_batches(max_chunksize=BATCH_ROWS):
        yield [Row(**values, part=path) for values in batch.to_pylist()]


def add_root(roots: Roots, tenant: str, root_key: bytes | None, chunk_tokens: int) -> None:
    """Note where chains begin; index rows of earlier releases do not say it."""
    if root_key is not None:
        roots.setdefault(tenant, set()).add((root_key, chunk_tokens))


# ---------------------------------------------------------------- prompts
class StoredPrompt(NamedTuple):
    """A prompt in a prompts part, and its keys in one generation."""

    id: str
    tenant: str
    root: bytes  # key of the empty prefix, from which they follow
    part: str
    row: int
    n_tokens: int
    chunk_tokens: int
    keys: tuple[bytes, ...]


def stored_prompts(
    store: Store, target: bytes, roots: Roots, stored: Callable[[bytes], bool], *, broken: Broken | None = None
) -> Iterator[StoredPrompt]:
    """Every prompt of a target under the keys it has in a generation; only those that have a stored chunk.

    roots: where that generation's chains begin; stored: whether a chunk of this key has a row in it;
    broken: told of parts that cannot be read, which are raised without it.
    """
    for path in store.list(prompts_prefix(target)):
        try:
            table = load_part(store, path)
        except DataError as error:
            if broken is None:
                raise
            broken(path, error)
            continue
        for number, prompt in enumerate(table.select(["id", "tenant", "token_ids", "n_tokens"]).to_pylist()):
            ids = np.asarray(prompt["token_ids"], dtype=np.int64)
            for root, step in roots.get(prompt["tenant"], ()):
                keys = tuple(chunk_keys(root, ids, step))
                if any(map(stored, keys)):
                    yield StoredPrompt(
                        prompt["id"], prompt["tenant"], root, path, number, prompt["n_tokens"], step, keys
                    )


def is_root(row: Row) -> bool:
    """Whether a row says that it begins a chain, in both of the ways it can."""
    return row.parent_key is None and row.parent_digest == ROOT_DIGEST
