#!/usr/bin/env python3
"""Compress caches that an inference engine saved: the files in its spool, into a store, under a target of the engine's own.

    python jobs/import_caches.py --model FOLDER --engine vllm --spool DIR --store URI [--delete]

The model's files must be those that the engine ran. Exit status: 0 if all that could be stored is stored; 2 for a request that cannot
be met; 1 for what files or storage are wrong with.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from rich.console import Console

from jobs.arguments import add_log, device
from jobs.exits import run_job
from pipeline.options import DEFAULT_PREDICTOR, PREDICTORS, Options


def parser() -> argparse.ArgumentParser:
    """The command line."""
    p = argparse.ArgumentParser(prog="import_caches.py", description="Compress caches that an engine saved.")
    add = p.add_argument
    add("--model", required=True, metavar="MODEL", help="the model that the engine ran: a folder or a hub id")
    add("--engine", default="vllm", metavar="NAME", help="vllm, or 'vllm QUANTIZATION' (default: %(default)s)")
    add("--spool", required=True, metavar="DIR", help="folder of saved caches")
    add("--store", required=True, metavar="URI", help="a folder or s3://bucket/prefix; made if it is not there")
    add("--predictor", choices=PREDICTORS, help=f"rung of the ladder (default: {DEFAULT_PREDICTOR})")
    add("--chunk-tokens", type=int, default=Options.chunk_tokens, metavar="N", help="tokens a chunk (default: 256)")
    add("--salt-env", metavar="NAME", help="environment variable with the tenant's salt, the engine's own")
    add(
        "--device",
        default="cpu",
        type=device,
        metavar="DEVICE",
        help="where predictor and target compute: cpu, cuda (default: cpu)",
    )
    add("--threads", type=int, default=1, metavar="N", help="threads (default: %(default)s)")
    add("--delete", action="store_true", help="delete files of which all is stored")
    add_log(p)
    return p


def main(arguments: list[str] | None = None) -> int:
    """Read the options, store the caches, and turn errors into one sentence and an exit status."""
    stopped = "interrupted; what is stored is complete, run the job again to go on"
    return run_job(
        parser(), arguments, "import", lambda given, notes: store(given.namespace, notes), interrupted=stopped
    )


def store(given: argparse.Namespace, notes: Console) -> int:
    """Store what is in the spool, and say what became of it."""
    from codec.errors import UserError
    from pipeline.engines.given import Given, store_caches
    from pipeline.engines.spool import Spool
    from pipeline.model_source import resolve_model
    from pipeline.options import read_salt
    from pipeline.report import say, show_rows
    from pipeline.store import Store
    from pipeline.target import check_device
    from pipeline.work import Device

    result = Console()
    for name in ("threads", "chunk_tokens"):
        if getattr(given, name) < 1:
            raise UserError(f"--{name.replace('_', '-')} {getattr(given, name)} must be at least 1")
    check_device(given.device)
    files = Spool(given.spool).files()
    what = Given(
        resolve_model(given.model), given.engine, given.predictor, given.chunk_tokens, read_salt(given.salt_env)
    )
    kept = Store.open(given.store, create=True)
    taken = store_caches(kept, files, what, Device(given.device, False, given.threads), lambda text: say(notes, text))
    if given.delete:
        for path in (path for path in files if str(path) not in taken.diverged):
            path.unlink()
    rows = [("prompts", f"{taken.prompts:,}"), ("tokens", f"{taken.tokens:,}"), ("new chunks", f"{taken.chunks:,}")]
    if taken.stored_bytes:
        rows.append(("ratio", f"{taken.raw_bytes / taken.stored_bytes:.2f}x"))
    if taken.diverged:
        rows.append(("not stored to the end", f"{len(taken.diverged):,}, whose beginnings are stored with other bits"))
    show_rows(result, f"stored {kept.uri}", rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
