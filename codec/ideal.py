"""The ideal code length: the floor that sizes on disk are compared with. Reports only; no coder sees a number of this file."""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from codec.cells import Ints
from codec.formats import NumberFormat

_LEAST = 2.0**-40  # as the reference: a scalar never counts for more than 40 bits


def ideal_bits(patterns: Ints, guess: Tensor, sigma: NDArray[np.float64], fmt: NumberFormat) -> float:
    """Sum of -log2 of a Gaussian's mass over each value's exact bin.

    patterns of any shape; guess, float32 or float64, of that shape; sigma broadcastable to it. NaNs and infinities count for
    an escape of 32 bits.
    """
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
    return float(torch.where(torch.from_numpy(finite), bits, torch.full_like(bits, 32.0)).sum())


def _magnitude(ordinal: Ints, fmt: NumberFormat) -> Tensor:
    return torch.from_numpy(fmt.values(ordinal))
