"""`scaling`: tokens a second and memory against context length, actors, and chunks in the index.

Lengths and windows: one prompt of each length, encoded chunk by chunk, decoded chunk by chunk as verification does, and decoded all
together, a layer at a time, as restoring does; each in a process of its own, after one chunk to warm up. Speeds are medians of its
repeats. Memory is the peak over what was held before (model, predictor and profile loaded).
A rung is calibrated anew for each window, on prompts of --train-tokens. Actors: the real job on an embedded Ray, nothing verified, on as
many cores as it has actors (on all there are, where it has more), which the driver and Ray share.

lengths         by window and tokens: encode_tokens_per_s, decode_tokens_per_s, restore_tokens_per_s, target_tokens_per_s, raw_bytes,
                weights_bytes (the stored predictor), and encode_memory, decode_memory, restore_memory: the peak over the raw cache's
                bytes. Encoding's peak holds the target's own cache, too. decode_batch_memory, restore_batch_memory: the same peaks
                with the weights, over what is decoded together (one chunk; the whole prompt) with the weights
window_keeps    by window: decode_tokens_per_s at the longest length over that at the one nearest 1,024
actors          by number: tokens_per_s of one actor, target and codec; all: of all of them, by the clock between the first blob and the
                last one, the first of each actor left out; and seconds of the whole job
actors_gain     all of the most actors over all of the fewest
index           rows, parts and bytes of an index of made-up chunks, write_seconds; plan_seconds to find `asked` chunks among them and
                the plan_peak_bytes that takes; `found`: half of them are there
verified        every chunk came back with the checksums of the target's cache, and the index found what it holds
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from codec.errors import UserError
from jobs.arguments import add_cache
from jobs.bench import rate
from jobs.bench.actor_scaling import by_actors, gain
from jobs.bench.child import ask
from jobs.bench.machine import available_cores, describe
from jobs.bench.prompts import read_prompts
from jobs.bench.turns import Note
from pipeline.model_source import load_config, load_tokenizer, resolve_model
from pipeline.paths import predictor_path
from pipeline.store import Store
from pipeline.target import context_length

CHILD = "jobs.bench.scaling_process"


@dataclass(frozen=True)
class Settings:
    """What is measured; the names are those of the command line. A window of 0 means none."""

    model: str
    calibration: str
    eval: str
    predictor: str = rate.Settings.predictor
    cache_dtype: str | None = None
    fp8_scale: str | None = None
    lengths: Sequence[int] = (512, 1024, 2048, 4096, 8192)
    windows: Sequence[int] = (0, 256)
    train: int = 4
    train_tokens: int = 512
    chunk_tokens: int = 256
    repeats: int = 3
    actors: Sequence[int] = ()
    prompts: int = 8
    index_rows: int = 0
    threads: int = field(default_factory=available_cores)

    def check(self) -> None:
        """Raise UserError for the first value that cannot be."""
        for window in (0, *self.windows):
            self.rate(window).check()
        for name in ("lengths", "actors"):
            if any(not 1 <= n <= 2**31 - 1 for n in getattr(self, name)):
                raise UserError(f"--{name} must be positive numbers")
        for name, least in (("repeats", 1), ("prompts", 1), ("index_rows", 0)):
            if not least <= getattr(self, name) <= 10**8:
                raise UserError(
                    f"--{name.replace('_', '-')} {getattr(self, name)} must be at least {least} and at most 100000000"
                )

    def rate(self, window: int) -> rate.Settings:
        """What calibrates under a window."""
        return rate.Settings(
            self.model, self.calibration, self.eval, self.predictor, window=window or None, cache_dtype=self.cache_dtype,
            fp8_scale=self.fp8_scale, tokens=self.train_tokens, train=self.train, test=1, chunk_tokens=self.chunk_tokens,
            threads=self.threads,
        )  # fmt: skip


# ---------------------------------------------------------------- command line
def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `scaling`."""
    given = Settings("", "", "")
    add = parser.add_argument
    rate.add_inputs(parser)
    add_cache(parser)
    for name, text in (
        ("lengths", "tokens of prompts"), ("windows", "windows of the predictor, 0 for none"),
        ("actors", "numbers of encode actors to run the real job with (default: leave this out)"),
    ):  # fmt: skip
        add(f"--{name}", type=int, nargs="*", default=list(getattr(given, name)), metavar="N", help=text)
    for name, text in (
        ("train", "prompts to calibrate on"), ("train_tokens", "tokens of these"), ("chunk_tokens", "tokens of a chunk"),
        ("repeats", "of every length"), ("prompts", "prompts of the job with --actors"),
        ("index_rows", "made-up chunks in an index; 0 leaves this out"), ("threads", "torch threads"),
    ):  # fmt: skip
        flag = "--" + name.replace("_", "-")
        add(flag, type=int, default=getattr(given, name), metavar="N", help=text + " (default: %(default)s)")


