"""The runbook's commands are what the jobs take, its names exist, and it covers what has to be covered."""

from __future__ import annotations

import re

import pytest

import pipeline.metrics
from pipeline.health import DRIFT_BITS
from tests.commands import check, jobs_in
from tests.conftest import REPO_ROOT

TEXT = (REPO_ROOT / "docs" / "RUNBOOK.md").read_text()
BLOCKS = re.findall(r"^ *```\n(.*?)^ *```", TEXT, re.M | re.S)
COMMANDS = [line.strip() for block in BLOCKS for line in block.splitlines() if line.strip()]
INLINE = [text for text in re.findall(r"`([^`\n]+)`", TEXT) if text.startswith("python jobs/")]


@pytest.mark.parametrize("command", [*COMMANDS, *INLINE])
def test_a_command_is_one_that_the_job_takes(command: str) -> None:
    found = list(jobs_in(command))
    assert len(found) == 1, f"no job in {command!r}"
    job, arguments = found[0]
    if check(job, arguments) is None:
        pytest.skip(f"{job} is not there yet")


def test_it_covers_what_happens() -> None:
    titles = re.findall(r"^## (.+)$", TEXT, re.M)
    for title in (
        "First day",
        "Upgrade of a model",
        "Disk full",
        "Verification failure",
        "Changed hardware",
        "Rolling back",
    ):
        assert title in titles
    used = {job for command in COMMANDS for job, _ in jobs_in(command)}
    assert len(COMMANDS) > 20 and len(used) >= 8


def test_files_and_metrics_that_it_names_exist() -> None:
    for path in re.findall(r"`((?:infra|tests|pipeline|docs)/[\w./-]+)`", TEXT):
        assert (REPO_ROOT / path).exists(), path
    ours = (pipeline.metrics.__doc__ or "") + (REPO_ROOT / "pipeline" / "restoration" / "metrics.py").read_text()
    for name in re.findall(r"\b(?:ray_)?(kv_[a-z_]+?)(?:_total)?`", TEXT):
        assert name in ours, name
    assert f"`ray_kv_profile_excess_bits` above {DRIFT_BITS}" in TEXT


def test_messages_that_it_quotes_are_said() -> None:
    sources = "".join(path.read_text() for name in ("codec", "pipeline") for path in (REPO_ROOT / name).rglob("*.py"))
    for words in (
        "the store is full",
        "has drifted from",
        "its arithmetic or its libraries differ",
        "corrupt",
        "mismatched",
    ):
        assert words in sources and words in TEXT
