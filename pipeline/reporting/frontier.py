"""The ladder as it was measured: bits a scalar and seconds of every rung, from benchmarks' JSON and from run records."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from codec.errors import UnsupportedFormat, UserError
from codec.formats import number_format
from pipeline.runs import OK, RunRecord

DECODING, JOB = "decoding (benchmark)", "the whole job (runs)"
MAX_BYTES = 16 << 20  # of a benchmark's file


@dataclass(frozen=True)
class Rung:
    """One measurement. bits: a scalar, on disk; seconds: per 1,000 tokens, of what `kind` says."""

    name: str
    bits: float
    seconds: float
    kind: str
    title: str


def from_files(paths: Iterable[str]) -> list[Rung]:
    """What `jobs/benchmark.py rate --json` or `restore --json` printed, one result a line. Raises UserError naming the file."""
    out = []
    for path in paths:
        try:
            if os.path.getsize(path) > MAX_BYTES:
                raise UserError(
                    f"the benchmark {path} is over {MAX_BYTES} bytes, and no result of jobs/benchmark.py is"
                )
            with open(path, encoding="utf-8") as file:
                lines = [line for line in file.read().splitlines() if line.strip()]
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"the benchmark {path} cannot be read ({error})") from None
        try:
            out += [_from_result(json.loads(line)) for line in lines]
        except (ValueError, KeyError, TypeError, AttributeError, ZeroDivisionError, RecursionError, UnsupportedFormat):
            what = "no result of jobs/benchmark.py rate --json or restore --json"
            raise UserError(f"the benchmark {path} holds {what}; pass what one of them printed last") from None
    return out


def _from_result(result: Mapping[str, Any]) -> Rung:
    settings = result["settings"]
    name = f"{settings['predictor']} {settings['loop']}"
    if "decode_seconds" in result:
        bits = number_format(settings["cache_dtype"]).item_bits * result["stored_bytes"] / result["raw_bytes"]
        seconds = 1000 * result["decode_seconds"] / settings["tokens"]
    else:
        bits, seconds = result["bits_per_scalar"], 1000 / result["decode_tokens_per_s"]
    if not (math.isfinite(bits) and math.isfinite(seconds) and seconds > 0):
        raise ValueError
    title = f"{settings['model']}, {settings['cache_dtype']}, {name}: {bits:.2f} bits, {seconds:.2f} s"
    return Rung(name, float(bits), float(seconds), DECODING, title)


def from_runs(runs: Sequence[RunRecord]) -> list[Rung]:
    """Of each rung and format, the latest successful run that computed most of what it was asked for."""
    found: dict[tuple[str, str, str], Rung] = {}
    for run in runs:
        took = _took(run)
        if run.outcome != OK or took <= 0 or min(run.scalars, run.tokens) <= 0 or run.chunks_new <= run.chunks_reused:
            continue
        share = run.chunks_new / (run.chunks_new + run.chunks_reused)
        seconds, bits = 1000 * took / (run.tokens * share), 8 * run.bytes / run.scalars
        title = f"{run.model}, {run.cache_format}, {run.rung}: {bits:.2f} bits, {seconds:.1f} s, target included"
        found[run.model, run.cache_format, run.rung] = Rung(run.rung, bits, seconds, JOB, title)
    return list(found.values())


def _took(run: RunRecord) -> float:
    """Seconds; 0 where its times are none."""
    try:
        return (datetime.fromisoformat(run.ended) - datetime.fromisoformat(run.started)).total_seconds()
    except (ValueError, TypeError):
        return 0.0
