"""Commands that stand in manifests and documents, parsed by the jobs' own parsers."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import shlex
from collections.abc import Iterator

from tests.conftest import REPO_ROOT


def jobs_in(command: str) -> Iterator[tuple[str, list[str]]]:
    """(job, its arguments) of every call of a job in a shell command; redirections and pipes end it."""
    words = shlex.split(command, comments=True)
    for number, word in enumerate(words):
        if word.startswith("jobs/") and word.endswith(".py") and words[number - 1].rpartition("/")[2] == "python":
            given = []
            for other in words[number + 1 :]:
                if other in ("|", "&&", ";", ">", ">>", "2>&1", "&"):
                    break
                given.append(other)
            yield word, given


def check(job: str, arguments: list[str]) -> argparse.Namespace | None:
    """Parse as the job would; None where the job is not there (yet). AssertionError with what argparse says."""
    if not (REPO_ROOT / job).exists():
        return None
    module = importlib.import_module(job.removesuffix(".py").replace("/", "."))
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        try:
            found: argparse.Namespace = module.parser().parse_args(arguments)
        except SystemExit:
            raise AssertionError(f"{job} {shlex.join(arguments)}: {said.getvalue().splitlines()[-1]}") from None
    return found
