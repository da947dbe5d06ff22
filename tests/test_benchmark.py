"""jobs/benchmark.py on a tiny model: what it prints, that its rate is that of the bytes on disk, and how it refuses."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import codec
from codec.errors import UserError
from codec.formats import number_format
from jobs.bench import ablation, predictor, rate
from jobs.bench.decode_process import Decoded, decode_all
from jobs.bench.prompts import plain_text, read_prompts
from pipeline.target import load_tokenizer, resolve_model

RATES = {"bits_per_scalar", "bits_k", "bits_v", "ratio", "ideal_bits_per_scalar", "ideal_bits_k", "ideal_bits_v"}
SIZES = {
    "raw_bytes",
    "stored_bytes",
    "header_bytes",
    "profile_bytes",
    "predictor_bytes",
    "scalars",
    "escapes",
    "chunks",
}
SPEEDS = {"encode_tokens_per_s", "decode_tokens_per_s", "target_tokens_per_s"}
KEYS = RATES | SIZES | SPEEDS | {"peak_rss_bytes", "peak_rss_decode_bytes", "verified", "settings", "machine"}
PHRASES = ("The fox reads a file. ", "def write(path: str): return path\n", "Answer questions about the source. ")


@pytest.fixture(autouse=True)
def same_threads() -> Iterator[None]:
    """A benchmark sets the process' threads."""
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """Two prompts that share a long prefix, one that is too short between them, and one of messages and tools."""
    shared = PHRASES[0] * 12
    tool = {"type": "function", "function": {"name": "größe", "parameters": {}}}
    records = [
        {"id": "a", "text": shared + PHRASES[1] * 12},
        {"id": "short", "text": "too short"},
        {"id": "b", "text": shared + PHRASES[2] * 12},
        {"id": "c", "messages": [{"role": "user", "content": PHRASES[2] * 20}], "tools": [tool]},
    ]
    path = tmp_path / "corpus.jsonl"
    path.write_text("".join(json.dumps(r) + "\n" for r in records), encoding="utf-8")
    return path


