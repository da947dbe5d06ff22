"""What every kind of store must do: subclassed once a kind, with a fixture `uri` that gives a place for a new store."""

import itertools
import multiprocessing
import multiprocessing.synchronize
import os
import pickle
import time
from collections import Counter

import pytest

from codec.errors import DataError, StorageError, UserError
from pipeline.store import FORMAT, ObjectMissing, Store

ODD_NAMES = (
    "with space/a b",
    "o/a.b",  # "." sorts before "/", though "a" sorts before "a.b"
    "o/a/c",
    "ü/é/日本",
    "percent%20/%2F%",
    "plus+and&=;,'\"",
    "hash#x",
    "star*[a-z]{1}",
    "c:drive",
    "~tilde",
    "x" * 255,
)
REFUSED_NAMES = (
    "",
    "/a",
    "a//b",
    "a/",
    "..",
    "a/../b",
    "./a",
    "a/.hidden",
    "a\\b",
    "a\nb",
    "a\0",
    "x?versionId=1",
    "x" * 256,
)


def race(store: Store, barrier: multiprocessing.synchronize.Barrier, path: str, number: int) -> tuple[bool, bytes]:
    barrier.wait()
    won = store.put_new(path, b"%d:" % number + os.urandom(64 * 1024))
    return won, store.get(path)


def _racer(
    store: Store, barrier: multiprocessing.synchronize.Barrier, rounds: int, number: int, results: object
) -> None:
    for turn in range(rounds):
        results.put((turn, number, *race(store, barrier, f"race/{turn}", number)))  # type: ignore[attr-defined]


