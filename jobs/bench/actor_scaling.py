"""The main job with one actor, two, and more, each number of them on so many cores: for `scaling`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from codec.errors import DataError
from jobs.bench.child import ROOT
from jobs.bench.turns import Note

_SALT = "KV_BENCH_SALT"


def by_actors(
    options: Sequence[str], numbers: Sequence[int], prompts: int, folder: Path, note: Note
) -> dict[str, dict[str, float]]:
    """Figures by number of actors; a first run calibrates, and each has a salt of its own, so that all of them encode all.

    Raises DataError.
    """
    out = {}
    for number in (0, *numbers) if numbers else ():
        note(f"the job with {number} actors" if number else "the job, to calibrate")
        report, begin = folder / "report.json", time.time()
        line = [
            sys.executable, str(ROOT / "jobs" / "compress_corpus.py"), *options, "--store", str(folder / "job"), "--report", str(report),
            "--limit", str(prompts if number else 1), "--actors", str(number or 1), "--salt-env", _SALT,
        ]  # fmt: skip
        with _cores(number or len(_allowed())):
            environment = os.environ | {_SALT: f"scaling with {number}"}
            done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, check=False, env=environment)
        if done.returncode:
            raise DataError(f"the job failed: {(done.stderr.strip().splitlines() or ['no message'])[-1]}")
        if number:
            told = json.loads(report.read_text(encoding="utf-8"))
            out[str(number)] = {
                "tokens_per_s": told["tokens_per_s"],
                "all": _by_the_clock(told, folder / "job", begin, number),
                "seconds": time.time() - begin,
            }
    return out


def gain(found: Mapping[str, Mapping[str, float]]) -> float | None:
    """All of the most actors over all of the fewest."""
    if len(found) < 2:
        return None
    return found[max(found, key=int)]["all"] / found[min(found, key=int)]["all"]


def _by_the_clock(told: Mapping[str, Any], store: Path, begin: float, number: int) -> float:
    """Tokens a second between the first blob written since `begin` and the last one; each actor's first came about before."""
    times = sorted(t for p in store.glob("blobs/**/*.kv") if (t := p.stat().st_mtime) >= begin)
    whole = next((p for p in told["per_prompt"] if p["chunks_new"] == p["chunks"]), None)
    if len(times) <= number or whole is None or times[0] == times[-1]:
        raise DataError(f"{len(times)} new chunks are too few to measure {number} actors by; give more --prompts")
    tokens = told["raw_bytes"] * whole["tokens"] / whole["raw_bytes"]
    return float(tokens * (len(times) - number) / len(times) / (times[-1] - times[0]))


def _allowed() -> list[int]:
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []


@contextmanager
def _cores(number: int) -> Iterator[None]:
    """Processes that are started here get the first `number` cores of ours. Where the system knows no such thing, all."""
    before = _allowed()
    if before:
        os.sched_setaffinity(0, before[:number])
    try:
        yield
    finally:
        if before:
            os.sched_setaffinity(0, before)
