"""What a job would come to, for --dry-run: said before any weights are loaded."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from codec.errors import UserError
from codec.formats import number_format
from codec.predictor.config import head_dim
from pipeline.plan import Plan
from pipeline.work import ChunkFigures, Job

# By loop and predictor, bf16: what SmolLM2-135M came to, rounded down; int8-mixed on short prompts only, int4 and mxfp4 guessed.
GUESSED_RATIOS = {("open", "fp8"): 2.3, ("closed", "fp8"): 3.6, ("closed", "int8"): 3.9, ("closed", "int8-mixed"): 4.7,
                  ("closed", "int8-a16"): 5.2, ("closed", "int4"): 2.9, ("closed", "mxfp4"): 2.8,
                  ("closed", "static"): 1.8, ("closed", "linear"): 2.0}  # fmt: skip
GUESSED_RATIO = 2.3  # of any other
# The same of an FP8 cache, over 8 bits (e4m3, one scale a tensor); open: the code length of a reference.
GUESSED_FP8_RATIOS = {
    ("open", "fp8"): 2.7,
    ("closed", "fp8"): 4.8,
    ("closed", "int8"): 5.5,
    ("closed", "int8-a16"): 8.0,
}
GUESSED_FP8_RATIO = 2.7
# Tokens a second of one actor, times parameters: target, exact predictor, coder and checks together. Measured with a
# 135M model on one core of a server CPU; for a GPU it is no more than a guess.
GUESSED_CPU_WORK = 4.0e9
GUESSED_GPU_WORK = 2.0e12


@dataclass(frozen=True)
class Estimate:
    """Expected sizes and time. `*_from` says where a figure comes from."""

    prompts: int
    tokens: int
    chunks_new: int
    chunks_shared: int
    chunks_skipped: int
    new_tokens: int
    raw_bytes: int
    expected_bytes: int
    expected_bytes_from: str
    expected_seconds: float
    expected_seconds_from: str

    def to_dict(self) -> dict[str, Any]:
        """Plain data for the report."""
        return {"dry_run": True, **asdict(self)}


def kv_bytes_a_token(config: Mapping[str, Any], cache_format: str) -> int:
    """Raw K and V of one token over all layers, in bytes, from a Hugging Face config with standard names.

    Raises:
        UserError: the config does not say it.
    """
    for name in ("num_attention_heads", "num_hidden_layers", "hidden_size"):
        if not isinstance(config.get(name), int):
            raise UserError(f"the model's configuration has no {name}, without which nothing can be estimated")
    heads = int(config["num_attention_heads"])
    kv_heads = int(config.get("num_key_value_heads") or heads)
    scalars = int(config["num_hidden_layers"]) * 2 * kv_heads * head_dim(config)
    return scalars * number_format(cache_format).item_bytes


def estimate(
    plan: Plan,
    job: Job,
    config: Mapping[str, Any],
    weight_bytes: int,
    known: Iterable[ChunkFigures],
    *,
    device: str,
    actors: int,
) -> Estimate:
    """Expected bytes and time of the plan's new chunks.

    Args:
        weight_bytes: size of the model's files, from which its parameters are guessed (two bytes each).
        known: figures of chunks of the same target and profile stored before; their ratio is used where there are any.
        actors: encode actors at work.
    """
    raw = plan.new_tokens * kv_bytes_a_token(config, job.cache_format)
    rows = list(known)
    stored = sum(row.stored_bytes for row in rows)
    ratio = (
        sum(row.raw_bytes for row in rows) / stored
        if stored
        else guessed_ratio(job.loop, job.predictor_kind, job.cache_format)
    )
    work = GUESSED_GPU_WORK if device == "cuda" else GUESSED_CPU_WORK
    seconds = plan.new_tokens * max(1, weight_bytes // 2) / work / max(1, actors)
    return Estimate(
        prompts=len(plan.prompts),
        tokens=plan.tokens,
        chunks_new=len(plan.new),
        chunks_shared=plan.shared,
        chunks_skipped=len(plan.stored),
        new_tokens=plan.new_tokens,
        raw_bytes=raw,
        expected_bytes=int(raw / ratio),
        expected_bytes_from=f"{len(rows)} chunks stored before" if stored else "a guess, as nothing is stored yet",
        expected_seconds=seconds,
        expected_seconds_from="a guess from the model's size",
    )


def guessed_bits(loop: str, predictor: str, cache_format: str) -> float:
    """Bits a scalar that a rung needs, guessed from other models'."""
    return number_format(cache_format).item_bits / guessed_ratio(loop, predictor, cache_format)


def guessed_ratio(loop: str, predictor: str, cache_format: str) -> float:
    """Raw over stored bytes, guessed the same way."""
    fmt, kind = number_format(cache_format), (loop, predictor)
    if fmt.coarse:
        return GUESSED_FP8_RATIOS.get(kind, GUESSED_FP8_RATIO)
    bf16 = number_format("bf16")
    bits = bf16.item_bits / GUESSED_RATIOS.get(kind, GUESSED_RATIO)
    # A finer format has mantissa bits more, which no predictor knows.
    return fmt.item_bits / (bits + fmt.mantissa + fmt.raw - bf16.mantissa)
