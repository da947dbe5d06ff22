"""Decode actors on Ray: batches of requests in, outcomes out; what an actor does not bring back is tried again elsewhere.

Bounded: an actor has one batch at a time, and the next one is taken from the caller's iterator only when an actor is free.
"""

from __future__ import annotations

import importlib
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from codec.errors import DataError
from pipeline import ray_runtime
from pipeline.restoration.batch import BatchRestorer, Outcome, Request
from pipeline.restoration.restorer import Workshop
from pipeline.restoration.span import Range
from pipeline.store import Store
from pipeline.work import Device
from pipeline.worker_process import settle

ATTEMPTS = 3  # of a request whose actor died, and of starting an actor
POLL_SECONDS = 0.5
Batch = list[Request]


@dataclass(frozen=True)
class PoolSettings:
    """What the actors are and do. deadline: seconds that one request may take once an actor has it; of a batch, their sum."""

    store: Store
    device: Device
    actors: int
    cpus: float
    gpus: float
    deadline: float
    layers: Range | None = None
    heads: Range | None = None


class DecodeActor:
    """The body of an actor. Predictors are loaded at its first batch: errors of a call arrive as what they are."""

    def __init__(self, settings: PoolSettings) -> None:
        self._settings = settings
        self._restorer: BatchRestorer | None = None

    def ready(self) -> bool:
        """Answers when the process is up."""
        return True

    def run(self, batch: Batch) -> list[Outcome]:
        """Restore a batch into files."""
        if self._restorer is None:
            settle(self._settings.device.threads)
            workshop = Workshop(self._settings.store, self._settings.device.name)
            self._restorer = BatchRestorer(workshop, self._settings.layers, self._settings.heads)
        return self._restorer.run(batch)


@dataclass
class _Task:
    """What one actor is doing; no batch: it is starting."""

    actor: Any
    batch: Batch
    until: float
    starts: int = 0


class DecodePool:
    """A pool that lives as long as `run` is iterated; giving it up (close, Ctrl-C) ends its actors."""

    def __init__(self, settings: PoolSettings) -> None:
        self._settings = settings
        self._ray: Any = importlib.import_module("ray")
        self._busy: dict[Any, _Task] = {}  # by the reference that answers
        self._again: deque[Batch] = deque()
        self.replaced = 0  # actors that died or were ended for being late

    def run(self, batches: Iterable[Batch]) -> Iterator[Outcome]:
        """Outcomes as they come, in no order; each request has exactly one.

        Raises:
            UserError, DataError, StorageError: what ends the job, as one sentence.
        """
        source: Iterator[Batch] | None = iter(batches)
        idle: list[Any] = []
        try:
            for _ in range(self._settings.actors):
                self._start()
            while True:
                while idle and (self._again or source is not None):
                    batch = self._again.popleft() if self._again else next(source or iter(()), None)
                    if batch is None:
                        source = None
                    else:
                        self._give(idle.pop(), batch)
                working = any(task.batch for task in self._busy.values())
                if source is None and not working and not self._again:
                    return
                yield from self._wait(idle)
        finally:
            for actor in [*idle, *(task.actor for task in self._busy.values())]:
                self._ray.kill(actor)
            self._busy.clear()

    # ---------------------------------------------------------------- actors
    def _start(self, starts: int = 0) -> None:
        remote = self._ray.remote(DecodeActor).options(num_cpus=self._settings.cpus, num_gpus=self._settings.gpus)
        actor = remote.remote(self._settings)
        self._busy[actor.ready.remote()] = _Task(actor, [], float("inf"), starts)

    def _give(self, actor: Any, batch: Batch) -> None:
        until = time.monotonic() + self._settings.deadline * len(batch)
        self._busy[actor.run.remote(batch)] = _Task(actor, batch, until)

    def _wait(self, idle: list[Any]) -> Iterator[Outcome]:
        """Take in what has finished, failed, or is late."""
        next_late = min((task.until for task in self._busy.values()), default=float("inf")) - time.monotonic()
        timeout = max(0.0, min(POLL_SECONDS, next_late))
        done, _ = self._ray.wait(list(self._busy), num_returns=1, timeout=timeout)
        for reference in done:
            task = self._busy.pop(reference)
            try:
                found = self._ray.get(reference)
            except Exception as error:
                yield from self._failed(task, error, idle)
                continue
            idle.append(task.actor)
            if task.batch:
                yield from found
        now = time.monotonic()
        for reference, task in [(r, t) for r, t in self._busy.items() if t.until < now]:
            del self._busy[reference]
            self._ray.kill(task.actor)
            self._replace()
            why = f"took longer than {self._settings.deadline:g} s; raise --deadline"
            yield from self._retry(task.batch, why, alone=len(task.batch) == 1)

    def _replace(self, starts: int = 0) -> None:
        self.replaced += 1
        self._start(starts)

    # ---------------------------------------------------------------- failures
    def _failed(self, task: _Task, error: Exception, idle: list[Any]) -> Iterator[Outcome]:
        """An error of ours ends the job; a dead actor is replaced, and its requests are tried again."""
        ours = ray_runtime.our_error(error)
        if ours is not None:
            idle.append(task.actor)
            raise ours from error
        if not isinstance(error, self._ray.exceptions.RayActorError):
            raise error
        if not task.batch and task.starts + 1 >= ATTEMPTS:
            raise DataError(f"decode actors end while they start: {_line(error)}") from error
        self._replace(task.starts + 1 if not task.batch else 0)
        yield from self._retry(task.batch, f"its decode actor died {ATTEMPTS} times")

    def _retry(self, batch: Batch, why: str, *, alone: bool = False) -> Iterator[Outcome]:
        """Each request of the batch by itself, so that one that is fatal to an actor takes no others with it.

        alone: the batch was one request, and it is its own fault.
        """
        for request in (r.again() for r in batch):
            if alone or request.attempts >= ATTEMPTS:
                yield Outcome(request.id, len(request.ids), 0, 0, 0.0, error=f"the prompt {request.id!r}: {why}")
            else:
                self._again.append([request])


def _line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]


def make_batches(requests: Iterable[Request], batch_tokens: int, window: int) -> Iterator[Batch]:
    """Requests in batches of at most so many tokens (or one request), those that begin alike together.

    Only `window` requests are looked at at a time.
    """
    pending: list[Request] = []
    for request in requests:
        pending.append(request)
        if len(pending) >= window:
            yield from _batches(pending, batch_tokens)
            pending = []
    yield from _batches(pending, batch_tokens)


def _batches(requests: Sequence[Request], batch_tokens: int) -> Iterator[Batch]:
    def chain(request: Request) -> tuple[bytes, ...]:
        return tuple(chunk.key for match in request.matches[:1] for chunk in match.chunks)

    batch: Batch = []
    tokens = 0
    for request in sorted(requests, key=chain):
        own = sum(match.tokens for match in request.matches[:1])
        if batch and tokens + own > batch_tokens:
            yield batch
            batch, tokens = [], 0
        batch.append(request)
        tokens += own
    if batch:
        yield batch
