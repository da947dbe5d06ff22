"""The stages of the main job that run as Ray Data actor pools: tokenising, then encoding and verifying what a plan says."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from rich.console import Console

from pipeline import ray_runtime
from pipeline.actors import EncodeActor, VerifyActor
from pipeline.committed import Committed
from pipeline.metrics import Metrics
from pipeline.plan import Plan
from pipeline.progress import Counts, Display, ProgressBoard, Reporter
from pipeline.quota import Quota
from pipeline.ray_runtime import Cluster, Pools
from pipeline.report import say
from pipeline.work import ALL, ChunkFigures, Device, GroupResult, Job, make_group, verify_groups

MAX_BLOCKS = 4096  # a block a group up to here: then a group is what is tried again when a machine is lost


def tables(kind: type, arguments: tuple[Any, ...], items: list[dict[str, Any]], cluster: Cluster) -> Iterator[Any]:
    """Tables that actors of this kind make of the items, one an item."""
    data: Any = importlib.import_module("ray.data")
    stage = data.from_items(items, override_num_blocks=min(len(items), MAX_BLOCKS)).map_batches(
        kind,
        fn_constructor_args=arguments,
        batch_size=1,
        num_cpus=1,
        compute=data.ActorPoolStrategy(size=min(slots(cluster), len(items))),
    )
    yield from stage.iter_batches(batch_format="pyarrow", batch_size=None)


def slots(cluster: Cluster) -> int:
    """How many tokenise at once: not more than there are processors, whatever Ray was told."""
    free = int(cluster.cpus) - ray_runtime.IO_SLOTS
    return max(1, min(free, cluster.cores or free))


def device_of(name: str, gpus: float, cpus: float) -> Device:
    """Where an actor of so many GPUs and CPUs computes."""
    return Device(name if gpus > 0 or name == "cpu" else "cpu", gpus > 1, max(1, int(cpus)))


def compute(
    job: Job, plan: Plan, before: Committed, quota: Quota, pools: Pools, device: str, notes: Console
) -> list[GroupResult]:
    """Encode the new chunks of a plan, and verify those that the job selects."""
    ray: Any = importlib.import_module("ray")
    data: Any = importlib.import_module("ray.data")
    board = ray.remote(ProgressBoard).options(num_cpus=0).remote()
    reporter = Reporter(board)
    groups = [{"group": make_group(group, plan.stored, before.lost, before.gone).to_json()} for group in plan.groups]
    stage = data.from_items(groups, override_num_blocks=min(len(groups), MAX_BLOCKS)).map_batches(
        EncodeActor,
        fn_constructor_args=(job, device_of(device, pools.encode_gpus, pools.encode_cpus), reporter, quota),
        batch_size=1,
        num_cpus=pools.encode_cpus,
        num_gpus=pools.encode_gpus,
        compute=data.ActorPoolStrategy(size=pools.encoders),
    )
    wanted = [key for key in plan.new if job.verify.selects(key)]
    if wanted:
        stage = stage.map_batches(
            VerifyActor,
            fn_constructor_args=(job, device_of(device, pools.verify_gpus, pools.verify_cpus), reporter),
            batch_size=1,
            num_cpus=pools.verify_cpus,
            num_gpus=pools.verify_gpus,
            compute=data.ActorPoolStrategy(size=max(1, pools.verifiers)),
        )
    work = f"{len(plan.new):,} chunks in {len(groups):,} groups"
    say(notes, f"compressing {work} on {device}, encode actors: {pools.encoders}")
    show = Display(
        notes,
        lambda: Counts(**ray.get(board.read.remote(), timeout=5)),
        total_chunks=len(plan.new),
        total_verify=len(wanted),
    )
    metrics, results = Metrics(job), list[GroupResult]()
    metrics.queue(len(groups))
    with show:
        for row in stage.iter_rows():
            results.append(GroupResult.from_json(row["result"]))
            metrics.queue(len(groups) - len(results))
    return results


def verify_stored(
    job: Job, plan: Plan, figures: Mapping[bytes, ChunkFigures], pools: Pools, device: str, notes: Console
) -> list[GroupResult]:
    """Decode these chunks of the plan, which earlier runs have stored."""
    data: Any = importlib.import_module("ray.data")
    job, groups = replace(job, verify=ALL), verify_groups(plan, figures)
    say(notes, f"verifying {len(figures):,} chunks that were stored before")
    stage = data.from_items(
        [{"result": group.to_json()} for group in groups], override_num_blocks=min(len(groups), MAX_BLOCKS)
    )
    stage = stage.map_batches(
        VerifyActor,
        fn_constructor_args=(job, device_of(device, pools.verify_gpus, pools.verify_cpus), Reporter(None)),
        batch_size=1,
        num_cpus=max(1, pools.verify_cpus),
        num_gpus=pools.verify_gpus,
        compute=data.ActorPoolStrategy(size=max(1, pools.verifiers)),
    )
    return [GroupResult.from_json(row["result"]) for row in stage.iter_rows()]
