"""The main job, from options to exit status: DESIGN 9 in one place.

corpus -> tokenise -> (scales of an FP8 cache) -> plan -> (calibrate) -> target and encode -> store and index -> verify -> report
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, Set
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

from rich.console import Console

from codec.errors import DataError
from codec.predictor.config import MAX_CONTEXT
from pipeline import ray_runtime, report
from pipeline.cache_scales import calibrate_scales
from pipeline.calibration import Sample, calibrate, choose_sample, find_profile
from pipeline.committed import Committed, find_committed
from pipeline.corpus import list_corpus
from pipeline.current import point_first, refuse_retired
from pipeline.estimate import estimate
from pipeline.heal import computed
from pipeline.health import Health, of_groups
from pipeline.lease import at_work
from pipeline.options import Options
from pipeline.paths import profile_path
from pipeline.plan import Admitted, Plan, Prompt, admit, make_plan
from pipeline.prepare import Prepared, prepare
from pipeline.prompts import Rekey, Tokenise, Tokenising, split_rows, with_keys, work_items
from pipeline.quota import Quota
from pipeline.ray_runtime import Cluster, Pools
from pipeline.recording import Ran, recorded
from pipeline.report import Outcome, say
from pipeline.retell import Retell, Retelling
from pipeline.reverify import marks_of, with_unseen
from pipeline.stages import compute, device_of, slots, tables, verify_stored
from pipeline.target import context_length
from pipeline.work import GroupResult, Job, load_profile

ACTOR_WEIGHTS = 4  # memory of one actor, in sizes of the model's files: target, predictor, and room to load them
ACTOR_BYTES = 1 << 30  # and what it needs besides


@dataclass(frozen=True)
class Consoles:
    """Where a run speaks: progress and notes, and the result."""

    notes: Console
    result: Console


def run(options: Options, consoles: Consoles) -> int:
    """Do what the options say. 0 if all that was asked for is stored and verified, else 1.

    Raises:
        UserError, DataError, StorageError: as one sentence each, also for what went wrong inside an actor.
    """
    prepared = prepare(options)
    with recorded("compress", prepared.job, options) as record:
        ran = carry_out(prepared, consoles, lambda job: refuse_retired(job.store, (job.target, job.profile)))
        if not options.dry_run:
            if (
                ran.job.profile
            ):  # a recompression may have replaced it meanwhile, and what is stored already may have been
                refuse_retired(ran.job.store, (ran.job.target, ran.job.profile))
            record(ran)
            if ran.status == 0:
                _show_readers(ran.job, consoles)
    return ran.status


def _show_readers(job: Job, consoles: Consoles) -> None:
    """Point readers of the model to its first generation; later ones are for a recompression to show."""
    name = job.model.name, job.cache_format
    now = point_first(job.store, *name, (job.target, job.profile)).current(*name)
    if now is not None and now.target != job.target:
        say(
            consoles.notes,
            f"the weights of {job.model.name} have changed: who asks for the model by its name still gets the caches of target "
            f"{now.target.hex()[:16]}; jobs/recompress.py makes all of them anew and points readers to these",
        )


def carry_out(prepared: Prepared, consoles: Consoles, before_encode: Callable[[Job], None]) -> Ran:
    """Do what was prepared. before_encode: called with the job as soon as its profile is known, before a chunk is stored.

    Raises as `run`.
    """
    for note in prepared.notes:
        say(consoles.notes, note)
    try:
        with ray_runtime.connected(prepared.options.actors) as cluster, _lease(prepared):
            return _run(prepared, cluster, consoles, before_encode)
    except Exception as error:
        ours = ray_runtime.our_error(error)
        if ours is None or ours is error:
            raise
        raise ours from error


def _lease(prepared: Prepared) -> AbstractContextManager[None]:
    """So that a collection knows of this job, which is about to use what nothing in the store uses yet."""
    return nullcontext() if prepared.options.dry_run else at_work(prepared.job.store)


def _run(prepared: Prepared, cluster: Cluster, consoles: Consoles, before_encode: Callable[[Job], None]) -> Ran:
    options, job = prepared.options, prepared.job
    start = time.monotonic()
    ray_runtime.check_shared(cluster, store_is_local=job.store.is_local, shared_fs=options.shared_fs, uri=job.store.uri)
    device = ray_runtime.choose_device(options.device, cluster)
    admitted = _admit(prepared, cluster, consoles)
    sources = _Calibration(prepared, admitted.prompts, cluster)
    if not job.scaled and options.dry_run:
        say(consoles.notes, "the cache's scales are not calibrated yet, so all chunks are new")
    elif not job.scaled:
        prepared, admitted = _scale(prepared, admitted, sources, cluster, device, consoles)
        job = prepared.job
    found = find_profile(job) if prepared.stored and job.scaled else None
    job = found or job
    before, plan = _plan(job, admitted.prompts)
    pools = _pools(prepared, cluster, device, len(plan.groups))
    if options.dry_run:
        return Ran(_dry_run(prepared, plan, before, pools, device, consoles), job, {})
    results: list[GroupResult] = []
    marks_of(job)  # a damaged one is said before hours of work
    if plan.groups:
        quota = prepared.allowance.quota()
        if found is not None:
            before_encode(job)
        else:
            job = _calibrate(prepared, sources, quota, pools, device, consoles)
            # The profile may be another job's, which may have stored chunks of this corpus meanwhile.
            before_encode(job)
            before, plan = _plan(job, admitted.prompts)
        results, before, plan = computed(
            job,
            (before, plan),
            lambda before, plan: compute(job, plan, before, quota, pools, device, consoles.notes),
            lambda: _plan(job, admitted.prompts),
            lambda text: say(consoles.notes, text),
        )
    if not plan.groups:
        say(consoles.notes, f"nothing to compute: all {len(plan.chunks):,} chunks are stored")
    outcome, wanted = with_unseen(
        job, plan, before, results,
        lambda figures: verify_stored(job, plan, figures, pools, device, consoles.notes), whole=prepared.whole,
    )  # fmt: skip
    return _finish(prepared, job, plan, admitted, outcome, wanted, time.monotonic() - start, consoles)


def _plan(job: Job, prompts: list[Prompt]) -> tuple[Committed, Plan]:
    """What the store holds of these prompts under the job's profile, if it has one yet, and what is left to do."""
    keys = {key for prompt in prompts for key in prompt.all_keys()}
    before = find_committed(job, keys) if job.profile else Committed.none()
    stored, lost = frozenset(before.figures), frozenset(before.lost)
    return before, make_plan(prompts, job.chunk_tokens, stored=stored, lost=lost)


