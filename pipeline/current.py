"""Which generation readers of a model follow: a log of small objects in the store, one a change.

    current/<model name>/<cache format>/<number>

S3 can write an object that is not there and nothing else, so the pointer is never overwritten: the valid entry with the highest
number counts, and of jobs that race for a number one wins. What an entry says:

    staged     a recompression fills this generation; readers do not look at it yet
    current    readers follow it from now on. `replaces` names generations that are retired by that: nobody writes to them any
               more, those who ask for their target still get them, and a collection deletes them after its grace period

Generations that no entry names are read as they are. A reader reads a listing of the log and decides once: what it then reads is
of one target, and of that target's generations that are neither staged nor retired beside a current one.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime

from codec.errors import DataError, UserError
from pipeline.paths import CURRENT, current_path, digest_hex
from pipeline.store import ObjectMissing, Store

VERSION = 1
MAX_BYTES = 1 << 20  # of an entry
STAGED, IN_USE = STATES = ("staged", "current")

Pair = tuple[bytes, bytes]  # target and profile: a generation


@dataclass(frozen=True)
class Entry:
    """One entry of a pointer's log. made: ISO 8601, for people; modified: when the store says that it was written."""

    model: str
    cache_format: str
    number: int
    state: str
    target: bytes
    profile: bytes
    replaces: tuple[Pair, ...] = ()
    made: str = ""
    modified: float = 0.0

    @property
    def pair(self) -> Pair:
        """The generation that it names."""
        return self.target, self.profile

    @property
    def path(self) -> str:
        """Where it lies in the store."""
        return current_path(self.model, self.cache_format, self.number)

    def to_json(self) -> str:
        """As text; `from_json` reads it back."""
        data = {
            "version": VERSION,
            "model": self.model,
            "cache_format": self.cache_format,
            "number": self.number,
            "state": self.state,
            "target": self.target.hex(),
            "profile": self.profile.hex(),
            "replaces": [[part.hex() for part in pair] for pair in self.replaces],
            "made": self.made,
        }
        return json.dumps(data, sort_keys=True, ensure_ascii=False)

    @staticmethod
    def from_json(data: bytes) -> Entry:
        """Read and check an entry. Raises DataError in half a sentence."""
        try:
            given = json.loads(data)
            if given["version"] != VERSION or given["state"] not in STATES:
                raise ValueError("it is of another version")
            replaces = tuple((bytes.fromhex(target), bytes.fromhex(profile)) for target, profile in given["replaces"])
            names = str(given["model"]), str(given["cache_format"]), int(given["number"]), str(given["state"])
            pair = bytes.fromhex(given["target"]), bytes.fromhex(given["profile"])
            for digest in (*pair, *(part for old in replaces for part in old)):
                digest_hex(digest)
            return Entry(*names, *pair, replaces, str(given["made"]))
        except (ValueError, KeyError, TypeError, RecursionError, DataError) as error:
            raise DataError(f"it is no entry of a pointer ({type(error).__name__}: {error!s:.100})") from None


@dataclass
class Pointers:
    """All pointers of a store as a listing found them; `damaged`: entries that count for nothing, and why."""

    logs: dict[tuple[str, str], list[Entry]] = field(default_factory=dict)
    damaged: dict[str, DataError] = field(default_factory=dict)

    def current(self, model: str, cache_format: str) -> Entry | None:
        """What readers of this model's caches in that format follow; None without a pointer."""
        entries = [entry for entry in self.logs.get((model, cache_format), ()) if entry.state == IN_USE]
        return entries[-1] if entries else None

    def of_model(self, model: str) -> dict[str, Entry]:
        """Cache format -> what is current, of one model."""
        found = {fmt: self.current(name, fmt) for name, fmt in self.logs if name == model}
        return {fmt: entry for fmt, entry in found.items() if entry is not None}

    def current_entries(self) -> list[Entry]:
        """What is current, of all models and formats."""
        return [entry for entry in (self.current(*name) for name in self.logs) if entry is not None]

    @property
    def in_use(self) -> set[Pair]:
        """Generations that some pointer names as current now."""
        return {entry.pair for entry in self.current_entries()}

    @property
    def retired(self) -> dict[Pair, Entry]:
        """Generations that were replaced and that nothing has taken up again, with the entry that replaced them."""
        found: dict[Pair, Entry] = {}
        for entries in self.logs.values():
            for entry in entries:
                found.pop(entry.pair, None)  # taken up again, or about to be
                found.update(dict.fromkeys(entry.replaces, entry) if entry.state == IN_USE else {})
        return {pair: entry for pair, entry in found.items() if pair not in self.in_use}

    @property
    def staged(self) -> dict[Pair, Entry]:
        """Generations that are being filled and that readers have never been shown."""
        found: dict[Pair, Entry] = {}
        seen: set[Pair] = set()
        for entry in (entry for entries in self.logs.values() for entry in entries):
            if entry.state == STAGED:
                found[entry.pair] = entry
            else:
                seen |= {entry.pair, *entry.replaces}
        return {pair: entry for pair, entry in found.items() if pair not in seen}

    def hidden(self, target: bytes) -> set[bytes]:
        """Profiles of a target that readers leave alone."""
        found = {profile for owner, profile in self.staged if owner == target}
        if any(owner == target for owner, _ in self.in_use):
            found |= {profile for owner, profile in self.retired if owner == target}
        return found


