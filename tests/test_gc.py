"""Collecting what nothing needs, compacting the index, forgetting prompts and tenants."""

from __future__ import annotations

import itertools
import os
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from codec.errors import DataError, UserError
from jobs.gc import main
from pipeline import collect as collect_module
from pipeline import index, lease
from pipeline.audit import audit
from pipeline.collect import Collection, collect, find_garbage
from pipeline.compact import read_parts, superfluous, to_merge
from pipeline.current import point_first
from pipeline.deep import decode_store, here
from pipeline.lease import at_work, running_jobs
from pipeline.options import Options
from pipeline.paths import predictor_path, profile_path
from pipeline.prompts import load_part
from pipeline.purge import Whose, plan_purge, purge
from pipeline.removal import drop_rows
from pipeline.store import Store
from pipeline.tenancy import tenant_name
from tests.made_store import RECORDS, SHARED, Made, files, make, make_old, options_of, overwrite
from tests.test_index import OTHER, PROFILE, TARGET, row

DAY = 24 * 3600.0


def quiet(text: str) -> None:
    """Nobody is told."""


def found(collection: Collection) -> list[tuple[str, str]]:
    return [(item.kind, item.entry.path) for item in collection.items]


def whole(made: Made, chunks: int) -> None:
    """The store can be decoded, all of it, and nothing is wrong with it."""
    seen = audit(made.store, grace=DAY, selects=lambda key: True)
    decode_store(seen, here(made.store, "cpu"))
    assert seen.faults == [] and seen.decoded == seen.rows == seen.blobs == chunks


def orphan(made: Made, key: bytes) -> None:
    drop_rows(made.store, made.job.target, made.job.profile, lambda t: [k == key for k in t["key"].to_pylist()])


# ---------------------------------------------------------------- collecting
def test_nothing_of_a_complete_store_is_garbage(made: Made) -> None:
    assert find_garbage(made.store, 0.0).items == []


