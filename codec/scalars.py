"""Scalars under their laws to rANS symbols and back: what the residual model's integers mean for the coder.

A scalar's cell in its window (codec.residual) is one symbol. With C the profile's table at a cell's lower edge and
T = 2**24 - WINDOW - ESCAPE_FREQ, the slots below cell n of the window that begins at S are floor(C T / 2**38) + n - S, so that every cell
has a slot of its own; the window's first cell has all that lies below it, its last all above, and the last slots mean an escape.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from codec import cells
from codec.cells import Ints
from codec.formats import NumberFormat
from codec.kernels import borrowed, compiled
from codec.rans import PRECISION, Codes, Decoder, Encoder, States, Symbols, Words
from codec.residual import (
    TABLE_BITS,
    TABLE_REACH,
    WINDOW,
    grid_limit,
    zero_cell_rows,
)
from codec.scalar_kernels import (
    ESCAPE_FREQ,
    GUESS_BITS,
    INVERSE,
    LOGS,
    ZERO,
    Fine,
    Floats,
    Numbers,
    Tables,
    given_row,
    new_row,
    place_row,
    scale_row,
)
from codec.scalar_put import put_row, room_for
from codec.scalar_read import read_row


@dataclass(frozen=True)
class Source:
    """A stream at its place, and the tables to read scalars from it."""

    coder: Decoder
    tables: Tables


@dataclass(frozen=True)
class Sink:
    """An encoder that has room for symbols, and the tables to write scalars as such in so many lanes."""

    encoder: Encoder
    tables: Tables
    lanes: int


def tables_of(table: Ints, fmt: NumberFormat) -> Tables:
    """The loops' tables for a profile's table of the normal distribution."""
    total = (1 << PRECISION) - WINDOW - ESCAPE_FREQ
    below = (table.astype(np.int64) * total) >> TABLE_BITS
    middle = (np.arange(1 << GUESS_BITS) * 2 + 1) << (PRECISION - GUESS_BITS - 1)
    logs = [max(m.bit_length() - 1, 0) for m in range((1 << fmt.mantissa) + 1)]
    fine = np.zeros(ZERO + (cells.BINADES + 1) * (cells.BINADES + 2), np.int32)
    fine[:INVERSE] = below
    fine[INVERSE:LOGS] = np.searchsorted(below, middle) - TABLE_REACH
    fine[LOGS : LOGS + len(logs)] = logs
    zero = fine[ZERO:].reshape(cells.BINADES + 1, cells.BINADES + 2)
    zero[:, 1:] = np.cumsum(zero_cell_rows().astype(np.int64) + 1, axis=1)  # exact: integers
    numbers = Numbers(
        fmt.mantissa,
        fmt.emin,
        fmt.bits,
        fmt.raw,
        cells.cell_limit(fmt),
        fmt.first_nonfinite,
        grid_limit(fmt),
        fmt.max_finite,
    )
    return Tables(numbers, cells.edge_table(fmt), fine)


def put_scaled(
    patterns: Ints, mean: Floats, sigma: Floats, tables: Tables, lanes: int, encoder: Encoder | None = None
) -> tuple[Symbols, int]:
    """(symbols, escapes) of rows [n, T], one after another; mean and sigma float64 [n, T]. They are written where `encoder` has room."""
    return _put(_put_scaled, patterns, (mean, sigma), tables, lanes, encoder)


def put_gridded(
    patterns: Ints, mean: Floats, grid: Ints, reciprocal: Ints, tables: Tables, lanes: int, encoder: Encoder | None = None
) -> tuple[Symbols, int]:  # fmt: skip
    """The same of rows in order whose scales are integers already, int64 [n, T]."""
    return _put(_put_gridded, patterns, (mean, grid, reciprocal), tables, lanes, encoder)


def _put(
    loop: Any, patterns: Ints, law: tuple[Any, ...], tables: Tables, lanes: int, encoder: Encoder | None
) -> tuple[Symbols, int]:
    codes = (encoder or Encoder(lanes)).room(room_for(patterns.size))
    row, split, counts = new_row(patterns.shape[1]), np.empty((2, patterns.shape[1]), np.int64), np.zeros(2, np.int64)
    loop(patterns, *law, tables.numbers, tables.fine, lanes, *row, split, codes, counts)
    return Symbols(codes[: counts[0]]), int(counts[1])


def read_gridded(coder: Decoder, mean: Floats, grid: Ints, reciprocal: Ints, tables: Tables) -> Ints:
    """Patterns of rows coded by `put_gridded` with the same means and scales. Raises CorruptBlob."""
    out, law = np.empty(mean.shape, np.int64), (mean, grid, reciprocal)
    _read_gridded(*law, tables.numbers, tables.fine, *new_row(mean.shape[1]), coder.steps, *coder.place, out)
    coder.check()
    return out


def read_scaled(coder: Decoder, mean: Floats, sigma: Floats, tables: Tables) -> Ints:
    """The next rows [n, T] coded by `put_scaled`. Raises CorruptBlob."""
    out = np.empty(mean.shape, np.int64)
    _read_scaled(mean, sigma, tables.numbers, tables.fine, *new_row(mean.shape[1]), coder.steps, *coder.place, out)
    coder.check()
    return out


@compiled
def _put_scaled(
    patterns: Ints, mean: Floats, sigma: Floats, t: Numbers, fine: Fine, width: int, at: Floats, rate: Floats, near: Floats, start: Ints,
    grid: Ints, found: Ints, more: Ints, split: Ints, codes: Codes, count: Ints,
) -> None:  # fmt: skip
    patterns, mean, sigma, fine, at, rate, near = borrowed((patterns, mean, sigma, fine, at, rate, near))
    start, grid, found, more, split, codes, count = borrowed((start, grid, found, more, split, codes, count))
    for i in range(patterns.shape[0]):
        scale_row(sigma[i], t, grid, rate, near)
        place_row(mean[i], t, grid, at, start)
        put_row(patterns[i], at, rate, start, grid, found, more, split, t, fine, width, codes, count)


@compiled
def _put_gridded(
    patterns: Ints, mean: Floats, grids: Ints, reciprocal: Ints, t: Numbers, fine: Fine, width: int, at: Floats, rate: Floats, near: Floats,
    start: Ints, grid: Ints, found: Ints, more: Ints, split: Ints, codes: Codes, count: Ints,
) -> None:  # fmt: skip
    patterns, mean, grids, reciprocal, fine, at, rate = borrowed((patterns, mean, grids, reciprocal, fine, at, rate))
    near, start, grid, found, more, split, codes, count = borrowed(
        (near, start, grid, found, more, split, codes, count)
    )
    for i in range(patterns.shape[0]):
        given_row(grids[i], reciprocal[i], grid, rate, near)
        place_row(mean[i], t, grid, at, start)
        put_row(patterns[i], at, rate, start, grid, found, more, split, t, fine, width, codes, count)


@compiled
def _read_gridded(
    mean: Floats, grids: Ints, reciprocal: Ints, t: Numbers, fine: Fine, at: Floats, rate: Floats, near: Floats, start: Ints, grid: Ints,
    found: Ints, cells: Ints, steps: Floats, states: States, words: Words, words_at: Ints, out: Ints,
) -> None:  # fmt: skip
    mean, grids, reciprocal, fine, at, rate, near, start = borrowed(
        (mean, grids, reciprocal, fine, at, rate, near, start)
    )
    grid, found, cells, steps, states, words, words_at, out = borrowed(
        (grid, found, cells, steps, states, words, words_at, out)
    )
    for i in range(mean.shape[0]):
        given_row(grids[i], reciprocal[i], grid, rate, near)
        place_row(mean[i], t, grid, at, start)
        read_row(at, rate, near, start, grid, found, cells, t, fine, steps, states, words, words_at, out[i])


@compiled
def _read_scaled(
    mean: Floats, sigma: Floats, t: Numbers, fine: Fine, at: Floats, rate: Floats, near: Floats, start: Ints, grid: Ints, found: Ints,
    cells: Ints, steps: Floats, states: States, words: Words, words_at: Ints, out: Ints,
) -> None:  # fmt: skip
    mean, sigma, fine, at, rate, near, start, grid = borrowed((mean, sigma, fine, at, rate, near, start, grid))
    found, cells, steps, states, words, words_at, out = borrowed((found, cells, steps, states, words, words_at, out))
    for i in range(mean.shape[0]):
        scale_row(sigma[i], t, grid, rate, near)
        place_row(mean[i], t, grid, at, start)
        read_row(at, rate, near, start, grid, found, cells, t, fine, steps, states, words, words_at, out[i])
