"""Linear layers in exact arithmetic: one class a number format of weights and activations.

A layer's input is quantised once for each format that asks for it, whatever the number of projections that read it.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor

from codec import exact
from codec.predictor import fused, packed

FORMS = ("fp8", "int8", "int8-a16", "int16", "int4", "mxfp4")
STORED_DTYPES = {"fp8": torch.float8_e4m3fn, "int8": torch.int8, "int8-a16": torch.int8, "int16": torch.int16,
                 "int4": torch.uint8, "mxfp4": torch.uint8}  # fmt: skip
_ACTIVATIONS = {"fp8": "fp8", "int8": "int8", "int8-a16": "int15", "int16": "int15", "int4": "int8", "mxfp4": "int8"}
_LIMB = 256.0


class Inputs:
    """Rows float32 [R, in] that several linear layers read, quantised on demand."""

    def __init__(self, x: Tensor) -> None:
        self._x = x
        self._quantised: dict[str, tuple[Tensor, Tensor]] = {}

    def quantised(self, form: str) -> tuple[Tensor, Tensor]:
        """(rows, scale float32 [R, 1]): e4m3 values as float64 [R, in], int8 integers [R, in], 15-bit integers as int8 limbs
        [2 R, in]: all low ones, then the high ones."""
        found = self._quantised.get(form)
        if found is None:
            found = self._quantised[form] = _quantise(self._x, form)
        return found


def _quantise(x: Tensor, form: str) -> tuple[Tensor, Tensor]:
    if form == "fp8":
        return exact.quantise_e4m3(x)
    if form == "int8":
        return fused.int8(x) if fused.serves(x.device) else exact.quantise_int8(x)
    if fused.serves(x.device):
        return fused.limbs(x)
    q, scale = exact.row_integers(x)
    return torch.cat(exact.limbs(q)), scale


class Linear:
    """y = x Wᵀ + b, with scales that belong to a row of x or to an output channel.

    fp8: e4m3 weights and activations; int8: both int8; int8-a16: int8 weights, 15-bit activations; int16: 16-bit weights and
    15-bit activations ("full precision"); int4, mxfp4: 4-bit weights spread to int8 (`packed`), int8 activations. What has more than
    8 bits is summed in int8 limbs.
    """

    def __init__(self, form: str, weight: Tensor, scale: Tensor, bias: Tensor | None) -> None:
        """weight: as stored, or what `packed.unpack` made of it, [out, in]; scale float32 [out]; bias float32 [out] or None; all
        on one device."""
        self.form, self.scale, self.bias = form, scale.to(torch.float64), bias
        self._whole: Tensor | None = None  # 16-bit weights for a float64 product, which is exact: 15 + 15 + 18 bits
        if form == "fp8":
            # e4m3 values are bf16 values, and those convert faster.
            self._limbs = [weight.to(torch.float32).to(torch.bfloat16)]
        elif form == "int16":
            self._limbs = [limb.T for limb in exact.limbs(weight.to(torch.float32))]
            self._whole = weight
        else:
            self._limbs = [weight.T]

    def in_form(self, form: str) -> Linear:
        """The same integer weights under activations of another form."""
        other = copy.copy(self)
        other.form = form
        return other

    def __call__(self, inputs: Inputs) -> Tensor:
        """float32 [R, out]"""
        rows, scale = inputs.quantised(_ACTIVATIONS[self.form])
        if self.form == "fp8":
            total = exact.product(rows, self._limbs[0].to(torch.float32).to(torch.float64).T)
        elif self._whole is not None and not exact.int8_kernel_serves(self.scale.device):
            total = exact.product(whole(rows), self._whole.to(torch.float64).T)
        else:
            products = [
                exact.product_int8(rows, w) for w in self._limbs
            ]  # stacked: a weight is converted once, where it must be
            if fused.serves(rows.device):
                return fused.dequantise(products, scale, self.scale, self.bias)
            total = _whole_product(products, len(scale))
        y = total.mul_(scale.to(torch.float64)).mul_(self.scale).to(torch.float32)
        return y if self.bias is None else y + self.bias


def _whole_product(products: list[Tensor], rows: int) -> Tensor:
    """Products of limbs, int32 [limbs * rows, out] a limb of the weight, combined in float64."""
    total: Tensor | None = None
    for j, product in enumerate(products):
        for i, found in enumerate(product.chunk(max(1, len(product) // max(1, rows)))):
            part = found.to(torch.float64)
            if i + j:
                part.mul_(_LIMB ** (i + j))  # exact: a power of two
            total = part if total is None else total.add_(part)
    assert total is not None
    return total


def whole(limbs: Tensor) -> Tensor:
    """int8 limbs [2 R, n], low ones first, as the float64 integers they stand for."""
    low, high = limbs.to(torch.float64).chunk(2)
    return high.mul_(_LIMB).add_(low)


def quantise_weight(weight: Tensor, form: str) -> dict[str, Tensor]:  # exact: computed once and stored
    """float32 [out, in] -> what is stored of it: `weight` in STORED_DTYPES, `scale` float32 [out], and for packed forms `shift`."""
    if form in packed.FORMS:
        nibbles, shift, scale = packed.quantise(weight, form)
        return {"weight": nibbles, "shift": shift, "scale": scale}
    top = {"fp8": exact.E4M3_MAX, "int16": float(exact.ROW_MAX)}.get(form, 127.0)
    scale = (weight.abs().amax(1) / top).clamp_min(2.0**-100)
    q = (weight / scale[:, None]).clamp(-top, top)
    if form != "fp8":
        q = torch.round(q)
    return {"weight": q.to(STORED_DTYPES[form]).contiguous(), "scale": scale.contiguous()}
