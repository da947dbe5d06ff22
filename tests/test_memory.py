"""What the predictor's state and a pass hold: bytes of the tensors that are alive, whatever an allocator makes of them."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator
from dataclasses import fields, is_dataclass, replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

import codec
from codec.predictor import memory
from codec.predictor.decoder import DecoderRun
from codec.predictor.far import SINKS
from tests import codec_samples as samples
from tests.float_model import world
from tests.test_prefix import CHUNK, stored

LAYERS = 4
CONFIG = samples.SMALL | {"num_hidden_layers": LAYERS, "max_position_embeddings": 2048}


def predictor(window: int = 0) -> codec.Predictor:
    return codec.build_predictor(CONFIG, samples.weights(CONFIG), "int8", window=window)


def tensors_of(x: Any) -> Iterator[Tensor]:
    """All tensors in dataclasses, lists and tuples."""
    if isinstance(x, Tensor):
        yield x
    elif is_dataclass(x):
        for field in fields(x):
            yield from tensors_of(getattr(x, field.name))
    elif isinstance(x, list | tuple):
        for part in x:
            yield from tensors_of(part)


def held(tensors: Iterable[Tensor]) -> int:
    """Bytes that they keep alive, each storage once."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


def token_bytes() -> int:
    """What a token needs: int16 K and V and a scale a head, in every layer but the last."""
    heads, dim = CONFIG["num_key_value_heads"], CONFIG["head_dim"]
    return (LAYERS - 1) * heads * (2 * 2 * dim + 4)


def taken_in(p: codec.Predictor, ids: Tensor, chunk: int) -> codec.PredictorState:
    state = p.new_state()
    for begin in range(0, len(ids), chunk):
        p.advance(state, ids[begin : begin + chunk])
    return state


@pytest.mark.parametrize("chunk", [7, 100, 256, 300])
def test_a_state_holds_each_token_once(chunk: int) -> None:
    p, ids = predictor(), samples.tokens(900, vocab=257)
    state = taken_in(p, ids, chunk)
    assert held(tensors_of(state.layers)) == 900 * token_bytes()
    assert max(len(m.pieces) for m in state.layers) <= 1 + 900 // memory.PIECE
    for n in (600, 256, 5, 0):  # what is forgotten is let go
        state.truncate(n)
        assert held(tensors_of(state.layers)) <= max(n, 1) * token_bytes() + memory.PIECE * token_bytes()
        assert sum(m.tokens for m in state.layers) == n * (LAYERS - 1)
    assert held(tensors_of(state.layers)) == 0


def test_of_windows_a_state_holds_centroids_too() -> None:
    window, ids = 32, samples.tokens(400, vocab=257)
    state = taken_in(predictor(window), ids, 100)
    far = [m.far for m in state.layers]
    assert held(tensors_of(state.layers)) == 400 * token_bytes() + held(tensors_of(far))
    assert held(tensors_of(far)) < 400 * token_bytes() / 8


@pytest.mark.parametrize(("window", "chunk"), [(1, 17), (5, 9), (32, 20), (32, 32), (32, 50), (48, 32)])
def test_a_state_that_forgets_goes_on_as_one_that_holds_all(
    window: int, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "PIECE", 32)
    p, ids = predictor(window), samples.tokens(60 if window == 1 else 300, vocab=257)
    state, whole = p.new_state(forgets=True), p.new_state()
    sizes = []
    for begin in range(0, len(ids), chunk):
        part = ids[begin : begin + chunk]
        for got, want in zip(samples.guesses(p, state, part), samples.guesses(p, whole, part), strict=True):
            assert all(torch.equal(g, w) for g, w in zip(got, want, strict=True))
        p.advance(state, part)
        p.advance(whole, part)
        assert {m.tokens for m in state.layers} == {begin + len(part)} == {state.length}
        sizes.append(held(tensors_of([m.pieces for m in state.layers])))
    near = (
        SINKS + 2 * window + 2 * max(chunk, memory.PIECE)
    )  # the window, and what of a first and a last piece is in it
    assert max(sizes) <= near * token_bytes() and (window == 1 or near < len(ids))
    with pytest.raises(ValueError, match="forgets"):
        state.truncate(len(ids) - 1)
    layer = state.layers[0]
    assert layer.gap, "something was let go"
    for near in (0, SINKS + layer.gap - 1):
        with pytest.raises(ValueError, match="no longer held"):
            layer.seen(near)
    with pytest.raises(ValueError, match="no longer held"):
        replace(layer.seen(SINKS + layer.gap), far=None).with_far(window)
    state.truncate(0)
    assert not held(tensors_of(state.layers))


def test_a_pass_shares_what_its_state_holds() -> None:
    p, ids = predictor(), samples.tokens(560, vocab=257)
    state = taken_in(p, ids[:512], 256)
    run = p.run([state], [ids[512:]])
    for layer in range(LAYERS - 1):
        run.advance(layer, run.guess(layer))
    assert isinstance(run, DecoderRun) and held(tensors_of([state.layers, run.seen])) == 560 * token_bytes()
    run.commit()
    assert held(tensors_of(state.layers)) == 560 * token_bytes()


def test_a_pass_that_is_not_kept_remembers_nothing() -> None:
    p, ids = predictor(), samples.tokens(60, vocab=257)
    run, kept = p.run([p.new_state()], [ids], keep=False), p.run([p.new_state()], [ids])
    for layer in range(LAYERS):
        for got, want in zip(run.guess(layer), kept.guess(layer), strict=True):
            assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])
        if layer < LAYERS - 1:
            run.advance(layer, run.guess(layer))
            kept.advance(layer, kept.guess(layer))
    assert isinstance(run, DecoderRun) and not run.seen
    with pytest.raises(ValueError, match="Only 0 of 3 layers"):
        run.commit()


def alive() -> int:
    gc.collect()
    return held(x for x in gc.get_objects() if type(x) is Tensor)


def test_a_restored_prefix_holds_no_layer_that_is_done() -> None:
    """In the closed loop, where every layer leaves K, V and corrections behind."""
    w = world()
    prompt = stored(w, w.profile("closed"), 3 * CHUNK + 5, 70)
    counts: dict[bool, list[int]] = {}
    for keep in (False, True):
        decoding = codec.decode_prefixes(w.predictor, prompt.profile, [prompt.task(w.predictor.new_state())], keep=keep)
        counts[keep] = []
        for pairs in decoding:
            counts[keep].append(alive())
            del pairs
    heads, dim = w.predictor.config.kv_heads, w.predictor.config.head_dim
    layer = len(prompt.ids) * heads * (2 * 2 * dim + 4)
    steps = {keep: [b - a for a, b in pairwise(found[:-1])] for keep, found in counts.items()}
    assert steps[False] and set(steps[False]) == {0}
    assert set(steps[True]) == {layer}, "what a pass is kept for"
