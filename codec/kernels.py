"""Compiled loops for the residual model: the same integers as the array code in residual.py, without its temporaries.

numba compiles without fast-math, so nothing is reassociated or contracted, and releases the GIL while a loop runs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numba
import numpy as np
from numba.core.compiler import CompilerBase, DefaultPassBuilder
from numba.extending import intrinsic
from numpy.typing import NDArray

from codec.cells import Ints
from codec.compiled_cache import CACHE_FOLDER

_OPTIONS: dict[str, Any] = {"nogil": True, "fastmath": False, "error_model": "numpy"}


def compiled(function: Callable[..., Any]) -> Any:
    """A loop, compiled when it is first called and kept for the next process."""
    settings: Any = numba.config
    before, settings.CACHE_DIR = settings.CACHE_DIR, CACHE_FOLDER  # read while the function is decorated
    try:
        return numba.njit(cache=True, **_OPTIONS)(function)
    except RuntimeError:  # no folder to keep compiled code in: compile anew in every process
        return numba.njit(**_OPTIONS)(function)
    finally:
        settings.CACHE_DIR = before


def inlined(function: Callable[..., Any]) -> Any:
    """A small function that becomes part of the loops that call it."""
    return numba.njit(forceinline=True, **_OPTIONS)(function)


class _Apart(CompilerBase):
    """Compiles a function whose arrays do not overlap. Without that word a loop which reads by index and writes is never vectorised."""

    def define_pipelines(self) -> Any:
        """See CompilerBase."""
        self.state.flags.noalias = True
        builder: Any = DefaultPassBuilder
        return [builder.define_nopython_pipeline(self.state)]


def apart(function: Callable[..., Any]) -> Any:
    """An `inlined` function of arrays no two of which overlap, as far as it writes to one of them: its loops are vectorised."""
    return numba.njit(forceinline=True, pipeline_class=_Apart, **_OPTIONS)(function)


def _borrowed(context: Any, arrays: Any) -> Any:
    """A tuple of arrays as they are, without references to what holds them: views of them are not counted then.

    Compiled code counts references whenever it takes a row, atomically. The caller holds its arguments while a call lasts; what is
    borrowed is never returned.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        out = []
        for k, kind in enumerate(signature.return_type):
            array = context.make_array(kind)(context, builder, value=builder.extract_value(arguments[0], k))
            array.meminfo, array.parent = (x.type(None) for x in (array.meminfo, array.parent))
            out.append(array._getvalue())
        return context.make_tuple(builder, signature.return_type, out)

    return arrays(arrays), generate


borrowed: Any = intrinsic(_borrowed)


@compiled
def _table_value(edge: int, mean: int, reciprocal: int, table: Ints, far: int, shift: int, reach: int) -> Any:
    distance = min(max(edge - mean, -far), far)
    position = (distance * reciprocal) >> shift
    return table[min(max(position, -reach), reach) + reach]


@compiled
def block_rows(
    start: Ints, mean: Ints, reciprocal: Ints, edges: Ints, table: Ints, constants: Ints, out: NDArray[np.float32]
) -> None:
    """Fill out [scalars, blocks + 1] as CellModel.block_frequencies defines it."""
    block, total, escape, bits, far, shift, reach = constants
    blocks = out.shape[1] - 1
    limit = (edges.shape[0] - 1) // 2
    for i in range(start.shape[0]):
        below = np.int64(0)
        for b in range(blocks):
            above = np.int64(total)
            if b < blocks - 1:
                edge = edges[start[i] + (b + 1) * block + limit]
                above = (_table_value(edge, mean[i], reciprocal[i], table, far, shift, reach) * total) >> bits
            out[i, b] = above - below
            below = above
        out[i, blocks] = escape


