"""Restoration over HTTP: what one replica does with a request. No Ray in here; see serving.py.

    POST /v1/restore   {"token_ids": […]} or {"messages": […], "tools": […]} or {"text": "…"}, and layers, heads as [first, end]
                       -> the longest stored prefix as streamed safetensors, layer by layer; x-kv-tokens is its length
    GET /healthz       200 when it can work
    GET /metrics       Prometheus text

All checks that can be made before decoding are made before the status line goes out. A failure after that ends the connection: the
body is then shorter than its content-length, which no HTTP client takes for a success, and no whole safetensors file either.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import dataclass
from typing import Any, Protocol

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse

from codec.errors import KVCodecError, UserError
from pipeline.corpus import BadRecord, parse_record
from pipeline.render import token_ids
from pipeline.restoration.batcher import Batcher
from pipeline.restoration.catalogue import Ids, token_array
from pipeline.restoration.files import Layout, layout, stream
from pipeline.restoration.restorer import Restoration, Restorer
from pipeline.restoration.span import Range

FIELDS = {"token_ids", "messages", "tools", "text", "layers", "heads"}
RETRY_SECONDS = 1
DECODERS = 2  # batches that are decoded at a time
AHEAD = 2  # pieces (K or V of a layer) that wait for a slow client
MEDIA_TYPE = "application/octet-stream"


@dataclass(frozen=True)
class Limits:
    """What one replica takes on. waiting: requests that wait for a place, in the order in which they came.

    deadline: seconds for a request, from its arrival to its last byte; at most half of them may go by before it has a place.
    keep_bytes: of decoded prefixes that stay for who asks next.
    """

    concurrency: int = 4
    waiting: int = 64
    body_bytes: int = 8 << 20
    tokens: int = 32_768
    deadline: float = 300.0
    refresh_seconds: float = 10.0
    keep_bytes: int = 10**9


class Board(Protocol):
    """Where counts go: a MetricsBoard, or what passes them on to one elsewhere."""

    def request(self, status: int) -> None:
        """See MetricsBoard."""

    def restored(self, asked: int, tokens: int, size: int, seconds: float) -> None:
        """See MetricsBoard."""

    def aborted(self, reason: str) -> None:
        """See MetricsBoard."""


class Refused(Exception):
    """A request that gets an error instead of a cache."""

    def __init__(self, status: int, message: str, **headers: str) -> None:
        super().__init__(message)
        self.status, self.headers = status, {name.replace("_", "-"): value for name, value in headers.items()}


class Late(Exception):
    """A stream that is over its deadline."""


class Service:
    """One replica: a restorer, its limits, and the requests it is working on."""

    def __init__(
        self,
        restorer: Restorer,
        limits: Limits,
        board: Board,
        *,
        read_metrics: Callable[[], Awaitable[str]],
        token: str = "",
        tokenizer: Callable[[], Any] | None = None,
    ) -> None:
        """token: what clients must bear, "" for none. tokenizer: gives one at a target's first request that needs it."""
        self._restorer, self._limits, self._board = restorer, limits, board
        self._read_metrics, self._token, self._load_tokenizer = read_metrics, token, tokenizer
        self._tokenizer: tuple[bytes, Any] = b"", None  # and the target that it was loaded for
        self.busy = self.waiting = 0  # requests that have a place, and those that wait for one
        self._places = asyncio.Semaphore(limits.concurrency)
        self._fresh = time.monotonic()
        self._refreshing = threading.Lock()
        self._index_error = ""  # why what was committed of late is not seen
        self._threads = ThreadPoolExecutor(limits.concurrency, "restore")
        self._batcher = Batcher(min(limits.concurrency, DECODERS), keep=limits.keep_bytes)

    async def handle(self, request: Request) -> Response:
        """Answer any request."""
        try:
            return await self._route(request)
        except Refused as error:
            if request.url.path == "/v1/restore":
                self._board.request(error.status)
            return JSONResponse({"error": str(error)}, error.status, error.headers)

    async def _route(self, request: Request) -> Response:
        path, method = request.url.path, request.method
        wanted = {"/healthz": "GET", "/metrics": "GET", "/v1/restore": "POST"}.get(path)
        if wanted is None:
            raise Refused(404, f"there is nothing at {path:.100}; POST /v1/restore, GET /healthz, GET /metrics")
        if method != wanted and not (method == "HEAD" and wanted == "GET"):
            raise Refused(405, f"{path} takes {wanted}, not {method}", allow=wanted)
        if path == "/healthz":
            found = self._restorer
            said = {"status": "ok", "target": found.target.hex(), "chunks": len(found.catalogue)}
            return JSONResponse(said | ({"index": self._index_error} if self._index_error else {}))
        self._authorise(request)
        if path == "/metrics":
            return PlainTextResponse(await self._read_metrics(), media_type="text/plain; version=0.0.4")
        return await self._restore(request)

    def _authorise(self, request: Request) -> None:
        if not self._token:
            return
        given = request.headers.get("authorization", "")
        scheme, _, token = given.partition(" ")
        right = hmac.compare_digest(token.strip().encode(), self._token.encode())
        if scheme.lower() != "bearer" or not right:
            raise Refused(401, "this service needs a bearer token", www_authenticate="Bearer")

    # ---------------------------------------------------------------- restoring
    async def _restore(self, request: Request) -> Response:
        """Take a place, check everything, and begin the stream; the place is free when the stream ends."""
        begin = time.monotonic()
        place = await self._place()
        try:
            asked = parse_body(await self._body(request))
            restored, plan = await self._in_thread(lambda: self._open(asked))
        except BaseException:
            place.leave()
            raise
        self._board.request(200)
        pieces = self._pieces(restored, plan, begin, place)
        return StreamingResponse(pieces, 200, headers_of(restored, plan), MEDIA_TYPE)

    async def _place(self) -> _Place:
        """A place, when it is this request's turn."""
        if self._places.locked() and self.waiting >= self._limits.waiting:
            raise Refused(503, "all places are taken; try again", retry_after=str(RETRY_SECONDS))
        self.waiting += 1
        try:
            # What begins with little time left would be cut, and was decoded for nothing.
            async with asyncio.timeout(self._limits.deadline / 2):
                await self._places.acquire()
        except TimeoutError:
            raise Refused(503, "no place became free in time; try again", retry_after=str(RETRY_SECONDS)) from None
        finally:
            self.waiting -= 1
        return _Place(self, asyncio.get_running_loop())

    def release(self) -> None:
        """Let the next request that waits have a place; in the loop's own thread."""
        self._places.release()

    async def _in_thread(self, call: Callable[[], tuple[Restoration, Layout]]) -> tuple[Restoration, Layout]:
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, call)
        except UserError as error:
            raise Refused(400, str(error)) from error
        except KVCodecError as error:
            raise Refused(500, str(error)) from error

    def _open(self, asked: Asked) -> tuple[Restoration, Layout]:
        """Find and check the prefix; runs in a thread."""
        self._refresh()
        while True:
            target = self._restorer.target
            ids = self._ids(asked, target)
            if len(ids) > self._limits.tokens:
                raise Refused(413, f"the prompt has {len(ids)} tokens, over the limit of {self._limits.tokens}")
            restored = self._restorer.restore(ids, layers=asked.layers, heads=asked.heads)
            if self._restorer.target == target:
                break  # else it came to another meanwhile, which may read the text as other tokens
        if not restored.tokens:
            raise Refused(404, "; ".join(restored.notes), x_kv_tokens="0")
        return restored, layout(restored)

    def _ids(self, asked: Asked, target: bytes) -> Ids:
        if "token_ids" in asked.record:
            return token_array(asked.record["token_ids"])
        if self._load_tokenizer is None:
            raise UserError("this service has no tokenizer; send token_ids")
        owner, tokenizer = self._tokenizer
        if owner != target:  # who follows a name comes to a model that may have another one
            tokenizer = self._load_tokenizer()
            self._tokenizer = target, tokenizer
        record = parse_record({"id": "request", **asked.record}, "the request")
        assert not isinstance(record, BadRecord), "it was parsed before"
        return token_array(token_ids(record, tokenizer, context_length=self._limits.tokens))

    def _refresh(self) -> None:
        """See what was committed since, now and then; one thread does it, the others go on with what is known."""
        if time.monotonic() - self._fresh > self._limits.refresh_seconds and self._refreshing.acquire(blocking=False):
            try:
                self._restorer.refresh()
                self._index_error = ""
            except KVCodecError as error:  # what is known is as good as before
                self._index_error = str(error)
            finally:
                self._fresh = time.monotonic()
                self._refreshing.release()

    async def _pieces(self, restored: Restoration, plan: Layout, begin: float, place: _Place) -> AsyncIterator[bytes]:
        """The body. A thread makes pieces of decoded layers, a few ahead of the client; what goes wrong is raised and cuts it short."""
        queue: asyncio.Queue[bytes | BaseException] = asyncio.Queue(AHEAD)
        loop, stopped = asyncio.get_running_loop(), threading.Event()
        until = begin + self._limits.deadline

        def put(item: bytes) -> None:
            waiting = asyncio.run_coroutine_threadsafe(queue.put(item), loop)
            while not stopped.is_set():
                if time.monotonic() > until:
                    waiting.cancel()
                    raise Late(f"not done after {self._limits.deadline:g} s")
                try:
                    waiting.result(0.2)
                    return
                except TimeoutError:
                    continue
            waiting.cancel()
            raise Late("the client has gone")

        def work() -> None:
            try:
                with closing(self._batcher.ask(restored)) as feed:
                    for piece in stream(restored, plan, feed.layers()):
                        put(piece)
            except BaseException as error:
                if not stopped.is_set():
                    asyncio.run_coroutine_threadsafe(_force(queue, error), loop)

        reason, sent = "left", 0
        self._threads.submit(work)
        try:
            while sent < plan.size:
                item = await queue.get()
                if isinstance(item, BaseException):
                    reason = "late" if isinstance(item, Late) else "failed"
                    raise item
                sent += len(item)  # a client that has all may close at once
                yield item
        finally:
            stopped.set()
            place.leave()
            if sent < plan.size:
                self._board.aborted(reason)
            else:
                self._board.restored(restored.asked, restored.tokens, plan.size, time.monotonic() - begin)

    async def _body(self, request: Request) -> bytes:
        limit = self._limits.body_bytes
        too_large = Refused(413, f"the request's body is over the limit of {limit} bytes")
        length = request.headers.get("content-length", "")
        if length.isdigit() and int(length) > limit:
            raise too_large
        parts, size = [], 0
        try:
            async with asyncio.timeout(self._limits.deadline):
                async for part in request.stream():
                    size += len(part)
                    if size > limit:
                        raise too_large
                    parts.append(part)
        except TimeoutError:
            raise Refused(408, "the request's body did not come in time") from None
        except ClientDisconnect:
            raise Refused(400, "the client left before its request was whole") from None
        return b"".join(parts)


