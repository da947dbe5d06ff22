#!/usr/bin/env python3
"""Show what a store holds and how it fares, as one HTML page that needs nothing else.

    python jobs/report.py --store URI --out report.html [--benchmark rate.json …]

Bytes by model and generation, bits by layer and head, prefixes that are shared, the profile's health beside what calibration promised,
runs and their verification, the ladder as measured. Exit status: 0 if the page was written; 2 for a request that cannot be met; 1 for
what data or storage are wrong with.
"""

from __future__ import annotations

import argparse
import sys
from datetime import UTC, datetime
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from rich.console import Console

from jobs.arguments import add_log, add_store
from jobs.exits import run_job


def parser() -> argparse.ArgumentParser:
    """The command line."""
    p = argparse.ArgumentParser(prog="report.py", description="Show what a store holds, as one HTML page.")
    add = p.add_argument
    add_store(p)
    add("--out", required=True, metavar="FILE.html", help="the page; what is there is replaced")
    text = "what jobs/benchmark.py rate --json or restore --json printed, for the ladder; may be repeated"
    add("--benchmark", action="append", default=[], metavar="FILE.json", help=text)
    add_log(p)
    return p


def main(arguments: list[str] | None = None) -> int:
    """Read the options, write the page, and turn errors into one sentence and an exit status."""
    return run_job(parser(), arguments, "report", lambda given, notes: write(given.namespace, notes))


def write(given: argparse.Namespace, notes: Console) -> int:
    """Gather, draw, write."""
    from pipeline.options import check_file
    from pipeline.report import say, write_file
    from pipeline.reporting.facts import gather
    from pipeline.reporting.frontier import from_files, from_runs
    from pipeline.reporting.page import render
    from pipeline.store import Store

    check_file("--out", given.out)
    measured = from_files(given.benchmark)
    facts = gather(Store.open(given.store, create=False), lambda text: say(notes, text))
    write_file(given.out, render(facts, [*measured, *from_runs(facts.runs)], datetime.now(UTC)))
    for gen in facts.generations:
        if gen.health is not None and (warning := gen.health.warning()) is not None:
            say(notes, f"{gen.name}: {warning}")
    say(Console(), f"wrote {given.out}: {len(facts.generations):,} generations, {len(facts.runs):,} runs")
    return 0


if __name__ == "__main__":
    sys.exit(main())
