"""The rANS coder in torch operations on integers: the bytes of codec.rans, on any device, many streams at once.

A lane's states depend on its own symbols alone. The encoder therefore takes all lanes of all streams side by side, symbol after symbol
from the last one on, and puts the words in order when it is done. The decoder gives words out to lanes as it goes: which lane takes
which word is a running count of the lanes that need one. An interval of all slots changes no state and writes no word; it stands in for
lanes that have no symbol.

Shapes: B streams of L lanes each, T scalars of a row. All tensors are int64; states are below 2**63.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from codec.cells import BINADES
from codec.errors import CorruptBlob
from codec.rans import LOW, PRECISION, Symbols
from codec.rans import Decoder as Stream
from codec.residual import WINDOW
from codec.scalar_kernels import ESCAPE_FREQ, ESCAPE_START
from codec.scalars_torch import ALL, Laws, Placed, TensorSymbols, share, uniform

_WORD = 32
_WORD_MASK = (1 << _WORD) - 1


# ---------------------------------------------------------------- encoding
def encode(
    streams: Sequence[Sequence[Symbols | TensorSymbols]], lanes: int, device: torch.device | str | None = None
) -> list[tuple[bytes, list[int]]]:
    """Of each stream, given as its parts in decoding order, what `rans.Encoder.finish` gives.

    device: where to compute, by default where the first part that is of tensors is. Raises ValueError for symbols in other lanes.
    """
    if device is None:
        tensors = (part.start.device for parts in streams for part in parts if isinstance(part, TensorSymbols))
        device = next(tensors, torch.device("cpu"))
    flat = [part for parts in streams for part in parts]
    sizes = torch.tensor([sum(map(len, parts)) for parts in streams], dtype=torch.int64, device=device)
    start, freq, lane = (_joined([getattr(part, name) for part in flat], device) for name in ("start", "freq", "lane"))
    if len(lane) and int(lane.max()) >= lanes:
        raise ValueError(f"symbols in lane {int(lane.max())} of streams that have {lanes}")
    stream = torch.repeat_interleave(torch.arange(len(streams), device=device), sizes)
    states, words, written = _code(start, freq, stream * lanes + lane, len(streams) * lanes)
    heads = states.cpu().numpy().astype("<u8").reshape(len(streams), lanes)
    count = torch.cat([written.new_zeros(1, dtype=torch.int64), written.cumsum(0)])  # exact: counts
    edges = list(itertools.accumulate(map(len, flat), initial=0))
    ends = count[edges].tolist()  # words before each part, and all
    kept = words[written].cpu().numpy().astype("<u4")
    out, k = [], 0
    for head, parts in zip(heads, streams, strict=True):
        mine = ends[k : k + len(parts) + 1]
        lengths = [4 * (b - a) for a, b in itertools.pairwise(mine)]
        if lengths:
            lengths[0] += 8 * lanes
        out.append((head.tobytes() + kept[mine[0] : mine[-1]].tobytes(), lengths))
        k += len(parts)
    return out


def _joined(parts: Sequence[Any], device: torch.device | str) -> Tensor:
    """Arrays and tensors of integers [n] each, one after another."""
    nothing = torch.zeros(0, dtype=torch.int64, device=device)
    return torch.cat(
        [nothing, *(torch.as_tensor(np.int64(x) if isinstance(x, np.ndarray) else x, device=device) for x in parts)]
    )


def _code(start: Tensor, freq: Tensor, lane: Tensor, lanes: int) -> tuple[Tensor, Tensor, Tensor]:
    """(final states [lanes], a word [n] and whether it is written [n] of each symbol) of symbols [n] in lanes of any streams."""
    order = torch.argsort(lane, stable=True)
    count = torch.bincount(lane, minlength=lanes)
    first = count.cumsum(0) - count  # exact: counts
    lane = lane[order]
    turn = torch.arange(len(order), device=lane.device) - first[lane]  # of a symbol among those of its lane
    steps = int(count.max()) if len(order) else 0
    starts, freqs = torch.zeros(2, steps, lanes, dtype=torch.int64, device=lane.device)
    freqs += ALL
    starts[turn, lane], freqs[turn, lane] = start[order], freq[order]
    x = torch.full((lanes,), LOW, dtype=torch.int64, device=lane.device)
    words, written = torch.empty_like(starts), torch.empty_like(starts, dtype=torch.bool)
    for i in range(steps - 1, -1, -1):
        f = freqs[i]
        full = (x >> (63 - PRECISION)) >= f
        words[i], written[i] = x & _WORD_MASK, full
        x = torch.where(full, x >> _WORD, x)
        share = x // f
        x = (share << PRECISION) + (x - share * f) + starts[i]
    back = torch.empty_like(order)
    back[order] = torch.arange(len(order), device=lane.device)
    return x, words[turn, lane][back], written[turn, lane][back]


# ---------------------------------------------------------------- decoding
class Decoder:
    """Streams of as many lanes each at their places, and the tables to read rows of scalars from them, one row of each at a time."""

    def __init__(self, streams: Sequence[bytes], lanes: int, laws: Laws) -> None:
        """Of one stream at least, on the device of `laws`. Raises CorruptBlob for what cannot be a stream of so many lanes."""
        device = laws.device
        parts = [Stream(stream, lanes) for stream in streams]
        sizes = np.array([len(part.words) - 1 for part in parts], np.int64)  # without the zero at the end
        self._states = torch.from_numpy(np.stack([part.states.astype(np.int64) for part in parts])).to(device)
        # one zero word more: what is read past the end of any stream
        words = np.concatenate([*(part.words[:-1] for part in parts), np.zeros(1, np.uint32)]).astype(np.int64)
        self._words = torch.from_numpy(words).to(device)
        self._end = torch.from_numpy(np.cumsum(sizes)).to(device)  # exact: counts
        self._at = self._end - torch.from_numpy(sizes).to(device)
        self._laws = laws

    def row(self, where: Placed, counts: Tensor | None = None) -> Tensor:
        """Patterns [B, T] of each stream's next row, placed there [B, T].

        counts [B]: how many scalars the row has, where that is not T for all; what lies beyond has to be placed where a
        scalar could be, too, and comes back as any number. A stream that ends gives any patterns from there on: see `check`.
        """
        lanes, out = self._states.shape[1], torch.empty_like(where.at)
        for begin in range(0, out.shape[1], lanes):
            some = slice(begin, min(begin + lanes, out.shape[1]))
            there = None
            if counts is not None:
                there = torch.arange(some.start, some.stop, device=out.device) < counts[:, None]
            out[:, some] = self._group(Placed(*(x[:, some] for x in where)), there)
        return out

    def check(self) -> None:
        """Raise CorruptBlob where more words were asked for than a stream has."""
        self._refuse(self._at > self._end, "ends before its tensors do")

    def finish(self) -> None:
        """Raise CorruptBlob unless every bit of every stream was used."""
        self.check()
        rest = (self._at != self._end) | (self._states != LOW).any(1)
        self._refuse(rest, "holds more than its tensors need")

    def _refuse(self, bad: Tensor, what: str) -> None:
        numbers = bad.nonzero()[:, 0].tolist()
        if numbers:
            raise CorruptBlob(f"Bitstream {numbers[0] + 1} of {len(bad)} {what}; the blob is corrupt.")

    # ------------------------------------------------------------ one scalar a lane
    def _group(self, where: Placed, there: Tensor | None) -> Tensor:
        """Patterns [B, up to L] through all stages (codec.scalar_kernels)."""
        t, grid = self._laws.numbers, where.grid
        escape, n = self._cell(where, there)
        m = torch.where(n < 0, -1 - n, n)
        zero = ~escape & (m == 0)
        log = self._laws.logs[m.clamp(max=1 << t.mantissa)]
        bits = torch.where(escape, t.bits, t.mantissa - log)
        value, binade = self._value_or_binade(bits, zero, grid, there)
        ordinal = self._offset(binade, zero, grid, there)
        coded = torch.where(escape, value, self._pattern(n, m, log, value, grid))
        coded = torch.where(zero, ordinal | _sign(n, t.bits), coded)
        return self._joined(coded, there) if t.raw else coded

    def _cell(self, where: Placed, there: Tensor | None) -> tuple[Tensor, Tensor]:
        """Stage 1: (whether it is an escape, the cell if not)."""
        slot = self._slots(where.at.shape[1])
        n, step = where.start, WINDOW // 2
        while step:  # the last cell that begins at the slot or below it
            n = torch.where(self._laws.slots(n + step, where) <= slot, n + step, n)
            step //= 2
        low, high = self._laws.interval(n, where)
        escape = slot >= ESCAPE_START
        low, freq = torch.where(escape, ESCAPE_START, low), torch.where(escape, ESCAPE_FREQ, high - low)
        self._take(low, freq, there)
        return escape, n

    def _value_or_binade(self, bits: Tensor, zero: Tensor, grid: Tensor, there: Tensor | None) -> tuple[Tensor, Tensor]:
        """Stage 2: a value of so many bits where it is no scalar in cell 0, a binade where it is one."""
        slot = self._slots(bits.shape[1])
        value, low, freq = uniform(slot, bits)
        binade = (slot[..., None] >= self._laws.zero_sums(grid)[..., 1:]).sum(-1)  # exact: counts
        found, width = self._laws.zero_interval(grid, binade)
        self._take(torch.where(zero, found, low), torch.where(zero, width, freq), there)
        return value, binade

    def _offset(self, binade: Tensor, zero: Tensor, grid: Tensor, there: Tensor | None) -> Tensor:
        """Stage 3: the ordinal of scalars in cell 0."""
        t, slot = self._laws.numbers, self._slots(binade.shape[1])
        shallow, low, freq = uniform(slot, torch.full_like(slot, t.mantissa))
        size = self._laws.deep_size(grid)
        offset = torch.minimum(slot // (ALL // size), size - 1)
        found, width = share(offset, size)
        deep = binade == BINADES
        low, freq = torch.where(deep, found, low), torch.where(deep, width, freq)
        self._take(torch.where(zero, low, 0), torch.where(zero, freq, ALL), there)
        return torch.where(deep, offset, ((grid - binade - t.emin) << t.mantissa) | shallow)

    def _pattern(self, n: Tensor, m: Tensor, log: Tensor, value: Tensor, grid: Tensor) -> Tensor:
        """cells.pattern_of of cells with m >= 1."""
        t = self._laws.numbers
        top = 1 << t.mantissa
        single = ((grid + t.mantissa - t.emin + 1) << t.mantissa) + m - top
        linear = ((grid + log - t.emin + 1) << t.mantissa) | ((m << (t.mantissa - log)) & (top - 1)) | value
        return torch.where(m >= top, single, linear) | _sign(n, t.bits)

    def _joined(self, coded: Tensor, there: Tensor | None) -> Tensor:
        """The last stage of a format with raw bits, and NumberFormat.join."""
        t = self._laws.numbers
        slot = self._slots(coded.shape[1])
        raw, low, freq = uniform(slot, torch.full_like(slot, t.raw))
        self._take(low, freq, there)
        item = t.bits + t.raw - 1  # rounding up takes one bit more than the format has
        sign, high = coded >> (t.bits - 1), coded & ((1 << (t.bits - 1)) - 1)
        magnitude = ((high << t.raw) | raw) - (1 << (t.raw - 1))
        return (sign << (item - 1)) | (magnitude & ((1 << (item - 1)) - 1))

    # ------------------------------------------------------------ states
    def _slots(self, width: int) -> Tensor:
        return self._states[:, :width] & (ALL - 1)

    def _take(self, low: Tensor, freq: Tensor, there: Tensor | None) -> None:
        """Take the symbols that were found out of the first lanes' states; lanes that fall short take words, in order."""
        if there is not None:
            low, freq = torch.where(there, low, 0), torch.where(there, freq, ALL)
        x = self._states[:, : low.shape[1]]
        x = freq * (x >> PRECISION) + (x & (ALL - 1)) - low
        short = x < LOW
        taken = short.cumsum(1)  # exact: counts
        place = self._at[:, None] + taken - 1
        word = self._words[torch.where(place < self._end[:, None], place, len(self._words) - 1)]
        # a lane that is not short has its word masked out before the shift could overflow
        self._states[:, : low.shape[1]] = torch.where(short, (torch.where(short, x, 0) << _WORD) | word, x)
        self._at = self._at + taken[:, -1]


def _sign(n: Tensor, bits: int) -> Tensor:
    """The sign bit of cell n."""
    return (n < 0).to(torch.int64) << (bits - 1)