# ---------------------------------------------------------------- tokenise
def _admit(prepared: Prepared, cluster: Cluster, consoles: Consoles) -> Admitted:
    admitted = _admitted(prepared, cluster)
    for record in admitted.bad:
        say(consoles.notes, f"skipped {record.source}: {record.reason}")
    copies = f", {admitted.duplicates:,} identical copies left out" if admitted.duplicates else ""
    tokens = sum(prompt.n_tokens for prompt in admitted.prompts)
    say(consoles.notes, f"tokenised {len(admitted.prompts):,} prompts, {tokens:,} tokens{copies}")
    return admitted


def _admitted(prepared: Prepared, cluster: Cluster) -> Admitted:
    if prepared.admitted is not None:
        return prepared.admitted
    options, retelling = prepared.options, prepared.retelling
    if retelling is None:
        tables = _tokenise(prepared, prepared.files, options.limit, cluster)
    else:
        tables = retelling.rows(_retell(prepared, retelling, cluster))
    prompts, bad = split_rows(tables)
    where = options.corpus if retelling is None else f"that {prepared.job.store.uri} keeps"
    return admit(
        prompts, bad, limit=options.limit, skip_bad=options.skip_bad, corpus=where, one_corpus=retelling is None
    )


def _tokenise(prepared: Prepared, files: list[str], limit: int | None, cluster: Cluster) -> Iterator[Any]:
    yield from tables(Tokenise, (_tokenising(prepared, limit),), work_items(files, limit, slots(cluster)), cluster)


def _retell(prepared: Prepared, retelling: Retelling, cluster: Cluster) -> Iterator[Any]:
    items = work_items(retelling.parts(prepared.job.store), None, 1)
    roots = prepared.roots.of_tenants(retelling.salts())
    yield from tables(Retell, (_tokenising(prepared, None), roots), items, cluster)


def _tokenising(prepared: Prepared, limit: int | None) -> Tokenising:
    options, job = prepared.options, prepared.job
    return Tokenising(
        job.store,
        job.model,
        job.target,
        prepared.roots,
        min(context_length(prepared.config), MAX_CONTEXT),
        int(prepared.config["vocab_size"]),
        options.max_tokens,
        limit,
        not options.dry_run,
    )


# ---------------------------------------------------------------- calibrate, encode, verify
def _pools(prepared: Prepared, cluster: Cluster, device: str, groups: int) -> Pools:
    options = prepared.options
    return ray_runtime.divide(
        cluster,
        device=device,
        actors=options.actors,
        gpus_per_actor=options.gpus_per_actor,
        groups=groups,
        verify=prepared.job.verify.fraction > 0,
        actor_bytes=ACTOR_WEIGHTS * prepared.weight_bytes + ACTOR_BYTES,
    )


class _Calibration:
    """The sample of prompts that scales and profile are calibrated on, tokenised at its first use."""

    def __init__(self, prepared: Prepared, prompts: list[Prompt], cluster: Cluster) -> None:
        self._prepared, self._prompts, self._cluster = prepared, prompts, cluster

    @functools.cached_property
    def samples(self) -> list[Sample]:
        """Chosen from --calibration, or else from the corpus. Their keys tell chunks apart and name nothing stored."""
        options, prompts = self._prepared.options, self._prompts
        if options.calibration is not None:
            tables = _tokenise(self._prepared, list_corpus(options.calibration), None, self._cluster)
            own, bad = split_rows(tables)
            prompts = admit(own, bad, limit=None, skip_bad=options.skip_bad, corpus=options.calibration).prompts
        return choose_sample(prompts, options.chunk_tokens)


