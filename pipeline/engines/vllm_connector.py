"""vLLM's connector: restored prefixes go into its paged cache, and prompts that are not stored yet into a spool.

    KVTransferConfig(kv_connector="KVStoreConnector", kv_connector_module_path="pipeline.engines.vllm_connector", kv_role="kv_both",
                     kv_load_failure_policy="recompute", kv_connector_extra_config={"store": "s3://bucket/prefixes"})

Its options are described in vllm_sides.py. Only this module imports vLLM. It imports nothing else of ours before it is used, because
vLLM reads through all loaded modules when a worker starts, and stumbles over those that numba brings along.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata, KVConnectorRole

if TYPE_CHECKING:
    from torch import Tensor

    from pipeline.engines.vllm_sides import Scheduler, Step, Worker


@dataclass
class StepMetadata(KVConnectorMetadata):  # type: ignore[misc]  # vLLM is not installed where types are checked
    """What the scheduler tells the worker of one step."""

    step: Step


class KVStoreConnector(KVConnectorBase_V1):  # type: ignore[misc]
    """Scheduler side or worker side, as `role` says. Raises UserError, DataError, StorageError: the engine does not start."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        from pipeline.engines import vllm_sides

        vllm_sides.check(vllm_config, kv_cache_config)
        if role == KVConnectorRole.SCHEDULER:
            self._scheduler: Scheduler = vllm_sides.Scheduler(vllm_config)
        else:
            self._worker = self.make_worker(vllm_config)

    def make_worker(self, vllm_config: Any) -> Worker:
        """The worker's side."""
        from pipeline.engines.vllm_sides import Worker

        return Worker(vllm_config)

    # ---------------------------------------------------------------- the scheduler
    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        """Tokens that are stored beyond those that vLLM has; they are loaded while other requests run."""
        found = self._scheduler.matched(request, num_computed_tokens)
        return found, found > 0

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """There are blocks now for what was matched."""
        self._scheduler.allocated(request, blocks.get_block_ids()[0], num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> StepMetadata:
        """What the worker is to do in this step."""
        return StepMetadata(self._scheduler.step(scheduler_output))

    def update_connector_output(self, connector_output: Any) -> None:
        """Loads that have ended in the worker."""
        failed, ended = connector_output.invalid_block_ids, connector_output.finished_recving
        self._scheduler.loaded(set(failed or ()), set(ended or ()))

    def request_finished(self, request: Any, block_ids: Sequence[int]) -> tuple[bool, None]:
        """Its blocks can be used again: loads have ended, and what is saved was copied."""
        self._scheduler.finished(request.request_id)
        return False, None

    # ---------------------------------------------------------------- the worker
    def register_kv_caches(self, kv_caches: Mapping[str, Tensor]) -> None:
        """The paged cache of every layer."""
        self._worker.register(kv_caches)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Begin this step's loads."""
        self._worker.load(self._step())

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing to wait for: what a step computes with was loaded before it."""

    def save_kv_layer(self, layer_name: str, kv_layer: Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """All layers are saved together, after the step."""

    def wait_for_save(self) -> None:
        """Copy the pages of prompts that this step completed."""
        self._worker.save(self._step())

    def get_finished(self, finished_req_ids: set[str]) -> tuple[None, set[str] | None]:
        """Requests whose loads have ended."""
        return None, self._worker.done(self._step()) or None

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Blocks of those requests that hold nothing right."""
        return self._worker.failed()

    def shutdown(self) -> None:
        """End the threads."""
        if self.role == KVConnectorRole.WORKER:
            self._worker.close()

    def _step(self) -> Step:
        step: Step = self._get_connector_metadata().step
        return step
