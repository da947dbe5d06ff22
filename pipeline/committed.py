"""What a store already holds of a corpus: committed index rows, and whether their blobs are there."""

from __future__ import annotations

from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields

import pyarrow as pa
import pyarrow.parquet as pq

from codec.errors import DataError
from pipeline import index
from pipeline.paths import blob_path, blob_prefix, parse_blob_path
from pipeline.store import Store
from pipeline.work import KEPT, ChunkFigures, Job

ASK_EACH = 2000  # up to so many chunks each is asked for; above, listing the blobs takes fewer requests
ASK_AT_ONCE = 16

_FIGURES = [field.name for field in fields(ChunkFigures) if field.name not in ("key", "outcome")]


@dataclass(frozen=True)
class Committed:
    """Chunks of a corpus that have an index row, or had one."""

    figures: dict[bytes, ChunkFigures]  # those with a row whose blob is there too
    lost: dict[bytes, bytes]  # those with a row whose blob is gone: key -> digest of the chain's bits
    gone: dict[
        bytes, bytes
    ]  # those without a row that stored chunks follow from: key -> digest of the bits they follow from

    @staticmethod
    def none() -> Committed:
        """Of a store that holds nothing for this job."""
        return Committed({}, {}, {})


def find_committed(job: Job, keys: Collection[bytes]) -> Committed:
    """Look up the chunks of a corpus under the job's target and profile.

    Raises:
        DataError, StorageError: an index part is malformed or unreadable.
    """
    figures: dict[bytes, ChunkFigures] = {}
    digests: dict[bytes, bytes] = {}
    followed: dict[bytes, bytes] = {}
    columns = ["key", "chain_digest", "parent_key", "parent_digest", *_FIGURES]
    for _, table in index.iter_parts(job.store, target=job.target, profile=job.profile, columns=columns):
        # Most rows of a large index are of other corpora: only two of their columns become objects.
        pairs = zip(table["key"].to_pylist(), table["parent_key"].to_pylist(), strict=True)
        for row in table.filter(pa.array([key in keys or parent in keys for key, parent in pairs])).to_pylist():
            key, parent = row.pop("key"), row.pop("parent_key")
            digest, parent_digest = row.pop("chain_digest"), row.pop("parent_digest")
            if parent in keys:
                followed[parent] = parent_digest
            if key in keys:
                digests[key], figures[key] = digest, ChunkFigures(key=key, outcome=KEPT, **row)
    there = _blobs_there(job.store, job.target, job.profile, list(figures))
    return Committed(
        {key: value for key, value in figures.items() if key in there},
        {key: digests[key] for key in figures.keys() - there},
        {key: digest for key, digest in followed.items() if key not in figures},
    )


def read_checksums(store: Store, part: str) -> dict[bytes, bytes]:
    """Key -> layer checksums of every row of one index part.

    Raises:
        DataError, StorageError: the part is malformed, missing or unreadable.
    """
    data = store.get(part)
    try:
        columns = [index.INDEX_SCHEMA.field(name) for name in ("key", "layer_checksums")]
        table = pq.read_table(pa.BufferReader(data), columns=[c.name for c in columns]).cast(pa.schema(columns))
    except Exception as error:  # broken files make pyarrow raise anything from OSError to KeyError
        place = f"{store.uri}/{part}"
        raise DataError(f"the index part {place} is no readable Parquet file ({type(error).__name__})") from error
    return dict(zip(table["key"].to_pylist(), table["layer_checksums"].to_pylist(), strict=True))


def _blobs_there(store: Store, target: bytes, profile: bytes, keys: list[bytes]) -> set[bytes]:
    if len(keys) > ASK_EACH:
        return {parse_blob_path(path)[2] for path in store.list(blob_prefix(target, profile))} & set(keys)
    with ThreadPoolExecutor(ASK_AT_ONCE) as pool:
        there = list(pool.map(lambda key: store.exists(blob_path(target, profile, key)), keys))
    return {key for key, found in zip(keys, there, strict=True) if found}
