#!/usr/bin/env python3
"""Collect what a store does not need, compact its index, or forget a prompt or a tenant.

    python jobs/gc.py --store URI [--grace 24h] [--compact] [--yes]
    python jobs/gc.py --store URI --purge [--prompt ID] [--salt-env NAME] [--yes]

Without --yes nothing is changed: what would be done is listed. Exit status: 0 if it was done, 2 for a request that cannot be met, 1
for what data or storage are wrong with.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from rich.console import Console

from codec.errors import UserError
from jobs.arguments import GRACE, add_log, add_store, seconds
from jobs.exits import run_job

if TYPE_CHECKING:
    from pipeline.store import Store


def parser() -> argparse.ArgumentParser:
    """The command line."""
    p = argparse.ArgumentParser(prog="gc.py", description="Collect what a store does not need; forget prompts.")
    add = p.add_argument
    add_store(p)
    add("--grace", type=seconds, default=GRACE, metavar="TIME", help="leave alone what is younger (default: 24h)")
    add("--compact", action="store_true", help="merge small index parts too")
    add("--purge", action="store_true", help="instead: forget the prompts that --prompt and --salt-env name")
    add(
        "--prompt", metavar="ID", help="with --purge: the prompt of this id, of any tenant unless --salt-env says whose"
    )
    add("--salt-env", metavar="NAME", help="with --purge: environment variable with the tenant's salt")
    add("--yes", action="store_true", help="do it; without this it is only listed")
    add_log(p)
    return p


def main(arguments: list[str] | None = None) -> int:
    """Read the options, do it, and turn errors into one sentence and an exit status."""
    return run_job(parser(), arguments, "gc", lambda given, notes: work(given.namespace, notes))


def work(given: argparse.Namespace, notes: Console) -> int:
    """Collect or purge."""
    from pipeline.report import say
    from pipeline.store import Store

    if given.purge and not (given.prompt or given.salt_env):
        raise UserError("--purge needs --prompt ID, --salt-env NAME or both, to say whose prompts go")
    if given.purge and given.compact:
        raise UserError("--purge does not go with --compact; run the two one after the other")
    if not given.purge and (given.prompt or given.salt_env):
        raise UserError("--prompt and --salt-env say what --purge forgets, and --purge was not given")
    result = Console()

    def tell(text: str) -> None:
        say(result, text)

    store = Store.open(given.store, create=False)
    say(notes, f"looking at {store.uri}")
    return forget(store, given, tell) if given.purge else clean(store, given, tell)


def clean(store: Store, given: argparse.Namespace, tell: Callable[[str], None]) -> int:
    """A collection, or a list of what it would do."""
    from pipeline.collect import collect, find_garbage

    found = collect(store, given.grace, tell, compact=given.compact) if given.yes else find_garbage(store, given.grace)
    for item in found.items:
        tell(f"{item.kind}: {item.entry.path} ({item.entry.size:,} bytes)")
    for note in found.notes:
        tell(note)
    kinds = Counter(item.kind for item in found.items)
    listed = ", ".join(f"{count:,} {kind}" for kind, count in kinds.items()) or "nothing"
    if given.yes:
        tell(f"deleted {found.deleted:,} objects of {found.bytes:,} bytes; merged {found.merged:,} index parts")
        return 0
    total = sum(item.entry.size for item in found.items)
    tell(f"would delete: {listed}; {total:,} bytes in all; pass --yes to do it")
    if given.compact:
        parts = sum(count for _, count in found.merges)
        tell(f"would merge {parts:,} index parts into {len(found.merges):,}")
    return 0


def forget(store: Store, given: argparse.Namespace, tell: Callable[[str], None]) -> int:
    """A purge, or a list of what it would do."""
    from pipeline.options import read_salt
    from pipeline.paths import blob_path
    from pipeline.purge import Whose, plan_purge, purge
    from pipeline.tenancy import tenant_name

    tenant = tenant_name(read_salt(given.salt_env, os.environ)) if given.salt_env else None
    whose = Whose(given.prompt, tenant)
    found = purge(store, whose, tell) if given.yes else plan_purge(store, whose)
    verb = "removed" if given.yes else "would remove"
    for (target, profile), keys in found.chunks.items():
        for key in sorted(keys):
            tell(f"{verb}: {blob_path(target, profile, key)}")
    tell(
        f"{verb} {found.blobs:,} blobs of {found.bytes:,} bytes, {found.rows:,} index rows and {found.prompts:,} prompts"
        + ("" if given.yes else "; pass --yes to do it")
    )
    if found.shared:
        tell(f"kept {found.shared:,} chunks that other prompts are made of too")
    if found.unknown:
        tell(f"{found.unknown:,} chunks do not say whose they are: a collection deletes those without an index row")
    return 0


if __name__ == "__main__":
    sys.exit(main())
