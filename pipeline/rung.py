"""A rung of the ladder: what is spent on predicting, and how its predictor is made from a target and calibration prompts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

import codec
from codec.predictor import MODEL_FREE

if TYPE_CHECKING:
    from pipeline.target import Target

RANGE_TOKENS = 512  # of each calibration prompt, to see how large activations get
_ONE_TOKEN = torch.zeros(1, dtype=torch.int64)
LIMB_PROMPTS, LIMB_TOKENS = 2, 256  # and of the first of them, to see what a second limb is worth


@dataclass(frozen=True)
class Rung:
    """Predictor kind, loop, and attention window (None: all tokens)."""

    kind: str
    loop: str
    window: int | None = None

    @property
    def calibrated(self) -> bool:
        """Whether `build` wants ranges."""
        return self.kind in codec.CALIBRATED

    def ranges(self, target: Target, prompts: Sequence[Tensor]) -> codec.Ranges:
        """What these prompts (token ids, int64 [T] each) show; merged over all actors, the same however they were shared out."""
        pilot = codec.build_pilot(**self._of(target))
        found = (codec.measure_ranges(pilot, ids[:RANGE_TOKENS]) for ids in prompts)
        return reduce(codec.Ranges.merge, found, codec.Ranges.zero(pilot.config))

    def build(self, target: Target, ranges: codec.Ranges | None, prompts: Sequence[Tensor]) -> codec.Predictor:
        """The predictor; `prompts` are the first of the calibration's."""
        if self.kind in MODEL_FREE:  # any token shows the cache's shapes
            return codec.build_model_free(self.kind, target.config, target.prefill(target.new_cache(), _ONE_TOKEN))
        few = [ids[:LIMB_TOKENS] for ids in prompts[:LIMB_PROMPTS]]
        return codec.fit_predictor(kind=self.kind, ranges=ranges, prompts=few, **self._of(target))

    def _of(self, target: Target) -> dict[str, Any]:
        # On the CPU wherever the target is, so that the predictor is the same.
        tensors = {name: tensor.cpu() for name, tensor in target.weights().items()}
        bf16 = target.dtype == torch.bfloat16
        return {
            "config": target.config,
            "tensors": tensors,
            "bf16": bf16,
            "exact_kv": self.loop == "closed",
            "window": self.window or 0,
        }