def read_pointers(store: Store, known: dict[str, Entry] | None = None) -> Pointers:
    """Read all pointers.

    known: entries read before, by path; entries never change, so only others are read, and put there.

    Raises:
        StorageError: the storage failed. A damaged entry is skipped.
    """
    found, known = Pointers(), {} if known is None else known
    for item in store.entries(CURRENT):
        try:
            if item.path not in known:
                known[item.path] = replace(_read(store, item.path), modified=item.modified)
        except ObjectMissing:
            continue
        except DataError as error:
            found.damaged[item.path] = error
            continue
        entry = replace(known[item.path], modified=item.modified)
        found.logs.setdefault((entry.model, entry.cache_format), []).append(entry)
    for entries in found.logs.values():
        entries.sort(key=lambda entry: entry.number)
    return found


def _read(store: Store, path: str) -> Entry:
    data = store.get(path, end=MAX_BYTES + 1)
    if len(data) > MAX_BYTES:
        raise DataError(f"it is over {MAX_BYTES} bytes")
    entry = Entry.from_json(data)
    if entry.path != path:
        raise DataError(f"it says that it is {entry.path}")
    return entry


def stage(store: Store, model: str, cache_format: str, pair: Pair) -> None:
    """Hide a generation from readers until `point` names it; one that they have been shown stays as it is."""
    while True:
        pointers = read_pointers(store)
        if pair in pointers.in_use or pair in pointers.staged:
            return
        if _append(store, pointers, model, cache_format, STAGED, pair, ()):
            return


def point_first(store: Store, model: str, cache_format: str, pair: Pair) -> Pointers:
    """Let readers follow a generation, unless they follow one already. What the pointers were before."""
    while True:
        pointers = read_pointers(store)
        if pointers.current(model, cache_format) is not None:
            return pointers
        if _append(store, pointers, model, cache_format, IN_USE, pair, ()):
            return pointers


def point(
    store: Store, model: str, cache_format: str, pair: Pair, *, replaces: Iterable[Pair], seen: Collection[Pair]
) -> None:
    """Let readers follow a generation that is complete and verified.

    replaces: generations that are retired by that. seen: those that may be current, as the work for this began with them.

    Raises:
        UserError: another job has moved the pointer meanwhile, to another generation.
        StorageError: the storage failed; the pointer may have been moved, and moving it again does no harm.
    """
    old = tuple(sorted(set(replaces) - {pair}))
    while True:
        pointers = read_pointers(store)
        now = pointers.current(model, cache_format)
        if now is not None and now.pair == pair and set(old) <= pointers.retired.keys():
            return
        if now is not None and now.pair not in {pair, *seen}:
            raise UserError(
                f"readers of {model!r} were pointed to another generation meanwhile ({now.target.hex()[:16]}, {now.path}); run "
                "again to recompress from that one"
            )
        if _append(store, pointers, model, cache_format, IN_USE, pair, old):
            return


def _append(
    store: Store, pointers: Pointers, model: str, cache_format: str, state: str, pair: Pair, replaces: tuple[Pair, ...]
) -> bool:
    """Write the next entry; False where another job had that number first."""
    folder = current_path(model, cache_format, 0).rpartition("/")[0] + "/"
    taken = [entry.path for entry in pointers.logs.get((model, cache_format), ())] + list(pointers.damaged)
    numbers = [path.rpartition("/")[2] for path in taken if path.startswith(folder)]
    number = max((int(name) for name in numbers if name.isdigit()), default=0) + 1
    made = datetime.now(UTC).isoformat(timespec="seconds")
    entry = Entry(model, cache_format, number, state, *pair, replaces, made)
    return store.put_new(entry.path, entry.to_json().encode())


def refuse_retired(store: Store, pair: Pair) -> None:
    """Raise UserError where a generation was replaced, or is not shown yet: what is put there would be collected."""
    pointers = read_pointers(store)
    if pair in pointers.staged:
        raise UserError(
            f"a recompression fills the generation that these options lead to (of {pointers.staged[pair].model!r}); finish it with "
            "jobs/recompress.py, then readers see it"
        )
    entry = pointers.retired.get(pair)
    if entry is not None:
        raise UserError(
            f"these options lead to a generation of {entry.model!r} that was replaced on {entry.made} (profile "
            f"{entry.profile.hex()[:16]} is in use now); pass that one's --model, --predictor, --loop and --coder, or go back with "
            "jobs/recompress.py"
        )
