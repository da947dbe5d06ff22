#!/usr/bin/env python3
"""Compress the KV caches of a corpus of prompts into a store.

    python jobs/compress_corpus.py --model PATH|GGUF|HUB_ID --corpus URI --store URI
    ray job submit --working-dir . -- python jobs/compress_corpus.py ...

Exit status: 0 if all that was asked for is stored and verified; 2 for a request that cannot be met; 1 for what data or
storage are wrong with.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from rich.console import Console

from jobs.arguments import add_cache, add_coder, add_log, add_loop, add_lora
from jobs.configuration import Given
from jobs.exits import run_job
from jobs.notes import Notes
from pipeline.options import (
    DEFAULT_PREDICTOR,
    DEVICES,
    PREDICTORS,
    Options,
)


def parser() -> argparse.ArgumentParser:
    """The command line; its names are the fields of Options."""
    p = argparse.ArgumentParser(
        prog="compress_corpus.py", description="Compress the KV caches of a corpus of prompts into a store."
    )
    add = p.add_argument
    add("--model", required=True, metavar="MODEL", help="the target: a folder, a GGUF file or a hub id")
    add_lora(p)
    add("--corpus", required=True, metavar="URI", help="JSONL (.gz) or Parquet: a file, folder or glob, local or s3://")
    add("--store", required=True, metavar="URI", help="a folder or s3://bucket/prefix; made if it is not there")
    rung = f"rung of the ladder (default: {DEFAULT_PREDICTOR}; linear for architectures that have no other)"
    add("--predictor", choices=PREDICTORS, help=rung)
    add_loop(p)
    add_coder(p)
    add_cache(p)
    add("--chunk-tokens", type=int, default=256, metavar="N", help="tokens a chunk and a prefill step (default: 256)")
    add("--calibration", metavar="URI", help="prompts to calibrate on at first use (default: some of the corpus)")
    add("--actors", type=int, metavar="N", help="encode actors (default: as many as fit)")
    add("--device", default="auto", choices=DEVICES, help="where the target runs (default: cuda if Ray has GPUs)")
    add("--gpus-per-actor", type=float, metavar="X", help="a fraction of a GPU, or several GPUs (default: 1)")
    add("--limit", type=int, metavar="N", help="only the first N prompts")
    add("--max-tokens", type=int, metavar="N", help="cut prompts after N tokens")
    add("--skip-bad", action="store_true", help="report and count bad records instead of refusing the corpus")
    add("--salt-env", metavar="NAME", help="environment variable with a tenant's salt; or a field salt in records")
    add("--verify", default="all", metavar="all|sample:F|none", help="new chunks to decode again (default: all)")
    add("--dry-run", action="store_true", help="say what would be done; load no weights, write nothing")
    add("--shared-fs", action="store_true", help="a local store path is the same file system on every node")
    add("--report", metavar="FILE.json", help="write the figures as JSON")
    size = "stop before the store holds more than this, such as 500GB (default: no limit)"
    add("--max-store-bytes", metavar="SIZE", help=size)
    add_log(p)
    return p


def main(arguments: list[str] | None = None) -> int:
    """Read the options, run the job, and turn errors into one sentence and an exit status."""
    stopped = "interrupted; what is stored is complete, run the job again to go on"
    return run_job(parser(), arguments, "compress", compress, interrupted=stopped)


def compress(given: Given, notes: Notes) -> int:
    """Check the options and run the job."""
    options = Options(**given.without("log_json"))
    options.check()  # before the import below, which takes seconds
    from pipeline.run import Consoles, run

    return run(options, Consoles(notes=notes, result=Console()))


if __name__ == "__main__":
    sys.exit(main())
