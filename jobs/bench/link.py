"""A link of a given bandwidth on the loopback address: a server that sends no faster, and the seconds a client needs to read."""

from __future__ import annotations

import socket
import threading
import time

from codec.errors import StorageError

BURST_SECONDS = 0.002  # what may be sent at once after a pause
BUFFER = 1 << 20


def fetch_seconds(size: int, bits_per_second: float) -> float:
    """Seconds from connecting to the last of `size` bytes. Raises StorageError where the link breaks."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        sender = threading.Thread(target=_send, args=(listener, size, bits_per_second / 8), daemon=True)
        sender.start()
        begin = time.perf_counter()
        with socket.create_connection(listener.getsockname()) as link:
            left, buffer = size, bytearray(BUFFER)
            while left:
                count = link.recv_into(buffer)
                if not count:
                    raise StorageError(f"the throttled link ended {left} bytes early")
                left -= count
        seconds = time.perf_counter() - begin
        sender.join()
    return seconds


def _send(listener: socket.socket, size: int, rate: float) -> None:
    """A token bucket: the allowance grows with time, and what is sent is taken from it."""
    link, _ = listener.accept()
    with link:
        most = max(1500, int(rate * BURST_SECONDS))
        data = memoryview(bytes(most))
        allowance, last, left = float(most), time.perf_counter(), size
        while left:
            now = time.perf_counter()
            allowance, last = min(most, allowance + (now - last) * rate), now
            part = min(left, int(allowance))
            if part < min(left, most // 2):
                time.sleep((min(left, most // 2) - part) / rate)
                continue
            link.sendall(data[:part])
            allowance -= part
            left -= part
