"""`service`: how the restoration service answers many clients at once, and whether all of it is right.

Starts jobs/serve.py on an existing store and asks it for prompts of that store, from many connections at a time. The first answer for a
prompt is compared with the checksums in the index, every other one with the first. A client that is told to come again waits and does.
Clients ask for the same few prompts in turn, as agents do; with --keep-decoded 0 the service decodes them again and again.

requests_per_s        caches that arrived whole
p50_seconds, p99_seconds   from a client's first try to the last byte, the times that it was sent away included
refused               answers 503: all places were taken
unanswered            clients that were sent away, or had no answer, for two minutes
cut                   answers that ended early, as those over the service's deadline do
wrong                 whole answers that held other bits; `verified` is false if there are any, cut or unanswered ones
memory                of the replicas, at the start, after every hundred requests, and at the end: requests answered so far, bytes, and
                      own_bytes, without what other processes have mapped, too (Ray's object store, through which answers go)
"""

from __future__ import annotations

import argparse
import http.client
import itertools
import json
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import psutil
import safetensors.torch
import xxhash

from codec import checksums
from codec.errors import DataError, UserError
from codec.formats import number_format
from jobs.bench.child import ROOT
from jobs.bench.machine import describe
from pipeline.catalogue import generations, read_generation, stored_prompts
from pipeline.committed import read_checksums
from pipeline.paths import index_prefix
from pipeline.prompts import PromptReader
from pipeline.restoration.targets import find_target
from pipeline.store import Store
from pipeline.verify import CHECKSUM_BYTES

Note = Callable[[str], None]
START_SECONDS = 300.0
TRIES_SECONDS = 120.0  # a client that was sent away for so long has failed
READ_MEMORY = 100  # requests between two readings
SERVE_FLAGS = {"concurrency": "N", "waiting": "N", "keep-decoded": "SIZE"}
REPLICA = "ServeReplica"  # in the command lines of replicas


@dataclass(frozen=True)
class Wanted:
    """One prompt: the request for it, and what its cache must be."""

    body: bytes
    sums: tuple[bytes, ...]  # of each chunk, as its index row has them
    chunk_tokens: int
    cache_format: str


@dataclass
class Seen:
    """What the clients saw."""

    seconds: list[float] = field(default_factory=list)
    refused: int = 0
    unanswered: int = 0
    cut: int = 0
    wrong: int = 0
    bytes: int = 0
    memory: list[Reading] = field(default_factory=list)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Store, load, and the service's own options."""
    add = parser.add_argument
    add("--store", required=True, metavar="URI", help="a store with prompts of the model")
    add("--model", required=True, metavar="MODEL", help="folder, GGUF file, fingerprint, or name in the store's index")
    add("--clients", type=int, default=32, metavar="N", help="connections at a time (default: %(default)s)")
    add("--seconds", type=float, default=60.0, metavar="S", help="how long they ask (default: %(default)g)")
    add("--requests", type=int, default=0, metavar="N", help="and at least until so many were answered (default: 0)")
    add(
        "--prompts", type=int, default=8, metavar="N", help="different prompts, the longest ones (default: %(default)s)"
    )
    add("--replicas", type=int, default=1, metavar="N", help="of the service (default: %(default)s)")
    for flag, metavar in SERVE_FLAGS.items():
        add(f"--{flag}", metavar=metavar, help="passed on to jobs/serve.py (default: as there)")


