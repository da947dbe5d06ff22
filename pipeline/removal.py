"""Taking chunks out of a store: rows first, then blobs, so that a row without its blob is never left behind on purpose."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc

import codec
from codec.checksums import chain
from codec.errors import BlobError
from pipeline import index
from pipeline.catalogue import Generation, read_generation
from pipeline.paths import QUARANTINE, blob_path
from pipeline.store import ObjectMissing, Store


@dataclass
class Removed:
    """What was taken out."""

    rows: int = 0
    blobs: int = 0
    bytes: int = 0


def drop_rows(
    store: Store, target: bytes, profile: bytes, unwanted: Callable[[pa.Table], pa.Array | list[bool]]
) -> int:
    """Remove rows from the index: parts that hold some are written again without them, and then deleted.

    unwanted: a mask over a part's rows, all columns. A part that cannot be read is left alone.

    Returns:
        How many rows are gone, a row that stood in two parts counted twice.
    """
    gone = 0
    parts = index.iter_parts(store, target=target, profile=profile, broken=lambda *_: None)
    for path, table in parts:
        mask = pa.array(unwanted(table), pa.bool_())
        count = pc.sum(mask.cast(pa.int64())).as_py() or 0
        if not count:
            continue
        kept = table.filter(pc.invert(mask))
        if len(kept):
            index.write_table(store, kept)
        store.delete(path)
        gone += count
    return gone


def drop_chunks(store: Store, gen: Generation, ids: set[bytes], *, unreadable: bool = False) -> Removed:
    """Remove the rows of these ids, and the blobs that hold the bits that they say; others stay where they are.

    unreadable: also blobs that do not say what they hold.
    """
    removed = Removed()
    if not ids:
        return removed

    def unwanted(table: pa.Table) -> list[bool]:
        pairs = zip(table["key"].to_pylist(), table["chain_digest"].to_pylist(), strict=True)
        return [key + digest in ids for key, digest in pairs]

    removed.rows = drop_rows(store, gen.target, gen.profile, unwanted)
    for item in sorted(ids):
        key, digest = item[:32], item[32:]
        path = blob_path(gen.target, gen.profile, key)
        try:
            data = store.get(path)
        except ObjectMissing:
            continue
        held = _holds(data)
        if held == digest or (unreadable and held is None):
            store.delete(path)
            removed.blobs += 1
            removed.bytes += len(data)
    return removed


def drop_chain(store: Store, target: bytes, profile: bytes, key: bytes, digest: bytes) -> Removed:
    """Remove a chunk that had these bits, and every chunk of every prompt that follows from it.

    For a chunk that is lost and, computed again, holds other bits: nothing stored may follow from the old ones (DESIGN 8).
    """
    gen = Generation(target, profile)
    read_generation(store, gen)
    return drop_chunks(store, gen, gen.descendants({key + digest}))


def _holds(blob: bytes) -> bytes | None:
    """The digest of the chain's bits up to and with this blob; None where it does not say."""
    try:
        header = codec.read_header(blob)
    except BlobError:
        return None
    return chain(header.parent_digest, header.layer_checksums)


def put_aside(store: Store, path: str) -> str:
    """Move an object into quarantine, where nothing reads it; returns where it lies now."""
    data = store.get(path)
    place = f"{QUARANTINE}/{codec.content_id(data).hex()[:8]}/{path}"
    store.put_new(place, data)
    store.delete(path)
    return place
