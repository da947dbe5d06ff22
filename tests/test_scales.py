"""Scales of an FP8 cache: their bytes, and quantising as an engine does it."""

from __future__ import annotations

import struct

import numpy as np
import pytest
import torch

from codec.errors import DataError
from codec.formats import FORMATS, NumberFormat
from codec.scales import MAX_SCALE, MIN_SCALE, SCALE_MODES, CacheScales

FP8 = [fmt for fmt in FORMATS.values() if fmt.coarse]
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
SCALES = (1.0, 0.37, 2.0**-9, 0.01, 3.3, 7.1)


def scales_of(*heads: float, mode: str = "head") -> CacheScales:
    """One layer: K has these scales, V twice these."""
    values = np.array([heads, [2 * h for h in heads]], np.float32)[None]
    return CacheScales(mode, values)


def every_pattern(fmt: NumberFormat) -> torch.Tensor:
    return torch.arange(256, dtype=torch.uint8).view(fmt.dtype)


def test_the_formats_are_there() -> None:
    assert {fmt.name for fmt in FP8} == {"fp8_e4m3", "fp8_e5m2"}


# ---------------------------------------------------------------- quantising
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("fmt", FP8, ids=lambda f: f.name)
def test_a_dequantised_value_quantises_to_itself(fmt: NumberFormat, dtype: torch.dtype) -> None:
    scales = scales_of(*SCALES)
    patterns = every_pattern(fmt)
    stored = patterns.view(torch.uint8).expand(len(SCALES), 1, 256).contiguous().view(fmt.dtype)
    for side in (0, 1):
        values = scales.dequantise(stored, 0, side, dtype)
        assert values.dtype == dtype and values.shape == stored.shape
        again = scales.quantise(values, 0, side, fmt)
        # A NaN's sign and payload, and infinities (which saturate), do not come back.
        # Neither does what the run's dtype cannot hold: it has become infinite or lost bits to its least numbers.
        exact = stored.double() * torch.tensor(scales.values[0, side])[:, None, None].double()
        info = torch.finfo(dtype)
        held = patterns.float().isfinite() & (exact.abs() <= info.max) & ((exact == 0) | (exact.abs() >= info.tiny))
        assert torch.equal(again.view(torch.uint8)[held], stored.view(torch.uint8)[held])
        assert int(held.sum()) > 0.8 * held.numel() or dtype == torch.float16
        nan = patterns.float().isnan().expand(stored.shape)
        assert bool(again.float()[nan].isnan().all()) and not bool(again.float()[~nan].isnan().any())


@pytest.mark.parametrize("fmt", FP8, ids=lambda f: f.name)
def test_quantising_saturates_and_rounds_to_nearest_even(fmt: NumberFormat) -> None:
    scale, top = 0.25, fmt.max_finite
    step = 2.0**-fmt.mantissa
    inf, nan = float("inf"), float("nan")
    given = [1 + step / 2, 1 + 1.5 * step, 1 + 0.51 * step, top, 2 * top, -1e30, inf, -inf, 0.0, -0.0]
    want = [1.0, 1 + 2 * step, 1 + step, top, top, -top, top, -top, 0.0, -0.0]
    values = torch.tensor([*given, nan])[None, None] * scale
    stored = scales_of(scale).quantise(values, 0, 0, fmt)
    assert stored.dtype == fmt.dtype and stored.shape == values.shape
    found = stored[0, 0].float()
    assert found[:-1].tolist() == want and bool(found[-1].isnan())
    assert torch.signbit(found[9]) and not torch.signbit(found[8])


@pytest.mark.parametrize("fmt", FP8, ids=lambda f: f.name)
def test_quantising_takes_the_nearest_of_all_values(fmt: NumberFormat) -> None:
    """Against a search over the format's values in float64, each head and K and V under its own scale."""
    scales = scales_of(0.013, 2.7)
    generator = torch.Generator().manual_seed(3)
    spread = torch.randn(2, 50, 8, generator=generator) * 2.0 ** torch.randint(-12, 6, (2, 50, 8), generator=generator)
    values = spread.to(torch.bfloat16)
    numbers = every_pattern(fmt).double()
    numbers = numbers[numbers.isfinite()]
    for side in (0, 1):
        factor = torch.tensor(scales.values[0, side])[:, None, None]
        quotient = (values.float() / factor).double()
        best = (quotient[..., None] - numbers).abs().amin(-1)
        found = scales.quantise(values, 0, side, fmt).double()
        assert torch.equal((quotient - found).abs(), best)


