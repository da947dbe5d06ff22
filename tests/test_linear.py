"""Linear layers in exact arithmetic: int8 products by either backend, a kernel that saturates, and how near each form comes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import codec
from codec import exact
from codec.predictor import packed
from codec.predictor.linear import FORMS, STORED_DTYPES, Inputs, Linear, quantise_weight
from tests import codec_samples as samples
from tests.test_predictor import agreement, cache_of, model, predictor_of

CPU = torch.device("cpu")
FASTER = exact._int8_kernel_is_faster


@pytest.fixture(autouse=True)
def unproven() -> Iterator[None]:
    """What a test does to the kernel is not to be remembered, and it is used even where it is slow."""
    exact._int8_kernel_is_exact.cache_clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exact, "_int8_kernel_is_faster", lambda device: True)
        yield
    exact._int8_kernel_is_exact.cache_clear()


def whole(a: Tensor, b: Tensor) -> Tensor:
    """The product in int64, which is a plain loop."""
    return torch.matmul(a.to(torch.int64), b.to(torch.int64))


def extremes(rows: int, width: int, kind: int, generator: torch.Generator) -> Tensor:
    """int8 [rows, width]: all alike, alternating, of both extremes at random, or anything."""
    if kind == 0:
        out = torch.full((rows, width), 127)
    elif kind == 1:
        out = torch.where(torch.arange(width) % 2 == 0, 127, -127).expand(rows, width)
    elif kind == 2:
        out = torch.randint(0, 2, (rows, width), generator=generator) * 255 - 128  # -128 only in a forged file
    else:
        out = torch.randint(-127, 128, (rows, width), generator=generator)
    return out.to(torch.int8)


def refuse(device: torch.device) -> bool:
    return False


def saturating(a: Tensor, b: Tensor, **more: Any) -> Tensor:
    """As kernels over vpmaddubsw do: the left operand made unsigned by adding 128, pairs of products added in 16 bits."""
    unsigned = a.to(torch.int64) + 128
    total = -128 * b.to(torch.int64).sum(0)
    for i in range(0, a.shape[1], 2):
        total = total + whole(unsigned[:, i : i + 2], b[i : i + 2]).clamp(-(2**15), 2**15 - 1)
    return total.to(torch.int32)


def absent(a: Tensor, b: Tensor, **more: Any) -> Tensor:
    raise RuntimeError("no such kernel on this processor")


# ---------------------------------------------------------------- products
@pytest.mark.parametrize("fallback", [False, True], ids=["chosen kernel", "float32"])
@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    st.integers(1, 40), st.integers(1, 2500), st.integers(1, 40), st.integers(0, 3), st.integers(0, 3), st.integers(0, 2**31),
)  # fmt: skip
def test_int8_products_equal_integers(
    fallback: bool, rows: int, width: int, out: int, left: int, right: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    a, w = extremes(rows, width, left, generator), extremes(out, width, right, generator)
    with pytest.MonkeyPatch.context() as patch:
        if fallback:
            patch.setattr(exact, "_int8_kernel_is_exact", refuse)
        for b in (w.T, w.T.contiguous()):  # as a layer gives it, and as the proof does
            got = exact.product_int8(a, b)
            assert got.dtype == torch.int32 and torch.equal(got.to(torch.int64), whole(a, b))


@pytest.mark.parametrize("fallback", [False, True], ids=["chosen kernel", "float32"])
def test_the_longest_sums_fit(monkeypatch: pytest.MonkeyPatch, fallback: bool) -> None:
    if fallback:
        monkeypatch.setattr(exact, "_int8_kernel_is_exact", refuse)
    for width in (1023, 1024, 1025, (1 << 17) - 1):
        for value in (127, -127):
            a, b = torch.full((2, width), 127, dtype=torch.int8), torch.full((width, 3), value, dtype=torch.int8)
            assert (exact.product_int8(a, b) == 127 * value * width).all()


@pytest.mark.parametrize("kernel", [saturating, absent])
def test_a_bad_int8_kernel_is_found_out_and_not_used(monkeypatch: pytest.MonkeyPatch, kernel: Any) -> None:
    predictor, ids = samples.build(samples.TINY, kind="int8"), samples.tokens(30)
    wanted = samples.guesses(predictor, predictor.new_state(), ids)
    exact._int8_kernel_is_exact.cache_clear()
    monkeypatch.setattr(torch, "_int_mm", kernel)
    assert not exact._int8_kernel_is_exact(CPU)
    a = torch.full((3, 200), 127, dtype=torch.int8)
    assert (exact.product_int8(a, a.T) == 127 * 127 * 200).all()
    got = samples.guesses(predictor, predictor.new_state(), ids)
    assert all(torch.equal(x, y) for p, q in zip(got, wanted, strict=True) for x, y in zip(p, q, strict=True))


def test_a_bad_kernel_that_slipped_through_would_fail_the_known_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    predictor = samples.build(samples.TINY, kind="int8")
    profile = samples.make_profile(predictor)
    codec.check_known_answer(predictor, profile)
    monkeypatch.setattr(exact, "product_int8", lambda a, b: whole(a, b).clamp(-(2**14), 2**14).to(torch.int32))
    with pytest.raises(codec.errors.KnownAnswerMismatch):
        codec.check_known_answer(predictor, profile)


@pytest.mark.parametrize("slow", ["int8", "float32"])
def test_the_faster_way_is_taken(monkeypatch: pytest.MonkeyPatch, slow: str) -> None:
    kernel, blocks = torch._int_mm, exact._float32_product

    def late(a: Tensor, b: Tensor, **more: Any) -> Tensor:
        time.sleep(0.02)
        return kernel(a, b, **more) if slow == "int8" else blocks(a, b)

    monkeypatch.setattr(torch if slow == "int8" else exact, "_int_mm" if slow == "int8" else "_float32_product", late)
    assert FASTER.__wrapped__(CPU) is (slow == "float32")


# ---------------------------------------------------------------- limbs
def test_limbs_hold_every_16_bit_integer() -> None:
    q = torch.arange(-exact.ROW_MAX, exact.ROW_MAX + 1, dtype=torch.float32)
    low, high = exact.limbs(q)
    assert low.dtype == high.dtype == torch.int8
    assert torch.equal(low.to(torch.int64) + 256 * high.to(torch.int64), q.to(torch.int64))


@pytest.mark.parametrize("fallback", [False, True], ids=["chosen kernel", "float32"])
@pytest.mark.parametrize("form", ["int8", "int8-a16", "int16"])
@settings(max_examples=15, deadline=None, derandomize=True)
@given(st.integers(1, 12), st.integers(2, 1500), st.integers(0, 2**31))
def test_layers_equal_integers(form: str, fallback: bool, rows: int, width: int, seed: int) -> None:
    """Products in limbs against int64, at the extremes: exact until the scales come in."""
    generator = torch.Generator().manual_seed(seed)
    top = exact.ROW_MAX if form == "int16" else 127
    weight = torch.randint(0, 2, (5, width), generator=generator) * 2 * top - top
    odd = torch.rand(5, width, generator=generator) < 0.5
    weight = torch.where(odd, torch.randint(-top, top + 1, (5, width), generator=generator), weight)
    x = torch.randn(rows, width, generator=generator).sign() * torch.randint(1, 3, (rows, width), generator=generator)
    q, scale = exact.quantise_int8(x) if form == "int8" else exact.row_integers(x)
    ones = torch.ones(5)
    want = whole(q, weight.T).to(torch.float64) * scale.to(torch.float64)
    with pytest.MonkeyPatch.context() as patch:
        if fallback:
            patch.setattr(exact, "_int8_kernel_is_exact", refuse)
        got = Linear(form, weight.to(STORED_DTYPES[form]), ones, None)(Inputs(x))
    assert torch.equal(got, want.to(torch.float32))


@settings(max_examples=20, deadline=None, derandomize=True)
@given(st.integers(1, 8), st.integers(1, 700), st.integers(0, 2**31))
def test_whole_integers_in_float64_equal_limbs(rows: int, width: int, seed: int) -> None:
    """The fast way of 16-bit weights where there is no int8 kernel."""
    generator = torch.Generator().manual_seed(seed)
    top = exact.ROW_MAX
    weight = torch.randint(-top, top + 1, (5, width), generator=generator)
    weight[:, ::3] = weight[:, ::3].sign() * top
    x = torch.randn(rows, width, generator=generator)
    layer = Linear(
        "int16", weight.to(torch.int16), torch.rand(5, generator=generator), torch.randn(5, generator=generator)
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exact, "int8_kernel_serves", lambda device: False)
        fast = layer(Inputs(x))
        patch.setattr(layer, "_whole", None)
        plain = layer(Inputs(x))
        patch.setattr(exact, "int8_kernel_serves", lambda device: True)
        assert torch.equal(layer(Inputs(x)), plain)
    assert torch.equal(fast, plain)


# ---------------------------------------------------------------- quantisers and layers
@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.integers(0, 2**31), st.floats(-90, 90))
def test_quantise_int8_fills_its_range(seed: int, exponent: float) -> None:
    x = torch.randn(6, 40, generator=torch.Generator().manual_seed(seed)) * 2.0**exponent
    q, scale = exact.quantise_int8(x)
    assert q.dtype == torch.int8 and (q.abs().amax(-1) == 127).all()
    assert ((q.double() * scale.double() - x.double()).abs() <= scale.double() * 0.5001).all()


def test_quantise_int8_of_extreme_rows() -> None:
    for value in (0.0, 1e-45, 1e-38, 1e30, -1e30):
        q, scale = exact.quantise_int8(torch.full((1, 4), value))
        assert torch.isfinite(scale).all() and (scale > 0).all() and (q.int().abs() <= 127).all()


@pytest.mark.parametrize("form", FORMS)
def test_weights_are_quantised_a_channel_at_a_time(form: str) -> None:
    weight = torch.randn(8, 40, generator=torch.Generator().manual_seed(0)) * torch.logspace(-8, 4, 8)[:, None]
    weight[5] = 0
    q, scale = unpacked(weight, form)
    assert (
        quantise_weight(weight, form)["weight"].dtype == STORED_DTYPES[form]
        and torch.isfinite(scale).all()
        and (scale > 0).all()
    )
    error = (q.double() * scale.double()[:, None] - weight.double()).abs().amax(1)
    step = {"fp8": 1 / 27, "int16": 0.51 / 32639, "int4": 0.2, "mxfp4": 0.3}.get(form, 0.51 / 127)
    assert (error <= weight.double().abs().amax(1) * step).all()


def unpacked(weight: Tensor, form: str) -> tuple[Tensor, Tensor]:
    """(integers as a Linear takes them, scales)"""
    parts = quantise_weight(weight, form)
    if "shift" in parts:
        parts["weight"] = packed.unpack("w", form, parts["weight"], parts["shift"], weight.shape[1])
    return parts["weight"], parts["scale"]


def layer_error(form: str, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> float:
    """RMS error of a layer relative to its output's RMS."""
    q, scale = unpacked(weight, form)
    got = Linear(form, q, scale, bias)(Inputs(x)).double()
    want = x.double() @ weight.double().T
    want = want if bias is None else want + bias.double()
    return float((got - want).pow(2).mean().sqrt() / want.pow(2).mean().sqrt())


