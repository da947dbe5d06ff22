"""Index rows of made-up chunks: as many as a large store has, with the sizes of SmolLM2-135M's."""

from __future__ import annotations

import datetime
import platform
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

import torch

ROWS_A_PART = 5000


def made_up_parts(keys: Iterable[bytes], target: bytes, profile: bytes) -> Iterator[list[dict[str, Any]]]:
    """Rows of chunks with these 32-byte keys, ROWS_A_PART at a time. They follow from nothing, and nothing was stored."""
    common = {
        "parent_key": None, "model": "made-up", "target": target, "predictor": bytes(32), "profile": profile, "cache_format": "bf16",
        "fp8_scale": None, "loop": "closed", "chunk_tokens": 256, "prefill_tokens": 256, "raw_bytes": 11_796_480, "header_bytes": 2000,
        "scalars_k": 2_949_120, "scalars_v": 2_949_120, "ideal_bits_k": None, "ideal_bits_v": None, "parent_digest": bytes(16),
        "tenant": "", "root_key": None, "layer_bits": None, "layer_spread": None, "layer_miss": None,
        "created": datetime.datetime.now(datetime.UTC), "host_arch": platform.machine(),
        "torch_version": torch.__version__, "device": "cpu",
    }  # fmt: skip
    numbered = enumerate(keys)
    while some := list(islice(numbered, ROWS_A_PART)):
        yield [
            common | {
                "key": key, "chunk_index": number % 32, "first_token": 256 * (number % 32), "tokens": 256,
                "stored_bytes": 2_000_000 + number % 7919, "bytes_k": 900_000 + number % 7919, "bytes_v": 1_098_000,
                "escapes": number % 31, "layer_checksums": key * 30, "chain_digest": key[:16],
            }
            for number, key in some
        ]  # fmt: skip
