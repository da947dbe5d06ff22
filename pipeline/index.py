"""The index: one row a stored chunk, in Parquet parts that any reader of Parquet can open.

A task that has stored its blobs commits them by writing one part, index/<target>/<profile>/<name>.parquet. The part's
name is a digest of the chunks in it and their bits, so a task that runs twice writes one part. A blob without a row was not
committed; a row without its blob is an error that verification reports. Two jobs that met the same chunk in differently
cut tasks both have a row for it: the rows of a key then agree in everything that describes the blob.

    duckdb: SELECT model, sum(raw_bytes) / sum(stored_bytes)
            FROM (SELECT DISTINCT ON (key, chain_digest) * FROM 'index/*/*/*.parquet') GROUP BY model

key            32 bytes: the hash chain over the tokens up to the chunk's end; parent_key: that of the chunk before, null for the first
chunk_index, first_token, tokens   its place in its prompts, and its length; chunk_tokens: of a full chunk
model, target, predictor, profile  the model's name when it was stored; fingerprint of its weights; ids of what decodes it
cache_format, fp8_scale, loop      number format of the cache, how an FP8 cache is scaled, the codec's loop
raw_bytes, stored_bytes            of the cache, and of the whole blob; header_bytes, bytes_k, bytes_v: what the blob is made of
scalars_k, scalars_v               how many numbers; ideal_bits_k, ideal_bits_v: their code length; escapes: numbers far from any guess
layer_checksums                    16 bytes a tensor, K then V, layer by layer, taken before encoding
layer_bits                         ideal bits a scalar, layer by layer: K's heads, then V's; null where they were not asked for
layer_spread, layer_miss           bits a scalar, K then V, layer by layer: the two parts of a Gaussian's cost (pipeline/health.py)
parent_digest, chain_digest        16 bytes: of all raw bits before the chunk, and up to its end
tenant, root_key                   whose it is, and the key of the empty prefix under that salt
created, host_arch, torch_version, device, prefill_tokens   where and how the target ran
"""

import hashlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from codec.errors import DataError
from pipeline.paths import index_path, index_prefix
from pipeline.store import ObjectMissing, Store

FORMAT = 1
FETCH_AHEAD = 8  # parts; a merged one has up to some 20 MB

ADDED = ("fp8_scale", "root_key", "layer_bits", "layer_spread", "layer_miss")  # columns that older parts lack

_DIGEST = pa.binary(32)
_CHAIN = pa.binary(16)
_BITS = pa.list_(pa.float32())


def _required(name: str, kind: pa.DataType) -> pa.Field:
    return pa.field(name, kind, nullable=False)


INDEX_SCHEMA = pa.schema(
    [
        _required("key", _DIGEST),
        pa.field("parent_key", _DIGEST),  # null for the first chunk of a prompt
        _required("chunk_index", pa.int32()),
        _required("first_token", pa.int64()),  # position in the prompt
        _required("tokens", pa.int32()),
        _required("model", pa.string()),  # its folder, file or repository; the fingerprint is what counts
        _required("target", _DIGEST),
        _required("predictor", _DIGEST),
        _required("profile", _DIGEST),
        _required("cache_format", pa.string()),
        pa.field("fp8_scale", pa.string()),  # how an FP8 cache is scaled; null for other formats
        _required("loop", pa.string()),
        _required("chunk_tokens", pa.int32()),
        _required("prefill_tokens", pa.int32()),
        _required("raw_bytes", pa.int64()),
        _required("stored_bytes", pa.int64()),  # the whole blob
        _required("header_bytes", pa.int64()),
        _required("bytes_k", pa.int64()),
        _required("bytes_v", pa.int64()),
        _required("scalars_k", pa.int64()),
        _required("scalars_v", pa.int64()),
        pa.field("ideal_bits_k", pa.float64()),  # null where the ideal code length was not asked for
        pa.field("ideal_bits_v", pa.float64()),
        _required("escapes", pa.int64()),
        _required("layer_checksums", pa.binary()),  # 16 bytes a tensor, K then V, layer by layer
        pa.field("layer_bits", _BITS),  # a head each: K's, then V's, layer by layer
        pa.field("layer_spread", _BITS),  # a tensor each
        pa.field("layer_miss", _BITS),
        _required("parent_digest", _CHAIN),
        _required("chain_digest", _CHAIN),
        _required("tenant", pa.string()),  # hex digest of the salt, "" without one
        pa.field("root_key", _DIGEST),  # key of the empty prefix, from which the keys of a prompt follow
        _required("created", pa.timestamp("us", tz="UTC")),
        _required("host_arch", pa.string()),
        _required("torch_version", pa.string()),
        _required("device", pa.string()),
    ]
)


