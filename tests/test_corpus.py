"""Reading corpora: every format, and every way a file or a record can be wrong."""

import gzip
import json
import os
import re
import tracemalloc
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from codec.errors import DataError, StorageError, UserError
from pipeline import corpus
from pipeline.corpus import BadRecord, Record, list_corpus, parse_record, read_corpus
from tests.s3_server import BUCKET, s3_server

GOOD: list[dict[str, Any]] = [
    {"id": "a", "text": "hello"},
    {"id": 7, "token_ids": [1, 2, 3], "other": None},
    {"id": "c", "messages": [{"role": "user", "content": "hi"}], "tools": [{"type": "function"}], "text": None},
]
LINES = "".join(json.dumps(record) + "\n" for record in GOOD)


def records(path: Path) -> list[Record]:
    out = list(read_corpus(str(path)))
    assert all(isinstance(record, Record) for record in out), out
    return [record for record in out if isinstance(record, Record)]


def check_good(found: list[Record]) -> None:
    assert [r.id for r in found] == ["a", "7", "c"]
    assert [r.kind for r in found] == ["text", "token_ids", "messages"]
    assert found[0].payload == {"text": "hello"}
    assert found[1].payload == {"token_ids": [1, 2, 3]}
    assert found[2].payload == {"messages": GOOD[2]["messages"], "tools": GOOD[2]["tools"]}


