"""The predictor against transformers' own Llama: guesses, every variant a config can ask for, and RoPE frequencies."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

import codec
from codec import errors
from codec.predictor import rope
from codec.predictor.linear import quantise_weight
from tests import codec_samples as samples

CONTEXT = 256
TOKENS = 60
SHAPE: dict[str, Any] = {
    "vocab_size": 101, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": CONTEXT, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
THETA = {"rope_theta": 10000.0}
YARN = THETA | {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LONG = THETA | {
    "rope_type": "longrope", "original_max_position_embeddings": 64,
    "short_factor": [1.0 + 0.02 * i for i in range(8)], "long_factor": [1.0 + 0.9 * i for i in range(8)],
}  # fmt: skip
ROPES: dict[str, dict[str, Any]] = {
    "default": THETA | {"rope_type": "default"},
    "theta": {"rope_type": "default", "rope_theta": 500000.0},
    "linear": THETA | {"rope_type": "linear", "factor": 2.5},
    "dynamic": THETA | {"rope_type": "dynamic", "factor": 2.0},
    "llama3": {
        "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": YARN,
    "yarn-untruncated": YARN | {"truncate": False, "beta_fast": 16, "beta_slow": 2},
    "yarn-mscale": YARN | {"mscale": 0.7, "mscale_all_dim": 1.1},
    "yarn-attention": YARN | {"attention_factor": 0.9},
    "longrope": LONG | {"factor": 4.0},
    "longrope-attention": LONG | {"factor": 4.0, "attention_factor": 1.3},
}  # fmt: skip


def model(**overrides: Any) -> LlamaForCausalLM:
    """transformers' Llama with random float32 weights; norms and biases are random too."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        made = LlamaForCausalLM(LlamaConfig(**(SHAPE | {"initializer_range": 0.12} | overrides))).eval()
        for name, weight in made.named_parameters():
            weight.requires_grad_(False)
            if name.endswith("norm.weight"):
                weight.uniform_(0.5, 1.5)
            elif name.endswith("bias"):
                weight.uniform_(-0.5, 0.5)
    return made


def cache_of(made: LlamaForCausalLM, ids: Tensor) -> samples.Layers:
    with torch.no_grad():
        cache = made(ids[None], use_cache=True).past_key_values
    return [(layer.keys[0], layer.values[0]) for layer in cache.layers]


def predictor_of(
    made: LlamaForCausalLM, bf16: bool = False, kind: str = "fp8", exact_kv: bool = False
) -> codec.Predictor:
    return codec.build_predictor(made.config.to_dict(), made.state_dict(), kind, bf16, exact_kv)


def agreement(guess: Tensor, true: Tensor) -> tuple[float, float]:
    """(correlation, RMS error relative to the RMS of the truth)"""
    a, b = guess.double().flatten(), true.double().flatten()
    return float(torch.corrcoef(torch.stack([a, b]))[0, 1]), float(
        (a - b).pow(2).mean().sqrt() / b.pow(2).mean().sqrt()
    )


def check_guesses(made: LlamaForCausalLM, tokens: int = TOKENS) -> None:
    ids, predictor = samples.tokens(tokens), predictor_of(made)
    guesses = samples.guesses(predictor, predictor.new_state(), ids)
    for layer, (guess, true) in enumerate(zip(guesses, cache_of(made, ids), strict=True)):
        for name, g, t in zip("KV", guess, true, strict=True):
            assert g.shape == t.shape and torch.isfinite(g).all()
            correlation, error = agreement(g, t)
            # FP8 has 3 mantissa bits: some 3 % of noise in the first projection, which adds up over layers.
            assert correlation > 0.98 and error < 0.06 + 0.06 * layer, (
                f"layer {layer} {name}: {correlation:.4f}, {error:.3f}"
            )


# ---------------------------------------------------------------- guesses
@pytest.mark.parametrize(
    "overrides",
    [
        {}, {"num_key_value_heads": 4}, {"num_key_value_heads": 1}, {"attention_bias": True}, {"mlp_bias": True},
        {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 1}, {"tie_word_embeddings": True}, {"head_dim": 24},
        {"head_dim": 8, "num_key_value_heads": 1}, {"num_hidden_layers": 1}, {"rms_norm_eps": 1e-2},
    ],
    ids=lambda o: "-".join(o) or "gqa",
)  # fmt: skip
def test_guesses_are_close_to_the_cache(overrides: dict[str, Any]) -> None:
    check_guesses(model(**overrides))


@pytest.mark.parametrize("name", ROPES)
def test_guesses_follow_every_rope_type(name: str) -> None:
    # longrope's regime is that of the whole prompt in transformers: stay below the switch
    check_guesses(model(rope_parameters=dict(ROPES[name])), tokens=TOKENS)


