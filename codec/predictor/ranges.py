"""Smoothing of int8 activations: how large each channel gets, and scales that even the channels out.

An activation's row has one scale, so its largest channel decides how coarse all others are. A power of two a channel moves range
from activations to weights (SmoothQuant, Xiao et al. 2023, with alpha 0.5): activations are divided by it, the weights that
read them are multiplied. It is folded into what comes before where that is linear, and then costs nothing.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import Tensor

from codec import exact
from codec.predictor.config import PredictorConfig
from codec.predictor.decoder import SMOOTH_LIMIT, DecoderPredictor

# An input of linear layers, and who reads it.
READERS = {"norm1": ("q", "k", "v"), "attention": ("o",), "norm2": ("gate", "up"), "mlp": ("down",)}


@dataclass(frozen=True)
class Ranges:
    """The largest absolute value of each channel: float32 [layers, width] for each input that READERS names."""

    largest: dict[str, Tensor]

    @classmethod
    def zero(cls, config: PredictorConfig) -> Ranges:
        """Of nothing yet."""
        c = config
        widths = {"norm1": c.hidden, "attention": c.heads * c.head_dim, "norm2": c.hidden, "mlp": c.intermediate}
        return cls({name: torch.zeros(c.layers, width) for name, width in widths.items()})

    def merge(self, other: Ranges) -> Ranges:
        """Of both; the order does not matter."""
        return Ranges({name: torch.maximum(mine, other.largest[name]) for name, mine in self.largest.items()})


def measure_ranges(predictor: DecoderPredictor, token_ids: Tensor) -> Ranges:
    """Run a predictor open loop over token ids int64 [T] and see how large the inputs of its linear layers get.

    The predictor must not be smoothed. The last layer but for its first input counts as 0: nothing reads it.
    """
    ranges = Ranges.zero(predictor.config)
    largest = ranges.largest

    def watch(layer: int, name: str, x: Tensor) -> None:
        largest[name][layer] = torch.maximum(largest[name][layer], x.abs().amax(0).cpu())

    run = predictor.run([predictor.new_state()], [token_ids])
    run.watch = watch
    for layer in range(predictor.config.layers):
        guess = run.guess(layer)
        if layer < predictor.config.layers - 1:
            run.advance(layer, guess)
    return ranges


def exponents(largest: Tensor, weights: list[Tensor]) -> Tensor:  # exact: computed once and stored
    """log2 of the smoothing scales, int32 [in]: channels of x [in] against weights [out, in]; 0 where either is 0 throughout."""
    w = torch.stack([weight.abs().amax(0) for weight in weights]).amax(0)
    known = (largest > 0) & (w > 0)
    e = 0.5 * (torch.log2(torch.where(known, largest, 1.0)) - torch.log2(torch.where(known, w, 1.0)))
    centre = e[known].mean() if bool(known.any()) else torch.zeros(())
    return torch.where(known, torch.round(e - centre), 0.0).clamp(-SMOOTH_LIMIT, SMOOTH_LIMIT).to(torch.int32)


@dataclass
class LayerWeights:
    """One layer's weights before they are quantised: float32, by short name; biases where there are any."""

    weight: dict[str, Tensor]
    bias: dict[str, Tensor]
    norm1: Tensor
    norm2: Tensor
    smooth: Tensor | None = None  # int32 [heads * head_dim]: attention's output is divided by 2**smooth


def smooth_layer(
    layer: LayerWeights, ranges: Ranges, number: int, exact_kv: bool, inputs: Collection[str] = tuple(READERS)
) -> LayerWeights:
    """The same function, with the channels of these inputs evened out.

    exact_kv: K and V have 16-bit weights, which need no care.
    """
    scales: dict[str, Tensor] = {}
    weight, bias = dict(layer.weight), dict(layer.bias)
    for name, readers in READERS.items():
        careful = [n for n in readers if not (exact_kv and n in ("k", "v"))]
        e = exponents(ranges.largest[name][number], [layer.weight[n] for n in careful])
        e = scales[name] = e if name in inputs else torch.zeros_like(e)
        for n in readers:
            weight[n] = weight[n] * exact.pow2(e)
    down = exact.pow2(-scales["mlp"])
    weight["up"] = weight["up"] * down[:, None]
    if "up" in bias:
        bias["up"] = bias["up"] * down
    norm1, norm2 = layer.norm1 * exact.pow2(-scales["norm1"]), layer.norm2 * exact.pow2(-scales["norm2"])
    return LayerWeights(weight, bias, norm1, norm2, scales["attention"])
