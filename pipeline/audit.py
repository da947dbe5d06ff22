"""What is wrong with a store, found without decoding: missing, corrupt, orphaned and mismatched objects.

    missing      an index row without its blob, a generation without its profile or predictor, a chunk without its prompt
    corrupt      an object whose own checksum or name does not fit its bytes, or that cannot be read
    orphaned     a blob without an index row
    mismatched   intact by itself, and not what its place, its row or its chain say

Every blob is read and its checksum computed. What its bits mean is found by pipeline/deep.py.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import islice

import numpy as np
from numpy.typing import NDArray

import codec
from codec import blob as blobs
from codec.checksums import chain, digest
from codec.errors import BlobError, DataError, StorageError, UnsupportedVersion, UserError
from codec.scales import CacheScales
from pipeline.catalogue import Row, generations, is_root, stored_prompts
from pipeline.current import read_pointers
from pipeline.names import column
from pipeline.paths import BY_CONFIG, PROFILES, SCALES, blob_path, predictor_path, profile_path
from pipeline.store import Entry, ObjectMissing, Store
from pipeline.survey import ID, KEY, Survey, rows_of, survey

MISSING, CORRUPT, ORPHANED, MISMATCHED = KINDS = ("missing", "corrupt", "orphaned", "mismatched")

# What a repair does about a fault.
NOTHING = "nothing"  # the next run of the job makes up for it, or nobody can
QUARANTINE = "quarantine"  # put the object aside; the next run of the job makes it again
DELETE = "delete"
DROP = "drop"  # rows, all that follow from them, and their blobs; the next run makes them again

AT_ONCE = 16  # blobs in memory


@dataclass(frozen=True)
class Fault:
    """One thing that is wrong: its kind, its path in the store, half a sentence, and what a repair does about it."""

    kind: str
    path: str
    cause: str
    remedy: str = NOTHING
    owner: tuple[bytes, bytes] = (b"", b"")  # target and profile
    rows: frozenset[bytes] = frozenset()  # to drop, by id


@dataclass
class Audit:
    """What was looked at and what is wrong with it."""

    store: Store
    grace: float  # seconds; younger orphans may be a running job's
    selects: Callable[[bytes], bool]  # which chunks' blobs are read
    faults: list[Fault] = field(default_factory=list)
    generations: list[Survey] = field(default_factory=list)
    rows: int = 0
    blobs: int = 0
    tokens: int = 0  # of the chunks that have a row
    stored_bytes: int = 0
    checked: int = 0  # blobs that were read
    decoded: int = 0  # chunks
    undecoded: int = 0  # chunks that were to be decoded and follow from one with a fault
    unusable: set[bytes] = field(default_factory=set)  # profiles that are damaged or gone, or whose predictor is

    def add(self, kind: str, path: str, cause: object, remedy: str = NOTHING, gen: Survey | None = None,
            rows: Iterable[bytes] = ()) -> None:  # fmt: skip
        """Note a fault; `cause` may be an error, whose text needs no end and no place."""
        text = str(cause).removeprefix(f"{self.store.uri}/{path}: ").rstrip(".")
        owner = (b"", b"") if gen is None else (gen.target, gen.profile)
        self.faults.append(Fault(kind, path, text, remedy, owner, frozenset(rows)))

    def count(self, kind: str) -> int:
        """How many faults are of a kind."""
        return sum(fault.kind == kind for fault in self.faults)


def audit(
    store: Store, *, grace: float, selects: Callable[[bytes], bool], model: str | None = None, target: str | None = None
) -> Audit:
    """Look at a store, or at the generations of one model's name or of one target's fingerprint (or its beginning).

    Raises:
        UserError: `target` or `model` name nothing in the store.
        StorageError: the storage failed; an object that alone cannot be read is a fault.
    """
    found = Audit(store, grace, selects)
    for (owner, profile), listed in generations(store, target=target).items():
        before = len(found.faults)
        gen = survey(
            store,
            owner,
            profile,
            listed.blobs,
            broken=lambda path, error: found.add(CORRUPT, path, error, QUARANTINE),
            wrong=lambda path, error: found.add(MISMATCHED, path, error),
        )
        if model is None or model in gen.models:
            found.generations.append(gen)
        else:
            del found.faults[before:]
    if model is not None and not found.generations:
        raise UserError(f"the store {store.uri} holds nothing of a model named {model!r}")
    for gen in found.generations:
        check_generation(found, gen)
    everything = model is None and target is None
    named = check_pointers(found) if everything else set()
    for profile in sorted(named | {gen.profile for gen in found.generations}):
        check_codec(found, profile)
    return found


def check_generation(found: Audit, gen: Survey) -> None:
    """All rows and all blobs of a generation, a few thousand rows in memory at a time."""
    reached = reached_chunks(found, gen)
    disputed: dict[bytes, list[Row]] = {}
    with ThreadPoolExecutor(AT_ONCE // 2) as pool:
        for rows in rows_of(found.store, gen):
            check_rows(found, gen, rows)
            check_prompts(found, gen, rows, reached)
            check_blobs(found, gen, [(row.key, [row]) for row in rows if row.key not in gen.disputed], pool)
            for row in rows:
                if row.key not in disputed:
                    found.tokens += row.tokens
                    found.stored_bytes += row.stored_bytes
                if row.key in gen.disputed:
                    disputed.setdefault(row.key, []).append(row)
        check_blobs(found, gen, list(disputed.items()), pool)
        check_blobs(found, gen, [(key, []) for key in gen.blobs if not gen.has(key)], pool)
    found.rows += len(gen.ids)
    found.blobs += len(gen.blobs)


# ---------------------------------------------------------------- rows
def check_rows(found: Audit, gen: Survey, rows: list[Row]) -> None:
    """Whether each row follows from the row that it names as its parent."""
    parents = [row.parent or bytes(ID) for row in rows]
    there = gen.ids.places(column(parents, ID)) >= 0
    for row, known in zip(rows, there.tolist(), strict=True):
        if row.parent_key is None:
            if not is_root(row):
                found.add(MISMATCHED, row.part, f"its row of chunk {row.key.hex()} has no parent key and yet a parent's digest",
                          DROP, gen, [row.id])  # fmt: skip
        elif not known:
            path = blob_path(gen.target, gen.profile, row.parent_key)
            if gen.has(row.parent_key):
                cause = f"chunk {row.key.hex()} follows from other bits than its index row says"
                found.add(MISMATCHED, path, cause, DROP, gen, [row.id])
            elif row.parent_key not in gen.blobs:
                cause = f"chunk {row.key.hex()} follows from it, and neither its blob nor its index row is there"
                found.add(MISSING, path, cause, DROP, gen, [row.id])


# ---------------------------------------------------------------- blobs
def check_blobs(found: Audit, gen: Survey, chunks: list[tuple[bytes, list[Row]]], pool: ThreadPoolExecutor) -> None:
    """The blobs of these chunks, as far as they are selected: whether they are there, and fit their rows and themselves."""
    waiting = (item for item in chunks if found.selects(item[0]) and _is_there(found, gen, *item))
    while some := list(islice(waiting, AT_ONCE)):
        found.checked += len(some)
        entries = [gen.blobs[key] for key, _ in some]
        read = pool.map(lambda entry: _get(found.store, entry.path), entries)
        for (key, rows), entry, data in zip(some, entries, read, strict=True):
            _check_blob(found, gen, key, entry, data, rows)


def _is_there(found: Audit, gen: Survey, key: bytes, rows: list[Row]) -> bool:
    if key in gen.blobs:
        return True
    path = blob_path(gen.target, gen.profile, key)
    if found.store.exists(path):  # a running job has written it since the blobs were listed
        gen.blobs[key] = Entry(path, 0, time.time())
        return True
    several = [row.id for row in rows] if len(rows) > 1 else []  # then none of them says what it has to be
    found.add(MISSING, path, "an index row says that it is stored", DROP if several else NOTHING, gen, several)
    return False


def _get(store: Store, path: str) -> bytes | StorageError:
    try:
        return store.get(path)
    except StorageError as error:
        return error


def _check_blob(
    found: Audit, gen: Survey, key: bytes, entry: Entry, data: bytes | StorageError, rows: list[Row]
) -> None:
    if isinstance(data, ObjectMissing):
        if rows:
            found.add(MISSING, entry.path, "an index row says that it is stored, and it was deleted a moment ago")
        return
    if isinstance(data, StorageError):
        found.add(CORRUPT, entry.path, data)
        return
    try:
        header = codec.read_header(data)
        blobs.streams(data, header)  # the checksum of the whole
    except BlobError as error:
        if isinstance(error, UnsupportedVersion) and digest(data[:-16]) == data[-16:]:
            found.add(MISMATCHED, entry.path, error)  # intact, and for another release to read
            return
        found.add(CORRUPT, entry.path, error, QUARANTINE, gen)
        return
    wrong = _misplaced(header, gen, key)
    if wrong:
        found.add(MISMATCHED, entry.path, wrong, QUARANTINE, gen)
    elif not rows:
        _orphan(found, gen, entry, key in gen.parents)
    else:
        _compare(found, gen, entry, len(data), header, rows)


def _misplaced(header: codec.BlobHeader, gen: Survey, key: bytes) -> str:
    """What of a blob's header does not fit its path; "" if all does."""
    place = (
        ("target", header.target, gen.target),
        ("profile", header.profile, gen.profile),
        ("prefix key", header.prefix_key, key),
    )
    for name, got, want in place:
        if got != want:
            return f"its {name} is {got.hex()[:16]}…, and its place is that of {want.hex()[:16]}…"
    return ""


