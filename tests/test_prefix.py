"""Chunks of whole prefixes decoded together: the bits of codec.decode, layer by layer, and what is wrong with one chunk named."""

from __future__ import annotations

import copy
from dataclasses import replace
from itertools import islice

import pytest
import torch

import codec
from codec import blob as blobs
from codec.errors import BlobError, ChunkFailed
from tests import codec_samples as samples
from tests.float_model import World, world

CHUNK = 16


class Stored:
    """One prompt's chunks as a store would have them."""

    def __init__(self, w: World, profile: codec.Profile, ids: torch.Tensor, truth: samples.Layers) -> None:
        self.ids, self.truth, self.profile = ids, truth, profile
        chunks = samples.encode_prompt(w.predictor, profile, ids, truth, CHUNK)
        keys = samples.keys(ids, CHUNK, profile.cache_format, profile.target)
        self.blobs = [c.blob for c in chunks]
        parents = [codec.ROOT_DIGEST, *(c.chain_digest for c in chunks)]
        self.identities = [
            codec.ChunkIdentity(profile.target, key, parent, CHUNK * n)
            for n, (key, parent) in enumerate(zip(keys, parents[:-1], strict=True))
        ]

    def task(self, state: codec.PredictorState, first: int = 0, last: int | None = None) -> codec.PrefixTask:
        part = slice(first, len(self.blobs) if last is None else last)
        ids = self.ids[first * CHUNK : None if last is None else last * CHUNK]
        return codec.PrefixTask(state, ids, self.blobs[part], self.identities[part])


def stored(w: World, profile: codec.Profile, tokens: int, seed: int, mode: str = "tensor") -> Stored:
    ids = w.tokens(tokens, seed=seed)
    return Stored(w, profile, ids, w.truth(ids, profile.cache_format, mode))


CASES = [
    ("fp8", "closed", "bf16"), ("fp8", "open", "bf16"), ("fp8", "closed", "fp8_e4m3"), ("linear", "closed", "bf16"),
    ("static", "closed", "bf16"), ("linear", "closed", "fp8_e4m3"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "loop", "name"), CASES)
def test_prompts_of_several_lengths_come_back_together(kind: str, loop: str, name: str) -> None:
    w = world(kind)
    profile = w.profile(loop, name)
    prompts = [stored(w, profile, count, 40 + count) for count in (3 * CHUNK + 5, 7, 2 * CHUNK)]
    states = [w.predictor.new_state() for _ in prompts]
    tasks = [p.task(state) for p, state in zip(prompts, states, strict=True)]
    layers = list(codec.decode_prefixes(w.predictor, profile, tasks))
    assert len(layers) == w.predictor.config.layers
    for number, (prompt, state) in enumerate(zip(prompts, states, strict=True)):
        assert samples.same_bits([layer[number] for layer in layers], prompt.truth)
        assert state.length == len(prompt.ids)


def joined(first: list[samples.Layers], second: list[samples.Layers]) -> samples.Layers:
    """Layers of one task, and of another that follows it, given layer by layer."""
    return [(torch.cat([a[0], b[0]], 1), torch.cat([a[1], b[1]], 1)) for a, b in zip(first, second, strict=True)]


def of(layers: list[samples.Layers], number: int) -> samples.Layers:
    """Task `number`'s layers."""
    return [layer[number] for layer in layers]


def two_prompts(w: World, profile: codec.Profile) -> list[Stored]:
    """With two chunks in common."""
    shared = w.tokens(2 * CHUNK, seed=50)
    prompts = [torch.cat([shared, w.tokens(CHUNK + 3, seed=seed)]) for seed in (51, 52)]
    return [Stored(w, profile, ids, w.truth(ids, profile.cache_format)) for ids in prompts]


def test_a_prefix_is_continued_from_its_state() -> None:
    w = world()
    one, _ = two_prompts(w, w.profile("closed"))
    state = w.predictor.new_state()
    first, rest = (
        list(codec.decode_prefixes(w.predictor, one.profile, [t])) for t in (one.task(state, 0, 2), one.task(state, 2))
    )
    assert samples.same_bits(joined(of(first, 0), of(rest, 0)), one.truth)


