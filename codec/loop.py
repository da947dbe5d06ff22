"""How a layer is coded and what the predictor then goes on with: the part in which open and closed loop differ.

Open loop (DESIGN 3): a Gaussian around the guess for each scalar; the predictor goes on with its own guesses.
Closed loop (DESIGN 4): closed_loop.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from codec.formats import NumberFormat
from codec.ideal import Cost, cost
from codec.predictor import Run, Stored
from codec.residual import ChannelScales

if TYPE_CHECKING:
    from codec.coders import Reader, Writer

Pair = tuple[Tensor, Tensor]  # K and V, [kv_heads, tokens, head_dim] each; or cos and sin


@dataclass(frozen=True)
class Next:
    """What the predictor goes on with: K and V to attend to, finite float32; a correction of its hidden state or None.

    carry: what this layer tells the residual model of the next one of the same chunk, a loop's own affair.
    """

    attend: Pair
    correction: Tensor | None = None
    carry: object = None


@dataclass(frozen=True)
class CodedLayer:
    """What K and V cost ideally (None when not asked for), escaped scalars, and how to go on."""

    ideal: tuple[Cost, Cost] | None
    escapes: int
    next: Next


@dataclass(frozen=True)
class DecodedLayer:
    """K and V in the cache's dtype, and how to go on."""

    values: Pair
    next: Next


class LoopCodec(Protocol):
    """Codes layers of one profile. `turn` is cos and sin of the tokens' RoPE angles, float32 [tokens, rotated dims / 2]."""

    def encode(
        self, layer: int, truth: Pair, guess: Pair, turn: Pair, ideal: bool, writer: Writer, carry: object = None
    ) -> CodedLayer:
        """Code the true K and V of a layer; `carry` is that of the layer before."""

    def decode(self, layer: int, reader: Reader, guess: Pair, turn: Pair, carry: object = None) -> DecodedLayer:
        """The inverse; raises CorruptBlob."""


def follow(run: Run, layer: int, steps: Sequence[Next], stored: Sequence[Stored | None] | None = None) -> None:
    """Advance a run of several sequences by what each of them goes on with; stored: see Run.advance."""
    corrections = [step.correction for step in steps if step.correction is not None]
    run.advance(layer, [step.attend for step in steps], corrections or None, stored)


class OpenLoop:
    """The method as published: one scale for each K or V, head and channel."""

    def __init__(
        self,
        scales: Sequence[tuple[ChannelScales, ChannelScales]],
        fmt: NumberFormat,
        cache_scales: NDArray[np.float64] | None = None,
    ) -> None:
        """cache_scales: float64 [layers, 2, kv_heads] of an FP8 cache; `scales` are then in units of them."""
        self._scales, self._fmt = scales, fmt
        self._cache_scales = cache_scales

    def encode(
        self, layer: int, truth: Pair, guess: Pair, turn: Pair, ideal: bool, writer: Writer, carry: object = None
    ) -> CodedLayer:
        """See LoopCodec."""
        costs: list[Cost] = []
        escapes = 0
        for side, (values, scales) in enumerate(zip(truth, self._scales[layer], strict=True)):
            patterns, mean = self._fmt.patterns(values), self._mean(layer, side, guess)
            escapes += writer.tensor(side, patterns, mean, scales)
            if ideal:
                costs.append(cost(patterns, mean, scales.sigma(), self._fmt, len(patterns)))
        return CodedLayer((costs[0], costs[1]) if ideal else None, escapes, Next(guess))

    def decode(self, layer: int, reader: Reader, guess: Pair, turn: Pair, carry: object = None) -> DecodedLayer:
        """See LoopCodec."""
        values = []
        for side, scales in enumerate(self._scales[layer]):
            patterns = reader.tensor(side, self._mean(layer, side, guess), scales)
            values.append(self._fmt.tensor(np.ascontiguousarray(patterns)))
        return DecodedLayer((values[0], values[1]), Next(guess))

    def _mean(self, layer: int, side: int, guess: Pair) -> NDArray[np.float64]:
        """The guess of K (side 0) or V (1) in the units that are stored: [kv_heads, tokens, head_dim]."""
        mean: NDArray[np.float64] = guess[side].cpu().double().numpy()
        if self._cache_scales is not None:
            mean = mean / self._cache_scales[layer, side][:, None, None]
        return mean