def _orphan(found: Audit, gen: Survey, entry: Entry, followed: bool) -> None:
    if not gen.readable:
        cause, remedy = (
            "no index row says so, and part of the index cannot be read; a run of the job adopts it",
            NOTHING,
        )
    elif followed:
        cause, remedy = "it has no index row, and chunks follow from it; a run of the job adopts it", NOTHING
    elif time.time() - entry.modified < found.grace:
        cause, remedy = "it has no index row; it is young, and may be the work of a running job", NOTHING
    else:
        cause, remedy = "it has no index row", DELETE
    found.add(ORPHANED, entry.path, cause, remedy, gen)


def _compare(found: Audit, gen: Survey, entry: Entry, size: int, header: codec.BlobHeader, rows: list[Row]) -> None:
    held = chain(header.parent_digest, header.layer_checksums)
    fitting = [row for row in rows if row.chain_digest == held]
    if not fitting:
        parent = "" if header.parent_digest == rows[0].parent_digest else ", and it follows from another parent's"
        cause = f"it holds other bits than its index row says{parent}"
        if len(rows) > 1:
            found.add(
                MISMATCHED, entry.path, f"none of its {len(rows)} index rows fits it", DROP, gen, [r.id for r in rows]
            )
        found.add(MISMATCHED, entry.path, cause, QUARANTINE, gen)
        return
    row = fitting[0]
    facts = (
        ("first token", header.first_token, row.first_token),
        ("number of tokens", header.tokens, row.tokens),
        ("cache format", header.format.name, row.cache_format),
        ("predictor", header.predictor.hex(), row.predictor.hex()),
        ("size", size, row.stored_bytes),
    )
    for name, got, want in facts:
        if got != want:
            found.add(MISMATCHED, entry.path, f"its {name} is {got}, and {want} in its index row", DROP, gen, [row.id])
    others = [other for other in rows if other.chain_digest != held]
    for other in others:
        cause = f"its row of chunk {other.key.hex()} says other bits than the blob holds"
        found.add(MISMATCHED, other.part, cause, DROP, gen, [other.id])