def test_first_layer_keys_are_exact_up_to_fp8() -> None:
    """With weights and inputs on the e4m3 grid nothing is quantised away: RoPE, norm and products must then agree to float32."""
    made = model()
    for name, weight in made.named_parameters():
        if "layers.0.self_attn" in name:
            grid, scale = quantise_weight(weight, "fp8").values()
            weight.copy_(grid.float() * scale[:, None])
    embed = made.model.embed_tokens.weight
    embed.copy_(torch.where(embed > 0, 1.0, -1.0))  # normalised to +-1 times the norm's weight
    made.model.layers[0].input_layernorm.weight.fill_(1.0)
    ids, predictor = samples.tokens(TOKENS), predictor_of(made)
    guess, true = samples.guesses(predictor, predictor.new_state(), ids)[0], cache_of(made, ids)[0]
    for g, t in zip(guess, true, strict=True):
        assert agreement(g, t)[1] < 1e-5


def test_bf16_targets_round_rope_and_embeddings() -> None:
    made = model()
    exact, rounded = predictor_of(made), predictor_of(made, bf16=True)
    assert (
        exact.fingerprint != rounded.fingerprint and rounded.config.rope_bf16 and rounded.embed.dtype == torch.bfloat16
    )
    cos, sin = rounded.rope(torch.arange(40))
    assert torch.equal(cos, cos.bfloat16().float()) and torch.equal(sin, sin.bfloat16().float())
    rotary = LlamaRotaryEmbedding(made.config)
    want_cos, want_sin = rotary(torch.zeros(1, dtype=torch.bfloat16), torch.arange(40)[None])
    half = cos.shape[1]
    for got, want in ((cos, want_cos), (sin, want_sin)):
        assert float((got != want[0, :, :half].float()).float().mean()) < 0.01, "all but a few near midpoints"


def test_building_is_deterministic_and_bytes_come_back() -> None:
    made = model(attention_bias=True, mlp_bias=True)
    a, b = predictor_of(made), predictor_of(made)
    assert a.to_bytes() == b.to_bytes() and a.fingerprint == b.fingerprint
    back = codec.Predictor.from_bytes(a.to_bytes())
    assert back.config == a.config and back.fingerprint == a.fingerprint and back.to_bytes() == a.to_bytes()
    ids = samples.tokens(20)
    for x, y in zip(samples.guesses(a, a.new_state(), ids), samples.guesses(back, back.new_state(), ids), strict=True):
        assert torch.equal(x[0], y[0]) and torch.equal(x[1], y[1])


def test_one_changed_weight_changes_the_fingerprint() -> None:
    tensors = samples.weights(samples.TINY)
    before = codec.build_predictor(samples.TINY, tensors).fingerprint
    tensors["model.layers.1.mlp.up_proj.weight"][3, 5] *= 2
    assert codec.build_predictor(samples.TINY, tensors).fingerprint != before


def test_weights_are_quantised_a_channel_at_a_time() -> None:
    weight = torch.randn(8, 40, generator=torch.Generator().manual_seed(0)) * torch.logspace(-8, 4, 8)[:, None]
    weight[5] = 0
    q, scale = quantise_weight(weight, "fp8").values()
    assert q.dtype == torch.float8_e4m3fn and torch.isfinite(scale).all() and (scale > 0).all()
    error = (q.float() * scale[:, None] - weight).abs().amax(1)
    assert (error <= weight.abs().amax(1) / 27).all()


# ---------------------------------------------------------------- RoPE
@pytest.mark.parametrize("name", ROPES)
def test_frequencies_equal_those_of_transformers(name: str) -> None:
    config = LlamaConfig(**SHAPE, rope_parameters=dict(ROPES[name]))
    got = rope.frequencies(config.to_dict(), 16)
    rotary = LlamaRotaryEmbedding(config)
    assert got.type == config.rope_parameters["rope_type"] and got.scaling == pytest.approx(
        rotary.attention_scaling, rel=1e-12
    )
    assert got.inverse.dtype == torch.float32
    torch.testing.assert_close(got.inverse[0], rotary.inv_freq, rtol=2e-7, atol=0)
    if got.type == "longrope":
        long, _ = ROPE_INIT_FUNCTIONS["longrope"](config, "cpu", seq_len=CONTEXT)
        assert got.starts == [0, 64]
        torch.testing.assert_close(got.inverse[1], long, rtol=2e-7, atol=0)
    else:
        assert got.starts == [0] and len(got.inverse) == 1


@pytest.mark.parametrize("name", ROPES)
def test_cos_and_sin_equal_those_of_transformers(name: str) -> None:
    config = LlamaConfig(**SHAPE, rope_parameters=dict(ROPES[name]))
    f, positions = rope.frequencies(config.to_dict(), 16), torch.arange(60)
    cos, sin = rope.cos_sin(f.inverse, f.starts, positions, f.scaling, bf16=False)
    want_cos, want_sin = LlamaRotaryEmbedding(config)(torch.zeros(1), positions[None])
    torch.testing.assert_close(cos, want_cos[0, :, :8], rtol=0, atol=1e-5)
    torch.testing.assert_close(sin, want_sin[0, :, :8], rtol=0, atol=1e-5)


def test_all_rope_types_of_the_codec_are_tested() -> None:
    assert {str(p["rope_type"]) for p in ROPES.values()} == set(rope.TYPES)


def test_longrope_takes_its_factor_from_the_config_as_transformers_does() -> None:
    config = LlamaConfig(**SHAPE, rope_parameters=LONG | {"factor": 9.0})
    assert rope.frequencies(config.to_dict(), 16).scaling == pytest.approx(
        LlamaRotaryEmbedding(config).attention_scaling
    )


def test_old_configs_are_read_too() -> None:
    """Up to transformers 4: rope_theta at the top, rope_scaling with `type`."""
    old = SHAPE | {"rope_theta": 500000.0, "rope_scaling": {"type": "linear", "factor": 2.0}}
    new = SHAPE | {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 500000.0}}
    a, b = (rope.frequencies(c, 16) for c in (old, new))
    assert a.type == b.type == "linear" and torch.equal(a.inverse, b.inverse)
    assert rope.frequencies(SHAPE | {"rope_theta": 500000.0, "rope_scaling": None}, 16).type == "default"


def test_regime_is_named_where_length_matters() -> None:
    for name, want in (("default", ""), ("yarn", ""), ("dynamic", "dynamic"), ("longrope", "longrope")):
        assert predictor_of(model(rope_parameters=dict(ROPES[name]))).config.rope_regime == want


# ---------------------------------------------------------------- what is refused
def test_unsupported_architectures_name_those_supported() -> None:
    weights = samples.weights(samples.TINY)
    for change, message in (({"model_type": "mamba"}, r"'mamba'.*llama, mistral, qwen2"), ({"model_type": None}, "supported are: llama"),
                            ({"hidden_act": "gelu"}, r"'gelu'.*supported is: silu"),
                            ({"rope_parameters": {"rope_type": "spiral"}}, r"'spiral'.*default, linear, llama3, yarn")):  # fmt: skip
        with pytest.raises(errors.UnsupportedArchitecture, match=message) as caught:
            codec.build_predictor(samples.TINY | change, weights)
        assert isinstance(caught.value, errors.UserError)
    with pytest.raises(errors.UserError, match="supported are: fp8"):
        codec.build_predictor(samples.TINY, weights, kind="fp3")


def test_missing_and_spoiled_weights_are_refused_by_name() -> None:
    name = "model.layers.1.self_attn.k_proj.weight"
    weights = samples.weights(samples.TINY)
    del weights[name]
    with pytest.raises(errors.UserError, match=name):
        codec.build_predictor(samples.TINY, weights)
    for bad in (float("nan"), float("inf")):
        weights = samples.weights(samples.TINY)
        weights["model.layers.0.input_layernorm.weight"][2] = bad
        with pytest.raises(errors.UserError, match="not finite"):
            codec.build_predictor(samples.TINY, weights)
        weights = samples.weights(samples.TINY)
        weights[name][0, 0] = bad
        with pytest.raises(errors.UserError, match="not finite"):
            codec.build_predictor(samples.TINY, weights)


def test_weights_of_wrong_shapes_are_refused() -> None:
    weights = samples.weights(samples.TINY)
    name = "model.layers.0.mlp.up_proj.weight"
    weights[name] = weights[name][:-1]
    with pytest.raises((errors.UserError, errors.PredictorError), match="up"):
        codec.build_predictor(samples.TINY, weights)


def test_prompts_beyond_context_or_vocabulary_are_refused() -> None:
    predictor = samples.tiny()
    state = predictor.new_state()
    with pytest.raises(errors.UserError, match="context length of 512"):
        predictor.advance(state, samples.tokens(513))
    with pytest.raises(errors.UserError, match="0 to 100"):
        predictor.advance(state, torch.tensor([5, 101]))
    assert state.length == 0


def test_the_context_is_capped_where_sums_stay_exact() -> None:
    longer = samples.TINY | {"max_position_embeddings": 1 << 20}
    assert codec.build_predictor(longer, samples.weights(longer)).context_length == 1 << 17


# ---------------------------------------------------------------- stored files
@settings(max_examples=25, deadline=None, derandomize=True)
@given(st.integers(0, 10**6))
def test_truncated_predictors_are_refused(end: int) -> None:
    data = samples.tiny().to_bytes()
    with pytest.raises(errors.PredictorError):
        codec.Predictor.from_bytes(data[: end % len(data)])


