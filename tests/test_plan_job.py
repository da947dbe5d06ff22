"""jobs/plan.py: what it says on a tiny model, its page, and its prediction beside what restoring really takes."""

from __future__ import annotations

import argparse
import itertools
import json
from pathlib import Path

import pytest
import torch

from jobs.arguments import bandwidth
from jobs.bench.speeds import Wanted, measure
from jobs.bench.synthetic import HEAD_DIM
from jobs.plan import main
from pipeline.economics import PREFILL, RAW
from pipeline.model_source import resolve_model
from tests.browser import rendered

QUICK = ["--tokens", "96", "--chunk-tokens", "32", "--repeats", "1", "--threads", "1"]


@pytest.fixture(autouse=True)
def same_threads() -> object:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def test_it_measures_weighs_and_draws(tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rate = {"settings": {"predictor": "int8", "loop": "closed", "model": "m", "cache_dtype": "bf16", "tokens": 96},
            "bits_per_scalar": 4.0, "decode_tokens_per_s": 50.0}  # fmt: skip
    (tmp_path / "rate.json").write_text(json.dumps(rate))
    out = tmp_path / "plan.html"
    given = ["--model", str(tiny_model), *QUICK, "--bandwidth", "10Mb/s", "--machine-price", "3", "--by", "cost"]
    given += ["--predictor", "int8", "--predictor", "linear", "--out", str(out)]
    assert main([*given, "--benchmark", str(tmp_path / "rate.json"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [way["name"] for way in found["ways"]] == [PREFILL, RAW, "int8", "linear"]
    assert found["case"]["raw_bytes"] == 96 * 3 * 2 * 2 * 16 * 2 and found["about"]["bits"].endswith("for linear")
    ways = {way["name"]: way for way in found["ways"]}
    assert ways[RAW]["seconds"] == pytest.approx(8 * found["case"]["raw_bytes"] / 1e7)
    assert ways["int8"]["stored_bytes"] == found["case"]["raw_bytes"] / 4
    assert min(ways.values(), key=lambda way: way["money"])["name"] == found["best"]
    page = out.read_text()
    assert f"Use {found['best']}" in page and "<script" not in page and page.count("<path") == 4


def test_the_table_is_for_people(tiny_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--model", str(tiny_model), *QUICK, "--predictor", "static"]) == 0
    text = capsys.readouterr().out
    assert ": use " in text and "prefill " in text and "prefilling" in text and "96 tokens" in text


@pytest.mark.parametrize(
    ("more", "said"),
    [(["--tokens", "0"], "--tokens 0"), (["--tokens", "5000"], "context length of 1024"), (["--reuse", "-1"], "reuse cannot be"),
     (["--out", "/nowhere/x.html"], "does not exist"), (["--threads", "-2"], "--threads")],
)  # fmt: skip
def test_bad_requests_are_one_sentence(
    tiny_model: Path, capsys: pytest.CaptureFixture[str], more: list[str], said: str
) -> None:
    assert main(["--model", str(tiny_model), *QUICK, *more]) == 2
    assert said in capsys.readouterr().err


def test_bandwidths() -> None:
    assert [bandwidth(text) for text in ("100Mb/s", "1 Gb/s", "2.5g", "10Gbps", "8000")] == [1e8, 1e9, 2.5e9, 1e10, 8e3]
    for text in ("0", "fast", "1 Xb/s", "-1G"):
        with pytest.raises(argparse.ArgumentTypeError):
            bandwidth(text)


@pytest.mark.slow
def test_its_page_is_drawn(tiny_model: Path, tmp_path: Path) -> None:
    out = tmp_path / "plan.html"
    assert main(["--model", str(tiny_model), *QUICK, "--predictor", "int8", "--out", str(out)]) == 0
    document = rendered(out, tmp_path)
    assert document.count("<circle") == 3 and "Beats raw below" in document


def test_a_rung_takes_one_pass_and_the_coding_of_every_scalar(tiny_model: Path) -> None:
    """With a clock that advances a second a reading: how long restoring really takes beside it, `jobs/benchmark.py restore` tells."""
    ticks = itertools.count()
    wanted = Wanted(("static", "int8"), 96, 32, "bf16", 2, lambda: float(next(ticks)))
    case = measure(resolve_model(str(tiny_model)), wanted, lambda text: None)
    free, int8 = case.rungs
    assert case.prefill_seconds == 1 and case.raw_bytes == 96 * 3 * 2 * 2 * 16 * 2
    assert int8.decode_seconds - free.decode_seconds == pytest.approx(1)
    layer = 2 * HEAD_DIM * 32  # scalars of a made-up layer's chunk, which takes one second
    assert free.decode_seconds == free.encode_seconds == pytest.approx(2 * 3 * 2 * 16 * 96 / layer)
