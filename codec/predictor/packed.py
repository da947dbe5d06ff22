"""4-bit weights: integers or e2m1 values in groups of 32 inputs, each group with a scale of its own.

A weight is `scale * multiplier * value`: a float scale an output channel, a small integer a group, a value of 4 bits. Multipliers are
bounded so that `multiplier * value` fits int8: one plain int8 product does what would else be a product a group. Those of mxfp4 are
powers of two, as MXFP4 has them; int4 takes all of 1 .. 16, which fits its groups better for the same bits.

Stored: nibbles uint8 [out, 16 * groups], two inputs a byte, the first in the low half, zeros beyond the last input; multipliers as
indices into their list, uint8 [out, (groups + 1) // 2], two groups a byte in the same order.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from codec import exact
from codec.errors import PredictorError

GROUP = 32


class Form(NamedTuple):
    """What the 16 nibbles mean, as integers; nibble 8 (-8, or -0) is never written."""

    values: tuple[int, ...]
    multipliers: tuple[int, ...]
    scales: tuple[float, ...]  # tried for a channel, in units of the least that reaches its largest weight
    fits: tuple[float, ...]  # tried for a group, in units of its largest weight
    power_of_two: bool  # the channel's scale is one as well


_HALVES = (0, 1, 2, 3, 4, 6, 8, 12)  # twice 0, 0.5, 1, 1.5, 2, 3, 4, 6
FORMS = {
    "int4": Form(
        (*range(8), *range(-8, 0)), tuple(range(1, 17)), (0.8, 0.9, 1.0), (0.7, 0.8, 0.9, 1.0), False
    ),  # to 7 * 16
    "mxfp4": Form((*_HALVES, *(-v for v in _HALVES)), (1, 2, 4, 8), (0.5, 1.0, 2.0), (0.5, 1.0), True),  # to 12 * 8
}


def stored_shapes(out: int, width: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """Shapes of nibbles and shifts of a weight [out, width]."""
    groups = -(-width // GROUP)
    return (out, groups * GROUP // 2), (out, (groups + 1) // 2)


def unpack(name: str, form: str, nibbles: Tensor, shifts: Tensor, width: int) -> Tensor:
    """Stored tensors to int8 [out, width]; raises PredictorError for what no encoder writes. `name` is for the message."""
    kind, groups = FORMS[form], -(-width // GROUP)
    codes, index = _halves(nibbles), _halves(shifts)
    wrong = bool((codes == 8).any()) or bool((codes[:, width:] != 0).any())
    if wrong or bool((index >= len(kind.multipliers)).any()) or bool((index[:, groups:] != 0).any()):
        raise PredictorError(f"The predictor's tensor '{name}' holds 4-bit codes out of range; the file is corrupt.")
    values, multipliers = (
        torch.tensor(t, dtype=torch.int8, device=nibbles.device) for t in (kind.values, kind.multipliers)
    )
    spread = multipliers[index[:, :groups].to(torch.int64)].repeat_interleave(GROUP, 1)
    return (values[codes.to(torch.int64)] * spread)[:, :width].contiguous()


def quantise(weight: Tensor, form: str) -> tuple[Tensor, Tensor, Tensor]:  # exact: computed once and stored
    """float32 [out, in] -> (nibbles, multipliers, scale float32 [out]) with the least squared error among those tried."""
    out, width = weight.shape
    kind, groups = FORMS[form], -(-width // GROUP)
    grouped = torch.nn.functional.pad(weight, (0, groups * GROUP - width)).view(out, groups, GROUP)
    most = float(max(kind.values) * max(kind.multipliers))
    start = (grouped.abs().amax((1, 2)) / most).clamp_min(2.0**-100)
    if kind.power_of_two:
        start = exact.pow2(torch.ceil(torch.log2(start)).to(torch.int32))
    best, scale = torch.full((out,), torch.inf), start
    for trial in kind.scales:
        error, _ = _best_multipliers(grouped, start * trial, kind)
        better = error < best
        best, scale = torch.where(better, error, best), torch.where(better, start * trial, scale)
    _, index = _best_multipliers(grouped, scale, kind)
    codes = _codes(grouped / _steps(scale, index, kind), kind).view(out, -1)
    return _pairs(codes), _pairs(torch.nn.functional.pad(index, (0, groups % 2))), scale.contiguous()


def _steps(scale: Tensor, index: Tensor, kind: Form) -> Tensor:
    return (scale[:, None] * torch.tensor(kind.multipliers, dtype=torch.float32)[index])[:, :, None]


def _best_multipliers(  # exact: computed once and stored
    grouped: Tensor, scale: Tensor, kind: Form
) -> tuple[Tensor, Tensor]:
    """The squared error of a channel [out] with the best multiplier of each group, and their indices int64 [out, groups]."""
    best = torch.full(grouped.shape[:2], torch.inf)
    chosen = torch.zeros(grouped.shape[:2], dtype=torch.int64)
    values = torch.tensor(kind.values, dtype=torch.float32)
    multipliers = torch.tensor(kind.multipliers, dtype=torch.float32)
    wanted = grouped.abs().amax(2) / (scale[:, None] * max(kind.values))
    for fit in kind.fits:
        index = torch.bucketize(wanted * fit, multipliers).clamp_max(len(multipliers) - 1)
        steps = _steps(scale, index, kind)
        error = (values[_codes(grouped / steps, kind)] * steps - grouped).square().sum(2)
        better = error < best
        best, chosen = torch.where(better, error, best), torch.where(better, index, chosen)
    return best.sum(1), chosen


def _codes(x: Tensor, kind: Form) -> Tensor:
    """The nearest value's nibble, int64, for x in units of a step."""
    values = torch.tensor(kind.values[:8], dtype=torch.float32)
    code = torch.bucketize(x.abs(), (values[1:] + values[:-1]) * 0.5)
    negative = (x < 0) & (code > 0)
    two_complement = kind.values[15] == -1
    return torch.where(negative, 16 - code if two_complement else code + 8, code)


def _pairs(codes: Tensor) -> Tensor:
    """Two 4-bit codes a byte, along the last axis."""
    both = codes.to(torch.uint8)
    return (both[:, 0::2] | (both[:, 1::2] << 4)).contiguous()


def _halves(packed: Tensor) -> Tensor:
    """The inverse: uint8 [out, 2n]."""
    return torch.stack([packed & 15, packed >> 4], 2).view(len(packed), -1)
