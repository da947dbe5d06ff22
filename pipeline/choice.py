"""Which predictor a model gets: the one asked for, the default one, or one that needs no model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from codec.errors import UnsupportedArchitecture
from codec.predictor import MODEL_FREE
from codec.predictor.config import check_family, head_dim
from codec.predictor.modelfree import rotation
from codec.predictor.rope import frequencies, regime
from pipeline.options import DEFAULT_PREDICTOR

FALLBACK = "linear"  # for architectures that no predictor is written for


@dataclass(frozen=True)
class Choice:
    """The predictor's kind, the name of the model's RoPE regime for the chunk keys, and what the user should be told."""

    kind: str
    rope_regime: str
    notes: tuple[str, ...] = ()


def choose(asked: str | None, loop: str, window: int | None, config: Mapping[str, Any]) -> Choice:
    """The rung asked for, or the default one; where no predictor is written for the architecture, one that needs no model.

    Raises:
        UnsupportedArchitecture: what was asked for cannot do without a predictor for this architecture.
    """
    if asked in MODEL_FREE:
        return _model_free(asked, config, ())
    try:
        check_family(config)
        rope = frequencies(config, head_dim(config)).type
    except UnsupportedArchitecture as error:
        reason = str(error).rstrip(".")
        if asked is not None or loop != "closed" or window is not None:
            raise UnsupportedArchitecture(f"{reason}; --predictor {FALLBACK} --loop closed works with any.") from error
        return _model_free(FALLBACK, config, (f"{reason}: using --predictor {FALLBACK}, which needs no model",))
    return Choice(asked or DEFAULT_PREDICTOR, regime(rope))


def _model_free(kind: str, config: Mapping[str, Any], notes: tuple[str, ...]) -> Choice:
    heads, hidden = config.get("num_attention_heads"), config.get("hidden_size")
    dim = config.get("head_dim") or (int(hidden) // int(heads) if hidden and heads else 2)
    found = rotation(config, int(dim))
    if found is None:
        notes += (f"no rotary embedding that is known in model type '{config.get('model_type')}': K is coded as it is",)
    return Choice(kind, "" if found is None else regime(found.type), notes)
