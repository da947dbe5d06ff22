"""What a run stored and did not verify is verified by the next one, whatever came between."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from codec.errors import DataError, UserError
from jobs.compress_corpus import main
from jobs.verify import main as verify
from pipeline.actors import EncodeActor, VerifyActor
from pipeline.collect import collect, find_garbage
from pipeline.engines import given as given_module
from pipeline.engines.given import Given, store_caches
from pipeline.engines.spool import Spool
from pipeline.model_source import resolve_model
from pipeline.options import Options
from pipeline.paths import UNVERIFIED, unverified_path
from pipeline.purge import Whose, purge
from pipeline.removal import drop_rows
from pipeline.store import Store
from pipeline.target import load_target
from pipeline.unverified import clear, mark, read_marks, unmark
from pipeline.work import Device, GroupResult
from tests.made_store import CHUNK, Made, make, make_old, options_of, overwrite, without_ray
from tests.stored import tokens_of
from tests.test_given import engine_cache

TARGET, PROFILE = b"t" * 32, b"p" * 32


def quiet(text: str) -> None:
    """Nobody is told."""


def killed(self: VerifyActor, batch: dict[str, Any]) -> Any:
    """A verify stage that does not get to it: what the encode stage said goes on as it is."""
    return [{"result": batch["result"]}]


@pytest.fixture
def options(tiny_model: Path, tmp_path: Path) -> Options:
    return options_of(tiny_model, tmp_path)


@pytest.fixture
def half(options: Options, monkeypatch: pytest.MonkeyPatch) -> Made:
    """A run that stored and committed everything and verified nothing."""
    with monkeypatch.context() as patch:
        patch.setattr(VerifyActor, "__call__", killed)
        return make(options)


def marks_of(made: Made) -> dict[str, frozenset[bytes]]:
    return read_marks(made.store, made.job.target, made.job.profile)


def run(options: Options, *more: str) -> int:
    """The main job, in this process."""
    where = ["--model", options.model, "--corpus", options.corpus, "--store", options.store]
    return main([*where, "--predictor", "int8", "--loop", "open", "--chunk-tokens", str(CHUNK), *more])


def keys_of(made: Made) -> set[bytes]:
    return set(made.plan.chunks)


def test_a_verified_run_leaves_nothing_behind(options: Options) -> None:
    made = make(options)
    assert sum(len(result.verified) for result in made.results) == 7 and list(made.store.list(UNVERIFIED)) == []


def test_the_next_run_verifies_what_a_killed_one_stored(
    half: Made, options: Options, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert frozenset().union(*marks_of(half).values()) == keys_of(half)
    without_ray(monkeypatch)
    seen: list[bytes] = []
    called = VerifyActor._result

    def counted(self: VerifyActor, result: GroupResult) -> GroupResult:
        found = called(self, result)
        seen.extend(found.verified)
        return found

    monkeypatch.setattr(VerifyActor, "_result", counted)
    assert run(options, "--verify", "sample:0.000001") == 0  # all of them, whatever this run's own sample is
    assert sorted(seen) == sorted(keys_of(half)) and marks_of(half) == {}
    assert run(options) == 0 and len(seen) == 7


def test_what_was_stored_without_a_row_is_verified_too(options: Options, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that was killed within a group: blobs are there, rows are not, and the next run's own sample is another."""

    def dies(self: EncodeActor, group: object) -> str:
        raise DataError("killed")

    with monkeypatch.context() as patch:
        patch.setattr(EncodeActor, "_commit", dies)
        with pytest.raises(DataError, match="killed"):
            make(options)
    store = Store(options.store)
    assert len(list(store.list("blobs"))) > 0 and len(list(store.list(UNVERIFIED))) == 1
    without_ray(monkeypatch)
    assert run(options, "--verify", "sample:0.000001") == 0
    assert list(store.list(UNVERIFIED)) == []


