"""Finding, naming and loading models, and the cache operations that everything else stands on."""

import json
import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from codec.errors import UserError
from pipeline.model_source import ModelSource, localise, resolve_cache_format
from pipeline.target import Target, load_config, load_target, load_tokenizer, load_weights, resolve_model

MakeModel = Callable[..., Path]
IDS = torch.arange(3, 83) % 384


@pytest.fixture(scope="module")
def target(tiny_model: Path) -> Target:
    return load_target(resolve_model(tiny_model))


def same(a: list[tuple[Tensor, Tensor]], b: list[tuple[Tensor, Tensor]]) -> bool:
    pairs = [(x, y) for left, right in zip(a, b, strict=True) for x, y in zip(left, right, strict=True)]
    return all(x.shape == y.shape and torch.equal(x.view(torch.int16), y.view(torch.int16)) for x, y in pairs)


def one_sentence(error: pytest.ExceptionInfo[UserError], *needles: str) -> None:
    text = str(error.value)
    assert "\n" not in text and "Traceback" not in text
    for needle in needles:
        assert needle in text


# ---------------------------------------------------------------- the cache
def test_prefill_gives_the_new_tokens_only(target: Target) -> None:
    cache = target.new_cache()
    first, second = target.prefill(cache, IDS[:50]), target.prefill(cache, IDS[50:])
    assert len(first) == 3 and target.length(cache) == 80
    for (key, value), layer in zip(second, cache.layers, strict=True):
        assert key.shape == value.shape == (2, 30, 16)
        assert key.dtype == value.dtype == torch.bfloat16
        assert key.is_contiguous() and value.is_contiguous()
        assert all(torch.equal(whole[0, :, 50:], t) for whole, t in zip(layer.whole(), (key, value), strict=True))
    assert same(first, target.read(cache, 0, 50))


def test_prefill_is_what_transformers_computes(target: Target, tiny_model: Path) -> None:
    from transformers import AutoModelForCausalLM, DynamicCache

    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.bfloat16).eval()
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(IDS.unsqueeze(0), cache=cache, use_cache=True)
    assert same(target.prefill(target.new_cache(), IDS), [(layer.keys[0], layer.values[0]) for layer in cache.layers])


def test_what_prefill_returned_does_not_change_later(target: Target) -> None:
    cache = target.new_cache()
    first = target.prefill(cache, IDS[:40])
    kept = [(k.clone(), v.clone()) for k, v in first]
    target.replace(cache, 0, [(torch.zeros_like(k), torch.zeros_like(v)) for k, v in first])
    target.prefill(cache, IDS[40:])
    assert same(first, kept)


def test_replacing_by_its_own_bits_changes_nothing(target: Target) -> None:
    plain, replaced = target.new_cache(), target.new_cache()
    target.prefill(plain, IDS[:50])
    bits = target.prefill(replaced, IDS[:50])
    target.replace(replaced, 0, bits)
    assert same(target.prefill(plain, IDS[50:]), target.prefill(replaced, IDS[50:]))


def test_other_bits_change_what_follows(target: Target) -> None:
    plain, replaced = target.new_cache(), target.new_cache()
    target.prefill(plain, IDS[:50])
    bits = target.prefill(replaced, IDS[:50])
    target.replace(replaced, 10, [(k[:, 10:20] + 1, v[:, 10:20]) for k, v in bits])
    assert not same(target.prefill(plain, IDS[50:]), target.prefill(replaced, IDS[50:]))
    assert same(target.read(plain, 0, 10), target.read(replaced, 0, 10))
    assert same(target.read(plain, 20, 30), target.read(replaced, 20, 30))


@pytest.mark.parametrize("already", [0, 30, 40])
def test_stored_bits_stand_in_for_a_forward_pass(target: Target, already: int) -> None:
    """Replace goes on past the end of the cache, also from an empty one."""
    plain, restored = target.new_cache(), target.new_cache()
    bits = target.prefill(plain, IDS[:50])
    if already:
        target.prefill(restored, IDS[:already])
    first = min(already, 30)
    if first:
        target.replace(restored, 0, [(k[:, :first], v[:, :first]) for k, v in bits])
    target.replace(restored, first, [(k[:, first:], v[:, first:]) for k, v in bits])
    assert target.length(restored) == 50
    assert same(target.prefill(plain, IDS[50:]), target.prefill(restored, IDS[50:]))


