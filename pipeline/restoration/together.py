"""Prompts of one generation decoded together, a layer of all of them at a time; what several of them begin with is decoded once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch

import codec
from codec.errors import ChunkFailed
from codec.formats import bits
from pipeline.restoration.prefix import Pair, Prefix
from pipeline.restoration.restorer import Restoration


def decode_together(group: Sequence[Restoration]) -> Iterator[tuple[int, list[Pair]]]:
    """Layer by layer, up to the last that one of them asks for: its number, and (K, V) of each prompt, all heads and tokens.

    group: of one generation, each with tokens.

    Raises:
        ChunkFailed: a chunk decodes to other bits than were stored. Its task is a prompt's number in the group, its chunk counts
            from that prompt's first one.
    """
    decoder, end = group[0].decoder, max(restored.span.layers[1] for restored in group)
    prefixes = [restored.prefix for restored in group]
    shares, new = _shares(prefixes), decoder.predictor.new_state
    heads = sorted({share.first for share in shares if share.chunks})
    longer = [n for n, p in enumerate(prefixes) if len(p.chunks) > shares[n].chunks]
    tasks = [prefixes[n].task(new(), 0, shares[n].chunks) for n in heads]
    for n in longer:
        after = heads.index(shares[n].first) if shares[n].chunks else None
        tasks.append(replace(prefixes[n].task(new(), shares[n].chunks), after=after))
    skipped = [0] * len(heads) + [shares[n].chunks for n in longer]
    decoding = codec.decode_prefixes(decoder.predictor, decoder.profile, tasks, keep=False)
    with _counted([*heads, *longer], skipped):
        for number, pairs in zip(range(end), decoding, strict=False):
            shared, own = dict(zip(heads, pairs, strict=False)), dict(zip(longer, pairs[len(heads) :], strict=True))
            yield number, [_joined(shared.get(shares[n].first), own.get(n)) for n in range(len(group))]


def holders(group: Sequence[Restoration], error: ChunkFailed) -> dict[int, int]:
    """Which of them hold the chunk that failed in `decode_together`, and its number in each."""
    bad = group[error.task].prefix.chunks[error.chunk].key
    found = {}
    for number, restored in enumerate(group):
        keys = [chunk.key for chunk in restored.prefix.chunks]
        if bad in keys:
            found[number] = keys.index(bad)
    return found


@dataclass(frozen=True)
class _Share:
    """How many chunks a prompt begins with that are decoded once for several, with those of prompt number `first`."""

    first: int
    chunks: int


def _shares(prefixes: Sequence[Prefix]) -> list[_Share]:
    """Prompts that have their first chunk in common share all chunks that they all have in common."""
    alike: dict[bytes, list[int]] = {}
    for number, prefix in enumerate(prefixes):
        alike.setdefault(prefix.chunks[0].key, []).append(number)
    found: dict[int, _Share] = {}
    for numbers in alike.values():
        common = _common([[chunk.key for chunk in prefixes[n].chunks] for n in numbers]) if len(numbers) > 1 else 0
        found |= {n: _Share(numbers[0], common) for n in numbers}
    return [found[n] for n in range(len(prefixes))]


def _common(chains: Sequence[Sequence[bytes]]) -> int:
    """How many keys all of them begin with."""
    count = 0
    for keys in zip(*chains, strict=False):
        if len(set(keys)) > 1:
            break
        count += 1
    return count


@contextmanager
def _counted(numbers: Sequence[int], before: Sequence[int]) -> Iterator[None]:
    """Let a ChunkFailed name the prompt by its number in the group, and the chunk from the prompt's first one on."""
    try:
        yield
    except ChunkFailed as error:
        raise ChunkFailed(str(error), numbers[error.task], error.chunk + before[error.task]) from error


def _joined(first: Pair | None, second: Pair | None) -> Pair:
    """One after the other along the tokens, bit for bit."""
    if first is None or second is None:
        found = second if first is None else first
        assert found is not None
        return found
    pairs = zip(first, second, strict=True)
    key, value = (torch.cat([bits(a.contiguous()), bits(b.contiguous())], 1).view(a.dtype) for a, b in pairs)
    return key, value
