"""Encode and decode chunks: predictor, residual model, coder and blob put together, a layer at a time.

Both directions run the same loop: guess a layer, code or decode it, go on. States change only when a whole chunk has succeeded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import xxhash
from torch import Tensor

from codec import blob as blobs
from codec import checksums, errors
from codec.coders import Writer
from codec.formats import NumberFormat
from codec.ideal import Cost, LayerCosts
from codec.loop import CodedLayer, DecodedLayer, follow
from codec.predictor import Predictor, PredictorState, Stored
from codec.profile import Profile

Layers = list[tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class ChunkIdentity:
    """Which chunk this is: target fingerprint and prefix key (32 bytes each), parent digest (16), position of its first token."""

    target: bytes
    prefix_key: bytes
    parent_digest: bytes
    first_token: int

    def __post_init__(self) -> None:
        sizes = (len(self.target), len(self.prefix_key), len(self.parent_digest))
        if sizes != (32, 32, 16):
            raise ValueError(
                f"A chunk's target, key and parent digest must have 32, 32 and 16 bytes; they have {sizes}."
            )


@dataclass(frozen=True)
class ChunkStats:
    """Sizes of one encoded chunk; ideal code lengths in bits, 0 when they were not asked for, and what layers cost."""

    scalars_k: int
    scalars_v: int
    bytes_k: int
    bytes_v: int
    header_bytes: int
    ideal_bits_k: float
    ideal_bits_v: float
    escapes: int
    costs: LayerCosts | None = None


@dataclass(frozen=True)
class EncodedChunk:
    """A blob and what it holds. layer_checksums: 16 bytes a tensor, K then V, layer by layer; chain_digest: 16 bytes."""

    blob: bytes
    layer_checksums: bytes
    chain_digest: bytes
    stats: ChunkStats


@dataclass(frozen=True)
class DecodedChunk:
    """K and V of every layer, [kv_heads, tokens, head_dim] in the cache's dtype, found equal to their checksums."""

    layers: Layers
    layer_checksums: bytes
    chain_digest: bytes


@dataclass(frozen=True)
class EncodeTask:
    """One chunk to encode: state before it, token ids int64 [T], true layers, identity.

    shared: whether the true layers stay as they are as long as the state lives; it then holds them, which saves a copy
    where somebody holds them anyway.
    """

    state: PredictorState
    token_ids: Tensor
    truth: Layers
    identity: ChunkIdentity
    shared: bool = False


@dataclass(frozen=True)
class DecodeTask:
    """One chunk to decode: state before it, token ids int64 [T], blob, the identity it must have."""

    state: PredictorState
    token_ids: Tensor
    blob: bytes
    identity: ChunkIdentity


def encode(
    predictor: Predictor, profile: Profile, state: PredictorState, token_ids: Tensor, truth: Layers, identity: ChunkIdentity,
    *, ideal: bool = False, shared: bool = False,
) -> EncodedChunk:  # fmt: skip
    """Encode one chunk and take its tokens into `state` (left as it was on an error).

    token_ids: int64 [T], T >= 1; truth: (K, V) of every layer, [kv_heads, T, head_dim] in the profile's cache format, any bit
    patterns; ideal: also compute the ideal code length, for reports; shared: see EncodeTask. Raises UserError, WrongTarget,
    WrongPredictor.
    """
    return encode_batch(predictor, profile, [EncodeTask(state, token_ids, truth, identity, shared)], ideal=ideal)[0]


def decode(
    predictor: Predictor,
    profile: Profile,
    state: PredictorState,
    token_ids: Tensor,
    blob: bytes,
    identity: ChunkIdentity,
) -> DecodedChunk:
    """Decode one chunk and take its tokens into `state` (left as it was on an error).

    Raises a subclass of BlobError when the blob is damaged or is not the one that `identity`, predictor and profile ask for;
    among them LayerMismatch, naming the layer, when what was decoded differs from what was stored. UserError for token ids
    that the model does not have, or too many of them. Nothing unchecked is returned.
    """
    return decode_batch(predictor, profile, [DecodeTask(state, token_ids, blob, identity)])[0]


def encode_batch(
    predictor: Predictor, profile: Profile, tasks: Sequence[EncodeTask], *, ideal: bool = False
) -> list[EncodedChunk]:
    """Encode chunks of several prompts together; each gives the bytes it gives alone."""
    check_pair(predictor, profile)
    fmt, c = profile.format, predictor.config
    for t in tasks:
        _check_truth(t, fmt, predictor, profile.target)
    sums = [checksums.layer_checksums(t.truth, fmt) for t in tasks]
    books = [_Book(profile.coder.writer(*profile.sizes(len(t.token_ids)))) for t in tasks]
    run = predictor.run([t.state for t in tasks], [t.token_ids for t in tasks])
    carries: list[object] = [None] * len(tasks)
    for layer in range(c.layers):
        guesses = run.guess(layer)
        for book in books:
            book.writer.layer()
        coded = [
            profile.loop_codec.encode(layer, task.truth[layer], guess, turn, ideal, book.writer, carry)
            for task, book, guess, turn, carry in zip(tasks, books, guesses, run.turns(), carries, strict=True)
        ]
        carries = [part.next.carry for part in coded]
        for book, part in zip(books, coded, strict=True):
            book.add(part)
        if layer < c.layers - 1:
            follow(run, layer, [part.next for part in coded], [_stored(t, layer, profile) for t in tasks])
    out = [_finish(predictor, profile, *parts) for parts in zip(tasks, books, sums, strict=True)]
    run.commit()
    return out


