#!/usr/bin/env python3
"""Recompress what a store holds: for a model that has changed, or with a better rung for the same one.

    python jobs/recompress.py --store URI --model NEW [--from FP] [--prompts URI]
    python jobs/recompress.py --store URI --codec-only [--from FP] [--predictor RUNG] [--model FILES]

All prompts that the store keeps are computed for the new model, verified, and only then shown to readers who ask for the model by its
name; what it replaces stays readable by its fingerprint until jobs/gc.py deletes it after a grace period. With --codec-only stored caches
are decoded and encoded again: same target, same bits, from the store alone. What is interrupted goes on when it is run again. Exit
status: 0 if readers have what was asked for (also where nothing was to do), 2 for a request that cannot be met, 1 for what data or
storage are wrong with.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from rich.console import Console

from jobs.arguments import add_log, add_lora, add_store
from jobs.configuration import Given
from jobs.exits import run_job
from jobs.notes import Notes
from pipeline.options import CACHE_FORMATS, CODERS, DEVICES, FP8_SCALES, LOOPS, PREDICTORS


def parser() -> argparse.ArgumentParser:
    """The command line; its names are the fields of RecompressOptions."""
    p = argparse.ArgumentParser(prog="recompress.py", description="Recompress what a store holds.")
    add = p.add_argument
    add_store(p)
    add("--model", metavar="MODEL", help="the new target: a folder, a GGUF file or a hub id")
    add_lora(p)
    add(
        "--from",
        dest="source",
        metavar="FP",
        help="fingerprint of the target to replace, or its beginning (default: the one in use)",
    )
    add("--as", dest="name", metavar="NAME", help="the name that readers ask for (default: the model's own)")
    add("--prompts", metavar="URI", help="a corpus to take prompts from (default: those that the store keeps)")
    add("--codec-only", action="store_true", help="same target, other rung: decode what is stored and encode it again")
    add("--predictor", choices=PREDICTORS, help="rung of the ladder (default: as it is now)")
    add("--loop", choices=LOOPS, help="whether the predictor sees decoded values (default: as it is now)")
    add("--coder", choices=CODERS, help="what turns scalars into bits (default: as it is now)")
    add("--window", type=int, metavar="N", help="the predictor attends to the last N tokens (default: as it is now)")
    add("--cache-dtype", choices=CACHE_FORMATS, help="dtype of the cache (default: as it is now)")
    add("--fp8-scale", choices=FP8_SCALES, help="calibrated scales of an FP8 cache (default: as it is now)")
    add("--chunk-tokens", type=int, metavar="N", help="tokens a chunk and a prefill step (default: as it is now)")
    add("--calibration", metavar="URI", help="prompts to calibrate on at first use (default: some of the stored ones)")
    add("--token-ids", choices=("keep", "skip"), help="prompts given as token ids, where the tokenizer has changed")
    add(
        "--salt-env",
        action="append",
        default=[],
        metavar="NAME",
        help="environment variable with a tenant's salt; once a tenant",
    )
    add("--skip-tenants", action="store_true", help="leave out prompts of tenants whose salts are not given")
    add("--skip-bad", action="store_true", help="report and count prompts that the new model cannot take")
    add("--max-tokens", type=int, metavar="N", help="cut prompts after N tokens")
    add("--actors", type=int, metavar="N", help="encode actors (default: as many as fit)")
    add("--device", default="auto", choices=DEVICES, help="where the target runs (default: cuda if Ray has GPUs)")
    add("--gpus-per-actor", type=float, metavar="X", help="a fraction of a GPU, or several GPUs (default: 1)")
    add("--dry-run", action="store_true", help="say what would be done; load no weights")
    add("--shared-fs", action="store_true", help="a local store path is the same file system on every node")
    add("--report", metavar="FILE.json", help="write the figures as JSON")
    add("--max-store-bytes", metavar="SIZE", help="stop before the store holds more than this, such as 500GB")
    add_log(p)
    return p


def main(arguments: list[str] | None = None) -> int:
    """Read the options, run the job, and turn errors into one sentence and an exit status."""
    stopped = "interrupted; readers have what they had before, run the job again to go on"
    return run_job(parser(), arguments, "recompress", work, interrupted=stopped)


def work(given: Given, notes: Notes) -> int:
    """Run the job."""
    from pipeline.recompress import RecompressOptions, recompress  # takes seconds
    from pipeline.run import Consoles

    values = given.without("log_json")
    options = RecompressOptions(**(values | {"salt_env": tuple(values["salt_env"])}))
    return recompress(options, Consoles(notes=notes, result=Console()))


if __name__ == "__main__":
    sys.exit(main())
