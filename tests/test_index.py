"""The Parquet index on a local store, and the layout of paths."""

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pandas
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from codec.errors import DataError
from pipeline import index, paths
from pipeline.store import Store

TARGET, PROFILE, OTHER = bytes([1]) * 32, bytes([2]) * 32, bytes([3]) * 32


def row(number: int, **changes: Any) -> dict[str, Any]:
    values: dict[str, Any] = {
        "key": number.to_bytes(32, "big"),
        "parent_key": None if number == 0 else (number - 1).to_bytes(32, "big"),
        "chunk_index": number,
        "first_token": 256 * number,
        "tokens": 256,
        "model": "tiny",
        "target": TARGET,
        "predictor": OTHER,
        "profile": PROFILE,
        "cache_format": "bf16",
        "fp8_scale": None,
        "loop": "open",
        "chunk_tokens": 256,
        "prefill_tokens": 512,
        "raw_bytes": 4096,
        "stored_bytes": 2000,
        "header_bytes": 100,
        "bytes_k": 900,
        "bytes_v": 1000,
        "scalars_k": 1024,
        "scalars_v": 1024,
        "ideal_bits_k": 7100.5,
        "ideal_bits_v": None,
        "escapes": 0,
        "layer_checksums": number.to_bytes(64, "big"),
        "layer_bits": [3.5, 4.25],
        "layer_spread": None,
        "layer_miss": None,
        "parent_digest": bytes(16),
        "chain_digest": number.to_bytes(16, "big"),
        "tenant": "",
        "root_key": None,
        "created": datetime(2026, 11, 29, 12, 0, tzinfo=UTC),
        "host_arch": "x86_64",
        "torch_version": "2.13.0",
        "device": "cpu",
    }
    return {**values, **changes}


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store.open(str(tmp_path))


def test_rows_come_back(store: Store) -> None:
    rows = [row(number) for number in range(5)]
    path = index.write_part(store, rows)
    assert path.startswith(f"index/{TARGET.hex()}/{PROFILE.hex()}/") and path.endswith(".parquet")
    assert index.read_rows(store, target=TARGET, profile=PROFILE).to_pylist() == rows
    assert index.committed_keys(store, TARGET, PROFILE) == {entry["key"] for entry in rows}


def test_columns_are_selected_in_the_order_asked_for(store: Store) -> None:
    index.write_part(store, [row(0), row(1)])
    table = index.read_rows(store, target=TARGET, profile=PROFILE, columns=["tokens", "key"])
    assert table.column_names == ["tokens", "key"]
    with pytest.raises(DataError, match="no column 'nonsense'"):
        index.read_rows(store, target=TARGET, profile=PROFILE, columns=["key", "nonsense"])


def test_empty_index_has_the_schema(store: Store) -> None:
    assert index.read_rows(store, target=TARGET, profile=PROFILE).schema.equals(index.INDEX_SCHEMA)
    assert index.committed_keys(store, TARGET, PROFILE) == set()


def test_a_task_that_runs_twice_commits_once(store: Store) -> None:
    first = index.write_part(store, [row(0), row(1)])
    again = index.write_part(store, [row(1, device="cuda"), row(0, device="cuda")])
    assert first == again
    assert index.read_rows(store, target=TARGET, profile=PROFILE)["device"].to_pylist() == ["cpu", "cpu"]
    assert index.write_part(store, [row(0)]) != first


def test_many_parts_are_streamed(store: Store) -> None:
    for number in range(70):
        index.write_part(store, [row(number)])
    index.write_part(store, [row(500, profile=OTHER)])
    parts = index.iter_parts(store, target=TARGET, profile=PROFILE, columns=["key"])
    path, table = next(parts)
    assert table.num_rows == 1 and path.endswith(".parquet")
    parts.close()  # type: ignore[attr-defined]
    assert index.committed_keys(store, TARGET, PROFILE) == {number.to_bytes(32, "big") for number in range(70)}
    assert index.committed_keys(store, TARGET, OTHER) == {(500).to_bytes(32, "big")}


def test_other_readers_can_open_a_part(store: Store, tmp_path: Path) -> None:
    path = index.write_part(store, [row(0), row(1)])
    frame = pandas.read_parquet(tmp_path / path)
    assert frame["key"][1] == (1).to_bytes(32, "big")
    assert frame["raw_bytes"].sum() / frame["stored_bytes"].sum() == pytest.approx(2.048)
    assert str(frame["created"].dt.tz) == "UTC"
    assert b"pandas" not in (pq.read_schema(tmp_path / path).metadata or {})


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "without rows"),
        ([row(0), row(1, target=OTHER)], "one target and one profile, not of 2"),
        ([{key: value for key, value in row(0).items() if key != "tokens"}], "columns tokens"),
        ([row(0, extra=1)], "columns extra"),
        ([row(0, key=b"short")], "does not fit the schema"),
        ([row(0, tokens="many")], "does not fit the schema"),
        ([row(0, chunk_index=2**40)], "does not fit the schema"),
        ([row(0, key=None)], "nothing in its column key"),
        ([row(0, created=datetime(2026, 1, 1))], "no time zone"),
    ],
)
def test_rows_that_do_not_fit(store: Store, rows: list[dict[str, Any]], message: str) -> None:
    with pytest.raises(DataError, match=message):
        index.write_part(store, rows)
    assert list(store.list("index")) == []


