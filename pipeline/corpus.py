"""Reading a corpus: JSON lines (also gzip) and Parquet, from local disk or s3://, a record at a time.

A record is an object with `id` and exactly one of

    text        a string
    messages    a list of {"role": …, "content": …}, with `tools` beside it if there are any (JSON schemas)
    token_ids   a list of integers

A `salt` (a string) keeps the record's chunks apart from all that have another one, or none: it is a tenant's secret and
is in no message. Other keys are ignored. In Parquet the same names are columns; `messages` and `tools` may be nested or JSON strings.
What is wrong with one record is a BadRecord; what is wrong with a file is raised.
"""

import hashlib
import json
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import IO, Any, Literal

import fsspec
from fsspec.core import url_to_fs

from codec.errors import DataError, KVCodecError, StorageError, UserError
from pipeline.secrets import without_secrets

EXTENSIONS = (".jsonl", ".jsonl.gz", ".json.gz", ".parquet")
MAX_LINE = 256 << 20  # bytes; a longer line is a bad record, and is skipped without being held
_BLOCK = 1 << 20
_COLUMNS = ("id", "text", "messages", "tools", "token_ids", "salt")

Kind = Literal["text", "messages", "token_ids"]
Options = Mapping[str, Any] | None


@dataclass(frozen=True)
class Record:
    """One prompt. payload: {"text"} or {"messages", "tools"} or {"token_ids"}; source: "file:line" (Parquet: row)."""

    id: str
    kind: Kind
    payload: dict[str, Any]
    source: str
    salt: str | None = field(default=None, repr=False)  # a tenant's secret

    def content_hash(self) -> bytes:
        """32 bytes that are equal for equal content, whatever the id, the salt, the place or the order of keys."""
        text = json.dumps([self.kind, self.payload], sort_keys=True, separators=(",", ":"))
        return hashlib.blake2b(text.encode(), digest_size=32).digest()


@dataclass(frozen=True)
class BadRecord:
    """A record that cannot be used, and why (half a sentence)."""

    source: str
    reason: str


# ---------------------------------------------------------------- files
def list_corpus(uri: str, *, storage_options: Options = None) -> list[str]:
    """The files of a corpus, sorted: one file, a folder (with what is below it) or a glob; local paths or s3://.

    Local files come as absolute paths. Raises UserError when there are none, StorageError when the storage fails.
    """
    try:
        fs, path = url_to_fs(uri, **dict(storage_options or {}))
        fs.invalidate_cache()
        files = _find(fs, path, uri)
        local = "file" in (fs.protocol if isinstance(fs.protocol, tuple) else (fs.protocol,))
        return sorted(file if local else fs.unstrip_protocol(file) for file in files)
    except (ImportError, ValueError) as error:
        raise UserError(f"the corpus address {uri} cannot be read ({_short(error)}); use a path or s3://") from error
    except Exception as error:
        raise _file_error(uri, error) from error


def _find(fs: Any, path: str, uri: str) -> list[str]:
    try:
        kind = fs.info(path)["type"]  # isfile and isdir would hide that credentials are wrong
    except FileNotFoundError:
        kind = ""
    if kind == "file":
        if not path.lower().endswith(EXTENSIONS):
            raise UserError(f"the corpus {uri} is of an unknown kind; accepted are {', '.join(EXTENSIONS)}")
        return [path]
    if kind == "directory":
        found, place = fs.find(path), "folder"
    elif any(c in path for c in "*?["):
        found, place = [f for f, info in fs.glob(path, detail=True).items() if info["type"] == "file"], "pattern"
    else:
        raise UserError(f"the corpus {uri} does not exist")
    files = [f for f in found if f.lower().endswith(EXTENSIONS) and not f.rpartition("/")[2].startswith(".")]
    if not files:
        raise UserError(f"the corpus {place} {uri} matches no file of {', '.join(EXTENSIONS)}")
    return files


