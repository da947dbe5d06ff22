"""Committed blobs of every format version: they decode to the bits they were made from, and are written again byte for byte.

A failure here means that stored caches can no longer be read, or that the same cache is now stored in other bytes. The way out
is a new format version with a golden set of its own, not a new set for an old version (see tests/make_golden.py).
"""

from __future__ import annotations

import itertools
import json
import math
import struct
import sys
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash

import codec
from codec import formats
from codec.checksums import layer_checksums
from codec.coders import NAMES
from codec.predictor import MODEL_FREE
from codec.predictor.config import KINDS
from tests import codec_samples as samples
from tests import make_golden

DATA = Path(__file__).resolve().parent / "data"
VERSIONS = sorted(p.name for p in DATA.glob("v*"))


@lru_cache(maxsize=8)
def record(version: str) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((DATA / version / "golden.json").read_text(encoding="utf-8"))
    return loaded


@lru_cache(maxsize=16)
def predictor(version: str, name: str) -> codec.Predictor:
    return codec.Predictor.from_bytes((DATA / version / f"predictor-{name}.safetensors").read_bytes())


@lru_cache(maxsize=16)
def profile(version: str, name: str) -> codec.Profile:
    return codec.Profile.from_bytes((DATA / version / f"profile-{name}.safetensors").read_bytes())


def predictor_of(version: str, profile_name: str) -> codec.Predictor:
    return predictor(version, record(version)["profiles"][profile_name]["predictor"])


def blobs(version: str, case: str) -> list[bytes]:
    count = len(record(version)["cases"][case]["blobs"])
    return [(DATA / version / f"{case}-{n}.kv").read_bytes() for n in range(count)]


def all_cases() -> list[tuple[str, str]]:
    return [(version, case) for version in VERSIONS for case in record(version)["cases"]]


def test_there_is_a_golden_set_and_it_is_small() -> None:
    assert "v1" in VERSIONS and set(record("v1")["cases"]) == set(make_golden.CASES)
    assert sum(f.stat().st_size for f in DATA.rglob("*") if f.is_file()) < 2_900_000


@pytest.mark.parametrize("version", VERSIONS)
def test_ids_are_digests_of_the_files(version: str) -> None:
    r = record(version)
    for name, wanted in r["predictors"].items():
        assert predictor(version, name).fingerprint.hex() == wanted
        assert predictor(version, name).to_bytes() == (DATA / version / f"predictor-{name}.safetensors").read_bytes()
    for name, stated in r["profiles"].items():
        p = profile(version, name)
        assert p.id.hex() == stated["id"] and p.predictor.hex() == r["predictors"][stated["predictor"]]
        assert p.target.hex() == r["target"]
        assert p.to_bytes() == (DATA / version / f"profile-{name}.safetensors").read_bytes()


@pytest.mark.parametrize("version", VERSIONS)
def test_this_machine_gives_the_known_answer(version: str) -> None:
    for name in record(version)["profiles"]:
        codec.check_known_answer(predictor_of(version, name), profile(version, name))


@pytest.mark.parametrize(("version", "case"), all_cases())
def test_golden_blobs_decode_and_are_written_again(version: str, case: str) -> None:
    r = record(version)
    c, size = r["cases"][case], r["chunk_tokens"]
    ids, p, stored = torch.tensor(c["token_ids"]), profile(version, c["profile"]), blobs(version, case)
    made_with = predictor_of(version, c["profile"])
    assert [codec.content_id(b).hex() for b in stored] == c["blobs"]
    assert [k.hex() for k in samples.keys(ids, size, p.cache_format, p.target)] == c["keys"]
    decoded = samples.decode_prompt(made_with, p, ids, stored, size)
    values = samples.joined(decoded)
    assert layer_checksums(values, p.format).hex() == c["whole_checksums"]
    assert [layer_checksums(d.layers, p.format).hex() for d in decoded] == c["layer_checksums"]
    assert [d.chain_digest.hex() for d in decoded] == c["chain_digests"]
    again = samples.encode_prompt(made_with, p, ids, values, size)
    assert [e.blob for e in again] == stored, "the same bits, stored in other bytes"
    assert [e.stats.escapes for e in again] == c["escapes"]