def run(given: argparse.Namespace, note: Note) -> dict[str, Any]:
    """Start the service, ask, and compare. Raises UserError, DataError, StorageError."""
    if given.clients < 1 or given.prompts < 1 or not given.seconds > 0:
        raise UserError("--clients and --prompts must be at least 1, and --seconds above 0")
    store = Store.open(given.store, create=False)
    wanted = find_prompts(store, find_target(store, given.model), given.prompts)
    note(f"starting the service for {len(wanted)} prompts")
    with served(given) as (port, pid):
        sizes, digests = zip(*(first_answer(port, one) for one in wanted), strict=True)
        note(f"{given.clients} clients for {given.seconds:g} s")
        seen, seconds = load(port, pid, wanted, digests, given)
    times = sorted(seen.seconds)
    return {
        "requests": len(times),
        "requests_per_s": len(times) / seconds,
        "p50_seconds": statistics.median(times) if times else None,
        "p99_seconds": times[min(len(times) - 1, len(times) * 99 // 100)] if times else None,
        "bytes_per_s": seen.bytes / seconds,
        "refused": seen.refused,
        "unanswered": seen.unanswered,
        "cut": seen.cut,
        "wrong": seen.wrong,
        "memory": [asdict(one) for one in seen.memory],
        "verified": seen.wrong == seen.cut == seen.unanswered == 0 and bool(times),
        "settings": {name: getattr(given, name) for name in ("model", "clients", "seconds", "replicas")}
        | {flag.replace("-", "_"): value for flag, value in _serve_flags(given).items()}
        | {"prompts": len(wanted), "bytes_a_prompt": int(statistics.mean(sizes))},
        "machine": describe(),
    }


def rows(result: dict[str, Any]) -> list[tuple[str, str]]:
    """The figures for people."""
    s, m = result["settings"], result["machine"]
    memory = [f"{one['own_bytes'] / 2**20:,.0f} ({one['requests']:,})" for one in result["memory"]]
    latency = (
        f"p50 {result['p50_seconds']:.2f} s, p99 {result['p99_seconds']:.2f} s" if result["requests"] else "no answer"
    )
    return [
        ("clients", f"{s['clients']}, {s['prompts']} prompts of {s['bytes_a_prompt']:,} bytes on average"),
        (
            "answered",
            f"{result['requests']:,}, {result['requests_per_s']:.2f} a second, {result['wrong']} wrong, {result['cut']} cut",
        ),
        ("latency", f"{latency}, {result['refused']:,} times sent away, {result['unanswered']:,} without an answer"),
        ("memory", f"{', '.join(memory)} MiB (after requests), without what is shared"),
        ("machine", f"{m['cpu']}, {m['cores']} cores, load {m['load']}"),
    ]


# ---------------------------------------------------------------- what to ask for
def find_prompts(store: Store, target: bytes, count: int) -> list[Wanted]:
    """The longest prompts that are stored to their end, without a tenant. UserError where there are none."""
    found: dict[tuple[bytes, ...], Wanted] = {}
    reader = PromptReader(store)
    for gen in generations(store, target=target.hex()).values():
        read_generation(store, gen, broken=_raise)
        sums = {
            key: one
            for part in store.list(index_prefix(gen.target, gen.profile))
            for key, one in read_checksums(store, part).items()
        }
        for prompt in stored_prompts(store, gen.target, gen.roots, gen.rows.__contains__):
            if not prompt.tenant and all(key in gen.rows for key in prompt.keys):
                ids = reader.tokens(prompt.part, prompt.row, prompt.n_tokens)
                body = json.dumps({"token_ids": ids.tolist()}).encode()
                fmt = gen.rows[prompt.keys[0]][0].cache_format
                found[prompt.keys] = Wanted(body, tuple(sums[key] for key in prompt.keys), prompt.chunk_tokens, fmt)
    if not found:
        raise UserError(f"the store {store.uri} holds no whole prompt of this target")
    return sorted(found.values(), key=lambda one: -len(one.body))[:count]


def _raise(path: str, error: object) -> None:
    raise DataError(f"{path}: {error}; verify the store first")


# ---------------------------------------------------------------- the service
@contextmanager
def served(given: argparse.Namespace) -> Iterator[tuple[int, int]]:
    """The service as its own process: port and process id."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    command = [sys.executable, str(ROOT / "jobs" / "serve.py"), "--store", given.store, "--model", given.model, "--port", str(port),
               "--replicas", str(given.replicas)]  # fmt: skip
    command += [word for flag, value in _serve_flags(given).items() for word in (f"--{flag}", value)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    try:
        until = time.monotonic() + START_SECONDS
        while not _healthy(port):
            if process.poll() is not None or time.monotonic() > until:
                said = (
                    process.stderr.read().strip().splitlines() if process.poll() is not None and process.stderr else []
                )
                raise DataError(f"the service did not start: {said[-1] if said else 'no answer in time'}")
            time.sleep(0.5)
        yield port, process.pid
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()


def _serve_flags(given: argparse.Namespace) -> dict[str, str]:
    """Those of SERVE_FLAGS that were given."""
    found = {flag: getattr(given, flag.replace("-", "_")) for flag in SERVE_FLAGS}
    return {flag: value for flag, value in found.items() if value is not None}


def _healthy(port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        connection.request("GET", "/healthz")
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


@dataclass(frozen=True)
class Reading:
    """Memory of the replicas after so many answers: all of it, and without what they share with other processes (Ray's object store)."""

    requests: int
    bytes: int
    own_bytes: int


def read_memory(pid: int, requests: int) -> Reading:
    """What the replicas of the service hold now."""
    total = own = 0
    for process in psutil.Process(pid).children(recursive=True):
        with suppress(psutil.Error):  # one that has just ended
            if REPLICA in " ".join(process.cmdline()):
                found = process.memory_info()
                total, own = total + found.rss, own + found.rss - found.shared
    return Reading(requests, total, own)


# ---------------------------------------------------------------- clients
def ask(port: int, body: bytes) -> tuple[int, bytes]:
    """Status and body of one answer; status 0 where it was cut short."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
    try:
        connection.request("POST", "/v1/restore", body)
        response = connection.getresponse()
        return response.status, response.read()
    except (OSError, http.client.HTTPException):
        return 0, b""
    finally:
        connection.close()


def first_answer(port: int, wanted: Wanted) -> tuple[int, bytes]:
    """Size and digest of a prompt's answer, found to hold the bits that were stored. DataError where it does not."""
    status, data = ask(port, wanted.body)
    if status != 200:
        raise DataError(f"the service answered a prompt of the store with status {status}")
    tensors, fmt = safetensors.torch.load(data), number_format(wanted.cache_format)
    count = len(wanted.sums[0]) // (2 * CHECKSUM_BYTES)
    layers = [(tensors[f"layers.{n}.key"], tensors[f"layers.{n}.value"]) for n in range(count)]
    for number, sums in enumerate(wanted.sums):
        part = slice(number * wanted.chunk_tokens, (number + 1) * wanted.chunk_tokens)
        if checksums.layer_checksums([(k[:, part], v[:, part]) for k, v in layers], fmt) != sums:
            raise DataError(f"the service answered with other bits than the index says, in chunk {number} of a prompt")
    return len(data), xxhash.xxh3_128(data).digest()


def load(
    port: int, pid: int, wanted: Sequence[Wanted], digests: Sequence[bytes], given: argparse.Namespace
) -> tuple[Seen, float]:
    """Let the clients ask for all prompts in turn; what they saw, and how long it took."""
    seen, lock, turns = Seen(), threading.Lock(), itertools.count()
    begin = time.monotonic()

    def over() -> bool:
        return time.monotonic() - begin >= given.seconds and len(seen.seconds) >= given.requests

    def client(number: int) -> None:
        waits = np.random.default_rng(number)
        while not over():
            which = next(turns) % len(wanted)
            start, status, refused, data = time.monotonic(), 503, 0, b""
            while status == 503 and time.monotonic() - start < TRIES_SECONDS:
                status, data = ask(port, wanted[which].body)
                if status == 503:
                    refused += 1
                    time.sleep(float(waits.uniform(0.2, 1.2)))
            right = status == 200 and xxhash.xxh3_128(data).digest() == digests[which]
            with lock:
                seen.refused += refused
                seen.bytes += len(data)
                if right:
                    seen.seconds.append(time.monotonic() - start)
                elif status == 503:
                    seen.unanswered += 1
                elif status == 0:
                    seen.cut += 1
                else:
                    seen.wrong += 1

    threads = [threading.Thread(target=client, args=(number,), daemon=True) for number in range(given.clients)]
    seen.memory.append(read_memory(pid, 0))
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        time.sleep(0.2)
        if len(seen.seconds) >= seen.memory[-1].requests + READ_MEMORY:
            seen.memory.append(read_memory(pid, len(seen.seconds)))
    seen.memory.append(read_memory(pid, len(seen.seconds)))
    return seen, time.monotonic() - begin
