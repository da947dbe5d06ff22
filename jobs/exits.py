"""How every job ends: errors become one sentence on standard error and an exit status."""

from __future__ import annotations

import argparse
import sys
import traceback
from collections.abc import Callable, Sequence

from rich.console import Console

from codec.errors import KVCodecError, UserError
from jobs.configuration import Given, read_options
from pipeline.secrets import without_secrets


def run_job(
    parser: argparse.ArgumentParser,
    arguments: Sequence[str] | None,
    work: Callable[[Given], int],
    *,
    interrupted: str = "interrupted",
) -> int:
    """Read a job's options from wherever they are given, do its work, and turn errors into a sentence and an exit status."""
    debug = "--debug" in (sys.argv[1:] if arguments is None else arguments)
    return exit_status(lambda: work(read_options(parser, arguments)), debug=debug, interrupted=interrupted)


def exit_status(work: Callable[[], int], *, debug: bool, interrupted: str = "interrupted") -> int:
    """What `work` returns, or where it raises: 2 for a UserError, 130 for Ctrl-C, 1 for all else.

    debug: show tracebacks; interrupted: what to say after Ctrl-C.
    """
    errors = Console(stderr=True, highlight=False, markup=False, soft_wrap=True)
    try:
        return work()
    except KVCodecError as error:
        if debug:
            traceback.print_exc()
        errors.print(f"error: {error}")
        return 2 if isinstance(error, UserError) else 1
    except KeyboardInterrupt:
        errors.print(f"error: {interrupted}")
        return 130
    except Exception as error:
        if debug:
            traceback.print_exc()
        text = without_secrets(str(error))[:500] or type(error).__name__
        errors.print(f"error: unexpected {type(error).__name__}: {text} (run again with --debug for the traceback)")
        return 1
