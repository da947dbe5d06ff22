"""Hostile blobs, profiles and predictors: each malformation has its error, and nothing is allocated on a blob's word."""

from __future__ import annotations

import struct
import tracemalloc
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import codec
from codec import blob as blobs
from codec import errors
from codec.checksums import chain, digest, layer_checksums
from codec.entropy import BACKEND
from tests import codec_samples as samples

# The layout as FORMAT.md has it, written down again: the code's own structs would agree with any change of theirs.
FIELDS = {
    "magic": (0, 8), "version": (8, 2), "flags": (10, 2), "header length": (12, 4), "target": (16, 32), "predictor": (48, 32),
    "profile": (80, 32), "prefix key": (112, 32), "parent digest": (144, 16), "first token": (160, 8), "tokens": (168, 4),
    "layers": (172, 2), "format": (174, 1), "scales": (175, 1), "K bytes": (176, 8), "streams": (184, 2), "stream length": (186, 8),
}  # fmt: skip
FIXED, ROW, SUM = 194, 40, 16  # the first with the length of one bitstream
LAYERS = samples.TINY["num_hidden_layers"]
HEADER = FIXED + LAYERS * ROW + SUM


class Sample(NamedTuple):
    ids: torch.Tensor
    identity: codec.ChunkIdentity
    chunk: codec.EncodedChunk
    truth: samples.Layers


@lru_cache(maxsize=1)
def sample() -> Sample:
    predictor, profile, ids = samples.tiny(), samples.tiny_profile(), samples.tokens(20)
    values = samples.truth(predictor, predictor.new_state(), ids, profile.format)
    identity = codec.ChunkIdentity(samples.TARGET, samples.keys(ids, 20)[0], codec.ROOT_DIGEST, 0)
    return Sample(ids, identity, codec.encode(predictor, profile, predictor.new_state(), ids, values, identity), values)


def decode(blob: bytes, **changes: Any) -> codec.DecodedChunk:
    predictor, s = samples.tiny(), sample()
    profile, identity = changes.pop("profile", samples.tiny_profile()), replace(s.identity, **changes)
    return codec.decode(predictor, profile, predictor.new_state(), s.ids, blob, identity)


def patched(blob: bytes, offset: int, data: bytes) -> bytes:
    return blob[:offset] + data + blob[offset + len(data) :]


def sealed(blob: bytes) -> bytes:
    """With both checksums made right again, as a forger would."""
    (length,) = struct.unpack_from("<I", blob, 12)
    head = blob[: length - SUM]
    body = head + digest(head) + blob[length:-SUM]
    return body + digest(body)


def forged(field: str, data: bytes) -> bytes:
    offset, size = FIELDS[field]
    assert len(data) == size
    return sealed(patched(sample().chunk.blob, offset, data))


@lru_cache(maxsize=1)
def separate() -> tuple[codec.Profile, Sample]:
    """The same chunk by the coder that writes a bitstream for each tensor."""
    predictor, s = samples.tiny(), sample()
    profile = samples.make_profile(predictor, coder=BACKEND)
    chunk = codec.encode(predictor, profile, predictor.new_state(), s.ids, s.truth, s.identity)
    return profile, s._replace(chunk=chunk)


def with_streams(order: list[int]) -> bytes:
    """The latter's blob with its bitstreams in another order, all lengths and checksums of bytes set right, those of tensors kept."""
    blob = separate()[1].chunk.blob
    header = blobs.read_header(blob)
    flat = blobs.streams(blob, header)
    chosen = [flat[i] for i in order]
    return blobs.pack(replace(header, key_bytes=min(header.key_bytes, sum(map(len, chosen)))), chosen)


# ---------------------------------------------------------------- the format
def test_header_is_laid_out_as_documented() -> None:
    s = sample()
    blob, i = s.chunk.blob, s.identity
    length = len(blob) - HEADER - SUM
    got = {name: blob[at : at + size] for name, (at, size) in FIELDS.items()}
    assert got == {
        "magic": b"\x89KVC\r\n\x1a\n", "version": b"\1\0", "flags": b"\0\0", "header length": HEADER.to_bytes(4, "little"),
        "target": i.target, "predictor": samples.tiny().fingerprint, "profile": samples.tiny_profile().id, "prefix key": i.prefix_key,
        "parent digest": bytes(16), "first token": bytes(8), "tokens": b"\x14\0\0\0", "layers": b"\2\0", "format": b"\1", "scales": b"\0",
        "K bytes": s.chunk.stats.bytes_k.to_bytes(8, "little"), "streams": b"\1\0", "stream length": length.to_bytes(8, "little"),
    }  # fmt: skip
    at = FIXED
    for layer in range(LAYERS):
        assert struct.unpack_from("<HHHH", blob, at) == (2, 12, 12, 0)
        assert blob[at + 8 : at + ROW] == s.chunk.layer_checksums[32 * layer : 32 * layer + 32]
        at += ROW
    assert blob[at : at + SUM] == digest(blob[:at]) and blob[-SUM:] == digest(blob[:-SUM])
    assert len(blob) == HEADER + length + SUM
    assert s.chunk.stats.header_bytes == HEADER + SUM and s.chunk.stats.bytes_k + s.chunk.stats.bytes_v == length


