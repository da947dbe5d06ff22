"""What a stored prefix is worth: seconds and money of prefilling it again, fetching it raw, and restoring it from each rung. Pure numbers.

    prefill   the target computes the cache again                seconds of the prefill
    raw       the cache as it is comes over the link             raw bytes over the bandwidth
    a rung    its blobs come over the link and are decoded       their bytes over the bandwidth, and the seconds of decoding

Fetching and decoding are added up, as for whoever wants a prefix's length first: then all blobs are checked before one is decoded. Where
blobs are decoded while they come (pipeline/restoration/arriving.py), it takes less.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from codec.errors import UserError

PREFILL, RAW = "prefill", "raw"
BY = ("time", "cost")
GB = 1e9


@dataclass(frozen=True)
class Rung:
    """One rung on this machine, for the prefix in question. bits: a scalar on disk; seconds: to decode and to encode it."""

    name: str
    bits: float
    decode_seconds: float
    encode_seconds: float


@dataclass(frozen=True)
class Case:
    """A prefix and this machine: its raw bytes, bits of a raw scalar, seconds of its prefill by the target, and the rungs."""

    tokens: int
    raw_bytes: float
    item_bits: int
    prefill_seconds: float
    rungs: Sequence[Rung]

    def stored_bytes(self, rung: Rung) -> float:
        """Of the prefix's blobs."""
        return self.raw_bytes * rung.bits / self.item_bits

    def named(self, name: str) -> Rung:
        """The rung of that name."""
        return next(rung for rung in self.rungs if rung.name == name)

    @property
    def ways(self) -> list[str]:
        """All ways to get the cache."""
        return [PREFILL, RAW, *(rung.name for rung in self.rungs)]


@dataclass(frozen=True)
class Terms:
    """What it is weighed with. bandwidth: bits a second; storage: money a GB and month; machine: money an hour; reuse: times a month."""

    bandwidth: float
    storage: float = 0.0
    machine: float = 0.0
    reuse: float = 0.0

    def check(self) -> None:
        """Raise UserError for a number that cannot be."""
        if not (math.isfinite(self.bandwidth) and self.bandwidth > 0):
            raise UserError(f"a bandwidth of {self.bandwidth} bits a second is none")
        for name in ("storage", "machine", "reuse"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise UserError(f"{name} cannot be {value}; give a number from 0 on")


@dataclass(frozen=True)
class Way:
    """One way to get the cache: seconds until all of it is there, bytes kept for it, money a month where prices are given."""

    name: str
    seconds: float
    stored_bytes: float
    money: float


@dataclass(frozen=True)
class BreakEven:
    """Where a rung pays. None: nowhere, whatever the number.

    below: bits a second up to which it is faster than fetching raw; above: bits a second from which it is faster than prefilling;
    reuse: times a month from which storing it costs less than prefilling each time.
    """

    below: float | None
    above: float | None
    reuse: float | None


def weigh(case: Case, terms: Terms) -> list[Way]:
    """All ways, in the order of `Case.ways`."""
    return [_way(case, terms, name) for name in case.ways]


def seconds(case: Case, bandwidth: float, name: str) -> float:
    """Until all of the cache is there."""
    if name == PREFILL:
        return case.prefill_seconds
    if name == RAW:
        return 8 * case.raw_bytes / bandwidth
    rung = case.named(name)
    return 8 * case.stored_bytes(rung) / bandwidth + rung.decode_seconds


def _way(case: Case, terms: Terms, name: str) -> Way:
    took, an_hour = seconds(case, terms.bandwidth, name), terms.machine / 3600
    if name == PREFILL:
        return Way(name, took, 0.0, terms.reuse * took * an_hour)
    kept = case.raw_bytes if name == RAW else case.stored_bytes(case.named(name))
    made = case.prefill_seconds + (0.0 if name == RAW else case.named(name).encode_seconds)
    return Way(name, took, kept, kept / GB * terms.storage + (made + terms.reuse * took) * an_hour)


def best(ways: Sequence[Way], by: str) -> Way:
    """The fastest or the cheapest; of equals the one that keeps fewer bytes."""
    if by not in BY:
        raise UserError(f"a way is chosen by {' or '.join(BY)}, not by {by!r}")
    return min(ways, key=lambda way: (way.seconds if by == "time" else way.money, way.stored_bytes))


def break_even(case: Case, terms: Terms, name: str) -> BreakEven:
    """Of a rung, or of fetching raw (whose `below` is None)."""
    kept = case.raw_bytes if name == RAW else case.stored_bytes(case.named(name))
    decoding = 0.0 if name == RAW else case.named(name).decode_seconds
    below = None
    if name != RAW and kept < case.raw_bytes:
        below = 8 * (case.raw_bytes - kept) / decoding if decoding else math.inf
    saved = case.prefill_seconds - decoding
    above = 8 * kept / saved if saved > 0 else None
    return BreakEven(below, above, _reuse(case, terms, name))


def _reuse(case: Case, terms: Terms, name: str) -> float | None:
    """Money is linear in the reuse count: fixed costs of keeping over what one reuse saves."""
    once, again = (_way(case, Terms(terms.bandwidth, terms.storage, terms.machine, n), name).money for n in (0.0, 1.0))
    prefill = case.prefill_seconds * terms.machine / 3600
    saved = prefill - (again - once)
    return once / saved if saved > 0 else None
