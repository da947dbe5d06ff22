"""The joint residual model of a layer (DESIGN 4.4): which law each channel has, given what was coded before it.

Residuals are taken in the coding order (codec.geometry). A channel's *feature* is its residual in whole steps, a power of two
about a tenth of its sigma: one byte. Its mean is an integer combination of the features before it (the Cholesky factor of their
covariance, as regression coefficients), of the features that earlier layers carried here, and a constant; so sums of whole
blocks come from one product, in encoder and decoder alike. A pair (a, b) is a 2-D Gaussian; rotated by
the token's angle it gives the law of the two K channels that are stored: the first, then the second given the first.
Everything but the integer products is elementwise float64.

Shapes: N = 2 * J * D channels, P = N / 4 pairs, G carried features, M hidden dims, T tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from codec import exact
from codec.cells import Ints
from codec.errors import InexactBackend
from codec.geometry import Floats, Geometry
from codec.kernels import compiled

FEATURE_MAX = 127  # a feature is clamped to this many steps, 8 to 16 sigma
REACH = 1024  # a residual of more steps is an outlier that must not steer anything
COEFFICIENT_MAX = exact.ROW_MAX  # two int8 limbs
Features = NDArray[np.int8]
BLOCK = 32  # channels whose means the decoder updates one by one; those beyond are updated block by block
_TERMS = 1 << 17  # fewer products of int8 than these stay below 2**31
LEAST = 2.0**-40  # no variance of a pair falls below this part of itself


@dataclass(frozen=True)
class JointLayer:
    """One layer's joint model, as stored in a profile."""

    step: Ints  # [N]: a feature's step is 2**step
    # [N, N], strictly lower triangular; row j in units of 2**unit[j] a step; 0 between the two of a pair
    coefficient: NDArray[np.int16]
    unit: Ints  # [N]
    given: NDArray[np.int8]  # [N, G]: on carried features, in units of 2**given_unit[j]
    given_unit: Ints  # [N]
    bias: NDArray[np.float32]  # [N]: mean of the residual
    sigma: NDArray[np.float32]  # [N]: of the innovation of each channel
    inside: NDArray[np.float32]  # [P]: regression of b on a
    gain: NDArray[np.int8]  # [M, N]: hidden-state correction in units of 2**gain_unit[m], of the state's RMS
    gain_unit: Ints  # [M]
    scale: NDArray[np.int16] | None = None  # [blocks, TERMS] of codec.token_scale; None: the same sigmas for all tokens
    narrow: NDArray[np.float32] | None = None  # [N]: factors of codec.narrow on the sigmas that are coded with; None: 1

    @property
    def history(self) -> int:
        """How many layers back it looks."""
        return int(self.given.shape[1] // self.step.shape[0])

    def check(self) -> None:
        """The sums are exact (DESIGN 5); raises InexactBackend."""
        terms = max(self.step.shape[0], self.given.shape[1])
        if terms >= _TERMS:
            raise InexactBackend(f"A joint model sums {terms} products of bytes, more than int32 can hold exactly.")


class Ready:
    """A JointLayer in the types that the arithmetic uses."""

    def __init__(self, joint: JointLayer) -> None:
        n = len(joint.step)
        self.values = n // 2  # V channels; as many K channels follow
        self.step = np.ldexp(1.0, joint.step.astype(np.int64))[:, None]
        self.step_k, self.step_v = np.maximum(self.step[n // 2 :: 2], self.step[n // 2 + 1 :: 2]), self.step[: n // 2]
        per_step = np.ldexp(1.0, -joint.step.astype(np.int64))  # as exact as a division by a power of two
        reach = np.concatenate([self.step_v[:, 0], np.repeat(self.step_k[:, 0], 2)])
        most = reach * REACH  # residuals beyond are outliers
        self.unit = np.ldexp(1.0, joint.unit.astype(np.int64))[:, None]
        self.lower = joint.coefficient
        starts = range(0, n, BLOCK)
        self.near = np.concatenate([np.zeros((0, BLOCK), np.int16), *(_square(joint.coefficient, lo) for lo in starts)])
        far = (torch.from_numpy(joint.coefficient[lo : lo + BLOCK, :lo].astype(np.float32)) for lo in starts)
        self._far = [torch.cat(exact.limbs(x)) for x in far]
        self.given = torch.from_numpy(np.ascontiguousarray(joint.given, np.int8))
        self.given_unit = np.ldexp(1.0, joint.given_unit.astype(np.int64))[:, None]
        self.bias = joint.bias.astype(np.float64)[:, None]
        self.gain = torch.from_numpy(np.ascontiguousarray(joint.gain, np.int8))
        self.gain_unit = np.ldexp(1.0, joint.gain_unit.astype(np.int64))
        self.sigma = joint.sigma.astype(np.float64)[:, None]
        self.scale = None if joint.scale is None else joint.scale.astype(np.int64)
        self.narrow = np.ones(n) if joint.narrow is None else joint.narrow.astype(np.float64)
        units = self.given_unit[:, 0], self.bias[:, 0], self.unit[:, 0]
        self.known = np.stack([*units, self.sigma[:, 0], per_step, most, self.narrow])  # [7, N], for compiled loops
        variance = self.sigma * self.sigma
        self.w = joint.inside.astype(np.float64)[:, None]
        self.va = variance[self.values :: 2]
        self.cab = self.w * self.va
        self.vi = variance[self.values + 1 :: 2]
        self.vb = self.w * self.cab + self.vi
        self.pair = np.ascontiguousarray(np.concatenate([self.w, self.va, self.vb, self.cab, self.vi], 1))  # [P, 5]

    def base(self, carried: Features | None) -> Floats:
        """What the means are before any feature of this layer: [N, 1] or [N, T]."""
        sums = self.given_sums(carried)
        return self.bias if sums is None else sums * self.given_unit + self.bias

    def given_sums(self, carried: Features | None) -> NDArray[np.int32] | None:
        """What carried features [G, T] add to the means, in whole units: [N, T]; None where there are none."""
        if carried is None or not self.given.shape[1]:
            return None
        return exact.product_int8(self.given, torch.from_numpy(carried)).numpy()

    def far(self, block: int, features: Features) -> NDArray[np.int32]:
        """What the features [BLOCK * block, T] of all blocks before add to the sums of a block's R channels.

        [2 R, T]: sums of the coefficients' low limbs, then of their high ones, which count 256 times.
        """
        # In full, as these products are not of low rank: with d_kv 192 (SmolLM2-135M, 4.03 bits a scalar) what V adds to K's means
        # costs 0.026 bits cut to rank 96 of 192, where nothing is saved yet, 0.065 at rank 64, 0.14 at 32 and 0.28 without it.
        if not block:
            return np.zeros((len(self._far[0]), features.shape[1]), np.int32)
        return exact.product_int8(self._far[block], torch.from_numpy(features)).numpy()

    def features(self, residual: Floats, rows: slice = slice(None)) -> Features:
        """Residuals in the coding order [n, T] to whole steps."""
        return np.rint(np.clip(residual / self.step[rows], -FEATURE_MAX, FEATURE_MAX)).astype(np.int8)

    def correction(self, features: Features, limit: float) -> NDArray[np.float32]:
        """What the features say about the hidden state: [T, M], in units of its RMS."""
        sums = exact.product_int8(torch.from_numpy(features).T, self.gain.T).numpy()
        out = np.empty(sums.shape, np.float32)
        _scaled(sums, self.gain_unit, limit, out)
        return out


@compiled
def _scaled(sums: NDArray[np.int32], unit: Floats, limit: float, out: NDArray[np.float32]) -> None:
    """sums [T, M] times units [M], clipped to +- limit and rounded to float32."""
    for t in range(out.shape[0]):
        for m in range(out.shape[1]):
            out[t, m] = np.float32(min(max(np.float64(sums[t, m]) * unit[m], -limit), limit))


def _square(coefficient: NDArray[np.int16], lo: int) -> NDArray[np.int16]:
    """A block's coefficients on itself: [R, BLOCK]."""
    own = coefficient[lo : lo + BLOCK, lo : lo + BLOCK]
    return np.pad(own, ((0, 0), (0, BLOCK - own.shape[1])))


class PairLaw:
    """The law of stored K channels of pairs [P, T] (or some of them), from the means of a and b given all channels before."""

    def __init__(self, ready: Ready, geometry: Geometry, a: Floats, b: Floats, some: slice = slice(None)) -> None:
        c, s = geometry.cos[some], geometry.sin[some]
        va, vb, cab, b = ready.va[some], ready.vb[some], ready.cab[some], b + ready.w[some] * a
        cc, ss, cs = c * c, s * s, c * s
        twice = (cab + cab) * cs
        v_first = va * cc + vb * ss - twice
        v_first = np.maximum(v_first, LEAST * va)
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

    def __init__(self, ready: Ready, tokens: int, base: Floats) -> None:
        """`features`: rows [N, T], to be filled in order by whoever decodes."""
        self._ready = ready
        self.features: Features = np.zeros((len(ready.step), tokens), np.int8)
        self._coefficient = torch.from_numpy(ready.lower.astype(np.float64))
        self._base = np.broadcast_to(base, self.features.shape)
        self._sum = np.zeros(self.features.shape)
        self._done = 0  # rows whose part in all later means is in _sum

    def of(self, j: int) -> Floats:
        """Mean of channel j's residual given the features of the channels before it: [T]."""
        ready = self._ready
        while j >= self._done + BLOCK:
            begin, end = self._done, self._done + BLOCK
            self._sum[end:] += self._product(slice(end, None), slice(begin, end))
            self._done = end
        near = self._product(slice(j, j + 1), slice(self._done, j))
        mean: Floats = (self._sum[j] + near[0]) * ready.unit[j] + self._base[j]
        return mean

    def _product(self, rows: slice, before: slice) -> Floats:
        features = torch.from_numpy(self.features[before].astype(np.float64))
        return exact.product(self._coefficient[rows, before], features).numpy()
