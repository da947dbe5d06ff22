"""Options from flags, environment, a YAML file and defaults; logs as JSON."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from codec.errors import DataError, UserError
from jobs import compress_corpus, gc, import_caches, plan, recompress, report, restore, serve, verify
from jobs.configuration import Given, read_options
from jobs.exits import run_job
from jobs.notes import Notes
from pipeline.report import say


@pytest.fixture
def config(tmp_path: Path) -> Path:
    return tmp_path / "job.yaml"


def read(file: Path | None, *arguments: str, **environment: str) -> Given:
    words = [*(["--config", str(file)] if file else []), *arguments]
    return read_options(compress_corpus.parser(), words, environment)


def test_flags_go_before_the_environment_before_the_file_before_defaults(config: Path) -> None:
    config.write_text("model: M\ncorpus: C\nstore: S\nchunk-tokens: 64\nskip_bad: true\nlimit: 5\nloop: open\n")
    given = read(config, "--limit", "7", KV_JOB_LIMIT="6", KV_JOB_STORE="E", KV_JOB_SHARED_FS="true", KV_OTHER="x")
    values = {
        name: given.values[name]
        for name in ("model", "store", "chunk_tokens", "skip_bad", "limit", "loop", "shared_fs")
    }
    assert values == {
        "model": "M", "store": "E", "chunk_tokens": 64, "skip_bad": True, "limit": 7, "loop": "open", "shared_fs": True,
    }  # fmt: skip
    origins = {name: given.origins[name] for name in ("model", "store", "limit", "coder")}
    assert origins == {
        "model": f"config {config}", "store": "environment KV_JOB_STORE", "limit": "flag", "coder": "default",
    }  # fmt: skip
    assert given.values.keys() == given.origins.keys() and "config" not in given.values


def test_what_a_job_goes_by_is_shown_with_where_it_came_from(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config.write_text("model: M\ncorpus: s3://me:hush@bucket/x\n")
    given = read(config, "--store", "S")
    given.show(Console(width=200))
    text = capsys.readouterr().out
    assert f"  model            M  (config {config})" in text and "S  (flag)" in text and "256  (default)" in text
    assert "hush" not in text and len(text.splitlines()) == len(given.values)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("modle: M", "unknown key 'modle'; did you mean model?"),
        ("zzz: 1", "unknown key 'zzz'; known are model, lora"),
        ("debug: true", "unknown key 'debug'"),
        ("chunk-tokens: many", r"job.yaml: --chunk-tokens: invalid int value: 'many'"),
        ("loop: ajar", "--loop: invalid choice: 'ajar'"),
        ("skip-bad: perhaps", "skip-bad must be true or false, not 'perhaps'"),
        ("limit: [1, 2]", "limit takes one value, not a list"),
        ("corpus: {a: 1}", "corpus takes a name or a number"),
        ("limit: 3\nlimit-: 4", "unknown key 'limit-'"),
        ("skip-bad: true\nskip_bad: true", "gives skip_bad twice"),
        ("- a", "must hold keys and values"),
        ("a: [", "is not valid YAML at line"),
        ("a: !!python/object/apply:os.system [true]", "is not valid YAML"),
        ("#" * (2**20 + 1), "over the limit"),
    ],
)
def test_files_that_cannot_be(config: Path, text: str, message: str) -> None:
    config.write_text(text)
    with pytest.raises(UserError, match=message):
        read(config, "--model", "M")


def test_a_file_that_is_not_there_and_a_variable_that_cannot_be(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"none\.yaml cannot be read"):
        read(tmp_path / "none.yaml")
    with pytest.raises(UserError, match=r"the environment \(KV_JOB_…\): --limit: invalid int value"):
        read(None, KV_JOB_LIMIT="x")


def test_what_is_missing_everywhere_is_said_as_for_flags(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config.write_text("")
    with pytest.raises(SystemExit) as caught:
        read(config, "--model", "M")
    assert caught.value.code == 2 and "required: --corpus, --store" in capsys.readouterr().err


def test_lists_and_flags_with_other_names(config: Path) -> None:
    config.write_text("store: S\nfrom: abc\nsalt-env: [A, B]\n")
    given = read_options(recompress.parser(), ["--config", str(config)], {})
    assert given.values["source"] == "abc" and given.values["salt_env"] == ["A", "B"]
    given = read_options(recompress.parser(), ["--config", str(config), "--salt-env", "C"], {"KV_JOB_FROM": "d"})
    assert given.values["source"] == "d" and given.values["salt_env"] == ["C"] and given.plain()["from"]["value"] == "d"


def test_a_flag_takes_the_place_of_what_it_excludes(config: Path) -> None:
    config.write_text("store: S\nmodel: M\nout: O\ncorpus: C\n")
    given = read_options(restore.parser(), ["--config", str(config), "--prompt-file", "P"], {})
    assert given.values["prompt_file"] == "P" and given.values["corpus"] is None


JOBS = [compress_corpus, recompress, restore, serve, verify, gc, report, plan, import_caches]


@pytest.mark.parametrize("job", JOBS)
def test_every_job_explains_itself(job: Any, capsys: pytest.CaptureFixture[str]) -> None:
    for given in (["--help"], ["--log-json", "-h"]):
        with pytest.raises(SystemExit) as caught:
            job.main(given)
        said = capsys.readouterr()
        assert caught.value.code == 0 and "--config FILE.yaml" in said.out and "%(" not in said.out and not said.err


@pytest.mark.parametrize("job", JOBS)
def test_every_job_takes_a_file(job: Any, config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config.write_text("cache-dtype: bf16\nnonsense-key: 1\n" if job is plan else "store: S\nnonsense-key: 1\n")
    assert job.main(["--config", str(config)]) == 2
    assert "has the unknown key 'nonsense-key'" in capsys.readouterr().err
    parser: argparse.ArgumentParser = job.parser()
    assert {"--log-json"} <= {word for action in parser._actions for word in action.option_strings}


def test_logs_as_json_have_a_line_an_object(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = read(None, "--model", "M", "--corpus", "C", "--store", "S", "--log-json")
    notes = Notes(given, "compress")
    assert capsys.readouterr().err == ""
    say(notes, "ein [b]Gruß[/b]", prompt="p1")
    notes.print("12 chunks", highlight=False)
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert [line["message"] for line in lines] == ["begun", "ein [b]Gruß[/b]", "12 chunks"]
    assert lines[0]["options"]["limit"] == {"value": None, "from": "default"}
    assert (
        lines[1]["prompt"] == "p1" and lines[1]["model"] == "M" and lines[1]["job"] == "compress" and lines[1]["time"]
    )


def test_notes_for_people_begin_with_the_options(capsys: pytest.CaptureFixture[str]) -> None:
    notes = Notes(read(None, "--model", "M", "--corpus", "C", "--store", "S"), "compress")
    say(notes, "tokenised")
    say(notes, "encoded")
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].split() == ["model", "M", "(flag)"] and lines[-2:] == ["tokenised", "encoded"]


@pytest.mark.parametrize("given", ["flag", "environment", "config"])
def test_an_error_is_the_last_line_and_json_wherever_that_was_asked_for(
    given: str, config: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    store, words = str(config.parent / "store"), ["--log-json"]
    if given == "environment":
        monkeypatch.setenv("KV_JOB_LOG_JSON", "true")
        words = []
    elif given == "config":
        config.write_text("log-json: true\n")
        words = ["--config", str(config)]
    assert gc.main(["--store", store, *words]) == 2
    (line,) = map(json.loads, capsys.readouterr().err.splitlines())
    assert line.keys() == {"time", "job", "store", "level", "message"}
    assert (line["job"], line["store"], line["level"]) == ("gc", store, "error")
    assert store in line["message"] and not line["message"].startswith("error")


@pytest.mark.parametrize(
    ("error", "status", "message"),
    [
        (UserError("no s3://me:hush@bucket"), 2, "no s3://bucket"),
        (DataError("two\nlines"), 1, "two lines"),
        (ValueError("hush [b]"), 1, "unexpected ValueError: *** [b] (run again with --debug for the traceback)"),
        (KeyboardInterrupt(), 130, "stopped"),
    ],
)
@pytest.mark.parametrize("log", [[], ["--log-json"]])
def test_all_that_ends_a_job_is_said_without_secrets(
    log: list[str], error: BaseException, status: int, message: str,
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    def work(given: Given, notes: Notes) -> int:
        notes.event("at work")
        raise error

    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hush")
    words = ["--model", "M", "--corpus", "C", "--store", "s3://me:hush@bucket", *log]
    assert run_job(compress_corpus.parser(), words, "compress", work, interrupted="stopped") == status
    text = capsys.readouterr().err
    if log:
        *_, before, last = map(json.loads, text.splitlines())
        assert (last["level"], last["message"], last["model"]) == ("error", message, "M") and "level" not in before
        assert last.keys() == before.keys() | {"level"}
    else:
        assert text.splitlines()[-2:] == ["at work", f"error: {message}"]
    assert "hush" not in text
