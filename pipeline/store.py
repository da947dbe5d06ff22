"""The store: named, immutable byte strings on a local disk or on S3, written at most once.

    file:///data/store, /data/store, data/store      a folder; made when it is not there
    s3://bucket/prefix                               a prefix of a bucket that exists

Every write is conditional (`put_new`): of any number of processes that write one path exactly one wins, the others are
told that it was there. A reader sees a whole object or none. A local write is on the disk before `put_new` returns.

S3 is configured by the environment alone, so that no secret is in a command line, a log or a pickled `Store`:
AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_SESSION_TOKEN, AWS_PROFILE and instance roles; AWS_ENDPOINT_URL_S3 or
AWS_ENDPOINT_URL for a server that is not Amazon's; AWS_REGION or AWS_DEFAULT_REGION. botocore reads all of these itself
except AWS_REGION, which is passed on here. KV_STORE_SSE (AES256 or aws:kms) and KV_STORE_SSE_KMS_KEY_ID ask the server to
encrypt what is written. Other s3fs settings can be given as `storage_options`, credentials cannot.
"""

import functools
import json
import os
import random
import re
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

import fsspec

from codec.errors import DataError, KVCodecError, StorageError, UserError
from pipeline.disk import fsync_folder, link_new
from pipeline.paths import MARKER, parse_store_uri, refuse_secrets, validate_path, validate_prefix
from pipeline.s3 import answer, connect_s3, is_full, lost_race, transient
from pipeline.secrets import without_secrets

FORMAT = 1

_PAUSES = (0.2, 0.4, 0.8, 1.6)  # seconds between attempts: five attempts in all
_MULTIPART_BYTES = 32 * 2**20  # objects of twice this size and more go up in parts of this size
_TEMPORARY = re.compile(r"\.[0-9a-f]{32}\.tmp")
_T = TypeVar("_T")
_INHERITED: list[Any] = []  # kept for ever: a forked copy that is collected would close its parent's connections


class ObjectMissing(StorageError):
    """The store has no object of this path."""


class StoreFull(StorageError):
    """There is no room for an object, or no more of it may be used."""


@dataclass(frozen=True)
class Entry:
    """One object of a listing: its path, its size in bytes, and when it was last written, in seconds since 1970."""

    path: str
    size: int
    modified: float
    upload: str = ""  # of a leftover on S3: the id of an upload that was never completed


