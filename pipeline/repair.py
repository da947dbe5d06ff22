"""What verification with --repair does: put aside what is damaged, delete what is orphaned, drop what follows from nothing.

A repair computes nothing: it leaves the store so that the next run of the job makes up for what is gone. A damaged blob is
put aside and its row stays, so that the run knows which bits the chunk had; if it computes others, it drops all that follows.
"""

from __future__ import annotations

from collections.abc import Callable

from codec.errors import StorageError
from pipeline import index
from pipeline.audit import DELETE, DROP, QUARANTINE, Audit, Fault
from pipeline.catalogue import Generation, read_generation
from pipeline.lease import exclusive, running_jobs
from pipeline.paths import BY_CONFIG, PROFILES, parse_blob_path
from pipeline.removal import drop_chunks, put_aside
from pipeline.store import ObjectMissing, Store


def repair(found: Audit, tell: Callable[[str], None]) -> int:
    """Act on every fault of an audit that something can be done about; returns how many those were.

    `tell` gets a line about each. What a job at work may be about to use is left alone.

    Raises:
        UserError: another repair or collection is at work.
        StorageError: the storage failed; what was done stays done, and a repair can be run again.
    """
    store, done = found.store, 0
    with exclusive(store):
        busy = running_jobs(store, found.grace)
        committed: dict[tuple[bytes, bytes], set[bytes]] = {}
        for fault in found.faults:
            if fault.remedy == QUARANTINE:
                done += _aside(store, fault.path, tell)
            elif fault.remedy == DELETE and busy:
                tell(f"left alone while {busy} job(s) run: {fault.path}")
            elif fault.remedy == DELETE and _is_committed(store, fault, committed):
                tell(f"left alone, as it has been committed: {fault.path}")
            elif fault.remedy == DELETE:
                store.delete(fault.path)
                tell(f"deleted: {fault.path}")
                done += 1
        done += _drop(found, tell)
        done += _unname(found, tell)
    return done


def _is_committed(store: Store, fault: Fault, known: dict[tuple[bytes, bytes], set[bytes]]) -> bool:
    """Whether an orphan has a row by now."""
    target, profile, key = parse_blob_path(fault.path)
    if (target, profile) not in known:
        known[target, profile] = index.committed_keys(store, target, profile)
    return key in known[target, profile]


def _aside(store: Store, path: str, tell: Callable[[str], None]) -> int:
    try:
        tell(f"put aside: {path} is now {put_aside(store, path)}")
    except ObjectMissing:
        return 0
    return 1


def _drop(found: Audit, tell: Callable[[str], None]) -> int:
    """Rows that cannot be right, and all that follows from them."""
    done = 0
    for owner in {fault.owner for fault in found.faults if fault.remedy == DROP}:
        ids = {row for fault in found.faults if fault.remedy == DROP and fault.owner == owner for row in fault.rows}
        gen = Generation(*owner)
        read_generation(found.store, gen)
        removed = drop_chunks(found.store, gen, gen.descendants(ids))
        tell(f"dropped {removed.rows} index rows and {removed.blobs} blobs that follow from what is not there")
        done += len(ids)
    return done


def _unname(found: Audit, tell: Callable[[str], None]) -> int:
    """Take the name from profiles that cannot be used, so that the next run of the job calibrates again.

    From the same prompts that gives the same profile, and the blobs under it can be decoded again.
    """
    done = 0
    for path in list(found.store.list(f"{PROFILES}/{BY_CONFIG}")) if found.unusable else []:
        try:
            named = found.store.get(path).decode("ascii", errors="replace").strip()
        except StorageError:
            continue
        if named in {profile.hex() for profile in found.unusable}:
            found.store.delete(path)
            tell(f"deleted: {path}, which names a profile that cannot be used; the next run of the job calibrates")
            done += 1
    return done
