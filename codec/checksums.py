"""Checksums over raw cache tensors: xxh3-128 of little-endian bit patterns in the order [kv_head, token, dim] (DESIGN 7)."""

from __future__ import annotations

from collections.abc import Sequence

import xxhash
from torch import Tensor

from codec.formats import NumberFormat
from codec.keys import DIGEST_BYTES

Layers = Sequence[tuple[Tensor, Tensor]]


def digest(*parts: bytes | memoryview) -> bytes:
    """xxh3-128 of the parts, one after another: 16 bytes, big-endian as the reference implementation's canonical form."""
    found = xxhash.xxh3_128()
    for part in parts:
        found.update(part)
    return found.digest()


def tensor_checksum(values: Tensor, fmt: NumberFormat) -> bytes:
    """Checksum of one tensor [kv_heads, tokens, head_dim]."""
    return digest(fmt.little_endian(values))


def layer_checksums(layers: Layers, fmt: NumberFormat) -> bytes:
    """Checksums of all tensors, K then V, layer by layer, 16 bytes each."""
    return b"".join(tensor_checksum(t, fmt) for pair in layers for t in pair)


def chain(parent: bytes, checksums: bytes) -> bytes:
    """The digest of a prefix's raw K and V, from its parent's and the chunk's checksums."""
    if len(parent) != DIGEST_BYTES:
        raise ValueError("a parent digest has 16 bytes")
    return digest(parent + checksums)