@pytest.mark.parametrize("biased", [False, True])
def test_int16_is_as_good_as_full_precision(biased: bool) -> None:
    """Against float64, over layers of many widths and sizes."""
    errors: dict[str, list[float]] = {form: [] for form in FORMS}
    for seed in range(60):
        generator = torch.Generator().manual_seed(seed)
        rows, width, size = 1 + seed % 7, 8 + 5 * seed, 2.0 ** (seed - 30)
        x = torch.randn(rows, width, generator=generator) * size
        weight = torch.randn(30, width, generator=generator) / width**0.5
        bias = torch.randn(30, generator=generator) * size if biased else None
        for form in FORMS:
            errors[form].append(layer_error(form, x, weight, bias))
    middle = {form: sorted(e)[30] for form, e in errors.items()}
    assert middle["int16"] < 5e-5 and middle["int16"] < middle["int8"] / 100
    assert middle["int8-a16"] < middle["int8"] and max(errors["int8"]) < 0.03 and max(errors["fp8"]) < 0.08
    assert max(errors["int16"]) < 1e-4


def test_int16_weights_beyond_their_limbs_are_refused() -> None:
    import safetensors.torch

    data = samples.build(samples.TINY, kind="int8", exact_kv=True)
    tensors = dict(safetensors.torch.load(data.to_bytes()))
    tensors["layers.0.k.weight"][0, 0] = exact.ROW_MAX + 1
    with pytest.raises(codec.errors.PredictorError, match="out of range"):
        codec.Predictor.from_bytes(safetensors.torch.save(tensors, {"predictor": data.config.to_json()}))