def test_a_tensor_of_other_shape_is_refused() -> None:
    with pytest.raises(ValueError, match="2 heads"):
        scales_of(1.0, 1.0).quantise(torch.zeros(3, 4, 8), 0, 0, FP8[0])


# ---------------------------------------------------------------- calibrating
@pytest.mark.parametrize("fmt", FP8, ids=lambda f: f.name)
def test_calibrated_scales_take_the_largest_value_to_the_top(fmt: NumberFormat) -> None:
    largest = np.array([[[3.5, 0.0], [0.25, 7.0]], [[0.0, 0.0], [1e-30, 1e38]]], np.float32)
    head = CacheScales.calibrated("head", largest, fmt).values
    assert head.dtype == np.float32 and head.shape == (2, 2, 2)
    top = np.float32(fmt.max_finite)
    assert head[0].tolist() == [[np.float32(3.5) / top, 1.0], [np.float32(0.25) / top, np.float32(7) / top]]
    assert head[1].tolist() == [[1.0, 1.0], [MIN_SCALE, MAX_SCALE]]
    tensor = CacheScales.calibrated("tensor", largest, fmt).values
    assert tensor[0].tolist() == [[np.float32(3.5) / top] * 2, [np.float32(7) / top] * 2]
    assert tensor[1].tolist() == [[1.0, 1.0], [MAX_SCALE, MAX_SCALE]]
    for mode in ("head", "tensor"):
        scales = CacheScales.calibrated(mode, largest, fmt)
        assert CacheScales.from_bytes(scales.to_bytes()).to_bytes() == scales.to_bytes()


# ---------------------------------------------------------------- bytes
@pytest.mark.parametrize("mode", SCALE_MODES)
def test_bytes_come_back(mode: str) -> None:
    values = {"none": [1.0] * 3, "tensor": [0.3] * 3, "head": [0.1, 0.2, 3.0]}[mode]
    scales = CacheScales(mode, np.array([[values] * 2] * 4, np.float32))
    data = scales.to_bytes()
    found = CacheScales.from_bytes(data)
    assert found.mode == mode and found.values.dtype == np.float32
    assert np.array_equal(found.values, scales.values) and found.to_bytes() == data
    assert len(data) == 14 + 4 * 4 * 2 * 3
    assert (CacheScales.none(4, 3).to_bytes() == data) == (mode == "none")


def malformed() -> dict[str, bytes]:
    good = scales_of(0.5, 0.25).to_bytes()

    def number(value: float) -> bytes:
        return good[:14] + struct.pack("<f", value) + good[18:]

    return {
        "empty": b"",
        "cut in the head": good[:13],
        "cut": good[:-1],
        "longer": good + b"\0",
        "magic": b"X" + good[1:],
        "mode": good[:8] + b"\3" + good[9:],
        "reserved": good[:9] + b"\1" + good[10:],
        "no layers": good[:10] + bytes(2) + good[12:],
        "no heads": good[:12] + bytes(2),
        "many layers": good[:10] + b"\xff\xff" + good[12:],
        "nan": number(float("nan")),
        "inf": number(float("inf")),
        "negative": number(-0.5),
        "zero": number(0.0),
        "subnormal": number(1e-42),
        "huge": number(1e30),
        "none that scales": good[:8] + b"\0" + good[9:],
        "tensor that differs": good[:8] + b"\1" + good[9:],
    }


@pytest.mark.parametrize("case", sorted(malformed()))
def test_malformed_bytes_are_refused_in_one_sentence(case: str) -> None:
    with pytest.raises(DataError) as error:
        CacheScales.from_bytes(malformed()[case])
    assert "\n" not in str(error.value)
