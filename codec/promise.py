"""What calibration promised: the spread of every layer's residuals, bits a scalar. For reports; no coder sees a number of this file."""

from __future__ import annotations

import numpy as np

from codec.ideal import Floats
from codec.profile import Profile
from codec.residual import ChannelScales


def promised_spread(profile: Profile) -> Floats:
    """Mean log2 of the profile's sigmas: float64 [layers, 2 (K, V)].

    The miss that goes with it is codec.ideal.MISS in every layer, because each sigma is the root mean square of what a fit leaves of
    samples that were left out. A rotated pair's two sigmas have the product of the unrotated ones, so the angle does not matter.
    Scales for tokens are not in it: on data like the sample's they make the spread a little smaller.
    """
    if profile.loop == "closed":
        logs = np.log2(profile.tensors["sigma"].astype(np.float64))
        half = logs.shape[1] // 2  # V comes first in the coding order
        return np.stack([logs[:, half:].mean(1), logs[:, :half].mean(1)], 1)
    grid, reciprocal = (profile.tensors[name].astype(np.int64) for name in ("grid", "reciprocal"))
    spread: Floats = np.log2(ChannelScales(grid, reciprocal).sigma()).mean((2, 3))
    return spread
