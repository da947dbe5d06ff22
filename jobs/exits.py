"""How every job ends: errors become one sentence on standard error and an exit status."""

from __future__ import annotations

import argparse
import sys
import traceback
from collections.abc import Callable, Sequence

from codec.errors import KVCodecError, UserError
from jobs.configuration import Given, read_options
from jobs.notes import Notes, print_error
from pipeline.secrets import without_secrets


def run_job(
    parser: argparse.ArgumentParser,
    arguments: Sequence[str] | None,
    job: str,
    work: Callable[[Given, Notes], int],
    *,
    interrupted: str = "interrupted",
) -> int:
    """Read a job's options from wherever they are given, do its work, and turn errors into a sentence and an exit status.

    job: what its notes call it.
    """
    debug = "--debug" in (sys.argv[1:] if arguments is None else arguments)
    begun: list[Notes] = []  # none before the options are known: whether errors are to be JSON is among them

    def begin() -> int:
        given = read_options(parser, arguments)
        begun.append(Notes(given, job))
        return work(given, begun[0])

    def say(message: str) -> None:
        begun[0].error(message) if begun else print_error(message)

    return exit_status(begin, debug=debug, interrupted=interrupted, say=say)


def exit_status(
    work: Callable[[], int],
    *,
    debug: bool,
    interrupted: str = "interrupted",
    say: Callable[[str], None] = print_error,
) -> int:
    """What `work` returns, or where it raises: 2 for a UserError, 130 for Ctrl-C, 1 for all else.

    debug: show tracebacks; interrupted: what to say after Ctrl-C; say: how errors are said.
    """
    try:
        return work()
    except KVCodecError as error:
        if debug:
            traceback.print_exc()
        say(without_secrets(str(error)))
        return 2 if isinstance(error, UserError) else 1
    except KeyboardInterrupt:
        say(interrupted)
        return 130
    except Exception as error:
        if debug:
            traceback.print_exc()
        text = without_secrets(str(error))[:500] or type(error).__name__
        say(f"unexpected {type(error).__name__}: {text} (run again with --debug for the traceback)")
        return 1
