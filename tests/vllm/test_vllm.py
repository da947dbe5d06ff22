"""The connector in a real vLLM: caches out of it, through our codec, and back into a fresh one; bits, log-probabilities, damage.

vLLM lives in an environment of its own (make test-vllm), so each engine is a process that gets a plan and writes answers.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import pipeline
from codec.formats import bits
from codec.keys import engine_target
from jobs import import_caches
from pipeline.engines.spool import Spool, read
from pipeline.model_source import load_tokenizer, resolve_model
from pipeline.model_weights import load_model
from pipeline.store import Store
from tests.conftest import REPO_ROOT
from tests.stored import Kept

pytestmark = pytest.mark.vllm

PYTHON = REPO_ROOT / ".venv-vllm" / "bin" / "python"
SPLIT, NEW, LAYERS = 512, 8, 6
TIMEOUT = 500
Answers = list[dict[str, Any]]


@pytest.fixture(scope="module")
def model(smollm2_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SmolLM2 as a folder, which vLLM reads."""
    if not PYTHON.is_file():
        pytest.skip("vLLM is not installed: make test-vllm")
    folder, source = tmp_path_factory.mktemp("vllm") / "smollm2", resolve_model(smollm2_gguf)
    load_model(source, torch.bfloat16).save_pretrained(folder)
    load_tokenizer(source).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def short_model(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its first layers: FP8 caches of all thirty take minutes to calibrate for, and their bytes go the same way."""
    from transformers import AutoModelForCausalLM

    folder, source = tmp_path_factory.mktemp("vllm") / "short", resolve_model(model)
    AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16, num_hidden_layers=LAYERS).save_pretrained(folder)
    load_tokenizer(source).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def prompts(model: Path) -> dict[str, list[int]]:
    """Text that is always the same, and a count that has one way to go on."""
    tokenizer = load_tokenizer(resolve_model(model))
    text: list[int] = tokenizer((REPO_ROOT / "LICENSE").read_text())["input_ids"]
    count: list[int] = tokenizer(", ".join(map(str, range(1, 180))))["input_ids"]
    return {"a": text[:600], "b": text[600:1150], "c": text[1150:1700], "count": count[:600]}


def engine(
    folder: Path, model: Path, runs: Answers, *, kv: str = "auto", store: Path | None = None, spool: Path | None = None
) -> Answers:
    """What a vLLM in a process of its own answers. It prefills `SPLIT` tokens at a time."""
    plan, out = folder / "plan.json", folder / "answers.json"
    said = {
        "model": str(model),
        "kv": kv,
        "batched": SPLIT,
        "store": store and str(store),
        "spool": spool and str(spool),
    }
    plan.write_text(json.dumps(said | {"runs": [{"tokens": NEW} | run for run in runs]}))
    out.unlink(missing_ok=True)
    command = [str(PYTHON), str(REPO_ROOT / "tests" / "vllm" / "engine.py"), str(plan), str(out)]
    # Loops that its version of numba compiled are kept beside it, for the next process.
    environment = os.environ | {"NUMBA_CACHE_DIR": str(PYTHON.parent.parent / "loops")}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=TIMEOUT)
    assert done.returncode == 0, done.stderr[-4000:]
    answers: Answers = json.loads(out.read_text())
    return answers


@dataclass
class Saved:
    """What a vLLM answered and saved, and the store that this went into; `kept`: the main job's caches in it."""

    kv: str
    store: Path
    spool: Path
    target: bytes
    answers: Answers
    kept: Kept

    def digest(self, ids: list[int], tokens: int) -> str:
        """SHA-256 of the saved bits of a prompt's first tokens, as tests.vllm.traced_loader computes it of pages."""
        (cache,) = [cache for cache in map(read, Spool(self.spool).files()) if cache.ids.tolist() == ids]
        found = hashlib.sha256()
        for pair in cache.layers:
            for values in pair:
                found.update(bits(values[:, :tokens].contiguous()).numpy().tobytes())
        return found.hexdigest()

    def blob(self, ids: list[int], number: int) -> Path:
        """The file of one chunk that vLLM computed."""
        chunk = pipeline.restore(str(self.store), self.target.hex(), ids).prefix.chunks[number]
        (path,) = self.store.glob(f"blobs/{self.target.hex()}/*/*/{chunk.key.hex()}.kv")
        return path


def saved(folder: Path, model: Path, prompts: dict[str, list[int]], kv: str, fmt: str, kind: str) -> Saved:
    """Save caches from vLLM, store them through our codec, and put a cache of the main job beside them."""
    store, spool = folder / "store", folder / "spool"
    spool.mkdir()
    Store.open(str(store))
    mine = [prompts[name] for name in "abc"]
    answers = engine(folder, model, [{"ids": ids} for ids in mine], kv=kv, store=store, spool=spool)
    assert not any(answer["trace"] for answer in answers)
    given = ["--model", str(model), "--spool", str(spool), "--store", str(store), "--predictor", kind]
    assert import_caches.main(given) == 0
    kept = Kept(model, store, kind="static", cache=fmt, mode="none", chunk=256, calibration=mine[:2])
    kept.put({"count": prompts["count"]})
    target = engine_target(resolve_model(model).fingerprint(fmt), "vllm")
    return Saved(kv, store, spool, target, answers, kept)


def restored(folder: Path, model: Path, prompts: dict[str, list[int]], found: Saved) -> Answers:
    """A fresh process: twice as it is, then with a flipped bit, a corrupt blob, and a prompt that only the main job stored."""
    ids = prompts["a"]
    runs = [
        {"ids": prompts["b"]}, {"ids": ids}, {"ids": ids, "flip": True}, {"ids": ids, "corrupt": str(found.blob(ids, 1))},
        {"ids": ids}, {"ids": prompts["count"]},
    ]  # fmt: skip
    return engine(folder, model, runs, kv=found.kv, store=found.store)


def check(prompts: dict[str, list[int]], found: Saved, answers: Answers) -> None:
    """What a fresh engine must have done with what another one saved."""
    second, first, flipped, corrupt, after, count = answers
    for answer, want, ids in ((first, found.answers[0], prompts["a"]), (second, found.answers[1], prompts["b"])):
        pages = found.digest(ids, SPLIT)
        assert answer["trace"] == [{"first": 0, "end": SPLIT, "right": SPLIT, "pages": pages}]
        assert (answer["hash"], answer["tokens"]) == (want["hash"], want["tokens"])
    assert flipped["trace"][0]["pages"] != first["trace"][0]["pages"]
    assert flipped["hash"] != first["hash"]
    # The damaged chunk and what follows it is computed again; the next request does not even ask for it.
    (trace,) = corrupt["trace"]
    assert (trace["end"], trace["right"], trace["pages"]) == (SPLIT, 256, found.digest(prompts["a"], 256))
    assert [step["end"] for step in after["trace"]] == [256]
    assert corrupt["tokens"] == after["tokens"] == first["tokens"]
    own = pipeline.restore(found.kept.store, found.kept.job.target.hex(), prompts["count"])
    (trace,) = count["trace"]
    assert (own.tokens, trace["right"]) == (len(prompts["count"]), SPLIT)


@torch.no_grad()
def generated(model: Path, found: pipeline.Restoration, ids: list[int]) -> list[int]:
    """What transformers goes on with from a restored cache."""
    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
    given = torch.tensor([ids])
    cache = found.as_dynamic_cache(loaded)
    out = loaded.generate(given, cache=cache, max_new_tokens=NEW, min_new_tokens=NEW, do_sample=False)
    return list(out[0, len(ids) :].tolist())


def test_bf16_caches_of_vllm_and_of_the_main_job_go_on_where_they_were(
    model: Path, prompts: dict[str, list[int]], tmp_path: Path
) -> None:
    alone = engine(tmp_path, model, [{"ids": prompts["a"]}, {"ids": prompts["count"]}])
    found = saved(tmp_path, model, prompts, "auto", "bf16", "int8")
    assert alone[0] | {"trace": []} == found.answers[0]  # to save changes nothing
    answers = restored(tmp_path, model, prompts, found)
    check(prompts, found, answers)
    # Only the whole model is sure enough of its tokens to choose the same ones in two engines.
    own = pipeline.restore(found.kept.store, found.kept.job.target.hex(), prompts["count"])
    assert answers[-1]["tokens"] == generated(model, own, prompts["count"])
    assert answers[1]["hash"] == alone[0]["hash"]
    assert answers[-1]["tokens"] == alone[1]["tokens"]


def test_fp8_caches_go_in_as_the_bytes_they_are(
    short_model: Path, prompts: dict[str, list[int]], tmp_path: Path
) -> None:
    if not (torch.cpu._is_avx512_supported() or torch.cpu._is_amx_tile_supported()):
        pytest.skip("vLLM has FP8 caches on processors with AVX-512 or AMX only")
    found = saved(tmp_path, short_model, prompts, "fp8", "fp8_e4m3", "linear")
    check(prompts, found, restored(tmp_path, short_model, prompts, found))
