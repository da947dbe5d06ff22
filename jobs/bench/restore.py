"""`restore`: how long a stored prefix takes to come back, against prefilling it and against fetching the raw cache.

Calibrates and encodes as `rate` does; then each evaluation prompt is restored and compared with the checksums of the target's cache:
decoded as a whole, layer by layer, from blobs that are there, and over links, where later blobs arrive while earlier ones are decoded.
A link is real: a server process on the loopback address behind a token bucket. All are medians over prompts and repeats, in seconds a
prompt; predictor and profile are loaded, as in a service. With one thread, seconds without a link are of processor time, so that
processes beside it count less; compare them with those over links only on a machine that does nothing else.

prefill_seconds   the target over the whole prompt in one pass
decode_seconds    the blobs, already fetched, to K and V of all layers; first_layer_seconds: until the first of them
links             by bandwidth: raw_seconds, to fetch the raw cache; restore_seconds, from asking for the first blob to the last layer;
                  busy_seconds, what of that was processor time; fetch_seconds, the blobs alone;
                  reached_bits_per_s, what the machine made of the bandwidth with the raw cache
worth_below_bits_per_s   over slower links than this restoring is sooner done than fetching the raw cache. Computed: all but the first
                  blob come while others are decoded
planned           what jobs/plan.py says of prefill_seconds and decode_seconds on this machine, without corpus or calibration, and each
                  over what was measured: prefill_ratio, decode_ratio. None with what it does not weigh: windows, open loops, FP8 caches,
                  other coders
verified          every chunk came back with the checksums taken before encoding, each time
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import codec
from codec import checksums, rans
from codec.errors import UserError
from jobs.bench import rate
from jobs.bench.decode_process import StoredPrompt
from jobs.bench.link import Link, LinkedStore
from jobs.bench.machine import describe
from jobs.bench.rate import Settings
from jobs.bench.speeds import Wanted, measure_target
from pipeline.model_source import RUN_DTYPES
from pipeline.paths import blob_path
from pipeline.restoration.catalogue import Chunk, Generation, Match
from pipeline.restoration.restorer import Restoration, Workshop
from pipeline.store import Store
from pipeline.target import Target

Note = Callable[[str], None]
Layers = list[tuple[Tensor, Tensor]]
RAW = "raw"
LINKS = {"100 Mb/s": 1e8, "1 Gb/s": 1e9, "10 Gb/s": 1e10}
TOKENS, TRAIN, TEST, REPEATS = 2048, 4, 2, 3


@dataclass(frozen=True)
class Prompt:
    """A stored prompt: what is asked for, where its blobs are, and what must come back, in hexadecimal."""

    ids: np.ndarray[Any, np.dtype[np.int64]]
    match: Match
    blobs: list[str]
    checksums: Sequence[str]


@dataclass
class Times:
    """Seconds of each repeat on each prompt, and whether everything was right."""

    prefill: list[float] = field(default_factory=list)
    decode: list[float] = field(default_factory=list)
    first_layer: list[float] = field(default_factory=list)
    links: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    right: bool = True
    clock: Callable[[], float] = time.perf_counter  # of what needs no link


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
    if plan := r["planned"]:
        ratios = f"prefill {plan['prefill_ratio']:.2f} and decode {plan['decode_ratio']:.2f} of what was measured"
        out.append(("jobs/plan.py says", ratios))
    out.append(("restoring beats raw", f"below {r['worth_below_bits_per_s'] / 1e6:,.0f} Mb/s"))
    out.append(("verified", "all chunks" if r["verified"] else "NO: decoded bits differ from the target's"))
    return [*out, ("machine", f"{m['cpu']}, {s['threads']} threads of {m['cores']} cores, load {m['load']}")]


@torch.no_grad()
def measure(settings: Settings, folder: Path, note: Note, repeats: int) -> dict[str, Any]:
    """The figures as documented above. Raises UserError, DataError, StorageError. Sets this process' number of torch threads."""
    machine, (target, identity, train, test) = describe(), rate.prepare(settings, note)
    store = Store.open(str(folder / "store"))
    predictor, profile = rate.calibrate(settings, target, identity, store, train, note)
    encoded = rate.encode_prompts(settings, target, predictor, profile, store, test, note)
    generation = Generation(
        identity, profile.id, predictor.fingerprint, profile.cache_format, settings.chunk_tokens, ""
    )
    chunks, raw = len(encoded.checksums) // len(test), encoded.raw_bytes // len(test)
    prompts = [
        _prompt(store, generation, stored, encoded.checksums[number * chunks : (number + 1) * chunks])
        for number, stored in enumerate(encoded.prompts)
    ]
    (folder / RAW).write_bytes(bytes(raw))
    times = Times(clock=time.process_time if settings.threads == 1 else time.perf_counter)
    workshop = Workshop(LinkedStore(store))
    note("timing")
    _decode(
        workshop, prompts[0], Times()
    )  # loads the predictor; compiled loops are loaded or compiled at their first use
    for number, prompt in enumerate(prompts):
        for _ in range(repeats):
            times.prefill.append(_prefill(target, test[number], times.clock))
            _decode(workshop, prompt, times)
        _over_links(workshop, prompt, repeats, times, folder, note)
    found = {"prefill": statistics.median(times.prefill), "decode": statistics.median(times.decode)}
    planned = _planned(settings, target, found, Wanted((settings.predictor,), settings.tokens, settings.chunk_tokens, target.cache_format,
                                                       repeats, times.clock), note)  # fmt: skip
    stored = int(statistics.median(prompt.match.stored_bytes for prompt in prompts))
    first = statistics.median(prompt.match.chunks[0].stored_bytes for prompt in prompts)
    return {
        "prefill_seconds": found["prefill"],
        "decode_seconds": found["decode"],
        "first_layer_seconds": statistics.median(times.first_layer),
        "links": {name: _link(found, raw) for name, found in times.links.items()},
        "worth_below_bits_per_s": 8 * (raw - first) / found["decode"],
        "planned": planned,
        "raw_bytes": raw,
        "stored_bytes": stored,
        "verified": times.right,
        "repeats": repeats,
        "settings": rate.shown(settings, target),
        "machine": machine,
    }


