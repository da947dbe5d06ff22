"""jobs/benchmark.py coder, peers and scaling on a tiny model: what they compare, what they refuse, and that they can fail."""

from __future__ import annotations

import argparse
import json
import mmap
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from codec.errors import CorruptBlob, DataError, UserError
from codec.formats import BF16, FP8_E4M3, FP16, FP32
from jobs.bench import actor_scaling, child, coder, general, machine, peers, scaling, synthetic, torch_coder
from jobs.bench.turns import take_turns
from tests import codec_samples as samples

TEXT = "The quick brown fox reads a file and writes another. "


@pytest.fixture(autouse=True)
def same_threads() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def arguments(benchmark: Any, model: Path, folder: Path, *more: str) -> argparse.Namespace:
    corpus = folder / "corpus.jsonl"
    corpus.write_text("".join(json.dumps({"id": str(n), "text": f"{n} {TEXT * (12 + n)}"}) + "\n" for n in range(3)))
    parser = argparse.ArgumentParser()
    benchmark.add_arguments(parser)
    common = [
        "--model",
        model,
        "--calibration",
        corpus,
        "--eval",
        corpus,
        "--predictor",
        "static",
        "--chunk-tokens",
        "32",
    ]
    return parser.parse_args([str(x) for x in (*common, *more)])


@pytest.mark.parametrize("cache", ["bf16", "fp8_e4m3"])
def test_coder_on_a_tiny_model(tiny_model: Path, tmp_path: Path, cache: str) -> None:
    given = arguments(
        coder, tiny_model, tmp_path, "--tokens", "60", "--train", "2", "--repeats", "2", "--d-kv", "64", "128", "--cache-dtype", cache
    )  # fmt: skip
    result = coder.run(given, lambda text: None)
    assert result["verified"] is True and result["scalars"] == 60 * 3 * 2 * 2 * 16
    for way in ("encode", "decode"):
        for suffix in ("", "_joint", "_constriction", "_gaussian"):
            assert result[f"{way}_scalars_per_s{suffix}"] > 0
    assert result["bits_per_scalar"] == pytest.approx(8 * result["bytes"] / result["scalars"])
    assert result["bytes"] == pytest.approx(result["bytes_constriction"], rel=0.2)
    assert list(result["d_kv"]) == ["64", "128"] and result["settings"]["threads"] == 1
    costs = [cost["ns_per_scalar"] for cost in result["d_kv"].values()]
    assert result["d_kv_ratio"] == costs[1] / costs[0] and min(result["spread"].values()) >= 1
    shown = dict(coder.rows(result))
    assert "M scalars/s" in shown["rANS, joint model"] and shown["verified"] == "every side"


