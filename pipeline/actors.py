"""The two kinds of Ray Data actors: one runs the target and encodes, the other decodes and compares.

Models are loaded at an actor's first call and not when it is made: what goes wrong in a call reaches the driver as the
error it is, what goes wrong in a constructor only as text.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, replace
from datetime import UTC, datetime
from typing import Any

import torch

import codec
from codec.errors import KVCodecError
from codec.formats import number_format
from pipeline import index
from pipeline.calibration import load_checked_target
from pipeline.committed import read_checksums
from pipeline.encode import ChainEncoder, Stored
from pipeline.health import Costs
from pipeline.metrics import Metrics
from pipeline.progress import Counts, Reporter
from pipeline.prompts import PromptReader
from pipeline.quota import PART_BYTES, ROW_BYTES, Quota
from pipeline.truth import Prefilled, Reread, Truth
from pipeline.unverified import mark, unmark
from pipeline.verify import ChainVerifier
from pipeline.work import KEPT, ChunkFigures, Device, Group, GroupResult, Job, PromptRef, load_predictor, load_profile
from pipeline.worker_process import settle


class EncodeActor:
    """Batches of groups in, one result a group out; blobs and index parts go to the store."""

    def __init__(self, job: Job, device: Device, reporter: Reporter, quota: Quota | None = None) -> None:
        self._metrics = Metrics(job)
        self._job = replace(job, store=self._metrics.store(job.store))
        self._device = device
        self._reporter = reporter
        self._quota = quota or Quota()
        self._profile: codec.Profile | None = None
        self._done: dict[bytes, Stored] = {}  # chunks of the group at work
        self._reader = PromptReader(job.store)
        self._scalar_bytes = number_format(job.cache_format).item_bytes
        self._encoder: ChainEncoder | None = None

    def __call__(self, batch: dict[str, Any]) -> Iterator[dict[str, list[str]]]:
        for text in batch["group"]:
            yield {"result": [self._group(Group.from_json(str(text))).to_json()]}

    def _loaded(self) -> ChainEncoder:
        if self._encoder is None:
            settle(self._device.threads)
            predictor, profile = _load(self._job, self._device)
            self._profile = profile
            self._encoder = ChainEncoder(self._job, self._truth(), predictor, profile, self._report, self._charge)
        return self._encoder

    def _truth(self) -> Truth:
        if self._job.decoded is None:
            return Prefilled(load_checked_target(self._job, self._device))
        old = replace(self._job, predictor=self._job.decoded.predictor, profile=self._job.decoded.profile)
        return Reread(old, *_load(old, self._device))

    def _group(self, group: Group) -> GroupResult:
        encoder = self._loaded()
        start, tokens, seconds = time.perf_counter(), encoder.truth.tokens, encoder.truth.seconds
        self._done = {}
        job = self._job
        mark(job.store, job.target, job.profile, list(filter(job.verify.selects, group.todo)), self._quota.charge)
        try:
            for prompt in group.prompts:
                ids = self._reader.tokens(prompt.part, prompt.row, prompt.n_tokens)
                encoder.prompt(ids, prompt.keys, group.todo, {**group.lost, **group.gone})
        except KVCodecError:
            with suppress(KVCodecError):  # a full store: what was written before is not to be written again
                self._commit(group)
            raise
        part, done = self._commit(group), self._done
        costs = [found for chunk in done.values() if (found := _costs(chunk)) is not None]
        total = Costs.total(costs)
        self._metrics.cost(total, len(costs), self._profile)
        return GroupResult(
            group.prompts,
            [self._figures(chunk) for chunk in done.values() if chunk.key in group.todo],
            part,
            encoder.truth.tokens - tokens,
            encoder.truth.seconds - seconds,
            time.perf_counter() - start,
            total,
            len(costs),
        )

    def _commit(self, group: Group) -> str:
        """Write the rows of the group's chunks that have none yet; the path of the index part, "" without any."""
        owners = {key: prompt for prompt in group.prompts for key in prompt.keys}
        new = [chunk for chunk in self._done.values() if chunk.key in group.todo and chunk.key not in group.lost]
        rows = [self._row(chunk, owners[chunk.key]) for chunk in new]
        return index.write_part(self._job.store, rows) if rows else ""

    def _charge(self, path: str, chunk: codec.EncodedChunk) -> None:
        """Ask whether a blob and its index row may still be written."""
        costs = chunk.stats.costs
        figures = 0 if costs is None else 4 * (costs.heads.size + costs.spread.size + costs.miss.size)
        size = len(chunk.blob) + len(chunk.layer_checksums) + figures + ROW_BYTES
        self._quota.charge(self._job.store, path, size if self._done else size + PART_BYTES)

    def _report(self, chunk: Stored) -> None:
        # A chunk that is met again, because the actor came back to it, was written the first time.
        self._done.setdefault(chunk.key, chunk)
        if chunk.outcome != KEPT:
            self._reporter.add(Counts(chunk.tokens, 1, self._raw_bytes(chunk), chunk.stored_bytes))
            scalars = chunk.stats.scalars_k + chunk.stats.scalars_v
            self._metrics.stored(chunk.outcome, chunk.tokens, scalars, self._raw_bytes(chunk), chunk.stored_bytes)

    def _raw_bytes(self, chunk: Stored) -> int:
        return self._scalar_bytes * (chunk.stats.scalars_k + chunk.stats.scalars_v)

    def _figures(self, chunk: Stored) -> ChunkFigures:
        stats = chunk.stats
        return ChunkFigures(
            key=chunk.key,
            outcome=chunk.outcome,
            tokens=chunk.tokens,
            raw_bytes=self._raw_bytes(chunk),
            stored_bytes=chunk.stored_bytes,
            header_bytes=stats.header_bytes,
            bytes_k=stats.bytes_k,
            bytes_v=stats.bytes_v,
            scalars_k=stats.scalars_k,
            scalars_v=stats.scalars_v,
            ideal_bits_k=stats.ideal_bits_k if chunk.has_ideal else None,
            ideal_bits_v=stats.ideal_bits_v if chunk.has_ideal else None,
        )

    def _row(self, chunk: Stored, owner: PromptRef) -> dict[str, Any]:
        job = self._job
        figures = asdict(self._figures(chunk))
        del figures["outcome"]  # what became of the chunk in this run, not what it is
        costs = _costs(chunk)
        figures |= {"layer_bits": None, "layer_spread": None, "layer_miss": None} if costs is None else costs.row()
        return figures | {
            "parent_key": chunk.parent_key,
            "chunk_index": chunk.index,
            "first_token": chunk.first_token,
            "model": job.model.name,
            "target": job.target,
            "predictor": job.predictor,
            "profile": job.profile,
            "cache_format": job.cache_format,
            "fp8_scale": job.scale_mode or None,
            "loop": job.loop,
            "chunk_tokens": job.chunk_tokens,
            "prefill_tokens": job.chunk_tokens,
            "escapes": chunk.stats.escapes,
            "layer_checksums": chunk.layer_checksums,
            "parent_digest": chunk.parent_digest,
            "chain_digest": chunk.chain_digest,
            "tenant": owner.tenant,
            "root_key": owner.root or None,
            "created": datetime.now(UTC),
            "host_arch": platform.machine(),
            "torch_version": torch.__version__,
            "device": _device_name(self._device.name),
        }


