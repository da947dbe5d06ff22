"""Narrower laws for a coarse cache (calibration only): the joint model's sigmas include the rounding to 8 bits.

That is as it should be where they say how far a bin's mean is to be trusted: with narrower ones the loop over channels was not
stable on real caches. But what is coded is the bin, whose width already stands for the rounding. So each channel is coded with
its sigma times the factor that cost the fewest bits on the calibration samples.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from codec.bins import Bins
from codec.cells import Ints
from codec.geometry import Floats

FACTORS = 2.0 ** (np.arange(-16, 7) / 8)
_LEAST = 2.0**-30  # an outlier counts for no more bits: it must not decide a factor


def code_lengths(bins: Bins, patterns: Ints, mean: Floats, sigma: Floats) -> Floats:  # exact: at calibration only
    """Bits that channels [n, T] take with sigmas times each of FACTORS: [n, factors]."""
    low, high = torch.from_numpy(bins.low[patterns] - mean), torch.from_numpy(bins.high[patterns] - mean)
    flip = low > 0  # stay in the lower tail, where erfc is accurate
    low, high = torch.where(flip, -high, low), torch.where(flip, -low, high)
    out = []
    for factor in FACTORS:
        over = torch.from_numpy(sigma * (factor * math.sqrt(2)))
        mass = 0.5 * (torch.erfc(-high / over) - torch.erfc(-low / over))
        out.append(-mass.clamp_min(_LEAST).log2().sum(1))
    return torch.stack(out, 1).numpy()


def fit(lengths: Sequence[Floats]) -> NDArray[np.float32]:
    """The best factors [layers, N] from lengths [layers, N, factors] of every sample, added in their order."""
    total = lengths[0].copy()
    for more in lengths[1:]:
        total += more
    best: NDArray[np.float32] = FACTORS[total.argmin(2)].astype(np.float32)
    return best