@compiled
def cell_rows(
    first: Ints, mean: Ints, reciprocal: Ints, edges: Ints, table: Ints, constants: Ints, out: NDArray[np.float32]
) -> None:
    """Fill out [scalars, cells of a block] as CellModel.cell_frequencies defines it; `first` is each block's first cell."""
    cells, total, far, shift, reach = constants
    limit = (edges.shape[0] - 1) // 2
    for i in range(first.shape[0]):
        at = first[i] + limit
        low = _table_value(edges[at], mean[i], reciprocal[i], table, far, shift, reach)
        mass = _table_value(edges[at + cells], mean[i], reciprocal[i], table, far, shift, reach) - low
        flat = mass == 0
        ratio = np.float64(total) / np.float64(cells if flat else mass)
        below = np.float64(0.0)
        for c in range(1, cells + 1):
            above = np.float64(total)
            if c < cells:
                inside = (
                    c if flat else _table_value(edges[at + c], mean[i], reciprocal[i], table, far, shift, reach) - low
                )
                above = min(np.float64(math.floor(np.float64(inside) * ratio)), np.float64(total))
            out[i, c - 1] = above - below
            below = above


@compiled
def placed(mean: NDArray[np.float64], grid: Ints, constants: Ints, bounds: NDArray[np.float64]) -> tuple[Ints, Ints]:
    """(position, first cell of the window) of means [scalars], as residual.place_values defines them."""
    fraction, mantissa, window, limit = constants
    position, start = np.empty(mean.shape[0], np.int64), np.empty(mean.shape[0], np.int64)
    for i in range(mean.shape[0]):
        value = min(max(mean[i], -bounds[0]), bounds[0])
        at = np.int64(np.rint(min(max(math.ldexp(value, int(fraction - grid[i])), -bounds[1]), bounds[1])))
        step = at >> fraction
        m = -1 - step if step < 0 else step
        binade = max(math.frexp(np.float64(max(m, 1)))[1] - 1 - mantissa, 0)
        n = (np.int64(binade) << mantissa) + (m >> np.int64(binade))
        n = -1 - n if step < 0 else n
        position[i], start[i] = at, min(max(n - window // 2, -limit), limit - window)
    return position, start


@compiled
def kept_blocks(block: NDArray[np.int32], start: Ints, mean: Ints, reciprocal: Ints, size: int, escape: int) -> Any:
    """Of the scalars whose block is no escape: their indices, first cells, means and reciprocals."""
    count = 0
    for i in range(block.shape[0]):
        count += block[i] < escape
    index, first = np.empty(count, np.int64), np.empty(count, np.int64)
    kept_mean, kept_reciprocal = np.empty(count, np.int64), np.empty(count, np.int64)
    k = 0
    for i in range(block.shape[0]):
        if block[i] < escape:
            index[k], first[k] = i, start[i] + block[i] * size
            kept_mean[k], kept_reciprocal[k] = mean[i], reciprocal[i]
            k += 1
    return index, first, kept_mean, kept_reciprocal


@compiled
def raw_sizes(first: Ints, symbol: NDArray[np.int32], mantissa: int) -> Any:
    """(cells n, sizes of the raw values of those that have raw bits, how many lie in cell 0), from blocks' first cells."""
    n, sizes = np.empty(first.shape[0], np.int64), np.empty(first.shape[0], np.int32)
    coarse, zeros = 0, 0
    for i in range(first.shape[0]):
        n[i] = first[i] + symbol[i]
        m = -1 - n[i] if n[i] < 0 else n[i]
        zeros += m == 0
        if m >= 1 and m < (1 << mantissa):
            bits = mantissa + 1 - math.frexp(np.float64(m))[1]
            if bits > 0:
                sizes[coarse] = 1 << bits
                coarse += 1
    return n, sizes[:coarse], zeros


@compiled
def patterns_from(n: Ints, raw: NDArray[np.int32], grid: Ints, index: Ints, constants: Ints, out: Ints) -> None:
    """Write the patterns of cells n (m >= 1) and their raw values to out[index]; cell 0 is left to the caller."""
    mantissa, emin, width = constants
    mask, k = (np.int64(1) << mantissa) - 1, 0
    for i in range(n.shape[0]):
        m = -1 - n[i] if n[i] < 0 else n[i]
        sign = np.int64(1) << (width - 1) if n[i] < 0 else np.int64(0)
        g = grid[index[i]]
        if m > mask:
            out[index[i]] = sign | (((g + mantissa - emin + 1) << mantissa) + m - mask - 1)
        elif m >= 1:
            log = math.frexp(np.float64(m))[1] - 1
            fraction = (m << (mantissa - log)) & mask
            if log < mantissa:
                fraction |= np.int64(raw[k])
                k += 1
            out[index[i]] = sign | ((g + log - emin + 1) << mantissa) | fraction
