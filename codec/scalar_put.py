"""Scalars to symbols of the rANS coder, compiled: the inverse of codec.scalar_read, in the same stages."""

from __future__ import annotations

from typing import Any

import numpy as np

from codec.cells import BINADES, Ints
from codec.kernels import apart, compiled, inlined
from codec.rans import FREQ_SHIFT, LANE_SHIFT, PRECISION, Codes
from codec.residual import WINDOW
from codec.scalar_kernels import (
    ESCAPE,
    ESCAPE_FREQ,
    ZERO,
    Fine,
    Floats,
    Numbers,
    deep_size,
    found_cell,
    raw_bits,
    slots_of,
)

_CERTAIN = 1 << (PRECISION + FREQ_SHIFT)  # a symbol of no bits
_ODD = 0  # no symbol at all


STAGES = 4  # symbols a scalar takes at most


def room_for(scalars: int) -> int:
    """Symbols that there must be room for where so many scalars are written."""
    return scalars * STAGES + 1  # a symbol of no bits is written where the next one goes


@inlined
def _symbol(start: int, freq: int, lane: int) -> Any:
    return np.uint64(start | (lane << LANE_SHIFT) | (freq << FREQ_SHIFT))


@inlined
def _put_bits(value: int, bits: int, lane: int, codes: Codes, k: int) -> Any:
    """Write a value with 2**bits that are equally likely; of no bits, nothing. Returns where the next symbol goes."""
    codes[np.uint64(k)] = _symbol(value << (PRECISION - bits), np.int64(1) << (PRECISION - bits), lane)
    return k + (bits > 0)


@apart
def _split_row(patterns: Ints, t: Numbers, coded: Ints, low: Ints) -> None:
    """NumberFormat.split of a format with raw bits."""
    item = t.bits + t.raw - 1
    for i in range(patterns.shape[0]):
        moved = (patterns[i] & ((np.int64(1) << (item - 1)) - 1)) + (np.int64(1) << (t.raw - 1))
        coded[i] = ((patterns[i] >> (item - 1)) << (t.bits - 1)) | (moved >> t.raw)
        low[i] = moved & ((np.int64(1) << t.raw) - 1)


@inlined
def _magnitude(coded: int, grid: int, t: Numbers) -> Any:
    """Of cells.cell_of; where a value is in no cell, no less than limit - 1."""
    ordinal = coded & ((np.int64(1) << (t.bits - 1)) - 1)
    one = np.int64(1) << t.mantissa
    over = ordinal - ((grid + t.mantissa - t.emin + 1) << t.mantissa)
    shift: Any = t.mantissa + grid - (t.emin - 1) - (ordinal >> t.mantissa)
    linear = ((ordinal & (one - 1)) | one) >> min(max(shift, 0), 62)
    m = one + over if over >= 0 else linear
    return np.int64(t.limit) if ordinal >= t.first_nonfinite else m


@apart
def _find_row(
    coded: Ints, at: Floats, rate: Floats, start: Ints, grid: Ints, t: Numbers, found: Ints, more: Ints
) -> None:
    """Of each scalar the cell (found_cell) and the symbol of stage 2 without a lane; _ODD of one that escapes or is in cell 0."""
    for i in range(coded.shape[0]):
        m, sign = _magnitude(coded[i], grid[i], t), coded[i] >> (t.bits - 1)
        place = (m ^ -sign) - start[i]
        escaped = (m >= t.limit - 1) | (place < 0) | (place >= WINDOW)
        m = np.int64(1) if escaped else m
        cell = found_cell(m, sign != 0, place, at[i], rate[i], t)
        found[i] = np.int64(ESCAPE) if escaped else cell
        bits = min(raw_bits(m, t), t.mantissa)
        value, free = coded[i] & ((np.int64(1) << bits) - 1), PRECISION - bits
        symbol = (value << free) | (np.int64(1) << (free + FREQ_SHIFT))
        more[i] = np.int64(_ODD) if escaped | (m == 0) else symbol


