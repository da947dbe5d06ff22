"""Fitting the joint model of a layer and its hidden-state correction from moments. Runs at calibration only; floats are allowed.

Channel j's mean is the regression of its residual on a constant, the features that earlier layers carried here and the features of
the channels before j. With the Cholesky factor L of the regressors' moments G = L Lᵀ and their moments C with the residuals, the
coefficients on the first m regressors are the first m rows of L⁻ᵀ applied to L⁻¹ C cut off after m rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from codec.errors import UserError
from codec.joint_model import COEFFICIENT_MAX, Features, JointLayer

Floats = NDArray[np.float64]
# Of the mean variance, added to what is regressed on: the best of these on samples that were left out.
RIDGES = (1e-6, 1e-5, 1e-4, 1e-3)
GAIN_RIDGES = (1e-4, 1e-3, 1e-2)
FOLDS = 3
STEPS_PER_SIGMA = 4  # a feature's step is sigma * 2**-STEPS_PER_SIGMA, rounded up to a power of two
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
    def of(cls, carried: Features | None, features: Floats, residual: Floats, error: Floats) -> LayerMoments:
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


def fit(
    moments: Iterable[LayerMoments],
    ridges: Sequence[float] = RIDGES,
    gain_ridges: Sequence[float] = GAIN_RIDGES,
    cross_validate: bool = True,
) -> tuple[JointLayer, int]:
    """Freeze a layer from moments, one a sample in a fixed order, each dropped once it is added up; also how many tokens counted.

    Samples are few and their tokens alike, so how well a fit does on its own samples says little. Both ridges and the
    deviations come from cross-validation: what fits to the other samples leave of each third of them.
    `ridges` and `gain_ridges` are tried, the second of each where there is nothing to try them on, or without `cross_validate`; a huge one
    switches the joint model or the correction of the state off. Raises UserError when there was nothing to calibrate on.
    """
    thirds: list[LayerMoments] = []
    for number, part in enumerate(moments):
        if number < FOLDS:
            thirds.append(merge([part]))
        else:
            thirds[number % FOLDS].add(part)
    merged = merge(thirds)
    if merged.tokens < 1:
        raise UserError(_NOTHING)
    step = _steps(merged)
    merged, thirds = _rounded(merged, step), [_rounded(third, step) for third in thirds]
    pairs = _folds(thirds) if cross_validate else []
    ridge, gain_ridge = ridges[:2][-1], gain_ridges[:2][-1]
    if pairs:
        ridge = min(ridges, key=lambda r: sum(float(np.log(_left(a, b, r)).sum()) for a, b in pairs))
        gain_ridge = min(gain_ridges, key=lambda r: sum(_gain_error(a, b, r) for a, b in pairs))
    weight = _regressions(merged, ridge)
    variance = _unexplained(weight, merged) * _inflation(merged)
    if pairs:
        variance = np.sum([_left(a, b, ridge) * (b.tokens / merged.tokens) for a, b in pairs], axis=0)
    return _frozen(merged, step, weight, variance, _gains(merged, gain_ridge)), merged.tokens


def _steps(moments: LayerMoments) -> NDArray[np.int64]:
    """A feature's step is 2**step: [N]."""
    own = np.diag(moments.gram)[-len(moments.power) :]
    spread = np.sqrt(own / moments.tokens)
    return np.ceil(np.log2(np.maximum(spread, _LEAST_SIGMA))).astype(np.int64) - STEPS_PER_SIGMA


def _rounded(moments: LayerMoments, step: NDArray[np.int64]) -> LayerMoments:
    """The moments with own features in whole steps, as the coder has them: rounding adds a twelfth of a step's square to their powers."""
    gram = moments.gram.copy()
    own = np.arange(len(gram) - len(step), len(gram))
    gram[own, own] += moments.tokens * np.exp2(2.0 * step) / 12
    return replace(moments, gram=gram)


