"""Run records: what a job was asked to do and what it came to, one JSON object in the store a run.

    runs/<time of its start, YYYYMMDDTHHMMSSZ>-<id>.json

A record holds figures, options and names: no prompt text, and no secret. Fields may be added; none is renamed or changes its meaning.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from datetime import UTC, datetime
from typing import Any

from codec.errors import DataError
from pipeline.paths import RUNS, run_path
from pipeline.secrets import without_secrets
from pipeline.store import Store

VERSION = 1
MAX_BYTES = 4 << 20  # of a record
JOBS = ("compress", "recompress", "verify")
OK, FAILED = "ok", "failed"  # outcomes; "failed" also where verification found something

_TYPES: dict[str, type | tuple[type, ...]] = {"str": str, "int": int, "Mapping[str, Any]": dict}


@dataclass(frozen=True)
class RunRecord:
    """One run. Times are ISO 8601 in UTC; scalars, bytes and tokens are those of all chunks that were asked for."""

    run: str  # an id of 16 hex digits
    job: str  # one of JOBS
    started: str
    ended: str
    outcome: str  # OK, FAILED, or the kind of error it ended with
    model: str
    fingerprint: str  # of the target, hex
    generation: str  # <target>/<profile> as in blobs/ and index/; "" where the run did not get so far
    rung: str  # predictor and loop
    cache_format: str
    tokens: int
    chunks_new: int
    chunks_reused: int  # that were stored already, or that another prompt of the run has, too
    chunks_verified: int
    verification_failures: int
    scalars: int
    bytes: int  # of their blobs
    options: Mapping[str, Any] = field(default_factory=dict)  # flag -> value
    health: Mapping[str, Any] = field(
        default_factory=dict
    )  # of the profile against what it was calibrated for; may be empty
    version: int = VERSION

    @property
    def path(self) -> str:
        """Where it lies in the store."""
        return run_path(datetime.fromisoformat(self.started).astimezone(UTC).strftime("%Y%m%dT%H%M%SZ"), self.run)

    def to_json(self) -> str:
        """Canonical JSON."""
        return json.dumps(asdict(self), sort_keys=True, ensure_ascii=False)

    @staticmethod
    def from_json(text: str) -> RunRecord:
        """Read what `to_json` wrote; fields of later releases are left out. Raises DataError in half a sentence."""
        try:
            data = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise DataError(f"it is not valid JSON ({error})") from None
        if not isinstance(data, dict) or data.get("version") != VERSION:
            raise DataError(f"it is no run record of version {VERSION}")
        known = {item.name: item.type for item in fields(RunRecord)}
        for name, kind in known.items():
            if name == "health" and not data.get(name):
                data[name] = {}
            value = data.get(name)
            if not isinstance(value, _TYPES[str(kind)]) or isinstance(value, bool):
                raise DataError(f"its field {name} is {value!r:.40}, no {kind}")
        return RunRecord(**{name: data[name] for name in known})


def new_run() -> tuple[str, str]:
    """(id, time of the start) of a run that begins now."""
    return uuid.uuid4().hex[:16], now()


def now() -> str:
    """The time in UTC, ISO 8601, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def plain_options(given: Mapping[str, Any]) -> dict[str, Any]:
    """Options as a record takes them: without those that were not given, and without credentials in addresses."""
    return {
        name: without_secrets(value) if isinstance(value, str) else value
        for name, value in given.items()
        if value is not None and value is not False
    }


def write_run(store: Store, record: RunRecord) -> str:
    """Put a record into the store; its path. Raises StorageError."""
    store.put_new(record.path, record.to_json().encode())
    return record.path


def read_run(store: Store, path: str) -> RunRecord:
    """One record. Raises DataError naming it, StorageError."""
    data = store.get(path, end=MAX_BYTES + 1)
    if len(data) > MAX_BYTES:
        raise DataError(f"the run record {store.uri}/{path} is over {MAX_BYTES} bytes")
    try:
        return RunRecord.from_json(data.decode(errors="replace"))
    except DataError as error:
        raise DataError(f"the run record {store.uri}/{path} cannot be read: {error}") from None


def list_runs(store: Store) -> Iterator[str]:
    """Paths of all records, the oldest first. Raises StorageError."""
    return (path for path in store.list(RUNS) if path.endswith(".json"))
