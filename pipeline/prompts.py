"""The tokenise stage: records in, rows of keys out; tokens go to the store as content-addressed Parquet parts.

A part holds one tenant's usable prompts among `PART_RECORDS` consecutive records of one file. Which records those are depends on
nothing but the file, and the part's name on nothing but its contents, so a second run finds every part in place.
"""

from __future__ import annotations

import functools
import hashlib
import io
import json
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from codec.errors import DataError
from codec.keys import chunk_keys
from pipeline.corpus import BadRecord, Record, read_corpus
from pipeline.model_source import ModelSource, load_tokenizer, localise
from pipeline.paths import prompts_path
from pipeline.plan import Bad, Prompt
from pipeline.render import BadPrompt, token_ids
from pipeline.store import Store
from pipeline.tenancy import Roots

PART_RECORDS = 64
MAX_SHARDS = 64  # tokenise tasks a file

PART_SCHEMA = pa.schema(
    [
        ("id", pa.string()),
        ("source", pa.string()),  # the record's content as JSON
        ("token_ids", pa.list_(pa.int32())),
        ("n_tokens", pa.int64()),
        ("tenant", pa.string()),  # hex digest of the salt, "" without one; older parts lack it
    ]
)
ROW_SCHEMA = pa.schema(
    [
        ("id", pa.string()),
        ("n_tokens", pa.int64()),
        ("keys", pa.binary()),
        ("part", pa.string()),
        ("row", pa.int64()),
        ("content", pa.binary()),
        ("file", pa.int64()),
        ("record", pa.int64()),
        ("source", pa.string()),
        ("tenant", pa.string()),
        ("root", pa.binary()),
        ("reason", pa.string()),  # why the record cannot be used; null when it can
    ]
)


@dataclass(frozen=True)
class Tokenising:
    """What a tokenise task is told. The job's own salt is only in the root of its keys: it does not travel."""

    store: Store
    model: ModelSource
    target: bytes
    roots: Roots
    context_length: int
    vocab_size: int
    max_tokens: int | None
    limit: int | None
    write: bool  # False for a dry run