@settings(max_examples=120, deadline=None, derandomize=True)
@given(st.integers(0, 3000), st.integers(0, 7))
def test_a_flipped_predictor_is_refused_or_has_another_fingerprint(at: int, bit: int) -> None:
    data = bytearray(samples.tiny().to_bytes())
    data[at] ^= 1 << bit
    with contextlib.suppress(errors.DataError):
        assert codec.Predictor.from_bytes(bytes(data)).fingerprint != samples.tiny().fingerprint


def predictor_with(config: dict[str, Any] | str | None = None, drop: str = "", **tensors: torch.Tensor) -> bytes:
    data = samples.tiny().to_bytes()
    parts = safetensors.torch.load(data) | {k.replace("__", "."): v for k, v in tensors.items()}
    parts.pop(drop, None)
    stated = json.loads(samples.tiny().config.to_json())
    text = (
        config
        if isinstance(config, str)
        else json.dumps(stated | (config or {}), sort_keys=True, separators=(",", ":"))
    )
    out: bytes = safetensors.torch.save(parts, {"predictor": text})
    return out


def test_guesses_stay_finite_whatever_a_stored_predictor_says_within_its_bounds() -> None:
    """A coder that is handed a NaN looks for a cell that is not there."""
    made = samples.tiny().config
    wide = made.heads * made.head_dim
    data = predictor_with(
        value_exponents=torch.full((made.layers, made.kv_heads), 60, dtype=torch.int32),
        layers__0__smooth=torch.full((wide,), -24, dtype=torch.int32),
        layers__0__o__weight=torch.full((made.hidden, wide), 448.0).to(torch.float8_e4m3fn),
        layers__0__o__scale=torch.full((made.hidden,), 2.0**20),
    )
    predictor, ids = codec.Predictor.from_bytes(data), samples.tokens(5)
    run = predictor.run([predictor.new_state()], [ids])
    run.guess(0)
    large = torch.full((made.kv_heads, 5, made.head_dim), 1e38)
    run.advance(0, [(large, large)])
    assert all(bool(torch.isfinite(x).all()) for x in (run.h, *run.guess(1)[0]))


def test_predictors_of_wrong_shapes_are_refused() -> None:
    tensors = safetensors.torch.load(samples.tiny().to_bytes())
    assert codec.Predictor.from_bytes(predictor_with()).fingerprint == samples.tiny().fingerprint
    nan = tensors["layers.0.norm1"].clone()
    nan[3] = float("nan")
    nan8 = tensors["layers.1.q.weight"].clone().view(torch.uint8)
    nan8[0, 0] = 0x7F
    bad: list[bytes] = [
        b"", bytes(8), b"\xff" * 64, predictor_with("[]"), predictor_with("{}"), predictor_with("1"), predictor_with("x"),
        predictor_with({"layers": 3}), predictor_with({"layers": 0}), predictor_with({"layers": 2.0}), predictor_with({"hidden": 1 << 40}),
        predictor_with({"heads": "4"}), predictor_with({"kv_heads": 3}), predictor_with({"vocab": 100}), predictor_with({"rope_dim": 14}),
        predictor_with({"rope_dim": "a"}), predictor_with({"rope_dim": -2}), predictor_with({"rope_dim": 6}),
        predictor_with({"context_length": 0}), predictor_with({"context_length": "9"}), predictor_with({"norm_eps": "a"}),
        predictor_with({"norm_eps": -1.0}), predictor_with({"rope_scaling": None}), predictor_with({"kind": "int1"}),
        predictor_with({"family": "rwkv"}), predictor_with({"exact_kv": 1}), predictor_with({"exact_kv": True}),
        predictor_with({"kind": "int8"}), predictor_with({"more": 1}), predictor_with(drop="embed"), predictor_with(drop="rope.inverse"),
        predictor_with(drop="rope.starts"), predictor_with(drop="layers.1.down.scale"), predictor_with(drop="value_exponents"),
        predictor_with(embed=tensors["embed"][:-1].contiguous()), predictor_with(rope__inverse=tensors["rope.inverse"][:, :2].contiguous()),
        predictor_with(layers__0__q__weight=tensors["layers.0.q.weight"].float()), predictor_with(layers__0__norm1=nan),
        predictor_with(layers__1__q__weight=nan8.view(torch.float8_e4m3fn)), predictor_with(layers__0__q__bias=torch.zeros(3)),
        predictor_with(value_exponents=tensors["value_exponents"].float()),
        predictor_with(value_exponents=tensors["value_exponents"] + 500),
        predictor_with(layers__0__q__scale=tensors["layers.0.q.scale"].double()),
    ]  # fmt: skip
    samples.refused_all(codec.Predictor.from_bytes, bad, errors.PredictorError)
