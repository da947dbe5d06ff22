"""A link of a given bandwidth on the loopback address, and a store behind it."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

from codec.errors import StorageError
from jobs.bench.child import ROOT
from jobs.bench.link_process import LENGTH_BYTES
from pipeline.store import Store


class Link:
    """Files by their names, behind a link: `with Link(files, bits_per_second, folder) as link: link.get(name)`; threads may share it."""

    def __init__(self, files: Mapping[str, Path], bits_per_second: float, folder: Path) -> None:
        """folder: for what the process at the other end is asked."""
        self.names = frozenset(files)
        request = folder / "link-request.json"
        plain = {name: str(path) for name, path in files.items()}
        request.write_text(json.dumps({"files": plain, "bits_per_second": bits_per_second}), encoding="utf-8")
        self._command = [sys.executable, "-m", "jobs.bench.link_process", str(request)]

    def __enter__(self) -> Link:
        self._process = subprocess.Popen(self._command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        said = self._process.stdout.readline()
        if not said:
            raise StorageError(f"the throttled link did not start (exit status {self._process.wait()})")
        self._port = int(said)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.terminate()
        self._process.communicate()

    def get(self, name: str) -> bytes:
        """The bytes of that name, as fast as the link is. Raises StorageError where it breaks."""
        with socket.create_connection(("127.0.0.1", self._port)) as link:
            link.sendall(name.encode() + b"\n")
            with link.makefile("rb") as stream:
                size = int.from_bytes(stream.read(LENGTH_BYTES), "little")
                data = bytearray(size)
                count = stream.readinto(data)
        if not size or count != size:
            raise StorageError(f"the throttled link ended {size - count} bytes early")
        return bytes(data)


class LinkedStore(Store):
    """A store whose blobs come over a link; everything else, and all while there is none, comes as it lies there."""

    def __init__(self, store: Store) -> None:
        super().__init__(store.uri)
        self.link: Link | None = None

    def get(self, path: str, *, start: int = 0, end: int | None = None) -> bytes:
        """As Store.get."""
        if self.link is not None and path in self.link.names:
            return self.link.get(path)[start:end]
        return super().get(path, start=start, end=end)
