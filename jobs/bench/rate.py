"""`rate`: how many bits a scalar the codec needs on one model and one corpus, and how fast it is.

Calibrates on prompts of one corpus, encodes prompts of another into a store, and decodes them in a separate process from
what is stored. Every prompt is stored on its own, also where prompts share a prefix, so that each counts once.

bits_per_scalar        bits of the blobs in the store, headers and all, over scalars; ratio: raw bytes over these bytes
bits_k, bits_v         of the bitstreams of K and of V alone
ideal_bits_*           sum of -log2 p over exact bins, over scalars; an untimed encoding of its own computes it. It counts at most
                       40 bits for a scalar, and the coder's tails are wider, so that far outliers can cost less than ideal
encode_tokens_per_s    tokens over the seconds in codec.encode; decode: in codec.decode, in the other process
target_tokens_per_s    tokens of the evaluation prompts over the seconds of the target's forward passes
peak_rss_bytes         of the process that loads the target, builds the predictor, calibrates and encodes
peak_rss_decode_bytes  of the process that decodes
verified               every chunk came back with the checksums taken from the target's cache before encoding
"""

from __future__ import annotations

import argparse
import functools
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import codec
from codec.errors import UserError
from codec.formats import number_format
from codec.scales import CacheScales
from jobs.arguments import add_cache, add_coder, add_loop
from jobs.bench.decode_process import Decoded, Request, StoredPrompt, decode_elsewhere
from jobs.bench.machine import describe, peak_rss_bytes
from jobs.bench.prompts import read_prompts
from pipeline.cache_scales import largest
from pipeline.calibration import closed_sample
from pipeline.model_source import load_config, load_tokenizer, resolve_cache_format, resolve_model
from pipeline.options import (
    DEFAULT_PREDICTOR,
    MAX_CHUNK_TOKENS,
    PREDICTORS,
    Options,
    check_loop,
    check_window,
    scale_mode,
)
from pipeline.paths import blob_path, predictor_path, profile_path
from pipeline.ray_runtime import available_cores
from pipeline.rung import Rung
from pipeline.store import Store
from pipeline.target import Target, kv_shape, load_target, run_format
from pipeline.target import context_length as context_length_of
from pipeline.work import put_predictor, put_profile
from pipeline.worker_process import settle

Note = Callable[[str], None]


@dataclass(frozen=True)
class Settings:
    """What is measured; the names are those of the command line. train, test: prompts, each of `tokens` tokens."""

    model: str
    calibration: str
    eval: str
    predictor: str = DEFAULT_PREDICTOR
    loop: str = Options.loop
    coder: str = Options.coder
    window: int | None = None
    cache_dtype: str | None = None
    fp8_scale: str | None = None
    tokens: int = 1024
    train: int = 12
    test: int = 6
    chunk_tokens: int = 256
    threads: int = field(default_factory=available_cores)

    def check(self) -> None:
        """Raise UserError for the first value that cannot be."""
        scale_mode(self.cache_dtype, self.fp8_scale)
        check_window(self.window)
        check_loop(self.predictor, self.loop, self.window)
        for name in ("tokens", "train", "test", "chunk_tokens", "threads"):
            top = MAX_CHUNK_TOKENS if name == "chunk_tokens" else 2**31 - 1
            if not 1 <= getattr(self, name) <= top:
                raise UserError(
                    f"--{name.replace('_', '-')} {getattr(self, name)} must be at least 1 and at most {top}"
                )


@dataclass
class Encoded:
    """What encoding the evaluation prompts came to; checksums in hexadecimal, a chunk each."""

    prompts: list[StoredPrompt] = field(default_factory=list)
    checksums: list[str] = field(default_factory=list)
    stats: list[codec.ChunkStats] = field(default_factory=list)
    stored_bytes: int = 0
    raw_bytes: int = 0
    tokens: int = 0
    target_seconds: float = 0.0
    encode_seconds: float = 0.0


