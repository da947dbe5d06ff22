"""Chunks: round trips over sizes and hostile values, batches, states that survive errors; calibration and stored profiles."""

from __future__ import annotations

import contextlib
import json
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import codec
from codec import errors
from codec.checksums import layer_checksums
from codec.formats import FORMATS
from tests import codec_samples as samples

TOKENS = 75
NAMES = pytest.mark.parametrize("name", ["bf16", "fp16"])


@lru_cache(maxsize=8)
def prompt(name: str = "bf16", seed: int = 0) -> tuple[torch.Tensor, samples.Layers]:
    predictor, ids = samples.tiny(), samples.tokens(TOKENS, seed=seed)
    return ids, samples.truth(predictor, predictor.new_state(), ids, FORMATS[name], seed=seed)


def identity(begin: int = 0, key: bytes = bytes(32), parent: bytes = codec.ROOT_DIGEST) -> codec.ChunkIdentity:
    return codec.ChunkIdentity(samples.TARGET, key, parent, begin)


def part(values: samples.Layers, begin: int, end: int) -> samples.Layers:
    return [(k[:, begin:end], v[:, begin:end]) for k, v in values]


def fingerprint(state: codec.PredictorState) -> tuple[int, list[tuple[int, ...]], int]:
    parts = [t for seen in (memory.seen() for memory in state.layers) for t in (seen.keys, seen.key_scale, seen.values)]
    return (
        state.length,
        [tuple(t.shape) for t in parts],
        hash(b"".join(t.contiguous().numpy().tobytes() for t in parts)),
    )


# ---------------------------------------------------------------- round trips
@NAMES
@pytest.mark.parametrize("chunk_tokens", [1, 2, 7, 32, 74, 75, 256])
def test_round_trip_over_chunk_sizes(name: str, chunk_tokens: int) -> None:
    predictor, profile = samples.tiny(), samples.tiny_profile(name)
    ids, values = prompt(name)
    ids, values = ids[: 12 if chunk_tokens < 7 else TOKENS], part(values, 0, 12 if chunk_tokens < 7 else TOKENS)
    chunks = samples.encode_prompt(predictor, profile, ids, values, chunk_tokens)
    decoded = samples.decode_prompt(predictor, profile, ids, [c.blob for c in chunks], chunk_tokens)
    assert samples.same_bits(samples.joined(decoded), values)
    assert [c.chain_digest for c in chunks] == [d.chain_digest for d in decoded]
    assert [c.layer_checksums for c in chunks] == [layer_checksums(d.layers, profile.format) for d in decoded]


@NAMES
def test_hostile_values_in_the_middle_harm_nothing_after_them(name: str) -> None:
    predictor, profile = samples.tiny(), samples.tiny_profile(name)
    ids, values = prompt(name)
    spoiled = samples.with_hostile(part(values, 0, 50), profile.format, token=25)
    values = [
        (torch.cat([a[:, :50], b[:, 50:]], 1), torch.cat([c[:, :50], d[:, 50:]], 1))
        for (a, c), (b, d) in zip(spoiled, values, strict=True)
    ]
    chunks = samples.encode_prompt(predictor, profile, ids, values, 25)
    decoded = samples.decode_prompt(predictor, profile, ids, [c.blob for c in chunks], 25)
    assert samples.same_bits(samples.joined(decoded), values)
    assert [c.stats.escapes > 0 for c in chunks] == [False, True, False]
    plain = samples.encode_prompt(predictor, profile, ids, prompt(name)[1], 25)
    assert len(chunks[2].blob) == len(plain[2].blob), "open loop: what was stored does not reach the predictor"


