"""The target's weights for the predictor: tensors by their HF names, one at a time."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from codec.errors import UserError
from pipeline.lora import Adapter
from pipeline.model_source import (
    RUN_DTYPES,
    ModelSource,
    hf_call,
    load_config,
    localise,
    location,
    resolve_cache_format,
    run_format,
    weight_files,
)


class SafetensorsWeights(Mapping[str, Tensor]):
    """Tensors of one or several safetensors files; a tensor is read when it is asked for and not kept.

    Floating-point tensors come in `dtype`, the one that the target runs in.
    """

    def __init__(self, source: ModelSource, dtype: torch.dtype) -> None:
        """Reads the headers of all files. Raises UserError when one of them is not readable."""
        from safetensors import safe_open

        self._source, self._dtype = source, dtype
        self._place: dict[str, tuple[Any, str]] = {}
        for path in weight_files(source):
            file = hf_call(source, lambda path=path: safe_open(path, framework="pt"))  # type: ignore[misc]
            for name in file.keys():  # type: ignore[no-untyped-call]  # noqa: SIM118
                self._place[_hf_name(name)] = (file, name)

    def __getitem__(self, name: str) -> Tensor:
        file, stored = self._place[name]
        tensor: Tensor = hf_call(self._source, lambda: file.get_tensor(stored))
        return tensor.to(self._dtype) if tensor.is_floating_point() else tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._place)

    def __len__(self) -> int:
        return len(self._place)


def _hf_name(name: str) -> str:
    """Checkpoints of a bare base model leave out the prefix; everything else keeps its name."""
    bare = name.partition(".")[0] in ("embed_tokens", "layers", "norm")
    return f"model.{name}" if bare else name


def load_weights(source: ModelSource, cache_format: str | None = None) -> tuple[dict[str, Any], Mapping[str, Tensor]]:
    """The config dict and the tensors of a predictor, under names like `model.layers.0.mlp.up_proj.weight`.

    Safetensors are read a tensor at a time; a GGUF file, or a model with an adapter, is loaded as a whole. Floating-point tensors
    come in the dtype in which the target runs for `cache_format`. Raises UserError, also for checkpoints with packed weights.
    """
    source = localise(source)
    dtype = RUN_DTYPES[run_format(source, resolve_cache_format(source, cache_format))]
    config = load_config(source)
    if source.kind == "gguf":
        return config, _merged_weights(source, dtype)
    if source.lora:
        return config, _merged_weights(source, dtype)
    if config.get("quantization_config"):
        raise UserError(f"the model {source.path!r} has quantised weights; a predictor is built from plain ones only")
    return config, SafetensorsWeights(source, dtype)


def _merged_weights(source: ModelSource, dtype: torch.dtype) -> dict[str, Tensor]:
    return {name: tensor.detach() for name, tensor in load_model(source, dtype).state_dict().items()}


def load_model(source: ModelSource, dtype: torch.dtype, device_map: str | dict[str, Any] | None = None) -> Any:
    """The transformers causal LM with dense weights in `dtype`.

    Raises UserError when it cannot be loaded or when a weight is missing: transformers would make one up at random.
    """
    from transformers import AutoModelForCausalLM, GgufConfig

    args, keywords = location(source)
    keywords.update(dtype=dtype, output_loading_info=True)
    if source.kind == "gguf":
        keywords["quantization_config"] = GgufConfig(dequantize=True)
    else:
        keywords["use_safetensors"] = True
    if device_map is not None:
        keywords["device_map"] = device_map
    model, info = hf_call(source, lambda: AutoModelForCausalLM.from_pretrained(*args, **keywords))
    # Mismatched entries are tuples that begin with the name.
    absent = [*info["missing_keys"], *(entry[0] for entry in info["mismatched_keys"])]
    if absent:
        more = f" and {len(absent) - 1} more" if len(absent) > 1 else ""
        raise UserError(f"the model {source.path!r} lacks the weight {min(absent)!r}{more}, or it has another shape")
    if source.lora:
        Adapter.open(source.lora).merge(model)
    return model.eval()
