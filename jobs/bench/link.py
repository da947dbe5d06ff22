"""A link of a given bandwidth on the loopback address: a server that sends no faster, however many ask it, and a store behind it."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Mapping
from types import TracebackType

from codec.errors import StorageError
from pipeline.store import Store

BURST_SECONDS = 0.002  # what may be sent at once after a pause
LENGTH_BYTES = 8


class Link:
    """Byte strings by their names, behind a link. `with Link(objects, bits_per_second) as link: link.get(name)`; threads may share it."""

    def __init__(self, objects: Mapping[str, bytes], bits_per_second: float) -> None:
        self.objects = objects
        self._bucket = _Bucket(bits_per_second / 8)
        self._listener = socket.create_server(("127.0.0.1", 0))

    def __enter__(self) -> Link:
        threading.Thread(target=self._serve, daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)  # ends what waits in accept
        self._listener.close()

    def get(self, name: str) -> bytes:
        """The bytes of that name, as fast as the link is. Raises StorageError where it breaks."""
        with socket.create_connection(self._listener.getsockname()) as link:
            link.sendall(name.encode() + b"\n")
            with link.makefile("rb") as stream:
                size = int.from_bytes(stream.read(LENGTH_BYTES), "little")
                data = bytearray(size)
                count = stream.readinto(data)
        if not size or count != size:
            raise StorageError(f"the throttled link ended {size - count} bytes early")
        return bytes(data)

    def _serve(self) -> None:
        while True:
            try:
                link, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._send, args=(link,), daemon=True).start()

    def _send(self, link: socket.socket) -> None:
        with link, link.makefile("rb") as asked:
            data = memoryview(self.objects[asked.readline().decode().rstrip("\n")])
            link.sendall(len(data).to_bytes(LENGTH_BYTES, "little"))
            sent = 0
            while sent < len(data):
                part = self._bucket.take(len(data) - sent)
                link.sendall(data[sent : sent + part])
                sent += part


class _Bucket:
    """An allowance that grows with time, and from which all that is sent is taken."""

    def __init__(self, rate: float) -> None:
        """rate: bytes a second."""
        self._rate, self._most = rate, max(1500, int(rate * BURST_SECONDS))
        self._allowance, self._last, self._lock = float(self._most), time.perf_counter(), threading.Lock()

    def take(self, wanted: int) -> int:
        """How much may be sent now, at most `wanted`; waits until that is a good part of what may be sent at once."""
        with self._lock:
            least = min(wanted, self._most // 2)
            while (allowed := self._refilled()) < least:
                time.sleep((least - allowed) / self._rate)
            part = min(wanted, int(allowed))
            self._allowance -= part
            return part

    def _refilled(self) -> float:
        now = time.perf_counter()
        self._allowance = min(self._most, self._allowance + (now - self._last) * self._rate)
        self._last = now
        return self._allowance


class LinkedStore(Store):
    """A store whose blobs come over a link; everything else, and all while there is none, comes as it lies there."""

    def __init__(self, store: Store) -> None:
        super().__init__(store.uri)
        self.link: Link | None = None

    def get(self, path: str, *, start: int = 0, end: int | None = None) -> bytes:
        """As Store.get."""
        if self.link is not None and path in self.link.objects:
            return self.link.get(path)[start:end]
        return super().get(path, start=start, end=end)
