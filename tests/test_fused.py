"""The predictor's compiled loops give the bits of the torch operations they stand for."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from codec import exact
from codec.predictor import fused, fused_attention, linear
from codec.predictor.attention import Seen, attend
from codec.predictor.decoder import DecoderRun
from codec.predictor.linear import Inputs, Linear, quantise_weight

LIMIT = 1e30
ROWS = st.integers(0, 40)
WIDTHS = st.integers(1, 70)


def rows_of(seed: int, *shape: int) -> Tensor:
    """float32 rows of every size: of zeros, denormals, values just below a power of two, up to the limit of the hidden state."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(shape) * np.exp2(rng.integers(-140, 98, (*shape[:-1], 1)).astype(float))
    x = np.where(rng.random(shape) < 0.1, 0.0, x)
    kind = rng.integers(0, 6, shape[:-1])
    x[kind == 0] = -0.0
    x[kind == 1] = np.round(x[kind == 1] / 2.0**-149) * 2.0**-149
    near = np.exp2(rng.integers(-60, 90, shape).astype(float)) * (
        1 - np.exp2(-rng.integers(1, 25, shape).astype(float))
    )
    x[kind == 2] = (near * rng.choice([-1.0, 1.0], shape))[kind == 2]
    return torch.from_numpy(np.clip(x, -LIMIT, LIMIT).astype(np.float32))


def same(a: Tensor, b: Tensor) -> None:
    assert a.dtype == b.dtype and a.shape == b.shape
    kind = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    assert torch.equal(a.contiguous().view(kind), b.contiguous().view(kind))


@pytest.fixture(autouse=True, params=[1, 3])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


def plainly(function, *arguments):
    fused.ENABLED = False
    try:
        return function(*arguments)
    finally:
        fused.ENABLED = True


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), ROWS, WIDTHS)
def test_rows_become_the_same_integers(seed, rows, width):
    x = rows_of(seed, rows, width)
    for form in ("int8", "int15"):
        got, want = linear._quantise(x, form), plainly(linear._quantise, x, form)
        same(got[0], want[0])
        same(got[1], want[1])
    got, (q, scale) = fused.row_integers(x), exact.row_integers(x)
    same(got[0] + 0.0, q.to(torch.float64) + 0.0)  # a zero's sign is lost in what follows: products
    same(got[1], scale)


@settings(max_examples=40, deadline=None)
@given(
    st.integers(0, 2**32),
    ROWS,
    st.integers(2, 70),
    st.integers(1, 33),
    st.booleans(),
    st.sampled_from(linear.FORMS[1:4]),
)
def test_linear_layers(seed, rows, width, out, biased, form):
    x, rng = rows_of(seed, rows, width), torch.Generator().manual_seed(seed % 2**31)
    stored = quantise_weight(torch.randn(out, width, generator=rng), form)
    bias = torch.randn(out, generator=rng) if biased else None
    layer = Linear(form, stored["weight"], stored["scale"], bias)
    same(layer(Inputs(x)), plainly(lambda: layer(Inputs(x))))


@pytest.mark.parametrize("limbs", [(1, 1), (2, 1), (1, 2), (2, 2)])
def test_limbs_of_either_side_are_combined(limbs):
    of_rows, of_weight = limbs
    rng = torch.Generator().manual_seed(3)
    products = [
        torch.randint(-(2**31), 2**31 - 1, (of_rows * 37, 19), generator=rng).to(torch.int32) for _ in range(of_weight)
    ]
    row, column = torch.rand(37, 1, generator=rng), torch.rand(19, generator=rng, dtype=torch.float64)
    total = linear._whole_product(products, 37)
    want = total.mul_(row.to(torch.float64)).mul_(column).to(torch.float32)
    same(fused.dequantise(products, row, column, None), want)


class _Config:
    norm_eps = 1e-5


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), ROWS, WIDTHS, st.booleans())
def test_norms(seed, rows, width, heads):
    x = rows_of(seed, 3, rows, width).transpose(0, 1) if heads else rows_of(seed, rows, width)
    weight = torch.randn(width, generator=torch.Generator().manual_seed(seed % 2**31))
    run = DecoderRun.__new__(DecoderRun)
    run.c = _Config()  # type: ignore[assignment]
    got, want = run._norm(x, weight), plainly(run._norm, x, weight)
    same(got[0], want[0])
    same(got[1], want[1])


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), ROWS, WIDTHS)
def test_gated_units(seed, rows, width):
    gate, up = rows_of(seed, rows, width), rows_of(seed + 1, rows, width)
    if rows:
        gate[0] = torch.linspace(-130, 130, width)
    same(DecoderRun._gated(gate, up), plainly(DecoderRun._gated, gate, up))


@settings(max_examples=40, deadline=None)
@given(
    st.integers(0, 2**32), st.integers(1, 70), st.integers(0, 50), st.sampled_from([0, 1, 7, 64]), st.sampled_from([(3, 1), (6, 2)]),
    st.sampled_from([0, 3]),
)  # fmt: skip
def test_attention(seed, tokens, before, window, heads, wild):
    dim, total = 8, tokens + before
    q = rows_of(seed, heads[0], tokens, dim) if wild else torch.randn(heads[0], tokens, dim)
    k = rows_of(seed + 1, heads[1], total, dim) if wild else torch.randn(heads[1], total, dim)
    keys, scale = exact.row_integers(k)
    values = torch.randint(-exact.ROW_MAX, exact.ROW_MAX, (heads[1], total, dim)).to(torch.int16)
    seen, step = Seen(keys.to(torch.int16), scale, values), torch.full((heads[1], 1, 1), 2.0**-12)
    same(attend(q, seen, step, window), plainly(attend, q, seen, step, window))


def test_scores_at_and_beyond_the_limit():
    """Infinities after scaling, ties, and rows of which one key alone is allowed."""
    scores = torch.tensor(
        [[[1e300, -1e300, 5.0, -0.0], [0.0, -0.0, 0.0, -0.0], [1e30, 1e30, 7.0, 1.0]]], dtype=torch.float64
    )
    allowed = torch.tensor([[True, True, True, True], [True, True, False, True], [False, False, False, True]])
    key, query = (
        torch.full((1, 1, 4), 2.0**40, dtype=torch.float64),
        torch.tensor([[[2.0**10], [1.0], [1.0 / math.pi]]]),
    )
    bias = torch.tensor([[[0.0, 0.0, -1e30, 3.0]]])
    t = (scores * key).to(torch.float32) * query + bias
    t = t.clamp(-LIMIT, LIMIT).masked_fill(~allowed, -2 * LIMIT)
    want = exact.weights_from_scores(t, None)
    got = fused_attention.weights(scores.clone(), key, query, bias, allowed, LIMIT, -2 * LIMIT)
    same(got[0], want[0])
    same(got[1], want[1])


def test_loops_serve_a_cpu_only_and_can_be_turned_off():
    assert fused.serves(torch.device("cpu")) and not fused.serves(torch.device("meta"))
    assert not plainly(fused.serves, torch.device("cpu"))
