"""`coder`: how many scalars a second one core codes, under the laws of a real model's layers.

Calibrates a closed loop, records the predictor's guesses for the evaluation prompts, and then codes their caches again and again:
the predictor's time is in no figure. One thread; seconds are of processor time, so that processes beside it count less; sides take turns,
and each figure is the median of its repeats. Every side's round trip is compared bit for bit before it is timed.

encode_scalars_per_s               the entropy stage alone: patterns under known laws (mean, sigma) to bytes; decode: back
*_joint                            the same with the joint model: the laws are found, too, channel after channel
*_constriction                     the same with the constriction backend instead of rANS, channel after channel, as it has to be
*_torch                            with --torch DEVICE: the entropy stage in torch operations on that device, laws included, many streams at
                                   once; by the clock, as such a device is not the processor. Its bytes are compared with rANS's
*_gaussian                         constriction's own QuantizedGaussian on integers of the same spread: what it does at best. It does not
                                   code the cache (rare values are clipped, and there is no escape)
bytes, bytes_constriction          of the bitstreams; bits_per_scalar: of rANS
d_kv                               by width of K and V of a token: the cost of decoding with a made-up joint model, ns_per_scalar; of
                                   encoding: encode_ns_per_scalar. d_kv_ratio: the last one's ns_per_scalar over the first one's
spread                             of a side: the slowest repeat over the fastest
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import constriction
import numpy as np
import torch
from torch import Tensor

import codec
from codec import entropy, rans, scalars
from codec.cells import Ints
from codec.closed_loop import ClosedLoop
from codec.coders import Coder
from codec.errors import DataError, UserError
from codec.formats import NumberFormat
from codec.geometry import Geometry
from codec.loop import Pair, follow
from jobs.arguments import device
from jobs.bench import rate, torch_coder
from jobs.bench.machine import describe
from jobs.bench.one_core import OneCore, add_one_core
from jobs.bench.synthetic import Sweep, sweep
from jobs.bench.torch_coder import Law
from jobs.bench.turns import Note, take_turns
from pipeline.store import Store

CODERS = {"rans": rans.NAME, "constriction": entropy.BACKEND}
Layers = list[tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Settings(OneCore):
    """What is measured; the names are those of the command line."""

    d_kv: Sequence[int] = (192, 1024)
    torch: str | None = None

    def check(self) -> None:
        """Raise UserError for the first value that cannot be."""
        super().check()
        if self.torch is not None:
            torch_coder.check_device(self.torch)
        for width in self.d_kv:
            if not 64 <= width <= 4096 or width % 64:
                raise UserError(f"--d-kv {width} must be a multiple of 64 from 64 to 4096")


@dataclass(frozen=True)
class Chunk:
    """A chunk of a cache, what was guessed of it, and its laws, layer by layer."""

    truth: Layers
    guesses: list[Pair]
    turns: list[Pair]
    laws: list[list[Law]]

    @property
    def scalars(self) -> int:
        """K and V of all layers."""
        layers, scalars = self.sizes
        return layers * scalars

    @property
    def sizes(self) -> tuple[int, int]:
        """(layers, scalars of each)"""
        return len(self.truth), sum(t.numel() for t in self.truth[0])


# ---------------------------------------------------------------- command line
def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `coder`."""
    given = Settings("", "", "")
    add_one_core(parser, given)
    parser.add_argument(
        "--d-kv", type=int, nargs="*", default=list(given.d_kv), metavar="N",
        help="widths to compare with made-up joint models (default: 192 1024); none to leave this out",
    )  # fmt: skip
    parser.add_argument(
        "--torch",
        type=device,
        metavar="DEVICE",
        help="measure the torch path on this device, too: cpu, cuda (default: do not)",
    )


def run(arguments: argparse.Namespace, note: Note) -> dict[str, Any]:
    """Measure; `note` is told what is going on."""
    settings = Settings(**{f.name: getattr(arguments, f.name) for f in fields(Settings)})
    settings.check()
    with tempfile.TemporaryDirectory(prefix="kv-coder-") as folder:
        return measure(settings, Path(folder), note)


def rows(result: dict[str, Any]) -> list[tuple[str, str]]:
    """The figures for people."""
    s, m, r = result["settings"], result["machine"], result

    def speed(suffix: str) -> str:
        encode, decode = (r[f"{way}_scalars_per_s{suffix}"] / 1e6 for way in ("encode", "decode"))
        return f"encode {encode:.1f}, decode {decode:.1f} M scalars/s"

    out = [
        ("laws", f"{s['predictor']}, {s['cache_dtype']} cache, {r['scalars']:,} scalars in chunks of {s['chunk_tokens']}"),
        ("rANS", speed("")), ("rANS, joint model", speed("_joint")), ("constriction", speed("_constriction")),
        ("QuantizedGaussian", speed("_gaussian")),
        *([("rANS, torch", f"{speed('_torch')}, on {s['torch']}")] if s["torch"] else []),
        ("size", f"{r['bits_per_scalar']:.4f} bits a scalar; {r['bytes'] / r['bytes_constriction']:.4f} of constriction's"),
    ]  # fmt: skip
    for width, cost in r["d_kv"].items():
        text = f"{cost['ns_per_scalar']:.1f} ns a scalar, encode {cost['encode_ns_per_scalar']:.1f}"
        out.append((f"joint model, d_kv {width}", text))
    if r["d_kv_ratio"]:
        out.append(("widest over narrowest", f"{r['d_kv_ratio']:.2f}x"))
    out.append(("verified", "every side" if r["verified"] else "NO: decoded bits differ"))
    out.append(("machine", f"{m['cpu']}, one thread of {m['cores']} cores, load {m['load']}"))
    return out


