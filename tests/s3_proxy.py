"""A proxy in front of a test's S3 server: what is to happen at a write happens exactly there, and not after some sleep."""

from __future__ import annotations

import http.client
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

from tests.ports import LOOPBACK
from tests.s3_server import BUCKET

HOP_BY_HOP = {"connection", "expect", "keep-alive", "transfer-encoding"}


@dataclass(frozen=True)
class Answer:
    """What the server said."""

    status: int
    headers: list[tuple[str, str]]
    body: bytes


# Called in the thread of a write's connection with the object's path in the bucket and with what sends the request on to
# the server. What it returns is the client's answer; None cuts the connection.
OnWrite = Callable[[str, Callable[[], Answer]], Answer | None]


@contextmanager
def s3_proxy(port: int, on_write: OnWrite) -> Iterator[str]:
    """A proxy for the server at this port; yields the endpoint that clients are told."""
    server = ThreadingHTTPServer((LOOPBACK, 0), partial(_Connection, port, on_write))
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.1}, daemon=True)
    thread.start()
    try:
        yield f"http://{LOOPBACK}:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Connection(BaseHTTPRequestHandler):
    """One client's connection. Requests are passed on as they are: their signatures cover the name of the host, too."""

    protocol_version = "HTTP/1.1"

    def __init__(self, port: int, on_write: OnWrite, *arguments: Any) -> None:
        self._port, self._on_write = port, on_write
        with suppress(ConnectionError):  # of a client that was killed
            super().__init__(*arguments)

    def _pass(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        send = partial(self._send, body)
        with suppress(OSError, http.client.HTTPException):  # the server is down
            path = unquote(urlsplit(self.path).path)
            answer = self._on_write(path.removeprefix(f"/{BUCKET}/"), send) if self.command == "PUT" else send()
            if answer is not None:
                return self._answer(answer)
        self.close_connection = True
        return None

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = _pass

    def _send(self, body: bytes) -> Answer:
        upstream = http.client.HTTPConnection(LOOPBACK, self._port, timeout=60)
        try:
            upstream.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
            for name, value in self.headers.items():
                if name.lower() not in HOP_BY_HOP:
                    upstream.putheader(name, value)
            upstream.endheaders(body or None)
            response = upstream.getresponse()
            return Answer(response.status, response.getheaders(), response.read())
        finally:
            upstream.close()

    def _answer(self, answer: Answer) -> None:
        self.send_response_only(answer.status)
        for name, value in answer.headers:
            if name.lower() not in HOP_BY_HOP | {"content-length"} or (
                self.command == "HEAD" and name.lower() == "content-length"
            ):
                self.send_header(name, value)
        if self.command != "HEAD" and answer.status != 204:
            self.send_header("Content-Length", str(len(answer.body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(answer.body)

    def log_message(self, *_: object) -> None:
        """Nothing."""