def test_header_lists_the_lengths_of_many_bitstreams() -> None:
    blob = separate()[1].chunk.blob
    (count,) = struct.unpack_from("<H", blob, 184)
    lengths = struct.unpack_from(f"<{count}Q", blob, 186)
    assert count == 2 * LAYERS and sum(lengths) == len(blob) - HEADER - 8 * (count - 1) - SUM
    assert int.from_bytes(blob[176:184], "little") == sum(lengths[::2])
    assert blob[FIXED + 8 * (count - 1) :][: LAYERS * ROW] == sample().chunk.blob[FIXED:][: LAYERS * ROW]


def test_read_header_gives_what_was_written() -> None:
    s = sample()
    header = codec.read_header(s.chunk.blob)
    assert (header.target, header.prefix_key, header.parent_digest) == (
        s.identity.target,
        s.identity.prefix_key,
        bytes(16),
    )
    assert (header.tokens, header.first_token, header.format.name, header.scales) == (20, 0, "bf16", ())
    assert header.layer_checksums == s.chunk.layer_checksums == layer_checksums(s.truth, header.format)
    assert (
        s.chunk.chain_digest == chain(bytes(16), s.chunk.layer_checksums) == digest(bytes(16) + s.chunk.layer_checksums)
    )
    assert blobs.pack(header, blobs.streams(s.chunk.blob, header)) == s.chunk.blob


def test_checksums_are_canonical_xxh3_128() -> None:
    assert digest(b"").hex() == "99aa06d3014798d86001c324468d497f"  # the reference implementation's value


# ---------------------------------------------------------------- damage
def test_truncation_at_every_field_boundary_is_refused() -> None:
    blob = sample().chunk.blob
    ends = [at for at, _ in FIELDS.values()] + [
        FIXED + i * ROW + d for i in range(LAYERS) for d in (0, 2, 4, 6, 8, 16, 24, 40, ROW)
    ]
    for end in {*ends, HEADER - 1, HEADER, HEADER + 1, HEADER + 4, len(blob) - SUM, len(blob) - 1}:
        with pytest.raises(errors.TruncatedBlob):
            decode(blob[:end])


@settings(max_examples=30, deadline=None, derandomize=True)
@given(st.integers(0, 10_000))
def test_truncation_anywhere_is_refused(end: int) -> None:
    with pytest.raises(errors.TruncatedBlob):
        decode(sample().chunk.blob[: end % len(sample().chunk.blob)])


@pytest.mark.parametrize("tail", [b"\0", b"\0" * 4, b"x" * 1000])
def test_trailing_bytes_are_refused(tail: bytes) -> None:
    with pytest.raises(errors.TruncatedBlob, match="cut or extended"):
        decode(sample().chunk.blob + tail)
    with pytest.raises(errors.TruncatedBlob):
        decode(sealed(sample().chunk.blob[:-SUM] + tail + bytes(SUM)))


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.integers(0, 10**6))
def test_a_flipped_bit_anywhere_is_refused(bit: int) -> None:
    blob = bytearray(sample().chunk.blob)
    bit %= len(blob) * 8
    blob[bit // 8] ^= 1 << bit % 8
    with pytest.raises(errors.BlobError):
        decode(bytes(blob))


def test_a_flipped_bit_in_each_part_has_its_error() -> None:
    blob = sample().chunk.blob
    expected = {
        "magic": errors.NotABlob, "version": errors.UnsupportedVersion, "flags": errors.MalformedHeader, "target": errors.MalformedHeader,
        "prefix key": errors.MalformedHeader, "parent digest": errors.MalformedHeader, "tokens": errors.MalformedHeader,
    }  # fmt: skip
    for field, error in expected.items():
        with pytest.raises(error):
            decode(patched(blob, at := FIELDS[field][0], bytes([blob[at] ^ 1])))
    for at, error in ((FIXED + 9, errors.MalformedHeader), (HEADER - 1, errors.MalformedHeader), (HEADER, errors.CorruptBlob),
                      (len(blob) - SUM - 1, errors.CorruptBlob), (len(blob) - 1, errors.CorruptBlob)):  # fmt: skip
        with pytest.raises(error):
            decode(patched(blob, at, bytes([blob[at] ^ 0x80])))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.binary(max_size=300))
