"""Measuring in a process of its own, so that its peak memory is that of what is measured and nothing else.

A module that is started so calls `answer` with a function: the request's JSON in, a dataclass or dict for JSON out.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from codec.errors import DataError, KVCodecError

ROOT = Path(__file__).resolve().parent.parent.parent


def ask(module: str, request: Mapping[str, Any], folder: Path, doing: str) -> dict[str, Any]:
    """Run `python -m module REQUEST.json` and wait; the request is written into `folder`. Raises DataError when it fails."""
    path = folder / f"{module.rpartition('.')[2]}-request.json"
    path.write_text(json.dumps(request), encoding="utf-8")
    command = [sys.executable, "-m", module, str(path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        raise DataError(f"{doing} in a process of its own failed: {lines[-1].removeprefix('error: ')}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def answer(work: Callable[[dict[str, Any]], Mapping[str, Any]]) -> int:
    """The child's main: read the request, work, print the outcome as one line of JSON. Returns the exit status."""
    try:
        found = work(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
    except KVCodecError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(json.dumps(found))
    return 0
