"""What every predictor is to the code around it: bytes with a fingerprint, and passes that guess a cache layer by layer."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Protocol

import safetensors.torch
import torch
from torch import Tensor

from codec.errors import PredictorError
from codec.keys import content_id
from codec.predictor.kept import Stored
from codec.predictor.memory import PredictorState


class Shape(Protocol):
    """What a predictor's configuration says of the cache; `hidden` is 0 where there is no hidden state to correct."""

    @property
    def kind(self) -> str:
        """The rung."""

    @property
    def layers(self) -> int:
        """Layers of the cache."""

    @property
    def hidden(self) -> int:
        """Dims of the predictor's hidden state."""

    @property
    def kv_heads(self) -> int:
        """Heads of K, and of V."""

    @property
    def head_dim(self) -> int:
        """Dims of a head of K, and of V."""

    @property
    def rope_dim(self) -> int:
        """Dims of a head of K that rotate: pairs (i, i + rope_dim / 2)."""

    @property
    def vocab(self) -> int:
        """Token ids are below it."""

    def to_json(self) -> str:
        """Canonical text."""


class Run(Protocol):
    """One pass over the new tokens of a batch, a layer at a time: guess(0), advance(0, kv), guess(1), …, commit().

    h: hidden state entering the layer, float32 [R, hidden], R tokens of all sequences; rms: its RMS, float32 [R, 1].
    """

    h: Tensor
    rms: Tensor

    def guess(self, layer: int) -> list[tuple[Tensor, Tensor]]:
        """Guessed K and V of a layer, float32 [J, T, D] each, for every sequence."""

    def advance(
        self, layer: int, kv: Sequence[tuple[Tensor, Tensor]], corrections: Sequence[Tensor] | None = None,
        stored: Sequence[Stored | None] | None = None,
    ) -> None:  # fmt: skip
        """Go on to the next layer, from these K and V (finite float32 [J, T, D]) and corrections of the state [T, hidden].

        stored: the cache that these K and V come from, where the state may hold it instead of what it makes of them.
        """

    def turns(self) -> list[tuple[Tensor, Tensor]]:
        """cos and sin of every sequence's new tokens, float32 [T, rope_dim / 2] each: what un-rotates K."""

    def commit(self) -> None:
        """Make the new tokens part of the states."""


class Predictor(ABC):
    """A predictor on one device, and the tensors that it is stored as."""

    history = 0  # earlier layers that the joint models look back to

    def __init__(self, config: Shape, tensors: dict[str, Tensor], device: torch.device | str = "cpu") -> None:
        self.config = config
        self.device = torch.device(device)
        self._stored = tensors
        self._fingerprint: bytes | None = None

    def to_bytes(self) -> bytes:
        """The predictor as stored: safetensors; the same tensors always give the same bytes."""
        data: bytes = safetensors.torch.save(self._stored, {"predictor": self.config.to_json()})
        return data

    @property
    def fingerprint(self) -> bytes:
        """BLAKE2b-256 of the stored bytes."""
        if self._fingerprint is None:
            self._fingerprint = content_id(self.to_bytes())
        return self._fingerprint

    @staticmethod
    def from_bytes(data: bytes, device: torch.device | str = "cpu") -> Predictor:
        """Parse a stored predictor of any kind. Raises PredictorError when it is malformed."""
        from codec.predictor import config, decoder, modelfree  # two of them build on this module

        try:
            tensors = safetensors.torch.load(data)  # checks lengths and offsets before it touches a tensor
            length = int.from_bytes(data[:8], "little")
            text = json.loads(data[8 : 8 + length])["__metadata__"]["predictor"]
            stated = json.loads(text)
            kind = stated.get("kind") if isinstance(stated, dict) else None
        except Exception as error:  # a hostile file can fail in many ways inside the parsers
            raise PredictorError(
                f"The stored predictor cannot be read ({type(error).__name__}: {error}); it is corrupt, restore it or recompute the store."
            ) from None
        predictor: Predictor
        if kind in modelfree.MODEL_FREE:
            predictor = modelfree.ModelFree(modelfree.ModelFreeConfig.from_json(text), tensors, device)
        else:
            predictor = decoder.DecoderPredictor(config.PredictorConfig.from_json(text), tensors, device)
        predictor._fingerprint = content_id(data)
        return predictor

    @property
    @abstractmethod
    def context_length(self) -> int:
        """Tokens a prompt may have."""

    def new_state(self, forgets: bool = False) -> PredictorState:
        """The state before the first token. forgets: it will not be cut, and lets go what windows leave behind."""
        return PredictorState(forgets)

    @abstractmethod
    def run(
        self,
        states: Sequence[PredictorState],
        token_ids: Sequence[Tensor],
        *,
        after: Sequence[int | None] | None = None,
        keep: bool = True,
    ) -> Run:
        """Begin a pass over new tokens (1-D int64 each) of several sequences. Raises UserError for a prompt that is too long.

        after: which sequence before it in the batch a sequence follows, so that several share it; its own state must then be empty.
        keep: False where the pass will not be committed, and nothing of it needs to be remembered.
        """

    def advance(self, state: PredictorState, token_ids: Tensor) -> None:
        """Take tokens, which may be none, in without coding anything."""
        if not len(token_ids):
            return
        run = self.run([state], [token_ids])
        for layer in range(self.config.layers - 1):
            run.advance(layer, run.guess(layer))
        run.commit()


def begins(held: Sequence[int], lengths: Sequence[int], after: Sequence[int | None]) -> list[int]:
    """The place of each sequence's first new token. held: tokens of its state; lengths: its new ones; after: see Predictor.run."""
    out: list[int] = []
    for number, (tokens, before) in enumerate(zip(held, after, strict=True)):
        if before is None:
            out.append(tokens)
        elif 0 <= before < number and not tokens:
            out.append(out[before] + lengths[before])
        else:
            raise ValueError(f"Sequence {number} of {tokens} tokens cannot follow sequence {before} of its batch.")
    return out
