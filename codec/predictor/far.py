"""What windowed attention still sees of tokens that left the window: centroids of their keys.

Tokens behind the sinks form groups as long as the window. A group that a token's window has left is stood for by one centroid for every
SHARE of its tokens: Lloyd's k-means on the keys (S. P. Lloyd, 1982), in integers, so that every process finds the same. A centroid
attends as the mean of its tokens' keys and gives the mean of their values; its weight counts for all of them: log2 of their number is
added to its score. As a mean is rough, 8 bits are enough for it, which attention multiplies in half of the time that 16 take.

Shapes: J key-value heads, D head dims, W window and group length, C centroids of a group, G groups.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from codec import exact
from codec.predictor import fused, fused_far

SINKS = 4  # the first tokens, which a window never loses: models park attention there (Xiao et al. 2024)
SHARE = 16  # tokens of a group for one centroid
ROUNDS = 3
VALUE_UNIT = 16  # steps of a value that one of a centroid's stands for: 8 bits then reach what a mean of values reaches
_BYTE = 7  # bits of an int8's magnitude
NONE = -1e30  # added to the score of a centroid without tokens: attention gives it no weight
_LOG_BITS = 30


def centroids(window: int) -> int:
    """Of one group."""
    return max(1, window // SHARE)


def groups_before(query: int, window: int) -> int:
    """Groups that end before the multiple of `window` that is at or before the token at this place; its window begins where they end.

    All tokens between two multiples see the same groups, so that a chunk as long as the window, or a part of it, is taken in at once.
    """
    return max(0, query // window * window - SINKS) // window


def groups_end(groups: int, window: int) -> int:
    """The first place that sees more groups than these."""
    return (groups + 1 + -(-SINKS // window)) * window


@dataclass
class Far:
    """Centroids of the first groups: keys, values int8 [J, G C, D], values in units of VALUE_UNIT; key_scale float32 [J, G C, 1], powers
    of two; bias float32 [J, G C, 1]: log2 of how many tokens each stands for."""

    keys: Tensor
    key_scale: Tensor
    values: Tensor
    bias: Tensor

    def then(self, other: Far) -> Far:
        """These and others behind them."""
        pairs = (
            (self.keys, other.keys),
            (self.key_scale, other.key_scale),
            (self.values, other.values),
            (self.bias, other.bias),
        )
        return Far(*(torch.cat(p, 1) for p in pairs))


@lru_cache(maxsize=8)
def _biases(window: int) -> Tensor:
    """What is added to the score of a centroid of 0 .. window tokens: float32 [window + 1]."""
    return torch.tensor([NONE, *(log2(n) for n in range(1, window + 1))], dtype=torch.float64).to(torch.float32)


def log2(n: int) -> float:
    """log2 of n >= 1 to 2**-30, by squaring in whole numbers: no library rounds it its own way."""
    whole = n.bit_length() - 1
    x, bits = (n << 62) >> whole, 0  # 1 <= x / 2**62 < 2
    for _ in range(_LOG_BITS):
        x = x * x >> 62
        bits <<= 1
        if x >> 63:
            x, bits = x >> 1, bits | 1
    return whole + bits * 2.0**-_LOG_BITS


def far(keys: Tensor, key_scale: Tensor, values: Tensor, window: int) -> Far:
    """The centroids of whole groups.

    keys, values: int16 [J, G W, D]; key_scale: float32 [J, G W, 1], powers of two.
    """
    heads, _, dim = keys.shape
    count = centroids(window)
    groups = (keys.reshape(-1, window, dim), key_scale.reshape(-1, window, 1), values.reshape(-1, window, dim))
    found = fused_far.lloyd(*groups, count, ROUNDS) if fused.serves(keys.device) else _lloyd(*groups, count)
    centre, value, members = found
    bias = _biases(window).to(keys.device)[members]
    wide = groups[1].amax(1, keepdim=True).expand(-1, count, 1)
    small = (*_key_bytes(centre, wide), _bytes(value.to(torch.float32) * (1.0 / VALUE_UNIT)), bias)
    key, scale, value, bias = (t.reshape(heads, -1, t.shape[-1] if t.dim() > 2 else 1) for t in small)
    return Far(key, scale, value, bias)


def _key_bytes(centre: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """int16 [G, C, D] of a scale [G, C, 1] as int8 of scales of their own."""
    whole = centre.to(torch.float32)
    _, e = torch.frexp(whole.abs().amax(-1, keepdim=True))
    shift = (e.to(torch.int32) - _BYTE).clamp_min(0)
    return _bytes(whole * exact.pow2(-shift)), scale * exact.pow2(shift)


def _bytes(x: Tensor) -> Tensor:
    return torch.round(x).clamp(-127.0, 127.0).to(torch.int8)


def _lloyd(keys: Tensor, key_scale: Tensor, values: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """fused_far.lloyd, G being J G here."""
    ratio = key_scale / key_scale.amax(1, keepdim=True)
    k = torch.round(keys.to(torch.float32) * ratio).to(torch.float64)
    v = values.to(torch.float64)
    # The bounds: 2 * 15 + log2(D) bits for distances, 15 + log2(W) for sums.
    stride = k.shape[1] // count
    centre, order = k[:, stride // 2 :: stride][:, :count], torch.arange(count, device=k.device).to(torch.float64)
    for _ in range(ROUNDS):
        distance = exact.row_sum(centre * centre).transpose(1, 2) - 2.0 * exact.product(k, centre.transpose(1, 2))
        ranked = distance * float(count) + order  # of equal distances, the first centroid is taken
        mine = (ranked == ranked.amin(-1, keepdim=True)).to(torch.float64).transpose(1, 2)  # [G, C, W]
        members = exact.row_sum(mine)
        mean = torch.round(exact.product(mine, k) / members.clamp_min(1.0))
        centre = torch.where(members > 0, mean, centre)
    value = torch.round(exact.product(mine, v) / members.clamp_min(1.0))
    return centre.to(torch.int16), value.to(torch.int16), members[..., 0].to(torch.int64)
