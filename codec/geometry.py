"""A layer's channels in the order in which the closed loop codes them: V channels, then K as un-rotated RoPE pairs.

Shapes: J key-value heads, D head dims, T tokens, P = J * D / 2 pairs.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, lru_cache
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from codec.cells import Ints
from codec.layout import transpose
from codec.loop import Pair

Floats = NDArray[np.float64]
Scalar = TypeVar("Scalar", bound=np.generic)


class Geometry:
    """The guesses of a layer, float32, as channels, and how pairs turn. Dims that do not rotate pair with angle 0.

    `scales` float64 [2 (K, V), J]: the cache's own; guesses are then in units of them, as what an FP8 cache stores is.
    """

    def __init__(self, guess: Pair, turn: Pair, rope_dim: int, scales: Floats | None = None) -> None:
        heads, self.tokens, dim = guess[0].shape
        self.shape, self.device = (heads, self.tokens, dim), guess[0].device
        self.scales = None if scales is None else np.repeat(scales, dim, 1)[:, :, None]  # [2, J * D, 1]
        self.first_rows, self.second_rows, self.k_order = _orders(heads, dim, rope_dim)
        self._guess, self._turn, self._still = guess, turn, dim // 2 - rope_dim // 2

    # ------------------------------------------------------------ guesses
    @cached_property
    def guess(self) -> NDArray[Any]:
        """K's channels, then V's: [2 * J * D, T], float32, or float64 in units of scales."""
        out = self.stacked([t.detach().cpu().contiguous().numpy() for t in self._guess])
        return out if self.scales is None else out / self.scales.reshape(-1, 1)

    @cached_property
    def k(self) -> Floats:
        """Of K, float64 [J * D, T]."""
        return self.guess[: len(self.guess) // 2].astype(np.float64)

    @cached_property
    def v(self) -> Floats:
        """Of V, float64 [J * D, T]."""
        return self.guess[len(self.guess) // 2 :].astype(np.float64)

    # ------------------------------------------------------------ pairs
    @cached_property
    def turns(self) -> Floats:
        """cos and sin of the pairs of one head, the same for every head: [2, D / 2, T]."""
        still = np.broadcast_to(np.array([1.0, 0.0])[:, None, None], (2, self._still, self.tokens))
        turning = torch.stack(self._turn).transpose(1, 2).cpu().double().numpy()
        return np.concatenate([turning, still], axis=1)

    @cached_property
    def cos(self) -> Floats:
        """Of all pairs: [P, T]."""
        return np.tile(self.turns[0], (self.shape[0], 1))

    @cached_property
    def sin(self) -> Floats:
        """Of all pairs: [P, T]."""
        return np.tile(self.turns[1], (self.shape[0], 1))

    # ------------------------------------------------------------ tensors and channels
    def channels(self, x: NDArray[Scalar]) -> NDArray[Scalar]:
        """[J, T, D] -> [J * D, T]"""
        return self.stacked([x])

    def stacked(self, parts: Sequence[NDArray[Scalar]]) -> NDArray[Scalar]:
        """The channels of tensors [J, T, D] of one dtype, one tensor's after another's: [parts * J * D, T]"""
        heads, tokens, dim = self.shape
        out = np.empty((len(parts), heads, dim, tokens), parts[0].dtype)
        for x, rows in zip(parts, out, strict=True):
            transpose(np.ascontiguousarray(x), rows)
        return out.reshape(len(parts) * heads * dim, tokens)

    def tensor(self, x: NDArray[Scalar]) -> NDArray[Scalar]:
        """[J * D, T] -> [J, T, D]"""
        out = np.empty(self.shape, x.dtype)
        transpose(np.ascontiguousarray(x).reshape(self.shape[0], self.shape[2], self.tokens), out)
        return out

    def real(self, k: NDArray[Any], v: NDArray[Any]) -> tuple[Tensor, Tensor]:
        """K and V channels, float32 or float64, as tensors [J, T, D] float32 in units of 1, on the guesses' device."""
        if self.scales is not None:
            k, v = k * self.scales[0], v * self.scales[1]
        one, other = (torch.from_numpy(self.tensor(x.astype(np.float32, copy=False))).to(self.device) for x in (k, v))
        return one, other

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


@lru_cache(maxsize=16)
def _orders(heads: int, dim: int, rope_dim: int) -> tuple[Ints, Ints, Ints]:
    """Rows of the first and of the second channel of every pair [P], and of both in turn [J * D]."""
    half = rope_dim // 2
    first = np.concatenate([np.arange(half), np.arange(rope_dim, dim, 2)])
    second = np.concatenate([np.arange(half, rope_dim), np.arange(rope_dim + 1, dim, 2)])
    base = np.arange(heads, dtype=np.int64)[:, None] * dim
    rows = (base + first).reshape(-1), (base + second).reshape(-1)
    order = np.stack(rows, 1).reshape(-1)
    for array in (*rows, order):
        array.setflags(write=False)  # shared by all layers
    return *rows, order
