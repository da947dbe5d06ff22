"""The chain rule, without Ray: whoever finds a chunk stored goes on from its bits; verification finds what is wrong."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import codec
from codec.errors import CorruptBlob, DataError, StorageError
from codec.keys import chunk_keys, root_key
from pipeline.encode import ChainEncoder, Stored
from pipeline.options import Verify
from pipeline.paths import blob_path
from pipeline.store import Store
from pipeline.target import Target, load_target, resolve_model
from pipeline.truth import Prefilled
from pipeline.verify import ChainVerifier, differing_tensor
from pipeline.work import ADOPTED, KEPT, WRITTEN, Job

CHUNK = 16
NONE: dict[bytes, bytes] = {}
Parts = tuple[Target, codec.Predictor, codec.Profile]


@pytest.fixture(scope="module")
def parts(tiny_model: Path) -> Parts:
    """A tiny target with its predictor and a profile calibrated on random tokens."""
    target = load_target(resolve_model(tiny_model), "bf16")
    predictor = codec.build_predictor(target.config, target.weights(), kind="fp8")
    ids = torch.from_numpy(tokens_of(99, 64))
    moments = codec.measure(predictor, predictor.new_state(), ids, target.prefill(target.new_cache(), ids))
    fingerprint = target.source.fingerprint("bf16")
    return target, predictor, codec.freeze(predictor, fingerprint, "bf16", moments, prefill_tokens=CHUNK)


@pytest.fixture
def job(parts: Parts, tmp_path: Path) -> Job:
    target, predictor, profile = parts
    return Job(
        Store.open(str(tmp_path / "store")),
        target.source,
        profile.target,
        "bf16",
        CHUNK,
        "fp8",
        "open",
        "",
        predictor.fingerprint,
        profile.id,
        Verify(1.0),
    )


def tokens_of(seed: int, count: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    return np.random.default_rng(seed).integers(0, 384, count, dtype=np.int64)


def keys_of(job: Job, tokens: np.ndarray[Any, np.dtype[np.int64]]) -> list[bytes]:
    root = root_key(target=job.target, cache_format=job.cache_format, chunk_tokens=CHUNK)
    return chunk_keys(root, tokens, CHUNK)


def path_of(job: Job, key: bytes) -> str:
    return blob_path(job.target, job.profile, key)


def encoder_of(job: Job, parts: Parts) -> ChainEncoder:
    return ChainEncoder(job, Prefilled(parts[0]), *parts[1:])


def encode_all(job: Job, parts: Parts, tokens: np.ndarray[Any, np.dtype[np.int64]]) -> list[Stored]:
    keys = keys_of(job, tokens)
    return encoder_of(job, parts).prompt(tokens, keys, frozenset(keys), NONE)


def rows_of(stored: list[Stored]) -> dict[bytes, bytes]:
    return {chunk.key: chunk.layer_checksums for chunk in stored}


class Shaken(Target):
    """The same model on other hardware: last bits of K differ."""

    def prefill(self, cache: Any, token_ids: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        first = self.length(cache)
        layers = [
            ((key.view(torch.int16) ^ 1).view(key.dtype), value) for key, value in super().prefill(cache, token_ids)
        ]
        self.replace(cache, first, layers)
        return layers


@pytest.fixture(scope="module")
def shaken(parts: Parts) -> Parts:
    other = object.__new__(Shaken)
    other.__dict__.update(parts[0].__dict__)
    return other, parts[1], parts[2]


# ---------------------------------------------------------------- encoding
def test_what_is_stored_decodes_to_the_targets_own_cache(job: Job, parts: Parts) -> None:
    target, predictor, profile = parts
    tokens = tokens_of(1, 3 * CHUNK + 5)
    stored = encode_all(job, parts, tokens)
    assert [(c.first_token, c.tokens, c.outcome) for c in stored] == [
        (0, 16, WRITTEN), (16, 16, WRITTEN), (32, 16, WRITTEN), (48, 5, WRITTEN),
    ]  # fmt: skip
    cache, state = target.new_cache(), predictor.new_state()
    for chunk in stored:
        ids = torch.from_numpy(tokens[chunk.first_token : chunk.first_token + chunk.tokens])
        truth = target.prefill(cache, ids)
        identity = codec.ChunkIdentity(job.target, chunk.key, chunk.parent_digest, chunk.first_token)
        decoded = codec.decode(predictor, profile, state, ids, job.store.get(path_of(job, chunk.key)), identity)
        for pair, true_pair in zip(decoded.layers, truth, strict=True):
            for found, true in zip(pair, true_pair, strict=True):
                assert torch.equal(found.view(torch.int16), true.view(torch.int16))


def test_a_shared_prefix_is_computed_once(job: Job, parts: Parts) -> None:
    encoder = encoder_of(job, parts)
    prefix = tokens_of(2, 2 * CHUNK)
    first, second = np.concatenate([prefix, tokens_of(3, 9)]), np.concatenate([prefix, tokens_of(4, CHUNK)])
    todo = frozenset(keys_of(job, first) + keys_of(job, second))
    assert len(encoder.prompt(first, keys_of(job, first), todo, NONE)) == 3
    assert len(encoder.prompt(second, keys_of(job, second), todo, NONE)) == 1
    assert encoder.truth.tokens == 2 * CHUNK + 9 + CHUNK


def test_nothing_is_computed_where_nothing_is_to_do(job: Job, parts: Parts) -> None:
    tokens = tokens_of(5, 2 * CHUNK)
    encode_all(job, parts, tokens)
    encoder = encoder_of(job, parts)
    assert encoder.prompt(tokens, keys_of(job, tokens), frozenset(), NONE) == []
    assert encoder.truth.tokens == 0


def test_a_stored_prefix_is_continued_without_running_the_target_over_it(job: Job, parts: Parts) -> None:
    prefix = tokens_of(6, 2 * CHUNK)
    whole = np.concatenate([prefix, tokens_of(7, CHUNK)])
    straight = encode_all(job, parts, whole)
    job.store.delete(path_of(job, straight[2].key))
    encoder = encoder_of(job, parts)
    again = encoder.prompt(whole, keys_of(job, whole), frozenset([straight[2].key]), NONE)
    assert [c.outcome for c in again] == [KEPT, KEPT, WRITTEN]
    assert encoder.truth.tokens == CHUNK
    assert again[2].chain_digest == straight[2].chain_digest


def test_blobs_without_rows_are_adopted_with_checksums_of_their_own_bits(job: Job, parts: Parts, shaken: Parts) -> None:
    tokens = tokens_of(8, 2 * CHUNK + 3)
    theirs = encode_all(job, shaken, tokens)
    ours = encode_all(job, parts, tokens)
    assert [c.outcome for c in ours] == [ADOPTED] * 3
    assert rows_of(ours) == rows_of(theirs)
    assert [c.stored_bytes for c in ours] == [c.stored_bytes for c in theirs]
    assert [(c.stats.bytes_k, c.stats.scalars_v) for c in ours] == [
        (c.stats.bytes_k, c.stats.scalars_v) for c in theirs
    ]


class Racing(Store):
    """A store in which another job is faster by a hair at one path."""

    path = ""
    winner = b""

    def put_new(self, path: str, data: bytes) -> bool:
        if path == self.path:
            super().put_new(path, self.winner)
        return super().put_new(path, data)


def test_the_loser_of_a_race_goes_on_from_the_winners_bits(
    job: Job, parts: Parts, shaken: Parts, tmp_path: Path, replace_job: Callable[..., Job]
) -> None:
    tokens = tokens_of(9, 3 * CHUNK)
    keys = keys_of(job, tokens)
    elsewhere = replace_job(job, store=Store.open(str(tmp_path / "elsewhere")))
    theirs = encode_all(elsewhere, shaken, tokens[: 2 * CHUNK])
    racing = Racing(job.store.uri)
    racing.path, racing.winner = path_of(job, keys[0]), elsewhere.store.get(path_of(job, keys[0]))
    ours = encoder_of(replace_job(job, store=racing), parts).prompt(tokens, keys, frozenset(keys), NONE)
    assert [c.outcome for c in ours] == [ADOPTED, WRITTEN, WRITTEN]
    assert ours[0].layer_checksums == theirs[0].layer_checksums
    assert ours[1].parent_digest == theirs[0].chain_digest
    alone = encode_all(replace_job(job, store=Store.open(str(tmp_path / "alone"))), parts, tokens)
    assert ours[1].layer_checksums != alone[1].layer_checksums  # K and V of later layers follow from the winner's K
    findings = verifier(job, parts).prompt(tokens, keys, frozenset(keys), rows_of(ours))
    assert findings.verified == keys and findings.failed == {}


@pytest.fixture
def replace_job() -> Callable[..., Job]:
    from dataclasses import replace

    return replace


def test_a_lost_blob_is_made_again_only_with_the_same_bits(job: Job, parts: Parts) -> None:
    tokens = tokens_of(10, 2 * CHUNK)
    stored = encode_all(job, parts, tokens)
    path = path_of(job, stored[0].key)
    before = job.store.get(path)
    job.store.delete(path)
    keys, todo = keys_of(job, tokens), frozenset([stored[0].key])
    with pytest.raises(DataError, match="other bits") as caught:
        encoder_of(job, parts).prompt(tokens, keys, todo, {stored[0].key: bytes(16)})
    assert path in str(caught.value) and not job.store.exists(path)
    encoder_of(job, parts).prompt(tokens, keys, todo, {stored[0].key: stored[0].chain_digest})
    assert job.store.get(path) == before


def test_after_an_error_the_encoder_starts_afresh(job: Job, parts: Parts, replace_job: Callable[..., Job]) -> None:
    class Broken(Store):
        broken = False

        def put_new(self, path: str, data: bytes) -> bool:
            if self.broken:
                raise StorageError("the disk is full")
            return super().put_new(path, data)

    store = Broken(job.store.uri)
    encoder = encoder_of(replace_job(job, store=store), parts)
    tokens = tokens_of(11, 3 * CHUNK)
    keys = keys_of(job, tokens)
    encoder.prompt(tokens, keys, frozenset(keys[:1]), NONE)
    store.broken = True
    with pytest.raises(StorageError, match="disk is full"):
        encoder.prompt(tokens, keys, frozenset(keys), NONE)
    store.broken = False
    assert [c.outcome for c in encoder.prompt(tokens, keys, frozenset(keys), NONE)] == [ADOPTED, WRITTEN, WRITTEN]


# ---------------------------------------------------------------- verifying
def verifier(job: Job, parts: Parts) -> ChainVerifier:
    return ChainVerifier(job, parts[1], parts[2])


def overwrite(job: Job, key: bytes, data: bytes) -> None:
    job.store.delete(path_of(job, key))
    job.store.put_new(path_of(job, key), data)


def test_verification_takes_only_what_is_wanted_and_keeps_shared_prefixes(job: Job, parts: Parts) -> None:
    prefix = tokens_of(12, CHUNK)
    first, second = np.concatenate([prefix, tokens_of(13, 4)]), np.concatenate([prefix, tokens_of(14, 4)])
    rows = rows_of(encode_all(job, parts, first)) | rows_of(encode_all(job, parts, second))
    check = verifier(job, parts)
    a, b = keys_of(job, first), keys_of(job, second)
    assert check.prompt(first, a, frozenset(a), rows).verified == a
    assert check.prompt(second, b, frozenset(b) - {a[0]}, rows).verified == [b[1]]
    assert verifier(job, parts).prompt(first, a, frozenset([a[0]]), rows).verified == [a[0]]


def test_a_flipped_bit_fails_the_chunk_and_those_after_it(job: Job, parts: Parts) -> None:
    tokens = tokens_of(15, 3 * CHUNK)
    rows, keys = rows_of(encode_all(job, parts, tokens)), keys_of(job, tokens)
    blob = bytearray(job.store.get(path_of(job, keys[1])))
    blob[-40] ^= 4
    overwrite(job, keys[1], bytes(blob))
    findings = verifier(job, parts).prompt(tokens, keys, frozenset(keys), rows)
    assert findings.verified == [keys[0]] and list(findings.failed) == keys[1:]
    assert path_of(job, keys[1]) in findings.failed[keys[1]] and "checksum" in findings.failed[keys[1]]
    assert path_of(job, keys[2]) in findings.failed[keys[2]] and "before it" in findings.failed[keys[2]]
    with pytest.raises(CorruptBlob, match=path_of(job, keys[1])):
        encoder_of(job, parts).prompt(tokens, keys, frozenset(keys), NONE)


def test_a_missing_blob_and_swapped_blobs_fail(job: Job, parts: Parts) -> None:
    tokens = tokens_of(16, 2 * CHUNK)
    rows, keys = rows_of(encode_all(job, parts, tokens)), keys_of(job, tokens)
    first, second = (job.store.get(path_of(job, key)) for key in keys)
    overwrite(job, keys[1], first)
    assert "prefix key" in verifier(job, parts).prompt(tokens, keys, frozenset(keys), rows).failed[keys[1]]
    job.store.delete(path_of(job, keys[1]))
    assert "not in the store" in verifier(job, parts).prompt(tokens, keys, frozenset(keys), rows).failed[keys[1]]
    overwrite(job, keys[1], second)
    assert verifier(job, parts).prompt(tokens, keys, frozenset(keys), rows).failed == {}


def test_a_row_that_says_otherwise_names_layer_and_tensor(job: Job, parts: Parts) -> None:
    tokens = tokens_of(17, CHUNK)
    rows, keys = rows_of(encode_all(job, parts, tokens)), keys_of(job, tokens)
    wrong = bytearray(rows[keys[0]])
    wrong[3 * 16] ^= 1  # layer 1, V
    findings = verifier(job, parts).prompt(tokens, keys, frozenset(keys), {keys[0]: bytes(wrong)})
    assert "layer 1, V" in findings.failed[keys[0]] and path_of(job, keys[0]) in findings.failed[keys[0]]
    assert "row is missing" in verifier(job, parts).prompt(tokens, keys, frozenset(keys), {}).failed[keys[0]]


def test_rows_of_checksums_are_compared_tensor_by_tensor() -> None:
    assert differing_tensor(bytes(64), bytes(64)) is None
    assert "layer 0, K" in str(differing_tensor(bytes(64), b"\1" + bytes(63)))
    assert "4 tensors decoded, 2" in str(differing_tensor(bytes(64), bytes(32)))