def test_arbitrary_bytes_are_refused(data: bytes) -> None:
    for blob in (data, blobs.MAGIC + data, sample().chunk.blob[:16] + data):
        with pytest.raises(errors.BlobError):
            decode(blob)


# ---------------------------------------------------------------- a blob of something else
def test_a_blob_of_something_else_is_refused() -> None:
    blob = sample().chunk.blob
    other = bytes(range(32))
    changes: list[tuple[dict[str, Any], type[Exception]]] = [
        ({"target": other}, errors.WrongTarget), ({"prefix_key": other}, errors.WrongKey),
        ({"parent_digest": other[:16]}, errors.WrongParent), ({"first_token": 20}, errors.MalformedHeader),
    ]  # fmt: skip
    for change, error in changes:
        with pytest.raises(error, match=replace(sample().identity, **change).prefix_key.hex()):
            decode(blob, **change)


@pytest.mark.parametrize(
    ("field", "error"),
    [("target", errors.WrongTarget), ("predictor", errors.WrongPredictor), ("profile", errors.WrongProfile),
     ("prefix key", errors.WrongKey), ("parent digest", errors.WrongParent)],
)  # fmt: skip
def test_forged_identity_is_refused(field: str, error: type[Exception]) -> None:
    with pytest.raises(error, match=field):
        decode(forged(field, b"\x5a" * FIELDS[field][1]))


def test_another_profile_or_predictor_is_refused() -> None:
    s, predictor = sample(), samples.tiny()
    with pytest.raises(errors.WrongProfile):
        decode(s.chunk.blob, profile=samples.make_profile(predictor, count=64))
    other = samples.build(samples.TINY, seed=1)
    with pytest.raises(errors.WrongPredictor, match="calibrated with"):
        codec.decode(other, samples.tiny_profile(), other.new_state(), s.ids, s.chunk.blob, s.identity)
    with pytest.raises(errors.WrongPredictor):
        codec.decode(other, samples.make_profile(other), other.new_state(), s.ids, s.chunk.blob, s.identity)


def test_swapped_blobs_are_refused_by_key() -> None:
    predictor, profile, ids = samples.tiny(), samples.tiny_profile(), samples.tokens(40)
    values = samples.truth(predictor, predictor.new_state(), ids, profile.format)
    a, b = (c.blob for c in samples.encode_prompt(predictor, profile, ids, values, 20))
    with pytest.raises(errors.WrongKey):
        samples.decode_prompt(predictor, profile, ids, [b, a], 20)


def test_a_parent_of_other_bits_is_refused() -> None:
    predictor, profile, ids = samples.tiny(), samples.tiny_profile(), samples.tokens(40)
    chunks = []
    for seed in (0, 1):  # the same tokens, computed by a target whose last bits differ
        values = samples.truth(predictor, predictor.new_state(), ids, profile.format, seed=seed)
        chunks.append([c.blob for c in samples.encode_prompt(predictor, profile, ids, values, 20)])
    with pytest.raises(errors.WrongParent):
        samples.decode_prompt(predictor, profile, ids, [chunks[0][0], chunks[1][1]], 20)


# ---------------------------------------------------------------- forgeries with right checksums
@pytest.mark.parametrize(
    ("field", "data", "error"),
    [
        ("magic", b"\x89KVD\r\n\x1a\n", errors.NotABlob), ("version", b"\0\0", errors.UnsupportedVersion),
        ("version", b"\2\0", errors.UnsupportedVersion), ("flags", b"\1\0", errors.MalformedHeader),
        ("first token", b"\1" + bytes(7), errors.MalformedHeader), ("first token", b"\xff" * 8, errors.MalformedHeader),
        ("tokens", bytes(4), errors.MalformedHeader), ("tokens", b"\x13\0\0\0", errors.MalformedHeader),
        ("tokens", b"\xff" * 4, errors.MalformedHeader), ("layers", b"\0\0", errors.MalformedHeader),
        ("layers", b"\1\0", errors.MalformedHeader), ("layers", b"\xff\xff", errors.MalformedHeader),
        ("format", b"\0", errors.MalformedHeader), ("format", b"\2", errors.MalformedHeader),
        ("format", b"\x63", errors.MalformedHeader), ("scales", b"\1", errors.MalformedHeader),
        ("K bytes", b"\xff" * 8, errors.MalformedHeader), ("streams", b"\0\0", errors.MalformedHeader),
        ("streams", b"\2\0", errors.MalformedHeader), ("streams", b"\xff\xff", errors.MalformedHeader),
        ("stream length", (2**40 + 1).to_bytes(8, "little"), errors.MalformedHeader),
        ("stream length", (2**40).to_bytes(8, "little"), errors.TruncatedBlob), ("stream length", bytes(8), errors.MalformedHeader),
    ],
)  # fmt: skip
def test_forged_fields_are_refused(field: str, data: bytes, error: type[Exception]) -> None:
    with pytest.raises(error):
        decode(forged(field, data))