def test_coder_tells_when_bits_differ(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = coder.read_joint

    def lying(*given: Any) -> Any:
        caches = read(*given)
        caches[0][0][0].view(torch.int16)[0, 0, 0] ^= 1
        return caches

    monkeypatch.setattr(coder, "read_joint", lying)
    given = arguments(coder, tiny_model, tmp_path, "--tokens", "40", "--train", "1", "--repeats", "1", "--d-kv")
    result = coder.run(given, lambda text: None)
    assert result["verified"] is False and result["d_kv_ratio"] is None
    assert dict(coder.rows(result))["verified"].startswith("NO")


@pytest.mark.parametrize("wrong", ["", "bytes", "a stream", "a pattern", "the end"])
def test_coder_compares_the_torch_path(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrong: str
) -> None:
    encode, decode = torch_coder.encode, torch_coder.decode

    def lying(*given: Any) -> Any:
        if wrong == "the end":
            raise CorruptBlob("Bitstream 1 of 1 holds more than its tensors need; the blob is corrupt.")
        patterns = decode(*given)
        patterns[0, -1, -1] ^= 1
        return patterns

    if wrong == "bytes":
        monkeypatch.setattr(torch_coder, "encode", lambda *given: [x[:-4] for x in encode(*given)])
    elif wrong == "a stream":
        monkeypatch.setattr(torch_coder, "encode", lambda *given: encode(*given)[:-1])
    elif wrong:
        monkeypatch.setattr(torch_coder, "decode", lying)
    more = ("--tokens", "24", "--train", "1", "--repeats", "1", "--d-kv", "--chunk-tokens", "16", "--torch", "cpu")
    result = coder.run(arguments(coder, tiny_model, tmp_path, *more), lambda text: None)
    assert result["verified"] is (not wrong)
    assert result["encode_scalars_per_s_torch"] > 0 and result["decode_scalars_per_s_torch"] > 0
    assert dict(coder.rows(result))["rANS, torch"].endswith("on cpu")


def test_coder_refuses_what_it_cannot_measure(tiny_model: Path, tmp_path: Path) -> None:
    for more, said in ((["--d-kv", "100"], "--d-kv 100 must be a multiple of 64"), (["--repeats", "0"], "--repeats 0"),
                       (["--torch", "cuda:63"], "--torch cuda:63: torch cannot compute there")):  # fmt: skip
        with pytest.raises(UserError, match=said):
            coder.run(arguments(coder, tiny_model, tmp_path, *more), lambda text: None)


def test_made_up_joint_models_are_like_real_ones() -> None:
    """About three bits a scalar."""
    made = synthetic._Made(128, 64, synthetic.np.random.default_rng(0))
    (stream,) = made.encode()
    assert 2.5 < 8 * len(stream) / made.scalars < 4


def test_sides_take_turns() -> None:
    seen: list[str] = []
    seconds = take_turns({"a": lambda: seen.append("a"), "b": lambda: seen.append("b")}, 2, lambda text: None)
    assert seen == ["a", "b"] * 3 and {name: len(times) for name, times in seconds.items()} == {"a": 2, "b": 2}


# ---------------------------------------------------------------- peers
def test_peers_on_a_tiny_model(tiny_model: Path, tmp_path: Path) -> None:
    given = arguments(peers, tiny_model, tmp_path, "--tokens", "60", "--train", "2", "--test", "1", "--repeats", "1")
    result = peers.run(given, lambda text: None)
    assert result["verified"] is True and result["raw_bytes"] == 60 * 3 * 2 * 2 * 16 * 2
    assert list(result["sides"])[-3:] == ["published open-loop method", "ours, constriction", "ours"]
    for side in result["sides"].values():
        assert side["ratio"] == pytest.approx(result["raw_bytes"] / side["bytes"]) and side["verified"] is True
        assert side["encode_gb_per_s"] > 0 and side["decode_gb_per_s"] > 0
    assert len(peers.rows(result)) == 3 + len(result["sides"]) + len(result["skipped"])


@pytest.mark.parametrize("fmt", [BF16, FP16, FP32, FP8_E4M3], ids=lambda f: f.name)
def test_general_compressors_give_back_what_they_got(fmt: Any) -> None:
    found, skipped = general.general_peers(fmt)
    generator = torch.Generator().manual_seed(0)
    raw = fmt.little_endian(samples.cast(torch.randn(3000, generator=generator), fmt))
    if not found:
        pytest.skip(f"no peer is installed ({', '.join(skipped)}); pip install '.[bench]'")
    for peer in found:
        packed = peer.encode(raw)
        assert peer.decode(packed) == raw, peer.name
        assert peer.decode(peer.encode(b"\0" * 64)) == b"\0" * 64, peer.name
    if fmt.item_bytes == 1:
        assert all(
            "does not take fp8_e4m3" in skipped[name] or "not installed" in skipped[name]
            for name in ("pcodec", "zipnn")
        )


def test_a_peer_that_is_not_installed_is_skipped_aloud(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> Any:
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr(general.importlib, "import_module", absent)
    found, skipped = general.general_peers(BF16)
    assert not found and set(skipped) == {"zstandard", "blosc2", "pcodec", "zipnn"}
    assert "not installed (No module named 'zipnn')" in skipped["zipnn"]


def test_a_peer_that_loses_bits_is_told() -> None:
    cache = peers.Cache([], [], [b"abc", b"defg"])
    honest = peers._General(general.Peer("honest", lambda raw: raw[::-1], lambda data: data[::-1]), [cache])
    lossy = peers._General(general.Peer("lossy", lambda raw: raw[:-1], lambda data: data), [cache])
    said: list[str] = []
    result = peers.compare({"honest": honest, "lossy": lossy}, 7, 1, said.append)
    assert result["verified"] is False and result["sides"]["honest"]["ratio"] == 1
    assert not result["sides"]["lossy"]["verified"] and "lossy does not give back what it was given" in said


# ---------------------------------------------------------------- scaling
@pytest.mark.slow
def test_scaling_on_a_tiny_model(tiny_model: Path, tmp_path: Path) -> None:
    given = arguments(
        scaling, tiny_model, tmp_path, "--lengths", "40", "90", "--windows", "0", "--train", "2", "--train-tokens", "60",
        "--repeats", "1", "--threads", "1", "--index-rows", "6000",
    )  # fmt: skip
    result = scaling.run(given, lambda text: None)
    assert result["verified"] is True and list(result["lengths"]["0"]) == ["40", "90"]
    for tokens, figures in result["lengths"]["0"].items():
        assert figures["raw_bytes"] == int(tokens) * 3 * 2 * 2 * 16 * 2
        assert min(figures[f"{x}_tokens_per_s"] for x in ("encode", "decode", "restore", "target")) > 0
        shares = {"decode": 32 / int(tokens), "restore": 1.0}  # a chunk, the prompt
        for name, share in shares.items():  # the ratio is that of the cache with the weights on both sides
            raw, weights = figures["raw_bytes"], figures["weights_bytes"]
            assert weights > 0
            whole = (figures[f"{name}_memory"] * raw + weights) / (share * raw + weights)
            assert figures[f"{name}_batch_memory"] == pytest.approx(whole)
    speeds = [result["lengths"]["0"][n]["decode_tokens_per_s"] for n in ("40", "90")]
    assert result["window_keeps"]["0"] == pytest.approx(speeds[1] / speeds[1])
    index = result["index"]
    assert index["rows"] == 6000 and index["parts"] == 2 and index["found"] == 1000 and index["asked"] == 2000
    assert not result["actors"] and len(scaling.rows(result)) == 6


def test_actors_are_measured_by_the_clock_on_cores_of_their_own(tmp_path: Path) -> None:
    for k, at in enumerate((90, 100, 101, 104, 108, 110)):  # the first is of another run
        blob = tmp_path / "blobs" / "t" / f"{k}.kv"
        blob.parent.mkdir(parents=True, exist_ok=True)
        blob.write_bytes(b"")
        os.utime(blob, (at, at))
    prompts = [
        {"chunks": 2, "chunks_new": 1, "tokens": 200, "raw_bytes": 1000},
        {"chunks": 4, "chunks_new": 4, "tokens": 400, "raw_bytes": 4000},
    ]
    told = {"per_prompt": prompts, "raw_bytes": 5000}  # 500 tokens, of which two actors wrote 3 chunks of 5 in 10 s
    assert actor_scaling._by_the_clock(told, tmp_path, 95, 2) == 30
    with pytest.raises(DataError, match="give more --prompts"):
        actor_scaling._by_the_clock(told, tmp_path, 95, 5)
    assert actor_scaling.gain({"1": {"all": 10.0}, "10": {"all": 80.0}, "2": {"all": 20.0}}) == 8
    assert actor_scaling.gain({"2": {"all": 20.0}}) is None
    before = os.sched_getaffinity(0)
    with actor_scaling._cores(1):
        assert os.sched_getaffinity(0) == {min(before)}
    assert os.sched_getaffinity(0) == before


def test_scaling_refuses_what_it_cannot_measure(tiny_model: Path, tmp_path: Path) -> None:
    for more, said in (
        (["--lengths", "5000"], "--lengths 5000 is over the model's context length of 1024"), (["--lengths", "0"], "--lengths must be"),
        (["--windows", "-1"], "--window -1"), (["--repeats", "0"], "--repeats 0"),
    ):  # fmt: skip
        with pytest.raises(UserError, match=said):
            scaling.run(arguments(scaling, tiny_model, tmp_path, "--windows", "0", *more), lambda text: None)


@pytest.mark.slow
def test_a_child_that_fails_says_why(tmp_path: Path) -> None:
    asked = {"do": "decode", "store": str(tmp_path / "none"), "threads": 1}
    with pytest.raises(DataError, match=r"decoding in a process of its own failed: .*none"):
        child.ask(scaling.CHILD, asked, tmp_path, "decoding")


def test_memory_of_this_process() -> None:
    before = machine.rss_bytes()
    if not machine.reset_peak():
        pytest.skip("this system does not let a process reset its peak")
    with mmap.mmap(-1, 40_000_000) as held:  # pages of its own: an array may come to lie where another was
        held.write(bytes([1]) * len(held))
        assert machine.peak_rss_bytes() >= before + len(held) * 0.9
    assert replace(scaling.Settings("m", "a", "b"), threads=1).rate(256).window == 256
