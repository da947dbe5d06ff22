"""Where the true K and V of a chunk come from: the target computes them, or a stored generation is decoded."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Protocol

import torch

import codec
from pipeline.chain import Next, Place, decode_blob
from pipeline.paths import blob_path
from pipeline.target import Target

KV = tuple[torch.Tensor, torch.Tensor]


class Truth(Protocol):
    """The truth of one prompt after another, chunk by chunk. tokens, seconds: what was computed so far, and how long it took.

    holds: whether it holds what it has given, so that others may hold it without another copy being made.
    """

    tokens: int
    seconds: float
    holds: bool

    def reset(self) -> None:
        """Forget the prompt."""

    def truncate(self, tokens: int) -> None:
        """Forget all but its first tokens."""

    def next(self, chunk: Next) -> Sequence[KV]:
        """(K, V) of every layer of the chunk that follows, [kv_heads, tokens, head_dim] each. They never change."""

    def replace(self, chunk: Next, layers: Sequence[KV]) -> None:
        """Go on from these bits of the chunk, whether or not `next` has given others for it."""


class Prefilled:
    """The target's own cache."""

    holds = True

    def __init__(self, target: Target) -> None:
        self.target = target
        self.tokens, self.seconds = 0, 0.0
        self.reset()

    def reset(self) -> None:
        """See Truth."""
        self._cache: Any = self.target.new_cache()

    def truncate(self, tokens: int) -> None:
        """See Truth."""
        self.target.truncate(self._cache, tokens)

    def next(self, chunk: Next) -> Sequence[KV]:
        """See Truth."""
        _synchronise()
        start = time.perf_counter()
        layers = self.target.prefill(self._cache, chunk.ids)
        _synchronise()
        self.seconds += time.perf_counter() - start
        self.tokens += len(chunk.ids)
        return layers

    def replace(self, chunk: Next, layers: Sequence[KV]) -> None:
        """See Truth."""
        self.target.replace(self._cache, chunk.identity.first_token, layers)


class Reread:
    """A stored generation of the same target: the very bits that it holds. Its target's files are not needed."""

    holds = False

    def __init__(self, place: Place, predictor: codec.Predictor, profile: codec.Profile) -> None:
        self._place, self._predictor, self._profile = place, predictor, profile
        self.tokens, self.seconds = 0, 0.0
        self.reset()

    def reset(self) -> None:
        """See Truth."""
        self._state = self._predictor.new_state()
        self._chunks: list[Next] = []  # of the prompt, those that were not decoded here at the end

    def truncate(self, tokens: int) -> None:
        """See Truth."""
        self._state.truncate(min(tokens, self._state.length))
        self._chunks = [chunk for chunk in self._chunks if chunk.identity.first_token < tokens]

    def next(self, chunk: Next) -> Sequence[KV]:
        """See Truth. Raises WrongParent where the chunks before it hold other bits than it follows from."""
        start = time.perf_counter()
        for earlier in self._chunks:  # those that were found in the new generation already
            if earlier.identity.first_token >= self._state.length:
                self._decode(earlier)
        self._chunks.append(chunk)
        layers = self._decode(chunk)
        self.seconds += time.perf_counter() - start
        self.tokens += len(chunk.ids)
        return layers

    def replace(self, chunk: Next, layers: Sequence[KV]) -> None:
        """See Truth: they are the same bits, and are decoded here as soon as a chunk after them is."""
        if not self._chunks or self._chunks[-1].identity.first_token < chunk.identity.first_token:
            self._chunks.append(chunk)

    def _decode(self, chunk: Next) -> Sequence[KV]:
        path = blob_path(self._place.target, self._place.profile, chunk.identity.prefix_key)
        old = Next(chunk.ids, chunk.identity, path)
        blob = self._place.store.get(path)
        return decode_blob(self._place, self._predictor, self._profile, self._state, old, blob).layers


def _synchronise() -> None:
    """Wait for the GPU, so that a clock around a call measures the call."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
