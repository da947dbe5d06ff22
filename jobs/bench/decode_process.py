"""Decode stored chunks in a process of its own, which has nothing but a store, token ids and keys.

    python -m jobs.bench.decode_process REQUEST.json

`decode_elsewhere` starts it. The process knows no checksum of what was encoded: it takes its own over what it decoded.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

import codec
from codec import checksums
from jobs.bench.child import answer, ask
from jobs.bench.machine import peak_rss_bytes
from pipeline.paths import blob_path
from pipeline.store import Store
from pipeline.work import load_predictor, load_profile
from pipeline.worker_process import settle


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
    asked = {"request": asdict(request), "prompts": [asdict(p) for p in prompts]}
    return Decoded(**ask("jobs.bench.decode_process", asked, folder, "decoding"))


def decode_all(request: Request, prompts: Sequence[StoredPrompt]) -> Decoded:
    """Decode every chunk of the prompts in this process, from the store alone. Raises DataError, StorageError."""
    settle(request.threads)
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


def work(asked: dict[str, Any]) -> dict[str, Any]:
    """Decode what was asked for."""
    return asdict(decode_all(Request(**asked["request"]), [StoredPrompt(**p) for p in asked["prompts"]]))


if __name__ == "__main__":
    sys.exit(answer(work))
