"""What of a store nothing needs any more: found first, deleted only when asked for.

    leftover     temporary files and uploads of writes that were cut off
    lease        of a job that was killed
    quarantine   what a repair has put aside
    index        parts whose rows all stand in a larger one
    retired      generations that a recompression has replaced: index, blobs, prompts; and those that one began and nobody went on with
    blob         without an index row, and nothing stored follows from it
    profile      that neither a blob nor an index part nor a reader's pointer names, with what names it for a configuration
    predictor    that no profile and no index row names
    unverified   what says of chunks that no run has verified them, where they are gone

Only what is older than the grace period counts. As long as a job runs, blobs, profiles, predictors and what says that chunks are
unverified are left alone: it may be about to use what nothing uses yet.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import codec
from codec.errors import DataError
from pipeline.catalogue import Generation, generations, read_generation
from pipeline.compact import merge, read_parts, superfluous, to_merge
from pipeline.current import Pointers, read_pointers
from pipeline.lease import dead_leases, exclusive, running_jobs
from pipeline.paths import BY_CONFIG, PREDICTORS, PROFILES, QUARANTINE, index_prefix, prompts_prefix
from pipeline.store import Entry, Store
from pipeline.unverified import stale_marks

NEEDS_QUIET = ("retired", "blob", "profile", "predictor", "unverified")  # left alone while a job runs


@dataclass(frozen=True)
class Item:
    """One thing that can go: its kind, its listing, and the generation of a blob."""

    kind: str
    entry: Entry
    owner: Generation | None = None


@dataclass
class Collection:
    """What can go, what was done, and what was left alone and why."""

    items: list[Item] = field(default_factory=list)
    merges: list[tuple[Generation, int]] = field(default_factory=list)  # parts that can become one
    notes: list[str] = field(default_factory=list)
    deleted: int = 0
    bytes: int = 0
    merged: int = 0


def find_garbage(store: Store, grace: float) -> Collection:
    """List what can go, older than `grace` seconds.

    Raises:
        DataError: part of the index cannot be read: then nothing can be said about blobs, and a repair comes first; or a pointer is
            damaged.
        StorageError: the storage failed.
    """
    found, before = Collection(), time.time() - grace
    found.items += [Item("leftover", entry) for entry in store.leftovers() if entry.modified <= before]
    found.items += [Item("lease", Entry(path, 0, 0.0)) for path in dead_leases(store, grace)]
    found.items += [Item("quarantine", entry) for entry in store.entries(QUARANTINE) if entry.modified <= before]
    everything = list(generations(store).values())
    pointers = read_pointers(store)
    for path, error in pointers.damaged.items():
        raise DataError(
            f"{store.uri}/{path}: {str(error).rstrip('.')}, so it cannot be said which generation is in use; let jobs/recompress.py point "
            "readers to it anew, then delete that object"
        )
    over = [_is_over(store, gen, pointers, before) for gen in everything]
    gone = [gen for gen, yes in zip(everything, over, strict=True) if yes]
    everything = [gen for gen, yes in zip(everything, over, strict=True) if not yes]
    for gen in everything:
        read_generation(store, gen)
        parts = read_parts(store, gen.target, gen.profile)
        old = [part for part in superfluous(parts, before) if part.modified <= before]
        found.items += [Item("index", Entry(part.path, part.size, part.modified)) for part in old]
        found.merges += [(gen, len(group)) for group in to_merge(parts)]
    busy = running_jobs(store, grace)
    if busy:
        found.notes.append(
            f"{busy} job(s) run on this store: blobs, profiles, predictors and marks of unverified chunks are left alone"
        )
        return found
    targets = {other.target for other in everything}
    for gen in gone:
        found.items += [Item("retired", entry, gen) for entry in _all_of(store, gen, prompts=gen.target not in targets)]
        targets.add(gen.target)  # its prompts are listed once
    for gen in everything:
        followed = gen.parents()
        for key, entry in gen.blobs.items():
            if key not in gen.rows and key not in followed and entry.modified <= before:
                found.items.append(Item("blob", entry, gen))
    found.items += _unused(store, [*everything, *gone], pointers, before, found.notes)
    rows = {(gen.target, gen.profile): gen.rows.keys() for gen in everything}
    marks = stale_marks(store, lambda *owner: rows.get(owner, set()), before)
    found.items += [Item("unverified", entry) for entry in marks]
    return found


def _is_over(store: Store, gen: Generation, pointers: Pointers, before: float) -> bool:
    """Whether a generation was replaced, or only ever begun, and its grace period has passed."""
    pair = gen.target, gen.profile
    if pair in pointers.retired:
        return pointers.retired[pair].modified <= before
    begun = pointers.staged.get(pair)
    if begun is None or begun.modified > before:
        return False
    parts = store.entries(index_prefix(*pair))
    return all(entry.modified <= before for entry in (*gen.blobs.values(), *parts))


def _all_of(store: Store, gen: Generation, *, prompts: bool) -> Iterator[Entry]:
    """A generation's objects: the index first, so that no row is left without its blob; blobs last, by which the rest is found."""
    yield from store.entries(index_prefix(gen.target, gen.profile))
    if prompts:
        yield from store.entries(prompts_prefix(gen.target))
    yield from gen.blobs.values()


