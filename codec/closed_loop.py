"""The closed loop (DESIGN 4): code a layer jointly, force what was decoded, correct the hidden state.

Residuals of a layer are taken in the coding order: V channels, then for each head the RoPE pairs of K, un-rotated, as (a, b)
next to each other. A channel's *feature* is its residual in whole steps, a power of two well below its sigma. A channel's mean
is an integer combination of the features before it (the Cholesky factor of their covariance, as regression coefficients), so
the encoder gets all means from one product and the decoder one after another, and both get the same integers. A pair (a, b) is a
2-D Gaussian; rotated by the token's angle it gives the law of the two K channels that are stored: the first, then the second
given the first. Everything but the integer products is elementwise float64.

Shapes: J key-value heads, D head dims, T tokens, P = J * D / 2 pairs, N = 2 * J * D channels, M hidden dims.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from codec import exact
from codec.cells import Ints
from codec.entropy import Decoder, decode_groups, encode_groups
from codec.formats import NumberFormat
from codec.ideal import ideal_bits
from codec.loop import CodedLayer, DecodedLayer, Next, Pair
from codec.residual import CellModel, ChannelScales, place_values, scale_integers

Floats = NDArray[np.float64]
Scalar = TypeVar("Scalar", bound=np.generic)

FEATURE_MAX = 1 << 14  # a feature is clamped to this many steps, about 16 sigma
_REACH = 4 * FEATURE_MAX  # a residual of more steps is an outlier that must not steer anything
COEFFICIENT_MAX = 1 << 15
_BLOCK = 32  # channels whose means the decoder updates one by one; those beyond are updated block by block
_CORRECTION_MAX = 2.0**20  # in units of the state's RMS, which is below 2**100: the sum stays finite
_LEAST = 2.0**-40  # no variance of a pair falls below this part of itself


@dataclass(frozen=True)
class JointLayer:
    """One layer's joint model, as stored in a profile."""

    step: Ints  # [N]: a feature's step is 2**step
    # [N, N], strictly lower triangular; row j in units of 2**unit[j] a step; 0 between the two of a pair
    coefficient: NDArray[np.int16]
    unit: Ints  # [N]
    sigma: NDArray[np.float32]  # [N]: of the innovation of each channel
    inside: NDArray[np.float32]  # [P]: regression of b on a
    gain: NDArray[np.int16]  # [M, N]: hidden-state correction in units of 2**gain_unit[m], of the state's RMS
    gain_unit: Ints  # [M]

    def check(self) -> None:
        """The sums are exact (DESIGN 5); raises InexactBackend."""
        exact.bound("joint model", 15, 14, float(np.log2(self.step.shape[0])))  # exact: a bound, not a value


