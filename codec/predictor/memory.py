"""What attention sees of the tokens before, as integers; and what a state remembers of them from pass to pass.

A memory is kept in the pieces that passes took in. A longer memory shares the pieces of a shorter one, so that taking tokens in copies
nothing, states may part ways, and a pass that fails has changed nothing. Attention wants one piece: that is made a layer at a time.

Shapes: J key-value heads, S tokens, D head dims.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from codec import exact
from codec.predictor import fused
from codec.predictor.far import SINKS, Far, centroids, far, groups_before

PIECE = 256  # tokens; a last piece of fewer is made longer instead of followed by another, so that there are never many


@dataclass(frozen=True)
class Seen:
    """K and V of tokens in one layer, as integers: keys, values int16 [J, S, D]; key_scale float32 [J, S, 1].

    far: centroids of the groups that windows have left behind, as many as were needed so far.
    gap: tokens behind the sinks that are left out, because no window reaches them.
    """

    keys: Tensor
    key_scale: Tensor
    values: Tensor
    far: Far | None = None
    gap: int = 0

    @classmethod
    def of(cls, k: Tensor, v: Tensor, value_step: Tensor) -> Seen:
        """Of K and V, finite float32 [J, S, D]; value_step: units of the integers of V, powers of two, float32 [J, 1, 1]."""
        if fused.serves(k.device):
            return cls(*fused.seen(k, v, value_step))
        keys, scale = exact.row_integers(k)
        values = torch.round(v / value_step).clamp(-exact.ROW_MAX, exact.ROW_MAX)
        return cls(keys.to(torch.int16), scale, values.to(torch.int16))

    @property
    def total(self) -> int:
        """Tokens, with those that are left out."""
        return self.keys.shape[1] + self.gap

    def cut(self, begin: int, end: int) -> Seen:
        """Tokens begin .. end - 1 alone."""
        return Seen(self.keys[:, begin:end], self.key_scale[:, begin:end], self.values[:, begin:end])

    def with_far(self, window: int) -> Seen:
        """The same with the centroids that the last token's attention needs."""
        found = _more_far(self.far, self.total, window)
        if found is not None and self.gap:
            raise ValueError("centroids are asked for of tokens that are no longer held")
        return self if found is None else replace(self, far=_then(self.far, self.cut(*found), window))

    def near(self, begin: int) -> Seen:
        """The same without what lies between the sinks and token `begin`, 0 for all; at least that of what is there already."""
        gap = begin - SINKS if begin else 0
        if gap <= self.gap:
            return self
        parts = self.cut(0, SINKS), self.cut(begin - self.gap, self.keys.shape[1])
        return replace(joined(parts), far=self.far, gap=gap)


class Piece(Protocol):
    """Tokens in one layer: Seen, or what that can be made of (codec.predictor.kept)."""

    @property
    def total(self) -> int:
        """Tokens."""

    def cut(self, begin: int, end: int) -> Seen:
        """Tokens begin .. end - 1 alone."""


@dataclass(frozen=True)
class Memory:
    """What one layer remembers of a prefix: consecutive pieces, and the centroids that were needed so far.

    gap: tokens between the first piece, which then is the sinks, and the next one that are no longer held.
    """

    pieces: tuple[Piece, ...] = ()
    far: Far | None = None
    gap: int = 0

    @property
    def tokens(self) -> int:
        """How many tokens it remembers, with those that are no longer held."""
        return sum(piece.total for piece in self.pieces) + self.gap

    def first(self, n: int) -> Memory:
        """The first n tokens. What is left of a piece is copied, so that the rest of it is let go."""
        kept: list[Piece] = []
        for piece in self.pieces:
            if n >= piece.total:
                kept.append(piece)
            elif n > 0:
                kept.append(_copied(piece.cut(0, n)))
            n -= piece.total
        return Memory(tuple(kept))

    @property
    def joins(self) -> bool:
        """Whether tokens that follow become a part of its last piece."""
        return len(self.pieces) > bool(self.gap) and self.pieces[-1].total < PIECE

    def then(self, piece: Piece) -> Memory:
        """These tokens followed by others."""
        if self.joins:
            return replace(
                self, pieces=(*self.pieces[:-1], joined([p.cut(0, p.total) for p in (self.pieces[-1], piece)]))
            )
        return replace(self, pieces=(*self.pieces, piece))

    def with_far(self, window: int) -> Memory:
        """The same with the centroids that the last token's attention needs."""
        found = _more_far(self.far, self.tokens, window)
        return self if found is None else replace(self, far=_then(self.far, self._cut(*found), window))

    def without_groups(self, window: int) -> Memory:
        """The same without the pieces of which centroids alone will be seen, whatever tokens follow."""
        begin, at = window_begin(self.tokens - 1, window), 0
        for number, piece, first in self._placed():
            if first + piece.total > begin:
                at = number
                break
        if not at or (at == 1 and self.gap):
            return self
        gone = sum(piece.total for piece in self.pieces[bool(self.gap) : at])
        sinks = self.pieces[0] if self.gap else _copied(self.pieces[0].cut(0, SINKS))
        return replace(self, pieces=(sinks, *self.pieces[at:]), gap=self.gap + gone - (0 if self.gap else SINKS))

    def seen(self, near: int = 0) -> Seen:
        """In one piece, without what lies between the sinks and token `near`; 0 for all."""
        end = self.tokens
        if self.gap and near < SINKS + self.gap:
            raise ValueError(f"tokens from {near} on are asked for, of which some are no longer held")
        parts = (self._cut(0, SINKS), self._cut(near, end)) if near else (self._cut(0, end),)
        return replace(joined(parts), far=self.far, gap=near - SINKS if near else 0)

    def _cut(self, begin: int, end: int) -> Seen:
        return joined(
            [
                piece.cut(max(begin - first, 0), min(end - first, piece.total))
                for _, piece, first in self._placed()
                if first < end and begin < first + piece.total
            ]
        )

    def _placed(self) -> Iterator[tuple[int, Piece, int]]:
        """Pieces with their numbers and the places of their first tokens."""
        at = 0
        for number, piece in enumerate(self.pieces):
            yield number, piece, at
            at += piece.total + (0 if number else self.gap)


