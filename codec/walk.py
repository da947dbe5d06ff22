"""The walk over a layer's channels, compiled: what ClosedLoop._one_by_one does, bit for bit, from a stream or with a known truth.

Channels come in blocks of BLOCK. What the features of all blocks before add to a block's means is one integer matrix product; within
a block channels go one after another, each adding its features to the means of those after it. numba neither
reassociates nor contracts (codec.kernels).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from codec import exact
from codec.bins import LEAST_MASS, Bins
from codec.cells import Ints
from codec.formats import NumberFormat
from codec.geometry import Floats, Geometry
from codec.joint_model import BLOCK, FEATURE_MAX, LEAST, REACH, Ready
from codec.kernels import compiled, inlined
from codec.rans import States, Words
from codec.residual import STEP_BITS, TABLE_REACH
from codec.scalar_kernels import Fine, Numbers, new_row, place_row, scale_row
from codec.scalar_read import read_row
from codec.scalars import Source
from codec.token_scale import CLIP, FINE, TokenScale

_STEPS, _REACH_STEPS, _FEATURE_MAX = float(1 << STEP_BITS), float(TABLE_REACH), float(FEATURE_MAX)
_OUTLIER, _LEAST_SHARE, _LEAST_MASS, _MIDDLE = float(REACH), LEAST, LEAST_MASS, TABLE_REACH
_FINE, _CLIP = float(FINE), float(CLIP)
_INFINITY = math.inf


@inlined
def _index(edge: float, mean: float, sigma: float) -> Any:
    steps = (edge - mean) / sigma * _STEPS
    return np.int64(np.rint(min(max(steps, -_REACH_STEPS), _REACH_STEPS))) + _MIDDLE


@inlined
def _centre(low: float, high: float, mean: float, sigma: float, cumulative: Ints, density: Ints) -> Any:
    a, b = _index(low, mean, sigma), _index(high, mean, sigma)
    mass = cumulative[b] - cumulative[a]
    x = mean
    if mass >= _LEAST_MASS:
        x = mean + sigma * (np.float64(density[a] - density[b]) / np.float64(mass))
    return min(max(x, low), high)


@compiled
def _values(patterns: Ints, table: Floats, shift: int, out: Floats) -> None:
    """What patterns stand for: by table, or the upper bits of a float32."""
    if table.shape[0]:
        for i in range(patterns.shape[0]):
            out[i] = table[patterns[i]]
    else:
        for i in range(patterns.shape[0]):
            out[i] = np.float64(np.uint32(patterns[i] << shift).view(np.float32))


@compiled
def _observe(
    patterns: Ints, guess: Floats, step: float, mean: Floats, sigma: Floats, real: Floats, edges: Floats, bins: Ints, residual: Floats,
    forced: Floats,
) -> None:  # fmt: skip
    """ClosedLoop._observed of a row; real: what the patterns stand for. edges, bins: of a coarse cache, else empty."""
    coarse, most = edges.shape[0] > 0, step * _OUTLIER
    for i in range(patterns.shape[0]):
        known = real[i]
        if coarse:
            p = patterns[i]
            known = _centre(edges[0, p], edges[1, p], mean[i], sigma[i], bins[0], bins[1])
        off = known - guess[i]
        trusted = abs(real[i]) < _INFINITY and abs(off) <= most
        residual[i] = off if trusted else 0.0
        forced[i] = real[i] if trusted else guess[i]


@inlined
def _feature(residual: float, step: float) -> Any:
    return np.rint(min(max(residual / step, -_FEATURE_MAX), _FEATURE_MAX))


@inlined
def _square(off: float, sigma: float) -> Any:
    """token_scale.innovations."""
    z = np.int64(np.rint(min(max(off / sigma * _FINE, -_CLIP), _CLIP)))
    return z * z


@compiled
def _add(sums: Floats, coefficient: Floats, j: int, lo: int, feature: Floats) -> None:
    """Add channel j's features to the sums of the later channels of its block: integers, exact in any order."""
    for k in range(j + 1 - lo, sums.shape[0]):
        weight = coefficient[lo + k, j]
        if weight != 0.0:
            for t in range(feature.shape[0]):
                sums[k, t] += weight * feature[t]


@compiled
def _law_of_value(j: int, sums: Floats, base: Floats, unit: float, sigma: float, factor: Floats, work: Floats) -> None:
    """Of V channel j: work[0] mean of the residual, work[2] the model's sigma times the token's factor."""
    for t in range(sums.shape[0]):
        work[0, t] = sums[t] * unit + base[t]
        work[2, t] = sigma * factor[t]
        work[3, t] = sigma


