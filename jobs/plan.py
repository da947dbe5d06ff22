#!/usr/bin/env python3
"""Say which rung to use: measure this machine, and weigh prefilling again, fetching raw, and restoring from each rung.

    python jobs/plan.py --model PATH|GGUF|HUB_ID --bandwidth 1Gb/s [--tokens 2048] [--reuse 100 --machine-price 2.5] [--out plan.html]

Needs no corpus and no store. Bits are guessed from other models unless --benchmark names what `jobs/benchmark.py rate --json` printed for
this one. Exit status: 0, 2 for a request that cannot be met, 1 for all else.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from rich.console import Console

from jobs.arguments import add_log, bandwidth
from jobs.exits import run_job
from pipeline.economics import BY, PREFILL, Case, Terms, best, break_even, weigh
from pipeline.options import PREDICTORS

DEFAULT_RUNGS = ("static", "int8", "int8-mixed", "int8-a16")
STORAGE = 0.023  # dollars a GB and month: usual for object storage


def parser() -> argparse.ArgumentParser:
    """The command line."""
    p = argparse.ArgumentParser(prog="plan.py", description="Say which rung of the ladder to use on this machine.")
    add = p.add_argument
    add("--model", required=True, metavar="MODEL", help="the target: a folder, a GGUF file or a hub id")
    add("--tokens", type=int, default=2048, metavar="N", help="length of the prefix (default: %(default)s)")
    add("--bandwidth", type=bandwidth, default=1e9, metavar="RATE", help="of the link to the store (default: 1Gb/s)")
    add("--reuse", type=float, default=100.0, metavar="N", help="uses of the prefix a month (default: %(default)g)")
    add("--storage-price", type=float, default=STORAGE, metavar="X", help="a GB and month (default: %(default)s)")
    add("--machine-price", type=float, default=0.0, metavar="X", help="of this machine, an hour (default: %(default)g)")
    add("--by", default="time", choices=BY, help="what the best way is best in (default: %(default)s)")
    rungs = f"a rung to weigh; may be repeated (default: {', '.join(DEFAULT_RUNGS)})"
    add("--predictor", action="append", choices=PREDICTORS, help=rungs)
    add("--cache-dtype", choices=("bf16", "fp16", "fp32"), help="dtype of the cache (default: the model's own)")
    text = "bits a scalar from what jobs/benchmark.py rate --json printed; may be repeated"
    add("--benchmark", action="append", default=[], metavar="FILE.json", help=text)
    add("--chunk-tokens", type=int, default=256, metavar="N", help="tokens of a chunk (default: %(default)s)")
    add("--repeats", type=int, default=3, metavar="N", help="timings of each (default: %(default)s)")
    add("--threads", type=int, metavar="N", help="torch threads (default: all cores)")
    add("--out", metavar="FILE.html", help="also draw it as a page")
    add("--json", action="store_true", help="print one JSON object on the last line instead of a table")
    add_log(p)
    return p


def main(arguments: list[str] | None = None) -> int:
    """Read the options, measure, and turn errors into one sentence and an exit status."""
    return run_job(parser(), arguments, "plan", lambda given, notes: plan(given.namespace, notes))


def plan(given: argparse.Namespace, notes: Console) -> int:
    """Measure, weigh, show."""
    from pipeline.options import check_file
    from pipeline.report import say, show_rows, write_file
    from pipeline.reporting.plan_page import Plan, render

    terms = Terms(given.bandwidth, given.storage_price, given.machine_price, given.reuse)
    terms.check()
    if given.out is not None:
        check_file("--out", given.out)
    result = Console()
    case, about = measured(given, lambda text: say(notes, text))
    ways = weigh(case, terms)
    meets = {way.name: break_even(case, terms, way.name) for way in ways if way.name != PREFILL}
    found = Plan(case, terms, ways, best(ways, given.by), given.by, meets, about)
    if given.json:
        print(json.dumps(as_dict(found)))
    else:
        show_rows(result, f"{about['model']}, {about['cache_format']}: use {found.best.name}", rows(found))
    if given.out is not None:
        write_file(given.out, render(found, datetime.now(UTC)))
        say(notes, f"wrote {given.out}")
    return 0


def measured(given: argparse.Namespace, note: Any) -> tuple[Case, dict[str, Any]]:
    """The case, with bits from benchmarks where there are any, and what it is about."""
    from codec.errors import UserError
    from jobs.bench.machine import describe
    from jobs.bench.speeds import Wanted, measure
    from pipeline.model_source import resolve_cache_format, resolve_model
    from pipeline.ray_runtime import available_cores
    from pipeline.reporting.frontier import from_files
    from pipeline.worker_process import settle

    threads = available_cores() if given.threads is None else given.threads
    for name, value in (("tokens", given.tokens), ("chunk-tokens", given.chunk_tokens), ("repeats", given.repeats)):
        if not 1 <= value <= 1 << 24:
            raise UserError(f"--{name} {value} must be at least 1 and at most {1 << 24}")
    if not 1 <= threads <= 4096:
        raise UserError(f"--threads {threads} must be at least 1 and at most 4096")
    known = {one.name: one.bits for one in from_files(given.benchmark)}
    settle(threads)  # as the processes do whose speed this tells
    source, machine = resolve_model(given.model), describe()
    cache_format = resolve_cache_format(source, given.cache_dtype)
    kinds = tuple(dict.fromkeys(given.predictor or DEFAULT_RUNGS))
    case = measure(source, Wanted(kinds, given.tokens, given.chunk_tokens, cache_format, given.repeats), note)
    rungs = [replace(rung, bits=known.get(f"{rung.name} closed", rung.bits)) for rung in case.rungs]
    guessed = [rung.name for rung in rungs if f"{rung.name} closed" not in known]
    bits = f"guessed from other models for {', '.join(guessed)}" if guessed else "measured"
    about = {"model": source.name, "cache_format": cache_format, "bits": bits}
    about["machine"] = f"{machine['cpu']}, {threads} threads, load {machine['load']}"
    return replace(case, rungs=rungs), about


def rows(found: Any) -> list[tuple[str, str]]:
    """The table: a line a way."""
    from pipeline.reporting.charts import size
    from pipeline.reporting.plan_page import rate

    out = [
        (
            "prefix",
            f"{found.case.tokens:,} tokens, {size(found.case.raw_bytes)} raw, over {rate(found.terms.bandwidth)}",
        )
    ]
    for way in found.ways:
        text = f"{way.seconds:.3g} s"
        if way.stored_bytes:
            text += f", {size(way.stored_bytes)} kept"
        text += f", {way.money:.4f} a month"
        if meet := found.meets.get(way.name):
            below = f"beats raw below {rate(meet.below)}" if meet.below and math.isfinite(meet.below) else ""
            above = f"beats prefilling above {rate(meet.above)}" if meet.above else "never beats prefilling"
            reuse = f"pays from {meet.reuse:.1f} uses a month" if meet.reuse else ""
            text += "".join(f"; {part}" for part in (below, above, reuse) if part)
        out.append((way.name, text))
    return [*out, ("bits", str(found.about["bits"])), ("machine", str(found.about["machine"]))]


def as_dict(found: Any) -> dict[str, Any]:
    """As plain data; what never happens is null."""
    meets = {
        name: {k: v if v and math.isfinite(v) else None for k, v in asdict(m).items()}
        for name, m in found.meets.items()
    }
    return {
        "best": found.best.name, "by": found.by, "case": asdict(found.case), "terms": asdict(found.terms),
        "ways": [asdict(way) for way in found.ways], "break_even": meets, "about": dict(found.about),
    }  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
