"""Paged caches of engines, read and written by bits, whatever their layout.

How a block holds its tokens depends on the engine, the number format and the processor: keys transposed, pairs interleaved for a
matrix unit. So the layout is not assumed but found out: known values are written with the engine's own kernel, and looked for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from codec.errors import UserError
from codec.formats import bits

Pair = tuple[Tensor, Tensor]
Write = Callable[[Tensor, Tensor, Tensor, Tensor], None]  # keys and values [T, heads, head_dim], cache, slots int64 [T]
DIGIT = 8  # the numbers 1 … 8 are exact in every format of a cache, and 0 is what was not written


@dataclass(frozen=True)
class PageLayout:
    """places: int64 [2 (K, V), tokens of a block, head_dim], where in a head's part of a block each value lies."""

    places: Tensor

    @property
    def block(self) -> int:
        """Tokens of a block."""
        return self.places.shape[1]

    @staticmethod
    def find(write: Write, cache: Tensor, dtype: torch.dtype, given: torch.dtype) -> PageLayout:
        """Of a paged cache [blocks, heads, block, 2 · head_dim], which is not touched.

        write: the engine's kernel, with scales of 1. dtype: of the stored values. given: that in which the kernel takes them.

        Raises:
            UserError: a block does not hold each value once, so it cannot be read or written here.
        """
        if cache.dim() != 4 or cache.shape[3] % 2:
            raise UserError(f"a paged cache of shape {list(cache.shape)} is of a kind that is not known here")
        _, heads, block, width = cache.shape
        probe = _Probe(write, torch.zeros_like(cache[:1]), dtype, given)
        count = 2 * block * (width // 2)
        numbers = torch.arange(count).view(2, block, 1, width // 2).expand(-1, -1, heads, -1)
        found = probe.read(numbers, count)
        owners = probe.read(torch.arange(heads).view(1, 1, heads, 1).expand_as(numbers), heads)
        right = torch.equal(found.sort(1).values, torch.arange(count).expand(heads, -1)) and bool(
            (found == found[0]).all()
        )
        if not right or not torch.equal(owners, torch.arange(heads)[:, None].expand_as(owners)):
            raise UserError("the engine's paged cache does not hold each value once in a place of its head's own")
        return PageLayout(found[0].argsort().view(2, block, width // 2))

    def put(self, cache: Tensor, blocks: Sequence[int], first: int, pair: Pair) -> None:
        """Write the tokens from `first` on, K and V [heads, T, head_dim] in the cache's format, bit by bit.

        blocks: the request's block ids, from its first token on.
        """
        pages = _pages(cache)
        for block, inside, given in self._parts(first, pair[0].shape[1]):
            for side, values in enumerate(pair):
                where = self.places[side, inside].reshape(-1)
                pages[blocks[block]][:, where] = bits(values[:, given].contiguous()).reshape(len(values), -1)

    def take(self, cache: Tensor, blocks: Sequence[int], first: int, tokens: int, dtype: torch.dtype) -> Pair:
        """Copies of the tokens first … first + tokens - 1: K and V [heads, tokens, head_dim] of this dtype."""
        pages, heads, dim = _pages(cache), cache.shape[1], self.places.shape[2]
        out = [torch.empty(heads, tokens, dim, dtype=dtype) for _ in range(2)]
        for block, inside, given in self._parts(first, tokens):
            for side, values in enumerate(out):
                where = self.places[side, inside].reshape(-1)
                bits(values)[:, given] = pages[blocks[block]][:, where].view(heads, -1, dim).cpu()
        return out[0], out[1]

    def _parts(self, first: int, tokens: int) -> list[tuple[int, slice, slice]]:
        """Block by block: its number among the request's, which of its tokens are meant, and which of those given they are."""
        found, at = [], first
        while at < first + tokens:
            number, begin = divmod(at, self.block)
            end = min(self.block, begin + first + tokens - at)
            found.append((number, slice(begin, end), slice(at - first, at - first + end - begin)))
            at += end - begin
        return found


class _Probe:
    """One empty block, written with numbers a digit at a time."""

    def __init__(self, write: Write, block: Tensor, dtype: torch.dtype, given: torch.dtype) -> None:
        self._write, self._block, self._dtype, self._given = write, block, dtype, given

    def read(self, numbers: Tensor, count: int) -> Tensor:
        """Write numbers below `count`, [2, block, heads, head_dim]; where they are now: int64 [heads, places], -1 for nowhere."""
        slots = torch.arange(numbers.shape[1])
        found = torch.zeros(self._block.shape[1], self._block[0, 0].numel(), dtype=torch.int64)
        power = 1
        while power < count:
            key, value = ((numbers // power % DIGIT + 1).to(self._given)).contiguous()
            self._block.zero_()
            self._write(
                key.to(self._block.device), value.to(self._block.device), self._block, slots.to(self._block.device)
            )
            stored = self._block.view(self._dtype).float().cpu().view(*found.shape)
            digits = stored.to(torch.int64)
            found = torch.where((digits < 1) | (digits > DIGIT) | (found < 0), -1, found + (digits - 1) * power)
            power *= DIGIT
        return found


def _pages(cache: Tensor) -> Tensor:
    """A paged cache as bit patterns [blocks, heads, values]; the same memory."""
    return bits(cache).view(cache.shape[0], cache.shape[1], -1)