@compiled
def _law_of_pair(
    sums: Floats, base: Floats, unit: Floats, pair: Floats, cos: Floats, sin: Floats, factor: Floats, work: Floats
) -> None:
    """joint_model.PairLaw of a pair's two rows: what `_law_of_value` says of the first; rows 4 to 7 what the second needs."""
    w, va, vb, cab, vi = pair[0], pair[1], pair[2], pair[3], pair[4]
    for t in range(sums.shape[1]):
        c, s = cos[t], sin[t]
        a = sums[0, t] * unit[0] + base[0, t]
        b = (sums[1, t] * unit[1] + base[1, t]) + w * a
        cc, ss, cs = c * c, s * s, c * s
        twice = (cab + cab) * cs
        v_first = max(va * cc + vb * ss - twice, _LEAST_SHARE * va)
        across = (va - vb) * cs + cab * (cc - ss)
        work[0, t] = a * c - b * s
        work[3, t] = math.sqrt(v_first)
        work[2, t] = work[3, t] * factor[t]
        work[4, t] = a * s + b * c
        work[5, t] = across / v_first
        work[6, t] = math.sqrt(va * vi / v_first)


@compiled
def _law_of_second(first: Floats, factor: Floats, work: Floats) -> None:
    """Of a pair's second channel, the residual of the first being known."""
    for t in range(first.shape[0]):
        work[0, t] = work[4, t] + work[5, t] * (first[t] - work[0, t])
        work[3, t] = work[6, t]
        work[2, t] = work[3, t] * factor[t]


@compiled
def _channel(
    row: int, j: int, guess: Floats, step: float, narrow: float, work: Floats, reading: bool, n: Numbers, fine: Fine,
    at: Floats, rate: Floats, near: Floats, start: Ints, grid: Ints, found: Ints, cells: Ints, steps: Floats, states: States, words: Words,
    words_at: Ints, table: Floats, shift: int, edges: Floats, bins: Ints,
    patterns: Ints, mean: Floats, sigma: Floats, residual: Floats, forced: Floats, squares: Ints,
) -> None:  # fmt: skip
    """ClosedLoop._take: read (or know) stored row `row`, channel j of the coding order, under the law in `work`."""
    for t in range(work.shape[1]):
        mean[row, t] = guess[row, t] + work[0, t]
        sigma[row, t] = work[2, t] * narrow
    if reading:
        scale_row(sigma[row], n, grid, rate, near)
        place_row(mean[row], n, grid, at, start)
        read_row(at, rate, near, start, grid, found, cells, n, fine, steps, states, words, words_at, patterns[row])
    _values(patterns[row], table, shift, work[7])
    _observe(patterns[row], guess[row], step, mean[row], work[2], work[7], edges, bins, residual[row], forced[row])
    for t in range(work.shape[1]):
        squares[j, t] = _square(residual[row, t] - work[0, t], work[3, t])


@compiled
def _block(
    lo: int, sums: Floats, factor: Floats, base: Floats, coefficient: Floats, unit: Floats, sigmas: Floats, step: Floats, step_k: Floats,
    pair: Floats, narrow: Floats, cos: Floats, sin: Floats, rows: Ints, guess: Floats, work: Floats, features: Floats, reading: bool,
    n: Numbers, fine: Fine, at: Floats, rate: Floats, near: Floats, start: Ints, grid: Ints, found: Ints, cells: Ints, steps: Floats,
    states: States, words: Words, words_at: Ints, table: Floats, shift: int, edges: Floats, bins: Ints, patterns: Ints, mean: Floats, sigma: Floats, residual: Floats, forced: Floats, squares: Ints,
) -> None:  # fmt: skip
    """Channels lo … of one block. Of `patterns` and the arrays from `mean` to `forced` rows are K's as stored, then V's."""
    half, tokens = features.shape[0] // 2, features.shape[1]
    j = lo
    while j < lo + sums.shape[0]:
        if j < half:
            row = half + j
            _law_of_value(j, sums[j - lo], base[j], unit[j], sigmas[j], factor, work)
            _channel(
                row, j, guess, step[j], narrow[j], work, reading, n, fine, at, rate, near, start, grid, found, cells,
                steps, states, words, words_at, table, shift, edges, bins, patterns, mean, sigma, residual, forced, squares,
            )  # fmt: skip
            for t in range(tokens):
                features[j, t] = _feature(residual[row, t], step[j])
            _add(sums, coefficient, j, lo, features[j])
            j += 1
            continue
        p = (j - half) // 2
        one, two = rows[0, p], rows[1, p]
        _law_of_pair(sums[j - lo : j - lo + 2], base[j : j + 2], unit[j : j + 2], pair[p], cos[p], sin[p], factor, work)
        for side in range(2):
            row = two if side else one
            if side:
                _law_of_second(residual[one], factor, work)
            _channel(
                row, j + side, guess, step_k[p], narrow[j + side], work, reading, n, fine, at, rate, near, start, grid, found,
                cells, steps, states, words, words_at, table, shift, edges, bins, patterns, mean, sigma, residual, forced, squares,
            )  # fmt: skip
        for t in range(tokens):
            x, y, c, s = residual[one, t], residual[two, t], cos[p, t], sin[p, t]
            features[j, t] = _feature(x * c + y * s, step[j])
            features[j + 1, t] = _feature(y * c - x * s, step[j + 1])
        _add(sums, coefficient, j, lo, features[j])
        _add(sums, coefficient, j + 1, lo, features[j + 1])
        j += 2


