"""Laws and scalars as symbols in torch operations: codec.scalars for any device, all scalars of many rows at once.

Integers are int64. What is computed in float64 is elementwise, of operations that IEEE 754 rounds the same way everywhere, and of powers of
two that are made from their bits.

Shapes: n rows of T scalars each.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from codec.cells import BINADES, FRACTION
from codec.rans import PRECISION
from codec.residual import MEAN_LIMIT, RECIPROCAL_BITS, STEP_BITS, TABLE_REACH, WINDOW
from codec.scalar_kernels import ESCAPE_FREQ, ESCAPE_START, FAR, INVERSE, LOGS, ONE_BITS, ZERO, Tables

ALL = 1 << PRECISION
_SHIFT = FRACTION + RECIPROCAL_BITS - STEP_BITS


class Placed(NamedTuple):
    """Where scalars are expected, as residual.Placement has it: [n, T] each."""

    at: Tensor
    start: Tensor
    grid: Tensor
    reciprocal: Tensor


@dataclass(frozen=True)
class TensorSymbols:
    """As rans.Symbols: int64 [symbols] each, in the order in which they are decoded."""

    start: Tensor
    freq: Tensor
    lane: Tensor

    def __len__(self) -> int:
        return len(self.start)


class Laws:
    """A profile's tables on a device."""

    def __init__(self, tables: Tables, device: torch.device | str = "cpu") -> None:
        self.numbers = tables.numbers
        self.device = torch.device(device)
        self._edges = torch.from_numpy(tables.edges).to(device)
        fine = torch.from_numpy(tables.fine).to(device, torch.int64)
        self._below = fine[:INVERSE]
        self.logs = fine[LOGS : LOGS + (1 << tables.numbers.mantissa) + 1]
        self._zero = fine[ZERO:].reshape(BINADES + 1, BINADES + 2)

    def place(self, mean: Tensor, sigma: Tensor) -> Placed:
        """residual.scale_integers and place_values of float64 [n, T]."""
        t = self.numbers
        sigma = sigma.clamp(2.0**-20, 2.0**60)
        grid = (torch.frexp(sigma)[1].long() - 3).clamp(t.emin, t.grid_limit)
        reciprocal = (_power(grid + RECIPROCAL_BITS) / sigma).round().clamp(1, 1 << 20).long()
        mean = mean.clamp(-t.max_finite, t.max_finite)
        at = (mean * _power(FRACTION - grid)).clamp(-MEAN_LIMIT, MEAN_LIMIT).round().long()
        start = (self._cell_at(at) - WINDOW // 2).clamp(-t.limit, t.limit - WINDOW)
        return Placed(at, start, grid, reciprocal)

    def slots(self, n: Tensor, where: Placed) -> Tensor:
        """Slots below cell n, one between the window's first and last edge."""
        distance = (self._edges[n + self.numbers.limit] - where.at).clamp(-FAR, FAR)
        z = ((distance * where.reciprocal) >> _SHIFT).clamp(-TABLE_REACH, TABLE_REACH)
        return self._below[z + TABLE_REACH] + (n - where.start)

    def interval(self, n: Tensor, where: Placed) -> tuple[Tensor, Tensor]:
        """(first slot, first slot after it) of cells of the window: its first has all that lies below it, its last all above."""
        low = torch.where(n == where.start, 0, self.slots(n, where))
        return low, torch.where(n == where.start + (WINDOW - 1), ESCAPE_START, self.slots(n + 1, where))

    def zero_sums(self, grid: Tensor) -> Tensor:
        """Sums of frequencies of the binades of cell 0: [*grid.shape, BINADES + 2]."""
        return self._zero[self._binades(grid)]

    def zero_interval(self, grid: Tensor, binade: Tensor) -> tuple[Tensor, Tensor]:
        """(first slot, frequency) of binades of cell 0."""
        count = self._binades(grid)
        low = self._zero[count, binade]
        return low, self._zero[count, binade + 1] - low

    def deep_size(self, grid: Tensor) -> Tensor:
        """How many ordinals of cell 0 are coded as one binade."""
        t = self.numbers
        return (grid - self._binades(grid) - t.emin + 1) << t.mantissa

    def put(self, patterns: Tensor, where: Placed, lanes: int) -> tuple[TensorSymbols, Tensor]:
        """(symbols, escapes) of patterns [n, T], row after row: what scalars.put_gridded gives.

        Patterns are integers of any type of which the format's bits count: those of a torch.int16 view do as well.
        """
        coded, rest = self._split(patterns.long() & ((1 << self._item_bits) - 1))
        n, inside = self._cell_of(coded, where)
        stages = [self._cell(n, inside, where), *self._within(coded, n, inside, where.grid)]
        if self.numbers.raw:
            _, low, freq = uniform(rest << (PRECISION - self.numbers.raw), torch.full_like(rest, self.numbers.raw))
            stages.append((low, freq, torch.ones_like(inside)))
        return _in_order(stages, lanes), (~inside).sum()  # exact: a count

    def _binades(self, grid: Tensor) -> Tensor:
        return (grid - self.numbers.emin).clamp(max=BINADES)

    @property
    def _item_bits(self) -> int:
        t = self.numbers
        return t.bits + max(t.raw - 1, 0)  # rounding up takes one bit more than the format has

    def _split(self, patterns: Tensor) -> tuple[Tensor, Tensor]:
        """NumberFormat.split."""
        t = self.numbers
        if not t.raw:
            return patterns, torch.zeros_like(patterns)
        item = self._item_bits
        moved = (patterns & ((1 << (item - 1)) - 1)) + (1 << (t.raw - 1))
        return ((patterns >> (item - 1)) << (t.bits - 1)) | (moved >> t.raw), moved & ((1 << t.raw) - 1)

    def _cell_of(self, coded: Tensor, where: Placed) -> tuple[Tensor, Tensor]:
        """cells.cell_of, and whether the window has the cell."""
        t, grid = self.numbers, where.grid
        one = 1 << t.mantissa
        ordinal = coded & ((1 << (t.bits - 1)) - 1)
        top = (grid + t.mantissa - t.emin + 1) << t.mantissa
        exponent = (ordinal >> t.mantissa) + (t.emin - 1)
        shift = (t.mantissa - (exponent - grid)).clamp(0, 62)
        linear = torch.where(exponent >= grid, ((ordinal & (one - 1)) | one) >> shift, 0)
        m = torch.where(ordinal >= top, one + ordinal - top, linear)
        codable = (ordinal < t.first_nonfinite) & (m < t.limit - 1)
        n = torch.where(coded >> (t.bits - 1) == 1, -1 - m, m)
        inside = codable & (n >= where.start) & (n < where.start + WINDOW)
        return torch.where(inside, n, where.start), inside

    def _cell(self, n: Tensor, inside: Tensor, where: Placed) -> tuple[Tensor, Tensor, Tensor]:
        """Stage 1: (start, freq, whether there is a symbol)."""
        low, high = self.interval(n, where)
        start, freq = torch.where(inside, low, ESCAPE_START), torch.where(inside, high - low, ESCAPE_FREQ)
        return start, freq, torch.ones_like(inside)

    def _within(self, coded: Tensor, n: Tensor, inside: Tensor, grid: Tensor) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Stages 2 and 3."""
        t = self.numbers
        one = 1 << t.mantissa
        m = torch.where(n < 0, -1 - n, n)
        zero = inside & (m == 0)
        bits = torch.where(inside, t.mantissa - self.logs[m.clamp(max=one)], t.bits)
        _, start, freq = uniform((coded & ((1 << bits) - 1)) << (PRECISION - bits), bits)
        # cells.zero_cell: the binades of cell 0, then what lies deeper
        ordinal = torch.where(zero, coded & ((1 << (t.bits - 1)) - 1), 0)
        binade = grid - ((ordinal >> t.mantissa) + t.emin)
        deep = (binade >= self._binades(grid)) | (ordinal < one)
        low, width = self.zero_interval(grid, torch.where(deep, BINADES, binade.clamp(0, BINADES)))
        second = torch.where(zero, low, start), torch.where(zero, width, freq), zero | (bits > 0)
        offset = torch.where(deep, ordinal, ordinal & (one - 1))
        third = *share(offset, torch.where(deep, self.deep_size(grid), one)), zero
        return [second, third]

    def _cell_at(self, at: Tensor) -> Tensor:
        """cells.cell_at."""
        t = self.numbers
        step = at >> FRACTION
        m = torch.where(step < 0, -1 - step, step)
        bits = torch.frexp(m.clamp(min=1).double())[1].long()  # exact below 2**53
        binade = (bits - 1 - t.mantissa).clamp(min=0)
        n = (binade << t.mantissa) + (m >> binade)
        return torch.where(step < 0, -1 - n, n)


def uniform(slot: Tensor, bits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(value, start, freq) of one of 2**bits equally likely values; of no bits 0 and an interval that changes nothing."""
    shift = PRECISION - bits
    value = slot >> shift
    return value, value << shift, torch.ones_like(slot) << shift


def share(offset: Tensor, size: Tensor) -> tuple[Tensor, Tensor]:
    """(first slot, frequency) of one of `size` equally likely offsets; the last one has what is left over."""
    each = ALL // size
    low = offset * each
    return low, torch.where(offset == size - 1, ALL - low, each)


def _in_order(stages: list[tuple[Tensor, Tensor, Tensor]], lanes: int) -> TensorSymbols:
    """Of each group of a row's scalars, one a lane, all stages in turn."""
    start, freq, there = (torch.stack(x, 1) for x in zip(*stages, strict=True))  # [n, stages, T]
    rows, count, length = start.shape
    groups = -(-length // lanes)
    fill = groups * lanes - length

    def grouped(x: Tensor) -> Tensor:
        padded = torch.nn.functional.pad(x, (0, fill))
        return padded.reshape(rows, count, groups, lanes).permute(0, 2, 1, 3)

    kept = grouped(there)
    lane = torch.arange(lanes, device=start.device).expand(kept.shape)
    return TensorSymbols(grouped(start)[kept], grouped(freq)[kept], lane[kept])


def _power(exponent: Tensor) -> Tensor:
    """2.0 ** exponent of a normal float64."""
    return ((exponent + ONE_BITS) << 52).view(torch.float64)
