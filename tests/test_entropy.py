"""The entropy stage: round trips of any pattern under any placement, its integers, its size, and constriction's exact words."""

from __future__ import annotations

import constriction
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from codec.cells import BINADES, Ints, cell_limit, edge_table
from codec.entropy import SLICE, Decoder, Encoder, decode_groups, decode_tensor, encode_groups, encode_tensor
from codec.errors import CorruptBlob
from codec.formats import BF16, FORMATS, FP16, FP32, NumberFormat
from codec.ideal import ideal_bits
from codec.residual import (
    BLOCK,
    BLOCKS,
    ESCAPE,
    PRECISION,
    TABLE_BITS,
    TABLE_REACH,
    WINDOW,
    CellModel,
    ChannelScales,
    Freqs,
    Placement,
    gaussian_table,
    grid_limit,
    place,
    place_values,
    place_values_reference,
    quantise_scales,
    scale_integers,
    zero_cell_frequencies,
)
from tests import codec_samples as samples

ANY = list(FORMATS.values())
EACH = pytest.mark.parametrize("fmt", ANY, ids=lambda f: f.name)
FINE = pytest.mark.parametrize("fmt", [BF16, FP16, FP32], ids=lambda f: f.name)
TABLE = gaussian_table()
MODELS = {f.name: CellModel(TABLE, f) for f in ANY}
ONE = 1 << PRECISION
EXACT_WORDS = [0x21694DDA, 0xFFFFFFFE, 0xD4472ADF, 0x2AFFFFFF, 0x32000000, 0x030A8009]


def any_placement(rng: np.random.Generator, count: int, fmt: NumberFormat) -> Placement:
    """Placements within the bounds that `place` and a profile keep, and no more sensible than that."""
    limit = cell_limit(fmt)
    near = rng.integers(-40, 40, count) << 8
    far = rng.integers(-(2**56), 2**56, count)
    return Placement(
        np.where(rng.random(count) < 0.5, near, far),
        np.where(
            rng.random(count) < 0.7,
            np.clip(rng.integers(-200, 80, count), -limit, limit - WINDOW),
            rng.integers(-limit, limit - WINDOW + 1, count),
        ),
        rng.integers(fmt.emin, grid_limit(fmt) + 1, count),
        np.where(rng.random(count) < 0.5, rng.integers(1 << 14, 1 << 16, count), rng.integers(1, (1 << 20) + 1, count)),
    )


# ---------------------------------------------------------------- round trips
@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.sampled_from(ANY), st.integers(0, 2**32 - 1), st.integers(1, 400))
def test_any_pattern_round_trips_under_any_placement(fmt: NumberFormat, seed: int, count: int) -> None:
    rng = np.random.default_rng(seed)
    where = any_placement(rng, count, fmt)
    patterns = rng.integers(0, 1 << fmt.item_bits, count)
    hostile = samples.hostile_patterns(fmt)
    patterns = np.where(rng.random(count) < 0.3, hostile[rng.integers(0, len(hostile), count)], patterns)
    stream, escapes = encode_tensor(patterns, where, MODELS[fmt.name], fmt)
    assert 0 <= escapes <= count
    assert np.array_equal(decode_tensor(stream, where, MODELS[fmt.name], fmt), patterns)


shapes = st.tuples(st.integers(1, 9), st.integers(1, 20), st.integers(1, 16))


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    st.sampled_from(ANY), shapes, st.integers(0, 2**31), st.floats(-30, 40), st.floats(-30, 40), st.floats(-30, 40),
)  # fmt: skip
def test_any_shape_scale_and_guess_round_trips(
    fmt: NumberFormat, shape: tuple[int, int, int], seed: int, spread: float, sigma: float, error: float
) -> None:
    """The guess may be off by any power of two more, or less, than the profile's sigma says."""
    generator = torch.Generator().manual_seed(seed)
    guess = torch.randn(shape, generator=generator) * 2.0**spread
    values = samples.cast(guess + torch.randn(shape, generator=generator) * 2.0**error, fmt)
    channel = 2.0**sigma * (0.5 + torch.rand(shape[0], shape[2], generator=generator).double().numpy())
    where = place(guess, quantise_scales(channel, fmt), fmt)
    patterns = fmt.patterns(values).reshape(-1)
    stream, _ = encode_tensor(patterns, where, MODELS[fmt.name], fmt)
    assert np.array_equal(decode_tensor(stream, where, MODELS[fmt.name], fmt), patterns)


