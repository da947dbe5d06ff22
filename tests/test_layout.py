"""Tensors to channels and back against numpy's own views, at all sizes around a tile; items of a tensor share its memory."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from codec.formats import FORMATS
from codec.joint_model import _scaled
from codec.layout import transpose
from codec.token_scale import _EDGES, _SEARCH, _log2, _sixteenths

SIZES = (0, 1, 15, 16, 17, 40)


@pytest.mark.parametrize("kind", [np.uint8, np.uint16, np.uint32, np.float32, np.float64])
def test_channels_are_the_transposed_tensor_and_come_back(kind: type[np.generic]) -> None:
    rng = np.random.default_rng(3)
    for heads, tokens, dims in itertools.product((0, 1, 3), SIZES, SIZES):
        x = rng.integers(0, 200, (heads, tokens, dims)).astype(kind)
        x.setflags(write=False)
        channels, back = np.full((heads, dims, tokens), 9, kind), np.full((heads, tokens, dims), 9, kind)
        transpose(x, channels)
        assert np.array_equal(channels, x.transpose(0, 2, 1))
        transpose(channels, back)
        assert np.array_equal(back, x)


def test_items_share_a_tensors_memory_and_patterns_do_not() -> None:
    for fmt in FORMATS.values():
        values = fmt.tensor(np.arange(60).reshape(3, 4, 5))
        items, patterns = fmt.items(values), fmt.patterns(values)
        assert items.dtype == fmt.empty((1,)).dtype and np.array_equal(items, patterns)
        items[0, 0, 0] = 17
        assert fmt.patterns(values)[0, 0, 0] == 17 and patterns[0, 0, 0] == 0
        assert fmt.shared(items).data_ptr() == values.data_ptr()
        assert np.array_equal(fmt.items(values.transpose(0, 2)), fmt.patterns(values).transpose(2, 1, 0))
        fortran = np.asfortranarray(fmt.patterns(values))
        assert fmt.tensor(fortran).is_contiguous() and np.array_equal(fmt.patterns(fmt.tensor(fortran)), fortran)


def test_scaled_sums_are_clipped_and_rounded_once() -> None:
    rng = np.random.default_rng(1)
    sums = rng.integers(-(2**31), 2**31 - 1, (5, 7)).astype(np.int32)
    unit = np.ldexp(1.0, rng.integers(-40, 12, 7))
    out = np.empty((5, 7), np.float32)
    _scaled(sums, unit, 2.0**20, out)
    assert np.array_equal(out, np.clip(sums * unit, -(2.0**20), 2.0**20).astype(np.float32))
    assert (np.abs(out) == 2.0**20).any() and (np.abs(out) < 2.0**20).any()


def test_compiled_logarithms_equal_the_plain_ones_at_every_edge() -> None:
    edges = (_EDGES[None] * np.ldexp(1.0, np.arange(1, 52))[:, None]).reshape(-1)
    n = np.unique(np.concatenate([np.floor(edges) + k for k in (-1, 0, 1, 2)] + [np.arange(1, 5000)]).astype(np.int64))
    n = n[n >= 1]
    assert [int(_sixteenths(int(x), _SEARCH)) for x in n] == _log2(n).tolist()