# ---------------------------------------------------------------- the measurement
@torch.no_grad()
def measure(settings: Settings, folder: Path, note: Note) -> dict[str, Any]:
    """The figures as documented above. Sets this process' number of torch threads. Raises UserError, DataError."""
    given, machine = settings.rate(), describe()
    target, identity, train, test = rate.prepare(given, note)
    predictor, profile = rate.calibrate(given, target, identity, Store.open(str(folder / "store")), train, note)
    loop = profile.loop_codec
    if not isinstance(loop, ClosedLoop):
        raise UserError("coder measures the closed loop")
    note("recording guesses and laws")
    chunks: list[Chunk] = []
    for ids in test:
        cache, state = target.new_cache(), predictor.new_state()
        chunks += [
            observe(predictor, profile, loop, state, x, target.prefill(cache, x))
            for x in ids.split(settings.chunk_tokens)
        ]
    coders = {name: Coder(backend, profile.coder.table, profile.format) for name, backend in CODERS.items()}
    sizes, sides, verified = make_sides(chunks, loop, coders, profile.format)
    seconds = take_turns(sides, settings.repeats, note, time.process_time)
    if settings.torch is not None:
        laws = [chunk.laws for chunk in chunks]
        more, same = torch_coder.make_sides(laws, put(coders["rans"], chunks), coders["rans"], settings.torch)
        seconds |= take_turns(more, settings.repeats, note)
        verified &= same
    costs = sweep(Sweep(settings.d_kv, settings.chunk_tokens, settings.repeats), note)
    return figures(sum(c.scalars for c in chunks), seconds, sizes, costs) | {
        "verified": verified,
        "settings": rate.shown(given, target)
        | {"repeats": settings.repeats, "d_kv": list(settings.d_kv), "torch": settings.torch},
        "machine": machine,
    }


def observe(
    predictor: codec.Predictor,
    profile: codec.Profile,
    loop: ClosedLoop,
    state: codec.PredictorState,
    ids: Tensor,
    truth: Layers,
) -> Chunk:
    """What encoding this chunk computes before anything becomes bits; takes its tokens into `state`."""
    run, carry, layers = predictor.run([state], [ids]), None, predictor.config.layers
    chunk = Chunk(truth, [], [], [])
    factors = None if profile.scales is None else profile.scales.values.astype(np.float64)
    for layer in range(layers):
        guess, turn = run.guess(layer)[0], run.turns()[0]
        geometry = Geometry(guess, turn, profile.facts.rope_dim, None if factors is None else factors[layer])
        laws, following = loop.known(layer, truth[layer], guess, turn, carry)
        patterns = [geometry.channels(profile.format.patterns(t)) for t in truth[layer]]
        order = (geometry.k_order, np.arange(len(geometry.v)))
        parts = [[np.ascontiguousarray(x[s][order[s]]) for x in (patterns, laws.mean, laws.sigma)] for s in (0, 1)]
        chunk.guesses.append(guess)
        chunk.turns.append(turn)
        chunk.laws.append([(s, *parts[s]) for s in (1, 0)])
        carry = following.carry
        if layer < layers - 1:
            follow(run, layer, [following])
    run.commit()
    return chunk


def make_sides(
    chunks: Sequence[Chunk], loop: ClosedLoop, coders: dict[str, Coder], fmt: NumberFormat
) -> tuple[dict[str, int], dict[str, Callable[[], object]], bool]:
    """(bytes of each coder's streams, what to time by name of the figure's suffix, whether all came back as it was)."""
    sides: dict[str, Callable[[], object]] = {}
    sizes, good = dict[str, int](), True
    for name, coder in coders.items():
        suffix = "" if name == "rans" else "_" + name
        streams = put(coder, chunks)
        sizes["bytes" + suffix] = sum(len(s) for some in streams for s in some)
        for chunk, found in zip(chunks, read(coder, chunks, streams), strict=True):
            known = [patterns for layer in chunk.laws for _, patterns, _, _ in layer]
            good &= all(np.array_equal(a, b) for a, b in zip(known, found, strict=True))
        sides[f"encode{suffix}"] = lambda c=coder: put(c, chunks)
        sides[f"decode{suffix}"] = lambda c=coder, s=streams: read(c, chunks, s)
    coder = coders["rans"]
    streams = put_joint(loop, coder, chunks)
    good &= streams == put(coder, chunks)
    for chunk, values in zip(chunks, read_joint(loop, coder, chunks, streams), strict=True):
        pairs = zip(chunk.truth, values, strict=True)
        good &= all(np.array_equal(*map(fmt.patterns, both)) for pair in pairs for both in zip(*pair, strict=True))
    sides["encode_joint"] = lambda: put_joint(loop, coder, chunks)
    sides["decode_joint"] = lambda: read_joint(loop, coder, chunks, streams)
    encode, decode = gaussian_sides(chunks, fmt)
    return sizes, sides | {"encode_gaussian": encode, "decode_gaussian": decode}, good


