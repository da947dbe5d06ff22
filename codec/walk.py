"""The walk over a layer's channels, compiled: what ClosedLoop._one_by_one does, bit for bit, from a stream or with a known truth, which it
writes where there is a sink.

Channels come in blocks of BLOCK. What the features of all blocks before add to a block's means is one integer matrix product; within
a block channels go one after another, each adding its features to the means of those after it. numba neither
reassociates nor contracts (codec.kernels).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from codec.bins import LEAST_MASS, Bins
from codec.cells import Ints
from codec.formats import Items, NumberFormat
from codec.geometry import Floats, Geometry
from codec.joint_model import BLOCK, FEATURE_MAX, LEAST, Features, Ready
from codec.kernels import apart, borrowed, compiled, inlined
from codec.rans import Codes, States, Symbols, Words
from codec.residual import STEP_BITS, TABLE_REACH
from codec.scalar_kernels import Fine, Numbers, place_row, scale_row, whole
from codec.scalar_put import put_row, room_for
from codec.scalar_read import read_row
from codec.scalars import Sink, Source
from codec.token_scale import CLIP, FINE, TokenScale

_STEPS, _REACH_STEPS, _FEATURE_MAX = float(1 << STEP_BITS), float(TABLE_REACH), float(FEATURE_MAX)
_LEAST_SHARE, _LEAST_MASS, _MIDDLE = LEAST, LEAST_MASS, TABLE_REACH
_FINE, _CLIP = float(FINE), float(CLIP)
_INFINITY = math.inf
Sums = NDArray[np.int32]
Weights = NDArray[np.int16]
Rows = NDArray[Any]  # float32, or float64 where a cache has scales
_KNOWN, _READ, _WRITTEN = 0, 1, 2  # what is done about patterns


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


@apart
def _widen(items: Items, patterns: Ints) -> None:
    for t in range(patterns.shape[0]):
        patterns[t] = np.int64(items[t])


@apart
def _narrow(patterns: Ints, items: Items) -> None:
    for t in range(patterns.shape[0]):
        items[t] = patterns[t]


@apart
def _values(patterns: Ints, shift: int, out: Floats) -> None:
    """What patterns stand for that are the upper bits of a float32."""
    for t in range(patterns.shape[0]):
        out[t] = np.float64(np.uint32(patterns[t] << shift).view(np.float32))


@apart
def _centres(patterns: Ints, mean: Floats, spread: Floats, edges: Floats, bins: Ints, out: Floats) -> None:
    """Of a coarse cache: the means inside bins."""
    for t in range(patterns.shape[0]):
        p = np.uint64(patterns[t])
        out[t] = _centre(edges[0, p], edges[1, p], mean[t], spread[t], bins[0], bins[1])


@apart
def _observe(
    value: Floats, known: Floats, guess: Rows, most: float, off: Floats, own: Floats, residual: Floats, forced: Rows, energy: Ints
) -> None:  # fmt: skip
    """ClosedLoop._observed of a row, and its innovations: value is what patterns stand for, known what they tell, off the mean of the
    residual, own the model's sigma."""
    for t in range(value.shape[0]):
        g = np.float64(guess[t])
        x = known[t] - g
        trusted = (abs(value[t]) < _INFINITY) & (abs(x) <= most)
        residual[t] = x if trusted else 0.0
        forced[t] = value[t] if trusted else g
        z = np.rint(min(max((residual[t] - off[t]) / own[t] * _FINE, -_CLIP), _CLIP))
        energy[t] += whole(z * z)


@inlined
def _feature(residual: float, per_step: float) -> Any:
    return np.int8(whole(np.rint(min(max(residual * per_step, -_FEATURE_MAX), _FEATURE_MAX))))


@apart
def _features_of_value(residual: Floats, per_step: float, out: Features) -> None:
    for t in range(residual.shape[0]):
        out[t] = _feature(residual[t], per_step)