def part_name(table: pa.Table) -> bytes:
    """32-byte name of the part that holds these rows: a digest of their keys and chain digests, in whichever order.

    Not of the keys alone: after a repair the same chunks may hold other bits.
    """
    return _name(row_ids(table))


def is_named_for(path: str, table: pa.Table) -> bool:
    """Whether a part's path is that of these rows; parts of earlier releases are named for their keys alone."""
    names = (part_name(table), _name(set(table["key"].to_pylist())))
    return path.rpartition("/")[2] in {f"{name.hex()}.parquet" for name in names}


def _name(items: set[bytes]) -> bytes:
    digest = hashlib.blake2b(digest_size=32, person=b"kv-index-part")
    for item in sorted(items):
        digest.update(item)
    return digest.digest()


def row_ids(table: pa.Table) -> set[bytes]:
    """What a row is about: 48 bytes each, a chunk's key and the digest of its chain's bits."""
    pairs = zip(table["key"].to_pylist(), table["chain_digest"].to_pylist(), strict=True)
    return {key + chain for key, chain in pairs}


def write_part(store: Store, rows: Sequence[Mapping[str, Any]]) -> str:
    """Commit the rows of one task, all of one target and profile; returns the part's path, also where it was there.

    Digests are bytes, `created` is a datetime with a time zone. Raises DataError for rows that do not fit the schema.
    """
    return write_table(store, _table(rows))


def write_table(store: Store, table: pa.Table) -> str:
    """As `write_part`, of rows that are a table of INDEX_SCHEMA."""
    owners = set(zip(table["target"].to_pylist(), table["profile"].to_pylist(), strict=True))
    if len(owners) != 1:
        raise DataError(f"an index part needs the rows of one target and one profile, not of {len(owners)}")
    target, profile = owners.pop()
    labels = {"kv_index_format": str(FORMAT), "kv_target": target.hex(), "kv_profile": profile.hex()}
    sink = pa.BufferOutputStream()
    pq.write_table(table.replace_schema_metadata(labels), sink, compression="zstd", write_page_checksum=True)
    path = index_path(target, profile, part_name(table))
    store.put_new(path, sink.getvalue().to_pybytes())
    return path


def iter_parts(
    store: Store,
    *,
    target: bytes,
    profile: bytes,
    columns: Sequence[str] | None = None,
    broken: Callable[[str, DataError], None] | None = None,
) -> Iterator[tuple[str, pa.Table]]:
    """(path, rows) of every part, sorted by path; only a few parts are in memory at a time.

    `columns` are names of INDEX_SCHEMA, None means all. Raises DataError naming the part that cannot be read, or tells
    `broken` of it and goes on.
    """
    names = INDEX_SCHEMA.names if columns is None else list(columns)
    unknown = sorted(set(names) - set(INDEX_SCHEMA.names))
    if unknown:
        raise DataError(f"the index has no column {unknown[0]!r}")
    for path, data in _fetched(store, index_prefix(target, profile)):
        if data is None:  # merged into another part since it was listed, or written again without some rows
            continue
        try:
            table = _read_part(f"{store.uri}/{path}", data, target, profile, names)
        except DataError as error:
            if broken is None:
                raise
            broken(path, error)
            continue
        yield path, table


def read_part(
    store: Store, path: str, *, target: bytes, profile: bytes, columns: Sequence[str] = INDEX_SCHEMA.names
) -> pa.Table:
    """The rows of one part. Raises ObjectMissing, StorageError, and DataError where it cannot be read."""
    return _read_part(f"{store.uri}/{path}", store.get(path), target, profile, list(columns))