class Store:
    """One store, made by `Store.open`; it can be pickled and connects again lazily in whichever process uses it."""

    def __init__(self, uri: str, storage_options: dict[str, Any] | None = None) -> None:
        """Parse `uri` without touching the storage. Raises UserError."""
        self._options = dict(storage_options or {})
        refuse_secrets(self._options)
        self.is_local, self._root = parse_store_uri(uri)
        self.uri = ("file://" if self.is_local else "s3://") + self._root
        self._page = 1000  # objects a listing request; S3 gives no more
        self._connected: Any = None
        self._pid = 0
        self._durable: set[str] = set()  # folders whose names are known to be on the disk

    @classmethod
    def open(cls, uri: str, *, create: bool = True, storage_options: dict[str, Any] | None = None) -> "Store":
        """Connect to the store at `uri` and check its format.

        With `create` the store is made where there is none, and a store that cannot be written is refused at once.
        Raises UserError (unknown scheme, a file in the place of the folder, missing bucket, refused credentials, no
        store without `create`, a newer format), StorageError (unreachable, unwritable), DataError (a damaged marker).
        """
        store = cls(uri, storage_options)
        if store.is_local and os.path.lexists(store._root) and not os.path.isdir(store._root):
            raise UserError(f"{store.uri} is a file, and a store needs a folder")
        try:
            # Asked for before the write: some servers make a missing bucket on the first write.
            found = store.get(MARKER)
        except ObjectMissing:
            found = b""
            if not create:
                raise UserError(f"there is no store at {store.uri}") from None
        if create:
            # Also where there is one: may we write here at all?
            store.put_new(MARKER, json.dumps({"format": FORMAT}).encode())
        _check_marker(found or store.get(MARKER), store.uri)
        return store

    def get(self, path: str, *, start: int = 0, end: int | None = None) -> bytes:
        """The object's bytes `start` to `end`, as a slice; neither is negative. Raises ObjectMissing, StorageError."""
        full = self._full(path)
        if start < 0 or (end is not None and end < 0):
            raise ValueError("a range cannot count from the end")
        if end is not None and end <= start:
            return b""
        limits: dict[str, Any] = {"start": start, "end": end} if start or end is not None else {}
        if not self.is_local:
            limits["max_concurrency"] = 1  # one request: s3fs would ask for the size first, then for pieces
        try:
            return bytes(self._attempt("read", path, lambda: self._fs.cat_file(full, **limits)))
        except StorageError as error:
            if error.__cause__ is not None and answer(error.__cause__)[0] == 416:
                return b""  # the range begins behind the object's end
            raise

    def put_new(self, path: str, data: bytes) -> bool:
        """Write an object unless there is one: True when this call wrote it, False when it was there already.

        Atomic, and durable when it returns. Where a connection fails and the outcome is unknown, the object itself is
        asked: True means that it now holds `data`, whoever wrote that. Raises StorageError.
        """
        full = self._full(path)
        return self._put_local(path, full, data) if self.is_local else self._put_s3(path, full, data)

    def exists(self, path: str) -> bool:
        """Whether there is an object of this path (a folder is none)."""
        try:
            self.size(path)
        except ObjectMissing:
            return False
        return True

    def size(self, path: str) -> int:
        """The object's size in bytes. Raises ObjectMissing, StorageError."""
        full = self._full(path)
        if self.is_local:
            info = self._attempt("read", path, lambda: self._fs.info(full))
            if info["type"] != "file":
                raise ObjectMissing(f"{self.uri}/{path} is a folder, no object of the store")
            return int(info["size"])
        bucket, _, key = full.partition("/")
        return int(
            self._attempt("read", path, lambda: self._fs.call_s3("head_object", Bucket=bucket, Key=key))[
                "ContentLength"
            ]
        )

    def list(self, prefix: str = "") -> Iterator[str]:
        """Paths of all objects in the folder `prefix` and below it ("" is all), sorted by their UTF-8 bytes.

        What is written or deleted meanwhile may be listed or not. Raises StorageError.
        """
        folder = validate_prefix(prefix)
        if self.is_local:
            return (path for path, _ in self._list_local(folder))
        return (entry.path for entry in self._list_s3(folder))

    def entries(self, prefix: str = "") -> Iterator[Entry]:
        """As `list`, with size and time of writing. Raises StorageError."""
        folder = validate_prefix(prefix)
        return self._stat_local(self._list_local(folder)) if self.is_local else self._list_s3(folder)

    def leftovers(self) -> Iterator[Entry]:
        """What writes that were cut off have left behind: temporary files, or uploads that were never completed.

        No object is among them, and none is ever read. Raises StorageError.
        """
        return self._stat_local(self._list_local("", temporary=True)) if self.is_local else self._uploads()

    def discard(self, leftover: Entry) -> None:
        """Remove what `leftovers` gave; one that is gone is no error. Raises StorageError."""
        full = f"{self._root}/{leftover.path}"
        if self.is_local:
            if not _TEMPORARY.fullmatch(os.path.basename(full)):
                raise ValueError(f"{leftover.path} is no temporary file")
            with suppress(FileNotFoundError):
                os.unlink(full)
            return
        bucket, _, key = full.partition("/")
        try:
            self._attempt(
                "delete",
                leftover.path,
                lambda: self._fs.call_s3("abort_multipart_upload", Bucket=bucket, Key=key, UploadId=leftover.upload),
            )
        except ObjectMissing:
            return
        except StorageError as error:
            if error.__cause__ is None or answer(error.__cause__)[0] != 404:
                raise

    def delete(self, path: str) -> None:
        """Remove an object; one that is not there is no error. Raises StorageError."""
        full = self._full(path)
        if not self.is_local:
            self._attempt("delete", path, lambda: self._fs.rm_file(full))
            return
        try:
            with suppress(FileNotFoundError, NotADirectoryError):
                os.unlink(full)
                fsync_folder(os.path.dirname(full))
        except OSError as error:
            raise self._explain("delete", path, error) from error

    # -- local disk

    def _put_local(self, path: str, full: str, data: bytes) -> bool:
        folder = os.path.dirname(full)
        temporary = os.path.join(folder, f".{uuid.uuid4().hex}.tmp")
        try:
            self._make_folder(folder)
            try:
                with open(temporary, "xb") as file:
                    file.write(data)
                    file.flush()
                    os.fsync(file.fileno())
                won = link_new(temporary, full)
            finally:
                with suppress(OSError):  # a leftover is never listed or read
                    os.unlink(temporary)
            # Also by the loser: it will build on an object whose name the winner may not have made durable yet.
            fsync_folder(folder)
            return won
        except OSError as error:
            raise self._explain("write", path, error) from error

    def _make_folder(self, folder: str) -> None:
        """Make a folder, and once in a process make its name and the names of all folders above it durable."""
        os.makedirs(folder, exist_ok=True)
        while folder not in self._durable:
            parent = os.path.dirname(folder)
            try:
                fsync_folder(parent)
            except PermissionError:
                if folder.startswith(self._root + "/"):
                    raise  # above the store there may be folders that we can pass, but not open
            self._durable.add(folder)
            folder = parent

    def _stat_local(self, found: Iterator[tuple[str, "os.DirEntry[str]"]]) -> Iterator[Entry]:
        for path, entry in found:
            try:
                info = entry.stat()
            except FileNotFoundError:
                continue  # deleted since it was listed
            except OSError as error:
                raise self._explain("list", path, error) from error
            yield Entry(path, info.st_size, info.st_mtime)

    def _list_local(self, folder: str, temporary: bool = False) -> Iterator[tuple[str, "os.DirEntry[str]"]]:
        try:
            entries = list(os.scandir(os.path.join(self._root, folder)))
        except (FileNotFoundError, NotADirectoryError):
            return
        except OSError as error:
            raise self._explain("list", folder, error) from error
        # A folder sorts as its name with "/" behind: then a depth-first walk yields whole paths in byte order.
        named = {
            entry.name + "/" * entry.is_dir(): entry
            for entry in entries
            if not entry.name.startswith(".") or (temporary and _TEMPORARY.fullmatch(entry.name))
        }
        for name in sorted(named, key=os.fsencode):
            relative = f"{folder}/{name}" if folder else name
            if name.endswith("/"):
                yield from self._list_local(relative[:-1], temporary)
            elif named[name].is_file() and name.startswith(".") == temporary:
                yield relative, named[name]

    # -- S3

    def _put_s3(self, path: str, full: str, data: bytes) -> bool:
        unclear = False
        for pause in (*_PAUSES, None):
            try:
                self._fs.pipe_file(full, data, mode="create", chunksize=_MULTIPART_BYTES)
                return True
            except Exception as error:
                if lost_race(error):
                    if unclear:  # an earlier attempt, whose answer was lost, may be what is there now
                        return self.get(path) == data
                    if self.exists(path):
                        return False
                    raise StorageError(f"cannot write {self.uri}/{path}: refused, perhaps as it is a folder") from error
                if not transient(error):
                    raise self._explain("write", path, error) from error
                unclear = True
                failure = error
            try:
                return self.get(path) == data
            except ObjectMissing:
                if pause is not None:
                    time.sleep(pause * random.uniform(0.5, 1.0))
        raise self._explain("write", path, failure) from failure

    def _list_s3(self, folder: str) -> Iterator[Entry]:
        bucket, _, top = self._root.partition("/")
        top = f"{top}/" if top else ""
        request: dict[str, Any] = {
            "Bucket": bucket,
            "Prefix": f"{top}{folder}/" if folder else top,
            "MaxKeys": self._page,
        }
        found: list[Entry] = []
        for page in self._pages(folder, "list_objects_v2", request, {"ContinuationToken": "NextContinuationToken"}):
            for item in page.get("Contents", ()):
                relative = item["Key"][len(top) :]
                if not relative.endswith("/") and not any(part.startswith(".") for part in relative.split("/")):
                    found.append(Entry(relative, int(item["Size"]), item["LastModified"].timestamp()))
        # Sorted here, because not every server sorts "a.b" before "a/b" as Amazon's does.
        yield from sorted(found, key=lambda entry: os.fsencode(entry.path))

    def _uploads(self) -> Iterator[Entry]:
        bucket, _, top = self._root.partition("/")
        top = f"{top}/" if top else ""
        markers = {"KeyMarker": "NextKeyMarker", "UploadIdMarker": "NextUploadIdMarker"}
        for page in self._pages("", "list_multipart_uploads", {"Bucket": bucket, "Prefix": top}, markers):
            for item in page.get("Uploads", ()):
                if item["Key"].startswith(top):
                    yield Entry(item["Key"][len(top) :], 0, item["Initiated"].timestamp(), item["UploadId"])

    def _pages(self, folder: str, call: str, request: dict[str, Any], markers: dict[str, str]) -> Iterator[Any]:
        """The answers to a request that gives one page at a time; `markers`: what of a page the next request needs."""
        while True:
            page = self._attempt("list", folder, functools.partial(self._fs.call_s3, call, **request))
            yield page
            if not page.get("IsTruncated"):
                return
            request = request | {name: page[found] for name, found in markers.items()}

    # -- connection, errors

    @property
    def _fs(self) -> Any:
        """The fsspec file system, made on first use in this process (a forked copy of an S3 client does not work)."""
        if self._connected is None or self._pid != os.getpid():
            _INHERITED.append(self._connected)
            self._connected = _connect_local() if self.is_local else connect_s3(self._options)
            self._pid = os.getpid()
        return self._connected

    def _full(self, path: str) -> str:
        return f"{self._root}/{validate_path(path)}"

    def _attempt(self, verb: str, path: str, call: Callable[[], _T]) -> _T:
        for pause in (*_PAUSES, None):
            try:
                return call()
            except Exception as error:
                if pause is None or not transient(error):
                    raise self._explain(verb, path, error) from error
            time.sleep(pause * random.uniform(0.5, 1.0))
        raise AssertionError("not reached")

    def _explain(self, verb: str, path: str, error: BaseException) -> KVCodecError:
        """One sentence for an error of the storage, with the place and without secrets."""
        if isinstance(error, KVCodecError):
            return error  # from making the connection
        status, code = answer(error)
        failed = f"cannot {verb} {self.uri}/{path}".rstrip("/")
        if verb == "write" and is_full(error):
            return StoreFull(
                f"{failed}: {_plain(error)}: the store is full; free space, raise its quota or run jobs/gc.py"
            )
        if verb == "write" and code == "EntityTooLarge":
            return StoreFull(f"{failed}: it is larger than this server takes; pass a smaller --chunk-tokens")
        if not self.is_local:
            if code == "NoSuchBucket":
                return UserError(f"{failed}: the bucket {self._root.partition('/')[0]} does not exist")
            if type(error).__name__ in ("NoCredentialsError", "PartialCredentialsError"):
                return UserError(f"{failed}: no credentials were found (set AWS_ACCESS_KEY_ID and the secret)")
            if isinstance(error, ValueError):
                return UserError(f"{failed}: {_plain(error)} (from the environment or the storage options)")
            if status in (401, 403):
                return UserError(f"{failed}: the credentials were refused, or do not allow it ({code or status})")
        if verb != "write" and isinstance(error, (FileNotFoundError, IsADirectoryError, NotADirectoryError)):
            return ObjectMissing(f"{self.uri}/{path} is not in the store")
        return StorageError(f"{failed}: {_plain(error)}")

    def __getstate__(self) -> dict[str, Any]:
        return {"uri": self.uri, "options": self._options, "page": self._page}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["uri"], state["options"])  # type: ignore[misc]
        self._page = state["page"]

    def __repr__(self) -> str:
        return f"Store({self.uri!r})"


def _check_marker(data: bytes, uri: str) -> None:
    try:
        found = json.loads(data)["format"]
        if type(found) is not int or found < 1:
            raise ValueError
    except (ValueError, KeyError, TypeError, RecursionError):
        raise DataError(f"{uri}/{MARKER} does not say which format the store has: it is damaged") from None
    if found > FORMAT:
        raise UserError(
            f"the store at {uri} has format {found}, this version reads up to {FORMAT}: update this software"
        )


def _connect_local() -> Any:
    return fsspec.filesystem("file", skip_instance_cache=True)


def _plain(error: BaseException) -> str:
    """The error's text on one line, without credentials."""
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return (without_secrets(text).rstrip(".") or type(error).__name__)[:300]
