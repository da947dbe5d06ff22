#!/usr/bin/env python3
"""Serve the caches of a store over HTTP, with Ray Serve.

    python jobs/serve.py --store URI --model MODEL
    curl -s -X POST 127.0.0.1:8000/v1/restore -d '{"text": "You are …"}' -o cache.safetensors -D -

It listens on the loopback address unless --host says otherwise; with --token-env clients need the bearer token that is in that variable.
Exit status: 0 after Ctrl-C or SIGTERM; 2 for a request that cannot be met; 1 for what stored data or storage are wrong with.
"""

from __future__ import annotations

import argparse
import signal
import sys
import threading
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from codec.errors import UserError
from jobs.arguments import add_log
from jobs.configuration import Given
from jobs.exits import run_job
from jobs.notes import Notes
from pipeline.options import CACHE_FORMATS, DEFAULT_KEEP, DEVICES


def parser() -> argparse.ArgumentParser:
    """The command line; its names are the fields of ServeOptions."""
    p = argparse.ArgumentParser(prog="serve.py", description="Serve the caches of a store over HTTP.")
    add = p.add_argument
    add("--store", required=True, metavar="URI", help="a folder or s3://bucket/prefix")
    add("--model", required=True, metavar="MODEL", help="folder, GGUF file, fingerprint, or name in the store's index")
    add("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    add("--port", type=int, default=8000, metavar="N", help="(default: %(default)s)")
    add("--tokenizer", metavar="MODEL", help="where the tokenizer is, if not with --model (token_ids need none)")
    add("--cache-dtype", choices=CACHE_FORMATS, help="which of the model's caches, where several are stored")
    add("--salt-env", metavar="NAME", help="environment variable with the tenant's salt")
    add(
        "--token-env",
        metavar="NAME",
        help="environment variable with the bearer token that clients need (default: none needed)",
    )
    add("--replicas", type=int, default=1, metavar="N", help="processes that decode (default: %(default)s)")
    add("--device", default="auto", choices=DEVICES, help="where predictors compute (default: cuda if Ray has GPUs)")
    add("--concurrency", type=int, default=4, metavar="N", help="requests a replica works on (default: %(default)s)")
    add(
        "--waiting",
        type=int,
        default=64,
        metavar="N",
        help="requests of a replica that wait for their turn; more get 503 (default: %(default)s)",
    )
    add(
        "--keep-decoded",
        default=DEFAULT_KEEP,
        metavar="SIZE",
        help="decoded prefixes that a replica keeps for who asks for them next; 0: none (default: %(default)s)",
    )
    add("--max-body", type=int, default=8 << 20, metavar="BYTES", help="largest request (default: %(default)s)")
    add("--max-tokens", type=int, default=32_768, metavar="N", help="longest prompt (default: %(default)s)")
    add("--deadline", type=float, default=300.0, metavar="S", help="seconds for a request (default: %(default)g)")
    add(
        "--refresh",
        type=float,
        default=10.0,
        metavar="S",
        help="seconds after which the index is looked at again (default: %(default)g)",
    )
    add("--shared-fs", action="store_true", help="a local store path is the same file system on every node")
    add_log(p)
    return p


def main(arguments: list[str] | None = None) -> int:
    """Read the options, serve, and turn errors into one sentence and an exit status."""
    return run_job(parser(), arguments, "serve", serve)


def serve(given: Given, notes: Notes) -> int:
    """Serve until a signal comes."""
    try:
        from pipeline.restoration.serving import ServeOptions, served  # takes seconds
    except ImportError as error:
        raise UserError(f"serving needs Ray Serve ({error}); install ray[serve]") from error

    ended = threading.Event()
    with served(ServeOptions(**given.without("log_json"))) as address:
        for number in (signal.SIGTERM, signal.SIGINT):  # after Ray has set its own, which abort
            signal.signal(number, lambda *_: ended.set())
        notes.event(f"serving on {address}")
        while not ended.wait(0.5):
            pass
    return 0


if __name__ == "__main__":
    sys.exit(main())
