"""Stores for tests of restoration: a tiny target's caches, encoded by the job's own actor, without Ray."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

import codec
from codec.formats import number_format
from codec.keys import chunk_keys, root_key
from codec.scales import CacheScales
from pipeline.actors import EncodeActor
from pipeline.cache_scales import largest
from pipeline.calibration import closed_sample
from pipeline.paths import blob_path, predictor_path, profile_path, prompts_path
from pipeline.prompts import part_bytes, part_name
from pipeline.rung import Rung
from pipeline.store import Store
from pipeline.target import Target, load_target, resolve_model, run_format
from pipeline.tenancy import tenant_name
from pipeline.work import Device, Group, Job, PromptRef

DEVICE = Device("cpu", False, 1)
VOCAB = 384
CHUNK = 32


class Silent:
    """A reporter that tells nobody."""

    def add(self, counts: object) -> None:
        """Nothing."""


def tokens_of(seed: int, count: int) -> list[int]:
    """Random token ids."""
    found: list[int] = np.random.default_rng(seed).integers(3, VOCAB, count).tolist()
    return found


class Kept:
    """One rung of one model in one store."""

    def __init__(
        self, model: Path, folder: Path | str, *, kind: str = "fp8", loop: str = "closed", cache: str = "bf16", mode: str = "tensor",
        salt: bytes = b"", chunk: int = CHUNK, calibration: Sequence[Sequence[int]] | None = None, window: int | None = None,
    ) -> None:  # fmt: skip
        self.chunk, self._salt = chunk, salt
        self.store = Store.open(str(folder))
        source = resolve_model(model)
        train = [torch.tensor(ids) for ids in calibration or [tokens_of(900 + n, 96) for n in range(3)]]
        target = load_target(source, run_format(source, cache))
        scales = None
        if number_format(cache).coarse:
            found = functools.reduce(np.maximum, [largest(target, ids, chunk) for ids in train])
            scales = CacheScales.calibrated("head" if mode == "head" else "tensor", found, number_format(cache))
            scales = CacheScales.none(*found.shape[::2]) if mode == "none" else scales
        self.target: Target = target.with_cache(cache, scales)
        rung = Rung(kind, loop, window)
        self.predictor = rung.build(self.target, rung.ranges(self.target, train) if rung.calibrated else None, train)
        self.profile = self._calibrate(loop, train, source.fingerprint(cache))
        self.store.put_new(predictor_path(self.predictor.fingerprint), self.predictor.to_bytes())
        self.store.put_new(profile_path(self.profile.id), self.profile.to_bytes())
        tenant = tenant_name(salt)
        self.job = Job(
            self.store, source, self.profile.target, cache, chunk, kind, loop, tenant, self.predictor.fingerprint,
            self.profile.id, scale_mode="" if scales is None else mode, scales=b"" if scales is None else scales.to_bytes(),
        )  # fmt: skip
        self.root = root_key(
            target=self.job.target, cache_format=cache, chunk_tokens=chunk, scales=self.job.scales, salt=salt
        )
        self._actor = EncodeActor(self.job, DEVICE, Silent())  # type: ignore[arg-type]

    def _calibrate(self, loop: str, train: list[torch.Tensor], fingerprint: bytes) -> codec.Profile:
        fmt, scales = self.target.cache_format, self.target.scales
        if loop == "closed":
            states = bool(self.predictor.config.hidden)
            samples = [closed_sample(self.target, ids, self.chunk, states=states) for ids in train]
            return codec.calibrate_closed(
                self.predictor, fingerprint, fmt, samples, prefill_tokens=self.chunk, scales=scales
            )
        moments = codec.Moments.zero(self.predictor.config)
        for ids in train:
            cache, state = self.target.new_cache(), self.predictor.new_state()
            for part in ids.split(self.chunk):
                moments.add(codec.measure(self.predictor, state, part, self.target.prefill(cache, part), scales))
        return codec.freeze(self.predictor, fingerprint, fmt, moments, prefill_tokens=self.chunk, scales=scales)

    def put(self, prompts: Mapping[str, Sequence[int]]) -> None:
        """Store and commit these prompts, as one group of a job."""
        rows: list[dict[str, Any]] = [
            {"id": name, "payload": "{}", "token_ids": list(ids), "n_tokens": len(ids), "tenant": self.job.tenant}
            for name, ids in prompts.items()
        ]
        path = prompts_path(self.job.target, part_name(rows))
        self.store.put_new(path, part_bytes(rows))
        refs = tuple(
            PromptRef(
                row["id"], path, number, row["n_tokens"], tuple(self.keys(row["token_ids"])), self.job.tenant, self.root
            )
            for number, row in enumerate(rows)
        )
        group = Group(refs, frozenset(key for ref in refs for key in ref.keys), {})
        assert list(self._actor({"group": [group.to_json()]}))

    def keys(self, ids: Sequence[int]) -> list[bytes]:
        """The prompt's chunks."""
        return chunk_keys(self.root, ids, self.chunk)

    def blob(self, ids: Sequence[int], number: int) -> Path:
        """The file of one chunk, of a local store."""
        root = Path(self.store.uri.removeprefix("file://"))
        return root / blob_path(self.job.target, self.job.profile, self.keys(ids)[number])

    def cache(self, ids: Sequence[int]) -> Any:
        """The target's own cache of a prompt, run in steps of a chunk as it was for the store."""
        cache = self.target.new_cache()
        for part in torch.tensor(list(ids)).split(self.chunk):
            self.target.prefill(cache, part)
        return cache

    def truth(self, ids: Sequence[int]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """K and V of every layer, [kv_heads, tokens, head_dim]."""
        return self.target.read(self.cache(ids), 0, len(ids))

    def elsewhere(self, uri: str) -> Job:
        """The job on another store."""
        return replace(self.job, store=Store.open(uri))


def same(
    found: Sequence[tuple[torch.Tensor, torch.Tensor]], wanted: Sequence[tuple[torch.Tensor, torch.Tensor]]
) -> bool:
    """Equal shapes, dtypes and bits."""
    pairs = [(a, b) for p, q in zip(found, wanted, strict=True) for a, b in zip(p, q, strict=True)]
    return all(
        a.shape == b.shape and a.dtype == b.dtype
        and torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
        for a, b in pairs
    )  # fmt: skip
