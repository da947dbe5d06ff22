"""A target with an FP8 cache: what it computes, what it stores, and going on from stored bits; other formats' views."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from codec.errors import DataError, UserError
from codec.formats import FORMATS, number_format
from codec.keys import chunk_keys, root_key
from codec.scales import CacheScales
from pipeline.target import Target, kv_shape, load_target, load_weights, resolve_model, run_format

FP8 = ("fp8_e4m3", "fp8_e5m2")
DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
IDS = torch.arange(3, 83) % 384
Layers = list[tuple[Tensor, Tensor]]
MakeModel = Callable[..., Path]


def some_scales(cache: str = "fp8_e4m3") -> CacheScales:
    """Of the tiny model: different for each layer, K or V, and head; small enough that some values saturate."""
    top = np.linspace(1, 9, 3 * 2 * 2, dtype=np.float32).reshape(3, 2, 2)
    return CacheScales("head", top / np.float32(number_format(cache).max_finite))


@pytest.fixture(scope="module", params=[(run, cache) for run in DTYPES for cache in FP8], ids="-".join)
def target(request: pytest.FixtureRequest, make_tiny_model: MakeModel) -> Target:
    run, cache = request.param
    source = resolve_model(make_tiny_model(dtype=DTYPES[run]))
    return load_target(source, cache, scales=some_scales(cache))


def bits(t: Tensor) -> list[int]:
    view = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[t.element_size()]
    values: list[int] = t.contiguous().view(view).flatten().tolist()
    return values


def same(a: Layers, b: Layers) -> bool:
    pairs = [(x, y) for left, right in zip(a, b, strict=True) for x, y in zip(left, right, strict=True)]
    return all(x.dtype == y.dtype and x.shape == y.shape and bits(x) == bits(y) for x, y in pairs)


# ---------------------------------------------------------------- what is computed
def test_attention_reads_what_is_stored(target: Target) -> None:
    """Against a cache that keeps nothing but rounds K and V by a plain formula as the model hands them over."""
    from transformers import AutoModelForCausalLM, DynamicCache

    fmt, dtype = target.format, target.dtype
    raw: list[list[tuple[Tensor, Tensor]]] = [[] for _ in range(3)]

    class Plain(DynamicCache):  # type: ignore[misc]
        def update(self, key: Tensor, value: Tensor, layer: int, *args: Any, **kwargs: Any) -> Any:
            raw[layer].append((key, value))
            rounded = []
            for side, t in enumerate((key, value)):
                scale = torch.tensor(some_scales(target.cache_format).values[layer, side])[None, :, None, None]
                stored = torch.clamp(t.to(torch.float32) / scale, -fmt.max_finite, fmt.max_finite).to(fmt.dtype)
                rounded.append((stored.to(torch.float32) * scale).to(dtype))
            return super().update(*rounded, layer, *args, **kwargs)

    model = AutoModelForCausalLM.from_pretrained(target.source.path, dtype=dtype).eval()
    plain, cache = Plain(config=model.config), target.new_cache()
    for part in (IDS[:50], IDS[50:]):
        with torch.no_grad():
            model(part.unsqueeze(0), cache=plain, use_cache=True)
        truth, states = target.prefill_states(cache, part)
        latent = [(pairs[-1][0][0], pairs[-1][1][0]) for pairs in raw]
        scales = some_scales(target.cache_format)
        want = [tuple(scales.quantise(t, i, side, fmt) for side, t in enumerate(p)) for i, p in enumerate(latent)]
        assert same(truth, want)  # type: ignore[arg-type]
        assert all(key.dtype == fmt.dtype and key.is_contiguous() for key, _ in truth)
        assert [s.shape for s in states] == [(len(part), 64)] * 3
    assert same([a.whole() for a in cache.layers], [(b.keys, b.values) for b in plain.layers])
    top = bits(torch.tensor(fmt.max_finite).to(fmt.dtype))[0]
    assert any(top in bits(t) for pair in truth for t in pair), "no value saturates, so the test is blind to it"


def test_states_and_truth_do_not_depend_on_how_they_are_asked_for(target: Target) -> None:
    caches = [target.new_cache() for _ in range(2)]
    truth = target.prefill(caches[0], IDS)
    again, states = target.prefill_states(caches[1], IDS)
    assert same(truth, again) and same(truth, target.read(caches[1], 0, 80)) and len(states) == 3


# ---------------------------------------------------------------- going on from stored bits
@pytest.mark.parametrize("already", [0, 30, 40])
def test_a_run_that_goes_on_from_stored_bits_is_equal_to_one_without_a_break(target: Target, already: int) -> None:
    plain, restored = target.new_cache(), target.new_cache()
    stored = target.prefill(plain, IDS[:50])
    if already:
        target.prefill(restored, IDS[:already].flip(0))  # what a stored chunk takes the place of
    target.replace(restored, 0, stored)
    assert target.length(restored) == 50 and same(target.read(restored, 0, 50), stored)
    assert same([a.whole() for a in plain.layers], [b.whole() for b in restored.layers])
    assert same(target.prefill(plain, IDS[50:]), target.prefill(restored, IDS[50:]))


def test_every_bit_pattern_is_kept_and_the_callers_tensors_are_left_alone(target: Target) -> None:
    fmt, cache = target.format, target.new_cache()
    odd = torch.arange(2 * 40 * 16).remainder(256).to(torch.uint8).reshape(2, 40, 16).view(fmt.dtype)
    given = [(odd.clone(), odd.flip(0).clone()) for _ in range(3)]
    target.replace(cache, 0, given)
    assert same(target.read(cache, 0, 40), given)
    zeros = [(torch.zeros_like(k), torch.zeros_like(v)) for k, v in given]
    target.replace(cache, 5, [(k[:, :10], v[:, :10]) for k, v in zeros])
    assert same(given, [(odd, odd.flip(0))] * 3)
    assert same(target.read(cache, 15, 25), [(k[:, 15:], v[:, 15:]) for k, v in given])
    assert same(target.read(cache, 5, 10), [(k[:, 5:15], v[:, 5:15]) for k, v in zeros])
    found = target.prefill(cache, IDS)  # NaN and infinities in the past: the model may compute anything, but it goes on
    assert target.length(cache) == 120 and found[0][0].dtype == fmt.dtype


@pytest.mark.parametrize("length", [0, 1, 50])
def test_truncate_forgets_bits_and_values(target: Target, length: int) -> None:
    plain, detour = target.new_cache(), target.new_cache()
    if length:
        target.prefill(plain, IDS[:length])
        target.prefill(detour, IDS[:length])
    target.prefill(detour, IDS.flip(0))
    target.truncate(detour, length)
    assert target.length(detour) == length
    for part in (IDS[length : length + 20], IDS[length + 20 : length + 29]):
        assert same(target.prefill(plain, part), target.prefill(detour, part))
    assert same(target.read(plain, 0, length + 29), target.read(detour, 0, length + 29))


def test_tensors_of_another_dtype_are_refused(target: Target) -> None:
    cache = target.new_cache()
    stored = target.prefill(cache, IDS[:10])
    with pytest.raises(ValueError):
        target.replace(cache, 0, [(k.to(target.dtype), v.to(target.dtype)) for k, v in stored])
    assert same(target.read(cache, 0, 10), stored)


# ---------------------------------------------------------------- formats and names
def test_the_cache_does_not_change_what_the_model_is_computed_in(target: Target) -> None:
    assert str(target.dtype) == f"torch.{DTYPES[run_format(target.source, target.cache_format)]}"
    weights, own = (load_weights(target.source, name)[1] for name in (target.cache_format, None))
    assert all(weights[name].dtype == target.dtype and torch.equal(weights[name], own[name]) for name in own)


def test_scales_must_fit(target: Target) -> None:
    other = "fp8_e4m3"
    with pytest.raises(DataError, match="3, 2, 2"):
        load_target(target.source, other, scales=CacheScales.none(3, 1))
    with pytest.raises(ValueError, match="lacks"):
        load_target(target.source, other)
    with pytest.raises(ValueError, match="has no"):
        load_target(target.source, "bf16", scales=some_scales())
    assert kv_shape(target.config) == (3, 2, 2)


def test_one_loaded_model_takes_both_caches(tiny_model: Path) -> None:
    plain = load_target(resolve_model(tiny_model))
    quantised = plain.with_cache("fp8_e4m3", some_scales())
    alone = load_target(plain.source, "fp8_e4m3", scales=some_scales())
    assert same(quantised.prefill(quantised.new_cache(), IDS), alone.prefill(alone.new_cache(), IDS))
    assert plain.cache_format == "bf16" and plain.prefill(plain.new_cache(), IDS)[0][0].dtype == torch.bfloat16
    with pytest.raises(ValueError, match="fp16"):
        plain.with_cache("fp16", None)


def test_fp32_keeps_every_bit_pattern(make_tiny_model: MakeModel) -> None:
    single = load_target(resolve_model(make_tiny_model(dtype="float32")))
    cache = single.new_cache()
    odd = torch.arange(-(2**31), 2**31 - 1, 3355443, dtype=torch.int64)[: 2 * 40 * 16].to(torch.int32)
    values = odd.reshape(2, 40, 16).view(torch.float32)
    single.prefill(cache, IDS[:20])
    single.replace(cache, 0, [(values, values.flip(0))] * 3)
    assert same(single.read(cache, 0, 40), [(values, values.flip(0))] * 3)


def test_fingerprints_tell_formats_and_run_dtypes_apart(tiny_model: Path, tmp_path: Path) -> None:
    source = resolve_model(tiny_model)
    found = {source.fingerprint(name) for name in FORMATS}
    assert len(found) == len(FORMATS) and source.fingerprint() == source.fingerprint("bf16")
    # The dtype that config.json names changes what an FP8 cache holds, and nothing of one whose format is named.
    other = shutil.copytree(tiny_model, tmp_path / "other")
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"dtype": "float16"}))
    moved = resolve_model(other)
    assert moved.fingerprint("bf16") == source.fingerprint("bf16")
    assert moved.fingerprint("fp8_e4m3") != source.fingerprint("fp8_e4m3")


def test_scales_are_part_of_a_chunks_key() -> None:
    near = some_scales().values.copy()
    near[2, 1, 1] = np.nextafter(near[2, 1, 1], np.float32(1))
    ones = CacheScales("head", np.ones((3, 2, 2), np.float32))
    scales = [b"", *(s.to_bytes() for s in (some_scales(), CacheScales("head", near), ones, CacheScales.none(3, 2)))]
    keys = set()
    for name in FP8:
        for data in scales:
            root = root_key(target=bytes(32), cache_format=name, chunk_tokens=16, scales=data)
            keys.update(chunk_keys(root, IDS.numpy(), 16))
    assert len(keys) == len(FP8) * len(scales) * 5


def test_a_format_that_is_not_known_is_refused(tiny_model: Path) -> None:
    with pytest.raises(UserError, match="bf16, fp16, fp32, fp8_e4m3 or fp8_e5m2"):
        load_target(resolve_model(tiny_model), "fp8")
    assert number_format("fp8_e4m3").coarse and not number_format("fp32").coarse
