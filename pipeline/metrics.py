"""Metrics of a running job, on the endpoint of every Ray node for Prometheus (which puts "ray_" before each name).

    kv_tokens, kv_chunks                 stored by encode actors; chunks by outcome: written, adopted
    kv_raw_bytes, kv_stored_bytes        of these chunks
    kv_bits_per_scalar                   of what an actor has stored so far, headers and all
    kv_profile_excess_bits               bits a scalar above what calibration promised (pipeline/health.py)
    kv_chunks_verified, kv_verification_failures
    kv_queue_depth                       groups of prompts that are planned and not done, of the driver
    kv_store_seconds                     a histogram of requests to the store, by operation: get, put

All have the tags model, cache_format and rung. Prompts, tenants and paths are in none of them.
"""

from __future__ import annotations

import importlib
import sys
import time
from collections.abc import Callable
from typing import Any, TypeVar

import codec
from pipeline.health import Costs, Health
from pipeline.store import Store
from pipeline.work import Job

TAGS = ("model", "cache_format", "rung")
SECONDS = [0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0]

_T = TypeVar("_T")


class Metrics:
    """What one process of a job reports. Where it does not run under Ray, nothing happens."""

    def __init__(self, job: Job, kinds: Any = None) -> None:
        """kinds: what has Counter, Gauge and Histogram; ray.util.metrics where this process is one of Ray's."""
        self._kinds = kinds or _rays()
        self._tags = {
            "model": job.model.name,
            "cache_format": job.cache_format,
            "rung": f"{job.predictor_kind} {job.loop}",
        }
        self._made: dict[str, Any] = {}
        self._scalars = self._bytes = self._measured = 0
        self._costs: Costs | None = None

    def stored(self, outcome: str, tokens: int, scalars: int, raw_bytes: int, stored_bytes: int) -> None:
        """One chunk that is in the store now."""
        self._count("kv_tokens", "Tokens of chunks stored", tokens)
        self._count("kv_chunks", "Chunks stored", 1, outcome=outcome)
        self._count("kv_raw_bytes", "Raw bytes of chunks stored", raw_bytes)
        self._count("kv_stored_bytes", "Bytes of their blobs", stored_bytes)
        self._scalars, self._bytes = self._scalars + scalars, self._bytes + stored_bytes
        self._set("kv_bits_per_scalar", "Bits on disk over scalars", 8 * self._bytes / self._scalars)

    def cost(self, costs: Costs | None, chunks: int, profile: codec.Profile | None) -> None:
        """What the layers of some chunks cost, beside the profile's promise."""
        if costs is None or profile is None:
            return
        self._costs = costs if self._costs is None else Costs.total([self._costs, costs])
        self._measured += chunks
        assert self._costs is not None
        excess = Health.of(self._costs, profile, self._measured).mean_excess
        self._set("kv_profile_excess_bits", "Bits a scalar above what calibration promised", excess)

    def verified(self, good: int, failed: int) -> None:
        """Chunks that were decoded again."""
        self._count("kv_chunks_verified", "Chunks that came back as they were", good)
        self._count("kv_verification_failures", "Chunks that did not", failed)

    def queue(self, depth: int) -> None:
        """How many groups are still to be done."""
        self._set("kv_queue_depth", "Groups of prompts planned and not done", depth)

    def store(self, store: Store) -> Store:
        """The same store, with the seconds of its requests reported."""
        return store if self._kinds is None else TimedStore.over(store, self._took)

    def _took(self, operation: str, seconds: float) -> None:
        more = {"boundaries": SECONDS}
        made = self._metric("Histogram", "kv_store_seconds", "Seconds of a request to the store", ("operation",), more)
        if made is not None:
            made.observe(seconds, tags={"operation": operation} | self._tags)

    def _count(self, name: str, text: str, value: float, **tags: str) -> None:
        made = self._metric("Counter", name, text, tuple(tags))
        if made is not None and value:
            made.inc(value, tags=self._tags | tags)

    def _set(self, name: str, text: str, value: float) -> None:
        made = self._metric("Gauge", name, text)
        if made is not None:
            made.set(value, tags=self._tags)

    def _metric(
        self, kind: str, name: str, text: str, tags: tuple[str, ...] = (), more: dict[str, Any] | None = None
    ) -> Any:
        if self._kinds is None:
            return None
        if name not in self._made:
            self._made[name] = getattr(self._kinds, kind)(name, description=text, tag_keys=TAGS + tags, **(more or {}))
        return self._made[name]


def _rays() -> Any:
    """ray.util.metrics in a process that is one of Ray's, else None: then nobody would ever ask."""
    ray = sys.modules.get("ray")
    if ray is None or not ray.is_initialized():
        return None
    return importlib.import_module("ray.util.metrics")


class TimedStore(Store):
    """A store that tells how long its requests took; one that failed counts too."""

    _tell: Callable[[str, float], None] | None = None  # not taken along where it is pickled

    @classmethod
    def over(cls, store: Store, tell: Callable[[str, float], None]) -> TimedStore:
        """The same place. tell: operation and seconds."""
        made = cls.__new__(cls)
        made.__setstate__(store.__getstate__())
        made._tell = tell
        return made

    def get(self, path: str, *, start: int = 0, end: int | None = None) -> bytes:
        """As of Store."""
        return self._timed("get", lambda: super(TimedStore, self).get(path, start=start, end=end))

    def put_new(self, path: str, data: bytes) -> bool:
        """As of Store."""
        return self._timed("put", lambda: super(TimedStore, self).put_new(path, data))

    def _timed(self, operation: str, call: Callable[[], _T]) -> _T:
        begin = time.perf_counter()
        try:
            return call()
        finally:
            if self._tell is not None:
                self._tell(operation, time.perf_counter() - begin)
