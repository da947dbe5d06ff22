"""The service over real HTTP: what it answers, refuses, and how a failure in the middle looks to a client."""

from __future__ import annotations

import http.client
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.routing import Route

from pipeline.model_source import load_tokenizer, resolve_model
from pipeline.restoration.metrics import MetricsBoard
from pipeline.restoration.restorer import Restorer
from pipeline.restoration.service import Limits, Service
from tests.made_store import Made
from tests.ports import LOOPBACK
from tests.stored import CHUNK, Kept, same, tokens_of
from tests.test_restoration import flip, forge

PROMPT = tokens_of(1, 2 * CHUNK + 9)
MESSAGES = [{"role": "user", "content": "The quick brown fox jumps over the lazy dog. " * 4}]
TOKEN = "secret-of-the-test"
Tensors = dict[str, torch.Tensor]


class Server:
    """A service in a thread, and what it counts."""

    def __init__(self, kept: Kept | Made, port: int, model: str = "", **more: Any) -> None:
        """model: what it serves, by default the kept target by its fingerprint."""
        self.kept, self.port, self.board = kept, port, MetricsBoard()

        async def metrics() -> str:
            return self.board.text()

        limits = Limits(**{"refresh_seconds": 0.01, **more.pop("limits", {})})
        self.restorer = Restorer(kept.store, model or kept.job.target.hex())
        self.service = Service(self.restorer, limits, self.board, read_metrics=metrics, **more)

        async def answer(request: Request) -> Any:
            return await self.service.handle(request)

        app = Starlette(routes=[Route("/{path:path}", answer, methods=["GET", "POST", "PUT", "DELETE"])])
        config = uvicorn.Config(app, host=LOOPBACK, port=port, log_level="critical")
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, daemon=True)

    def __enter__(self) -> Server:
        self._thread.start()
        until = time.monotonic() + 30
        while not self._server.started and time.monotonic() < until:
            time.sleep(0.01)
        return self

    def __exit__(self, *_: object) -> None:
        self._server.should_exit = True
        self._thread.join(30)

    @contextmanager
    def asked(
        self, body: Any = None, path: str = "/v1/restore", method: str = "POST", **headers: str
    ) -> Iterator[http.client.HTTPResponse]:
        """The response to one request, not read yet."""
        connection = http.client.HTTPConnection(LOOPBACK, self.port, timeout=60)
        data = body if isinstance(body, bytes | type(None)) else json.dumps(body).encode()
        connection.request(method, path, data, headers)
        try:
            yield connection.getresponse()
        finally:
            connection.close()

    def refused(self, body: Any, status: int, words: str, **more: Any) -> http.client.HTTPResponse:
        with self.asked(body, **more) as response:
            text = response.read().decode()
            assert response.status == status and words in json.loads(text)["error"], text
            return response

    def tensors(self, body: Any) -> tuple[Tensors, http.client.HTTPMessage]:
        with self.asked(body) as response:
            data = response.read()
            assert response.status == 200, data
            return safetensors.torch.load(data), response.headers

    def metrics(self) -> dict[str, float]:
        with self.asked(path="/metrics", method="GET") as response:
            lines = response.read().decode().splitlines()
        return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines if not line.startswith("#")}


def pairs_of(tensors: Tensors, layers: range) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [(tensors[f"layers.{n}.key"], tensors[f"layers.{n}.value"]) for n in layers]


def until(true: Callable[[], bool]) -> bool:
    end = time.monotonic() + 30
    while not true() and time.monotonic() < end:
        time.sleep(0.02)
    return true()


