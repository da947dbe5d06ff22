"""Ray: start or join it, see what it has, divide that among the actors, and turn its errors back into ours."""

from __future__ import annotations

import importlib
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from codec.errors import DataError, KVCodecError, StorageError, UserError
from pipeline.work import OtherBits

ROOT = Path(__file__).resolve().parent.parent
OBJECT_STORE_BYTES = 256 * 2**20  # rows and keys only: bitstreams never enter the object store
IO_SLOTS = 2  # logical CPUs for reads, tokenising and the like beside the actors
# more actors in one machine's own little cluster would only take turns, and its memory
ACTORS_A_CORE, FEW_ACTORS = 4, 8
NO_PROGRESS_SECONDS = 24 * 3600  # one group of long prompts on a CPU may take longer than Ray Data's half hour
_UDF_NOTE = "\nFailed to apply UDF transform"  # Ray Data appends this to the message of a user's exception


@dataclass(frozen=True)
class Cluster:
    """What the job runs on. cores: processors behind the CPUs, where Ray was told of more than there are."""

    nodes: int
    cpus: float
    gpus: float
    memory: float  # bytes
    embedded: bool
    cores: int | None = None


@dataclass(frozen=True)
class Pools:
    """Sizes of the two actor pools, and what each actor may use."""

    encoders: int
    encode_cpus: float
    encode_gpus: float
    verifiers: int
    verify_cpus: float
    verify_gpus: float


@contextmanager
def connected(actors: int | None, flag: str = "--actors") -> Iterator[Cluster]:
    """Join the cluster of RAY_ADDRESS (set within `ray job submit`), or run Ray in this process' own little cluster.

    What was started here is ended again; a cluster that was joined is only left. flag: where their number was given.

    Raises:
        UserError: so many actors are no use on this machine alone.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    with _without_ray_noise():
        ray: Any = importlib.import_module("ray")
        started_here = not ray.is_initialized()
        embedded = started_here and not os.environ.get("RAY_ADDRESS")
        if embedded:
            _check_actors(actors or 1, flag)
        if started_here:
            _init(ray, embedded, actors)
    try:
        _quieten()
        total = ray.cluster_resources()
        nodes = sum(bool(node["Alive"]) for node in ray.nodes())
        cores = available_cores() if embedded else None
        yield Cluster(nodes, total.get("CPU", 0), total.get("GPU", 0), total.get("memory", 0), embedded, cores)
    finally:
        if started_here:
            ray.shutdown()


@contextmanager
def _without_ray_noise() -> Iterator[None]:
    """Keep Ray's C++ side from writing to the terminal, unless RAY_BACKEND_LOG_LEVEL says what is wanted.

    It logs the level itself, and later an error for every actor pool of Ray Data, whatever Python's loggers are told.
    """
    if os.environ.get("RAY_BACKEND_LOG_LEVEL"):
        yield
        return
    os.environ["RAY_BACKEND_LOG_LEVEL"] = "fatal"
    sys.stderr.flush()
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        del os.environ[
            "RAY_BACKEND_LOG_LEVEL"
        ]  # read once, at the start; children of this process choose for themselves
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


def _check_actors(actors: int, flag: str) -> None:
    """Raise UserError for more actors than the processors of this machine could ever serve."""
    most = max(FEW_ACTORS, ACTORS_A_CORE * available_cores())
    if actors > most:
        raise UserError(
            f"{flag} {actors} is too many for the {available_cores()} processors of this machine; ask for {most} at most, or "
            "name a cluster in RAY_ADDRESS"
        )


def available_cores() -> int:
    """Processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _init(ray: Any, embedded: bool, actors: int | None) -> None:
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.CRITICAL}
    if embedded:
        # More logical CPUs than cores: if the actors took every slot, the stages that feed them could never run.
        cpus = max(available_cores(), 2 * (actors or 1)) + IO_SLOTS
        ray.init(
            address="local",
            num_cpus=cpus,
            include_dashboard=False,
            object_store_memory=OBJECT_STORE_BYTES,
            _node_ip_address="127.0.0.1",
            runtime_env={"env_vars": {"PYTHONPATH": _python_path()}},
            **quiet,
        )
    elif os.environ.get("RAY_JOB_CONFIG_JSON_ENV_VAR"):
        ray.init(**quiet)  # a submitted job: its working directory is on every node already
    else:
        ray.init(runtime_env={"py_modules": [str(ROOT / "codec"), str(ROOT / "pipeline")]}, **quiet)


def _python_path() -> str:
    return os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))


def _quieten() -> None:
    data: Any = importlib.import_module("ray.data")
    context = data.DataContext.get_current()
    context.enable_progress_bars = False
    context.print_on_execution_start = False
    context.raise_original_map_exception = True
    context.execution_no_progress_timeout_s = NO_PROGRESS_SECONDS
    logging.getLogger("ray.data").setLevel(logging.CRITICAL)
    logging.getLogger("ray").setLevel(logging.CRITICAL)


