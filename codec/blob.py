"""The blob: one chunk's compressed cache as bytes. Format version 1; FORMAT.md beside this file describes it field by field."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from codec import errors
from codec.checksums import digest
from codec.formats import NumberFormat, format_by_code

Data = TypeVar("Data", bytes, memoryview)
MAGIC = b"\x89KVC\r\n\x1a\n"
VERSION = 1
MAX_LAYERS = 4096
MAX_TOKENS = 1 << 20
MAX_DIM = 1 << 16
MAX_STREAM_BYTES = 1 << 40
MAX_STREAMS = 2 * MAX_LAYERS
_PREFIX = struct.Struct("<8sHHI")  # magic, version, flags, header length
_FIXED = struct.Struct(
    "<32s32s32s32s16sQIHBBQ"
)  # target, predictor, profile, key, parent, first token, tokens, layers, format, scale code, K bytes
_LAYER = struct.Struct("<HHHH16s16s")  # kv_heads, K dim, V dim, 0, K checksum, V checksum
_STREAMS = struct.Struct("<H")  # how many bitstreams; then the length of each
_LENGTH_BYTES = 8
_SCALE_BYTES = 4
MAX_SCALES = 1 << 20
MAX_HEADER = (
    _PREFIX.size + _FIXED.size + MAX_LAYERS * _LAYER.size + MAX_SCALES * _SCALE_BYTES + 2 + 8 * MAX_STREAMS + 16
)


@dataclass(frozen=True)
class LayerHeader:
    """Shape and checksums of one layer."""

    kv_heads: int
    key_dim: int
    value_dim: int
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
    key_bytes: int = 0  # how many bytes of the bitstreams K took; for reports
    stream_bytes: tuple[int, ...] = field(default=(), compare=False)
    header_bytes: int = field(default=0, compare=False)

    @property
    def layer_checksums(self) -> bytes:
        """As `codec.checksums.layer_checksums` gives them for the raw tensors."""
        return b"".join(layer.key_checksum + layer.value_checksum for layer in self.layers)


def pack(header: BlobHeader, streams: Sequence[bytes]) -> bytes:
    """Header and bitstreams to a blob; the header's own idea of their lengths does not count."""
    body = _FIXED.pack(
        header.target, header.predictor, header.profile, header.prefix_key, header.parent_digest, header.first_token, header.tokens,
        len(header.layers), header.format.code, _scale_code(len(header.scales), header.layers), header.key_bytes,
    )  # fmt: skip
    body += _STREAMS.pack(len(streams)) + struct.pack(f"<{len(streams)}Q", *map(len, streams))
    body += struct.pack(f"<{len(header.scales)}f", *header.scales)
    for layer in header.layers:
        body += _LAYER.pack(layer.kv_heads, layer.key_dim, layer.value_dim, 0, layer.key_checksum, layer.value_checksum)
    head = _PREFIX.pack(MAGIC, VERSION, 0, _PREFIX.size + len(body) + 16) + body
    parts = [head, digest(head), *streams]
    return b"".join([*parts, digest(*parts)])


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
    if length < _PREFIX.size + _FIXED.size + _STREAMS.size + 16:
        raise errors.MalformedHeader(f"The blob's header length of {length} bytes is too small for its fields.")
    if digest(blob[: length - 16]) != blob[length - 16 : length]:
        raise errors.MalformedHeader("The checksum of the blob's header differs; the blob is corrupt.")
    return _parse(blob, flags, length)


def _parse(blob: bytes, flags: int, length: int) -> BlobHeader:
    target, predictor, profile, key, parent, first, tokens, layers, code, scale_code, key_bytes = _FIXED.unpack_from(
        blob, _PREFIX.size
    )
    fmt, at, end = format_by_code(code), _PREFIX.size + _FIXED.size, length - 16
    (count,) = _STREAMS.unpack_from(blob, at)
    at += _STREAMS.size + count * _LENGTH_BYTES
    scales, odd = divmod(end - at - layers * _LAYER.size, _SCALE_BYTES)
    if (
        flags
        or fmt is None
        or odd
        or not 0 <= scales <= (MAX_SCALES if fmt.coarse else 0)
        or not 1 <= layers <= MAX_LAYERS
        or not 1 <= tokens <= MAX_TOKENS
        or not 1 <= count <= MAX_STREAMS
    ):
        raise errors.MalformedHeader(
            f"The blob's header contradicts itself (flags {flags}, format {code}, {layers} layers, {tokens} tokens, "
            f"{count} bitstreams, {length} bytes)."
        )
    lengths = struct.unpack_from(f"<{count}Q", blob, at - count * _LENGTH_BYTES)
    if max(lengths) > MAX_STREAM_BYTES or key_bytes > sum(lengths):
        raise errors.MalformedHeader(
            f"The blob's header claims bitstreams of up to {max(lengths)} bytes, {key_bytes} of them K's."
        )
    factors = struct.unpack_from(f"<{scales}f", blob, at)
    at += scales * _SCALE_BYTES
    rows = []
    for i in range(layers):
        heads, kd, vd, zero, kc, vc = _LAYER.unpack_from(blob, at + i * _LAYER.size)
        if zero or not (1 <= heads <= MAX_DIM and kd <= MAX_DIM and vd <= MAX_DIM):
            raise errors.MalformedHeader(f"The blob's header is malformed at layer {i}.")
        rows.append(LayerHeader(heads, kd, vd, kc, vc))
    if scale_code != _scale_code(scales, rows):
        raise errors.MalformedHeader(
            f"The blob's header has {scales} scales, which its scale code {scale_code} does not mean."
        )
    return BlobHeader(
        target, predictor, profile, key, parent, first, tokens, fmt, tuple(rows), factors, key_bytes, lengths, length
    )


def _scale_code(scales: int, rows: Sequence[LayerHeader]) -> int:
    """0: no scales; 1: one for each K and each V; 2: one for each of their heads; 255: no such number of them."""
    tensors, heads = 2 * len(rows), 2 * sum(row.kv_heads for row in rows)
    return {0: 0, heads: 2, tensors: 1}.get(scales, 255)


def streams(blob: Data, header: BlobHeader) -> list[Data]:
    """The bitstreams, after the checksum of the whole blob was found right; of a memoryview they are no copies."""
    want = header.header_bytes + sum(header.stream_bytes) + 16
    if len(blob) != want:
        raise errors.TruncatedBlob(
            f"The blob has {len(blob)} bytes where its header says {want}; it was cut or extended."
        )
    if digest(memoryview(blob)[:-16]) != blob[-16:]:
        raise errors.CorruptBlob("The checksum of the blob differs; its bytes were changed after it was written.")
    out, at = [], header.header_bytes
    for size in header.stream_bytes:
        out.append(blob[at : at + size])
        at += size
    return out