# ---------------------------------------------------------------- command line
def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `rate`."""
    given = Settings("", "", "")
    add = parser.add_argument
    add_inputs(parser)
    add_loop(parser)
    add_coder(parser)
    add_cache(parser)
    for name, text in (
        ("tokens", "tokens of a prompt; shorter prompts are skipped"),
        ("train", "prompts to calibrate on"),
        ("test", "prompts to measure"),
        ("chunk_tokens", "tokens of a chunk, and of a prefill step"),
        ("threads", "torch threads, of target and codec alike"),
    ):
        flag = "--" + name.replace("_", "-")
        add(flag, type=int, default=getattr(given, name), metavar="N", help=text + " (default: %(default)s)")


def add_inputs(parser: argparse.ArgumentParser) -> None:
    """The target, the rung and the corpora, for every benchmark that calibrates."""
    add = parser.add_argument
    add("--model", required=True, metavar="PATH|GGUF|HUB_ID", help="the target")
    add("--calibration", required=True, metavar="URI", help="corpus to calibrate on")
    add("--eval", required=True, metavar="URI", help="corpus to measure")
    add(
        "--predictor",
        default=Settings.predictor,
        choices=PREDICTORS,
        help="the rung of the ladder (default: %(default)s)",
    )


def run(arguments: argparse.Namespace, note: Note) -> dict[str, Any]:
    """Measure in a temporary store; `note` is told what is going on."""
    settings = Settings(**{name: getattr(arguments, name) for name in Settings.__dataclass_fields__})
    settings.check()
    with tempfile.TemporaryDirectory(prefix="kv-rate-") as folder:
        return measure_rate(settings, Path(folder), note)


def rows(result: dict[str, Any]) -> list[tuple[str, str]]:
    """The figures for people."""
    s, m, r = result["settings"], result["machine"], result
    window = f" (window {s['window']})" if s["window"] else ""
    return [
        ("prompts", f"{s['test']} measured, {s['train']} for calibration, {s['tokens']:,} tokens each"),
        (
            "predictor",
            f"{s['predictor']}{window}, {s['loop']} loop, {_cache(s)} cache, chunks of {s['chunk_tokens']}",
        ),
        ("bits a scalar", f"{r['bits_per_scalar']:.3f} (K {r['bits_k']:.3f}, V {r['bits_v']:.3f})"),
        (
            "ideal code length",
            f"{r['ideal_bits_per_scalar']:.3f} (K {r['ideal_bits_k']:.3f}, V {r['ideal_bits_v']:.3f})",
        ),
        ("ratio", f"{r['ratio']:.3f}x ({r['raw_bytes']:,} bytes in {r['stored_bytes']:,})"),
        ("profile, predictor", f"{r['profile_bytes']:,} and {r['predictor_bytes']:,} bytes"),
        ("target", f"{r['target_tokens_per_s']:.1f} tokens/s"),
        ("encode, decode", f"{r['encode_tokens_per_s']:.1f} and {r['decode_tokens_per_s']:.1f} tokens/s"),
        (
            "peak memory",
            f"{r['peak_rss_bytes'] / 2**20:,.0f} MiB, decoding {r['peak_rss_decode_bytes'] / 2**20:,.0f} MiB",
        ),
        ("verified", f"{r['chunks']} chunks" if r["verified"] else "NO: decoded bits differ from the target's"),
        ("machine", f"{m['cpu']}, {s['threads']} threads of {m['cores']} cores, load {m['load']}, torch {m['torch']}"),
    ]


def _cache(settings: dict[str, Any]) -> str:
    scale = settings["fp8_scale"]
    return f"{settings['cache_dtype']} (scale: {scale})" if scale else str(settings["cache_dtype"])


# ---------------------------------------------------------------- the measurement
@torch.no_grad()
def measure_rate(settings: Settings, folder: Path, note: Note) -> dict[str, Any]:
    """Calibrate, encode into a store in `folder`, decode in another process; the figures as documented above.

    Raises UserError, DataError, StorageError. Sets this process' number of torch threads.
    """
    machine, (target, identity, train, test) = describe(), prepare(settings, note)
    cache_format = target.cache_format
    store = Store.open(str(folder / "store"))
    predictor, profile = calibrate(settings, target, identity, store, train, note)
    encoded = encode_prompts(settings, target, predictor, profile, store, test, note)
    peak = peak_rss_bytes()
    note("decoding in another process")
    names = (identity.hex(), predictor.fingerprint.hex(), profile.id.hex(), cache_format)
    request = Request(store.uri, *names, settings.chunk_tokens, settings.threads)
    decoded = decode_elsewhere(request, encoded.prompts, folder)
    sizes = {
        "profile_bytes": store.size(profile_path(profile.id)),
        "predictor_bytes": store.size(predictor_path(predictor.fingerprint)),
        "peak_rss_bytes": peak,
        "peak_rss_decode_bytes": decoded.peak_rss_bytes,
    }
    return figures(encoded, decoded) | sizes | {"settings": shown(settings, target), "machine": machine}


def prepare(settings: Settings, note: Note) -> tuple[Target, bytes, list[Tensor], list[Tensor]]:
    """The target with its cache's scales, its fingerprint, and the prompts to calibrate on and to measure."""
    settle(settings.threads)
    source = resolve_model(settings.model)
    cache_format = resolve_cache_format(source, settings.cache_dtype)
    limit = context_length_of(load_config(source))
    if settings.tokens > limit:
        raise UserError(f"--tokens {settings.tokens} is over the model's context length of {limit}")
    tokenizer = load_tokenizer(source)
    train, test = (
        read_prompts(uri, tokenizer, tokens=settings.tokens, count=count)
        for uri, count in ((settings.calibration, settings.train), (settings.eval, settings.test))
    )
    mode = scale_mode(cache_format, settings.fp8_scale)
    target = load_target(source, run_format(source, cache_format))
    target = target.with_cache(cache_format, make_scales(settings, target, cache_format, mode, train, note))
    return target, source.fingerprint(cache_format), train, test


