"""Decode stored chunks in a process of its own, which has nothing but a store, token ids and keys.

    python -m jobs.bench.decode_process REQUEST.json

`decode_elsewhere` starts it. The process knows no checksum of what was encoded: it takes its own over what it decoded.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

import codec
from codec import checksums
from codec.errors import DataError, KVCodecError
from jobs.bench.machine import peak_rss_bytes
from pipeline.paths import blob_path
from pipeline.store import Store
from pipeline.work import load_predictor, load_profile

ROOT = Path(__file__).resolve().parent.parent.parent


@dataclass(frozen=True)
class StoredPrompt:
    """A prompt in the store: its token ids, and its chunks' keys in hexadecimal."""

    token_ids: list[int]
    keys: list[str]


@dataclass(frozen=True)
class Request:
    """What to decode and with what; digests in hexadecimal."""

    store: str
    target: str
    predictor: str
    profile: str
    cache_format: str
    chunk_tokens: int
    threads: int


@dataclass(frozen=True)
class Decoded:
    """What came back: layer checksums (hexadecimal) of every chunk, prompt after prompt, seconds in the codec, peak memory."""

    checksums: list[str]
    seconds: float
    peak_rss_bytes: int


def decode_elsewhere(request: Request, prompts: Sequence[StoredPrompt], folder: Path) -> Decoded:
    """Start the process and wait for it; its request is written into `folder`. Raises DataError when it fails."""
    path = folder / "decode-request.json"
    path.write_text(json.dumps({"request": asdict(request), "prompts": [asdict(p) for p in prompts]}), encoding="utf-8")
    command = [sys.executable, "-m", "jobs.bench.decode_process", str(path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        raise DataError(f"decoding in a process of its own failed: {lines[-1].removeprefix('error: ')}")
    return Decoded(**json.loads(done.stdout.splitlines()[-1]))


def decode_all(request: Request, prompts: Sequence[StoredPrompt]) -> Decoded:
    """Decode every chunk of the prompts in this process, from the store alone. Raises DataError, StorageError."""
    torch.set_num_threads(request.threads)
    store = Store.open(request.store, create=False)
    target, profile_id = bytes.fromhex(request.target), bytes.fromhex(request.profile)
    predictor = load_predictor(store, bytes.fromhex(request.predictor), "cpu")
    profile = load_profile(store, profile_id, target=target, cache_format=request.cache_format)
    codec.check_known_answer(predictor, profile)
    _warm_up(store, target, predictor, profile, request.chunk_tokens, prompts[0])
    sums, seconds = [], 0.0
    for prompt in prompts:
        state, parent = predictor.new_state(), codec.ROOT_DIGEST
        for number, key in enumerate(bytes.fromhex(k) for k in prompt.keys):
            first = number * request.chunk_tokens
            ids = torch.tensor(prompt.token_ids[first : first + request.chunk_tokens], dtype=torch.int64)
            blob = store.get(blob_path(target, profile_id, key))
            begin = time.perf_counter()
            chunk = codec.decode(predictor, profile, state, ids, blob, codec.ChunkIdentity(target, key, parent, first))
            seconds += time.perf_counter() - begin
            parent = chunk.chain_digest
            sums.append(checksums.layer_checksums(chunk.layers, profile.format).hex())
    return Decoded(sums, seconds, peak_rss_bytes())


def _warm_up(
    store: Store, target: bytes, predictor: codec.Predictor, profile: codec.Profile, step: int, prompt: StoredPrompt
) -> None:
    """Decode one chunk before the clock runs: compiled loops are loaded or compiled at their first use."""
    key = bytes.fromhex(prompt.keys[0])
    blob = store.get(blob_path(target, profile.id, key))
    identity = codec.ChunkIdentity(target, key, codec.ROOT_DIGEST, 0)
    codec.decode(predictor, profile, predictor.new_state(), torch.tensor(prompt.token_ids[:step]), blob, identity)


def main(arguments: Sequence[str]) -> int:
    """Read the request, decode, print the outcome as one line of JSON."""
    data: dict[str, Any] = json.loads(Path(arguments[0]).read_text(encoding="utf-8"))
    try:
        decoded = decode_all(Request(**data["request"]), [StoredPrompt(**p) for p in data["prompts"]])
    except KVCodecError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(json.dumps(asdict(decoded)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
