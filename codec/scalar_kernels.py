"""Scalars from symbols of the rANS coder, compiled (the way there: codec.scalar_put); codec.rans_plain says the same plainly.

A *row* is scalars of one channel (or of a flat tensor) that lie beside each other; scalar i is coded in lane i
modulo the lanes. Lanes go through each stage together, so that a vector machine can, too:

    cell of the window, or escape | the low bits of a cell of many values, the binade of cell 0, or the whole pattern of an escape
    | the offset in cell 0 | of a format wider than what is modelled, the bits below
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from codec.cells import BINADES, FRACTION, Ints
from codec.kernels import compiled, inlined
from codec.rans import LOW, PRECISION, States, Words, taken
from codec.residual import MEAN_LIMIT, RECIPROCAL_BITS, STEP_BITS, TABLE_REACH, WINDOW

Floats = NDArray[np.float64]
Fine = NDArray[np.int32]
ESCAPE_FREQ = 256  # of 2**PRECISION: about 2**-16
ESCAPE_START = (1 << PRECISION) - ESCAPE_FREQ
GUESS_BITS = 12  # the decoder's first guess of a cell comes from so many bits of the slot
FAR = 1 << 20  # distances are clipped here: far beyond the table's reach, and safe to multiply

_SHIFT = FRACTION + RECIPROCAL_BITS - STEP_BITS
_SLOTS, _LOW, _WORD = np.uint64((1 << PRECISION) - 1), np.uint64(LOW), np.uint64(32)
_MEAN_LIMIT = MEAN_LIMIT
_ONE_BITS = 1023  # exponent of 1.0 in a float64
# z of a guess, in table steps, times this over R is a distance in units of w / 2**FRACTION
_GUESS_SCALE = float(1 << (FRACTION + RECIPROCAL_BITS - STEP_BITS))
_INDEX = PRECISION - GUESS_BITS


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
    """Scratch of one row: where its scalars are expected."""

    place: Ints  # [7, T]: position, start of the window, grid, reciprocal; the rest for what the loops note
    near: Floats  # [T]: distance of one table step, in units of w / 2**FRACTION


def new_row(count: int) -> Row:
    """Room for rows of up to `count` scalars."""
    return Row(np.empty((7, count), np.int64), np.empty(count))


# rows of a Row's place
AT, START, GRID, RECIPROCAL, CELL, _FROM, _TO = range(7)


@inlined
def power(exponent: int) -> Any:
    """2.0 ** exponent of a normal float64."""
    return np.int64((exponent + _ONE_BITS) << 52).view(np.float64)


@inlined
def _floor_log2(x: float) -> Any:
    """Of a positive normal float64."""
    return (np.float64(x).view(np.int64) >> 52) - _ONE_BITS


@compiled
def scale_row(sigma: Floats, t: Numbers, place: Ints) -> None:
    """residual.scale_integers of a row."""
    for i in range(sigma.shape[0]):
        s = min(max(sigma[i], 2.0**-20), 2.0**60)
        g = min(max(_floor_log2(s) - 2, t.emin), t.grid_limit)
        r = np.rint(power(g + RECIPROCAL_BITS) / s)
        place[GRID, i], place[RECIPROCAL, i] = g, np.int64(min(max(r, 1.0), float(1 << 20)))


@compiled
def place_row(mean: Floats, t: Numbers, place: Ints, near: Floats) -> None:
    """residual.place_values of a row whose grid and reciprocal are there."""
    for i in range(mean.shape[0]):
        value = min(max(mean[i], -t.max_finite), t.max_finite)
        at = np.int64(np.rint(min(max(value * power(FRACTION - place[GRID, i]), -_MEAN_LIMIT), _MEAN_LIMIT)))
        step = at >> FRACTION
        m = -1 - step if step < 0 else step
        binade = max(_floor_log2(np.float64(1 if m == 0 else m)) - t.mantissa, 0)
        n = (binade << t.mantissa) + (m >> binade)
        n = -1 - n if step < 0 else n
        place[AT, i], place[START, i] = at, min(max(n - WINDOW // 2, -t.limit), t.limit - WINDOW)
        near[i] = _GUESS_SCALE / np.float64(place[RECIPROCAL, i])


@inlined
def below(n: int, start: int, at: int, reciprocal: int, t: Numbers, edges: Ints, fine: Fine) -> Any:
    """Slots below cell n of the window, which reaches from start to start + WINDOW."""
    if n <= start:
        return np.int64(0)
    if n >= start + WINDOW:
        return np.int64(ESCAPE_START)
    distance = min(max(edges[n + t.limit] - at, -FAR), FAR)
    z = min(max((distance * reciprocal) >> _SHIFT, -TABLE_REACH), TABLE_REACH)
    return np.int64(fine[z + TABLE_REACH]) + (n - start)


@inlined
def _guess(slot: int, at: int, near: float, t: Numbers, fine: Fine) -> Any:
    """A cell near the one in which a slot lies. Any answer will do; this one is right most of the time."""
    z = fine[INVERSE + (slot >> _INDEX)]
    position = np.float64(at) + np.float64(z) * near
    y = abs(position) * (1.0 / (1 << FRACTION))
    top = np.int64(1) << t.mantissa
    if y < top:
        m = np.int64(y)
    else:  # the nearest value
        bits = (np.float64(y).view(np.int64) + (np.int64(1) << (51 - t.mantissa))) >> (52 - t.mantissa)
        m = bits - ((_ONE_BITS + t.mantissa - 1) << t.mantissa)
    return -1 - m if position < 0.0 else m


@inlined
def _without(x: np.uint64, start: int, freq: int, word: np.uint32) -> Any:
    """(a state without a symbol that was found in it, and with the next word if it needs one; whether it did)."""
    y = taken(x, start, freq)
    need = y < _LOW
    return ((y << _WORD) | np.uint64(word) if need else y), np.int64(need)


@inlined
def _equal(x: np.uint64, bits: int) -> Any:
    """Which of 2**bits equally likely values a state holds."""
    return np.int64(x & _SLOTS) >> (PRECISION - bits)


@compiled
def _read_bits(bits: int, lane: int, states: States, words: Words, k: int) -> Any:
    """(a value all of whose 2**bits are equally likely, place of the next word)."""
    value, size = _equal(states[lane], bits), 1 << (PRECISION - bits)
    return value, _take(value * size, size, lane, states, words, k)


@compiled
def _take(start: int, freq: int, lane: int, states: States, words: Words, k: int) -> Any:
    """Take a symbol that was found out of a lane's state. Returns the place of the next word."""
    states[lane], need = _without(states[lane], start, freq, words[min(k, words.shape[0] - 1)])
    return k + need


