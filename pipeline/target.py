"""The target: the model whose KV cache is stored, run by transformers' own code.

What its cache holds is the truth, whatever arithmetic made it. Only models whose whole state is plain K and V of
every token are taken: sliding windows, latent attention and recurrent layers keep other state and are refused.
"""

import copy
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from codec.errors import DataError, UserError
from codec.formats import number_format
from codec.scales import CacheScales
from pipeline.model_source import (
    RUN_DTYPES,
    ModelSource,
    config_dict,
    hf_config,
    load_config,
    load_tokenizer,
    localise,
    resolve_cache_format,
    resolve_model,
    run_format,
)
from pipeline.model_weights import load_model, load_weights

__all__ = [
    "ModelSource", "Target", "load_config", "load_target", "load_tokenizer", "load_weights",
    "resolve_cache_format", "resolve_model", "run_format",
]  # fmt: skip

KV = tuple[Tensor, Tensor]


class Target:
    """A loaded model. Its caches hold one prompt each; all work is on batch 1 and without gradients."""

    def __init__(self, model: Any, source: ModelSource, cache_format: str, scales: CacheScales | None = None) -> None:
        """`model`: a transformers causal LM in eval mode; its output head is dropped, K and V do not need it.

        scales: of an FP8 cache, None of any other. DataError where they are not for this model.
        """
        self._model = model.base_model
        self._prefix = model.base_model_prefix
        self._hf_config = model.config.get_text_config(decoder=True)
        # The keyword was past_key_values before transformers 5.2x; an unknown keyword would be ignored in silence.
        names = inspect.signature(self._model.forward).parameters
        self._cache_argument = "cache" if "cache" in names else "past_key_values"
        self.source = source
        self._set_format(cache_format, scales)
        self.dtype: torch.dtype = RUN_DTYPES[run_format(source, cache_format)]  # what the model is computed in
        self.config = config_dict(self._hf_config)
        self.vocab_size = int(self._hf_config.vocab_size)
        self.context_length = context_length(self.config)

    def _set_format(self, cache_format: str, scales: CacheScales | None) -> None:
        self.format = number_format(cache_format)  # that of what prefill, read and replace give and take
        if self.format.coarse != (scales is not None):
            raise ValueError(f"a cache in {cache_format} {'lacks its' if self.format.coarse else 'has no'} scales")
        if scales is not None and (found := scales.values.shape) != (wanted := kv_shape(config_dict(self._hf_config))):
            raise DataError(
                f"the cache's scales are for {list(found)} layers, K and V, and heads, not for {list(wanted)}"
            )
        self.cache_format, self.scales = cache_format, scales

    def with_cache(self, cache_format: str, scales: CacheScales | None) -> "Target":
        """The same loaded model with another cache, whose format must leave the model in the same dtype."""
        if RUN_DTYPES[run_format(self.source, cache_format)] != self.dtype:
            raise ValueError(f"a model that runs in {self.dtype} has no cache in {cache_format}")
        other = copy.copy(self)
        other._set_format(cache_format, scales)
        return other

    def weights(self) -> Mapping[str, Tensor]:
        """The loaded weights (no copy) under the names of an HF checkpoint, without the output head."""
        return {f"{self._prefix}.{name}": tensor for name, tensor in self._model.state_dict().items()}

    def new_cache(self) -> Any:
        """An empty transformers DynamicCache for one prompt, of layers as in pipeline.piece_cache."""
        from pipeline.piece_cache import PieceLayer

        cache = _new_cache(self._hf_config, self.source)
        layers = range(len(cache.layers))
        cache.layers = [PieceLayer(self.dtype, i, self.format, self.scales) for i in layers]
        return cache

    @staticmethod
    def length(cache: Any) -> int:
        """How many tokens the cache holds."""
        return int(cache.get_seq_length())

    @torch.no_grad()
    def prefill(self, cache: Any, token_ids: Tensor) -> list[KV]:
        """Run the model over the next tokens of the cache's prompt, in one forward pass.

        token_ids: 1-D int64. Returns K and V (after RoPE) of these tokens only, a pair a layer, each contiguous
        [kv_heads, tokens, head_dim] in the cache's format on the layer's device. They are the cache's own and never change: do not
        write to them. How a prompt is split into calls changes last bits: callers record it. Raises UserError for ids out of the
        vocabulary or past the context length, and where the model computes K and V in another dtype than was asked for.
        """
        self._forward(cache, token_ids)
        return self.read(cache, self.length(cache) - len(token_ids), len(token_ids))

    @torch.no_grad()
    def prefill_states(self, cache: Any, token_ids: Tensor) -> tuple[list[KV], list[Tensor]]:
        """As `prefill`, and the hidden state entering every layer: [tokens, hidden] in the run dtype, on the CPU."""
        out = self._forward(cache, token_ids, output_hidden_states=True)
        states = [state[0].cpu() for state in out.hidden_states[: len(cache.layers)]]
        return self.read(cache, self.length(cache) - len(token_ids), len(token_ids)), states

    def read(self, cache: Any, first_token: int, tokens: int) -> list[KV]:
        """K and V of tokens first_token … first_token + tokens, as `prefill` returns them."""
        if first_token < 0 or tokens < 1 or first_token + tokens > self.length(cache):
            raise ValueError(f"tokens {first_token}+{tokens} are not in a cache of {self.length(cache)}")
        return [layer.read(first_token, tokens) for layer in cache.layers]

    @torch.no_grad()
    def truncate(self, cache: Any, length: int) -> None:
        """Forget all but the first `length` tokens. ValueError if the cache holds fewer."""
        have = self.length(cache)
        if not 0 <= length <= have:
            raise ValueError(f"cannot cut a cache of {have} tokens to {length}")
        if length == 0:
            cache.reset()
        elif length < have:
            cache.crop(length - have)  # transformers counts the tokens to remove, as a negative number

    @torch.no_grad()
    def replace(self, cache: Any, first_token: int, layers: Sequence[KV]) -> None:
        """Put stored bits in place of what the model computed, so that everything after continues from them.

        layers: (K, V) a layer, [kv_heads, tokens, head_dim] in the cache's format, on any device. Tokens from first_token on
        are overwritten; where they go past the cache's end they are appended, so a stored chunk needs no forward pass.
        Later tokens that the cache already holds stay: truncate first if they are to follow from the new bits.
        ValueError for other shapes, another dtype or a gap.
        """
        have = self.length(cache)
        _check_layers(layers, len(cache.layers), self.format.dtype)
        if not 0 <= first_token <= have:
            raise ValueError(f"cannot put tokens at {first_token} into a cache of {have}")
        for index, (layer, pair) in enumerate(zip(cache.layers, layers, strict=True)):
            device = layer.device if have else self._layer_device(index)
            layer.put(first_token, pair, device)

    def _forward(self, cache: Any, token_ids: Tensor, **more: Any) -> Any:
        from pipeline.piece_cache import gather

        self._check_ids(token_ids, self.length(cache))
        device = self._model.get_input_embeddings().weight.device
        ids = token_ids.to(device).unsqueeze(0)
        out = self._model(input_ids=ids, use_cache=True, **{self._cache_argument: cache}, **more)
        gather(cache.layers)
        return out

    def _check_ids(self, ids: Tensor, have: int) -> None:
        if ids.dim() != 1 or ids.dtype != torch.int64 or len(ids) == 0:
            raise ValueError(f"token ids must be a 1-D int64 tensor, not empty, not {ids.dtype} {list(ids.shape)}")
        low, high = int(ids.min()), int(ids.max())
        if low < 0 or high >= self.vocab_size:
            raise UserError(f"token id {low if low < 0 else high} is not in the vocabulary of {self.vocab_size} tokens")
        if have + len(ids) > self.context_length:
            raise UserError(f"{have + len(ids)} tokens exceed the model's context length of {self.context_length}")

    def _layer_device(self, index: int) -> torch.device:
        """Where the weights of one layer live: its cache must live there too."""
        layers = getattr(self._model, "layers", None)
        module = layers[index] if layers is not None else self._model
        return torch.device(next(module.parameters()).device)