def test_garbage_is_listed_and_goes_only_when_asked_for(
    made: Made, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store, path = made.store, made.path("c", 2)
    orphan(made, made.keys("c")[2])
    (tmp_path / "store" / "blobs" / f".{'0' * 32}.tmp").write_bytes(b"half")
    for name in ("quarantine/x/y", profile_path(bytes(32)), predictor_path(bytes(32)), "running/dead-3"):
        store.put_new(name, b"content")
    overwrite(store, "profiles/by-config/" + "ab" * 32, bytes(32).hex().encode())
    make_old(store)
    before = files(store)
    want = {
        ("leftover", f"blobs/.{'0' * 32}.tmp"), ("quarantine", "quarantine/x/y"), ("lease", "running/dead-3"), ("blob", path),
        ("profile", "profiles/by-config/" + "ab" * 32), ("profile", profile_path(bytes(32))),
        ("predictor", predictor_path(bytes(32))),
    }  # fmt: skip
    arguments = ["--store", store.uri]
    assert set(found(find_garbage(store, DAY))) == want
    assert main(arguments) == 0 and files(store) == before and list(store.leftovers())
    text = capsys.readouterr().out
    assert all(f"{kind}: {name} (" in text for kind, name in want) and "pass --yes" in text
    assert main([*arguments, "--grace", "90d", "--yes"]) == 0 and files(store) == before
    assert main([*arguments, "--yes"]) == 0
    assert before.keys() - files(store).keys() == {name for kind, name in want if kind != "leftover"}
    assert list(store.leftovers()) == [] and find_garbage(store, 0.0).items == []
    whole(made, 6)


def test_pointers_go_before_what_they_name(made: Made) -> None:
    made.store.put_new(profile_path(bytes(32)), b"x")
    made.store.put_new("profiles/by-config/" + "ab" * 32, bytes(32).hex().encode())
    kinds = [path for kind, path in found(find_garbage(made.store, 0.0)) if kind == "profile"]
    assert kinds == ["profiles/by-config/" + "ab" * 32, profile_path(bytes(32))]


def test_what_a_young_pointer_or_the_current_generation_names_is_kept(made: Made) -> None:
    for number in (7, 8):
        made.store.put_new(profile_path(bytes([number]) * 32), made.store.get(profile_path(made.job.profile)))
    made.store.put_new("profiles/by-config/" + "ab" * 32, (b"\7" * 32).hex().encode())
    point_first(made.store, "a model", "bf16", (TARGET, b"\10" * 32))
    for number in (7, 8):
        then = time.time() - 2 * DAY
        os.utime(Path(made.store.uri.removeprefix("file://")) / profile_path(bytes([number]) * 32), (then, then))
    assert found(find_garbage(made.store, DAY)) == []
    make_old(made.store)
    assert {path for _, path in found(find_garbage(made.store, DAY))} == {
        "profiles/by-config/" + "ab" * 32, profile_path(b"\7" * 32)
    }  # fmt: skip


def test_predictors_are_kept_when_a_profile_cannot_be_read(made: Made) -> None:
    made.store.put_new(profile_path(bytes(32)), b"young and damaged")
    point_first(made.store, "x", "bf16", (TARGET, bytes(32)))
    made.store.put_new(predictor_path(bytes(32)), b"x")
    make_old(made.store)
    collection = find_garbage(made.store, DAY)
    assert found(collection) == [] and "predictors are left alone" in collection.notes[0]


def test_what_chunks_follow_from_is_kept(made: Made) -> None:
    orphan(made, made.keys("a")[1])
    assert find_garbage(made.store, 0.0).items == []


def test_nothing_is_said_of_blobs_when_the_index_cannot_be_read(made: Made) -> None:
    path = next(iter(made.store.list("index")))
    overwrite(made.store, path, b"no parquet")
    with pytest.raises(DataError, match=path):
        collect(made.store, DAY, quiet)
    assert sum(p.endswith(".kv") for p in made.store.list()) == 7
    assert "locks/gc" not in list(made.store.list())


def test_a_running_job_keeps_what_it_may_use(made: Made) -> None:
    """An old orphan is adopted by a job while a collection looks at the store."""
    orphan(made, made.keys("c")[2])
    make_old(made.store)
    with at_work(made.store):
        collection = collect(made.store, DAY, quiet)
        assert collection.items == [] and "1 job(s) run" in collection.notes[0]
    assert [kind for kind, _ in found(find_garbage(made.store, DAY))] == ["blob"]


def test_a_row_that_is_committed_during_a_collection_saves_its_blob(
    made: Made, options: Options, monkeypatch: pytest.MonkeyPatch
) -> None:
    orphan(made, made.keys("c")[2])
    make_old(made.store)
    find = collect_module.find_garbage

    def find_and_lose_time(store: Store, grace: float) -> Collection:
        collection = find(store, grace)
        assert [item.kind for item in collection.items] == ["blob"]
        assert make(options).computed() == 0
        return collection

    monkeypatch.setattr(collect_module, "find_garbage", find_and_lose_time)
    assert collect(made.store, DAY, quiet).deleted == 0
    whole(made, 7)


def test_leases_are_renewed_and_end(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    with at_work(made.store, renew=0.05):
        (first,) = made.store.list("running")
        deadline = time.monotonic() + 20
        while first in list(made.store.list("running")) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert running_jobs(made.store, DAY) == 1 and first not in list(made.store.list("running"))
        assert running_jobs(made.store, 0.0) == 0  # who says so knows that nothing runs
    assert list(made.store.list("running")) == []
    made.store.put_new("running/killed-0", b"{}")
    assert running_jobs(made.store, DAY) == 1 and lease.dead_leases(made.store, 0.0) == []
    make_old(made.store, hours=2)
    assert running_jobs(made.store, DAY) == 0 and lease.dead_leases(made.store, 0.0) == ["running/killed-0"]


# ---------------------------------------------------------------- compacting
@pytest.fixture
def many(tmp_path: Path) -> Store:
    store = Store.open(str(tmp_path / "many"))
    for number in range(40):
        index.write_part(store, [row(2 * number), row(2 * number + 1)])
    index.write_part(store, [row(500, profile=OTHER)])
    return store


def rows_of(store: Store) -> dict[bytes, dict[str, Any]]:
    return {r["key"]: r for r in index.read_rows(store, target=TARGET, profile=PROFILE).to_pylist()}


def test_compaction_keeps_every_row_and_takes_old_parts_away_later(many: Store) -> None:
    before = rows_of(many)
    first = collect(many, DAY, quiet, compact=True)
    assert first.merged == 40 and first.deleted == 0 and len(list(many.list("index"))) == 42
    assert rows_of(many) == before
    assert collect(many, DAY, quiet, compact=True).merged == 0  # again: nothing to do, nothing twice
    assert len(list(many.list("index"))) == 42
    make_old(many)
    assert collect(many, DAY, quiet, compact=True).deleted == 40
    (path,) = many.list(f"index/{TARGET.hex()}/{PROFILE.hex()}")
    table = index.read_part(many, path, target=TARGET, profile=PROFILE)
    assert len(table) == 80 and table["key"].to_pylist() == sorted(before) and rows_of(many) == before
    index.write_part(many, [row(3), row(4)])  # a task that runs again
    assert rows_of(many) == before and collect(many, 0.0, quiet, compact=True).merged == 0


def test_compaction_that_was_cut_off_goes_on(many: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    before, merged = rows_of(many), itertools.count()
    monkeypatch.setattr("pipeline.compact.MERGE_ROWS", 20)
    monkeypatch.setattr("pipeline.compact.SMALL_ROWS", 10)

    def fail_later(store: Store, *arguments: Any) -> str:
        if next(merged) == 2:
            raise OSError("killed")
        return str(merge(store, *arguments))

    merge = collect_module.merge
    monkeypatch.setattr(collect_module, "merge", fail_later)
    with pytest.raises(OSError, match="killed"):
        collect(many, 0.0, quiet, compact=True)
    assert rows_of(many) == before
    monkeypatch.setattr(collect_module, "merge", merge)
    collect(many, 0.0, quiet, compact=True)
    collect(many, 0.0, quiet, compact=True)
    assert rows_of(many) == before and len(list(many.list("index"))) <= 5


def test_a_reader_whose_part_is_merged_away_goes_on(many: Store) -> None:
    collect(many, 0.0, quiet, compact=True)
    before = rows_of(many)
    parts = index.iter_parts(many, target=TARGET, profile=PROFILE)
    seen = {key for key in next(parts)[1]["key"].to_pylist()}
    collect(many, 0.0, quiet)
    seen |= {key for _, table in parts for key in table["key"].to_pylist()}
    assert seen == set(before)


def test_only_older_parts_make_others_superfluous(many: Store) -> None:
    collect(many, DAY, quiet, compact=True)
    parts = read_parts(many, TARGET, PROFILE)
    assert superfluous(parts, time.time() - DAY) == [] and len(superfluous(parts, time.time() + 1)) == 40
    assert to_merge(parts) == []


def test_other_readers_read_the_index_without_this_code(many: Store, tmp_path: Path) -> None:
    import duckdb
    import pandas

    collect(many, 0.0, quiet, compact=True)
    pattern = f"{tmp_path}/many/index/*/*/*.parquet"
    query = f"SELECT model, count(*), sum(raw_bytes) / sum(stored_bytes) FROM (SELECT DISTINCT ON (key, chain_digest) * FROM '{pattern}') GROUP BY model"  # noqa: E501
    assert duckdb.sql(query).fetchall() == [("tiny", 81, 2.048)]
    types = dict(duckdb.sql(f"SELECT column_name, column_type FROM (DESCRIBE SELECT * FROM '{pattern}')").fetchall())
    assert types.keys() == set(index.INDEX_SCHEMA.names)
    assert {types[n] for n in ("key", "root_key", "layer_checksums")} == {"BLOB"} and types["tokens"] == "INTEGER"
    frame = pandas.concat(map(pandas.read_parquet, Path(tmp_path).glob("many/index/*/*/*.parquet")))
    assert frame.drop_duplicates(["key", "chain_digest"]).groupby("model")["tokens"].sum()["tiny"] == 81 * 256


# ---------------------------------------------------------------- forgetting
def test_a_prompt_is_forgotten_and_what_others_share_is_kept(
    made: Made, options: Options, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--store", made.store.uri, "--purge", "--prompt", "b"]
    before = files(made.store)
    assert main(arguments) == 0 and files(made.store) == before
    assert f"would remove: {made.path('b', 2)}" in capsys.readouterr().out
    assert main([*arguments, "--yes"]) == 0
    text = capsys.readouterr().out
    assert (
        f"removed: {made.path('b', 2)}" in text
        and "removed 1 blobs of" in text
        and "1 index rows and 1 prompts" in text
    )
    assert "kept 2 chunks that other prompts are made of too" in text and "listed again: none of 1 chunks" in text
    assert not made.store.exists(made.path("b", 2)) and made.store.exists(made.path("b", 1))
    tables = [load_part(made.store, path) for path in made.store.list("prompts")]
    assert sorted(pa.concat_tables(tables)["id"].to_pylist()) == ["a", "c"]
    whole(made, 6)
    assert main([*arguments, "--yes"]) == 2 and "holds no such prompt" in capsys.readouterr().err
    assert make(options).computed() == 20
    whole(made, 7)


def test_a_tenant_is_forgotten_and_the_same_prompt_of_others_is_kept(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    records = [*RECORDS, RECORDS[0] | {"salt": "hush"}, {"id": "z", "token_ids": SHARED, "salt": "hush"}]
    made = make(options_of(tiny_model, tmp_path, records))
    monkeypatch.setenv("KV_TEST_SALT", "hush")
    arguments = ["--store", made.store.uri, "--purge", "--salt-env", "KV_TEST_SALT", "--yes"]
    name = tenant_name(b"hush")
    assert plan_purge(made.store, Whose("a", name)).blobs == 1  # z has the first two chunks
    assert plan_purge(made.store, Whose("a", None)).blobs == 2
    assert main(arguments) == 0
    text = capsys.readouterr().out
    assert "removed 3 blobs" in text and "3 index rows and 2 prompts" in text and "hush" not in text
    everything = b"".join(path.encode() + data for path, data in files(made.store).items())
    assert name.encode() not in everything
    whole(made, 7)


def test_a_purge_that_was_cut_off_is_finished_by_another(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("pipeline.purge.drop_rows", lambda *_: (_ for _ in ()).throw(OSError("killed")))
        with pytest.raises(OSError, match="killed"):
            purge(made.store, Whose("a", None), quiet)
    assert not made.store.exists(made.path("a", 2))
    done = purge(made.store, Whose("a", None), quiet)
    assert (done.rows, done.prompts, done.shared) == (1, 1, 2)
    whole(made, 6)


def test_copies_in_quarantine_are_forgotten_too(made: Made) -> None:
    made.store.put_new(f"quarantine/x/{made.path('c', 0)}", b"damaged")
    made.store.put_new(f"quarantine/x/{made.path('a', 0)}", b"damaged")
    purge(made.store, Whose("c", None), quiet)
    assert list(made.store.list("quarantine")) == [f"quarantine/x/{made.path('a', 0)}"]


def test_a_purge_waits_for_jobs(made: Made) -> None:
    with at_work(made.store), pytest.raises(UserError, match=r"1 job\(s\) run on .* purge when they have ended"):
        purge(made.store, Whose("a", None), quiet)


def test_a_purge_that_leaves_something_says_so(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeline.purge.drop_rows", lambda *_: 0)
    with pytest.raises(DataError, match=r"chunks are still in .*; run the purge again"):
        purge(made.store, Whose("c", None), quiet)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--purge"], "needs --prompt"),
        (["--prompt", "a"], "--purge was not given"),
        (["--purge", "--prompt", "a", "--compact"], "does not go with"),
        (["--purge", "--prompt", "nobody"], "holds no such prompt"),
        (["--purge", "--salt-env", "KV_TEST_NO_SUCH"], "KV_TEST_NO_SUCH"),
    ],
)
def test_what_cannot_be_asked_for(
    made: Made, more: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--store", made.store.uri, *more]) == 2
    assert message in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["--store", made.store.uri, "--grace", "soon"])