def shown(settings: Settings, target: Target) -> dict[str, Any]:
    """The settings as a result names them, without folders: where files lie on one machine says nothing about the figures."""
    names = {name: getattr(settings, name).rstrip("/").rpartition("/")[2] for name in ("calibration", "eval")}
    scaled = None if target.scales is None else target.scales.mode
    more = {"model": target.source.name, "cache_dtype": target.cache_format, "fp8_scale": scaled}
    return asdict(settings) | more | names | {"prompts": [settings.train, settings.test]}


def make_scales(
    settings: Settings, target: Target, cache_format: str, mode: str, prompts: Sequence[Tensor], note: Note
) -> CacheScales | None:
    """Scales of an FP8 cache as the job makes them, from the calibration prompts; None for other formats ("")."""
    if not mode:
        return None
    layers, _, heads = kv_shape(target.config)
    if mode == "none":
        return CacheScales.none(layers, heads)
    note(f"calibrating the cache's scales on {len(prompts)} prompts")
    found = (largest(target, tokens, settings.chunk_tokens) for tokens in prompts)
    return CacheScales.calibrated(mode, functools.reduce(np.maximum, found), number_format(cache_format))


def calibrate(
    settings: Settings, target: Target, identity: bytes, store: Store, prompts: Sequence[Tensor], note: Note
) -> tuple[codec.Predictor, codec.Profile]:
    """Build predictor and profile, and put them into the store."""
    note("building the predictor")
    rung = Rung(settings.predictor, settings.loop, settings.window)
    ranges = rung.ranges(target, prompts) if rung.calibrated else None
    predictor = rung.build(target, ranges, prompts)
    put_predictor(store, predictor)
    fit = _calibrate_closed if settings.loop == "closed" else _calibrate_open
    profile = fit(settings, target, identity, predictor, prompts, note)
    put_profile(store, profile)
    return predictor, profile


def _calibrate_open(
    settings: Settings,
    target: Target,
    identity: bytes,
    predictor: codec.Predictor,
    prompts: Sequence[Tensor],
    note: Note,
) -> codec.Profile:
    moments = codec.Moments.zero(predictor.config)
    for number, tokens in enumerate(prompts):
        note(f"calibrating on prompt {number + 1} of {len(prompts)}")
        cache, state = target.new_cache(), predictor.new_state()
        for ids in _chunks(tokens, settings.chunk_tokens):
            moments.add(codec.measure(predictor, state, ids, target.prefill(cache, ids), target.scales))
    step = settings.chunk_tokens
    return codec.freeze(
        predictor,
        identity,
        target.cache_format,
        moments,
        prefill_tokens=step,
        scales=target.scales,
        coder=settings.coder,
    )


def _calibrate_closed(
    settings: Settings,
    target: Target,
    identity: bytes,
    predictor: codec.Predictor,
    prompts: Sequence[Tensor],
    note: Note,
) -> codec.Profile:
    note(f"running the target on {len(prompts)} calibration prompts")
    states = bool(predictor.config.hidden)
    samples = [closed_sample(target, tokens, settings.chunk_tokens, states=states) for tokens in prompts]
    note("calibrating layer by layer")
    step = settings.chunk_tokens
    return codec.calibrate_closed(
        predictor,
        identity,
        target.cache_format,
        samples,
        prefill_tokens=step,
        scales=target.scales,
        coder=settings.coder,
    )


