"""A plain float Llama over the weights of codec_samples: the caches that closed-loop tests need.

Guess plus independent noise would show nothing: what the closed loop uses is that all errors of a layer have one cause. Here
the truth is what the original weights give, and the predictor's error is its own quantisation.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

import codec
from codec.calibrate import Sample, calibrate_closed
from codec.coders import DEFAULT
from codec.formats import FORMATS
from codec.predictor import MODEL_FREE
from codec.predictor.rope import cos_sin, frequencies, rotate
from tests import codec_samples as samples


def cache_of(
    config: dict[str, Any], weights: dict[str, Tensor], ids: Tensor, scales: codec.CacheScales | None = None, stored: str = ""
) -> tuple[samples.Layers, list[Tensor]]:  # fmt: skip
    """(K and V of every layer, float64 [kv_heads, T, dim]; hidden state entering every layer, [T, hidden]).

    With scales, attention reads K and V rounded to the FP8 format `stored`, as in an engine with such a cache.
    """
    t = {name: w.double() for name, w in weights.items()}
    dim, heads, kv_heads = config["head_dim"], config["num_attention_heads"], config["num_key_value_heads"]
    f = frequencies(config, dim)
    cos, sin = (x.double() for x in cos_sin(f.inverse, f.starts, torch.arange(len(ids)), f.scaling, bf16=False))
    later = torch.ones(len(ids), len(ids), dtype=torch.bool).triu(1)
    h, layers, hidden = t["model.embed_tokens.weight"][ids], [], []
    for i in range(config["num_hidden_layers"]):
        name = f"model.layers.{i}."

        def project(x: Tensor, projection: str, name: str = name) -> Tensor:
            return x @ t[f"{name}{projection}.weight"].T

        def norm(x: Tensor, which: str, name: str = name) -> Tensor:
            return x / (x.square().mean(-1, keepdim=True) + config["rms_norm_eps"]).sqrt() * t[f"{name}{which}.weight"]

        hidden.append(h)
        x = norm(h, "input_layernorm")
        q, k, v = (
            project(x, f"self_attn.{p}_proj").view(len(ids), n, dim).transpose(0, 1)
            for p, n in (("q", heads), ("k", kv_heads), ("v", kv_heads))
        )
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        layers.append((k, v))
        if scales is not None:
            k, v = (
                scales.dequantise(scales.quantise(x, i, side, FORMATS[stored]), i, side, torch.float64)
                for side, x in enumerate((k, v))
            )
        kk, vv = (z.repeat_interleave(heads // kv_heads, 0) for z in (k, v))
        scores = (q @ kk.transpose(1, 2) / dim**0.5).masked_fill(later, -torch.inf)
        h = h + project((scores.softmax(-1) @ vv).transpose(0, 1).reshape(len(ids), -1), "self_attn.o_proj")
        x = norm(h, "post_attention_layernorm")
        gated = torch.nn.functional.silu(project(x, "mlp.gate_proj")) * project(x, "mlp.up_proj")
        h = h + project(gated, "mlp.down_proj")
    return layers, hidden


class World:
    """A model, a predictor of it, and profiles of both loops, calibrated on prompts that tests do not use."""

    def __init__(
        self, config: dict[str, Any], kind: str, *, seed: int = 0, prompts: int = 12, tokens: int = 100, exact_kv: bool = True,
        window: int = 0,
    ) -> None:  # fmt: skip
        self.config, self.weights = config, samples.weights(config, seed)
        self.predictor = self._predictor(kind, exact_kv, window)
        self._prompts = [self.tokens(tokens, seed=500 + i) for i in range(prompts)]
        self._profiles: dict[tuple[str, str, str, str], codec.Profile] = {}
        self._scales: dict[tuple[str, str], codec.CacheScales] = {}

    def _predictor(self, kind: str, exact_kv: bool, window: int) -> codec.Predictor:
        """As a job makes it: with all that calibration says about it."""
        if kind in MODEL_FREE:
            return codec.build_model_free(kind, self.config, cache_of(self.config, self.weights, torch.tensor([1]))[0])
        given: dict[str, Any] = {"bf16": True, "exact_kv": exact_kv, "window": window}
        prompts = [self.tokens(60, seed=700 + i) for i in range(2)]
        if kind in codec.CALIBRATED:
            pilot = codec.build_pilot(self.config, self.weights, **given)
            given["ranges"] = codec.measure_ranges(pilot, torch.cat(prompts))
        return codec.fit_predictor(self.config, self.weights, kind, prompts=prompts, **given)

    def tokens(self, count: int, seed: int = 0) -> Tensor:
        """Random token ids, int64 [count]."""
        return samples.tokens(count, vocab=self.config["vocab_size"], seed=seed)

    def truth(self, ids: Tensor, name: str = "bf16", mode: str = "tensor") -> samples.Layers:
        """The model's cache for a prompt, in the cache's format; mode: of an FP8 cache's scales."""
        return self._cast(cache_of(self.config, self.weights, ids, self.scales(name, mode), name)[0], name, mode)

    def scales(self, name: str, mode: str = "tensor") -> codec.CacheScales | None:
        """The scales of an FP8 cache, calibrated on the calibration prompts."""
        fmt, c = FORMATS[name], self.predictor.config
        if not fmt.coarse:
            return None
        if (name, mode) not in self._scales:
            caches = [cache_of(self.config, self.weights, ids)[0] for ids in self._prompts]
            largest = np.stack([[[t.abs().amax((1, 2)).numpy() for t in pair] for pair in layers] for layers in caches])
            scales = codec.CacheScales.calibrated("tensor" if mode == "none" else mode, largest.max(0), fmt)
            self._scales[name, mode] = codec.CacheScales.none(c.layers, c.kv_heads) if mode == "none" else scales
        return self._scales[name, mode]

    def profile(self, loop: str, name: str = "bf16", mode: str = "tensor", coder: str = DEFAULT) -> codec.Profile:
        """The profile of that loop, cache format and coder."""
        which = (loop, name, mode, coder)
        if which not in self._profiles:
            calibrate = self._closed if loop == "closed" else self._open
            self._profiles[which] = calibrate(name, mode, coder)
        return self._profiles[which]

    def samples(self, name: str, mode: str = "tensor") -> list[Sample]:
        """The calibration prompts."""
        out = []
        for ids in self._prompts:
            layers, hidden = cache_of(self.config, self.weights, ids, self.scales(name, mode), name)
            states = [] if self.predictor.config.hidden == 0 else hidden
            out.append(Sample(ids, self._cast(layers, name, mode), states))
        return out

    def _closed(self, name: str, mode: str, coder: str) -> codec.Profile:
        work, scales = self.samples(name, mode), self.scales(name, mode)
        return calibrate_closed(
            self.predictor, samples.TARGET, name, work, prefill_tokens=64, scales=scales, coder=coder
        )

    def _open(self, name: str, mode: str, coder: str) -> codec.Profile:
        moments, scales = codec.Moments.zero(self.predictor.config), self.scales(name, mode)
        for s in self.samples(name, mode):
            state = self.predictor.new_state()
            moments.add(codec.measure(self.predictor, state, s.token_ids, s.truth, scales))
        return codec.freeze(
            self.predictor, samples.TARGET, name, moments, prefill_tokens=64, scales=scales, coder=coder
        )

    def _cast(self, layers: Sequence[tuple[Tensor, Tensor]], name: str, mode: str) -> samples.Layers:
        fmt, scales = FORMATS[name], self.scales(name, mode)
        if scales is None:
            return [(samples.cast(k.float(), fmt), samples.cast(v.float(), fmt)) for k, v in layers]
        return [(scales.quantise(k, i, 0, fmt), scales.quantise(v, i, 1, fmt)) for i, (k, v) in enumerate(layers)]


# Four layers, so that a correction has somewhere to go.
WORLD: dict[str, Any] = samples.TINY | {"num_hidden_layers": 4}


@lru_cache(maxsize=8)
def world(kind: str = "fp8") -> World:
    """The shared world of a predictor kind."""
    return World(WORLD, kind)