class VerifyActor:
    """Results of the encode stage in, the same with `verified` and `failed` out."""

    def __init__(self, job: Job, device: Device, reporter: Reporter) -> None:
        self._metrics = Metrics(job)
        self._job = replace(job, store=self._metrics.store(job.store))
        self._device = device
        self._reporter = reporter
        self._reader = PromptReader(job.store)
        self._verifier: ChainVerifier | None = None
        self._older: dict[bytes, bytes] = {}  # checksums of rows in other parts than a group's own

    def __call__(self, batch: dict[str, Any]) -> Iterator[dict[str, list[str]]]:
        for text in batch["result"]:
            yield {"result": [self._result(GroupResult.from_json(str(text))).to_json()]}

    def _loaded(self) -> ChainVerifier:
        if self._verifier is None:
            settle(self._device.threads)
            self._verifier = ChainVerifier(self._job, *_load(self._job, self._device))
        return self._verifier

    def _result(self, result: GroupResult) -> GroupResult:
        job = self._job
        chosen = frozenset(c.key for c in result.chunks if job.verify.selects(c.key))
        wanted = set(chosen)
        if not wanted:
            return result
        verifier = self._loaded()
        rows = self._committed(result, wanted)
        for prompt in result.prompts:
            if wanted.isdisjoint(prompt.keys):
                continue
            ids = self._reader.tokens(prompt.part, prompt.row, prompt.n_tokens)
            findings = verifier.prompt(ids, prompt.keys, frozenset(wanted), rows)
            result.verified += findings.verified
            result.failed |= findings.failed
            wanted -= set(findings.verified) | findings.failed.keys()
            self._reporter.add(Counts(verified=len(findings.verified)))
            self._metrics.verified(len(findings.verified), len(findings.failed))
        if chosen <= set(result.verified):
            unmark(job.store, job.target, job.profile, chosen)
        return result

    def _committed(self, result: GroupResult, wanted: set[bytes]) -> dict[bytes, bytes]:
        """Layer checksums from the group's own index part; where a lost blob was replaced, from its older row."""
        rows: dict[bytes, bytes] = {}
        if result.index_part:
            rows = read_checksums(self._job.store, result.index_part)
        if missing := wanted - rows.keys():
            if not missing <= self._older.keys():
                table = index.read_rows(
                    self._job.store,
                    target=self._job.target,
                    profile=self._job.profile,
                    columns=["key", "layer_checksums"],
                )
                self._older = dict(zip(table["key"].to_pylist(), table["layer_checksums"].to_pylist(), strict=True))
            rows = {key: self._older[key] for key in missing & self._older.keys()} | rows
        return rows


def _costs(chunk: Stored) -> Costs | None:
    """What its layers cost, where this process encoded it."""
    stats = chunk.stats
    return None if stats.costs is None else Costs.of(stats.costs, stats.scalars_k, stats.scalars_v)


def _load(job: Job, device: Device) -> tuple[codec.Predictor, codec.Profile]:
    """Predictor and profile from the store, and the proof that this process computes the same bits with them."""
    predictor = load_predictor(job.store, job.predictor, device.name)
    profile = load_profile(job.store, job.profile, target=job.target, cache_format=job.cache_format)
    codec.check_known_answer(predictor, profile)
    return predictor, profile


def _device_name(device: str) -> str:
    return torch.cuda.get_device_name(device) if device.startswith("cuda") else "cpu"