def load_target(
    source: ModelSource,
    cache_format: str | None = None,
    device: str | torch.device = "cpu",
    device_map: str | dict[str, Any] | None = None,
    scales: CacheScales | None = None,
) -> Target:
    """Load the model with a cache in `cache_format` (None or "auto": its own dtype), which it is computed in unless it is FP8.

    scales: of an FP8 cache.
    device: "cpu", "cuda", "cuda:1"; device_map ("auto" or a dict of transformers) spreads it over several GPUs instead.
    Raises UserError when it cannot be loaded, keeps other state than plain K and V, or the device is not there.
    """
    source = localise(source)
    cache_format = resolve_cache_format(source, cache_format)
    check_cache(hf_config(source), source)
    check_device(device)
    model = load_model(source, RUN_DTYPES[run_format(source, cache_format)], device_map)
    if device_map is None:
        model = model.to(device)
    return Target(model, source, cache_format, scales)


def check_cache(config: Any, source: ModelSource) -> None:
    """Raise UserError unless every layer of this HF config keeps plain K and V of all tokens and nothing else."""
    if getattr(config, "is_encoder_decoder", False):
        raise UserError(f"the model {source.name!r} is an encoder-decoder; only decoders are supported")
    if getattr(config, "kv_lora_rank", None):
        raise UserError(f"the model {source.name!r} uses latent attention (MLA), whose cache is not supported yet")
    _new_cache(config, source)


