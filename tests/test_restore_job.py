"""The restore job on embedded Ray: files, statuses, actors that die or are late."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from rich.console import Console

from codec.errors import StorageError, UserError
from pipeline import ray_runtime
from pipeline.restoration.batch import Outcome
from pipeline.restoration.job import RestoreOptions, read_prompt_file, run
from pipeline.restoration.pool import DecodePool, PoolSettings
from tests.conftest import REPO_ROOT
from tests.stored import DEVICE, Kept, same, tokens_of
from tests.test_restoration import flip
from tests.test_restore_files import PROMPTS, metadata, pairs_of, requests

JOB = REPO_ROOT / "jobs" / "restore.py"
TEXT = "You are an agent that reads source code, calls tools and answers questions about what it has found. "


class Case:
    """A store with some prompts, a corpus that names them, and an empty folder."""

    def __init__(self, model: Path, folder: Path) -> None:
        self.kept = Kept(model, folder / "store", kind="static")
        self.kept.put(PROMPTS)
        self.corpus, self.out = folder / "corpus.jsonl", folder / "out"
        self.write({name: ids for name, ids in PROMPTS.items()} | {"x/y": PROMPTS["a"] + tokens_of(9, 5)})
        self.options = RestoreOptions(self.kept.store.uri, str(model), str(self.out), corpus=str(self.corpus), actors=1)

    def write(self, prompts: dict[str, list[int]]) -> None:
        self.corpus.write_text("".join(json.dumps({"id": n, "token_ids": i}) + "\n" for n, i in prompts.items()))

    def run(self, **changes: Any) -> tuple[int, str]:
        text = io.StringIO()
        console = Console(file=text, width=300)
        return run(replace(self.options, **changes), console, console), text.getvalue()


@pytest.fixture
def case(tiny_model: Path, tmp_path: Path) -> Case:
    return Case(tiny_model, tmp_path)


@pytest.fixture(scope="module")
def cluster() -> Iterator[ray_runtime.Cluster]:
    """One Ray for the tests that want it; `run` joins it."""
    with ray_runtime.connected(2) as running:
        yield running


# ---------------------------------------------------------------- the job
@pytest.mark.slow
@pytest.mark.usefixtures("cluster")
def test_a_corpus_is_restored_once_and_files_are_whole(case: Case) -> None:
    status, text = case.run()
    assert status == 0, text
    for name, ids in PROMPTS.items():
        path = case.out / f"{name}.safetensors"
        assert same(pairs_of(path), case.kept.truth(ids)) and metadata(path)["id"] == name
    assert metadata(case.out / "x%2Fy.safetensors")["tokens"] == str(len(PROMPTS["a"]))
    before = {p.name: p.stat().st_mtime_ns for p in case.out.iterdir()}
    assert len(before) == 5
    (case.out / "b.safetensors").unlink()
    status, text = case.run()
    assert status == 0 and "files kept         4" in text and "files written      1" in text
    after = {p.name: p.stat().st_mtime_ns for p in case.out.iterdir()}
    assert after.keys() == before.keys() and [n for n in after if after[n] != before[n]] == ["b.safetensors"]
    status, text = case.run(overwrite=True, heads="1:2", layers="0:2")
    assert status == 0 and "files written      5" in text
    truth = [(k[1:2], v[1:2]) for k, v in case.kept.truth(PROMPTS["d"])[:2]]
    assert same(pairs_of(case.out / "d.safetensors"), truth)


@pytest.mark.slow
@pytest.mark.usefixtures("cluster")
def test_what_is_damaged_is_said_and_gives_status_1(case: Case) -> None:
    flip(case.kept.blob(PROMPTS["a"], 2), -60)
    status, text = case.run()
    assert status == 1 and "damaged            2" in text and "checksum" in text and "\x1b" not in text
    assert metadata(case.out / "a.safetensors")["tokens"] == "64"
    assert same(pairs_of(case.out / "b.safetensors"), case.kept.truth(PROMPTS["b"]))
    twice = {"id": "d", "token_ids": PROMPTS["d"]}
    case.corpus.write_text("".join(json.dumps(r) + "\n" for r in (twice, twice, twice | {"token_ids": [1, 2]})))
    with pytest.raises(UserError, match="two different prompts"):
        case.run(overwrite=True)
    case.write({"unknown": tokens_of(77, 50)})
    status, text = case.run()
    assert status == 1 and "nothing of any of these prompts is stored" in text


@pytest.mark.slow
@pytest.mark.usefixtures("cluster")
def test_messages_need_the_tokenizer_and_a_prompt_file_is_one_prompt(case: Case, tmp_path: Path) -> None:
    from pipeline.model_source import load_tokenizer, resolve_model

    tokenizer = load_tokenizer(resolve_model(case.options.model))
    ids = tokenizer.encode(TEXT * 2, add_special_tokens=False)
    case.kept.put({"text": ids})
    (tmp_path / "question.txt").write_text(TEXT * 2)
    status, text = case.run(corpus=None, prompt_file=str(tmp_path / "question.txt"))
    assert status == 0, text
    assert same(pairs_of(case.out / "question.safetensors"), case.kept.truth(ids))
    fingerprint = case.kept.job.target.hex()
    with pytest.raises(UserError, match="--tokenizer"):
        case.run(corpus=None, prompt_file=str(tmp_path / "question.txt"), model=fingerprint, overwrite=True)
    status, _ = case.run(
        corpus=None, prompt_file=str(tmp_path / "question.txt"), model=fingerprint, overwrite=True,
        tokenizer=case.options.model,
    )  # fmt: skip
    assert status == 0


@pytest.mark.slow
def test_from_a_command_line(case: Case, tmp_path: Path) -> None:
    """In a process of its own, with Ray of its own, from another folder."""

    def job(*more: str, **given: str) -> subprocess.CompletedProcess[str]:
        asked = {"store": case.options.store, "model": case.options.model, "out": str(case.out)} | given
        pairs = [text for name, value in asked.items() for text in (f"--{name.replace('_', '-')}", value)]
        return subprocess.run(
            [sys.executable, str(JOB), *pairs, *more], capture_output=True, text=True, timeout=400, cwd=tmp_path
        )

    done = job(corpus=str(case.corpus), actors="1")
    assert done.returncode == 0, done.stderr
    assert "files written      5" in done.stdout and len(list(case.out.iterdir())) == 5
    for given, words in (
        ({"corpus": "none.jsonl"}, "none.jsonl does not exist"),
        ({"corpus": str(case.corpus), "heads": "1"}, "--heads '1' is no range"),
        ({"corpus": str(case.corpus), "model": "nobody"}, "no name in the index"),
        ({"corpus": str(case.corpus), "store": str(tmp_path / "no")}, "there is no store"),
    ):
        refused = job(**given)
        assert refused.returncode == 2 and words in refused.stderr, refused.stderr
        assert refused.stderr.startswith("error: ") and len(refused.stderr.strip().splitlines()) == 1


# ---------------------------------------------------------------- the pool
def outcomes_of(pool: DecodePool, case: Case) -> list[Outcome]:
    folder = case.out
    folder.mkdir(exist_ok=True)
    return list(pool.run([[request] for request in requests(case.kept, folder)]))


def settings(case: Case, **changes: Any) -> PoolSettings:
    return replace(PoolSettings(case.kept.store, DEVICE, 1, 1, 0, 300.0), **changes)


def decode_processes() -> list[int]:
    """Pids of living decode actors; a process may end while it is looked at."""
    found = []
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            if "DecodeActor" in "".join(child.cmdline()[:1]):
                found.append(child.pid)
    return found


@pytest.mark.slow
@pytest.mark.usefixtures("cluster")
def test_an_actor_that_is_killed_is_replaced_and_its_requests_are_done(case: Case) -> None:
    pool = DecodePool(settings(case))
    found: list[Outcome] = []
    killed: list[int] = []

    def kill() -> None:
        until = time.monotonic() + 120
        while time.monotonic() < until and not killed:
            for pid in decode_processes():
                os.kill(pid, signal.SIGKILL)
                killed.append(pid)
            time.sleep(0.05)

    killer = threading.Thread(target=kill)
    killer.start()
    found = outcomes_of(pool, case)
    killer.join()
    assert killed and pool.replaced == len(killed)
    assert sorted(o.id for o in found) == sorted(PROMPTS) and not any(o.error for o in found)
    for name, ids in PROMPTS.items():
        assert same(pairs_of(case.out / f"{name}.safetensors"), case.kept.truth(ids))
    until = time.monotonic() + 30
    while decode_processes() and time.monotonic() < until:
        time.sleep(0.1)
    assert decode_processes() == [], "the pool ends its actors"


@pytest.mark.slow
@pytest.mark.usefixtures("cluster")
def test_a_request_over_its_deadline_is_given_up_and_said(case: Case) -> None:
    pool = DecodePool(settings(case, deadline=0.001))
    found = outcomes_of(pool, case)
    assert sorted(o.id for o in found) == sorted(PROMPTS)
    assert all("took longer than 0.001 s" in o.error and o.tokens == 0 for o in found)
    assert pool.replaced == len(PROMPTS) and not list(case.out.glob("*.safetensors"))


@pytest.mark.slow
@pytest.mark.usefixtures("cluster")
def test_what_ends_the_job_is_one_sentence_of_ours(case: Case, tmp_path: Path) -> None:
    asked = [[replace(r, path=str(tmp_path / "none" / "x"))] for r in requests(case.kept, case.out)]
    with pytest.raises(StorageError, match="cannot write") as caught:
        list(DecodePool(settings(case)).run(asked))
    assert "Traceback" not in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.slow
@pytest.mark.usefixtures("cluster")
def test_no_requests_at_all(case: Case) -> None:
    assert list(DecodePool(settings(case)).run([])) == []


# ---------------------------------------------------------------- options and prompt files
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"corpus": None}, "one of"), ({"prompt_file": "x"}, "one of"), ({"heads": "2"}, "--heads"), ({"layers": "2:1"}, "--layers"),
        ({"deadline": 0.0}, "--deadline"), ({"deadline": float("nan")}, "--deadline"), ({"limit": 0}, "--limit"),
        ({"batch_tokens": 0}, "--batch-tokens"), ({"device": "tpu"}, "--device"), ({"cache_dtype": "x"}, "--cache-dtype"),
        ({"salt_env": "KV_NOT_SET"}, "KV_NOT_SET"),
    ],
)  # fmt: skip
def test_options_that_cannot_be(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        replace(RestoreOptions("s", "m", "o", corpus="c"), **changes).check()


def test_prompt_files(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("some text")
    (tmp_path / "b.json").write_text('{"token_ids": [1, 2]}')
    (tmp_path / "c.json").write_text('{"id": "own", "messages": [{"role": "user", "content": "hi"}]}')
    found = [read_prompt_file(str(tmp_path / name)) for name in ("a.txt", "b.json", "c.json")]
    assert [(r.id, r.kind) for r in found] == [("a", "text"), ("b", "token_ids"), ("own", "messages")]
    for name, data in (
        ("d.json", b"{"),
        ("e.txt", b"\xff\xfe"),
        ("f.json", b"[]"),
        ("g.txt", b""),
        ("h.json", b'{"x": 1}'),
    ):
        (tmp_path / name).write_bytes(data)
        with pytest.raises(UserError, match=name):
            read_prompt_file(str(tmp_path / name))
    (tmp_path / "prompts.jsonl").write_text('{"id": "a", "text": "x"}')
    with pytest.raises(UserError, match=r"prompts\.jsonl is a corpus .*--corpus"):
        read_prompt_file(str(tmp_path / "prompts.jsonl"))
    with pytest.raises(UserError, match=r"nothing\.txt"):
        read_prompt_file(str(tmp_path / "nothing.txt"))