@inlined
def deep_size(grid: int, t: Numbers) -> Any:
    return (grid - min(grid - t.emin, BINADES) - t.emin + 1) << t.mantissa


@inlined
def _pattern(n: int, fraction: int, grid: int, t: Numbers, fine: Fine) -> Any:
    """cells.pattern_of: cell n with m >= 1, and the bits within it."""
    m = -1 - n if n < 0 else n
    sign = np.int64(1) << (t.bits - 1) if n < 0 else np.int64(0)
    top = np.int64(1) << t.mantissa
    log = np.int64(fine[LOGS + (top if m > top else m)])
    single = ((grid + t.mantissa - t.emin + 1) << t.mantissa) + m - top
    linear = ((grid + log - t.emin + 1) << t.mantissa) | ((m << (t.mantissa - log)) & (top - 1)) | fraction
    return sign | (single if m >= top else linear)


@inlined
def raw_bits(n: int, t: Numbers, fine: Fine) -> Any:
    """cells.raw_bits of a cell with m >= 1."""
    m = -1 - n if n < 0 else n
    top = np.int64(1) << t.mantissa
    return t.mantissa - np.int64(fine[LOGS + (top if m > top else m)])


@compiled
def _read_binade(lane: int, grid: int, t: Numbers, fine: Fine, states: States, words: Words, k: int) -> Any:
    sums = ZERO + min(grid - t.emin, BINADES) * (BINADES + 2)
    slot, b = np.int64(states[lane] & _SLOTS), 0
    while slot >= fine[sums + b + 1]:
        b += 1
    return b, _take(fine[sums + b], fine[sums + b + 1] - fine[sums + b], lane, states, words, k)