def check_device(device: str | torch.device) -> None:
    """Raise UserError if this process cannot use the device."""
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise UserError(f"the device {str(device)!r} is not available here; pass cpu, or run where it is") from error


def kv_shape(config: Mapping[str, Any]) -> tuple[int, int, int]:
    """(layers, 2 for K and V, kv_heads) from an HF config: the shape of an FP8 cache's scales."""
    heads = config.get("num_key_value_heads") or config["num_attention_heads"]
    return int(config["num_hidden_layers"]), 2, int(heads)


def context_length(config: Mapping[str, Any]) -> int:
    """How many tokens the model was made for (its max_position_embeddings; no limit when it names none)."""
    for name in ("max_position_embeddings", "n_positions", "max_seq_len"):
        if isinstance(config.get(name), int):
            return int(config[name])
    return 1 << 62


def _new_cache(config: Any, source: ModelSource) -> Any:
    from transformers import DynamicCache
    from transformers.cache_utils import DynamicLayer

    cache = DynamicCache(config=config)
    other = sorted({type(layer).__name__ for layer in cache.layers if type(layer) is not DynamicLayer})
    if other == ["DynamicSlidingWindowLayer"]:
        raise UserError(
            f"the model {source.name!r} attends within a sliding window of {config.sliding_window} tokens and forgets older "
            "K and V, which is not supported yet; every layer must have full attention"
        )
    if other:
        raise UserError(
            f"the model {source.name!r} keeps state that is not supported yet ({', '.join(other)}); "
            "every layer must have full attention with plain K and V"
        )
    return cache


def _check_layers(layers: Sequence[KV], count: int, dtype: torch.dtype) -> None:
    if len(layers) != count:
        raise ValueError(f"{len(layers)} layers given for a cache of {count}")
    tokens = layers[0][0].shape[1] if layers[0][0].dim() == 3 else 0
    for index, pair in enumerate(layers):
        for tensor in pair:
            if tensor.dim() != 3 or tensor.shape[1] != tokens or tokens == 0 or tensor.dtype != dtype:
                got = f"{tensor.dtype} {list(tensor.shape)}"
                raise ValueError(f"layer {index}: expected {dtype} [kv_heads, {tokens}, head_dim], got {got}")