def decode_batch(predictor: Predictor, profile: Profile, tasks: Sequence[DecodeTask]) -> list[DecodedChunk]:
    """Decode chunks of several prompts together, layer by layer."""
    check_pair(predictor, profile)
    headers = [check_blob(predictor, profile, t) for t in tasks]
    readers = [
        profile.coder.reader(blobs.streams(memoryview(t.blob), h), *profile.sizes(h.tokens))
        for t, h in zip(tasks, headers, strict=True)
    ]
    out: list[Layers] = [[] for _ in tasks]
    run = predictor.run([t.state for t in tasks], [t.token_ids for t in tasks])
    carries: list[object] = [None] * len(tasks)
    for layer in range(predictor.config.layers):
        guesses = run.guess(layer)
        for reader in readers:
            reader.layer()
        parts = [
            profile.loop_codec.decode(layer, reader, guess, turn, carry)
            for reader, guess, turn, carry in zip(readers, guesses, run.turns(), carries, strict=True)
        ]
        carries = [part.next.carry for part in parts]
        for header, part, layers in zip(headers, parts, out, strict=True):
            layers.append(checked_layer(layer, part, header, profile.format))
        if layer < predictor.config.layers - 1:
            follow(run, layer, [part.next for part in parts])
    for reader in readers:
        reader.finish()
    run.commit()
    sums = [h.layer_checksums for h in headers]
    return [
        DecodedChunk(layers, s, checksums.chain(t.identity.parent_digest, s))
        for layers, s, t in zip(out, sums, tasks, strict=True)
    ]


# ---------------------------------------------------------------- one chunk
def checked_layer(
    layer: int, decoded: DecodedLayer, header: blobs.BlobHeader, fmt: NumberFormat
) -> tuple[Tensor, Tensor]:
    """The decoded tensors, if their checksums are those that the blob states."""
    row = header.layers[layer]
    wanted = (("K", row.key_checksum), ("V", row.value_checksum))
    for values, (name, want) in zip(decoded.values, wanted, strict=True):
        if checksums.tensor_checksum(values, fmt) != want:
            raise errors.LayerMismatch(
                f"Blob {header.prefix_key.hex()}: layer {layer} {name} decodes to other bits than were stored; the predictor "
                "computed other guesses here than when it was encoded, or the blob was forged."
            )
    return decoded.values


def _stored(task: EncodeTask, layer: int, profile: Profile) -> Stored | None:
    """The layer for the state to hold, if it may."""
    if not task.shared:
        return None
    scales, device = profile.scales, task.truth[layer][0].device
    return Stored(task.truth[layer], None if scales is None else scales.factors(layer).to(device))


class _Book:
    """What accumulates over the layers of one chunk."""

    def __init__(self, writer: Writer) -> None:
        self.writer = writer
        self.costs: list[tuple[Cost, Cost]] = []
        self.escapes = 0

    def add(self, coded: CodedLayer) -> None:
        if coded.ideal is not None:
            self.costs.append(coded.ideal)
        self.escapes += coded.escapes


def _finish(predictor: Predictor, profile: Profile, task: EncodeTask, book: _Book, sums: bytes) -> EncodedChunk:
    c, i = predictor.config, task.identity
    rows = tuple(
        blobs.LayerHeader(
            c.kv_heads,
            c.head_dim,
            c.head_dim,
            sums[32 * n : 32 * n + 16],
            sums[32 * n + 16 : 32 * n + 32],
        )
        for n in range(c.layers)
    )
    written = book.writer.finish()
    header = blobs.BlobHeader(
        i.target,
        predictor.fingerprint,
        profile.id,
        i.prefix_key,
        i.parent_digest,
        i.first_token,
        len(task.token_ids),
        profile.format,
        rows,
        () if profile.scales is None else profile.scales.listed(),
        written.bytes_k,
    )
    data = blobs.pack(header, written.streams)
    bytes_k, bytes_v = written.bytes_k, written.bytes_v
    scalars = sum(k.numel() for k, _ in task.truth)
    costs = LayerCosts.of(book.costs) if book.costs else None
    ideal_k, ideal_v = (0.0, 0.0) if costs is None else (float(costs.heads[:, side].sum()) for side in (0, 1))
    stats = ChunkStats(
        scalars, sum(v.numel() for _, v in task.truth), bytes_k, bytes_v, len(data) - bytes_k - bytes_v, ideal_k, ideal_v, book.escapes,
        costs,
    )  # fmt: skip
    return EncodedChunk(data, sums, checksums.chain(i.parent_digest, sums), stats)


