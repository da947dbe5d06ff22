"""Static scales of an FP8 cache, calibrated on first use: the largest K and V of a sample of prompts, as vLLM's are.

Scales are part of the chunks' keys, so they are found or made before anything is planned. The store names them under a
hash of what they are specific to; of several jobs that make some at once one wins, and the others go on with the winner's.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from codec.errors import DataError
from codec.formats import number_format
from codec.scales import CacheScales
from pipeline.calibration import Sample, load_checked_target
from pipeline.paths import scales_config_path
from pipeline.prompts import PromptReader
from pipeline.store import ObjectMissing
from pipeline.target import Target
from pipeline.work import Device, Job
from pipeline.worker_process import settle

SCALES_VERSION = 1  # of how scales are calibrated

Largest = NDArray[np.float32]  # [layers, 2 (K, V), kv_heads]


def config_hash(job: Job) -> bytes:
    """Digest of everything that scales are specific to."""
    parts = {
        "what": "scales",
        "version": SCALES_VERSION,
        "target": job.target.hex(),
        "cache_format": job.cache_format,
        "mode": job.scale_mode,
    }
    return hashlib.blake2b(json.dumps(parts, sort_keys=True).encode(), digest_size=32).digest()


def find_scales(job: Job) -> Job | None:
    """The job with the scales that the store names for it, or None where it names none.

    Raises:
        DataError: what the store names is malformed or of another mode.
    """
    path = scales_config_path(config_hash(job))
    try:
        data = job.store.get(path)
    except ObjectMissing:
        return None
    try:
        scales = CacheScales.from_bytes(data)
    except DataError as error:
        raise DataError(f"{job.store.uri}/{path}: {error}") from None
    if scales.mode != job.scale_mode:
        raise DataError(f"{job.store.uri}/{path} holds scales of mode '{scales.mode}', not '{job.scale_mode}'")
    return replace(job, scales=data)


def offer_scales(job: Job, scales: CacheScales) -> Job:
    """Name these scales as the ones in use, unless another job was faster; the job with whichever are now."""
    job.store.put_new(scales_config_path(config_hash(job)), scales.to_bytes())
    found = find_scales(job)
    if found is None:
        raise DataError(f"{job.store.uri}: the cache's scales that were just stored are gone again; run the job again")
    return found


def largest(target: Target, tokens: torch.Tensor, step: int) -> Largest:
    """The largest finite magnitudes of K and V of a prompt, int64 [T], of which `step` tokens are run at a time.

    target: with a cache that is not FP8; so no scale depends on another one.
    """
    cache = target.new_cache()
    found: Largest | None = None
    for begin in range(0, len(tokens), step):
        pairs = target.prefill(cache, tokens[begin : begin + step])
        part = torch.stack([torch.stack([_largest_finite(t) for t in pair]).cpu() for pair in pairs]).numpy()
        found = part if found is None else np.maximum(found, part)
    if found is None:
        raise ValueError("a prompt without tokens has no largest values")
    return found


def _largest_finite(t: torch.Tensor) -> torch.Tensor:
    """[kv_heads, T, head_dim], any float dtype -> float32 [kv_heads]."""
    magnitude = t.float().abs()
    return torch.where(magnitude.isfinite(), magnitude, torch.zeros_like(magnitude)).amax((1, 2))


class ScaleMeter:
    """The body of an actor: the target with its plain cache, and the largest values on its prompts."""

    def __init__(self, job: Job, device: Device) -> None:
        self._job = job
        self._device = device
        self._target: Target | None = None
        self._reader = PromptReader(job.store)

    def measure(self, sample: Sample) -> Largest:
        """`largest` of one sample's chunks."""
        if self._target is None:
            settle(self._device.threads)
            self._target = load_checked_target(self._job, self._device, quantised=False)
        prompt, step = sample.prompt, self._job.chunk_tokens
        tokens = self._reader.tokens(prompt.part, prompt.row, prompt.n_tokens)[: sample.chunks * step]
        return largest(self._target, torch.from_numpy(tokens.copy()), step)


def calibrate_scales(
    job: Job, samples: Sequence[Sample], *, actors: int, cpus: float, gpus: float, device: Device
) -> Job:
    """Make scales with a pool of Ray actors, and return the job with those now in use.

    Maxima are merged, so the outcome does not depend on how the samples are divided or on their order.
    """
    ray: Any = importlib.import_module("ray")
    util: Any = importlib.import_module("ray.util")
    remote = ray.remote(ScaleMeter).options(num_cpus=cpus, num_gpus=gpus)
    pool = [remote.remote(job, device) for _ in range(min(actors, len(samples)))]
    try:
        parts = list(util.ActorPool(pool).map(lambda actor, sample: actor.measure.remote(sample), list(samples)))
    finally:
        for actor in pool:
            ray.kill(actor)
    merged = functools.reduce(np.maximum, parts)
    return offer_scales(job, CacheScales.calibrated(job.scale_mode, merged, number_format(job.cache_format)))