@pytest.fixture(scope="module")
def kept(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Kept:
    found = Kept(tiny_model, tmp_path_factory.mktemp("kept"), kind="static")
    found.put({"prompt": PROMPT})
    return found


@pytest.fixture
def own(tiny_model: Path, tmp_path: Path) -> Kept:
    found = Kept(tiny_model, tmp_path / "store", kind="static")
    found.put({"prompt": PROMPT})
    return found


def test_the_longest_prefix_comes_back_layer_by_layer(kept: Kept, free_port: int) -> None:
    with Server(kept, free_port) as server:
        tensors, headers = server.tensors({"token_ids": [*PROMPT, 5, 6, 7]})
        assert same(pairs_of(tensors, range(3)), kept.truth(PROMPT))
        assert (headers["x-kv-tokens"], headers["x-kv-asked"]) == (str(len(PROMPT)), str(len(PROMPT) + 3))
        assert headers["x-kv-format"] == "bf16" and len(headers["x-kv-digest"]) == 32 and headers["x-kv-damaged"] == "0"
        tensors, _ = server.tensors({"token_ids": PROMPT, "layers": [1, 2], "heads": [1, 2]})
        key, value = kept.truth(PROMPT)[1]
        assert set(tensors) == {"layers.1.key", "layers.1.value"}
        assert same(pairs_of(tensors, range(1, 2)), [(key[1:2], value[1:2])])
        with server.asked(path="/healthz", method="GET") as response:
            assert json.load(response) == {"status": "ok", "target": kept.job.target.hex(), "chunks": 3}
        assert until(lambda: server.metrics()["kv_restore_seconds_count"] == 2)
        counts = server.metrics()
        assert counts['kv_restore_requests_total{status="200"}'] == 2
        assert counts['kv_restore_tokens_total{what="restored"}'] == 2 * len(PROMPT)
        assert counts['kv_restore_tokens_total{what="asked"}'] == 2 * len(PROMPT) + 3


def test_messages_are_rendered_as_the_job_renders_them(own: Kept, tiny_model: Path, free_port: int) -> None:
    tokenizer = load_tokenizer(resolve_model(tiny_model))
    ids = tokenizer.apply_chat_template(MESSAGES, tokenize=True, return_dict=False)
    with Server(own, free_port, tokenizer=lambda: tokenizer) as server:
        server.refused({"messages": MESSAGES}, 404, "nothing of the prompt is stored")
        own.put({"messages": ids})
        time.sleep(0.02)  # the index is looked at again
        tensors, headers = server.tensors({"messages": MESSAGES})
        assert headers["x-kv-tokens"] == str(len(ids))
        assert same(pairs_of(tensors, range(3)), own.truth(ids))


BAD: list[tuple[Any, int, str]] = [
    (b"{", 400, "not valid JSON"), (b"\xff", 400, "not valid JSON"), (b"[]", 400, "not a JSON object"), ({}, 400, "no content"),
    ({"token_ids": []}, 400, "empty"), ({"token_ids": [1.5]}, 400, "integer"), ({"token_ids": [-1]}, 400, "out of range"),
    ({"token_ids": "12"}, 400, "list"), ({"token_ids": [1], "text": "x"}, 400, "only one"), ({"tokens": [1]}, 400, "unknown field"),
    ({"token_ids": [1], "layers": [1]}, 400, "layers must be"), ({"token_ids": [1], "heads": [0, True]}, 400, "heads must be"),
    ({"token_ids": PROMPT, "layers": [0, 99]}, 400, "not in a cache"), ({"token_ids": PROMPT, "heads": [1, 1]}, 400, "not in a cache"),
    ({"text": "x"}, 400, "no tokenizer"), ({"token_ids": tokens_of(9, 50)}, 404, "nothing of the prompt is stored"),
    ({"token_ids": [1] * 501}, 413, "over the limit of 500"), (b" " * 5000, 413, "limit of 4000 bytes"),
    (b"[" * 4000, 400, "not valid JSON"),
]  # fmt: skip


def test_bad_requests_get_one_sentence_each(kept: Kept, free_port: int) -> None:
    with Server(kept, free_port, limits={"body_bytes": 4000, "tokens": 500}) as server:
        for body, status, words in BAD:
            server.refused(body, status, words)
        server.refused(None, 404, "there is nothing at", path="/v2", method="GET")
        assert server.refused(None, 405, "takes POST", method="GET").headers["allow"] == "POST"
        server.refused({}, 405, "takes GET", path="/metrics")
        assert server.service.busy == 0
        assert server.metrics()['kv_restore_requests_total{status="400"}'] == sum(s == 400 for _, s, _ in BAD)


def test_a_body_without_a_length_is_limited_too(kept: Kept, free_port: int) -> None:
    with Server(kept, free_port, limits={"body_bytes": 4000}):
        connection = http.client.HTTPConnection(LOOPBACK, free_port, timeout=30)
        connection.request("POST", "/v1/restore", iter([b" " * 3000, b" " * 3000]), encode_chunked=True,
                           headers={"transfer-encoding": "chunked"})  # fmt: skip
        assert connection.getresponse().status == 413
        connection.close()


def test_a_bearer_token(kept: Kept, free_port: int) -> None:
    with Server(kept, free_port, token=TOKEN) as server:
        for given in ({}, {"authorization": "Bearer wrong"}, {"authorization": TOKEN}, {"authorization": "Bearer "}):
            refused = server.refused({"token_ids": PROMPT}, 401, "bearer token", **given)
            assert refused.headers["www-authenticate"] == "Bearer"
        server.refused(None, 401, "bearer token", path="/metrics", method="GET")
        with server.asked(path="/healthz", method="GET") as response:
            assert response.status == 200
        with server.asked({"token_ids": PROMPT}, authorization=f"Bearer {TOKEN}") as response:
            assert response.status == 200 and len(response.read()) == int(response.headers["content-length"])


def test_a_failure_after_the_first_layer_is_no_success_for_any_client(own: Kept, free_port: int) -> None:
    forge(own.blob(PROMPT, 1))
    with Server(own, free_port) as server:
        with server.asked({"token_ids": PROMPT}) as response:
            assert response.status == 200 and response.headers["x-kv-tokens"] == str(len(PROMPT))
            with pytest.raises((http.client.IncompleteRead, ConnectionError)):
                response.read()
        assert server.metrics()['kv_restore_aborted_total{reason="failed"}'] == 1 and server.service.busy == 0


def test_damage_that_checksums_show_only_shortens_the_prefix(own: Kept, free_port: int) -> None:
    flip(own.blob(PROMPT, 1), -60)
    with Server(own, free_port) as server:
        tensors, headers = server.tensors({"token_ids": PROMPT})
        assert headers["x-kv-tokens"] == str(CHUNK) and headers["x-kv-damaged"] == "1"
        assert same(pairs_of(tensors, range(3)), own.truth(PROMPT[:CHUNK]))


def test_a_bent_index_part_hides_only_what_is_new(own: Kept, free_port: int) -> None:
    with Server(own, free_port) as server:
        own.put({"other": tokens_of(7, CHUNK)})
        root = Path(own.store.uri.removeprefix("file://")) / "index"
        newest = max(root.rglob("*.parquet"), key=lambda p: p.stat().st_mtime_ns)
        whole = newest.read_bytes()
        newest.write_bytes(whole[:-9])
        time.sleep(0.02)
        tensors, _ = server.tensors({"token_ids": PROMPT})
        assert same(pairs_of(tensors, range(3)), own.truth(PROMPT))
        with server.asked(path="/healthz", method="GET") as response:
            assert "index part" in json.load(response)["index"]
        newest.write_bytes(whole)
        time.sleep(0.02)
        server.tensors({"token_ids": tokens_of(7, CHUNK)})
        with server.asked(path="/healthz", method="GET") as response:
            assert "index" not in json.load(response)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Streams wait behind it after their header."""
    from pipeline.restoration import service

    opened, real = threading.Event(), service.stream

    def held(restored: Any, plan: Any, layers: Any) -> Iterator[bytes]:
        pieces = real(restored, plan, layers)
        yield next(pieces)
        opened.wait(10)
        yield from pieces

    monkeypatch.setattr(service, "stream", held)
    yield opened
    opened.set()


def test_a_full_service_says_when_to_come_again(kept: Kept, free_port: int, gate: threading.Event) -> None:
    with Server(kept, free_port, limits={"concurrency": 2, "waiting": 0}) as server:
        with server.asked({"token_ids": PROMPT}) as one, server.asked({"token_ids": PROMPT}) as two:
            assert one.status == two.status == 200
            refused = server.refused({"token_ids": PROMPT}, 503, "try again")
            assert int(refused.headers["retry-after"]) >= 1
            with server.asked(path="/healthz", method="GET") as response:
                assert response.status == 200
            gate.set()
            for response in (one, two):
                assert same(pairs_of(safetensors.torch.load(response.read()), range(3)), kept.truth(PROMPT))
        assert until(lambda: server.service.busy == 0)
        server.tensors({"token_ids": PROMPT})
        assert server.metrics()['kv_restore_requests_total{status="503"}'] == 1


def test_who_finds_no_place_waits_for_one(kept: Kept, free_port: int, gate: threading.Event) -> None:
    with Server(kept, free_port, limits={"concurrency": 1, "waiting": 2}) as server, ThreadPoolExecutor(2) as clients:
        with server.asked({"token_ids": PROMPT}) as one:
            waiting = [clients.submit(server.tensors, {"token_ids": PROMPT}) for _ in range(2)]
            assert until(lambda: server.service.waiting == 2)
            server.refused({"token_ids": PROMPT}, 503, "try again")
            gate.set()
            one.read()
        for answer in waiting:
            assert same(pairs_of(answer.result(60)[0], range(3)), kept.truth(PROMPT))
        assert until(lambda: server.service.busy == 0) and server.service.waiting == 0


def test_who_waits_too_long_for_a_place_is_told(kept: Kept, free_port: int, gate: threading.Event) -> None:
    with (
        Server(kept, free_port, limits={"concurrency": 1, "deadline": 0.5}) as server,
        server.asked({"token_ids": PROMPT}) as one,
    ):
        assert one.status == 200
        assert server.refused({"token_ids": PROMPT}, 503, "in time").headers["retry-after"]
        assert server.service.waiting == 0
        gate.set()
        with suppress(http.client.IncompleteRead, ConnectionError):  # it may be over the deadline by now
            one.read()


def test_a_client_that_leaves_makes_room(kept: Kept, free_port: int, gate: threading.Event) -> None:
    with Server(kept, free_port, limits={"concurrency": 1}) as server:
        for _ in range(3):
            with socket.create_connection((LOOPBACK, free_port)) as raw:
                body = json.dumps({"token_ids": PROMPT}).encode()
                raw.sendall(b"POST /v1/restore HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
                assert raw.recv(12) == b"HTTP/1.1 200"
            assert until(lambda: server.service.busy == 0)
        gate.set()
        server.tensors({"token_ids": PROMPT})
        assert server.metrics()['kv_restore_aborted_total{reason="left"}'] == 3


def test_a_stream_over_its_deadline_is_cut(kept: Kept, free_port: int, gate: threading.Event) -> None:
    with Server(kept, free_port, limits={"deadline": 0.5}) as server:
        with server.asked({"token_ids": PROMPT}) as response:
            assert response.status == 200
            time.sleep(0.8)
            gate.set()
            with pytest.raises((http.client.IncompleteRead, ConnectionError)):
                response.read()
        assert until(lambda: server.service.busy == 0)
        assert server.metrics()['kv_restore_aborted_total{reason="late"}'] == 1
