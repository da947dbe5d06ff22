"""Compiled loops for the residual model: the same integers as the array code in residual.py, without its temporaries.

numba compiles without fast-math, so nothing is reassociated or contracted, and releases the GIL while a loop runs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numba
import numpy as np
from numpy.typing import NDArray

from codec.cells import Ints


def _compiled(function: Callable[..., Any]) -> Any:
    options: dict[str, Any] = {"nogil": True, "fastmath": False, "error_model": "numpy"}
    try:
        return numba.njit(cache=True, **options)(function)
    except RuntimeError:  # no folder to keep compiled code in: compile anew in every process
        return numba.njit(**options)(function)


@_compiled
def _table_value(edge: int, mean: int, reciprocal: int, table: Ints, far: int, shift: int, reach: int) -> Any:
    distance = min(max(edge - mean, -far), far)
    position = (distance * reciprocal) >> shift
    return table[min(max(position, -reach), reach) + reach]


@_compiled
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


@_compiled
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
