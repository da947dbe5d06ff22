"""What a user sees who asks for what cannot be: one sentence that names the thing, and an exit status by kind."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from jobs.compress_corpus import main
from pipeline import ray_runtime
from tests.conftest import REPO_ROOT, TINY_CONTEXT
from tests.s3_server import BUCKET, s3_server

JOB = REPO_ROOT / "jobs" / "compress_corpus.py"
GOOD = {"id": "good", "text": "The quick brown fox jumps over the lazy dog."}


class Case:
    """A model, a corpus and a store that are all right, to be spoilt one at a time."""

    def __init__(self, model: Path, folder: Path) -> None:
        self.folder = folder
        self.corpus = folder / "corpus.jsonl"
        self.write(GOOD)
        self.given = {"model": str(model), "corpus": str(self.corpus), "store": str(folder / "store")}

    def write(self, *records: dict[str, Any] | str) -> None:
        lines = (record if isinstance(record, str) else json.dumps(record) for record in records)
        self.corpus.write_text("".join(line + "\n" for line in lines))

    def arguments(self, *more: str, **spoilt: str) -> list[str]:
        pairs = [(f"--{name}", value) for name, value in (self.given | spoilt).items()]
        return [text for pair in pairs for text in pair] + list(more)

    def run(self, *more: str, env: dict[str, str] | None = None, **spoilt: str) -> subprocess.CompletedProcess[str]:
        """The job in a process of its own, from another folder."""
        command = [sys.executable, str(JOB), *self.arguments(*more, **spoilt)]
        return subprocess.run(
            command, capture_output=True, text=True, timeout=300, cwd=self.folder, env=os.environ | (env or {})
        )

    def nothing_half_written(self) -> None:
        """No blob, no index part, no profile and no temporary file."""
        names = [str(p.relative_to(self.folder)) for p in self.folder.rglob("*") if p.is_file()]
        assert not [n for n in names if n.endswith(".tmp") or n.startswith(("store/b", "store/i", "store/profiles"))]


@pytest.fixture
def case(tiny_model: Path, tmp_path: Path) -> Case:
    return Case(tiny_model, tmp_path)


def refused(result: subprocess.CompletedProcess[str], status: int, *words: str) -> None:
    assert result.returncode == status, result.stderr
    lines = result.stderr.strip().splitlines()
    assert len(lines) == 1 and lines[0].startswith("error: "), result.stderr
    for word in words:
        assert word in lines[0], lines[0]


# ---------------------------------------------------------------- before anything is started
def test_an_unknown_model_path(case: Case) -> None:
    refused(case.run(model="no/such/model.gguf"), 2, "no/such/model.gguf", "does not exist")
    case.nothing_half_written()
    assert not (case.folder / "store").exists()


def test_an_unsupported_architecture_says_what_is_supported(case: Case) -> None:
    folder = case.folder / "gpt2"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}))
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", 2) + b"{}")
    refused(case.run("--predictor", "fp8", model=str(folder)), 2, "gpt2", "llama", "--predictor linear")
    assert not (case.folder / "store").exists()


def test_a_corrupt_gguf(case: Case) -> None:
    path = case.folder / "broken.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 5, 9) + bytes(100))
    refused(case.run(model=str(path)), 2, "broken.gguf")
    assert not (case.folder / "store").exists()


def test_a_missing_corpus(case: Case) -> None:
    refused(case.run(corpus="nowhere.jsonl"), 2, "nowhere.jsonl", "does not exist")
    assert not (case.folder / "store").exists()


def test_an_unwritable_store(case: Case) -> None:
    (case.folder / "file").write_text("not a folder")
    refused(case.run(store=str(case.folder / "file")), 2, "file", "needs a folder")
    refused(case.run(store=str(case.folder / "file" / "store")), 1, "file/store", "cannot write")


def test_a_store_of_a_newer_format(case: Case) -> None:
    (case.folder / "store").mkdir()
    (case.folder / "store" / "store.json").write_text('{"format": 99}')
    refused(case.run(), 2, "99", str(case.folder / "store"))


def test_options_that_cannot_be(case: Case) -> None:
    refused(case.run("--verify", "often"), 2, "--verify 'often'")
    refused(case.run("--salt-env", "KV_TEST_NO_SUCH"), 2, "KV_TEST_NO_SUCH", "unset")


def test_wrong_credentials_and_a_missing_bucket(case: Case, tmp_path_factory: pytest.TempPathFactory) -> None:
    with s3_server(tmp_path_factory.mktemp("s3")) as right:
        wrong = right | {"AWS_SECRET_ACCESS_KEY": "not-the-secret"}
        result = case.run(store=f"s3://{BUCKET}/store", env=wrong)
        refused(result, 2, f"s3://{BUCKET}/store", "credentials were refused")
        assert "not-the-secret" not in result.stderr
        refused(case.run(store="s3://no-such-bucket/store", env=right), 2, "no-such-bucket", "does not exist")


# ---------------------------------------------------------------- found by the tokenise stage
def test_a_bad_line_in_a_process_of_its_own(case: Case) -> None:
    case.write(GOOD, "this is no JSON")
    refused(case.run(), 2, f"{case.corpus}:2: ", "not valid JSON", "--skip-bad")
    case.nothing_half_written()


@contextmanager
def one_ray() -> Iterator[None]:
    with ray_runtime.connected(1):
        yield


@pytest.fixture(scope="module")
def ray_is_up() -> Iterator[None]:
    """For the tests that call `main` in this process: one Ray for all of them."""
    with one_ray():
        yield


@pytest.mark.usefixtures("ray_is_up")
class TestRecords:
    BAD: tuple[tuple[dict[str, Any], str], ...] = (
        ({"id": "bare"}, "has no content"),
        ({"id": "empty", "messages": []}, "empty"),
        ({"id": "nothing", "text": ""}, "empty"),
        ({"id": "long", "token_ids": [5] * (TINY_CONTEXT + 1)}, f"context length of {TINY_CONTEXT}"),
        ({"id": "alien", "token_ids": [10_000_000]}, "vocabulary"),
        ({"text": "anonymous"}, "has no id"),
    )

    def test_each_kind_of_bad_record_is_named_and_can_be_skipped(
        self, case: Case, capsys: pytest.CaptureFixture[str]
    ) -> None:
        case.write(GOOD, *(record for record, _ in self.BAD))
        assert main(case.arguments("--skip-bad", "--dry-run")) == 0
        lines = capsys.readouterr().err.splitlines()
        for number, (_, reason) in enumerate(self.BAD, 2):
            line = next(line for line in lines if f"corpus.jsonl:{number}: " in line)
            assert line.startswith("skipped ") and reason in line

    def test_one_id_for_two_prompts(self, case: Case, capsys: pytest.CaptureFixture[str]) -> None:
        case.write(GOOD, GOOD, GOOD | {"text": "Another text."})
        assert main(case.arguments("--skip-bad")) == 2
        (line,) = capsys.readouterr().err.strip().splitlines()
        assert line.startswith("error: the id 'good' ") and f"{case.corpus}:1" in line and f"{case.corpus}:3" in line
        case.nothing_half_written()

    def test_nothing_but_bad_records(self, case: Case, capsys: pytest.CaptureFixture[str]) -> None:
        case.write({"id": "bare"})
        assert main(case.arguments("--skip-bad")) == 2
        assert "holds no prompt" in capsys.readouterr().err
