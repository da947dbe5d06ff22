"""What of a request the store has: the side of an engine that schedules. Only the index is read here, nothing is decoded.

Of a target the store can hold caches that this engine computed, and caches that the main job computed with transformers. Both are
right; they differ in last bits, so they lie under different fingerprints. The longer one is taken, of two of one length the engine's.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from codec.errors import KVCodecError
from codec.keys import engine_target
from pipeline.model_source import ModelSource
from pipeline.restoration.catalogue import Catalogue, Ids, Match, token_array
from pipeline.store import Store

REFRESH_SECONDS = 10.0
log = logging.getLogger("kv_store")


@dataclass(frozen=True)
class Load:
    """Part of a stored prefix that a worker is to put into pages: the tokens first … end - 1.

    ids: int64, the prefix's. blocks: the request's block ids, from its first token on.
    """

    request: str
    ids: Ids
    match: Match
    first: int
    end: int
    blocks: tuple[int, ...]


@dataclass(frozen=True)
class Save:
    """A prompt whose cache is in these blocks, and not in the store. ids: int64 [T]."""

    ids: Ids
    blocks: tuple[int, ...]


def targets(source: ModelSource, cache_format: str, engine: str, *, plain: bool) -> list[bytes]:
    """Fingerprints under which caches of a model can be stored that `engine` can use: its own, and the main job's if `plain`."""
    own = source.fingerprint(cache_format)
    return [engine_target(own, engine), *([own] if plain else [])]


class Lookup:
    """The index of a store, and what is under way for each request."""

    def __init__(
        self, store: Store, targets: Sequence[bytes], block: int, *, salt: bytes = b"", refresh: float = REFRESH_SECONDS
    ) -> None:
        """targets: whose caches may be used, the preferred one first. block: tokens of a block; only whole ones are loaded.

        salt: of requests without one of their own. Raises DataError, StorageError.
        """
        self._catalogues = [Catalogue(store, target) for target in targets]
        self._block, self._salt, self._refresh = block, salt, refresh
        self._found: dict[str, Match] = {}
        self._loads: dict[str, Load] = {}  # under way
        self._begun: set[str] = set()  # requests that were given something: none is given to twice
        self._bad: set[bytes] = set()  # keys of chunks that could not be restored
        self._fresh = time.monotonic()
        self._thread = ThreadPoolExecutor(1, "kv-store-index")
        self._reading: Future[None] | None = None

    def matched(self, request: str, ids: Sequence[int], computed: int, salt: str | None = None) -> int:
        """How many tokens beyond the `computed` ones can be loaded. At least one token is left for the engine to compute."""
        if request in self._begun:
            return 0
        self._look()
        match = self._longest(token_array(ids), self._salt if salt is None else salt.encode())
        if match is None:
            return 0
        end = min(match.tokens, len(ids) - 1) // self._block * self._block
        if end <= computed:
            return 0
        self._found[request] = match
        return end - computed

    def allocated(self, request: str, ids: Sequence[int], blocks: Sequence[int], tokens: int) -> Load | None:
        """What to load now that `matched` has blocks for this many tokens; None where it is nothing."""
        match = self._found.pop(request, None)
        if match is None or tokens <= 0:
            return None
        end = min(match.tokens, len(ids) - 1) // self._block * self._block
        load = Load(request, token_array(ids)[: match.tokens], match, end - tokens, end, tuple(blocks))
        self._loads[request] = load
        self._begun.add(request)
        return load

    def failed(self, blocks: set[int]) -> None:
        """These blocks could not be loaded: what they were to hold is not asked for again."""
        for load in self._loads.values():
            bad = [number for number, block in enumerate(load.blocks) if block in blocks]
            if bad:
                at = bad[0] * self._block
                self._bad |= {c.key for c in load.match.chunks if c.first_token <= at < c.first_token + c.tokens}

    def loaded(self, requests: set[str]) -> None:
        """These requests' loads have come to an end."""
        for request in requests:
            self._loads.pop(request, None)

    def finished(self, request: str) -> None:
        """Nothing more comes of this request."""
        self._found.pop(request, None)
        self._loads.pop(request, None)
        self._begun.discard(request)

    def stored(self, ids: Sequence[int]) -> bool:
        """Whether all of a prompt is stored under the preferred target."""
        match = _best(self._catalogues[:1], token_array(ids), self._salt)
        return match is not None and match.tokens == len(ids)

    def _longest(self, ids: Ids, salt: bytes) -> Match | None:
        match = _best(self._catalogues, ids, salt)
        if match is None:
            return None
        good = next((n for n, chunk in enumerate(match.chunks) if chunk.key in self._bad), len(match.chunks))
        return Match(match.generation, match.chunks[:good]) if good else None

    def _look(self) -> None:
        """See what was committed since, now and then, in a thread: what is known is used meanwhile."""
        idle = self._reading is None or self._reading.done()
        if idle and time.monotonic() - self._fresh > self._refresh:
            self._reading = self._thread.submit(self._read)

    def _read(self) -> None:
        try:
            for catalogue in self._catalogues:
                catalogue.refresh()
        except KVCodecError as error:  # what is known is as good as before
            log.warning("the store's index cannot be read again: %s", error)
        finally:
            self._fresh = time.monotonic()


def _best(catalogues: Sequence[Catalogue], ids: Ids, salt: bytes) -> Match | None:
    """The longest stored prefix; of several of one length, that of the first catalogue."""
    found = [catalogue.find(ids, salt)[0][:1] for catalogue in catalogues]
    return max((match for matches in found for match in matches), key=lambda m: m.tokens, default=None)
