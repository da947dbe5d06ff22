"""Rungs without a model: every guess is zero, and what is known of K and V is all in the profile's joint model.

They need no weights and no earlier tokens, so they code the cache of any architecture, and any chunk decodes without its
predecessors: a state is only a position. `static` has a joint model of each layer on its own; that of `linear` also looks back to
the layers before it (codec.joint_model).
K is un-rotated where the model's rotary embedding is known; a wrong or missing rotation costs bits and nothing else.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from codec.errors import PredictorError, UnsupportedArchitecture, UnsupportedFormat, UserError
from codec.predictor.base import Predictor, begins
from codec.predictor.config import LIMITS, MAX_CONTEXT, SUPPORTED, read_fields
from codec.predictor.kept import Stored
from codec.predictor.memory import PredictorState
from codec.predictor.rope import Frequencies, cos_sin, frequencies

HISTORY = {"static": 0, "linear": 2}  # earlier layers that the joint model of a layer looks back to
MODEL_FREE = tuple(HISTORY)
_FREQUENCY_LIMIT = 1024.0
_SIZES = ("layers", "kv_heads", "head_dim")


@dataclass(frozen=True)
class ModelFreeConfig:
    """Shapes of a cache."""

    kind: str
    layers: int
    kv_heads: int
    head_dim: int
    rope_dim: int  # 0: nothing rotates

    @property
    def hidden(self) -> int:
        """There is no hidden state."""
        return 0

    @property
    def vocab(self) -> int:
        """Any token id: they are only counted."""
        return LIMITS["vocab"]

    def to_json(self) -> str:
        """Canonical text, part of the fingerprint."""
        return json.dumps(asdict(self), sort_keys=True, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> ModelFreeConfig:
        """Parse and check; raises PredictorError."""
        config = cls(**read_fields(text, cls))
        config.check()
        return config

    def check(self) -> None:
        """Everything that a stored predictor must satisfy; raises PredictorError."""
        if self.kind not in MODEL_FREE:
            raise PredictorError(f"The predictor is a '{self.kind}', which needs weights that it does not have.")
        for name in _SIZES:
            value = getattr(self, name)
            if type(value) is not int or not 1 <= value <= LIMITS[name]:
                raise PredictorError(
                    f"The predictor's configuration says {name} = {value!r}; allowed is 1 to {LIMITS[name]}."
                )
        if type(self.rope_dim) is not int or not 0 <= self.rope_dim <= self.head_dim or self.rope_dim % 2:
            raise PredictorError(f"The predictor's configuration says rope_dim = {self.rope_dim!r}, which cannot be.")
        if self.head_dim % 2:
            raise PredictorError("The joint model needs an even number of dimensions a head.")


class ModelFree(Predictor):
    """A predictor that guesses zero."""

    config: ModelFreeConfig

    def __init__(self, config: ModelFreeConfig, tensors: dict[str, Tensor], device: torch.device | str = "cpu") -> None:
        """tensors: `rope.inverse` float32 [regimes, rope_dim / 2], `rope.starts` int64 [regimes]. Raises PredictorError."""
        super().__init__(config, tensors, device)
        config.check()
        _check_rotation(tensors, config.rope_dim // 2)
        self.history = HISTORY[config.kind]
        self._inverse = tensors["rope.inverse"].to(self.device)
        self._starts: list[int] = tensors["rope.starts"].tolist()

    @property
    def context_length(self) -> int:
        """Tokens a prompt may have."""
        return MAX_CONTEXT

    def state_at(self, position: int) -> PredictorState:
        """The state before token `position`, whatever came before it."""
        if not 0 <= position <= MAX_CONTEXT:
            raise ValueError(f"There is no position {position} in a context of {MAX_CONTEXT} tokens.")
        state = PredictorState()
        state.length = position
        return state

    def run(
        self,
        states: Sequence[PredictorState],
        token_ids: Sequence[Tensor],
        *,
        after: Sequence[int | None] | None = None,
        keep: bool = True,
    ) -> ModelFreeRun:
        """Begin a pass; the token ids are only counted, and there is nothing that could be kept."""
        return ModelFreeRun(self, states, [len(t) for t in token_ids], after)

    def turn(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin of the angles at int64 positions [R]: float32 [R, rope_dim / 2] each."""
        return cos_sin(self._inverse, self._starts, positions, 1.0, False)


