"""The target's own cache, in the pieces in which its tokens came: what is stored of each layer, and nothing else.

Attention gets a layer put together, in the dtype that the model computes in, and lets go of that when the layer is done. A piece is
never written to, so whoever is given one may hold it for as long as he likes. Transformers is imported with this module, so import it
where a model is loaded anyway.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicLayer

from codec.errors import UserError
from codec.formats import NumberFormat, bits
from codec.scales import CacheScales

KV = tuple[Tensor, Tensor]


class PieceLayer(DynamicLayer):  # type: ignore[misc]  # transformers has no types
    """One layer's cache. Pieces are K and V as stored, [kv_heads, tokens, head_dim] each."""

    def __init__(self, dtype: torch.dtype, layer: int, fmt: NumberFormat, scales: CacheScales | None) -> None:
        """dtype: what the model computes in; scales: of an FP8 cache, whose values are quantised as they come."""
        super().__init__()
        self._dtype, self._layer, self._format, self._scales = dtype, layer, fmt, scales
        self.pieces: list[KV] = []

    # ------------------------------------------------------------ what transformers calls
    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> KV:
        """Store new K and V, [1, kv_heads, tokens, head_dim], and return all that the cache stands for.

        As in an engine with an FP8 cache, also the tokens of the current pass are read back from it.
        """
        if key_states.dtype != self._dtype or value_states.dtype != self._dtype:
            raise UserError(f"the model computes K and V in {key_states.dtype} where {self._dtype} was asked for")
        if len(key_states) != 1:
            raise ValueError(f"a batch of {len(key_states)} prompts for a cache of one")
        self.is_initialized, self.device = True, key_states.device
        k, v = (self._stored(t[0], side) for side, t in enumerate((key_states, value_states)))
        self.pieces.append((k, v))
        return self.whole()

    def whole(self) -> KV:
        """What all that is stored stands for: [1, kv_heads, tokens, head_dim] in the dtype that the model computes in."""
        k, v = (
            torch.cat([self._meaning(piece[side], side) for piece in self.pieces], 1).unsqueeze(0) for side in (0, 1)
        )
        return k, v

    def get_seq_length(self) -> int:
        """Tokens that it holds."""
        return sum(k.shape[1] for k, _ in self.pieces)

    def reset(self) -> None:
        """Forget all tokens."""
        super().reset()
        self.pieces = []

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last tokens; their number is negative, as in transformers."""
        if tokens_to_remove > 0:
            raise ValueError(f"the number of tokens to remove is negative, not {tokens_to_remove}")
        if tokens_to_remove:
            self.pieces = self._cut(0, max(0, self.get_seq_length() + tokens_to_remove))

    # ------------------------------------------------------------ what is stored
    def read(self, first: int, tokens: int) -> KV:
        """The stored K and V of some tokens, contiguous. They must not be written to: they may be the cache's own."""
        parts = self._cut(first, first + tokens)
        return parts[0] if len(parts) == 1 else (_joined([k for k, _ in parts]), _joined([v for _, v in parts]))

    def put(self, first: int, stored: KV, device: torch.device) -> None:
        """Copies on a device of stored K and V in place of tokens from `first` on; where they go past the end they are appended."""
        k, v = (t.to(device, copy=True, memory_format=torch.contiguous_format) for t in stored)
        behind = self._cut(first + k.shape[1], self.get_seq_length())
        self.pieces = [*self._cut(0, first), (k, v), *behind]
        self.is_initialized, self.device = True, device

    def _cut(self, begin: int, end: int) -> list[KV]:
        """Tokens begin .. end - 1: whole pieces as they are, of others a copy, so that the rest of them is let go."""
        out, at = list[KV](), 0
        for k, v in self.pieces:
            a, b = max(begin - at, 0), min(end - at, k.shape[1])
            if a < b:
                whole = b - a == k.shape[1]
                out.append((k, v) if whole else (_copied(k[:, a:b]), _copied(v[:, a:b])))
            at += k.shape[1]
        return out

    def _stored(self, values: Tensor, side: int) -> Tensor:
        if self._scales is None:
            return values.detach()
        return self._scales.quantise(values, self._layer, side, self._format)

    def _meaning(self, stored: Tensor, side: int) -> Tensor:
        if self._scales is None:
            return stored
        return self._scales.dequantise(stored, self._layer, side, self._dtype)


def gather(layers: Sequence[PieceLayer]) -> None:
    """Put the last pieces of layers, of as many tokens each, side by side in one block a device.

    A piece is made among the temporary arrays of its pass, some of which it may be a part of; and a few hundred small ones there would
    keep the allocator from giving their room to the next pass.
    """
    by_device = defaultdict[torch.device, list[PieceLayer]](list)
    for layer in layers:
        by_device[layer.pieces[-1][0].device].append(layer)
    for some in by_device.values():
        like = some[0].pieces[-1][0]
        block = torch.empty(len(some), 2, *like.shape, dtype=like.dtype, device=like.device)
        for layer, (k, v) in zip(some, block, strict=True):
            for place, values in zip((k, v), layer.pieces[-1], strict=True):
                bits(place).copy_(bits(values))
            layer.pieces[-1] = (k, v)


def _copied(t: Tensor) -> Tensor:
    return t.clone(memory_format=torch.contiguous_format)


def _joined(parts: Sequence[Tensor]) -> Tensor:
    """Tokens one after the other, by their bits: not every dtype can be joined, and no conversion may touch a NaN payload."""
    return torch.cat([bits(part) for part in parts], 1).view(parts[0].dtype)
