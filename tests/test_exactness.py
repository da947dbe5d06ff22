"""One set of bits, whatever computes it: real processes with other threads, kernels, chunks and batches.

Run as a program, this file is one such process: it digests guesses and blobs, writes its blobs, and decodes those of another.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import safetensors.torch
import torch

import codec
from codec import exact
from codec.chunk import guess_digest
from tests import codec_samples as samples
from tests.float_model import World

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parent.parent
LENGTHS = (300, 121, 1)  # of the prompts of a batch; the first alone is more than one block of queries
FORCED = "TEST_INT8_KERNEL"  # which of the two exact ways to multiply int8, instead of the faster one


class Row(NamedTuple):
    """A predictor, a loop, a cache format, and the chunk sizes that are tried."""

    kind: str
    loop: str
    chunks: tuple[int, ...]
    format: str = "bf16"
    mode: str = "tensor"  # of an FP8 cache's scales
    window: int = 0

    @property
    def cache(self) -> str:
        """Which of the truths it codes."""
        return f"{self.format}-{self.mode}"


PAIRS = {
    "fp8-open": Row("fp8", "open", (37, 64, 256, 300)),
    "fp8-closed": Row("fp8", "closed", (37, 300)),
    "int8-open": Row("int8", "open", (64, 300)),
    "int8-closed": Row("int8", "closed", (100, 300)),
    "int8-a16-closed": Row("int8-a16", "closed", (150,)),
    "int8-mixed-closed": Row("int8-mixed", "closed", (150,), "fp16"),
    "int4-closed": Row("int4", "closed", (300,)),
    "mxfp4-closed": Row("mxfp4", "closed", (300,)),
    "static-closed": Row("static", "closed", (150,)),
    "linear-closed": Row("linear", "closed", (150,)),
    "int8-window-closed": Row("int8", "closed", (37, 300), window=40),
    "fp8-open-e4m3": Row("fp8", "open", (300,), "fp8_e4m3"),
    "int8-closed-e4m3": Row("int8", "closed", (100, 300), "fp8_e4m3", "head"),
    "int8-a16-closed-e5m2": Row("int8-a16", "closed", (300,), "fp8_e5m2", "none"),
    "linear-closed-e4m3": Row("linear", "closed", (300,), "fp8_e4m3"),
    "int8-closed-fp32": Row("int8", "closed", (300,), "fp32"),
}
CHUNKS = {name: row.chunks for name, row in PAIRS.items()}
ROWS = [(pair, chunk) for pair, chunks in CHUNKS.items() for chunk in chunks]
SETTINGS: dict[str, dict[str, str]] = {
    "one thread": {"OMP_NUM_THREADS": "1"},
    # passive: threads that spin while they wait would take a core from one another on a busy machine
    "two threads": {
        "OMP_NUM_THREADS": "2",
        "MKL_DYNAMIC": "FALSE",
        "OMP_WAIT_POLICY": "PASSIVE",
        "GOMP_SPINCOUNT": "0",
    },
    "scalar kernels": {"OMP_NUM_THREADS": "1", "ATEN_CPU_CAPABILITY": "default"},
    "avx2 kernels": {"OMP_NUM_THREADS": "1", "ATEN_CPU_CAPABILITY": "avx2"},
    "sse4.2 products": {"OMP_NUM_THREADS": "1", "MKL_ENABLE_INSTRUCTIONS": "SSE4_2", "NUMBA_CPU_NAME": "generic"},
    # int8 kernels that saturate on some processors: the proof refuses them
    "no int8 kernel": {"OMP_NUM_THREADS": "1", "ONEDNN_MAX_CPU_ISA": "AVX2"},
    "int8 kernel": {"OMP_NUM_THREADS": "1", FORCED: "1"},
    "float32 for int8": {"OMP_NUM_THREADS": "1", FORCED: ""},
}


# ---------------------------------------------------------------- the process
def prompts() -> list[torch.Tensor]:
    return [samples.tokens(n, vocab=samples.SMALL["vocab_size"], seed=i) for i, n in enumerate(LENGTHS)]


def layers_of(tensors: dict[str, torch.Tensor], cache: str, prompt: int) -> samples.Layers:
    layers = range(samples.SMALL["num_hidden_layers"])
    return [(tensors[f"{cache}.{prompt}.{n}.k"], tensors[f"{cache}.{prompt}.{n}.v"]) for n in layers]


def batch_blobs(predictor: codec.Predictor, profile: codec.Profile, truths: list[samples.Layers]) -> list[list[bytes]]:
    """The blobs of all prompts, each whole: [together, one by one]."""

    def task(i: int) -> codec.EncodeTask:
        ids = prompts()[i]
        identity = codec.ChunkIdentity(samples.TARGET, samples.keys(ids, 512)[0], codec.ROOT_DIGEST, 0)
        return codec.EncodeTask(predictor.new_state(), ids, truths[i], identity)

    together = codec.encode_batch(predictor, profile, [task(i) for i in range(len(LENGTHS))])
    alone = [codec.encode_batch(predictor, profile, [task(i)])[0] for i in range(len(LENGTHS))]
    return [[c.blob for c in chunks] for chunks in (together, alone)]


def compute(folder: Path, name: str, other: str | None = None) -> dict[str, Any]:
    """Digests under this process's settings; blobs go to `folder`/name, those in `folder`/other are decoded."""
    tensors = safetensors.torch.load((folder / "truth").read_bytes())
    if FORCED in os.environ:
        forced = bool(os.environ[FORCED])
        exact._int8_kernel_is_faster = lambda device: forced  # type: ignore[assignment]
    out: dict[str, Any] = {
        "threads": torch.get_num_threads(), "kernels": torch.backends.cpu.get_cpu_capability(),
        "int8 kernel": exact.int8_kernel_serves(torch.device("cpu")), "guesses": {}, "blobs": {}, "decoded": {},
    }  # fmt: skip
    for pair, chunks in CHUNKS.items():
        predictor = codec.Predictor.from_bytes((folder / f"{pair}.predictor").read_bytes())
        profile = codec.Profile.from_bytes((folder / f"{pair}.profile").read_bytes())
        codec.check_known_answer(predictor, profile)
        ids, truths = prompts()[0], [layers_of(tensors, PAIRS[pair].cache, i) for i in range(len(LENGTHS))]
        out["guesses"] |= {f"{pair}.{n}": guess_digest(predictor, ids, n).hex() for n in chunks}
        blobs = {
            f"{pair}.{n}": [c.blob for c in samples.encode_prompt(predictor, profile, ids, truths[0], n)]
            for n in chunks
        }
        blobs[f"{pair}.batch"], blobs[f"{pair}.alone"] = batch_blobs(predictor, profile, truths)
        out["blobs"] |= {n: codec.content_id(b"".join(part)).hex() for n, part in blobs.items()}
        for n, part in blobs.items():
            for i, blob in enumerate(part):
                (folder / f"{name}.{n}.{i}").write_bytes(blob)
        if other is not None:
            for n in chunks:
                back = samples.decode_prompt(predictor, profile, ids, read(folder, f"{other}.{pair}", n), n)
                out["decoded"][f"{pair}.{n}"] = samples.same_bits(samples.joined(back), truths[0])
    return out