def choose_device(device: str, cluster: Cluster) -> str:
    """ "cpu" or "cuda" for `auto`, and a check that there are GPUs when they are asked for.

    Raises:
        UserError: no GPU in the cluster.
    """
    if device == "auto":
        return "cuda" if cluster.gpus > 0 else "cpu"
    if device == "cuda" and cluster.gpus <= 0:
        raise UserError("--device cuda, but Ray sees no GPU; add a GPU node or pass --device cpu")
    return device


def divide(
    cluster: Cluster,
    *,
    device: str,
    actors: int | None,
    gpus_per_actor: float | None,
    groups: int,
    verify: bool,
    actor_bytes: int,
) -> Pools:
    """Divide CPUs, GPUs and memory among encode and verify actors; without `actors`, as many as fit.

    actor_bytes: rough memory that one actor's weights need, in bytes.

    Raises:
        UserError: what was asked for does not fit into the cluster.
    """
    if device == "cuda":
        return _divide_gpus(cluster, actors, gpus_per_actor or 1.0, groups, verify)
    if gpus_per_actor is not None:
        raise UserError(
            f"--gpus-per-actor {gpus_per_actor:g} needs GPUs, and Ray sees none; leave it out to run on CPUs"
        )
    cpus = max(1, int(cluster.cpus) - IO_SLOTS)
    by_memory = max(1, int(cluster.memory // max(1, actor_bytes)))
    pools = 2 if verify else 1
    most = max(1, min(cpus, by_memory) // pools)
    if actors is not None and actors * pools > cpus and actors > 1:
        raise UserError(
            f"--actors {actors} needs {actors * pools} CPUs for {'encode and verify' if verify else 'encode'} actors "
            f"and {cpus} are free; pass a smaller number"
        )
    encoders = max(1, min(actors or most, groups))
    # An actor has a thread for each CPU of its share: more threads than cores would only take turns.
    share = max(1, min(cpus, cluster.cores or cpus) // (encoders * pools))
    return Pools(encoders, share, 0.0, encoders if verify else 0, share, 0.0)


def _divide_gpus(cluster: Cluster, actors: int | None, each: float, groups: int, verify: bool) -> Pools:
    if each > cluster.gpus:
        raise UserError(f"--gpus-per-actor {each:g} is more than the {cluster.gpus:g} GPUs that Ray sees")
    fit = int(cluster.gpus // each) if each >= 1 else int(cluster.gpus) * int(1 / each + 1e-9)
    if actors is not None and actors > fit:
        raise UserError(f"--actors {actors} with {each:g} GPUs each do not fit into {cluster.gpus:g} GPUs")
    # Verifying needs the predictor alone and gives the same bits on a CPU: it takes a GPU only where one is left over.
    spare = fit - (actors or max(1, fit // 2 if verify else fit))
    encoders = max(1, min(actors or fit - (spare if verify else 0), groups))
    verifiers = min(encoders, max(1, spare)) if verify else 0
    cpus = max(1, int(cluster.cpus) - IO_SLOTS)
    share = max(1, cpus // (encoders + verifiers))
    return Pools(encoders, share, each, verifiers, share, each if spare > 0 else 0.0)


def check_shared(cluster: Cluster, *, store_is_local: bool, shared_fs: bool, uri: str) -> None:
    """Refuse a local store on several nodes: each would write to a disk of its own.

    Raises:
        UserError: the store is local, there are several nodes, and `shared_fs` was not said.
    """
    if store_is_local and cluster.nodes > 1 and not shared_fs:
        raise UserError(
            f"the store {uri} is a local path and the cluster has {cluster.nodes} nodes; use s3://, or pass "
            "--shared-fs if every node mounts the same file system there"
        )


def our_error(error: BaseException) -> KVCodecError | None:
    """The error of ours that Ray wrapped into one of its own, if there is one."""
    waiting: list[Any] = [error]
    seen: set[int] = set()
    while waiting:
        current = waiting.pop(0)
        if not isinstance(current, BaseException) or id(current) in seen:
            continue
        seen.add(id(current))
        # RayTaskError makes classes that inherit from ours too; their text is a whole traceback.
        if isinstance(current, KVCodecError) and not hasattr(current, "cause"):
            if isinstance(current, OtherBits):
                return OtherBits(str(current).split(_UDF_NOTE)[0], *current.chunk)
            kind = next(k for k in (UserError, StorageError, DataError, KVCodecError) if isinstance(current, k))
            return kind(str(current).split(_UDF_NOTE)[0])
        waiting += [getattr(current, "cause", None), current.__cause__, current.__context__]
    return None
