"""Who is at work on a store: jobs that run, and the one collection or repair that may.

A job keeps a small object running/<name> in the store and renews it as long as it runs; a collection leaves alone what a
running job may be about to use. A job that was killed leaves its object behind, and it soon counts for nothing.
"""

from __future__ import annotations

import json
import os
import platform
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from codec.errors import StorageError, UserError
from pipeline.paths import LOCKS, RUNNING
from pipeline.store import Store

RENEW_SECONDS = 300.0
LEASE_SECONDS = 3600.0  # one that was not renewed for so long is a dead job's
LOCK_SECONDS = 24 * 3600.0
_LOCK = f"{LOCKS}/gc"


@contextmanager
def at_work(store: Store, renew: float = RENEW_SECONDS) -> Iterator[None]:
    """Keep a lease on the store while the body runs.

    Raises:
        StorageError: it cannot be written. Later failures to renew it are not raised.
    """
    name, done = uuid.uuid4().hex, threading.Event()
    current = [_write(store, name, 0)]

    def keep() -> None:
        number = 0
        while not done.wait(renew):
            number += 1
            with suppress(StorageError):
                old, current[0] = current[0], _write(store, name, number)
                store.delete(old)

    thread = threading.Thread(target=keep, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join(timeout=30)
        with suppress(StorageError):
            store.delete(current[0])


def _write(store: Store, name: str, number: int) -> str:
    path = f"{RUNNING}/{name}-{number}"
    store.put_new(path, json.dumps(_who()).encode())
    return path


def _who() -> dict[str, object]:
    return {"host": platform.node(), "pid": os.getpid(), "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())}


def running_jobs(store: Store, grace: float) -> int:
    """How many jobs are at work. With a grace period below LEASE_SECONDS, leases count for that long only."""
    limit = min(grace, LEASE_SECONDS)
    names = {e.path.rpartition("-")[0] for e in store.entries(RUNNING) if time.time() - e.modified < limit}
    return len(names)


def dead_leases(store: Store, grace: float) -> list[str]:
    """Paths of leases that were not renewed for so long that they count for nothing."""
    limit = max(grace, LEASE_SECONDS)
    return [entry.path for entry in store.entries(RUNNING) if time.time() - entry.modified >= limit]


def refuse_deleting(store: Store) -> None:
    """Raise UserError while a collection or repair is at work. Whoever calls it has a lease, which later ones look at."""
    if any(time.time() - entry.modified <= LOCK_SECONDS for entry in store.entries(LOCKS)):
        raise UserError(f"a collection or repair is at work on {store.uri}; run again when it has ended")


@contextmanager
def exclusive(store: Store) -> Iterator[None]:
    """Be the only one who deletes from the store while the body runs.

    Raises:
        UserError: another one is at it, or was and did not end well.
    """
    for entry in store.entries(LOCKS):
        if time.time() - entry.modified > LOCK_SECONDS:
            store.delete(entry.path)
    if not store.put_new(_LOCK, json.dumps(_who()).encode()):
        with suppress(StorageError):
            who = store.get(_LOCK).decode(errors="replace")
            raise UserError(
                f"another collection or repair is at work on {store.uri} ({who:.200}); wait for it, or delete {_LOCK} from "
                "the store if it has died"
            )
        raise UserError(f"another collection or repair is at work on {store.uri}; try again")
    try:
        yield
    finally:
        store.delete(_LOCK)
