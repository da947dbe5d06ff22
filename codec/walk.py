"""The walk over a coarse cache's channels, compiled: what ClosedLoop._one_by_one does with a truth that is known, bit for bit.

Tokens are independent of one another, so they are taken in strips that stay in the cache; within a strip channels go one after
another, each adding its features to the means of all later ones. numba neither reassociates nor contracts (codec.kernels).
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from codec.bins import LEAST_MASS, Bins
from codec.cells import Ints
from codec.geometry import Floats, Geometry
from codec.joint_model import FEATURE_MAX, LEAST, REACH, Ready
from codec.kernels import compiled
from codec.residual import STEP_BITS, TABLE_REACH

_STRIP = 64
_STEPS, _REACH_STEPS, _FEATURE_MAX = float(1 << STEP_BITS), float(TABLE_REACH), float(FEATURE_MAX)
_OUTLIER, _LEAST_SHARE, _LEAST_MASS, _MIDDLE = float(REACH), LEAST, LEAST_MASS, TABLE_REACH


@compiled
def _index(edge: float, mean: float, sigma: float) -> Any:
    steps = (edge - mean) / sigma * _STEPS
    return np.int64(np.rint(min(max(steps, -_REACH_STEPS), _REACH_STEPS))) + _MIDDLE


@compiled
def _centre(low: float, high: float, mean: float, sigma: float, cumulative: Ints, density: Ints) -> Any:
    a, b = _index(low, mean, sigma), _index(high, mean, sigma)
    mass = cumulative[b] - cumulative[a]
    x = mean
    if mass >= _LEAST_MASS:
        x = mean + sigma * (np.float64(density[a] - density[b]) / np.float64(mass))
    return min(max(x, low), high)


@compiled
def _take(
    pattern: int, guess: float, step: float, mean: float, sigma: float, values: Floats, low: Floats, high: Floats,
    cumulative: Ints, density: Ints,
) -> Any:  # fmt: skip
    """(residual, forced) of one scalar, as ClosedLoop._observed defines them."""
    real = values[pattern]
    residual = _centre(low[pattern], high[pattern], mean, sigma, cumulative, density) - guess
    if math.isfinite(real) and abs(residual) <= step * _OUTLIER:
        return residual, real
    return 0.0, guess


@compiled
def _feature(residual: float, step: float) -> Any:
    return np.rint(min(max(residual / step, -_FEATURE_MAX), _FEATURE_MAX))


@compiled
def _add(sums: Floats, coefficient: Floats, j: int, feature: Floats, count: int) -> None:
    """Add channel j's features to the sums of all later channels: integers, exact in any order."""
    for k in range(j + 1, sums.shape[0]):
        weight = coefficient[k, j]
        if weight != 0.0:
            for t in range(count):
                sums[k, t] += weight * feature[t]


@compiled
def _walk(
    patterns: Ints, guess: Floats, base: Floats, coefficient: Floats, unit: Floats, sigma: Floats, step: Floats, step_k: Floats,
    pair: Floats, narrow: Floats, cos: Floats, sin: Floats, rows: Ints, values: Floats, low: Floats, high: Floats, cumulative: Ints,
    density: Ints, mean_out: Floats, sigma_out: Floats, residual_out: Floats, forced_out: Floats, features: Floats,
) -> None:  # fmt: skip
    """Channels of `patterns` and all outputs but features: K rows, then V rows, as stored. pair: w, va, vb, cab, vi [5, P]."""
    n, tokens = features.shape
    half = n // 2
    sums = np.zeros((n, _STRIP))
    for begin in range(0, tokens, _STRIP):
        count = min(_STRIP, tokens - begin)
        sums[:] = 0.0
        for j in range(half):
            row = half + j
            for i in range(count):
                t = begin + i
                mean = guess[row, t] + (sums[j, i] * unit[j] + base[j, t])
                mean_out[row, t], sigma_out[row, t] = mean, sigma[j] * narrow[j]
                r, f = _take(
                    patterns[row, t], guess[row, t], step[j], mean, sigma[j], values, low, high, cumulative, density
                )
                residual_out[row, t], forced_out[row, t] = r, f
                features[j, t] = _feature(r, step[j])
            _add(sums, coefficient, j, features[j, begin : begin + count], count)
        for p in range(half // 2):
            j, one, two = half + 2 * p, rows[0, p], rows[1, p]
            w, va, vb, cab, vi = pair[0, p], pair[1, p], pair[2, p], pair[3, p], pair[4, p]
            for i in range(count):
                t = begin + i
                c, s = cos[p, t], sin[p, t]
                a = sums[j, i] * unit[j] + base[j, t]
                b = (sums[j + 1, i] * unit[j + 1] + base[j + 1, t]) + w * a
                cc, ss, cs = c * c, s * s, c * s
                twice = (cab + cab) * cs
                v_first = max(va * cc + vb * ss - twice, _LEAST_SHARE * va)
                across = (va - vb) * cs + cab * (cc - ss)
                mean_first = a * c - b * s
                sigma_first, sigma_second = math.sqrt(v_first), math.sqrt(va * vi / v_first)
                mean = guess[one, t] + mean_first
                mean_out[one, t], sigma_out[one, t] = mean, sigma_first * narrow[j]
                r1, f = _take(
                    patterns[one, t],
                    guess[one, t],
                    step_k[p],
                    mean,
                    sigma_first,
                    values,
                    low,
                    high,
                    cumulative,
                    density,
                )
                residual_out[one, t], forced_out[one, t] = r1, f
                mean = guess[two, t] + ((a * s + b * c) + across / v_first * (r1 - mean_first))
                mean_out[two, t], sigma_out[two, t] = mean, sigma_second * narrow[j + 1]
                r2, f = _take(
                    patterns[two, t],
                    guess[two, t],
                    step_k[p],
                    mean,
                    sigma_second,
                    values,
                    low,
                    high,
                    cumulative,
                    density,
                )
                residual_out[two, t], forced_out[two, t] = r2, f
                features[j, t] = _feature(r1 * c + r2 * s, step[j])
                features[j + 1, t] = _feature(r2 * c - r1 * s, step[j + 1])
            _add(sums, coefficient, j, features[j, begin : begin + count], count)
            _add(sums, coefficient, j + 1, features[j + 1, begin : begin + count], count)


def walk(
    ready: Ready, geometry: Geometry, base: Floats, patterns: list[Ints], bins: Bins
) -> tuple[list[NDArray[np.float64]], Floats]:
    """([mean, sigma, residual, forced], features): the first four [2 * J * D, T], K's rows as stored, then V's."""
    guess = np.concatenate([geometry.k, geometry.v])
    outs = [np.empty_like(guess) for _ in range(4)]
    features = np.zeros((len(ready.step), geometry.tokens))
    pair = np.concatenate([ready.w, ready.va, ready.vb, ready.cab, ready.vi], 1).T
    _walk(
        np.concatenate(patterns), guess, np.ascontiguousarray(np.broadcast_to(base, features.shape)), ready.coefficient.numpy(),
        ready.unit[:, 0], ready.sigma[:, 0], ready.step[:, 0], ready.step_k[:, 0], np.ascontiguousarray(pair), ready.narrow,
        geometry.cos, geometry.sin, np.stack([geometry.first_rows, geometry.second_rows]).astype(np.int64), bins.values, bins.low,
        bins.high, bins.cumulative, bins.density, *outs, features,
    )  # fmt: skip
    return outs, features
