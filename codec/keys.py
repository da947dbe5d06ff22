"""Digests that name things: chunk keys and content ids.

A chunk's key names the whole prefix up to the chunk's end, for one target, cache format and tenant (DESIGN 8).
Every field is length-prefixed, so that no two different inputs are hashed from the same bytes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

KEY_VERSION = 1
KEY_BYTES = 32
DIGEST_BYTES = 16
ROOT_DIGEST = bytes(DIGEST_BYTES)  # the parent digest of a prompt's first chunk


def content_id(data: bytes) -> bytes:
    """BLAKE2b-256 of stored bytes: the id of a profile or predictor."""
    return hashlib.blake2b(data, digest_size=KEY_BYTES).digest()


def hash_fields(domain: str, *fields: bytes) -> bytes:
    """BLAKE2b-256 over length-prefixed fields under a domain name."""
    h = hashlib.blake2b(digest_size=KEY_BYTES)
    for field in (domain.encode(), *fields):
        h.update(len(field).to_bytes(8, "little"))
        h.update(field)
    return h.digest()


def engine_target(target: bytes, engine: str) -> bytes:
    """The fingerprint of a target that another engine runs: its bits are other ones, so none of its keys may be the same."""
    return hash_fields("kv-engine", target, engine.encode())


def root_key(
    *,
    target: bytes,
    cache_format: str,
    chunk_tokens: int,
    rope_regime: str = "",
    scales: bytes = b"",
    salt: bytes = b"",
) -> bytes:
    """The key of the empty prefix: all that a prefix's key depends on but its tokens.

    target: the 32-byte target fingerprint (weights, config, adapters, dtype); salt: a tenant's secret, any length.
    """
    number = chunk_tokens.to_bytes(8, "little")
    return hash_fields(
        "kv-root", bytes([KEY_VERSION]), salt, target, cache_format.encode(), scales, rope_regime.encode(), number
    )


def chunk_keys(root: bytes, token_ids: Sequence[int] | NDArray[np.integer], chunk_tokens: int) -> list[bytes]:
    """Keys of a prompt's chunks, the last of which may be partial; each is chained to the one before."""
    ids = np.asarray(token_ids, dtype=np.int64)
    if ids.size and (ids.min() < 0 or ids.max() >= 1 << 32):
        raise ValueError("token ids must be 0 to 2**32 - 1")
    keys, parent = [], root
    for begin in range(0, len(ids), chunk_tokens):
        parent = hash_fields("kv-chunk", parent, ids[begin : begin + chunk_tokens].astype("<u4").tobytes())
        keys.append(parent)
    return keys
