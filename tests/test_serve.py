"""jobs/serve.py in a process of its own, on Ray Serve, with real HTTP clients."""

from __future__ import annotations

import http.client
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import safetensors.torch

from codec.errors import UserError
from pipeline.current import point_first, read_pointers
from pipeline.restoration.serving import ServeOptions
from tests.conftest import REPO_ROOT
from tests.made_store import RECORDS, Made, make
from tests.ports import LOOPBACK, free_ports
from tests.stored import CHUNK, Kept, same, tokens_of
from tests.test_recompress import A, Site
from tests.test_recompress_job import recompress
from tests.test_restoration import forge
from tests.test_service import pairs_of

JOB = REPO_ROOT / "jobs" / "serve.py"
PROMPT = tokens_of(1, 2 * CHUNK + 9)
BROKEN = tokens_of(2, 2 * CHUNK)
TOKEN = "only-for-this-test"
START = 400.0


@contextmanager
def serving(kept: Kept | Made, port: int, folder: Path, *more: str) -> Iterator[subprocess.Popen[bytes]]:
    """The job, ready; ended by its pid."""
    command = [
        sys.executable, str(JOB), "--store", kept.store.uri, "--model", kept.job.target.hex(), "--port", str(port),
        "--token-env", "KV_TEST_TOKEN", *more,
    ]  # fmt: skip
    with open(folder / "serve.err", "wb") as errors:
        process = subprocess.Popen(
            command, stdout=errors, stderr=errors, cwd=folder, env=os.environ | {"KV_TEST_TOKEN": TOKEN}
        )
    try:
        end = time.monotonic() + START
        while b"serving on" not in (folder / "serve.err").read_bytes():
            assert process.poll() is None and time.monotonic() < end, (folder / "serve.err").read_text()
            time.sleep(0.2)
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def ask(port: int, ids: list[int], token: str = TOKEN) -> tuple[int, bytes, http.client.HTTPMessage]:
    """Raises what http.client raises for a body that is cut short."""
    connection = http.client.HTTPConnection(LOOPBACK, port, timeout=120)
    try:
        body = json.dumps({"token_ids": ids})
        connection.request("POST", "/v1/restore", body, {"authorization": f"Bearer {token}"})
        response = connection.getresponse()
        return response.status, response.read(), response.headers
    finally:
        connection.close()


def get(port: int, path: str) -> str:
    connection = http.client.HTTPConnection(LOOPBACK, port, timeout=60)
    try:
        connection.request("GET", path, headers={"authorization": f"Bearer {TOKEN}"})
        return connection.getresponse().read().decode()
    finally:
        connection.close()


def listening(process: subprocess.Popen[bytes], port: int) -> set[str]:
    """Addresses that the job's processes accept connections to this port on."""
    found = set()
    for one in [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]:
        for connection in one.net_connections("inet"):
            if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port:
                found.add(connection.laddr.ip)
    return found


@pytest.mark.slow
def test_the_service_from_start_to_end(tiny_model: Path, tmp_path: Path, free_port: int) -> None:
    kept = Kept(tiny_model, tmp_path / "store", kind="static")
    kept.put({"prompt": PROMPT, "broken": BROKEN})
    forge(kept.blob(BROKEN, 1))
    with serving(kept, free_port, tmp_path, "--concurrency", "3") as process:
        assert listening(process, free_port) == {LOOPBACK}
        status, data, headers = ask(free_port, [*PROMPT, 7])
        assert (
            status == 200 and headers["x-kv-tokens"] == str(len(PROMPT)) and len(data) == int(headers["content-length"])
        )
        assert same(pairs_of(safetensors.torch.load(data), range(3)), kept.truth(PROMPT))
        assert ask(free_port, PROMPT, "wrong")[0] == 401
        assert ask(free_port, tokens_of(5, 40))[0] == 404
        for _ in range(3):
            with pytest.raises((http.client.IncompleteRead, ConnectionError)):
                ask(free_port, BROKEN)
        _many(kept, free_port)
        counts = get(free_port, "/metrics")
        assert 'kv_restore_aborted_total{reason="failed"} 3.0' in counts and 'status="401"' in counts
        assert json.loads(get(free_port, "/healthz"))["status"] == "ok"
        _survives(kept, free_port, process)
    assert process.returncode == 0, (tmp_path / "serve.err").read_text()
    text = (tmp_path / "serve.err").read_text()
    assert TOKEN not in text and "Traceback" not in text
    with pytest.raises(OSError):
        ask(free_port, PROMPT)