class ModelFreeRun:
    """See codec.predictor.base.Run."""

    def __init__(
        self,
        predictor: ModelFree,
        states: Sequence[PredictorState],
        lengths: Sequence[int],
        after: Sequence[int | None] | None = None,
    ) -> None:
        if len({id(s) for s in states}) < len(states):
            raise ValueError("A state cannot be in one batch twice.")
        self._ends = []
        first = begins([s.length for s in states], lengths, after or [None] * len(states))
        for begin, n in zip(first, lengths, strict=True):
            if begin + n > MAX_CONTEXT:
                raise UserError(f"A prompt of {begin + n} tokens is over the limit of {MAX_CONTEXT}.")
            self._ends.append(begin + n)
        c, device = predictor.config, predictor.device
        self._states = list(states)
        self._guesses = [torch.zeros(c.kv_heads, n, c.head_dim, device=device) for n in lengths]
        places = [torch.arange(begin, end, device=device) for begin, end in zip(first, self._ends, strict=True)]
        self._turns = [predictor.turn(p) for p in places]
        self.h = torch.zeros(sum(lengths), 0, device=device)
        self.rms = torch.ones(sum(lengths), 1, device=device)

    def guess(self, layer: int) -> list[tuple[Tensor, Tensor]]:
        """Zeros."""
        return [(zero, zero) for zero in self._guesses]

    def advance(
        self, layer: int, kv: Sequence[tuple[Tensor, Tensor]], corrections: Sequence[Tensor] | None = None,
        stored: Sequence[Stored | None] | None = None,
    ) -> None:  # fmt: skip
        """Nothing follows from a layer here."""

    def turns(self) -> list[tuple[Tensor, Tensor]]:
        """See Run."""
        return self._turns

    def commit(self) -> None:
        """See Run."""
        for state, end in zip(self._states, self._ends, strict=True):
            state.length = end


def build_model_free(kind: str, config: Mapping[str, Any], cache: Sequence[tuple[Tensor, Tensor]]) -> ModelFree:
    """A model-free predictor of the caches of one model.

    config: its Hugging Face config as a dict, read for its rotary embedding only; cache: (K, V) of every layer for any tokens,
    [kv_heads, T, head_dim]. Raises UnsupportedFormat for another kind, UnsupportedArchitecture for layers of different shapes.
    """
    if kind not in MODEL_FREE:
        raise UnsupportedFormat(
            f"Predictor '{kind}' needs a model's weights; without them there are: {', '.join(MODEL_FREE)}."
        )
    shapes = {(t.shape[0], t.shape[2]) for pair in cache for t in pair}
    if len(shapes) != 1:
        raise UnsupportedArchitecture(
            f"The layers of this model's cache have different shapes ({sorted(shapes)}), which is not supported yet."
        )
    kv_heads, head_dim = shapes.pop()
    rope = rotation(config, head_dim)
    tensors = _tensors(rope or Frequencies("", torch.zeros(1, 0), [0], 1.0))
    shape = ModelFreeConfig(kind, len(cache), kv_heads, head_dim, 2 * tensors["rope.inverse"].shape[1])
    try:
        return ModelFree(shape, tensors)
    except PredictorError as error:
        raise UnsupportedArchitecture(f"This model's cache cannot be coded: {error}") from None


def rotation(config: Mapping[str, Any], head_dim: int) -> Frequencies | None:
    """The frequencies by which a model rotates K, from its Hugging Face config; None where there is no rotation that is known."""
    p = config.get("rope_parameters")
    if not isinstance(p, Mapping) or "rope_type" not in p or config.get("position_embedding_type", "rope") != "rope":
        return None
    try:
        if config.get("model_type") in SUPPORTED:
            found = frequencies(config, head_dim)
        else:  # these rotate a part of the dims in the default scheme too
            partial = p.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0
            whole = {"rope_parameters": {**p, "partial_rotary_factor": 1.0}, "partial_rotary_factor": 1.0}
            found = frequencies({**config, **whole}, int(head_dim * float(partial)))
        _check_rotation(_tensors(found), found.inverse.shape[1])
    except (UnsupportedArchitecture, PredictorError, KeyError, TypeError, ValueError, ArithmeticError, RuntimeError):
        return None  # whatever another family's config may hold
    return found if 2 <= 2 * found.inverse.shape[1] <= head_dim else None


def _tensors(rope: Frequencies) -> dict[str, Tensor]:
    return {"rope.inverse": rope.inverse.contiguous(), "rope.starts": torch.tensor(rope.starts, dtype=torch.int64)}


def _check_rotation(tensors: Mapping[str, Tensor], pairs: int) -> None:
    """Raise PredictorError unless these are frequencies of so many pairs, and nothing else."""
    if set(tensors) != {"rope.inverse", "rope.starts"}:
        raise PredictorError(
            f"A model-free predictor has other tensors than its rotation: {', '.join(sorted(tensors))}."
        )
    inverse, starts = tensors["rope.inverse"], tensors["rope.starts"]
    places = starts.tolist() if starts.dim() == 1 else []
    if inverse.dtype != torch.float32 or starts.dtype != torch.int64 or inverse.shape != (len(places), pairs):
        raise PredictorError(
            "The predictor's rotary frequencies have another shape or type than its configuration says."
        )
    if not places or places[0] != 0 or places != sorted(set(places)):
        raise PredictorError("The predictor's rotary regimes are out of order; the file is corrupt.")
    if not bool(((inverse >= 0) & (inverse <= _FREQUENCY_LIMIT)).all()):  # not so for a NaN
        raise PredictorError("The predictor's rotary frequencies are out of range; the file is corrupt.")