def run(arguments: argparse.Namespace, note: Note) -> dict[str, Any]:
    """Measure; `note` is told what is going on."""
    settings = Settings(**{name: getattr(arguments, name) for name in Settings.__dataclass_fields__})
    settings.check()
    with tempfile.TemporaryDirectory(prefix="kv-scaling-") as folder:
        return measure(settings, Path(folder), note)


def rows(result: dict[str, Any]) -> list[tuple[str, str]]:
    """The figures for people."""
    s, m, out = result["settings"], result["machine"], []
    for window, lengths in result["lengths"].items():
        for tokens, f in lengths.items():
            speeds = [f"{name} {f[f'{name}_tokens_per_s']:,.1f}" for name in ("encode", "decode", "restore", "target")]
            memory = ", ".join(f"{f[f'{name}_memory']:.2f}x" for name in ("encode", "decode", "restore"))
            batch = " and ".join(f"{f[f'{name}_batch_memory']:.2f}x" for name in ("decode", "restore"))
            text = f"{', '.join(speeds)} tokens/s; memory {memory} the raw cache; with weights {batch} a batch with weights"
            out.append((f"{int(tokens):,} tokens, {_window(window)}", text))
    for window, share in result["window_keeps"].items():
        out.append((f"longest over 1,024, {_window(window)}", f"{share:.2f}"))
    for number, f in result["actors"].items():
        out.append(
            (f"{number} actors", f"{f['all']:,.1f} tokens/s, {f['tokens_per_s']:,.1f} each; job {f['seconds']:.0f} s")
        )
    if result["actors_gain"]:
        out.append(("most over fewest actors", f"{result['actors_gain']:.2f}x"))
    if i := result["index"]:
        text = f"written in {i['write_seconds']:.0f} s, {i['asked']:,} chunks planned against it in {i['plan_seconds']:.1f} s"
        out.append((f"index of {i['rows']:,} rows", f"{text} and {i['plan_peak_bytes'] / 2**20:,.0f} MiB"))
    out.append(("verified", "yes" if result["verified"] else "NO: chunks differ, or the index lost some"))
    out.append(("machine", f"{m['cpu']}, {s['threads']} threads of {m['cores']} cores, load {m['load']}"))
    return out


def _window(window: str) -> str:
    return "no window" if window == "0" else f"window {window}"


# ---------------------------------------------------------------- the measurement
def measure(settings: Settings, folder: Path, note: Note) -> dict[str, Any]:
    """The figures as documented above. Raises UserError, DataError, StorageError."""
    machine, good, lengths = describe(), True, dict[str, dict[str, Any]]()
    source = resolve_model(settings.model)
    limit, longest = context_length(load_config(source)), max(settings.lengths, default=0)
    if longest > limit:
        raise UserError(f"--lengths {longest} is over the model's context length of {limit}")
    shown = asdict(settings) | {"model": source.name}
    if settings.lengths:
        (ids,) = read_prompts(settings.eval, load_tokenizer(source), tokens=longest, count=1)
        for window in settings.windows:
            with torch.no_grad():
                common = _calibrated(settings, window, folder, note)
            shown["cache_dtype"] = common["cache_format"]
            for tokens in settings.lengths:
                note(f"{tokens} tokens, {_window(str(window))}")
                figures, same = _point(common | {"token_ids": ids[:tokens].tolist()}, folder)
                lengths.setdefault(str(window), {})[str(tokens)] = figures
                good &= same
    found: dict[str, Any] = {}
    if settings.index_rows:
        note(f"an index of {settings.index_rows:,} rows")
        asked = {
            "do": "index",
            "store": str(folder / "index"),
            "rows": settings.index_rows,
            "asked": 2000,
            "model": settings.model,
        }
        found = ask(CHILD, asked, folder, "filling an index")
        good &= found["right"]
    actors = by_actors(_job(settings), settings.actors, settings.prompts, folder, note)
    shown |= {name: str(shown[name]).rstrip("/").rpartition("/")[2] for name in ("calibration", "eval")}
    return {
        "lengths": lengths, "window_keeps": {w: _keeps(points) for w, points in lengths.items()},
        "actors": actors, "actors_gain": gain(actors), "index": found, "verified": good, "settings": shown, "machine": machine,
    }  # fmt: skip


