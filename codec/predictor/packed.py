"""4-bit weights: integers or e2m1 values in groups of 32 inputs, each group with a power-of-two scale of its own.

A weight is `scale * 2**shift * value`: a float scale an output channel, a small shift a group, a value of 4 bits. The span of the
shifts is bounded so that `2**shift * value` fits int8: one plain int8 product does what would else be a product a group.

Stored: nibbles uint8 [out, 16 * groups], two inputs a byte, the first in the low half, zeros beyond the last input; shifts uint8
[out, (groups + 1) // 2], two groups a byte in the same order.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from codec import exact
from codec.errors import PredictorError

GROUP = 32


class Form(NamedTuple):
    """What the 16 nibbles mean, as integers, and how far groups may be shifted."""

    values: tuple[int, ...]
    shifts: int  # 0 .. shifts - 1
    forbidden: int  # a nibble that is never written, or -1
    power_of_two: bool  # the channel's scale is one as well


_HALVES = (0, 1, 2, 3, 4, 6, 8, 12)  # twice 0, 0.5, 1, 1.5, 2, 3, 4, 6
FORMS = {
    "int4": Form((*range(8), *range(-8, 0)), 5, 8, False),  # 7 * 2**4 = 112
    "mxfp4": Form((*_HALVES, *(-v for v in _HALVES)), 4, 8, True),  # 12 * 2**3 = 96
}
_TRIALS = 8  # channel scales tried within an octave


def stored_shapes(out: int, width: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """Shapes of nibbles and shifts of a weight [out, width]."""
    groups = -(-width // GROUP)
    return (out, groups * GROUP // 2), (out, (groups + 1) // 2)


def unpack(name: str, form: str, nibbles: Tensor, shifts: Tensor, width: int) -> Tensor:
    """Stored tensors to int8 [out, width]; raises PredictorError for what no encoder writes. `name` is for the message."""
    kind, groups = FORMS[form], -(-width // GROUP)
    codes, shift = _halves(nibbles), _halves(shifts)
    wrong = bool((codes == kind.forbidden).any()) or bool((codes[:, width:] != 0).any())
    if wrong or bool((shift >= kind.shifts).any()) or bool((shift[:, groups:] != 0).any()):
        raise PredictorError(f"The predictor's tensor '{name}' holds 4-bit codes out of range; the file is corrupt.")
    table = torch.tensor(kind.values, dtype=torch.int8, device=nibbles.device)
    spread = shift[:, :groups].repeat_interleave(GROUP, 1)
    return (table[codes.to(torch.int64)] << spread.to(torch.int8))[:, :width].contiguous()


def quantise(weight: Tensor, form: str) -> tuple[Tensor, Tensor, Tensor]:  # exact: computed once and stored
    """float32 [out, in] -> (nibbles, shifts, scale float32 [out]) with the least squared error among the scales tried."""
    out, width = weight.shape
    kind, groups = FORMS[form], -(-width // GROUP)
    grouped = torch.nn.functional.pad(weight, (0, groups * GROUP - width)).view(out, groups, GROUP)
    largest = grouped.abs().amax((1, 2))
    most = float(max(kind.values)) * 2.0 ** (kind.shifts - 1)
    start = (largest / most).clamp_min(2.0**-100)
    if kind.power_of_two:
        start = torch.exp2(torch.floor(torch.log2(start)))
        trials = [start, start * 2.0]
    else:
        trials = [start * 2.0 ** (i / _TRIALS - 0.5) for i in range(_TRIALS)]
    best, scale = torch.full((out,), torch.inf), start
    for trial in trials:
        error = _best_shifts(grouped, trial, kind)[0]
        better = error < best
        best, scale = torch.where(better, error, best), torch.where(better, trial, scale)
    _, shift = _best_shifts(grouped, scale, kind)
    codes = _codes(grouped / _steps(scale, shift), kind).view(out, -1)
    return _pairs(codes), _pairs(torch.nn.functional.pad(shift, (0, groups % 2))), scale.contiguous()


def _steps(scale: Tensor, shift: Tensor) -> Tensor:
    return scale[:, None, None] * exact.pow2(shift)[:, :, None]


def _best_shifts(
    grouped: Tensor, scale: Tensor, kind: Form
) -> tuple[Tensor, Tensor]:  # exact: computed once and stored
    """The squared error of a channel [out] with the best shift of each group, and these shifts int32 [out, groups]."""
    best = torch.full(grouped.shape[:2], torch.inf)
    shift = torch.zeros(grouped.shape[:2], dtype=torch.int32)
    table = torch.tensor(kind.values, dtype=torch.float32)
    for s in range(kind.shifts):
        at = torch.full_like(shift, s)
        steps = _steps(scale, at)
        error = (table[_codes(grouped / steps, kind)] * steps - grouped).square().sum(2)
        better = error < best
        best, shift = torch.where(better, error, best), torch.where(better, at, shift)
    return best.sum(1), shift


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
