"""LoRA adapters: a folder with adapter_config.json and adapter_model.safetensors, merged into the target's weights.

For each adapted linear layer W becomes W + s B A, summed in float32, with s = lora_alpha / r (or over the root of r, use_rslora). An
adapter that says or holds anything else is refused: a part that is left out would make another model's cache.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from codec.errors import UserError

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
MAX_CONFIG = 1 << 20
_NAME = re.compile(r"(?:base_model\.model\.)?([\w.]+)\.lora_([AB])(?:\.default)?\.weight")
# What an adapter may say besides, as long as it says nothing by it.
_EMPTY = (
    "modules_to_save", "rank_pattern", "alpha_pattern", "use_dora", "fan_in_fan_out", "lora_bias", "layer_replication",
    "corda_config", "trainable_token_indices", "target_parameters", "megatron_config",
)  # fmt: skip
# What the merged weights depend on.
BITS = ("peft_type", "lora_alpha", "r", "use_rslora", "bias", *_EMPTY)


@dataclass(frozen=True)
class Adapter:
    """An adapter that was found and can be merged."""

    folder: Path
    alpha: float
    rslora: bool

    @staticmethod
    def open(folder: str) -> Adapter:
        """Read its configuration. Raises UserError for what is no adapter, or one that cannot be merged."""
        path = Path(folder)
        for name in (CONFIG, WEIGHTS):
            if not (path / name).is_file():
                raise UserError(f"the LoRA adapter {folder!r} has no {name}; pass a folder with {CONFIG} and {WEIGHTS}")
        config = _config(path)
        if config.get("peft_type") != "LORA" or config.get("bias", "none") != "none":
            raise UserError(f"the adapter {folder!r} is no plain LoRA adapter; merge it into its model first")
        for name in _EMPTY:
            if config.get(name):
                raise UserError(
                    f"the LoRA adapter {folder!r} has {name}, which is not supported; merge it into its model first"
                )
        alpha = config.get("lora_alpha")
        if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not math.isfinite(alpha):
            raise UserError(f"the LoRA adapter {folder!r} has no lora_alpha, or one that is no number")
        return Adapter(path, float(alpha), bool(config.get("use_rslora")))

    def canonical(self) -> bytes:
        """What of its configuration the merged weights depend on."""
        config = _config(self.folder)
        return json.dumps({name: config[name] for name in BITS if config.get(name)}, sort_keys=True).encode()

    @torch.no_grad()
    def merge(self, model: Any) -> None:
        """Add it to the weights of a transformers model. Raises UserError where the two do not belong together."""
        pairs = dict(self._pairs())
        if not pairs:
            raise UserError(f"the LoRA adapter {str(self.folder)!r} holds no weights")
        modules = dict(model.named_modules())
        for name, (a, b) in sorted(pairs.items()):
            module = modules.get(name)
            weight = getattr(module, "weight", None)
            if not isinstance(module, torch.nn.Linear) or not isinstance(weight, Tensor):
                raise UserError(
                    f"the LoRA adapter {str(self.folder)!r} adapts {name!r}, which is no linear layer of the model"
                )
            if (
                a.dim() != 2
                or b.dim() != 2
                or a.shape[0] != b.shape[1]
                or (b.shape[0], a.shape[1]) != tuple(weight.shape)
            ):
                raise UserError(
                    f"the LoRA adapter {str(self.folder)!r} has {list(b.shape)} x {list(a.shape)} for {name!r}, whose weight is "
                    f"{list(weight.shape)}: it was made for another model"
                )
            rank = a.shape[0]
            scale = self.alpha / (math.sqrt(rank) if self.rslora else rank)
            change = (b.to(weight.device, torch.float32) @ a.to(weight.device, torch.float32)) * scale
            weight.copy_((weight.float() + change).to(weight.dtype))

    def _pairs(self) -> Iterator[tuple[str, tuple[Tensor, Tensor]]]:
        """(module, (A [r, in], B [out, r])) of every layer that is adapted."""
        from safetensors import safe_open

        place = str(self.folder / WEIGHTS)
        try:
            with safe_open(place, framework="pt") as file:
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except Exception as error:  # safetensors has errors of its own
            raise UserError(f"the LoRA weights {place!r} cannot be read ({str(error)[:200]})") from error
        halves: dict[str, dict[str, Tensor]] = {}
        for name, tensor in tensors.items():
            match = _NAME.fullmatch(name)
            if match is None or not tensor.is_floating_point():
                raise UserError(
                    f"the LoRA weights {place!r} hold {name!r:.200}, which is not supported; merge it into its model first"
                )
            halves.setdefault(match[1], {})[match[2]] = tensor
        for module, pair in halves.items():
            if pair.keys() != {"A", "B"}:
                raise UserError(f"the LoRA weights {place!r} hold only half of {module!r}")
            yield module, (pair["A"], pair["B"])


def _config(folder: Path) -> dict[str, Any]:
    place = folder / CONFIG
    try:
        if place.stat().st_size > MAX_CONFIG:
            raise ValueError("it is too long")
        found = json.loads(place.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"the LoRA configuration {str(place)!r} cannot be read ({str(error)[:200]})") from error
    if not isinstance(found, dict):
        raise UserError(f"the LoRA configuration {str(place)!r} is no JSON object")
    return found
