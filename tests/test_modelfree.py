"""Rungs without a model: zero guesses, any architecture, any chunk on its own."""

from __future__ import annotations

import json
from functools import lru_cache
from typing import Any

import pytest
import safetensors.torch
import torch
import transformers
from torch import Tensor

import codec
from codec import errors
from codec.formats import FORMATS
from codec.predictor import MODEL_FREE, ModelFree
from codec.predictor.config import MAX_CONTEXT
from codec.predictor.modelfree import rotation
from codec.predictor.rope import rotate
from tests import codec_samples as samples

KINDS = pytest.mark.parametrize("kind", MODEL_FREE)
FORMAT_NAMES = ["bf16", "fp16"]
SHAPE: dict[str, Any] = {"vocab_size": 101, "bos_token_id": 1, "eos_token_id": 2}
LLAMA = SHAPE | {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
    "initializer_range": 0.2,
}  # fmt: skip
GPT2 = SHAPE | {"n_embd": 32, "n_head": 2, "n_layer": 3, "n_positions": 256, "initializer_range": 0.2}
NEOX = SHAPE | {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}


@lru_cache(maxsize=8)
def model(name: str) -> Any:
    """A random model of transformers: Llama, GPT2 or GPTNeoX."""
    options = {"Llama": LLAMA, "GPT2": GPT2, "GPTNeoX": NEOX}[name]
    class_name = "GPT2LMHead" if name == "GPT2" else f"{name}ForCausalLM".removesuffix("Model")
    made = getattr(transformers, class_name + ("Model" if name == "GPT2" else ""))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        return made(getattr(transformers, f"{name}Config")(**options)).eval()


def cache_of(name: str, ids: Tensor, cache_format: str = "bf16") -> samples.Layers:
    with torch.no_grad():
        cache = model(name)(ids[None], use_cache=True).past_key_values
    fmt = FORMATS[cache_format]
    return [(samples.cast(layer.keys[0], fmt), samples.cast(layer.values[0], fmt)) for layer in cache.layers]


@lru_cache(maxsize=16)
def parts(name: str, kind: str, cache_format: str = "bf16") -> tuple[ModelFree, codec.Profile]:
    """A model-free predictor of a model's caches, and a profile calibrated on random tokens."""
    prompts = [samples.tokens(100, seed=50 + i) for i in range(6)]
    caches = [cache_of(name, ids, cache_format) for ids in prompts]
    predictor = codec.build_model_free(kind, model(name).config.to_dict(), caches[0])
    inputs = [
        codec.ClosedSample(ids, c, [torch.zeros(len(ids), 0)] * len(c)) for ids, c in zip(prompts, caches, strict=True)
    ]
    return predictor, codec.calibrate_closed(predictor, samples.TARGET, cache_format, inputs, prefill_tokens=100)


# ---------------------------------------------------------------- coding
@KINDS
@pytest.mark.parametrize("cache_format", FORMAT_NAMES)
@pytest.mark.parametrize("name", ["Llama", "GPT2", "GPTNeoX"])
def test_caches_of_any_architecture_round_trip(name: str, kind: str, cache_format: str) -> None:
    predictor, profile = parts(name, kind, cache_format)
    codec.check_known_answer(predictor, profile)
    ids = samples.tokens(75, seed=1)
    truth = cache_of(name, ids, cache_format)
    blobs = [chunk.blob for chunk in samples.encode_prompt(predictor, profile, ids, truth, 32)]
    elsewhere = codec.Predictor.from_bytes(predictor.to_bytes()), codec.Profile.from_bytes(profile.to_bytes())
    assert elsewhere[0].fingerprint == predictor.fingerprint and elsewhere[1].id == profile.id
    assert samples.same_bits(samples.joined(samples.decode_prompt(*elsewhere, ids, blobs, 32)), truth)


@KINDS
def test_a_chunk_decodes_without_its_predecessors(kind: str) -> None:
    predictor, profile = parts("Llama", kind)
    ids = samples.tokens(75, seed=2)
    truth = cache_of("Llama", ids)
    encoded = samples.encode_prompt(predictor, profile, ids, truth, 32)
    header = codec.read_header(encoded[-1].blob)
    where = codec.ChunkIdentity(samples.TARGET, header.prefix_key, header.parent_digest, 64)
    fresh = codec.Predictor.from_bytes(predictor.to_bytes())
    assert isinstance(fresh, ModelFree)
    state = fresh.state_at(64)
    decoded = codec.decode(fresh, profile, state, ids[64:], encoded[-1].blob, where)
    assert state.length == 75
    assert samples.same_bits(decoded.layers, [(k[:, 64:], v[:, 64:]) for k, v in truth])
    with pytest.raises(errors.MalformedHeader):
        codec.decode(fresh, profile, fresh.state_at(32), ids[64:], encoded[-1].blob, where)
    for position in (-1, MAX_CONTEXT + 1):
        with pytest.raises(ValueError, match="no position"):
            fresh.state_at(position)