class _Place:
    """One of the places of a service, left once; also by a response that nobody ever began to read."""

    def __init__(self, service: Service, loop: asyncio.AbstractEventLoop) -> None:
        self._service: Service | None = service
        self._loop = loop
        service.busy += 1

    def leave(self) -> None:
        """Make room for another request."""
        if self._service is not None:
            self._service.busy -= 1
            with suppress(RuntimeError):  # the loop has ended, and nobody waits
                self._loop.call_soon_threadsafe(self._service.release)
            self._service = None

    def __del__(self) -> None:
        self.leave()


async def _force(queue: asyncio.Queue[bytes | BaseException], error: BaseException) -> None:
    """Let the reader see an error next, whatever waits before it."""
    while not queue.empty():
        queue.get_nowait()
    queue.put_nowait(error)


@dataclass(frozen=True)
class Asked:
    """A checked request: one prompt, and which layers and heads of its cache."""

    record: dict[str, Any]
    layers: Range | None
    heads: Range | None


def parse_body(body: bytes) -> Asked:
    """Read a request's body. Raises Refused (400) in one sentence."""
    try:
        value = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise Refused(400, f"the request's body is not valid JSON ({str(error)[:200]})") from error
    if not isinstance(value, dict):
        raise Refused(400, "the request's body is not a JSON object")
    unknown = sorted(value.keys() - FIELDS)
    if unknown:
        raise Refused(
            400, f"the request has an unknown field {unknown[0]!r:.100}; known are {', '.join(sorted(FIELDS))}"
        )
    ranges = {name: _range(name, value.pop(name, None)) for name in ("layers", "heads")}
    record = parse_record({"id": "request", **value}, "the request")
    if isinstance(record, BadRecord):
        raise Refused(400, f"{record.source} {record.reason}")
    return Asked(record.payload, **ranges)


def _range(name: str, value: Any) -> Range | None:
    if value is None:
        return None
    if isinstance(value, list) and len(value) == 2 and all(type(n) is int and 0 <= n < 1 << 20 for n in value):
        return value[0], value[1]
    raise Refused(400, f"{name} must be [first, end], two whole numbers")


def headers_of(restored: Restoration, plan: Layout) -> dict[str, str]:
    """What a client knows before the first layer."""
    return {
        "content-length": str(plan.size),
        "cache-control": "no-store",
        "x-kv-tokens": str(restored.tokens),
        "x-kv-asked": str(restored.asked),
        "x-kv-format": restored.cache_format,
        "x-kv-target": restored.generation.target.hex(),
        "x-kv-digest": restored.digest.hex(),
        "x-kv-damaged": str(int(restored.damaged)),
    }