# ---------------------------------------------------------------- checks
def check_pair(predictor: Predictor, profile: Profile) -> None:
    if predictor.fingerprint != profile.predictor:
        raise errors.WrongPredictor(
            f"The profile was calibrated with predictor {profile.predictor.hex()[:16]}, not with {predictor.fingerprint.hex()[:16]}."
        )
    f, c = profile.facts, predictor.config
    shapes = (f.layers, f.hidden, f.kv_heads, f.head_dim, f.rope_dim)
    if shapes != (c.layers, c.hidden, c.kv_heads, c.head_dim, c.rope_dim):
        raise errors.ProfileError(f"The profile is for other shapes, {shapes}, than the predictor that it names.")


def _check_truth(task: EncodeTask, fmt: NumberFormat, predictor: Predictor, target: bytes) -> None:
    c, tokens = predictor.config, len(task.token_ids)
    shape = (c.kv_heads, tokens, c.head_dim)
    if tokens < 1 or len(task.truth) != c.layers:
        raise errors.UserError(
            f"A chunk needs at least one token and {c.layers} layers; given were {tokens} and {len(task.truth)}."
        )
    if task.identity.target != target:
        raise errors.WrongTarget("The chunk is of another target than the one that the profile was calibrated for.")
    if task.identity.first_token != task.state.length:
        raise errors.UserError(
            f"The chunk begins at token {task.identity.first_token}, but the predictor has seen {task.state.length}."
        )
    for n, pair in enumerate(task.truth):
        for name, tensor in zip("KV", pair, strict=True):
            if tuple(tensor.shape) != shape or tensor.dtype != fmt.dtype:
                raise errors.UserError(
                    f"Layer {n} {name} has shape {tuple(tensor.shape)} and dtype {tensor.dtype}; expected are {shape} and {fmt.dtype}."
                )


def check_blob(predictor: Predictor, profile: Profile, task: DecodeTask) -> blobs.BlobHeader:
    """The blob's header, if it is meant for all that it would be decoded with."""
    header, want = blobs.read_header(task.blob), task.identity
    key = want.prefix_key.hex()
    for what, got, expected, error in (
        ("target", header.target, want.target, errors.WrongTarget),
        ("predictor", header.predictor, predictor.fingerprint, errors.WrongPredictor),
        ("profile", header.profile, profile.id, errors.WrongProfile),
        ("prefix key", header.prefix_key, want.prefix_key, errors.WrongKey),
        ("parent digest", header.parent_digest, want.parent_digest, errors.WrongParent),
    ):
        if got != expected:
            raise error(
                f"Blob {key}: its {what} is {got.hex()[:16]} where {expected.hex()[:16]} is needed; it must not be decoded here."
            )
    if header.scales != (() if profile.scales is None else profile.scales.listed()):
        raise errors.WrongProfile(
            f"Blob {key}: its cache has other scales than the profile's; it must not be decoded here."
        )
    c = predictor.config
    shape = (c.layers, len(task.token_ids), task.state.length, want.first_token, profile.format)
    if (len(header.layers), header.tokens, header.first_token, header.first_token, header.format) != shape or any(
        (r.kv_heads, r.key_dim, r.value_dim) != (c.kv_heads, c.head_dim, c.head_dim) for r in header.layers
    ):
        raise errors.MalformedHeader(
            f"Blob {key}: it holds {len(header.layers)} layers of {header.tokens} tokens from token {header.first_token} on, "
            f"where {c.layers} layers of {len(task.token_ids)} tokens from {task.state.length} on are asked for."
        )
    return header


def guess_digest(predictor: Predictor, token_ids: Tensor, chunk_tokens: int) -> bytes:
    """xxh3-128 over the guesses of all layers for a prompt, taken in chunks: what must be equal on every machine."""
    digests = [xxhash.xxh3_128() for _ in range(predictor.config.layers * 2)]
    state = predictor.new_state()
    for begin in range(0, len(token_ids), chunk_tokens):
        run = predictor.run([state], [token_ids[begin : begin + chunk_tokens]])
        for layer in range(predictor.config.layers):
            kv = run.guess(layer)
            for tensor in range(2):  # token-major, so that the digest does not depend on the chunks
                rows = kv[0][tensor].transpose(0, 1).contiguous().cpu().view(torch.int32).numpy()
                digests[2 * layer + tensor].update(np.ascontiguousarray(rows, dtype="<i4").tobytes())
            if layer < predictor.config.layers - 1:
                run.advance(layer, kv)
        run.commit()
    return checksums.digest(b"".join(d.digest() for d in digests))