@KINDS
@pytest.mark.parametrize("cache_format", FORMAT_NAMES)
def test_any_pattern_round_trips_and_leaves_its_neighbours_alone(kind: str, cache_format: str) -> None:
    predictor, profile = parts("Llama", kind, cache_format)
    ids = samples.tokens(64, seed=3)
    plain = cache_of("Llama", ids, cache_format)
    spoilt = samples.with_hostile(plain, FORMATS[cache_format], token=60)
    sizes = []
    for truth in (plain, spoilt):
        blobs = [chunk.blob for chunk in samples.encode_prompt(predictor, profile, ids, truth, 64)]
        decoded = samples.decode_prompt(predictor, profile, ids, blobs, 64)
        assert samples.same_bits(samples.joined(decoded), truth)
        sizes.append(len(blobs[0]))
    most = sum(
        8 * t[:, 60:].numel() for pair in spoilt for t in pair
    )  # 64 bits for each scalar of the last four tokens
    assert sizes[1] - sizes[0] < most


@KINDS
def test_batches_give_what_chunks_give_alone(kind: str) -> None:
    predictor, profile = parts("GPT2", kind)
    prompts = [samples.tokens(n, seed=n) for n in (31, 5, 64)]
    caches = [cache_of("GPT2", ids) for ids in prompts]
    alone = [samples.encode_prompt(predictor, profile, ids, c, 64)[0] for ids, c in zip(prompts, caches, strict=True)]
    tasks = []
    for ids, cache in zip(prompts, caches, strict=True):
        where = codec.ChunkIdentity(samples.TARGET, samples.keys(ids, 64)[0], codec.ROOT_DIGEST, 0)
        tasks.append(codec.EncodeTask(predictor.new_state(), ids, cache, where))
    assert [c.blob for c in codec.encode_batch(predictor, profile, tasks)] == [c.blob for c in alone]


def test_token_ids_are_only_counted() -> None:
    predictor, profile = parts("Llama", "static")
    ids = samples.tokens(20, seed=4)
    truth = cache_of("Llama", ids)
    where = codec.ChunkIdentity(samples.TARGET, bytes(32), codec.ROOT_DIGEST, 0)
    blobs = [
        codec.encode(predictor, profile, predictor.new_state(), some, truth, where).blob for some in (ids, ids + 10**6)
    ]
    assert blobs[0] == blobs[1]


def test_limits_are_those_of_the_codec() -> None:
    predictor, _ = parts("Llama", "static")
    assert predictor.context_length == MAX_CONTEXT
    predictor.advance(state := predictor.state_at(MAX_CONTEXT - 5), samples.tokens(5))
    with pytest.raises(errors.UserError, match=str(MAX_CONTEXT)):
        predictor.advance(state, samples.tokens(1))
    assert state.length == MAX_CONTEXT
    state.truncate(7)
    assert state.length == 7
    with pytest.raises(ValueError, match="twice"):
        predictor.run([state, state], [samples.tokens(1)] * 2)


# ---------------------------------------------------------------- rotation
def test_keys_are_unrotated_where_the_rotation_is_known() -> None:
    """A key that rotates with its position becomes constant."""
    predictor, _ = parts("Llama", "static")
    still = torch.randn(2, 1, 8, generator=torch.Generator().manual_seed(0)).expand(2, 40, 8)
    cos, sin = predictor.run([predictor.state_at(100)], [samples.tokens(40)]).turns()[0]
    want_cos, want_sin = model("Llama").model.rotary_emb(torch.zeros(1), torch.arange(100, 140)[None])
    turned = still * want_cos[0] + torch.cat([-still[..., 4:], still[..., :4]], -1) * want_sin[0]
    torch.testing.assert_close(rotate(turned, cos, -sin), still, rtol=0, atol=1e-5)


def test_rotations_of_other_architectures() -> None:
    neox = model("GPTNeoX")
    assert neox.config.rope_parameters["partial_rotary_factor"] == 0.25
    found = rotation(neox.config.to_dict(), 16)
    assert found is not None
    torch.testing.assert_close(found.inverse[0], neox.gpt_neox.rotary_emb.inv_freq, rtol=2e-7, atol=0)
    assert parts("GPTNeoX", "linear")[0].config.rope_dim == 4
    assert rotation(model("GPT2").config.to_dict(), 16) is None and parts("GPT2", "linear")[0].config.rope_dim == 0
    base = model("Llama").config.to_dict()
    rope = base["rope_parameters"]
    for wrong in (
        {}, None, {"full_attention": dict(rope)}, rope | {"rope_type": "spiral"}, rope | {"rope_type": "yarn", "factor": "x"},
        rope | {"rope_type": "linear", "factor": 0.0},
            rope | {"rope_type": "longrope", "short_factor": [1.0] * 3, "long_factor": [1.0] * 3},
    ):  # fmt: skip
        assert rotation(base | {"rope_parameters": wrong}, 8) is None
    for partial, dims in ((0.5, 4), (0.0, 8), (0.1, None), (2.0, None), ("x", None)):
        found = rotation(
            base | {"model_type": "other", "rope_parameters": rope | {"partial_rotary_factor": partial}}, 8
        )
        assert (None if found is None else 2 * found.inverse.shape[1]) == dims, partial