def _planned(
    settings: Settings, target: Target, found: dict[str, float], wanted: Wanted, note: Note
) -> dict[str, float] | None:
    """What jobs/plan.py makes of the same prefix, and how that compares with what was measured."""
    odd = settings.loop != "closed" or settings.window is not None or settings.coder != rans.NAME
    if odd or target.cache_format not in RUN_DTYPES:
        return None
    case = measure_target(target, wanted, note)
    said = {"prefill": case.prefill_seconds, "decode": case.rungs[0].decode_seconds}
    ratios = {f"{name}_ratio": seconds / found[name] for name, seconds in said.items()}
    return {f"{name}_seconds": seconds for name, seconds in said.items()} | ratios


def _link(found: dict[str, list[float]], raw: int) -> dict[str, float]:
    medians = {f"{name}_seconds": statistics.median(values) for name, values in found.items()}
    return medians | {"reached_bits_per_s": 8 * raw / medians["raw_seconds"]}


def _prompt(store: Store, generation: Generation, stored: StoredPrompt, sums: Sequence[str]) -> Prompt:
    """What the index would say of a prompt that was encoded here."""
    keys = [bytes.fromhex(key) for key in stored.keys]
    paths = [blob_path(generation.target, generation.profile, key) for key in keys]
    chunks = []
    for number, (key, path) in enumerate(zip(keys, paths, strict=True)):
        blob = store.get(path)
        header = codec.read_header(blob)
        digest = checksums.chain(header.parent_digest, header.layer_checksums)
        chunks.append(Chunk(key, number * generation.chunk_tokens, header.tokens, digest, len(blob)))
    return Prompt(np.array(stored.token_ids), Match(generation, tuple(chunks)), paths, sums)


def _prefill(target: Target, ids: Tensor, clock: Callable[[], float]) -> float:
    cache = target.new_cache()
    begin = clock()
    target.prefill(cache, ids)
    return clock() - begin


def _decode(workshop: Workshop, prompt: Prompt, times: Times) -> None:
    """A prompt's blobs, which are there, decoded together."""
    restored = workshop.open(prompt.ids, [prompt.match])
    begin = times.clock()
    layers = []
    for number, pair in restored.layers():
        layers.append(pair)
        if not number:
            times.first_layer.append(times.clock() - begin)
    times.decode.append(times.clock() - begin)
    times.right &= _right(restored, layers, prompt)


def _over_links(workshop: Workshop, prompt: Prompt, repeats: int, times: Times, folder: Path, note: Note) -> None:
    """Over each link in its turn: the raw cache, the blobs alone, and a restored prefix."""
    store = workshop.store
    assert isinstance(store, LinkedStore)
    files = {path: folder / "store" / path for path in prompt.blobs} | {RAW: folder / RAW}
    for name, bandwidth in LINKS.items():
        note(f"restoring over {name}")
        found = times.links.setdefault(name, {"raw": [], "fetch": [], "restore": [], "busy": []})
        with Link(files, bandwidth, folder) as store.link:
            for _ in range(repeats):
                begin = time.perf_counter()
                store.link.get(RAW)
                raw = time.perf_counter()
                for path in prompt.blobs:
                    store.link.get(path)
                fetched, idle = time.perf_counter(), time.process_time()
                restored = workshop.open(prompt.ids, [prompt.match], decode=True)
                layers = restored.load()
                end, busy = time.perf_counter(), time.process_time()
                for side, seconds in zip(found, (raw - begin, fetched - raw, end - fetched, busy - idle), strict=True):
                    found[side].append(seconds)
                times.right &= _right(restored, layers, prompt)
        store.link = None


def _right(restored: Restoration, layers: Layers, prompt: Prompt) -> bool:
    """Whether every chunk has the checksums that were taken before it was encoded."""
    parts = [slice(chunk.first_token, chunk.first_token + chunk.tokens) for chunk in prompt.match.chunks]
    fmt = restored.decoder.profile.format
    sums = [checksums.layer_checksums([(k[:, part], v[:, part]) for k, v in layers], fmt).hex() for part in parts]
    return sums == list(prompt.checksums)