@EACH
def test_every_pattern_codes_on_one_placement(fmt: NumberFormat) -> None:
    patterns = np.resize(samples.all_patterns(fmt), 1 << 16)
    channels = quantise_scales(np.full((1, 1), 0.03), fmt)
    for guess in (0.0, 0.5, -3.0):
        where = place(torch.full((1, 1 << 16, 1), guess), channels, fmt)
        stream, escapes = encode_tensor(patterns, where, MODELS[fmt.name], fmt)
        assert escapes >= (patterns & ((1 << (fmt.item_bits - 1)) - 1) >= fmt.first_nonfinite << fmt.raw).sum(), (
            "infinities, NaNs and what is far away are escaped"
        )
        assert np.array_equal(decode_tensor(stream, where, MODELS[fmt.name], fmt), patterns)


@EACH
def test_guesses_beyond_the_format_and_extreme_scales(fmt: NumberFormat) -> None:
    guess = torch.tensor([1e38, -1e38, 3.4e38, 0.0, -0.0, 1e-40, fmt.max_finite, 1e-30]).view(1, 8, 1)
    patterns = samples.hostile_patterns(fmt)[:8]
    for sigma in (0.0, 1e-300, 1e-6, 1.0, 1e30, np.inf, np.nan):
        where = place(guess, quantise_scales(np.full((1, 1), sigma), fmt), fmt)
        stream, _ = encode_tensor(patterns, where, MODELS[fmt.name], fmt)
        assert np.array_equal(decode_tensor(stream, where, MODELS[fmt.name], fmt), patterns)


@pytest.mark.parametrize("count", [SLICE - 1, SLICE, SLICE + 1, 2 * SLICE + 5])
def test_slices_meet_without_a_seam(count: int) -> None:
    rng = np.random.default_rng(count)
    where = place(torch.zeros(1, count, 1), quantise_scales(np.full((1, 1), 1.0), BF16), BF16)
    patterns = BF16.patterns(torch.from_numpy(rng.standard_normal(count).astype(np.float32)).to(torch.bfloat16))
    stream, _ = encode_tensor(patterns, where, MODELS["bf16"], BF16)
    assert np.array_equal(decode_tensor(stream, where, MODELS["bf16"], BF16), patterns)


def test_no_scalars_give_no_bytes() -> None:
    empty = np.zeros(0, np.int64)
    assert encode_tensor(empty, Placement(empty, empty, empty, empty), MODELS["bf16"], BF16) == (b"", 0)
    assert len(decode_tensor(b"", Placement(empty, empty, empty, empty), MODELS["bf16"], BF16)) == 0


# ---------------------------------------------------------------- integers
def check_rows(rows: Freqs, symbols: int) -> None:
    assert rows.dtype == np.float32 and rows.shape[1] == symbols
    assert (rows >= 0).all() and (rows == np.floor(rows)).all() and rows.max() < ONE
    assert (rows.astype(np.int64).sum(1) == ONE - symbols).all(), "the coder's scale must be exactly 1"


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.sampled_from(ANY), st.integers(0, 2**32 - 1))
def test_frequency_rows_are_integers_of_one_exact_sum(fmt: NumberFormat, seed: int) -> None:
    rng = np.random.default_rng(seed)
    where = any_placement(rng, 300, fmt)
    rows = MODELS[fmt.name].block_frequencies(where)
    check_rows(rows, BLOCKS + 1)
    assert (rows[:, BLOCKS] == ESCAPE).all()
    check_rows(MODELS[fmt.name].cell_frequencies(where, rng.integers(0, BLOCKS, 300)), BLOCK)
    check_rows(zero_cell_frequencies(where.grid, fmt), BINADES + 1)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(st.sampled_from(ANY), st.integers(0, 2**32 - 1))
