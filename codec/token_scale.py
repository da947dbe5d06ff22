"""A scale for every token: how far off guesses are changes from token to token, and what is decoded already says by how much.

Channels are coded in blocks of BLOCK. A block's *level* is the logarithm of its mean squared innovation in units of its sigmas, in
steps of 1/16 octave. The variance of the next block is taken 2**(x / 16) times as large as the joint model says, x being an integer
combination of the levels of the layer before, of all blocks of this layer so far, and of the last one. Integers throughout: sums of
squares of innovations rounded to 1/16 sigma, logarithms and powers by table.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from codec.cells import Ints
from codec.geometry import Floats
from codec.kernels import compiled, inlined

BLOCK = 32
TERMS = 4  # a constant, the layer before, this layer so far, its last block
UNIT = 256  # weights are in units of 1 / UNIT
FINE = 16  # innovations are rounded to 1 / FINE sigma
CLIP = 8 * FINE
_OCTAVE = 16  # levels an octave
_MOST = 96  # levels are clipped to +- this: six octaves of variance
# 2**(k / 32) and 2**(k / 16 - 1); data, so that no library's power function is on the way to the coder
_POWERS = np.array([
    1.0, 1.0218971486541166, 1.0442737824274138, 1.0671404006768237, 1.0905077326652577, 1.1143867425958924,
    1.1387886347566916, 1.1637248587775775, 1.189207115002721, 1.215247359980469, 1.241857812073484, 1.2690509571917332,
    1.2968395546510096, 1.3252366431597413, 1.3542555469368927, 1.383909881963832, 1.4142135623730951, 1.4451808069770467,
    1.4768261459394993, 1.5091644275934228, 1.5422108254079407, 1.5759808451078865, 1.6104903319492543, 1.645755478153965,
    1.681792830507429, 1.718619298122478, 1.7562521603732995, 1.7947090750031072, 1.8340080864093424, 1.8741676341103,
    1.9152065613971474, 1.9571441241754002,
])  # fmt: skip
_LEAST = 2.0**-200  # of a block whose innovations are all 0: the smallest weight there is
_EDGES = np.ascontiguousarray(_POWERS[::2] * 0.5)
_LEADING = 6  # bits of a mantissa: fewer than two edges have the same
_FIRST = np.searchsorted(_EDGES, 0.5 + np.arange(1 << _LEADING) / (2 << _LEADING), side="right") - 1.0
# edges and one that no mantissa reaches; by leading bits, the last edge that is below
_SEARCH = np.concatenate([_EDGES, [2.0], _FIRST])


def levels(squares: Ints, count: int) -> Ints:
    """The level of sums of `count` squared innovations (in units of 1 / FINE**2), any shape."""
    return np.clip(_log2(squares + 1) - int(_log2(np.array([count * FINE * FINE]))[0]), -_MOST, _MOST)


def _log2(n: Ints) -> Ints:
    """floor(16 log2 n) for 1 <= n < 2**52. No edge has so few bits that an integer could fall on it, but for powers of two."""
    mantissa, exponent = np.frexp(n.astype(np.float64))
    return exponent.astype(np.int64) * _OCTAVE + np.searchsorted(_EDGES, mantissa, side="right") - 1 - _OCTAVE


def innovations(off: Floats, sigma: Floats) -> Ints:
    """Squares of innovations, rounded and clipped: what levels are made of. Shapes broadcast."""
    z = np.rint(np.clip(off / sigma * float(FINE), -CLIP, CLIP)).astype(np.int64)
    return z * z


def factor(weights: Ints, before: Ints, so_far: Ints, last: Ints) -> Floats:
    """What sigmas are multiplied by: weights int64 [..., TERMS]; the three levels int64 of one shape."""
    x = weights[..., 0] + weights[..., 1] * before + weights[..., 2] * so_far + weights[..., 3] * last
    x = np.clip(x >> 8, -_MOST, _MOST)
    factors: Floats = np.ldexp(_POWERS[x & 31], x >> 5)
    return factors


class TokenScale:
    """The scales of one layer and chunk, block by block: `of(b)` after `add` of all blocks before b."""

    def __init__(self, weights: Ints, tokens: int, before: Ints | None) -> None:
        """weights: int64 [blocks, TERMS]; before: the level of the layer before, int64 [T], or None."""
        self._weights = weights
        self._before = np.zeros(tokens, np.int64) if before is None else before
        self._total, self._last, self._count = np.zeros(tokens, np.int64), np.zeros(tokens, np.int64), 0

    def of(self, b: int) -> Floats:
        """The factor on the sigmas of block b: [T]."""
        so_far = levels(self._total, self._count) if self._count else np.zeros_like(self._total)
        return factor(self._weights[b], self._before, so_far, self._last)

    def add(self, energy: Ints, count: int) -> None:
        """Take in a block of `count` channels: its sums of squared innovations [T], at most 2**14 * 32 each."""
        self._total = self._total + energy
        self._count += count
        self._last = levels(energy, count)

    @property
    def level(self) -> Ints:
        """Of the whole layer, for the next one: [T]."""
        return levels(self._total, self._count)


@inlined
def _level(energy: int, count: int, edges: Floats) -> Any:
    """`levels` of one sum."""
    return min(max(_sixteenths(energy + 1, edges) - _sixteenths(count * FINE * FINE, edges), -_MOST), _MOST)


@inlined
def _sixteenths(n: int, edges: Floats) -> Any:
    """`_log2` of one integer. The leading bits of a mantissa leave at most one edge to compare it with."""
    bits = np.float64(n).view(np.int64)
    mantissa = np.int64((bits & ((np.int64(1) << 52) - 1)) | (np.int64(1022) << 52)).view(np.float64)
    below = np.int64(edges[np.uint64(_OCTAVE + 1 + ((bits >> (52 - _LEADING)) & ((1 << _LEADING) - 1)))])
    below += edges[np.uint64(below + 1)] <= mantissa
    return ((bits >> 52) - 1022) * _OCTAVE + below - _OCTAVE


@compiled
def _factors(
    weights: Ints, before: Ints, total: Ints, last: Ints, count: int, edges: Floats, powers: Floats, out: Floats
) -> None:
    for t in range(out.shape[0]):
        so_far = _level(total[t], count, edges) if count else np.int64(0)
        x = weights[0] + weights[1] * before[t] + weights[2] * so_far + weights[3] * last[t]
        x = min(max(x >> 8, -_MOST), _MOST)
        out[t] = powers[x & 31] * np.int64(((x >> 5) + 1023) << 52).view(np.float64)


@compiled
def _absorb(energy: Ints, count: int, total: Ints, last: Ints, edges: Floats) -> None:
    for t in range(total.shape[0]):
        total[t] += energy[t]
        last[t] = _level(energy[t], count, edges)


class CompiledTokenScale(TokenScale):
    """The same numbers from compiled loops."""

    def of(self, b: int) -> Floats:
        """See TokenScale."""
        out = np.empty(len(self._total))
        _factors(self._weights[b], self._before, self._total, self._last, self._count, _SEARCH, _POWERS, out)
        return out

    def add(self, energy: Ints, count: int) -> None:
        """See TokenScale."""
        _absorb(energy, count, self._total, self._last, _SEARCH)
        self._count += count


def block_sizes(channels: int) -> Ints:
    """Channels of each block: [blocks]."""
    starts = np.arange(0, channels, BLOCK, dtype=np.int64)
    return np.minimum(BLOCK, channels - starts)


def fit(energies: Sequence[NDArray[np.int64]], counts: Ints) -> NDArray[np.int16]:
    """Weights [layers, blocks, TERMS] from sums of squares of every sample, [layers, blocks, T] each; counts: channels a block.

    Runs once, at calibration. Levels are taken relative to their mean over the samples: the sigmas are already right on average,
    for samples that were left out.
    """
    squares = np.concatenate(list(energies), axis=2)
    layers, blocks, _ = squares.shape
    out = np.zeros((layers, blocks, TERMS), np.int16)
    mean = squares.mean(2) / (counts * FINE**2) + 1e-9  # exact: at calibration only
    for layer in range(layers):
        total, count = np.zeros(squares.shape[2], np.int64), 0
        for b in range(blocks):
            out[layer, b] = _fit_block(squares, counts, mean, layer, b, total, count)
            total, count = total + squares[layer, b], count + int(counts[b])
    return out


def _fit_block(  # exact: at calibration only
    squares: Ints, counts: Ints, mean: Floats, layer: int, b: int, total: Ints, count: int
) -> NDArray[np.int16]:
    tokens = squares.shape[2]
    known, shift = np.zeros((3, tokens)), np.zeros(3)
    if layer:
        known[0] = levels(squares[layer - 1].sum(0), int(counts.sum()))
        shift[0] = (mean[layer - 1] * counts).sum() / counts.sum()
    if count:
        known[1], known[2] = levels(total, count), levels(squares[layer, b - 1], int(counts[b - 1]))
        shift[1], shift[2] = (mean[layer, :b] * counts[:b]).sum() / count, mean[layer, b - 1]
    used = np.array([layer > 0, count > 0, b > 1])
    if not used.any():
        return np.zeros(TERMS, np.int16)
    x = known[used] - _OCTAVE * np.log2(shift[used])[:, None]
    energy = squares[layer, b] / (counts[b] * FINE**2) / mean[layer, b]
    y = _OCTAVE * np.log2(energy + 1e-2)
    centred = x - x.mean(1, keepdims=True)
    slope = np.linalg.solve(centred @ centred.T + np.eye(len(x)) * tokens, centred @ (y - y.mean()))
    guess = slope @ x
    best = np.mean(energy / np.exp2(guess / _OCTAVE))  # of all constants, for a Gaussian code
    constant = _OCTAVE * np.log2(max(best, _LEAST))
    weights = np.zeros(TERMS)
    weights[0] = constant
    weights[1:][used] = slope
    return np.clip(np.rint(weights * UNIT), -32768, 32767).astype(np.int16)
