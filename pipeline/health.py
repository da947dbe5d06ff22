"""Whether data are still what a profile was calibrated on: what layers cost beside what calibration promised.

Under a Gaussian a scalar costs its spread, log2 sigma, and its miss, (x - mean)**2 / (2 sigma**2) log2 e, besides what does not depend
on data. Where the profile fits, the miss is half a log2 e and the spread is that of the profile's sigmas (codec.promise); scales for
tokens even take a little off. Data of another kind are guessed worse: the miss grows, and the spread with it where sigmas follow.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

import codec
from codec.errors import DataError

# Bits a scalar above the promise, over all layers, and of one layer's K or V. Prompts like the sample's stay below the promise
# (-0.04 on the real model, other agentic prompts than it was calibrated on); random token ids and German took 0.07 more than promised.
DRIFT_BITS = 0.05
DRIFT_LAYER_BITS = 1.0  # single chunks reach half of it without any drift
SIDES = ("K", "V")

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Costs:
    """What chunks cost, K then V of every layer: sums of codec.LayerCosts, and scalars [layers, 2] of them."""

    heads: Floats
    spread: Floats
    miss: Floats
    scalars: Floats

    @staticmethod
    def of(costs: codec.LayerCosts, scalars_k: int, scalars_v: int) -> Costs:
        """Of one chunk, whose layers are alike."""
        layers = len(costs.spread)
        scalars = np.tile([scalars_k / layers, scalars_v / layers], (layers, 1))
        return Costs(costs.heads, costs.spread, costs.miss, scalars)

    @staticmethod
    def total(parts: Iterable[Costs]) -> Costs | None:
        """The sum, None of nothing. Raises DataError where they are of other shapes."""
        found: Costs | None = None
        for part in parts:
            if found is not None and part.heads.shape != found.heads.shape:
                raise DataError(
                    "figures of layers are of other shapes in some chunks; the index holds two models' rows"
                )
            found = part if found is None else Costs(*(a + b for a, b in zip(found._all(), part._all(), strict=True)))
        return found

    def _all(self) -> tuple[Floats, ...]:
        return self.heads, self.spread, self.miss, self.scalars

    def row(self) -> dict[str, list[float]]:
        """As columns of the index: bits a scalar."""
        heads = self.heads / (self.scalars[:, :, None] / self.heads.shape[2])
        means = {
            "layer_bits": heads,
            "layer_spread": self.spread / self.scalars,
            "layer_miss": self.miss / self.scalars,
        }
        return {name: values.ravel().tolist() for name, values in means.items()}

    def to_plain(self) -> dict[str, Any]:
        """As data that JSON can say."""
        return {name: getattr(self, name).tolist() for name in ("heads", "spread", "miss", "scalars")}

    @staticmethod
    def from_plain(data: Mapping[str, Any] | None) -> Costs | None:
        """Read what `to_plain` gave."""
        return None if data is None else Costs(**{name: np.array(values, np.float64) for name, values in data.items()})


@dataclass(frozen=True)
class Health:
    """Bits a scalar of every layer's K and V [layers, 2]: observed spread and miss, and the spread that was promised."""

    spread: Floats
    miss: Floats
    promised: Floats
    chunks: int

    @staticmethod
    def of(costs: Costs, profile: codec.Profile, chunks: int) -> Health:
        """Of what chunks cost under a profile."""
        promised = codec.promised_spread(profile)
        if promised.shape != costs.spread.shape:
            raise DataError(f"the index says {len(costs.spread)} layers, and the profile has {len(promised)}")
        return Health(costs.spread / costs.scalars, costs.miss / costs.scalars, promised, chunks)

    @property
    def excess(self) -> Floats:
        """Bits a scalar above what was promised [layers, 2]; negative where data are easier."""
        excess: Floats = self.spread + self.miss - self.promised - codec.MISS
        return excess

    @property
    def mean_excess(self) -> float:
        """The same over all layers."""
        return float(self.excess.mean())

    @property
    def worst(self) -> tuple[int, str, float]:
        """Layer, K or V, and excess of the tensor that is furthest above its promise."""
        layer, side = divmod(int(self.excess.argmax()), 2)
        return layer, SIDES[side], float(self.excess[layer, side])

    @property
    def drifted(self) -> bool:
        """Whether the profile does not fit these data any more."""
        return self.mean_excess > DRIFT_BITS or self.worst[2] > DRIFT_LAYER_BITS

    def warning(self) -> str | None:
        """What a user should know, or None."""
        if not self.drifted:
            return None
        layer, side, bits = self.worst
        return (
            f"warning: the profile fits this corpus less well than calibration promised: {self.mean_excess:+.2f} bits a scalar on average, "
            f"{bits:+.2f} in layer {layer} {side}, the worst; nothing is lost but space: the corpus has drifted from the calibration "
            "sample, or that was small or uniform (docs/RUNBOOK.md)"
        )

    def to_dict(self) -> dict[str, Any]:
        """For reports and run records."""
        layer, side, bits = self.worst
        return {
            "drifted": self.drifted,
            "excess_bits": self.mean_excess,
            "worst": {"layer": layer, "side": side, "excess_bits": bits},
            "chunks": self.chunks,
            "spread": self.spread.round(4).tolist(),
            "miss": self.miss.round(4).tolist(),
            "promised_spread": self.promised.round(4).tolist(),
            "promised_miss": codec.MISS,
        }


def of_groups(found: Sequence[tuple[Costs | None, int]], profile: codec.Profile) -> Health | None:
    """Health over groups of chunks, (costs, how many chunks) each; None where none of them was encoded with its costs."""
    costs = Costs.total(part for part, _ in found if part is not None)
    return None if costs is None else Health.of(costs, profile, sum(count for part, count in found if part is not None))
