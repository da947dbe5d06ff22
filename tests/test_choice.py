"""Rungs without a model through the whole pipeline: any architecture is compressed, verified, and a chunk decodes alone."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from rich.console import Console

import codec
from codec.errors import UnsupportedArchitecture, UserError
from codec.predictor import ModelFree
from jobs.bench.rate import Settings
from pipeline import index, ray_runtime
from pipeline.calibration import closed_sample, find_profile
from pipeline.choice import choose
from pipeline.encode import ChainEncoder
from pipeline.estimate import kv_bytes_a_token
from pipeline.model_source import load_config, resolve_model
from pipeline.options import Options
from pipeline.paths import blob_path, predictor_path
from pipeline.prepare import prepare
from pipeline.run import Consoles, run
from pipeline.rung import Rung
from pipeline.store import Store
from pipeline.target import load_target
from pipeline.truth import Prefilled
from pipeline.verify import ChainVerifier
from pipeline.work import ADOPTED, KEPT, Job, load_predictor, load_profile
from tests.conftest import write_tokenizer

CHUNK = 32


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a tiny random GPT-2 in bf16: no rotary embedding, other names in its config, fused projections."""
    folder = tmp_path_factory.mktemp("tiny-gpt2")
    config = transformers.GPT2Config(
        vocab_size=384, n_embd=48, n_head=3, n_layer=3, n_positions=256, initializer_range=0.2, bos_token_id=1, eos_token_id=2
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        transformers.GPT2LMHeadModel(config).to(torch.bfloat16).save_pretrained(str(folder))
    write_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def cluster() -> Iterator[ray_runtime.Cluster]:
    """One Ray for all tests here."""
    with ray_runtime.connected(2) as running:
        yield running


def options(model: Path, folder: Path, **more: Any) -> Options:
    corpus = folder / "corpus.jsonl"
    texts = ["The quick brown fox jumps over the lazy dog. " * 5, "An agent reads source code and calls tools. " * 5]
    records = [{"id": str(n), "text": text} for n, text in enumerate(texts)]
    corpus.write_text("".join(json.dumps(r) + "\n" for r in records))
    return Options(model=str(model), corpus=str(corpus), store=str(folder / "store"), chunk_tokens=CHUNK, **more)


def compress(given: Options, folder: Path) -> tuple[int, dict[str, Any], str]:
    """(exit status, report, everything that was printed)."""
    text = io.StringIO()
    console = Console(file=text, width=300)
    status = run(replace(given, report=str(folder / "report.json")), Consoles(console, console))
    return status, json.loads((folder / "report.json").read_text()), text.getvalue()


@pytest.mark.slow
@pytest.mark.parametrize("asked", [None, "static", "linear"])
def test_an_architecture_without_a_predictor_is_compressed(
    asked: str | None, gpt2: Path, tmp_path: Path, cluster: ray_runtime.Cluster
) -> None:
    given = options(gpt2, tmp_path, predictor=asked)
    status, report, text = compress(given, tmp_path)
    assert status == 0 and report["chunks_verified"] == report["chunks_new"] > 4 and report["chunks_failed"] == 0
    assert ("using --predictor linear, which needs no model" in text) == (asked is None)
    assert "model type 'gpt2': K is coded as it is" in text and f"{asked or 'linear'} closed loop" in text
    assert report["raw_bytes"] == report["tokens"] * kv_bytes_a_token(load_config(resolve_model(gpt2)), "bf16")
    assert "nothing to compute" in compress(given, tmp_path)[2]


@pytest.mark.slow
def test_a_stored_chunk_decodes_alone(tiny_model: Path, tmp_path: Path, cluster: ray_runtime.Cluster) -> None:
    """From the store alone, without the chunks before it and without the model."""
    given = options(tiny_model, tmp_path, predictor="linear")
    status, _, text = compress(given, tmp_path)
    assert status == 0 and "K is coded as it is" not in text and "needs no model" not in text
    job = find_profile(prepare(given).job)
    assert job is not None
    rows = index.read_rows(job.store, target=job.target, profile=job.profile).to_pylist()
    row = max(rows, key=lambda r: (r["chunk_index"], r["key"]))
    assert row["chunk_index"] > 1
    predictor = load_predictor(job.store, job.predictor, "cpu")
    profile = load_profile(job.store, job.profile, target=job.target, cache_format="bf16")
    assert isinstance(predictor, ModelFree) and predictor.config.rope_dim == 16
    ids = torch.zeros(row["tokens"], dtype=torch.int64)  # they are only counted
    where = codec.ChunkIdentity(job.target, row["key"], row["parent_digest"], row["first_token"])
    blob = job.store.get(blob_path(job.target, job.profile, row["key"]))
    decoded = codec.decode(predictor, profile, predictor.state_at(row["first_token"]), ids, blob, where)
    assert decoded.layer_checksums == row["layer_checksums"] and decoded.chain_digest == row["chain_digest"]


@pytest.mark.parametrize("kind", ["static", "linear"])
@pytest.mark.parametrize("name", ["gpt2", "tiny_model"])
def test_chains_are_encoded_and_verified_without_ray(
    kind: str, name: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    source = resolve_model(request.getfixturevalue(name))
    target, store = load_target(source), Store.open(str(tmp_path / "store"))
    predictor = Rung(kind, "closed").build(target, None, [])
    prompts = [np.random.default_rng(seed).integers(0, 384, 100, dtype=np.int64) for seed in range(5)]
    inputs = [closed_sample(target, torch.from_numpy(ids), CHUNK, states=False) for ids in prompts[1:]]
    profile = codec.calibrate_closed(predictor, source.fingerprint("bf16"), "bf16", inputs, prefill_tokens=CHUNK)
    names = (kind, "closed", "")
    job = Job(store, source, profile.target, "bf16", CHUNK, *names, predictor.fingerprint, profile.id)
    store.put_new(predictor_path(predictor.fingerprint), predictor.to_bytes())
    root = codec.root_key(target=job.target, cache_format="bf16", chunk_tokens=CHUNK)
    keys = codec.chunk_keys(root, prompts[0], CHUNK)
    stored = ChainEncoder(job, Prefilled(target), predictor, profile).prompt(prompts[0], keys, frozenset(keys), {})
    assert [chunk.tokens for chunk in stored] == [32, 32, 32, 4]
    loaded = load_predictor(store, predictor.fingerprint, "cpu")
    rows = {chunk.key: chunk.layer_checksums for chunk in stored}
    findings = ChainVerifier(job, loaded, profile).prompt(prompts[0], keys, frozenset(keys), rows)
    assert findings.verified == keys and not findings.failed
    again = ChainEncoder(job, Prefilled(target), loaded, profile).prompt(prompts[0], keys, frozenset(keys[-1:]), {})
    assert [chunk.outcome for chunk in again] == [KEPT, KEPT, KEPT, ADOPTED]


# ---------------------------------------------------------------- choosing
def test_a_named_predictor_that_cannot_be_is_refused(gpt2: Path, tmp_path: Path) -> None:
    given = options(gpt2, tmp_path)
    for changes in ({"predictor": "int8"}, {"loop": "open"}, {"predictor": "fp8", "loop": "open"}):
        with pytest.raises(UnsupportedArchitecture, match=r"'gpt2'.*llama.*--predictor linear --loop closed") as error:
            prepare(replace(given, **changes))
        assert "\n" not in str(error.value)
    assert not (tmp_path / "store").exists()
    assert prepare(given).job.predictor_kind == "linear"
    assert prepare(replace(given, predictor="static")).job.predictor_kind == "static"


@pytest.mark.parametrize("kind", ["static", "linear"])
def test_the_open_loop_is_a_usage_error(kind: str, tiny_model: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"--predictor {kind} .*needs --loop closed"):
        options(tiny_model, tmp_path, predictor=kind, loop="open").check()
    with pytest.raises(UserError, match=f"--predictor {kind} .*needs --loop closed"):
        Settings("m", "c", "e", predictor=kind, loop="open").check()


def test_supported_architectures_keep_the_default(tiny_model: Path, tmp_path: Path) -> None:
    prepared = prepare(options(tiny_model, tmp_path))
    assert prepared.job.predictor_kind == "int8-a16" and prepared.notes == ()


def test_unknown_rotations_and_activations_fall_back_too(tiny_model: Path) -> None:
    config = load_config(resolve_model(tiny_model))
    spiral = config | {"rope_parameters": {"rope_type": "spiral", "rope_theta": 10000.0}}
    for changed, known in ((config | {"hidden_act": "gelu"}, True), (spiral, False)):
        choice = choose(None, "closed", None, changed)
        assert choice.kind == "linear" and ("coded as it is" in choice.notes[-1]) != known
        with pytest.raises(UnsupportedArchitecture):
            choose("int8", "closed", None, changed)
    assert choose("static", "closed", None, config).notes == ()


def test_configs_are_read_under_standard_names(gpt2: Path, make_tiny_model: Callable[..., Path]) -> None:
    config = load_config(resolve_model(gpt2))
    assert (config["num_hidden_layers"], config["num_attention_heads"], config["hidden_size"]) == (3, 3, 48)
    assert config["max_position_embeddings"] == 256 and config["n_layer"] == 3
    assert kv_bytes_a_token(config, "bf16") == 3 * 2 * 48 * 2
    assert kv_bytes_a_token(load_config(resolve_model(make_tiny_model())), "bf16") == 3 * 2 * 2 * 16 * 2
    with pytest.raises(UserError, match="num_attention_heads"):
        kv_bytes_a_token({"hidden_size": 8}, "bf16")


def test_targets_of_other_architectures_run(gpt2: Path) -> None:
    target = load_target(resolve_model(gpt2))
    cache = target.new_cache()
    layers = target.prefill(cache, torch.arange(10))
    assert [tuple(t.shape) for pair in layers for t in pair] == [(3, 10, 16)] * 6
    target.truncate(cache, 4)
    target.replace(cache, 4, [(k[:, 4:], v[:, 4:]) for k, v in layers])
    assert target.length(cache) == 10
