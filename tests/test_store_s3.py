"""The store on a real S3 server (SeaweedFS), which these tests start on the loopback address."""

import os
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from botocore.exceptions import ClientError

from codec.errors import StorageError, UserError
from pipeline import store as store_module
from pipeline.store import ObjectMissing, Store, StoreFull
from tests.s3_server import BUCKET, s3_server
from tests.store_conformance import StoreConformance

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    with s3_server(tmp_path_factory.mktemp("s3")) as environment:
        yield environment


@pytest.fixture(autouse=True)
def environment(server: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    for name, value in server.items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def uri() -> str:
    return f"s3://{BUCKET}/{uuid.uuid4().hex}/some prefix"


class TestS3Store(StoreConformance):
    def leave_behind(self, store: Store, path: str) -> None:
        bucket, _, key = f"{store._root}/{path}".partition("/")
        upload = store._fs.call_s3("create_multipart_upload", Bucket=bucket, Key=key)["UploadId"]
        store._fs.call_s3("upload_part", Bucket=bucket, Key=key, UploadId=upload, PartNumber=1, Body=b"half")


@pytest.fixture
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "_PAUSES", (0.0, 0.0, 0.0, 0.0))


def test_store_at_the_root_of_a_bucket() -> None:
    store = Store.open(f"s3://{BUCKET}")
    assert store.put_new("root/a", b"1")
    assert list(store.list("root")) == ["root/a"]
    assert "store.json" in list(store.list())


def test_more_objects_than_a_server_lists_at_once(uri: str) -> None:
    store = Store.open(uri)
    names = [f"many/{number:04}" for number in range(1100)]
    with ThreadPoolExecutor(16) as pool:
        assert all(pool.map(lambda name: store.put_new(name, b"x"), names))
    assert list(store.list("many")) == names


@pytest.mark.parametrize("create", [True, False])
def test_missing_bucket(create: bool) -> None:
    with pytest.raises(UserError, match=r"cannot read s3://nothing/x/.*: the bucket nothing does not exist$"):
        Store.open("s3://nothing/x", create=create)