def test_replace_keeps_every_bit_pattern(target: Target) -> None:
    cache = target.new_cache()
    shape = (2, 40, 16)
    patterns = torch.arange(-32768, 32767, 51, dtype=torch.int16)[: 2 * 40 * 16]
    odd = patterns.reshape(shape).view(torch.bfloat16)
    target.prefill(cache, IDS[:20])
    target.replace(cache, 0, [(odd, odd.flip(0))] * 3)  # 20 overwritten, 20 appended; NaN payloads among them
    assert same(target.read(cache, 0, 40), [(odd, odd.flip(0))] * 3)


@pytest.mark.parametrize("length", [0, 1, 50])
def test_truncate_forgets(target: Target, length: int) -> None:
    plain, detour = target.new_cache(), target.new_cache()
    if length:
        target.prefill(plain, IDS[:length])
        target.prefill(detour, IDS[:length])
    target.prefill(detour, IDS.flip(0))
    target.truncate(detour, length)
    assert target.length(detour) == length
    for part in (IDS[length : length + 20], IDS[length + 20 : length + 29]):
        assert same(target.prefill(plain, part), target.prefill(detour, part))


def test_misuse_is_refused(target: Target) -> None:
    cache = target.new_cache()
    bits = target.prefill(cache, IDS[:10])
    with pytest.raises(UserError, match="384"):
        target.prefill(cache, torch.tensor([384]))
    with pytest.raises(UserError, match="context length of 1024"):
        target.prefill(cache, IDS.repeat(13))
    for bad in (IDS.int(), IDS.unsqueeze(0), IDS[:0]):
        with pytest.raises(ValueError):
            target.prefill(cache, bad)
    with pytest.raises(ValueError):
        target.replace(cache, 11, bits)
    with pytest.raises(ValueError):
        target.replace(cache, 0, bits[:2])
    with pytest.raises(ValueError):
        target.replace(cache, 0, [(k.half(), v.half()) for k, v in bits])
    with pytest.raises(ValueError):
        target.truncate(cache, 11)
    assert target.length(cache) == 10


# ---------------------------------------------------------------- loading
def test_weights_are_those_of_the_loaded_model(target: Target, tiny_model: Path) -> None:
    config, weights = load_weights(resolve_model(tiny_model))
    assert config["model_type"] == "llama" and config["num_key_value_heads"] == 2
    loaded = target.weights()
    assert set(weights) == set(loaded)
    assert all(torch.equal(weights[name], loaded[name]) for name in weights)
    assert {"model.embed_tokens.weight", "model.layers.2.mlp.down_proj.weight", "model.norm.weight"} <= set(weights)


