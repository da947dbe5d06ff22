"""Linear layers in exact arithmetic: one class a number format of weights and activations.

A layer's input is quantised once for each format that asks for it, whatever the number of projections that read it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from codec import exact

FORMATS = ("fp8", "int8", "int16")


class Inputs:
    """Rows float32 [R, in] that several linear layers read, quantised on demand."""

    def __init__(self, x: Tensor) -> None:
        self._x = x
        self._quantised: dict[str, tuple[Tensor, Tensor]] = {}

    def quantised(self, form: str) -> tuple[Tensor, Tensor]:
        """(integers or e4m3 values in the form that the format's product takes, scale float32 [R, 1])."""
        found = self._quantised.get(form)
        if found is None:
            found = self._quantised[form] = _QUANTISERS[form](self._x)
        return found


def _int16_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    q, scale = exact.row_integers(x)
    return q.to(torch.float64), scale


_QUANTISERS = {"fp8": exact.quantise_e4m3, "int8": exact.quantise_int8, "int16": _int16_rows}


@dataclass
class Linear:
    """y = x Wᵀ + b. weight [out, in]: bf16 (holding e4m3 values) for fp8, int8 or int16; scale float32 [out]; bias float32 or None.

    fp8: e4m3 weights and activations; int8: both int8; int16: 16-bit weights and 15-bit activations ("full precision").
    """

    form: str
    weight: Tensor
    scale: Tensor
    bias: Tensor | None

    def __call__(self, inputs: Inputs) -> Tensor:
        """float32 [R, out]"""
        q, scale = inputs.quantised(self.form)
        if self.form == "int8":
            total = exact.product_int8(q, self.weight.T).to(torch.float64)
        else:
            total = exact.product(q, self.weight.to(torch.float32).to(torch.float64).T)
        y = (total * scale.to(torch.float64) * self.scale.to(torch.float64)).to(torch.float32)
        return y if self.bias is None else y + self.bias


def quantise_weight(weight: Tensor, form: str) -> tuple[Tensor, Tensor]:  # exact: computed once and stored
    """float32 [out, in] -> (weights as stored: float8_e4m3fn, int8 or int16; scale float32 [out], one an output channel)."""
    top = {"fp8": exact.E4M3_MAX, "int8": 127.0, "int16": float(exact.ROW_MAX)}[form]
    scale = (weight.abs().amax(1) / top).clamp_min(2.0**-100)
    q = (weight / scale[:, None]).clamp(-top, top)
    if form == "fp8":
        return q.to(torch.float8_e4m3fn).contiguous(), scale.contiguous()
    return torch.round(q).to(torch.int8 if form == "int8" else torch.int16).contiguous(), scale.contiguous()


STORED_DTYPES = {"fp8": torch.float8_e4m3fn, "int8": torch.int8, "int16": torch.int16}