@inlined
def _binade(coded: int, grid: int, t: Numbers) -> Any:
    """cells.zero_cell's binade."""
    ordinal = coded & ((np.int64(1) << (t.bits - 1)) - 1)
    deepest = BINADES
    b = grid - ((ordinal >> t.mantissa) + t.emin)
    return deepest if b >= min(grid - t.emin, deepest) or ordinal < (np.int64(1) << t.mantissa) else b


@inlined
def _put_offset(coded: int, lane: int, grid: int, t: Numbers, codes: Codes, k: int) -> Any:
    """Stage 3."""
    ordinal = coded & ((np.int64(1) << (t.bits - 1)) - 1)
    if _binade(coded, grid, t) < BINADES:
        return _put_bits(ordinal & ((np.int64(1) << t.mantissa) - 1), t.mantissa, lane, codes, k)
    size = deep_size(grid, t)
    freq = (1 << PRECISION) // size
    width = (1 << PRECISION) - ordinal * freq if ordinal == size - 1 else freq
    codes[np.uint64(k)] = _symbol(ordinal * freq, width, lane)
    return k + 1


@compiled
def _put_odd(
    coded: Ints, begin: int, many: int, grid: Ints, t: Numbers, fine: Fine, found: Ints, more: Ints, codes: Codes, count: Ints
) -> None:  # fmt: skip
    """Stages 2 and 3 of one scalar a lane, some of which are escapes or in cell 0; their symbols of stage 1 are the last ones."""
    k, first = count[0], count[0] - many
    for lane in range(many):
        i = np.uint64(begin + lane)
        if found[i] == ESCAPE:
            codes[first + lane] += np.uint64((ESCAPE_FREQ - 1) << FREQ_SHIFT)
            count[1] += 1
            k = _put_bits(coded[i], t.bits, lane, codes, k)
        elif more[i] == _ODD:
            b = ZERO + min(grid[i] - t.emin, BINADES) * (BINADES + 2) + _binade(coded[i], grid[i], t)
            codes[np.uint64(k)] = _symbol(np.int64(fine[b]), np.int64(fine[b + 1] - fine[b]), lane)
            k += 1
        else:
            codes[k] = np.uint64(more[i] | (lane << LANE_SHIFT))
            k += more[i] < _CERTAIN
    for lane in range(many):
        i = np.uint64(begin + lane)
        if found[i] != ESCAPE and more[i] == _ODD:
            k = _put_offset(coded[i], lane, grid[i], t, codes, k)
    count[0] = k


@inlined
def put_row(
    patterns: Ints,
    at: Floats,
    rate: Floats,
    start: Ints,
    grid: Ints,
    found: Ints,
    more: Ints,
    split: Ints,
    t: Numbers,
    fine: Fine,
    width: int,
    codes: Codes,
    count: Ints,
) -> None:
    """The symbols of a placed row's scalars, in `width` lanes.

    split: scratch [2, T] of formats with raw bits; codes: see room_for; count: of symbols so far, of escapes.
    """
    coded = patterns
    if t.raw:
        coded = split[0]
        _split_row(patterns, t, coded, split[1])
    _find_row(coded, at, rate, start, grid, t, found, more)
    for begin in range(0, patterns.shape[0], width):
        many, k = min(width, patterns.shape[0] - begin), count[0]
        for lane in range(many):
            low, high = slots_of(found[np.uint64(begin + lane)], fine)
            codes[np.uint64(k + lane)] = _symbol(low, high - low, lane)
        count[0] = k = k + many
        odd = False
        for lane in range(many):
            symbol = more[np.uint64(begin + lane)]
            codes[np.uint64(k)] = np.uint64(symbol | (lane << LANE_SHIFT))
            k += symbol < _CERTAIN
            odd |= symbol == _ODD
        if odd:
            _put_odd(coded, begin, many, grid, t, fine, found, more, codes, count)
        else:
            count[0] = k
        if t.raw:
            k = count[0]
            for lane in range(many):
                k = _put_bits(split[1, begin + lane], t.raw, lane, codes, k)
            count[0] = k
