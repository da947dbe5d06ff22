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
from codec.predictor.config import KINDS, check_family, from_hf, head_dim
from codec.predictor.decoder import Predictor
from codec.predictor.linear import quantise_weight
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
) -> Predictor:
    """Quantise a target's weights.

    config: the Hugging Face config as a dict; tensors: its weights under their Hugging Face names, any float dtype;
    bf16: whether the target runs in bf16 (it then rounds cos and sin so); exact_kv: keep the K and V projections in full precision
    (for the closed loop). Raises UnsupportedArchitecture, UserError.
    """
    if kind not in KINDS:
        raise UnsupportedFormat(f"Predictor '{kind}' is unknown; supported are: {', '.join(KINDS)}.")
    check_family(config)
    rope = frequencies(config, head_dim(config))
    shape = from_hf(config, kind, (rope.type, 2 * rope.inverse.shape[1], rope.scaling), bf16, exact_kv)
    out: dict[str, Tensor] = {
        "embed": _get(tensors, "model.embed_tokens.weight").to(torch.bfloat16 if bf16 else torch.float32).contiguous(),
        "rope.inverse": rope.inverse.contiguous(),
        "rope.starts": torch.tensor(rope.starts, dtype=torch.int64),
    }
    exponents = []
    for layer in range(shape.layers):
        source, name = f"model.layers.{layer}.", f"layers.{layer}."
        for short, long in PROJECTIONS.items():
            weight = _get(tensors, source + long + ".weight").float()
            out[f"{name}{short}.weight"], out[f"{name}{short}.scale"] = quantise_weight(weight, shape.form(short))
            bias = tensors.get(source + long + ".bias")
            if bias is not None:
                out[f"{name}{short}.bias"] = bias.float().contiguous()
        for short, long in (("norm1", "input_layernorm"), ("norm2", "post_attention_layernorm")):
            out[name + short] = _get(tensors, f"{source}{long}.weight").float().contiguous()
        exponents.append(_value_exponents(tensors, source, shape.kv_heads))
    out["value_exponents"] = torch.stack(exponents)
    for tensor_name, tensor in out.items():
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor.float()).all()):
            raise UserError(
                f"The model's weights are not finite (found in '{tensor_name}'); no predictor can be made of them."
            )
    try:
        return Predictor(shape, out)
    except PredictorError as error:  # else it would be stored, and no process could load it
        raise UserError(f"No predictor can be made of this model: {error}") from error


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


def _get(tensors: Mapping[str, Tensor], name: str) -> Tensor:
    tensor = tensors.get(name)
    if tensor is None:
        raise UserError(f"The model's weights lack '{name}', which its configuration asks for.")
    return tensor
