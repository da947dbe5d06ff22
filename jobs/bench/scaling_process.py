"""One point of `scaling` in a process of its own: `encode`, `decode` or `index`.

python -m jobs.bench.scaling_process REQUEST.json
"""

from __future__ import annotations

import datetime
import hashlib
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

import codec
from codec import checksums
from jobs.bench.child import answer
from jobs.bench.machine import peak_rss_bytes, reset_peak, rss_bytes
from pipeline import committed, index
from pipeline.model_source import resolve_model
from pipeline.paths import blob_path, index_prefix
from pipeline.store import Store
from pipeline.target import load_target, run_format
from pipeline.work import Job, load_predictor, load_profile

ROWS_A_PART = 5000


def work(request: dict[str, Any]) -> Mapping[str, Any]:
    """Do what the request names."""
    doing: dict[str, Callable[[dict[str, Any]], Mapping[str, Any]]] = {
        "encode": encode,
        "decode": decode,
        "index": fill,
    }
    with torch.no_grad():
        return doing[request["do"]](request)


class _Point:
    """What encoding and decoding of one prompt share."""

    def __init__(self, request: dict[str, Any]) -> None:
        torch.set_num_threads(request["threads"])
        self.store = Store.open(request["store"], create=False)
        self.target, self.id = bytes.fromhex(request["target"]), bytes.fromhex(request["profile"])
        self.predictor = load_predictor(self.store, bytes.fromhex(request["predictor"]), "cpu")
        self.profile = load_profile(self.store, self.id, target=self.target, cache_format=request["cache_format"])
        self.ids = torch.tensor(request["token_ids"]).split(request["chunk_tokens"])
        self.keys = [hashlib.blake2b(str(x).encode(), digest_size=32).digest() for x in range(len(self.ids))]

    def identity(self, number: int, parent: bytes, first: int) -> codec.ChunkIdentity:
        return codec.ChunkIdentity(self.target, self.keys[number], parent, first)

    def path(self, number: int) -> str:
        return blob_path(self.target, self.id, self.keys[number])


def encode(request: dict[str, Any]) -> Mapping[str, Any]:
    """Prefill and encode the prompt, as often as asked; the blobs of the first time go to the store."""
    point, source = _Point(request), resolve_model(request["model"])
    target = load_target(source, run_format(source, request["cache_format"]))
    target = target.with_cache(request["cache_format"], point.profile.scales)
    times: list[float] = []
    prefills: list[float] = []
    sums: list[str] = []
    before = raw = 0
    for repeat in range(request["repeats"] + 1):  # the first time warms up, on one chunk
        if repeat == 1:
            before = rss_bytes()
            reset_peak()
        cache, state, parent, seconds = target.new_cache(), point.predictor.new_state(), codec.ROOT_DIGEST, [0.0, 0.0]
        for number, ids in enumerate(point.ids if repeat else point.ids[:1]):
            begin = time.perf_counter()
            truth = target.prefill(cache, ids)
            middle = time.perf_counter()
            where = point.identity(number, parent, state.length)
            chunk = codec.encode(point.predictor, point.profile, state, ids, truth, where)
            seconds[0] += middle - begin
            seconds[1] += time.perf_counter() - middle
            parent = chunk.chain_digest
            if repeat == 1:
                raw += sum(t.numel() * t.element_size() for pair in truth for t in pair)
                sums.append(chunk.layer_checksums.hex())
                point.store.put_new(point.path(number), chunk.blob)
        if repeat:
            prefills.append(seconds[0])
            times.append(seconds[1])
    return {
        "seconds": statistics.median(times), "target_seconds": statistics.median(prefills), "checksums": sums, "raw_bytes": raw,
        "loaded_bytes": before, "peak_bytes": peak_rss_bytes(),
    }  # fmt: skip


