"""The recompress job as users run it: a process that is killed at what it says, and run again."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from codec.errors import UserError
from jobs.verify import main as verify
from pipeline.current import point_first, read_pointers, refuse_retired
from pipeline.runs import list_runs, read_run
from tests.conftest import REPO_ROOT, write_tiny_llama, write_tokenizer
from tests.made_store import RECORDS, make, options_of

pytestmark = pytest.mark.slow


def recompress(store: str, config: Path, die_at: str = "") -> tuple[int, str]:
    """(exit status, what it said); it is killed, with all it has started, as soon as it says `die_at`."""
    command = [sys.executable, "jobs/recompress.py", "--store", store, "--config", str(config), "--log-json"]
    process = subprocess.Popen(
        command, cwd=REPO_ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    said: list[str] = []
    assert process.stdout is not None
    try:
        for line in process.stdout:
            said.append(line)
            if die_at and die_at in line:
                break
        else:
            return process.wait(60), "".join(said)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)  # its own session: whatever it has started is in it
    return process.wait(60), "".join(said)


def test_a_job_that_is_killed_is_finished_by_the_next_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = write_tiny_llama(tmp_path / "mymodel")
    write_tokenizer(model)
    made = make(options_of(model, tmp_path, [*RECORDS, {"id": "t", "text": "hush hush, said the fox. " * 9}]))
    store, old = made.store, (made.job.target, made.job.profile)
    point_first(store, "mymodel", "bf16", old)
    write_tiny_llama(model, seed=5)
    config = tmp_path / "job.yaml"
    config.write_text(f"model: {model}\nactors: 1\n")
    status, said = recompress(store.uri, config, "compressing ")
    assert status == -signal.SIGKILL, said
    assert read_pointers(store).in_use == {old}
    status, said = recompress(store.uri, config)
    assert status == 0 and "now follow target" in said and f'"value": "{model}", "from": "config {config}"' in said
    assert "hush hush" not in said
    (new,) = read_pointers(store).in_use
    assert new != old and read_pointers(store).retired.keys() == {old}
    assert verify(["--store", store.uri, "--deep"]) == 0 and "26 read, 26 decoded" in capsys.readouterr().out
    records = [read_run(store, path) for path in list_runs(store)]
    (record,) = [record for record in records if record.job == "recompress"]
    assert record.generation == f"{new[0].hex()}/{new[1].hex()}"
    status, said = recompress(store.uri, config)
    assert status == 0 and "unchanged: readers of mymodel have this generation" in said
    with pytest.raises(UserError, match="was replaced on"):
        refuse_retired(store, old)
