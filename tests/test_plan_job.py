"""jobs/plan.py: what it says on a tiny model, its page, and its prediction beside what restoring really takes."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import pytest
import torch

from jobs.arguments import bandwidth
from jobs.bench import restore
from jobs.bench.speeds import Wanted, measure
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


@pytest.mark.slow
def test_its_prediction_is_what_restoring_takes(
    smollm2_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within 25 % of jobs/benchmark.py restore, in processor time of one thread, so that a busy machine changes neither side."""
    corpus, parser = tmp_path / "corpus.jsonl", argparse.ArgumentParser()
    texts = [
        (Path(__file__).parent / name).read_text() for name in ("conftest.py", "test_layering.py", "made_store.py")
    ]
    corpus.write_text("".join(json.dumps({"id": str(n), "text": text}) + "\n" for n, text in enumerate(texts)))
    restore.add_arguments(parser)
    given = ["--model", str(smollm2_gguf), "--calibration", str(corpus), "--eval", str(corpus), "--predictor", "int8", "--tokens", "512",
             "--train", "2", "--test", "1", "--threads", "1", "--repeats", "2"]  # fmt: skip
    monkeypatch.setattr(restore, "LINKS", {})
    measured = restore.run(parser.parse_args(given), lambda text: None)
    wanted = Wanted(("int8",), 512, 256, measured["settings"]["cache_dtype"], 2, time.process_time)
    case = measure(resolve_model(str(smollm2_gguf)), wanted, lambda text: None)
    said = f"decode {case.rungs[0].decode_seconds:.2f} s, measured {measured['decode_seconds']:.2f} s"
    assert case.rungs[0].decode_seconds == pytest.approx(measured["decode_seconds"], rel=0.25), said
    assert case.prefill_seconds == pytest.approx(measured["prefill_seconds"], rel=0.25)
    assert case.raw_bytes == measured["raw_bytes"]
