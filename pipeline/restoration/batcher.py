"""Requests of a service decoded together: whatever waits when a thread is free, what several prompts begin with only once, and a
prefix that several ask for at a time only once.

A request gets its layers through a feed. Layers that are decoded wait there for a client that is slow, so that it does not hold up
those it was decoded with; whoever asks bounds how many requests there are. Prefixes decoded of late are kept, up to a number of bytes:
agents ask for the same few again and again.
"""

from __future__ import annotations

import queue
import threading
from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from typing import Any

from codec.errors import ChunkFailed
from pipeline.restoration.catalogue import Generation
from pipeline.restoration.prefix import Pair
from pipeline.restoration.restorer import Restoration
from pipeline.restoration.together import decode_together, holders

BATCH_TOKENS = 8192  # decoded together, or one prompt
Key = tuple[Generation, bytes]  # and the digest of all raw bits: what names a decoded prefix
_END = object()


class Feed:
    """One request's layers, as they come."""

    def __init__(self, restored: Restoration) -> None:
        self.restored = restored
        self.closed = False  # nobody takes them any more
        self._next = restored.span.layers[0]
        self._queue: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def give(self, number: int, pair: Pair) -> None:
        """One layer of all heads; what was not asked for, or was given before, is dropped."""
        if number == self._next < self.restored.span.layers[1]:
            self._next += 1
            self._queue.put((number, (self.restored.span.cut(pair[0]), self.restored.span.cut(pair[1]))))

    def end(self, error: BaseException | None = None) -> None:
        """No more will come."""
        self._queue.put(_END if error is None else error)

    def close(self) -> None:
        """Ask for no more."""
        self.closed = True

    def layers(self) -> Iterator[tuple[int, Pair]]:
        """What Restoration.layers yields and raises."""
        while (item := self._queue.get()) is not _END:
            if isinstance(item, BaseException):
                raise item
            yield item


class _Work:
    """One prefix, decoded for all who ask for it."""

    def __init__(self, key: Key, feed: Feed) -> None:
        self.key, self.restored, self.feeds = key, feed.restored, [feed]
        self.begun = False
        self.layers: list[Pair] = []  # for who asks when it is begun

    @property
    def wanted(self) -> bool:
        """Whether anybody still waits for it."""
        return any(not feed.closed for feed in self.feeds)

    def takes(self, feed: Feed) -> bool:
        """Let another request have the same; not one that needs more layers than are being decoded."""
        longer = feed.restored.span.layers[1] > self.restored.span.layers[1]
        if longer and self.begun:
            return False
        if longer:
            self.restored = feed.restored
        self.feeds.append(feed)
        for number, pair in enumerate(self.layers):
            feed.give(number, pair)
        return True

    def give(self, number: int, pair: Pair) -> None:
        """One layer; again, where decoding began anew."""
        if number == len(self.layers):
            self.layers.append(pair)
        for feed in self.feeds:
            feed.give(number, pair)

    def end(self, error: BaseException | None = None) -> None:
        """Tell all that no more will come."""
        for feed in self.feeds:
            feed.end(error)


class Decoded:
    """Decoded prefixes, those asked for last, of at most so many bytes."""

    def __init__(self, limit: int) -> None:
        self._limit, self._held = limit, 0
        self._layers: OrderedDict[Key, list[Pair]] = OrderedDict()

    def get(self, key: Key, layers: int) -> list[Pair]:
        """The first so many layers; [] where they are not kept."""
        found = self._layers.get(key, [])
        if len(found) < layers:
            return []
        self._layers.move_to_end(key)
        return found[:layers]

    def put(self, key: Key, layers: list[Pair]) -> None:
        """Keep a prefix, unless it is over the limit by itself, and forget what was not asked for longest."""
        size = _bytes(layers)
        if size > self._limit or len(layers) <= len(self._layers.get(key, ())):
            return
        self._held -= _bytes(self._layers.pop(key, []))
        while self._held + size > self._limit:
            self._held -= _bytes(self._layers.popitem(last=False)[1])
        self._layers[key], self._held = layers, self._held + size


def _bytes(layers: Sequence[Pair]) -> int:
    """What they hold on to: a tensor that is part of a larger one keeps all of it."""
    return sum(t.untyped_storage().nbytes() for pair in layers for t in pair)


class Batcher:
    """A few threads that decode all requests of a process."""

    def __init__(self, threads: int, tokens: int = BATCH_TOKENS, keep: int = 0) -> None:
        """threads: how many batches at a time. tokens: of a batch. keep: bytes of decoded prefixes that stay for who asks next."""
        self._tokens = tokens
        self._decoded = Decoded(keep)
        self._waiting: deque[_Work] = deque()
        self._works: dict[Key, _Work] = {}  # that wait or are being decoded
        self._some = threading.Condition()
        for number in range(threads):
            threading.Thread(target=self._work, name=f"decode-{number}", daemon=True).start()

    def ask(self, restored: Restoration) -> Feed:
        """The layers of a restoration that has tokens, decoded together with what others ask for. Close the feed in the end."""
        feed, key = Feed(restored), (restored.generation, restored.digest)
        with self._some:
            if kept := self._decoded.get(key, restored.span.layers[1]):
                for number, pair in enumerate(kept):
                    feed.give(number, pair)
                feed.end()
            elif key not in self._works or not self._works[key].takes(feed):
                self._works[key] = _Work(key, feed)
                self._waiting.append(self._works[key])
                self._some.notify()
        return feed

    def _work(self) -> None:
        while True:
            with self._some:
                self._some.wait_for(lambda: self._waiting)
                batch = self._take()
            try:
                self._decode(batch)
            except BaseException as error:  # whatever it is, those who wait must hear of it
                with self._some:
                    self._end(batch, error)
            batch = []  # holds no layers while nothing is asked for

    def _take(self) -> list[_Work]:
        """The one that waits longest, and all that can be decoded with it."""
        first = self._waiting.popleft()
        batch, tokens = [first], first.restored.tokens
        for work in list(self._waiting):
            fits = tokens + work.restored.tokens <= self._tokens
            if fits and work.restored.generation == first.restored.generation:
                self._waiting.remove(work)
                batch.append(work)
                tokens += work.restored.tokens
        for work in batch:
            work.begun = True
        return batch

    def _decode(self, batch: list[_Work]) -> None:
        """Give each its layers. A chunk that fails ends those that hold it; the others begin anew and go on where they were."""
        while group := self._wanted(batch):
            try:
                for number, pairs in decode_together([work.restored for work in group]):
                    with self._some:
                        for work, pair in zip(group, pairs, strict=True):
                            work.give(number, pair)
                    if not any(work.wanted for work in group):
                        break
                else:
                    with self._some:
                        for work in group:
                            self._decoded.put(work.key, work.layers)
                        self._end(group)
                    return
            except ChunkFailed as error:
                bad = holders([work.restored for work in group], error)
                with self._some:
                    self._end([group[number] for number in bad], error)
                batch = [work for number, work in enumerate(group) if number not in bad]

    def _wanted(self, batch: list[_Work]) -> list[_Work]:
        """Those that somebody still waits for; the others are at their end, and who asks for them now begins anew."""
        with self._some:
            self._end([work for work in batch if not work.wanted])
            return [work for work in batch if work.wanted]

    def _end(self, works: Sequence[_Work], error: BaseException | None = None) -> None:
        for work in works:
            if self._works.get(work.key) is work:
                del self._works[work.key]
            work.end(error)
