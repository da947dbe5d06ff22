"""Scalars from symbols of the rANS coder, compiled: the inverse of codec.scalar_put, in the same stages."""

from __future__ import annotations

from typing import Any

import numpy as np

from codec.cells import BINADES, Ints
from codec.kernels import apart, compiled, inlined
from codec.rans import LOW, PRECISION, States, Words, taken
from codec.residual import WINDOW
from codec.scalar_kernels import (
    ESCAPE,
    ESCAPE_START,
    GUESS_BITS,
    INVERSE,
    UNITS,
    ZERO,
    Fine,
    Floats,
    Numbers,
    cell_at,
    deep_size,
    found_cell,
    raw_bits,
    slots_of,
)

_SLOTS, _LOW, _WORD = np.uint64((1 << PRECISION) - 1), np.uint64(LOW), np.uint64(32)
_INDEX, _INVERSE = np.uint64(PRECISION - GUESS_BITS), np.uint64(INVERSE)


@inlined
def _without(x: np.uint64, start: int, freq: int, word: np.uint32) -> Any:
    """(a state without a symbol that was found in it, and with the next word if it needs one; whether it did)."""
    y = taken(x, start, freq)
    need = y < _LOW
    return ((y << _WORD) | np.uint64(word) if need else y), np.int64(need)


@compiled
def _take(start: int, freq: int, lane: int, states: States, words: Words, k: int) -> Any:
    """Take a symbol that was found out of a lane's state. Returns the place of the next word."""
    states[lane], need = _without(states[lane], start, freq, words[min(k, words.shape[0] - 1)])
    return k + need


@compiled
def _read_bits(bits: int, lane: int, states: States, words: Words, k: int) -> Any:
    """(a value all of whose 2**bits are equally likely, place of the next word)."""
    value, size = np.int64(states[lane] & _SLOTS) >> (PRECISION - bits), 1 << (PRECISION - bits)
    return value, _take(value * size, size, lane, states, words, k)


@inlined
def _magnitude(n: int) -> Any:
    return n ^ (n >> 63)


@inlined
def _pattern(n: int, bits: int, fraction: int, grid: int, t: Numbers) -> Any:
    """cells.pattern_of: cell n with m >= 1, and its raw bits."""
    exponent = grid + t.mantissa - bits - t.emin + 1  # of the cell; of cells that are one value, bits are 0
    number = (exponent << t.mantissa) + (_magnitude(n) << bits) - (np.int64(1) << t.mantissa) + fraction
    return number | ((n >> 63) & (np.int64(1) << (t.bits - 1)))


# ---------------------------------------------------------------- escapes and cell 0
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
    begin: int, count: int, start: Ints, grid: Ints, cells: Ints, t: Numbers, fine: Fine, states: States, words: Words, k: int, out: Ints
) -> Any:  # fmt: skip
    """Stages 2 and 3 of one scalar a lane, some of which are escapes or in cell 0."""
    for lane in range(count):
        i = np.uint64(begin + lane)
        n = cells[i]
        if n == start[i] + WINDOW:
            out[i], k = _read_bits(t.bits, lane, states, words, k)
        elif _magnitude(n) == 0:
            out[i], k = _read_binade(lane, grid[i], t, fine, states, words, k)
        else:
            bits = raw_bits(_magnitude(n), t)
            value, k = _read_bits(bits, lane, states, words, k)
            out[i] = _pattern(n, bits, value, grid[i], t)
    for lane in range(count):
        i = np.uint64(begin + lane)
        n = cells[i]
        if _magnitude(n) == 0 and n != start[i] + WINDOW:
            ordinal, k = _read_offset(out[i], lane, grid[i], t, states, words, k)
            out[i] = ordinal | (np.int64(1) << (t.bits - 1) if n < 0 else np.int64(0))
    return k


# ---------------------------------------------------------------- stage 1
@apart
def _guess(
    begin: int, count: int, at: Floats, rate: Floats, near: Floats, start: Ints, t: Numbers, steps: Floats, found: Ints, cells: Ints
) -> Any:  # fmt: skip
    """Of each lane a cell near the one in which its slot lies, by the table's guess of it in `steps`: most of the time the right one.

    Any cell of the window would do. Returns whether one of them is cell 0.
    """
    top, odd = np.float64(np.int64(1) << t.mantissa), np.int64(0)
    half = np.int64(1) << (51 - t.mantissa)
    for lane in range(count):
        i = np.uint64(begin + lane)
        position = at[i] + steps[lane] * near[i]
        y = abs(position) * (1.0 / UNITS)
        nearest = np.int64(np.float64(y).view(np.int64) + half).view(
            np.float64
        )  # a value has half a spacing on either side
        n = cell_at(np.floor(nearest) if nearest < top else nearest, top, t)
        n = -1 - n if position < 0.0 else n
        n = min(max(n, start[i]), start[i] + WINDOW - 1)
        cells[i], m = n, _magnitude(n)
        found[i] = found_cell(m, n < 0, n - start[i], at[i], rate[i], t)
        odd += m == 0
    return odd != 0


