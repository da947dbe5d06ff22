"""Which chunks a cache and a predictor's state hold now: what encoding and verification both keep track of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

import codec
from codec.errors import BlobError
from codec.keys import ROOT_DIGEST
from pipeline.paths import blob_path
from pipeline.store import Store

Tokens = np.ndarray[Any, np.dtype[np.int64]]


class Place(Protocol):
    """Where the chunks of one generation lie, and how long they are: a job, or what stands for one."""

    @property
    def store(self) -> Store:
        """Their store."""

    @property
    def target(self) -> bytes:
        """Fingerprint of the target."""

    @property
    def profile(self) -> bytes:
        """Id of the profile."""

    @property
    def chunk_tokens(self) -> int:
        """Tokens of a full chunk."""


@dataclass(frozen=True)
class Link:
    """One chunk of a chain."""

    key: bytes
    end: int  # tokens up to and with this chunk
    digest: bytes  # of the chain's raw bits up to and with this chunk


@dataclass(frozen=True)
class Next:
    """The chunk that follows a chain: its token ids int64 [T], its identity, and the path of its blob."""

    ids: torch.Tensor
    identity: codec.ChunkIdentity
    path: str


class Chain:
    """The chunks taken in so far, from a prompt's first on."""

    def __init__(self) -> None:
        self._links: list[Link] = []

    def __len__(self) -> int:
        return len(self._links)

    @property
    def tokens(self) -> int:
        """How many tokens it holds."""
        return self._links[-1].end if self._links else 0

    @property
    def digest(self) -> bytes:
        """Digest of its raw bits; the parent digest of what comes next."""
        return self._links[-1].digest if self._links else ROOT_DIGEST

    def rewind(self, keys: Sequence[bytes]) -> None:
        """Keep only what a prompt with these keys has in common with it."""
        common = 0
        while common < min(len(keys), len(self._links)) and self._links[common].key == keys[common]:
            common += 1
        del self._links[common:]

    def next(self, job: Place, tokens: Tokens, key: bytes) -> Next:
        """The chunk of this key; `tokens` are those of the whole prompt, int64."""
        ids = torch.from_numpy(tokens[self.tokens : self.tokens + job.chunk_tokens].copy())
        identity = codec.ChunkIdentity(job.target, key, self.digest, self.tokens)
        return Next(ids, identity, blob_path(job.target, job.profile, key))

    def append(self, chunk: Next, digest: bytes) -> None:
        """Take in a chunk, whose bits gave the chain this digest."""
        self._links.append(Link(chunk.identity.prefix_key, self.tokens + len(chunk.ids), digest))


def decode_blob(
    job: Place,
    predictor: codec.Predictor,
    profile: codec.Profile,
    state: codec.PredictorState,
    chunk: Next,
    blob: bytes,
) -> codec.DecodedChunk:
    """codec.decode, with the blob's path in front of what it raises."""
    try:
        return codec.decode(predictor, profile, state, chunk.ids, blob, chunk.identity)
    except BlobError as error:
        raise type(error)(f"{job.store.uri}/{chunk.path}: {error}") from error