def test_compiled_loops_equal_the_plain_code(fmt: NumberFormat, seed: int) -> None:
    rng = np.random.default_rng(seed)
    where, block = any_placement(rng, 400, fmt), rng.integers(0, BLOCKS, 400)
    fast, plain = MODELS[fmt.name], CellModel(TABLE, fmt, reference=True)
    assert np.array_equal(fast.block_frequencies(where), plain.block_frequencies(where))
    assert np.array_equal(fast.cell_frequencies(where, block), plain.cell_frequencies(where, block))


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.sampled_from(ANY), st.integers(0, 2**32 - 1), st.integers(1, 300))
def test_compiled_placing_equals_the_plain_code(fmt: NumberFormat, seed: int, count: int) -> None:
    rng = np.random.default_rng(seed)
    sigma = 2.0 ** rng.uniform(-25, 65, (3, 1))
    mean = rng.standard_normal((3, count)) * 2.0 ** rng.uniform(-40, 130, (3, count))
    mean[rng.random(mean.shape) < 0.2] = 0.0
    mean = np.where(
        rng.random(mean.shape) < 0.2, sigma * rng.integers(-9, 10, mean.shape) / 8, mean
    )  # halves, cell edges
    scales = ChannelScales(*scale_integers(sigma, fmt))
    fast, plain = place_values(mean, scales, fmt), place_values_reference(mean, scales, fmt)
    assert np.array_equal(fast.mean, plain.mean) and np.array_equal(fast.start, plain.start)
    limit = cell_limit(fmt)
    assert (plain.start >= -limit).all() and (plain.start <= limit - WINDOW).all()
    outside = (
        np.abs(fast.start + WINDOW // 2) < limit - WINDOW
    )  # not cut off at the ends: the window is around the mean
    at = plain.start + WINDOW // 2 + limit
    edges = edge_table(fmt)
    inside = outside & (np.abs(plain.mean) < 2**49)
    low, high = edges[at[inside] - 1], edges[np.minimum(at[inside] + 2, 2 * limit)]
    assert (low <= plain.mean[inside]).all() and (plain.mean[inside] <= high).all()


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.sampled_from(ANY), st.integers(0, 2**32 - 1), st.integers(1, 200), st.integers(1, 5))
def test_compiled_decoding_equals_the_plain_code(fmt: NumberFormat, seed: int, group: int, groups: int) -> None:
    rng = np.random.default_rng(seed)
    flat = any_placement(rng, group * groups, fmt)
    where = Placement(*(x.reshape(groups, group) for x in (flat.mean, flat.start, flat.grid, flat.reciprocal)))
    hostile = samples.hostile_patterns(fmt)
    patterns = rng.integers(0, 1 << fmt.item_bits, (groups, group))
    patterns = np.where(
        rng.random(patterns.shape) < 0.3, hostile[rng.integers(0, len(hostile), patterns.shape)], patterns
    )
    stream, _ = encode_groups(patterns, where, MODELS[fmt.name], fmt)
    plain = CellModel(TABLE, fmt, reference=True)
    assert encode_groups(patterns, where, plain, fmt)[0] == stream
    for model in (MODELS[fmt.name], plain):
        coder = Decoder(stream)
        for g in range(groups):
            row = where.rows(np.array([g]))
            assert np.array_equal(decode_groups(coder, row, model, fmt), patterns[g])
        coder.finish()


def test_groups_of_one_are_the_same_bits_as_a_tensor() -> None:
    rng = np.random.default_rng(1)
    where, patterns = any_placement(rng, 300, BF16), rng.integers(0, 1 << 16, 300)
    one = Placement(*(x[None] for x in (where.mean, where.start, where.grid, where.reciprocal)))
    assert encode_groups(patterns[None], one, MODELS["bf16"], BF16) == encode_tensor(
        patterns, where, MODELS["bf16"], BF16
    )