@dataclass
class Walked:
    """What a walk found. patterns int64 and mean, sigma, residual, forced float64 [2 * J * D, T]: K's rows as stored, then V's."""

    patterns: Ints
    mean: Floats
    sigma: Floats
    residual: Floats
    forced: Floats
    features: Floats  # [N, T]
    squares: Ints  # [N, T]


class Walker:
    """Walks over layers of one cache format. bins: of a coarse cache."""

    def __init__(self, fmt: NumberFormat, bins: Bins | None) -> None:
        self._table, self._shift = np.zeros(0), fmt.mantissa  # the shift is used where there is no table
        if fmt.name == "bf16":
            self._shift = 16
        elif fmt.item_bits == 32:
            self._shift = 0
        else:
            self._table = fmt.values(np.arange(1 << fmt.item_bits, dtype=np.int64))
        self._edges, self._bins = np.zeros((0, 1)), np.zeros((0, 1), np.int64)
        if bins is not None:
            self._edges, self._bins = np.stack([bins.low, bins.high]), np.stack([bins.cumulative, bins.density])

    def walk(
        self,
        ready: Ready,
        geometry: Geometry,
        base: Floats,
        scale: TokenScale | None,
        patterns: Ints | None,
        source: Source | None,
    ) -> Walked:
        """Over one layer: with known patterns [2 * J * D, T], or those that a source gives.

        base: [N, 1 or T], see Ready.base; scale: the tokens' own scales, or None. A broken source gives any patterns.
        """
        guess = np.concatenate([geometry.k, geometry.v])
        reading = patterns is None
        found = np.empty(guess.shape, np.int64) if patterns is None else np.ascontiguousarray(patterns)
        n, tokens = len(ready.step), geometry.tokens
        floats = [np.empty(guess.shape) for _ in range(4)]
        features, squares = np.zeros((n, tokens)), np.zeros((n, tokens), np.int64)
        out = Walked(found, floats[0], floats[1], floats[2], floats[3], features, squares)
        base = np.ascontiguousarray(np.broadcast_to(base, (n, tokens)))
        stream = _stream(source)
        rows = np.stack([geometry.first_rows, geometry.second_rows]).astype(np.int64)
        work, row, factor = np.empty((8, tokens)), new_row(tokens), np.ones(tokens)
        for lo in range(0, n, BLOCK):
            hi = min(lo + BLOCK, n)
            if scale is not None:
                if lo:
                    scale.add(out.squares[lo - BLOCK : lo])
                factor = scale.of(lo // BLOCK)
            sums = np.zeros((hi - lo, tokens))
            if lo:
                sums = exact.product(ready.coefficient[lo:hi, :lo], torch.from_numpy(out.features[:lo])).numpy()
            _block(
                lo, sums, factor, base, ready.lower, ready.unit[:, 0], ready.sigma[:, 0], ready.step[:, 0], ready.step_k[:, 0],
                ready.pair, ready.narrow, geometry.cos, geometry.sin, rows, guess, work, out.features, reading, *stream[:2], *row,
                *stream[2:], self._table, self._shift, self._edges, self._bins, out.patterns, out.mean, out.sigma, out.residual,
                out.forced, out.squares,
            )  # fmt: skip
        if scale is not None:
            scale.add(out.squares[(n - 1) // BLOCK * BLOCK :])
        return out


def _stream(source: Source | None) -> Any:
    """Numbers and tables, scratch, states, words and place; stand-ins where nothing is read."""
    if source is None:
        nothing = Numbers(0, 0, 0, 0, 0, 0, 0, 0.0)
        empty = [np.zeros(1, kind) for kind in (np.int32, np.float64, np.uint64, np.uint32, np.int64)]
        return nothing, *empty
    coder = source.coder
    return source.tables.numbers, source.tables.fine, coder.steps, *coder.place
