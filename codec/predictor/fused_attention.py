"""Attention's elementwise work in compiled loops, as codec.predictor.fused does the rest of the predictor's.

What a query sees lies in two parts: `near`, the first keys of which the first query sees `visible`, the next one more, and so on; and
`far`, all of which every query sees. Rows are queries of the heads that share a key-value head, head by head.

Shapes: J key-value heads, T queries, R = T times the heads of one, n near keys, m far ones, D head dims.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from codec import exact
from codec.kernels import apart, compiled, inlined
from codec.predictor.fused import MAGNITUDE, Bits, Bytes, Doubles, Singles, array, exp2_fraction, over_rows, pow2

Shorts = NDArray[np.int16]
Flags = NDArray[np.bool_]
_WEIGHT_BITS = np.int32(exact.PROBABILITY_BITS)
_LIMB = 256.0


# ---------------------------------------------------------------- integers as limbs
@apart
def _split_row(x: Shorts, low: Bytes, high: Bytes) -> None:
    for d in range(x.shape[0]):
        top = (np.int32(x[d]) + np.int32(128)) >> np.int32(8)
        low[d], high[d] = np.int8(np.int32(x[d]) - (top << np.int32(8))), np.int8(top)


@compiled
def _split(begin: int, end: int, x: Shorts, out: Bytes) -> None:
    dim = x.shape[1]
    for i in range(begin, end):
        _split_row(x[i], out[i, :dim], out[i, dim:])


def split(x: Tensor) -> Tensor:
    """exact.limbs of int16 [J, n, D] within exact.ROW_MAX, side by side: int8 [J, n, 2 D], low ones first."""
    rows = array(x).reshape(-1, x.shape[-1])
    out = np.empty((rows.shape[0], 2 * rows.shape[1]), np.int8)
    over_rows(_split, len(rows), rows, out)
    return torch.from_numpy(out).view(*x.shape[:-1], -1)


# ---------------------------------------------------------------- softmax
@apart
def _largest(bits: Bits) -> Any:
    """Floats in order as integers: of negative ones, all bits but the sign are turned round."""
    top = np.int32(-0x7FFFFFFF)
    for k in range(bits.shape[0]):
        top = max(top, bits[k] ^ ((bits[k] >> np.int32(31)) & MAGNITUDE))
    return top


@apart
def _numerators(t: Singles, most: Any, weight: Bits) -> Any:
    total = np.int64(0)
    for k in range(t.shape[0]):
        d = max(t[k] - most, np.float32(-100.0))
        whole = np.floor(d)
        w = np.int32(np.rint(exp2_fraction(d, whole) * pow2(np.int32(whole) + _WEIGHT_BITS)))
        weight[k] = w
        total += np.int64(w)
    return total


@inlined
def _softmax(t: Singles, bits: Bits, weight: Bits) -> Any:
    """exact.weights_from_scores of one row t, whose bits are `bits`: writes the weights, returns their sum."""
    top = _largest(bits)
    return _numerators(t, np.int32(top ^ ((top >> np.int32(31)) & MAGNITUDE)).view(np.float32), weight)


@compiled
def _weights(
    begin: int,
    end: int,
    scores: Doubles,
    key_scale: Doubles,
    query_scale: Singles,
    bias: Singles,
    allowed: Flags,
    limit: Any,
    unseen: Any,
    sums: Doubles,
) -> None:
    n, each = scores.shape[1], scores.shape[0] // key_scale.shape[0]
    t, weight = np.empty(n, np.float32), np.empty(n, np.int32)
    bits = t.view(np.int32)
    for i in range(begin, end):
        scale, query, head = query_scale[i], i % each % allowed.shape[0], i // each
        for k in range(n):
            score = np.float32(scores[i, k] * key_scale[head, k]) * scale + bias[head, k]
            t[k] = min(max(score, -limit), limit) if allowed[query, k] else unseen
        sums[i] = np.float64(_softmax(t, bits, weight))
        for k in range(n):
            scores[i, k] = np.float64(weight[k])


def weights(
    scores: Tensor,
    key_scale: Tensor,
    query_scale: Tensor,
    bias: Tensor,
    allowed: Tensor,
    limit: float,
    unseen: float,
) -> tuple[Tensor, Tensor]:
    """exact.weights_from_scores of scaled scores: (weights, which take the place of `scores`; their sums float64 [J, rows, 1]).

    scores: float64 [J, rows, keys]; key_scale: float64 [J, 1, keys]; query_scale: float32 [J, rows, 1]; bias: float32 [J, 1, keys], added
    to scaled scores; allowed: bool [T, keys], rows being a multiple of T; a row's scores are clamped to -limit .. limit, and what is not
    allowed becomes `unseen`, which is less.
    """
    heads, rows, keys = scores.shape
    sums = np.empty(heads * rows)
    flat = scores.view(-1, keys).numpy()
    scale, more = (array(t).reshape(heads, keys) for t in (key_scale, bias))
    over_rows(
        _weights,
        heads * rows,
        flat,
        scale,
        array(query_scale).reshape(-1),
        more,
        allowed.numpy(),
        np.float32(limit),
        np.float32(unseen),
        sums,
    )
    return scores, torch.from_numpy(sums).view(heads, rows, 1)


# ---------------------------------------------------------------- softmax of products of limbs
@apart
def _scores(
    high: Bits, cross: Bits, low: Bits, key_scale: Singles, bias: Singles, scale: Any, limit: Any, out: Singles
) -> None:
    for k in range(out.shape[0]):
        whole = (np.float64(high[k]) * _LIMB + np.float64(cross[k])) * _LIMB + np.float64(low[k])
        score = np.float32(whole) * key_scale[k] * scale + bias[k]
        out[k] = min(max(score, -limit), limit)


@apart
def _far_scores(high: Bits, low: Bits, key_scale: Singles, bias: Singles, scale: Any, limit: Any, out: Singles) -> None:
    for k in range(out.shape[0]):
        whole = np.float64(high[k]) * _LIMB + np.float64(low[k])
        score = np.float32(whole) * key_scale[k] * scale + bias[k]
        out[k] = min(max(score, -limit), limit)


@apart
def _put(weight: Bits, low: Bytes, middle: Bytes, high: Bytes) -> None:
    for k in range(weight.shape[0]):
        above = (weight[k] + np.int32(128)) >> np.int32(8)
        top = (above + np.int32(128)) >> np.int32(8)
        low[k], middle[k] = np.int8(weight[k] - (above << np.int32(8))), np.int8(above - (top << np.int32(8)))
        high[k] = np.int8(top)


@compiled
def _limb_weights(
    begin: int, end: int, visible: int, queries: int, near: tuple[Bits, Bits, Bits], far: tuple[Bits, Bits],
    near_scale: tuple[Singles, Singles], far_scale: tuple[Singles, Singles], query_scale: Singles, limit: Any, out: Bytes,
    far_out: Bytes, sums: Doubles,
) -> None:  # fmt: skip
    rows, m = far[0].shape
    n = near[0].shape[1]
    t, weight = np.empty(n + m, np.float32), np.empty(n + m, np.int32)
    bits = t.view(np.int32)
    for i in range(begin, end):
        sees, scale = visible + i % queries, query_scale[i]
        every = sees + m
        _scores(near[0][i], near[1][i], near[2][i], near_scale[0], near_scale[1], scale, limit, t[:sees])
        _far_scores(far[0][i], far[1][i], far_scale[0], far_scale[1], scale, limit, t[sees:every])
        sums[i] = np.float64(_softmax(t[:every], bits[:every], weight[:every]))
        _put(weight[:sees], out[i], out[rows + i], out[2 * rows + i])
        _put(weight[sees:every], far_out[i], far_out[rows + i], far_out[2 * rows + i])
        for limb in range(i, 3 * rows, rows):
            out[limb, sees:] = 0


def limb_weights(
    near: Sequence[Tensor], far: Sequence[Tensor], scales: tuple[Sequence[Tensor], Sequence[Tensor]], query_scale: Tensor, visible: int,
    queries: int, limit: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """`weights` of one head, in limbs: (int8 [3 R, n] of near keys and [3 R, m] of far ones, low limbs of all rows first; their sums
    float64 [R]).

    near: int32 [R, n], products of the queries' and keys' high limbs, of one's high and the other's low ones, of the low ones; far:
    int32 [R, m], of the queries' high and low limbs with keys of one limb; scales: of near keys, of far ones: powers of two and what is
    added to scaled scores, float32 [n] or [m]; query_scale: float32 [R, 1]; queries: T.
    """
    near_products, far_products = (tuple(p.numpy() for p in part) for part in (near, far))
    near_scale, far_scale = (tuple(array(s).reshape(-1) for s in part) for part in scales)
    (rows, n), m = near_products[0].shape, far_products[0].shape[1]
    out, far_out, sums = np.empty((3 * rows, n), np.int8), np.empty((3 * rows, m), np.int8), np.empty(rows)
    over_rows(
        _limb_weights, rows, visible, queries, near_products, far_products, near_scale, far_scale, array(query_scale).reshape(-1),
        np.float32(limit), out, far_out, sums,
    )  # fmt: skip
    return torch.from_numpy(out), torch.from_numpy(far_out), torch.from_numpy(sums)


# ---------------------------------------------------------------- weighted means
@apart
def _wholes(low: Bits, middle: Bits, high: Bits, out: Doubles) -> None:
    """Of one row: its low, middle and high limbs of weights against both limbs of values. Integers below 2**53, exact in any order."""
    dim = out.shape[0]
    for d in range(dim):
        small = np.float64(middle[d]) + np.float64(low[dim + d])
        large = np.float64(high[d]) + np.float64(middle[dim + d])
        out[d] = ((np.float64(high[dim + d]) * _LIMB + large) * _LIMB + small) * _LIMB + np.float64(low[d])


@apart
def _add_far(low: Bits, middle: Bits, high: Bits, unit: float, out: Doubles) -> None:
    """The same of far values, which have one limb."""
    for d in range(out.shape[0]):
        out[d] += ((np.float64(high[d]) * _LIMB + np.float64(middle[d])) * _LIMB + np.float64(low[d])) * unit


@apart
def _means(whole: Doubles, total: Any, step: float, out: Singles) -> None:
    for d in range(out.shape[0]):
        out[d] = np.float32((whole[d] / total) * step)


@compiled
def _weighted(
    begin: int, end: int, near: Bits, far: Bits, unit: float, sums: Doubles, step: float, out: Singles
) -> None:
    rows, dim = out.shape
    whole = np.empty(dim)
    for i in range(begin, end):
        _wholes(near[i], near[rows + i], near[2 * rows + i], whole)
        if far.shape[0]:
            _add_far(far[i], far[rows + i], far[2 * rows + i], unit, whole)
        _means(whole, sums[i], step, out[i])


def weighted(near: Tensor, far: Tensor | None, unit: float, sums: Tensor, step: float) -> Tensor:
    """Weighted means of values: float32 [R, D].

    near: int32 [3 R, 2 D], limbs of weights against limbs of values, low ones first; far: int32 [3 R, D], against far values, of which
    one is `unit` steps; sums: float64 [R], of all weights; step: a power of two.
    """
    rows, dim = len(sums), near.shape[1] // 2
    out, none = np.empty((rows, dim), np.float32), np.empty((0, dim), np.int32)
    far_products = none if far is None else far.numpy()
    over_rows(_weighted, rows, near.numpy(), far_products, float(unit), sums.numpy(), step, out)
    return torch.from_numpy(out)
