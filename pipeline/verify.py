"""Verification: decode from stored bytes alone and compare with the index, without Ray and without the target."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import codec
from codec.errors import DataError, StorageError
from pipeline.chain import Chain, Place, Tokens, decode_blob
from pipeline.paths import blob_path

CHECKSUM_BYTES = 16
Differs = Callable[
    [codec.DecodedChunk, bytes | None], str | None
]  # a chunk and what its row says: what is wrong with it


@dataclass
class Findings:
    """Which chunks came back as they should, and what is wrong with the others."""

    verified: list[bytes] = field(default_factory=list)
    failed: dict[bytes, str] = field(default_factory=dict)
    behind: set[bytes] = field(
        default_factory=set
    )  # those of `failed` that were not decoded, as one before them failed


class ChainVerifier:
    """Decodes prompts one after another, keeping the predictor's state of the last one."""

    def __init__(
        self, job: Place, predictor: codec.Predictor, profile: codec.Profile, differs: Differs | None = None
    ) -> None:
        """`differs`: what is wrong with a chunk, given what `prompt` was told of its row; by default layer checksums."""
        self._job = job
        self._differs = differs or differing_layer
        self._predictor = predictor
        self._profile = profile
        self._state = predictor.new_state()
        self._chain = Chain()

    def prompt(
        self, tokens: Tokens, keys: Sequence[bytes], wanted: frozenset[bytes], rows: Mapping[bytes, bytes]
    ) -> Findings:
        """Decode this prompt's chunks up to the last wanted one and compare the wanted ones.

        Args:
            tokens: the prompt's token ids, int64.
            keys: its chunks' keys in order.
            wanted: chunks to verify.
            rows: key -> layer checksums, from committed index rows, or what else `differs` compares with.
        """
        findings = Findings()
        last = max((index for index, key in enumerate(keys) if key in wanted), default=-1)
        self._chain.rewind(keys)
        self._state.truncate(self._chain.tokens)
        for index in range(len(self._chain), last + 1):
            try:
                self._chunk(index, tokens, keys, wanted, rows, findings)
            except (DataError, StorageError) as error:
                self._state.truncate(self._chain.tokens)
                self._give_up(keys[index : last + 1], wanted, str(error), findings)
                break
        return findings

    def _chunk(
        self,
        index: int,
        tokens: Tokens,
        keys: Sequence[bytes],
        wanted: frozenset[bytes],
        rows: Mapping[bytes, bytes],
        findings: Findings,
    ) -> None:
        key, store = keys[index], self._job.store
        chunk = self._chain.next(self._job, tokens, key)
        decoded = decode_blob(self._job, self._predictor, self._profile, self._state, chunk, store.get(chunk.path))
        self._chain.append(chunk, decoded.chain_digest)
        if key not in wanted:
            return
        wrong = self._differs(decoded, rows.get(key))
        if wrong is None:
            findings.verified.append(key)
        else:
            findings.failed[key] = f"{store.uri}/{chunk.path}: {wrong}"

    def _give_up(self, keys: Sequence[bytes], wanted: frozenset[bytes], message: str, findings: Findings) -> None:
        """The first chunk cannot be decoded, so neither can those that follow from it."""
        for number, key in enumerate(keys):
            if key in wanted:
                path = blob_path(self._job.target, self._job.profile, key)
                place = f"{self._job.store.uri}/{path}"
                findings.failed[key] = message if number == 0 else f"{place}: not decoded, a chunk before it failed"
                if number:
                    findings.behind.add(key)


def differing_layer(found: codec.DecodedChunk, expected: bytes | None) -> str | None:
    """As `differing_tensor`, of a decoded chunk."""
    return differing_tensor(found.layer_checksums, expected)


def differing_chain(found: codec.DecodedChunk, expected: bytes | None) -> str | None:
    """What is wrong with a chunk whose index row has this digest of the chain's bits; None if nothing is.

    The digest covers the checksums of all layers, and takes a hundredth of their room.
    """
    if expected is None:
        return "its committed index row is missing"
    if found.chain_digest != expected:
        return "decoded bits have another digest than the index row"
    return None


def differing_tensor(found: bytes, expected: bytes | None) -> str | None:
    """What the first difference between two rows of layer checksums is, or None if they are equal."""
    if expected is None:
        return "its committed index row is missing"
    if len(found) != len(expected):
        return f"{len(found) // CHECKSUM_BYTES} tensors decoded, {len(expected) // CHECKSUM_BYTES} in its index row"
    for number in range(0, len(found), CHECKSUM_BYTES):
        if found[number : number + CHECKSUM_BYTES] != expected[number : number + CHECKSUM_BYTES]:
            layer, side = divmod(number // CHECKSUM_BYTES, 2)
            return f"layer {layer}, {'V' if side else 'K'}: decoded bits have another checksum than the index row"
    return None
