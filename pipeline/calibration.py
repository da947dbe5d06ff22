"""Calibration on first use: a predictor and a frozen profile for one (target, predictor, cache format, loop).

The store names the profile in use under a hash of that configuration. A job that finds none makes one in the actors and
offers it; of several jobs that do so at once one wins, and the others go on with the winner's.
"""

from __future__ import annotations

import copy
import hashlib
import importlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

import numpy as np
import torch

import codec
from codec.errors import DataError
from codec.formats import number_format
from codec.profile import PROFILE_VERSION
from pipeline.model_source import localise
from pipeline.paths import profile_config_path
from pipeline.plan import Prompt
from pipeline.prompts import PromptReader
from pipeline.quota import Quota
from pipeline.rung import LIMB_PROMPTS
from pipeline.store import ObjectMissing
from pipeline.target import Target, load_target, run_format
from pipeline.work import Device, Job, PromptRef, load_predictor, load_profile, put_predictor, put_profile
from pipeline.worker_process import settle

SAMPLE_PROMPTS = 12
SAMPLE_TOKENS = 1024  # measured at most, a prompt
SAMPLE_DEPTH = 4096  # tokens from a prompt's start that may be run through the target to reach chunks not yet measured


@dataclass(frozen=True)
class Sample:
    """One calibration prompt: run the first `chunks` chunks, measure those of `measured`."""

    prompt: PromptRef
    chunks: int
    measured: frozenset[bytes]


