"""What a store holds of one target, from its index alone, and the stored prefixes of a prompt."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from codec.errors import DataError, StorageError, UserError
from codec.formats import number_format
from codec.keys import chunk_keys, root_key
from pipeline import index
from pipeline.current import Entry, read_pointers
from pipeline.paths import parse_index_path, predictor_path, profile_path, target_index_prefix
from pipeline.store import Store
from pipeline.tenancy import tenant_name
from pipeline.work import load_profile

Ids = NDArray[np.int64]

ROPE_REGIMES = ("", "dynamic", "longrope")  # what a key's RoPE regime can be: see codec.predictor.rope
MAX_TOKENS = 1 << 22
_COLUMNS = [
    "key", "parent_key", "tokens", "chunk_tokens", "cache_format", "tenant", "predictor", "chain_digest", "stored_bytes",
]  # fmt: skip


@dataclass(frozen=True)
class Generation:
    """Chunks that can follow one another: of one target, profile, chunk size and tenant (hex digest of the salt)."""

    target: bytes
    profile: bytes
    predictor: bytes
    cache_format: str
    chunk_tokens: int
    tenant: str


@dataclass(frozen=True)
class Chunk:
    """One committed chunk of a prompt; digest: of the chain's raw bits up to and with it."""

    key: bytes
    first_token: int
    tokens: int
    digest: bytes
    stored_bytes: int


@dataclass(frozen=True)
class Match:
    """The committed chunks with which a prompt begins."""

    generation: Generation
    chunks: tuple[Chunk, ...]

    @property
    def tokens(self) -> int:
        """How many tokens they cover."""
        return sum(chunk.tokens for chunk in self.chunks)

    @property
    def stored_bytes(self) -> int:
        """The size of their blobs."""
        return sum(chunk.stored_bytes for chunk in self.chunks)


@dataclass
class _Rows:
    """Index rows of one generation: key -> (tokens, digest, bytes); and of chunks that are not full, their lengths by parent."""

    chunks: dict[bytes, tuple[int, bytes, int]] = field(default_factory=dict)
    partial: dict[bytes, set[int]] = field(default_factory=dict)