class PredictorState:
    """What the predictor remembers of one prefix. The last layer needs no memory: nothing attends to it.

    forgets: whether it lets go what windows have left behind. It then takes no more memory as it grows but for centroids, and cannot be
    cut. Without a window it holds all.
    """

    def __init__(self, forgets: bool = False) -> None:
        self.forgets = forgets
        self.length = 0
        self.layers: list[Memory] = []

    def truncate(self, n: int) -> None:
        """Forget all but the first n tokens."""
        if not 0 <= n <= self.length:
            raise ValueError(f"A state of {self.length} tokens cannot be cut to {n}.")
        if n == self.length:
            return
        if self.forgets and n:
            raise ValueError(f"A state that forgets cannot be cut to {n} tokens.")
        self.layers = [memory.first(n) for memory in self.layers]
        self.length = n


def gathered(layers: Sequence[Memory]) -> list[Memory]:
    """The same memories of a prefix, one a layer, with the integers of their last pieces side by side in one block.

    Where one of these pieces is the stored cache, all stay as they are.
    A piece is made among the temporary arrays of its pass, and a few hundred small ones there would keep the allocator from giving
    their room to the next pass.
    """
    last = [piece for memory in layers if isinstance(piece := memory.pieces[-1], Seen)]
    if len(last) < len(layers):
        return list(layers)
    shape = last[0].keys.shape if last else (0,)
    integers = torch.empty(len(last), 2, *shape, dtype=torch.int16, device=last[0].keys.device if last else None)
    scales = torch.empty(len(last), *shape[:-1], 1, device=integers.device)
    out = []
    for memory, piece, both, scale in zip(layers, last, integers, scales, strict=True):
        both[0], both[1], scale[:] = piece.keys, piece.values, piece.key_scale
        out.append(replace(memory, pieces=(*memory.pieces[:-1], Seen(both[0], scale, both[1]))))
    return out


def joined(parts: Sequence[Seen]) -> Seen:
    """Tokens one after the other; of one part nothing is copied."""
    keys, scales, values = ([p.keys for p in parts], [p.key_scale for p in parts], [p.values for p in parts])
    return Seen(exact.cat(keys, 1), exact.cat(scales, 1), exact.cat(values, 1))


def window_begin(query: int, window: int) -> int:
    """The first token of a query's window, 0 where that meets the sinks."""
    groups = groups_before(query, window) if window else 0
    return SINKS + groups * window if groups else 0


def _copied(piece: Seen) -> Seen:
    return Seen(piece.keys.clone(), piece.key_scale.clone(), piece.values.clone())


def _more_far(known: Far | None, total: int, window: int) -> tuple[int, int] | None:
    """Which tokens' centroids the last of `total` tokens needs besides the known ones."""
    if not window:
        return None
    have = 0 if known is None else known.keys.shape[1] // centroids(window)
    need = groups_before(total - 1, window)
    return None if have >= need else (SINKS + have * window, SINKS + need * window)


def _then(known: Far | None, tokens: Seen, window: int) -> Far:
    new = far(tokens.keys, tokens.key_scale, tokens.values, window)
    return new if known is None else known.then(new)