def work_items(files: Sequence[str], limit: int | None, slots: int) -> list[dict[str, Any]]:
    """The stage's input: one item for each file and shard. A shard takes every n-th run of PART_RECORDS records.

    Each shard reads its whole file and tokenises its share, because JSON lines cannot be found without reading.
    """
    shards = 1 if limit is not None and limit <= PART_RECORDS else max(1, min(MAX_SHARDS, slots // max(1, len(files))))
    return [
        {"file": file, "index": index, "shard": shard, "shards": shards}
        for index, file in enumerate(files)
        for shard in range(shards)
    ]


class Tokenise:
    """The stage's callable: a batch of work items in, tables of ROW_SCHEMA out, one a part."""

    def __init__(self, settings: Tokenising) -> None:
        self._settings = settings
        self._tokenizer: Any = None

    def __call__(self, batch: dict[str, Any]) -> Iterator[pa.Table]:
        for file, index, shard, shards in zip(
            batch["file"], batch["index"], batch["shard"], batch["shards"], strict=True
        ):
            yield from self._file(str(file), int(index), int(shard), int(shards))

    def _file(self, file: str, index: int, shard: int, shards: int) -> Iterator[pa.Table]:
        part: list[dict[str, Any]] = []
        good = 0
        for number, record in enumerate(read_corpus(file)):
            if number % PART_RECORDS == 0:
                yield from self._flush(part)
                part = []
                if self._settings.limit is not None and good >= self._settings.limit:
                    return
            if (number // PART_RECORDS) % shards == shard:
                part.append(self._row(record, index, number))
                good += part[-1]["reason"] is None
                if good == self._settings.limit:
                    break
        yield from self._flush(part)

    def _row(self, record: Record | BadRecord, file: int, number: int) -> dict[str, Any]:
        place = {"file": file, "record": number, "source": record.source, "reason": None}
        if isinstance(record, BadRecord):
            return place | {"reason": record.reason}
        if record.salt is not None and self._settings.roots.tenant:
            return place | {"reason": "has a salt of its own, and --salt-env gives all records another one"}
        try:
            ids = self._ids(record, self._settings.context_length)
        except BadPrompt as error:
            return place | {"reason": f"the prompt {record.id!r} {error.reason}"}
        return place | self._usable(record, ids, *self._settings.roots.of(record.salt))

    def _ids(self, record: Record, context_length: int) -> list[int]:
        """Token ids of a record. Raises BadPrompt."""
        return token_ids(
            record,
            self._loaded(),
            max_tokens=self._settings.max_tokens,
            context_length=context_length,
            vocab_size=self._settings.vocab_size,
        )

    def _loaded(self) -> Any:
        if self._tokenizer is None:
            self._tokenizer = load_tokenizer(localise(self._settings.model))
        return self._tokenizer

    def _usable(self, record: Record, ids: list[int], tenant: str, root: bytes) -> dict[str, Any]:
        """What a row says of a record that can be used."""
        return {
            "id": record.id,
            "n_tokens": len(ids),
            "keys": b"".join(chunk_keys(root, ids, self._settings.roots.chunk_tokens)),
            "tenant": tenant,
            "root": root,
            "content": record.content_hash(),
            "payload": json.dumps({"kind": record.kind, **record.payload}, sort_keys=True, ensure_ascii=False),
            "token_ids": ids,
        }

    def _flush(self, rows: list[dict[str, Any]]) -> Iterator[pa.Table]:
        if not rows:
            return
        tenants: dict[str, list[dict[str, Any]]] = {}
        for row in rows:
            if row["reason"] is None:
                tenants.setdefault(row["tenant"], []).append(row)
        for good in tenants.values():
            path = prompts_path(self._settings.target, part_name(good))
            for number, row in enumerate(good):
                row.update(part=path, row=number)
            if self._settings.write and not self._settings.store.exists(path):
                self._settings.store.put_new(path, part_bytes(good))
        yield pa.Table.from_pylist(rows, schema=ROW_SCHEMA)


def part_name(rows: Sequence[dict[str, Any]]) -> bytes:
    """Digest of what a part holds: its tenant; ids, records and token ids, each with its length before it."""
    digest = hashlib.blake2b(b"kv prompts 1\0", digest_size=32, key=_tenant_of(rows).encode())
    for row in rows:
        for item in (row["id"].encode(), row["payload"].encode(), _ids_bytes(row["token_ids"])):
            digest.update(struct.pack("<Q", len(item)) + item)
    return digest.digest()


def _tenant_of(rows: Sequence[dict[str, Any]]) -> str:
    tenants = {row.get("tenant", "") for row in rows}
    if len(tenants) > 1:
        raise ValueError("a prompts part is of one tenant")
    return str(tenants.pop()) if tenants else ""


def _ids_bytes(ids: Sequence[int]) -> bytes:
    return np.asarray(ids, dtype="<i4").tobytes()


def part_bytes(rows: Sequence[dict[str, Any]]) -> bytes:
    """A part as Parquet."""
    columns = {
        "id": [row["id"] for row in rows],
        "source": [row["payload"] for row in rows],
        "token_ids": [row["token_ids"] for row in rows],
        "n_tokens": [row["n_tokens"] for row in rows],
        "tenant": [row.get("tenant", "") for row in rows],
    }
    sink = io.BytesIO()
    pq.write_table(pa.Table.from_pydict(columns, schema=PART_SCHEMA), sink, compression="zstd")
    return sink.getvalue()


def split_rows(tables: Iterator[pa.Table]) -> tuple[list[Prompt], list[Bad]]:
    """The stage's output as prompts and bad records."""
    prompts: list[Prompt] = []
    bad: list[Bad] = []
    for table in tables:
        for row in table.to_pylist():
            position = (row.pop("file"), row.pop("record"))
            reason = row.pop("reason")
            if reason is not None:
                bad.append(Bad(row["source"], reason, position))
            else:
                prompts.append(Prompt(position=position, **row))
    return prompts, bad


class Rekey:
    """The callable of another stage: names of parts in, the keys of their prompts under another root out.

    For when the root depends on what only the prompts themselves could tell, as the scales of an FP8 cache do: tokens are
    read back from the parts, which do not depend on keys.
    """

    def __init__(self, store: Store, root: bytes, chunk_tokens: int) -> None:
        self._store, self._root, self._chunk_tokens = store, root, chunk_tokens

    def __call__(self, batch: dict[str, Any]) -> Iterator[pa.Table]:
        for part in map(str, batch["part"]):
            ids = load_part(self._store, part)["token_ids"].to_pylist()
            keys = [b"".join(chunk_keys(self._root, row, self._chunk_tokens)) for row in ids]
            roots = [self._root] * len(keys)
            yield pa.table({"part": [part] * len(keys), "row": list(range(len(keys))), "keys": keys, "root": roots})


def with_keys(prompts: Sequence[Prompt], tables: Iterator[pa.Table]) -> list[Prompt]:
    """The prompts with the keys that `Rekey` gave. DataError where it gave none for one of them."""
    rows = {(row.pop("part"), row.pop("row")): row for table in tables for row in table.to_pylist()}
    try:
        found = [replace(prompt, **rows[prompt.part, prompt.row]) for prompt in prompts]
    except KeyError as error:
        raise DataError(
            f"row {error.args[0][1]} of the prompts part {error.args[0][0]} is gone; run the job again"
        ) from None
    if any(len(new.keys) != len(old.keys) for new, old in zip(found, prompts, strict=True)):
        raise DataError("the prompts parts hold other tokens than were just put into them; run the job again")
    return found


class PromptReader:
    """Reads token ids back from parts, a few parts at a time."""

    def __init__(self, store: Store) -> None:
        self._load = functools.lru_cache(maxsize=4)(functools.partial(load_part, store))

    def tokens(self, part: str, row: int, n_tokens: int) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Token ids of one prompt, int64.

        Raises:
            DataError: the part is malformed or holds something else at this row.
            StorageError: the part is missing or unreadable.
        """
        column = self._load(part)["token_ids"]
        if not 0 <= row < len(column):
            raise DataError(f"the prompts part {part} has no row {row}")
        ids = np.asarray(column[row].values.to_numpy(zero_copy_only=False), dtype=np.int64)
        if len(ids) != n_tokens:
            raise DataError(f"row {row} of the prompts part {part} has {len(ids)} tokens instead of {n_tokens}")
        return ids


def load_part(store: Store, part: str) -> pa.Table:
    """A part as a table of PART_SCHEMA, found to hold what it is named for.

    Raises:
        DataError: malformed, or other contents than its name says.
        StorageError: missing or unreadable.
    """
    data = store.get(part)
    try:
        table = pq.read_table(io.BytesIO(data))
        if "tenant" not in table.column_names:
            table = table.append_column("tenant", pa.array([""] * len(table), pa.string()))
        table = table.select(PART_SCHEMA.names).cast(PART_SCHEMA)
        name = part_name(part_rows(table)).hex()
    except Exception as error:  # broken files make pyarrow raise anything
        place = f"{store.uri}/{part}"
        raise DataError(f"the prompts part {place} is no readable Parquet file ({type(error).__name__})") from error
    if not part.endswith(f"/{name}.parquet"):  # else tokens would be stored under keys that are not theirs
        raise DataError(
            f"the prompts part {store.uri}/{part} holds other prompts than the ones it is named for; delete it"
        )
    return table.combine_chunks()


def part_rows(table: pa.Table) -> list[dict[str, Any]]:
    """The rows of a part as `part_name` and `part_bytes` take them."""
    return [row | {"payload": row.pop("source")} for row in table.to_pylist()]
