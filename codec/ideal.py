"""The ideal code length: the floor that sizes on disk are compared with. Reports only; no coder sees a number of this file."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from codec.cells import Ints
from codec.formats import NumberFormat

_LEAST = 2.0**-40  # as the reference: a scalar never counts for more than 40 bits
_MOST_SQUARE = 64.0  # an outlier's miss counts as 8 sigma: it is escaped, and must not decide a layer's health
MISS = 0.5 * math.log2(math.e)  # bits a scalar of a Gaussian's miss where its sigma is right

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Cost:
    """What K or V of one layer costs, in bits.

    heads: ideal code length of each head, float64 [J]. The two parts of a Gaussian's code length that depend on the data, summed over
    all finite scalars: spread, log2 sigma; miss, (x - mean)**2 / (2 sigma**2) log2 e.
    """

    heads: Floats
    spread: float
    miss: float


@dataclass(frozen=True)
class LayerCosts:
    """The same of a chunk, K then V: heads float64 [layers, 2, J]; spread, miss float64 [layers, 2]."""

    heads: Floats
    spread: Floats
    miss: Floats

    @staticmethod
    def of(layers: list[tuple[Cost, Cost]]) -> LayerCosts:
        """Costs of K and V layer by layer, put together."""
        return LayerCosts(
            np.array([[cost.heads for cost in pair] for pair in layers]),
            np.array([[cost.spread for cost in pair] for pair in layers]),
            np.array([[cost.miss for cost in pair] for pair in layers]),
        )


def cost(
    patterns: Ints, guess: Floats, sigma: Floats, fmt: NumberFormat, heads: int, own: Floats | None = None
) -> Cost:
    """The cost of K or V of one layer.

    patterns: the heads along the first axis, whole or channel by channel; guess of that shape, sigma broadcastable to it. own: the
    model's sigmas where those that are coded with are others (codec.narrow); spread and miss are theirs.
    """
    bits = _bits(patterns, torch.from_numpy(guess), sigma, fmt)
    own = np.broadcast_to(sigma if own is None else own, patterns.shape)
    value = fmt.values(patterns)
    with np.errstate(invalid="ignore", over="ignore"):
        square = np.minimum(((value - guess) / own) ** 2, _MOST_SQUARE)
    finite = np.isfinite(value)
    return Cost(
        bits.reshape(heads, -1).sum(1).numpy(),
        float(np.log2(own)[finite].sum()),
        float(square[finite].sum()) * MISS,
    )


def ideal_bits(patterns: Ints, guess: Tensor, sigma: Floats, fmt: NumberFormat) -> float:
    """Sum of -log2 of a Gaussian's mass over each value's exact bin.

    patterns of any shape; guess, float32 or float64, of that shape; sigma broadcastable to it. NaNs and infinities count for
    an escape of 32 bits.
    """
    return float(_bits(patterns, guess, sigma, fmt).sum())


def _bits(patterns: Ints, guess: Tensor, sigma: Floats, fmt: NumberFormat) -> Tensor:
    sign_bit = fmt.item_bits - 1
    ordinal, last = patterns & ((1 << sign_bit) - 1), (fmt.first_nonfinite << fmt.raw) - 1
    finite = ordinal <= last
    o = np.where(finite, ordinal, 0)
    value = _magnitude(o, fmt)
    above = (_magnitude(np.minimum(o + 1, last), fmt) + value) / 2
    if fmt.coarse:  # whatever is larger was saturated
        above = torch.where(torch.from_numpy(o == last), torch.full_like(above, math.inf), above)
    below = torch.where(
        torch.from_numpy(o > 0), (_magnitude(np.maximum(o - 1, 0), fmt) + value) / 2, torch.zeros_like(value)
    )
    sign = torch.from_numpy(np.where(patterns >> sign_bit == 1, -1.0, 1.0))
    deviation = torch.from_numpy(np.array(np.broadcast_to(sigma, patterns.shape)))
    mean = guess.cpu().double()
    a, b = (below * sign - mean) / deviation, (above * sign - mean) / deviation
    low, high = torch.minimum(a, b), torch.maximum(a, b)
    flip = low > 0  # stay in the lower tail, where erfc is accurate
    low, high = torch.where(flip, -high, low), torch.where(flip, -low, high)
    mass = 0.5 * (torch.erfc(-high / math.sqrt(2)) - torch.erfc(-low / math.sqrt(2)))
    bits = -mass.clamp_min(_LEAST).log2()
    return torch.where(torch.from_numpy(finite), bits, torch.full_like(bits, 32.0))


def _magnitude(ordinal: Ints, fmt: NumberFormat) -> Tensor:
    return torch.from_numpy(fmt.values(ordinal))