def benchmark(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    script = Path(__file__).resolve().parent.parent / "jobs" / "benchmark.py"
    return subprocess.run(
        [sys.executable, str(script), *arguments], cwd=cwd, capture_output=True, text=True, check=False
    )


def settings_for(model: Path, corpus: Path, *, train: int = 1, test: int = 1) -> rate.Settings:
    paths = (str(model), str(corpus), str(corpus))
    return rate.Settings(*paths, tokens=90, train=train, test=test, chunk_tokens=40, threads=1)


def options(model: Path, corpus: Path) -> list[str]:
    return (
        f"rate --model {model} --calibration {corpus} --eval {corpus} --predictor fp8 --loop open --cache-dtype bf16 "
        "--tokens 90 --train 1 --test 3 --chunk-tokens 40 --threads 1"
    ).split()


def test_command_line(tiny_model: Path, corpus: Path, tmp_path: Path) -> None:
    done = benchmark(*options(tiny_model, corpus), "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert set(result) == KEYS
    assert result["verified"] is True and result["chunks"] == 3 * 3
    assert result["bits_per_scalar"] == pytest.approx(8 * result["stored_bytes"] / result["scalars"])
    assert result["ratio"] == pytest.approx(16 / result["bits_per_scalar"])
    settings = result["settings"]
    expected = {"prompts": [1, 3], "tokens": 90, "threads": 1, "eval": "corpus.jsonl", "cache_dtype": "bf16"}
    assert settings | expected == settings
    assert result["machine"]["cpu"] and result["machine"]["torch"] == torch.__version__
    assert min(result["peak_rss_bytes"], result["peak_rss_decode_bytes"]) > 10_000_000
    assert not list(tmp_path.glob("kv-rate-*"))


def test_rate_is_that_of_the_bytes_on_disk(tiny_model: Path, corpus: Path, tmp_path: Path) -> None:
    settings = settings_for(tiny_model, corpus, train=2, test=3)
    result = rate.measure_rate(settings, tmp_path, lambda text: None)
    sizes = [path.stat().st_size for path in (tmp_path / "store").rglob("*.kv")]
    scalars = 3 * 90 * 3 * 2 * 2 * 16  # prompts, tokens, layers, K and V, heads, dimensions
    assert len(sizes) == 3 * 3 and result["scalars"] == scalars
    assert result["verified"] is True
    assert result["stored_bytes"] == sum(sizes)
    assert result["bits_per_scalar"] == pytest.approx(8 * sum(sizes) / scalars)
    assert result["raw_bytes"] == 2 * scalars
    streams = (result["bits_k"] + result["bits_v"]) / 2 * scalars / 8
    assert streams + result["header_bytes"] == pytest.approx(sum(sizes))
    ideal = (result["ideal_bits_k"] + result["ideal_bits_v"]) / 2
    assert result["ideal_bits_per_scalar"] == pytest.approx(ideal)
    assert dict(rate.rows(result))["verified"] == "9 chunks"


@pytest.mark.parametrize(
    ("cache", "scale", "loop"),
    [
        ("fp8_e4m3", None, "closed"),
        ("fp8_e4m3", "head", "closed"),
        ("fp8_e4m3", "none", "closed"),
        ("fp8_e4m3", "head", "open"),
        ("fp8_e5m2", "tensor", "closed"),
        ("fp32", None, "closed"),
        ("fp32", None, "open"),
    ],
)
def test_every_cache_format_comes_back(
    tiny_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    cache: str,
    scale: str | None,
    loop: str,
) -> None:
    """In one process here, to be quick; on random tokens, of which few prompts are enough to calibrate on."""
    monkeypatch.setattr(rate, "decode_elsewhere", lambda request, prompts, _: decode_all(request, prompts))
    for name, seed in (("calibration", 0), ("eval", 1)):
        tokens = torch.randint(0, 384, (4, 100), generator=torch.Generator().manual_seed(seed)).tolist()
        lines = (json.dumps({"id": str(number), "token_ids": ids}) + "\n" for number, ids in enumerate(tokens))
        (tmp_path / f"{name}.jsonl").write_text("".join(lines))
    settings = settings_for(tiny_model, tmp_path / "eval.jsonl", train=4)
    settings = replace(
        settings, calibration=str(tmp_path / "calibration.jsonl"), cache_dtype=cache, fp8_scale=scale, loop=loop
    )
    settings.check()
    result = rate.measure_rate(settings, tmp_path, lambda text: None)
    assert result["verified"] is True and result["chunks"] == 3
    bits = 8 * number_format(cache).item_bytes
    assert result["raw_bytes"] == bits // 8 * result["scalars"]
    assert result["ratio"] == pytest.approx(bits / result["bits_per_scalar"])
    streams = (result["bits_k"] + result["bits_v"]) / 2
    assert streams < bits / 1.5 and result["escapes"] < result["scalars"] / 100
    shown = scale or ("tensor" if bits == 8 else None)
    assert result["settings"]["cache_dtype"] == cache and result["settings"]["fp8_scale"] == shown
    assert f"{cache} (scale: {shown}) cache" in dict(rate.rows(result))["predictor"] or shown is None


def test_scales_are_of_fp8_caches_alone(tiny_model: Path, corpus: Path, tmp_path: Path) -> None:
    for cache in (None, "bf16", "fp32"):
        with pytest.raises(UserError, match="--fp8-scale does not go with"):
            replace(settings_for(tiny_model, corpus), cache_dtype=cache, fp8_scale="head").check()
    with pytest.raises(UserError, match="--fp8-scale 'row' is not known"):
        replace(settings_for(tiny_model, corpus), cache_dtype="fp8_e4m3", fp8_scale="row").check()


def test_other_bits_are_not_verified(
    tiny_model: Path, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lying(*arguments: Any) -> Decoded:
        return replace(decode(*arguments), checksums=["00"] * 3)

    decode = rate.decode_elsewhere
    monkeypatch.setattr(rate, "decode_elsewhere", lying)
    settings = settings_for(tiny_model, corpus)
    result = rate.measure_rate(settings, tmp_path, lambda text: None)
    assert result["verified"] is False
    assert "NO" in dict(rate.rows(result))["verified"]


def test_prompts(tiny_model: Path, corpus: Path) -> None:
    tokenizer = load_tokenizer(resolve_model(tiny_model))
    prompts = read_prompts(str(corpus), tokenizer, tokens=90, count=3)
    records = [json.loads(line) for line in corpus.read_text(encoding="utf-8").splitlines()]
    text = plain_text(records[3])
    assert text.startswith('[\n {\n  "type": "function",\n') and '"gr\\u00f6\\u00dfe"' in text
    assert text.endswith("\n]\n<user>\n" + PHRASES[2] * 20)
    for ids, record in zip(prompts, (records[0], records[2], records[3]), strict=True):
        assert ids.dtype == torch.int64
        assert ids.tolist() == tokenizer(plain_text(record), add_special_tokens=False).input_ids[:90]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"model": "nowhere/at/all"}, "nowhere/at/all"),
        ({"calibration": "missing.jsonl"}, "missing.jsonl"),
        ({"test": 9}, "has 3 prompts of 90 tokens or more where 9 are asked for"),
        ({"tokens": 5000}, "--tokens 5000 is over the model's context length of 1024"),
    ],
)
def test_bad_requests(tiny_model: Path, corpus: Path, tmp_path: Path, change: dict[str, Any], said: str) -> None:
    settings = settings_for(tiny_model, corpus)
    with pytest.raises(UserError, match=said):
        rate.measure_rate(replace(settings, **change), tmp_path, lambda text: None)
    assert not (tmp_path / "store").exists()


