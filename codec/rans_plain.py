"""The rANS coder in plain Python integers and array code: what the compiled loops of codec.rans and codec.scalar_kernels must equal."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from codec import cells
from codec.cells import Ints
from codec.errors import CorruptBlob
from codec.formats import BY_SHAPE, NumberFormat
from codec.geometry import Floats
from codec.rans import LOW, PRECISION, Symbols
from codec.residual import RECIPROCAL_BITS, STEP_BITS, TABLE_REACH, WINDOW, ChannelScales, place_values_reference
from codec.scalar_kernels import ESCAPE_FREQ, ESCAPE_START, FAR, ZERO, Tables

_SLOTS = 1 << PRECISION
Interval = tuple[int, int]  # start, freq


def encode(parts: Sequence[Symbols], lanes: int) -> tuple[bytes, list[int]]:
    """As `rans.Encoder.finish`."""
    states, words, sizes = [LOW] * lanes, list[int](), list[int]()
    for part in reversed(parts):
        before = len(words)
        for start, freq, lane in zip(*(x.tolist()[::-1] for x in (part.start, part.freq, part.lane)), strict=True):
            x = states[lane]
            if x >= freq << (63 - PRECISION):
                words.append(x & 0xFFFFFFFF)
                x >>= 32
            states[lane] = (x // freq << PRECISION) + x % freq + start
        sizes.insert(0, 4 * (len(words) - before))
    if sizes:
        sizes[0] += 8 * lanes
    return np.array(states, "<u8").tobytes() + np.array(words[::-1], "<u4").tobytes(), sizes


def put(patterns: Ints, mean: Floats, grid: Ints, reciprocal: Ints, tables: Tables, lanes: int) -> tuple[Symbols, int]:
    """As `scalars.put_gridded`."""
    fmt = _format(tables)
    out: list[tuple[int, int, int]] = []
    escapes = 0
    for row in range(len(patterns)):
        where = place_values_reference(mean[row], ChannelScales(grid[row], reciprocal[row]), fmt)
        coded, rest = fmt.split(patterns[row])
        n, codable = cells.cell_of(coded, grid[row], fmt)
        inside = codable & (n >= where.start) & (n < where.start + WINDOW)
        escapes += int(np.count_nonzero(~inside))
        for begin in range(0, len(coded), lanes):
            some = range(begin, min(begin + lanes, len(coded)))
            stages: list[list[tuple[Interval, int]]] = [[], [], [], []]
            for i in some:
                at, start = int(where.mean[i]), int(where.start[i])
                low, high = ESCAPE_START, _SLOTS
                if inside[i]:
                    low, high = (_below(int(n[i]) + k, start, at, int(reciprocal[row, i]), tables) for k in (0, 1))
                stages[0].append(((low, high - low), i))
                more = _within(int(coded[i]), int(n[i]), bool(inside[i]), int(grid[row, i]), fmt, tables)
                for stage, interval in enumerate(more):
                    stages[1 + stage].append((interval, i))
                if fmt.raw:
                    stages[3].append((_bits(int(rest[i]), fmt.raw), i))
            out += [(*interval, i - begin) for stage in stages for interval, i in stage]
    table = np.array(out, np.int64).reshape(-1, 3)
    return Symbols.of(*table.T), escapes


def _below(n: int, start: int, at: int, reciprocal: int, tables: Tables) -> int:
    if n == start:
        return 0
    if n == start + WINDOW:
        return ESCAPE_START
    distance = min(max(int(tables.edges[n + tables.numbers.limit]) - at, -FAR), FAR)
    z = min(max((distance * reciprocal) >> (cells.FRACTION + RECIPROCAL_BITS - STEP_BITS), -TABLE_REACH), TABLE_REACH)
    return int(tables.fine[z + TABLE_REACH]) + n - start


def _bits(value: int, bits: int) -> Interval:
    size = _SLOTS >> bits
    return value * size, size


def _uniform(value: int, size: int) -> Interval:
    """One of `size` values; the last has what is left."""
    freq = _SLOTS // size
    return value * freq, _SLOTS - value * freq if value == size - 1 else freq


def _sums(grid: int, fmt: NumberFormat, tables: Tables) -> list[int]:
    """Sums of frequencies of the binades of cell 0."""
    row = ZERO + int(cells.binade_count(np.array([grid]), fmt)[0]) * (cells.BINADES + 2)
    return [int(x) for x in tables.fine[row : row + cells.BINADES + 2]]


def _offsets(binade: int, grid: int, fmt: NumberFormat) -> int:
    return int(cells.zero_cell_sizes(np.array([binade]), np.array([grid]), fmt)[0])


def _within(coded: int, n: int, inside: bool, grid: int, fmt: NumberFormat, tables: Tables) -> list[Interval]:
    """The symbols of stages 2 and 3 of a scalar."""
    if not inside:
        return [_bits(coded, fmt.bits)]
    if n in (0, -1):
        ordinal = np.array([coded & ((1 << (fmt.bits - 1)) - 1)])
        binade, offset = (int(x[0]) for x in cells.zero_cell(ordinal, np.array([grid]), fmt))
        sums = _sums(grid, fmt, tables)
        return [(sums[binade], sums[binade + 1] - sums[binade]), _uniform(offset, _offsets(binade, grid, fmt))]
    bits = int(cells.raw_bits(np.array([n]), fmt)[0])
    return [_bits(coded & ((1 << bits) - 1), bits)] if bits else []


class Decoder:
    """As `rans.Decoder`, but it reads rows itself."""

    def __init__(self, stream: bytes | memoryview, lanes: int) -> None:
        if len(stream) % 4 or len(stream) < 8 * lanes:
            raise CorruptBlob(
                f"A bitstream of {len(stream)} bytes cannot be one of {lanes} states; the blob is corrupt."
            )
        self._states = [int(x) for x in np.frombuffer(stream, "<u8", lanes)]
        self._words = [int(x) for x in np.frombuffer(stream, "<u4", offset=8 * lanes)][::-1]
        if any(not LOW <= x < 1 << 63 for x in self._states):
            raise CorruptBlob("A bitstream's states are out of range; the blob is corrupt.")

    def row(self, mean: Floats, grid: Ints, reciprocal: Ints, tables: Tables) -> Ints:
        """Patterns [n] of the next row. Raises CorruptBlob."""
        fmt, lanes = _format(tables), len(self._states)
        where = place_values_reference(mean, ChannelScales(grid, reciprocal), fmt)
        out = np.zeros(len(mean), np.int64)
        for begin in range(0, len(mean), lanes):
            some = range(begin, min(begin + lanes, len(mean)))
            found = [
                self._cell(i - begin, int(where.start[i]), int(where.mean[i]), int(reciprocal[i]), tables) for i in some
            ]
            binades = [self._more(i, i - begin, n, grid, fmt, tables, out) for i, n in zip(some, found, strict=True)]
            for i, binade, n in zip(some, binades, found, strict=True):
                if binade is not None and n is not None:
                    offset = self._value(i - begin, _offsets(binade, int(grid[i]), fmt))
                    ordinal = cells.zero_cell_ordinal(np.array([binade]), np.array([offset]), grid[i : i + 1], fmt)
                    out[i] = int(ordinal[0]) | (int(n < 0) << (fmt.bits - 1))
            if fmt.raw:
                for i in some:
                    out[i] = fmt.join(out[i : i + 1], np.array([self._value(i - begin, 1 << fmt.raw)]))[0]
        return out

    def _cell(self, lane: int, start: int, at: int, reciprocal: int, tables: Tables) -> int | None:
        """Stage 1: the cell, or None for an escape."""
        slot = self._states[lane] % _SLOTS
        if slot >= ESCAPE_START:
            self._take(lane, (ESCAPE_START, ESCAPE_FREQ))
            return None
        n = start
        while _below(n + 1, start, at, reciprocal, tables) <= slot:
            n += 1
        low, high = (_below(n + k, start, at, reciprocal, tables) for k in (0, 1))
        self._take(lane, (low, high - low))
        return n

    def _more(
        self, i: int, lane: int, n: int | None, grid: Ints, fmt: NumberFormat, tables: Tables, out: Ints
    ) -> int | None:
        """Stage 2: the pattern to `out`, or the binade of a scalar in cell 0."""
        if n is None:
            out[i] = self._value(lane, 1 << fmt.bits)
        elif n in (0, -1):
            sums = _sums(int(grid[i]), fmt, tables)
            slot = self._states[lane] % _SLOTS
            binade = next(b for b in range(cells.BINADES + 1) if slot < sums[b + 1])
            self._take(lane, (sums[binade], sums[binade + 1] - sums[binade]))
            return binade
        else:
            bits = int(cells.raw_bits(np.array([n]), fmt)[0])
            raw = self._value(lane, 1 << bits) if bits else 0
            out[i] = cells.pattern_of(np.array([n]), np.array([raw]), grid[i : i + 1], fmt)[0]
        return None

    def _value(self, lane: int, size: int) -> int:
        """One of `size` equally likely values."""
        value = min(self._states[lane] % _SLOTS // (_SLOTS // size), size - 1)
        self._take(lane, _uniform(value, size))
        return value

    def _take(self, lane: int, interval: Interval) -> None:
        x, (start, freq) = self._states[lane], interval
        x = freq * (x >> PRECISION) + x % _SLOTS - start
        if x < LOW:
            if not self._words:
                raise CorruptBlob("A bitstream ends before its tensors do; the blob is corrupt.")
            x = x << 32 | self._words.pop()
        self._states[lane] = x

    def finish(self) -> None:
        """Raise CorruptBlob unless every bit was used."""
        if self._words or any(x != LOW for x in self._states):
            raise CorruptBlob("A bitstream holds more than its tensors need; the blob is corrupt.")


def _format(tables: Tables) -> NumberFormat:
    n = tables.numbers
    return BY_SHAPE[n.bits, n.mantissa, n.raw]
