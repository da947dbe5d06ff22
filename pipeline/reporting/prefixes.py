"""How prompts share prefixes: how much it saves, and the picture of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

from pipeline.reporting import charts
from pipeline.reporting.charts import Block
from pipeline.reporting.facts import PromptFacts

SHOWN = 200  # prompts in the picture


@dataclass(frozen=True)
class Sharing:
    """Chunks that prompts need, one by one, and distinct ones; how many prompts the most shared chunk is in; the picture."""

    prompts: int
    occurrences: int
    distinct: int
    most: int
    picture: Markup | None

    @property
    def saved(self) -> float:
        """Share of the chunks that sharing saves."""
        return 1 - self.distinct / self.occurrences if self.occurrences else 0.0


def sharing(prompts: Sequence[PromptFacts]) -> Sharing:
    """Of a generation's prompts; the picture shows those whose first chunk is shared most."""
    uses = Counter(key for prompt in prompts for key in prompt.keys)
    first = Counter(prompt.keys[0] for prompt in prompts)
    shown = sorted(prompts, key=lambda prompt: (-first[prompt.keys[0]], prompt.keys))[:SHOWN]
    shown.sort(key=lambda prompt: (-first[prompt.keys[0]], prompt.keys))
    drawn = _picture(shown) if prompts else None
    return Sharing(len(prompts), sum(uses.values()), len(uses), max(uses.values(), default=0), drawn)


def _picture(prompts: Sequence[PromptFacts]) -> Markup:
    depth = max(len(prompt.keys) for prompt in prompts)
    return charts.icicle(blocks(prompts), len(prompts), depth, "prompts side by side, and the prefixes they share")


def blocks(prompts: Sequence[PromptFacts]) -> list[Block]:
    """Sorted prompts as blocks: neighbours that have a chunk in common share a block, and chunks of the same prompts are one."""
    out: list[Block] = []
    waiting = [(0, len(prompts), 0)]  # from, to, depth: prompts that have all chunks above in common
    while waiting:
        begin, end, top = waiting.pop()
        while begin < end and len(prompts[begin].keys) <= top:
            begin += 1
        if begin == end:
            continue
        key, stop = prompts[begin].keys[top], begin
        while stop < end and len(prompts[stop].keys) > top and prompts[stop].keys[top] == key:
            stop += 1
        waiting.append((stop, end, top))
        depth = 1
        while _go_on(prompts[begin:stop], top + depth):
            depth += 1
        names = ", ".join(prompt.id for prompt in prompts[begin : min(stop, begin + 3)])
        more = f" and {stop - begin - 3} others" if stop - begin > 3 else ""
        out.append(Block(begin, stop - begin, top, depth, f"{depth} chunks of {names}{more}"))
        waiting.append((begin, stop, top + depth))
    return out


def _go_on(prompts: Sequence[PromptFacts], depth: int) -> bool:
    """Whether all of them have the same next chunk."""
    following = {prompt.keys[depth] if len(prompt.keys) > depth else None for prompt in prompts}
    return len(following) == 1 and None not in following
