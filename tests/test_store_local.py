"""The store on a local disk."""

import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import pytest

from codec.errors import StorageError, UserError
from pipeline import store as store_module
from pipeline.secrets import without_secrets
from pipeline.store import Entry, Store, StoreFull
from tests.store_conformance import StoreConformance

NOBODY = 65534


class TestLocalStore(StoreConformance):
    @pytest.fixture
    def uri(self, tmp_path: Path) -> str:
        return f"file://{tmp_path}/deep/er/store"

    def leave_behind(self, store: Store, path: str) -> None:
        folder = Path(store.uri.removeprefix("file://")) / os.path.dirname(path)

        def write() -> None:
            store_module.link_new = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[assignment, return-value]
            store.put_new(path, b"half")

        writer = multiprocessing.get_context("fork").Process(target=write)
        writer.start()
        writer.join()
        assert writer.exitcode == -signal.SIGKILL and any(name.endswith(".tmp") for name in os.listdir(folder))


def files_below(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


@pytest.mark.parametrize("form", ["file://{}", "{}", "{}/", "{}/x/..", "relative"])
def test_forms_of_a_uri(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "relative"
    store = Store.open(form.format(folder))
    assert store.uri == f"file://{folder}"
    assert store.is_local
    assert files_below(tmp_path) == ["relative/store.json"]


@pytest.mark.parametrize(
    ("uri", "message"),
    [
        ("gs://bucket/x", r"a store cannot be at gs://: supported are file://, s3:// and plain folders"),
        ("http://user:hidden@host/x", r"supported are file://, s3://"),
        ("file://relative/x", "has no absolute path"),
        ("s3:bucket", "is no place for a store"),
        ("", "is no place for a store"),
        ("s3://", "needs the name of a bucket"),
        ("s3://key:hidden@bucket/x", "needs the name of a bucket"),
        ("s3://bucket/a/../b", "is no place for a store"),
    ],
)
def test_wrong_uri(uri: str, message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        Store.open(uri)
    assert "hidden" not in str(caught.value)


def test_a_file_in_the_place_of_the_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=f"file://{tmp_path}/file is a file"):
        Store.open(str(tmp_path / "file"))
    with pytest.raises(StorageError, match=f"cannot write file://{tmp_path}/file/below"):
        Store.open(str(tmp_path / "file" / "below"))


@pytest.mark.parametrize("made_before", [False, True])
def test_unwritable_folder(made_before: bool) -> None:
    """Also where the store exists already: a job must learn it before it computes anything."""
    code = (
        "import os, sys\n"
        "from codec.errors import StorageError\n"
        "from pipeline.store import Store\n"
        "Store(sys.argv[1])._fs  # imports what it needs while we may still read it\n"
        # Nothing is unwritable for root.
        f"if os.getuid() == 0: os.setgroups([]); os.setgid({NOBODY}); os.setuid({NOBODY})\n"
        "try: Store.open(sys.argv[1])\n"
        "except StorageError as error: print(error)\n"
    )
    with tempfile.TemporaryDirectory() as folder:  # pytest's own folders are closed to other users
        if made_before:
            Store.open(folder)
        os.chmod(folder, 0o555)
        result = subprocess.run([sys.executable, "-c", code, folder], capture_output=True, text=True, check=False)
        os.chmod(folder, 0o755)
        assert result.stdout == f"cannot write file://{folder}/store.json: Permission denied\n", result.stderr
        assert files_below(Path(folder)) == (["store.json"] if made_before else [])


def test_a_folder_in_the_place_of_an_object(tmp_path: Path) -> None:
    store = Store.open(str(tmp_path))
    store.put_new("a/b", b"1")
    with pytest.raises(StorageError, match=r"cannot write .*/a: Is a directory"):
        store.put_new("a", b"2")
    with pytest.raises(StorageError, match=r"cannot write .*/a/b/c: (Not a directory|File exists)"):
        store.put_new("a/b/c", b"2")
    assert files_below(tmp_path) == ["a/b", "store.json"]


def test_order_of_a_durable_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Contents reach the disk before they have a name, and the name before the caller is told."""
    events: list[str] = []
    fsync, link = os.fsync, os.link

    def traced_fsync(descriptor: int) -> None:
        events.append(f"fsync {os.path.relpath(os.readlink(f'/proc/self/fd/{descriptor}'), tmp_path)}")
        fsync(descriptor)

    def traced_link(source: str, target: str) -> None:
        events.append(f"link {os.path.relpath(target, tmp_path)}")
        link(source, target)

    store = Store.open(str(tmp_path / "s"))
    monkeypatch.setattr(os, "fsync", traced_fsync)
    monkeypatch.setattr(os, "link", traced_link)
    assert store.put_new("a/b/c", b"1")
    assert events[:2] == ["fsync s/a", "fsync s"]  # the names of the new folders
    assert events[2].startswith("fsync s/a/b/.") and events[2].endswith(".tmp")
    assert events[3:] == ["link s/a/b/c", "fsync s/a/b"]
    events.clear()
    assert store.put_new("a/b/c", b"2") is False
    assert events[1:] == ["link s/a/b/c", "fsync s/a/b"]


@pytest.mark.parametrize("call", ["fsync", "link"])
def test_failed_write_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    store = Store.open(str(tmp_path))
    store.put_new("a/b", b"1")

    def full_disk(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, call, full_disk)
        with pytest.raises(StoreFull, match=f"cannot write file://{tmp_path}/a/c: No space left on device: the store"):
            store.put_new("a/c", b"2")
    assert files_below(tmp_path) == ["a/b", "store.json"]
    assert store.put_new("a/c", b"2")


def test_repeated_link_of_a_network_disk_counts_as_won(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store.open(str(tmp_path))
    link = os.link

    def link_and_lose_the_answer(source: str, target: str) -> None:
        link(source, target)
        raise FileExistsError(17, "File exists")

    monkeypatch.setattr(os, "link", link_and_lose_the_answer)
    assert store.put_new("a", b"1") is True


def _write_until_killed(store: Store) -> None:
    for number in range(10**6):
        store.put_new(f"n/{number}", bytes([number % 256]) * 200_000)


def test_no_half_written_object_is_seen_when_a_writer_is_killed(tmp_path: Path) -> None:
    store = Store.open(str(tmp_path))
    for _ in range(3):
        writer = multiprocessing.get_context("fork").Process(target=_write_until_killed, args=(store,))
        writer.start()
        deadline = threading.Event()
        while len(list(store.list("n"))) < 5:
            deadline.wait(0.01)
        writer.kill()
        writer.join()
        for path in store.list("n"):
            number = int(path.removeprefix("n/"))
            assert store.get(path) == bytes([number % 256]) * 200_000
            store.delete(path)


def test_readers_see_all_or_nothing(tmp_path: Path) -> None:
    store = Store.open(str(tmp_path))
    data = os.urandom(2**20)
    seen: set[bytes] = set()
    done = threading.Event()

    def read() -> None:
        while not done.is_set():
            seen.update(store.get(path) for path in store.list("r"))

    reader = threading.Thread(target=read)
    reader.start()
    for number in range(50):
        store.put_new(f"r/{number}", data)
    done.set()
    reader.join()
    assert seen <= {data}


def test_temporary_files_are_not_listed(tmp_path: Path) -> None:
    store = Store.open(str(tmp_path))
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / ".0123.tmp").write_bytes(b"half")
    assert list(store.list()) == ["store.json"]


def test_pickle_keeps_no_connection(tmp_path: Path) -> None:
    store = Store.open(str(tmp_path))
    assert store.__getstate__() == {"uri": store.uri, "options": {}, "page": store._page}
    assert pickle.loads(pickle.dumps(store))._connected is None


def test_secrets_are_taken_out_of_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "very-secret")
    error = RuntimeError("no\n  answer from http://me:pass@host/x with very-secret.")
    assert store_module._plain(error) == "no answer from http://host/x with ***"
    monkeypatch.setenv("HF_TOKEN", "hf_hidden")
    assert without_secrets("https://hub/?t=hf_hidden") == "https://hub/?t=***"


def test_only_temporary_files_are_discarded(tmp_path: Path) -> None:
    store = Store.open(str(tmp_path))
    store.put_new("a/b", b"1")
    with pytest.raises(ValueError, match="no temporary file"):
        store.discard(Entry("a/b", 1, 0.0))
    assert store.exists("a/b")


def test_a_real_full_disk(tmp_path: Path) -> None:
    """A file system of 1 MiB, mounted in a name space of its own: what fits is kept, what does not leaves nothing."""
    code = (
        "import sys\nfrom pipeline.store import Store, StoreFull\nstore = Store.open(sys.argv[1])\n"
        "store.put_new('small', bytes(1000))\n"
        "try: store.put_new('large', bytes(2 << 20))\n"
        "except StoreFull as error: print(error)\n"
        "print(*store.list(), *store.leftovers())\n"
    )
    script = f'mount -t tmpfs -o size=1m none {tmp_path} && exec {sys.executable} -c "$0" {tmp_path}/s'
    result = subprocess.run(
        ["unshare", "--mount", "--map-root-user", "sh", "-c", script, code], capture_output=True, text=True, check=False
    )
    if result.returncode and ("unshare" in result.stderr or "mount" in result.stderr):
        pytest.skip(f"no file system can be mounted here: {result.stderr.strip()}")
    assert result.returncode == 0, result.stderr
    assert result.stdout == (
        f"cannot write file://{tmp_path}/s/large: No space left on device: the store is full; free space, raise its quota "
        "or run jobs/gc.py\nsmall store.json\n"
    )
