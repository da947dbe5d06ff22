"""Forgetting a prompt or a tenant: its blobs, index rows and prompts, except what others share; and the proof of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import pyarrow as pa

from codec.errors import DataError, UserError
from pipeline.catalogue import Generation, generations, read_generation, stored_prompts
from pipeline.lease import LEASE_SECONDS, exclusive, running_jobs
from pipeline.paths import INDEX, PROMPTS, QUARANTINE, blob_path, blob_prefix, prompts_path
from pipeline.prompts import load_part, part_bytes, part_name, part_rows
from pipeline.removal import drop_rows
from pipeline.store import Store
from pipeline.unverified import forget


@dataclass(frozen=True)
class Whose:
    """Whose prompts: an id, a tenant's name, or both; None is any."""

    prompt: str | None
    tenant: str | None

    def takes(self, prompt: str, tenant: str) -> bool:
        """Whether a prompt is meant."""
        return (self.prompt is None or prompt == self.prompt) and (self.tenant is None or tenant == self.tenant)


@dataclass
class Purge:
    """What is to go, or has gone. `chunks`: keys by generation; `shared`: chunks that other prompts are made of too."""

    chunks: dict[tuple[bytes, bytes], set[bytes]] = field(default_factory=dict)
    parts: dict[str, int] = field(default_factory=dict)  # prompts parts, and how many of their prompts go
    shared: int = 0
    blobs: int = 0
    bytes: int = 0
    rows: int = 0
    unknown: int = 0  # chunks of which nothing says whose they are: without rows, or with those of earlier releases

    @property
    def prompts(self) -> int:
        """How many prompts go."""
        return sum(self.parts.values())


def plan_purge(store: Store, whose: Whose) -> Purge:
    """Find what belongs to these prompts alone.

    Raises:
        UserError: neither prompts nor chunks of them are in the store.
        DataError: part of index or prompts cannot be read, so that nothing can be proved; a repair comes first.
    """
    found = Purge()
    for path in store.list(PROMPTS):
        table = load_part(store, path)
        pairs = zip(table["id"].to_pylist(), table["tenant"].to_pylist(), strict=True)
        if count := sum(whose.takes(*pair) for pair in pairs):
            found.parts[path] = count
    for owner, gen in generations(store).items():
        read_generation(store, gen)
        mine, others = _keys(store, gen, whose)
        found.shared += len(mine & others)
        if doomed := mine - others:
            found.chunks[owner] = doomed
            sizes = [gen.blobs[key].size for key in doomed if key in gen.blobs]
            found.blobs += len(sizes)
            found.bytes += sum(sizes)
            found.rows += sum(len(gen.rows.get(key, ())) for key in doomed)
        told = {key for key, rows in gen.rows.items() if any(row.root_key is not None for row in rows)}
        found.unknown += len((gen.blobs.keys() | gen.rows.keys()) - told - mine)
    if not found.parts and not found.chunks:
        raise UserError(f"the store {store.uri} holds no such prompt")
    return found


def _keys(store: Store, gen: Generation, whose: Whose) -> tuple[set[bytes], set[bytes]]:
    """Keys of the chunks of these prompts, and of all others."""
    mine: set[bytes] = set()
    others: set[bytes] = set()
    for prompt in stored_prompts(store, gen.target, gen.roots, gen.rows.__contains__):
        (mine if whose.takes(prompt.id, prompt.tenant) else others).update(prompt.keys)
    if whose.prompt is None:  # also chunks whose prompts are gone
        mine |= {key for key, rows in gen.rows.items() if any(whose.takes("", row.tenant) for row in rows)}
    return mine, others


def purge(store: Store, whose: Whose, tell: Callable[[str], None]) -> Purge:
    """Remove what belongs to these prompts alone, and look again that it is gone.

    Blobs go first and prompts last: a purge that was cut off still finds what is left when it is run again.

    Raises:
        UserError: a job runs on the store, or another collection; the prompts are not there.
        DataError: something is still there, or cannot be read.
    """
    with exclusive(store):
        if busy := running_jobs(store, LEASE_SECONDS):
            raise UserError(
                f"{busy} job(s) run on {store.uri} and may store the same again; purge when they have ended"
            )
        found = plan_purge(store, whose)
        found.rows = 0
        for (target, profile), keys in found.chunks.items():
            forget(store, target, profile, keys)  # first: a damaged mark stops it before anything is gone
            for key in sorted(keys):
                store.delete(blob_path(target, profile, key))
            found.rows += drop_rows(store, target, profile, lambda t, keys=keys: _among(t, keys))  # type: ignore[misc]
        _delete_copies(store, found)
        for path in found.parts:
            _without(store, path, whose)
        prove(store, found, whose)
    tell(f"listed again: none of {sum(map(len, found.chunks.values())):,} chunks, and no prompt, is left")
    return found


def _among(table: pa.Table, keys: set[bytes]) -> list[bool]:
    return [key in keys for key in table["key"].to_pylist()]


def _delete_copies(store: Store, found: Purge) -> None:
    """What a repair has put aside of these chunks and prompts."""
    names = {f"{key.hex()}.kv" for keys in found.chunks.values() for key in keys}
    for path in store.list(QUARANTINE):
        if path.rpartition("/")[2] in names or f"/{PROMPTS}/" in path or f"/{INDEX}/" in path:
            store.delete(path)


def _without(store: Store, path: str, whose: Whose) -> None:
    """Write a prompts part again without these prompts, and delete it."""
    kept = [row for row in part_rows(load_part(store, path)) if not whose.takes(row["id"], row["tenant"])]
    if kept:
        target = bytes.fromhex(path.split("/")[1])
        store.put_new(prompts_path(target, part_name(kept)), part_bytes(kept))
    store.delete(path)


def prove(store: Store, found: Purge, whose: Whose) -> None:
    """List the store again. Raises DataError where anything is left that was to go."""
    for (target, profile), keys in found.chunks.items():
        gen = Generation(target, profile)
        read_generation(store, gen)
        blobs = {bytes.fromhex(path[-67:-3]) for path in store.list(blob_prefix(target, profile))}
        if left := keys & (gen.rows.keys() | blobs):
            path = blob_path(target, profile, next(iter(left)))
            raise DataError(f"{len(left)} chunks are still in {store.uri}, among them {path}; run the purge again")
    for path in store.list(PROMPTS):
        table = load_part(store, path)
        if any(map(whose.takes, table["id"].to_pylist(), table["tenant"].to_pylist())):
            raise DataError(f"{store.uri}/{path} still holds a prompt that was to go; run the purge again")