def test_a_line_that_is_no_json(tiny_model: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken.jsonl"
    broken.write_text("{\n", encoding="utf-8")
    done = benchmark(*options(tiny_model, broken), cwd=tmp_path)
    assert done.returncode == 2 and not done.stdout
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert "broken.jsonl:1: not valid JSON" in line and "Traceback" not in done.stderr


@pytest.mark.parametrize("name", ["tokens", "train", "test", "chunk_tokens", "threads"])
def test_numbers_below_one(name: str) -> None:
    with pytest.raises(UserError, match=f"--{name.replace('_', '-')} 0 must be at least 1"):
        replace(rate.Settings("m", "a", "b"), **{name: 0}).check()


def test_windows_below_one(tiny_model: Path, corpus: Path) -> None:
    for settings in (rate.Settings("m", "a", "b", window=0), predictor.Settings("m", "a", window=0)):
        with pytest.raises(UserError, match="--window 0 must be at least 1"):
            settings.check()


@pytest.mark.parametrize("kind", ["int8-mixed", "int4"])
def test_calibrated_rungs_and_windows(tiny_model: Path, corpus: Path, tmp_path: Path, kind: str) -> None:
    """What the ladder needs of calibration gets to the predictor, and what is stored comes back."""
    settings = replace(settings_for(tiny_model, corpus), predictor=kind, loop="closed", window=16)
    result = rate.measure_rate(settings, tmp_path, lambda text: None)
    assert result["verified"] is True and result["settings"]["window"] == 16
    assert dict(rate.rows(result))["predictor"].startswith(f"{kind} (window 16), closed loop")
    (stored,) = (tmp_path / "store").glob("predictors/*.safetensors")
    made = codec.Predictor.from_bytes(stored.read_bytes())
    assert made.config.window == 16 and (made.layers[0].smooth is not None) == (kind == "int8-mixed")


def test_predictor_passes(tiny_model: Path, corpus: Path, tmp_path: Path) -> None:
    line = f"predictor --model {tiny_model} --corpus {corpus} --predictor int8 --predictor fp8 --tokens 80 --chunk-tokens 30"
    done = benchmark(*line.split(), "--repeats", "2", "--threads", "1", "--cache-dtype", "bf16", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert list(result["sides"]) == ["target", "int8", "fp8"] and result["sides"]["target"]["times_target"] == 1
    for side in result["sides"].values():
        assert side["tokens_per_s"] == pytest.approx(80 / side["seconds"]) and side["spread"] >= 1
    assert result["settings"]["tokens"] == 80 and result["machine"]["torch"] == torch.__version__


def test_figures_of_passes_are_medians() -> None:
    found = predictor.figures({"target": [1.0, 4.0, 2.0], "int8": [3.0, 3.0, 9.0]}, 100)
    assert found["target"] == {"seconds": 2.0, "tokens_per_s": 50.0, "times_target": 1.0, "spread": 4.0}
    assert found["int8"]["times_target"] == 1.5 and found["int8"]["spread"] == 3.0


def test_ablation_measures_the_codec_without_each_part(tiny_model: Path, corpus: Path) -> None:
    settings = replace(settings_for(tiny_model, corpus), predictor="int8", loop="closed")
    result = ablation.measure(settings, lambda text: None)
    variants = result["variants"]
    assert list(variants) == [v.name for v in ablation.VARIANTS] + ["open loop"]
    whole = variants[ablation.WHOLE]
    assert whole["costs"] == 0 and variants["no joint model of a layer"]["costs"] > 0
    for figures in variants.values():
        assert figures["costs"] == figures["bits_per_scalar"] - whole["bits_per_scalar"]
    assert variants["open loop"]["costs"] > 0
    assert len(ablation.rows(result)) == len(variants) + 2


def test_ablation_of_a_rung_without_a_model_leaves_out_what_it_has_not(tiny_model: Path, corpus: Path) -> None:
    settings = replace(settings_for(tiny_model, corpus), predictor="linear", loop="closed")
    variants = ablation.measure(settings, lambda text: None)["variants"]
    assert next(iter(variants)) == ablation.WHOLE and "no joint model of a layer" in variants
    assert not {"open loop", "no correction of the hidden state", "activations not smoothed"} & set(variants)


def test_what_a_benchmark_cannot_measure_is_a_usage_error(tiny_model: Path, corpus: Path, tmp_path: Path) -> None:
    common = f"--model {tiny_model} --tokens 80 --threads 1".split()
    both = ["--calibration", str(corpus), "--eval", str(corpus)]
    for line in (
        ["ablation", *common, *both, "--loop", "open"],
        ["predictor", *common, "--corpus", str(corpus), "--cache-dtype", "fp8_e4m3"],
    ):
        done = benchmark(*line, cwd=tmp_path)
        assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr
