"""The k-means of codec.predictor.far in a compiled loop: the same integers as its torch operations, without their temporaries.

Shapes: G groups of W tokens, C centroids of a group, D head dims.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from codec.kernels import apart, compiled
from codec.predictor.fused import Doubles, Singles, array, over_rows

Shorts = NDArray[np.int16]
Longs = NDArray[np.int64]


@apart
def _add(x: Doubles, out: Doubles) -> None:
    for d in range(out.shape[0]):
        out[d] += x[d]


@apart
def _add_times(factor: float, x: Doubles, out: Doubles) -> None:
    for c in range(out.shape[0]):
        out[c] += factor * x[c]


@apart
def _scaled(x: Shorts, ratio: np.float32, out: Doubles) -> None:
    for d in range(out.shape[0]):
        out[d] = np.float64(np.rint(np.float32(x[d]) * ratio))


@compiled
def _nearest(k: Doubles, centre: Doubles, nearest: Longs, members: Longs) -> None:
    """The centroid that each key is nearest to, the first of several; all sums are integers below 2**53, exact in any order."""
    turned, square, product = centre.T.copy(), np.zeros(centre.shape[0]), np.empty(centre.shape[0])
    for d in range(turned.shape[0]):
        for c in range(turned.shape[1]):
            square[c] += turned[d, c] * turned[d, c]
    members[:] = 0
    for t in range(k.shape[0]):
        product[:] = 0.0
        for d in range(turned.shape[0]):
            _add_times(k[t, d], turned[d], product)
        best, least = 0, square[0] - 2.0 * product[0]
        for c in range(1, product.shape[0]):
            distance = square[c] - 2.0 * product[c]
            if distance < least:
                best, least = c, distance
        nearest[t] = best
        members[best] += 1


@compiled
def _lloyd(
    begin: int, end: int, keys: Shorts, scale: Singles, values: Shorts, rounds: int, centres: Shorts, means: Shorts, members: Longs
) -> None:  # fmt: skip
    tokens, dim, count = keys.shape[1], keys.shape[2], centres.shape[1]
    k, sums, centre = np.empty((tokens, dim)), np.empty((count, dim)), np.empty((count, dim))
    nearest, v, one = np.empty(tokens, np.int64), np.empty(dim), np.float32(1.0)
    stride = tokens // count
    for g in range(begin, end):
        most = np.float32(0.0)
        for t in range(tokens):
            most = max(most, scale[g, t])
        for t in range(tokens):
            _scaled(keys[g, t], scale[g, t] / most, k[t])
        for c in range(count):
            centre[c] = k[stride // 2 + c * stride]
        for _ in range(rounds):
            _nearest(k, centre, nearest, members[g])
            sums[:] = 0.0
            for t in range(tokens):
                _add(k[t], sums[nearest[t]])
            for c in range(count):
                if members[g, c]:
                    centre[c] = np.rint(sums[c] / np.float64(members[g, c]))
        sums[:] = 0.0
        for t in range(tokens):
            _scaled(values[g, t], one, v)
            _add(v, sums[nearest[t]])
        for c in range(count):
            for d in range(dim):
                centres[g, c, d] = np.int16(centre[c, d])
                means[g, c, d] = np.int16(np.rint(sums[c, d] / np.float64(max(members[g, c], 1))))


def lloyd(keys: Tensor, scale: Tensor, values: Tensor, count: int, rounds: int) -> tuple[Tensor, Tensor, Tensor]:
    """See codec.predictor.far: (centroids int16 [G, count, D] in units of a group's largest scale, means of their values int16
    [G, count, D], how many tokens each stands for int64 [G, count]).

    keys, values: int16 [G, W, D]; scale: float32 [G, W, 1], powers of two.
    """
    groups, _, dim = keys.shape
    centres, means = (np.empty((groups, count, dim), np.int16) for _ in range(2))
    members = np.empty((groups, count), np.int64)
    scales = array(scale).reshape(groups, -1)
    over_rows(_lloyd, groups, array(keys), scales, array(values), rounds, centres, means, members)
    return torch.from_numpy(centres), torch.from_numpy(means), torch.from_numpy(members)
