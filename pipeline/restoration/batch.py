"""Several prompts restored together into files: decoded as one batch, and what all of them share decoded once."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

import codec
from codec.errors import ChunkFailed
from codec.formats import number_format
from pipeline.restoration.catalogue import Ids, Match
from pipeline.restoration.files import AtomicFile, layer_bytes, layout
from pipeline.restoration.prefix import Prefix
from pipeline.restoration.restorer import Pair, Restoration, Workshop
from pipeline.restoration.span import Range, bits


@dataclass(frozen=True)
class Request:
    """One prompt to restore into a file. ids: int64 [T]; matches: its stored prefixes, the longest first."""

    id: str
    ids: Ids
    matches: tuple[Match, ...]
    path: str
    notes: tuple[str, ...] = ()
    attempts: int = 0

    def again(self) -> Request:
        """The same, after an attempt that came to nothing."""
        return replace(self, attempts=self.attempts + 1)


@dataclass(frozen=True)
class Outcome:
    """What became of a request: tokens of `asked` in the file of `bytes`; error: why there is no file."""

    id: str
    asked: int
    tokens: int
    bytes: int
    seconds: float  # of the batch it was part of
    notes: tuple[str, ...] = ()
    damaged: bool = False
    error: str = ""


@dataclass
class _Open:
    """One request while its batch is worked on."""

    request: Request
    restored: Restoration
    size: int = 0
    file: AtomicFile | None = field(default=None, repr=False)


class BatchRestorer:
    """Restores batches of prompts into files, with the predictors of one workshop."""

    def __init__(self, workshop: Workshop, layers: Range | None = None, heads: Range | None = None) -> None:
        self._workshop, self._layers, self._heads = workshop, layers, heads

    def run(self, requests: Sequence[Request]) -> list[Outcome]:
        """One outcome a request, in their order. A prompt of which nothing is intact gets no file.

        Raises:
            UserError, DataError, StorageError: what concerns more than one prompt's blobs.
        """
        begin = time.perf_counter()
        work = [_Open(r, self._workshop.open(r.ids, r.matches, r.notes, self._layers, self._heads)) for r in requests]
        groups: dict[bytes, list[_Open]] = {}
        for one in work:
            if one.restored.tokens:
                groups.setdefault(one.restored.generation.profile, []).append(one)
        for group in groups.values():
            self._group(group)
        seconds = time.perf_counter() - begin
        return [
            Outcome(
                one.request.id, one.restored.asked, one.restored.tokens, one.size, seconds, tuple(one.restored.notes), one.restored.damaged
            )
            for one in work
        ]  # fmt: skip

    def _group(self, group: list[_Open]) -> None:
        """Write the files of prompts of one generation; where a chunk fails, those that hold it get shorter, and all begin anew."""
        while group := [one for one in group if one.restored.tokens]:
            try:
                with ExitStack() as files:
                    for one in group:
                        _begin(one, files)
                    for layer in self._layers_of(group):
                        for one, pair in zip(group, layer, strict=True):
                            _write(one, pair)
                return
            except ChunkFailed as error:
                bad = group[error.task].restored.prefix.chunks[error.chunk].key
                for one in group:
                    keys = [chunk.key for chunk in one.restored.prefix.chunks]
                    if bad in keys:
                        one.restored.shorten(ChunkFailed(str(error), 0, keys.index(bad)))
                        one.size = 0

    def _layers_of(self, group: list[_Open]) -> Iterator[list[Pair]]:
        """Layer by layer what every prompt of the group gets: first what several share, then the rest of all of them.

        The chunk of a ChunkFailed counts from its prompt's first one.
        """
        decoder, span = group[0].restored.decoder, group[0].restored.span
        prefixes = [one.restored.prefix for one in group]
        shares = _shares(prefixes)
        longer = [n for n, p in enumerate(prefixes) if len(p.chunks) > shares[n].chunks]
        states = {share.first: decoder.predictor.new_state() for share in shares}
        heads = sorted({share.first for share in shares if share.chunks})
        tasks = [prefixes[n].task(states[n], 0, shares[n].chunks) for n in heads]
        first, end = span.layers
        # What continues from the states needs them to have taken in all layers.
        last = decoder.predictor.config.layers if longer else end
        with _counted(heads, 0):
            decoding = codec.decode_prefixes(decoder.predictor, decoder.profile, tasks) if tasks else iter(())
            shared = [dict(zip(heads, pairs, strict=True)) for _, pairs in zip(range(last), decoding, strict=False)]
        tasks = [prefixes[n].task(codec.fork(states[shares[n].first]), shares[n].chunks) for n in longer]
        rest = codec.decode_prefixes(decoder.predictor, decoder.profile, tasks) if tasks else iter([[]] * end)
        for number in range(end):
            with _counted(longer, [shares[n].chunks for n in longer]):
                own: dict[int, Pair] = dict(zip(longer, next(rest), strict=True))
            if number >= first:
                before = shared[number] if shared else {}
                yield [
                    _cut(one.restored, _joined(before.get(shares[n].first), own.get(n))) for n, one in enumerate(group)
                ]


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


@contextmanager
def _counted(numbers: Sequence[int], before: int | Sequence[int]) -> Iterator[None]:
    """Let a ChunkFailed name the prompt by its number in the group, and the chunk from the prompt's first one on."""
    try:
        yield
    except ChunkFailed as error:
        skipped = before if isinstance(before, int) else before[error.task]
        raise ChunkFailed(str(error), numbers[error.task], error.chunk + skipped) from error


def _begin(one: _Open, files: ExitStack) -> None:
    """Open its file and write what stands before the layers."""
    plan = layout(one.restored, {"id": one.request.id})
    one.file = files.enter_context(AtomicFile(Path(one.request.path)))
    one.file.write(plan.head)
    one.size = plan.size


def _write(one: _Open, pair: Pair) -> None:
    assert one.file is not None
    for data in layer_bytes(pair, number_format(one.restored.cache_format)):
        one.file.write(data)


def _cut(restored: Restoration, pair: Pair) -> Pair:
    return restored.span.cut(pair[0]), restored.span.cut(pair[1])


def _joined(first: Pair | None, second: Pair | None) -> Pair:
    """One after the other along the tokens, bit for bit."""
    if first is None or second is None:
        found = second if first is None else first
        assert found is not None
        return found
    pairs = zip(first, second, strict=True)
    key, value = (torch.cat([bits(a.contiguous()), bits(b.contiguous())], 1).view(a.dtype) for a, b in pairs)
    return key, value


def _common(chains: Sequence[Sequence[bytes]]) -> int:
    """How many keys all of them begin with."""
    count = 0
    for keys in zip(*chains, strict=False):
        if len(set(keys)) > 1:
            break
        count += 1
    return count