@compiled
def _read_offset(b: int, lane: int, grid: int, t: Numbers, states: States, words: Words, k: int) -> Any:
    """Stage 3: (ordinal of a scalar in cell 0, place of the next word)."""
    if b < BINADES:
        offset, k = _read_bits(t.mantissa, lane, states, words, k)
        return ((grid - b - t.emin) << t.mantissa) | offset, k
    size = deep_size(grid, t)
    freq = (1 << PRECISION) // size
    offset = min(np.int64(states[lane] & _SLOTS) // freq, size - 1)
    width = (1 << PRECISION) - offset * freq if offset == size - 1 else freq
    return offset, _take(offset * freq, width, lane, states, words, k)


@compiled
def _read_odd(
    begin: int, count: int, place: Ints, t: Numbers, fine: Fine, states: States, words: Words, k: int, out: Ints
) -> Any:
    """Stages 2 and 3 of one scalar a lane, some of which are escapes or in cell 0."""
    for lane in range(count):
        i, n = begin + lane, place[CELL, lane]
        if n == place[START, i] + WINDOW:
            out[i], k = _read_bits(t.bits, lane, states, words, k)
        elif n == 0 or n == -1:
            out[i], k = _read_binade(lane, place[GRID, i], t, fine, states, words, k)
        else:
            value, k = _read_bits(raw_bits(n, t, fine), lane, states, words, k)
            out[i] = _pattern(n, value, place[GRID, i], t, fine)
    for lane in range(count):
        i, n = begin + lane, place[CELL, lane]
        if (n == 0 or n == -1) and n != place[START, i] + WINDOW:
            ordinal, k = _read_offset(out[i], lane, place[GRID, i], t, states, words, k)
            out[i] = ordinal | (np.int64(1) << (t.bits - 1) if n < 0 else np.int64(0))
    return k


# Loops and arrays stay in one function here: where a loop's helper took arrays, compiled code would count references to them.
@compiled
def _read_cells(
    begin: int,
    count: int,
    place: Ints,
    near: Floats,
    t: Numbers,
    edges: Ints,
    fine: Fine,
    states: States,
    words: Words,
    k: int,
) -> Any:
    """Stage 1 of one scalar a lane: cells to place[CELL], start + WINDOW for an escape.

    Returns the next word's place, and whether any scalar escaped or is in cell 0.
    """
    # one loop for each step: a processor then has several lanes in flight
    odd, last = False, words.shape[0] - 1
    for lane in range(count):
        i = begin + lane
        slot, start = np.int64(states[lane] & _SLOTS), place[START, i]
        place[CELL, lane] = min(max(_guess(slot, place[AT, i], near[i], t, fine), start), start + WINDOW - 1)
    for lane in range(count):
        i, n = begin + lane, place[CELL, lane]
        start, at, reciprocal = place[START, i], place[AT, i], place[RECIPROCAL, i]
        place[_FROM, lane] = below(n, start, at, reciprocal, t, edges, fine)
        place[_TO, lane] = below(n + 1, start, at, reciprocal, t, edges, fine)
    for lane in range(count):
        i, x = begin + lane, states[lane]
        slot, start, n = np.int64(x & _SLOTS), place[START, i], place[CELL, lane]
        low, high = place[_FROM, lane], place[_TO, lane]
        if slot < low or slot >= high:
            if slot >= ESCAPE_START:
                n, low, high = start + WINDOW, np.int64(ESCAPE_START), np.int64(1 << PRECISION)
                odd = True
            else:
                at, reciprocal = place[AT, i], place[RECIPROCAL, i]
                while slot < low:
                    n -= 1
                    high = low
                    low = below(n, start, at, reciprocal, t, edges, fine)
                while slot >= high:
                    n += 1
                    low = high
                    high = below(n + 1, start, at, reciprocal, t, edges, fine)
            place[CELL, lane] = n
        odd |= n == 0 or n == -1
        states[lane], need = _without(x, low, high - low, words[min(k, last)])
        k += need
    return k, odd


@compiled
def read_row(
    place: Ints,
    near: Floats,
    t: Numbers,
    edges: Ints,
    fine: Fine,
    states: States,
    words: Words,
    words_at: Ints,
    out: Ints,
) -> None:
    """The patterns of a placed row's scalars, as many as `out` has, from a stream at its place; past its end zeros are read."""
    lanes, k, last = states.shape[0], words_at[0], words.shape[0] - 1
    for begin in range(0, out.shape[0], lanes):
        count = min(lanes, out.shape[0] - begin)
        k, odd = _read_cells(begin, count, place, near, t, edges, fine, states, words, k)
        if odd:
            k = _read_odd(begin, count, place, t, fine, states, words, k, out)
        else:
            for lane in range(count):
                bits = raw_bits(place[CELL, lane], t, fine)
                place[_FROM, lane] = 0
                if bits > 0:
                    x = states[lane]
                    value, size = _equal(x, bits), 1 << (PRECISION - bits)
                    states[lane], need = _without(x, value * size, size, words[min(k, last)])
                    k += need
                    place[_FROM, lane] = value
            for lane in range(count):
                i = begin + lane
                out[i] = _pattern(place[CELL, lane], place[_FROM, lane], place[GRID, i], t, fine)
        if t.raw:
            for lane in range(count):
                low, k = _read_bits(t.raw, lane, states, words, k)
                out[begin + lane] = _joined(out[begin + lane], low, t)
    words_at[0] = k


@inlined
def _joined(coded: int, low: int, t: Numbers) -> Any:
    """NumberFormat.join of a format with raw bits."""
    item = t.bits + t.raw - 1  # rounding up takes one bit more than the format has
    sign, high = coded >> (t.bits - 1), coded & ((np.int64(1) << (t.bits - 1)) - 1)
    magnitude = ((high << t.raw) | low) - (np.int64(1) << (t.raw - 1))
    return (sign << (item - 1)) | (magnitude & ((np.int64(1) << (item - 1)) - 1))
