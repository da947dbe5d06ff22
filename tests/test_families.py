"""Every supported family against transformers' own implementation of it, with random weights, biases and norms."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import transformers
from torch import Tensor

import codec
from codec import errors
from codec.predictor.config import SUPPORTED
from pipeline.model_source import ModelSource
from pipeline.target import Target, check_cache, load_target
from tests import codec_samples as samples

TOKENS = 60
SHAPE: dict[str, Any] = {
    "vocab_size": 101, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "initializer_range": 0.12, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
CLASSES = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}
# Name of the test -> family and what its config says beyond SHAPE.
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "mistral": ("mistral", {"sliding_window": None}),
    "mistral-head_dim": ("mistral", {"sliding_window": None, "head_dim": 24, "num_key_value_heads": 1}),
    "qwen2": ("qwen2", {}),
    "qwen2-mha": ("qwen2", {"num_key_value_heads": 4, "rms_norm_eps": 1e-2}),
    "qwen2-yarn": ("qwen2", {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0,
                                                 "original_max_position_embeddings": 128}}),
    "qwen3": ("qwen3", {"head_dim": 16}),
    "qwen3-head_dim": ("qwen3", {"head_dim": 24}),  # 4 * 24 is not the hidden size
    "qwen3-mqa": ("qwen3", {"head_dim": 8, "num_key_value_heads": 1}),
    "qwen3-bias": ("qwen3", {"head_dim": 32, "attention_bias": True}),
    "qwen3-eps": ("qwen3", {"head_dim": 24, "rms_norm_eps": 0.3}),
}  # fmt: skip


def model(variant: str, dtype: torch.dtype = torch.float32) -> Any:
    """transformers' model with random weights; norms and biases are random too."""
    family, options = VARIANTS[variant]
    config = getattr(transformers, CLASSES[family] + "Config")(**(SHAPE | options))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        made = getattr(transformers, CLASSES[family] + "ForCausalLM")(config).eval()
        for name, weight in made.named_parameters():
            weight.requires_grad_(False)
            if name.endswith("norm.weight"):
                weight.uniform_(0.5, 1.5)
            elif name.endswith("bias"):
                weight.uniform_(-0.5, 0.5)
    return made.to(dtype)


def predictor_of(made: Any, kind: str = "int8-a16", weights: dict[str, Tensor] | None = None) -> codec.Predictor:
    tensors = made.state_dict() if weights is None else weights
    return codec.build_predictor(made.config.to_dict(), tensors, kind, made.dtype == torch.bfloat16, exact_kv=True)


def errors_of(made: Any, predictor: codec.Predictor) -> list[float]:
    """RMS error of the guesses relative to the RMS of the truth: K and V of layer 0, of layer 1, …"""
    ids = samples.tokens(TOKENS)
    with torch.no_grad():
        cache = made(ids[None], use_cache=True).past_key_values
    out = []
    for guess, layer in zip(samples.guesses(predictor, predictor.new_state(), ids), cache.layers, strict=True):
        for g, t in zip(guess, (layer.keys[0], layer.values[0]), strict=True):
            assert g.shape == t.shape and torch.isfinite(g).all()
            out.append(float((g.double() - t.double()).norm() / t.double().norm()))
    return out


def test_every_supported_family_is_tested() -> None:
    assert {family for family, _ in VARIANTS.values()} == set(SUPPORTED) == set(CLASSES)


@pytest.mark.parametrize("variant", VARIANTS)
def test_guesses_are_those_of_transformers(variant: str) -> None:
    """The first layer's K and V keep 15 bits; after it, 8-bit weights add some noise a layer."""
    found = errors_of(made := model(variant), predictor_of(made))
    assert max(found[:2]) < 2e-4, found
    assert max(found[2:4]) < 0.02 and max(found[4:]) < 0.03, found
    assert max(errors_of(made, predictor_of(made, "fp8"))) < 0.2


@pytest.mark.parametrize("variant", VARIANTS)
def test_guesses_are_those_of_transformers_in_bf16(variant: str) -> None:
    """bf16 keeps 8 bits, and the target rounds to it after each step."""
    found = errors_of(made := model(variant, torch.bfloat16), predictor_of(made))
    assert max(found[:2]) < 0.015, found
    assert max(found[2:]) < 0.03, found


@pytest.mark.parametrize(
    ("variant", "ending", "value"),
    [("qwen2", "q_proj.bias", 0.0), ("qwen2", "k_proj.bias", 0.0), ("qwen2", "v_proj.bias", 0.0),
     ("qwen3", "q_norm.weight", 1.0), ("qwen3", "k_norm.weight", 1.0)],
)  # fmt: skip
def test_every_tensor_of_a_family_matters(variant: str, ending: str, value: float) -> None:
    """The bounds above would notice a bias or a norm that is left out."""
    made = model(variant)
    weights = {name: t.clone() for name, t in made.state_dict().items()}
    for name, tensor in weights.items():
        if name.endswith(ending):
            tensor.fill_(value)
    assert max(errors_of(made, predictor_of(made, weights=weights))[2:]) > 0.05


