"""Which layers and heads of a cache are asked for: what one rank of a sharded engine holds."""

from __future__ import annotations

import re
from dataclasses import dataclass

from torch import Tensor

from codec.errors import UserError

Range = tuple[int, int]


@dataclass(frozen=True)
class Span:
    """Layers and KV heads, each [first, end)."""

    layers: Range
    heads: Range

    @staticmethod
    def of(layer_count: int, head_count: int, layers: Range | None = None, heads: Range | None = None) -> Span:
        """Of a cache of that many layers and heads; None is all of them. Raises UserError for a range that it does not have."""
        return Span(_within("layers", layers, layer_count), _within("heads", heads, head_count))

    def cut(self, values: Tensor) -> Tensor:
        """The heads of a tensor [kv_heads, …], contiguous."""
        first, end = self.heads
        return values[first:end].contiguous() if (first, end) != (0, len(values)) else values.contiguous()


def parse_range(name: str, text: str | None) -> Range | None:
    """`A:B` as a pair, for a command line; B may be left out of the range as in Python. Raises UserError."""
    if text is None:
        return None
    match = re.fullmatch(r"(\d{1,6}):(\d{1,6})", text)
    if match is None or int(match[1]) >= int(match[2]):
        raise UserError(f"{name} {text!r} is no range A:B of whole numbers with A below B (B itself is not in it)")
    return int(match[1]), int(match[2])


def _within(what: str, given: Range | None, count: int) -> Range:
    if given is None:
        return 0, count
    first, end = given
    if not 0 <= first < end <= count:
        raise UserError(f"the {what} {first}:{end} are not in a cache that has {what} 0:{count}")
    return first, end