@pytest.mark.parametrize("name", ["AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"])
def test_wrong_credentials(uri: str, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(name, "wrong-but-secret")
    with pytest.raises(UserError, match=f"cannot read {uri}/store.json: the credentials were refused") as caught:
        Store.open(uri)
    assert "secret" not in str(caught.value)


def test_no_credentials(uri: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    with pytest.raises(UserError, match="no credentials were found"):
        Store.open(uri)


def test_unreachable_endpoint(uri: str, monkeypatch: pytest.MonkeyPatch, no_pauses: None) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    with pytest.raises(StorageError, match=f"cannot read {uri}/store.json: .*127.0.0.1:1"):
        Store.open(uri)


def test_endpoint_that_is_no_url(uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "nonsense")
    with pytest.raises(UserError, match="Invalid endpoint: nonsense"):
        Store.open(uri)


def test_endpoint_and_region_as_options(uri: str, server: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_ENDPOINT_URL")
    options = {"endpoint_url": server["AWS_ENDPOINT_URL"], "client_kwargs": {"region_name": "us-east-1"}}
    assert Store.open(uri, storage_options=options).put_new("a", b"1")


@pytest.mark.parametrize("name", ["AWS_REGION", "AWS_DEFAULT_REGION"])
def test_region_from_the_environment(uri: str, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.delenv("AWS_REGION")
    monkeypatch.setenv(name, "eu-central-1")
    store = Store.open(uri)
    assert store._fs.s3.meta.region_name == "eu-central-1"


class Flaky:
    """Stands before the file system and fails its first `failures` writes, before or after they have been done."""

    def __init__(self, inner: Any, failures: int, error: BaseException, *, after: Callable[[], object] | None) -> None:
        self.inner, self.failures, self.error, self.after = inner, failures, error, after

    def pipe_file(self, *arguments: Any, **options: Any) -> None:
        if self.failures > 0:
            self.failures -= 1
            if self.after is not None:
                self.after()
            raise self.error
        self.inner.pipe_file(*arguments, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


def make_flaky(store: Store, failures: int, after: Callable[[], object] | None = None) -> None:
    store._connected = Flaky(store._fs, failures, TimeoutError("no answer"), after=after)


def test_write_that_fails_for_a_while(uri: str, no_pauses: None) -> None:
    store = Store.open(uri)
    make_flaky(store, 4)
    assert store.put_new("a", b"1") is True


def test_write_that_fails_for_ever_says_so(uri: str, no_pauses: None) -> None:
    store = Store.open(uri)
    make_flaky(store, 5)
    with pytest.raises(StorageError, match=f"cannot write {uri}/a: no answer"):
        store.put_new("a", b"1")
    assert not store.exists("a")


def test_write_whose_answer_was_lost_is_ours(uri: str, no_pauses: None) -> None:
    store = Store.open(uri)
    make_flaky(store, 1, after=lambda: Store(uri).put_new("a", b"mine"))
    assert store.put_new("a", b"mine") is True


def test_write_that_failed_while_another_won(uri: str, no_pauses: None) -> None:
    store = Store.open(uri)
    make_flaky(store, 1, after=lambda: Store(uri).put_new("a", b"theirs"))
    assert store.put_new("a", b"mine") is False
    assert store.get("a") == b"theirs"


@pytest.mark.parametrize(("landed", "ours"), [(b"mine", True), (b"theirs", False)])
def test_write_that_lands_after_it_was_given_up(
    uri: str, monkeypatch: pytest.MonkeyPatch, no_pauses: None, landed: bytes, ours: bool
) -> None:
    """The first look finds nothing, the repeated write is refused: only the object itself says whose it is."""
    store = Store.open(uri)
    make_flaky(store, 1)
    get, looks = store.get, []

    def get_before_it_lands(path: str) -> bytes:
        looks.append(path)
        if len(looks) == 1:
            Store(uri).put_new(path, landed)
            raise ObjectMissing("not yet")
        return get(path)

    monkeypatch.setattr(store, "get", get_before_it_lands)
    assert store.put_new("a", b"mine") is ours
    assert len(looks) == 2


@pytest.mark.parametrize(
    ("status", "code", "message"),
    [
        (507, "XMinioStorageFull", "the store is full; free space"),
        (403, "QuotaExceeded", "the store is full; free space"),
        (400, "EntityTooLarge", "larger than this server takes; pass a smaller --chunk-tokens"),
    ],
)
def test_a_full_server_says_so_at_once(uri: str, status: int, code: str, message: str) -> None:
    """No server here can be filled, so its answer is made up; that it is not asked again is what counts."""
    store = Store.open(uri)
    answer = {"Error": {"Code": code}, "ResponseMetadata": {"HTTPStatusCode": status}}
    error = OSError(f"{code} of the server")
    error.__cause__ = ClientError(answer, "PutObject")
    store._connected = Flaky(store._fs, 1, error, after=None)
    with pytest.raises(StoreFull, match=f"cannot write {uri}/a: .*{message}"):
        store.put_new("a", b"1")
    assert store._connected.failures == 0 and not store.exists("a")


# ---------------------------------------------------------------- encryption at rest
def on_disk(server_files: Path, needle: bytes) -> bool:
    """Whether these bytes stand in any file of the server's."""
    return any(needle in path.read_bytes() for path in server_files.rglob("*") if path.is_file())


def test_objects_are_encrypted_on_the_servers_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server of its own, whose files are searched for what was written: one part and several, with and without."""
    needle = os.urandom(64)
    # SeaweedFS keeps the key of its own (SSE-S3) in its filer.
    with s3_server(tmp_path, data=tmp_path / "data") as environment:
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        Store.open(f"s3://{BUCKET}/plain").put_new("a", bytes(500_000) + needle)
        assert on_disk(tmp_path / "data", needle)
        secret = os.urandom(64)
        monkeypatch.setenv("KV_STORE_SSE", "AES256")
        store = Store.open(f"s3://{BUCKET}/closed")
        large = os.urandom(2**20) * 64 + secret
        assert store.put_new("small", bytes(500_000) + secret) and store.put_new("large", large)
        assert store.put_new("small", b"other") is False and store.put_new("large", b"other") is False
        for name in ("small", "large"):
            head = store._fs.call_s3("head_object", Bucket=BUCKET, Key=f"closed/{name}")
            assert head["ServerSideEncryption"] == "AES256"
        assert not on_disk(tmp_path / "data", secret)
        monkeypatch.delenv("KV_STORE_SSE")
        again = Store.open(f"s3://{BUCKET}/closed")
        assert again.get("large") == large and again.get("small", start=499_990) == bytes(10) + secret
        assert again.size("large") == len(large) and [e.size for e in again.entries()][:2] == [len(large), 500_064]


@pytest.mark.parametrize(
    ("kind", "key", "message"),
    [("rot13", "", "KV_STORE_SSE is 'rot13'; it may be AES256"), ("AES256", "k", "needs KV_STORE_SSE to be aws:kms")],
)
def test_encryption_that_cannot_be(
    uri: str, monkeypatch: pytest.MonkeyPatch, kind: str, key: str, message: str
) -> None:
    monkeypatch.setenv("KV_STORE_SSE", kind)
    monkeypatch.setenv("KV_STORE_SSE_KMS_KEY_ID", key)
    with pytest.raises(UserError, match=message):
        Store.open(uri)


def test_a_key_of_a_key_service_is_asked_for(uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KV_STORE_SSE", "aws:kms")
    monkeypatch.setenv("KV_STORE_SSE_KMS_KEY_ID", "a-key")
    assert Store(uri)._fs.s3_additional_kwargs == {"ServerSideEncryption": "aws:kms", "SSEKMSKeyId": "a-key"}
