"""`peers`: the codec beside others on the same real caches: ratio, and speed on one core.

The target's caches of the evaluation prompts, chunk by chunk as the job stores them, go through each side. Repeats take turns and figures
are medians; seconds are of processor time, so that processes beside it count less. What a side gives back is compared bit for bit with
what it was given before it is timed; `verified` is false if any differs. General compressors get a chunk's bytes, K and V of all layers,
at the levels in their names, one thread each. Ours and the published method include their predictor's pass over the tokens, which the
others do not have, their headers and their checksums.

sides      by name: ratio (raw bytes over compressed), encode_gb_per_s and decode_gb_per_s (of raw bytes), bytes,
           spread (the slowest repeat over the fastest, encoding)
skipped    by name: why a peer was not measured
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import codec
from codec import entropy
from codec.formats import NumberFormat
from jobs.bench import rate
from jobs.bench.general import Peer, general_peers
from jobs.bench.machine import describe
from jobs.bench.one_core import OneCore, add_one_core
from jobs.bench.turns import Note, take_turns
from pipeline.store import Store

Layers = list[tuple[Tensor, Tensor]]
PUBLISHED = ("fp8", "open", entropy.BACKEND)  # rung, loop and coder of the published method


@dataclass(frozen=True)
class Settings(OneCore):
    """What is measured; the names are those of the command line."""

    tokens: int = 1024
    train: int = 12
    test: int = 2
    repeats: int = 3


@dataclass(frozen=True)
class Cache:
    """One prompt's cache: token ids and true layers of each chunk, and the chunks' bytes."""

    ids: list[Tensor]
    truth: list[Layers]
    raw: list[bytes]


# ---------------------------------------------------------------- command line
def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `peers`."""
    add_one_core(parser, Settings("", "", ""))


def run(arguments: argparse.Namespace, note: Note) -> dict[str, Any]:
    """Measure; `note` is told what is going on."""
    settings = Settings(**{f.name: getattr(arguments, f.name) for f in fields(Settings)})
    settings.check()
    with tempfile.TemporaryDirectory(prefix="kv-peers-") as folder:
        return measure(settings, Path(folder), note)


def rows(result: dict[str, Any]) -> list[tuple[str, str]]:
    """The figures for people."""
    s, m = result["settings"], result["machine"]
    out = [
        ("caches", f"{s['test']} prompts of {s['tokens']:,} tokens, {s['cache_dtype']}, {result['raw_bytes']:,} bytes")
    ]
    for name, side in result["sides"].items():
        speed = f"encode {side['encode_gb_per_s']:.4f}, decode {side['decode_gb_per_s']:.4f} GB/s"
        out.append((name, f"{side['ratio']:.3f}x, {speed}"))
    out += [(name, f"skipped: {why}") for name, why in result["skipped"].items()]
    out.append(("verified", "every side" if result["verified"] else "NO: a side gave other bits back"))
    out.append(("machine", f"{m['cpu']}, one thread of {m['cores']} cores, load {m['load']}"))
    return out


# ---------------------------------------------------------------- the measurement
@torch.no_grad()
def measure(settings: Settings, folder: Path, note: Note) -> dict[str, Any]:
    """The figures as documented above. Sets this process' number of torch threads. Raises UserError, DataError."""
    given, machine = settings.rate(), describe()
    target, identity, train, test = rate.prepare(given, note)
    store = Store.open(str(folder / "store"))
    predictor, profile = rate.calibrate(given, target, identity, store, train, note)
    fmt, caches = profile.format, []
    for ids in test:
        cache, parts = target.new_cache(), list(ids.split(settings.chunk_tokens))
        truth = [target.prefill(cache, part) for part in parts]
        caches.append(Cache(parts, truth, [raw_bytes(layers, fmt) for layers in truth]))
    found, skipped = general_peers(fmt)
    for name, why in skipped.items():
        note(f"skipping {name}: {why}")
    sides = {peer.name: _General(peer, caches) for peer in found}
    rung, loop, coder = PUBLISHED
    other = replace(given, predictor=rung, loop=loop, coder=coder, window=None)
    note("calibrating the published method")
    sides["published open-loop method"] = _Ours(*rate.calibrate(other, target, identity, store, train, note), caches)
    with_constriction = replace(profile, facts=replace(profile.facts, coder=entropy.BACKEND))
    sides["ours, constriction"] = _Ours(predictor, with_constriction, caches)
    sides["ours"] = _Ours(predictor, profile, caches)
    return compare(sides, sum(len(raw) for c in caches for raw in c.raw), settings.repeats, note) | {
        "skipped": skipped,
        "settings": rate.shown(given, target) | {"repeats": settings.repeats},
        "machine": machine,
    }