@settings(max_examples=25, deadline=None, derandomize=True)
@given(st.sampled_from(["bf16", "fp16"]), st.integers(0, 2**32 - 1), st.integers(1, 20), st.integers(0, 30))
def test_any_bit_patterns_round_trip(name: str, seed: int, count: int, before: int) -> None:
    predictor, profile, rng = samples.tiny(), samples.tiny_profile(name), np.random.default_rng(seed)
    c, ids = predictor.config, samples.tokens(before + count, seed=seed % 1000)
    values = [
        tuple(profile.format.tensor(rng.integers(0, 1 << 16, (c.kv_heads, count, c.head_dim))) for _ in range(2))
        for _ in range(c.layers)
    ]
    encoding, decoding = (samples.state_after(predictor, ids[:before]) for _ in range(2))
    chunk = codec.encode(predictor, profile, encoding, ids[before:], values, identity(before))  # type: ignore[arg-type]
    back = codec.decode(predictor, profile, decoding, ids[before:], chunk.blob, identity(before))
    assert samples.same_bits(back.layers, values)  # type: ignore[arg-type]
    assert encoding.length == decoding.length == before + count


@settings(max_examples=10, deadline=None, derandomize=True)
@given(st.integers(1, 3), st.integers(1, 3), st.integers(1, 3), st.integers(1, 8), st.integers(1, 9))
def test_any_shape_of_model_round_trips(layers: int, kv_heads: int, groups: int, half: int, count: int) -> None:
    config = samples.TINY | {
        "num_hidden_layers": layers, "num_key_value_heads": kv_heads, "num_attention_heads": kv_heads * groups, "head_dim": 2 * half,
    }  # fmt: skip
    predictor = samples.build(config)
    profile = samples.make_profile(predictor, count=16)
    ids = samples.tokens(count)
    values = samples.truth(predictor, predictor.new_state(), ids, profile.format)
    chunk = codec.encode(predictor, profile, predictor.new_state(), ids, values, identity())
    assert samples.same_bits(
        codec.decode(predictor, profile, predictor.new_state(), ids, chunk.blob, identity()).layers, values
    )


def test_strided_truth_gives_the_same_blob() -> None:
    predictor, profile, (ids, values) = samples.tiny(), samples.tiny_profile(), prompt()
    strided = [
        (k.transpose(0, 1).contiguous().transpose(0, 1), v.transpose(1, 2).contiguous().transpose(1, 2))
        for k, v in values
    ]
    blobs = {
        codec.encode(predictor, profile, predictor.new_state(), ids, v, identity()).blob for v in (values, strided)
    }
    assert len(blobs) == 1


def test_stats_add_up() -> None:
    predictor, profile, (ids, values) = samples.tiny(), samples.tiny_profile(), prompt()
    chunk = codec.encode(predictor, profile, predictor.new_state(), ids, values, identity(), ideal=True)
    s = chunk.stats
    assert s.scalars_k == s.scalars_v == 2 * 2 * TOKENS * 12 and s.escapes == 0
    assert s.bytes_k + s.bytes_v + s.header_bytes == len(chunk.blob)
    ideal = s.ideal_bits_k + s.ideal_bits_v
    assert ideal < 8 * (s.bytes_k + s.bytes_v) < 1.005 * ideal + 64
    assert abs(8 * s.bytes_k - s.ideal_bits_k) < 0.02 * s.ideal_bits_k  # one stream: what is whose is known to a word
    assert chunk.blob == codec.encode(predictor, profile, predictor.new_state(), ids, values, identity()).blob


# ---------------------------------------------------------------- batches
def test_a_batch_gives_the_bytes_of_its_parts() -> None:
    predictor, profile = samples.tiny(), samples.tiny_profile()
    lengths = (75, 1, 40, 13)
    tasks, alone = [], []
    for n, (length, before) in enumerate(zip(lengths, (0, 5, 0, 20), strict=True)):
        ids, values = prompt(seed=n)
        for keep in (tasks, alone):
            state = samples.state_after(predictor, ids[:before])
            piece = slice(before, before + min(length, TOKENS - before))
            keep.append(
                codec.EncodeTask(
                    state, ids[piece], part(values, piece.start, piece.stop), identity(before, bytes([n]) * 32)
                )
            )
    batch = codec.encode_batch(predictor, profile, tasks)
    single = [codec.encode(predictor, profile, t.state, t.token_ids, t.truth, t.identity) for t in alone]
    assert [c.blob for c in batch] == [c.blob for c in single] and [c.stats for c in batch] == [c.stats for c in single]
    assert [fingerprint(t.state) for t in tasks] == [fingerprint(t.state) for t in alone]
    decoding = []
    for t, c in zip(tasks, batch, strict=True):
        seen = prompt(seed=t.identity.prefix_key[0])[0][: t.identity.first_token]
        state = samples.state_after(predictor, seen)
        decoding.append(codec.DecodeTask(state, t.token_ids, c.blob, t.identity))
    decoded = codec.decode_batch(predictor, profile, decoding)
    assert all(samples.same_bits(d.layers, list(t.truth)) for d, t in zip(decoded, tasks, strict=True))
    assert [fingerprint(d.state) for d in decoding] == [fingerprint(t.state) for t in tasks]