def _unused(
    store: Store, everything: list[Generation], pointers: Pointers, before: float, notes: list[str]
) -> Iterator[Item]:
    """Profiles with the pointers to them (which come first), then predictors."""
    current = {profile.hex() for _, profile in pointers.in_use | pointers.staged.keys()}
    used = {gen.profile.hex() for gen in everything} | current
    naming: dict[str, list[Entry]] = {}
    profiles: dict[str, Entry] = {}
    for entry in store.entries(PROFILES):
        if entry.path.startswith(f"{PROFILES}/{BY_CONFIG}/"):
            naming.setdefault(store.get(entry.path).decode("ascii", errors="replace").strip(), []).append(entry)
        else:
            profiles[entry.path.rpartition("/")[2]] = entry
    needed = {row.predictor.hex() for gen in everything for rows in gen.rows.values() for row in rows}
    readable = True
    for name, entry in profiles.items():
        named = naming.get(name, [])
        if name in used or any(item.modified > before for item in [entry, *named]):
            try:
                needed.add(codec.Profile.from_bytes(store.get(entry.path)).predictor.hex())
            except DataError as error:
                notes.append(f"{entry.path}: {str(error).rstrip('.')}; predictors are left alone, as it may need one")
                readable = False
        else:
            yield from (Item("profile", item) for item in [*named, entry])
    for entry in store.entries(PREDICTORS) if readable else ():
        if entry.path.rpartition("/")[2].partition(".")[0] not in needed and entry.modified <= before:
            yield Item("predictor", entry)


def collect(store: Store, grace: float, tell: Callable[[str], None], *, compact: bool = False) -> Collection:
    """Delete what `find_garbage` finds and, with `compact`, merge small index parts.

    Raises:
        UserError: another collection or repair is at work.
        DataError, StorageError: as `find_garbage`; what was deleted stays deleted, and it can be run again.
    """
    with exclusive(store):
        found = find_garbage(store, grace)
        kinds = list(dict.fromkeys(item.kind for item in found.items))
        for kind in kinds:
            items = [item for item in found.items if item.kind == kind]
            if kind in NEEDS_QUIET and running_jobs(store, grace):
                found.notes.append(f"a job has begun meanwhile: {len(items)} {kind} object(s) are left alone")
                continue
            if kind == "retired":
                in_use = read_pointers(store).in_use  # somebody may have gone back to one
                items = [
                    item
                    for item in items
                    if item.owner is None or (item.owner.target, item.owner.profile) not in in_use
                ]
            for item in _still_unused(store, items) if kind == "blob" else items:
                if kind == "leftover":
                    store.discard(item.entry)
                else:
                    store.delete(item.entry.path)
                found.deleted += 1
                found.bytes += item.entry.size
        if compact:
            for gen in {id(gen): gen for gen, _ in found.merges}.values():
                for group in to_merge(read_parts(store, gen.target, gen.profile)):
                    path = merge(store, gen.target, gen.profile, group)
                    found.merged += len(group) if path else 0
                    tell(f"merged {len(group)} index parts into {path}")
    return found


def _still_unused(store: Store, items: list[Item]) -> list[Item]:
    """Blobs that have no row now either: a job that has ended since they were listed may have committed some."""
    rows: dict[int, Generation] = {}
    for gen in {id(item.owner): item.owner for item in items}.values():
        assert gen is not None
        fresh = Generation(gen.target, gen.profile)
        read_generation(store, fresh)
        rows[id(gen)] = fresh
    return [item for item in items if _key(item) not in rows[id(item.owner)].rows]


def _key(item: Item) -> bytes:
    return bytes.fromhex(item.entry.path.rpartition("/")[2].removesuffix(".kv"))
