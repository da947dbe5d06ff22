"""Fitting the joint model of a layer and its hidden-state correction from moments. Runs at calibration only; floats are allowed.

Channel j's coefficients are the regression of its residual on those before it, read off the Cholesky factor of the
covariance (G = L Lᵀ, U = L / diag L: residuals are U times independent innovations, so coefficients are I - U⁻¹).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from codec.closed_loop import COEFFICIENT_MAX, JointLayer
from codec.errors import UserError

Floats = NDArray[np.float64]
RIDGE = 1e-3  # of the mean variance, added to what the correction is regressed on
RIDGE_JOINT = 1e-5
STEPS_PER_SIGMA = 10  # a feature's step is sigma * 2**-STEPS_PER_SIGMA, rounded up to a power of two
_LEAST_SIGMA = 1e-5
_NOTHING = "Calibration saw no token; give it a corpus with at least one prompt."
_MOST = 2.0**60


@dataclass
class LayerMoments:
    """Second moments of one layer: residuals in the coding order [N, N], residuals with state errors [N, M], tokens."""

    gram: Floats
    cross: Floats
    tokens: int

    def add(self, other: LayerMoments) -> None:
        """Merge in place."""
        self.gram += other.gram
        self.cross += other.cross
        self.tokens += other.tokens


def merge(moments: Iterable[LayerMoments]) -> LayerMoments:
    """The sum of moments, added in the order given: keep it fixed, so that a repeated calibration gives the same profile.

    Raises UserError where there are none.
    """
    parts = list(moments)
    if not parts:
        raise UserError(_NOTHING)
    total = LayerMoments(parts[0].gram.copy(), parts[0].cross.copy(), parts[0].tokens)
    for part in parts[1:]:
        total.add(part)
    return total


def fit(moments: LayerMoments) -> JointLayer:
    """Freeze a layer. Raises UserError when there was nothing to calibrate on."""
    if moments.tokens < 1:
        raise UserError(_NOTHING)
    n = len(moments.gram)
    gram = moments.gram / moments.tokens
    power = float(np.mean(np.diag(gram))) + 1e-30
    regular = gram + np.eye(n) * (RIDGE_JOINT * power + 1e-12)
    factor = np.linalg.cholesky(regular)
    coefficient = np.eye(n) - np.linalg.inv(factor / np.diag(factor))
    coefficient = np.tril(coefficient, -1)
    filtered = np.eye(n) - coefficient
    sigma = np.sqrt(np.maximum(np.einsum("ij,jk,ik->i", filtered, gram, filtered, optimize=True), _LEAST_SIGMA**2))
    first = np.arange(n // 2, n, 2)
    inside = coefficient[first + 1, first].copy()
    coefficient[first + 1, first] = 0.0
    step = np.ceil(np.log2(np.maximum(np.sqrt(np.diag(gram)), _LEAST_SIGMA))).astype(np.int64) - STEPS_PER_SIGMA
    scaled = coefficient * np.exp2(step)[None, :]
    unit, integers = _rows_to_int16(scaled)
    gain = np.linalg.solve(gram + np.eye(n) * (RIDGE * power + 1e-12), moments.cross / moments.tokens).T  # [M, N]
    gain_unit, gain_integers = _rows_to_int16(gain * np.exp2(step)[None, :])
    return JointLayer(
        step.astype(np.int64),
        integers,
        unit,
        np.minimum(sigma, _MOST).astype(np.float32),
        np.clip(inside, -_MOST, _MOST).astype(np.float32),
        gain_integers,
        gain_unit,
    )


def _rows_to_int16(x: NDArray[np.floating]) -> tuple[NDArray[np.int64], NDArray[np.int16]]:
    """(unit, integers): row i of x is about integers[i] * 2**unit[i]."""
    top = np.maximum(np.abs(x).max(1), 2.0**-80)
    unit = np.clip(np.ceil(np.log2(top)) - 15, -120, 120).astype(np.int64)
    integers = np.rint(x / np.exp2(unit)[:, None])
    return unit, np.clip(integers, -COEFFICIENT_MAX + 1, COEFFICIENT_MAX - 1).astype(np.int16)
