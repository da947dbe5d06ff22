"""What the loops that code scalars share, compiled: tables, where scalars are expected, and the slots of a cell.

A *row* is scalars of one channel (or of a flat tensor) that lie beside each other; scalar i is coded in lane i
modulo the lanes. Lanes go through each stage together, so that a vector machine can, too:

    cell of the window, or escape | the low bits of a cell of many values, the binade of cell 0, or the whole pattern of an escape
    | the offset in cell 0 | of a format wider than what is modelled, the bits below

codec.scalar_put goes this way, codec.scalar_read comes back; codec.rans_plain says the same plainly.

What is vectorised is written with float64 in place of wide integers: positions, edges and their distances are integers below 2**53 there,
or so far apart that they are clipped. A vector machine looks tables up no faster than one by one, so that is left to loops of its own.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from codec.cells import BINADES, FRACTION, Ints
from codec.kernels import apart, inlined
from codec.rans import PRECISION
from codec.residual import MEAN_LIMIT, RECIPROCAL_BITS, STEP_BITS, TABLE_REACH, WINDOW

Floats = NDArray[np.float64]
Fine = NDArray[np.int32]
ESCAPE_FREQ = 256  # of 2**PRECISION: about 2**-16
ESCAPE_START = (1 << PRECISION) - ESCAPE_FREQ
GUESS_BITS = 12  # the decoder's first guess of a cell comes from so many bits of the slot
FAR = (
    1 << 40
)  # distances are clipped here where they are integers: beyond the table's reach for any reciprocal, and safe to multiply

_MEAN_LIMIT, _REACH = MEAN_LIMIT, float(TABLE_REACH)
ONE_BITS = 1023  # exponent of 1.0 in a float64
# of a distance, in units of w / 2**FRACTION, times a reciprocal: table steps
_STEPS = 2.0 ** (STEP_BITS - FRACTION - RECIPROCAL_BITS)
_NEAR = 2.0 ** (FRACTION - STEP_BITS)
UNITS = float(1 << FRACTION)  # positions a cell
_WHOLE = 1.5 * 2.0**52  # added to an integer below 2**51, it leaves the integer in the low bits
_WHOLE_BITS = int(np.float64(_WHOLE).view(np.int64))
_OCTAVE = 0x7FF << 52
# a found cell in one integer: the two indices of its edges into the table of the normal distribution, and its place in the window
_EDGE_BITS, _PLACE_SHIFT = 16, 32
_EDGE_MASK, _EDGE_UNIT = (1 << _EDGE_BITS) - 1, float(1 << _EDGE_BITS)
# of one without a cell, but for how many slots it has
ESCAPE = 2 * TABLE_REACH | 2 * TABLE_REACH << _EDGE_BITS | WINDOW << _PLACE_SHIFT


class Numbers(NamedTuple):
    """What the loops know of a format (residual.place_values, cells)."""

    mantissa: int
    emin: int
    bits: int
    raw: int
    limit: int
    first_nonfinite: int
    grid_limit: int
    max_finite: float


class Tables(NamedTuple):
    """Numbers of a format, and tables of it and of the profile's normal distribution.

    The loops take these one by one: compiled code counts references of arrays in tuples, whenever one is touched.
    """

    numbers: Numbers
    edges: Ints  # lower edges of cells, index n + limit
    # from 0 on the normal distribution in slots, index z + TABLE_REACH; from INVERSE on z of the middle of each of the 2**GUESS_BITS
    # parts of the slots, a first guess only; from LOGS on floor(log2 m) for m <= 2**mantissa; from ZERO on, for every number of
    # binades of cell 0 that are told apart, the BINADES + 2 sums of their frequencies
    fine: NDArray[np.int32]


INVERSE = 2 * TABLE_REACH + 1
LOGS = INVERSE + (1 << GUESS_BITS)
ZERO = LOGS + (1 << 10) + 1


class Row(NamedTuple):
    """Scratch of one row: where its scalars are expected. [T] each."""

    at: Floats  # positions of means, units of w / 2**FRACTION
    rate: Floats  # table steps in a unit of distance
    near: Floats  # its inverse, more or less
    start: Ints  # first cell of the window
    grid: Ints
    found: Ints  # the loops' notes of one scalar each
    more: Ints


def new_row(count: int) -> Row:
    """Room for rows of up to `count` scalars."""
    floats, ints = np.empty((3, count)), np.empty((4, count), np.int64)
    return Row(*floats, *ints)


# ---------------------------------------------------------------- numbers
@inlined
def power(exponent: int) -> Any:
    """2.0 ** exponent of a normal float64."""
    return np.int64((exponent + ONE_BITS) << 52).view(np.float64)


@inlined
def whole(x: float) -> Any:
    """A float64 that is an integer below 2**51, as int64. (Of what there are vector instructions for, everywhere.)"""
    return np.float64(x + _WHOLE).view(np.int64) - _WHOLE_BITS


@inlined
def real(n: int) -> Any:
    """The inverse of `whole`."""
    return np.int64(n + _WHOLE_BITS).view(np.float64) - _WHOLE


@inlined
def exponent_of(x: float) -> Any:
    """floor(log2 x) of a positive normal float64; -ONE_BITS of 0."""
    return (np.float64(x).view(np.int64) >> 52) - ONE_BITS


@inlined
def _octave(x: float) -> Any:
    """2.0 ** floor(log2 x) of a positive normal float64."""
    return np.int64(np.float64(x).view(np.int64) & _OCTAVE).view(np.float64)


# ---------------------------------------------------------------- rows
@apart
def scale_row(sigma: Floats, t: Numbers, grid: Ints, rate: Floats, near: Floats) -> None:
    """residual.scale_integers of a row."""
    for i in range(sigma.shape[0]):
        s = min(max(sigma[i], 2.0**-20), 2.0**60)
        g = min(max(exponent_of(s) - 2, t.emin), t.grid_limit)
        r = np.rint(power(g + RECIPROCAL_BITS) / s)
        grid[i], rate[i] = g, min(max(r, 1.0), float(1 << 20)) * _STEPS
        near[i] = s * power(-g) * _NEAR


@apart
def given_row(grids: Ints, reciprocal: Ints, grid: Ints, rate: Floats, near: Floats) -> None:
    """The same of a row whose integers are given."""
    for i in range(grids.shape[0]):
        grid[i], rate[i] = grids[i], real(reciprocal[i]) * _STEPS
        near[i] = 1.0 / rate[i]


@apart
def place_row(mean: Floats, t: Numbers, grid: Ints, at: Floats, start: Ints) -> None:
    """residual.place_values of a row whose grid is there."""
    top = np.float64(np.int64(1) << t.mantissa)
    for i in range(mean.shape[0]):
        value = min(max(mean[i], -t.max_finite), t.max_finite)
        at[i] = np.rint(min(max(value * power(FRACTION - grid[i]), -_MEAN_LIMIT), _MEAN_LIMIT))
        step = np.floor(at[i] * (1.0 / UNITS))
        n = cell_at(max(step, -1.0 - step), top, t)
        n = -1 - n if step < 0.0 else n
        start[i] = min(max(n - WINDOW // 2, -t.limit), t.limit - WINDOW)


@inlined
def cell_at(m: float, top: float, t: Numbers) -> Any:
    """The cell of whole steps m >= 0, a float64 below 2**51. top: 2**mantissa, from which on a cell is a number of so many bits."""
    number = (np.float64(m).view(np.int64) >> (52 - t.mantissa)) - ((ONE_BITS - 1 + t.mantissa) << t.mantissa)
    return whole(min(m, top)) if m < top else number


@inlined
def found_cell(m: int, negative: bool, place: int, at: float, rate: float, t: Numbers) -> Any:
    """Where to look up the slots of a cell [place] of the window, m being its magnitude: see `slots_of`.

    The table's first entry is 0 and its last one all slots but WINDOW and the escape's, so that the window's first cell has all
    that lies below it, and its last one all above.
    """
    top = np.int64(1) << t.mantissa
    unit = 1.0 / np.float64(top)
    number = np.int64(((m - top) << (52 - t.mantissa)) + ((ONE_BITS + t.mantissa) << 52)).view(np.float64)
    value = number if m >= top else real(m)
    # cells.edge_table of m and of m + 1: a cell's lower edge is half a spacing of the values below it, dropped where finer than a unit
    above, below = _octave(max(value, 0.5)) * unit, _octave(max(value - 1.0, 0.5)) * unit
    upper = UNITS * (value + max(above, 1.0)) - np.floor(UNITS / 2.0 * above)
    lower = UNITS * value - np.floor(UNITS / 2.0 * below) if m > 0 else 0.0
    a, b = (-upper, -lower) if negative else (lower, upper)
    first = _index((a - at) * rate) if place > 0 else 0.0
    last = _index((b - at) * rate) if place < WINDOW - 1 else 2.0 * _REACH
    return whole(first + last * _EDGE_UNIT) | (place << _PLACE_SHIFT)


@inlined
def slots_of(cell: int, fine: Fine) -> Any:
    """(first slot, first slot after it) of what `found_cell` says of a cell."""
    place = cell >> _PLACE_SHIFT
    low, high = (
        np.int64(fine[np.uint64(cell & _EDGE_MASK)]),
        np.int64(fine[np.uint64((cell >> _EDGE_BITS) & _EDGE_MASK)]),
    )
    return low + place, high + place + 1


@inlined
def _index(steps: float) -> Any:
    """Index into the table of the normal distribution, as a float64."""
    return min(max(np.floor(steps), -_REACH), _REACH) + _REACH


@inlined
def raw_bits(m: int, t: Numbers) -> Any:
    """cells.raw_bits of a cell of magnitude m >= 1."""
    return max(t.mantissa - exponent_of(real(m)), 0)


@inlined
def deep_size(grid: int, t: Numbers) -> Any:
    """How many ordinals of cell 0 are coded as one binade."""
    return (grid - min(grid - t.emin, BINADES) - t.emin + 1) << t.mantissa