def encode_prompts(
    settings: Settings, target: Target, predictor: codec.Predictor, profile: codec.Profile, store: Store,
    prompts: Sequence[Tensor], note: Note,
) -> Encoded:  # fmt: skip
    """Encode the evaluation prompts chunk by chunk, and put the blobs into the store."""
    out = Encoded()
    scales = b"" if target.scales is None else target.scales.to_bytes()
    for number, tokens in enumerate(prompts):
        note(f"encoding prompt {number + 1} of {len(prompts)}")
        # A salt a prompt: shared prefixes are stored again, so that the store holds what the rate is about.
        salt, fmt, step = number.to_bytes(4, "little"), profile.cache_format, settings.chunk_tokens
        root = codec.root_key(target=profile.target, cache_format=fmt, chunk_tokens=step, scales=scales, salt=salt)
        keys = codec.chunk_keys(root, tokens.numpy(), step)
        cache, state, parent = target.new_cache(), predictor.new_state(), codec.ROOT_DIGEST
        for key, ids in zip(keys, _chunks(tokens, step), strict=True):
            begin = time.perf_counter()
            truth = target.prefill(cache, ids)
            out.target_seconds += time.perf_counter() - begin
            where = codec.ChunkIdentity(profile.target, key, parent, state.length)
            parent = _encode_chunk(out, predictor, profile, state, ids, truth, where, store)
        out.prompts.append(StoredPrompt(tokens.tolist(), [key.hex() for key in keys]))
    return out


def _chunks(tokens: Tensor, step: int) -> list[Tensor]:
    return [tokens[begin : begin + step] for begin in range(0, len(tokens), step)]


def _encode_chunk(
    out: Encoded, predictor: codec.Predictor, profile: codec.Profile, state: codec.PredictorState, ids: Tensor,
    truth: list[tuple[Tensor, Tensor]], where: codec.ChunkIdentity, store: Store,
) -> bytes:  # fmt: skip
    """Encode twice: for the ideal code length, which also warms up, and then timed. Returns the chain digest."""
    stats = codec.encode(predictor, profile, state, ids, truth, where, ideal=True).stats
    state.truncate(where.first_token)
    begin = time.perf_counter()
    chunk = codec.encode(predictor, profile, state, ids, truth, where)
    out.encode_seconds += time.perf_counter() - begin
    path = blob_path(profile.target, profile.id, where.prefix_key)
    store.put_new(path, chunk.blob)
    out.checksums.append(chunk.layer_checksums.hex())
    out.stats.append(stats)
    out.stored_bytes += store.size(path)
    out.raw_bytes += sum(t.numel() * t.element_size() for pair in truth for t in pair)
    out.tokens += len(ids)
    return chunk.chain_digest


def figures(encoded: Encoded, decoded: Decoded) -> dict[str, Any]:
    """Rates, speeds and whether every chunk came back."""

    def count(name: str) -> int:
        return sum(int(getattr(stats, name)) for stats in encoded.stats)

    k, v = count("scalars_k"), count("scalars_v")
    ideal_k, ideal_v = (sum(getattr(stats, f"ideal_bits_{side}") for stats in encoded.stats) for side in "kv")
    return {
        "bits_per_scalar": 8 * encoded.stored_bytes / (k + v),
        "bits_k": 8 * count("bytes_k") / k,
        "bits_v": 8 * count("bytes_v") / v,
        "ratio": encoded.raw_bytes / encoded.stored_bytes,
        "ideal_bits_per_scalar": (ideal_k + ideal_v) / (k + v),
        "ideal_bits_k": ideal_k / k,
        "ideal_bits_v": ideal_v / v,
        "raw_bytes": encoded.raw_bytes,
        "stored_bytes": encoded.stored_bytes,
        "header_bytes": count("header_bytes"),
        "scalars": k + v,
        "escapes": count("escapes"),
        "chunks": len(encoded.stats),
        "encode_tokens_per_s": encoded.tokens / encoded.encode_seconds,
        "decode_tokens_per_s": encoded.tokens / decoded.seconds,
        "target_tokens_per_s": encoded.tokens / encoded.target_seconds,
        "verified": decoded.checksums == encoded.checksums,
    }
