"""The target's cache in pieces: tokens are cut, replaced and read as from one array, and no piece is ever written to."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from codec.errors import UserError
from codec.formats import BF16, FP8_E4M3, NumberFormat
from codec.scales import CacheScales
from pipeline.piece_cache import PieceLayer, gather

HEADS, DIM = 2, 4


def some(rng: np.random.Generator, tokens: int) -> Tensor:
    return torch.from_numpy(rng.standard_normal((HEADS, tokens, DIM)).astype(np.float32)).bfloat16()


def same(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    st.sampled_from([BF16, FP8_E4M3]),
    st.lists(st.tuples(st.sampled_from("upcr"), st.integers(1, 9), st.integers(0, 40)), max_size=12),
    st.integers(0, 2**32 - 1),
)
def test_pieces_are_one_array(fmt: NumberFormat, steps: list[tuple[str, int, int]], seed: int) -> None:
    rng = np.random.default_rng(seed)
    scales = CacheScales("head", rng.uniform(0.5, 2, (1, 2, HEADS)).astype(np.float32)) if fmt.coarse else None
    layer = PieceLayer(torch.bfloat16, 0, fmt, scales)
    want = [torch.empty(HEADS, 0, DIM, dtype=fmt.dtype) for _ in range(2)]
    handed: list[tuple[Tensor, Tensor]] = []

    def raw(x: Tensor) -> Tensor:
        return x.view(torch.uint8) if fmt.coarse else x

    def cat(*parts: Tensor) -> Tensor:
        return torch.cat([raw(p) for p in parts], 1).view(fmt.dtype)

    for what, tokens, place in steps:
        k, v = some(rng, tokens), some(rng, tokens)
        if what == "u":  # as a pass of the model does, of which gathering is the end
            given = [t if scales is None else scales.quantise(t, 0, side, fmt) for side, t in enumerate((k, v))]
            want = [cat(w, g) for w, g in zip(want, given, strict=True)]
            whole = layer.update(k[None], v[None])
            meant = [w if scales is None else scales.dequantise(w, 0, side, k.dtype) for side, w in enumerate(want)]
            assert all(same(a[0], b) for a, b in zip(whole, meant, strict=True))
            gather([layer])
        elif what == "p":
            place = min(place, want[0].shape[1])
            new = (k.to(fmt.dtype), v.to(fmt.dtype))
            want = [cat(w[:, :place], n, w[:, place + tokens :]) for w, n in zip(want, new, strict=True)]
            layer.put(place, new, torch.device("cpu"))
        elif what == "c":
            layer.crop(-place)
            want = [w[:, : max(0, w.shape[1] - place)] for w in want]
        elif want[0].shape[1]:
            place = min(place, want[0].shape[1] - 1)
            end = min(place + tokens, want[0].shape[1])
            got = layer.read(place, end - place)
            assert all(same(g, w[:, place:end]) and g.is_contiguous() for g, w in zip(got, want, strict=True))
            handed.append((got[0], got[0].clone()))
        assert layer.get_seq_length() == want[0].shape[1]
    assert all(same(*pair) for pair in handed)
    if want[0].shape[1]:
        assert all(same(g, w) for g, w in zip(layer.read(0, want[0].shape[1]), want, strict=True))
    layer.reset()
    assert layer.get_seq_length() == 0 and not layer.pieces


def test_a_pass_leaves_its_tokens_in_one_block() -> None:
    rng = np.random.default_rng(1)
    layers = [PieceLayer(torch.bfloat16, n, BF16, None) for n in range(3)]
    given = [(some(rng, 5), some(rng, 5)) for _ in layers]
    for layer, (k, v) in zip(layers, given, strict=True):
        layer.update(k[None], v[None])
    gather(layers)
    assert len({t.untyped_storage().data_ptr() for layer in layers for t in layer.pieces[0]}) == 1
    for layer, pair in zip(layers, given, strict=True):
        assert all(same(a, b) and a.is_contiguous() for a, b in zip(layer.pieces[0], pair, strict=True))


def test_another_dtype_is_refused() -> None:
    k = some(np.random.default_rng(2), 3)
    with pytest.raises(UserError, match=r"torch\.float16 where torch\.bfloat16"):
        PieceLayer(torch.bfloat16, 0, BF16, None).update(k[None].half(), k[None].half())
