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
_LIMB_TOKENS = 1 << 17  # fewer keys than these: sums of int8 products stay below 2**31


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
    """What queries from token `first` on may see, cut down block by block. parts: with the axis of the tokens of each."""

    def __init__(self, parts: list[tuple[Tensor, int]], first: int, window: int) -> None:
        total, device = parts[0][0].shape[parts[0][1]], parts[0][0].device
        self._window, self._end = window, total
        self._near = self._from(first)
        self._parts = [(self._pick(t, self._near, total, axis), axis) for t, axis in parts]
        self._place = self._pick(torch.arange(total, device=device), self._near, total, 0)

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

    def block(self, begin: int, end: int) -> tuple[list[Tensor], Tensor]:
        """For queries begin .. end - 1: the parts' n tokens, and which of them each query may see: bool [queries, n]."""
        gap = self._near - SINKS if self._near else 0  # tokens already left out
        near = self._from(begin)
        near = near - gap if near > self._near else 0
        parts = [self._pick(t, near, end - gap, axis) for t, axis in self._parts]
        place = self._pick(self._place, near, end - gap, 0)
        query = torch.arange(begin, end, device=place.device)[:, None]
        allowed = place <= query
        if self._window:
            allowed &= (place > query - self._window) | (place < SINKS)
        return parts, allowed


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
    to_base_2 = exact.LOG2E / math.sqrt(dim)  # exact: a constant, one rounding
    in_limbs = fused.serves(q.device) and exact.int8_kernel_serves(q.device) and total < _LIMB_TOKENS
    way = _InLimbs(q, seen, value_step) if in_limbs else _Whole(q, seen, value_step)
    qs = way.query_scale.view(kv_heads, groups, tokens, 1) * to_base_2
    visible = _Visible(way.parts, first, window)
    step = block_length(heads, total, window)
    out = []
    for begin in range(0, tokens, step):
        end = min(begin + step, tokens)
        parts, allowed = visible.block(first + begin, first + end)
        scale = qs[:, :, begin:end].reshape(kv_heads, -1, 1)
        o = way.block(begin, end, parts, scale, allowed).view(kv_heads, groups, end - begin, dim)
        out.append(o.permute(2, 0, 1, 3).reshape(end - begin, heads * dim))
    return torch.cat(out)


class _Whole:
    """Attention by products of whole integers in float64."""

    def __init__(self, q: Tensor, seen: Seen, value_step: Tensor) -> None:
        integers, self.query_scale = fused.row_integers(q) if fused.serves(q.device) else exact.row_integers(q)
        kv_heads, (_, tokens, dim) = len(seen.keys), q.shape
        self._q = integers.view(kv_heads, -1, tokens, dim).to(torch.float64)
        keys, values, scale = (t.to(torch.float64) for t in (seen.keys, seen.values, seen.key_scale))
        self.parts = [(keys.transpose(1, 2), 2), (values, 1), (scale.transpose(1, 2), 2)]
        self._step = value_step.to(torch.float64)

    def block(self, begin: int, end: int, parts: list[Tensor], scale: Tensor, allowed: Tensor) -> Tensor:
        """Of queries begin .. end - 1: float32 [J, H / J * queries, D]. scale: float32 [J, H / J * queries, 1]."""
        keys, values, key_scale = parts
        queries = self._q[:, :, begin:end].reshape(len(keys), -1, self._q.shape[-1])
        weights, norm = _weights(exact.product(queries, keys), key_scale, scale, allowed)
        return exact.product(weights, values).div_(norm).mul_(self._step).to(torch.float32)


class _InLimbs:
    """The same integers by products of int8 limbs, which cost a fraction where the int8 kernel serves."""

    def __init__(self, q: Tensor, seen: Seen, value_step: Tensor) -> None:
        (heads, tokens, dim), kv_heads = q.shape, len(seen.keys)
        limbs, self.query_scale = fused.limbs(q.reshape(-1, dim))
        low, high = limbs.view(2, kv_heads, heads // kv_heads, tokens, dim)
        self._low, self._high, self._cross = low, high, torch.cat([high, low], -1)
        keys, values = (_split(t) for t in (seen.keys, seen.values))
        self.parts = [(keys[0], 1), (keys[1], 1), (torch.cat(keys, 2), 1), (torch.cat(values, 2), 1)]
        self.parts.append((seen.key_scale.to(torch.float64), 1))
        self._steps: list[float] = value_step.flatten().tolist()

    def block(self, begin: int, end: int, parts: list[Tensor], scale: Tensor, allowed: Tensor) -> Tensor:
        """See _Whole.block."""
        out = []
        for j, step in enumerate(self._steps):
            low, high, both, values, key_scale = (part[j] for part in parts)
            sides = ((self._high, high), (self._cross, both), (self._low, low))
            found = [exact.product_int8(x[j, :, begin:end].reshape(-1, x.shape[-1]), y.T) for x, y in sides]
            weights, norm = fused.limb_weights(
                (found[0], found[1], found[2]), key_scale, scale[j], allowed, _SCORE_LIMIT
            )
            out.append(fused.weighted(exact.product_int8(weights, values), norm, step))
        return torch.stack(out)


def _split(t: Tensor) -> tuple[Tensor, Tensor]:
    """int16 within exact.ROW_MAX as exact.limbs: int8, low and high."""
    high = (t + 128) >> 8  # no overflow: ROW_MAX + 128 is the largest int16
    return (t - (high << 8)).to(torch.int8), high.to(torch.int8)


def _weights(scores: Tensor, key_scale: Tensor, query_scale: Tensor, allowed: Tensor) -> tuple[Tensor, Tensor]:
    """See fused.weights; infinities would make NaNs, whose casts differ by processor, hence the limit."""
    if fused.serves(scores.device):
        return fused.weights(scores, key_scale, query_scale, allowed, _SCORE_LIMIT)
    t = scores.mul_(key_scale).to(torch.float32).mul_(query_scale)  # scaling by powers of two is exact
    t = t.clamp_(-_SCORE_LIMIT, _SCORE_LIMIT)
    t.masked_fill_(~allowed.repeat(scores.shape[1] // len(allowed), 1), -_SCORE_LIMIT)
    return exact.weights_from_scores(t, None)