def _calibrated(settings: Settings, window: int, folder: Path, note: Note) -> dict[str, Any]:
    """A store with predictor and profile, as a request for points of scaling."""
    given = settings.rate(window)
    target, identity, train, _ = rate.prepare(replace(given, eval=given.calibration), note)
    store = Store.open(str(folder / f"store-{window}"))
    predictor, profile = rate.calibrate(given, target, identity, store, train, note)
    return {
        "store": store.uri, "target": identity.hex(), "predictor": predictor.fingerprint.hex(), "profile": profile.id.hex(),
        "cache_format": target.cache_format, "chunk_tokens": settings.chunk_tokens, "threads": settings.threads, "model": settings.model,
        "repeats": settings.repeats,
    }  # fmt: skip


def _point(request: dict[str, Any], folder: Path) -> tuple[dict[str, float], bool]:
    """(figures of one length, whether it came back as it was)."""
    count, store = len(request["token_ids"]), Store.open(request["store"])
    encoded = ask(CHILD, request | {"do": "encode"}, folder, "encoding")
    decoded = ask(CHILD, request | {"do": "decode"}, folder, "decoding")
    restored = ask(CHILD, request | {"do": "restore"}, folder, "restoring")
    for path in list(store.list("blobs/")):
        store.delete(path)
    raw, weights = encoded["raw_bytes"], store.size(predictor_path(bytes.fromhex(request["predictor"])))
    taken = {name: f["peak_bytes"] - f["loaded_bytes"] for name, f in (("decode", decoded), ("restore", restored))}
    together = {"decode": raw * min(count, request["chunk_tokens"]) / count, "restore": raw}
    figures = {
        "encode_tokens_per_s": count / encoded["seconds"], "decode_tokens_per_s": count / decoded["seconds"],
        "restore_tokens_per_s": count / restored["seconds"], "target_tokens_per_s": count / encoded["target_seconds"],
        "raw_bytes": raw, "weights_bytes": weights, "encode_memory": (encoded["peak_bytes"] - encoded["loaded_bytes"]) / raw,
        "encode_peak_bytes": encoded["peak_bytes"], "decode_peak_bytes": decoded["peak_bytes"],
    }  # fmt: skip
    for name, peak in taken.items():
        figures[f"{name}_memory"] = peak / raw
        figures[f"{name}_batch_memory"] = (peak + weights) / (together[name] + weights)
    return figures, decoded["checksums"] == encoded["checksums"] == restored["checksums"]


def _keeps(points: dict[str, Any]) -> float:
    """How much of its decoding speed the longest prompt keeps."""
    near, longest = min(points, key=lambda n: abs(int(n) - 1024)), max(points, key=int)
    return float(points[longest]["decode_tokens_per_s"] / points[near]["decode_tokens_per_s"])


def _job(settings: Settings) -> list[str]:
    """Options of the job that actors are measured with."""
    line = [
        "--model", settings.model, "--corpus", settings.eval, "--calibration", settings.calibration, "--predictor", settings.predictor,
        "--chunk-tokens", str(settings.chunk_tokens), "--max-tokens", str(settings.train_tokens), "--verify", "none",
    ]  # fmt: skip
    for flag, value in (("--cache-dtype", settings.cache_dtype), ("--fp8-scale", settings.fp8_scale)):
        line += [flag, value] if value else []
    return line