def test_a_mark_loses_what_was_verified_and_keeps_the_rest(tmp_path: Path) -> None:
    store, (a, b, c) = Store.open(str(tmp_path / "store")), (bytes([n]) * 32 for n in range(3))
    mark(store, TARGET, PROFILE, [a, b])
    clear(store, read_marks(store, TARGET, PROFILE), {c})
    clear(store, read_marks(store, TARGET, PROFILE), {a, c})
    assert list(read_marks(store, TARGET, PROFILE).values()) == [{b}]
    clear(store, read_marks(store, TARGET, PROFILE), {b})
    assert read_marks(store, TARGET, PROFILE) == {}


def test_a_damaged_mark_stops_a_purge_before_anything_is_gone(half: Made) -> None:
    half.store.put_new(unverified_path(half.job.target, half.job.profile, b"d" * 32), b"no keys")
    before = set(half.store.list())
    with pytest.raises(DataError, match="is damaged"):
        purge(half.store, Whose("b", None), quiet)
    assert set(half.store.list()) == before


def test_what_did_not_come_back_is_not_forgotten(
    half: Made, options: Options, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = half.path("c", 1)
    data = bytearray(half.store.get(path))
    data[-1] ^= 1
    overwrite(half.store, path, bytes(data))
    without_ray(monkeypatch)
    assert run(options) == 1 and run(options) == 1
    left = frozenset().union(*marks_of(half).values())
    assert left == set(half.keys("c")[1:])  # what is wrong, and what was not decoded for it
    assert verify(["--store", options.store, "--deep", "--repair"]) == 1
    assert run(options) == 0 and marks_of(half) == {}
    assert verify(["--store", options.store, "--deep"]) == 0
    capsys.readouterr()


def test_only_what_is_to_be_verified_is_marked(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(VerifyActor, "__call__", killed)
    for number, fraction in enumerate(("none", "sample:0.4")):
        folder = tmp_path / str(number)
        folder.mkdir()
        made = make(options_of(tiny_model, folder, verify=fraction))
        marked: frozenset[bytes] = frozenset().union(*marks_of(made).values())
        assert marked == {key for key in keys_of(made) if made.job.verify.selects(key)}
        assert len(marked) < 7 and bool(marked) == (fraction != "none")


def test_a_mark_that_cannot_be_deleted_does_not_fail_the_run(options: Options, monkeypatch: pytest.MonkeyPatch) -> None:
    delete = Store.delete

    def forbidden(self: Store, path: str) -> None:
        if path.startswith(UNVERIFIED):
            raise UserError("the credentials were refused")  # what the store makes of S3's 403
        delete(self, path)

    monkeypatch.setattr(Store, "delete", forbidden)
    made = make(options)
    assert len(marks_of(made)) == len(made.plan.groups)
    clear(made.store, marks_of(made), keys_of(made))
    monkeypatch.setattr(Store, "delete", delete)
    clear(made.store, marks_of(made), keys_of(made))
    assert marks_of(made) == {}


def test_marks_of_chunks_that_are_gone_are_collected(half: Made) -> None:
    make_old(half.store)
    assert find_garbage(half.store, 0.0).items == []
    gone = set(half.keys("c"))
    drop_rows(half.store, half.job.target, half.job.profile, lambda t: [key in gone for key in t["key"].to_pylist()])
    mark(half.store, TARGET, PROFILE, [b"k" * 32])
    (other,) = read_marks(half.store, TARGET, PROFILE)
    half.store.put_new(damaged := unverified_path(TARGET, PROFILE, b"d" * 32), b"no keys")
    make_old(half.store)
    (of_c,) = (path for path, keys in marks_of(half).items() if keys == gone)
    found = {item.entry.path for item in find_garbage(half.store, 0.0).items if item.kind == "unverified"}
    assert found == {of_c, other}, "of a damaged one nobody knows what it was for"
    assert not any(item.kind == "unverified" for item in find_garbage(half.store, 72 * 3600.0).items)
    collect(half.store, 3600.0, quiet)
    assert set(half.store.list(UNVERIFIED)) == {*marks_of(half), damaged} and len(marks_of(half)) == 1


def test_a_forgotten_prompt_is_in_no_mark(half: Made) -> None:
    own = set(half.keys("b")) - set(half.keys("a"))
    purge(half.store, Whose("b", None), quiet)
    left = frozenset().union(*marks_of(half).values())
    assert own and left == keys_of(half) - own


@pytest.mark.parametrize("data", [b"", b"x" * 31, b"k" * 32])
def test_a_damaged_mark_is_a_sentence(tmp_path: Path, data: bytes) -> None:
    store = Store.open(str(tmp_path / "store"))
    store.put_new(path := unverified_path(TARGET, PROFILE, b"n" * 32), data)
    with pytest.raises(DataError, match=f"{path} is damaged.*verify.py --deep, then delete it"):
        read_marks(store, TARGET, PROFILE)


def test_marks_are_named_for_what_they_hold_and_charged_once(tmp_path: Path) -> None:
    store, charged = Store.open(str(tmp_path / "store")), list[int]()
    keys = [bytes([n]) * 32 for n in range(3)]
    for some in (keys, keys[::-1], []):
        mark(store, TARGET, PROFILE, some, lambda s, p, size: charged.append(size))
    assert charged == [96] and list(read_marks(store, TARGET, PROFILE).values()) == [frozenset(keys)]
    unmark(store, TARGET, PROFILE, keys[:2])  # marked with another
    assert len(read_marks(store, TARGET, PROFILE)) == 1
    unmark(store, TARGET, PROFILE, keys)
    assert read_marks(store, TARGET, PROFILE) == {}


def test_an_engines_caches_that_were_not_verified_are_when_they_are_given_again(
    tiny_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store, settings = Store.open(str(tmp_path / "store")), Given(resolve_model(tiny_model), "vllm", "static", CHUNK)
    (tmp_path / "spool").mkdir()
    target = load_target(resolve_model(tiny_model), "bf16")
    files = [Spool(tmp_path / "spool").put(engine_cache(target, tokens_of(5, 70)))]
    device = Device("cpu", False, 1)
    with monkeypatch.context() as patch:
        patch.setattr(VerifyActor, "__call__", killed)
        assert store_caches(store, files, settings, device).chunks == 3
    assert len(list(store.list(UNVERIFIED))) == 1
    verified: list[list[bytes]] = []
    called = given_module._verified

    def told(*given: Any) -> GroupResult:
        verified.append((found := called(*given)).verified)
        return found

    monkeypatch.setattr(given_module, "_verified", told)
    assert store_caches(store, files, settings, device).chunks == 0
    assert [len(keys) for keys in verified] == [3] and list(store.list(UNVERIFIED)) == []
    assert store_caches(store, files, settings, device).chunks == 0 and len(verified) == 1


def test_a_cache_that_does_not_come_back_keeps_no_other_from_being_stored(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, settings = Store.open(str(tmp_path / "store")), Given(resolve_model(tiny_model), "vllm", "static", CHUNK)
    target, device = load_target(resolve_model(tiny_model), "bf16"), Device("cpu", False, 1)
    (tmp_path / "spool").mkdir()
    spool = Spool(tmp_path / "spool")
    files = [spool.put(engine_cache(target, tokens_of(seed, 70))) for seed in (5, 6)]
    with monkeypatch.context() as patch:
        patch.setattr(VerifyActor, "__call__", killed)
        store_caches(store, files[:1], settings, device)
    path = next(store.list("blobs"))
    data = bytearray(store.get(path))
    data[-1] ^= 1
    overwrite(store, path, bytes(data))
    for _ in range(2):
        with pytest.raises(DataError, match="1 of 2 saved caches do not come back"):
            store_caches(store, files, settings, device)
        assert len(list(store.list("blobs"))) == 6


@pytest.mark.slow
def test_the_job_on_ray_verifies_what_was_left(
    half: Made, options: Options, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert run(options, "--verify", "none") == 0 and len(marks_of(half)) > 0
    assert "verifying" not in capsys.readouterr().err
    assert run(options, "--report", str(tmp_path / "report.json")) == 0
    assert f"verifying {len(keys_of(half))} chunks that were stored before" in " ".join(capsys.readouterr().err.split())
    assert marks_of(half) == {} and '"chunks_verified": 7' in (tmp_path / "report.json").read_text()
