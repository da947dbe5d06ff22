"""Make a predictor from a target's weights, and keep it as bytes.

The file is safetensors with one metadata entry, `predictor`: the canonical configuration. Its BLAKE2b digest is the predictor's
fingerprint; all a decoder needs is in it, so the target's own files may be gone. Building runs once; its results are data.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from codec.errors import PredictorError, UnsupportedFormat, UserError
from codec.predictor.config import KINDS, LIMBED, QKV_BIAS, SMOOTHED, PredictorConfig, check_family, from_hf, head_dim
from codec.predictor.decoder import DecoderPredictor
from codec.predictor.limbs import choose_limbs, products
from codec.predictor.linear import quantise_weight
from codec.predictor.ranges import READERS, LayerWeights, Ranges, smooth_layer
from codec.predictor.rope import frequencies

PROJECTIONS = {"q": "self_attn.q_proj", "k": "self_attn.k_proj", "v": "self_attn.v_proj", "o": "self_attn.o_proj",
               "gate": "mlp.gate_proj", "up": "mlp.up_proj", "down": "mlp.down_proj"}  # fmt: skip
VALUE_HEADROOM = 7  # a value head's integers reach 2**VALUE_HEADROOM times its expected RMS


def build_predictor(
    config: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    kind: str = "fp8",
    bf16: bool = True,
    exact_kv: bool = False,
    *,
    ranges: Ranges | None = None,
    limbs: Tensor | None = None,
    window: int = 0,
) -> DecoderPredictor:
    """Quantise a target's weights.

    config: the Hugging Face config as a dict; tensors: its weights under their Hugging Face names, any float dtype;
    bf16: whether the target runs in bf16 (it then rounds cos and sin so); exact_kv: keep the K and V projections in full precision
    (for the closed loop); ranges: smooth the activations by these, where the rung gains by it; limbs: int32 [layers, 5] for int8-mixed
    (`limbs.choose_limbs`), without which the inputs of `down`, then of `o` and `q`, get the second limbs that the budget allows;
    window: tokens that attention sees at least, the first few among them; 0 for all. Raises UnsupportedArchitecture, UserError.
    """
    if kind not in KINDS:
        raise UnsupportedFormat(f"Predictor '{kind}' is unknown; supported are: {', '.join(KINDS)}.")
    check_family(config)
    rope = frequencies(config, head_dim(config))
    shape = from_hf(config, kind, (rope.type, 2 * rope.inverse.shape[1], rope.scaling), bf16, exact_kv, window)
    out: dict[str, Tensor] = {
        "embed": _get(tensors, "model.embed_tokens.weight").to(torch.bfloat16 if bf16 else torch.float32).contiguous(),
        "rope.inverse": rope.inverse.contiguous(),
        "rope.starts": torch.tensor(rope.starts, dtype=torch.int64),
    }
    if kind == "int8-mixed":
        out["limbs"] = (_default_limbs(shape) if limbs is None else limbs.to(torch.int32)).contiguous()
    exponents = []
    for layer in range(shape.layers):
        source = f"model.layers.{layer}."
        weights = _layer_weights(tensors, source, shape)
        if ranges is not None and kind in SMOOTHED:
            weights = smooth_layer(weights, ranges, layer, exact_kv, _uneven(out.get("limbs"), layer))
        out |= {f"layers.{layer}.{name}": tensor for name, tensor in _quantised(weights, shape).items()}
        for norm in ("q_norm", "k_norm") if shape.head_norm else ():
            out[f"layers.{layer}.{norm}"] = _get(tensors, f"{source}self_attn.{norm}.weight").float().contiguous()
        exponents.append(_value_exponents(tensors, source, shape.kv_heads))
    out["value_exponents"] = torch.stack(exponents)
    for tensor_name, tensor in out.items():
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor.float()).all()):
            raise UserError(
                f"The model's weights are not finite (found in '{tensor_name}'); no predictor can be made of them."
            )
    try:
        return DecoderPredictor(shape, out)
    except PredictorError as error:  # else it would be stored, and no process could load it
        raise UserError(f"No predictor can be made of this model: {error}") from error


def _layer_weights(tensors: Mapping[str, Tensor], source: str, shape: PredictorConfig) -> LayerWeights:
    weight = {short: _get(tensors, f"{source}{long}.weight").float() for short, long in PROJECTIONS.items()}
    bias = {
        short: b.float()
        for short, long in PROJECTIONS.items()
        if (b := _bias(tensors, source + long, shape.family in QKV_BIAS and short in "qkv")) is not None
    }
    norm1, norm2 = (
        _get(tensors, f"{source}{n}.weight").float() for n in ("input_layernorm", "post_attention_layernorm")
    )
    return LayerWeights(weight, bias, norm1, norm2)


def _quantised(layer: LayerWeights, shape: PredictorConfig) -> dict[str, Tensor]:
    """What is stored of a layer, by name."""
    out = {f"{n}.bias": b.contiguous() for n, b in layer.bias.items()}
    out |= {"norm1": layer.norm1.contiguous(), "norm2": layer.norm2.contiguous()}
    for n, weight in layer.weight.items():
        out |= {f"{n}.{part}": tensor for part, tensor in quantise_weight(weight, shape.form(n)).items()}
    return out if layer.smooth is None else out | {"smooth": layer.smooth}


def _uneven(limbs: Tensor | None, layer: int) -> set[str]:
    """Inputs to smooth: those that someone reads with one limb. Two limbs have range enough, and smoothing costs weights some."""
    fine = {} if limbs is None else {n: count == 2 for n, count in zip(LIMBED, limbs[layer].tolist(), strict=True)}
    return {name for name, readers in READERS.items() if any(not fine.get(n, False) for n in readers if n in LIMBED)}


def _default_limbs(shape: PredictorConfig) -> Tensor:
    """Where nothing was calibrated: inputs that are largest at their worst come first."""
    order = {"down": 3.0, "o": 2.0, "q": 1.0}
    gains = torch.tensor([order.get(name, 0.0) * products(shape)[name] for name in LIMBED], dtype=torch.float64)
    return choose_limbs(shape, gains.expand(shape.layers, -1))


def _value_exponents(tensors: Mapping[str, Tensor], source: str, kv_heads: int) -> Tensor:
    """The fixed-point step of each value head as a power of two, int32 [kv_heads].

    V enters a sum over tokens, so its scale may belong to no token. A normalised input has RMS 1, so the expected RMS of a
    value channel is the norm of its weight row times the norm's weights.
    """
    norm = _get(tensors, source + "input_layernorm.weight").double()
    rows = _get(tensors, source + "self_attn.v_proj.weight").double()
    rms = (rows * norm).pow(2).sum(1).sqrt()  # exact: computed once and stored
    bias = tensors.get(source + "self_attn.v_proj.bias")
    if bias is not None:
        rms = rms + bias.double().abs()
    top = rms.view(kv_heads, -1).amax(1).clamp_min(2.0**-40)
    _, e = torch.frexp(top)
    return (e.to(torch.int32) + VALUE_HEADROOM - 15).clamp(-60, 60)


def _bias(tensors: Mapping[str, Tensor], name: str, needed: bool) -> Tensor | None:
    return _get(tensors, name + ".bias") if needed else tensors.get(name + ".bias")


def _get(tensors: Mapping[str, Tensor], name: str) -> Tensor:
    tensor = tensors.get(name)
    if tensor is None:
        raise UserError(f"The model's weights lack '{name}', which its configuration asks for.")
    return tensor
