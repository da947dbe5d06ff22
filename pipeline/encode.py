"""Encoding a prompt chunk by chunk into a store: the chain rule of DESIGN 8, without Ray.

Chunk n is coded against the true bits of the chunks before it. So wherever a blob is found in place of what was about
to be computed (stored earlier, or another process was faster), the target's cache and the predictor's state continue
from the bits in that blob, not from this process' own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import codec
from pipeline.chain import Chain, Next, Tokens, decode_blob
from pipeline.store import ObjectMissing, Store
from pipeline.truth import Truth
from pipeline.work import ADOPTED, KEPT, WRITTEN, Job, OtherBits
from pipeline.worker_process import give_back


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
    """Encodes prompts one after another, keeping the truth's and the predictor's state of the last one."""

    def __init__(
        self,
        job: Job,
        truth: Truth,
        predictor: codec.Predictor,
        profile: codec.Profile,
        on_chunk: Callable[[Stored], None] | None = None,
        before_write: Callable[[str, codec.EncodedChunk], None] | None = None,
    ) -> None:
        """`on_chunk` is called with every chunk as soon as it is in the store.

        before_write: called with path and chunk before a blob is written; what it raises ends the prompt.
        """
        self._job = job
        self._before_write = before_write
        self._on_chunk = on_chunk
        self.truth = truth
        self._predictor = predictor
        self._profile = profile
        self._reset()

    def _reset(self) -> None:
        self.truth.reset()
        self._state = self._predictor.new_state()
        self._chain = Chain()

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
            OtherBits: a lost chunk holds other bits now than it did.
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
        self._chain.rewind(keys)
        self.truth.truncate(self._chain.tokens)
        self._state.truncate(self._chain.tokens)

    def _chunk(
        self, index: int, tokens: Tokens, keys: Sequence[bytes], todo: frozenset[bytes], lost: Mapping[bytes, bytes]
    ) -> Stored:
        key, store = keys[index], self._job.store
        following = self._chain.next(self._job, tokens, key)
        blob = find_blob(store, following.path)
        encoded = None
        outcome = KEPT if key not in todo else ADOPTED
        if blob is None:
            encoded = self._compute(following)
            self._check_lost(following, encoded.chain_digest, lost.get(key))
            if self._before_write is not None:
                self._before_write(following.path, encoded)
            if store.put_new(following.path, encoded.blob):
                blob, outcome = encoded.blob, WRITTEN
            else:
                blob, outcome = store.get(following.path), ADOPTED
        if encoded is not None and blob == encoded.blob:
            stats, checksums, digest = encoded.stats, encoded.layer_checksums, encoded.chain_digest
        else:
            stats, checksums, digest = self._continue_from(blob, following)
            self._check_lost(following, digest, lost.get(key))
            encoded = None
        self._chain.append(following, digest)
        chunk = Stored(
            key=key,
            parent_key=keys[index - 1] if index else None,
            index=index,
            first_token=following.identity.first_token,
            tokens=len(following.ids),
            outcome=outcome,
            stats=stats,
            has_ideal=encoded is not None,
            stored_bytes=len(blob),
            layer_checksums=checksums,
            parent_digest=following.identity.parent_digest,
            chain_digest=digest,
        )
        if self._on_chunk is not None:
            self._on_chunk(chunk)
        return chunk

    def _compute(self, chunk: Next) -> codec.EncodedChunk:
        truth = list(self.truth.next(chunk))
        give_back()  # the target's temporary tensors are others than the predictor's: those of both would stay
        encoded = codec.encode(
            self._predictor,
            self._profile,
            self._state,
            chunk.ids,
            truth,
            chunk.identity,
            ideal=True,
            shared=self.truth.holds,
        )
        give_back()
        return encoded

    def _check_lost(self, chunk: Next, digest: bytes, lost: bytes | None) -> None:
        if lost is not None and digest != lost:
            raise OtherBits(
                f"the blob {self._job.store.uri}/{chunk.path} was lost, and made again it holds other bits than its index row "
                "says, from which the chunks after it do not follow; run the job again, alone",
                chunk.identity.prefix_key,
                lost,
            )

    def _continue_from(self, blob: bytes, chunk: Next) -> tuple[codec.ChunkStats, bytes, bytes]:
        first = chunk.identity.first_token
        self._state.truncate(first)  # encoding has advanced it along bits that are not the stored ones
        decoded = decode_blob(self._job, self._predictor, self._profile, self._state, chunk, blob)
        self.truth.replace(chunk, decoded.layers)
        return stats_of(blob, decoded), decoded.layer_checksums, decoded.chain_digest


def stats_of(blob: bytes, decoded: codec.DecodedChunk) -> codec.ChunkStats:
    """Sizes of a blob that this process did not encode; ideal code length and escapes are not known and are 0."""
    header = codec.read_header(blob)
    bytes_k, bytes_v = header.key_bytes, sum(header.stream_bytes) - header.key_bytes
    scalars_k, scalars_v = (sum(pair[side].numel() for pair in decoded.layers) for side in (0, 1))
    return codec.ChunkStats(scalars_k, scalars_v, bytes_k, bytes_v, len(blob) - bytes_k - bytes_v, 0.0, 0.0, 0)


def find_blob(store: Store, path: str) -> bytes | None:
    """The blob at this path, or None."""
    try:
        return store.get(path)
    except ObjectMissing:
        return None
