"""Decoding a prefix while it arrives: later blobs are fetched while those that have come are decoded.

Restoration.layers waits for all blobs, because the prefix's length is fixed before the first layer goes out. Who takes the bits as a
whole, in the end, or says himself how many of them are right, need not wait: over a slow link a prefix is there soon after its last
blob. Every blob is checked before it is decoded, and every layer is found equal to its checksums, as always. The price is memory: to go
on from what has come, the predictor remembers it in all layers, which takes as much as the raw cache of all but the last part.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from types import TracebackType

import torch
from torch import Tensor

import codec
from codec.errors import ChunkFailed, DataError, StorageError
from codec.formats import bits
from pipeline.restoration.catalogue import Ids, Match
from pipeline.restoration.prefix import Decoder, Pair, Prefix, checked_blob, read_blob
from pipeline.restoration.span import Span
from pipeline.store import Store

IN_FLIGHT = 2  # few: over a slow link the first blob is to come long before the last


def decode_arriving(store: Store, match: Match, decoder: Decoder, ids: Ids, span: Span) -> tuple[Prefix, list[Pair]]:
    """All chunks of a match, decoded as they come.

    ids: the whole prompt's, int64. Returns the prefix, and (K, V) of the layers asked for, [heads, tokens, head_dim].
    Raises as ArrivingPrefix.parts.
    """
    whole: list[Pair] = []
    with ArrivingPrefix(store, match, decoder, ids, span) as arriving:
        for part in arriving.parts():
            number = part.layer - span.layers[0]
            if number == len(whole):
                key, value = part.pair
                whole.append((_room(key, match.tokens), _room(value, match.tokens)))
            _fill(whole[number], part)
        return arriving.prefix, whole


def _room(part: Tensor, tokens: int) -> Tensor:
    """For as many tokens of what a part, [heads, tokens, head_dim], is of."""
    return torch.empty((part.shape[0], tokens, part.shape[2]), dtype=part.dtype, device=part.device)


def _fill(whole: Pair, part: Part) -> None:
    for to, new in zip(whole, part.pair, strict=True):
        bits(to)[:, part.first_token : part.first_token + new.shape[1]] = bits(new)


@dataclass(frozen=True)
class Part:
    """(K, V) of one layer, [heads, T, head_dim], of the tokens from `first_token` on."""

    layer: int
    first_token: int
    pair: Pair


class ArrivingPrefix:
    """A match that is decoded as it comes. Its blobs are fetched from the begin of `with` on, which ends when no fetch is under way."""

    def __init__(self, store: Store, match: Match, decoder: Decoder, ids: Ids, span: Span | None = None) -> None:
        """ids: the whole prompt's, int64. span: the layers and heads asked for, all by default."""
        self._store, self._match, self._decoder = store, match, decoder
        shape = decoder.predictor.config
        self._span = span or Span.of(shape.layers, shape.kv_heads)
        self._state = decoder.predictor.new_state(forgets=True)
        tokens = torch.from_numpy(ids[: match.tokens].copy())
        self.prefix = Prefix(store.uri, match.generation, tokens, match.chunks, ())  # its blobs: those that have come
        self._done, self._last = 0, len(match.chunks)  # chunks that are decoded, and that there can be

    @property
    def tokens(self) -> int:
        """Tokens of which all layers were taken."""
        return self._tokens(self._done)

    @property
    def reach(self) -> int:
        """Tokens that there will be in the end, as far as is known."""
        return self._tokens(self._last)

    def parts(self) -> Iterator[Part]:
        """Decode what has come, again and again, layer by layer, until all chunks are decoded.

        Raises:
            DataError: a blob is corrupt, missing, or not the one that is meant; ChunkFailed: it decodes to other bits than were stored.
            StorageError: the store cannot be read.

        What was yielded of tokens that are not among `tokens` then belongs to a longer prefix than can be had. The prefix is shorter
        from then on, and can be asked again for the rest of it. Whoever stops in the middle for a reason of his own cannot ask again.
        """
        while self._done < self._last:
            if self._done == len(self.prefix.blobs):
                self._take()
            yield from self._decoded(min(len(self.prefix.blobs), self._last))

    def _take(self) -> None:
        """Check what has come since; of what is not right those before it stay."""
        try:
            for blob in self._blobs.take():
                come = self.prefix.blobs
                checked = checked_blob(self._store, self._match, self._decoder, len(come), blob)
                self.prefix = replace(self.prefix, blobs=(*come, checked))
        except (DataError, StorageError):
            self._end(len(self.prefix.blobs))
            raise

    def _decoded(self, end: int) -> Iterator[Part]:
        """Chunks up to `end`."""
        predictor, profile = self._decoder.predictor, self._decoder.profile
        first, last = self._span.layers
        # What continues from the state needs it to have taken in all layers; nothing continues from the last part.
        continues = end < self._last
        task = self.prefix.task(self._state, self._done, end)
        decoding = codec.decode_prefixes(predictor, profile, [task], keep=continues)
        try:
            for layer, ((key, value),) in zip(
                range(predictor.config.layers if continues else last), decoding, strict=False
            ):
                if first <= layer < last:
                    yield Part(layer, self.tokens, (self._span.cut(key), self._span.cut(value)))
        except ChunkFailed as error:
            self._end(self._done + error.chunk)
            raise
        finally:
            decoding.close()  # type: ignore[attr-defined]
        self._done = end

    def _end(self, chunks: int) -> None:
        """There are no more chunks than these."""
        self._last = chunks
        self._blobs.cancel()

    def _tokens(self, chunks: int) -> int:
        return sum(chunk.tokens for chunk in self._match.chunks[:chunks])

    def __enter__(self) -> ArrivingPrefix:
        self._blobs = Arriving(self._store, self._match)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._blobs.close()


class Arriving:
    """The blobs of a match, fetched in order by a few threads."""

    def __init__(self, store: Store, match: Match) -> None:
        self._threads = ThreadPoolExecutor(IN_FLIGHT, "arriving")
        self._coming: deque[Future[bytes | None]] = deque(
            self._threads.submit(read_blob, store, match, chunk) for chunk in match.chunks
        )

    def take(self) -> Iterator[bytes | None]:
        """All that have come and were not taken yet, at least one, which is waited for; None for one that is not there.

        Raises StorageError for one that cannot be read, when those before it were taken.
        """
        yield self._coming.popleft().result()
        while self._coming and self._coming[0].done():
            yield self._coming.popleft().result()

    def cancel(self) -> None:
        """Nothing more is needed."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def close(self) -> None:
        """The same, and what is under way comes to its end."""
        self._threads.shutdown(cancel_futures=True)
