"""The facts of a report, read from a store: generations, what their layers cost, prompts, run records. Nothing is decoded.

What cannot be read becomes a note on the page, because a report is most wanted when something is wrong.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from codec.errors import DataError, KVCodecError, StorageError
from pipeline import index
from pipeline.catalogue import Generation, StoredPrompt, generations, read_generation, stored_prompts
from pipeline.current import Pair, read_pointers
from pipeline.health import Costs, Health
from pipeline.paths import predictor_path, profile_path
from pipeline.runs import RunRecord, list_runs, read_run
from pipeline.store import Store
from pipeline.work import load_profile, predictor_config

MOST_PROMPTS = 20_000  # read of a generation; those beyond would change no picture
MOST_RUNS = 500  # the latest
CURRENT = "current"
_MOST_COUNT = 1 << 62
_SUMS = ["raw_bytes", "stored_bytes", "header_bytes", "bytes_k", "bytes_v", "tokens", "scalars_k", "scalars_v"]
_LAYERS = ["layer_bits", "layer_spread", "layer_miss"]

Note = Callable[[str], None]


@dataclass(frozen=True)
class PromptFacts:
    """A prompt and the keys of its chunks in one generation; sizes of those that are stored."""

    id: str
    tokens: int
    keys: tuple[bytes, ...]
    raw_bytes: int
    stored_bytes: int


@dataclass
class GenerationFacts:
    """One target under one profile."""

    target: str
    profile: str
    model: str = "?"
    cache_format: str = "?"
    rung: str = "?"
    state: str = ""  # current, staged or replaced, as the model's pointer says; "" where none speaks of it
    chunks: int = 0
    sums: Counter[str] = field(default_factory=Counter)  # of the columns in _SUMS
    profile_bytes: int = 0
    predictor_bytes: int = 0
    costs: Costs | None = None
    with_costs: int = 0  # chunks that `costs` are of
    health: Health | None = None
    prompts: list[PromptFacts] = field(default_factory=list)

    @property
    def name(self) -> str:
        """As a person tells it from others."""
        return f"{self.model} {self.cache_format} {self.rung} ({self.target[:6]}/{self.profile[:6]})"

    @property
    def ratio(self) -> float | None:
        """Raw bytes over those of the blobs."""
        return self.sums["raw_bytes"] / self.sums["stored_bytes"] if self.sums["stored_bytes"] else None

    @property
    def all_bytes(self) -> int:
        """Of blobs, profile and predictor."""
        return self.sums["stored_bytes"] + self.profile_bytes + self.predictor_bytes

    @property
    def bits(self) -> float | None:
        """Bits a scalar on disk, headers and all."""
        scalars = self.sums["scalars_k"] + self.sums["scalars_v"]
        return 8 * self.sums["stored_bytes"] / scalars if scalars else None

    @property
    def uses(self) -> Counter[bytes]:
        """How many prompts each chunk is in."""
        return Counter(key for prompt in self.prompts for key in prompt.keys)


@dataclass(frozen=True)
class Facts:
    """All that a page shows. notes: what could not be read."""

    uri: str
    generations: list[GenerationFacts]
    runs: list[RunRecord]
    notes: list[str]


def gather(store: Store, tell: Note = lambda text: None) -> Facts:
    """Read a store's facts; `tell` is told what is going on. Raises StorageError where nothing can be read at all."""
    notes: list[str] = []
    runs = _runs(store, notes.append)
    rungs = {run.generation: run.rung for run in runs}
    states = _states(store, notes.append)
    found = []
    for number, gen in enumerate(everything := list(generations(store).values())):
        tell(f"reading generation {number + 1} of {len(everything)}")
        facts = _generation(store, gen, notes.append)
        name = f"{facts.target}/{facts.profile}"
        facts.rung = rungs.get(name) or facts.rung
        facts.state = states.get((gen.target, gen.profile), "")
        found.append(facts)
    found.sort(key=lambda one: (one.model, one.state != CURRENT, -one.sums["stored_bytes"]))
    return Facts(store.uri, found, runs, notes)


def _runs(store: Store, note: Note) -> list[RunRecord]:
    out = []
    for path in list(list_runs(store))[-MOST_RUNS:]:
        try:
            run = read_run(store, path)
        except KVCodecError as error:
            note(str(error))
            continue
        if all(0 <= value <= _MOST_COUNT for value in asdict(run).values() if isinstance(value, int)):
            out.append(run)
        else:
            note(f"the run record {store.uri}/{path} has a count that cannot be")
    return out


def _states(store: Store, note: Note) -> dict[Pair, str]:
    """What the pointers of models say about generations."""
    pointers = read_pointers(store)
    for path, error in pointers.damaged.items():
        note(f"{store.uri}/{path}: {error}")
    found = dict.fromkeys(pointers.retired, "replaced") | dict.fromkeys(pointers.staged, "staged")
    return found | dict.fromkeys(pointers.in_use, CURRENT)


