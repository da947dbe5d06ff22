"""The predictor's elementwise work in compiled loops: one pass over memory where torch makes ten.

Each loop does what the operations it stands for do (codec.exact, linear, decoder): one correctly rounded operation after
another, in the same types and order, and sums of integers; so it gives the same bits, which tests/test_fused.py shows. Loops run on a
CPU alone, rows shared among as many threads as torch has; elsewhere torch's own operations are taken.

Shapes: R rows, n columns. Inputs are finite.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from codec import exact
from codec.kernels import compiled, inlined

Singles = NDArray[np.float32]
Doubles = NDArray[np.float64]
Bits = NDArray[np.int32]
Bytes = NDArray[np.int8]
Shorts = NDArray[np.int16]

ENABLED = True  # tests turn it off, to compare
_ROWS_A_THREAD = 16
_ONE, _ZERO = np.float32(1.0), np.float32(0.0)
_INV_127, _LEAST_SCALE = np.float32(1.0 / 127.0), np.float32(2.0**-100)
_LOG2E = np.float32(exact.LOG2E)
_C0, _C1, _C2, _C3, _C4, _C5 = (np.float32(c) for c in exact.EXP2)
_ROW_MAX, _SHARE = np.float32(exact.ROW_MAX), np.float32(exact.ROW_MAX / 32768.0)
MAGNITUDE = np.int32(0x7FFFFFFF)


def serves(device: torch.device) -> bool:
    """Whether tensors on a device go through these loops."""
    return ENABLED and device.type == "cpu"


@lru_cache(maxsize=4)
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="rows")


def over_rows(loop: Callable[..., Any], rows: int, *arguments: Any) -> None:
    """Run loop(begin, end, *arguments) over all rows, on as many threads as torch uses."""
    parts = min(torch.get_num_threads(), rows // _ROWS_A_THREAD)
    if parts < 2:
        loop(0, rows, *arguments)
        return
    edges = [rows * i // parts for i in range(parts + 1)]
    for done in [_pool(parts).submit(loop, a, b, *arguments) for a, b in pairwise(edges)]:
        done.result()


def array(x: Tensor) -> Any:
    return x.contiguous().numpy()


# ---------------------------------------------------------------- parts of loops
@inlined
def pow2(exponent: int) -> Any:
    """exact.pow2"""
    return np.int32((exponent + 127) << 23).view(np.float32)


@inlined
def _largest(bits: Bits, i: int) -> Any:
    """The bits of the largest magnitude in a row of float32."""
    top = np.int32(0)
    for j in range(bits.shape[1]):
        top = max(top, bits[i, j] & MAGNITUDE)
    return top


@inlined
def _exponent(top: int) -> Any:
    """The exponent by which exact.row_integers scales a row whose largest magnitude has these bits."""
    e = (top >> 23) - 126 if top > 0 else 0
    if np.int32(top).view(np.float32) > pow2(min(max(e, -60), 100)) * _SHARE:
        e += 1
    return min(max(e, -60), 100)


@inlined
def _integer(x: Any, factor: Any) -> Any:
    """One value of exact.row_integers, as float32."""
    return min(max(np.rint(x * factor), -_ROW_MAX), _ROW_MAX)


@inlined
def exp2_fraction(t: Any, n: Any) -> Any:
    """The polynomial of exact.exp2_fraction; n is floor(t)."""
    f = t - n
    y = _C5 * f + _C4
    y = y * f + _C3
    y = y * f + _C2
    y = y * f + _C1
    return y * f + _C0


# ---------------------------------------------------------------- rows as integers
@compiled
def _limbs(begin: int, end: int, x: Singles, bits: Bits, limbs: Bytes, scale: Singles) -> None:
    rows, n = x.shape
    for i in range(begin, end):
        e = _exponent(_largest(bits, i))
        factor = pow2(15 - e)
        scale[i, 0] = pow2(e - 15)
        for j in range(n):
            q = np.int32(_integer(x[i, j], factor))
            high = (q + np.int32(128)) >> np.int32(8)
            limbs[i, j], limbs[rows + i, j] = np.int8(q - (high << np.int32(8))), np.int8(high)


def limbs(x: Tensor) -> tuple[Tensor, Tensor]:
    """float32 [R, n] -> exact.limbs of exact.row_integers, low limbs of all rows, then high ones: int8 [2 R, n]; scales float32 [R, 1]."""
    a = array(x)
    out, scale = np.empty((2 * a.shape[0], a.shape[1]), np.int8), np.empty((a.shape[0], 1), np.float32)
    over_rows(_limbs, a.shape[0], a, a.view(np.int32), out, scale)
    return torch.from_numpy(out), torch.from_numpy(scale)


@compiled
def _int8(begin: int, end: int, x: Singles, bits: Bits, out: Bytes, scale: Singles) -> None:
    for i in range(begin, end):
        top = _largest(bits, i)
        s = max(np.int32(top).view(np.float32) * _INV_127, _LEAST_SCALE)
        scale[i, 0] = s
        for j in range(x.shape[1]):
            out[i, j] = np.int8(min(max(np.rint(x[i, j] / s), np.float32(-127.0)), np.float32(127.0)))


def int8(x: Tensor) -> tuple[Tensor, Tensor]:
    """exact.quantise_int8 of float32 [R, n]."""
    a = array(x)
    out, scale = np.empty(a.shape, np.int8), np.empty((a.shape[0], 1), np.float32)
    over_rows(_int8, a.shape[0], a, a.view(np.int32), out, scale)
    return torch.from_numpy(out), torch.from_numpy(scale)


@compiled
def _row_integers(begin: int, end: int, x: Singles, bits: Bits, out: Doubles, scale: Singles) -> None:
    for i in range(begin, end):
        e = _exponent(_largest(bits, i))
        factor = pow2(15 - e)
        scale[i, 0] = pow2(e - 15)
        for j in range(x.shape[1]):
            out[i, j] = np.float64(_integer(x[i, j], factor))


def row_integers(x: Tensor) -> tuple[Tensor, Tensor]:
    """exact.row_integers of float32 [..., n], its integers as float64."""
    a = array(x)
    rows = a.reshape(-1, a.shape[-1])
    out, scale = np.empty(rows.shape), np.empty((len(rows), 1), np.float32)
    over_rows(_row_integers, len(rows), rows, rows.view(np.int32), out, scale)
    return torch.from_numpy(out.reshape(a.shape)), torch.from_numpy(scale.reshape(*a.shape[:-1], 1))


@compiled
def _seen(
    begin: int,
    end: int,
    k: Singles,
    bits: Bits,
    v: Singles,
    steps: Singles,
    keys: Shorts,
    scale: Singles,
    values: Shorts,
) -> None:
    for i in range(begin, end):
        e = _exponent(_largest(bits, i))
        factor, step = pow2(15 - e), steps[i // (k.shape[0] // steps.shape[0])]
        scale[i, 0] = pow2(e - 15)
        for j in range(k.shape[1]):
            keys[i, j] = np.int16(_integer(k[i, j], factor))
        for j in range(k.shape[1]):
            values[i, j] = np.int16(min(max(np.rint(v[i, j] / step), -_ROW_MAX), _ROW_MAX))


def seen(k: Tensor, v: Tensor, value_step: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """memory.Seen.of: keys int16 [J, S, D], their scales float32 [J, S, 1], values int16 [J, S, D]."""
    a, b = (array(x).reshape(-1, x.shape[-1]) for x in (k, v))
    keys, values = np.empty(a.shape, np.int16), np.empty(a.shape, np.int16)
    scale = np.empty((len(a), 1), np.float32)
    over_rows(_seen, len(a), a, a.view(np.int32), b, array(value_step).reshape(-1), keys, scale, values)
    one, two, three = (torch.from_numpy(x).view(*k.shape[:-1], x.shape[1]) for x in (keys, scale, values))
    return one, two, three


# ---------------------------------------------------------------- between products
@compiled
def _dequantise(
    begin: int, end: int, one: Bits, two: Bits, rows: int, row: Singles, column: Doubles, bias: Singles, out: Singles
) -> None:
    n = out.shape[1]
    total = np.empty(n)
    for i in range(begin, end):
        for j in range(n):
            total[j] = np.float64(one[i, j])
        factor = 1.0
        for k in range(i + rows, one.shape[0], rows):
            factor *= 256.0
            for j in range(n):
                total[j] += np.float64(one[k, j]) * factor
        factor = 1.0
        for k in range(i, two.shape[0], rows):
            factor *= 256.0
            for j in range(n):
                total[j] += np.float64(two[k, j]) * factor
        scale = np.float64(row[i, 0])
        for j in range(n):
            out[i, j] = np.float32((total[j] * scale) * column[j])
        if bias.shape[0]:
            for j in range(n):
                out[i, j] += bias[j]


def dequantise(products: list[Tensor], row: Tensor, column: Tensor, bias: Tensor | None) -> Tensor:
    """What integer products come to: float32 [R, n].

    products: int32 [limbs * R, n] for each limb of the weight, rows' limbs one after another, low first; at most two. row: float32
    [R, 1]; column: float64 [n]; bias: float32 [n].
    """
    one, none = products[0].numpy(), np.zeros((0, products[0].shape[1]), np.int32)
    two = products[1].numpy() if len(products) > 1 else none
    out = np.empty((len(row), one.shape[1]), np.float32)
    more = np.zeros(0, np.float32) if bias is None else bias.numpy()
    over_rows(_dequantise, len(row), one, two, len(row), row.numpy(), column.numpy(), more, out)
    return torch.from_numpy(out)


@compiled
def _norm(
    begin: int, end: int, x: Singles, bits: Bits, weight: Singles, eps: float, share: float, out: Singles, rms: Singles
) -> None:
    for i in range(begin, end):
        e = _exponent(_largest(bits, i))
        factor, step = pow2(15 - e), np.float64(pow2(e - 15))
        total = np.int64(0)
        for j in range(x.shape[1]):
            q = np.int64(_integer(x[i, j], factor))
            total += q * q
        mean = (np.float64(total) * share) * (step * step)
        r = np.float32(np.sqrt(mean + eps))
        rms[i, 0] = r
        for j in range(x.shape[1]):
            out[i, j] = (x[i, j] / r) * weight[j]


def norm(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """RMS norm of float32 [..., n], see DecoderRun._norm."""
    a = array(x)
    rows = a.reshape(-1, a.shape[-1])
    out, rms = np.empty(rows.shape, np.float32), np.empty((len(rows), 1), np.float32)
    share = 1.0 / a.shape[-1]
    over_rows(_norm, len(rows), rows, rows.view(np.int32), weight.numpy(), eps, share, out, rms)
    return torch.from_numpy(out.reshape(a.shape)), torch.from_numpy(rms.reshape(*a.shape[:-1], 1))


@compiled
def _gated(begin: int, end: int, gate: Singles, up: Singles, limit: Any, out: Singles) -> None:
    for i in range(begin, end):
        for j in range(gate.shape[1]):
            x = gate[i, j]
            t = max(-abs(x) * _LOG2E, np.float32(-126.0))
            n = np.floor(t)
            e = exp2_fraction(t, n) * pow2(np.int32(n))
            y = (x * (e if x < _ZERO else _ONE) / (e + _ONE)) * up[i, j]
            out[i, j] = min(max(y, -limit), limit)


def gated(gate: Tensor, up: Tensor, limit: float) -> Tensor:
    """(exact.silu(gate) * up).clamp(-limit, limit) of float32 [R, n]."""
    a, b = array(gate), array(up)
    out = np.empty(a.shape, np.float32)
    over_rows(_gated, len(a), a, b, np.float32(limit), out)
    return torch.from_numpy(out)
