"""Counts of the service in Prometheus' text format, kept in one place for all replicas."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest

SECONDS = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300)


class MetricsBoard:
    """Adds up what replicas report; the body of a tiny Ray actor, or an object in the process of a test."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        kind = {"registry": self._registry}
        self._requests = Counter("kv_restore_requests", "Restore requests by HTTP status", ["status"], **kind)  # type: ignore[arg-type]
        self._aborted = Counter("kv_restore_aborted", "Streams that were cut short, by reason", ["reason"], **kind)  # type: ignore[arg-type]
        self._tokens = Counter("kv_restore_tokens", "Tokens asked for and tokens restored", ["what"], **kind)  # type: ignore[arg-type]
        self._bytes = Counter("kv_restore_bytes", "Bytes streamed", **kind)  # type: ignore[arg-type]
        self._seconds = Histogram("kv_restore_seconds", "Seconds from request to last byte", buckets=SECONDS, **kind)  # type: ignore[arg-type]
        for status in ("200", "503"):
            self._requests.labels(status)

    def request(self, status: int) -> None:
        """One answered request."""
        self._requests.labels(str(status)).inc()

    def restored(self, asked: int, tokens: int, size: int, seconds: float) -> None:
        """One whole stream."""
        self._tokens.labels("asked").inc(asked)
        self._tokens.labels("restored").inc(tokens)
        self._bytes.inc(size)
        self._seconds.observe(seconds)

    def aborted(self, reason: str) -> None:
        """One stream that was cut short: failed, late, or left by its client."""
        self._aborted.labels(reason).inc()

    def text(self) -> str:
        """Everything so far."""
        return generate_latest(self._registry).decode()
