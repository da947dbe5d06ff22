"""Cells: how a floating-point value is cut into an integer that a Gaussian can code, and bits that need no model.

Each channel has a grid exponent g. The cell grid has step w = 2**g below T = w * 2**mantissa, where the format's values are
denser than the grid, and one cell a value from T on, where they are not. Cells are numbered in order of value:

    n >= 0 : magnitude m = n,       positive sign        m <  2**mantissa : [m*w, (m+1)*w)
    n <  0 : magnitude m = -1 - n,  negative sign        m >= 2**mantissa : the value itself

So -0 lies in cell -1 and +0 in cell 0. A cell with 1 <= m < 2**mantissa lies in one binade: its values are equally spaced and
are told apart by 2**r raw bits. Cell m = 0 holds the binades below w: a geometric code over binades, then the mantissa.
All functions take and return int64 arrays; sign is 0 or 1, `ordinal` is the pattern without its sign.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from codec.formats import NumberFormat

Ints = NDArray[np.int64]

FRACTION = 8  # positions on the real line are integers in units of w * 2**-FRACTION
BINADES = 15  # binades of cell 0 coded one by one; what lies deeper is coded uniformly over its ordinals
_MAX_LOG_BINADES = 40  # cells reach T * 2**40 at most; values beyond are escaped


def cell_limit(fmt: NumberFormat) -> int:
    """Cells have |n| below this; a value whose cell would not is escaped."""
    binades = min(_MAX_LOG_BINADES, (fmt.first_nonfinite >> fmt.mantissa) - 1)
    return (1 << fmt.mantissa) * (1 + binades)


def _threshold(grid: Ints, fmt: NumberFormat) -> Ints:
    """The ordinal of T = 2**(grid + mantissa), from which a cell is one value."""
    return (grid + fmt.mantissa - fmt.emin + 1) << fmt.mantissa


def floor_log2(m: Ints, fmt: NumberFormat) -> Ints:
    """floor(log2 m) for 1 <= m <= 2**mantissa (0 for m = 0), by table."""
    return _log_table(fmt)[m]


@lru_cache(maxsize=8)
def _log_table(fmt: NumberFormat) -> Ints:
    return np.array([max(m.bit_length() - 1, 0) for m in range((1 << fmt.mantissa) + 1)], dtype=np.int64)


def cell_of(pattern: Ints, grid: Ints, fmt: NumberFormat) -> tuple[Ints, NDArray[np.bool_]]:
    """(n, codable): the cell of each pattern; where not codable (NaN, infinity, far out) n is 0 and the value is escaped."""
    ordinal = pattern & ((1 << (fmt.bits - 1)) - 1)
    negative = pattern >> (fmt.bits - 1)
    top = _threshold(grid, fmt)
    exponent = (ordinal >> fmt.mantissa) + (fmt.emin - 1)  # of a normal value; a denormal is below w and needs none
    shift = np.clip(fmt.mantissa - (exponent - grid), 0, 62)
    significand = (ordinal & ((1 << fmt.mantissa) - 1)) | (1 << fmt.mantissa)
    linear = np.where(exponent >= grid, significand >> shift, 0)
    m = np.where(ordinal >= top, (1 << fmt.mantissa) + ordinal - top, linear)
    codable = (ordinal < fmt.first_nonfinite) & (m < cell_limit(fmt) - 1)
    m = np.where(codable, m, 0)
    return np.where(negative == 1, -1 - m, m), codable


def cell_at(position: Ints, fmt: NumberFormat) -> Ints:
    """The cell in which a position on the line lies, in units of w * 2**-FRACTION, below 2**52 in magnitude."""
    step = position >> FRACTION
    m = np.where(step < 0, -1 - step, step)
    _, bits = np.frexp(np.maximum(m, 1).astype(np.float64))  # exact below 2**53
    binade = np.maximum(bits.astype(np.int64) - 1 - fmt.mantissa, 0)
    n = (binade << fmt.mantissa) + (m >> binade)
    return np.where(step < 0, -1 - n, n)


def raw_bits(n: Ints, fmt: NumberFormat) -> Ints:
    """How many raw bits tell the values of cell n apart, for cells with m >= 1 (0 for m = 0, which has a code of its own)."""
    m = np.where(n < 0, -1 - n, n)
    inside = (m >= 1) & (m < (1 << fmt.mantissa))
    return np.where(inside, fmt.mantissa - floor_log2(np.where(inside, m, 1), fmt), 0)


def pattern_of(n: Ints, raw: Ints, grid: Ints, fmt: NumberFormat) -> Ints:
    """The pattern of cell n (m >= 1) and its raw bits: the inverse of `cell_of` and `raw_bits`."""
    m = np.where(n < 0, -1 - n, n)
    negative = (n < 0).astype(np.int64)
    log = floor_log2(np.minimum(m, 1 << fmt.mantissa), fmt)
    fraction = ((m << np.clip(fmt.mantissa - log, 0, 62)) & ((1 << fmt.mantissa) - 1)) | raw
    linear = ((grid + log - fmt.emin + 1) << fmt.mantissa) | fraction
    single = _threshold(grid, fmt) + m - (1 << fmt.mantissa)
    return (negative << (fmt.bits - 1)) | np.where(m >= (1 << fmt.mantissa), single, linear)


def binade_count(grid: Ints, fmt: NumberFormat) -> Ints:
    """How many binades of cell 0 are coded one by one: they must hold normal values."""
    return np.minimum(grid - fmt.emin, BINADES)


def zero_cell(ordinal: Ints, grid: Ints, fmt: NumberFormat) -> tuple[Ints, Ints]:
    """(binade b, offset) of ordinals below w: b counts down from w, b = BINADES stands for everything deeper.

    The offset is the mantissa for b < BINADES and the ordinal itself for the rest.
    """
    count = binade_count(grid, fmt)
    b = grid - ((ordinal >> fmt.mantissa) + fmt.emin)
    deep = (b >= count) | (ordinal < (1 << fmt.mantissa))
    return np.where(deep, BINADES, b), np.where(deep, ordinal, ordinal & ((1 << fmt.mantissa) - 1))


def zero_cell_sizes(binade: Ints, grid: Ints, fmt: NumberFormat) -> Ints:
    """How many offsets each binade of cell 0 has."""
    deep_size = (grid - binade_count(grid, fmt) - fmt.emin + 1) << fmt.mantissa
    return np.where(binade == BINADES, deep_size, 1 << fmt.mantissa)


def zero_cell_ordinal(binade: Ints, offset: Ints, grid: Ints, fmt: NumberFormat) -> Ints:
    """The inverse of `zero_cell`."""
    return np.where(binade == BINADES, offset, ((grid - binade - fmt.emin) << fmt.mantissa) | offset)


@lru_cache(maxsize=8)
def edge_table(fmt: NumberFormat) -> Ints:
    """Lower edge of cell n at index n + cell_limit, in units of w * 2**-FRACTION: the midpoint between neighbouring values.

    Floating-point spacing scales with the value, so one table serves every grid exponent.
    """
    limit, one = cell_limit(fmt), 1 << fmt.mantissa
    m = np.arange(1, limit + 1, dtype=np.int64)
    log_binade = np.where(m > one, (m - one) >> fmt.mantissa, 0)
    value = np.where(m > one, (one + ((m - one) & (one - 1))) << log_binade, m)
    below = value - 1  # the spacing just below: that of the binade that holds value - 1 grid step
    exponent = np.array([int(v).bit_length() - 1 for v in below], dtype=np.int64)
    # spacing = 2**(exponent - mantissa) grid steps; half of it in units of 2**-FRACTION, dropped where finer than a unit
    shift = exponent - fmt.mantissa - 1 + FRACTION
    half = np.where(shift >= 0, np.int64(1) << np.maximum(shift, 0), 0)
    positive = (value << FRACTION) - half
    return np.concatenate([-positive[::-1], np.zeros(1, np.int64), positive])
