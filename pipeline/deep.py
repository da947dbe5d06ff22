"""Decoding a store from stored bytes alone, chain by chain: predictors, profiles, prompts and blobs, without the target."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import groupby

import codec
from codec.errors import DataError, StorageError
from pipeline.audit import CORRUPT, MISMATCHED, QUARANTINE, Audit
from pipeline.catalogue import Generation, StoredPrompt, stored_prompts
from pipeline.paths import blob_path, profile_path
from pipeline.prompts import PromptReader
from pipeline.store import Store
from pipeline.verify import ChainVerifier
from pipeline.work import load_predictor, load_profile


@dataclass(frozen=True)
class Space:
    """Where the chunks of one generation lie, and how long they are."""

    store: Store
    target: bytes
    profile: bytes
    chunk_tokens: int


def decode_store(found: Audit, device: str = "cpu", tell: Callable[[str], None] = lambda text: None) -> None:
    """Decode the selected chunks of an audit that kept checksums, and add what is wrong to its faults.

    What has a fault already is not decoded, nor what follows from it.

    Raises:
        DataError: this machine computes other bits than the one that made a profile, so it can say nothing.
    """
    faulty = {fault.path for fault in found.faults}
    for gen in found.generations:
        wanted = {
            key for key, rows in gen.rows.items()
            if found.selects(key) and key in gen.blobs and gen.blobs[key].path not in faulty and len(rows) == 1
        }  # fmt: skip
        if wanted and gen.profile not in found.unusable:
            _decode(found, gen, wanted, device, tell)


def _decode(found: Audit, gen: Generation, wanted: set[bytes], device: str, tell: Callable[[str], None]) -> None:
    formats = {row.cache_format for rows in gen.rows.values() for row in rows}
    try:
        profile = load_profile(found.store, gen.profile, target=gen.target, cache_format=formats.pop())
        predictor = load_predictor(found.store, profile.predictor, device)
    except (DataError, StorageError) as error:
        found.add(MISMATCHED, profile_path(gen.profile), error)
        found.unusable.add(gen.profile)
        return
    codec.check_known_answer(predictor, profile)
    reader, total = PromptReader(found.store), len(wanted)
    prompts = sorted(stored_prompts(found.store, gen, broken=lambda *_: None), key=lambda p: (p.chunk_tokens, p.keys))
    for chunk_tokens, some in groupby(prompts, key=lambda prompt: prompt.chunk_tokens):
        space = Space(found.store, gen.target, gen.profile, chunk_tokens)
        verifier = ChainVerifier(space, predictor, profile)
        for prompt in some:
            mine = wanted.intersection(prompt.keys)
            if not mine:
                continue
            wanted -= mine
            _prompt(found, gen, verifier, reader, prompt, mine)
            tell(f"decoded {found.decoded:,} of {total:,} chunks")


def _prompt(
    found: Audit, gen: Generation, verifier: ChainVerifier, reader: PromptReader, prompt: StoredPrompt, mine: set[bytes]
) -> None:
    """One prompt's chunks; only the first that fails is a fault of its own."""
    rows = {key: gen.rows[key][0].layer_checksums for key in mine}
    tokens = reader.tokens(prompt.part, prompt.row, prompt.n_tokens)
    findings = verifier.prompt(tokens, prompt.keys, frozenset(mine), rows)
    found.decoded += len(findings.verified)
    known = {fault.path for fault in found.faults}
    for key, message in findings.failed.items():
        path = blob_path(gen.target, gen.profile, key)
        if key in findings.behind:
            found.undecoded += 1
        elif path not in known:
            found.add(MISMATCHED if "index row" in message else CORRUPT, path, message, QUARANTINE, gen)