def test_table_is_a_cumulative_distribution() -> None:
    assert len(TABLE) == 2 * TABLE_REACH + 1 and TABLE[0] == 0 and TABLE[-1] == 1 << TABLE_BITS
    assert (np.diff(TABLE) >= 0).all() and TABLE[TABLE_REACH] == 1 << (TABLE_BITS - 1)
    middle = np.arange(1, 2 * TABLE_REACH)
    assert (np.abs(TABLE[middle] + TABLE[2 * TABLE_REACH - middle] - (1 << TABLE_BITS)) <= 1).all(), "symmetric"


@FINE
def test_scales_stand_for_the_sigma_they_came_from(fmt: NumberFormat) -> None:
    sigma = 2.0 ** np.linspace(-9, 5, 60).reshape(3, 20)
    back = quantise_scales(sigma, fmt)
    assert np.allclose(back.sigma()[:, 0], sigma, rtol=3e-5)
    ratio = sigma / 2.0 ** back.grid[:, 0]
    assert (ratio >= 4).all() and (ratio < 8).all()


# ---------------------------------------------------------------- size
@EACH
@pytest.mark.parametrize(
    ("spread", "sigma"), [(1.0, 0.02), (1.0, 0.1), (8.0, 0.3), (0.05, 1.0), (200.0, 0.5), (0.0, 0.004)]
)
def test_size_is_within_one_percent_of_the_ideal(fmt: NumberFormat, spread: float, sigma: float) -> None:
    generator = torch.Generator().manual_seed(5)
    shape = (2, 512, 24)
    guess = torch.randn(shape, generator=generator) * spread
    values = samples.cast(guess + torch.randn(shape, generator=generator) * sigma, fmt)
    scales = quantise_scales(np.full((2, 24), sigma), fmt)
    patterns = fmt.patterns(values)
    stream, _ = encode_tensor(patterns.reshape(-1), place(guess, scales, fmt), MODELS[fmt.name], fmt)
    # within FP8's denormals all values of cell 0 are equally likely: it costs more where sigma is below them
    most = 1.25 if fmt.coarse and sigma < 2.0**fmt.emin else 1.01
    assert len(stream) * 8 <= most * ideal_bits(patterns, guess, scales.sigma(), fmt)


# ---------------------------------------------------------------- constriction underneath
class ReferenceAns:
    """The coder of FORMAT.md in plain integers: 64-bit state, 32-bit words, 24-bit probabilities."""

    def __init__(self) -> None:
        self.words: list[int] = []
        self.state = 0

    def push(self, left: int, probability: int) -> None:
        if self.state >> (64 - PRECISION) >= probability:
            self.words.append(self.state & 0xFFFFFFFF)
            self.state >>= 32
        prefix, remainder = divmod(self.state, probability)
        self.state = prefix << PRECISION | (left + remainder)

    def finish(self) -> list[int]:
        words, state = list(self.words), self.state
        while state:
            words.append(state & 0xFFFFFFFF)
            state >>= 32
        return words


def reference_words(stages: list[tuple[Ints, Freqs | Ints]]) -> list[int]:
    coder = ReferenceAns()
    for symbols, parameters in reversed(stages):
        for symbol, row in zip(reversed(symbols.tolist()), reversed(parameters.tolist()), strict=True):
            if parameters.ndim == 2:
                frequencies = [int(p) + 1 for p in row]
                assert sum(frequencies) == ONE
                coder.push(sum(frequencies[:symbol]), frequencies[symbol])
            else:
                each = ONE // row
                coder.push(symbol * each, each if symbol < row - 1 else ONE - symbol * each)
    return coder.finish()


