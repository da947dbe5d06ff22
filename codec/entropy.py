"""The entropy stage: symbols to bits and back, with constriction's ANS coder underneath.

constriction is given integers only. Its `Categorical(perfect=False)` turns weights p into frequencies
floor(cumulative(p) * scale) + index with scale = (2**24 - symbols) / sum(p); rows that sum to 2**24 - symbols make the scale
exactly 1, so the frequencies are p + 1, whatever the machine. A tensor is coded in slices of SLICE scalars, each in stages:

    block of the window (or escape) | cell of the block | raw bits | binade and offset of cell 0 | whole pattern of escapes

The bitstream is the coder's 32-bit words, little-endian. ANS is a stack: the encoder pushes everything in reverse.
"""

from __future__ import annotations

from importlib.metadata import version

import constriction
import numpy as np
from numpy.typing import NDArray

from codec import cells
from codec.cells import Ints
from codec.errors import CorruptBlob
from codec.formats import NumberFormat
from codec.residual import BLOCK, BLOCKS, WINDOW, CellModel, Freqs, Placement, zero_cell_frequencies

SLICE = 1 << 15
# constriction bumps its leading version when its output changes (0.x counts as leading).
BACKEND = "constriction-ans24/" + ".".join(version("constriction").split(".")[:2])

_Ans = constriction.stream.stack.AnsCoder
_Categorical = constriction.stream.model.Categorical
_Uniform = constriction.stream.model.Uniform


class Encoder:
    """Collects stages in decoding order and codes them when finished."""

    def __init__(self) -> None:
        self._stages: list[tuple[NDArray[np.int32], Freqs | NDArray[np.int32]]] = []

    def categorical(self, symbols: Ints, frequencies: Freqs) -> None:
        """Symbols with a row of frequencies each."""
        if len(symbols):
            self._stages.append((symbols.astype(np.int32), frequencies))

    def uniform(self, values: Ints, sizes: Ints) -> None:
        """Values below their sizes (2 or more), all equally likely."""
        if len(values):
            self._stages.append((values.astype(np.int32), sizes.astype(np.int32)))

    def finish(self) -> bytes:
        """The bitstream."""
        coder = _Ans()
        for symbols, parameters in reversed(self._stages):
            model = _Categorical(perfect=False) if parameters.ndim == 2 else _Uniform()
            coder.encode_reverse(symbols, model, parameters)
        return bytes(coder.get_compressed().astype("<u4").tobytes())


class Decoder:
    """Reads stages in the order in which the encoder was given them."""

    def __init__(self, stream: bytes) -> None:
        if len(stream) % 4:
            raise CorruptBlob(
                f"A bitstream of {len(stream)} bytes is not a whole number of 32-bit words; the blob is corrupt."
            )
        try:
            self._coder = _Ans(np.frombuffer(stream, dtype="<u4").astype(np.uint32))
        except ValueError as error:
            raise CorruptBlob(f"A bitstream cannot be one of the coder's ({error}); the blob is corrupt.") from None

    def categorical(self, frequencies: Freqs) -> Ints:
        """The symbols coded with these rows."""
        if not len(frequencies):
            return np.zeros(0, np.int64)
        symbols: Ints = self._coder.decode(_Categorical(perfect=False), frequencies).astype(np.int64)
        return symbols

    def uniform(self, sizes: Ints) -> Ints:
        """The values coded with these sizes."""
        if not len(sizes):
            return np.zeros(0, np.int64)
        values: Ints = self._coder.decode(_Uniform(), sizes.astype(np.int32)).astype(np.int64)
        return values

    def finish(self) -> None:
        """Raise CorruptBlob unless every bit was used."""
        if not self._coder.is_empty():
            raise CorruptBlob("A bitstream holds more than its tensor needs; the blob is corrupt.")


def encode_tensor(patterns: Ints, where: Placement, model: CellModel, fmt: NumberFormat) -> tuple[bytes, int]:
    """Code flat patterns [scalars] at their placement. Returns (bitstream, number of escaped scalars)."""
    coder, escapes = Encoder(), 0
    for begin in range(0, len(patterns), SLICE):
        end = begin + SLICE
        escapes += _encode_slice(coder, patterns[begin:end], where.slice(begin, end), model, fmt)
    return coder.finish(), escapes


def decode_tensor(stream: bytes, where: Placement, model: CellModel, fmt: NumberFormat) -> Ints:
    """Flat patterns [scalars] from a bitstream coded at the same placement. Raises CorruptBlob."""
    coder, parts = Decoder(stream), [np.zeros(0, np.int64)]
    for begin in range(0, len(where.mean), SLICE):
        parts.append(_decode_slice(coder, where.slice(begin, begin + SLICE), model, fmt))
    coder.finish()
    return np.concatenate(parts)


def _encode_slice(coder: Encoder, patterns: Ints, where: Placement, model: CellModel, fmt: NumberFormat) -> int:
    n, codable = cells.cell_of(patterns, where.grid, fmt)
    symbol = n - where.start
    inside = codable & (symbol >= 0) & (symbol < WINDOW)
    block = np.where(inside, symbol // BLOCK, BLOCKS)
    coder.categorical(block, model.block_frequencies(where))
    kept = _pick(where, inside)
    n, symbol, ordinal = n[inside], symbol[inside], patterns[inside] & ((1 << (fmt.bits - 1)) - 1)
    coder.categorical(symbol % BLOCK, model.cell_frequencies(kept, symbol // BLOCK))
    bits = cells.raw_bits(n, fmt)
    coarse = bits > 0
    sizes = np.int64(1) << bits[coarse]
    coder.uniform(ordinal[coarse] & (sizes - 1), sizes)
    zero = (n == 0) | (n == -1)
    grid = kept.grid[zero]
    binade, offset = cells.zero_cell(ordinal[zero], grid, fmt)
    coder.categorical(binade, zero_cell_frequencies(grid, fmt))
    coder.uniform(offset, cells.zero_cell_sizes(binade, grid, fmt))
    escaped = patterns[~inside]
    coder.uniform(escaped, np.full(len(escaped), 1 << fmt.bits))
    return len(escaped)


def _decode_slice(coder: Decoder, where: Placement, model: CellModel, fmt: NumberFormat) -> Ints:
    block = coder.categorical(model.block_frequencies(where))
    inside = block < BLOCKS
    kept, block = _pick(where, inside), block[inside]
    n = kept.start + block * BLOCK + coder.categorical(model.cell_frequencies(kept, block))
    bits = cells.raw_bits(n, fmt)
    coarse = bits > 0
    raw = np.zeros(len(n), np.int64)
    raw[coarse] = coder.uniform(np.int64(1) << bits[coarse])
    decoded = cells.pattern_of(n, raw, kept.grid, fmt)
    zero = (n == 0) | (n == -1)
    grid = kept.grid[zero]
    binade = coder.categorical(zero_cell_frequencies(grid, fmt))
    offset = coder.uniform(cells.zero_cell_sizes(binade, grid, fmt))
    decoded[zero] = cells.zero_cell_ordinal(binade, offset, grid, fmt) | (
        (n[zero] == -1).astype(np.int64) << (fmt.bits - 1)
    )
    out = np.empty(len(where.mean), np.int64)
    out[inside] = decoded
    escaped = int(len(inside) - np.count_nonzero(inside))
    out[~inside] = coder.uniform(np.full(escaped, 1 << fmt.bits))
    return out


def _pick(where: Placement, mask: NDArray[np.bool_]) -> Placement:
    return Placement(where.mean[mask], where.start[mask], where.grid[mask], where.reciprocal[mask])