class _Ready:
    """A JointLayer in the types that the arithmetic uses."""

    def __init__(self, joint: JointLayer, fmt: NumberFormat) -> None:
        n = len(joint.step)
        self.values = n // 2  # V channels; as many K channels follow
        self.step = np.ldexp(1.0, joint.step.astype(np.int64))[:, None]
        self.step_k, self.step_v = np.maximum(self.step[n // 2 :: 2], self.step[n // 2 + 1 :: 2]), self.step[: n // 2]
        self.unit = np.ldexp(1.0, joint.unit.astype(np.int64))[:, None]
        self.coefficient = torch.from_numpy(joint.coefficient.astype(np.float64))
        self.gain = torch.from_numpy(joint.gain.astype(np.float64))
        self.gain_unit = np.ldexp(1.0, joint.gain_unit.astype(np.int64))[:, None]
        sigma = joint.sigma.astype(np.float64)[:, None]
        self.value_scales = ChannelScales(*scale_integers(sigma[: self.values], fmt))
        variance = sigma * sigma
        self.w = joint.inside.astype(np.float64)[:, None]
        self.va = variance[self.values :: 2]
        self.cab = self.w * self.va
        self.vi = variance[self.values + 1 :: 2]
        self.vb = self.w * self.cab + self.vi


class ClosedLoop:
    """Codes layers under joint models."""

    def __init__(self, layers: list[JointLayer], rope_dim: int, model: CellModel, fmt: NumberFormat) -> None:
        for layer in layers:
            layer.check()
        self._layers = [_Ready(layer, fmt) for layer in layers]
        self._rope_dim, self._model, self._fmt = rope_dim, model, fmt

    def encode(self, layer: int, truth: Pair, guess: Pair, turn: Pair, ideal: bool, carry: object = None) -> CodedLayer:
        """See LoopCodec. All channels at once."""
        ready, fmt = self._layers[layer], self._fmt
        geometry = Geometry(guess, turn, self._rope_dim)
        patterns = [geometry.channels(fmt.patterns(t)) for t in truth]  # K, V: [J * D, T]
        residual, features = self._known(ready, geometry, truth)
        mean = exact.product(ready.coefficient, torch.from_numpy(features)).numpy() * ready.unit
        v_where = place_values(geometry.v + mean[: ready.values], ready.value_scales, fmt)
        pairs = PairLaw(ready, geometry, mean[ready.values :: 2], mean[ready.values + 1 :: 2])
        k_mean = np.empty_like(geometry.k)
        k_sigma = np.empty_like(geometry.k)
        k_mean[geometry.first_rows], k_sigma[geometry.first_rows] = (
            geometry.first(geometry.k) + pairs.mean_first,
            pairs.sigma_first,
        )
        given = pairs.second(geometry.first(residual[0]))
        k_mean[geometry.second_rows], k_sigma[geometry.second_rows] = (
            geometry.second(geometry.k) + given,
            pairs.sigma_second,
        )
        k_where = place_values(k_mean, ChannelScales(*scale_integers(k_sigma, fmt)), fmt)
        order = geometry.k_order
        v_stream, v_escapes = encode_groups(patterns[1], v_where, self._model, fmt)
        k_stream, k_escapes = encode_groups(patterns[0][order], k_where.rows(order), self._model, fmt)
        floors = (0.0, 0.0)
        if ideal:
            v_sigma = np.broadcast_to(ready.value_scales.sigma(), geometry.v.shape)
            floors = (
                ideal_bits(patterns[0], torch.from_numpy(k_mean), k_sigma, fmt),
                ideal_bits(patterns[1], torch.from_numpy(geometry.v + mean[: ready.values]), v_sigma, fmt),
            )
        return CodedLayer(
            (k_stream, v_stream), floors, k_escapes + v_escapes, self._next(ready, geometry, residual, features)
        )

    def next(self, layer: int, truth: Pair, guess: Pair, turn: Pair) -> Next:
        """How to go on from a known truth, without coding it (for calibration)."""
        ready, geometry = self._layers[layer], Geometry(guess, turn, self._rope_dim)
        residual, features = self._known(ready, geometry, truth)
        return self._next(ready, geometry, residual, features)

    def _known(self, ready: _Ready, geometry: Geometry, truth: Pair) -> tuple[list[Floats], Floats]:
        """Residuals (K, V) and features of a known truth."""
        real = [geometry.channels(t.cpu().to(torch.float64).numpy()) for t in truth]
        k_step = np.empty((len(geometry.k), 1))
        k_step[geometry.first_rows] = k_step[geometry.second_rows] = ready.step_k
        residual = [self._admit(real[0], geometry.k, k_step), self._admit(real[1], geometry.v, ready.step_v)]
        return residual, self._features(ready, np.concatenate([residual[1], geometry.unrotate(residual[0])]))

    def decode(
        self, layer: int, streams: tuple[bytes, bytes], guess: Pair, turn: Pair, carry: object = None
    ) -> DecodedLayer:
        """See LoopCodec. V channel by channel, then K pair by pair."""
        ready, fmt = self._layers[layer], self._fmt
        geometry = Geometry(guess, turn, self._rope_dim)
        means = Means(ready, geometry.tokens)
        features = means.features
        patterns = [np.empty(geometry.k.shape, np.int64), np.empty(geometry.v.shape, np.int64)]
        residual = [np.empty_like(geometry.k), np.empty_like(geometry.v)]
        coder = Decoder(streams[1])
        for j in range(ready.values):
            scales = ChannelScales(ready.value_scales.grid[j : j + 1], ready.value_scales.reciprocal[j : j + 1])
            where = place_values(geometry.v[j : j + 1] + means.of(j), scales, fmt)
            patterns[1][j] = decode_groups(coder, where, self._model, fmt)
            residual[1][j] = self._admit(self._real(patterns[1][j]), geometry.v[j], ready.step_v[j])
            features[j] = self._features(ready, residual[1][j : j + 1], slice(j, j + 1))[0]
        coder.finish()
        coder = Decoder(streams[0])
        for p in range(ready.values // 2):
            self._decode_pair(p, ready, geometry, means, coder, patterns[0], residual[0])
        coder.finish()
        out = [fmt.tensor(geometry.tensor(x)) for x in patterns]
        return DecodedLayer((out[0], out[1]), self._next(ready, geometry, residual, features))

    def _decode_pair(
        self, p: int, ready: _Ready, geometry: Geometry, means: Means, coder: Decoder, patterns: Ints, residual: Floats
    ) -> None:
        """Decode the two K channels of pair p into rows of patterns and residual, and set their features."""
        fmt, j = self._fmt, ready.values + 2 * p
        one = slice(p, p + 1)
        law = PairLaw(ready, geometry, means.of(j)[None], means.of(j + 1)[None], one)
        rows = int(geometry.first_rows[p]), int(geometry.second_rows[p])
        mean, sigma = law.mean_first, law.sigma_first
        for half, row in enumerate(rows):
            where = place_values(geometry.k[row : row + 1] + mean, ChannelScales(*scale_integers(sigma, fmt)), fmt)
            patterns[row] = decode_groups(coder, where, self._model, fmt)
            residual[row] = self._admit(self._real(patterns[row]), geometry.k[row], ready.step_k[p])
            if half == 0:
                mean, sigma = law.second(residual[row : row + 1]), law.sigma_second
        turned = geometry.unrotate_pair(residual[rows[0]], residual[rows[1]], p)
        means.features[j : j + 2] = self._features(ready, turned, slice(j, j + 2))

    def _real(self, patterns: Ints) -> Floats:
        values: Floats = self._fmt.tensor(patterns).to(torch.float64).numpy()
        return values

    def _admit(self, real: Floats, guess: Floats, step: Floats) -> Floats:
        """Residuals; 0 where the truth is not finite, or so far off that it must not steer anything."""
        with np.errstate(invalid="ignore", over="ignore"):
            r = real - guess
            return np.where(np.isfinite(real) & (np.abs(r) <= step * _REACH), r, 0.0)

    def _features(self, ready: _Ready, residual: Floats, rows: slice = slice(None)) -> Floats:
        """Residuals in the coding order [n, T] to whole steps."""
        return np.rint(np.clip(residual / ready.step[rows], -FEATURE_MAX, FEATURE_MAX))

    def _next(self, ready: _Ready, geometry: Geometry, residual: list[Floats], features: Floats) -> Next:
        """Attend to what is known to be true, and correct the state by what it showed."""
        attend = [
            geometry.tensor((g + r).astype(np.float32)) for g, r in zip((geometry.k, geometry.v), residual, strict=True)
        ]
        total = exact.product(ready.gain, torch.from_numpy(features)).numpy() * ready.gain_unit
        total = np.clip(total, -_CORRECTION_MAX, _CORRECTION_MAX)
        correction = torch.from_numpy(np.ascontiguousarray(total.astype(np.float32).T)).to(geometry.device)
        pair = [torch.from_numpy(np.ascontiguousarray(a)).to(geometry.device) for a in attend]
        return Next((pair[0], pair[1]), correction)


class Geometry:
    """The guesses of a layer as channels [J * D, T] in float64, and how pairs turn. Dims that do not rotate pair with angle 0."""

    def __init__(self, guess: Pair, turn: Pair, rope_dim: int) -> None:
        heads, self.tokens, dim = guess[0].shape
        self.shape, self.device = (heads, self.tokens, dim), guess[0].device
        self.k, self.v = (self.channels(g.cpu().to(torch.float64).numpy()) for g in guess)
        half = rope_dim // 2
        first = np.concatenate([np.arange(half), np.arange(rope_dim, dim, 2)])
        second = np.concatenate([np.arange(half, rope_dim), np.arange(rope_dim + 1, dim, 2)])
        base = np.arange(heads)[:, None] * dim
        self.first_rows, self.second_rows = (base + first).reshape(-1), (base + second).reshape(-1)
        self.k_order = np.stack([self.first_rows, self.second_rows], 1).reshape(-1)
        cos, sin = (t.cpu().to(torch.float64).numpy().T for t in turn)
        still = len(first) - half
        cos = np.concatenate([cos, np.ones((still, self.tokens))])
        sin = np.concatenate([sin, np.zeros((still, self.tokens))])
        self.cos, self.sin = np.tile(cos, (heads, 1)), np.tile(sin, (heads, 1))  # [P, T]

    def channels(self, x: NDArray[Scalar]) -> NDArray[Scalar]:
        """[J, T, D] -> [J * D, T]"""
        return np.ascontiguousarray(x.transpose(0, 2, 1).reshape(-1, self.tokens))

    def tensor(self, x: NDArray[Scalar]) -> NDArray[Scalar]:
        """[J * D, T] -> [J, T, D]"""
        return np.ascontiguousarray(x.reshape(self.shape[0], self.shape[2], self.tokens).transpose(0, 2, 1))

    def first(self, x: Floats) -> Floats:
        """The first K channel of every pair: [P, T]."""
        rows: Floats = x[self.first_rows]
        return rows

    def second(self, x: Floats) -> Floats:
        """The second."""
        rows: Floats = x[self.second_rows]
        return rows

    def unrotate(self, x: Floats) -> Floats:
        """K channels [J * D, T] to pairs in the coding order: rows a, b, a, b, …"""
        a, b = self.first(x), self.second(x)
        out = np.empty_like(x)
        out[0::2] = a * self.cos + b * self.sin
        out[1::2] = b * self.cos - a * self.sin
        return out

    def unrotate_pair(self, a: Floats, b: Floats, p: int) -> Floats:
        """The same for one pair: two rows."""
        cos, sin = self.cos[p], self.sin[p]
        return np.stack([a * cos + b * sin, b * cos - a * sin])


class PairLaw:
    """The law of stored K channels of pairs [P, T] (or some of them), from the means of a and b given all channels before."""

    def __init__(self, ready: _Ready, geometry: Geometry, a: Floats, b: Floats, some: slice = slice(None)) -> None:
        c, s = geometry.cos[some], geometry.sin[some]
        va, vb, cab, b = ready.va[some], ready.vb[some], ready.cab[some], b + ready.w[some] * a
        cc, ss, cs = c * c, s * s, c * s
        twice = (cab + cab) * cs
        v_first = va * cc + vb * ss - twice
        v_first = np.maximum(v_first, _LEAST * va)
        across = (va - vb) * cs + cab * (cc - ss)
        self.mean_first = a * c - b * s
        self._mean_second = a * s + b * c
        self._slope = across / v_first
        self.sigma_first = np.sqrt(v_first)
        self.sigma_second = np.sqrt(va * ready.vi[some] / v_first)  # the determinant: no difference that could cancel

    def second(self, first: Floats) -> Floats:
        """Mean of the second channel's residual given the first's."""
        mean: Floats = self._mean_second + self._slope * (first - self.mean_first)
        return mean


class Means:
    """The decoder's means: features come one by one, sums of whole blocks are done at once."""

    def __init__(self, ready: _Ready, tokens: int) -> None:
        """`features`: rows [N, T], to be filled in order by whoever decodes."""
        self._ready = ready
        self.features = np.zeros((len(ready.step), tokens))
        self._sum = np.zeros_like(self.features)
        self._done = 0  # rows whose part in all later means is in _sum

    def of(self, j: int) -> Floats:
        """Mean of channel j's residual given the features of the channels before it: [T]."""
        ready = self._ready
        while j >= self._done + _BLOCK:
            begin, end = self._done, self._done + _BLOCK
            block = torch.from_numpy(self.features[begin:end])
            self._sum[end:] += exact.product(ready.coefficient[end:, begin:end], block).numpy()
            self._done = end
        fresh = slice(self._done, j)
        near = exact.product(ready.coefficient[j : j + 1, fresh], torch.from_numpy(self.features[fresh])).numpy()
        mean: Floats = (self._sum[j] + near[0]) * ready.unit[j]
        return mean
