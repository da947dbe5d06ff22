"""What the codec's tests are made of: tiny random predictors, caches that look like a guess plus noise, profiles over them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

import codec
from codec.coders import DEFAULT
from codec.formats import FORMATS, NumberFormat
from codec.residual import ChannelScales

Layers = list[tuple[Tensor, Tensor]]

TARGET = hashlib.blake2b(b"a target", digest_size=32).digest()
PROFILE_NOISE = 0.03

# As `config.to_dict()` of transformers gives it, cut to what the codec reads.
TINY: dict[str, Any] = {
    "model_type": "llama", "hidden_act": "silu", "vocab_size": 101, "hidden_size": 48, "intermediate_size": 80,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 12,
    "max_position_embeddings": 512, "rms_norm_eps": 1e-5, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}  # fmt: skip
# Larger, for what depends on kernels, threads and blocks of queries.
SMALL: dict[str, Any] = TINY | {
    "vocab_size": 257, "hidden_size": 96, "intermediate_size": 200, "num_hidden_layers": 3, "head_dim": 24,
}  # fmt: skip


def weights(config: dict[str, Any], seed: int = 0) -> dict[str, Tensor]:
    """Random weights under Hugging Face names, bf16. Large enough that attention attends and norms matter."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int, spread: float) -> Tensor:
        return (torch.randn(*shape, generator=generator) * spread).to(torch.bfloat16)

    hidden, wide, dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    heads, kv_heads = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim
    shapes = {
        "self_attn.q_proj": (heads, hidden), "self_attn.k_proj": (kv_heads, hidden), "self_attn.v_proj": (kv_heads, hidden),
        "self_attn.o_proj": (hidden, heads), "mlp.gate_proj": (wide, hidden), "mlp.up_proj": (wide, hidden),
        "mlp.down_proj": (hidden, wide),
    }  # fmt: skip
    out = {"model.embed_tokens.weight": normal(config["vocab_size"], hidden, spread=1.0)}
    for layer in range(config["num_hidden_layers"]):
        name = f"model.layers.{layer}."
        for projection, shape in shapes.items():
            out[f"{name}{projection}.weight"] = normal(*shape, spread=1.2 / shape[1] ** 0.5)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            out[f"{name}{norm}.weight"] = 1 + normal(hidden, spread=0.2)
    return out


def build(config: dict[str, Any], seed: int = 0, kind: str = "fp8", *, exact_kv: bool = False) -> codec.Predictor:
    """A predictor with random weights."""
    return codec.build_predictor(config, weights(config, seed), kind, exact_kv=exact_kv)


@lru_cache(maxsize=1)
def tiny() -> codec.Predictor:
    """The shared tiny predictor: 2 layers, 2 KV heads, 12 dims."""
    return build(TINY)


@lru_cache(maxsize=1)
def small() -> codec.Predictor:
    """The shared larger predictor."""
    return build(SMALL)


def tokens(count: int, *, vocab: int = TINY["vocab_size"], seed: int = 0) -> Tensor:
    """Random token ids, int64 [count]."""
    return torch.randint(0, vocab, (count,), generator=torch.Generator().manual_seed(1000 + seed))


def guesses(predictor: codec.Predictor, state: codec.PredictorState, ids: Tensor) -> Layers:
    """The guesses for the next tokens, float32 [kv_heads, T, dim] a tensor; `state` is left as it was."""
    run = predictor.run([state], [ids])
    out: Layers = []
    for layer in range(predictor.config.layers):
        out.append(run.guess(layer)[0])
        if layer < predictor.config.layers - 1:
            run.advance(layer, [out[-1]])
    return out


def state_after(predictor: codec.Predictor, ids: Tensor) -> codec.PredictorState:
    """A state that has seen these tokens, which may be none."""
    state = predictor.new_state()
    if len(ids):
        predictor.advance(state, ids)
    return state


def cast(values: Tensor, fmt: NumberFormat) -> Tensor:
    """To the cache's dtype, within its range."""
    return values.clamp(-fmt.max_finite, fmt.max_finite).to(fmt.dtype)


def truth(
    predictor: codec.Predictor, state: codec.PredictorState, ids: Tensor, fmt: NumberFormat, *, noise: float = PROFILE_NOISE,
    seed: int = 0,
) -> Layers:  # fmt: skip
    """A synthetic cache for the next tokens: guess plus noise, in the cache's format."""
    generator = torch.Generator().manual_seed(2000 + seed)

    def noisy(guess: Tensor) -> Tensor:
        return cast(guess + torch.randn(guess.shape, generator=generator) * noise, fmt)

    return [(noisy(k), noisy(v)) for k, v in guesses(predictor, state, ids)]


def make_profile(
    predictor: codec.Predictor, name: str = "bf16", *, target: bytes = TARGET, count: int = 96, coder: str = DEFAULT
) -> codec.Profile:
    """A profile by the real calibration, over a synthetic cache."""
    ids = tokens(count, vocab=predictor.config.vocab, seed=7)
    sample = truth(predictor, predictor.new_state(), ids, FORMATS[name], seed=7)
    moments = codec.measure(predictor, predictor.new_state(), ids, sample)
    return codec.freeze(predictor, target, name, moments, prefill_tokens=64, coder=coder)


@lru_cache(maxsize=4)
def tiny_profile(name: str = "bf16") -> codec.Profile:
    """The shared profile of the tiny predictor."""
    return make_profile(tiny(), name)


