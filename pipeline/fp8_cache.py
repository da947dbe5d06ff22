"""An FP8 cache in a transformers model: K and V are quantised as they come, and attention reads what the stored values stand for.

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
    """

    def __init__(self, scales: CacheScales, layer: int, fmt: NumberFormat, dtype: torch.dtype) -> None:
        """`dtype`: the run dtype."""
        super().__init__()
        self._scales, self._layer, self._format, self._dtype = scales, layer, fmt, dtype

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> KV:
        """Quantise new K and V, [1, kv_heads, tokens, head_dim] in the run dtype, and return all that the cache stands for."""
        if key_states.dtype != self._dtype or value_states.dtype != self._dtype:
            raise UserError(f"the model computes K and V in {key_states.dtype} where {self._dtype} was asked for")
        k, v = (
            self._scales.quantise(t[0], self._layer, side, self._format)
            for side, t in enumerate((key_states, value_states))
        )
        self.append((k, v))
        return self.keys, self.values

    def append(self, stored: KV) -> None:
        """Add tokens by their stored values: K and V, FP8 [kv_heads, tokens, head_dim], on the layer's device."""
        meant = (
            self._scales.dequantise(t, self._layer, side, self._dtype).unsqueeze(0) for side, t in enumerate(stored)
        )
        super().update(*meant)
