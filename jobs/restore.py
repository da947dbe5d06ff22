#!/usr/bin/env python3
"""Restore the caches of prompts from a store: one safetensors file a prompt, of its longest stored prefix.

    python jobs/restore.py --store URI --model MODEL --corpus URI --out DIR
    python jobs/restore.py --store URI --model MODEL --prompt-file prompt.txt --out DIR

DIR/<id>.safetensors holds layers.N.key and layers.N.value, [heads, tokens, head_dim]; its metadata say how many tokens, in which
format, and the digest of the cache's bits. Exit status: 0 if all that is stored of the prompts is in the files; 2 for a request that
cannot be met; 1 where stored data are damaged, something failed, or nothing of any prompt is stored.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from rich.console import Console

from jobs.arguments import add_log
from jobs.configuration import Given
from jobs.exits import run_job
from jobs.notes import Notes
from pipeline.options import CACHE_FORMATS, DEVICES


def parser() -> argparse.ArgumentParser:
    """The command line; its names are the fields of RestoreOptions."""
    p = argparse.ArgumentParser(prog="restore.py", description="Restore the caches of prompts from a store.")
    add = p.add_argument
    add("--store", required=True, metavar="URI", help="a folder or s3://bucket/prefix")
    add(
        "--model",
        required=True,
        metavar="MODEL",
        help="folder, GGUF file, fingerprint (64 hex digits), or name in the store's index",
    )
    add("--out", required=True, metavar="DIR", help="folder for the files; made if it is not there")
    given = p.add_mutually_exclusive_group(required=True)
    given.add_argument("--corpus", metavar="URI", help="JSONL (.gz) or Parquet, as for compress_corpus.py")
    given.add_argument("--prompt-file", metavar="FILE", help="one prompt: a record in *.json, else text")
    add("--tokenizer", metavar="MODEL", help="where the tokenizer is, if not with --model (token_ids need none)")
    add("--cache-dtype", choices=CACHE_FORMATS, help="which of the model's caches, where several are stored")
    add("--salt-env", metavar="NAME", help="environment variable with the tenant's salt")
    add("--heads", metavar="A:B", help="only KV heads A to B-1 (tensor parallel)")
    add("--layers", metavar="A:B", help="only layers A to B-1 (pipeline parallel)")
    add(
        "--overwrite",
        action="store_true",
        help="write files anew that are there (default: keep whole ones, complete shorter ones, refuse others)",
    )
    add("--skip-bad", action="store_true", help="report and count bad records instead of refusing the corpus")
    add("--limit", type=int, metavar="N", help="only the first N prompts")
    add("--actors", type=int, metavar="N", help="decode actors (default: as many as fit)")
    add("--device", default="auto", choices=DEVICES, help="where predictors compute (default: cuda if Ray has GPUs)")
    add(
        "--deadline",
        type=float,
        default=600.0,
        metavar="S",
        help="seconds a prompt may take in an actor (default: %(default)g)",
    )
    add("--batch-tokens", type=int, default=4096, metavar="N", help="tokens decoded together (default: %(default)s)")
    add("--shared-fs", action="store_true", help="local paths are the same file system on every node")
    add_log(p)
    return p


def main(arguments: list[str] | None = None) -> int:
    """Read the options, run the job, and turn errors into one sentence and an exit status."""
    stopped = "interrupted; files that were written are whole, run the job again to go on"
    return run_job(parser(), arguments, "restore", restore, interrupted=stopped)


def restore(given: Given, notes: Notes) -> int:
    """Check the options and run the job."""
    from pipeline.restoration.job import RestoreOptions, run  # takes seconds

    return run(RestoreOptions(**given.without("log_json")), notes, Console())


if __name__ == "__main__":
    sys.exit(main())
