"""A stored prefix whose blobs were read and checked: everything that can be known before the first layer is decoded.

All checksums of headers and blobs, what each blob says it is, and the chain of parents' digests are checked here, for all chunks.
That fixes the prefix's length: it ends before the first chunk that is corrupt, missing, or not the one that is meant.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial

import torch

import codec
from codec import checksums
from codec.blob import streams
from codec.errors import BlobError, DataError
from codec.keys import ROOT_DIGEST
from pipeline.paths import blob_path
from pipeline.restoration.catalogue import Chunk, Generation, Ids, Match
from pipeline.store import ObjectMissing, Store
from pipeline.work import load_predictor, load_profile

Pair = tuple[torch.Tensor, torch.Tensor]
READ_AT_ONCE = 8


@dataclass(frozen=True)
class Decoder:
    """A predictor and a profile in this process, found to compute the bits that they are to compute."""

    predictor: codec.Predictor
    profile: codec.Profile

    @staticmethod
    def load(store: Store, generation: Generation, device: str) -> Decoder:
        """Read both from the store and prove them. Raises DataError, StorageError."""
        profile = load_profile(
            store, generation.profile, target=generation.target, cache_format=generation.cache_format
        )
        predictor = load_predictor(store, profile.predictor, device)
        codec.check_known_answer(predictor, profile)
        return Decoder(predictor, profile)


@dataclass(frozen=True)
class Prefix:
    """Checked chunks of one prompt. ids: int64 [tokens]; end: why it is no longer, "" where it covers all that was asked for.

    damaged: whether it is short of what the index says is stored.
    """

    store: str  # its URI, for messages
    generation: Generation
    ids: torch.Tensor
    chunks: tuple[Chunk, ...]
    blobs: tuple[bytes, ...]
    end: str = ""
    damaged: bool = False

    @property
    def tokens(self) -> int:
        """Its length."""
        return len(self.ids)

    @property
    def digest(self) -> bytes:
        """Digest of the raw bits of K and V of all layers."""
        return self.chunks[-1].digest if self.chunks else ROOT_DIGEST

    def identities(self) -> list[codec.ChunkIdentity]:
        """What each blob must be."""
        parents = [ROOT_DIGEST, *(chunk.digest for chunk in self.chunks)]
        return [
            codec.ChunkIdentity(self.generation.target, chunk.key, parent, chunk.first_token)
            for chunk, parent in zip(self.chunks, parents, strict=False)
        ]

    def task(self, state: codec.PredictorState, first: int = 0, last: int | None = None) -> codec.PrefixTask:
        """Chunks first … last - 1 for codec.decode_prefixes; `state` holds those before."""
        part = slice(first, len(self.chunks) if last is None else last)
        chunks = self.chunks[part]
        begin = chunks[0].first_token if chunks else self.tokens
        ids = self.ids[begin : begin + sum(chunk.tokens for chunk in chunks)]
        return codec.PrefixTask(state, ids, self.blobs[part], self.identities()[part])

    def place(self, number: int) -> str:
        """Where a chunk's blob lies."""
        return f"{self.store}/{blob_path(self.generation.target, self.generation.profile, self.chunks[number].key)}"

    def first(self, chunks: int) -> Prefix:
        """The prefix of the first chunks, because the next one is not right."""
        kept = self.chunks[:chunks]
        tokens = sum(chunk.tokens for chunk in kept)
        return replace(self, ids=self.ids[:tokens], chunks=kept, blobs=self.blobs[:chunks], damaged=True)


def read_prefix(store: Store, match: Match, decoder: Decoder, ids: Ids) -> Prefix:
    """Read and check the blobs of a match, as many as are intact and follow from one another.

    ids: the whole prompt's, int64.

    Raises:
        StorageError: the store cannot be read (a blob that is not there only ends the prefix).
    """
    blobs: list[bytes] = []
    end = "" if match.tokens == len(ids) else unstored(match)
    for number, blob in enumerate(_read(store, match)):
        try:
            blobs.append(checked_blob(store, match, decoder, number, blob))
        except DataError as error:
            end = str(error)
            break
    whole = Prefix(
        store.uri, match.generation, torch.from_numpy(ids[: match.tokens].copy()), match.chunks, tuple(blobs), end
    )
    return whole if len(blobs) == len(match.chunks) else whole.first(len(blobs))


def unstored(match: Match) -> str:
    """Why a prefix is shorter than what was asked for, where all of it is intact."""
    return f"no more of the prompt is stored than its first {match.tokens} tokens"


def checked_blob(store: Store, match: Match, decoder: Decoder, number: int, blob: bytes | None) -> bytes:
    """The blob of a match's chunk `number`, found to be what it should be. Raises DataError, which names its place."""
    chunk, place = match.chunks[number], f"{store.uri}/{_path(match, match.chunks[number])}"
    if blob is None:
        raise DataError(f"{place} is in the index and not in the store")
    try:
        check_chunk(match.generation, decoder, chunk, match.chunks[number - 1].digest if number else ROOT_DIGEST, blob)
    except DataError as error:
        raise DataError(f"{place}: {error}") from error
    return blob


def check_chunk(generation: Generation, decoder: Decoder, chunk: Chunk, parent: bytes, blob: bytes) -> None:
    """Check a blob without decoding it: intact, the one that the index means, and a child of this parent. Raises BlobError."""
    header = codec.read_header(blob)
    streams(blob, header)
    profile, shape = decoder.profile, decoder.predictor.config
    scales = () if profile.scales is None else profile.scales.listed()
    for what, got, wanted in (
        ("target", header.target, generation.target),
        ("predictor", header.predictor, decoder.predictor.fingerprint),
        ("profile", header.profile, generation.profile),
        ("prefix key", header.prefix_key, chunk.key),
        ("parent digest", header.parent_digest, parent),
        ("first token", header.first_token, chunk.first_token),
        ("number of tokens", header.tokens, chunk.tokens),
        ("number format", header.format, profile.format),
        ("scales", header.scales, scales),
        ("number of layers", len(header.layers), shape.layers),
        ("chain digest", checksums.chain(parent, header.layer_checksums), chunk.digest),
    ):
        if got != wanted:
            raise BlobError(f"its {what} is another one than the index and the chunks before it ask for")
    if {(row.kv_heads, row.key_dim, row.value_dim) for row in header.layers} != {
        (shape.kv_heads, shape.head_dim, shape.head_dim)
    }:
        raise BlobError("its layers have another shape than the predictor's")


def read_blob(store: Store, match: Match, chunk: Chunk) -> bytes | None:
    """A chunk's blob, not checked; None where there is none. No more is read than the index says it has. Raises StorageError."""
    try:
        return store.get(_path(match, chunk), start=0, end=chunk.stored_bytes + 1)
    except ObjectMissing:
        return None


def _read(store: Store, match: Match) -> Iterator[bytes | None]:
    """The blobs in order, a few ahead."""
    with ThreadPoolExecutor(READ_AT_ONCE) as pool:
        waiting: list[Chunk] = list(match.chunks)
        while waiting:
            batch, waiting = waiting[:READ_AT_ONCE], waiting[READ_AT_ONCE:]
            yield from pool.map(partial(read_blob, store, match), batch)


def _path(match: Match, chunk: Chunk) -> str:
    return blob_path(match.generation.target, match.generation.profile, chunk.key)
