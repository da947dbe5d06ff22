"""An FP8 cache in a transformers model: K and V are quantised as they are stored, and attention reads what was stored.

As in an engine with such a cache, also the tokens of the current pass are read back from it. Transformers is imported with
this module, so import it where a model is loaded anyway.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicLayer

from codec.errors import UserError
from codec.formats import NumberFormat
from codec.scales import CacheScales

KV = tuple[Tensor, Tensor]


class QuantisedLayer(DynamicLayer):  # type: ignore[misc]  # transformers has no types
    """One layer's cache. `keys` and `values` hold what the stored values stand for, in the run dtype: a function of the stored
    bits alone, so that a run which continues from stored bits computes what one without a break does.

    The stored bits are kept beside them, one byte a value: quantising again would not give back a NaN's sign, nor what
    the run dtype cannot hold.
    """

    def __init__(self, scales: CacheScales, layer: int, fmt: NumberFormat, dtype: torch.dtype) -> None:
        """`dtype`: the run dtype."""
        super().__init__()
        self._scales, self._layer, self._format, self._dtype = scales, layer, fmt, dtype
        self._stored: KV | None = None  # uint8 [1, kv_heads, tokens, head_dim] each

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> KV:
        """Quantise new K and V, [1, kv_heads, tokens, head_dim] in the run dtype, and return all that the cache stands for."""
        if key_states.dtype != self._dtype or value_states.dtype != self._dtype:
            raise UserError(f"the model computes K and V in {key_states.dtype} where {self._dtype} was asked for")
        new = key_states[0], value_states[0]
        self.append([self._scales.quantise(t, self._layer, side, self._format) for side, t in enumerate(new)])
        return self.keys, self.values

    def append(self, stored: list[Tensor] | KV) -> None:
        """Add tokens by their stored values: K and V, FP8 [kv_heads, tokens, head_dim], on the layer's device."""
        bits = [t.view(torch.uint8).unsqueeze(0) for t in stored]
        new = [self._meaning(t, side) for side, t in enumerate(stored)]
        if self._stored is None:
            self.lazy_initialization(*new)
            self._stored = bits[0].clone(), bits[1].clone()  # `overwrite` must not write into the caller's
            self.keys, self.values = new
        else:
            old = self._stored
            self._stored = torch.cat([old[0], bits[0]], dim=-2), torch.cat([old[1], bits[1]], dim=-2)
            super().update(*new)

    def overwrite(self, first: int, stored: KV) -> None:
        """Put other stored values, as in `append`, in place of the tokens from `first` on."""
        assert self._stored is not None
        for side, (bits, meaning) in enumerate(zip(self._stored, (self.keys, self.values), strict=True)):
            given = stored[side].to(bits.device)
            part = slice(first, first + given.shape[1])
            bits[0, :, part] = given.view(torch.uint8)
            meaning[:, :, part] = self._meaning(given, side)

    def read(self, first: int, tokens: int) -> KV:
        """Copies of the stored values of some tokens: FP8 [kv_heads, tokens, head_dim], contiguous."""
        assert self._stored is not None
        key, value = (
            bits[0, :, first : first + tokens].clone(memory_format=torch.contiguous_format) for bits in self._stored
        )
        return key.view(self._format.dtype), value.view(self._format.dtype)

    def reset(self) -> None:
        """Forget all tokens."""
        super().reset()
        self._stored = None

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last tokens; their number is negative, as in transformers."""
        super().crop(tokens_to_remove)
        if tokens_to_remove and self._stored is not None:
            key, value = (bits[..., :tokens_to_remove, :] for bits in self._stored)
            self._stored = key, value

    def _meaning(self, stored: Tensor, side: int) -> Tensor:
        return self._scales.dequantise(stored, self._layer, side, self._dtype).unsqueeze(0)
