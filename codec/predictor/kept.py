"""K and V that attention has seen, held as the cache itself stores them.

Integers follow from stored values, so a cache that others hold anyway need not be held a second time: they are made again whenever
attention asks for them. Where attention saw another value than the stored one (one that is not finite, or so far off that it must steer
nothing), that one is held beside it. Pieces of fewer than memory.PIECE tokens are joined, and are integers.

Shapes: J key-value heads, S tokens, D head dims.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from codec.predictor.memory import Seen

_SHARE = 16  # of so many stored scalars one may have been another for attention: more are not worth it


@dataclass(frozen=True)
class Stored:
    """K and V of a layer as the cache has them, [J, S, D]; scales: of an FP8 cache, float32 [2, J, 1, 1]. They must never change."""

    pair: tuple[Tensor, Tensor]
    scales: Tensor | None = None

    def real(self, side: int, begin: int, end: int) -> Tensor:
        """What K (side 0) or V of tokens begin .. end - 1 stands for: float32 [J, end - begin, D]."""
        stored = self.pair[side][:, begin:end].to(torch.float32)
        return stored if self.scales is None else stored * self.scales[side]


@dataclass(frozen=True)
class Others:
    """Values that are not the stored ones: places int64 [n] in [J, S, D], in any order, and values float32 [n]."""

    places: Tensor
    values: Tensor

    def put(self, real: Tensor, begin: int, total: int) -> Tensor:
        """K or V of tokens from `begin` on, [J, some, D], of `total`, with these values in their places."""
        if not len(self.places):
            return real
        heads, some, dim = real.shape
        out = real.clone(memory_format=torch.contiguous_format)  # it may be what is stored
        for head in range(heads):
            place = self.places - (head * total + begin) * dim
            inside = (place >= 0) & (place < some * dim)
            out[head].view(-1)[place[inside]] = self.values[inside]
        return out


@dataclass(frozen=True)
class Kept:
    """A piece of memory that holds no integers. value_step: float32 [J, 1, 1], see Seen.of."""

    stored: Stored
    others: tuple[Others, Others]
    value_step: Tensor

    @property
    def total(self) -> int:
        """Tokens."""
        return self.stored.pair[0].shape[1]

    def cut(self, begin: int, end: int) -> Seen:
        """Integers of tokens begin .. end - 1."""
        end = min(end, self.total)
        k, v = (o.put(self.stored.real(side, begin, end), begin, self.total) for side, o in enumerate(self.others))
        return Seen.of(k, v, self.value_step)


def kept(stored: Stored, attended: tuple[Tensor, Tensor], value_step: Tensor) -> Kept | None:
    """Memory of what attention saw, float32 [J, S, D], by what is stored of it; None where that would not be worth it."""
    if any(t.device != value_step.device for t in stored.pair):
        return None
    found = []
    for side, saw in enumerate(attended):
        real = stored.real(side, 0, saw.shape[1])
        other = (real != saw).reshape(-1)
        places = other.nonzero()[:, 0]
        if _SHARE * len(places) > saw.numel():
            return None
        found.append(Others(places, saw.reshape(-1)[places]))
    return Kept(stored, (found[0], found[1]), value_step)