@apart
def _features_of_pair(
    x: Floats, y: Floats, cos: Floats, sin: Floats, per_first: float, per_second: float, first: Features, second: Features
) -> None:  # fmt: skip
    for t in range(x.shape[0]):
        first[t] = _feature(x[t] * cos[t] + y[t] * sin[t], per_first)
        second[t] = _feature(y[t] * cos[t] - x[t] * sin[t], per_second)


# ---------------------------------------------------------------- sums of features within a block
@apart
def _add_one(sums: Sums, near: Weights, at: int, last: int, feature: Features) -> None:
    """Add the features of the block's channel `at` to the sums of the channels after it, up to `last`: integers, exact in any order."""
    for k in range(at + 1, last):
        row, weight = np.uint64(k), np.int32(near[np.uint64(k), np.uint64(at)])
        for t in range(feature.shape[0]):
            sums[row, t] += weight * np.int32(feature[t])


@apart
def _add_eight(sums: Sums, near: Weights, at: int, features: Features) -> None:
    """The same of channels `at` to `at` + 7, whose features [8, T] these are, to all after them."""
    for k in range(at + 8, sums.shape[0]):
        row = np.uint64(k)
        w = near[row]
        a, b, c, d = np.int32(w[at]), np.int32(w[at + 1]), np.int32(w[at + 2]), np.int32(w[at + 3])
        e, f, g, h = np.int32(w[at + 4]), np.int32(w[at + 5]), np.int32(w[at + 6]), np.int32(w[at + 7])
        for t in range(features.shape[1]):
            one = a * np.int32(features[0, t]) + b * np.int32(features[1, t])
            two = c * np.int32(features[2, t]) + d * np.int32(features[3, t])
            three = e * np.int32(features[4, t]) + f * np.int32(features[5, t])
            four = g * np.int32(features[6, t]) + h * np.int32(features[7, t])
            sums[row, t] += (one + two) + (three + four)


@inlined
def _add(sums: Sums, near: Weights, at: int, lo: int, features: Features) -> None:
    """A channel's features are there: add them to the sums of later ones, those beyond its eight with those of all eight."""
    rows = sums.shape[0]
    _add_one(sums, near, at, min((at | 7) + 1, rows), features[lo + at])
    if at & 7 == 7 and at + 1 < rows:
        _add_eight(sums, near, at - 7, features[lo + at - 7 : lo + at + 1])


# ---------------------------------------------------------------- laws
@inlined
def _sum(low: int, high: int, near: int) -> Any:
    return np.float64(high) * 256.0 + np.float64(low) + np.float64(near)


@inlined
def _mean(sum_: float, unit: float, given: int, given_unit: float, bias: float) -> Any:
    """joint_model.Ready.base and what the features of this layer add to it."""
    return sum_ * unit + (np.float64(given) * given_unit + bias)


@apart
def _law_of_value(
    low: Sums, high: Sums, near: Sums, given: Sums, given_unit: float, bias: float, unit: float, sigma: float, factor: Floats, off: Floats,
    own: Floats, spread: Floats,
) -> None:  # fmt: skip
    """Of a V channel: off, mean of the residual; own, the model's sigma; spread, that times the token's factor."""
    for t in range(near.shape[0]):
        off[t] = _mean(_sum(low[t], high[t], near[t]), unit, given[t], given_unit, bias)
        own[t] = sigma
        spread[t] = sigma * factor[t]