# ---------------------------------------------------------------- what is refused
def test_caches_of_other_shapes_are_refused() -> None:
    config = model("Llama").config.to_dict()
    cache = cache_of("Llama", samples.tokens(3))
    odd = [(k[..., :7], v[..., :7]) for k, v in cache]
    wider = [(k, torch.cat([v, v], -1)) for k, v in cache]
    for wrong, words in ((odd, "even"), (wider, "different shapes"), ([*cache, *odd], "different shapes")):
        with pytest.raises(errors.UnsupportedArchitecture, match=words):
            codec.build_model_free("linear", config, wrong)
    with pytest.raises(errors.UnsupportedFormat, match="static, linear"):
        codec.build_model_free("int8", config, cache)
    with pytest.raises(errors.UserError, match="fp8"):
        codec.build_predictor(samples.TINY, samples.weights(samples.TINY), kind="linear")


def test_malformed_stored_predictors_are_refused() -> None:
    good = parts("Llama", "linear")[0].to_bytes()
    tensors, stated = safetensors.torch.load(good), json.loads(parts("Llama", "linear")[0].config.to_json())
    inverse, starts = tensors["rope.inverse"], tensors["rope.starts"]

    def stored(changes: dict[str, Any] | str | None = None, **more: Tensor | None) -> bytes:
        text = (
            changes
            if isinstance(changes, str)
            else json.dumps(stated | (changes or {}), sort_keys=True, separators=(",", ":"))
        )
        named = tensors | {name.replace("__", "."): t for name, t in more.items()}
        out: bytes = safetensors.torch.save({n: t for n, t in named.items() if t is not None}, {"predictor": text})
        return out

    assert stored() == good and isinstance(codec.Predictor.from_bytes(good), ModelFree)
    missing = {name: value for name, value in stated.items() if name != "rope_dim"}
    bad = [
        good[:-1], good[:40], b"", stored("x"), stored("[]"), stored("1"), stored(json.dumps(missing)), stored({"more": 1}),
        stored({"kind": "int8"}), stored({"kind": "quadratic"}), stored({"kind": ["linear"]}), stored({"layers": 0}),
        stored({"layers": 4.0}),
        stored({"layers": 1 << 20}), stored({"kv_heads": -1}), stored({"head_dim": 7}), stored({"head_dim": "8"}),
        stored({"head_dim": 1 << 20}), stored({"head_dim": True}), stored({"rope_dim": 6}), stored({"rope_dim": 16}),
        stored({"rope_dim": -2}),
        stored({"rope_dim": 0}), stored({"rope_dim": None}), stored(rope__inverse=None), stored(rope__starts=None),
        stored(embed=torch.zeros(2)), stored(rope__inverse=inverse.double()), stored(rope__inverse=inverse[0].contiguous()),
        stored(rope__inverse=torch.full_like(inverse, torch.nan)), stored(rope__inverse=-inverse), stored(rope__inverse=inverse * 2000),
        stored(rope__starts=starts.int()), stored(rope__starts=starts + 1), stored(rope__starts=torch.tensor([0, 5])),
        stored(rope__starts=torch.zeros(0, dtype=torch.int64), rope__inverse=inverse[:0].contiguous()),
        stored(rope__starts=torch.tensor([0, 5, 5]), rope__inverse=inverse.repeat(3, 1)), stored(rope__starts=starts[0].clone()),
    ]  # fmt: skip
    samples.refused_all(codec.Predictor.from_bytes, bad, errors.PredictorError)


def test_wrong_pairs_and_parents_are_refused() -> None:
    static, linear = parts("Llama", "static"), parts("Llama", "linear")
    ids = samples.tokens(20, seed=4)
    chunk = samples.encode_prompt(*static, ids, cache_of("Llama", ids), 20)[0]
    header = codec.read_header(chunk.blob)
    where = codec.ChunkIdentity(samples.TARGET, header.prefix_key, header.parent_digest, 0)
    with pytest.raises(errors.WrongPredictor):
        codec.decode(linear[0], static[1], linear[0].new_state(), ids, chunk.blob, where)
    with pytest.raises(errors.WrongPredictor):
        codec.decode(*linear, linear[0].new_state(), ids, chunk.blob, where)
    other = codec.ChunkIdentity(samples.TARGET, header.prefix_key, bytes(15) + b"\1", 0)
    with pytest.raises(errors.WrongParent):
        codec.decode(*static, static[0].new_state(), ids, chunk.blob, other)