def test_one_bad_blob_of_a_batch_leaves_all_states() -> None:
    predictor, profile, (ids, values) = samples.tiny(), samples.tiny_profile(), prompt()
    blob = codec.encode(predictor, profile, predictor.new_state(), ids, values, identity()).blob
    states = [predictor.new_state(), predictor.new_state()]
    tasks = [codec.DecodeTask(s, ids, b, identity()) for s, b in zip(states, (blob, blob[:-1]), strict=True)]
    with pytest.raises(errors.TruncatedBlob):
        codec.decode_batch(predictor, profile, tasks)
    assert [s.length for s in states] == [0, 0] and not states[0].layers


def test_one_state_cannot_be_in_a_batch_twice() -> None:
    predictor, profile, (ids, values) = samples.tiny(), samples.tiny_profile(), prompt()
    state = predictor.new_state()
    with pytest.raises(ValueError, match="twice"):
        codec.encode_batch(predictor, profile, [codec.EncodeTask(state, ids, values, identity())] * 2)
    assert state.length == 0


# ---------------------------------------------------------------- states
def test_chunked_states_equal_whole_ones_and_truncated_ones() -> None:
    predictor, ids = samples.tiny(), prompt()[0]
    whole, parts, cut = (predictor.new_state() for _ in range(3))
    predictor.advance(whole, ids)
    for begin in range(0, TOKENS, 11):
        predictor.advance(parts, ids[begin : begin + 11])
    predictor.advance(cut, torch.cat([ids[:30], samples.tokens(20, seed=9)]))
    cut.truncate(30)
    predictor.advance(cut, ids[30:])
    assert fingerprint(whole) == fingerprint(parts) == fingerprint(cut)
    for bad in (-1, TOKENS + 1):
        with pytest.raises(ValueError, match="cannot be cut"):
            whole.truncate(bad)


def test_no_tokens_are_nothing_to_advance_over() -> None:
    predictor, ids = samples.tiny(), prompt()[0]
    for seen in (0, 5):
        state = samples.state_after(predictor, ids[:seen])
        before = fingerprint(state)
        predictor.advance(state, ids[:0])
        assert fingerprint(state) == before


def test_encode_decode_measure_and_advance_leave_the_same_state() -> None:
    predictor, profile, (ids, values) = samples.tiny(), samples.tiny_profile(), prompt()
    states = [predictor.new_state() for _ in range(4)]
    chunk = codec.encode(predictor, profile, states[0], ids, values, identity())
    codec.decode(predictor, profile, states[1], ids, chunk.blob, identity())
    codec.measure(predictor, states[2], ids, values)
    predictor.advance(states[3], ids)
    assert len({repr(fingerprint(s)) for s in states}) == 1


