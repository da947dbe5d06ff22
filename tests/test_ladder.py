"""The rungs that calibration makes: smoothing, limbs by sensitivity, and 4-bit weights."""

from __future__ import annotations

from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import codec
from codec import errors, exact
from codec.predictor import limbs, packed
from codec.predictor.config import LIMBED
from codec.predictor.linear import Inputs, Linear, quantise_weight
from codec.predictor.ranges import READERS, LayerWeights, exponents, measure_ranges, smooth_layer
from tests import codec_samples as samples

INT8 = ("int8", "int8-mixed", "int8-a16", "int4", "mxfp4")


def prompts(count: int = 3, length: int = 40) -> list[Tensor]:
    return [samples.tokens(length, seed=50 + i) for i in range(count)]


def pilot(config: dict[str, Any] = samples.TINY) -> codec.Predictor:
    return codec.build_pilot(config, samples.weights(config), bf16=True, exact_kv=True)


def ranges_of(config: dict[str, Any] = samples.TINY) -> codec.Ranges:
    predictor = pilot(config)
    out = codec.Ranges.zero(predictor.config)
    for ids in prompts():
        out = out.merge(measure_ranges(predictor, ids))
    return out


def fitted(kind: str, config: dict[str, Any] = samples.TINY, **more: Any) -> codec.Predictor:
    given = {"bf16": True, "exact_kv": True, "ranges": ranges_of(config), "prompts": prompts(2)} | more
    return codec.fit_predictor(config, samples.weights(config), kind, **given)


def with_tensors(predictor: codec.Predictor, drop: str = "", **changed: Tensor) -> bytes:
    tensors = dict(safetensors.torch.load(predictor.to_bytes()))
    tensors |= {name.replace("__", "."): tensor for name, tensor in changed.items()}
    tensors.pop(drop, None)
    data: bytes = safetensors.torch.save(tensors, {"predictor": predictor.config.to_json()})
    return data


# ---------------------------------------------------------------- ranges and smoothing
def test_ranges_are_the_largest_inputs_whatever_the_order() -> None:
    predictor = pilot()
    parts = [measure_ranges(predictor, ids) for ids in prompts()]
    merged = parts[0].merge(parts[1]).merge(parts[2])
    other = parts[2].merge(parts[0].merge(parts[1])).merge(parts[2])
    for name, largest in merged.largest.items():
        assert torch.equal(largest, other.largest[name])
        assert torch.equal(largest, torch.stack([p.largest[name] for p in parts]).amax(0))
        assert (largest[0] > 0).all() and largest.shape[0] == predictor.config.layers
        assert bool((largest[-1] > 0).any()) == (name == "norm1"), "nothing else is read in the last layer"
    h = predictor.embed[torch.cat(prompts())].double()
    weight = predictor.layers[0].norm1.double()
    want = (h / (h.square().mean(1, keepdim=True) + predictor.config.norm_eps).sqrt() * weight).abs().amax(0)
    torch.testing.assert_close(merged.largest["norm1"][0].double(), want, rtol=1e-3, atol=1e-5)


def test_watching_changes_nothing() -> None:
    predictor, ids = pilot(), samples.tokens(30)
    before = samples.guesses(predictor, predictor.new_state(), ids)
    measure_ranges(predictor, ids)
    assert all(torch.equal(a, b) for p, q in zip(before, samples.guesses(predictor, predictor.new_state(), ids), strict=True)
               for a, b in zip(p, q, strict=True))  # fmt: skip


def layer_weights(seed: int) -> LayerWeights:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator) * torch.logspace(-2, 2, shape[-1])

    shapes = {"q": (12, 8), "k": (6, 8), "v": (6, 8), "o": (8, 12), "gate": (20, 8), "up": (20, 8), "down": (8, 20)}
    weight = {name: normal(*shape) for name, shape in shapes.items()}
    return LayerWeights(weight, {n: normal(len(w)) for n, w in weight.items()}, normal(8), normal(8))


def floats(w: LayerWeights, x: Tensor, attended: Tensor) -> dict[str, Tensor]:
    """What a layer's projections give, float64, without attention and norms in between."""
    rows = {"norm1": x * w.norm1.double(), "norm2": x * w.norm2.double()}
    rows["attention"] = attended if w.smooth is None else attended * exact.pow2(-w.smooth).double()

    def linear(name: str, of: Tensor) -> Tensor:
        return of @ w.weight[name].double().T + w.bias[name].double()

    out = {name: linear(name, rows[source]) for source in rows for name in READERS[source]}
    out["down"] = linear("down", out["gate"].clamp(-1, 1) * out["up"])  # any function of gate alone
    return out