def test_rows_are_quantised_once_and_do_not_see_each_other() -> None:
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(9, 33, generator=generator) * torch.logspace(-12, 12, 9)[:, None]
    weight = torch.randn(5, 33, generator=generator)
    for form in FORMS:
        q, scale = unpacked(weight, form)
        layer = Linear(form, q, scale, None)
        inputs = Inputs(x)
        together = layer(inputs)
        read = {"int8-a16": "int15", "int16": "int15"}.get(form, form)
        assert inputs.quantised(read)[0] is inputs.quantised(read)[0]
        for i in range(len(x)):
            assert torch.equal(layer(Inputs(x[i : i + 1]))[0], together[i])


# ---------------------------------------------------------------- predictors
@pytest.mark.parametrize(
    "overrides", [{}, {"attention_bias": True, "mlp_bias": True}, {"num_key_value_heads": 1}], ids=str
)
def test_better_forms_come_nearer_to_the_cache(overrides: dict[str, Any]) -> None:
    """Against transformers' Llama: int8 nearer than fp8, exact K and V projections nearer than their own kind."""
    made, ids = model(**overrides), samples.tokens(60)
    true, errors = cache_of(made, ids), {}
    for kind in ("fp8", "int8", "int8-a16"):
        for exact_kv in (False, True):
            predictor = predictor_of(made, kind=kind, exact_kv=exact_kv)
            guesses = samples.guesses(predictor, predictor.new_state(), ids)
            errors[kind, exact_kv] = [
                [agreement(g, t)[1] for g, t in zip(p, q, strict=True)] for p, q in zip(guesses, true, strict=True)
            ]
    flat = {name: torch.tensor(e) for name, e in errors.items()}
    assert (flat["int8", False] < 0.6 * flat["fp8", False]).all() and (flat["int8", True] <= flat["fp8", True]).all()
    assert (flat["int8-a16", False] < 0.8 * flat["int8", False]).all()
    assert (flat["fp8", True] < flat["fp8", False]).all() and (flat["int8", True] < flat["int8", False]).all()
    assert (flat["fp8", True][0] < 1e-3).all(), "the first layer's input is exact: nothing is left but 15 bits"


