"""Coarse caches (DESIGN 4.5): an FP8 symbol tells a bin, not a value. What it tells is the mean of the Gaussian inside the bin.

E[x | lo < x < hi] = mean + sigma (phi(a) - phi(b)) / (Phi(b) - Phi(a)), with a, b the edges in sigmas from the mean. phi and Phi are
integer tables over the same steps, so their differences are exact and one division remains.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from codec.cells import Ints
from codec.formats import NumberFormat
from codec.residual import STEP_BITS, TABLE_BITS, TABLE_REACH

Floats = NDArray[np.float64]
LEAST_MASS = 1 << 10  # of 2**TABLE_BITS: further out, about 5.5 sigma, table differences say nothing about the mean


def density_table() -> Ints:  # exact: runs once, at calibration; then it is data of the profile
    """The normal density at z = i / 2**STEP_BITS, |i| <= TABLE_REACH, in units of 2**-TABLE_BITS; 0 at both ends."""
    z = np.arange(-TABLE_REACH, TABLE_REACH + 1) / (1 << STEP_BITS)
    scale = (1 << TABLE_BITS) / math.sqrt(2 * math.pi)
    table = np.array([round(scale * math.exp(-0.5 * x * x)) for x in z], dtype=np.int64)
    table[0] = table[-1] = 0
    return table


class Bins:
    """The bins of an FP8 format: 256 patterns with their values and edges; what is beyond the largest value was saturated."""

    def __init__(self, cumulative: Ints, density: Ints, fmt: NumberFormat) -> None:
        self.cumulative, self.density = cumulative.astype(np.int64), density.astype(np.int64)
        half, last = 1 << (fmt.bits - 1), fmt.first_nonfinite - 1
        magnitude = fmt.values(np.arange(last + 1))
        middle = (magnitude[1:] + magnitude[:-1]) * 0.5
        low, high = np.zeros(half), np.zeros(half)
        low[1 : last + 1], high[:last], high[last] = middle, middle, np.inf
        self.values = fmt.values(np.arange(2 * half))
        self.low, self.high = np.concatenate([low, -high]), np.concatenate([high, -low])

    def centre(self, patterns: Ints, mean: Floats, sigma: Floats) -> Floats:
        """Means inside bins, elementwise; of a bin too far out for the tables the edge that is nearer, which is the limit.

        (The bin's own value would be wrong there: where sigma is small against the bin, it is many sigmas off.)
        """
        low, high = self.low[patterns], self.high[patterns]
        a, b = self._index(low, mean, sigma), self._index(high, mean, sigma)
        mass = self.cumulative[b] - self.cumulative[a]
        known = mass >= LEAST_MASS
        z = (self.density[a] - self.density[b]) / np.where(known, mass, 1)
        return np.clip(np.where(known, mean + sigma * z, mean), low, high)

    def _index(self, edge: Floats, mean: Floats, sigma: Floats) -> Ints:
        steps = (edge - mean) / sigma * float(1 << STEP_BITS)
        return np.rint(np.clip(steps, -TABLE_REACH, TABLE_REACH)).astype(np.int64) + TABLE_REACH