# ---------------------------------------------------------------- one generation
def _generation(store: Store, gen: Generation, note: Note) -> GenerationFacts:
    facts = GenerationFacts(gen.target.hex(), gen.profile.hex())

    def broken(path: str, error: DataError) -> None:
        note(f"{store.uri}/{path}: {error}")

    read_generation(store, gen, broken=broken)
    sizes = _figures(store, gen, facts, broken)
    facts.profile_bytes = _size(store, profile_path(gen.profile))
    rows = next(iter(gen.rows.values()), None)
    if rows is None:
        return facts
    facts.model, facts.cache_format = rows[0].model, rows[0].cache_format
    facts.predictor_bytes = _size(store, predictor_path(rows[0].predictor))
    loop = facts.rung
    facts.rung = f"{_kind(store, rows[0].predictor)} {loop}".strip()
    facts.prompts = list(_prompts(store, gen, facts, sizes, broken))
    if facts.costs is not None:
        try:
            profile = load_profile(store, gen.profile, target=gen.target, cache_format=facts.cache_format)
            facts.health = Health.of(facts.costs, profile, facts.with_costs)
        except KVCodecError as error:
            note(str(error))
    return facts


def _figures(
    store: Store, gen: Generation, facts: GenerationFacts, broken: Callable[[str, DataError], None]
) -> dict[bytes, int]:
    """Add up the rows of a generation, each chunk once; stored bytes by key."""
    sizes: dict[bytes, int] = {}
    columns = ["key", "loop", *_SUMS, *_LAYERS]
    for path, part in index.iter_parts(store, target=gen.target, profile=gen.profile, columns=columns, broken=broken):
        keys = part["key"].to_pylist()
        fresh = [number for number, key in enumerate(keys) if key not in sizes]
        table = part.take(pa.array(fresh, pa.int64()))  # a list may be empty, and then says no type
        sizes |= dict(zip(table["key"].to_pylist(), table["stored_bytes"].to_pylist(), strict=True))
        facts.chunks += len(table)
        facts.sums.update({name: int(table[name].to_numpy().sum()) for name in _SUMS})
        facts.rung = str(table["loop"][0]) if len(table) else facts.rung
        try:
            costs, count = layer_costs(table)
            facts.costs = Costs.total(one for one in (facts.costs, costs) if one is not None)
            facts.with_costs += count
        except DataError as error:
            broken(path, error)
    return sizes


def layer_costs(table: pa.Table) -> tuple[Costs | None, int]:
    """What the rows that say it cost together, and how many these are. Raises DataError where rows contradict each other."""
    table = table.filter(table["layer_bits"].is_valid())
    if not len(table):
        return None, 0
    values = {}
    for name in _LAYERS:
        flat = table[name].combine_chunks().flatten().to_numpy(zero_copy_only=False)
        if len(pc.unique(pc.list_value_length(table[name]))) != 1:
            raise DataError(f"the rows' figures of layers in {name} are of several lengths")
        values[name] = flat.reshape(len(table), -1).astype(np.float64)
    layers = values["layer_spread"].shape[1] // 2
    if not layers or values["layer_miss"].shape[1] != 2 * layers or values["layer_bits"].shape[1] % (2 * layers):
        raise DataError("the rows' figures of layers contradict each other")
    scalars = np.stack([table[f"scalars_{side}"].to_numpy() / layers for side in "kv"], 1)  # [rows, 2]
    heads = values["layer_bits"].reshape(len(table), layers, 2, -1)
    weighed = {name: values[name].reshape(len(table), layers, 2) * scalars[:, None] for name in _LAYERS[1:]}
    return Costs(
        (heads * scalars[:, None, :, None] / heads.shape[3]).sum(0),
        weighed["layer_spread"].sum(0),
        weighed["layer_miss"].sum(0),
        np.tile(scalars.sum(0), (layers, 1)),
    ), len(table)


def _prompts(
    store: Store,
    gen: Generation,
    facts: GenerationFacts,
    sizes: dict[bytes, int],
    broken: Callable[[str, DataError], None],
) -> Iterator[PromptFacts]:
    """Prompts all of whose chunks are stored, each once."""
    seen: set[tuple[str, str, bytes]] = set()  # several parts can hold a prompt
    a_token = facts.sums["raw_bytes"] / max(1, facts.sums["tokens"])
    for prompt in stored_prompts(store, gen.target, gen.roots, gen.rows.__contains__, broken=broken):
        name = (prompt.tenant, prompt.id, prompt.keys[-1])
        if name in seen or any(key not in sizes for key in prompt.keys):
            continue
        seen.add(name)
        yield _prompt(prompt, round(a_token * prompt.n_tokens), sizes)
        if len(seen) == MOST_PROMPTS:
            return


def _prompt(prompt: StoredPrompt, raw: int, sizes: dict[bytes, int]) -> PromptFacts:
    return PromptFacts(prompt.id, prompt.n_tokens, prompt.keys, raw, sum(sizes[key] for key in prompt.keys))


def _size(store: Store, path: str) -> int:
    try:
        return store.size(path)
    except StorageError:
        return 0  # verification says what is missing


def _kind(store: Store, fingerprint: bytes) -> str:
    """What kind of predictor it is, from the beginning of its file; "" where that does not say."""
    try:
        return str(predictor_config(store, fingerprint).get("kind", ""))[:40]
    except (DataError, StorageError):
        return ""
