"""Chunks that were stored and that no run has verified yet: a job was killed in between, or they did not come back.

Before an encode actor stores what is to be verified, it says so in a small object,

    unverified/<target>/<profile>/<name>    the chunks' 32-byte keys, sorted, one after another; <name>: a digest of them

and a verify actor deletes that as soon as all of them came back. What stays behind is for the next run over these prompts to verify.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Set
from contextlib import suppress

import codec
from codec.errors import DataError, KVCodecError
from pipeline.paths import DIGEST_BYTES, UNVERIFIED, parse_unverified_path, unverified_path, unverified_prefix
from pipeline.store import Entry, ObjectMissing, Store
from pipeline.work import Charge, put_charged

MAX_BYTES = 64 << 20  # of a mark: two million chunks


def mark(store: Store, target: bytes, profile: bytes, keys: Collection[bytes], charge: Charge | None = None) -> None:
    """Say that these chunks, if any, are about to be stored and not verified. Raises StorageError, and what `charge` does."""
    if keys:
        put_charged(store, _path(target, profile, keys), _data(keys), charge)


def unmark(store: Store, target: bytes, profile: bytes, keys: Collection[bytes]) -> None:
    """Say that these chunks, which were marked together, are verified. A mark that cannot be deleted stays: they are verified once more."""
    with suppress(KVCodecError):
        store.delete(_path(target, profile, keys))


def read_marks(store: Store, target: bytes, profile: bytes) -> dict[str, frozenset[bytes]]:
    """Keys by mark. Raises DataError for one that is damaged, StorageError."""
    found = {}
    for path in store.list(unverified_prefix(target, profile)):
        with suppress(ObjectMissing):  # deleted meanwhile: verified
            found[path] = _read(store, path)
    return found


def clear(store: Store, marks: Mapping[str, Set[bytes]], verified: Set[bytes]) -> None:
    """Take these chunks out of the marks. What cannot be written or deleted stays: its chunks are verified once more."""
    for path, keys in marks.items():
        if keys & verified:
            with suppress(KVCodecError):
                _shrink(store, path, keys - verified)


def forget(store: Store, target: bytes, profile: bytes, keys: Set[bytes]) -> None:
    """Take chunks that are gone out of the marks. Raises DataError, StorageError."""
    for path, marked in read_marks(store, target, profile).items():
        if marked & keys:
            _shrink(store, path, marked - keys)


def _shrink(store: Store, path: str, keys: Set[bytes]) -> None:
    """Put a mark of these chunks, if any, in another's place: at no time is one of them in none."""
    target, profile = parse_unverified_path(path)
    mark(store, target, profile, keys)
    store.delete(path)


def stale_marks(store: Store, stored: Callable[[bytes, bytes], Set[bytes]], before: float) -> Iterator[Entry]:
    """Marks that were written before then, and none of whose chunks is stored any more. Damaged ones are nobody's to delete unasked.

    stored: keys of the chunks that have a row under a target and a profile. Raises StorageError.
    """
    for entry in store.entries(UNVERIFIED):
        if entry.modified > before:
            continue
        with suppress(DataError, ObjectMissing):
            target, profile = parse_unverified_path(entry.path)
            if not _read(store, entry.path) & stored(target, profile):
                yield entry


def _read(store: Store, path: str) -> frozenset[bytes]:
    data = store.get(path, end=MAX_BYTES + 1)
    if not data or len(data) % DIGEST_BYTES or path.rpartition("/")[2] != codec.content_id(data).hex():
        raise DataError(
            f"{store.uri}/{path} is damaged, so it cannot be said which chunks have yet to be verified; run jobs/verify.py --deep, then "
            "delete it"
        )
    return frozenset(data[first : first + DIGEST_BYTES] for first in range(0, len(data), DIGEST_BYTES))


def _data(keys: Collection[bytes]) -> bytes:
    return b"".join(sorted(keys))


def _path(target: bytes, profile: bytes, keys: Collection[bytes]) -> str:
    return unverified_path(target, profile, codec.content_id(_data(keys)))