def put(coder: Coder, chunks: Sequence[Chunk]) -> list[list[bytes]]:
    """Streams of each chunk, from known laws."""
    out = []
    for chunk in chunks:
        writer = coder.writer(*chunk.sizes)
        for layer in chunk.laws:
            writer.layer()
            for part in layer:
                writer.channels(*part)
        out.append(writer.finish().streams)
    return out


def read(coder: Coder, chunks: Sequence[Chunk], streams: Sequence[list[bytes]]) -> list[list[Ints]]:
    """Patterns of each chunk in the order in which they were coded, from known laws."""
    out = []
    for chunk, some in zip(chunks, streams, strict=True):
        reader, found = coder.reader(some, *chunk.sizes), list[Ints]()
        for layer in chunk.laws:
            reader.layer()
            for side, _, mean, sigma in layer:
                source = reader.source
                if source is not None:
                    found.append(scalars.read_scaled(source.coder, mean, sigma, source.tables))
                else:
                    found.append(np.stack([reader.channel(side, m, s) for m, s in zip(mean, sigma, strict=True)]))
        reader.finish()
        out.append(found)
    return out


def put_joint(loop: ClosedLoop, coder: Coder, chunks: Sequence[Chunk]) -> list[list[bytes]]:
    """Streams of each chunk, from its guesses."""
    out = []
    for chunk in chunks:
        writer, carry = coder.writer(*chunk.sizes), None
        for layer, (truth, guess, turn) in enumerate(zip(chunk.truth, chunk.guesses, chunk.turns, strict=True)):
            writer.layer()
            carry = loop.encode(layer, truth, guess, turn, False, writer, carry).next.carry
        out.append(writer.finish().streams)
    return out


def read_joint(loop: ClosedLoop, coder: Coder, chunks: Sequence[Chunk], streams: Sequence[list[bytes]]) -> list[Layers]:
    """Caches of each chunk, from its guesses."""
    out = []
    for chunk, some in zip(chunks, streams, strict=True):
        reader, carry, layers = coder.reader(some, *chunk.sizes), None, Layers()
        for layer, (guess, turn) in enumerate(zip(chunk.guesses, chunk.turns, strict=True)):
            reader.layer()
            decoded = loop.decode(layer, reader, guess, turn, carry)
            layers.append(decoded.values)
            carry = decoded.next.carry
        reader.finish()
        out.append(layers)
    return out


def gaussian_sides(chunks: Sequence[Chunk], fmt: NumberFormat) -> tuple[Callable[[], object], Callable[[], object]]:
    """Encoding and decoding of residuals as whole steps of about sigma / 6 by constriction's own model."""
    model = constriction.stream.model.QuantizedGaussian(-127, 127)
    laws = [part for chunk in chunks for layer in chunk.laws for part in layer]
    spread = np.concatenate([sigma.reshape(-1) for *_, sigma in laws])
    off = np.concatenate([(fmt.values(p) - mean).reshape(-1) for _, p, mean, _ in laws])
    step = np.exp2(np.floor(np.log2(spread)) - 2)
    with np.errstate(invalid="ignore", over="ignore"):
        steps = np.nan_to_num(np.clip(off / step, -127, 127)).round().astype(np.int32)
    mean, sigma = np.zeros(len(steps)), spread / step

    def encode() -> Any:
        coder = constriction.stream.stack.AnsCoder()
        coder.encode_reverse(steps, model, mean, sigma)
        return coder.get_compressed()

    words = encode()
    if not np.array_equal(constriction.stream.stack.AnsCoder(words).decode(model, mean, sigma), steps):
        raise DataError("constriction's QuantizedGaussian did not give its integers back; reinstall constriction")
    return encode, lambda: constriction.stream.stack.AnsCoder(words).decode(model, mean, sigma)


def figures(
    count: int, seconds: dict[str, list[float]], sizes: dict[str, int], costs: dict[int, dict[str, float]]
) -> dict[str, Any]:
    """Medians of each side's repeats, and sizes, of `count` scalars."""
    speeds = {}
    for name, times in seconds.items():
        way, _, suffix = name.partition("_")
        speeds[f"{way}_scalars_per_s" + (f"_{suffix}" if suffix else "")] = count / statistics.median(times)
    widths = list(costs)
    return speeds | sizes | {
        "scalars": count,
        "bits_per_scalar": 8 * sizes["bytes"] / count,
        "spread": {name: max(times) / min(times) for name, times in seconds.items()},
        "d_kv": {str(width): cost for width, cost in costs.items()},
        "d_kv_ratio": costs[widths[-1]]["ns_per_scalar"] / costs[widths[0]]["ns_per_scalar"] if widths else None,
    }  # fmt: skip
