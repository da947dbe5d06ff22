"""A restored prefix as a transformers cache: the same object, bit for bit, that the run which was stored went on with."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from codec.errors import UserError
from codec.formats import number_format
from pipeline.model_source import config_dict
from pipeline.target import kv_shape

if TYPE_CHECKING:
    from pipeline.restoration.prefix import Pair
    from pipeline.restoration.restorer import Restoration


@torch.no_grad()
def dynamic_cache(restored: Restoration, model: Any, leave: int = 1) -> Any:
    """A DynamicCache of `model` (a transformers causal LM or its base) that holds the restored prefix; empty where there is none.

    An FP8 cache is made of layers that read as the target's did (pipeline.fp8_cache): what is read is the stored value times its scale,
    and what is added is quantised likewise. leave: see Restoration.as_dynamic_cache.

    Raises:
        UserError: the model has another shape or dtype than the cache, or only a part of the cache was asked for.
    """
    from transformers import DynamicCache

    config = model.config.get_text_config(decoder=True)
    cache = DynamicCache(config=config)
    if not restored.tokens:
        return cache
    _check(restored, model, config)
    layers = restored.load()
    tokens = min(restored.tokens, max(0, restored.asked - leave))
    if not layers or not tokens:
        return DynamicCache(config=config)
    if restored.scales is not None:
        _make_fp8(cache, restored, model.dtype)
    modules = getattr(model.base_model, "layers", None)
    for index, pair in enumerate(layers):
        owner = model if modules is None else modules[index]
        device = next(owner.parameters()).device
        _fill(cache, index, (pair[0][:, :tokens].to(device), pair[1][:, :tokens].to(device)))
    return cache


def _make_fp8(cache: Any, restored: Restoration, dtype: torch.dtype) -> None:
    from pipeline.fp8_cache import QuantisedLayer

    scales, fmt = restored.scales, number_format(restored.cache_format)
    assert scales is not None
    cache.layers = [QuantisedLayer(scales, index, fmt, dtype) for index in range(len(scales.values))]


def _fill(cache: Any, index: int, pair: Pair) -> None:
    append = getattr(cache.layers[index], "append", None)
    if append is not None:
        append(pair)
    else:
        cache.update(pair[0].unsqueeze(0), pair[1].unsqueeze(0), index)


def _check(restored: Restoration, model: Any, config: Any) -> None:
    shape, fmt = restored.decoder.predictor.config, number_format(restored.cache_format)
    if restored.span.layers != (0, shape.layers) or restored.span.heads != (0, shape.kv_heads):
        raise UserError("a transformers cache needs all layers and heads; restore without a range of them")
    layers, _, heads = kv_shape(config_dict(config))
    if (layers, heads) != (shape.layers, shape.kv_heads):
        raise UserError(
            f"the model has {layers} layers of {heads} KV heads and the stored cache {shape.layers} of {shape.kv_heads}"
        )
    if not fmt.coarse and model.dtype != fmt.dtype:
        raise UserError(
            f"the model runs in {model.dtype} and the stored cache is in {fmt.dtype}; load it in that dtype"
        )