def compare(sides: dict[str, Any], raw: int, repeats: int, note: Note) -> dict[str, Any]:
    """Verify each side and let them take turns. A side has encode() -> sizes, decode() -> object and good() -> bool."""
    good = {name: side.good() for name, side in sides.items()}
    for name in (name for name, well in good.items() if not well):
        note(f"{name} does not give back what it was given")
    timed = {f"{name}: {way}": getattr(side, way) for name, side in sides.items() for way in ("encode", "decode")}
    seconds, out = take_turns(timed, repeats, note, time.process_time), {}
    for name, side in sides.items():
        encode, decode = (seconds[f"{name}: {way}"] for way in ("encode", "decode"))
        out[name] = {
            "ratio": raw / side.bytes, "bytes": side.bytes, "encode_gb_per_s": raw / statistics.median(encode) / 1e9,
            "decode_gb_per_s": raw / statistics.median(decode) / 1e9, "spread": max(encode) / min(encode), "verified": good[name],
        }  # fmt: skip
    return {"sides": out, "raw_bytes": raw, "verified": all(good.values())}


def raw_bytes(layers: Layers, fmt: NumberFormat) -> bytes:
    """A chunk as the cache holds it: K, then V, layer by layer."""
    return b"".join(fmt.little_endian(t) for pair in layers for t in pair)


@dataclass
class _General:
    """A compressor of bytes over all chunks."""

    peer: Peer
    caches: Sequence[Cache]

    def __post_init__(self) -> None:
        self._packed = self._encode()
        self.bytes = sum(len(x) for x in self._packed)

    def _encode(self) -> list[bytes]:
        return [self.peer.encode(raw) for c in self.caches for raw in c.raw]

    def encode(self) -> object:
        return self._encode()

    def decode(self) -> list[bytes]:
        return [self.peer.decode(x) for x in self._packed]

    def good(self) -> bool:
        return self.decode() == [raw for c in self.caches for raw in c.raw]


class _Ours:
    """This codec over all chunks of all prompts, predictor and all."""

    def __init__(self, predictor: codec.Predictor, profile: codec.Profile, caches: Sequence[Cache]) -> None:
        self._predictor, self._profile, self._caches = predictor, profile, caches
        self._blobs = self.encode()
        self.bytes = sum(len(blob) for some in self._blobs for blob in some)

    def encode(self) -> list[list[bytes]]:
        out = []
        for cache in self._caches:
            state, parent, blobs = self._predictor.new_state(), codec.ROOT_DIGEST, []
            for ids, truth in zip(cache.ids, cache.truth, strict=True):
                where = self._identity(parent, state.length)
                chunk = codec.encode(self._predictor, self._profile, state, ids, truth, where)
                parent = chunk.chain_digest
                blobs.append(chunk.blob)
            out.append(blobs)
        return out

    def decode(self) -> list[list[Layers]]:
        out = []
        for cache, blobs in zip(self._caches, self._blobs, strict=True):
            state, parent, found = self._predictor.new_state(), codec.ROOT_DIGEST, []
            for ids, blob in zip(cache.ids, blobs, strict=True):
                where = self._identity(parent, state.length)
                chunk = codec.decode(self._predictor, self._profile, state, ids, blob, where)
                parent = chunk.chain_digest
                found.append(chunk.layers)
            out.append(found)
        return out

    def good(self) -> bool:
        fmt = self._profile.format
        found = [[raw_bytes(layers, fmt) for layers in chunks] for chunks in self.decode()]
        return found == [c.raw for c in self._caches]

    def _identity(self, parent: bytes, first: int) -> codec.ChunkIdentity:
        return codec.ChunkIdentity(self._profile.target, bytes(32), parent, first)
