"""jobs/benchmark.py restore on a tiny model, and its throttled link."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from codec.errors import UserError
from jobs.bench import restore
from jobs.bench.link import Link

TEXT = "The quick brown fox reads a file and writes another. "


@pytest.fixture(autouse=True)
def same_threads() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def arguments(model: Path, folder: Path, *more: str) -> argparse.Namespace:
    corpus = folder / "corpus.jsonl"
    corpus.write_text("".join(json.dumps({"id": str(n), "text": f"{n} {TEXT * (12 + n)}"}) + "\n" for n in range(3)))
    parser = argparse.ArgumentParser()
    restore.add_arguments(parser)
    given = ["--model", str(model), "--calibration", str(corpus), "--eval", str(corpus), "--predictor", "static", "--tokens", "80",
             "--train", "2", "--test", "2", "--chunk-tokens", "32", "--threads", "1", "--repeats", "2"]  # fmt: skip
    return parser.parse_args([*given, *more])


def test_figures_of_a_tiny_model(tiny_model: Path, tmp_path: Path) -> None:
    said: list[str] = []
    result = restore.run(arguments(tiny_model, tmp_path), said.append)
    assert result["verified"] is True and said
    assert result["raw_bytes"] == 80 * 3 * 2 * 2 * 16 * 2 and 0 < result["stored_bytes"] < result["raw_bytes"]
    assert 0 < result["first_layer_seconds"] < result["decode_seconds"] and result["prefill_seconds"] > 0
    assert set(result["links"]) == set(restore.LINKS)
    for link in result["links"].values():
        assert link["restore_seconds"] > 0 and link["fetch_seconds"] > 0 and link["raw_seconds"] > 0
    assert result["worth_below_bits_per_s"] > 0
    planned = result["planned"]
    for name in ("prefill", "decode"):
        assert planned[f"{name}_ratio"] == planned[f"{name}_seconds"] / result[f"{name}_seconds"] > 0
    assert "of what was measured" in dict(restore.rows(result))["jobs/plan.py says"]
    json.dumps(result)
    shown = dict(restore.rows(result))
    assert "all chunks" in shown["verified"] and "restored in" in shown["at 1 Gb/s"]
    assert "NO" in dict(restore.rows(result | {"verified": False}))["verified"]


def test_other_bits_than_the_targets_are_seen(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    encode = restore.rate.encode_prompts

    def lied(*given: object) -> object:
        found = encode(*given)  # type: ignore[arg-type]
        found.checksums[-1] = "00" * (len(found.checksums[-1]) // 2)
        return found

    monkeypatch.setattr(restore.rate, "encode_prompts", lied)
    assert restore.run(arguments(tiny_model, tmp_path, "--repeats", "1"), lambda text: None)["verified"] is False


def test_repeats_that_cannot_be(tiny_model: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--repeats"):
        restore.run(arguments(tiny_model, tmp_path, "--repeats", "0"), lambda text: None)


@pytest.mark.parametrize("more", [("--window", "32"), ("--cache-dtype", "fp8_e4m3")])
def test_what_plan_does_not_weigh_is_not_compared(tiny_model: Path, tmp_path: Path, more: tuple[str, str]) -> None:
    given = arguments(tiny_model, tmp_path, "--repeats", "1", "--predictor", "int8", *more)
    result = restore.run(given, lambda text: None)
    assert result["verified"] and result["planned"] is None and "jobs/plan.py says" not in dict(restore.rows(result))


@pytest.mark.parametrize(("size", "rate"), [(500_000, 2e7), (3_000_000, 1e8), (10, 1e6)])
def test_a_link_is_not_faster_than_it_should_be_however_many_ask(size: int, rate: float, tmp_path: Path) -> None:
    data = {"one": bytes(size), "two": b"\x01" * size}
    files = {name: tmp_path / name for name in data}
    for name, path in files.items():
        path.write_bytes(data[name])
    least = 0.9 * (2 * size - max(1500, rate / 8 * 0.002)) * 8 / rate
    with Link(files, rate, tmp_path) as link, ThreadPoolExecutor(2) as threads:
        begin = time.perf_counter()
        assert list(threads.map(link.get, data)) == list(data.values())
        assert time.perf_counter() - begin >= least
    with pytest.raises(OSError):
        link.get("one")