# ---------------------------------------------------------------- what decoding needs besides
def check_codec(found: Audit, profile: bytes) -> None:
    """A profile, and the predictor that it names."""
    before, path = len(found.faults), profile_path(profile)
    try:
        data = found.store.get(path)
        if codec.content_id(data) != profile:
            raise DataError("its bytes have another digest than its name")
        path = predictor_path(codec.Profile.from_bytes(data).predictor)
        if codec.content_id(found.store.get(path)) != bytes.fromhex(path.rpartition("/")[2].partition(".")[0]):
            raise DataError("its bytes have another digest than its name")
    except ObjectMissing:
        count = sum(len(gen.blobs) for gen in found.generations if gen.profile == profile)
        found.add(MISSING, path, f"{count} blobs cannot be decoded without it; run the job on its calibration corpus")
    except (DataError, StorageError) as error:
        found.add(CORRUPT, path, error, QUARANTINE if isinstance(error, DataError) else NOTHING)
    if len(found.faults) > before:
        found.unusable.add(profile)


def reached_chunks(found: Audit, gen: Survey) -> NDArray[np.bool_]:
    """For each of the generation's keys, whether a stored prompt leads to it: chunks are decoded along their prompts."""

    def broken(path: str, error: DataError) -> None:
        if not any(fault.path == path for fault in found.faults):
            found.add(CORRUPT, path, error, QUARANTINE)

    reached = np.zeros(len(gen.keys), dtype=bool)
    for prompt in stored_prompts(found.store, gen.target, gen.roots, gen.has, broken=broken):
        places = gen.keys.places(column(list(prompt.keys), KEY))
        reached[places[places >= 0]] = True
    return reached


def check_prompts(found: Audit, gen: Survey, rows: list[Row], reached: NDArray[np.bool_]) -> None:
    """Whether the tokens of these chunks are there."""
    lost = ~reached[gen.keys.places(column([row.key for row in rows], KEY))]
    for row in (row for row, gone in zip(rows, lost.tolist(), strict=True) if gone and found.selects(row.key)):
        cause = "no stored prompt is made of it, so its tokens are gone; run the job on its corpus"
        if row.root_key is None:
            cause = "its index row is older than root keys, so that its prompt cannot be found"
        found.add(MISSING, blob_path(gen.target, gen.profile, row.key), cause)


def check_pointers(found: Audit) -> set[bytes]:
    """Readers' pointers, the small objects that name the profile in use, and scales of FP8 caches; the profiles that are named."""
    for path, error in read_pointers(found.store).damaged.items():
        found.add(CORRUPT, path, error)  # without it an older entry would count
    named: set[bytes] = set()
    for path in found.store.list(f"{PROFILES}/{BY_CONFIG}"):
        try:
            profile = bytes.fromhex(found.store.get(path).decode("ascii").strip())
            profile_path(profile)
            named.add(profile)
        except ObjectMissing:
            continue
        except (ValueError, DataError):
            found.add(CORRUPT, path, "it does not name a profile", QUARANTINE)
    for path in found.store.list(f"{SCALES}/{BY_CONFIG}"):
        try:
            CacheScales.from_bytes(found.store.get(path))
        except ObjectMissing:
            continue
        except DataError as error:
            found.add(CORRUPT, path, error, QUARANTINE)
    return named
