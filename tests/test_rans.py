"""The rANS coder: compiled loops, plain integers and tensor operations give the same bytes and read each other; size; damage."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import constriction
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from codec import rans, rans_plain, rans_torch, scalars
from codec.cells import Ints
from codec.coders import Coder
from codec.errors import CorruptBlob
from codec.formats import BF16, FP8_E4M3, NumberFormat
from codec.rans import LOW, PRECISION, Symbols, lane_count
from codec.residual import (
    ChannelScales,
    gaussian_table,
    place_values_reference,
    scale_integers,
)
from codec.scalars_torch import Laws, Placed
from tests import codec_samples as samples
from tests.rans_rows import ANY, DEVICES, TABLES, Rows, any_rows, read_torch

ONE = 1 << PRECISION


# ---------------------------------------------------------------- three paths
@pytest.mark.parametrize("device", DEVICES)
@settings(max_examples=20, deadline=None, derandomize=True)
@given(
    st.sampled_from(ANY), st.integers(0, 2**32 - 1), st.integers(1, 32), st.integers(1, 2), st.integers(1, 50), st.integers(1, 3),
)  # fmt: skip
def test_paths_give_the_same_bytes_and_read_each_other(
    device: str, fmt: NumberFormat, seed: int, lanes: int, rows: int, count: int, batch: int
) -> None:
    rng, tables = np.random.default_rng(seed), TABLES[fmt.name]
    some = [any_rows(rng, fmt, rows, max(1, count - 5 * b)) for b in range(batch)]
    coded, tensors = [], []
    for r in some:
        law = r.mean, r.grid, r.reciprocal
        symbols, escapes = r.put(lanes)
        plain, plain_escapes = rans_plain.put(r.patterns, *law, tables, lanes)
        assert escapes == plain_escapes
        for name in ("start", "freq", "lane"):
            assert np.array_equal(getattr(symbols, name), getattr(plain, name)), name
        laid, laid_escapes = Laws(tables, device).put(
            torch.from_numpy(r.patterns).to(device), Placed(*(x.to(device) for x in r.placed())), lanes
        )
        assert laid_escapes == escapes
        for name in ("start", "freq", "lane"):
            assert np.array_equal(getattr(symbols, name), getattr(laid, name).cpu().numpy()), name
        tensors.append([laid, symbols])
        parts = [symbols, symbols]
        encoder = rans.Encoder(lanes)
        for part in parts:
            encoder.add(part)
        coded.append(encoder.finish())
        assert coded[-1] == rans_plain.encode(parts, lanes)
        assert sum(coded[-1][1]) == len(coded[-1][0])
    streams = [stream for stream, _ in coded]
    assert rans_torch.encode(tensors, lanes) == coded
    for r, stream in zip(some, streams, strict=True):
        law = r.mean, r.grid, r.reciprocal
        compiled, plainly = rans.Decoder(stream, lanes), rans_plain.Decoder(stream, lanes)
        for _ in range(2):
            assert np.array_equal(scalars.read_gridded(compiled, *law, tables), r.patterns)
            for row in range(rows):
                found = plainly.row(r.mean[row], r.grid[row], r.reciprocal[row], tables)
                assert np.array_equal(found, r.patterns[row])
        compiled.finish()
        plainly.finish()
    twice = [Rows(fmt, *(np.concatenate([x, x]) for x in (r.patterns, r.mean, r.grid, r.reciprocal))) for r in some]
    read = read_torch(streams, twice, lanes, device)
    for b, r in enumerate(twice):
        assert np.array_equal(read[b, :, : r.patterns.shape[1]].numpy(), r.patterns)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("fmt", ANY, ids=lambda f: f.name)
def test_tensors_place_laws_as_the_reference_does(device: str, fmt: NumberFormat) -> None:
    rng, shape = np.random.default_rng(3), (40, 500)
    sigma = 2.0 ** rng.uniform(-25, 62, shape)
    sigma = np.where(rng.random(shape) < 0.2, 2.0 ** rng.integers(-30, 70, shape), sigma)
    sigma = np.where(rng.random(shape) < 0.02, rng.choice([0.0, 5e-324, 1e308, math.inf], shape), sigma)
    mean = sigma.clip(0, 1e100) * rng.integers(-40, 41, shape) / 8
    mean = np.where(rng.random(shape) < 0.3, rng.standard_normal(shape) * 2.0 ** rng.uniform(-140, 130, shape), mean)
    mean = np.where(rng.random(shape) < 0.05, rng.choice([0.0, -0.0, 5e-324, 3e38, -3e38, 1e308], shape), mean)
    scales = ChannelScales(*scale_integers(sigma, fmt))
    wanted = place_values_reference(mean, scales, fmt)
    placed = Laws(TABLES[fmt.name], device).place(*(torch.from_numpy(x).to(device) for x in (mean, sigma)))
    for name, found in zip(("mean", "start", "grid", "reciprocal"), placed, strict=True):
        assert np.array_equal(found.cpu().numpy(), getattr(wanted, name)), name


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("fmt", ANY, ids=lambda f: f.name)
def test_tensors_take_patterns_of_signed_types(device: str, fmt: NumberFormat) -> None:
    """As torch views floats: a negative number is a negative integer."""
    rows = any_rows(np.random.default_rng(4), fmt, 2, 60)
    placed = Placed(*(x.to(device) for x in rows.placed()))
    signed = torch.from_numpy(rows.patterns).to({8: torch.int8, 16: torch.int16, 32: torch.int32}[fmt.item_bits])
    assert bool((signed < 0).any())
    found, _ = Laws(TABLES[fmt.name], device).put(signed.to(device), placed, 4)
    assert rans_torch.encode([[found]], 4) == [rans_plain.encode([rows.put(4)[0]], 4)]


def test_symbols_of_lanes_that_a_stream_lacks_are_refused() -> None:
    symbols = Symbols.of(np.zeros(9, np.int64), np.full(9, 5), np.arange(9) % 8)
    with pytest.raises(ValueError, match="lane 7 of streams that have 4"):
        rans_torch.encode([[symbols], []], 4)
    assert rans_torch.encode([], 4) == []


@pytest.mark.parametrize("device", DEVICES)
@settings(max_examples=30, deadline=None, derandomize=True)
@given(st.integers(0, 2**32 - 1), st.integers(1, 32), st.lists(st.integers(0, 60), max_size=4))
def test_any_symbols_code_to_the_same_bytes(device: str, seed: int, lanes: int, lengths: list[int]) -> None:
    """Also those that no scalar has: of one slot, of all slots, parts without symbols, lanes without any."""
    rng = np.random.default_rng(seed)

    def part(count: int) -> Symbols:
        freq = np.clip(rng.integers(1, 1 << rng.integers(1, PRECISION + 2, count)), 1, ONE)
        start = rng.integers(0, ONE - freq + 1)
        lane = rng.integers(0, max(1, lanes - 1), count)
        return Symbols.of(start, freq, lane)

    parts = [part(count) for count in lengths]
    encoder = rans.Encoder(lanes)
    for some in parts:
        encoder.add(some)
    wanted = encoder.finish()
    assert rans_plain.encode(parts, lanes) == wanted
    coded = rans_torch.encode([parts, [], parts[1:]], lanes, device)
    assert coded[0] == wanted and coded[2] == rans_plain.encode(parts[1:], lanes)
    stream, states = wanted[0], rans.Decoder(wanted[0], lanes).states.copy()
    words, at = np.frombuffer(stream, "<u4", offset=8 * lanes), 0
    for some in parts:  # decoding by the formula, from known symbols
        for start, freq, lane in zip(some.start.tolist(), some.freq.tolist(), some.lane.tolist(), strict=True):
            slot = int(states[lane]) % ONE
            assert start <= slot < start + freq
            x = int(rans.taken(states[lane], start, freq))
            if x < LOW:
                x, at = x << 32 | int(words[at]), at + 1
            states[lane] = x
    assert at == len(words) and (states == LOW).all()


def test_a_symbol_for_every_lane_where_quotients_are_hardest() -> None:
    """Starts are chosen so that the state is a multiple of the next symbol's slots, or one off, where float64 cannot tell."""
    rng, lanes, rounds = np.random.default_rng(5), rans.MAX_LANES, 200
    states, hard, far = [LOW] * lanes, 0, 0
    sizes = np.clip(rng.integers(1, 1 << rng.integers(1, PRECISION + 1, (rounds + 1, lanes))), 1, ONE // 2).tolist()
    out: list[tuple[int, int, int]] = []
    for now, following in pairwise(sizes):
        for lane in range(lanes):
            x, freq, then = states[lane], now[lane], following[lane]
            x = x >> 32 if x >= freq << 39 else x
            hard += x % freq in (0, 1, freq - 1)
            far += x >= 1 << 53
            x = (x // freq << PRECISION) + x % freq
            shifted = x >> 32 if x >= then << 39 else x  # whether the next one writes a word does not hang on 24 bits
            start = (int(rng.integers(-1, 2)) - shifted) % then if shifted == x else int(rng.integers(0, ONE // 2))
            states[lane] = x + start
            out.append((start, freq, lane))
    table = np.array(out, np.int64).reshape(rounds, lanes, 3)[::-1].reshape(-1, 3)
    parts = [Symbols.of(*table[:777].T), Symbols.of(*table[777:].T)]  # the first begins and ends amid the lanes
    encoder = rans.Encoder(lanes)
    for part in parts:
        encoder.add(part)
    stream = encoder.finish()
    assert np.frombuffer(stream[0], "<u8", lanes).tolist() == states
    assert stream == rans_plain.encode(parts, lanes)
    assert hard > len(out) // 3 and far > len(out) // 20


def test_every_pattern_of_every_format_under_some_laws() -> None:
    for fmt in ANY:
        patterns = np.resize(samples.all_patterns(fmt), (8, 1 << 13))
        for mean, sigma in ((0.0, 0.03), (0.5, 1.0), (-3.0, 2.0**-12)):
            grid, reciprocal = (np.full(patterns.shape, x[0]) for x in scale_integers(np.array([sigma]), fmt))
            rows = Rows(fmt, patterns, np.full(patterns.shape, mean), grid, reciprocal)
            symbols, escapes = rows.put(32)
            encoder = rans.Encoder(32)
            encoder.add(symbols)
            stream, _ = encoder.finish()
            assert escapes >= (patterns & ((1 << (fmt.item_bits - 1)) - 1) >= fmt.first_nonfinite << fmt.raw).sum()
            coder = rans.Decoder(stream, 32)
            found = scalars.read_gridded(coder, rows.mean, grid, reciprocal, TABLES[fmt.name])
            coder.finish()
            assert np.array_equal(found, patterns)


def test_scaled_rows_are_gridded_rows() -> None:
    rng = np.random.default_rng(4)
    for fmt in ANY:
        rows, sigma = any_rows(rng, fmt, 5, 90), 2.0 ** rng.uniform(-25, 65, (5, 90))
        grid, reciprocal = scale_integers(sigma, fmt)
        one, _ = scalars.put_scaled(rows.patterns, rows.mean, sigma, TABLES[fmt.name], 4)
        other, _ = Rows(fmt, rows.patterns, rows.mean, grid, reciprocal).put(4)
        assert all(np.array_equal(getattr(one, n), getattr(other, n)) for n in ("start", "freq", "lane"))


def test_parts_in_one_room_are_added_in_order() -> None:
    one, other = Symbols.of(*np.array([[3, 2, 0], [9, 1, 1]]).T), Symbols.of(*np.array([[5, 4, 1]]).T)
    encoder, plain = rans.Encoder(2), [one, other]
    room = encoder.room(5)
    room[:2], room[2:3] = one.codes, other.codes
    with pytest.raises(ValueError, match="not added"):
        encoder.add(Symbols(room[2:3]))
    encoder.add(Symbols(room[:2]))
    encoder.add(Symbols(room[2:3]))
    following = encoder.room(5)
    assert not any(np.shares_memory(following[:5], part.codes) for part in encoder.parts)
    assert encoder.finish() == rans_plain.encode(plain, 2)


def test_lanes_follow_the_number_of_scalars() -> None:
    assert [lane_count(n) for n in (0, 1, 2**14, 2**15 - 1, 2**15, 3 * 2**16, 2**19 - 1, 2**19, 2**40)] == [
        1, 1, 1, 1, 2, 8, 16, 32, 32,
    ]  # fmt: skip


# ---------------------------------------------------------------- damaged streams
def readers(rows: Rows, lanes: int) -> list[Any]:
    """For each path, what reads a stream of these rows and says what it found."""
    law, tables = (rows.mean, rows.grid, rows.reciprocal), TABLES[rows.fmt.name]

    def compiled(stream: bytes) -> Ints:
        coder = rans.Decoder(stream, lanes)
        found = scalars.read_gridded(coder, *law, tables)
        coder.finish()
        return found

    def plain(stream: bytes) -> Ints:
        coder = rans_plain.Decoder(stream, lanes)
        found = np.stack([coder.row(*row, tables) for row in zip(*law, strict=True)])
        coder.finish()
        return found

    def on(device: str) -> Callable[[bytes], Ints]:
        return lambda stream: read_torch([stream], [rows], lanes, device)[0].numpy()

    return [compiled, plain, *map(on, DEVICES)]


@settings(max_examples=8, deadline=None, derandomize=True)
@given(st.sampled_from(ANY), st.integers(0, 2**32 - 1), st.integers(1, 32))
def test_damaged_streams_raise_corrupt_blob(fmt: NumberFormat, seed: int, lanes: int) -> None:
    rng = np.random.default_rng(seed)
    rows = any_rows(rng, fmt, 2, 24)
    encoder = rans.Encoder(lanes)
    encoder.add(rows.put(lanes)[0])
    stream, _ = encoder.finish()
    low = (LOW - 1).to_bytes(8, "little")
    damaged = [
        b"", stream[:-1], stream[: 8 * lanes - 4], stream[: 8 * lanes], stream[:-4], stream + b"\0", stream + bytes(4),
        stream + b"\1\0\0\0", low + stream[8:], stream[: 8 * lanes - 1] + b"\x80" + stream[8 * lanes :],
    ]  # fmt: skip
    for read in readers(rows, lanes):
        assert np.array_equal(read(stream), rows.patterns)
        for bad in damaged:
            if bad != stream:
                with pytest.raises(CorruptBlob):
                    read(bad)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(st.sampled_from(ANY), st.binary(max_size=300), st.integers(0, 2**32 - 1), st.integers(1, 8), st.booleans())
def test_garbage_is_refused_or_read_alike(
    fmt: NumberFormat, garbage: bytes, seed: int, lanes: int, plausible: bool
) -> None:
    """States within range and any words: most paths go wrong late, and none may read beyond the stream or its tables."""
    rng = np.random.default_rng(seed)
    rows = any_rows(rng, fmt, 2, 40)
    if plausible:
        states = rng.integers(LOW, 2**63 - 1, lanes, dtype=np.uint64, endpoint=True)
        garbage = states.astype("<u8").tobytes() + garbage[: len(garbage) // 4 * 4]
    told = []
    for read in readers(rows, lanes):
        try:
            found = read(garbage)
            told.append(found.tolist())
            assert found.shape == rows.patterns.shape
        except CorruptBlob:
            told.append(None)
    assert all(one == told[0] for one in told)


def test_which_stream_is_broken_is_told() -> None:
    rng = np.random.default_rng(2)
    rows, streams = any_rows(rng, BF16, 1, 30), []
    for _ in range(3):
        encoder = rans.Encoder(4)
        encoder.add(rows.put(4)[0])
        streams.append(encoder.finish()[0])
    assert read_torch(streams, [rows] * 3, 4).shape == (3, 1, 30)
    for bad, said in ((streams[1][:-4], "2 of 3 ends before"), (streams[1] + bytes(4), "2 of 3 holds more")):
        with pytest.raises(CorruptBlob, match=said):
            read_torch([streams[0], bad, streams[2]], [rows] * 3, 4)


# ---------------------------------------------------------------- size
def constriction_bytes(parts: list[Symbols]) -> int:
    """What constriction makes of the same frequencies, in one stream. An interval that touches an end is moved by a slot."""
    coder = constriction.stream.stack.AnsCoder()
    model = constriction.stream.model.Categorical(perfect=False)
    for part in reversed(parts):
        freq = part.freq.astype(np.int64)
        assert freq.max() <= ONE - 2
        start = np.clip(part.start.astype(np.int64), 1, ONE - 1 - freq)
        rows = np.stack([start, freq, ONE - start - freq], 1) - 1  # constriction adds 1 each
        coder.encode_reverse(np.ones(len(rows), np.int32), model, rows.astype(np.float32))
    return 4 * len(coder.get_compressed())


@pytest.mark.parametrize(
    ("fmt", "sigma", "least", "most"), [(BF16, 0.0055, 2.9, 3.1), (FP8_E4M3, 0.0115, 0.85, 0.95)], ids=["3", "0.9"]
)
def test_size_is_constrictions(fmt: NumberFormat, sigma: float, least: float, most: float) -> None:
    """A full chunk: 256 tokens, 30 layers of 384 channels."""
    rng, layers, shape = np.random.default_rng(7), 30, (384, 256)
    sizes, sigmas = (layers, shape[0] * shape[1]), np.full(shape, sigma)
    coders = [Coder(rans.NAME, gaussian_table(), fmt, reference) for reference in (False, True)]
    writer, truths, parts = coders[0].writer(*sizes), [], []
    for _ in range(layers):
        mean = rng.standard_normal(shape)
        truth = samples.cast(torch.from_numpy(mean + sigma * rng.standard_normal(shape)), fmt)
        truths.append((mean, fmt.patterns(truth)))
        writer.layer()
        writer.channels(0, truths[-1][1], mean, sigmas)
        parts.append(scalars.put_scaled(truths[-1][1], mean, sigmas, TABLES[fmt.name], 1)[0])
    written = writer.finish()
    assert len(written.streams) == (1 if fmt.coarse else 3)
    size = sum(map(len, written.streams))
    assert (written.bytes_k, written.bytes_v) == (size, 0)
    assert least < 8 * size / math.prod(sizes) < most
    assert size <= 1.001 * constriction_bytes(parts)
    reader = coders[0].reader(written.streams, *sizes)
    for mean, patterns in truths:
        reader.layer()
        assert reader.source is not None
        assert np.array_equal(scalars.read_scaled(reader.source.coder, mean, sigmas, TABLES[fmt.name]), patterns)
    reader.finish()


def test_how_many_layers_share_a_stream() -> None:
    """Every blob depends on it."""
    found = [
        rans.layers_a_stream(n, coarse)
        for n in (98304, 1 << 19, (1 << 19) + 1, 1 << 20, 1 << 30)
        for coarse in (False, True)
    ]
    assert found == [10, 32, 2, 6, 1, 5, 1, 3, 1, 1]


@settings(max_examples=20, deadline=None, derandomize=True)
@given(st.integers(1, 9), st.integers(1, 4), st.integers(1, 5), st.integers(0, 2**32 - 1))
def test_layers_share_streams(layers: int, most: int, width: int, seed: int) -> None:
    """Streams hold whole layers, each is used up by its own, and both paths agree."""
    rng, scalars_a_layer = np.random.default_rng(seed), 2 * width * 3
    coders = [Coder(rans.NAME, gaussian_table(), BF16, reference) for reference in (False, True)]
    patterns = rng.integers(0, 1 << 16, (layers, 2, width, 3))
    law = np.zeros((width, 3)), np.ones((width, 3))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rans, "STREAM_SCALARS", most * scalars_a_layer)
        written = []
        for coder in coders:
            writer = coder.writer(layers, scalars_a_layer)
            for layer in patterns:
                writer.layer()
                assert writer.channels(1, layer[1], *law) + writer.channels(0, layer[0], *law) <= layer.size
            written.append(writer.finish())
        assert written[0] == written[1]
        streams = written[0].streams
        assert len(streams) == -(-layers // most)
        assert written[0].bytes_k + written[0].bytes_v == sum(map(len, streams))
        for coder in coders:
            reader = coder.reader(streams, layers, scalars_a_layer)
            for layer in patterns:
                reader.layer()
                found = [np.stack([reader.channel(side, m, s) for m, s in zip(*law, strict=True)]) for side in (1, 0)]
                assert np.array_equal(found, layer[::-1])
            reader.finish()
            for bad in (streams[:-1], [*streams, streams[0]]):
                with pytest.raises(CorruptBlob, match="bitstreams where"):
                    coder.reader(bad, layers, scalars_a_layer)
            with pytest.raises(CorruptBlob):
                reader = coder.reader([stream + bytes(4) for stream in streams], layers, scalars_a_layer)
                for _ in range(layers):
                    reader.layer()
                    [reader.channel(side, m, s) for side in (1, 0) for m, s in zip(*law, strict=True)]
                reader.finish()