@pytest.mark.parametrize(
    ("variant", "name"),
    [("qwen2", "model.layers.1.self_attn.v_proj.bias"), ("qwen3", "model.layers.1.self_attn.q_norm.weight"),
     ("qwen3", "model.layers.2.self_attn.k_norm.weight")],
)  # fmt: skip
def test_a_missing_bias_or_norm_is_refused_by_name(variant: str, name: str) -> None:
    made = model(variant)
    weights = made.state_dict()
    del weights[name]
    with pytest.raises(errors.UserError, match=name):
        predictor_of(made, weights=weights)


def test_stored_head_norms_are_checked() -> None:
    predictor = predictor_of(model("qwen3"))
    data, text = predictor.to_bytes(), predictor.config.to_json()
    assert codec.Predictor.from_bytes(data).fingerprint == predictor.fingerprint
    tensors = safetensors.torch.load(data)
    name = "layers.1.k_norm"
    bad: list[bytes] = []
    for wrong in (
        None,
        torch.ones(15),
        torch.ones(16, dtype=torch.float64),
        torch.full((16,), torch.nan),
        torch.full((16,), 2.0**21),
    ):
        parts = {n: t for n, t in tensors.items() if n != name} | ({} if wrong is None else {name: wrong})
        bad.append(safetensors.torch.save(parts, {"predictor": text}))
    samples.refused_all(codec.Predictor.from_bytes, bad, errors.PredictorError)


WINDOW = {"sliding_window": 64}
SOME_LAYERS = WINDOW | {"use_sliding_window": True, "max_window_layers": 2}


@pytest.mark.parametrize(("family", "options"), [("Mistral", WINDOW), ("Qwen2", SOME_LAYERS), ("Qwen3", SOME_LAYERS)])
def test_sliding_windows_are_refused_in_plain_words(family: str, options: dict[str, Any]) -> None:
    config_class, source = getattr(transformers, f"{family}Config"), ModelSource("folder", "/nowhere", "slider")
    with pytest.raises(errors.UserError, match="'slider' attends within a sliding window of 64 tokens") as error:
        check_cache(config_class(num_hidden_layers=4, **options), source)
    assert "\n" not in str(error.value) and "full attention" in str(error.value)
    full = {"sliding_window": None} if family == "Mistral" else WINDOW | {"use_sliding_window": False}
    check_cache(config_class(num_hidden_layers=4, **full), source)


# ---------------------------------------------------------------- the whole way
def calibrated(target: Target, predictor: codec.Predictor) -> codec.Profile:
    inputs = []
    for seed in range(6):
        ids = samples.tokens(90, seed=20 + seed)
        truth, hidden = target.prefill_states(target.new_cache(), ids)
        inputs.append(codec.ClosedSample(ids, truth, hidden))
    return codec.calibrate_closed(predictor, samples.TARGET, "bf16", inputs, prefill_tokens=90)


@pytest.mark.parametrize("variant", ["mistral-head_dim", "qwen2", "qwen3-head_dim"])
def test_a_family_round_trips_in_the_closed_loop(variant: str, tmp_path: Path) -> None:
    model(variant, torch.bfloat16).save_pretrained(tmp_path)
    target = load_target(ModelSource("folder", str(tmp_path), variant), "bf16")
    predictor = codec.build_predictor(target.config, target.weights(), "int8-a16", True, exact_kv=True)
    profile = calibrated(target, predictor)
    codec.check_known_answer(predictor, profile)
    ids = samples.tokens(75, seed=4)
    truth = target.prefill(target.new_cache(), ids)
    encoded = samples.encode_prompt(predictor, profile, ids, truth, 32)
    elsewhere = codec.Predictor.from_bytes(predictor.to_bytes()), codec.Profile.from_bytes(profile.to_bytes())
    decoded = samples.decode_prompt(*elsewhere, ids, [chunk.blob for chunk in encoded], 32)
    assert samples.same_bits(samples.joined(decoded), truth)
    scalars = sum(chunk.stats.scalars_k + chunk.stats.scalars_v for chunk in encoded)
    bits = 8 * sum(chunk.stats.bytes_k + chunk.stats.bytes_v for chunk in encoded) / scalars
    assert bits < 7.0, f"{bits:.2f} bits a scalar"  # without a predictor it is some 11