def _scale(
    prepared: Prepared, admitted: Admitted, sources: _Calibration, cluster: Cluster, device: str, consoles: Consoles
) -> tuple[Prepared, Admitted]:
    """Calibrate the scales of an FP8 cache, and give the prompts the keys that depend on them."""
    samples, job = sources.samples, prepared.job
    say(consoles.notes, f"calibrating the cache's scales on {len(samples):,} prompts (once for this model)")
    pools = _pools(prepared, cluster, device, len(samples))
    scaled = calibrate_scales(
        job,
        samples,
        actors=pools.encoders,
        cpus=pools.encode_cpus,
        gpus=pools.encode_gpus,
        device=device_of(device, pools.encode_gpus, pools.encode_cpus),
    )
    prepared = replace(prepared, job=scaled)
    if any(prompt.tenant != job.tenant for prompt in admitted.prompts):
        return prepared, _admitted(prepared, cluster)  # their salts are in the corpus and nowhere else
    return prepared, replace(admitted, prompts=_rekey(prepared, admitted.prompts, cluster))


def _rekey(prepared: Prepared, prompts: list[Prompt], cluster: Cluster) -> list[Prompt]:
    items = [{"part": part} for part in sorted({prompt.part for prompt in prompts})]
    arguments = prepared.job.store, prepared.root, prepared.options.chunk_tokens
    return with_keys(prompts, tables(Rekey, arguments, items, cluster))


def _calibrate(
    prepared: Prepared, sources: _Calibration, quota: Quota, pools: Pools, device: str, consoles: Consoles
) -> Job:
    samples = sources.samples
    measured = sum(len(sample.measured) for sample in samples)
    say(consoles.notes, f"calibrating on {measured:,} chunks of {len(samples):,} prompts (once for this model)")
    begin = time.monotonic()
    job = calibrate(
        prepared.job,
        samples,
        actors=pools.encoders,
        cpus=pools.encode_cpus,
        gpus=pools.encode_gpus,
        device=device_of(device, pools.encode_gpus, pools.encode_cpus),
        quota=quota,
    )
    size = job.store.size(profile_path(job.profile))
    say(consoles.notes, f"calibrated in {report.duration(time.monotonic() - begin)}; the profile has {size:,} bytes")
    return job


# ---------------------------------------------------------------- the end
def _dry_run(prepared: Prepared, plan: Plan, before: Committed, pools: Pools, device: str, consoles: Consoles) -> int:
    found = estimate(
        plan,
        prepared.job,
        prepared.config,
        prepared.weight_bytes,
        before.figures.values(),
        device=device,
        actors=pools.encoders,
    )
    report.show_estimate(consoles.result, found, f"dry run for {prepared.job.model.name}: nothing was written")
    if prepared.options.report is not None:
        report.write_report(prepared.options.report, found.to_dict())
    return 0


def _finish(
    prepared: Prepared,
    job: Job,
    plan: Plan,
    admitted: Admitted,
    outcome: Outcome,
    wanted: Set[bytes],
    seconds: float,
    consoles: Consoles,
) -> Ran:
    missing = [key for key in plan.chunks if key not in outcome.figures]
    if missing:
        raise DataError(f"{len(missing)} chunks were not stored, among them {missing[0].hex()}; run the job again")
    unseen = wanted - outcome.verified - outcome.failed.keys()
    if unseen:
        raise DataError(f"{len(unseen)} chunks were stored but not verified, among them {next(iter(unseen)).hex()}")
    for message in outcome.failed.values():
        say(consoles.notes, f"failed: {message}")
    health = _health(job, outcome)
    size = job.store.size(profile_path(job.profile))
    figures = report.make_report(plan, outcome, profile_bytes=size, bad_records=len(admitted.bad), health=health)
    title = f"{job.model.name}, {job.cache_format}, {job.predictor_kind} {job.loop} loop: {report.duration(seconds)}"
    report.show_report(consoles.result, figures, title)
    if health is not None and (warning := health.warning()) is not None:
        say(consoles.notes, warning)
    if prepared.options.report is not None:
        report.write_report(prepared.options.report, figures)
    scalars = sum(c.scalars_k + c.scalars_v for c in (outcome.figures[key] for key in plan.chunks))
    return Ran(1 if outcome.failed else 0, job, figures, scalars)


def _health(job: Job, outcome: Outcome) -> Health | None:
    """Of the chunks that this run encoded, None without any."""
    if all(costs is None for costs, _ in outcome.costs):
        return None  # then the profile need not be read
    profile = load_profile(job.store, job.profile, target=job.target, cache_format=job.cache_format)
    return of_groups(outcome.costs, profile)