def read_rows(store: Store, *, target: bytes, profile: bytes, columns: Sequence[str] | None = None) -> pa.Table:
    """All rows of one target and profile, part after part; a key may come more than once. Raises as `iter_parts`."""
    tables = [table for _, table in iter_parts(store, target=target, profile=profile, columns=columns)]
    names = INDEX_SCHEMA.names if columns is None else list(columns)
    return pa.concat_tables([_schema(names).empty_table(), *tables])


def committed_keys(store: Store, target: bytes, profile: bytes) -> set[bytes]:
    """The 32-byte keys of all committed chunks. Raises as `iter_parts`."""
    keys: set[bytes] = set()
    for _, table in iter_parts(store, target=target, profile=profile, columns=["key"]):
        keys.update(table["key"].to_pylist())
    return keys


def _fetched(store: Store, folder: str) -> Iterator[tuple[str, bytes | None]]:
    """The parts of a folder in order, FETCH_AHEAD of them on their way or waiting."""
    waiting: deque[tuple[str, Future[bytes | None]]] = deque()
    with ThreadPoolExecutor(FETCH_AHEAD) as pool:  # they wait for the storage, not for a processor
        for path in store.list(folder):
            if not path.endswith(".parquet"):
                continue
            if len(waiting) == FETCH_AHEAD:
                first, data = waiting.popleft()
                yield first, data.result()
            waiting.append((path, pool.submit(_get, store, path)))
        while waiting:
            first, data = waiting.popleft()
            yield first, data.result()


def _get(store: Store, path: str) -> bytes | None:
    try:
        return store.get(path)
    except ObjectMissing:
        return None


def _schema(names: Sequence[str]) -> pa.Schema:
    return pa.schema([INDEX_SCHEMA.field(name) for name in names])


def _table(rows: Sequence[Mapping[str, Any]]) -> pa.Table:
    if not rows:
        raise DataError("an index part without rows cannot be written")
    for row in rows:
        if row.keys() != set(INDEX_SCHEMA.names):
            wrong = sorted(row.keys() ^ set(INDEX_SCHEMA.names))
            raise DataError(f"an index row lacks, or has beyond the schema, the columns {', '.join(wrong)}")
        for field in INDEX_SCHEMA:
            if row[field.name] is None and not field.nullable:
                raise DataError(f"an index row has nothing in its column {field.name}")
        if getattr(row["created"], "tzinfo", None) is None:
            raise DataError("an index row's time of creation has no time zone")
    try:
        return pa.Table.from_pylist([dict(row) for row in rows], schema=INDEX_SCHEMA)
    except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
        raise DataError(f"an index row does not fit the schema: {error}") from error


def _with_added(table: pa.Table) -> pa.Table:
    """A part's rows with the columns that parts lack which were written before these were added."""
    for name in ADDED:
        if name not in table.column_names:
            table = table.append_column(name, pa.nulls(len(table), INDEX_SCHEMA.field(name).type))
    return table


def _read_part(uri: str, data: bytes, target: bytes, profile: bytes, names: Sequence[str]) -> pa.Table:
    try:
        file = pq.ParquetFile(pa.BufferReader(data), page_checksum_verification=True)
        labels = file.schema_arrow.metadata or {}
        found = int(labels.get(b"kv_index_format", b"0"))
        owner = (labels.get(b"kv_target", b"").decode(), labels.get(b"kv_profile", b"").decode())
        if found == FORMAT:
            # `select` restores the order that was asked for, `cast` refuses other types.
            table = _with_added(file.read(columns=list(names))).select(list(names)).cast(_schema(names))
    except Exception as error:
        # Broken files make pyarrow raise anything from OSError to KeyError.
        raise DataError(f"the index part {uri} cannot be read: {' '.join(str(error).split()):.300}") from error
    if found != FORMAT:
        raise DataError(f"the index part {uri} has format {found}, and this version reads {FORMAT}")
    if owner != (target.hex(), profile.hex()):
        raise DataError(f"the index part {uri} belongs to another target or profile than its folder")
    return table
