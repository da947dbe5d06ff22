"""The number formats a cache can be stored in, seen as bit patterns.

A pattern is sign and magnitude; magnitudes are ordered as integers ("ordinals"), which is all the residual model needs. What is
coded under a model has at most 10 mantissa bits: of a wider format the pattern is *split* into the nearest value with so many
(the coded pattern) and the raw bits that tell its neighbours apart.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from codec.errors import UnsupportedFormat

Ints = NDArray[np.int64]
Items = NDArray[np.unsignedinteger[Any]]

_STORED: dict[int, tuple[torch.dtype, type[np.generic], type[np.generic]]] = {
    8: (torch.uint8, np.uint8, np.uint8),
    16: (torch.int16, np.int16, np.uint16),
    32: (torch.int32, np.int32, np.uint32),
}  # item bits: torch's view, numpy's, and the unsigned one


@dataclass(frozen=True)
class NumberFormat:
    """A binary floating-point format. Of a coded pattern: `bits` with the sign, `mantissa` bits, least normal exponent `emin`,
    the ordinal `first_nonfinite` from which on magnitudes are infinities and NaNs. `raw` bits more are stored as they are.
    """

    name: str
    code: int  # its number in a blob's header
    bits: int
    mantissa: int
    emin: int
    first_nonfinite: int
    max_finite: float
    dtype: torch.dtype
    raw: int = 0

    @property
    def item_bits(self) -> int:
        """Bits a value takes uncompressed."""
        return self.dtype.itemsize * 8

    @property
    def item_bytes(self) -> int:
        """Bytes a value takes uncompressed."""
        return self.dtype.itemsize

    @property
    def coarse(self) -> bool:
        """Whether a pattern tells a bin rather than a value: an FP8 cache, which has scales and saturates."""
        return self.item_bits == 8

    def patterns(self, values: Tensor) -> Ints:
        """Bit patterns of a tensor of this dtype, any shape, as non-negative int64 in a contiguous array."""
        return self.items(values).astype(np.int64)

    def items(self, values: Tensor) -> Items:
        """The same as unsigned integers of the format's size, which may share the tensor's memory."""
        if values.dtype != self.dtype:
            raise UnsupportedFormat(
                f"A tensor of {values.dtype} was given where the cache format is {self.name} ({self.dtype})."
            )
        return self._raw(values).view(_STORED[self.item_bits][2])

    def empty(self, shape: tuple[int, ...]) -> Items:
        """Room for items."""
        return np.empty(shape, _STORED[self.item_bits][2])

    def tensor(self, patterns: Ints) -> Tensor:
        """The tensor of this dtype with these bit patterns (the inverse of `patterns`)."""
        return self.shared(patterns.astype(_STORED[self.item_bits][2], order="C"))

    def shared(self, items: Items) -> Tensor:
        """The tensor of contiguous items, which shares their memory."""
        return torch.from_numpy(items.view(_STORED[self.item_bits][1])).view(self.dtype)

    def values(self, patterns: Ints) -> NDArray[np.float64]:
        """The numbers that patterns stand for, exactly."""
        numbers: NDArray[np.float64] = self.tensor(patterns).to(torch.float32).to(torch.float64).numpy()
        return numbers

    def little_endian(self, values: Tensor) -> bytes:
        """The raw bytes that checksums are taken over: values in the given order, each little-endian."""
        raw = self._raw(values)
        return bytes(raw.astype(raw.dtype.newbyteorder("<"), copy=False).tobytes())

    def split(self, patterns: Ints) -> tuple[Ints, Ints]:
        """Whole patterns to (coded patterns, raw bits). Coded is the nearest value with `mantissa` bits."""
        if not self.raw:
            return patterns, np.zeros_like(patterns)
        magnitude = patterns & ((1 << (self.item_bits - 1)) - 1)
        sign = patterns >> (self.item_bits - 1)
        moved = magnitude + (1 << (self.raw - 1))
        return (sign << (self.bits - 1)) | (moved >> self.raw), moved & ((1 << self.raw) - 1)

    def join(self, coded: Ints, raw: Ints) -> Ints:
        """The inverse of `split`; of what `split` cannot give (a corrupt stream), any pattern."""
        if not self.raw:
            return coded
        sign, high = coded >> (self.bits - 1), coded & ((1 << (self.bits - 1)) - 1)
        magnitude = ((high << self.raw) | raw) - (1 << (self.raw - 1))
        return (sign << (self.item_bits - 1)) | (magnitude & ((1 << (self.item_bits - 1)) - 1))

    def _raw(self, values: Tensor) -> NDArray[np.generic]:
        view = _STORED[self.item_bits][0]
        raw: NDArray[np.generic] = values.detach().contiguous().cpu().view(view).numpy()
        return raw


BF16 = NumberFormat("bf16", 1, 16, 7, -126, 255 << 7, float(torch.finfo(torch.bfloat16).max), torch.bfloat16)
FP16 = NumberFormat("fp16", 2, 16, 10, -14, 31 << 10, 65504.0, torch.float16)
# coded with 10 mantissa bits; rounding the largest NaNs up needs one more bit of magnitude
FP32 = NumberFormat("fp32", 3, 20, 10, -126, 255 << 10, float(torch.finfo(torch.float32).max), torch.float32, raw=13)
FP8_E4M3 = NumberFormat("fp8_e4m3", 4, 8, 3, -6, 127, 448.0, torch.float8_e4m3fn)  # no infinities
FP8_E5M2 = NumberFormat("fp8_e5m2", 5, 8, 2, -14, 31 << 2, 57344.0, torch.float8_e5m2)
FORMATS = {f.name: f for f in (BF16, FP16, FP32, FP8_E4M3, FP8_E5M2)}
BY_SHAPE = {(f.bits, f.mantissa, f.raw): f for f in FORMATS.values()}
_BY_CODE = {f.code: f for f in FORMATS.values()}


def number_format(name: str) -> NumberFormat:
    """The format of that name; raises UnsupportedFormat naming those that exist."""
    try:
        return FORMATS[name]
    except KeyError:
        raise UnsupportedFormat(
            f"Cache format '{name}' is unknown; supported are {', '.join(sorted(FORMATS))}."
        ) from None


def bits(values: Tensor) -> Tensor:
    """The bit patterns of a tensor of any float dtype, as integers: a view."""
    return values.view(_STORED[8 * values.element_size()][0])


def format_by_code(code: int) -> NumberFormat | None:
    """The format with that number in a blob's header, or None."""
    return _BY_CODE.get(code)
