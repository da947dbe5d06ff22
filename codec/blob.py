"""The blob: one chunk's compressed cache as bytes. Format version 1; FORMAT.md beside this file describes it field by field."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field

from codec import errors
from codec.checksums import digest
from codec.formats import NumberFormat, format_by_code

MAGIC = b"\x89KVC\r\n\x1a\n"
VERSION = 1
MAX_LAYERS = 4096
MAX_TOKENS = 1 << 20
MAX_DIM = 1 << 16
MAX_TENSOR_BYTES = 1 << 40
_PREFIX = struct.Struct("<8sHHI")  # magic, version, flags, header length
_FIXED = struct.Struct(
    "<32s32s32s32s16sQIHBB"
)  # target, predictor, profile, key, parent, first token, tokens, layers, format, scale code
_LAYER = struct.Struct("<HHHHQQ16s16s")  # kv_heads, K dim, V dim, 0, K bytes, V bytes, K checksum, V checksum
_SCALE_BYTES = 4
MAX_SCALES = 1 << 20
MAX_HEADER = _PREFIX.size + _FIXED.size + MAX_LAYERS * _LAYER.size + MAX_SCALES * _SCALE_BYTES + 16


@dataclass(frozen=True)
class LayerHeader:
    """Shape, stream lengths and checksums of one layer."""

    kv_heads: int
    key_dim: int
    value_dim: int
    key_bytes: int
    value_bytes: int
    key_checksum: bytes
    value_checksum: bytes


@dataclass(frozen=True)
class BlobHeader:
    """Everything a blob says about itself. Ids are 32 bytes, digests 16."""

    target: bytes
    predictor: bytes
    profile: bytes
    prefix_key: bytes
    parent_digest: bytes
    first_token: int
    tokens: int
    format: NumberFormat
    layers: tuple[LayerHeader, ...]
    scales: tuple[
        float, ...
    ] = ()  # of an FP8 cache, layer by layer K's, then V's: one each, or one a head; none if all are 1
    header_bytes: int = field(default=0, compare=False)

    @property
    def layer_checksums(self) -> bytes:
        """As `codec.checksums.layer_checksums` gives them for the raw tensors."""
        return b"".join(layer.key_checksum + layer.value_checksum for layer in self.layers)


def pack(header: BlobHeader, streams: Sequence[tuple[bytes, bytes]]) -> bytes:
    """Header and (K, V) bitstreams of every layer to a blob."""
    body = _FIXED.pack(
        header.target, header.predictor, header.profile, header.prefix_key, header.parent_digest, header.first_token, header.tokens,
        len(header.layers), header.format.code, _scale_code(len(header.scales), header.layers),
    )  # fmt: skip
    body += struct.pack(f"<{len(header.scales)}f", *header.scales)
    for layer, (k, v) in zip(header.layers, streams, strict=True):
        body += _LAYER.pack(
            layer.kv_heads, layer.key_dim, layer.value_dim, 0, len(k), len(v), layer.key_checksum, layer.value_checksum
        )
    head = _PREFIX.pack(MAGIC, VERSION, 0, _PREFIX.size + len(body) + 16) + body
    parts = [head, digest(head), *(s for pair in streams for s in pair)]
    blob = b"".join(parts)
    return blob + digest(blob)


def read_header(blob: bytes) -> BlobHeader:
    """Parse and check a blob's header without touching its bitstreams. Raises a subclass of BlobError."""
    if len(blob) < _PREFIX.size:
        raise errors.TruncatedBlob(
            f"The blob has only {len(blob)} bytes, less than the {_PREFIX.size} of its first fields."
        )
    magic, version, flags, length = _PREFIX.unpack_from(blob)
    if magic != MAGIC:
        raise errors.NotABlob("The bytes do not begin as a KV-cache blob does.")
    if version != VERSION:
        raise errors.UnsupportedVersion(f"The blob has format version {version}; this release reads version {VERSION}.")
    if length > MAX_HEADER:
        raise errors.OversizedHeader(f"The blob claims a header of {length} bytes; the format allows {MAX_HEADER}.")
    if length > len(blob):
        raise errors.TruncatedBlob(f"The blob ends within its header, after {len(blob)} of {length} bytes.")
    if length < _PREFIX.size + _FIXED.size + 16:
        raise errors.MalformedHeader(f"The blob's header length of {length} bytes is too small for its fields.")
    if digest(blob[: length - 16]) != blob[length - 16 : length]:
        raise errors.MalformedHeader("The checksum of the blob's header differs; the blob is corrupt.")
    return _parse(blob, flags, length)


def _parse(blob: bytes, flags: int, length: int) -> BlobHeader:
    target, predictor, profile, key, parent, first, tokens, layers, code, scale_code = _FIXED.unpack_from(
        blob, _PREFIX.size
    )
    fmt = format_by_code(code)
    scales, odd = divmod(length - _PREFIX.size - _FIXED.size - layers * _LAYER.size - 16, _SCALE_BYTES)
    if (
        flags
        or fmt is None
        or odd
        or not 0 <= scales <= (MAX_SCALES if fmt.coarse else 0)
        or not 1 <= layers <= MAX_LAYERS
        or not 1 <= tokens <= MAX_TOKENS
    ):
        raise errors.MalformedHeader(
            f"The blob's header contradicts itself (flags {flags}, format {code}, {layers} layers, {tokens} tokens, {length} bytes)."
        )
    at = _PREFIX.size + _FIXED.size
    factors = struct.unpack_from(f"<{scales}f", blob, at)
    at += scales * _SCALE_BYTES
    rows = []
    for i in range(layers):
        heads, kd, vd, zero, kb, vb, kc, vc = _LAYER.unpack_from(blob, at + i * _LAYER.size)
        if zero or not (1 <= heads <= MAX_DIM and kd <= MAX_DIM and vd <= MAX_DIM) or max(kb, vb) > MAX_TENSOR_BYTES:
            raise errors.MalformedHeader(f"The blob's header is malformed at layer {i}.")
        rows.append(LayerHeader(heads, kd, vd, kb, vb, kc, vc))
    if scale_code != _scale_code(scales, rows):
        raise errors.MalformedHeader(
            f"The blob's header has {scales} scales, which its scale code {scale_code} does not mean."
        )
    return BlobHeader(target, predictor, profile, key, parent, first, tokens, fmt, tuple(rows), factors, length)


def _scale_code(scales: int, rows: Sequence[LayerHeader]) -> int:
    """0: no scales; 1: one for each K and each V; 2: one for each of their heads; 255: no such number of them."""
    tensors, heads = 2 * len(rows), 2 * sum(row.kv_heads for row in rows)
    return {0: 0, heads: 2, tensors: 1}.get(scales, 255)


def streams(blob: bytes, header: BlobHeader) -> list[tuple[bytes, bytes]]:
    """The (K, V) bitstreams of every layer, after the checksum of the whole blob was found right."""
    want = header.header_bytes + sum(layer.key_bytes + layer.value_bytes for layer in header.layers) + 16
    if len(blob) != want:
        raise errors.TruncatedBlob(
            f"The blob has {len(blob)} bytes where its header says {want}; it was cut or extended."
        )
    if digest(blob[:-16]) != blob[-16:]:
        raise errors.CorruptBlob("The checksum of the blob differs; its bytes were changed after it was written.")
    out, at = [], header.header_bytes
    for layer in header.layers:
        middle = at + layer.key_bytes
        end = middle + layer.value_bytes
        out.append((blob[at:middle], blob[middle:end]))
        at = end
    return out
