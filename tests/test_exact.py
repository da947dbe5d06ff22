"""Exact arithmetic: our own functions against float64, bounds of reductions, and proofs that catch a broken backend."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import codec
from codec import exact, rans
from codec.errors import DataError, InexactBackend, KnownAnswerMismatch
from tests import codec_samples as samples


def relative_error(got: Tensor, want: Tensor) -> float:
    return float(((got.double() - want) / want).abs().max())


# ---------------------------------------------------------------- functions
def test_exp_negative_is_accurate() -> None:
    x = -torch.logspace(-8, math.log10(87), 20001, dtype=torch.float64).float()
    assert relative_error(exact.exp_negative(x), x.double().exp()) < 6e-6  # the argument's own rounding grows with |x|
    near = -torch.linspace(0, 2, 20001)
    assert relative_error(exact.exp_negative(near), near.double().exp()) < 3e-7
    assert exact.exp_negative(torch.zeros(1)).item() == 1.0
    far = exact.exp_negative(torch.tensor([-88.0, -1e4, -3e38, -math.inf]))
    assert (far >= 2.0**-126).all() and (far < 1e-37).all(), "neither zero nor a denormal"


def test_exp2_fraction_is_accurate_and_bounded() -> None:
    t = -torch.linspace(0, 126, 200001)
    p, n = exact.exp2_fraction(t)
    assert (p >= 1).all() and (p <= 2).all() and n.dtype == torch.int32
    assert relative_error(p.double() * 2.0 ** n.double(), 2.0 ** t.double()) < 3e-7


def test_silu_is_accurate() -> None:
    x = torch.cat([torch.linspace(-30, 30, 60001), torch.tensor([1e-30, -1e-30, 1e30])])
    want = x.double() * torch.sigmoid(x.double())
    assert float((exact.silu(x).double() - want).abs().div(want.abs().clamp_min(1e-6)).max()) < 4e-6
    assert exact.silu(torch.tensor([0.0, -0.0])).tolist() == [0.0, 0.0]
    assert torch.isfinite(exact.silu(torch.tensor([3e38, -3e38]))).all()


@settings(max_examples=20, deadline=None, derandomize=True)
@given(st.floats(0, 1.6e6), st.integers(0, 1000))
def test_cos_sin_is_accurate(start: float, seed: int) -> None:
    angle = torch.cat([
        torch.tensor([start], dtype=torch.float64),
        (torch.rand(2000, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)) * 100 + start).clamp_max(1.6e6),
        torch.arange(8, dtype=torch.float64) * (math.pi / 4),
    ]).float().double()  # fmt: skip
    cos, sin = exact.cos_sin(angle)
    want = torch.tensor([[math.cos(a), math.sin(a)] for a in angle.tolist()], dtype=torch.float64)
    assert float((cos - want[:, 0]).abs().max()) < 1e-10 and float((sin - want[:, 1]).abs().max()) < 1e-10


def test_cos_sin_of_small_angles_keeps_the_documented_precision() -> None:
    angle = torch.linspace(0, 4096, 100001, dtype=torch.float64)
    cos, sin = exact.cos_sin(angle)
    assert float((cos - torch.cos(angle)).abs().max()) < 1e-12 and float((sin - torch.sin(angle)).abs().max()) < 1e-12


def test_pow2_is_exact_over_its_range() -> None:
    e = torch.arange(-126, 128, dtype=torch.int32)
    assert exact.pow2(e).tolist() == [2.0**i for i in e.tolist()]


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.integers(0, 2**31), st.integers(1, 70), st.floats(-55, 95))
def test_row_integers_keep_15_bits(seed: int, width: int, exponent: float) -> None:
    x = torch.randn(5, width, generator=torch.Generator().manual_seed(seed)) * 2.0**exponent
    q, scale = exact.row_integers(x)
    assert q.abs().max() <= exact.ROW_MAX and torch.equal(q, q.round())
    assert (torch.frexp(scale)[0] == 0.5).all(), "a power of two"
    assert ((q.double() * scale.double() - x.double()).abs() <= scale.double() * 0.5001).all()
    top = x.abs().amax(-1, keepdim=True)
    assert (q.abs().amax(-1, keepdim=True) >= torch.where(top > 2.0**-59, 2**14 - 65, 0)).all(), "no bit is given away"


def test_row_integers_of_extreme_rows() -> None:
    for value in (0.0, 1e-45, 1e-38, 1e30, -1e30):
        q, scale = exact.row_integers(torch.full((1, 4), value))
        assert torch.isfinite(q).all() and torch.isfinite(scale).all() and q.abs().max() <= exact.ROW_MAX


def test_rows_do_not_see_each_other() -> None:
    x = torch.randn(40, 33, generator=torch.Generator().manual_seed(2)) * torch.logspace(-12, 12, 40)[:, None]
    for function in (exact.row_integers, exact.quantise_e4m3, exact.quantise_int8):
        whole = function(x)
        for i in range(len(x)):
            assert all(torch.equal(a[i], b[0]) for a, b in zip(whole, function(x[i : i + 1]), strict=True))


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.integers(0, 2**31), st.floats(-90, 90))
def test_quantise_e4m3_stays_on_the_grid(seed: int, exponent: float) -> None:
    x = torch.randn(6, 40, generator=torch.Generator().manual_seed(seed)) * 2.0**exponent
    q, scale = exact.quantise_e4m3(x)
    units = q * 2.0**9
    assert torch.equal(units, units.round()) and float(units.abs().max()) < 2.0**exact.E4M3_UNITS
    assert float(q.abs().amax(-1).min()) == exact.E4M3_MAX, "a row's largest value fills the range"
    error = (q * scale.double() - x.double()).abs()
    assert (error <= x.double().abs() * 2.0**-4 + scale.double() * 2.0**-10 * 1.001).all()


def test_weights_from_scores_are_integers_of_a_softmax() -> None:
    t = torch.randn(7, 50, generator=torch.Generator().manual_seed(0)) * 6
    allowed = torch.ones(7, 50, dtype=torch.bool).tril(20)
    w, total = exact.weights_from_scores(t, allowed)
    assert torch.equal(w, w.round()) and torch.equal(total, w.sum(-1, keepdim=True))
    assert (w.amax(-1) == 2.0**exact.PROBABILITY_BITS).all() and (w[~allowed] == 0).all()
    want = torch.softmax(torch.where(allowed, t.double() * math.log(2), -torch.inf), -1)
    assert float((w / total - want).abs().max()) < 2e-6
    huge, _ = exact.weights_from_scores(torch.tensor([[3e38, -3e38, 3e38]]), None)
    assert huge.tolist() == [[2.0**21, 0.0, 2.0**21]]


# ---------------------------------------------------------------- bounds and proofs
def test_bounds_are_enforced() -> None:
    exact.bound("fits", 26, 26, 1)
    with pytest.raises(InexactBackend, match=r"'too long'.*54"):
        exact.bound("too long", 26, 26, 2)


def test_products_at_the_bound_are_exact() -> None:
    rng = np.random.default_rng(0)
    for bits, terms in ((18, 1 << 17), (15, 1 << 15), (22, 512)):
        a = rng.integers(-(2**bits) + 1, 2**bits, (2, terms))
        a[0] = 2**bits - 1  # the worst case: all of one sign
        got = exact.product(torch.from_numpy(a).double(), torch.from_numpy(a.T.copy()).double())
        assert [[int(v) for v in row] for row in got.tolist()] == [
            [sum(int(x) * int(y) for x, y in zip(r, s, strict=True)) for s in a] for r in a
        ]


def test_this_backend_is_exact() -> None:
    exact.prove_backend()
    codec.check_known_answer(samples.tiny(), samples.tiny_profile())
    codec.check_known_answer(samples.tiny(), samples.tiny_profile("fp16"))


def single_precision(a: Tensor, b: Tensor) -> Tensor:
    return torch.matmul(a.float(), b.float()).double()


def off_by_one(a: Tensor, b: Tensor) -> Tensor:
    return torch.matmul(a, b) + 1


def saturating(a: Tensor, b: Tensor) -> Tensor:
    return torch.matmul(a, b).clamp(-(2.0**40), 2.0**40)


@pytest.mark.parametrize("broken", [single_precision, off_by_one, saturating])
def test_a_broken_product_is_caught_before_anything_is_coded(monkeypatch: pytest.MonkeyPatch, broken: object) -> None:
    predictor, profile = samples.tiny(), samples.tiny_profile()
    monkeypatch.setattr(exact, "product", broken)
    with pytest.raises(InexactBackend, match="differs from integer arithmetic"):
        exact.prove_backend()
    with pytest.raises(InexactBackend):
        codec.check_known_answer(predictor, profile)


@pytest.mark.parametrize(
    ("name", "replacement"),
    [
        ("exp_negative", torch.exp),
        ("silu", torch.nn.functional.silu),
        ("cos_sin", lambda a: (torch.cos(a) + 1e-9, torch.sin(a))),
        ("exp2_fraction", lambda t: (torch.exp2(t - t.floor()), t.floor().to(torch.int32))),
        ("row_integers", lambda x: (x.half().float(), torch.ones_like(x[..., :1]))),
    ],
)
def test_another_arithmetic_is_caught_by_the_known_answer(
    monkeypatch: pytest.MonkeyPatch, name: str, replacement: object
) -> None:
    predictor, profile = samples.tiny(), samples.tiny_profile()
    monkeypatch.setattr(exact, name, replacement)
    exact.prove_backend()  # products and casts are right
    with pytest.raises(KnownAnswerMismatch, match=profile.id.hex()[:16]) as caught:
        codec.check_known_answer(predictor, profile)
    assert isinstance(caught.value, DataError)


def test_another_coder_is_caught_by_the_known_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    predictor, profile, real = samples.tiny(), samples.tiny_profile(), rans.Encoder.finish
    monkeypatch.setattr(rans.Encoder, "finish", lambda self: (real(self)[0][:-4] + b"\1\0\0\0", real(self)[1]))
    with pytest.raises(KnownAnswerMismatch):
        codec.check_known_answer(predictor, profile)


def test_a_changed_profile_is_caught_by_the_known_answer() -> None:
    profile = samples.tiny_profile()
    for changed in (
        {"reciprocal": profile.tensors["reciprocal"] + np.int32(700)},
        {"grid": profile.tensors["grid"] + np.int16(1)},
    ):
        with pytest.raises(KnownAnswerMismatch):
            codec.check_known_answer(samples.tiny(), replace(profile, tensors=profile.tensors | changed))