def stages_of(rng: np.random.Generator, count: int) -> list[tuple[Ints, Freqs | Ints]]:
    where = any_placement(rng, count, BF16)
    sizes = np.where(rng.random(count) < 0.5, 1 << rng.integers(1, 17, count), rng.integers(1, 512, count) * 128)
    return [
        (rng.integers(0, BLOCKS + 1, count), MODELS["bf16"].block_frequencies(where)),
        (rng.integers(0, BLOCK, count), MODELS["bf16"].cell_frequencies(where, rng.integers(0, BLOCKS, count))),
        (rng.integers(0, 1 << 30, count) % sizes, sizes),
        (rng.integers(0, BINADES + 1, count), zero_cell_frequencies(where.grid, BF16)),
    ]


def coded(stages: list[tuple[Ints, Freqs | Ints]]) -> bytes:
    coder = Encoder()
    for symbols, parameters in stages:
        coder.stage(symbols, parameters)
    return coder.finish()


@settings(max_examples=25, deadline=None, derandomize=True)
@given(st.integers(0, 2**32 - 1), st.integers(1, 60))
def test_constriction_codes_with_exactly_our_frequencies(seed: int, count: int) -> None:
    stages = stages_of(np.random.default_rng(seed), count)
    stream = coded(stages)
    assert np.frombuffer(stream, "<u4").tolist() == reference_words(stages)
    coder = Decoder(stream)
    for symbols, parameters in stages:
        read = coder.categorical(parameters) if parameters.ndim == 2 else coder.uniform(parameters)  # type: ignore[arg-type]
        assert np.array_equal(read, symbols)
    coder.finish()


def test_exact_words_of_a_fixed_input() -> None:
    """Other words than these mean that blobs of version 1 can no longer be read."""
    rows = np.array([[0, 2**24 - 4, 0, 0], [2**23 - 2, 2**23 - 4, 1, 1], [7, 11, 13, 2**24 - 4 - 31]], dtype=np.float32)
    symbols = np.array([0, 1, 2, 3, 0, 1, 2, 3, 3], dtype=np.int64)
    stages: list[tuple[Ints, Freqs | Ints]] = [
        (symbols, np.tile(rows, (3, 1))), (np.array([0, 127, 65535, 383]), np.array([2, 128, 65536, 384])),
    ]  # fmt: skip
    words = np.frombuffer(coded(stages), "<u4").tolist()
    assert words == reference_words(stages)
    assert words == EXACT_WORDS


def test_lazy_and_eager_models_agree() -> None:
    rows = MODELS["bf16"].block_frequencies(any_placement(np.random.default_rng(3), 20, BF16))
    for row in rows:
        words = []
        for lazy in (False, True):
            coder = constriction.stream.stack.AnsCoder()
            model = constriction.stream.model.Categorical(row, perfect=False, lazy=lazy)
            coder.encode_reverse(np.arange(BLOCKS + 1, dtype=np.int32), model)
            words.append(coder.get_compressed().tolist())
        assert words[0] == words[1]


# ---------------------------------------------------------------- damaged streams
def test_damaged_streams_raise_corrupt_blob() -> None:
    where = place(torch.zeros(1, 200, 1), quantise_scales(np.full((1, 1), 1.0), BF16), BF16)
    patterns = BF16.patterns(torch.randn(200, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16))
    stream, _ = encode_tensor(patterns, where, MODELS["bf16"], BF16)
    for bad in (stream[:-1], stream + b"\0", stream + bytes(4), stream + b"\1\0\0\0", stream[:-4] + bytes(4)):
        with pytest.raises(CorruptBlob):
            decode_tensor(bad, where, MODELS["bf16"], BF16)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.binary(max_size=400), st.integers(0, 2**32 - 1))
def test_any_stream_decodes_to_something_or_is_refused(stream: bytes, seed: int) -> None:
    where = any_placement(np.random.default_rng(seed), 150, FP16)
    try:
        patterns = decode_tensor(stream, where, MODELS["fp16"], FP16)
    except CorruptBlob:
        return
    assert len(patterns) == 150 and patterns.min() >= 0 and patterns.max() < 1 << 16