def test_forged_header_lengths_are_refused() -> None:
    blob = sample().chunk.blob
    for length, error in ((0, errors.MalformedHeader), (16, errors.MalformedHeader), (FIXED + SUM - 1, errors.MalformedHeader),
                          (HEADER - ROW, errors.MalformedHeader), (HEADER + ROW, errors.MalformedHeader),
                          (len(blob) + 1, errors.TruncatedBlob), (blobs.MAX_HEADER, errors.TruncatedBlob),
                          (blobs.MAX_HEADER + 1, errors.OversizedHeader), (2**32 - 1, errors.OversizedHeader)):  # fmt: skip
        with pytest.raises(error):
            decode(patched(blob, 12, length.to_bytes(4, "little")))


@pytest.mark.parametrize(
    ("offset", "data", "error"),
    [
        (0, b"\0\0", errors.MalformedHeader), (0, b"\1\0", errors.MalformedHeader), (2, b"\xff\xff", errors.MalformedHeader),
        (4, b"\0\0", errors.MalformedHeader), (6, b"\1\0", errors.MalformedHeader),
        (8, bytes(16), errors.LayerMismatch), (24, bytes(16), errors.LayerMismatch),
    ],
)  # fmt: skip
@pytest.mark.parametrize("layer", range(LAYERS))
def test_forged_layer_rows_are_refused(layer: int, offset: int, data: bytes, error: type[Exception]) -> None:
    with pytest.raises(error):
        decode(sealed(patched(sample().chunk.blob, FIXED + layer * ROW + offset, data)))


@pytest.mark.parametrize("order", [[1, 0, 2, 3], [0, 1, 3, 2], [2, 1, 0, 3], [2, 3, 0, 1], [0, 3, 2, 1]])
def test_swapped_bitstreams_with_right_checksums_are_refused(order: list[int]) -> None:
    profile, s = separate()
    assert with_streams([0, 1, 2, 3]) == s.chunk.blob
    assert samples.same_bits(decode(s.chunk.blob, profile=profile).layers, s.truth)
    with pytest.raises((errors.LayerMismatch, errors.CorruptBlob)):
        decode(with_streams(order), profile=profile)


@pytest.mark.parametrize("order", [[0, 1, 2], [0, 1, 2, 3, 3], [0, 1]])
def test_another_number_of_bitstreams_is_refused(order: list[int]) -> None:
    with pytest.raises(errors.CorruptBlob):
        decode(with_streams(order), profile=separate()[0])
    s = sample()
    with pytest.raises(errors.CorruptBlob, match="2 bitstreams where its coder writes 1"):
        decode(
            blobs.pack(
                blobs.read_header(s.chunk.blob), blobs.streams(s.chunk.blob, blobs.read_header(s.chunk.blob)) * 2
            )
        )


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.integers(-1, 3), st.binary(max_size=600))
def test_forged_bitstreams_are_refused(which: int, stream: bytes) -> None:
    profile, s = separate() if which >= 0 else (samples.tiny_profile(), sample())
    header = blobs.read_header(s.chunk.blob)
    flat = blobs.streams(s.chunk.blob, header)
    flat[which] = stream
    with pytest.raises((errors.LayerMismatch, errors.CorruptBlob)):
        decode(blobs.pack(replace(header, key_bytes=0), flat), profile=profile)


def test_layer_mismatch_names_layer_and_tensor() -> None:
    with pytest.raises(errors.LayerMismatch, match="layer 1 V"):
        decode(sealed(patched(sample().chunk.blob, FIXED + ROW + 24, bytes(16))))


def test_claims_allocate_nothing() -> None:
    blob = sample().chunk.blob
    rows = struct.pack("<HHHH16s16s", 65535, 65535, 65535, 0, bytes(16), bytes(16)) * blobs.MAX_LAYERS
    huge = patched(blob[:FIXED], 168, struct.pack("<IH", blobs.MAX_TOKENS, blobs.MAX_LAYERS))
    huge = patched(huge, 12, struct.pack("<I", FIXED + len(rows) + SUM))
    claims = [
        sealed(huge + rows + bytes(SUM) + bytes(SUM)),
        forged("tokens", b"\0\0\x10\0"),
        patched(blob, 12, b"\xff" * 4),
    ]
    claims += [forged("stream length", (2**40).to_bytes(8, "little")), forged("streams", b"\xff\xff")]
    decode(blob)  # so that lazily made tables do not count
    for claim in claims:
        tracemalloc.start()
        with pytest.raises(errors.BlobError):
            decode(claim)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < 16 * len(claim) + (1 << 20), (
            "an attacker's claim must not cost more than the bytes it took to make it"
        )
