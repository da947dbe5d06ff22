"""Encoding a prompt chunk by chunk into a store: the chain rule of DESIGN 8, without Ray.

Chunk n is coded against the true bits of the chunks before it. So wherever a blob is found in place of what was about
to be computed (stored earlier, or another process was faster), the target's cache and the predictor's state continue
from the bits in that blob, not from this process' own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

import codec
from codec.errors import BlobError, DataError
from codec.keys import ROOT_DIGEST
from pipeline.paths import blob_path
from pipeline.store import ObjectMissing, Store
from pipeline.target import Target
from pipeline.work import ADOPTED, KEPT, WRITTEN, Job

KV = tuple[torch.Tensor, torch.Tensor]
Tokens = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True)
class Link:
    """One chunk of the chain that cache and state hold now."""

    key: bytes
    end: int  # tokens up to and with this chunk
    chain_digest: bytes


@dataclass(frozen=True)
class Stored:
    """One chunk that is in the store, and everything that its index row says about it."""

    key: bytes
    parent_key: bytes | None
    index: int
    first_token: int
    tokens: int
    outcome: str
    stats: codec.ChunkStats
    has_ideal: bool
    stored_bytes: int
    layer_checksums: bytes
    parent_digest: bytes
    chain_digest: bytes


class ChainEncoder:
    """Encodes prompts one after another, keeping the target's cache and the predictor's state of the last one."""

    def __init__(
        self,
        job: Job,
        target: Target,
        predictor: codec.Predictor,
        profile: codec.Profile,
        on_chunk: Callable[[Stored], None] | None = None,
    ) -> None:
        """`on_chunk` is called with every chunk as soon as it is in the store."""
        self._job = job
        self._on_chunk = on_chunk
        self._target = target
        self._predictor = predictor
        self._profile = profile
        self.target_tokens = 0
        self.target_seconds = 0.0
        self._reset()

    def _reset(self) -> None:
        self._cache = self._target.new_cache()
        self._state = self._predictor.new_state()
        self._chain: list[Link] = []

    def prompt(
        self, tokens: Tokens, keys: Sequence[bytes], todo: frozenset[bytes], lost: Mapping[bytes, bytes]
    ) -> list[Stored]:
        """Bring every chunk of `todo` in this prompt into the store.

        Args:
            tokens: the prompt's token ids, int64.
            keys: its chunks' keys in order.
            todo: chunks to bring into the store; others of the prompt are there already.
            lost: for chunks that were committed and whose blob is gone, the digest of the chain's bits they had.

        Returns:
            The chunks that were handled, in order; those after the last one of `todo` and those that the last prompt
            had in common with this one are not among them.

        Raises:
            DataError: a stored blob is damaged or belongs to another chain.
            StorageError: the store failed.
        """
        last = max((index for index, key in enumerate(keys) if key in todo), default=-1)
        try:
            self._rewind(keys)
            return [self._chunk(index, tokens, keys, todo, lost) for index in range(len(self._chain), last + 1)]
        except BaseException:
            self._reset()  # cache and state may have parted
            raise

    def _rewind(self, keys: Sequence[bytes]) -> None:
        common = 0
        while common < min(len(keys), len(self._chain)) and self._chain[common].key == keys[common]:
            common += 1
        del self._chain[common:]
        length = self._chain[-1].end if self._chain else 0
        self._target.truncate(self._cache, length)
        self._state.truncate(length)

    def _chunk(
        self, index: int, tokens: Tokens, keys: Sequence[bytes], todo: frozenset[bytes], lost: Mapping[bytes, bytes]
    ) -> Stored:
        key = keys[index]
        first = self._chain[-1].end if self._chain else 0
        parent = self._chain[-1].chain_digest if self._chain else ROOT_DIGEST
        ids = torch.from_numpy(tokens[first : first + self._job.chunk_tokens].copy())
        identity = codec.ChunkIdentity(self._job.target, key, parent, first)
        path = blob_path(self._job.target, self._job.profile, key)
        blob = find_blob(self._job.store, path)
        encoded = None
        outcome = KEPT if key not in todo else ADOPTED
        if blob is None:
            encoded = self._compute(ids, identity, path, lost.get(key))
            if self._job.store.put_new(path, encoded.blob):
                blob, outcome = encoded.blob, WRITTEN
            else:
                blob, outcome = self._job.store.get(path), ADOPTED
        if encoded is not None and blob == encoded.blob:
            stats, checksums, digest = encoded.stats, encoded.layer_checksums, encoded.chain_digest
        else:
            stats, checksums, digest = self._continue_from(blob, ids, identity, path)
            encoded = None
        self._chain.append(Link(key, first + len(ids), digest))
        chunk = Stored(
            key=key,
            parent_key=keys[index - 1] if index else None,
            index=index,
            first_token=first,
            tokens=len(ids),
            outcome=outcome,
            stats=stats,
            has_ideal=encoded is not None,
            stored_bytes=len(blob),
            layer_checksums=checksums,
            parent_digest=parent,
            chain_digest=digest,
        )
        if self._on_chunk is not None:
            self._on_chunk(chunk)
        return chunk

    def _compute(
        self, ids: torch.Tensor, identity: codec.ChunkIdentity, path: str, lost: bytes | None
    ) -> codec.EncodedChunk:
        truth = self._prefill(ids)
        encoded = codec.encode(self._predictor, self._profile, self._state, ids, truth, identity, ideal=True)
        if lost is not None and encoded.chain_digest != lost:
            raise DataError(
                f"the blob {self._job.store.uri}/{path} is gone, and computed again it holds other bits than its index "
                "row says, from which the chunks after it cannot follow; use a new store for this model"
            )
        return encoded

    def _prefill(self, ids: torch.Tensor) -> list[KV]:
        _synchronise()
        start = time.perf_counter()
        layers = self._target.prefill(self._cache, ids)
        _synchronise()
        self.target_seconds += time.perf_counter() - start
        self.target_tokens += len(ids)
        return layers

    def _continue_from(
        self, blob: bytes, ids: torch.Tensor, identity: codec.ChunkIdentity, path: str
    ) -> tuple[codec.ChunkStats, bytes, bytes]:
        self._state.truncate(identity.first_token)  # encoding has advanced it along bits that are not the stored ones
        decoded = decode_blob(self._job.store, path, self._predictor, self._profile, self._state, ids, blob, identity)
        self._target.replace(self._cache, identity.first_token, decoded.layers)
        return stats_of(blob, decoded), decoded.layer_checksums, decoded.chain_digest


def stats_of(blob: bytes, decoded: codec.DecodedChunk) -> codec.ChunkStats:
    """Sizes of a blob that this process did not encode; ideal code length and escapes are not known and are 0."""
    layers = codec.read_header(blob).layers
    bytes_k, bytes_v = sum(layer.key_bytes for layer in layers), sum(layer.value_bytes for layer in layers)
    scalars_k, scalars_v = (sum(pair[side].numel() for pair in decoded.layers) for side in (0, 1))
    return codec.ChunkStats(scalars_k, scalars_v, bytes_k, bytes_v, len(blob) - bytes_k - bytes_v, 0.0, 0.0, 0)


def find_blob(store: Store, path: str) -> bytes | None:
    """The blob at this path, or None."""
    try:
        return store.get(path)
    except ObjectMissing:
        return None


def decode_blob(
    store: Store,
    path: str,
    predictor: codec.Predictor,
    profile: codec.Profile,
    state: codec.PredictorState,
    ids: torch.Tensor,
    blob: bytes,
    identity: codec.ChunkIdentity,
) -> codec.DecodedChunk:
    """codec.decode, with the blob's path in front of what it raises."""
    try:
        return codec.decode(predictor, profile, state, ids, blob, identity)
    except BlobError as error:
        raise type(error)(f"{store.uri}/{path}: {error}") from error


def _synchronise() -> None:
    """Wait for the GPU, so that a clock around a call measures the call."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
