#!/usr/bin/env python3
"""Verify a store: list what is missing, corrupt, orphaned or mismatched, each with its path and cause.

    python jobs/verify.py --store URI [--model NAME | --target FINGERPRINT] [--sample F] [--deep] [--repair]
    python jobs/verify.py --store URI --watch [--sample F] [--every TIME] [--rounds N] [--report FILE.json]

Every object is read and its checksums are computed; with --deep every chunk is decoded too, from the store alone, on Ray where
that takes long (the cluster of RAY_ADDRESS, or this machine). With --watch it goes on beside jobs and services until it is stopped,
and each round decodes another share of the chunks. Exit status: 0 if nothing is wrong, 1 if something is (also where a repair has
just mended it), 2 for a request that cannot be met.
"""

from __future__ import annotations

import argparse
import signal
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from rich.console import Console

from codec.errors import UserError
from jobs.arguments import GRACE, add_log, add_store, device, seconds
from jobs.configuration import Given
from jobs.exits import run_job
from jobs.notes import Notes

if TYPE_CHECKING:
    from pipeline.deep import Decoded, Task, Work
    from pipeline.options import Verify
    from pipeline.store import Store


def parser() -> argparse.ArgumentParser:
    """The command line."""
    p = argparse.ArgumentParser(prog="verify.py", description="Verify a store, and repair it.")
    add = p.add_argument
    add_store(p)
    which = p.add_mutually_exclusive_group()
    which.add_argument("--model", metavar="NAME", help="only what is stored for a model of this name")
    which.add_argument("--target", metavar="FP", help="only this target's fingerprint, or the beginning of it")
    add("--sample", type=float, default=1.0, metavar="F", help="only this share of the chunks (default: 1, all)")
    add("--deep", action="store_true", help="decode the chunks too, from stored bytes alone")
    add("--local", action="store_true", help="decode in this process, without Ray, however much it is")
    add("--shared-fs", action="store_true", help="every node of the cluster mounts the local store's file system")
    add("--repair", action="store_true", help="put aside or delete what is wrong, so that the next job makes it again")
    add("--watch", action="store_true", help="go on, and decode another share of the chunks each round")
    add(
        "--every",
        type=seconds,
        default=60.0,
        metavar="TIME",
        help="with --watch: a round begins so often (default: 60s)",
    )
    add("--rounds", type=int, metavar="N", help="with --watch: end after N rounds (default: when it is stopped)")
    add("--report", metavar="FILE.json", help="with --watch: totals so far, written anew after each round")
    add("--grace", type=seconds, default=GRACE, metavar="TIME", help="younger orphans are left alone (default: 24h)")
    add("--device", default="cpu", type=device, metavar="DEVICE", help="where --deep decodes: cpu, cuda (default: cpu)")
    add_log(p)
    return p


def main(arguments: list[str] | None = None) -> int:
    """Read the options, verify, and turn errors into one sentence and an exit status."""

    def run(given: Given, notes: Notes) -> int:
        return keep_watch(given.namespace) if given.namespace.watch else verify(given.namespace, notes)

    return run_job(parser(), arguments, "verify", run)


def verify(given: argparse.Namespace, notes: Console) -> int:
    """Look, decode if asked to, list, repair if asked to."""
    from pipeline.audit import KINDS, audit
    from pipeline.deep import decode_store
    from pipeline.recording import record_audit
    from pipeline.repair import repair
    from pipeline.report import say, show_rows
    from pipeline.runs import new_run
    from pipeline.store import Store

    result, begun = Console(), new_run()
    for flag in ("rounds", "report"):
        if getattr(given, flag) is not None:
            raise UserError(
                f"--{flag} goes with --watch; a verification that ends leaves its record in the store (runs/)"
            )
    sample = share_of(given)
    store = Store.open(given.store, create=False)
    say(notes, f"verifying {store.uri}")
    found = audit(store, grace=given.grace, selects=sample.selects, model=given.model, target=given.target)
    if given.deep:
        decode_store(found, work(given, store), progress(notes))
    record_audit(found, begun, vars(given))
    for fault in found.faults:
        say(result, f"{fault.kind}: {fault.path}: {fault.cause}")
    rows = [("generations", f"{len(found.generations):,}"), ("index rows", f"{found.rows:,}")]
    rows.append(("blobs", f"{found.blobs:,}, {found.checked:,} read, {found.decoded:,} decoded"))
    if found.undecoded:
        rows.append(("not decoded", f"{found.undecoded:,}, which follow from one that is listed"))
    show_rows(result, f"verified {store.uri}", [*rows, *((kind, f"{found.count(kind):,}") for kind in KINDS)])
    if given.repair and found.faults:
        done = repair(found, lambda text: say(result, text))
        say(result, f"{done:,} things were done; run the job again, which makes up for what is gone")
    return 1 if found.faults else 0


def share_of(given: argparse.Namespace) -> Verify:
    """Which chunks are looked at. Raises UserError."""
    from pipeline.options import Verify

    if not 1e-9 <= given.sample <= 1:
        raise UserError(f"--sample {given.sample} is no share of the chunks; write a number above 0 and up to 1")
    return Verify(given.sample)


def work(given: argparse.Namespace, store: Store) -> Work:
    """How chunks are decoded: in this process where that was asked for or is soon done, else on Ray."""
    from pipeline.deep import here
    from pipeline.deep_actors import LITTLE_TOKENS, on_ray

    local, ray = here(store, given.device), on_ray(store, given.device, shared_fs=given.shared_fs)

    def choose(todo: list[Task]) -> Iterable[Decoded]:
        little = sum(task.tokens for task in todo) <= LITTLE_TOKENS
        return local(todo) if given.local or little else ray(todo)

    return choose


def keep_watch(given: argparse.Namespace) -> int:
    """Verify share after share, until it is stopped or has made its rounds."""
    from pipeline.options import check_file
    from pipeline.report import say, show_rows, write_report
    from pipeline.store import Store
    from pipeline.watch import watch

    if given.repair:
        raise UserError("--watch only looks; repair with a run of its own")
    if given.rounds is not None and given.rounds < 1:
        raise UserError(f"--rounds {given.rounds} must be at least 1")
    if given.report is not None:
        check_file("--report", given.report)
    result, shares = Console(), max(1, round(1 / share_of(given).fraction))
    store = Store.open(given.store, create=False)
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)  # how a service is stopped
    rounds = watch(
        store, shares, model=given.model, target=given.target, device=given.device, tell=lambda text: say(result, text)
    )
    found, begin = None, time.monotonic()
    try:
        for found in rounds:
            if given.report:
                write_report(given.report, found.to_plain())
            if found.rounds == given.rounds:
                break
            time.sleep(max(0.0, begin + given.every - time.monotonic()))
            begin = time.monotonic()
    except KeyboardInterrupt:
        say(result, "stopped")
    finally:
        signal.signal(signal.SIGTERM, before)
    if found is None:
        return 0
    rows = [("rounds", f"{found.rounds:,}, a share of 1/{shares} each"), ("chunks decoded", f"{found.decoded:,}")]
    show_rows(
        result,
        f"watched {store.uri}",
        [*rows, ("failed", f"{len(found.faults):,}"), ("not read", f"{found.unread:,} rounds")],
    )
    return 1 if found.faults or found.unread == found.rounds else 0


def progress(notes: Console) -> Any:
    """A line every few seconds."""
    from pipeline.report import say

    last = time.monotonic()

    def tell(text: str) -> None:
        nonlocal last
        if time.monotonic() - last > 10:
            last = time.monotonic()
            say(notes, text)

    return tell


if __name__ == "__main__":
    sys.exit(main())
