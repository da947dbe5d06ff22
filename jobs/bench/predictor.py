"""`predictor`: what a predictor's pass costs beside the target's own prefill, in one process and on the same threads.

A pass computes what encoding computes without coding anything: guesses of K and V in every layer, and the state after it. Predictors
are built without calibration, which changes numbers but no cost (int8-mixed has the products that its budget allows). Sides take turns,
and each figure is the median of its repeats.

sides           by name: seconds of a pass over the prompt, tokens_per_s, and times_target: seconds over the target's
spread          of a side: the slowest repeat over the fastest
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

import codec
from codec.errors import UserError
from codec.predictor.config import KINDS
from jobs.arguments import add_loop
from jobs.bench.machine import describe
from jobs.bench.prompts import read_prompts
from jobs.bench.turns import Note, take_turns
from pipeline.model_source import RUN_DTYPES, load_tokenizer, resolve_cache_format, resolve_model
from pipeline.options import MAX_CHUNK_TOKENS, Options, check_window
from pipeline.ray_runtime import available_cores
from pipeline.rung import Rung
from pipeline.target import Target, load_target
from pipeline.worker_process import settle

TARGET = "target"


@dataclass(frozen=True)
class Settings:
    """What is measured; the names are those of the command line."""

    model: str
    corpus: str
    predictor: Sequence[str] = ("int8",)
    loop: str = Options.loop
    window: int | None = None
    cache_dtype: str | None = None
    tokens: int = 1024
    chunk_tokens: int = 256
    repeats: int = 3
    threads: int = field(default_factory=available_cores)

    def check(self) -> None:
        """Raise UserError for the first number that cannot be."""
        check_window(self.window)
        for name in ("tokens", "chunk_tokens", "repeats", "threads"):
            top = MAX_CHUNK_TOKENS if name == "chunk_tokens" else 2**31 - 1
            if not 1 <= getattr(self, name) <= top:
                raise UserError(
                    f"--{name.replace('_', '-')} {getattr(self, name)} must be at least 1 and at most {top}"
                )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `predictor`."""
    given = Settings("", "")
    add = parser.add_argument
    add("--model", required=True, metavar="PATH|GGUF|HUB_ID", help="the target")
    add("--corpus", required=True, metavar="URI", help="its first prompt that is long enough is taken")
    add("--predictor", action="append", choices=KINDS, help="a rung of the ladder; may be repeated (default: int8)")
    add_loop(parser)
    add("--cache-dtype", choices=tuple(RUN_DTYPES), help="dtype to run the target in (default: the model's own)")
    for name, text in (
        ("tokens", "tokens of the prompt"), ("chunk_tokens", "tokens of a step, of target and predictor alike"),
        ("repeats", "passes of every side"), ("threads", "torch threads"),
    ):  # fmt: skip
        flag = "--" + name.replace("_", "-")
        add(flag, type=int, default=getattr(given, name), metavar="N", help=text + " (default: %(default)s)")


def run(arguments: argparse.Namespace, note: Note) -> dict[str, Any]:
    """Measure; `note` is told what is going on."""
    given = {name: getattr(arguments, name) for name in Settings.__dataclass_fields__}
    settings = Settings(**(given | {"predictor": given["predictor"] or Settings.predictor}))
    settings.check()
    return measure(settings, note)


def rows(result: dict[str, Any]) -> list[tuple[str, str]]:
    """The figures for people."""
    s, m = result["settings"], result["machine"]
    shown = [
        (
            name,
            f"{side['tokens_per_s']:,.1f} tokens/s, {side['times_target']:.2f}x the target's time (spread {side['spread']:.2f})",
        )
        for name, side in result["sides"].items()
    ]
    what = f"{s['tokens']:,} tokens in steps of {s['chunk_tokens']}, {s['repeats']} repeats, {s['cache_dtype']} cache, {s['loop']} loop"
    return [
        ("pass", what),
        *shown,
        ("machine", f"{m['cpu']}, {s['threads']} threads of {m['cores']} cores, load {m['load']}"),
    ]


@torch.no_grad()
def measure(settings: Settings, note: Note) -> dict[str, Any]:
    """The figures as documented above. Sets this process' number of torch threads. Raises UserError."""
    settle(settings.threads)
    machine = describe()
    source = resolve_model(settings.model)
    cache_format = resolve_cache_format(source, settings.cache_dtype)
    (ids,) = read_prompts(settings.corpus, load_tokenizer(source), tokens=settings.tokens, count=1)
    target = load_target(source, cache_format)
    chunks = list(ids.split(settings.chunk_tokens))
    sides: dict[str, Callable[[], None]] = {TARGET: lambda: _prefill(target, chunks)}
    for kind in dict.fromkeys(settings.predictor):
        note(f"building {kind}")
        predictor = Rung(kind, settings.loop, settings.window).build(target, None, [])
        sides[kind] = lambda p=predictor: predict(p, chunks)  # type: ignore[misc]
    seconds = take_turns(sides, settings.repeats, note)
    shown = asdict(settings) | {
        "model": source.name,
        "cache_dtype": cache_format,
        "predictor": list(settings.predictor),
    }
    shown["corpus"] = settings.corpus.rstrip("/").rpartition("/")[2]
    return {"sides": figures(seconds, settings.tokens), "settings": shown, "machine": machine}


def figures(seconds: dict[str, list[float]], tokens: int) -> dict[str, dict[str, float]]:
    """Medians of each side's repeats."""
    middle = {name: statistics.median(times) for name, times in seconds.items()}
    return {
        name: {
            "seconds": middle[name], "tokens_per_s": tokens / middle[name], "times_target": middle[name] / middle[TARGET],
            "spread": max(times) / min(times),
        }
        for name, times in seconds.items()
    }  # fmt: skip


def predict(predictor: codec.Predictor, chunks: Sequence[Tensor]) -> None:
    """One pass: every layer's guess, and every layer but the last gone through, as encoding does."""
    state, last = predictor.new_state(), predictor.config.layers - 1
    for ids in chunks:
        run = predictor.run([state], [ids])
        for layer in range(last):
            run.advance(layer, run.guess(layer))
        run.guess(last)
        run.commit()


def _prefill(target: Target, chunks: Sequence[Tensor]) -> None:
    cache = target.new_cache()
    for ids in chunks:
        target.prefill(cache, ids)