def keys(ids: Tensor, chunk_tokens: int, name: str = "bf16", target: bytes = TARGET) -> list[bytes]:
    """Chunk keys of a prompt."""
    return codec.chunk_keys(
        codec.root_key(target=target, cache_format=name, chunk_tokens=chunk_tokens), ids.numpy(), chunk_tokens
    )


def encode_prompt(
    predictor: codec.Predictor, profile: codec.Profile, ids: Tensor, values: Layers, chunk_tokens: int
) -> list[codec.EncodedChunk]:
    """All chunks of a prompt, chained."""
    state, parent, out = predictor.new_state(), codec.ROOT_DIGEST, []
    for begin, key in zip(
        range(0, len(ids), chunk_tokens), keys(ids, chunk_tokens, profile.cache_format, profile.target), strict=True
    ):
        part = slice(begin, begin + chunk_tokens)
        piece = [(k[:, part], v[:, part]) for k, v in values]
        identity = codec.ChunkIdentity(profile.target, key, parent, begin)
        out.append(codec.encode(predictor, profile, state, ids[part], piece, identity))
        parent = out[-1].chain_digest
    return out


def decode_prompt(
    predictor: codec.Predictor, profile: codec.Profile, ids: Tensor, blobs: list[bytes], chunk_tokens: int
) -> list[codec.DecodedChunk]:
    """The inverse of `encode_prompt`, from blobs alone."""
    state, parent, out = predictor.new_state(), codec.ROOT_DIGEST, []
    prompt_keys = keys(ids, chunk_tokens, profile.cache_format, profile.target)
    for n, (key, blob) in enumerate(zip(prompt_keys, blobs, strict=True)):
        begin = n * chunk_tokens
        identity = codec.ChunkIdentity(profile.target, key, parent, begin)
        out.append(codec.decode(predictor, profile, state, ids[begin : begin + chunk_tokens], blob, identity))
        parent = out[-1].chain_digest
    return out


def joined(chunks: list[codec.DecodedChunk]) -> Layers:
    """The layers of consecutive chunks as one."""
    return [
        (torch.cat([c.layers[n][0] for c in chunks], 1), torch.cat([c.layers[n][1] for c in chunks], 1))
        for n in range(len(chunks[0].layers))
    ]


def same_bits(a: Layers, b: Layers) -> bool:
    """Equal as bit patterns: NaNs equal themselves, -0 differs from +0."""
    pairs = [(x, y) for p, q in zip(a, b, strict=True) for x, y in zip(p, q, strict=True)]
    return all(
        x.dtype == y.dtype and torch.equal(x.contiguous().view(torch.uint8), y.contiguous().view(torch.uint8))
        for x, y in pairs
    )


def hostile_patterns(fmt: NumberFormat) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Zeros, denormals, the extremes, infinities, quiet and signalling NaNs with payloads; each with either sign."""
    sign, one = 1 << (fmt.item_bits - 1), 1 << (fmt.mantissa + fmt.raw)
    inf, quiet = fmt.first_nonfinite << fmt.raw, one >> 1
    positive = [0, 1, 2, one - 1, one, inf - 1, inf, inf + 1, inf + quiet, inf + quiet + 5, sign - 1]
    return np.array([min(p, sign - 1) | s for p in positive for s in (0, sign)], dtype=np.int64)


def all_patterns(fmt: NumberFormat) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Every pattern of a format of up to 16 bits; of a wider one every exponent and sign with some mantissas."""
    if fmt.item_bits <= 16:
        return np.arange(1 << fmt.item_bits, dtype=np.int64)
    few = np.array(
        [0, 1, 4095, 4096, 4097, 8191, 8192, (1 << 22) + 3, (1 << 23) - 4097, (1 << 23) - 4096, (1 << 23) - 1]
    )
    exponents = np.arange(1 << (fmt.item_bits - 23), dtype=np.int64) << 23
    return (exponents[:, None] | few).reshape(-1)


def with_hostile(values: Layers, fmt: NumberFormat, *, token: int) -> Layers:
    """A copy with hostile patterns in every tensor from `token` on, at one value in three."""
    out: Layers = []
    bad = hostile_patterns(fmt)
    for pair in values:
        new = []
        for tensor in pair:
            patterns = fmt.patterns(tensor)
            flat = patterns[:, token:].reshape(-1)
            places = np.arange(0, len(flat), 3)
            flat[places] = bad[places % len(bad)]
            patterns[:, token:] = flat.reshape(patterns[:, token:].shape)
            new.append(fmt.tensor(patterns))
        out.append((new[0], new[1]))
    return out


def scales(grid: np.ndarray[Any, Any], reciprocal: np.ndarray[Any, Any]) -> ChannelScales:
    """Channel scales from integers [kv_heads, dim]."""
    return ChannelScales(grid.astype(np.int64)[:, None, :], reciprocal.astype(np.int64)[:, None, :])


def refused_all(parse: Callable[[bytes], object], files: list[bytes], error: type[Exception]) -> None:
    """Each of these files must raise `error` when it is parsed."""
    problems = []
    for n, data in enumerate(files):
        try:
            parse(data)
        except error:
            continue
        except Exception as other:
            problems.append(f"number {n} raised {type(other).__name__}: {other}")
        else:
            problems.append(f"number {n} was taken")
    assert not problems, "malformed files: " + "; ".join(problems)
