"""LoRA adapters: merged weights, fingerprints, and what is refused."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from codec.errors import UserError
from pipeline.model_source import resolve_model
from pipeline.target import load_target

PREFIX = "base_model.model.model.layers.1"


def write_adapter(
    folder: Path, *, seed: int = 0, tensors: dict[str, torch.Tensor] | None = None, **config: Any
) -> Path:
    """An adapter of rank 2 on q_proj and mlp.up_proj of layer 1 of the tiny model."""
    folder.mkdir(exist_ok=True)
    random = torch.Generator().manual_seed(seed)
    shapes = {"self_attn.q_proj": (64, 64), "mlp.up_proj": (128, 64)}
    if tensors is None:
        tensors = {}
        for name, (out, into) in shapes.items():
            tensors[f"{PREFIX}.{name}.lora_A.weight"] = torch.randn(2, into, generator=random)
            tensors[f"{PREFIX}.{name}.lora_B.weight"] = torch.randn(out, 2, generator=random)
    save_file(tensors, folder / "adapter_model.safetensors")
    plain = {"peft_type": "LORA", "lora_alpha": 4, "r": 2, "bias": "none", "target_modules": ["q_proj", "up_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(plain | config))
    return folder


@pytest.mark.parametrize("rslora", [False, True])
def test_an_adapter_is_added_to_the_weights_that_it_names(tiny_model: Path, tmp_path: Path, rslora: bool) -> None:
    from safetensors.torch import load_file

    adapter = write_adapter(tmp_path / "style", use_rslora=rslora)
    base = load_target(resolve_model(tiny_model)).weights()
    merged = load_target(resolve_model(tiny_model, adapter)).weights()
    halves = load_file(adapter / "adapter_model.safetensors")
    scale = 4 / (math.sqrt(2) if rslora else 2)
    for name, weight in base.items():
        half = f"base_model.model.{name.removesuffix('.weight')}.lora_"
        if f"{half}A.weight" in halves:
            change = (halves[f"{half}B.weight"] @ halves[f"{half}A.weight"]) * scale
            weight = (weight.float() + change).to(torch.bfloat16)
            assert not torch.equal(weight, base[name])
        assert torch.equal(merged[name], weight), name


def test_an_adapter_is_part_of_the_fingerprint_and_the_name(tiny_model: Path, tmp_path: Path) -> None:
    plain = resolve_model(tiny_model).fingerprint()
    adapter = write_adapter(tmp_path / "style")
    source = resolve_model(tiny_model, adapter)
    first = source.fingerprint()
    assert source.name == f"{tiny_model.name}+style" and first != plain
    (tmp_path / "moved").mkdir()
    for file in adapter.iterdir():
        (tmp_path / "moved" / file.name).write_bytes(file.read_bytes())
    assert resolve_model(tiny_model, tmp_path / "moved").fingerprint() == first
    write_adapter(adapter, lora_dropout=0.1)  # says nothing about the merged weights
    assert resolve_model(tiny_model, adapter).fingerprint() == first
    write_adapter(adapter, lora_alpha=8)
    second = resolve_model(tiny_model, adapter).fingerprint()
    write_adapter(adapter, seed=1)
    assert len({plain, first, second, resolve_model(tiny_model, adapter).fingerprint()}) == 4


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"peft_type": "IA3"}, "no plain LoRA adapter"),
        ({"bias": "all"}, "no plain LoRA adapter"),
        ({"use_dora": True}, "has use_dora"),
        ({"modules_to_save": ["lm_head"]}, "has modules_to_save"),
        ({"rank_pattern": {"q_proj": 4}}, "has rank_pattern"),
        ({"lora_alpha": None}, "has no lora_alpha"),
    ],
)
def test_adapters_that_cannot_be_merged(tiny_model: Path, tmp_path: Path, config: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        resolve_model(tiny_model, write_adapter(tmp_path / "a", **config))


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({}, "holds no weights"),
        ({"x.embed.lora_embedding_A": (2, 64)}, "which is not supported"),
        ({f"{PREFIX}.mlp.up_proj.lora_A.weight": (2, 64)}, "only half"),
        (
            {f"{PREFIX}.mlp.up_proj.lora_A.weight": (2, 64), f"{PREFIX}.mlp.up_proj.lora_B.weight": (64, 2)},
            "another model",
        ),
        ({f"{PREFIX}.norm.lora_A.weight": (2, 64), f"{PREFIX}.norm.lora_B.weight": (64, 2)}, "no linear layer"),
    ],
)
def test_weights_that_do_not_fit(
    tiny_model: Path, tmp_path: Path, tensors: dict[str, tuple[int, int]], message: str
) -> None:
    made = {name: torch.zeros(shape) for name, shape in tensors.items()}
    with pytest.raises(UserError, match=message):
        load_target(resolve_model(tiny_model, write_adapter(tmp_path / "a", tensors=made)))


def test_what_is_no_adapter_is_said(tiny_model: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"has no adapter_config\.json"):
        resolve_model(tiny_model, tmp_path)
    adapter = write_adapter(tmp_path / "a")
    (adapter / "adapter_model.safetensors").write_bytes(b"x")
    with pytest.raises(UserError, match="cannot be read"):
        load_target(resolve_model(tiny_model, adapter))
    (adapter / "adapter_config.json").write_text("{")
    with pytest.raises(UserError, match="cannot be read"):
        resolve_model(tiny_model, adapter)
    with pytest.raises(UserError, match="pass its model, and this folder with --lora"):
        resolve_model(adapter)