class Catalogue:
    """The index of one target in memory: some 200 bytes a chunk."""

    def __init__(self, store: Store, target: bytes) -> None:
        """Read the index. Raises DataError, StorageError."""
        self.store, self.target = store, target
        self._parts: set[str] = set()
        self._rows: dict[Generation, _Rows] = {}
        self._scales: dict[bytes, bytes] = {}
        self._entries: dict[str, Entry] = {}  # of pointers, as they were read
        self._lock = threading.Lock()  # threads may look up while one reads what is new
        self.refresh()

    def __len__(self) -> int:
        return sum(len(rows.chunks) for rows in self._rows.values())

    def predictor_bytes(self) -> int:
        """Size of the largest stored predictor and profile that its chunks need. Raises StorageError."""
        pairs = {(g.predictor, g.profile) for g in self._rows}
        sizes = [self.store.size(predictor_path(a)) + self.store.size(profile_path(b)) for a, b in pairs]
        return max(sizes, default=0)

    @property
    def generations(self) -> list[Generation]:
        """All that there is a chunk of, most chunks first."""
        return sorted(self._rows, key=lambda g: -len(self._rows[g].chunks))

    def refresh(self) -> bool:
        """Read the parts that were committed since; whether there were any. Raises DataError, StorageError.

        Generations that a recompression fills are not looked at, and those that were replaced are forgotten.
        """
        hidden, listed = self._listed()
        owners = {path: parse_index_path(path)[1] for path in listed}
        fresh = [path for path in listed if path not in self._parts and owners[path] not in hidden]
        for path in fresh:
            profile = owners[path]
            rows = index.read_part(self.store, path, target=self.target, profile=profile, columns=_COLUMNS)
            with self._lock:
                self._add(profile, rows)
                self._parts.add(path)
        self._forget(hidden)
        return bool(fresh)

    def _listed(self) -> tuple[set[bytes], list[str]]:
        """Profiles to leave alone, and index parts; both as they were at one time."""
        pointers = read_pointers(self.store, self._entries)
        while True:
            listed = [path for path in self.store.list(target_index_prefix(self.target)) if path.endswith(".parquet")]
            before, pointers = pointers, read_pointers(self.store, self._entries)
            if pointers.logs == before.logs:
                return pointers.hidden(self.target), listed

    def _forget(self, hidden: set[bytes]) -> None:
        """What is taken up again later is read anew."""
        with self._lock:
            self._rows = {gen: rows for gen, rows in self._rows.items() if gen.profile not in hidden}
            self._parts = {path for path in self._parts if parse_index_path(path)[1] not in hidden}

    def find(self, ids: Ids, salt: bytes = b"") -> tuple[list[Match], list[str]]:
        """The stored prefixes of a prompt, the longest first, one a generation; and what could not be looked up, a sentence each.

        ids: int64 [T]. Of two of one length the one with fewer bytes comes first.
        """
        tenant = tenant_name(salt)
        with self._lock:
            return self._find(ids, salt, tenant)

    def _find(self, ids: Ids, salt: bytes, tenant: str) -> tuple[list[Match], list[str]]:
        found, notes = [], []
        for generation, rows in self._rows.items():
            if generation.tenant != tenant:
                continue
            try:
                chunks = self._longest(generation, rows, ids, salt)
            except (DataError, StorageError) as error:  # another generation may do
                notes.append(str(error))
                continue
            if chunks:
                found.append(Match(generation, chunks))
        return sorted(found, key=lambda m: (-m.tokens, m.stored_bytes, m.generation.profile)), notes

    def _add(self, profile: bytes, table: Any) -> None:
        for row in table.to_pylist():
            generation = Generation(
                self.target, profile, row["predictor"], row["cache_format"], row["chunk_tokens"], row["tenant"]
            )
            rows = self._rows.setdefault(generation, _Rows())
            rows.chunks[row["key"]] = (row["tokens"], row["chain_digest"], row["stored_bytes"])
            if row["tokens"] < generation.chunk_tokens:
                rows.partial.setdefault(row["parent_key"] or b"", set()).add(row["tokens"])

    def _longest(self, generation: Generation, rows: _Rows, ids: Ids, salt: bytes) -> tuple[Chunk, ...]:
        scales = self._scales_of(generation) if number_format(generation.cache_format).coarse else b""
        best: tuple[Chunk, ...] = ()
        for regime in ROPE_REGIMES:
            root = root_key(
                target=generation.target,
                cache_format=generation.cache_format,
                chunk_tokens=generation.chunk_tokens,
                rope_regime=regime,
                scales=scales,
                salt=salt,
            )
            chunks = _walk(root, rows, ids, generation.chunk_tokens)
            best = max(best, chunks, key=lambda c: sum(chunk.tokens for chunk in c))
        return best

    def _scales_of(self, generation: Generation) -> bytes:
        """What the keys of an FP8 cache depend on besides tokens."""
        if generation.profile not in self._scales:
            profile = load_profile(
                self.store, generation.profile, target=self.target, cache_format=generation.cache_format
            )
            self._scales[generation.profile] = b"" if profile.scales is None else profile.scales.to_bytes()
        return self._scales[generation.profile]


def _walk(root: bytes, rows: _Rows, ids: Ids, step: int) -> tuple[Chunk, ...]:
    """Full chunks as far as they are stored, and the longest one that is not full after them."""
    found: list[Chunk] = []
    parent, first = root, 0
    while first + step <= len(ids):
        key = chunk_keys(parent, ids[first : first + step], step)[0]
        row = rows.chunks.get(key)
        if row is None:
            break
        found.append(Chunk(key, first, *row))
        parent, first = key, first + step
    for length in sorted(rows.partial.get(parent if found else b"", ()), reverse=True):
        if first + length > len(ids):
            continue
        key = chunk_keys(parent, ids[first : first + length], step)[0]
        row = rows.chunks.get(key)
        if row is not None:
            return (*found, Chunk(key, first, *row))
    return tuple(found)


def token_array(tokens: Sequence[int] | NDArray[Any] | Any) -> Ids:
    """Token ids as int64 [T], from a list, an array or a tensor, also of shape [1, T]. Raises UserError."""
    try:
        ids = np.asarray(tokens)
    except Exception as error:  # whatever a caller's object does
        raise UserError(f"the tokens cannot be read as numbers ({type(error).__name__})") from error
    if ids.ndim == 2 and ids.shape[0] == 1:
        ids = ids[0]
    if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
        raise UserError(f"the tokens must be one row of integers, not {ids.dtype} {list(ids.shape)}")
    if len(ids) > MAX_TOKENS:
        raise UserError(f"{len(ids)} tokens are more than the {MAX_TOKENS} that a prompt may have")
    if ids.size and (int(ids.min()) < 0 or int(ids.max()) >= 1 << 32):
        raise UserError("a token id is negative or beyond 32 bits")
    return ids.astype(np.int64)