@compiled
def _search(slot: int, n: int, at: float, rate: float, start: int, t: Numbers, fine: Fine) -> Any:
    """(the cell in which a slot lies, what found_cell says of it), from cell n on; start + WINDOW for an escape."""
    if slot >= ESCAPE_START:
        return start + WINDOW, np.int64(ESCAPE)
    while True:
        cell = found_cell(_magnitude(n), n < 0, n - start, at, rate, t)
        low, high = slots_of(cell, fine)
        if low <= slot < high:
            return n, cell
        n += 1 if slot >= high else -1


# Inlined, as all is that has arrays and runs often: compiled code counts references to the arrays of a call.
@inlined
def _read_cells(
    begin: int, count: int, at: Floats, rate: Floats, near: Floats, start: Ints, t: Numbers, fine: Fine, steps: Floats, found: Ints,
    cells: Ints, states: States, words: Words, k: int,
) -> Any:  # fmt: skip
    """Stage 1 of one scalar a lane: cells, start + WINDOW for an escape.

    Returns the next word's place, and whether any scalar escaped or is in cell 0.
    """
    last = words.shape[0] - 1
    for lane in range(count):
        steps[lane] = np.float64(fine[_INVERSE + ((states[lane] & _SLOTS) >> _INDEX)])
    odd = _guess(begin, count, at, rate, near, start, t, steps, found, cells)
    for lane in range(count):
        i, x = np.uint64(begin + lane), states[lane]
        slot = np.int64(x & _SLOTS)
        low, high = slots_of(found[i], fine)
        if slot < low or slot >= high:
            n, cell = _search(slot, cells[i], at[i], rate[i], start[i], t, fine)
            cells[i] = n
            low, high = slots_of(cell, fine)
            if cell == ESCAPE:
                high = np.int64(1 << PRECISION)
            odd |= (cell == ESCAPE) | (_magnitude(n) == 0)
        states[lane], need = _without(x, low, high - low, words[np.uint64(min(k, last))])
        k += need
    return k, odd


# ---------------------------------------------------------------- stage 2
@apart
def _read_even(begin: int, count: int, grid: Ints, cells: Ints, t: Numbers, states: States, out: Ints) -> Any:
    """Stage 2 where there are neither escapes nor scalars in cell 0. Returns whether any state needs a word."""
    short = np.int64(0)
    for lane in range(count):
        i, x = np.uint64(begin + lane), np.int64(states[lane])
        bits = raw_bits(_magnitude(cells[i]), t)
        free = PRECISION - bits
        slot = x & ((np.int64(1) << PRECISION) - 1)
        y = ((x >> PRECISION) << free) + (slot & ((np.int64(1) << free) - 1))
        states[lane] = np.uint64(y)
        out[i] = _pattern(cells[i], bits, slot >> free, grid[i], t)
        short += y < LOW
    return short != 0


@inlined
def read_row(
    at: Floats, rate: Floats, near: Floats, start: Ints, grid: Ints, found: Ints, cells: Ints, t: Numbers, fine: Fine, steps: Floats,
    states: States, words: Words, words_at: Ints, out: Ints,
) -> None:  # fmt: skip
    """The patterns of a placed row's scalars, as many as `out` has, from a stream at its place; past its end zeros are read.

    steps: scratch, one a lane.
    """
    lanes, k, last = states.shape[0], words_at[0], words.shape[0] - 1
    for begin in range(0, out.shape[0], lanes):
        count = min(lanes, out.shape[0] - begin)
        k, odd = _read_cells(begin, count, at, rate, near, start, t, fine, steps, found, cells, states, words, k)
        if odd:
            k = _read_odd(begin, count, start, grid, cells, t, fine, states, words, k, out)
        elif _read_even(begin, count, grid, cells, t, states, out):
            for lane in range(count):
                x = states[lane]
                if x < _LOW:
                    states[lane] = (x << _WORD) | np.uint64(words[np.uint64(min(k, last))])
                    k += 1
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
