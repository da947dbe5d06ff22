"""What a store holds, generation by generation: index rows, blobs, and prompts that lead to them. Read only.

A generation is one target under one profile. A row is told from others by 48 bytes, the chunk's key and the digest of its
chain's bits, and so is the row of the chunk before it: chains of rows can be followed without decoding anything.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from codec.checksums import chain
from codec.errors import DataError, UserError
from codec.keys import ROOT_DIGEST, chunk_keys
from pipeline import index
from pipeline.paths import BLOBS, INDEX, parse_blob_path, parse_index_path, prompts_prefix
from pipeline.prompts import load_part
from pipeline.store import Entry, Store

_COLUMNS = [
    "key", "parent_key", "parent_digest", "chain_digest", "first_token", "tokens", "chunk_tokens", "stored_bytes",
    "predictor", "cache_format", "tenant", "root_key", "model", "layer_checksums",
]  # fmt: skip

Broken = Callable[[str, DataError], None]  # is told of what cannot be read, by path


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
    layer_checksums: bytes  # empty where they were not asked for
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
    readable: bool = True  # whether every index part could be read

    @property
    def ids(self) -> set[bytes]:
        """The ids of all rows."""
        return {row.id for rows in self.rows.values() for row in rows}

    @property
    def models(self) -> set[str]:
        """Names that its target had when it was stored."""
        return {row.model for rows in self.rows.values() for row in rows}

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


def read_generation(
    store: Store, gen: Generation, *, checksums: bool = False, broken: Broken | None = None, wrong: Broken | None = None
) -> None:
    """Read the rows of a generation into it; equal rows are kept once.

    checksums: keep layer checksums, for decoding; broken: told of parts that cannot be read (without it they are raised);
    wrong: told of rows whose checksums do not give their chain digest.
    """

    def unreadable(path: str, error: DataError) -> None:
        gen.readable = False
        if broken is None:
            raise error
        broken(path, error)

    known: set[bytes] = set()
    # All columns, so that damage to any of them is noticed.
    for path, table in index.iter_parts(store, target=gen.target, profile=gen.profile, broken=unreadable):
        if not index.is_named_for(path, table):
            unreadable(path, DataError("it holds other rows than those it is named for"))
            continue
        for batch in table.select(_COLUMNS).to_batches(max_chunksize=4096):
            for values in batch.to_pylist():
                sums = values.pop("layer_checksums")
                row = Row(**values, layer_checksums=sums if checksums else b"", part=path)
                if wrong is not None and chain(row.parent_digest, sums) != row.chain_digest:
                    wrong(path, DataError(f"its row of chunk {row.key.hex()} contradicts itself"))
                if row.id not in known:
                    known.add(row.id)
                    gen.rows.setdefault(row.key, []).append(row)


# ---------------------------------------------------------------- prompts
class StoredPrompt(NamedTuple):
    """A prompt in a prompts part, and its keys in one generation."""

    id: str
    tenant: str
    part: str
    row: int
    n_tokens: int
    chunk_tokens: int
    keys: tuple[bytes, ...]
    root: bytes  # key of the empty prefix, from which they follow


def stored_prompts(store: Store, gen: Generation, *, broken: Broken | None = None) -> Iterator[StoredPrompt]:
    """Every prompt of the generation's target under the keys it has there; only those that have a chunk with a row.

    broken: told of parts that cannot be read, which are raised without it.
    """
    roots: dict[str, set[tuple[bytes, int]]] = {}
    for rows in gen.rows.values():
        for row in rows:
            if row.root_key is not None:
                roots.setdefault(row.tenant, set()).add((row.root_key, row.chunk_tokens))
    for path in store.list(prompts_prefix(gen.target)):
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
                if any(key in gen.rows for key in keys):
                    yield StoredPrompt(
                        prompt["id"], prompt["tenant"], path, number, prompt["n_tokens"], step, keys, root
                    )


def is_root(row: Row) -> bool:
    """Whether a row says that it begins a chain, in both of the ways it can."""
    return row.parent_key is None and row.parent_digest == ROOT_DIGEST