@pytest.mark.parametrize(("kind", "loop", "name"), CASES)
@pytest.mark.parametrize("keep", [True, False])
def test_several_prompts_follow_one_prefix_in_one_pass(kind: str, loop: str, name: str, keep: bool) -> None:
    w = world(kind)
    profile = w.profile(loop, name)
    one, two = two_prompts(w, profile)
    states = [w.predictor.new_state() for _ in range(3)]
    tasks = [
        one.task(states[0], 0, 2), replace(one.task(states[1], 2), after=0), replace(two.task(states[2], 2), after=0),
    ]  # fmt: skip
    layers = list(codec.decode_prefixes(w.predictor, profile, tasks, keep=keep))
    for number, prompt in ((1, one), (2, two)):
        assert samples.same_bits(joined(of(layers, 0), of(layers, number)), prompt.truth)
    assert [s.length for s in states] == ([32, 51, 51] if keep else [0, 0, 0])
    if keep:  # the next token's guesses follow from all that was taken in
        more = w.tokens(5, seed=60)
        whole = w.predictor.new_state()
        list(codec.decode_prefixes(w.predictor, profile, [two.task(whole)]))
        pairs = zip(*(samples.guesses(w.predictor, s, more) for s in (states[2], whole)), strict=True)
        assert all(samples.same_bits([a], [b]) for a, b in pairs)


@pytest.mark.parametrize("after", [1, 2, -1])
def test_a_task_follows_one_before_it_with_an_empty_state(after: int) -> None:
    w = world()
    one, two = two_prompts(w, w.profile("closed"))
    tasks = [one.task(w.predictor.new_state(), 0, 2), replace(two.task(w.predictor.new_state(), 2), after=after)]
    with pytest.raises(ValueError, match="cannot follow"):
        next(codec.decode_prefixes(w.predictor, one.profile, tasks))
    held = w.predictor.new_state()
    w.predictor.advance(held, one.ids[:CHUNK])
    with pytest.raises(ValueError, match="cannot follow"):
        next(codec.decode_prefixes(w.predictor, one.profile, [tasks[0], replace(two.task(held, 2), after=0)]))


def test_a_pass_that_is_given_up_leaves_the_state_as_it_was() -> None:
    w = world()
    prompt = stored(w, w.profile("closed"), 3 * CHUNK, 53)
    state = w.predictor.new_state()
    passing = codec.decode_prefixes(w.predictor, prompt.profile, [prompt.task(state)])
    layers = list(islice(passing, 2))
    passing.close()  # type: ignore[attr-defined]
    assert state.length == 0 and state.layers == []
    assert samples.same_bits([layer[0] for layer in layers], prompt.truth[:2])


def test_a_damaged_chunk_is_named_before_anything_is_decoded() -> None:
    w = world()
    prompts = [stored(w, w.profile("closed"), 3 * CHUNK, seed) for seed in (54, 55)]
    blob = bytearray(prompts[1].blobs[2])
    blob[-40] ^= 1
    prompts[1].blobs[2] = bytes(blob)
    tasks = [p.task(w.predictor.new_state()) for p in prompts]
    with pytest.raises(ChunkFailed, match="checksum") as caught:
        next(codec.decode_prefixes(w.predictor, w.profile("closed"), tasks))
    assert (caught.value.task, caught.value.chunk) == (1, 2)
    assert isinstance(caught.value, BlobError)


def test_a_chunk_that_decodes_to_other_bits_is_named_and_its_layer_not_given() -> None:
    """A bitstream changed within intact checksums of the blob: what only the layers' own checksums can see."""
    w = world()
    prompt = stored(w, w.profile("closed"), 3 * CHUNK, 56)
    header = codec.read_header(prompt.blobs[1])
    (stream,) = blobs.streams(prompt.blobs[1], header)
    at = len(stream) * 5 // 8  # layers follow one another, so the first ones stay as they are
    prompt.blobs[1] = blobs.pack(header, [stream[:at] + bytes([stream[at] ^ 1]) + stream[at + 1 :]])
    state = w.predictor.new_state()
    got = []
    with pytest.raises(ChunkFailed) as caught:
        for layer in codec.decode_prefixes(w.predictor, prompt.profile, [prompt.task(state)]):
            got.append(layer[0])
    assert (caught.value.task, caught.value.chunk) == (0, 1)
    assert 1 <= len(got) < w.predictor.config.layers
    assert samples.same_bits(got, prompt.truth[: len(got)]) and state.length == 0


def test_an_error_survives_the_way_between_processes() -> None:
    error = copy.copy(ChunkFailed("bent", 3, 4))
    assert (str(error), error.task, error.chunk) == ("bent", 3, 4)
