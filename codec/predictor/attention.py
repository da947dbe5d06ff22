"""Causal attention in exact arithmetic, over all earlier tokens, or over the first few, a window of the last ones and what stands for
those between (codec.predictor.far)."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from codec import exact
from codec.predictor import fused
from codec.predictor.far import SINKS, Far, centroids, groups_before
from codec.predictor.memory import Seen, window_begin

_SCORES_AT_ONCE = 1 << 18  # float64 scores held at a time, a multiple of the L2 cache rather than T x T
_SCORE_LIMIT = 1e30
_LIMB_TOKENS = 1 << 17  # fewer keys than these: sums of int8 products stay below 2**31


@dataclass
class _Part:
    """What of every token, along an axis, and of every centroid: the same for both."""

    tokens: Tensor
    far: Tensor | None
    axis: int


class _Visible:
    """What queries may see, cut down block by block. parts: without what the first query's window has left behind, `near` on."""

    def __init__(self, parts: list[_Part], total: int, near: int, window: int) -> None:
        device = parts[0].tokens.device
        self._window, self._device, self._near, self._parts = window, device, near, parts
        self._place = self._pick(torch.arange(total, device=device), near, total, 0)
        if window:
            # Queries before `until` see a token, those from there on its group's centroids.
            until = (torch.arange(1, total // window + 2, device=device) + 1) * window + (SINKS - 1)
            tokens = until.repeat_interleave(window)[: total - SINKS] if total > SINKS else until[:0]
            sinks = torch.full((min(SINKS, total),), total, device=device)
            self._until = self._pick(torch.cat([sinks, tokens]), near, total, 0)
            self._since = until.repeat_interleave(centroids(window))

    @staticmethod
    def _pick(t: Tensor, near: int, end: int, axis: int) -> Tensor:
        """Along an axis: all before `end`, without what lies between the sinks and `near`."""
        if not near:
            return t.narrow(axis, 0, end)
        return torch.cat([t.narrow(axis, 0, SINKS), t.narrow(axis, near, end - near)], axis)

    def block(self, begin: int, end: int) -> tuple[list[Tensor], Tensor]:
        """For queries begin .. end - 1: n tokens and centroids of each part, and which each query may see: bool [queries, n]."""
        gap = self._near - SINKS if self._near else 0  # tokens already left out
        near = window_begin(begin, self._window)
        near = near - gap if near > self._near else 0
        place = self._pick(self._place, near, end - gap, 0)
        query = torch.arange(begin, end, device=self._device)[:, None]
        allowed, count = place <= query, 0
        if self._window:
            allowed &= query < self._pick(self._until, near, end - gap, 0)
            count = centroids(self._window) * groups_before(end - 1, self._window)
            allowed = torch.cat([allowed, query >= self._since[:count]], 1)
        return [self._of(part, near, end - gap, count) for part in self._parts], allowed

    def _of(self, part: _Part, near: int, end: int, count: int) -> Tensor:
        tokens = self._pick(part.tokens, near, end, part.axis)
        if not count:
            return tokens
        assert part.far is not None, "with_far comes before attend"
        return torch.cat([tokens, part.far.narrow(part.axis, 0, count)], part.axis)


def block_length(heads: int, total: int, window: int) -> int:
    """Queries at a time."""
    if not window:
        return max(1, _SCORES_AT_ONCE // (heads * total))
    most = max(64, window)  # so that no block sees much more than its windows hold
    visible = SINKS + 2 * window + most + centroids(window) * groups_before(total, window)
    return max(1, min(most, _SCORES_AT_ONCE // (heads * min(total, visible))))


def attend(q: Tensor, seen: Seen, value_step: Tensor, window: int) -> Tensor:
    """Causal attention of one sequence: q float32 [H, T, D] -> float32 [T, H * D], over blocks of queries.

    value_step: float32 [J, 1, 1], powers of two; window: the last tokens that are seen themselves, at least, besides the sinks; 0 for all.
    """
    (heads, tokens, dim), kv_heads, total = q.shape, len(seen.keys), seen.total
    groups, first = heads // kv_heads, total - tokens
    near = window_begin(first, window)
    seen = seen.with_far(window).near(near)
    to_base_2 = exact.LOG2E / math.sqrt(dim)  # exact: a constant, one rounding
    in_limbs = fused.serves(q.device) and exact.int8_kernel_serves(q.device) and total < _LIMB_TOKENS
    way = _InLimbs(q, seen, value_step) if in_limbs else _Whole(q, seen, value_step)
    qs = way.query_scale.view(kv_heads, groups, tokens, 1) * to_base_2
    visible = _Visible(way.parts, total, near, window)
    step = block_length(heads, total, window)
    out = torch.empty(tokens, heads * dim, device=q.device)
    for begin in range(0, tokens, step):
        end = min(begin + step, tokens)
        parts, allowed = visible.block(first + begin, first + end)
        scale = qs[:, :, begin:end].reshape(kv_heads, -1, 1)
        o = way.block(begin, end, parts, scale, allowed).view(kv_heads, groups, end - begin, dim)
        out[begin:end].view(-1, kv_heads, groups, dim).copy_(o.permute(2, 0, 1, 3))
    return out


class _Whole:
    """Attention by products of whole integers in float64."""

    def __init__(self, q: Tensor, seen: Seen, value_step: Tensor) -> None:
        integers, self.query_scale = fused.row_integers(q) if fused.serves(q.device) else exact.row_integers(q)
        kv_heads, (_, tokens, dim) = len(seen.keys), q.shape
        self._q = integers.view(kv_heads, -1, tokens, dim).to(torch.float64)
        self.parts = _parts(seen, self._converted, (2, 1, 2, 2))
        self._step = value_step.to(torch.float64)

    @staticmethod
    def _converted(seen: Seen | Far, bias: Tensor) -> list[Tensor]:
        keys, values, scale = (t.to(torch.float64) for t in (seen.keys, seen.values, seen.key_scale))
        return [keys.transpose(1, 2), values, scale.transpose(1, 2), bias.transpose(1, 2)]

    def block(self, begin: int, end: int, parts: list[Tensor], scale: Tensor, allowed: Tensor) -> Tensor:
        """Of queries begin .. end - 1: float32 [J, H / J * queries, D]. scale: float32 [J, H / J * queries, 1]."""
        keys, values, key_scale, bias = parts
        queries = self._q[:, :, begin:end].reshape(len(keys), -1, self._q.shape[-1])
        weights, norm = _weights(exact.product(queries, keys), key_scale, scale, bias, allowed)
        return exact.product(weights, values).div_(norm).mul_(self._step).to(torch.float32)


class _InLimbs:
    """The same integers by products of int8 limbs, which cost a fraction where the int8 kernel serves."""

    def __init__(self, q: Tensor, seen: Seen, value_step: Tensor) -> None:
        (heads, tokens, dim), kv_heads = q.shape, len(seen.keys)
        limbs, self.query_scale = fused.limbs(q.reshape(-1, dim))
        low, high = limbs.view(2, kv_heads, heads // kv_heads, tokens, dim)
        self._low, self._high, self._cross = low, high, torch.cat([high, low], -1)
        self.parts = _parts(seen, self._converted, (1,) * 6)
        self._steps: list[float] = value_step.flatten().tolist()

    @staticmethod
    def _converted(seen: Seen | Far, bias: Tensor) -> list[Tensor]:
        keys, values = (_split(t) for t in (seen.keys, seen.values))
        return [*keys, torch.cat(keys, 2), torch.cat(values, 2), seen.key_scale.to(torch.float64), bias]

    def block(self, begin: int, end: int, parts: list[Tensor], scale: Tensor, allowed: Tensor) -> Tensor:
        """See _Whole.block."""
        out = []
        for j, step in enumerate(self._steps):
            low, high, both, values, *scales = (part[j] for part in parts)
            sides = ((self._high, high), (self._cross, both), (self._low, low))
            found = [exact.product_int8(x[j, :, begin:end].reshape(-1, x.shape[-1]), y.T) for x, y in sides]
            weights, norm = fused.limb_weights(
                (found[0], found[1], found[2]), scales[0], scale[j], scales[1], allowed, _SCORE_LIMIT
            )
            out.append(fused.weighted(exact.product_int8(weights, values), norm, step))
        return torch.stack(out)


def _parts(seen: Seen, convert: Callable[[Seen | Far, Tensor], list[Tensor]], axes: tuple[int, ...]) -> list[_Part]:
    """Of tokens and centroids alike; tokens have no bias."""
    tokens = convert(seen, torch.zeros_like(seen.key_scale))
    rest = [None] * len(axes) if seen.far is None else convert(seen.far, seen.far.bias)
    return [_Part(t, f, axis) for t, f, axis in zip(tokens, rest, axes, strict=True)]


def _split(t: Tensor) -> tuple[Tensor, Tensor]:
    """int16 within exact.ROW_MAX as exact.limbs: int8, low and high."""
    high = (t + 128) >> 8  # no overflow: ROW_MAX + 128 is the largest int16
    return (t - (high << 8)).to(torch.int8), high.to(torch.int8)


def _weights(
    scores: Tensor, key_scale: Tensor, query_scale: Tensor, bias: Tensor, allowed: Tensor
) -> tuple[Tensor, Tensor]:
    """See fused.weights; infinities would make NaNs, whose casts differ by processor, hence the limit."""
    if fused.serves(scores.device):
        return fused.weights(scores, key_scale, query_scale, bias, allowed, _SCORE_LIMIT)
    t = scores.mul_(key_scale).to(torch.float32).mul_(query_scale).add_(bias)  # scaling by powers of two is exact
    t = t.clamp_(-_SCORE_LIMIT, _SCORE_LIMIT)
    t.masked_fill_(~allowed.repeat(scores.shape[1] // len(allowed), 1), -_SCORE_LIMIT)
    return exact.weights_from_scores(t, None)