def test_errors_leave_the_state_as_it_was() -> None:
    predictor, profile, (ids, values) = samples.tiny(), samples.tiny_profile(), prompt()
    state = samples.state_after(predictor, ids[:10])
    before, good, tail = fingerprint(state), part(values, 10, 20), ids[10:20]
    calls = {
        "beyond the vocabulary": (torch.full((10,), 101), good, identity(10)), "negative": (torch.full((10,), -1), good, identity(10)),
        "no token": (tail[:0], part(good, 0, 0), identity(10)), "a layer short": (tail, good[:1], identity(10)),
        "too few tokens": (tail, part(good, 0, 9), identity(10)), "wrong place": (tail, good, identity(0)),
        "wrong dtype": (tail, [(k.half(), v) for k, v in good], identity(10)),
        "wrong heads": (tail, [(k, v[:1]) for k, v in good], identity(10)),
        "over the context": (torch.zeros(503, dtype=torch.int64), [(torch.zeros(2, 503, 12, dtype=torch.bfloat16),) * 2] * 2, identity(10)),
    }  # fmt: skip
    for what, (token_ids, truth, i) in calls.items():
        with pytest.raises(errors.UserError):
            codec.encode(predictor, profile, state, token_ids, truth, i)
            pytest.fail(what)
        assert fingerprint(state) == before, what
    chunk = codec.encode(predictor, profile, state, tail, good, identity(10))
    state.truncate(10)
    for blob in (chunk.blob[:-1], b"", chunk.blob[:400] + b"\0" * (len(chunk.blob) - 400)):
        with pytest.raises(errors.BlobError):
            codec.decode(predictor, profile, state, tail, blob, identity(10))
        assert fingerprint(state) == before
    assert samples.same_bits(codec.decode(predictor, profile, state, tail, chunk.blob, identity(10)).layers, good)


def test_a_state_at_the_wrong_place_fails_cleanly() -> None:
    predictor, profile, (ids, values) = samples.tiny(), samples.tiny_profile(), prompt()
    first, second = samples.encode_prompt(predictor, profile, ids[:40], part(values, 0, 40), 20)
    i = codec.ChunkIdentity(samples.TARGET, samples.keys(ids[:40], 20)[1], first.chain_digest, 20)
    for seen in (0, 19, 21, 40):
        state = samples.state_after(predictor, ids[:seen])
        with pytest.raises(errors.BlobError, match=f"from {seen} on"):
            codec.decode(predictor, profile, state, ids[20:40], second.blob, i)
        assert state.length == seen


def test_other_tokens_or_another_prefix_are_found_out() -> None:
    """Keys exclude it; should a caller mix them up, the checksum still does not let wrong bits out."""
    predictor, profile, (ids, values) = samples.tiny(), samples.tiny_profile(), prompt()
    state = samples.state_after(predictor, ids[:20])
    chunk = codec.encode(predictor, profile, state, ids[20:40], part(values, 20, 40), identity(20))
    for prefix, tokens in ((ids[:20], ids[21:41]), (samples.tokens(20, seed=5), ids[20:40])):
        other = samples.state_after(predictor, prefix)
        with pytest.raises((errors.LayerMismatch, errors.CorruptBlob)):
            codec.decode(predictor, profile, other, tokens, chunk.blob, identity(20))
        assert other.length == 20


def test_calibration_is_deterministic_and_refuses_nothing_to_see() -> None:
    predictor, (ids, values) = samples.tiny(), prompt()
    assert samples.make_profile(predictor).id == samples.make_profile(predictor).id
    whole = codec.measure(predictor, predictor.new_state(), ids, values)
    state, parts = predictor.new_state(), codec.Moments.zero(predictor.config)
    for begin in range(0, TOKENS, 25):
        parts.add(codec.measure(predictor, state, ids[begin : begin + 25], part(values, begin, begin + 25)))
    assert (
        np.allclose(whole.squares, parts.squares)
        and (whole.counts == parts.counts).all()
        and whole.tokens == parts.tokens == TOKENS
    )
    with pytest.raises(errors.UserError, match="no token"):
        codec.freeze(predictor, samples.TARGET, "bf16", codec.Moments.zero(predictor.config), prefill_tokens=64)


def test_calibration_ignores_what_is_not_finite() -> None:
    predictor, (ids, values) = samples.tiny(), prompt()
    spoiled = [(k.clone(), v.clone()) for k, v in values]
    spoiled[0][0][0, 3, 2], spoiled[1][1][1, 5, 0] = float("nan"), float("inf")
    moments = codec.measure(predictor, predictor.new_state(), ids, spoiled)
    assert np.isfinite(moments.squares).all()
    assert (
        moments.counts[0, 0, 0, 2] == moments.counts[1, 1, 1, 0] == TOKENS - 1
        and moments.counts.sum() == moments.counts.size * TOKENS - 2
    )
    profile = codec.freeze(predictor, samples.TARGET, "bf16", moments, prefill_tokens=64)
    chunk = codec.encode(predictor, profile, predictor.new_state(), ids, spoiled, identity())
    assert samples.same_bits(
        codec.decode(predictor, profile, predictor.new_state(), ids, chunk.blob, identity()).layers, spoiled
    )