def read_corpus(file: str, *, storage_options: Options = None) -> Iterator[Record | BadRecord]:
    """The records of one file in order; memory stays at one line, or at one batch of a Parquet row group.

    Raises UserError (no such file, unknown kind), DataError (a corrupt archive or Parquet file), StorageError.
    """
    if not file.lower().endswith(EXTENSIONS):
        raise UserError(f"the corpus file {file} is of an unknown kind; accepted are {', '.join(EXTENSIONS)}")
    read = _read_parquet if file.lower().endswith(".parquet") else _read_lines
    compression = "gzip" if file.lower().endswith(".gz") else None
    try:
        with fsspec.open(file, "rb", compression=compression, **dict(storage_options or {})) as stream:
            yield from read(stream, file)
    except Exception as error:
        raise _file_error(file, error) from error


def _file_error(uri: str, error: Exception) -> KVCodecError:
    """Storage layers raise from many libraries: sort what they say by whose fault it is."""
    import pyarrow as pa

    if isinstance(error, KVCodecError):
        return error
    if isinstance(error, (FileNotFoundError, IsADirectoryError)):
        return UserError(f"the corpus {uri} does not exist")
    if isinstance(error, PermissionError) or type(error).__name__ in ("NoCredentialsError", "PartialCredentialsError"):
        return UserError(f"the corpus {uri} may not be read with the credentials at hand")
    if isinstance(error, (EOFError, zlib.error)) or type(error).__name__ == "BadGzipFile":
        return DataError(f"the corpus file {uri} is truncated or is not intact gzip; compress it again")
    if isinstance(error, pa.ArrowException) or (uri.lower().endswith(".parquet") and isinstance(error, OSError)):
        return DataError(f"the corpus file {uri} is not intact Parquet ({_short(error)})")
    return StorageError(f"the corpus {uri} could not be read ({_short(error)})")


def _short(error: BaseException) -> str:
    text = without_secrets(str(error))[:200].rstrip(". ")
    return text or type(error).__name__


# ---------------------------------------------------------------- JSON lines
def _read_lines(stream: IO[bytes], file: str) -> Iterator[Record | BadRecord]:
    for number, line in _lines(stream):
        source = f"{file}:{number}"
        if line is None:
            yield BadRecord(source, f"the line is longer than {MAX_LINE} bytes")
        elif line.strip():
            yield _parse_line(line, source)


def _lines(stream: IO[bytes]) -> Iterator[tuple[int, bytes | None]]:
    """(number from 1, line without its end) of a byte stream; None for a line that is longer than MAX_LINE."""
    number, parts, size = 1, [], 0
    while block := stream.read(_BLOCK):
        start = 0
        while (end := block.find(b"\n", start)) >= 0:
            parts.append(block[start:end])
            yield number, b"".join(parts) if size + end - start <= MAX_LINE else None
            number, parts, size, start = number + 1, [], 0, end + 1
        size += len(block) - start
        parts = [*parts, block[start:]] if size <= MAX_LINE else []
    if size:
        yield number, b"".join(parts) if size <= MAX_LINE else None


def _parse_line(line: bytes, source: str) -> Record | BadRecord:
    try:
        value = json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        return BadRecord(source, f"not valid UTF-8 at byte {error.start + 1}")
    except json.JSONDecodeError as error:
        return BadRecord(source, f"not valid JSON at column {error.colno} ({error.msg})")
    except (ValueError, RecursionError) as error:  # integers of thousands of digits; nesting without end
        return BadRecord(source, f"not usable JSON ({_short(error)})")
    return parse_record(value, source)


# ---------------------------------------------------------------- Parquet
def _read_parquet(stream: IO[bytes], file: str) -> Iterator[Record | BadRecord]:
    import pyarrow.parquet as pq

    table = pq.ParquetFile(stream)
    columns = [name for name in _COLUMNS if name in table.schema_arrow.names]
    if "id" not in columns or not {"text", "messages", "token_ids"} & set(columns):
        raise UserError(f"the corpus file {file} lacks a column id, or all of text, messages and token_ids")
    number = 0
    for group in range(table.num_row_groups):
        for batch in table.iter_batches(batch_size=64, row_groups=[group], columns=columns):
            for row in batch.to_pylist():
                number += 1
                yield parse_record(_without_nulls(row), f"{file}:{number}")


def _without_nulls(value: Any) -> Any:
    """Nested columns give every struct every field; those that a row does not have come as None."""
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    return value


