"""Decoding a large store on Ray: actors that work off the tasks of pipeline/deep.py."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

from pipeline import ray_runtime
from pipeline.deep import Decoded, Decoder, Task, Work
from pipeline.paths import PREDICTORS
from pipeline.store import Store
from pipeline.worker_process import settle

ACTOR_PREDICTORS = (
    3  # memory of one actor, in sizes of the largest predictor: its bytes, itself, and what it works with
)
ACTOR_BYTES = 1 << 30  # and what it needs besides
MAX_BLOCKS = 4096
LITTLE_TOKENS = 16_384  # so many are decoded before Ray and its actors are there


class DeepActor:
    """Batches of tasks in, what became of them out."""

    def __init__(self, store: Store, device: str, threads: int) -> None:
        self._store, self._device, self._threads = store, device, threads
        self._decoder: Decoder | None = None

    def __call__(self, batch: dict[str, Any]) -> Iterator[dict[str, list[str]]]:
        if self._decoder is None:
            settle(self._threads)
            self._decoder = Decoder(self._store, self._device)
        for text in batch["task"]:
            yield {"done": [self._decoder.decode(Task.from_json(str(text))).to_json()]}


def on_ray(store: Store, device: str, *, shared_fs: bool = False) -> Work:
    """To do tasks by actors, as many as fit: in the cluster of RAY_ADDRESS, or on this machine.

    What is returned raises DataError and StorageError as `Decoder.decode`, UserError for a cluster that cannot do it.
    """
    return lambda todo: _decoded(store, device, shared_fs, todo)


def _decoded(store: Store, device: str, shared_fs: bool, todo: list[Task]) -> Iterator[Decoded]:
    data: Any = importlib.import_module("ray.data")
    predictor = max((entry.size for entry in store.entries(PREDICTORS)), default=0)
    try:
        with ray_runtime.connected(None) as cluster:
            ray_runtime.check_shared(cluster, store_is_local=store.is_local, shared_fs=shared_fs, uri=store.uri)
            chosen = ray_runtime.choose_device(device, cluster)
            pools = ray_runtime.divide(
                cluster,
                device=chosen,
                actors=None,
                gpus_per_actor=None,
                groups=len(todo),
                verify=False,
                actor_bytes=ACTOR_PREDICTORS * predictor + ACTOR_BYTES,
            )
            stage = data.from_items(
                [{"task": task.to_json()} for task in todo], override_num_blocks=min(len(todo), MAX_BLOCKS)
            )
            stage = stage.map_batches(
                DeepActor,
                fn_constructor_args=(store, chosen, max(1, int(pools.encode_cpus))),
                batch_size=1,
                num_cpus=pools.encode_cpus,
                num_gpus=pools.encode_gpus,
                compute=data.ActorPoolStrategy(size=pools.encoders),
            )
            for row in stage.iter_rows():
                yield Decoded.from_json(row["done"])
    except Exception as error:
        ours = ray_runtime.our_error(error)
        if ours is None or ours is error:
            raise
        raise ours from error
