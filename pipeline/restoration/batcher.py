"""Requests of a service decoded together: whatever waits when a thread is free, and what several prompts begin with only once.

A request gets its layers through a feed. Layers that are decoded wait there for a client that is slow, so that it does not hold up
those it was decoded with; whoever asks bounds how many requests there are.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Iterator
from typing import Any

from codec.errors import ChunkFailed
from pipeline.restoration.restorer import Pair, Restoration
from pipeline.restoration.together import decode_together, holders

BATCH_TOKENS = 8192  # decoded together, or one prompt
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


class Batcher:
    """A few threads that decode all requests of a process."""

    def __init__(self, threads: int, tokens: int = BATCH_TOKENS) -> None:
        """threads: how many batches at a time. tokens: of a batch."""
        self._tokens = tokens
        self._waiting: deque[Feed] = deque()
        self._some = threading.Condition()
        for number in range(threads):
            threading.Thread(target=self._work, name=f"decode-{number}", daemon=True).start()

    def ask(self, restored: Restoration) -> Feed:
        """The layers of a restoration that has tokens, decoded together with what others ask for. Close the feed in the end."""
        feed = Feed(restored)
        with self._some:
            self._waiting.append(feed)
            self._some.notify()
        return feed

    def _work(self) -> None:
        while True:
            with self._some:
                self._some.wait_for(lambda: self._waiting)
                batch = self._take()
            try:
                _decode(batch)
            except BaseException as error:  # whatever it is, those who wait must hear of it
                for feed in batch:
                    feed.end(error)

    def _take(self) -> list[Feed]:
        """The one that waits longest, and all that can be decoded with it."""
        first = self._waiting.popleft()
        batch, tokens = [first], first.restored.tokens
        for feed in list(self._waiting):
            fits = tokens + feed.restored.tokens <= self._tokens
            if fits and feed.restored.generation == first.restored.generation:
                self._waiting.remove(feed)
                batch.append(feed)
                tokens += feed.restored.tokens
        return batch


def _decode(batch: list[Feed]) -> None:
    """Give each its layers. A chunk that fails ends those that hold it; the others begin anew and go on where they were."""
    while group := [feed for feed in batch if not feed.closed]:
        try:
            for number, pairs in decode_together([feed.restored for feed in group]):
                for feed, pair in zip(group, pairs, strict=True):
                    feed.give(number, pair)
                if all(feed.closed for feed in group):
                    return
            for feed in group:
                feed.end()
            return
        except ChunkFailed as error:
            bad = holders([feed.restored for feed in group], error)
            for number in bad:
                group[number].end(error)
            batch = [feed for number, feed in enumerate(group) if number not in bad]