@apart
def _law_of_pair(
    low: Sums, high: Sums, near: Sums, given_a: Sums, given_b: Sums, given_unit: Floats, bias: Floats, unit_a: float, unit_b: float,
    pair: Floats, cos: Floats, sin: Floats, factor: Floats, off: Floats, own: Floats, spread: Floats, second: Floats,
) -> None:  # fmt: skip
    """joint_model.PairLaw of a pair's two rows: what `_law_of_value` says of the first; what the second needs."""
    w, va, vb, cab, vi = pair[0], pair[1], pair[2], pair[3], pair[4]
    for t in range(cos.shape[0]):
        c, s = cos[t], sin[t]
        a = _mean(_sum(low[0, t], high[0, t], near[0, t]), unit_a, given_a[t], given_unit[0], bias[0])
        b = _mean(_sum(low[1, t], high[1, t], near[1, t]), unit_b, given_b[t], given_unit[1], bias[1]) + w * a
        cc, ss, cs = c * c, s * s, c * s
        twice = (cab + cab) * cs
        v_first = max(va * cc + vb * ss - twice, _LEAST_SHARE * va)
        across = (va - vb) * cs + cab * (cc - ss)
        off[t] = a * c - b * s
        own[t] = math.sqrt(v_first)
        spread[t] = own[t] * factor[t]
        second[0, t] = a * s + b * c
        second[1, t] = across / v_first
        second[2, t] = math.sqrt(va * vi / v_first)


@apart
def _law_of_second(first: Floats, factor: Floats, second: Floats, off: Floats, own: Floats, spread: Floats) -> None:
    """Of a pair's second channel, the residual of the first being known."""
    for t in range(first.shape[0]):
        off[t] = second[0, t] + second[1, t] * (first[t] - off[t])
        own[t] = second[2, t]
        spread[t] = own[t] * factor[t]


@apart
def _law_of_stored(guess: Rows, off: Floats, spread: Floats, narrow: float, mean: Floats, sigma: Floats) -> None:
    """What is coded with."""
    for t in range(guess.shape[0]):
        mean[t] = np.float64(guess[t]) + off[t]
        sigma[t] = spread[t] * narrow


@inlined
def _channel(
    row: int, side: int, whole_rows: int, guess: Rows, most: float, narrow: float, work: Floats, mode: int, n: Numbers, fine: Fine,
    at: Floats, rate: Floats, near: Floats, start: Ints, grid: Ints, found: Ints, more: Ints, split: Ints, steps: Floats, states: States,
    words: Words, words_at: Ints, codes: Codes, count: Ints, lanes: int, table: Floats, shift: int, edges: Floats, bins: Ints,
    coded: Ints, items: Items, mean: Floats, sigma: Floats, residual: Floats, forced: Rows, energy: Ints,
) -> None:  # fmt: skip
    """ClosedLoop._take: read, write or know stored row `row` under the law in `work`."""
    m, s, r = mean[row * whole_rows], sigma[row * whole_rows], residual[row * whole_rows + side * (1 - whole_rows)]
    _law_of_stored(guess[row], work[0], work[2], narrow, m, s)
    if mode != _READ:
        _widen(items[row], coded)
    if mode != _KNOWN:
        scale_row(s, n, grid, rate, near)
        place_row(m, n, grid, at, start)
        if mode == _READ:
            read_row(at, rate, near, start, grid, found, more, n, fine, steps, states, words, words_at, coded)
            _narrow(coded, items[row])
        else:
            put_row(coded, at, rate, start, grid, found, more, split, n, fine, lanes, codes, count)
    if table.shape[0]:
        for t in range(work.shape[1]):
            work[3, t] = table[np.uint64(coded[t])]
    else:
        _values(coded, shift, work[3])
    if edges.shape[0]:
        _centres(coded, m, work[2], edges, bins, work[4])
        _observe(work[3], work[4], guess[row], most, work[0], work[1], r, forced[row], energy)
    else:
        _observe(work[3], work[3], guess[row], most, work[0], work[1], r, forced[row], energy)


# Scratch of a row lies in two arrays, and what a layer knows of channels in one: a compiled function takes time for each array of a call.
# Rows of work: 0 to 2 the law (off, own, spread), 3 and 4 what patterns stand for and tell, 5 to 7 what a pair's second channel needs, 8 to
# 10 the first three of scalar_kernels.Row; of ints: the other four, patterns, and two of formats with raw bits.
_WORK, _INTS = 11, 7


