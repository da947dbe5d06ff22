"""Verifying a store and repairing it: every way it can be wrong is listed, and mended by a repair and a run of the job."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import codec
from codec.checksums import digest
from codec.errors import UserError
from jobs.verify import main
from pipeline import index
from pipeline.actors import EncodeActor
from pipeline.audit import CORRUPT, KINDS, MISMATCHED, MISSING, ORPHANED, Audit, audit
from pipeline.catalogue import Generation, read_generation
from pipeline.deep import decode_store, here
from pipeline.lease import at_work, exclusive
from pipeline.options import Options
from pipeline.paths import predictor_path, profile_path
from pipeline.removal import drop_chain, drop_rows
from pipeline.repair import repair
from pipeline.runs import list_runs, read_run
from tests.conftest import REPO_ROOT
from tests.made_store import RECORDS, Made, ShakenActor, files, make, options_of, overwrite

DAY = 24 * 3600.0


def look(
    made: Made, *, deep: bool = False, grace: float = DAY, share: Callable[[bytes], bool] = lambda key: True
) -> Audit:
    found = audit(made.store, grace=grace, selects=share)
    if deep:
        decode_store(found, here(made.store, "cpu"))
    return found


def faults(found: Audit) -> list[tuple[str, str]]:
    return [(fault.kind, fault.path) for fault in found.faults]


def flip(made: Made, path: str, at: int) -> None:
    data = bytearray(made.store.get(path))
    data[at] ^= 4
    overwrite(made.store, path, bytes(data))


def useful(made: Made) -> dict[str, bytes]:
    """What a store is for: everything but what was put aside, and the index, whose rows have times."""
    return {p: data for p, data in files(made.store).items() if not p.startswith(("quarantine/", "index/"))}


def mended(made: Made, options: Options, before: dict[str, bytes], encoder: type = ShakenActor.__mro__[1]) -> Made:
    """Repair, run the job again, and find the store as it was, decodable in all its chunks."""
    said: list[str] = []
    repair(look(made, deep=True), said.append)
    again = make(options, encoder)
    assert useful(again) == before, said
    found = look(again, deep=True)
    assert found.faults == [] and found.decoded == found.rows == found.blobs == 7
    return again


# ---------------------------------------------------------------- a store that is as it should be
def test_nothing_is_wrong_with_what_a_job_left(made: Made) -> None:
    found = look(made)
    assert found.faults == [] and (found.rows, found.blobs, found.checked, found.decoded) == (7, 7, 7, 0)
    found = look(made, deep=True)
    assert found.faults == [] and (found.decoded, found.undecoded) == (7, 0)


def test_a_look_without_deep_decodes_nothing(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise AssertionError("decoded")

    monkeypatch.setattr(codec, "decode", fail)
    monkeypatch.setattr(codec.Predictor, "from_bytes", fail)
    assert look(made).faults == []


def test_the_command_line_needs_the_store_alone(made: Made, tmp_path: Path) -> None:
    command = [sys.executable, str(REPO_ROOT / "jobs" / "verify.py"), "--store", made.store.uri]

    def run(*more: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([*command, *more], capture_output=True, text=True, cwd=tmp_path, timeout=300)

    clean = run("--deep")
    assert clean.returncode == 0 and "7, 7 read, 7 decoded" in clean.stdout, clean.stderr
    flip(made, made.path("a", 1), -40)
    bad = run()
    assert bad.returncode == 1 and f"corrupt: {made.path('a', 1)}: The checksum of the blob differs" in bad.stdout
    none = subprocess.run([*command[:3], str(tmp_path / "none")], capture_output=True, text=True)
    assert none.returncode == 2 and none.stderr.startswith("error: there is no store at")


# ---------------------------------------------------------------- blobs
@pytest.mark.parametrize("at", [0, 9, 20, 150, -40, -1])
def test_a_flipped_bit_is_found_and_mended(made: Made, options: Options, at: int) -> None:
    before = useful(made)
    path = made.path("a", 1)  # two chunks of a and one of b follow from it
    flip(made, path, at)
    assert faults(look(made)) == [(CORRUPT, path)]
    deep = look(made, deep=True)
    assert faults(deep) == [(CORRUPT, path)] and (deep.decoded, deep.undecoded) == (4, 2)
    again = mended(made, options, before)
    assert again.computed() == 32 and [p for p in again.store.list("quarantine") if p.endswith(path)]


@pytest.mark.parametrize(
    "damage", [lambda data: b"", lambda data: data[:100], lambda data: data[:-1], lambda data: data + b"x"]
)
def test_a_blob_that_was_cut_or_extended(made: Made, options: Options, damage: Callable[[bytes], bytes]) -> None:
    before, path = useful(made), made.path("c", 2)
    overwrite(made.store, path, damage(made.store.get(path)))
    assert faults(look(made)) == [(CORRUPT, path)]
    mended(made, options, before)


def test_a_missing_blob(made: Made, options: Options) -> None:
    before, path = useful(made), made.path("a", 0)
    made.store.delete(path)
    assert faults(look(made)) == [(MISSING, path)]
    assert faults(look(made, deep=True)) == [(MISSING, path)]
    mended(made, options, before)


def test_blobs_in_each_others_places(made: Made, options: Options) -> None:
    before, paths = useful(made), [made.path("c", 0), made.path("c", 1)]
    first, second = map(made.store.get, paths)
    overwrite(made.store, paths[0], second)
    overwrite(made.store, paths[1], first)
    assert sorted(faults(look(made))) == sorted((MISMATCHED, path) for path in paths)
    mended(made, options, before)


def test_bits_that_only_decoding_shows(made: Made, options: Options) -> None:
    """Bitstreams that were changed together with the checksum of the blob: intact, and not what the row says."""
    before, path = useful(made), made.path("b", 2)
    data = bytearray(made.store.get(path))
    data[-60] ^= 1
    overwrite(made.store, path, bytes(data[:-16]) + digest(bytes(data[:-16])))
    assert look(made).faults == []
    found = look(made, deep=True)
    assert faults(found) == [(CORRUPT, path)] and "checksum of the blob" not in found.faults[0].cause
    assert found.decoded == 6
    mended(made, options, before)


def test_a_blob_of_a_later_format_is_listed_and_left_alone(made: Made) -> None:
    path = made.path("c", 2)
    data = bytearray(made.store.get(path)[:-16])
    data[8] = 9
    later = bytes(data) + digest(bytes(data))
    overwrite(made.store, path, later)
    found = look(made)
    assert faults(found) == [(MISMATCHED, path)] and "version 9" in found.faults[0].cause
    assert repair(found, lambda text: None) == 0 and made.store.get(path) == later


# ---------------------------------------------------------------- orphans
def without_row(made: Made, key: bytes) -> None:
    drop_rows(made.store, made.job.target, made.job.profile, lambda t: [k == key for k in t["key"].to_pylist()])


def test_an_orphan_is_deleted_when_it_is_old(made: Made, options: Options) -> None:
    before, path = useful(made), made.path("a", 2)
    without_row(made, made.keys("a")[2])
    assert faults(look(made)) == [(ORPHANED, path)]
    again = mended(made, options, before)
    assert again.computed() == 30 and not list(again.store.list("quarantine"))


def test_a_young_orphan_and_one_of_a_running_job_are_left_alone(made: Made) -> None:
    path = made.path("a", 2)
    without_row(made, made.keys("a")[2])
    young = look(made, grace=100 * DAY)
    assert faults(young) == [(ORPHANED, path)] and "running job" in young.faults[0].cause
    assert repair(young, lambda text: None) == 0
    with at_work(made.store):
        assert repair(look(made), lambda text: None) == 0
    assert made.store.exists(path)
    assert repair(look(made), lambda text: None) == 1 and not made.store.exists(path)


def test_an_orphan_that_chunks_follow_from_is_adopted(made: Made, options: Options) -> None:
    before, path = useful(made), made.path("a", 1)
    without_row(made, made.keys("a")[1])
    found = look(made)
    assert faults(found) == [(ORPHANED, path)] and "follow from it" in found.faults[0].cause
    again = mended(made, options, before)
    assert again.computed() == 0


# ---------------------------------------------------------------- the index
def test_a_damaged_index_part_costs_no_blob(made: Made, options: Options) -> None:
    before = useful(made)
    path = next(iter(made.store.list("index")))
    column = pq.ParquetFile(pa.BufferReader(made.store.get(path))).metadata.row_group(0).column(0)
    flip(made, path, column.data_page_offset + column.total_compressed_size // 2)
    found = look(made)
    assert (CORRUPT, path) in faults(found) and {kind for kind, _ in faults(found)} <= {CORRUPT, ORPHANED, MISSING}
    assert mended(made, options, before).computed() == 0


def test_an_index_part_under_another_name(made: Made, options: Options) -> None:
    before, path = useful(made), next(iter(made.store.list("index")))
    other = f"{path.rpartition('/')[0]}/{'0' * 64}.parquet"
    made.store.put_new(other, made.store.get(path))
    made.store.delete(path)
    assert faults(look(made))[0] == (CORRUPT, other)
    assert mended(made, options, before).computed() == 0


def test_a_chunk_whose_parent_is_gone_with_its_row(made: Made, options: Options) -> None:
    before, path = useful(made), made.path("a", 1)
    without_row(made, made.keys("a")[1])
    made.store.delete(path)
    found = look(made)
    assert set(faults(found)) == {(MISSING, path)} and "follows from it" in found.faults[0].cause
    again = mended(made, options, before)
    assert again.computed() == 32 + 30 + 20


@pytest.mark.parametrize("encoder", [EncodeActor, ShakenActor])
def test_a_run_makes_a_chunk_again_whose_blob_and_row_are_gone(made: Made, options: Options, encoder: type) -> None:
    """Without a repair before it: what is stored after the chunk says which bits it had."""
    before, path = useful(made), made.path("a", 1)
    without_row(made, made.keys("a")[1])
    made.store.delete(path)
    again = make(options, encoder)
    if encoder is EncodeActor:
        assert again.computed() == 32 and useful(again) == before and again.notes == []
    else:  # chunk 0 stays; what followed from chunk 1 is made again with it
        assert again.computed() == 32 + 30 + 20 and "2 chunks that follow from the old ones" in again.notes[0]
    found = look(again, deep=True)
    assert found.faults == [] and found.decoded == found.rows == found.blobs == 7


def test_rows_that_disagree_are_settled_by_the_blob(made: Made, options: Options) -> None:
    before, key = useful(made), made.keys("c")[2]
    table = index.read_rows(made.store, target=made.job.target, profile=made.job.profile)
    (row,) = (r for r in table.to_pylist() if r["key"] == key)
    sums = bytes(len(row["layer_checksums"]))
    index.write_part(made.store, [row | {"layer_checksums": sums, "chain_digest": digest(row["parent_digest"] + sums)}])
    found = look(made)
    assert [kind for kind, _ in faults(found)] == [MISMATCHED] and "other bits than the blob holds" in found.faults[
        0
    ].cause
    assert mended(made, options, before).computed() == 0


def test_a_row_that_contradicts_itself_is_listed(made: Made) -> None:
    table = index.read_rows(made.store, target=made.job.target, profile=made.job.profile)
    (row,) = (r for r in table.to_pylist() if r["key"] == made.keys("c")[2])
    index.write_part(made.store, [row | {"chain_digest": bytes(16)}])
    assert any("contradicts itself" in fault.cause for fault in look(made).faults)


# ---------------------------------------------------------------- profile, predictor, prompts, pointers
@pytest.mark.parametrize("gone", [False, True])
@pytest.mark.parametrize("what", ["profile", "predictor", "prompts"])
def test_what_decoding_needs_besides(made: Made, options: Options, what: str, gone: bool) -> None:
    before = useful(made)
    path = {
        "profile": profile_path(made.job.profile),
        "predictor": predictor_path(made.job.predictor),
        "prompts": next(iter(made.store.list("prompts"))),
    }[what]
    if gone:
        made.store.delete(path)
    else:
        flip(made, path, 3000 if what != "prompts" else 40)
    found = look(made)
    if what == "prompts":
        assert len(found.faults) == 7 + (not gone) and found.count(MISSING) == 7
    else:
        assert faults(found) == [(MISSING if gone else CORRUPT, path)]
    assert mended(made, options, before).computed() == 0


def test_a_pointer_that_names_nothing(made: Made, options: Options) -> None:
    before = useful(made)
    (pointer,) = made.store.list("profiles/by-config")
    overwrite(made.store, pointer, b"nonsense")
    assert faults(look(made)) == [(CORRUPT, pointer)]
    mended(made, options, before)


# ---------------------------------------------------------------- repairs that give other bits
def test_what_follows_from_a_lost_chunk_with_other_bits_is_made_again(made: Made, options: Options) -> None:
    """DESIGN 8. Also what another corpus put on top of it."""
    more = replace(options, corpus=options_of(Path(options.model), Path(options.store).parent, [
        RECORDS[0], {"id": "d", "token_ids": RECORDS[0]["token_ids"][:64] + [7] * 40}]).corpus)  # fmt: skip
    make(more)
    flip(made, made.path("a", 0), -30)
    repair(look(made), lambda text: None)
    again = make(options, ShakenActor)
    assert len(again.notes) == 1 and "was lost and holds other bits now" in again.notes[0]
    found = look(again, deep=True)
    assert found.faults == [] and found.decoded == found.rows == 7  # those of d are gone
    assert make(more).computed() == 40
    found = look(again, deep=True)
    assert found.faults == [] and found.decoded == found.rows == 9


def test_dropping_a_chain_leaves_blobs_with_other_bits(made: Made) -> None:
    key = made.keys("a")[0]
    assert drop_chain(made.store, made.job.target, made.job.profile, key, bytes(16)).blobs == 0
    gen = Generation(made.job.target, made.job.profile)
    read_generation(made.store, gen)
    removed = drop_chain(made.store, made.job.target, made.job.profile, key, gen.rows[key][0].chain_digest)
    assert (removed.rows, removed.blobs) == (4, 4) and look(made).rows == 3


# ---------------------------------------------------------------- choosing, locks
def test_a_sample_looks_at_a_share(made: Made) -> None:
    path = made.path("b", 2)
    flip(made, path, -40)
    found = look(made, share=lambda key: key != made.keys("b")[2], deep=True)
    assert found.faults == [] and (found.checked, found.decoded) == (6, 6)


def test_a_model_or_a_target_is_chosen(made: Made, capsys: pytest.CaptureFixture[str]) -> None:
    model = index.read_rows(made.store, target=made.job.target, profile=made.job.profile)["model"][0].as_py()
    arguments = ["--store", made.store.uri]
    assert main([*arguments, "--model", model]) == 0
    (record,) = [read_run(made.store, path) for path in list_runs(made.store)]
    assert (record.job, record.outcome, record.fingerprint) == ("verify", "ok", made.job.target.hex())
    assert record.chunks_verified == 7 and record.options["model"] == model
    assert main([*arguments, "--target", made.job.target.hex()[:12]]) == 0
    assert main([*arguments, "--sample", "0.5"]) == 0
    assert main([*arguments, "--model", "another"]) == 2
    assert main([*arguments, "--target", "zz"]) == 2
    assert main([*arguments, "--sample", "2"]) == 2
    assert main([*arguments, "--sample", "nan"]) == 2
    assert main([*arguments, "--report", "found.json"]) == 2
    assert main([*arguments, "--rounds", "1"]) == 2
    assert main([*arguments, "--watch", "--report", "no/where/found.json"]) == 2
    assert "error: " in capsys.readouterr().err
    for flag, text in (("--device", "tpu"), ("--every", "9" * 20 + "d"), ("--grace", "-1")):
        with pytest.raises(SystemExit) as ended:
            main([*arguments, flag, text])
        assert ended.value.code == 2 and f"argument {flag}: " in capsys.readouterr().err
    assert set(KINDS) == {"missing", "corrupt", "orphaned", "mismatched"}


def test_one_repair_at_a_time(made: Made) -> None:
    flip(made, made.path("a", 0), -30)
    with exclusive(made.store), pytest.raises(UserError, match="another collection or repair is at work"):
        repair(look(made), lambda text: None)
    assert repair(look(made), lambda text: None) == 1
