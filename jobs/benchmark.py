#!/usr/bin/env python3
"""Measure the codec: the figures of the README, each with the command that makes it.

    python jobs/benchmark.py rate --model M --calibration A.jsonl --eval B.jsonl --json

With --json the last line on standard output is one JSON object. Exit status: 0 if all that was measured came back as it was;
2 for a request that cannot be met; 1 for what data or storage are wrong with.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from rich.console import Console

from jobs.bench import ablation, coder, peers, predictor, rate, restore, scaling, service, store
from jobs.exits import exit_status
from pipeline.report import say, show_rows

COMMANDS = {
    "rate": rate,
    "ablation": ablation,
    "coder": coder,
    "peers": peers,
    "predictor": predictor,
    "restore": restore,
    "scaling": scaling,
    "service": service,
    "store": store,
}  # name on the command line -> module, as described in jobs/bench/__init__.py


def parser() -> argparse.ArgumentParser:
    """The command line: a sub-command a benchmark."""
    p = argparse.ArgumentParser(prog="benchmark.py", description="Measure the codec.")
    commands = p.add_subparsers(dest="command", required=True, metavar="BENCHMARK", title="benchmarks")
    for name, module in COMMANDS.items():
        summary = (module.__doc__ or "").partition("\n")[0].partition(": ")[2]
        plain = argparse.RawDescriptionHelpFormatter
        sub = commands.add_parser(name, help=summary, description=module.__doc__, formatter_class=plain)
        module.add_arguments(sub)
        sub.add_argument(
            "--json", action="store_true", help="print one JSON object on the last line instead of a table"
        )
        sub.add_argument("--debug", action="store_true", help="show tracebacks")
    return p


def main(arguments: list[str] | None = None) -> int:
    """Parse the command line, run one benchmark, and turn errors into one sentence and an exit status."""
    given = parser().parse_args(arguments)
    return exit_status(lambda: measure(given), debug=given.debug)


def measure(given: argparse.Namespace) -> int:
    """Run the benchmark that was asked for and print its figures."""
    module, notes = COMMANDS[given.command], Console(stderr=True)
    result = module.run(given, lambda text: say(notes, text))
    if given.json:
        print(json.dumps(result))
    else:
        show_rows(Console(), f"{given.command}: {result['settings']['model']}", module.rows(result))
    return 0 if result.get("verified", True) else 1


if __name__ == "__main__":
    sys.exit(main())
