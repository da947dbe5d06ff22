"""Rotary position embedding: the frequencies a config asks for, and exact cos and sin.

Frequencies are computed once, when a predictor is built, and are data from then on; they follow the target's float32 arithmetic
as closely as torch allows, because an error in them is an error of the guess. Angles and their cos and sin are computed wherever
they are needed, in exact elementwise arithmetic, so that no table has to be stored and positions have no limit.
Sources: Su et al. 2021 (RoPE); Peng et al. 2023 (YaRN); Meta's Llama 3.1 scaling; Ding et al. 2024 (LongRoPE).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from codec import exact
from codec.errors import UnsupportedArchitecture

TYPES = ("default", "linear", "llama3", "yarn", "longrope", "dynamic")
_BY_LENGTH = ("dynamic", "longrope")  # scalings that depend on how long the whole prompt is


class Frequencies(NamedTuple):
    """Inverse frequencies float32 [regimes, rotated dims / 2], the first position of each regime, and the factor on cos and sin."""

    type: str
    inverse: Tensor
    starts: list[int]
    scaling: float


def regime(rope_type: str) -> str:
    """Names a scaling that depends on total length, for the chunk keys; empty where K depends on the prefix alone."""
    return rope_type if rope_type in _BY_LENGTH else ""


def frequencies(config: Mapping[str, Any], head_dim: int) -> Frequencies:  # exact: computed once and stored
    """Read the RoPE parameters of a Hugging Face config dict. Raises UnsupportedArchitecture for an unknown type."""
    p: dict[str, Any] = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    kind = str(p.get("rope_type") or p.get("type") or "default")
    theta = float(p.get("rope_theta") or config.get("rope_theta") or 10000.0)
    # Llama's own code rotates every dim in the default scheme, whatever this factor says.
    partial = (
        1.0 if kind == "default" else float(p.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1)
    )
    dim = int(head_dim * partial)
    powers = theta ** (torch.arange(0, dim, 2, dtype=torch.int64).float() / dim)
    base = 1.0 / powers
    context = int(config["max_position_embeddings"])
    original = int(
        p.get("original_max_position_embeddings") or config.get("original_max_position_embeddings") or context
    )
    if kind in ("default", "dynamic"):  # dynamic scaling begins beyond the context length, where no prompt may go
        return Frequencies(kind, base[None], [0], 1.0)
    if kind == "linear":
        return Frequencies(kind, (base / float(p["factor"]))[None], [0], 1.0)
    if kind == "llama3":
        return Frequencies(kind, _llama3(base, p, original)[None], [0], 1.0)
    if kind == "yarn":
        inverse, scaling = _yarn(powers, p, theta, dim, original, context)
        return Frequencies(kind, inverse[None], [0], scaling)
    if kind == "longrope":
        return _longrope(powers, p, original, context)
    raise UnsupportedArchitecture(f"RoPE type '{kind}' is not supported; supported are: {', '.join(TYPES)}.")


def _llama3(base: Tensor, p: Mapping[str, Any], original: int) -> Tensor:  # exact: computed once and stored
    factor, low, high = float(p["factor"]), float(p["low_freq_factor"]), float(p["high_freq_factor"])
    wavelength = 2 * math.pi / base
    slow = torch.where(wavelength > original / low, base / factor, base)
    smooth = (original / wavelength - low) / (high - low)
    blended = (1 - smooth) * slow / factor + smooth * slow
    medium = (wavelength >= original / high) & (wavelength <= original / low)
    return torch.where(medium, blended, slow)


def _yarn(  # exact: computed once and stored
    powers: Tensor, p: Mapping[str, Any], theta: float, dim: int, original: int, context: int
) -> tuple[Tensor, float]:
    factor = float(p.get("factor") or context / original)

    def mscale(scale: float, m: float = 1.0) -> float:
        return 1.0 if scale <= 1 else 0.1 * m * math.log(scale) + 1.0

    scaling = p.get("attention_factor")
    if scaling is None:
        m, m_all = p.get("mscale"), p.get("mscale_all_dim")
        scaling = mscale(factor, float(m)) / mscale(factor, float(m_all)) if m and m_all else mscale(factor)

    def dimension(rotations: float) -> float:
        return (dim * math.log(original / (rotations * 2 * math.pi))) / (2 * math.log(theta))

    low, high = dimension(float(p.get("beta_fast") or 32)), dimension(float(p.get("beta_slow") or 1))
    if p.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / ((high - low) or 0.001)).clamp(0, 1)
    keep = 1 - ramp
    inverse = 1.0 / (factor * powers) * (1 - keep) + 1.0 / powers * keep
    return inverse, float(scaling)


def _longrope(  # exact: computed once and stored
    powers: Tensor, p: Mapping[str, Any], original: int, context: int
) -> Frequencies:
    factor = float(p.get("factor") or context / original)
    scaling = p.get("attention_factor")
    if scaling is None:
        scaling = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    rows = [1.0 / (torch.tensor([float(v) for v in p[name]]) * powers) for name in ("short_factor", "long_factor")]
    return Frequencies("longrope", torch.stack(rows), [0, original], float(scaling))


def cos_sin(inverse: Tensor, starts: list[int], positions: Tensor, scaling: float, bf16: bool) -> tuple[Tensor, Tensor]:
    """cos and sin for int64 positions [tokens]: float32 [tokens, rotated dims / 2] each, rounded to bf16 where the target does so."""
    regime = torch.zeros_like(positions)
    for i, start in enumerate(starts[1:], 1):
        regime = torch.where(positions >= start, torch.full_like(regime, i), regime)
    angle = inverse[regime] * positions.to(torch.float32)[:, None]  # float32, as the target's angles are
    cos, sin = exact.cos_sin(angle.to(torch.float64))
    cos, sin = (cos * scaling).to(torch.float32), (sin * scaling).to(torch.float32)
    if bf16:
        cos, sin = cos.to(torch.bfloat16).to(torch.float32), sin.to(torch.bfloat16).to(torch.float32)
    return cos, sin


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate float32 [heads, tokens, head_dim]; dims beyond 2 * cos.shape[-1] pass through (pairs are (i, i + half))."""
    half = cos.shape[-1]
    a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    out = exact.empty(x.shape, x.dtype, x.device)
    torch.mul(a, cos, out=out[..., :half]).sub_(part := b * sin)
    torch.mul(b, cos, out=out[..., half : 2 * half]).add_(torch.mul(a, sin, out=part))
    out[..., 2 * half :] = rest
    return out