def _frozen(
    moments: LayerMoments, step: NDArray[np.int64], weight: Floats, variance: Floats, gain: Floats
) -> JointLayer:
    """Coefficients [N, K], variances [N] and gains [M, N] as integers."""
    n = len(variance)
    before = len(moments.gram) - n  # regressors that are not own features
    sigma = np.sqrt(np.maximum(variance, _LEAST_SIGMA**2))
    coefficient = weight[:, before:]
    first = np.arange(n // 2, n, 2)
    inside = coefficient[first + 1, first].copy()
    coefficient[first + 1, first] = 0.0
    unit, integers = _rows_to_integers(coefficient * np.exp2(step)[None, :], np.int16, COEFFICIENT_MAX)
    given_unit, given = _rows_to_integers(weight[:, 1:before] * CARRIED, np.int8)
    gain_unit, gain_integers = _rows_to_integers(gain * np.exp2(step)[None, :], np.int8)
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


def _folds(thirds: Sequence[LayerMoments]) -> list[tuple[LayerMoments, LayerMoments]]:
    """(the other samples, a third of them) for each third, or nothing where there are too few."""
    if len(thirds) < FOLDS or not all(third.tokens for third in thirds):
        return []
    return [(merge([*thirds[:i], *thirds[i + 1 :]]), third) for i, third in enumerate(thirds)]


def _left(fitted: LayerMoments, other: LayerMoments, ridge: float) -> Floats:
    """Variance [N] that a fit to some samples leaves of others."""
    return np.maximum(_unexplained(_regressions(fitted, ridge), other), _LEAST_SIGMA**2)


def _unexplained(weight: Floats, moments: LayerMoments) -> Floats:
    """Mean square [N] of residuals minus their regression."""
    explained = 2 * np.einsum("jk,kj->j", weight, moments.target)
    variance: Floats = moments.power - explained + np.einsum("jk,jk->j", weight @ moments.gram, weight)
    return variance / moments.tokens


def _inflation(moments: LayerMoments) -> Floats:
    """What a variance grows by from the samples it was fitted to to others, were their tokens independent: [N]."""
    k, n = len(moments.gram), len(moments.power)
    used = np.minimum(np.arange(k - n, k), 0.5 * moments.tokens)
    grown: Floats = (moments.tokens + used) / (moments.tokens - used)
    return grown


def _regressions(moments: LayerMoments, ridge: float) -> Floats:
    """Coefficients [N, K] of every channel on the constant, all carried features and the own features before it."""
    gram, target = moments.gram / moments.tokens, moments.target / moments.tokens
    k, n = len(gram), len(moments.power)
    added = np.full(k, ridge + 1e-12)
    added[0] = 1e-12
    added[k - n :] = ridge * _mean_power(moments) + 1e-12
    inverse = np.linalg.inv(np.linalg.cholesky(gram + np.diag(added)))
    allowed = np.arange(k)[:, None] < k - n + np.arange(n)[None, :]
    weights: Floats = (inverse.T @ np.where(allowed, inverse @ target, 0.0)).T
    weights[:, k - n :] = np.tril(weights[:, k - n :], -1)  # zeros that rounding may have missed
    return weights


def _gains(moments: LayerMoments, ridge: float) -> Floats:
    """What own features say about errors of the state: [M, N]."""
    n = len(moments.power)
    own = moments.gram[-n:, -n:] / moments.tokens
    added = np.eye(n) * (ridge * _mean_power(moments) + 1e-12)
    return np.asarray(np.linalg.solve(own + added, moments.cross / moments.tokens).T, np.float64)


def _gain_error(fitted: LayerMoments, other: LayerMoments, ridge: float) -> float:
    """What gains fitted to some samples leave of the errors of others, but for what does not depend on them."""
    gains, n = _gains(fitted, ridge), len(fitted.power)
    own = other.gram[-n:, -n:]
    return float(((gains @ own) * gains).sum() - 2 * (gains * other.cross.T).sum())


def _mean_power(moments: LayerMoments) -> float:
    """Mean square of an own feature."""
    n = len(moments.power)
    return float(np.mean(np.diag(moments.gram)[-n:])) / moments.tokens + 1e-30


def _rows_to_integers(
    x: NDArray[np.floating], dtype: type[np.signedinteger], most: int = 127
) -> tuple[NDArray[np.int64], NDArray[Any]]:
    """(unit, integers): row i of x is about integers[i] * 2**unit[i]."""
    top = np.maximum(np.abs(x).max(1, initial=0.0), 2.0**-80)
    unit = np.clip(np.ceil(np.log2(top / most)), -120, 120).astype(np.int64)
    integers = np.rint(x / np.exp2(unit)[:, None])
    return unit, np.clip(integers, -most, most).astype(dtype)