# ---------------------------------------------------------------- a reader written from FORMAT.md, in plain integers
# code: mantissa bits, least exponent, first ordinal that is not finite, bits of a pattern
FORMATS = {1: (7, -126, 32640, 16), 2: (10, -14, 31744, 16), 4: (3, -6, 127, 8)}


class Bitstream:
    """ANS decoding, a symbol at a time."""

    def __init__(self, stream: bytes) -> None:
        self.words = [w for (w,) in struct.iter_unpack("<I", stream)]
        self.state = 0
        for _ in range(min(2, len(self.words))):
            self.state = self.state << 32 | self.words.pop()

    def _take(self, frequency: int, before: int) -> None:
        self.state = frequency * (self.state >> 24) + self.state % 2**24 - before
        if self.state < 2**32 and self.words:
            self.state = self.state << 32 | self.words.pop()

    def symbol(self, weights: list[int]) -> int:
        assert sum(weights) == 2**24 - len(weights)
        before, quantile = 0, self.state % 2**24
        for symbol, weight in enumerate(weights):
            if quantile < before + weight + 1:
                self._take(weight + 1, before)
                return symbol
            before += weight + 1
        raise AssertionError("weights do not fill the range")

    def uniform(self, size: int) -> int:
        each = 2**24 // size
        value = min(self.state % 2**24 // each, size - 1)
        self._take(each if value < size - 1 else 2**24 - each * value, each * value)
        return value


class Scalar:
    """What is known of one scalar before it is read."""

    def __init__(self, code: int, table: list[int], guess: float, grid: int, reciprocal: int) -> None:
        self.mu, self.emin, self.inf, self.bits = FORMATS[code]
        self.table, self.g, self.r = table, grid, reciprocal
        self.limit = 2**self.mu * (1 + min(40, (self.inf >> self.mu) - 1))
        self.mean = round(max(-(2.0**50), min(2.0**50, math.ldexp(guess, 8 - grid))))
        step = self.mean >> 8
        m = step if step >= 0 else -1 - step
        e = max(max(m, 1).bit_length() - 1 - self.mu, 0)
        n = (e << self.mu) + (m >> e)
        n = n if step >= 0 else -1 - n
        self.start = max(-self.limit, min(self.limit - 128, n - 64))
        self.binades = min(grid - self.emin, 15)

    def edge(self, n: int) -> int:
        if n <= 0:
            return -self.edge(-n) if n else 0
        over = n - 2**self.mu
        value = n if over <= 0 else (2**self.mu + over % 2**self.mu) << (over >> self.mu)
        half = (value - 1).bit_length() - 1 - self.mu + 7
        return (value << 8) - (1 << half if half >= 0 else 0)

    def cumulative(self, n: int) -> int:
        distance = max(-(2**20), min(2**20, self.edge(n) - self.mean))
        return self.table[4096 + max(-4096, min(4096, (distance * self.r) >> 16))]

    def blocks(self) -> list[int]:
        t = 2**24 - 264
        c = [0, *((self.cumulative(self.start + 16 * b) * t) >> 38 for b in range(1, 8)), t]
        return [b - a for a, b in itertools.pairwise(c)] + [255]

    def cells(self, first: int) -> list[int]:
        a = [self.cumulative(first + i) - self.cumulative(first) for i in range(17)]
        a = a if a[16] else list(range(17))
        t = 2**24 - 16
        q = [min(math.floor(a[i] * (t / a[16])), t) for i in range(16)] + [t]
        return [b - a for a, b in itertools.pairwise(q)]

    def zero_binades(self) -> list[int]:
        c = self.binades
        return [2 ** (23 - b) - 1 if b < c else 0 for b in range(15)] + [2 ** (24 - c) - 1 - (15 - c)]


def read_slice(bits: Bitstream, scalars: list[Scalar]) -> list[int]:
    """Patterns of up to 32,768 scalars, a stage after the other."""
    out = [0] * len(scalars)
    blocks = [bits.symbol(s.blocks()) for s in scalars]
    kept = [i for i, b in enumerate(blocks) if b < 8]
    first = {i: scalars[i].start + 16 * blocks[i] for i in kept}
    n = {i: first[i] + bits.symbol(scalars[i].cells(first[i])) for i in kept}
    for i in kept:
        s, m = scalars[i], n[i] if n[i] >= 0 else -1 - n[i]
        r = s.mu - (m.bit_length() - 1) if 1 <= m < 2**s.mu else 0
        raw = bits.uniform(2**r) if r else 0
        if m >= 2**s.mu:
            out[i] = ((s.g + s.mu - s.emin + 1) << s.mu) + m - 2**s.mu
        elif m:
            out[i] = (s.g + m.bit_length() - 1 - s.emin + 1) << s.mu | (m << r) % 2**s.mu | raw
        out[i] |= (n[i] < 0) << (s.bits - 1)
    zero = [i for i in kept if n[i] in (0, -1)]
    binades = [bits.symbol(scalars[i].zero_binades()) for i in zero]
    for i, b in zip(zero, binades, strict=True):
        s = scalars[i]
        if b < 15:
            out[i] |= (s.g - b - s.emin) << s.mu | bits.uniform(2**s.mu)
        else:
            out[i] |= bits.uniform((s.g - s.binades - s.emin + 1) << s.mu)
    for i, b in enumerate(blocks):
        if b == 8:
            out[i] = bits.uniform(2 ** scalars[i].bits)
    return out


class Lanes:
    """rANS decoding, a symbol at a time."""

    def __init__(self, stream: bytes, scalars: int) -> None:
        count = min(32, 1 << max((scalars // 2**14).bit_length() - 1, 0))
        self.states = list(struct.unpack_from(f"<{count}Q", stream))
        self.words = [w for (w,) in struct.iter_unpack("<I", stream[8 * count :])][::-1]

    def take(self, lane: int, sums: list[int]) -> int:
        """The symbol of a row of sums of frequencies, 0 first and 2^24 last."""
        x, slot = self.states[lane], self.states[lane] % 2**24
        symbol = next(i for i in range(len(sums) - 1) if slot < sums[i + 1])
        x = (sums[symbol + 1] - sums[symbol]) * (x >> 24) + slot - sums[symbol]
        self.states[lane] = x if x >= 2**31 else x << 32 | self.words.pop()
        return symbol

    def uniform(self, lane: int, size: int) -> int:
        """One of `size` equally likely values."""
        return self.take(lane, [i * (2**24 // size) for i in range(size)] + [2**24])


def read_lanes(bits: Lanes, scalars: list[Scalar]) -> list[int]:
    """Patterns of one row of scalars."""
    out = [0] * len(scalars)
    for begin in range(0, len(scalars), len(bits.states)):
        row = list(enumerate(range(begin, min(begin + len(bits.states), len(scalars)))))
        n: dict[int, int | None] = {}
        for lane, i in row:
            s = scalars[i]
            t = 2**24 - 384
            inner = [((s.cumulative(s.start + k) * t) >> 38) + k for k in range(1, 128)]
            cell = bits.take(lane, [0, *inner, t + 128, 2**24])
            n[i] = None if cell == 128 else s.start + cell
        binades: dict[int, int] = {}
        for lane, i in row:
            s, cell_number = scalars[i], n[i]
            if cell_number is None:
                out[i] = bits.uniform(lane, 2**s.bits)
                continue
            m = cell_number if cell_number >= 0 else -1 - cell_number
            if m == 0:
                frequencies = [w + 1 for w in s.zero_binades()]
                binades[i] = bits.take(lane, [0, *itertools.accumulate(frequencies)])
                continue
            r = s.mu - (m.bit_length() - 1) if m < 2**s.mu else 0
            raw = bits.uniform(lane, 2**r) if r else 0
            out[i] = ((s.g + s.mu - s.emin + 1) << s.mu) + m - 2**s.mu
            if m < 2**s.mu:
                out[i] = (s.g + m.bit_length() - 1 - s.emin + 1) << s.mu | (m << r) % 2**s.mu | raw
            out[i] |= (cell_number < 0) << (s.bits - 1)
        for lane, i in row:
            if i in binades:
                s, b = scalars[i], binades[i]
                if b < 15:
                    out[i] = (s.g - b - s.emin) << s.mu | bits.uniform(lane, 2**s.mu)
                else:
                    out[i] = bits.uniform(lane, (s.g - s.binades - s.emin + 1) << s.mu)
                out[i] |= (n[i] == -1) << (s.bits - 1)
    return out


@pytest.mark.parametrize("case", [c for c in record("v1")["cases"] if "-open-" in c])
def test_a_reader_written_from_the_document_reads_the_first_chunk(case: str) -> None:
    c = record("v1")["cases"][case]
    p, made_with, blob = profile("v1", c["profile"]), predictor_of("v1", c["profile"]), blobs("v1", case)[0]
    ids = torch.tensor(c["token_ids"])[: record("v1")["chunk_tokens"]]
    guesses = [t for pair in samples.guesses(made_with, made_with.new_state(), ids) for t in pair]
    length, layers, code = struct.unpack_from("<I", blob, 12)[0], struct.unpack_from("<H", blob, 172)[0], blob[174]
    (count,) = struct.unpack_from("<H", blob, 184)
    lengths, at = struct.unpack_from(f"<{count}Q", blob, 186), 186 + 8 * count
    scales = struct.unpack_from(f"<{(length - 16 - at - 40 * layers) // 4}f", blob, at)
    at += 4 * len(scales)
    sums = [blob[at + 40 * i + 8 + 16 * j :][:16] for i in range(layers) for j in range(2)]
    at, table, width = length, p.tensors["table"].tolist(), FORMATS[code][3] // 8
    lanes = None
    if count == 1:
        lanes = Lanes(blob[at : at + lengths[0]], sum(guess.numel() for guess in guesses))
    for tensor, guess in enumerate(guesses):
        grid, reciprocal = (a[tensor // 2, tensor % 2].tolist() for a in (p.tensors["grid"], p.tensors["reciprocal"]))
        if scales:
            assert blob[175] == 1, "one scale a tensor"
            guess = guess.double() / scales[tensor]
        finite = guess.clamp(-p.format.max_finite, p.format.max_finite)
        rows = [
            [Scalar(code, table, g, grid[h][d], reciprocal[h][d]) for d, g in enumerate(row)]
            for h, rows in enumerate(finite.tolist()) for row in rows
        ]  # fmt: skip
        if lanes is not None:
            patterns = [x for row in rows for x in read_lanes(lanes, row)]
        else:
            bits = Bitstream(blob[at : at + lengths[tensor]])
            patterns = read_slice(bits, [s for row in rows for s in row])
            assert bits.state == 0 and not bits.words
            at += lengths[tensor]
        assert xxhash.xxh3_128_digest(struct.pack(f"<{len(patterns)}{' BH'[width]}", *patterns)) == sums[tensor]
    if lanes is not None:
        assert set(lanes.states) == {2**31} and not lanes.words
    else:
        assert at == len(blob) - 16


@pytest.mark.parametrize("version", VERSIONS)
def test_the_set_holds_what_is_hard(version: str) -> None:
    cases = record(version)["cases"]
    assert any(len(c["token_ids"]) % record(version)["chunk_tokens"] for c in cases.values()), "a partial chunk"
    kinds = {tuple(c["profile"].split("-")) for c in cases.values()}
    rungs = {kind.replace("-", "_") for kind in (*KINDS, *MODEL_FREE)}
    assert {k[0] for k in kinds} == rungs | {"int8_window"} and {k[2] for k in kinds} == set(formats.FORMATS)
    assert {k[:2] for k in kinds} >= {(p, loop) for p in ("fp8", "int8") for loop in ("open", "closed")}
    assert {profile(version, name).facts.coder for name in record(version)["profiles"]} == set(NAMES)
    modes = {profile(version, name).facts.scale_mode for name in record(version)["profiles"]}
    assert modes == {"", "none", "tensor", "head"}
    assert all(sum(c["escapes"]) > 0 for n, c in cases.items() if "hostile" in n or "outliers" in n)


def test_an_existing_set_is_not_overwritten(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["make_golden"])
    with pytest.raises(SystemExit) as caught:
        make_golden.main()
    assert caught.value.code == 2 and "never changes" in capsys.readouterr().err
