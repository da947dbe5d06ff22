"""From calibration to a predictor: ranges smooth its activations, sensitivities say which of them get a second limb."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from codec.predictor.build import build_predictor
from codec.predictor.config import SMOOTHED
from codec.predictor.decoder import DecoderPredictor
from codec.predictor.limbs import choose_limbs, sensitivities
from codec.predictor.ranges import Ranges

CALIBRATED = SMOOTHED  # rungs that want ranges; others make nothing of them


def build_pilot(
    config: Mapping[str, Any], tensors: Mapping[str, Tensor], *, bf16: bool, exact_kv: bool, window: int = 0
) -> DecoderPredictor:
    """The predictor whose ranges are to be measured; arguments as in `build_predictor`."""
    return build_predictor(config, tensors, "int8-a16", bf16, exact_kv, window=window)


def fit_predictor(
    config: Mapping[str, Any], tensors: Mapping[str, Tensor], kind: str, *, bf16: bool, exact_kv: bool, window: int = 0,
    ranges: Ranges | None = None, prompts: Sequence[Tensor] = (),
) -> DecoderPredictor:  # fmt: skip
    """A predictor with all that calibration can say about it.

    ranges: merged from `measure_ranges` over calibration tokens; prompts: a few hundred token ids, int64 [T] each, for int8-mixed. Without
    them the predictor is what `build_predictor` makes. Other arguments and errors as there.
    """

    def build(kind: str, limbs: Tensor | None = None) -> DecoderPredictor:
        return build_predictor(config, tensors, kind, bf16, exact_kv, ranges=ranges, limbs=limbs, window=window)

    if kind != "int8-mixed" or not prompts:
        return build(kind)
    plain = build("int8")
    return build(kind, choose_limbs(build(kind).config, sensitivities(plain, prompts)))
