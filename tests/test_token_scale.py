"""Scales of tokens: integers alike in any order of work, and a fit that finds what is there."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from codec import token_scale
from codec.token_scale import (
    BLOCK,
    TERMS,
    CompiledTokenScale,
    TokenScale,
    block_sizes,
    factor,
    innovations,
    levels,
)


def test_levels_are_sixteenths_of_an_octave() -> None:
    count = 32
    mean_squares = 2.0 ** np.linspace(-5.9, 5.9, 400)
    squares = np.rint(mean_squares * count * 256).astype(np.int64)
    found = levels(squares, count)
    assert np.abs(found - 16 * np.log2(mean_squares)).max() <= 1.01
    assert levels(np.array([0, 2**40]), 1).tolist() == [-96, 96]


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.integers(1, 2**50), st.integers(1, 50))
def test_logarithms_by_table_are_those_of_the_definition(n: int, spread: int) -> None:
    values = np.array([max(1, n >> spread), n, n | 1, (1 << spread), max(1, (1 << spread) - 1)])
    want = [(v**16).bit_length() - 1 for v in values.tolist()]
    assert token_scale._log2(values).tolist() == want


def test_factors_are_powers_of_two() -> None:
    weights = np.array([0, 256, 0, 0])
    x = np.arange(-200, 200)
    nothing = np.zeros_like(x)
    assert np.allclose(factor(weights, x, nothing, nothing), 2.0 ** (np.clip(x, -96, 96) / 32), rtol=1e-15)
    one = factor(np.array([512, 0, 128, 256]), np.array([5]), np.array([6]), np.array([-4]))
    assert np.allclose(one, 2.0 ** ((2 + 3 - 4) / 32))


def block_sums(squares: np.ndarray) -> np.ndarray:
    """Sums [blocks, T] of squares [N, T] over blocks."""
    return np.add.reduceat(squares, np.arange(0, len(squares), BLOCK), axis=0)


def spread(scale: TokenScale, sigma: np.ndarray, squares: np.ndarray) -> np.ndarray:
    """Sigmas [N, T] times their factors, block after block."""
    out = np.empty_like(sigma)
    for b, begin in enumerate(range(0, len(sigma), BLOCK)):
        rows = slice(begin, begin + BLOCK)
        out[rows] = sigma[rows] * scale.of(b)
        scale.add(squares[rows].sum(0), len(squares[rows]))
    return out


@settings(max_examples=30, deadline=None, derandomize=True)
@given(st.integers(0, 2**32 - 1), st.integers(1, 120), st.integers(1, 7))
def test_compiled_and_plain_scales_are_the_same(seed: int, channels: int, tokens: int) -> None:
    rng = np.random.default_rng(seed)
    blocks = len(block_sizes(channels))
    weights = rng.integers(-700, 700, (blocks, TERMS))
    before = rng.integers(-96, 97, tokens) if seed % 2 else None
    sigma = 2.0 ** rng.uniform(-9, 9, (channels, tokens))
    squares = innovations(rng.standard_normal((channels, tokens)) * 3 * sigma, sigma)
    compiled, plain = CompiledTokenScale(weights, tokens, before), TokenScale(weights, tokens, before)
    assert np.array_equal(spread(compiled, sigma, squares), spread(plain, sigma, squares))
    assert np.array_equal(compiled.level, plain.level)
    assert block_sizes(channels).sum() == channels


def test_innovations_are_clipped() -> None:
    off = np.array([0.0, 1.0, -1.0, 8.0, 1e300, -1e300])
    assert innovations(off, np.ones(1)).tolist() == [0, 256, 256, 16384, 16384, 16384]


def test_a_fit_finds_tokens_that_are_further_off() -> None:
    """Tokens whose innovations are all twice or half as large: their scale must cost fewer bits, on other tokens too."""
    rng, layers, channels = np.random.default_rng(3), 3, 128

    def sample(tokens: int) -> np.ndarray:
        size = np.where(rng.random(tokens) < 0.5, 0.5, 2.0)
        return rng.standard_normal((layers, channels, tokens)) * size

    train, test = [sample(200) for _ in range(4)], sample(500)
    one = np.ones((1, 1))
    energies = [np.stack([block_sums(innovations(z, one)) for z in x]) for x in train]
    weights = token_scale.fit(energies, block_sizes(channels)).astype(np.int64)
    scale = TokenScale(weights[0], test.shape[2], None)
    sigma = np.full((channels, test.shape[2]), math.sqrt((0.25 + 4) / 2))  # what a joint model without them has
    bits = [np.log2(sigma) + (test[0] / sigma) ** 2 / 2 / math.log(2)]
    own = spread(scale, sigma, innovations(test[0], sigma))
    bits.append(np.log2(own) + (test[0] / own) ** 2 / 2 / math.log(2))
    gain = (bits[0] - bits[1]).reshape(-1, BLOCK, test.shape[2]).mean((1, 2))
    assert abs(gain[0]) < 0.02, "nothing is known before the first block of the first layer"
    assert (gain[1:] > 0.2).all(), gain  # the most that can be gained is 0.34 bit


def test_a_fit_of_tokens_alike_changes_nothing() -> None:
    rng, one = np.random.default_rng(5), np.ones((1, 1))
    energies = [
        np.stack([block_sums(innovations(rng.standard_normal((64, 300)), one)) for _ in range(2)]) for _ in range(3)
    ]
    weights = token_scale.fit(energies, block_sizes(64)).astype(np.int64)
    x = rng.standard_normal((64, 300))
    scale = TokenScale(weights[1], 300, levels(energies[0][0].sum(0), 64))
    own = spread(scale, np.ones((64, 300)), innovations(x, one))
    assert np.abs(np.log2(own)).mean() < 0.05


def test_innovations_that_are_all_0_are_fitted_without_a_warning() -> None:
    energies, counts = [np.zeros((2, 3, 1), np.int64)], np.array([BLOCK, BLOCK, 8])
    with np.errstate(all="raise"):
        weights = token_scale.fit(energies, counts)
    assert weights.shape == (2, 3, TERMS) and (weights[0, 0] == 0).all() and weights[:, 1:, 0].max() == -32768