def decode(request: dict[str, Any]) -> Mapping[str, Any]:
    """Decode the prompt from the store, as often as asked."""
    point = _Point(request)
    times, sums, before = list[float](), list[str](), 0
    for repeat in range(request["repeats"] + 1):
        if repeat == 1:
            before = rss_bytes()
            reset_peak()
        state, parent, seconds = point.predictor.new_state(), codec.ROOT_DIGEST, 0.0
        for number, ids in enumerate(point.ids if repeat else point.ids[:1]):
            blob = point.store.get(point.path(number))
            where = point.identity(number, parent, state.length)
            begin = time.perf_counter()
            chunk = codec.decode(point.predictor, point.profile, state, ids, blob, where)
            seconds += time.perf_counter() - begin
            parent = chunk.chain_digest
            if repeat == 1:
                sums.append(checksums.layer_checksums(chunk.layers, point.profile.format).hex())
        if repeat:
            times.append(seconds)
    return {
        "seconds": statistics.median(times), "checksums": sums, "loaded_bytes": before, "peak_bytes": peak_rss_bytes(),
    }  # fmt: skip


# ---------------------------------------------------------------- the index
def fill(request: dict[str, Any]) -> Mapping[str, Any]:
    """Write index rows of made-up chunks, then look a corpus up among them, as planning does."""
    store, count = Store.open(request["store"]), request["rows"]
    target, profile = (
        hashlib.blake2b(b"target", digest_size=32).digest(),
        hashlib.blake2b(b"profile", digest_size=32).digest(),
    )
    begin = time.perf_counter()
    for part in _parts(count, target, profile):
        index.write_part(store, part)
    written = time.perf_counter()
    before = rss_bytes()
    reset_peak()
    job = Job(store, resolve_model(request["model"]), target, "bf16", 256, "int8", "closed", "", profile=profile)
    numbers = range(0, 2 * count, max(1, 2 * count // request["asked"]))  # half of them are there
    asked = {_key(number) for number in numbers}
    known = committed.find_committed(job, asked)
    planned, peak = time.perf_counter(), peak_rss_bytes()
    found = len(known.figures) + len(known.lost)
    files = [store.size(path) for path in store.list(index_prefix(target, profile))]
    return {
        "rows": count, "parts": len(files), "bytes": sum(files), "write_seconds": written - begin, "asked": len(asked), "found": found,
        "plan_seconds": planned - written, "plan_peak_bytes": peak - before, "right": found == sum(n < count for n in numbers),
    }  # fmt: skip


def _key(number: int) -> bytes:
    return hashlib.blake2b(number.to_bytes(8, "little"), digest_size=32).digest()


def _parts(count: int, target: bytes, profile: bytes) -> Iterator[list[dict[str, Any]]]:
    common = {
        "parent_key": None, "model": "made-up", "target": target, "predictor": bytes(32), "profile": profile, "cache_format": "bf16",
        "fp8_scale": None, "loop": "closed", "chunk_tokens": 256, "prefill_tokens": 256, "raw_bytes": 11_796_480, "header_bytes": 2000,
        "scalars_k": 2_949_120, "scalars_v": 2_949_120, "ideal_bits_k": None, "ideal_bits_v": None, "parent_digest": bytes(16),
        "tenant": "", "root_key": None, "layer_bits": None, "layer_spread": None, "layer_miss": None,
        "created": datetime.datetime.now(datetime.UTC), "host_arch": platform.machine(),
        "torch_version": torch.__version__, "device": "cpu",
    }  # fmt: skip
    for begin in range(0, count, ROWS_A_PART):
        rows = []
        for number in range(begin, min(begin + ROWS_A_PART, count)):
            key = _key(number)
            rows.append(common | {
                "key": key, "chunk_index": number % 32, "first_token": 256 * (number % 32), "tokens": 256,
                "stored_bytes": 2_000_000 + number % 7919, "bytes_k": 900_000 + number % 7919, "bytes_v": 1_098_000,
                "escapes": number % 31, "layer_checksums": key * 30, "chain_digest": key[:16],
            })  # fmt: skip
        yield rows


if __name__ == "__main__":
    sys.exit(answer(work))
