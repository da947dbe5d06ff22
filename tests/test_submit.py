"""The job as users run it: by `ray job submit` on a cluster, and directly, on a store on S3."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import REPO_ROOT
from tests.ray_head import RAY, ray_head
from tests.s3_server import BUCKET, s3_server

pytestmark = pytest.mark.slow

TEXT = "You are an agent that reads source code, calls tools and answers questions about what it has found. "


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a head's dashboard, where jobs are submitted."""
    with ray_head(tmp_path_factory.mktemp("head")) as running:
        yield running.dashboard


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    path = tmp_path / "corpus.jsonl"
    records = [{"id": str(n), "text": TEXT * 3 + f"Question {n}."} for n in range(3)]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


@pytest.fixture(scope="module")
def working_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a user would submit: the packages alone, so that nothing else of the working tree is uploaded."""
    folder = tmp_path_factory.mktemp("working-dir")
    for name in ("codec", "pipeline", "jobs"):
        shutil.copytree(REPO_ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    return folder


def submit(head: str, working_dir: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [str(RAY), "job", "submit", "--address", head, "--working-dir", str(working_dir), "--"]
    command += [sys.executable, "jobs/compress_corpus.py", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=600)


def test_a_submitted_job_runs_to_the_end(
    head: str, working_dir: Path, tiny_model: Path, corpus: Path, tmp_path: Path
) -> None:
    report = tmp_path / "report.json"
    given = ["--model", str(tiny_model), "--corpus", str(corpus), "--store", str(tmp_path / "store")]
    given += ["--chunk-tokens", "32", "--report", str(report)]
    result = submit(head, working_dir, *given)
    assert result.returncode == 0, result.stdout + result.stderr
    first = json.loads(report.read_text())
    assert first["chunks_new"] == first["chunks_verified"] > 0 and first["chunks_shared"] > 0
    again = submit(head, working_dir, *given)
    assert again.returncode == 0 and "nothing to compute" in again.stdout + again.stderr


def test_a_submitted_job_that_fails_has_a_status_and_its_sentence(
    head: str, working_dir: Path, tiny_model: Path, tmp_path: Path
) -> None:
    given = ["--model", str(tiny_model), "--corpus", "nowhere.jsonl", "--store", str(tmp_path / "store")]
    result = submit(head, working_dir, *given)
    assert result.returncode != 0
    assert "error: the corpus nowhere.jsonl does not exist" in result.stdout + result.stderr


def test_the_direct_call_on_a_store_on_s3(
    tiny_model: Path, corpus: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    report = tmp_path / "report.json"
    command = [sys.executable, "jobs/compress_corpus.py", "--model", str(tiny_model), "--corpus", str(corpus)]
    command += ["--store", f"s3://{BUCKET}/store", "--chunk-tokens", "32", "--report", str(report)]
    with s3_server(tmp_path_factory.mktemp("s3")) as environment:
        for state in ("new", "skipped"):
            result = subprocess.run(
                command, capture_output=True, text=True, timeout=600, cwd=REPO_ROOT, env=os.environ | environment
            )
            assert result.returncode == 0, result.stderr
            figures = json.loads(report.read_text())
            assert figures[f"chunks_{state}"] > 0 and figures["chunks_failed"] == 0
        assert environment["AWS_SECRET_ACCESS_KEY"] not in result.stdout + result.stderr