def test_shards_and_bare_names(tiny_model: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    model.save_pretrained(tmp_path / "shards", max_shard_size="100KB")
    model.base_model.save_pretrained(tmp_path / "bare")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 1
    _, plain = load_weights(resolve_model(tiny_model))
    for folder in ("shards", "bare"):
        source = resolve_model(tmp_path / folder)
        _, weights = load_weights(source)
        assert {k: weights[k].tolist() for k in weights} == {k: plain[k].tolist() for k in plain}
        assert len(load_target(source).prefill(load_target(source).new_cache(), IDS)) == 3


def test_runs_in_the_format_asked_for(tiny_model: Path, make_tiny_model: MakeModel) -> None:
    half = load_target(resolve_model(tiny_model), "fp16")
    assert half.prefill(half.new_cache(), IDS)[0][0].dtype == torch.float16
    assert load_weights(resolve_model(tiny_model), "fp16")[1]["model.norm.weight"].dtype == torch.float16
    assert resolve_cache_format(resolve_model(tiny_model)) == "bf16"
    assert resolve_cache_format(resolve_model(make_tiny_model(dtype="float16")), "auto") == "fp16"
    single = resolve_model(make_tiny_model(dtype="float32"))
    full = load_target(single)
    assert full.cache_format == "fp32" and full.prefill(full.new_cache(), IDS)[0][0].dtype == torch.float32
    assert load_target(single, "bf16").dtype == torch.bfloat16
    with pytest.raises(UserError, match="int8"):
        resolve_cache_format(single, "int8")
    edit(Path(single.path) / "config.json", lambda c: c.update(dtype="float64", torch_dtype="float64"))
    for wanted in (None, "fp8_e4m3"):  # an FP8 cache does not say what the model is computed in
        with pytest.raises(UserError) as error:
            load_weights(single, wanted)
        one_sentence(error, "float64", "bf16, fp16 or fp32")


@pytest.mark.parametrize("family", ["Mistral", "DeepseekV3", "Jamba"])
def test_other_state_than_k_and_v_is_refused(family: str, tmp_path: Path, tiny_model: Path) -> None:
    """The refusal comes from the config alone, before any weight is read."""
    import transformers

    options = {"num_hidden_layers": 4} | ({"sliding_window": 64} if family == "Mistral" else {})
    getattr(transformers, f"{family}Config")(**options).save_pretrained(tmp_path)
    shutil.copy(tiny_model / "model.safetensors", tmp_path)
    with pytest.raises(UserError, match="not supported yet") as error:
        load_target(resolve_model(tmp_path), "bf16")
    one_sentence(error, tmp_path.name)


def test_a_device_that_is_not_there(tiny_model: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    with pytest.raises(UserError, match="cuda"):
        load_target(resolve_model(tiny_model), device="cuda")


# ---------------------------------------------------------------- names
def copy_of(model: Path, place: Path) -> Path:
    return Path(shutil.copytree(model, place))


def edit(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))


def test_fingerprint_follows_what_changes_the_bits(tiny_model: Path, tmp_path: Path) -> None:
    base = resolve_model(tiny_model).fingerprint()
    assert len(base) == 32
    moved = copy_of(tiny_model, tmp_path / "moved")
    edit(moved / "config.json", lambda c: c.update(_name_or_path="elsewhere", transformers_version="9"))
    (moved / "generation_config.json").write_text("{}")
    assert resolve_model(moved).fingerprint() == base
    assert resolve_model(tiny_model).fingerprint("bf16") == base
    assert resolve_model(tiny_model).fingerprint("fp16") != base

    edit(moved / "config.json", lambda c: c.update(rms_norm_eps=1e-3))
    other_config = resolve_model(moved).fingerprint()
    assert other_config != base
    weights = moved / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    os.utime(weights, ns=(1, 1))
    assert resolve_model(moved).fingerprint() not in (base, other_config)


def test_a_source_survives_a_trip_to_another_node(tiny_model: Path) -> None:
    source = resolve_model(tiny_model)
    assert localise(source) == source
    with pytest.raises(UserError) as error:
        localise(ModelSource("folder", "/nowhere/model", "model"))
    one_sentence(error, "/nowhere/model", "every node")


def test_hub_models_are_pinned_to_a_commit(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The hub's client is replaced: it hands out a folder laid out like its cache."""
    import huggingface_hub

    asked = []

    def snapshot(repo: str, *, revision: str | None, **_: Any) -> str:
        asked.append((repo, revision))
        place = tmp_path / "snapshots" / (revision if revision == "c0ffee" else "0ddba11")
        return str(place if place.exists() else copy_of(tiny_model, place))

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    source = resolve_model("org/name")
    assert (source.kind, source.name, source.repo, source.commit) == ("hub", "name", "org/name", "0ddba11")
    assert source.fingerprint() == resolve_model(tiny_model).fingerprint()
    assert resolve_model("org/name@c0ffee").commit == "c0ffee"
    shutil.rmtree(tmp_path / "snapshots")
    assert localise(source).commit == "0ddba11" and Path(source.path).exists()  # another node asks for the same commit
    assert asked == [("org/name", None), ("org/name", "c0ffee"), ("org/name", "0ddba11")]


# ---------------------------------------------------------------- bad models
@pytest.mark.parametrize(
    "spec", ["/nowhere/model", "./nowhere", "nowhere", "nowhere.gguf", "no/where", "no/x.gguf", ""]
)
def test_unknown_path(spec: str) -> None:
    with pytest.raises(UserError) as error:
        resolve_model(spec)
    one_sentence(error, repr(spec), "safetensors", "gguf", "hub id")


def test_folders_that_hold_no_model(tiny_model: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"config\.json"):
        resolve_model(tmp_path)
    (tmp_path / "x.gguf").write_bytes(b"GGUF")
    with pytest.raises(UserError, match=r"x\.gguf"):
        resolve_model(tmp_path)
    shutil.copy(tiny_model / "config.json", tmp_path)
    with pytest.raises(UserError, match="no weights"):
        resolve_model(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    with pytest.raises(UserError, match="pickled weights, which are never loaded"):
        resolve_model(tmp_path)
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(UserError, match=r"not \*\.gguf"):
        resolve_model(tmp_path / "notes.txt")
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(UserError, match="LoRA"):
        resolve_model(tmp_path)


@pytest.mark.parametrize("shard", ["../other.safetensors", "/etc/passwd", "weights.bin", 3, "lost.safetensors"])
def test_a_shard_index_is_not_trusted(shard: Any, tiny_model: Path, tmp_path: Path) -> None:
    shutil.copy(tiny_model / "config.json", tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": shard}}))
    with pytest.raises(UserError) as error:
        resolve_model(tmp_path)
    one_sentence(error, repr(shard))


@pytest.mark.parametrize("damage", ["truncated", "garbage", "lacks a weight"])
def test_damaged_safetensors(damage: str, tiny_model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    from safetensors.torch import load_file, save_file

    model = copy_of(tiny_model, tmp_path / "m")
    weights = model / "model.safetensors"
    if damage == "truncated":
        weights.write_bytes(weights.read_bytes()[:-100])
    elif damage == "garbage":
        weights.write_bytes(b"\xff" * 100)
    else:
        tensors = load_file(weights)
        del tensors["model.layers.1.mlp.up_proj.weight"]
        save_file(tensors, weights, metadata={"format": "pt"})
    with pytest.raises(UserError) as error:
        load_target(resolve_model(model))
    one_sentence(error, str(model), *(["model.layers.1.mlp.up_proj.weight"] if damage == "lacks a weight" else []))
    if damage != "lacks a weight":
        with pytest.raises(UserError):
            load_weights(resolve_model(model))
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("text", ["{", "[]", '{"model_type": "no_such_family"}', '{"auto_map": {"AutoConfig": "x.Y"}}'])
def test_damaged_config(text: str, tiny_model: Path, tmp_path: Path) -> None:
    model = copy_of(tiny_model, tmp_path / "m")
    (model / "config.json").write_text(text)
    with pytest.raises(UserError) as error:
        load_config(resolve_model(model))
    one_sentence(error, str(model))


def tiny_gguf(path: Path, kind: str = "F16", blocks: bool = True) -> bytes:
    """A GGUF file with two matrices and a vector, written by the gguf package itself."""
    import gguf
    import numpy as np

    writer = gguf.GGUFWriter(path, "llama")
    if blocks:
        writer.add_block_count(1)
    writer.add_array("some.words", ["a", "bc", ""])
    writer.add_array("some.numbers", [1, 2, 3])
    for name in ("a", "b"):
        writer.add_tensor(name, np.zeros((4, 32), np.float16 if kind == "F16" else np.float32))
    writer.add_tensor("norm", np.zeros(32, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path.read_bytes()


def test_gguf_dtype_and_fingerprint(tmp_path: Path) -> None:
    tiny_gguf(tmp_path / "half.gguf")
    tiny_gguf(tmp_path / "single.gguf", "F32")
    half = resolve_model(tmp_path / "half.gguf")
    assert resolve_cache_format(half) == "fp16"
    assert resolve_cache_format(resolve_model(tmp_path / "single.gguf")) == "fp32"
    shutil.copy(tmp_path / "half.gguf", tmp_path / "renamed.gguf")
    assert resolve_model(tmp_path / "renamed.gguf").fingerprint() == half.fingerprint() != half.fingerprint("bf16")


def test_every_truncation_of_a_gguf_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    data = tiny_gguf(path)
    resolve_model(path)
    for length in range(0, len(data) - 31):  # the last tensor's padding may be missing
        path.write_bytes(data[:length])
        with pytest.raises(UserError) as error:
            resolve_model(path)
        one_sentence(error, str(path))


@pytest.mark.parametrize(
    "data",
    [
        b"PK\x03\x04" + bytes(100),
        b"GGUF" + struct.pack("<IQQ", 99, 0, 0),
        b"GGUF" + struct.pack(">IQQ", 3, 0, 0),
        b"GGUF" + struct.pack("<IQQ", 3, 0, 0),
        b"GGUF" + struct.pack("<IQQ", 3, 1 << 60, 0),
        b"GGUF" + struct.pack("<IQQ", 3, 0, 1 << 60),
        b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1 << 62) + bytes(100),
        b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1) + b"a" + struct.pack("<IIQ", 9, 4, 1 << 60) + bytes(100),
        b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1) + b"a" + struct.pack("<IIQ", 9, 9, 1) + bytes(100),
        b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1) + b"a" + struct.pack("<I", 77) + bytes(100),
        b"GGUF" + struct.pack("<IQQQ", 3, 1, 0, 1) + b"a" + struct.pack("<I", 1 << 31) + bytes(100),
        b"GGUF" + struct.pack("<IQQQ", 3, 1, 0, 1) + b"a" + struct.pack("<IQIQ", 1, 8, 99, 0) + bytes(100),
        b"GGUF" + struct.pack("<IQQQ", 3, 1, 0, 1) + b"a" + struct.pack("<IQIQ", 1, 1 << 63, 0, 0) + bytes(100),
    ],
)
def test_hostile_gguf(data: bytes, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(data)
    with pytest.raises(UserError) as error:
        resolve_model(path)
    one_sentence(error, str(path))


def test_gguf_that_is_no_language_model(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "model.gguf"
    tiny_gguf(path, blocks=False)
    with pytest.raises(UserError, match="without a language model"):
        resolve_model(path)
    tiny_gguf(path)
    with pytest.raises(UserError) as error:
        load_tokenizer(resolve_model(path))
    one_sentence(error, str(path))
    assert capfd.readouterr() == ("", "")


# ---------------------------------------------------------------- the real model
def test_truncated_real_gguf(smollm2_gguf: Path, tmp_path: Path) -> None:
    path = tmp_path / "half.gguf"
    with open(smollm2_gguf, "rb") as file:
        path.write_bytes(file.read(40 << 20))
    with pytest.raises(UserError) as error:
        resolve_model(path)
    one_sentence(error, str(path), "truncated")


@pytest.mark.slow
def test_real_gguf(smollm2_gguf: Path, capfd: pytest.CaptureFixture[str]) -> None:
    source = resolve_model(smollm2_gguf)
    assert source.kind == "gguf" and resolve_cache_format(source) == "bf16"
    target = load_target(source)
    config, tokenizer = load_config(source), load_tokenizer(source)
    assert (config["num_hidden_layers"], config["num_key_value_heads"], target.context_length) == (30, 3, 8192)
    ids = torch.tensor(tokenizer.encode("The quick brown fox", add_special_tokens=False))
    bits = target.prefill(target.new_cache(), ids)
    assert len(bits) == 30 and bits[0][0].shape == (3, len(ids), 64)
    assert target.weights()["model.embed_tokens.weight"].shape == (49152, 576)
    assert capfd.readouterr() == ("", "")
