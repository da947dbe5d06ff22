"""Arithmetic that gives the same bits on every machine (DESIGN 5).

Two kinds of operation, and no other, stand between a prompt and the integers a coder sees:

* reductions over integers, `product`, `product_int8` and `row_sum` alone: their operands are integers (or dyadic fractions on
  one grid), and every partial sum is exact in the type that adds them, so that any order of addition gives the same result;
* elementwise operations, each one correctly rounded IEEE operation: add, sub, mul, div by a tensor, sqrt, floor, round,
  compare, where, and casts.

Functions that a library would compute by an approximation of its own (exp, sin, cos) are polynomials here.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from codec.errors import InexactBackend

# The only functions that add values up; their callers state the bound.
EXACT_REDUCTIONS = (
    "product", "product_int8", "_int8_kernel", "_float32_product", "_int8_kernel_is_exact", "_int8_kernel_is_faster", "row_sum"
)  # fmt: skip
MANTISSA = 53  # integers of up to 53 bits are exact in float64
E4M3_MAX = 448.0
E4M3_UNITS = 18  # |e4m3 value| < 2**18 in units of 2**-9
ROW_MAX = 32639  # 127*256 + 127: what two signed 8-bit limbs can hold
PROBABILITY_BITS = 21  # attention weights, as integers
_INV_448 = 1.0 / 448.0
_INV_127 = 1.0 / 127.0
_FLOAT32_TERMS = 1024  # int8 products whose sum stays below 2**24
LOG2E = 1.4426950408889634
_NUMPY = {
    torch.float64: np.float64,
    torch.float32: np.float32,
    torch.int32: np.int32,
    torch.int16: np.int16,
    torch.uint8: np.uint8,
    torch.int8: np.int8,
}
# Minimax polynomial of 2**f on [0, 1) with p(0) = 1, degree 5 (our own fit by Lawson's iteration, relative error 8.3e-8).
EXP2 = (1.0, 0.6931512951850891, 0.24016444385051727, 0.05579991266131401, 0.009017030708491802, 0.001867129816673696)
# pi/2 in two parts; the first has 33 bits, so that n * _PIO2_HI is exact for n < 2**20 (Cody and Waite).
_PIO2_HI = 1.5707963267341256
_PIO2_LO = 6.077100506506192e-11
_TWO_OVER_PI = 0.6366197723675814
_SIN = tuple((-1.0) ** i / math.factorial(2 * i + 1) for i in range(8))
_COS = tuple((-1.0) ** i / math.factorial(2 * i) for i in range(9))


def bound(name: str, *bits: float) -> None:
    """Check that a reduction is exact: `bits` are the base-2 logarithms of its operands' bounds and of its length.

    Raises InexactBackend with the name of the reduction otherwise.
    """
    if sum(bits) > MANTISSA:
        raise InexactBackend(
            f"The sum '{name}' may need {sum(bits):.1f} bits, more than the {MANTISSA} that float64 holds exactly."
        )


def product(a: Tensor, b: Tensor) -> Tensor:
    """Exact matrix product over the last axis of `a` and the next-to-last of `b`: float64 in, float64 out.

    The caller has shown with `bound` that no partial sum exceeds 2**53 grid units.
    """
    return torch.matmul(a, b)


def product_int8(a: Tensor, b: Tensor) -> Tensor:
    """Exact product of int8 matrices [R, n] and [n, m] as int32 (n < 2**17), by the fastest backend that proved itself.

    Some processors' int8 kernels saturate (DESIGN 5); they fail the proof and float32 blocks are used instead. So they are
    where the int8 kernel is a plain loop: without VNNI it took 30 times as long.
    """
    # torch 2.13 does not even initialise the result for a width of 1
    serves = a.shape[1] > 1 and int8_kernel_serves(a.device)
    return _int8_kernel(a, b) if serves else _float32_product(a, b)


def _int8_kernel(a: Tensor, b: Tensor) -> Tensor:
    # of a row that is a transposed column torch 2.13 reads other memory: it takes the row's stride for the matrix's
    out = empty((len(a), b.shape[1]), torch.int32, a.device)
    return torch._int_mm(a.flatten()[None] if len(a) == 1 else a, b, out=out)


def empty(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """As torch.empty, of floats of 64 or 32 bits or integers of 32, 16 or 8.

    On a CPU the memory is numpy's: what torch asks for is aligned in a way that keeps glibc before 2.38 from giving the same place to
    the next tensor of the size, and a process that frees and takes large tensors grows by as much again.
    """
    if device.type != "cpu":
        return torch.empty(shape, dtype=dtype, device=device)
    return torch.from_numpy(np.empty(shape, _NUMPY[dtype]))


def cat(parts: Sequence[Tensor], dim: int) -> Tensor:
    """As torch.cat of tensors of one dtype and device, in memory as `empty` gives it; of one part nothing is copied."""
    if len(parts) == 1:
        return parts[0]
    shape = list(parts[0].shape)
    shape[dim] = sum(part.shape[dim] for part in parts)  # exact: counts
    return torch.cat(list(parts), dim, out=empty(shape, parts[0].dtype, parts[0].device))


def int8_kernel_serves(device: torch.device) -> bool:
    """Whether `product_int8` takes the int8 kernel; where it does not, whole integers in float64 may be cheaper than limbs."""
    return _int8_kernel_is_faster(device) and _int8_kernel_is_exact(device)


def _float32_product(a: Tensor, b: Tensor) -> Tensor:
    total: Tensor | None = None
    for i in range(0, a.shape[1], _FLOAT32_TERMS):
        j = i + _FLOAT32_TERMS
        part = torch.matmul(a[:, i:j].to(torch.float32), b[i:j].to(torch.float32)).to(torch.int32)
        total = part if total is None else total.add_(part)
    return torch.zeros(a.shape[0], b.shape[1], dtype=torch.int32, device=a.device) if total is None else total


@lru_cache(maxsize=16)
def _int8_kernel_is_faster(device: torch.device) -> bool:
    """Which of two exact ways is taken; it changes no bit."""
    a = torch.ones(64, 256, dtype=torch.int8, device=device)
    b = torch.ones(256, 256, dtype=torch.int8, device=device).T
    best = []
    for way in (_int8_kernel, _float32_product):
        times = []
        for _ in range(4):  # the first warms up
            begin = time.perf_counter()
            try:
                way(a, b)
            except RuntimeError:  # the build or the processor has no such kernel
                return False
            times.append(time.perf_counter() - begin)
        best.append(min(times[1:]))
    return best[0] < best[1]


@lru_cache(maxsize=16)
def _int8_kernel_is_exact(device: torch.device) -> bool:
    """Extreme int8 operands of every kind of shape against float64."""
    if device.type != "cpu":
        return False  # until it is proven there, with its limits on shapes
    i = torch.arange(96 * 1100, device=device).reshape(96, 1100)
    try:
        for a in (
            torch.full_like(i, 127),
            torch.full_like(i, -127),
            torch.where(i % 2 == 0, 127, -127),
            i * 7919 % 255 - 127,
            torch.where(i % 3 == 0, 127, -128),  # what a low limb may hold
        ):
            for rows in (1, 5, 96):
                left, right = a[:rows].to(torch.int8), a.to(torch.int8).T
                want = product(left.to(torch.float64), right.to(torch.float64))
                wide, tall = torch.cat([left, left], 1), torch.cat([right.T, right.T], 1)
                for x in (left, left.T.contiguous().T, wide[:, : left.shape[1]]):
                    for y in (right, right.contiguous(), right[:, :1].contiguous(), tall[:, len(right) :].T):
                        if not torch.equal(_int8_kernel(x, y).to(torch.float64), want[:, : y.shape[1]]):
                            return False
    except RuntimeError:  # the build or the processor has no such kernel
        return False
    return True


def row_sum(q: Tensor) -> Tensor:
    """Sum of integer-valued float64 over the last axis, kept as an axis of one."""
    return q.sum(-1, keepdim=True)


def pow2(exponent: Tensor) -> Tensor:
    """2**exponent as float32 for an int32 exponent in -126..127, by writing the exponent field."""
    return (exponent + 127).bitwise_left_shift_(23).view(torch.float32)


def row_integers(x: Tensor) -> tuple[Tensor, Tensor]:
    """Rows (last axis) as 15-bit integers of a power-of-two scale of their own.

    x: finite float32 [..., d]. Returns (q, scale): float32 integers |q| <= ROW_MAX, and float32 [..., 1] with x ~ q * scale.
    """
    _, e = torch.frexp(x.abs().amax(-1, keepdim=True))
    e = e.to(torch.int32)
    # the last values below a power of two would be cut off by up to 129 steps: they take the next scale
    e = torch.where(x.abs().amax(-1, keepdim=True) > pow2(e.clamp(-60, 100)) * (ROW_MAX / 32768.0), e + 1, e).clamp(
        -60, 100
    )
    q = torch.round(x * pow2(15 - e)).clamp(-ROW_MAX, ROW_MAX)
    return q, pow2(e - 15)


def limbs(q: Tensor) -> list[Tensor]:
    """Integer-valued float32 |q| <= ROW_MAX as two int8 limbs, low first: q = low + 256 * high."""
    high = torch.floor(q * (1.0 / 256.0) + 0.5)
    return [(q - high * 256.0).to(torch.int8), high.to(torch.int8)]


def quantise_e4m3(x: Tensor) -> tuple[Tensor, Tensor]:
    """FP8 activations, one scale a row: x float32 [..., d] -> (values on the e4m3 grid as float64, scale float32 [..., 1])."""
    scale = (x.abs().amax(-1, keepdim=True) * _INV_448).clamp_min(2.0**-100)
    q = (x / scale).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    return q.to(torch.float32).to(torch.float64), scale


def quantise_int8(x: Tensor) -> tuple[Tensor, Tensor]:
    """int8 activations, one scale a row: x float32 [..., d] -> (int8 in -127 .. 127, scale float32 [..., 1])."""
    scale = (x.abs().amax(-1, keepdim=True) * _INV_127).clamp_min(2.0**-100)
    return torch.round(x / scale).clamp(-127.0, 127.0).to(torch.int8), scale


def _horner(x: Tensor, coefficients: tuple[float, ...]) -> Tensor:
    y = torch.full_like(x, coefficients[-1])
    for c in reversed(coefficients[:-1]):
        y.mul_(x).add_(c)
    return y


def exp2_fraction(t: Tensor) -> tuple[Tensor, Tensor]:
    """2**t for float32 t in [-126, 0] as (p, n): p in [1, 2) is the polynomial of the fraction, n = floor(t) as int32."""
    n = torch.floor(t)
    return _horner(t - n, EXP2), n.to(torch.int32)


def exp_negative(x: Tensor) -> Tensor:
    """exp(x) for float32 x <= 0, to about 3e-7 relative; 2**-126 for anything smaller."""
    p, n = exp2_fraction((x * LOG2E).clamp_min(-126.0))
    return p * pow2(n)


def silu(x: Tensor) -> Tensor:
    """x * sigmoid(x), elementwise in float32, without overflow."""
    e = exp_negative(-x.abs())
    return x * torch.where(x < 0, e, torch.ones_like(e)) / (e + 1.0)


def weights_from_scores(t: Tensor, allowed: Tensor | None) -> tuple[Tensor, Tensor]:
    """Softmax numerators as integers: t float32 [..., keys] in base-2 logarithms -> (weights float64, their sum [..., 1]).

    The largest weight of a row is 2**PROBABILITY_BITS; keys that `allowed` (bool) excludes get 0. At least one is allowed.
    """
    if allowed is not None:
        t = torch.where(allowed, t, torch.full_like(t, -1e30))
    t = (t - t.amax(-1, keepdim=True)).clamp_min_(-100.0)
    p, n = exp2_fraction(t)
    w = p.mul_(pow2(n.add_(PROBABILITY_BITS))).round_().to(torch.float64)
    return w, row_sum(w)


def cos_sin(angle: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin of float64 angles in 0 .. 1.6e6, to about 1e-13, elementwise in float64."""
    n = torch.floor(angle * _TWO_OVER_PI + 0.5)
    r = (angle - n * _PIO2_HI) - n * _PIO2_LO
    z = r * r
    c, s = _horner(z, _COS), _horner(z, _SIN) * r
    quadrant = n.to(torch.int64) & 3
    odd = (quadrant & 1) == 1
    cos = torch.where(odd, s, c)
    sin = torch.where(odd, c, s)
    cos = torch.where((quadrant == 1) | (quadrant == 2), -cos, cos)
    return cos, torch.where(quadrant >= 2, -sin, sin)


