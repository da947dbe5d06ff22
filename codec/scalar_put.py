"""Scalars to symbols of the rANS coder, compiled: the inverse of codec.scalar_kernels, in the same stages."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from codec.cells import BINADES, Ints
from codec.kernels import compiled, inlined
from codec.rans import PRECISION
from codec.residual import WINDOW
from codec.scalar_kernels import AT, CELL, GRID, RECIPROCAL, START, ZERO, Fine, Numbers, below, deep_size, raw_bits

Fresh = NDArray[np.uint32]
Lanes = NDArray[np.uint8]


class Sink(NamedTuple):
    """Where symbols are written to, with room for STAGES a scalar; counts: of symbols, of escapes."""

    start: NDArray[np.uint32]
    freq: NDArray[np.uint32]
    lane: NDArray[np.uint8]
    counts: Ints


STAGES = 4  # symbols a scalar takes at most


def new_sink(scalars: int) -> Sink:
    """An empty one for so many scalars."""
    room = scalars * STAGES + 1  # a symbol of no bits is written where the next one goes
    return Sink(np.empty(room, np.uint32), np.empty(room, np.uint32), np.empty(room, np.uint8), np.zeros(2, np.int64))


@inlined
def _put(start: int, freq: int, lane: int, starts: Fresh, freqs: Fresh, lanes: Lanes, k: int) -> Any:
    """Write a symbol; returns where the next one goes."""
    starts[k], freqs[k], lanes[k] = np.uint32(start), np.uint32(freq), np.uint8(lane)
    return k + 1


@inlined
def _put_bits(value: int, bits: int, lane: int, starts: Fresh, freqs: Fresh, lanes: Lanes, k: int) -> Any:
    """The same of a value with 2**bits that are equally likely; of no bits, nothing."""
    _put(value << (PRECISION - bits), 1 << (PRECISION - bits), lane, starts, freqs, lanes, k)
    return k + (bits > 0)


@inlined
def _split(pattern: int, t: Numbers) -> Any:
    """NumberFormat.split."""
    if t.raw == 0:
        return pattern, np.int64(0)
    item = t.bits + t.raw - 1
    moved = (pattern & ((np.int64(1) << (item - 1)) - 1)) + (np.int64(1) << (t.raw - 1))
    coded = ((pattern >> (item - 1)) << (t.bits - 1)) | (moved >> t.raw)
    return coded, moved & ((np.int64(1) << t.raw) - 1)


@inlined
def _cell_of(coded: int, grid: int, t: Numbers) -> Any:
    """cells.cell_of, but for values in no cell: those lie at `limit`, where no window reaches."""
    ordinal = coded & ((np.int64(1) << (t.bits - 1)) - 1)
    one = np.int64(1) << t.mantissa
    top = (grid + t.mantissa - t.emin + 1) << t.mantissa
    if ordinal >= t.first_nonfinite:
        return np.int64(t.limit)
    if ordinal >= top:
        m = one + ordinal - top
        if m >= t.limit - 1:
            return np.int64(t.limit)
    else:
        exponent = (ordinal >> t.mantissa) + (t.emin - 1)
        m = np.int64(0)
        if exponent >= grid:
            m = ((ordinal & (one - 1)) | one) >> (t.mantissa - (exponent - grid))
    return -1 - m if coded >> (t.bits - 1) else m


@inlined
def _binade(coded: int, grid: int, t: Numbers) -> Any:
    """cells.zero_cell's binade."""
    ordinal = coded & ((np.int64(1) << (t.bits - 1)) - 1)
    deepest = BINADES
    b = grid - ((ordinal >> t.mantissa) + t.emin)
    return deepest if b >= min(grid - t.emin, deepest) or ordinal < (np.int64(1) << t.mantissa) else b


@inlined
def _put_offset(coded: int, lane: int, grid: int, t: Numbers, starts: Fresh, freqs: Fresh, lanes: Lanes, k: int) -> Any:
    """Stage 3."""
    ordinal = coded & ((np.int64(1) << (t.bits - 1)) - 1)
    if _binade(coded, grid, t) < BINADES:
        return _put_bits(ordinal & ((np.int64(1) << t.mantissa) - 1), t.mantissa, lane, starts, freqs, lanes, k)
    size = deep_size(grid, t)
    freq = (1 << PRECISION) // size
    width = (1 << PRECISION) - ordinal * freq if ordinal == size - 1 else freq
    return _put(ordinal * freq, width, lane, starts, freqs, lanes, k)


@compiled
def _put_odd(
    patterns: Ints,
    begin: int,
    many: int,
    place: Ints,
    t: Numbers,
    fine: Fine,
    starts: Fresh,
    freqs: Fresh,
    lanes: Lanes,
    count: Ints,
) -> None:
    """Stages 2 and 3 of one scalar a lane, some of which are escapes or in cell 0."""
    cells, k = place[CELL], count[0]
    for lane in range(many):
        i, n = begin + lane, cells[lane]
        coded, grid = _split(patterns[i], t)[0], place[GRID, i]
        if n == place[START, i] + WINDOW:
            count[1] += 1
            k = _put_bits(coded, t.bits, lane, starts, freqs, lanes, k)
        elif n == 0 or n == -1:
            b = ZERO + min(grid - t.emin, BINADES) * (BINADES + 2) + _binade(coded, grid, t)
            k = _put(fine[b], fine[b + 1] - fine[b], lane, starts, freqs, lanes, k)
        else:
            bits = raw_bits(n, t, fine)
            k = _put_bits(coded & ((np.int64(1) << bits) - 1), bits, lane, starts, freqs, lanes, k)
    for lane in range(many):
        i, n = begin + lane, cells[lane]
        if (n == 0 or n == -1) and n != place[START, i] + WINDOW:
            k = _put_offset(_split(patterns[i], t)[0], lane, place[GRID, i], t, starts, freqs, lanes, k)
    count[0] = k


@compiled
def put_row(
    patterns: Ints,
    place: Ints,
    t: Numbers,
    edges: Ints,
    fine: Fine,
    width: int,
    starts: Fresh,
    freqs: Fresh,
    lanes: Lanes,
    count: Ints,
) -> None:
    """The symbols of a placed row's scalars, in `width` lanes."""
    cells = place[CELL]
    for begin in range(0, patterns.shape[0], width):
        many, odd, k = min(width, patterns.shape[0] - begin), False, count[0]
        for lane in range(many):
            i = begin + lane
            start, at, reciprocal = place[START, i], place[AT, i], place[RECIPROCAL, i]
            n = _cell_of(_split(patterns[i], t)[0], place[GRID, i], t)
            escaped = n < start or n >= start + WINDOW
            n = start + WINDOW if escaped else n
            low = below(n, start, at, reciprocal, t, edges, fine)
            high = np.int64(1 << PRECISION) if escaped else below(n + 1, start, at, reciprocal, t, edges, fine)
            _put(low, high - low, lane, starts, freqs, lanes, k + lane)
            odd |= escaped or n == 0 or n == -1
            cells[lane] = n
        count[0] = k = k + many
        if odd:
            _put_odd(patterns, begin, many, place, t, fine, starts, freqs, lanes, count)
        else:
            for lane in range(many):
                bits = raw_bits(cells[lane], t, fine)
                value = _split(patterns[begin + lane], t)[0] & ((np.int64(1) << bits) - 1)
                k = _put_bits(value, bits, lane, starts, freqs, lanes, k)
            count[0] = k
        if t.raw:
            k = count[0]
            for lane in range(many):
                k = _put_bits(_split(patterns[begin + lane], t)[1], t.raw, lane, starts, freqs, lanes, k)
            count[0] = k