def test_form_of_each_projection() -> None:
    predictor = samples.build(samples.TINY, kind="int8", exact_kv=True)
    layer = predictor.layers[1]
    assert [getattr(layer, n).form for n in ("q", "k", "v", "o", "gate", "up", "down")] == [
        "int8", "int16", "int16", "int8", "int8", "int8", "int8",
    ]  # fmt: skip
    back = codec.Predictor.from_bytes(predictor.to_bytes())
    assert back.config == predictor.config and back.fingerprint == predictor.fingerprint
    prints = {
        samples.build(samples.TINY, 0, k, exact_kv=e).fingerprint
        for k in ("fp8", "int8", "int8-a16")
        for e in (False, True)
    }
    assert len(prints) == 6


@pytest.mark.parametrize("kernel", [True, False])
def test_products_of_bytes(monkeypatch, kernel):
    monkeypatch.setattr(exact, "int8_kernel_serves", lambda device: kernel)
    rng = torch.Generator().manual_seed(5)
    a = torch.randint(-128, 128, (7, 300), generator=rng).to(torch.int8)
    b = torch.randint(-127, 128, (300, 5), generator=rng).to(torch.int8)
    b[0], b[1] = 127, -127
    want = [
        [sum(int(x) * int(y) for x, y in zip(row, column, strict=True)) for column in b.T.tolist()]
        for row in a.tolist()
    ]
    assert exact.product_int8(a, b).tolist() == want
