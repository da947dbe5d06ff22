"""Chunks of whole prefixes decoded together: the bits of codec.decode, layer by layer, and what is wrong with one chunk named."""

from __future__ import annotations

import copy
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


def test_a_prefix_is_continued_from_its_state_and_a_fork_goes_its_own_way() -> None:
    w = world()
    profile = w.profile("closed")
    shared = w.tokens(2 * CHUNK, seed=50)
    prompts = [torch.cat([shared, w.tokens(CHUNK + 3, seed=seed)]) for seed in (51, 52)]
    one, two = (Stored(w, profile, ids, w.truth(ids)) for ids in prompts)
    state = w.predictor.new_state()
    first = list(codec.decode_prefixes(w.predictor, profile, [one.task(state, 0, 2)]))
    other = codec.fork(state)
    assert other.length == 2 * CHUNK
    rest = list(codec.decode_prefixes(w.predictor, profile, [one.task(state, 2), two.task(other, 2)]))
    for number, prompt in enumerate((one, two)):
        whole = [
            (torch.cat([a[0][0], b[number][0]], 1), torch.cat([a[0][1], b[number][1]], 1))
            for a, b in zip(first, rest, strict=True)
        ]
        assert samples.same_bits(whole, prompt.truth)


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
