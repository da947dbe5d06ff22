"""Number formats as bit patterns, and cells: every pattern has a cell and comes back from it."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from codec import cells
from codec.errors import UnsupportedFormat, UserError
from codec.formats import BF16, FORMATS, FP16, NumberFormat, format_by_code, number_format

ALL = np.arange(1 << 16, dtype=np.int64)
BOTH = pytest.mark.parametrize("fmt", [BF16, FP16], ids=lambda f: f.name)


def top_grid(fmt: NumberFormat) -> int:
    """The largest grid exponent that a profile may have."""
    return (fmt.first_nonfinite >> fmt.mantissa) + fmt.emin - 2 - fmt.mantissa


def grids(fmt: NumberFormat) -> st.SearchStrategy[int]:
    return st.integers(fmt.emin, top_grid(fmt))


def value(ordinal: int, fmt: NumberFormat) -> Fraction:
    """What a finite magnitude stands for, exactly."""
    exponent, fraction = ordinal >> fmt.mantissa, ordinal & ((1 << fmt.mantissa) - 1)
    if exponent:
        fraction |= 1 << fmt.mantissa
    return Fraction(fraction) * Fraction(2) ** (max(exponent, 1) + fmt.emin - 1 - fmt.mantissa)


# ---------------------------------------------------------------- formats
@BOTH
def test_all_patterns_survive_a_tensor(fmt: NumberFormat) -> None:
    tensor = fmt.tensor(ALL)
    assert tensor.dtype == fmt.dtype
    assert np.array_equal(fmt.patterns(tensor), ALL)
    assert np.array_equal(fmt.patterns(tensor.view(256, 256).T.contiguous().T).reshape(-1), ALL)  # strided
    assert fmt.little_endian(tensor) == b"".join(int(p).to_bytes(2, "little") for p in ALL)


@BOTH
def test_format_constants_describe_the_dtype(fmt: NumberFormat) -> None:
    info = torch.finfo(fmt.dtype)
    assert fmt.max_finite == info.max == float(value(fmt.first_nonfinite - 1, fmt))
    assert fmt.bits == info.bits and fmt.item_bytes == 2
    assert float(value(1 << fmt.mantissa, fmt)) == info.tiny == 2.0**fmt.emin
    assert bool(torch.isinf(fmt.tensor(np.array([fmt.first_nonfinite]))).all())
    assert format_by_code(fmt.code) is fmt and number_format(fmt.name) is fmt


def test_unknown_formats_are_refused_by_name() -> None:
    with pytest.raises(UnsupportedFormat, match=r"'fp8'.*bf16, fp16") as caught:
        number_format("fp8")
    assert isinstance(caught.value, UserError)
    assert format_by_code(0) is None and format_by_code(255) is None
    with pytest.raises(UnsupportedFormat, match="bf16"):
        BF16.patterns(torch.zeros(1, dtype=torch.float16))


def test_format_codes_are_those_of_version_1() -> None:
    assert {name: f.code for name, f in FORMATS.items()} == {"bf16": 1, "fp16": 2}


# ---------------------------------------------------------------- cells
def round_trip(fmt: NumberFormat, grid: int) -> None:
    g = np.full(len(ALL), grid, dtype=np.int64)
    n, codable = cells.cell_of(ALL, g, fmt)
    ordinal = ALL & ((1 << (fmt.bits - 1)) - 1)
    assert not codable[ordinal >= fmt.first_nonfinite].any(), "infinities and NaNs have no cell"
    assert (np.abs(n) < cells.cell_limit(fmt)).all()
    assert ((n < 0) == (ALL >> (fmt.bits - 1) == 1))[codable].all(), "the sign of zero is in the cell"
    zero = codable & ((n == 0) | (n == -1))
    plain = codable & ~zero
    bits = cells.raw_bits(n[plain], fmt)
    back = cells.pattern_of(n[plain], ordinal[plain] & ((1 << bits) - 1), g[plain], fmt)
    assert np.array_equal(back, ALL[plain])
    binade, offset = cells.zero_cell(ordinal[zero], g[zero], fmt)
    sizes = cells.zero_cell_sizes(binade, g[zero], fmt)
    assert (offset >= 0).all() and (offset < sizes).all() and (sizes >= 2).all() and (sizes <= 1 << 16).all()
    assert ((binade >= 0) & (binade <= cells.BINADES)).all()
    assert np.array_equal(cells.zero_cell_ordinal(binade, offset, g[zero], fmt), ordinal[zero])


@BOTH
def test_every_pattern_round_trips_on_the_extreme_grids(fmt: NumberFormat) -> None:
    for grid in (fmt.emin, fmt.emin + 1, fmt.emin + cells.BINADES, top_grid(fmt) - 1, top_grid(fmt)):
        round_trip(fmt, grid)


@settings(max_examples=20, deadline=None, derandomize=True)
@given(grids(BF16))
@example(-8)
def test_every_bf16_pattern_round_trips(grid: int) -> None:
    round_trip(BF16, grid)


@settings(max_examples=20, deadline=None, derandomize=True)
@given(grids(FP16))
def test_every_fp16_pattern_round_trips(grid: int) -> None:
    round_trip(FP16, grid)


@settings(max_examples=12, deadline=None, derandomize=True)
@given(st.sampled_from([BF16, FP16]), st.data())
def test_cells_are_in_order_of_value_and_hold_what_they_say(fmt: NumberFormat, data: st.DataObject) -> None:
    grid = data.draw(grids(fmt))
    positive = np.arange(fmt.first_nonfinite, dtype=np.int64)
    m, codable = cells.cell_of(positive, np.full(len(positive), grid), fmt)
    m = m[codable]
    assert codable[: len(m)].all(), "what is escaped lies beyond all cells"
    steps = np.diff(m)
    assert ((steps == 0) | (steps == 1)).all()
    width = Fraction(2) ** grid
    for i in {0, len(m) // 3, len(m) // 2, len(m) - 1, *range(0, len(m), len(m) // 50)}:
        magnitude = value(int(positive[i]), fmt)
        if m[i] < 1 << fmt.mantissa:
            assert m[i] * width <= magnitude < (m[i] + 1) * width
        else:
            assert magnitude >= width * (1 << fmt.mantissa)
            assert m[i] == m[i - 1] + 1, "one value a cell"


@BOTH
def test_raw_bits_count_the_values_of_a_cell(fmt: NumberFormat) -> None:
    grid = 0 if fmt is BF16 else -6
    positive = np.arange(fmt.first_nonfinite, dtype=np.int64)
    m, codable = cells.cell_of(positive, np.full(len(positive), grid), fmt)
    counts = np.bincount(m[codable])[1:]
    assert np.array_equal(counts, 1 << cells.raw_bits(np.arange(1, len(counts) + 1), fmt))


@BOTH
def test_edges_are_midpoints_between_neighbouring_values(fmt: NumberFormat) -> None:
    grid = 0 if fmt is BF16 else -4
    edges, limit = cells.edge_table(fmt), cells.cell_limit(fmt)
    assert len(edges) == 2 * limit + 1 and (np.diff(edges) > 0).all() and edges[limit] == 0
    assert np.array_equal(edges, -edges[::-1])
    positive = np.arange(fmt.first_nonfinite, dtype=np.int64)
    m, codable = cells.cell_of(positive, np.full(len(positive), grid), fmt)
    _, first = np.unique(m[codable], return_index=True)
    unit = Fraction(2) ** (grid - cells.FRACTION)
    for n in range(1, len(first), max(1, len(first) // 400)):
        lowest = int(positive[first[n]])
        middle = (value(lowest, fmt) + value(lowest - 1, fmt)) / 2
        assert abs(Fraction(int(edges[limit + n])) * unit - middle) < unit, f"lower edge of cell {n}"
