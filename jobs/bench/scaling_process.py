"""One point of `scaling` in a process of its own: `encode`, `decode`, `restore` or `index`.

python -m jobs.bench.scaling_process REQUEST.json
"""

from __future__ import annotations

import hashlib
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

import codec
from codec import checksums
from jobs.bench.child import answer
from jobs.bench.machine import peak_rss_bytes, reset_peak, rss_bytes
from jobs.bench.made_up import made_up_parts
from pipeline import committed, index
from pipeline.model_source import resolve_model
from pipeline.paths import blob_path, index_prefix
from pipeline.store import Store
from pipeline.target import load_target, run_format
from pipeline.work import Job, load_predictor, load_profile
from pipeline.worker_process import give_back, settle


def work(request: dict[str, Any]) -> Mapping[str, Any]:
    """Do what the request names."""
    doing: dict[str, Callable[[dict[str, Any]], Mapping[str, Any]]] = {
        "encode": encode,
        "decode": decode,
        "restore": restore,
        "index": fill,
    }
    with torch.no_grad():
        return doing[request["do"]](request)


class _Point:
    """What encoding and decoding of one prompt share."""

    def __init__(self, request: dict[str, Any]) -> None:
        settle(request["threads"])
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
    times, prefills, sums = list[float](), list[float](), list[str]()
    before = raw = 0

    def once(chunks: Sequence[torch.Tensor], stores: bool) -> tuple[float, float]:
        nonlocal raw
        cache, state, parent, seconds = target.new_cache(), point.predictor.new_state(), codec.ROOT_DIGEST, [0.0, 0.0]
        for number, ids in enumerate(chunks):
            begin = time.perf_counter()
            truth = target.prefill(cache, ids)
            middle = time.perf_counter()
            give_back()  # as pipeline.encode does
            where = point.identity(number, parent, state.length)
            chunk = codec.encode(point.predictor, point.profile, state, ids, truth, where, shared=True)
            give_back()
            seconds[0] += middle - begin
            seconds[1] += time.perf_counter() - middle
            parent = chunk.chain_digest
            if stores:
                raw += sum(t.numel() * t.element_size() for pair in truth for t in pair)
                sums.append(chunk.layer_checksums.hex())
                point.store.put_new(point.path(number), chunk.blob)
        return seconds[0], seconds[1]

    once(point.ids[:1], False)  # warms up
    before = _zero()
    for repeat in range(request["repeats"]):
        prefill, seconds = once(point.ids, repeat == 0)
        prefills.append(prefill)
        times.append(seconds)
    return {
        "seconds": statistics.median(times), "target_seconds": statistics.median(prefills), "checksums": sums, "raw_bytes": raw,
        "loaded_bytes": before, "peak_bytes": peak_rss_bytes(),
    }  # fmt: skip


def _zero() -> int:
    """What is held before the measurement; the peak is counted from here on."""
    give_back()
    reset_peak()
    return rss_bytes()


def decode(request: dict[str, Any]) -> Mapping[str, Any]:
    """Decode the prompt from the store chunk by chunk, as often as asked: as one who reads its chunks in order."""
    point = _Point(request)
    times, sums = list[float](), list[str]()

    def once(chunks: Sequence[torch.Tensor], found: list[str]) -> float:
        state, parent, seconds = point.predictor.new_state(forgets=True), codec.ROOT_DIGEST, 0.0
        for number, ids in enumerate(chunks):
            blob = point.store.get(point.path(number))
            where = point.identity(number, parent, state.length)
            begin = time.perf_counter()
            chunk = codec.decode(point.predictor, point.profile, state, ids, blob, where)
            seconds += time.perf_counter() - begin
            parent = chunk.chain_digest
            found.append(checksums.layer_checksums(chunk.layers, point.profile.format).hex())
        return seconds

    once(point.ids[:1], [])  # warms up
    before = _zero()
    for repeat in range(request["repeats"]):
        times.append(once(point.ids, [] if repeat else sums))
    return {
        "seconds": statistics.median(times), "checksums": sums, "loaded_bytes": before, "peak_bytes": peak_rss_bytes(),
    }  # fmt: skip


def restore(request: dict[str, Any]) -> Mapping[str, Any]:
    """Decode all chunks of the prompt together, a layer at a time, as often as asked: what a restored prefix costs."""
    point = _Point(request)
    times, parts = list[float](), [list[str]() for _ in point.ids]

    def once(chunks: int, found: list[list[str]]) -> float:
        task, seconds = _prefix(point, chunks), 0.0
        decoding = codec.decode_prefixes(point.predictor, point.profile, [task], keep=False)
        for _ in range(point.predictor.config.layers):
            begin = time.perf_counter()
            ((key, value),) = next(decoding)
            seconds += time.perf_counter() - begin
            pairs = zip(*(t.split(request["chunk_tokens"], 1) for t in (key, value)), strict=True)
            for sums, pair in zip(found, pairs, strict=True):
                sums.append(checksums.layer_checksums([pair], point.profile.format).hex())
        return seconds

    once(1, [[]])  # warms up
    before = _zero()
    for repeat in range(request["repeats"]):
        times.append(once(len(point.ids), [[] for _ in point.ids] if repeat else parts))
    return {
        "seconds": statistics.median(times), "checksums": ["".join(sums) for sums in parts], "loaded_bytes": before,
        "peak_bytes": peak_rss_bytes(),
    }  # fmt: skip


def _prefix(point: _Point, chunks: int) -> codec.PrefixTask:
    """The prompt's first chunks as stored."""
    blobs = [point.store.get(point.path(number)) for number in range(chunks)]
    identities, first = list[codec.ChunkIdentity](), 0
    for number, ids in enumerate(point.ids[:chunks]):
        identities.append(point.identity(number, codec.read_header(blobs[number]).parent_digest, first))
        first += len(ids)
    return codec.PrefixTask(point.predictor.new_state(), torch.cat(point.ids[:chunks]), blobs, identities)


# ---------------------------------------------------------------- the index
def fill(request: dict[str, Any]) -> Mapping[str, Any]:
    """Write index rows of made-up chunks, then look a corpus up among them, as planning does."""
    store, count = Store.open(request["store"]), request["rows"]
    target, profile = (
        hashlib.blake2b(b"target", digest_size=32).digest(),
        hashlib.blake2b(b"profile", digest_size=32).digest(),
    )
    begin = time.perf_counter()
    for part in made_up_parts(map(_key, range(count)), target, profile):
        index.write_part(store, part)
    written = time.perf_counter()
    before = _zero()
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


if __name__ == "__main__":
    sys.exit(answer(work))