# ---------------------------------------------------------------- one record
class _Bad(Exception):
    """Why a record cannot be used."""


def parse_record(value: Any, source: str) -> Record | BadRecord:
    """Check one decoded record: never raises, whatever it is given from JSON or Parquet."""
    try:
        if not isinstance(value, dict):
            raise _Bad(f"not an object but {_kind_of(value)}")
        kind, payload = _payload(value)
        record = Record(_id(value), kind, payload, source, _salt(value))
        json.dumps([record.id, record.salt, payload], ensure_ascii=False).encode()
        return record
    except _Bad as error:
        return BadRecord(source, str(error))
    except UnicodeEncodeError:
        return BadRecord(source, "holds half of a surrogate pair, which is no text")
    except (TypeError, ValueError, RecursionError) as error:
        return BadRecord(source, f"holds what JSON cannot say ({_short(error)})")


def _id(value: dict[str, Any]) -> str:
    own = value.get("id")
    if own is None:
        raise _Bad("has no id")
    if isinstance(own, bool) or not isinstance(own, (str, int)):
        raise _Bad(f"id must be a string or an integer, not {_kind_of(own)}")
    if own == "":
        raise _Bad("id is empty")
    return str(own)


def _salt(value: dict[str, Any]) -> str | None:
    own = value.get("salt")
    if own is None:
        return None
    if not isinstance(own, str):
        raise _Bad(f"salt must be a string, not {_kind_of(own)}")
    if own == "":
        raise _Bad("salt is empty")
    return own


def _payload(value: dict[str, Any]) -> tuple[Kind, dict[str, Any]]:
    given = [name for name in ("text", "messages", "token_ids") if value.get(name) is not None]
    if not given:
        raise _Bad("has no content: one of text, messages and token_ids is needed")
    if len(given) > 1:
        raise _Bad(f"has {' and '.join(given)}, of which only one is allowed")
    if value.get("tools") and given[0] != "messages":
        raise _Bad("has tools, which need messages")
    if given[0] == "text":
        return "text", {"text": _text(value["text"])}
    if given[0] == "token_ids":
        return "token_ids", {"token_ids": _token_ids(value["token_ids"])}
    messages = _objects("messages", value["messages"])
    if not messages:
        raise _Bad("messages are empty")
    for index, message in enumerate(messages):
        _check_message(index, message)
    tools = _objects("tools", value["tools"]) if value.get("tools") else []
    return "messages", {"messages": messages, **({"tools": tools} if tools else {})}


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise _Bad(f"text must be a string, not {_kind_of(value)}")
    if not value:
        raise _Bad("text is empty")
    return value


def _token_ids(value: Any) -> list[int]:
    if not isinstance(value, list):
        raise _Bad(f"token_ids must be a list, not {_kind_of(value)}")
    if not value:
        raise _Bad("token_ids are empty")
    for index, item in enumerate(value):
        if isinstance(item, bool) or not isinstance(item, int):
            raise _Bad(f"token_ids[{index}] must be an integer, not {_kind_of(item)}")
        if not 0 <= item < 1 << 31:
            raise _Bad(f"token_ids[{index}] is out of range")
    return value


def _objects(name: str, value: Any) -> list[dict[str, Any]]:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise _Bad(f"{name} is a string that is not valid JSON ({_short(error)})") from error
    if not isinstance(value, list):
        raise _Bad(f"{name} must be a list, not {_kind_of(value)}")
    for index, item in enumerate(value):
        if not isinstance(item, dict):
            raise _Bad(f"{name}[{index}] must be an object, not {_kind_of(item)}")
    return value


def _check_message(index: int, message: dict[str, Any]) -> None:
    if not isinstance(message.get("role"), str) or not message["role"]:
        raise _Bad(f"messages[{index}] has no role")
    content = message.get("content")
    if content is None and not message.get("tool_calls"):
        raise _Bad(f"messages[{index}] has no content")
    if content is not None and not isinstance(content, (str, list)):
        raise _Bad(f"messages[{index}].content must be a string or a list of parts, not {_kind_of(content)}")


def _kind_of(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", int: "an integer"}
    return "null" if value is None else names.get(type(value), f"a {type(value).__name__}")
