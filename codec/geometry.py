"""A layer's channels in the order in which the closed loop codes them: V channels, then K as un-rotated RoPE pairs.

Shapes: J key-value heads, D head dims, T tokens, P = J * D / 2 pairs.
"""

from __future__ import annotations

from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from codec.loop import Pair

Floats = NDArray[np.float64]
Scalar = TypeVar("Scalar", bound=np.generic)


class Geometry:
    """The guesses of a layer as channels [J * D, T] in float64, and how pairs turn. Dims that do not rotate pair with angle 0.

    `scales` float64 [2 (K, V), J]: the cache's own; guesses are then in units of them, as what an FP8 cache stores is.
    """

    def __init__(self, guess: Pair, turn: Pair, rope_dim: int, scales: Floats | None = None) -> None:
        heads, self.tokens, dim = guess[0].shape
        self.shape, self.device = (heads, self.tokens, dim), guess[0].device
        self.scales = None if scales is None else np.repeat(scales, dim, 1)[:, :, None]  # [2, J * D, 1]
        self.k, self.v = (self.channels(g.cpu().double().numpy()) for g in guess)
        if self.scales is not None:
            self.k, self.v = self.k / self.scales[0], self.v / self.scales[1]
        half = rope_dim // 2
        first = np.concatenate([np.arange(half), np.arange(rope_dim, dim, 2)])
        second = np.concatenate([np.arange(half, rope_dim), np.arange(rope_dim + 1, dim, 2)])
        base = np.arange(heads)[:, None] * dim
        self.first_rows, self.second_rows = (base + first).reshape(-1), (base + second).reshape(-1)
        self.k_order = np.stack([self.first_rows, self.second_rows], 1).reshape(-1)
        cos, sin = (t.cpu().double().numpy().T for t in turn)
        still = len(first) - half
        cos = np.concatenate([cos, np.ones((still, self.tokens))])
        sin = np.concatenate([sin, np.zeros((still, self.tokens))])
        self.cos, self.sin = np.tile(cos, (heads, 1)), np.tile(sin, (heads, 1))  # [P, T]

    def channels(self, x: NDArray[Scalar]) -> NDArray[Scalar]:
        """[J, T, D] -> [J * D, T]"""
        return np.ascontiguousarray(x.transpose(0, 2, 1).reshape(-1, self.tokens))

    def tensor(self, x: NDArray[Scalar]) -> NDArray[Scalar]:
        """[J * D, T] -> [J, T, D]"""
        return np.ascontiguousarray(x.reshape(self.shape[0], self.shape[2], self.tokens).transpose(0, 2, 1))

    def real(self, k: Floats, v: Floats) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """K and V channels as tensors [J, T, D] float32 in units of 1."""
        if self.scales is not None:
            k, v = k * self.scales[0], v * self.scales[1]
        return self.tensor(k.astype(np.float32)), self.tensor(v.astype(np.float32))

    def first(self, x: Floats) -> Floats:
        """The first K channel of every pair: [P, T]."""
        rows: Floats = x[self.first_rows]
        return rows

    def second(self, x: Floats) -> Floats:
        """The second."""
        rows: Floats = x[self.second_rows]
        return rows

    def unrotate(self, x: Floats) -> Floats:
        """K channels [J * D, T] to pairs in the coding order: rows a, b, a, b, …"""
        a, b = self.first(x), self.second(x)
        out = np.empty_like(x)
        out[0::2] = a * self.cos + b * self.sin
        out[1::2] = b * self.cos - a * self.sin
        return out

    def unrotate_pair(self, a: Floats, b: Floats, p: int) -> Floats:
        """The same for one pair: two rows."""
        cos, sin = self.cos[p], self.sin[p]
        return np.stack([a * cos + b * sin, b * cos - a * sin])
