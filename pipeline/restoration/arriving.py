"""Decoding a prefix while it arrives: later blobs are fetched while those that have come are decoded.

Restoration.layers waits for all blobs, because the prefix's length is fixed before the first layer goes out. Who takes the bits as a
whole, in the end, need not wait: over a slow link a prefix is there soon after its last blob. Every blob is checked before it is
decoded, and every layer is found equal to its checksums, as always.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from itertools import islice
from types import TracebackType

import torch
from torch import Tensor

import codec
from pipeline.restoration.catalogue import Ids, Match
from pipeline.restoration.prefix import Decoder, Pair, Prefix, checked_blob, read_blob
from pipeline.restoration.span import Span, bits
from pipeline.store import Store

IN_FLIGHT = 2  # few: over a slow link the first blob is to come long before the last


def decode_arriving(store: Store, match: Match, decoder: Decoder, ids: Ids, span: Span) -> tuple[Prefix, list[Pair]]:
    """Decode what has come, again and again, until all chunks of a match are decoded.

    ids: the whole prompt's, int64. Returns the prefix, and (K, V) of the layers asked for, [heads, tokens, head_dim].

    Raises:
        DataError: a blob is corrupt, missing, or not the one that is meant; ChunkFailed: it decodes to other bits than were stored.
        StorageError: the store cannot be read.
    """
    state, (first, end) = decoder.predictor.new_state(forgets=True), span.layers
    prefix = Prefix(store.uri, match.generation, torch.from_numpy(ids[: match.tokens].copy()), match.chunks, ())
    whole: list[Pair] = []
    with Arriving(store, match) as arriving:
        while (done := len(prefix.blobs)) < len(match.chunks):
            come = arriving.take()
            new = [checked_blob(store, match, decoder, number, blob) for number, blob in enumerate(come, done)]
            prefix = replace(prefix, blobs=(*prefix.blobs, *new))
            before, count = state.length, done + len(new)
            decoding = codec.decode_prefixes(decoder.predictor, decoder.profile, [prefix.task(state, done, count)])
            # What continues from the state needs it to have taken in all layers; nothing continues from the last part.
            last = end if count == len(match.chunks) else None
            part = [(span.cut(k), span.cut(v)) for ((k, v),) in islice(decoding, last)][first:end]
            whole = whole or [(_room(k, match.tokens), _room(v, match.tokens)) for k, v in part]
            _fill(whole, before, part)
    return prefix, whole


def _room(part: Tensor, tokens: int) -> Tensor:
    """For as many tokens of what a part, [heads, tokens, head_dim], is of."""
    return torch.empty((part.shape[0], tokens, part.shape[2]), dtype=part.dtype, device=part.device)


def _fill(whole: Sequence[Pair], first: int, part: Sequence[Pair]) -> None:
    for pair, values in zip(whole, part, strict=True):
        for to, new in zip(pair, values, strict=True):
            bits(to)[:, first : first + new.shape[1]] = bits(new)


class Arriving:
    """The blobs of a match, fetched in order by a few threads."""

    def __init__(self, store: Store, match: Match) -> None:
        self._threads = ThreadPoolExecutor(IN_FLIGHT, "arriving")
        self._coming: deque[Future[bytes | None]] = deque(
            self._threads.submit(read_blob, store, match, chunk) for chunk in match.chunks
        )

    def take(self) -> list[bytes | None]:
        """All that have come and were not taken yet, at least one, which is waited for; None for one that is not there."""
        found = [self._coming.popleft().result()]
        while self._coming and self._coming[0].done():
            found.append(self._coming.popleft().result())
        return found

    def __enter__(self) -> Arriving:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._threads.shutdown(cancel_futures=True)