def place(store: Store, data: bytes) -> str:
    path = paths.index_path(TARGET, PROFILE, OTHER)
    store.delete(path)
    store.put_new(path, data)
    return path


def test_unreadable_part_is_named(store: Store) -> None:
    good = store.get(index.write_part(store, [row(number) for number in range(50)]))
    for bad in (b"", b"PAR1", b"no parquet at all", good[:-1], good[: len(good) // 2], good[8:]):
        path = place(store, bad)
        with pytest.raises(DataError, match=f"the index part {store.uri}/{path} cannot be read"):
            index.committed_keys(store, TARGET, PROFILE)


def test_flipped_bits_are_noticed(store: Store) -> None:
    path = index.write_part(store, [row(number) for number in range(50)])
    good = store.get(path)
    pages = pq.ParquetFile(pa.BufferReader(good)).metadata.row_group(0).column(0)
    position = pages.data_page_offset + pages.total_compressed_size // 2
    store.delete(path)
    store.put_new(path, good[:position] + bytes([good[position] ^ 1]) + good[position + 1 :])
    with pytest.raises(DataError, match="cannot be read"):
        index.committed_keys(store, TARGET, PROFILE)


def test_part_of_another_target_is_refused(store: Store) -> None:
    foreign = store.get(index.write_part(store, [row(0, target=OTHER)]))
    place(store, foreign)
    with pytest.raises(DataError, match="belongs to another target or profile"):
        index.committed_keys(store, TARGET, PROFILE)


@pytest.mark.parametrize("labels", [{}, {"kv_index_format": "2"}])
def test_part_of_another_format_is_refused(store: Store, labels: dict[str, str]) -> None:
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table({"key": [b"1" * 32]}).replace_schema_metadata(labels), sink)
    place(store, sink.getvalue().to_pybytes())
    with pytest.raises(DataError, match=r"has format \d, and this version reads 1"):
        index.committed_keys(store, TARGET, PROFILE)


def test_part_without_a_column_or_with_another_type(store: Store) -> None:
    for table in (pa.table({"tokens": [1]}), pa.table({"key": ["text"]})):
        labels = {"kv_index_format": "1", "kv_target": TARGET.hex(), "kv_profile": PROFILE.hex()}
        sink = pa.BufferOutputStream()
        pq.write_table(table.replace_schema_metadata(labels), sink)
        place(store, sink.getvalue().to_pybytes())
        with pytest.raises(DataError, match="cannot be read"):
            index.committed_keys(store, TARGET, PROFILE)


def test_layout() -> None:
    key = bytes([0xAB]) * 32
    target, profile, name = TARGET.hex(), PROFILE.hex(), key.hex()
    assert paths.blob_path(TARGET, PROFILE, key) == f"blobs/{target}/{profile}/ab/{name}.kv"
    assert paths.profile_path(PROFILE) == f"profiles/{profile}"
    assert paths.profile_config_path(key) == f"profiles/by-config/{name}"
    assert paths.predictor_path(key) == f"predictors/{name}.safetensors"
    assert paths.prompts_path(TARGET, key) == f"prompts/{target}/{name}.parquet"
    assert paths.index_path(TARGET, PROFILE, key) == f"index/{target}/{profile}/{name}.parquet"
    assert paths.current_path("org/model v1.0", "bf16", 7) == "current/org%2Fmodel v1.0/bf16/00000007"
    assert paths.current_path("..", "bf16", 1) == "current/%2E./bf16/00000001"
    for made in (paths.blob_path(TARGET, PROFILE, key), paths.current_path("a\\b?c\n", "bf16", 1)):
        assert paths.validate_path(made) == made


def test_blob_path_is_parsed_back() -> None:
    key = bytes(range(32))
    path = paths.blob_path(TARGET, PROFILE, key)
    assert paths.parse_blob_path(path) == (TARGET, PROFILE, key)
    for bad in ("", path + "x", path.upper(), path.replace("/00/", "/01/"), path + "\n", "profiles/x"):
        with pytest.raises(DataError, match="is not the path of a blob"):
            paths.parse_blob_path(bad)


@pytest.mark.parametrize("digest", [b"", bytes(31), bytes(33), "a" * 64, None])
def test_digests_have_32_bytes(digest: Any) -> None:
    with pytest.raises(DataError, match="must be 32 bytes"):
        paths.blob_path(TARGET, PROFILE, digest)


@pytest.mark.parametrize("name", ["", "x" * 300, "\ud800"])
def test_model_names_that_cannot_be_a_path(name: str) -> None:
    with pytest.raises(DataError):
        paths.current_path(name, "bf16", 1)