def choose_sample(prompts: Iterable[Prompt], chunk_tokens: int) -> list[Sample]:
    """A deterministic sample: prompts in the order of their content's hash, and of each only chunks not measured yet.

    Prompts of a corpus often share long prefixes. Measuring the shared part once a prompt would fit the profile to
    that part alone, so each chunk counts once.
    """
    most = max(1, SAMPLE_TOKENS // chunk_tokens)
    depth = max(1, SAMPLE_DEPTH // chunk_tokens)
    seen: set[bytes] = set()
    samples: list[Sample] = []
    for prompt in sorted(prompts, key=lambda p: (p.content, p.id)):
        if len(samples) == SAMPLE_PROMPTS:
            break
        keys = prompt.all_keys()[:depth]
        fresh = [key for key in keys if key not in seen][:most]
        if not fresh:
            continue
        seen.update(fresh)
        ref = PromptRef(prompt.id, prompt.part, prompt.row, prompt.n_tokens, tuple(keys))
        samples.append(Sample(ref, keys.index(fresh[-1]) + 1, frozenset(fresh)))
    return samples


def config_hash(job: Job) -> bytes:
    """Digest of everything that a profile is specific to."""
    parts = {
        "target": job.target.hex(),
        "predictor": job.predictor_kind,
        "cache_format": job.cache_format,
        "loop": job.loop,
        "window": job.window or 0,
        "codec": PROFILE_VERSION,
        "coder": job.coder,
    }
    if job.scale_mode:
        parts |= {"fp8_scale": job.scale_mode, "scales": codec.content_id(job.scales).hex()}
    return hashlib.blake2b(json.dumps(parts, sort_keys=True).encode(), digest_size=32).digest()


def find_profile(job: Job) -> Job | None:
    """The job with the profile and the predictor that the store names for it, or None where it names none.

    Raises:
        DataError: the store names something that is malformed or made for something else.
        StorageError: what is named is missing.
    """
    path = profile_config_path(config_hash(job))
    try:
        named = job.store.get(path)
    except ObjectMissing:
        return None
    try:
        profile_id = bytes.fromhex(named.decode("ascii").strip())
    except ValueError:
        raise DataError(f"{job.store.uri}/{path} does not name a profile") from None
    profile = load_profile(job.store, profile_id, target=job.target, cache_format=job.cache_format)
    return replace(job, profile=profile_id, predictor=profile.predictor)


def offer_profile(job: Job, profile_id: bytes) -> Job:
    """Name a stored profile as the one in use, unless another job was faster; the job with whichever it is now."""
    job.store.put_new(profile_config_path(config_hash(job)), profile_id.hex().encode())
    found = find_profile(job)
    if found is None:
        raise DataError(f"{job.store.uri}: the profile that was just named is gone again; run the job again")
    return found


class Calibrator:
    """The body of a calibration actor: the target, and moments of the residuals on its prompts."""

    def __init__(self, job: Job, device: Device, quota: Quota | None = None) -> None:
        self._job = job
        self._device = device
        self._charge = (quota or Quota()).charge
        self._target: Target | None = None
        self._predictor: codec.Predictor | None = None
        self._closed: codec.ClosedCalibration | None = None
        self._reader = PromptReader(job.store)

    def _loaded(self) -> Target:
        if self._target is None:
            settle(self._device.threads)
            self._target = load_checked_target(self._job, self._device)
        return self._target

    def ranges(self, samples: Sequence[Sample]) -> codec.Ranges:
        """How large activations get on these samples."""
        return self._job.rung.ranges(self._loaded(), self._tokens(samples))

    def build(self, ranges: codec.Ranges | None, samples: Sequence[Sample]) -> bytes:
        """Build the predictor from the target, put it into the store, return its fingerprint."""
        predictor = self._job.rung.build(self._loaded(), ranges, self._tokens(samples))
        return put_predictor(self._job.store, predictor, self._charge)

    def _tokens(self, samples: Sequence[Sample]) -> list[torch.Tensor]:
        refs = [sample.prompt for sample in samples]
        return [torch.from_numpy(self._reader.tokens(ref.part, ref.row, ref.n_tokens).copy()) for ref in refs]

    def layers(self) -> int:
        """How many layers the model has."""
        return self._ready().config.layers

    def load(self, fingerprint: bytes) -> None:
        """Take the predictor from the store."""
        self._predictor = load_predictor(self._job.store, fingerprint, self._device.name)

    def measure(self, sample: Sample) -> codec.Moments:
        """Moments of the residuals of one sample's measured chunks."""
        target, predictor = self._loaded(), self._ready()
        cache, state = target.new_cache(), predictor.new_state()
        tokens = self._reader.tokens(sample.prompt.part, sample.prompt.row, sample.prompt.n_tokens)
        moments = codec.Moments.zero(predictor.config)
        step = self._job.chunk_tokens
        for index, key in enumerate(sample.prompt.keys[: sample.chunks]):
            ids = torch.from_numpy(tokens[index * step : (index + 1) * step].copy())
            truth = target.prefill(cache, ids)
            if key in sample.measured:
                moments.add(codec.measure(predictor, state, ids, truth, target.scales))
            else:
                predictor.advance(state, ids)
        return moments

    def begin_closed(self, samples: Sequence[Sample]) -> None:
        """Run the target on these samples, and be ready for `layer_moments(0)`."""
        job = self._job
        loaded = [self._closed_sample(sample) for sample in samples]
        self._closed = codec.ClosedCalibration(self._ready(), job.cache_format, loaded, scales=self._loaded().scales)

    def _closed_sample(self, sample: Sample) -> codec.ClosedSample:
        prompt, step = sample.prompt, self._job.chunk_tokens
        tokens = self._reader.tokens(prompt.part, prompt.row, prompt.n_tokens)[: sample.chunks * step]
        counted = np.zeros(len(tokens), np.bool_)
        for index, key in enumerate(prompt.keys[: sample.chunks]):
            counted[index * step : (index + 1) * step] = key in sample.measured
        states = bool(self._ready().config.hidden)
        return closed_sample(self._loaded(), torch.from_numpy(tokens.copy()), step, counted, states=states)

    def rounds(self) -> int:
        """How often the moments of a layer are taken and fitted."""
        return self._closing().rounds

    def layer_moments(self, sample: int, layer: int, law: codec.JointLayer | None) -> codec.LayerMoments:
        """Moments of a layer over one of this actor's samples; after the first round under the law that it gave."""
        return self._closing().moments_of(sample, layer, law)

    def evidence(self) -> list[Any]:
        """What sigmas are sharpened by in the end, one a sample."""
        return self._closing().evidence()

    def advance(self, layer: int, frozen: codec.JointLayer) -> None:
        """Take this actor's samples through a frozen layer."""
        self._closing().advance(layer, frozen)

    def freeze_closed(self, layers: Sequence[codec.JointLayer], tokens: int) -> bytes:
        """Freeze joint models into a profile, put it into the store, return its id."""
        job = self._job
        profile = codec.freeze_closed(
            self._ready(),
            job.target,
            job.cache_format,
            layers,
            tokens,
            prefill_tokens=job.chunk_tokens,
            scales=job.cache_scales,
            coder=job.coder,
        )
        return put_profile(self._job.store, profile, self._charge)

    def _closing(self) -> codec.ClosedCalibration:
        if self._closed is None:
            raise DataError("the calibration actor was restarted before it was done; run the job again")
        return self._closed

    def freeze(self, moments: codec.Moments) -> bytes:
        """Freeze merged moments into a profile, put it into the store, return its id."""
        job = self._job
        profile = codec.freeze(
            self._ready(),
            job.target,
            job.cache_format,
            moments,
            prefill_tokens=job.chunk_tokens,
            scales=job.cache_scales,
            coder=job.coder,
        )
        return put_profile(self._job.store, profile, self._charge)

    def _ready(self) -> codec.Predictor:
        if self._predictor is None:
            raise DataError("the calibration actor was restarted before it had its predictor; run the job again")
        return self._predictor


def closed_sample(
    target: Target, token_ids: torch.Tensor, step: int, counted: np.ndarray[Any, np.dtype[np.bool_]] | None = None,
    *, states: bool = True,
) -> codec.ClosedSample:  # fmt: skip
    """Run the target on a prompt, int64 [T], `step` tokens at a time; the prompt as the closed loop is calibrated on it.

    states: whether the predictor has a hidden state, which is compared with the target's.
    """
    cache = target.new_cache()
    hidden: list[list[torch.Tensor]] = []
    for begin in range(0, len(token_ids), step):
        ids = token_ids[begin : begin + step]
        if states:
            hidden.append(target.prefill_states(cache, ids)[1])
        else:
            target.prefill(cache, ids)
    merged = [torch.cat(parts) for parts in zip(*hidden, strict=True)]
    return codec.ClosedSample(token_ids, target.read(cache, 0, len(token_ids)), merged, counted)


def load_checked_target(job: Job, device: Device, *, quantised: bool = True) -> Target:
    """Load the target in this process, and make sure that it is the one that the driver saw.

    Args:
        quantised: False for a cache in the dtype that the model is computed in, where the job's is FP8.

    Raises:
        UserError: it cannot be loaded.
        DataError: its files differ from those that the job began with.
    """
    cache_format = job.cache_format if quantised else run_format(localise(job.model), job.cache_format)
    scales = job.cache_scales if quantised else None
    target = load_target(job.model, cache_format, device.name, "auto" if device.spread else None, scales)
    if target.source.fingerprint(job.cache_format) != job.target:
        raise DataError(f"the model {job.model.path} on this node has other contents than where the job was started")
    return target


def calibrate(
    job: Job, samples: Sequence[Sample], *, actors: int, cpus: float, gpus: float, device: Device, quota: Quota
) -> Job:
    """Make predictor and profile with a pool of Ray actors, and return the job with those now in use.

    Moments are merged in the order of the samples, whichever actor measured them: floating-point sums then depend on
    neither the number of actors nor their speed.
    """
    ray: Any = importlib.import_module("ray")
    remote = ray.remote(Calibrator).options(num_cpus=cpus, num_gpus=gpus)
    pool = [remote.remote(job, device, quota) for _ in range(min(actors, len(samples)))]
    try:
        ranges = _ranges(ray, pool, samples) if job.rung.calibrated else None
        fingerprint = ray.get(pool[0].build.remote(ranges, samples[:LIMB_PROMPTS]))
        ray.get([actor.load.remote(fingerprint) for actor in pool])
        calibrate_loop = _calibrate_closed if job.loop == "closed" else _calibrate_open
        profile_id = calibrate_loop(ray, job, pool, samples)
    finally:
        for actor in pool:
            ray.kill(actor)
    return offer_profile(job, profile_id)


def _ranges(ray: Any, pool: Sequence[Any], samples: Sequence[Sample]) -> codec.Ranges:
    """A barrier: every actor measures a share of the samples. The largest values are the same in any order."""
    found: list[codec.Ranges] = ray.get(
        [actor.ranges.remote(list(samples[i :: len(pool)])) for i, actor in enumerate(pool)]
    )
    return reduce(codec.Ranges.merge, found)


def _calibrate_open(ray: Any, job: Job, pool: Sequence[Any], samples: Sequence[Sample]) -> bytes:
    measured = _measure_all(ray, pool, samples)
    moments = copy.deepcopy(measured[0])  # arrays that come out of Ray's object store are read-only
    for other in measured[1:]:
        moments.add(other)
    profile_id: bytes = ray.get(pool[0].freeze.remote(moments))
    return profile_id


def _calibrate_closed(ray: Any, job: Job, pool: Sequence[Any], samples: Sequence[Sample]) -> bytes:
    """A barrier a layer: the moments of a layer need the frozen gains of those below it (DESIGN 4.7)."""
    shares = [list(samples[i :: len(pool)]) for i in range(len(pool))]
    ray.get([actor.begin_closed.remote(share) for actor, share in zip(pool, shares, strict=True)])
    count: int = ray.get(pool[0].layers.remote())
    rounds: int = ray.get(pool[0].rounds.remote())

    def moments(layer: int, law: codec.JointLayer | None) -> Iterator[codec.LayerMoments]:
        """In the order of the samples, a few at a time: a large model's are hundreds of megabytes each."""
        shared, waiting = ray.put(law), []
        for number in range(len(samples) + len(pool)):
            if number < len(samples):
                waiting.append(pool[number % len(pool)].layer_moments.remote(number // len(pool), layer, shared))
            if number >= len(pool):
                yield ray.get(waiting.pop(0))

    def advance(layer: int, law: codec.JointLayer) -> None:
        ray.get([actor.advance.remote(layer, law) for actor in pool])

    layers, tokens = codec.fit_layers(count, rounds, moments, advance)
    found = ray.get([actor.evidence.remote() for actor in pool])
    evidence = [found[i % len(pool)][i // len(pool)] for i in range(len(samples))]
    layers = codec.sharpened(layers, evidence, number_format(job.cache_format))
    profile_id: bytes = ray.get(pool[0].freeze_closed.remote(layers, tokens))
    return profile_id


def _measure_all(ray: Any, pool: Sequence[Any], samples: Sequence[Sample]) -> list[codec.Moments]:
    util: Any = importlib.import_module("ray.util")
    workers = util.ActorPool(list(pool))
    return list(workers.map(lambda actor, sample: actor.measure.remote(sample), list(samples)))
