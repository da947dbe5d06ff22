"""Causal attention in exact arithmetic, over all earlier tokens or over the first few and a window of the last ones."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from codec import exact
from codec.predictor import fused

SINKS = 4  # the first tokens, which a window never loses: models park attention there (Xiao et al. 2024)
_SCORES_AT_ONCE = 1 << 18  # float64 scores held at a time, a multiple of the L2 cache rather than T x T
_SCORE_LIMIT = 1e30


@dataclass
class Seen:
    """K and V that attention in one layer sees, as integers: keys, values int16 [J, S, D]; key_scale float32 [J, S, 1]."""

    keys: Tensor
    key_scale: Tensor
    values: Tensor

    def first(self, n: int) -> Seen:
        """The first n tokens."""
        return Seen(self.keys[:, :n], self.key_scale[:, :n], self.values[:, :n])

    def then(self, other: Seen) -> Seen:
        """These tokens followed by others."""
        pairs = ((self.keys, other.keys), (self.key_scale, other.key_scale), (self.values, other.values))
        return Seen(*(torch.cat(p, 1) for p in pairs))


class _Visible:
    """What queries from token `first` on may see, as float64, cut down block by block."""

    def __init__(self, seen: Seen, first: int, window: int) -> None:
        total = seen.keys.shape[1]
        self._window, self._end = window, total
        self._near = self._from(first)
        place = torch.arange(total, device=seen.keys.device)
        parts = seen.keys, seen.values, seen.key_scale
        keys, values, scale = (self._pick(t, self._near, total, 1).to(torch.float64) for t in parts)
        self._parts = keys.transpose(1, 2), values, scale.transpose(1, 2)
        self._place = self._pick(place, self._near, total, 0)

    def _from(self, query: int) -> int:
        """The first token of a query's window, 0 where that meets the sinks."""
        near = max(0, query - self._window + 1) if self._window else 0
        return near if near > SINKS else 0

    @staticmethod
    def _pick(t: Tensor, near: int, end: int, axis: int) -> Tensor:
        """Along an axis: all before `end`, without what lies between the sinks and `near`."""
        if not near:
            return t.narrow(axis, 0, end)
        return torch.cat([t.narrow(axis, 0, SINKS), t.narrow(axis, near, end - near)], axis)

    def block(self, begin: int, end: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """For queries begin .. end - 1: keys [J, D, n], values [J, n, D], key scales [J, 1, n], allowed bool [queries, n]."""
        gap = self._near - SINKS if self._near else 0  # tokens already left out
        near = self._from(begin)
        near = near - gap if near > self._near else 0
        keys, values, scale = (
            self._pick(t, near, end - gap, axis) for t, axis in zip(self._parts, (2, 1, 2), strict=True)
        )
        place = self._pick(self._place, near, end - gap, 0)
        query = torch.arange(begin, end, device=place.device)[:, None]
        allowed = place <= query
        if self._window:
            allowed &= (place > query - self._window) | (place < SINKS)
        return keys, values, scale, allowed


def block_length(heads: int, total: int, window: int) -> int:
    """Queries at a time."""
    if not window:
        return max(1, _SCORES_AT_ONCE // (heads * total))
    most = max(64, window)  # so that no block sees much more than its windows hold
    return max(1, min(most, _SCORES_AT_ONCE // (heads * min(total, window + most + SINKS))))


def attend(q: Tensor, seen: Seen, value_step: Tensor, window: int) -> Tensor:
    """Causal attention of one sequence: q float32 [H, T, D] -> float32 [T, H * D], over blocks of queries.

    value_step: float32 [J, 1, 1], powers of two; window: the last tokens that are seen besides the sinks, 0 for all.
    """
    (heads, tokens, dim), (kv_heads, total, _) = q.shape, seen.keys.shape
    groups, first = heads // kv_heads, total - tokens
    qi, qs = fused.row_integers(q) if fused.serves(q.device) else exact.row_integers(q)
    qi = qi.view(kv_heads, groups, tokens, dim).to(torch.float64)
    to_base_2 = exact.LOG2E / math.sqrt(dim)  # exact: a constant, one rounding
    qs = qs.view(kv_heads, groups, tokens, 1) * to_base_2
    visible = _Visible(seen, first, window)
    step = block_length(heads, total, window)
    value_scale = value_step.to(torch.float64)
    out = []
    for begin in range(0, tokens, step):
        end = min(begin + step, tokens)
        keys, values, key_scale, allowed = visible.block(first + begin, first + end)
        block = qi[:, :, begin:end].reshape(kv_heads, -1, dim)
        weights, norm = _weights(exact.product(block, keys), key_scale, qs[:, :, begin:end].reshape(kv_heads, -1, 1), allowed)
        o = exact.product(weights, values).div_(norm).mul_(value_scale)
        o = o.to(torch.float32).view(kv_heads, groups, end - begin, dim)
        out.append(o.permute(2, 0, 1, 3).reshape(end - begin, heads * dim))
    return torch.cat(out)


def _weights(scores: Tensor, key_scale: Tensor, query_scale: Tensor, allowed: Tensor) -> tuple[Tensor, Tensor]:
    """See fused.weights; infinities would make NaNs, whose casts differ by processor, hence the limit."""
    if fused.serves(scores.device):
        return fused.weights(scores, key_scale, query_scale, allowed, _SCORE_LIMIT)
    t = scores.mul_(key_scale).to(torch.float32).mul_(query_scale)  # scaling by powers of two is exact
    t = t.clamp_(-_SCORE_LIMIT, _SCORE_LIMIT)
    t.masked_fill_(~allowed.repeat(scores.shape[1] // len(allowed), 1), -_SCORE_LIMIT)
    return exact.weights_from_scores(t, None)