@compiled
def _block(
    lo: int, half: int, far: Sums, all_sums: Sums, weights: Weights, factor: Floats, given: Sums, known: Floats, pair: Floats,
    turns: Floats, rows: Ints, whole_rows: int, guess: Rows, work: Floats, ints: Ints, features: Features, energies: Ints, mode: int,
    n: Numbers, fine: Fine, steps: Floats, states: States, words: Words, words_at: Ints, codes: Codes, count: Ints, lanes: int,
    table: Floats, shift: int, edges: Floats, bins: Ints, items: Items, mean: Floats, sigma: Floats, residual: Floats, forced: Rows,
) -> None:  # fmt: skip
    """Channels lo … of one block.

    known: Ready.known. Of `items`, `guess` and `forced` rows are K's as stored, then V's. So they are of `mean`, `sigma` and `residual`
    where whole_rows is 1; where it is 0, these are scratch of a row, and of two. count: of symbols, of escapes, of V's symbols.
    """
    far, all_sums, weights, factor, given = borrowed((far, all_sums, weights, factor, given))
    known, pair, turns, rows, guess, work = borrowed((known, pair, turns, rows, guess, work))
    ints, features, energies, fine, steps = borrowed((ints, features, energies, fine, steps))
    states, words, words_at, codes, count = borrowed((states, words, words_at, codes, count))
    table, edges, bins, items, forced = borrowed((table, edges, bins, items, forced))
    mean, sigma, residual = borrowed((mean, sigma, residual))
    lines, has_given = min(BLOCK, features.shape[0] - lo), np.int64(given.shape[0] > 1)
    given_unit, bias, unit, sigmas = known[0], known[1], known[2], known[3]
    per_step, most, narrow = known[4], known[5], known[6]
    at, rate, near = work[8], work[9], work[10]
    start, grid, found, more, coded, split = ints[0], ints[1], ints[2], ints[3], ints[4], ints[5:7]
    sums, energy = all_sums[:lines], energies[lo // BLOCK]
    sums[:] = 0
    low, high = far[:lines], far[lines:]
    j = lo
    while j < lo + lines:
        k, g = j - lo, j * has_given
        if j < half:
            row, many = half + j, 1
            _law_of_value(
                low[k], high[k], sums[k], given[g], given_unit[j], bias[j], unit[j], sigmas[j], factor, work[0], work[1], work[2]
            )  # fmt: skip
        else:
            if j == half:
                count[2] = count[0]
            p = (j - half) // 2
            row, many, turn = rows[0, p], 2, p % turns.shape[1]
            _law_of_pair(
                low[k : k + 2], high[k : k + 2], sums[k : k + 2], given[g], given[g + has_given], given_unit[j : j + 2], bias[j : j + 2],
                unit[j], unit[j + 1], pair[p], turns[0, turn], turns[1, turn], factor, work[0], work[1], work[2], work[5:8],
            )  # fmt: skip
        first = residual[row * whole_rows]
        for side in range(many):
            if side:
                row = rows[1, p]
                _law_of_second(first, factor, work[5:8], work[0], work[1], work[2])
            _channel(
                row, side, whole_rows, guess, most[j], narrow[j + side], work, mode, n, fine, at, rate, near, start, grid, found, more,
                split, steps, states, words, words_at, codes, count, lanes, table, shift, edges, bins, coded, items, mean, sigma, residual,
                forced, energy,
            )  # fmt: skip
        if many == 1:
            _features_of_value(first, per_step[j], features[j])
            _add(sums, weights[lo:], k, lo, features)
        else:
            _features_of_pair(
                first, residual[row * whole_rows + 1 - whole_rows], turns[0, turn], turns[1, turn], per_step[j], per_step[j + 1],
                features[j], features[j + 1],
            )  # fmt: skip
            _add(sums, weights[lo:], k, lo, features)
            _add(sums, weights[lo:], k + 1, lo, features)
        j += many


@dataclass
class Walked:
    """What a walk found. Rows are K's as stored, then V's: items [2 * J * D, T] (patterns, unsigned); forced, float32, or float64 where
    the cache has scales. Where it was asked to keep them, mean, sigma and residual, float64.

    symbols: of the symbols written, V's and K's; escapes: of the scalars.
    """

    items: Items
    mean: Floats
    sigma: Floats
    residual: Floats
    forced: Rows
    features: Features  # [N, T]
    energy: Ints  # [blocks, T]
    symbols: tuple[Symbols, Symbols]
    escapes: int


class Walker:
    """Walks over layers of one cache format. bins: of a coarse cache."""

    def __init__(self, fmt: NumberFormat, bins: Bins | None) -> None:
        self._fmt = fmt
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
        self, ready: Ready, geometry: Geometry, given: Sums | None, scale: TokenScale | None, items: Items | None, *,
        source: Source | None = None, sink: Sink | None = None, keep: bool = False,
    ) -> Walked:  # fmt: skip
        """Over one layer: with known items [2 * J * D, T], or those that a source gives; they are written where there is a sink.

        given: [N, T], see Ready.given_sums; scale: the tokens' own scales, or None; keep: whole rows of means, sigmas and residuals.
        A broken source gives any patterns.
        """
        guess = geometry.guess
        n, tokens = len(ready.step), geometry.tokens
        kept = (len(guess),) * 3 if keep else (1, 1, 2)
        if (items is None) != (source is not None) or (source is not None and sink is not None):
            raise ValueError("items are known, and may be written, or they are read")
        mean, sigma, residual = (np.empty((rows, tokens)) for rows in kept)
        mode = _READ if items is None else _KNOWN if sink is None else _WRITTEN
        items, forced = self._fmt.empty(guess.shape) if items is None else items, np.empty_like(guess)
        features, energy = np.empty((n, tokens), np.int8), np.zeros((-(-n // BLOCK), tokens), np.int64)
        given = np.zeros((1, tokens), np.int32) if given is None else given
        stream, written, count = _stream(source, sink), _room(sink, guess.size), np.zeros(3, np.int64)
        rows = np.stack([geometry.first_rows, geometry.second_rows])
        work, ints, factor = np.empty((_WORK, tokens)), np.empty((_INTS, tokens), np.int64), np.ones(tokens)
        sums = np.empty((BLOCK, tokens), np.int32)
        for b, lo in enumerate(range(0, n, BLOCK)):
            if scale is not None:
                if b:
                    scale.add(energy[b - 1], BLOCK)
                factor = scale.of(b)
            _block(
                lo, n // 2, ready.far(b, features[:lo]), sums, ready.near, factor, given, ready.known, ready.pair, geometry.turns, rows,
                int(keep), guess, work, ints, features, energy, mode, *stream, written, count, 1 if sink is None else sink.encoder.lanes,
                self._table, self._shift, self._edges, self._bins, items, mean, sigma, residual, forced,
            )  # fmt: skip
        if scale is not None:
            scale.add(energy[-1], (n - 1) % BLOCK + 1)
        symbols = Symbols(written[: count[2]]), Symbols(written[count[2] : count[0]])
        return Walked(items, mean, sigma, residual, forced, features, energy, symbols, int(count[1]))


def _room(sink: Sink | None, scalars: int) -> Codes:
    return np.empty(0, np.uint64) if sink is None else sink.encoder.room(room_for(scalars))


def _stream(source: Source | None, sink: Sink | None) -> Any:
    """Numbers and tables, scratch, states, words and place; stand-ins where nothing is read."""
    given = sink if source is None else source
    tables = None if given is None else given.tables
    numbers = Numbers(0, 0, 0, 0, 0, 0, 0, 0.0) if tables is None else tables.numbers
    fine = np.zeros(1, np.int32) if tables is None else tables.fine
    if source is None:
        return numbers, fine, *(np.zeros(1, kind) for kind in (np.float64, np.uint64, np.uint32, np.int64))
    return numbers, fine, source.coder.steps, *source.coder.place
