"""Several prompts restored together into files: decoded as one batch, and what all of them share decoded once."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path

from codec.errors import ChunkFailed
from codec.formats import number_format
from pipeline.restoration.catalogue import Ids, Match
from pipeline.restoration.files import AtomicFile, layer_bytes, layout
from pipeline.restoration.prefix import Pair
from pipeline.restoration.restorer import Restoration, Workshop
from pipeline.restoration.span import Range
from pipeline.restoration.together import decode_together, holders


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
                    for number, layer in decode_together([one.restored for one in group]):
                        for one, pair in zip(group, layer, strict=True):
                            if number >= one.restored.span.layers[0]:
                                _write(one, _cut(one.restored, pair))
                return
            except ChunkFailed as error:
                for number, chunk in holders([one.restored for one in group], error).items():
                    group[number].restored.shorten(ChunkFailed(str(error), 0, chunk))
                    group[number].size = 0


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
