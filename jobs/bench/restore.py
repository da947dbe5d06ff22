"""`restore`: how long a stored prefix takes to come back, against prefilling it and against fetching the raw cache.

Calibrates and encodes as `rate` does; then each evaluation prompt is fetched and decoded as a whole, layer by layer, and compared with the
checksums of the target's cache. The link is real: a socket on the loopback address behind a token bucket. All are medians over
prompts and repeats, in seconds a prompt; predictor and profile are loaded, as in a service.

prefill_seconds   the target over the whole prompt in one pass
decode_seconds    the blobs, already fetched, to K and V of all layers; first_layer_seconds: until the first of them
links             by bandwidth: raw_seconds, to fetch the raw cache; restore_seconds, to fetch the blobs (fetch_seconds) and decode them;
                  reached_bits_per_s, what the machine made of the bandwidth with the raw cache
verified          every chunk came back with the checksums taken before encoding
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

import codec
from codec import checksums
from codec.errors import UserError
from jobs.bench import rate
from jobs.bench.decode_process import StoredPrompt
from jobs.bench.link import fetch_seconds
from jobs.bench.machine import describe
from jobs.bench.rate import Settings
from pipeline.paths import blob_path
from pipeline.store import Store
from pipeline.target import Target

Note = Callable[[str], None]
LINKS = {"100 Mb/s": 1e8, "1 Gb/s": 1e9, "10 Gb/s": 1e10}
TOKENS, TRAIN, TEST, REPEATS = 2048, 4, 2, 3


@dataclass(frozen=True)
class Timed:
    """One decoding of one prompt."""

    first_layer: float
    seconds: float
    right: bool


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `rate`, and how often each thing is timed."""
    rate.add_arguments(parser)
    parser.set_defaults(tokens=TOKENS, train=TRAIN, test=TEST)
    parser.add_argument(
        "--repeats", type=int, default=REPEATS, metavar="N", help="timings of each (default: %(default)s)"
    )


def run(arguments: argparse.Namespace, note: Note) -> dict[str, Any]:
    """Measure in a temporary store; `note` is told what is going on."""
    settings = Settings(**{name: getattr(arguments, name) for name in Settings.__dataclass_fields__})
    settings.check()
    if arguments.repeats < 1:
        raise UserError(f"--repeats {arguments.repeats} must be at least 1")
    with tempfile.TemporaryDirectory(prefix="kv-restore-") as folder:
        return measure(settings, Path(folder), note, arguments.repeats)


def rows(result: dict[str, Any]) -> list[tuple[str, str]]:
    """The figures for people."""
    s, m, r = result["settings"], result["machine"], result
    out = [
        (
            "prompts",
            f"{s['test']} of {s['tokens']:,} tokens, {r['raw_bytes']:,} bytes raw and {r['stored_bytes']:,} stored each",
        ),
        ("predictor", f"{s['predictor']}, {s['loop']} loop, {s['cache_dtype']} cache"),
        ("prefill", f"{r['prefill_seconds']:.2f} s"),
        ("decode", f"{r['decode_seconds']:.2f} s, first layer after {r['first_layer_seconds']:.2f} s"),
    ]
    for name, link in r["links"].items():
        times = f"restored in {link['restore_seconds']:.2f} s, raw in {link['raw_seconds']:.2f} s"
        out.append((f"at {name}", f"{times} ({link['reached_bits_per_s'] / 1e9:.2f} Gb/s reached)"))
    out.append(("verified", "all chunks" if r["verified"] else "NO: decoded bits differ from the target's"))
    return [*out, ("machine", f"{m['cpu']}, {s['threads']} threads of {m['cores']} cores, load {m['load']}")]


@torch.no_grad()
def measure(settings: Settings, folder: Path, note: Note, repeats: int) -> dict[str, Any]:
    """The figures as documented above. Raises UserError, DataError, StorageError. Sets this process' number of torch threads."""
    machine, (target, identity, train, test) = describe(), rate.prepare(settings, note)
    store = Store.open(str(folder / "store"))
    predictor, profile = rate.calibrate(settings, target, identity, store, train, note)
    encoded = rate.encode_prompts(settings, target, predictor, profile, store, test, note)
    chunks = len(encoded.checksums) // len(test)
    prefills, decodings, sizes = [], [], []
    for number, (prompt, ids) in enumerate(zip(encoded.prompts, test, strict=True)):
        note(f"timing prompt {number + 1} of {len(test)}")
        wanted = encoded.checksums[number * chunks : (number + 1) * chunks]
        prefills += [_prefill(target, ids) for _ in range(repeats)]
        blobs = [store.get(blob_path(identity, profile.id, bytes.fromhex(key))) for key in prompt.keys]
        sizes.append(sum(map(len, blobs)))
        decode = partial(_decode, predictor, profile, prompt, blobs, wanted, settings.chunk_tokens)
        decode()  # compiled loops are loaded or compiled at their first use
        decodings += [decode() for _ in range(repeats)]
    raw, stored = encoded.raw_bytes // len(test), int(statistics.median(sizes))
    seconds = statistics.median(d.seconds for d in decodings)
    return {
        "prefill_seconds": statistics.median(prefills),
        "decode_seconds": seconds,
        "first_layer_seconds": statistics.median(d.first_layer for d in decodings),
        "links": {
            name: _link(bandwidth, raw, stored, seconds, repeats, note, name) for name, bandwidth in LINKS.items()
        },
        "raw_bytes": raw,
        "stored_bytes": stored,
        "verified": all(d.right for d in decodings),
        "repeats": repeats,
        "settings": rate.shown(settings, target),
        "machine": machine,
    }


def _link(
    bandwidth: float, raw: int, stored: int, decode: float, repeats: int, note: Note, name: str
) -> dict[str, float]:
    note(f"fetching at {name}")
    raws, blobs = ([fetch_seconds(size, bandwidth) for _ in range(repeats)] for size in (raw, stored))
    slow, fetched = statistics.median(raws), statistics.median(blobs)
    reached = 8 * raw / slow
    return {
        "raw_seconds": slow,
        "fetch_seconds": fetched,
        "restore_seconds": fetched + decode,
        "reached_bits_per_s": reached,
    }


def _prefill(target: Target, ids: torch.Tensor) -> float:
    cache = target.new_cache()
    begin = time.perf_counter()
    target.prefill(cache, ids)
    return time.perf_counter() - begin


def _decode(
    predictor: codec.Predictor, profile: codec.Profile, prompt: StoredPrompt, blobs: Sequence[bytes], wanted: Sequence[str], step: int
) -> Timed:  # fmt: skip
    """Decode one prompt's blobs together, and compare every chunk with its checksums, in hexadecimal."""
    headers = [codec.read_header(blob) for blob in blobs]
    identities = [
        codec.ChunkIdentity(profile.target, bytes.fromhex(key), header.parent_digest, number * step)
        for number, (key, header) in enumerate(zip(prompt.keys, headers, strict=True))
    ]
    task = codec.PrefixTask(predictor.new_state(), torch.tensor(prompt.token_ids), blobs, identities)
    begin = time.perf_counter()
    decoding = codec.decode_prefixes(predictor, profile, [task])
    layers = [next(decoding)[0]]
    first = time.perf_counter() - begin
    layers += [pair for (pair,) in decoding]
    seconds = time.perf_counter() - begin
    parts = [slice(i.first_token, i.first_token + h.tokens) for i, h in zip(identities, headers, strict=True)]
    sums = [checksums.layer_checksums([(k[:, p], v[:, p]) for k, v in layers], profile.format).hex() for p in parts]
    return Timed(first, seconds, sums == list(wanted))