# ---------------------------------------------------------------- formats
@pytest.mark.parametrize(
    "text", [LINES, LINES.rstrip("\n"), "\n \n" + LINES, LINES.replace("\n", "\r\n"), "\ufeff" + LINES]
)
def test_json_lines(text: str, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(text.encode())
    check_good(records(path))


@pytest.mark.parametrize("block", [1, 2, 7, 64])
def test_lines_across_blocks(block: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpus, "_BLOCK", block)
    path = tmp_path / "a.jsonl"
    path.write_text(LINES)
    check_good(records(path))
    assert [r.source for r in records(path)] == [f"{path}:{n}" for n in (1, 2, 3)]


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.json.gz", "A.JSONL.GZ"])
def test_gzip(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    half = len(LINES) // 2
    path.write_bytes(gzip.compress(LINES[:half].encode()) + gzip.compress(LINES[half:].encode()))
    check_good(records(path))


@pytest.mark.parametrize("as_text", [False, True])
def test_parquet(as_text: bool, tmp_path: Path) -> None:
    rows = [
        {"id": "a", "text": "hello", "messages": None, "tools": None, "token_ids": None, "extra": 1.5},
        {"id": "7", "text": None, "messages": None, "tools": None, "token_ids": [1, 2, 3], "extra": None},
        {"id": "c", "text": None, "messages": GOOD[2]["messages"], "tools": GOOD[2]["tools"], "token_ids": None},
    ]
    if as_text:
        for name in ("messages", "tools"):
            rows[2][name] = json.dumps(rows[2][name])
    path = tmp_path / "a.parquet"
    pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=2)
    check_good(records(path))
    assert [r.source for r in records(path)] == [f"{path}:{n}" for n in (1, 2, 3)]


def test_parquet_structs_lose_the_nulls_that_others_gave_them(tmp_path: Path) -> None:
    tools = [
        {"name": "f", "parameters": {"a": {"type": "string"}}},
        {"name": "g", "parameters": {"b": {"type": "null"}}},
    ]
    path = tmp_path / "a.parquet"
    pq.write_table(pa.Table.from_pylist([{"id": 1, "messages": GOOD[2]["messages"], "tools": tools}]), path)
    assert records(path)[0].payload["tools"] == tools


def test_content_hash(tmp_path: Path) -> None:
    def of(**value: Any) -> bytes:
        record = parse_record(value, "x:1")
        assert isinstance(record, Record)
        return record.content_hash()

    message = {"role": "user", "content": "hi"}
    assert len(of(id="a", text="x")) == 32
    assert of(id="a", text="x") == of(id="b", text="x") != of(id="a", text="y")
    assert of(id=1, messages=[message]) == of(id=1, messages=[dict(reversed(message.items()))], tools=[])
    assert len({of(id=1, messages=[message]), of(id=1, messages=[message], tools=[{}]), of(id=1, text="hi")}) == 3


# ---------------------------------------------------------------- which files
def test_file_folder_and_glob(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("b.jsonl", "a.parquet", "sub/c.jsonl.gz", "notes.txt", ".hidden.jsonl"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("")

    def names(uri: str) -> list[str]:
        return [str(Path(f).relative_to(tmp_path)) for f in list_corpus(uri)]

    assert names(str(tmp_path)) == names(f"file://{tmp_path}") == ["a.parquet", "b.jsonl", "sub/c.jsonl.gz"]
    assert names(str(tmp_path / "b.jsonl")) == ["b.jsonl"]
    assert names(str(tmp_path / "*.jsonl")) == ["b.jsonl"]
    assert names(str(tmp_path / "**" / "*.gz")) == ["sub/c.jsonl.gz"]
    monkeypatch.chdir(tmp_path)
    assert names("b.jsonl") == ["b.jsonl"]


def test_a_name_that_looks_like_a_pattern(tmp_path: Path) -> None:
    path = tmp_path / "part[1].jsonl"
    path.write_text(LINES)
    assert list_corpus(str(path)) == [str(path)]
    check_good(records(path))


def test_memory_file_system() -> None:
    """Anything fsspec opens is read the same way; s3:// is tested against a real server with the store."""
    import fsspec

    with fsspec.open("memory://corpus/a.jsonl", "wb") as file:
        file.write(LINES.encode())
    assert list_corpus("memory://corpus") == ["memory:///corpus/a.jsonl"]
    check_good([r for r in read_corpus("memory:///corpus/a.jsonl") if isinstance(r, Record)])


@pytest.mark.parametrize("what", ["missing.jsonl", "missing", "*.jsonl", "empty", "notes.txt", "nosuch://x/y.jsonl"])
def test_nothing_to_read(what: str, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "notes.txt").write_text("")
    uri = what if "://" in what else str(tmp_path / what)
    with pytest.raises(UserError) as error:
        list_corpus(uri)
    assert uri in str(error.value) and "\n" not in str(error.value)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="does not exist"):
        list(read_corpus(str(tmp_path / "gone.jsonl")))
    with pytest.raises(UserError, match="unknown kind"):
        list(read_corpus(str(tmp_path / "a.csv")))


class Refusing:
    def __init__(self, error: Exception) -> None:
        self.error = error

    def __call__(self, *_: Any, **__: Any) -> Any:
        raise self.error


@pytest.mark.parametrize(
    ("raised", "kind"),
    [
        (PermissionError("Forbidden"), UserError),
        (OSError("connection reset"), StorageError),
        (TimeoutError(), StorageError),
    ],
)
def test_storage_errors(raised: Exception, kind: type[Exception], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpus.fsspec, "open", Refusing(raised))
    monkeypatch.setattr(corpus, "url_to_fs", Refusing(raised))
    with pytest.raises(kind, match=r"s3://bucket/a\.jsonl"):
        list(read_corpus("s3://bucket/a.jsonl"))
    with pytest.raises(kind, match=r"s3://bucket/a\.jsonl"):
        list_corpus("s3://bucket/a.jsonl")


@pytest.mark.parametrize("damage", ["truncated", "not gzip", "flipped"])
def test_corrupt_gzip(damage: str, tmp_path: Path) -> None:
    data = bytearray(gzip.compress((LINES * 500).encode()))
    if damage == "truncated":
        del data[-20:]
    elif damage == "not gzip":
        data = bytearray(LINES.encode())
    else:
        data[len(data) // 2] ^= 0xFF
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(data)
    with pytest.raises(DataError) as error:
        list(read_corpus(str(path)))
    assert str(path) in str(error.value)


@pytest.mark.parametrize("data", [b"", b"PAR1", b"PAR1" + bytes(100) + b"PAR1", b"x" * 1000])
def test_corrupt_parquet(data: bytes, tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    path.write_bytes(data)
    with pytest.raises(DataError) as error:
        list(read_corpus(str(path)))
    assert str(path) in str(error.value)


def test_parquet_without_the_columns(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    for row in ({"text": "x"}, {"id": 1, "prompt": "x"}):
        pq.write_table(pa.Table.from_pylist([row]), path)
        with pytest.raises(UserError, match="column"):
            list(read_corpus(str(path)))


# ---------------------------------------------------------------- bad records
BAD = [
    (b'{"id": 1, "text": "x"', "not valid JSON at column 22"),
    (b"\xff\xfe{}", "UTF-8 at byte 1"),
    (b"[" * 100_000, "JSON"),
    (b'{"id": ' + b"9" * 5000 + b', "text": "x"}', "JSON"),
    (b"[1]", "not an object but a list"),
    (b'"x"', "a string"),
    (b'{"text": "x"}', "no id"),
    (b'{"id": "", "text": "x"}', "id is empty"),
    (b'{"id": true, "text": "x"}', "not a boolean"),
    (b'{"id": 1.5, "text": "x"}', "not a float"),
    (b'{"id": 1}', "no content"),
    (b'{"id": 1, "text": null}', "no content"),
    (b'{"id": 1, "text": ""}', "text is empty"),
    (b'{"id": 1, "text": 5}', "text must be a string, not an integer"),
    (b'{"id": 1, "text": "x", "token_ids": [1]}', "text and token_ids"),
    (b'{"id": 1, "text": "x", "tools": [{}]}', "tools, which need messages"),
    (b'{"id": 1, "text": "\\ud800"}', "surrogate"),
    (b'{"id": "\\udfff", "text": "x"}', "surrogate"),
    (b'{"id": 1, "token_ids": []}', "empty"),
    (b'{"id": 1, "token_ids": "1 2"}', "list"),
    (b'{"id": 1, "token_ids": [1, -1]}', r"token_ids\[1\] is out of range"),
    (b'{"id": 1, "token_ids": [1, 2147483648]}', "out of range"),
    (b'{"id": 1, "token_ids": [1.0]}', r"token_ids\[0\] must be an integer"),
    (b'{"id": 1, "token_ids": [true]}', "not a boolean"),
    (b'{"id": 1, "messages": []}', "messages are empty"),
    (b'{"id": 1, "messages": "hi"}', "not valid JSON"),
    (b'{"id": 1, "messages": {"role": "user"}}', "list"),
    (b'{"id": 1, "messages": ["hi"]}', r"messages\[0\] must be an object"),
    (b'{"id": 1, "messages": [{"content": "x"}]}', r"messages\[0\] has no role"),
    (b'{"id": 1, "messages": [{"role": "user"}]}', r"messages\[0\] has no content"),
    (b'{"id": 1, "messages": [{"role": "user", "content": 5}]}', "content must be"),
    (b'{"id": 1, "messages": [{"role": "user", "content": "x"}], "tools": 5}', "tools must be a list"),
]


@pytest.mark.parametrize(("line", "reason"), BAD, ids=[reason for _, reason in BAD])
def test_bad_lines(line: bytes, reason: str, tmp_path: Path) -> None:
    """A bad line says where and why, and those around it are read."""
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"id": "before", "text": "x"}\n' + line + b'\n{"id": "after", "text": "x"}\n')
    before, bad, after = read_corpus(str(path))
    assert isinstance(before, Record) and isinstance(after, Record)
    assert (before.id, after.id) == ("before", "after")
    assert isinstance(bad, BadRecord) and bad.source == f"{path}:2"
    assert re.search(reason, bad.reason), bad.reason


@pytest.mark.parametrize("compressed", [False, True])
def test_an_endless_line_is_skipped_without_being_held(
    compressed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(corpus, "MAX_LINE", 1 << 20)
    path = tmp_path / ("a.jsonl.gz" if compressed else "a.jsonl")
    with gzip.open(path, "wb", compresslevel=1) if compressed else open(path, "wb") as file:
        for _ in range(64):
            file.write(b" " * (1 << 20))
        file.write(b'\n{"id": 1, "text": "x"}')
    tracemalloc.start()
    bad, good = read_corpus(str(path))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert isinstance(bad, BadRecord) and "longer than" in bad.reason
    assert isinstance(good, Record) and good.source == f"{path}:2"
    assert peak < 16 << 20


def test_memory_does_not_grow_with_the_file(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    with open(path, "w") as file:
        for number in range(20_000):
            file.write(json.dumps({"id": number, "text": "x" * 1000}) + "\n")
    tracemalloc.start()
    count = sum(1 for _ in read_corpus(str(path)))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert count == 20_000 and peak < 8 << 20


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


FIELDS = dict.fromkeys(("id", "text", "messages", "tools", "token_ids"), JSON)


@given(st.fixed_dictionaries({}, optional=FIELDS) | JSON)
def test_any_value_gives_a_record_or_a_reason(value: Any) -> None:
    out = parse_record(value, "f:1")
    if isinstance(out, Record):
        assert out.id and len(out.content_hash()) == 32
    else:
        assert out.reason and "\n" not in out.reason


# ---------------------------------------------------------------- a real S3 server
@pytest.mark.slow
def test_s3(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Credentials and endpoint come from the environment alone."""
    import s3fs

    with s3_server(tmp_path) as environment:
        for name in [name for name in os.environ if name.startswith("AWS_")]:
            monkeypatch.delenv(name)
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        s3fs.S3FileSystem.clear_instance_cache()
        fs = s3fs.S3FileSystem()
        fs.pipe(f"{BUCKET}/c/a.jsonl", LINES.encode())
        fs.pipe(f"{BUCKET}/c/b.jsonl.gz", gzip.compress(LINES.encode()))
        pq.write_table(pa.Table.from_pylist([{"id": "p", "text": "x"}]), tmp_path / "p.parquet")
        fs.put(str(tmp_path / "p.parquet"), f"{BUCKET}/c/d/p.parquet")

        base = f"s3://{BUCKET}/c"
        files = [f"{base}/a.jsonl", f"{base}/b.jsonl.gz", f"{base}/d/p.parquet"]
        assert list_corpus(base) == list_corpus(f"{base}/") == files
        assert list_corpus(f"{base}/*.jsonl") == files[:1] == list_corpus(files[0])
        for file in files[:2]:
            check_good([r for r in read_corpus(file) if isinstance(r, Record)])
        assert [r.id for r in read_corpus(files[2]) if isinstance(r, Record)] == ["p"]
        for uri in (f"s3://{BUCKET}/none", f"s3://{BUCKET}/none.jsonl", "s3://no-such-bucket/a.jsonl"):
            with pytest.raises(UserError, match="does not exist"):
                list_corpus(uri)
        with pytest.raises(UserError, match="does not exist"):
            list(read_corpus(f"{base}/gone.jsonl"))

        for name, value in (("AWS_SECRET_ACCESS_KEY", "wrong"), ("AWS_ACCESS_KEY_ID", None)):
            if value is None:
                monkeypatch.delenv(name)
                monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
            else:
                monkeypatch.setenv(name, value)
            s3fs.S3FileSystem.clear_instance_cache()
            for call in (list_corpus, lambda uri: list(read_corpus(uri))):
                with pytest.raises(UserError, match="credentials") as error:
                    call(files[0])
                assert "wrong" not in str(error.value) and "\n" not in str(error.value)
    s3fs.S3FileSystem.clear_instance_cache()