def test_an_identity_of_wrong_sizes_is_refused_and_leaves_the_state() -> None:
    predictor, profile, (ids, values) = samples.tiny(), samples.tiny_profile(), prompt()
    state = predictor.new_state()
    for size in (0, 15, 17):
        with pytest.raises(ValueError, match="16"):
            codec.encode(predictor, profile, state, ids, values, replace(identity(), parent_digest=bytes(size)))
        assert state.length == 0 and not state.layers


# ---------------------------------------------------------------- stored profiles
def test_a_profile_comes_back_with_its_id() -> None:
    for name in ("bf16", "fp16"):
        profile = samples.tiny_profile(name)
        data = profile.to_bytes()
        again = codec.Profile.from_bytes(data)
        assert (
            again.to_bytes() == data
            and again.id == profile.id == codec.content_id(data)
            and again.facts == profile.facts
        )


@settings(max_examples=25, deadline=None, derandomize=True)
@given(st.integers(0, 10**6))
def test_truncated_profiles_are_refused(end: int) -> None:
    data = samples.tiny_profile().to_bytes()
    with pytest.raises(errors.ProfileError):
        codec.Profile.from_bytes(data[: end % len(data)])


@settings(max_examples=120, deadline=None, derandomize=True)
@given(st.integers(0, 1200), st.integers(0, 7))
def test_a_flipped_profile_is_refused_or_has_another_id(at: int, bit: int) -> None:
    data = bytearray(samples.tiny_profile().to_bytes())
    data[at] ^= 1 << bit
    with contextlib.suppress(errors.ProfileError):
        profile = codec.Profile.from_bytes(bytes(data))
        assert profile.id == codec.content_id(bytes(data)) != samples.tiny_profile().id
        assert (len(profile.target), len(profile.predictor)) == (32, 32)


def profile_with(facts: dict[str, Any] | None = None, drop: str = "", **tensors: np.ndarray[Any, Any]) -> bytes:
    profile = samples.tiny_profile()
    parts = profile.tensors | tensors
    parts.pop(drop, None)
    text = json.dumps(
        json.loads(json.dumps(profile.facts.__dict__)) | (facts or {}), sort_keys=True, separators=(",", ":")
    )
    data: bytes = safetensors.numpy.save({k: np.ascontiguousarray(v) for k, v in parts.items()}, {"profile": text})
    return data


def test_profiles_of_wrong_shapes_and_ranges_are_refused() -> None:
    assert codec.Profile.from_bytes(profile_with()).id == samples.tiny_profile().id
    grid, reciprocal, table = (samples.tiny_profile().tensors[n] for n in ("grid", "reciprocal", "table"))
    falling = table.copy()
    falling[4000] = falling[5000]
    bad: list[bytes] = [
        b"", b"\0" * 8, b"\xff" * 64, profile_with(drop="grid"), profile_with(drop="table"), profile_with({"version": 2}),
        profile_with({"version": 0}), profile_with({"coder": "another"}), profile_with({"cache_format": "fp4"}),
        profile_with({"layers": 3}),
        profile_with({"kv_heads": 1}), profile_with({"unknown": 1}), profile_with({"target": "xyz"}), profile_with({"predictor": "ab"}),
        profile_with({"loop": "ajar"}), profile_with(grid=grid[:1]), profile_with(grid=grid.astype(np.int32)),
        profile_with(grid=np.full_like(grid, -127)), profile_with(grid=np.full_like(grid, 121)),
        profile_with(reciprocal=reciprocal * 0), profile_with(reciprocal=np.full_like(reciprocal, (1 << 20) + 1)),
        profile_with(reciprocal=reciprocal.astype(np.int64)), profile_with(table=table[1:]), profile_with(table=table + 1),
        profile_with(table=falling), profile_with(table=table.astype(np.float64)),
        profile_with({"cache_format": "fp16"}, grid=grid - 20),
    ]  # fmt: skip
    samples.refused_all(codec.Profile.from_bytes, bad, errors.ProfileError)