def _many(kept: Kept, port: int) -> None:
    """More clients than places: each gets the whole right answer, or a 503 that says when to come again."""
    truth, wrong, answers = kept.truth(PROMPT), [], []

    def client() -> None:
        for _ in range(5):
            status, data, headers = ask(port, PROMPT)
            answers.append(status)
            if status == 503:
                wrong.extend([] if int(headers["retry-after"]) >= 1 else ["no retry-after"])
            elif status != 200 or not same(pairs_of(safetensors.torch.load(data), range(3)), truth):
                wrong.append(f"{status} {data[:200]!r}")

    threads = [threading.Thread(target=client) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong and len(answers) == 40 and 200 in answers


def _survives(kept: Kept, port: int, process: subprocess.Popen[bytes]) -> None:
    """A replica that is killed is replaced."""
    replicas = []
    for child in psutil.Process(process.pid).children(recursive=True):
        title = "".join(child.cmdline()[:1])
        if "ServeReplica" in title:
            replicas.append(child.pid)
    assert len(replicas) == 1
    os.kill(replicas[0], signal.SIGKILL)
    end = time.monotonic() + 120
    while True:
        try:
            status, data, _ = ask(port, PROMPT)
            if status == 200:
                break
        except (OSError, http.client.HTTPException):
            pass
        assert time.monotonic() < end, "no replica came back"
        time.sleep(0.5)
    assert same(pairs_of(safetensors.torch.load(data), range(3)), kept.truth(PROMPT))


@pytest.mark.slow
def test_two_services_while_their_store_is_recompressed(tmp_path: Path) -> None:
    """By name: all old caches until the job has verified the new ones, then all new ones. By fingerprint: the old ones."""
    site = Site(tmp_path, RECORDS)
    made, old, first = make(site.options), site.fingerprint(), site.truth(A)
    point_first(made.store, "mymodel", "bf16", (old, made.job.profile))
    site.weights(5)
    new, second = site.fingerprint(), site.truth(A)
    (config := tmp_path / "job.yaml").write_text(f"model: {site.model}\nactors: 1\n")
    ports, folders = free_ports(2), [tmp_path / "named", tmp_path / "fixed"]
    for folder in folders:
        folder.mkdir()
    answers: dict[int, list[bytes]] = {port: [] for port in ports}
    wrong, over = list[str](), threading.Event()
    truths = {old.hex(): first, new.hex(): second}

    def client(port: int) -> None:
        while not over.wait(0.2):
            status, data, headers = ask(port, A)
            if status != 200 or not same(
                pairs_of(safetensors.torch.load(data), range(3)), truths[headers["x-kv-target"]]
            ):
                wrong.append(f"{status} {data[:200]!r}")
                return
            answers[port].append(bytes.fromhex(headers["x-kv-target"]))
            pointed = read_pointers(made.store).current("mymodel", "bf16")
            if answers[port][-1] == new and pointed is not None and pointed.target == old:
                wrong.append("the new cache before the pointer was moved")

    more = "--refresh", "0.5", "--keep-decoded", "0"
    with (
        serving(made, ports[0], folders[0], *more, "--model", "mymodel"),
        serving(made, ports[1], folders[1], *more),
        ThreadPoolExecutor(2) as threads,
    ):
        clients = [threads.submit(client, port) for port in ports]
        try:
            status, said = recompress(made.store.uri, config)
            assert status == 0 and "readers of mymodel now follow" in said, said
            end = time.monotonic() + 60
            while answers[ports[0]][-1:] != [new] and time.monotonic() < end and not wrong:
                time.sleep(0.2)
            time.sleep(2)  # more than a refresh
        finally:
            over.set()
        for running in clients:
            running.result()
        assert not wrong and set(answers[ports[1]]) == {old}
        switch = answers[ports[0]].index(new)
        assert switch > 3 and set(answers[ports[0]][:switch]) == {old} and set(answers[ports[0]][switch:]) == {new}
        assert json.loads(get(ports[0], "/healthz"))["target"] == new.hex()
    for folder in folders:
        assert "Traceback" not in (folder / "serve.err").read_text()


@pytest.mark.slow
def test_what_keeps_it_from_starting_is_one_sentence(tiny_model: Path, tmp_path: Path, free_port: int) -> None:
    kept = Kept(tiny_model, tmp_path / "store", kind="static")
    kept.put({"prompt": PROMPT})
    asked = {"store": kept.store.uri, "model": kept.job.target.hex(), "port": str(free_port)}
    for changed, words in (
        ({"model": "nobody"}, "no name in the index"), ({"store": str(tmp_path / "no")}, "there is no store"),
        ({"port": "0"}, "--port 0"), ({"replicas": "0"}, "--replicas 0 must be at least 1"),
        ({"replicas": "100000"}, "--replicas 100000 is too many for the"), ({"token_env": "KV_NOT_SET"}, "KV_NOT_SET"),
    ):  # fmt: skip
        pairs = [t for name, value in (asked | changed).items() for t in (f"--{name.replace('_', '-')}", value)]
        done = subprocess.run([sys.executable, str(JOB), *pairs], capture_output=True, text=True, timeout=120)
        assert done.returncode == 2 and words in done.stderr, done.stderr
        assert done.stderr.startswith("error: ") and len(done.stderr.strip().splitlines()) == 1


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"port": 70000}, "--port"), ({"host": " "}, "--host"), ({"replicas": 0}, "--replicas"), ({"concurrency": 0}, "--concurrency"),
        ({"waiting": -1}, "--waiting"), ({"keep_decoded": "lots"}, "--keep-decoded"),
        ({"max_body": 0}, "--max-body"), ({"max_tokens": -1}, "--max-tokens"), ({"deadline": 0.0}, "--deadline"),
        ({"refresh": float("inf")}, "--refresh"), ({"device": "tpu"}, "--device"), ({"cache_dtype": "x"}, "--cache-dtype"),
        ({"salt_env": "KV_NOT_SET"}, "--salt-env"), ({"token_env": "KV_NOT_SET"}, "--token-env"),
    ],
)  # fmt: skip
def test_options_that_cannot_be(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        replace(ServeOptions("s", "m"), **changes).check()


@pytest.mark.parametrize("token", ["h\u00fcsh", " hush", "hush\n"])
def test_a_token_that_no_header_carries_is_refused(token: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KV_TEST_BEARER", token)
    with pytest.raises(UserError, match="plain ASCII") as error:
        replace(ServeOptions("s", "m"), token_env="KV_TEST_BEARER").check()
    assert "sh" not in str(error.value)
