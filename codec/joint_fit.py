"""Fitting the joint model of a layer and its hidden-state correction from moments. Runs at calibration only; floats are allowed.

Channel j's mean is the regression of its residual on a constant, the features that earlier layers carried here and the features of
the channels before j. With the Cholesky factor L of the regressors' moments G = L Lᵀ and their moments C with the residuals, the
coefficients on the first m regressors are the first m rows of L⁻ᵀ applied to L⁻¹ C cut off after m rows.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from codec.errors import UserError
from codec.joint_model import COEFFICIENT_MAX, JointLayer

Floats = NDArray[np.float64]
RIDGE = 1e-3  # of the mean variance, added to what the correction is regressed on
RIDGE_JOINT = 1e-5
STEPS_PER_SIGMA = 10  # a feature's step is sigma * 2**-STEPS_PER_SIGMA, rounded up to a power of two
CARRIED = 2.0**-STEPS_PER_SIGMA  # regressors are carried features times this: about one sigma is one
_LEAST_SIGMA = 1e-5
_NOTHING = "Calibration saw no token; give it a corpus with at least one prompt."
_MOST = 2.0**60


@dataclass
class LayerMoments:
    """Sums over tokens. Regressors are K = 1 + G + N rows: 1, carried features times CARRIED, own features in units of 1.

    gram [K, K]; target [K, N]: regressors with residuals; power [N]: squared residuals; cross [N, M]: own features with errors of
    the hidden state.
    """

    gram: Floats
    target: Floats
    power: Floats
    cross: Floats
    tokens: int

    @classmethod
    def of(cls, carried: Floats | None, features: Floats, residual: Floats, error: Floats) -> LayerMoments:
        """carried [G, T] in steps or None, features and residual [N, T], error [T, M]."""
        tokens = features.shape[1]
        rows = [np.ones((1, tokens)), *([] if carried is None else [carried * CARRIED]), features]
        x = np.concatenate(rows)
        return cls(x @ x.T, x @ residual.T, (residual * residual).sum(1), features @ error, tokens)

    def add(self, other: LayerMoments) -> None:
        """Merge in place."""
        for name in ("gram", "target", "power", "cross"):
            getattr(self, name).__iadd__(getattr(other, name))
        self.tokens += other.tokens


def merge(moments: Iterable[LayerMoments]) -> LayerMoments:
    """The sum of moments, added in the order given: keep it fixed, so that a repeated calibration gives the same profile.

    Raises UserError where there are none.
    """
    total: LayerMoments | None = None
    for part in moments:
        if total is None:
            total = LayerMoments(part.gram.copy(), part.target.copy(), part.power.copy(), part.cross.copy(), 0)
            total.tokens = part.tokens
        else:
            total.add(part)
    if total is None:
        raise UserError(_NOTHING)
    return total


def fit(moments: LayerMoments) -> JointLayer:
    """Freeze a layer. Raises UserError when there was nothing to calibrate on."""
    if moments.tokens < 1:
        raise UserError(_NOTHING)
    n = len(moments.power)
    before = len(moments.gram) - n  # regressors that are not own features
    gram, target = moments.gram / moments.tokens, moments.target / moments.tokens
    own = gram[before:, before:]
    power = float(np.mean(np.diag(own))) + 1e-30
    weight = _regressions(gram, target, before, power)  # [N, K]
    variance = moments.power / moments.tokens - 2 * np.einsum("jk,kj->j", weight, target)
    variance = variance + np.einsum("ij,jk,ik->i", weight, gram, weight, optimize=True)
    sigma = np.sqrt(np.maximum(variance, _LEAST_SIGMA**2))
    coefficient = weight[:, before:]
    first = np.arange(n // 2, n, 2)
    inside = coefficient[first + 1, first].copy()
    coefficient[first + 1, first] = 0.0
    step = np.ceil(np.log2(np.maximum(np.sqrt(np.diag(own)), _LEAST_SIGMA))).astype(np.int64) - STEPS_PER_SIGMA
    unit, integers = _rows_to_int16(coefficient * np.exp2(step)[None, :])
    given_unit, given = _rows_to_int16(weight[:, 1:before] * CARRIED)
    gain = np.linalg.solve(own + np.eye(n) * (RIDGE * power + 1e-12), moments.cross / moments.tokens).T  # [M, N]
    gain_unit, gain_integers = _rows_to_int16(gain * np.exp2(step)[None, :])
    return JointLayer(
        step=step,
        coefficient=integers,
        unit=unit,
        given=given,
        given_unit=given_unit,
        bias=np.clip(weight[:, 0], -_MOST, _MOST).astype(np.float32),
        sigma=np.minimum(sigma, _MOST).astype(np.float32),
        inside=np.clip(inside, -_MOST, _MOST).astype(np.float32),
        gain=gain_integers,
        gain_unit=gain_unit,
    )


def _regressions(gram: Floats, target: Floats, before: int, power: float) -> Floats:
    """Coefficients [N, K] of every channel on the constant, all carried features and the own features before it."""
    k = len(gram)
    ridge = np.full(k, RIDGE_JOINT + 1e-12)
    ridge[0] = 1e-12
    ridge[before:] = RIDGE_JOINT * power + 1e-12
    inverse = np.linalg.inv(np.linalg.cholesky(gram + np.diag(ridge)))
    allowed = np.arange(k)[:, None] < before + np.arange(k - before)[None, :]
    weights: Floats = (inverse.T @ np.where(allowed, inverse @ target, 0.0)).T
    weights[:, before:] = np.tril(weights[:, before:], -1)  # zeros that rounding may have missed
    return weights


def _rows_to_int16(x: NDArray[np.floating]) -> tuple[NDArray[np.int64], NDArray[np.int16]]:
    """(unit, integers): row i of x is about integers[i] * 2**unit[i]."""
    top = np.maximum(np.abs(x).max(1, initial=0.0), 2.0**-80)
    unit = np.clip(np.ceil(np.log2(top)) - 15, -120, 120).astype(np.int64)
    integers = np.rint(x / np.exp2(unit)[:, None])
    return unit, np.clip(integers, -COEFFICIENT_MAX + 1, COEFFICIENT_MAX - 1).astype(np.int16)