class StoreConformance:
    @pytest.fixture
    def store(self, uri: str) -> Store:
        return Store.open(uri)

    def test_read_after_write(self, store: Store) -> None:
        assert store.put_new("a/b", b"content") is True
        assert store.get("a/b") == b"content"
        assert store.size("a/b") == 7
        assert store.exists("a/b")

    def test_second_write_changes_nothing(self, store: Store) -> None:
        assert store.put_new("a", b"first")
        assert store.put_new("a", b"second, longer") is False
        assert store.put_new("a", b"first") is False
        assert store.get("a") == b"first"

    def test_empty_object(self, store: Store) -> None:
        assert store.put_new("empty", b"")
        assert store.put_new("empty", b"x") is False
        assert (store.get("empty"), store.size("empty")) == (b"", 0)
        assert store.get("empty", start=0, end=10) == b""

    def test_missing_object_names_its_place(self, store: Store) -> None:
        for action in (store.get, store.size):
            with pytest.raises(ObjectMissing, match=f"{store.uri}/no/such"):
                action("no/such")
        assert not store.exists("no/such")

    def test_folder_is_no_object(self, store: Store) -> None:
        store.put_new("folder/a", b"1")
        assert not store.exists("folder")
        with pytest.raises(ObjectMissing):
            store.get("folder")

    @pytest.mark.parametrize(
        ("start", "end"), [(0, 4), (3, 7), (9, None), (0, 100), (10, 20), (50, 60), (5, 5), (7, 3)]
    )
    def test_range_is_a_slice(self, store: Store, start: int, end: int | None) -> None:
        store.put_new("a", b"0123456789")
        assert store.get("a", start=start, end=end) == b"0123456789"[start:end]

    def test_range_of_a_missing_object(self, store: Store) -> None:
        with pytest.raises(ObjectMissing):
            store.get("a", start=1, end=2)

    def test_negative_range_is_refused(self, store: Store) -> None:
        with pytest.raises(ValueError, match="count from the end"):
            store.get("a", start=-1)

    def test_list_is_sorted_recursive_and_bounded_by_the_folder(self, store: Store) -> None:
        for path in ("b/2", "b/1/x", "b.txt", "bb/1", "a"):
            store.put_new(path, b"")
        assert list(store.list("b")) == list(store.list("b/")) == ["b/1/x", "b/2"]
        assert list(store.list()) == ["a", "b.txt", "b/1/x", "b/2", "bb/1", "store.json"]
        assert list(store.list("none")) == []
        assert list(store.list("a")) == []

    def test_list_goes_on_beyond_a_page(self, store: Store) -> None:
        names = [f"many/{number % 3}/{number:03}" for number in range(25)]
        for name in names:
            store.put_new(name, b"")
        for store._page in (1, 4, 25, 1000):
            assert list(store.list("many")) == sorted(names)

    def test_entries_say_size_and_time(self, store: Store) -> None:
        before = time.time()
        for path, data in (("b/2", b"12"), ("b/1/x", b""), ("a", b"123")):
            store.put_new(path, data)
        after = time.time()
        found = list(store.entries())
        assert [(e.path, e.size) for e in found if e.path != "store.json"] == [("a", 3), ("b/1/x", 0), ("b/2", 2)]
        assert [e.path for e in store.entries("b")] == list(store.list("b"))
        assert list(store.entries("none")) == []
        for entry in found:
            assert before - 2 <= entry.modified <= after + 2  # servers may keep whole seconds

    def test_a_second_write_does_not_make_an_object_younger(self, store: Store) -> None:
        store.put_new("a", b"1")
        (first,) = (e for e in store.entries() if e.path == "a")
        time.sleep(1.1)
        assert store.put_new("a", b"2") is False
        (second,) = (e for e in store.entries() if e.path == "a")
        assert first == second

    def test_leftovers_are_found_and_removed(self, store: Store) -> None:
        """What a killed writer leaves: no object, listed apart, removed for good."""
        store.put_new("x/a", b"1")
        assert list(store.leftovers()) == []
        self.leave_behind(store, "x/b")
        (left,) = store.leftovers()
        assert left.path.startswith("x/") and abs(left.modified - time.time()) < 30
        assert list(store.list("x")) == ["x/a"] and not store.exists("x/b")
        store.discard(left)
        store.discard(left)
        assert list(store.leftovers()) == []
        assert store.get("x/a") == b"1"

    def leave_behind(self, store: Store, path: str) -> None:
        """Begin to write `path` and stop in the middle."""
        raise NotImplementedError

    def test_delete(self, store: Store) -> None:
        store.put_new("a/b", b"1")
        store.delete("a/b")
        store.delete("a/b")
        store.delete("never/was")
        assert not store.exists("a/b")
        assert list(store.list("a")) == []
        assert store.put_new("a/b", b"2") is True
        assert store.get("a/b") == b"2"

    def test_odd_names(self, store: Store) -> None:
        for name in ODD_NAMES:
            assert store.put_new(name, name.encode()), name
        for name in ODD_NAMES:
            assert store.get(name) == name.encode(), name
        assert list(store.list()) == sorted([*ODD_NAMES, "store.json"], key=os.fsencode)
        for name in ODD_NAMES:
            store.delete(name)
        assert list(store.list()) == ["store.json"]

    @pytest.mark.parametrize("name", REFUSED_NAMES)
    def test_dangerous_names_are_refused(self, store: Store, name: str) -> None:
        for action in (store.get, store.exists, store.size, store.delete, lambda path: store.put_new(path, b"")):
            with pytest.raises(DataError, match="cannot be a path"):
                action(name)

    def test_an_object_where_there_is_a_folder_is_written_or_refused(self, store: Store) -> None:
        """Amazon's S3 takes both, a disk and SeaweedFS do not; none may say that the object was there already."""
        store.put_new("a/b", b"1")
        try:
            assert store.put_new("a", b"2") is True
            assert store.get("a") == b"2"
        except StorageError:
            assert not store.exists("a")
        assert store.get("a/b") == b"1"

    def test_large_object(self, store: Store) -> None:
        data = os.urandom(2**20) * 65  # above the size from which an upload has several parts
        assert store.put_new("large", data) is True
        assert store.put_new("large", b"small") is False
        assert store.put_new("large", data[::-1]) is False
        assert store.size("large") == len(data)
        assert store.get("large") == data
        assert store.get("large", start=2**20 - 3, end=2**20 + 3) == data[2**20 - 3 : 2**20 + 3]

    def test_race_has_one_winner(self, store: Store) -> None:
        """Real processes, started together for each path; everyone reads the winner's bytes straight afterwards."""
        processes, rounds = 4, 8
        context = multiprocessing.get_context("fork")
        barrier, results = context.Barrier(processes), context.Queue()
        racers = [
            context.Process(target=_racer, args=(store, barrier, rounds, number, results))
            for number in range(processes)
        ]
        for racer in racers:
            racer.start()
        outcomes = sorted(results.get(timeout=120) for _ in range(processes * rounds))
        for racer in racers:
            racer.join(timeout=30)
            assert racer.exitcode == 0
        for turn, group in itertools.groupby(outcomes, key=lambda outcome: outcome[0]):
            entries = list(group)
            winners = [number for _, number, won, _ in entries if won]
            contents = {content for *_, content in entries}
            assert len(entries) == processes
            assert Counter(won for _, _, won, _ in entries)[True] == 1, f"round {turn}: winners {winners}"
            assert len(contents) == 1
            assert contents.pop().startswith(b"%d:" % winners[0])
        assert list(store.list("race")) == sorted(f"race/{turn}" for turn in range(rounds))

    def test_opens_again_and_again(self, uri: str) -> None:
        Store.open(uri).put_new("a", b"1")
        assert Store.open(uri, create=False).get("a") == b"1"
        assert Store.open(uri + "/").get("a") == b"1"

    def test_no_store_and_none_wanted(self, uri: str) -> None:
        with pytest.raises(UserError, match="there is no store at"):
            Store.open(uri, create=False)
        assert list(Store(uri).list()) == []

    def test_newer_format_is_refused(self, uri: str) -> None:
        Store(uri).put_new("store.json", b'{"format": %d}' % (FORMAT + 1))
        with pytest.raises(UserError, match=f"has format {FORMAT + 1}, this version reads up to {FORMAT}"):
            Store.open(uri)

    @pytest.mark.parametrize(
        "marker", [b"", b"{", b"[]", b'{"format": "1"}', b'{"format": 0}', b'{"format": true}', b"\xff"]
    )
    def test_damaged_marker(self, uri: str, marker: bytes) -> None:
        Store(uri).put_new("store.json", marker)
        with pytest.raises(DataError, match=r"store\.json does not say which format"):
            Store.open(uri)

    def test_pickled_store_works_and_holds_no_secret(self, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
        store.put_new("a", b"1")
        pickled = pickle.dumps(store)
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            if name in os.environ:
                assert os.environ[name].encode() not in pickled
                assert os.environ[name] not in repr(store)
        again = pickle.loads(pickled)
        assert (again.uri, again.is_local, again.get("a")) == (store.uri, store.is_local, b"1")

    def test_works_in_a_forked_process(self, store: Store) -> None:
        store.put_new("a", b"1")
        child = multiprocessing.get_context("fork").Process(target=_check_from_fork, args=(store,))
        child.start()
        child.join(timeout=60)
        assert child.exitcode == 0

    @pytest.mark.parametrize("option", ["key", "secret", "token", "aws_secret_access_key", "password"])
    def test_credentials_as_options_are_refused(self, uri: str, option: str) -> None:
        for options in ({option: "hidden"}, {"client_kwargs": {option: "hidden"}}):
            with pytest.raises(UserError, match="come from the environment alone") as caught:
                Store.open(uri, storage_options=options)
            assert "hidden" not in str(caught.value)


def _check_from_fork(store: Store) -> None:
    assert store.get("a") == b"1"
    assert store.put_new("b", b"2")
