"""Static scales of an FP8 cache: what K and V are divided by before they are rounded to 8 bits, as vLLM's FP8 cache does it.

One scale a layer and K or V ("tensor"), one a head besides ("head"), or none, which is a scale of 1. They are calibrated
once, never change with the values, and are part of a chunk's key.

    bytes: magic, mode, 0, layers, kv_heads (little-endian, as in _HEAD), then float32 [layers, 2 (K, V), kv_heads]
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from codec.errors import DataError
from codec.formats import NumberFormat

SCALE_MODES = ("none", "tensor", "head")
MIN_SCALE, MAX_SCALE = 2.0**-60, 2.0**60  # with any FP8 value these give normal float32 numbers
MAX_LAYERS, MAX_HEADS = 4096, 4096
_MAGIC = b"KVSCALE1"
_HEAD = struct.Struct("<8sBBHH")


@dataclass(frozen=True, eq=False)
class CacheScales:
    """mode: one of SCALE_MODES; values: float32 [layers, 2 (K, V), kv_heads], equal over heads for "tensor", ones for "none"."""

    mode: str
    values: NDArray[np.float32]

    @classmethod
    def none(cls, layers: int, kv_heads: int) -> CacheScales:
        """Scales of 1, for values that are rounded as they are."""
        return cls("none", np.ones((layers, 2, kv_heads), np.float32))

    @classmethod
    def calibrated(cls, mode: str, largest: NDArray[np.float32], fmt: NumberFormat) -> CacheScales:
        """Scales under which the largest magnitudes of a sample, [layers, 2, kv_heads], become the format's largest number.

        mode: "tensor" or "head". Heads that held only zeros get a scale of 1.
        """
        if mode == "tensor":
            largest = np.broadcast_to(largest.max(2, keepdims=True), largest.shape)
        values = (largest.astype(np.float32) / np.float32(fmt.max_finite)).clip(MIN_SCALE, MAX_SCALE)
        return cls(mode, np.where(largest == 0, np.float32(1), values).astype(np.float32))

    def to_bytes(self) -> bytes:
        """Canonical bytes."""
        layers, _, heads = self.values.shape
        head = _HEAD.pack(_MAGIC, SCALE_MODES.index(self.mode), 0, layers, heads)
        return head + bytes(self.values.astype("<f4").tobytes())

    @classmethod
    def from_bytes(cls, data: bytes) -> CacheScales:
        """Read what `to_bytes` wrote. Raises DataError for anything else."""
        if len(data) < _HEAD.size:
            raise DataError(f"The cache's scales have only {len(data)} bytes; they are cut or of another version.")
        magic, mode, zero, layers, heads = _HEAD.unpack_from(data)
        if magic != _MAGIC or zero or mode >= len(SCALE_MODES):
            raise DataError("The cache's scales do not begin as scales do; they are corrupt or of another version.")
        if not (1 <= layers <= MAX_LAYERS and 1 <= heads <= MAX_HEADS):
            raise DataError(f"The cache's scales claim {layers} layers of {heads} heads, which no cache has.")
        if len(data) != _HEAD.size + 8 * layers * heads:
            raise DataError(f"The cache's scales have {len(data)} bytes, which is not what {layers} layers take.")
        values = np.frombuffer(data, "<f4", offset=_HEAD.size).reshape(layers, 2, heads).astype(np.float32)
        if not bool(((values >= MIN_SCALE) & (values <= MAX_SCALE)).all()):  # a NaN is neither
            raise DataError("The cache's scales are not all positive numbers of a sane size; they are corrupt.")
        name = SCALE_MODES[mode]
        if (name == "none" and bool((values != 1).any())) or (
            name == "tensor" and bool((values != values[..., :1]).any())
        ):
            raise DataError(f"The cache's scales differ where mode '{name}' has them equal; they are corrupt.")
        return cls(name, values)

    def listed(self) -> tuple[float, ...]:
        """As a blob lists them, layer by layer for K and V: nothing, one each, or one a head."""
        kept = {"none": 0, "tensor": 1, "head": self.values.shape[2]}[self.mode]
        return tuple(self.values[:, :, :kept].reshape(-1).tolist())

    def quantise(self, values: Tensor, layer: int, side: int, fmt: NumberFormat) -> Tensor:
        """K (side 0) or V (1) of a layer, [kv_heads, T, head_dim], any float dtype, to the FP8 format `fmt`.

        As float32 divided by the scale, saturated at the largest finite number (infinities too), rounded to nearest even.
        A NaN stays a NaN.
        """
        scaled = values.float() / self._factor(values, layer, side)
        return scaled.clamp(-fmt.max_finite, fmt.max_finite).to(fmt.dtype)

    def dequantise(self, stored: Tensor, layer: int, side: int, dtype: torch.dtype) -> Tensor:
        """What FP8 values [kv_heads, T, head_dim] stand for: times the scale in float32, then rounded to `dtype`."""
        return (stored.float() * self._factor(stored, layer, side)).to(dtype)

    def factors(self, layer: int) -> Tensor:
        """Of one layer, float32 [2 (K, V), kv_heads, 1, 1]."""
        return torch.from_numpy(self.values[layer].copy())[:, :, None, None]

    def _factor(self, like: Tensor, layer: int, side: int) -> Tensor:
        heads = self.values[layer, side]
        if like.dim() != 3 or like.shape[0] != len(heads):
            raise ValueError(f"scales of {len(heads)} heads do not fit a tensor of {list(like.shape)}")
        return torch.from_numpy(heads.copy())[:, None, None].to(like.device)
