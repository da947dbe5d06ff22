"""The far end of a link of a given bandwidth: a server on the loopback address that sends no faster, however many ask it.

    python -m jobs.bench.link_process REQUEST.json

A process of its own, so that sending waits for nothing that is measured. The request names files and bits_per_second; the port is said
as one line. A client sends a name and a line's end, and gets the length, 8 bytes, and the bytes.
"""

from __future__ import annotations

import json
import socket
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path

BURST_SECONDS = 0.002  # what may be sent at once after a pause
LENGTH_BYTES = 8


def main() -> None:
    """Serve until the process is ended."""
    request = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    objects = {name: Path(path).read_bytes() for name, path in request["files"].items()}
    bucket = Bucket(request["bits_per_second"] / 8)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        print(listener.getsockname()[1], flush=True)
        while True:
            link, _ = listener.accept()
            threading.Thread(target=send, args=(link, objects, bucket), daemon=True).start()


def send(link: socket.socket, objects: Mapping[str, bytes], bucket: Bucket) -> None:
    """Answer one client."""
    with link, link.makefile("rb") as asked:
        data = memoryview(objects[asked.readline().decode().rstrip("\n")])
        link.sendall(len(data).to_bytes(LENGTH_BYTES, "little"))
        sent = 0
        while sent < len(data):
            part = bucket.take(len(data) - sent)
            link.sendall(data[sent : sent + part])
            sent += part


class Bucket:
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


if __name__ == "__main__":
    main()