def read(folder: Path, name: str, chunk_tokens: int) -> list[bytes]:
    """The blobs that another process wrote for one chunk size."""
    return [(folder / f"{name}.{chunk_tokens}.{i}").read_bytes() for i in range(-(-LENGTHS[0] // chunk_tokens))]


# ---------------------------------------------------------------- the tests
@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What each setting's process computed. Each also decodes the blobs of the one before it, the first those of this process."""
    folder = tmp_path_factory.mktemp("exactness")
    tensors: dict[str, torch.Tensor] = {}
    for pair, row in PAIRS.items():
        w = World(samples.SMALL, row.kind, prompts=4, exact_kv=row.loop == "closed", window=row.window)
        (folder / f"{pair}.predictor").write_bytes(w.predictor.to_bytes())
        (folder / f"{pair}.profile").write_bytes(w.profile(row.loop, row.format, row.mode).to_bytes())
        for i, ids in enumerate(prompts()):  # the model's own cache: the same for every predictor
            for n, kv in enumerate(w.truth(ids, row.format, row.mode)):
                tensors |= {f"{row.cache}.{i}.{n}.{x}": t.contiguous() for x, t in zip("kv", kv, strict=True)}
    (folder / "truth").write_bytes(safetensors.torch.save(tensors))
    out: dict[str, dict[str, Any]] = {"this process": compute(folder, "this process")}
    for name, settings in SETTINGS.items():
        out[name] = in_process(settings, folder, name, list(out)[-1])
    return out


def in_process(settings: dict[str, str], *arguments: str | Path) -> dict[str, Any]:
    cleared = {
        k: v for k, v in os.environ.items() if not k.startswith(("OMP_", "GOMP_", "MKL_", "ATEN_", "NUMBA_", "ONEDNN_"))
    }
    run = subprocess.run(
        [sys.executable, "-m", "tests.test_exactness", *map(str, arguments)], env=cleared | settings, cwd=ROOT, capture_output=True,
        text=True, timeout=600,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-3000:]
    result: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    return result


def test_settings_took_effect(results: dict[str, dict[str, Any]]) -> None:
    assert results["one thread"]["threads"] == 1 and results["two threads"]["threads"] == 2
    assert results["scalar kernels"]["kernels"] == "DEFAULT"
    assert not results["float32 for int8"]["int8 kernel"]
    if exact._int8_kernel_is_exact(torch.device("cpu")):  # AVX2 alone may leave one that saturates, or none
        assert results["int8 kernel"]["int8 kernel"]


@pytest.mark.parametrize("pair", CHUNKS)
def test_guesses_have_one_digest(results: dict[str, dict[str, Any]], pair: str) -> None:
    digests = {(name, chunk): r["guesses"][f"{pair}.{chunk}"] for name, r in results.items() for chunk in CHUNKS[pair]}
    assert len(digests) == len(CHUNKS[pair]) * (len(SETTINGS) + 1)
    assert len(set(digests.values())) == 1, digests


@pytest.mark.parametrize(
    "row", [f"{p}.{c}" for p, c in ROWS] + [f"{p}.{c}" for p in CHUNKS for c in ("batch", "alone")]
)
def test_blobs_have_one_digest(results: dict[str, dict[str, Any]], row: str) -> None:
    digests = {name: r["blobs"][row] for name, r in results.items()}
    assert len(set(digests.values())) == 1, digests


@pytest.mark.parametrize("pair", CHUNKS)
def test_a_batch_gives_the_blobs_of_its_prompts(results: dict[str, dict[str, Any]], pair: str) -> None:
    for name, r in results.items():
        assert r["blobs"][f"{pair}.batch"] == r["blobs"][f"{pair}.alone"], name


@pytest.mark.parametrize("name", SETTINGS)
def test_blobs_decode_under_another_setting(results: dict[str, dict[str, Any]], name: str) -> None:
    assert len(results[name]["decoded"]) == len(ROWS) and all(results[name]["decoded"].values())


if __name__ == "__main__":
    print(json.dumps(compute(Path(sys.argv[1]), *sys.argv[2:4])))
