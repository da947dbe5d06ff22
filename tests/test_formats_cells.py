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
from codec.formats import BF16, FORMATS, FP16, FP32, NumberFormat, format_by_code, number_format
from tests import codec_samples as samples

EACH = pytest.mark.parametrize("fmt", list(FORMATS.values()), ids=lambda f: f.name)


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
@EACH
def test_all_patterns_survive_a_tensor(fmt: NumberFormat) -> None:
    every = samples.all_patterns(fmt)
    tensor = fmt.tensor(every)
    assert tensor.dtype == fmt.dtype
    assert np.array_equal(fmt.patterns(tensor), every)
    assert np.array_equal(fmt.patterns(tensor.view(2, -1).T.contiguous().T).reshape(-1), every)  # strided
    assert fmt.little_endian(tensor) == b"".join(int(p).to_bytes(fmt.item_bytes, "little") for p in every)
    coded, raw = fmt.split(every)
    assert (coded < 1 << fmt.bits).all() and (coded >= 0).all() and (raw >= 0).all() and (raw < 1 << fmt.raw).all()
    assert np.array_equal(fmt.join(coded, raw), every)
    finite = (every & ((1 << (fmt.item_bits - 1)) - 1)) < fmt.first_nonfinite << fmt.raw
    assert np.isfinite(fmt.values(every[finite])).all() and not np.isfinite(fmt.values(every[~finite])).any()


def test_a_wide_format_is_coded_as_the_nearest_value_with_fewer_bits() -> None:
    patterns = FP32.patterns(torch.randn(1000, generator=torch.Generator().manual_seed(1)))
    coded, _ = FP32.split(patterns)
    near = FP32.values(FP32.join(coded, np.full_like(coded, 1 << (FP32.raw - 1))))
    off = np.abs(near - FP32.values(patterns))
    assert (off <= np.abs(near) * 2.0 ** -(FP32.mantissa + 1)).all() and off.max() > 0


@settings(max_examples=20, deadline=None, derandomize=True)
@given(st.integers(0, (1 << FP32.bits) - 1), st.integers(0, (1 << FP32.raw) - 1))
def test_what_no_encoder_wrote_joins_to_some_pattern(coded: int, raw: int) -> None:
    assert 0 <= int(FP32.join(np.array([coded]), np.array([raw]))[0]) < 1 << 32


@EACH
def test_format_constants_describe_the_dtype(fmt: NumberFormat) -> None:
    info = torch.finfo(fmt.dtype)
    last = np.array([(fmt.first_nonfinite << fmt.raw) - 1])
    assert fmt.max_finite == info.max == float(fmt.values(last)[0])
    assert fmt.item_bits == info.bits == fmt.item_bytes * 8
    assert float(value(1 << fmt.mantissa, fmt)) == info.tiny == 2.0**fmt.emin
    assert not bool(torch.isfinite(fmt.tensor(last + 1).float()).any())
    assert format_by_code(fmt.code) is fmt and number_format(fmt.name) is fmt


def test_unknown_formats_are_refused_by_name() -> None:
    with pytest.raises(UnsupportedFormat, match=r"'fp8'.*bf16, fp16, fp32, fp8_e4m3, fp8_e5m2") as caught:
        number_format("fp8")
    assert isinstance(caught.value, UserError)
    assert format_by_code(0) is None and format_by_code(255) is None
    with pytest.raises(UnsupportedFormat, match="bf16"):
        BF16.patterns(torch.zeros(1, dtype=torch.float16))


def test_format_codes_are_those_of_version_1() -> None:
    assert {name: f.code for name, f in FORMATS.items()} == {
        "bf16": 1,
        "fp16": 2,
        "fp32": 3,
        "fp8_e4m3": 4,
        "fp8_e5m2": 5,
    }


# ---------------------------------------------------------------- cells
def round_trip(fmt: NumberFormat, grid: int) -> None:
    every = np.unique(fmt.split(samples.all_patterns(fmt))[0])
    g = np.full(len(every), grid, dtype=np.int64)
    n, codable = cells.cell_of(every, g, fmt)
    ordinal = every & ((1 << (fmt.bits - 1)) - 1)
    assert not codable[ordinal >= fmt.first_nonfinite].any(), "infinities and NaNs have no cell"
    assert (np.abs(n) < cells.cell_limit(fmt)).all()
    assert ((n < 0) == (every >> (fmt.bits - 1) == 1))[codable].all(), "the sign of zero is in the cell"
    zero = codable & ((n == 0) | (n == -1))
    plain = codable & ~zero
    bits = cells.raw_bits(n[plain], fmt)
    back = cells.pattern_of(n[plain], ordinal[plain] & ((1 << bits) - 1), g[plain], fmt)
    assert np.array_equal(back, every[plain])
    binade, offset = cells.zero_cell(ordinal[zero], g[zero], fmt)
    sizes = cells.zero_cell_sizes(binade, g[zero], fmt)
    assert (offset >= 0).all() and (offset < sizes).all() and (sizes >= 2).all() and (sizes <= 1 << 20).all()
    assert ((binade >= 0) & (binade <= cells.BINADES)).all()
    assert np.array_equal(cells.zero_cell_ordinal(binade, offset, g[zero], fmt), ordinal[zero])


@EACH
def test_every_pattern_round_trips_on_the_extreme_grids(fmt: NumberFormat) -> None:
    for grid in (
        fmt.emin,
        fmt.emin + 1,
        min(fmt.emin + cells.BINADES, top_grid(fmt)),
        top_grid(fmt) - 1,
        top_grid(fmt),
    ):
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
@given(st.sampled_from(list(FORMATS.values())), st.data())
def test_cells_are_in_order_of_value_and_hold_what_they_say(fmt: NumberFormat, data: st.DataObject) -> None:
    grid = data.draw(grids(fmt))
    positive = np.arange(fmt.first_nonfinite, dtype=np.int64)
    m, codable = cells.cell_of(positive, np.full(len(positive), grid), fmt)
    m = m[codable]
    assert codable[: len(m)].all(), "what is escaped lies beyond all cells"
    steps = np.diff(m)
    assert ((steps == 0) | (steps == 1)).all()
    width = Fraction(2) ** grid
    for i in {0, len(m) // 3, len(m) // 2, len(m) - 1, *range(0, len(m), max(1, len(m) // 50))}:
        magnitude = value(int(positive[i]), fmt)
        if m[i] < 1 << fmt.mantissa:
            assert m[i] * width <= magnitude < (m[i] + 1) * width
        else:
            assert magnitude >= width * (1 << fmt.mantissa)
            assert m[i] == m[i - 1] + 1, "one value a cell"


@EACH
def test_raw_bits_count_the_values_of_a_cell(fmt: NumberFormat) -> None:
    grid = 0 if fmt in (BF16, FP32) else -6
    positive = np.arange(fmt.first_nonfinite, dtype=np.int64)
    m, codable = cells.cell_of(positive, np.full(len(positive), grid), fmt)
    counts = np.bincount(m[codable])[1:]
    assert np.array_equal(counts, 1 << cells.raw_bits(np.arange(1, len(counts) + 1), fmt))


@EACH
def test_edges_are_midpoints_between_neighbouring_values(fmt: NumberFormat) -> None:
    grid = 0 if fmt in (BF16, FP32) else -4
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
