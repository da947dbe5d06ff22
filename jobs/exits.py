"""How every job ends: errors become one sentence on standard error and an exit status."""

from __future__ import annotations

import traceback
from collections.abc import Callable

from rich.console import Console

from codec.errors import KVCodecError, UserError
from pipeline.secrets import without_secrets


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
