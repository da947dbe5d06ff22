"""The residual model: what a guess and a calibrated scale say about a scalar, as integers (DESIGN 3 and 7).

A channel's scale is two integers: the grid exponent g (cells of w = 2**g, with sigma between 4 w and 8 w) and the reciprocal
R = w / sigma * 2**RECIPROCAL_BITS. A guess becomes its position M on the line in units of w * 2**-FRACTION and the first of the
WINDOW cells around it. Probabilities of cells are differences of one table of the cumulative distribution in fixed point.
From there on there are only integers: nothing in this file adds floating-point numbers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from codec import cells
from codec.cells import FRACTION, Ints
from codec.formats import NumberFormat
from codec.kernels import block_rows, cell_rows, placed

Freqs = NDArray[np.float32]  # integer values; the type is the one the coder takes

WINDOW = 128  # cells around the guess: at least 8 sigma on either side
BLOCKS, BLOCK = 8, 16  # a symbol is a block of the window, then a cell of the block
RECIPROCAL_BITS = 17
STEP_BITS = 9  # the table's argument is z * 2**STEP_BITS
TABLE_REACH = 8 << STEP_BITS  # beyond 8 sigma the table is flat
TABLE_BITS = 38  # so that a table value times 2**24 fits an int64
PRECISION = 24  # bits of a probability in the coder
ESCAPE = 255  # weight of the escape symbol beside the 2**24 of all: about 2**-16
_SHIFT = FRACTION + RECIPROCAL_BITS - STEP_BITS
MEAN_LIMIT = 2.0**50  # positions of means are clipped here; values that far out are escaped
_FAR = 1 << 40  # distances are clipped here: beyond the table's reach for any reciprocal, and safe to multiply


@dataclass(frozen=True)
class ChannelScales:
    """Scales of some channels: int64, of one shape that broadcasts to the means they are used with.

    Open loop: [kv_heads, 1, head_dim], for means [kv_heads, tokens, head_dim]; closed loop: [channels, 1 or tokens].
    """

    grid: Ints
    reciprocal: Ints

    def sigma(self) -> NDArray[np.float64]:  # exact: for reports only
        """The standard deviation these integers stand for, in their shape; for reports, not for coding."""
        return np.ldexp(1.0 / self.reciprocal.astype(np.float64), self.grid + RECIPROCAL_BITS)


def quantise_scales(sigma: NDArray[np.float64], fmt: NumberFormat) -> ChannelScales:
    """Calibrated standard deviations [kv_heads, head_dim] as integers, with an axis for tokens. Runs once, at calibration."""
    sigma = np.nan_to_num(sigma, nan=1.0, posinf=2.0**60, neginf=1.0)[:, None, :]
    return ChannelScales(*scale_integers(sigma, fmt))


def gaussian_table() -> Ints:  # exact: runs once, at calibration; then it is data of the profile
    """Cumulative normal distribution at z = i / 2**STEP_BITS, |i| <= TABLE_REACH, scaled to 0 .. 2**TABLE_BITS.

    It comes from the platform's erfc, so it is computed once, at calibration, and then is data of the profile.
    """
    z = np.arange(-TABLE_REACH, TABLE_REACH + 1) / (1 << STEP_BITS)
    table = np.array([round(0.5 * math.erfc(-x / math.sqrt(2.0)) * (1 << TABLE_BITS)) for x in z], dtype=np.int64)
    table[0], table[-1] = 0, 1 << TABLE_BITS
    return table


@dataclass(frozen=True)
class Placement:
    """Where scalars are expected: int64 arrays of one shape. Coded are flat ones, in the order of the bitstream."""

    mean: Ints  # position of the guess, units of w * 2**-FRACTION
    start: Ints  # first cell of the window
    grid: Ints
    reciprocal: Ints

    def slice(self, begin: int, end: int) -> Placement:
        """Scalars (or rows) begin .. end - 1."""
        return Placement(self.mean[begin:end], self.start[begin:end], self.grid[begin:end], self.reciprocal[begin:end])

    def rows(self, which: Ints | NDArray[np.bool_]) -> Placement:
        """These scalars (or rows), by index or by mask."""
        return Placement(self.mean[which], self.start[which], self.grid[which], self.reciprocal[which])

    def flat(self) -> Placement:
        """As one row of scalars."""
        return Placement(
            self.mean.reshape(-1), self.start.reshape(-1), self.grid.reshape(-1), self.reciprocal.reshape(-1)
        )


def place(guess: Tensor, scales: ChannelScales, fmt: NumberFormat) -> Placement:
    """Turn guesses, finite float32 [kv_heads, tokens, head_dim], into integers, flat."""
    return place_values(guess.cpu().numpy().astype(np.float64), scales, fmt).flat()


def scale_integers(sigma: NDArray[np.float64], fmt: NumberFormat) -> tuple[Ints, Ints]:
    """(grid, reciprocal) of standard deviations of any shape: elementwise and exact, so usable on the path to the coder."""
    sigma = np.clip(sigma, 2.0**-20, 2.0**60)
    _, exponent = np.frexp(sigma)
    grid = np.clip(exponent.astype(np.int64) - 3, fmt.emin, grid_limit(fmt))
    reciprocal = np.rint(np.ldexp(1.0, grid + RECIPROCAL_BITS) / sigma)
    return grid, np.clip(reciprocal, 1, 1 << 20).astype(np.int64)


def grid_limit(fmt: NumberFormat) -> int:
    """The largest grid exponent: T must be a finite value."""
    return (fmt.first_nonfinite >> fmt.mantissa) + fmt.emin - 2 - fmt.mantissa


def place_values(mean: NDArray[np.float64], scales: ChannelScales, fmt: NumberFormat) -> Placement:
    """Turn means, float64 of any shape, into integers of that shape; scales broadcast to it."""
    shape = mean.shape
    grid, reciprocal = np.broadcast_to(scales.grid, shape), np.broadcast_to(scales.reciprocal, shape)
    at, start = placed(mean.reshape(-1), grid.reshape(-1), *_placing(fmt))
    return Placement(at.reshape(shape), start.reshape(shape), grid, reciprocal)


@lru_cache(maxsize=8)
def _placing(fmt: NumberFormat) -> tuple[Ints, NDArray[np.float64]]:
    """What the compiled loop needs to know of a format."""
    constants = np.array([FRACTION, fmt.mantissa, WINDOW, cells.cell_limit(fmt)], dtype=np.int64)
    return constants, np.array([fmt.max_finite, MEAN_LIMIT])


def place_values_reference(mean: NDArray[np.float64], scales: ChannelScales, fmt: NumberFormat) -> Placement:
    """`place_values` in plain array code: what the compiled loop must equal."""
    mean = np.clip(mean, -fmt.max_finite, fmt.max_finite)
    shape = mean.shape
    grid, reciprocal = np.broadcast_to(scales.grid, shape), np.broadcast_to(scales.reciprocal, shape)
    at = np.rint(np.clip(np.ldexp(mean, FRACTION - grid), -MEAN_LIMIT, MEAN_LIMIT)).astype(np.int64)
    limit = cells.cell_limit(fmt)
    start = np.clip(cells.cell_at(at, fmt) - WINDOW // 2, -limit, limit - WINDOW)
    return Placement(at, start, grid, reciprocal)


class CellModel:
    """Frequencies of symbols: float32 rows of integers f - 1, which sum to 2**PRECISION - (symbols), for each scalar.

    `reference` chooses the plain array code instead of the compiled loops; both give the same integers.
    """

    def __init__(self, table: Ints, fmt: NumberFormat, reference: bool = False) -> None:
        self._table = np.ascontiguousarray(table, dtype=np.int64)
        self._edges = cells.edge_table(fmt)
        self._limit = cells.cell_limit(fmt)
        blocks, inner = (1 << PRECISION) - (BLOCKS + 1) - ESCAPE, (1 << PRECISION) - BLOCK
        self._block_constants = np.array([BLOCK, blocks, ESCAPE, TABLE_BITS, _FAR, _SHIFT, TABLE_REACH], dtype=np.int64)
        self._cell_constants = np.array([BLOCK, inner, _FAR, _SHIFT, TABLE_REACH], dtype=np.int64)
        self.reference = reference

    def block_frequencies(self, where: Placement) -> Freqs:
        """[scalars, BLOCKS + 1]: the blocks of the window, which share what lies outside it, then the escape."""
        total = (1 << PRECISION) - (BLOCKS + 1) - ESCAPE
        out = np.empty((len(where.start), BLOCKS + 1), dtype=np.float32)
        if not self.reference:
            block_rows(where.start, where.mean, where.reciprocal, self._edges, self._table, self._block_constants, out)
            return out
        inner = (self._cumulative(where, where.start + BLOCK, BLOCK, BLOCKS - 1) * total) >> TABLE_BITS
        out[:, 0] = inner[:, 0]
        out[:, 1 : BLOCKS - 1] = inner[:, 1:] - inner[:, :-1]
        out[:, BLOCKS - 1] = total - inner[:, -1]
        out[:, BLOCKS] = ESCAPE
        return out

    def cell_frequencies(self, where: Placement, block: Ints) -> Freqs:
        """[scalars, BLOCK]: the cells of each scalar's block."""
        total, first = (1 << PRECISION) - BLOCK, where.start + block * BLOCK
        if not self.reference:
            return self.kept_frequencies(first, where.mean, where.reciprocal)
        at = self._cumulative(where, first, 1, BLOCK + 1)
        low, mass = at[:, :1], at[:, -1:] - at[:, :1]
        flat = mass == 0  # too far out for the table to tell the cells apart
        at = np.where(flat, np.arange(BLOCK + 1, dtype=np.int64), at - low)
        # one rounding each in float64, and monotone: the same integers everywhere
        ratio = np.float64(total) / np.where(flat, BLOCK, mass).astype(np.float64)
        inner = np.minimum(np.floor(at.astype(np.float64) * ratio), float(total))
        inner[:, -1] = float(total)
        return np.diff(inner, axis=1).astype(np.float32)

    def kept_frequencies(self, first: Ints, mean: Ints, reciprocal: Ints) -> Freqs:
        """As `cell_frequencies`, from each block's first cell; compiled."""
        out = np.empty((len(first), BLOCK), dtype=np.float32)
        cell_rows(first, mean, reciprocal, self._edges, self._table, self._cell_constants, out)
        return out

    def _cumulative(self, where: Placement, first: Ints, stride: int, count: int) -> Ints:
        """Table values at the edges of cells first, first + stride, … (`count` of them): [scalars, count]."""
        index = first[:, None] + np.arange(count, dtype=np.int64) * stride
        distance = self._edges[index + self._limit] - where.mean[:, None]
        np.clip(distance, -_FAR, _FAR, out=distance)
        distance *= where.reciprocal[:, None]
        distance >>= _SHIFT
        np.clip(distance, -TABLE_REACH, TABLE_REACH, out=distance)
        values: Ints = self._table[distance + TABLE_REACH]
        return values


def zero_cell_frequencies(grid: Ints, fmt: NumberFormat) -> Freqs:
    """[scalars, BINADES + 1]: binades of cell 0 in proportion to their width; the last symbol is everything deeper."""
    return zero_cell_rows()[cells.binade_count(grid, fmt)]


@lru_cache(maxsize=1)
def zero_cell_rows() -> Freqs:
    """Row: how many binades are coded one by one."""
    rows = np.zeros((cells.BINADES + 1, cells.BINADES + 1), dtype=np.float64)
    for count in range(cells.BINADES + 1):
        for b in range(count):
            rows[count, b] = (1 << (PRECISION - 1 - b)) - 1
        rows[count, cells.BINADES] = (1 << (PRECISION - count)) - 1 - (cells.BINADES - count)
    return rows.astype(np.float32)
