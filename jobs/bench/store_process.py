"""Planning for `store` in a process of its own: keys of made-up prompts, a look into the index, groups for the actors.

python -m jobs.bench.store_process REQUEST.json
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from codec.keys import chunk_keys, content_id, root_key
from jobs.bench.child import answer
from jobs.bench.machine import peak_rss_bytes
from jobs.bench.made_up import made_up_parts
from pipeline import index
from pipeline.committed import find_committed
from pipeline.model_source import ModelSource
from pipeline.paths import blob_path
from pipeline.plan import Prompt, make_plan
from pipeline.store import Store
from pipeline.work import Job, make_group

CHUNK = 256
FAMILY = 1000  # prompts that share a prefix
STORED = 20  # one family in so many is in the store already
TARGET, PROFILE = content_id(b"target"), content_id(b"profile")


def plan(request: dict[str, Any]) -> Mapping[str, Any]:
    """Plan; seconds of each step, and the most memory that the process has held."""
    count, tokens, shared = request["prompts"], request["tokens"], request["shared"]
    store = Store.open(request["store"])
    times = [time.perf_counter()]
    prompts = list(_prompts(count, tokens, shared))
    times.append(time.perf_counter())
    there = {key for prompt in prompts if prompt.row // FAMILY % STORED == 0 for key in prompt.all_keys()}
    _fill(store, there)
    times.append(time.perf_counter())
    job = Job(
        store, ModelSource("folder", "made-up", "made-up"), TARGET, "bf16", CHUNK, "int8", "closed", "", profile=PROFILE
    )
    before = find_committed(job, {key for prompt in prompts for key in prompt.all_keys()})
    found = make_plan(prompts, CHUNK, stored=frozenset(before.figures), lost=frozenset(before.lost))
    groups = [make_group(group, found.stored, before.lost, before.gone).to_json() for group in found.groups]
    times.append(time.perf_counter())
    each = -(-tokens // CHUNK)
    own, families = each - shared // CHUNK, -(-count // FAMILY)
    return {
        "key_seconds": times[1] - times[0], "plan_seconds": times[3] - times[2], "peak_bytes": peak_rss_bytes(),
        "chunks": len(found.chunks), "occurrences": found.occurrences, "stored": len(found.stored), "groups": len(groups),
        "group_bytes": sum(map(len, groups)),
        "right": found.stored == there and len(found.chunks) == families * (each - own) + count * own,
    }  # fmt: skip


def _prompts(count: int, tokens: int, shared: int) -> Iterator[Prompt]:
    """As tokenising leaves them; their ids exist one prompt at a time."""
    root = root_key(target=TARGET, cache_format="bf16", chunk_tokens=CHUNK)
    draw = np.random.default_rng(1)
    for number in range(count):
        if number % FAMILY == 0:
            ids = draw.integers(0, 49_152, tokens)
        ids[shared:] = draw.integers(0, 49_152, tokens - shared)
        keys = b"".join(chunk_keys(root, ids, CHUNK))
        place = (0, number)
        yield Prompt(
            str(number), tokens, keys, "prompts/made-up", number, keys[-32:], place, f"made-up:{number}", "", root
        )


def _fill(store: Store, keys: set[bytes]) -> None:
    """An index and empty blobs of these chunks; written without the care that a store takes, as no one will need them."""
    for part in made_up_parts(sorted(keys), TARGET, PROFILE):
        index.write_part(store, part)
    for key in keys:
        path = Path(store.uri.removeprefix("file://")) / blob_path(TARGET, PROFILE, key)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()


if __name__ == "__main__":
    sys.exit(answer(plan))
