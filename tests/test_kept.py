"""A state that holds the cache itself: the same blobs and guesses as one of integers, whatever the cache holds; and no copy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import codec
from codec.formats import FORMATS
from codec.predictor import fused, memory
from codec.predictor.kept import Kept, Stored, kept
from codec.predictor.memory import Memory, Seen
from tests import codec_samples as samples
from tests.float_model import world
from tests.test_closed_loop import ALL, FAR, hostile_cache
from tests.test_memory import held, tensors_of

CHUNK = 48


def encoded(
    profile: codec.Profile, ids: Tensor, values: samples.Layers, *, shared: bool, chunk: int = CHUNK
) -> tuple[list[bytes], codec.PredictorState, list[samples.Layers]]:
    """Blobs of a prompt whose middle was cut away and encoded once more, the state after it, and the chunks it was given."""
    p = world().predictor
    state, parent, out, given = p.new_state(), [codec.ROOT_DIGEST], list[bytes](), list[samples.Layers]()
    places = list(range(0, len(ids), chunk))
    for n, begin in enumerate([*places[:3], *places[1:]]):
        index = begin // chunk
        state.truncate(begin)
        part = slice(begin, begin + chunk)
        given.append([(k[:, part].contiguous(), v[:, part].contiguous()) for k, v in values])
        where = codec.ChunkIdentity(samples.TARGET, bytes(32), parent[index], begin)
        coded = codec.encode(p, profile, state, ids[part], given[-1], where, shared=shared)
        parent[index + 1 :] = [coded.chain_digest]
        out.append(coded.blob)
        assert n < 3 or coded.blob == out[index] or index > 2
    return out, state, given


@pytest.mark.parametrize("loop", ["closed", "open"])
@pytest.mark.parametrize("piece", [16, memory.PIECE])
@pytest.mark.parametrize("name", list(FORMATS))
@pytest.mark.parametrize("kind", ["", FAR, ALL])
def test_blobs_are_those_of_a_state_of_integers(
    name: str, kind: str, piece: int, loop: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "PIECE", piece)  # shorter ones are joined, which makes integers of them
    w, ids = world(), world().tokens(200, seed=3)
    profile, values = w.profile(loop, name), w.truth(ids, name)
    if kind:
        values = hostile_cache(values, profile.format, [0, 7, 50, 100, 199], kind, every=5)
    kept_values = [(k.clone(), v.clone()) for k, v in values]
    blobs, state, given = encoded(profile, ids, values, shared=True)
    want, other, _ = encoded(profile, ids, values, shared=False)
    assert blobs == want
    guesses = [samples.guesses(w.predictor, s, ids[:20]) for s in (state, other)]
    assert samples.same_bits(*guesses)
    assert samples.same_bits(values, kept_values)
    for n, chunk in enumerate(given):  # a cache of float32 is not written to either
        begin = [0, 1, 2, 1, 2, 3, 4][n] * CHUNK
        assert samples.same_bits(chunk, [(k[:, begin : begin + CHUNK], v[:, begin : begin + CHUNK]) for k, v in values])
    pieces = [p for m in state.layers for p in m.pieces]
    if loop == "closed" and piece < CHUNK:
        assert all(isinstance(p, Kept) for p in pieces)
        assert (
            any(len(o.places) for p in pieces if isinstance(p, Kept) for o in p.others) == (kind == FAR) or kind == ALL
        )
    if loop == "open":
        assert all(isinstance(p, Seen) for p in pieces), "it attends to guesses, which nothing stores"


def test_the_state_holds_what_it_was_given_and_no_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "PIECE", CHUNK)
    w, ids = world(), world().tokens(4 * CHUNK, seed=4)
    _, state, given = encoded(w.profile("closed"), ids, w.truth(ids, "bf16"), shared=True)
    own = {t.untyped_storage().data_ptr() for chunk in given for pair in chunk for t in pair}
    pieces = [p for m in state.layers for p in m.pieces]
    assert len(pieces) == 4 * (w.predictor.config.layers - 1)
    for p in pieces:
        assert isinstance(p, Kept)
        assert {t.untyped_storage().data_ptr() for t in p.stored.pair} <= own
        assert held(tensors_of(p.others)) == 0
    state.truncate(CHUNK + 5)  # of a piece that is cut, integers are left
    assert [type(p) for p in state.layers[0].pieces] == [Kept, Seen]
    assert sum(p.total for p in state.layers[0].pieces) == CHUNK + 5


@pytest.mark.parametrize("name", list(FORMATS))
@pytest.mark.parametrize("plain", [False, True])
def test_any_part_of_a_piece_is_that_of_the_whole(name: str, plain: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "ENABLED", not plain)
    rng, fmt, shape = np.random.default_rng(5), FORMATS[name], (3, 40, 6)
    pair: Any = tuple(samples.cast(torch.from_numpy(rng.standard_normal(shape)).float(), fmt) for _ in range(2))
    scales = torch.from_numpy(rng.uniform(0.5, 2, (2, 3, 1, 1)).astype(np.float32)) if fmt.coarse else None
    stored, step = Stored(pair, scales), 2.0 ** torch.arange(-12, -9)[:, None, None].float()
    saw: Any = [stored.real(side, 0, 40).clone() for side in (0, 1)]
    for side, t, heads in ((0, 0, slice(None)), (1, 39, slice(1, 2)), (1, 17, slice(0, 3))):
        saw[side][heads, t, ::3] = 7.25
    whole, piece = Seen.of(*saw, step), kept(stored, tuple(saw), step)
    assert piece is not None and piece.total == 40
    for begin in range(40):
        for end in (begin, begin + 1, begin + 9, 40):
            got, want = piece.cut(begin, end), whole.cut(begin, min(end, 40))
            assert all(torch.equal(getattr(got, n), getattr(want, n)) for n in ("keys", "key_scale", "values"))
    assert Memory((piece,)).seen().total == 40
    saw[0][:, :20] += 1.0
    assert kept(stored, tuple(saw), step) is None, "too much of it is not what is stored"
