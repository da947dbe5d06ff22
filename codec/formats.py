"""The number formats a cache can be stored in, seen as bit patterns.

A pattern is sign and magnitude; magnitudes are ordered as integers ("ordinals"), which is all the residual model needs.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from codec.errors import UnsupportedFormat


@dataclass(frozen=True)
class NumberFormat:
    """A binary floating-point format: `bits` wide, `mantissa` stored mantissa bits, least normal exponent `emin`."""

    name: str
    code: int  # its number in a blob's header
    bits: int
    mantissa: int
    emin: int
    max_finite: float
    dtype: torch.dtype

    @property
    def first_nonfinite(self) -> int:
        """The ordinal of infinity: magnitudes from here up are infinities and NaNs."""
        return ((1 << (self.bits - 1 - self.mantissa)) - 1) << self.mantissa

    @property
    def item_bytes(self) -> int:
        """Bytes a value takes uncompressed."""
        return self.bits // 8

    def patterns(self, values: Tensor) -> NDArray[np.int64]:
        """Bit patterns of a tensor of this dtype, any shape, as non-negative int64 in a contiguous array."""
        if values.dtype != self.dtype:
            raise UnsupportedFormat(
                f"A tensor of {values.dtype} was given where the cache format is {self.name} ({self.dtype})."
            )
        raw = values.detach().contiguous().cpu().view(torch.int16).numpy()
        return raw.astype(np.int64) & ((1 << self.bits) - 1)

    def tensor(self, patterns: NDArray[np.int64]) -> Tensor:
        """The tensor of this dtype with these bit patterns (the inverse of `patterns`)."""
        return torch.from_numpy(patterns.astype(np.uint16).view(np.int16).copy()).view(self.dtype)

    def little_endian(self, values: Tensor) -> bytes:
        """The raw bytes that checksums are taken over: values in the given order, each little-endian."""
        raw = values.detach().contiguous().cpu().view(torch.int16).numpy()
        return raw.astype("<i2", copy=False).tobytes()


BF16 = NumberFormat("bf16", 1, 16, 7, -126, float(torch.finfo(torch.bfloat16).max), torch.bfloat16)
FP16 = NumberFormat("fp16", 2, 16, 10, -14, 65504.0, torch.float16)
FORMATS = {f.name: f for f in (BF16, FP16)}
_BY_CODE = {f.code: f for f in FORMATS.values()}


def number_format(name: str) -> NumberFormat:
    """The format of that name; raises UnsupportedFormat naming those that exist."""
    try:
        return FORMATS[name]
    except KeyError:
        raise UnsupportedFormat(
            f"Cache format '{name}' is unknown; supported are {', '.join(sorted(FORMATS))}."
        ) from None


def format_by_code(code: int) -> NumberFormat | None:
    """The format with that number in a blob's header, or None."""
    return _BY_CODE.get(code)
