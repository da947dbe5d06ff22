"""The connector with a loader that tells what it did. Imported by vLLM."""

from __future__ import annotations

from typing import Any

from pipeline.engines.vllm_connector import KVStoreConnector


class TracedConnector(KVStoreConnector):
    """The connector of the tests."""

    def make_worker(self, vllm_config: Any) -> Any:
        """One with a witness; imported late, as the connector does it."""
        from pipeline.engines.vllm_sides import Worker
        from tests.vllm.traced_loader import TracedLoader

        return Worker(vllm_config, TracedLoader)
