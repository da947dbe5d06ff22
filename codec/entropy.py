"""The entropy stage: symbols to bits and back, with constriction's ANS coder underneath.

constriction is given integers only. Its `Categorical(perfect=False)` turns weights p into frequencies
floor(cumulative(p) * scale) + index with scale = (2**24 - symbols) / sum(p); rows that sum to 2**24 - symbols make the scale
exactly 1, so the frequencies are p + 1, whatever the machine. A tensor is coded in slices of SLICE scalars, each in stages:

    block of the window (or escape) | cell of the block | raw bits | binade and offset of cell 0 | whole pattern of escapes
    | of a format wider than what is modelled, the bits below

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
from codec.kernels import kept_blocks, patterns_from, raw_sizes
from codec.residual import BLOCK, BLOCKS, WINDOW, CellModel, Freqs, Placement, zero_cell_frequencies

SLICE = 1 << 15
# constriction bumps its leading version when its output changes (0.x counts as leading).
BACKEND = "constriction-ans24/" + ".".join(version("constriction").split(".")[:2])

_Ans = constriction.stream.stack.AnsCoder
_CATEGORICAL = constriction.stream.model.Categorical(perfect=False)
_UNIFORM = constriction.stream.model.Uniform()


class Encoder:
    """Collects stages in decoding order and codes them when finished."""

    def __init__(self) -> None:
        self._stages: list[tuple[NDArray[np.int32], Freqs | Ints]] = []

    def stage(self, symbols: Ints, parameters: Freqs | Ints) -> None:
        """Symbols with a row of frequencies each, or values with a size each (2 or more), all equally likely."""
        if len(symbols):
            self._stages.append((symbols.astype(np.int32), parameters))

    def finish(self) -> bytes:
        """The bitstream."""
        coder = _Ans()
        for symbols, parameters in reversed(self._stages):
            if parameters.ndim == 2:
                coder.encode_reverse(symbols, _CATEGORICAL, parameters)
            else:
                coder.encode_reverse(symbols, _UNIFORM, parameters.astype(np.int32))
        return bytes(coder.get_compressed().astype("<u4").tobytes())


class Decoder:
    """Reads stages in the order in which the encoder was given them."""

    def __init__(self, stream: bytes | memoryview) -> None:
        if len(stream) % 4:
            raise CorruptBlob(
                f"A bitstream of {len(stream)} bytes is not a whole number of 32-bit words; the blob is corrupt."
            )
        try:
            self._coder = _Ans(np.frombuffer(stream, dtype="<u4").astype(np.uint32))
        except ValueError as error:
            raise CorruptBlob(f"A bitstream cannot be one of the coder's ({error}); the blob is corrupt.") from None

    def symbols(self, frequencies: Freqs) -> NDArray[np.int32]:
        """The symbols coded with these rows."""
        if not len(frequencies):
            return np.zeros(0, np.int32)
        found: NDArray[np.int32] = self._coder.decode(_CATEGORICAL, frequencies)
        return found

    def values(self, sizes: NDArray[np.int32]) -> NDArray[np.int32]:
        """The values coded with these sizes."""
        if not len(sizes):
            return np.zeros(0, np.int32)
        found: NDArray[np.int32] = self._coder.decode(_UNIFORM, sizes)
        return found

    def categorical(self, frequencies: Freqs) -> Ints:
        """`symbols` as int64."""
        return self.symbols(frequencies).astype(np.int64)

    def uniform(self, sizes: Ints) -> Ints:
        """`values` as int64."""
        return self.values(sizes.astype(np.int32)).astype(np.int64)

    def finish(self) -> None:
        """Raise CorruptBlob unless every bit was used."""
        if not self._coder.is_empty():
            raise CorruptBlob("A bitstream holds more than its tensor needs; the blob is corrupt.")


def encode_tensor(patterns: Ints, where: Placement, model: CellModel, fmt: NumberFormat) -> tuple[bytes, int]:
    """Code flat patterns [scalars] at their placement. Returns (bitstream, number of escaped scalars)."""
    coder, escapes = Encoder(), 0
    for begin in range(0, len(patterns), SLICE):
        end = min(begin + SLICE, len(patterns))
        escapes += _encode_part(coder, patterns[begin:end], where.slice(begin, end), end - begin, model, fmt)
    return coder.finish(), escapes


def decode_tensor(stream: bytes, where: Placement, model: CellModel, fmt: NumberFormat) -> Ints:
    """Flat patterns [scalars] from a bitstream coded at the same placement. Raises CorruptBlob."""
    coder = Decoder(stream)
    found = decode_rest(coder, where, model, fmt)
    coder.finish()
    return found


def decode_rest(coder: Decoder, where: Placement, model: CellModel, fmt: NumberFormat) -> Ints:
    """The same from a decoder, without asking whether more follows."""
    parts = [np.zeros(0, np.int64)]
    for begin in range(0, len(where.mean), SLICE):
        parts.append(_decode_part(coder, where.slice(begin, begin + SLICE), model, fmt))
    return np.concatenate(parts)


def encode_groups(patterns: Ints, where: Placement, model: CellModel, fmt: NumberFormat) -> tuple[bytes, int]:
    """Code patterns [groups, scalars] so that a decoder can read group after group, using each before it places the next.

    Returns (bitstream, number of escaped scalars).
    """
    coder, rows = Encoder(), max(1, SLICE // patterns.shape[1])
    escapes = 0
    for begin in range(0, len(patterns), rows):
        part = patterns[begin : begin + rows].reshape(-1)
        escapes += _encode_part(coder, part, where.slice(begin, begin + rows).flat(), patterns.shape[1], model, fmt)
    return coder.finish(), escapes


def decode_groups(coder: Decoder, where: Placement, model: CellModel, fmt: NumberFormat) -> Ints:
    """The next group [scalars] of a bitstream by `encode_groups`."""
    return _decode_part(coder, where.flat(), model, fmt)


def _encode_part(
    coder: Encoder, patterns: Ints, where: Placement, group: int, model: CellModel, fmt: NumberFormat
) -> int:
    """Stage flat scalars, group after group of `group` scalars; each group goes through all stages before the next begins."""
    coded, rest = fmt.split(patterns)
    n, codable = cells.cell_of(coded, where.grid, fmt)
    symbol = n - where.start
    inside = codable & (symbol >= 0) & (symbol < WINDOW)
    kept = where.rows(inside)
    n, kept_symbol, ordinal = n[inside], symbol[inside], coded[inside] & ((1 << (fmt.bits - 1)) - 1)
    bits = cells.raw_bits(n, fmt)
    coarse, zero = bits > 0, (n == 0) | (n == -1)
    sizes = np.int64(1) << bits[coarse]
    grid = kept.grid[zero]
    binade, offset = cells.zero_cell(ordinal[zero], grid, fmt)
    escaped = coded[~inside]
    stages: list[tuple[Ints, Freqs | Ints, Ints]] = [  # symbols, parameters, and where each group ends among them
        (np.where(inside, symbol // BLOCK, BLOCKS), model.block_frequencies(where), _ends(np.ones_like(inside), group)),
        (kept_symbol % BLOCK, model.cell_frequencies(kept, kept_symbol // BLOCK), _ends(inside, group)),
        (ordinal[coarse] & (sizes - 1), sizes, _ends(_spread(inside, coarse), group)),
        (binade, zero_cell_frequencies(grid, fmt), _ends(_spread(inside, zero), group)),
        (offset, cells.zero_cell_sizes(binade, grid, fmt), _ends(_spread(inside, zero), group)),
        (escaped, np.full(len(escaped), 1 << fmt.bits), _ends(~inside, group)),
    ]
    if fmt.raw:
        stages.append((rest, np.full(len(rest), 1 << fmt.raw), _ends(np.ones_like(inside), group)))
    for g in range(len(patterns) // group):
        for symbols, parameters, ends in stages:
            part = slice(int(ends[g]), int(ends[g + 1]))
            coder.stage(symbols[part], parameters[part])
    return len(escaped)


def _ends(mask: NDArray[np.bool_], group: int) -> Ints:
    """How many of a mask's scalars come before each group's begin, and in all: [groups + 1]."""
    counts = np.count_nonzero(mask.reshape(-1, group), axis=1)
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])  # exact: integers


def _spread(outer: NDArray[np.bool_], inner: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """A mask over the scalars that another mask picked, as a mask over all."""
    out = np.zeros_like(outer)
    out[outer] = inner
    return out


def _decode_part(coder: Decoder, where: Placement, model: CellModel, fmt: NumberFormat) -> Ints:
    coded = (_decode_part_reference if model.reference else _decode_part_fast)(coder, where, model, fmt)
    if not fmt.raw:
        return coded
    return fmt.join(coded, coder.uniform(np.full(len(coded), 1 << fmt.raw)))


def _decode_part_fast(coder: Decoder, where: Placement, model: CellModel, fmt: NumberFormat) -> Ints:
    """`_decode_part_reference` in compiled loops; cell 0 and escapes, which are rare, in array code."""
    block = coder.symbols(model.block_frequencies(where))
    index, first, mean, reciprocal = kept_blocks(block, where.start, where.mean, where.reciprocal, BLOCK, BLOCKS)
    symbol = coder.symbols(model.kept_frequencies(first, mean, reciprocal))
    n, sizes, zeros = raw_sizes(first, symbol, fmt.mantissa)
    raw = coder.values(sizes)
    out = np.empty(len(where.mean), np.int64)
    patterns_from(n, raw, where.grid, index, np.array([fmt.mantissa, fmt.emin, fmt.bits]), out)
    if zeros:
        zero = (n == 0) | (n == -1)
        out[index[zero]] = _decode_zero_cell(coder, n[zero], where.grid[index[zero]], fmt)
    if len(index) < len(block):
        escaped = block == BLOCKS
        out[escaped] = coder.uniform(np.full(np.count_nonzero(escaped), 1 << fmt.bits))
    return out


def _decode_zero_cell(coder: Decoder, n: Ints, grid: Ints, fmt: NumberFormat) -> Ints:
    binade = coder.categorical(zero_cell_frequencies(grid, fmt))
    offset = coder.uniform(cells.zero_cell_sizes(binade, grid, fmt))
    patterns: Ints = cells.zero_cell_ordinal(binade, offset, grid, fmt) | ((n == -1).astype(np.int64) << (fmt.bits - 1))
    return patterns


def _decode_part_reference(coder: Decoder, where: Placement, model: CellModel, fmt: NumberFormat) -> Ints:
    block = coder.categorical(model.block_frequencies(where))
    inside = block < BLOCKS
    kept, block = where.rows(inside), block[inside]
    n = kept.start + block * BLOCK + coder.categorical(model.cell_frequencies(kept, block))
    bits = cells.raw_bits(n, fmt)
    coarse = bits > 0
    raw = np.zeros(len(n), np.int64)
    raw[coarse] = coder.uniform(np.int64(1) << bits[coarse])
    decoded = cells.pattern_of(n, raw, kept.grid, fmt)
    zero = (n == 0) | (n == -1)
    decoded[zero] = _decode_zero_cell(coder, n[zero], kept.grid[zero], fmt)
    out = np.empty(len(where.mean), np.int64)
    out[inside] = decoded
    escaped = int(len(inside) - np.count_nonzero(inside))
    out[~inside] = coder.uniform(np.full(escaped, 1 << fmt.bits))
    return out