def elementwise_sample(device: torch.device) -> bytes:
    """The functions above on a fixed grid, as bytes: float32 results, little-endian. Part of every known answer.

    A prompt's guesses show a changed last bit only where it survives quantisation; this shows it at once.
    """
    x = (torch.arange(-(1 << 14), 1 << 14, device=device) * 7919 % 65521).to(torch.float32) * (1.0 / 2048.0) - 16.0
    cos, sin = cos_sin(x.abs().to(torch.float64) * 977.0)
    q, scale = row_integers(x.view(64, -1))
    parts = [silu(x), exp_negative(-x.abs()), torch.sqrt(x.abs() + 1.0), cos, sin, q, scale]
    parts += [*weights_from_scores(x.view(64, -1), None), *quantise_e4m3(x.view(64, -1))]
    return b"".join(
        t.to(torch.float32).cpu().contiguous().view(torch.int32).numpy().astype("<i4").tobytes() for t in parts
    )


def prove_backend(device: torch.device | str = "cpu") -> None:
    """Run at start-up: extreme operands against exact integers, and the rounding casts against their definition.

    Raises InexactBackend when this device's arithmetic is not the one the codec relies on.
    """
    k = 4096
    a = torch.full((3, k), 229376.0, dtype=torch.float64, device=device)  # 448 in units of 2**-9
    a[1, ::2] = -229376.0
    a[2] = torch.arange(k, device=device).to(torch.float64) * 56.0 - 114688.0
    exact = [[sum(int(x) * int(y) for x, y in zip(r, s, strict=True)) for s in a.tolist()] for r in a.tolist()]
    if product(a, a.T.contiguous()).tolist() != [[float(v) for v in row] for row in exact]:
        raise InexactBackend(
            f"A float64 product of integers on {device} differs from integer arithmetic; this backend must not code."
        )
    grid = torch.arange(0, 127, dtype=torch.uint8, device=device).view(torch.float8_e4m3fn).to(torch.float32)
    middle = (grid[1:] + grid[:-1]) * 0.5
    even = (torch.arange(1, 127, device=device) & 1) == 0
    rounded = torch.where(even, grid[1:], grid[:-1])
    if not torch.equal(middle.to(torch.float8_e4m3fn).to(torch.float32), rounded):
        raise InexactBackend(
            f"The cast to FP8 e4m3 on {device} does not round half to even; this backend must not code."
        )
    probe = torch.tensor([1.00390625, 1.01171875, -1.00390625, 65535.0], device=device).to(torch.bfloat16)
    if probe.view(torch.int16).tolist() != [0x3F80, 0x3F82, 0x3F80 - 0x8000, 0x4780]:
        raise InexactBackend(f"The cast to bf16 on {device} does not round half to even; this backend must not code.")
