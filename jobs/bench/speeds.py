"""What this machine takes for one prefix, without a corpus and without calibration: prefilling, predicting, coding.

Predictors are built as `predictor` builds them, and joint models are made up (jobs/bench/synthetic.py): neither changes what a token
costs. All tokens of a prefix go through a predictor at once, as in restoring.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from codec.errors import UserError
from codec.formats import number_format
from codec.predictor import MODEL_FREE
from codec.predictor.config import head_dim
from jobs.bench.predictor import predict
from jobs.bench.synthetic import HEAD_DIM, Sweep, sweep
from jobs.bench.turns import Note, take_turns
from pipeline.economics import Case, Rung
from pipeline.estimate import guessed_bits, kv_bytes_a_token
from pipeline.model_source import ModelSource, load_config
from pipeline.rung import Rung as Recipe
from pipeline.target import Target, context_length, kv_shape, load_target

LOOKS_BACK = {"linear": 2}  # layers that a rung's joint model looks back


@dataclass(frozen=True)
class Wanted:
    """What is measured. tokens: of the prefix; clock: time.process_time where others are at work on the machine."""

    rungs: Sequence[str]
    tokens: int
    chunk_tokens: int
    cache_format: str
    repeats: int
    clock: Callable[[], float] = time.perf_counter


def measure(source: ModelSource, wanted: Wanted, note: Note) -> Case:
    """Seconds of one prefix on this machine; bits are guesses. Raises UserError."""
    longest = context_length(load_config(source))
    if wanted.tokens > longest:
        raise UserError(f"--tokens {wanted.tokens} is over the model's context length of {longest}")
    return measure_target(load_target(source, wanted.cache_format), wanted, note)


@torch.no_grad()
def measure_target(target: Target, wanted: Wanted, note: Note) -> Case:
    """The same of a target that is loaded, and whose context holds so many tokens."""
    config = target.config
    ids = torch.randint(0, int(config["vocab_size"]), (wanted.tokens,), generator=torch.Generator().manual_seed(0))
    sides: dict[str, Callable[[], object]] = {"target": lambda: target.prefill(target.new_cache(), ids)}
    for kind in wanted.rungs:
        note(f"building {kind}")
        sides[kind] = partial(predict, Recipe(kind, "closed").build(target, None, []), [ids])
    passes = {
        name: statistics.median(times) for name, times in take_turns(sides, wanted.repeats, note, wanted.clock).items()
    }
    layers, _, heads = kv_shape(config)
    width, item_bits = heads * head_dim(config), number_format(wanted.cache_format).item_bits
    costs = {back: _coding(width, back, wanted, note) for back in {LOOKS_BACK.get(kind, 0) for kind in wanted.rungs}}
    scalars = 2 * layers * width * wanted.tokens
    rungs = []
    for kind in wanted.rungs:
        decode, encode = costs[LOOKS_BACK.get(kind, 0)]
        guessing = 0.0 if kind in MODEL_FREE else passes[kind]
        bits = guessed_bits("closed", kind, wanted.cache_format)
        rungs.append(Rung(kind, bits, guessing + decode * scalars, guessing + encode * scalars))
    raw = kv_bytes_a_token(config, wanted.cache_format) * wanted.tokens
    return Case(wanted.tokens, raw, item_bits, passes["target"], rungs)


def _coding(width: int, looks_back: int, wanted: Wanted, note: Note) -> tuple[float, float]:
    """Seconds a scalar of decoding and encoding under joint models of that width, measured at the nearest that can be made up."""
    nearest = max(HEAD_DIM, round(width / HEAD_DIM) * HEAD_DIM)
    given = Sweep((nearest,), min(wanted.tokens, wanted.chunk_tokens), wanted.repeats, looks_back, wanted.clock)
    found = sweep(given, note)[nearest]
    return found["ns_per_scalar"] / 1e9, found["encode_ns_per_scalar"] / 1e9