@pytest.mark.parametrize("exact_kv", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_smoothing_changes_no_function(seed: int, exact_kv: bool) -> None:
    """Powers of two come in and go out: not one bit of the unquantised function changes."""
    generator = torch.Generator().manual_seed(seed + 90)
    before = layer_weights(seed)
    largest = {"norm1": 8, "attention": 12, "norm2": 8, "mlp": 20}
    ranges = codec.Ranges({n: 2 ** (8 * torch.rand(2, width, generator=generator) - 4) for n, width in largest.items()})
    after = smooth_layer(before, ranges, 1, exact_kv)
    x, attended = (torch.randn(5, n, generator=generator, dtype=torch.float64) for n in (8, 12))
    a, b = floats(before, x, attended), floats(after, x, attended)
    for name in ("q", "k", "v", "o", "gate", "down"):
        assert torch.equal(a[name], b[name]), name
    assert after.smooth is not None and not torch.equal(before.norm1, after.norm1)


def test_exponents_balance_channels() -> None:
    largest = torch.tensor([64.0, 1.0, 0.0, 1.0, 4.0])
    weights = [torch.tensor([[1.0, 1.0, 1.0, 0.0, 0.25], [0.5, 1.0, 2.0, 0.0, 0.125]])]
    e = exponents(largest, weights)
    assert e.dtype == torch.int32 and e[2] == e[3] == 0, "channels that are always 0 are left alone"
    assert e[0] - e[1] == 3 and e[4] - e[1] == 2, "sqrt(64 / 1) = 8, sqrt(4 / (1/4)) = 4"
    assert torch.equal(exponents(torch.zeros(5), weights), torch.zeros(5, dtype=torch.int32))


def spiky(config: dict[str, Any]) -> dict[str, Tensor]:
    """Weights of a model whose channels differ in size, as real ones do."""
    tensors = samples.weights(config)
    for name, tensor in tensors.items():
        if "layernorm" in name:
            tensor[::9] *= 24
        if "up_proj" in name:
            tensor[::11] *= 16
        if "v_proj" in name:
            tensor[::7] *= 8
    return tensors


def cache_error(predictor: codec.Predictor, fine: codec.Predictor, ids: Tensor) -> float:
    a, b = (samples.guesses(p, p.new_state(), ids)[-1] for p in (predictor, fine))
    return float(sum((x - y).square().mean() for x, y in zip(a, b, strict=True)))


def test_smoothing_and_limbs_come_nearer() -> None:
    config, tensors = samples.SMALL, spiky(samples.SMALL)
    common: dict[str, Any] = {"bf16": True, "exact_kv": True}
    rough = codec.build_pilot(config, tensors, **common)
    ids = samples.tokens(60, vocab=257, seed=1)
    train = [samples.tokens(60, vocab=257, seed=s) for s in (5, 6)]
    ranges = measure_ranges(rough, train[0]).merge(measure_ranges(rough, train[1]))
    fine = codec.build_predictor(config, {n: t for n, t in tensors.items()}, "int8-a16", exact_kv=True)
    error = {
        (kind, smooth): cache_error(
            codec.fit_predictor(config, tensors, kind, **common, ranges=ranges if smooth else None, prompts=train),
            fine,
            ids,
        )
        for kind in INT8
        for smooth in (False, True)
    }
    assert error["int8", True] < 0.7 * error["int8", False]
    assert error["int8-a16", True] == error["int8-a16", False] and error["int4", True] == error["int4", False]
    assert error["int8-mixed", True] < 0.8 * error["int8", True]
    assert error["int4", True] > error["int8", True] and error["mxfp4", True] > error["int8", True]


# ---------------------------------------------------------------- limbs
@pytest.mark.parametrize("exact_kv", [False, True])
@pytest.mark.parametrize("times", [1.05, 1.2, 1.4, 2.0])
def test_mixed_respects_its_budget(times: float, exact_kv: bool) -> None:
    config = samples.build(samples.SMALL, 0, "int8", exact_kv=exact_kv).config
    gains = torch.rand(config.layers, len(LIMBED), dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    chosen = limbs.choose_limbs(config, gains, times)
    each = limbs.products(config)
    kv = 2 * config.kv_heads * config.head_dim * config.hidden
    plain = config.layers * kv * (4 if exact_kv else 1) + (config.layers - 1) * sum(each.values())
    spent = config.layers * kv * (4 if exact_kv else 2)
    spent += sum(
        each[name] * int(chosen[layer, i]) for layer in range(config.layers - 1) for i, name in enumerate(LIMBED)
    )
    if not exact_kv and times == 1.05:  # two limbs for K and V alone cost more
        assert (chosen == 1).all()
        return
    assert spent <= times * plain
    assert (chosen[-1] == 1).all(), "the last layer's projections are never computed"
    if spent + max(each.values()) <= times * plain:
        assert (chosen[:-1] == 2).all(), "money is left over only where nothing is left to buy"


def test_the_best_gain_a_product_comes_first() -> None:
    config = samples.build(samples.SMALL, 0, "int8", exact_kv=True).config
    gains = torch.zeros(config.layers, len(LIMBED), dtype=torch.float64)
    gains[1, 4], gains[0, 1], gains[0, 2] = 3.0, 2.9, 0.0
    chosen = limbs.choose_limbs(config, gains)
    assert chosen[0, 1] == 2 and chosen[0, 2] == 1 and int((chosen == 2).sum()) <= 2


def test_sensitivities_see_what_a_limb_is_worth() -> None:
    predictor = codec.build_predictor(samples.SMALL, spiky(samples.SMALL), "int8-a16", exact_kv=True)
    train = [samples.tokens(30, vocab=257, seed=s) for s in (5, 6)]
    gains = limbs.sensitivities(predictor, train)
    assert gains.shape == (3, 5) and (gains[:-1] > 0).all() and (gains[-1] == 0).all()
    ranges = measure_ranges(predictor, train[0])
    smooth = codec.build_predictor(samples.SMALL, spiky(samples.SMALL), "int8", exact_kv=True, ranges=ranges)
    less = limbs.sensitivities(smooth, train)[:-1, LIMBED.index("down")]
    assert (less < 0.7 * gains[:-1, LIMBED.index("down")]).all(), "smoothed activations need a second limb less"


def test_limbs_are_part_of_the_predictor() -> None:
    predictor = fitted("int8-mixed", samples.SMALL)
    chosen = dict(safetensors.torch.load(predictor.to_bytes()))["limbs"]
    assert (chosen == 2).any()
    for layer, row in zip(predictor.layers, chosen.tolist(), strict=True):
        assert [getattr(layer, n).form for n in LIMBED] == ["int8-a16" if n == 2 else "int8" for n in row]
        assert layer.k.form == layer.v.form == "int16"
    assert (
        codec.build_predictor(samples.SMALL, samples.weights(samples.SMALL), "int8-mixed").layers[0].k.form
        == "int8-a16"
    )
    less = with_tensors(predictor, limbs=torch.ones_like(chosen))
    assert codec.Predictor.from_bytes(less).fingerprint != predictor.fingerprint
    bad = [with_tensors(predictor, "limbs"), with_tensors(predictor, limbs=chosen + 1), with_tensors(predictor, limbs=chosen - 1),
           with_tensors(predictor, limbs=chosen.float()), with_tensors(predictor, limbs=chosen[:, :4].contiguous())]  # fmt: skip
    samples.refused_all(codec.Predictor.from_bytes, bad, errors.PredictorError)


@pytest.mark.parametrize("kind", INT8)
def test_fitting_is_deterministic_and_bytes_come_back(kind: str) -> None:
    a, b = fitted(kind), fitted(kind)
    assert a.to_bytes() == b.to_bytes()
    back = codec.Predictor.from_bytes(a.to_bytes())
    ids = samples.tokens(20)
    for p, q in zip(samples.guesses(a, a.new_state(), ids), samples.guesses(back, back.new_state(), ids), strict=True):
        assert all(torch.equal(x, y) for x, y in zip(p, q, strict=True))
    plain = fitted(kind, ranges=None, prompts=())
    assert (a.fingerprint != plain.fingerprint) == (kind in codec.CALIBRATED), "only int8 activations are smoothed"


def test_smoothing_out_of_range_is_refused() -> None:
    predictor = fitted("int8")
    smooth = dict(safetensors.torch.load(predictor.to_bytes()))["layers.0.smooth"]
    bad = [with_tensors(predictor, layers__0__smooth=smooth + 60), with_tensors(predictor, layers__0__smooth=smooth.float()),
           with_tensors(predictor, layers__0__smooth=smooth[:-1].contiguous())]  # fmt: skip
    samples.refused_all(codec.Predictor.from_bytes, bad, errors.PredictorError)


# ---------------------------------------------------------------- 4 bits
def halves(packed_bytes: Tensor) -> list[list[int]]:
    return [[code for byte in row for code in (byte & 15, byte >> 4)] for row in packed_bytes.tolist()]


def plain_weight(form: str, parts: dict[str, Tensor], width: int) -> Tensor:
    """The definition, a value at a time: multiplier * value, in float64."""
    magnitudes = (0, 1, 2, 3, 4, 6, 8, 12)

    def value(code: int) -> int:
        if form == "int4":
            return code - 16 if code > 7 else code
        return -magnitudes[code - 8] if code > 7 else magnitudes[code]

    times = (1, 2, 4, 8) if form == "mxfp4" else range(1, 17)
    codes, shifts = halves(parts["weight"]), halves(parts["shift"])
    rows = [
        [value(c[i]) * times[s[i // packed.GROUP]] for i in range(width)] for c, s in zip(codes, shifts, strict=True)
    ]
    return torch.tensor(rows, dtype=torch.float64)


@pytest.mark.parametrize("form", packed.FORMS)
@settings(max_examples=15, deadline=None, derandomize=True)
@given(st.integers(1, 6), st.integers(1, 130), st.integers(0, 2**31))
def test_packed_layers_equal_their_definition(form: str, out: int, width: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(out, width, generator=generator) * 2 ** (6 * torch.rand(out, width, generator=generator))
    parts = quantise_weight(weight, form)
    shapes = packed.stored_shapes(out, width)
    assert (tuple(parts["weight"].shape), tuple(parts["shift"].shape)) == shapes
    integers = packed.unpack("w", form, parts["weight"], parts["shift"], width)
    want = plain_weight(form, parts, width)
    assert integers.dtype == torch.int8 and torch.equal(integers.double(), want)
    x = torch.randn(4, width, generator=generator)
    q, scale = exact.quantise_int8(x)
    y = (q.double() @ want.T) * scale.double() * parts["scale"].double()
    assert torch.equal(Linear(form, integers, parts["scale"], None)(Inputs(x)), y.float())


@pytest.mark.parametrize(("form", "worst"), [("int4", 0.095), ("mxfp4", 0.125)])
def test_four_bits_come_as_near_as_they_can(form: str, worst: float) -> None:
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(64, 256, generator=generator) * 2 ** torch.rand(64, 8, generator=generator).repeat_interleave(
        32, 1
    )
    parts = quantise_weight(weight, form)
    got = plain_weight(form, parts, 256) * parts["scale"].double()[:, None]
    assert float((got - weight).square().mean().sqrt() / weight.square().mean().sqrt()) < worst
    if form == "mxfp4":
        mantissa, _ = torch.frexp(parts["scale"])
        assert (mantissa == 0.5).all(), "block scales of MXFP4 are powers of two"


@pytest.mark.parametrize("form", packed.FORMS)
def test_weights_that_are_on_the_grid_come_back(form: str) -> None:
    generator = torch.Generator().manual_seed(2)
    table = torch.tensor(packed.FORMS[form].values)
    integers = table[torch.randint(0, 8, (16, 64), generator=generator)] * torch.tensor([1, -1])[torch.arange(64) % 2]
    integers = integers * torch.where(torch.arange(64) < 32, 2, 8)
    integers[:, 0], integers[:, 32] = table[:8].max() * 2, table[:8].max() * 8
    weight = integers * 0.25
    parts = quantise_weight(weight, form)
    assert torch.equal(plain_weight(form, parts, 64) * parts["scale"].double()[:, None], weight.double())


@pytest.mark.parametrize("form", packed.FORMS)
def test_malformed_packed_weights_are_refused(form: str) -> None:
    predictor = fitted(form)
    tensors = dict(safetensors.torch.load(predictor.to_bytes()))
    weight, shift = tensors["layers.0.q.weight"], tensors["layers.0.q.shift"]

    def changed(t: Tensor, column: int, value: int) -> Tensor:
        t = t.clone()
        t[0, column] = value
        return t

    bad = [
        with_tensors(predictor, layers__0__q__weight=changed(weight, 0, 8)),
        with_tensors(predictor, layers__0__q__weight=changed(weight, 3, 0x80)),
        with_tensors(predictor, layers__0__q__weight=changed(weight, 24, 1)),  # beyond 48 inputs
        with_tensors(predictor, layers__0__q__shift=changed(shift, 0, 4) if form == "mxfp4" else shift[:, :0]),
        with_tensors(predictor, layers__0__down__shift=changed(tensors["layers.0.down.shift"], 1, 0x10)),  # beyond 3 groups
        with_tensors(predictor, "layers.1.up.shift"), with_tensors(predictor, layers__0__q__weight=weight.to(torch.int8)),
        with_tensors(predictor, layers__0__q__weight=weight[:, :-1].contiguous()),
        with_tensors(predictor, layers__0__q__shift=torch.cat([shift, shift], 1)),
    ]  # fmt: skip
    samples.refused_all(codec.Predictor.from_bytes, bad, errors.PredictorError)
