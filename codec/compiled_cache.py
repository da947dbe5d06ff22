"""Where compiled loops are kept from process to process: the one place of this package that looks at files, its own."""

from __future__ import annotations

import hashlib
import os
from typing import Any

import numba

_SETTINGS: Any = numba.config


def _cache_folder() -> str:
    """Where compiled code is kept: a folder for each state of this package.

    numba compiles a function anew when its own file has changed. But a loop holds the code of the functions it calls, and those
    are in other files: after an update it would go on with what they were before.
    """
    here = os.path.dirname(os.path.abspath(__file__))
    files = sorted(os.path.join(at, n) for at, _, names in os.walk(here) for n in names if n.endswith(".py"))
    stamps = [(os.path.relpath(f, here), s.st_mtime_ns, s.st_size) for f in files for s in [os.stat(f)]]
    beside = os.path.join(here, "__pycache__")
    writable = os.access(beside if os.path.isdir(beside) else here, os.W_OK)
    own = beside if writable else os.path.join(os.path.expanduser("~"), ".cache", "kv-cache-codec")
    name = hashlib.blake2b(repr(stamps).encode(), digest_size=8).hexdigest()
    return os.path.join(_SETTINGS.CACHE_DIR or own, f"loops-{name}")


CACHE_FOLDER = _cache_folder()
