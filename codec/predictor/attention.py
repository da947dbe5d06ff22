"""Causal attention in exact arithmetic, over all earlier tokens, or over the first few, a window of the last ones and what stands for
those between (codec.predictor.far).

Queries go in runs that have the same groups before their windows. What a run sees is `near`: the sinks and what follows in its windows,
of which each query sees one token more than the one before it; and `far`: centroids, all of which each of them sees.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from codec import exact
from codec.predictor import fused, fused_attention
from codec.predictor.far import SINKS, VALUE_UNIT, Far, centroids, groups_before, groups_end
from codec.predictor.memory import Seen, window_begin

_SCORES_AT_ONCE = 1 << 18  # scores held at a time, a multiple of the L2 cache rather than T x T
_MOST_QUERIES = 64  # more at a time multiply too much with what most of them do not see yet
_SCORE_LIMIT = 1e30
_UNSEEN = -2e30  # below all scores, so that what a query may not see has no weight even beside the least of them
_LIMB_TOKENS = 1 << 17  # fewer keys than these: sums of int8 products stay below 2**31


def block_length(heads: int, total: int, window: int) -> int:
    """Queries at a time, of so many heads."""
    visible = total
    if window:
        visible = min(total, SINKS + 2 * window + centroids(window) * groups_before(total, window))
    return max(1, min(_MOST_QUERIES, _SCORES_AT_ONCE // (heads * visible)))


def runs(first: int, total: int, window: int) -> Iterator[tuple[int, int, int]]:
    """(begin, end, groups): the queries `first` .. total - 1 in runs, and how many groups lie before their windows."""
    while first < total:
        groups = groups_before(first, window) if window else 0
        end = min(total, groups_end(groups, window)) if window else total
        yield first, end, groups
        first = end


def attend(q: Tensor, seen: Seen, value_step: Tensor, window: int) -> Tensor:
    """Causal attention of one sequence: q float32 [H, T, D] -> float32 [T, H * D], over blocks of queries.

    value_step: float32 [J, 1, 1], powers of two; window: tokens that are seen themselves, at least, the sinks among them; 0 for all.
    """
    (heads, tokens, dim), kv_heads, total = q.shape, len(seen.keys), seen.total
    groups, first = heads // kv_heads, total - tokens
    seen = seen.with_far(window).near(window_begin(first, window))
    to_base_2 = exact.LOG2E / math.sqrt(dim)  # exact: a constant, one rounding
    in_limbs = fused.serves(q.device) and exact.int8_kernel_serves(q.device) and total < _LIMB_TOKENS
    way = _InLimbs(q, seen, value_step) if in_limbs else _Whole(q, seen, value_step)
    qs = way.query_scale.view(kv_heads, groups, tokens, 1) * to_base_2
    step = block_length(groups if in_limbs else heads, total, window)
    out = exact.empty((tokens, heads * dim), torch.float32, q.device)
    for begin, end, behind in runs(first, total, window):
        hidden = behind * window  # tokens after the sinks that the run does not see
        way.look(hidden - seen.gap, end - seen.gap, behind * centroids(window) if behind else 0)
        for at in range(begin, end, step):
            part, to = slice(at - first, min(at + step, end) - first), min(at + step, end)
            scale = qs[:, :, part].reshape(kv_heads, -1, 1)
            o = way.block(part, to - hidden, at + 1 - hidden, scale).view(kv_heads, groups, to - at, dim)
            out[part].view(-1, kv_heads, groups, dim).copy_(o.permute(2, 0, 1, 3))
    return out


class _Whole:
    """Attention by products of whole integers in float64."""

    def __init__(self, q: Tensor, seen: Seen, value_step: Tensor) -> None:
        integers, self.query_scale = fused.row_integers(q) if fused.serves(q.device) else exact.row_integers(q)
        kv_heads, (_, tokens, dim) = len(seen.keys), q.shape
        self._q = integers.view(kv_heads, -1, tokens, dim).to(torch.float64)
        self._all = self._converted(seen, 1.0, torch.zeros_like(seen.key_scale))
        self._centroids = self._all if seen.far is None else self._converted(seen.far, VALUE_UNIT, seen.far.bias)
        self._near, self._far = self._all, self._all  # of a run
        self._step = value_step.to(torch.float64)

    @staticmethod
    def _converted(seen: Seen | Far, unit: float, bias: Tensor) -> list[Tensor]:
        keys, values, scale = (t.to(torch.float64) for t in (seen.keys, seen.values, seen.key_scale))
        return [keys, values * unit, scale, bias]

    def look(self, skip: int, end: int, far: int) -> None:
        """The next blocks see tokens before `end` without `skip` of them after the sinks, and the first `far` centroids."""
        self._near = [_without(t, skip, end) for t in self._all]
        self._far = [t[:, :far] for t in self._centroids]

    def block(self, part: slice, near: int, visible: int, scale: Tensor) -> Tensor:
        """Of some queries, the first of which sees `visible` of `near` keys: float32 [J, H / J * queries, D].

        scale: float32 [J, H / J * queries, 1].
        """
        keys, values, key_scale, bias = (
            torch.cat([n[:, :near], f], 1) for n, f in zip(self._near, self._far, strict=True)
        )
        queries = self._q[:, :, part]
        place = torch.arange(keys.shape[1], device=keys.device)
        sees = torch.arange(visible, visible + queries.shape[2], device=keys.device)[:, None]
        allowed = (place < sees) | (place >= near)
        scores = exact.product(queries.reshape(len(keys), -1, keys.shape[-1]), keys.transpose(1, 2))
        weights, norm = _weights(scores, key_scale.transpose(1, 2), scale, bias.transpose(1, 2), allowed)
        return exact.product(weights, values).div_(norm).mul_(self._step).to(torch.float32)


class _InLimbs:
    """The same integers by products of int8 limbs, which cost a fraction where the int8 kernel serves."""

    def __init__(self, q: Tensor, seen: Seen, value_step: Tensor) -> None:
        (heads, tokens, dim), kv_heads = q.shape, len(seen.keys)
        limbs, self.query_scale = fused.limbs(q.reshape(-1, dim))
        low, high = limbs.view(2, kv_heads, heads // kv_heads, tokens, dim)
        self._q = exact.cat([high, low], -1)  # against keys with their low limbs first: the cross terms
        zeros = torch.zeros_like(seen.key_scale)
        self._all = [fused_attention.split(seen.keys), fused_attention.split(seen.values), seen.key_scale, zeros]
        far = seen.far
        self._centroids = self._all if far is None else [far.keys, far.values, far.key_scale, far.bias]
        self._near, self._far = self._all, self._all  # of a run
        self._steps: list[float] = value_step.flatten().tolist()

    def look(self, skip: int, end: int, far: int) -> None:
        """See _Whole.look."""
        self._near = [_without(t, skip, end) for t in self._all]
        self._far = [t[:, :far] for t in self._centroids]

    def block(self, part: slice, near: int, visible: int, scale: Tensor) -> Tensor:
        """See _Whole.block."""
        out = []
        for j, step in enumerate(self._steps):
            queries = self._q[j, :, part].reshape(-1, self._q.shape[-1])
            keys, values, *scales = (t[j, :near] for t in self._near)
            far_keys, far_values, *far_scales = (t[j] for t in self._far)
            weights, far_weights, norm = fused_attention.limb_weights(
                _products(queries, keys), _far_products(queries, far_keys), (scales, far_scales), scale[j], visible, part.stop - part.start,
                _SCORE_LIMIT,
            )  # fmt: skip
            sums = exact.product_int8(weights, values)
            far_sums = exact.product_int8(far_weights, far_values) if len(far_values) else None
            out.append(fused_attention.weighted(sums, far_sums, VALUE_UNIT, norm, step))
        return torch.stack(out)


def _without(t: Tensor, skip: int, end: int) -> Tensor:
    """Along the tokens: all before `end`, without `skip` of them after the sinks."""
    return exact.cat([t[:, :SINKS], t[:, SINKS + skip : end]], 1) if skip else t[:, :end]


def _products(queries: Tensor, keys: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """int32 [R, n]: of high limbs, of one's high and the other's low ones, of low ones. queries: int8 [R, 2 D], high limbs first; keys:
    int8 [n, 2 D], low ones first."""
    dim = keys.shape[1] // 2
    high, low = (
        exact.product_int8(queries[:, :dim], keys[:, dim:].T),
        exact.product_int8(queries[:, dim:], keys[:, :dim].T),
    )
    return high, exact.product_int8(queries, keys.T), low


def _far_products(queries: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
    """int32 [R, m]: of high limbs of queries and of low ones with keys of one limb, int8 [m, D]."""
    if not len(keys):
        none = torch.empty(len(queries), 0, dtype=torch.int32)
        return none, none
    high, low = (exact.product_int8(limb, keys.T) for limb in queries.chunk(2, 1))
    return high, low


def _weights(
    scores: Tensor, key_scale: Tensor, query_scale: Tensor, bias: Tensor, allowed: Tensor
) -> tuple[Tensor, Tensor]:
    """See fused_attention.weights; infinities would make NaNs, whose casts differ by processor, hence the limit."""
    if fused.serves(scores.device):
        return fused_attention.weights(scores, key_scale, query_scale, bias, allowed, _SCORE_LIMIT, _UNSEEN)
    t = scores.mul_(key_scale).to(torch.float32).mul_(query_scale).add_(bias)  # scaling by powers of two is exact
    t = t.clamp_(-_SCORE_LIMIT, _SCORE_LIMIT)
    t.masked_fill_(~allowed.repeat(scores.shape[1] // len(allowed), 1), _UNSEEN)
    return exact.weights_from_scores(t, None)
