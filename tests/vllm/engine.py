"""One vLLM in a process of its own: a plan as JSON in, what it answered as JSON out. Runs where vLLM is installed.

plan: {"model", "kv", "batched", "store" or null, "spool" or null, "runs": [{"ids", "tokens", "flip", "corrupt"}]}
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
import sys
from pathlib import Path
from typing import Any

os.environ.update(
    HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1", DO_NOT_TRACK="1", VLLM_CPU_KVCACHE_SPACE="1", VLLM_HOST_IP="127.0.0.1",
    VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_LOGGING_LEVEL="WARNING",
)  # fmt: skip
sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))


def answer(plan: dict[str, Any]) -> list[dict[str, Any]]:
    """The answers to all runs, one after another."""
    from vllm import LLM, SamplingParams
    from vllm.config import KVTransferConfig

    connector = None
    if plan["store"]:
        extra = {"store": plan["store"], "refresh": 0.0} | ({"spool": plan["spool"]} if plan["spool"] else {})
        connector = KVTransferConfig(
            kv_connector="TracedConnector", kv_connector_module_path="tests.vllm.traced", kv_role="kv_both",
            kv_load_failure_policy="recompute", kv_connector_extra_config=extra,
        )  # fmt: skip
    llm = LLM(
        model=plan["model"], dtype="bfloat16", kv_cache_dtype=plan["kv"], max_model_len=1024, max_num_seqs=2, enforce_eager=True,
        max_num_batched_tokens=plan["batched"], enable_prefix_caching=False, kv_transfer_config=connector, seed=0,
    )  # fmt: skip
    found = []
    for run in plan["runs"]:
        trace = prepare(run) if connector else []
        wanted = SamplingParams(temperature=0, max_tokens=run["tokens"], logprobs=20, ignore_eos=True)
        (out,) = llm.generate({"prompt_token_ids": run["ids"]}, wanted, use_tqdm=False)
        text = out.outputs[0]
        found.append({"tokens": list(text.token_ids), "hash": hash_of(text.logprobs), "trace": list(trace)})
    llm.llm_engine.engine_core.shutdown()
    return found


def prepare(run: dict[str, Any]) -> list[dict[str, Any]]:
    """Do to the store and the pages what the run asks for; where its trace will be."""
    from tests.vllm import traced_loader as traced

    traced.TRACE.clear()
    traced.FLIP[:] = [True] if run.get("flip") else []
    if run.get("corrupt"):
        path = Path(run["corrupt"])
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
    return traced.TRACE


def hash_of(logprobs: Any) -> str:
    """SHA-256 over the best tokens of every position and the bits of their log-probabilities."""
    digest = hashlib.sha256()
    for position in logprobs:
        for token, value in sorted(position.items()):
            digest.update(struct.pack("<qd", token, value.logprob))
    return digest.hexdigest()


if __name__ == "__main__":
    plan_path, out_path = map(Path, sys.argv[1:])
    out_path.write_text(json.dumps(answer(json.loads(plan_path.read_text()))))
