"""What travels to the actors and back: the job's identity, one group of prompts, and what became of its chunks.

Groups and results travel as JSON text in one column, so that blocks are small, have one schema and hold no tensors.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import codec
from codec import coders
from codec.errors import DataError
from codec.scales import CacheScales
from pipeline.health import Costs
from pipeline.model_source import ModelSource
from pipeline.options import Verify
from pipeline.paths import predictor_path, profile_path
from pipeline.plan import Plan, Prompt, group_prompts
from pipeline.rung import Rung
from pipeline.store import Store

# What became of a chunk that a group needed.
WRITTEN = "written"  # this run computed and stored it
ADOPTED = "adopted"  # its blob was there: another job won, or an earlier one died before its commit
KEPT = "kept"  # stored and committed before; decoded only to continue from its bits


Charge = Callable[[Store, str, int], None]  # asked before an object of so many bytes is written: see pipeline/quota.py

ALL = Verify(1.0)
_MAX_HEADER = 1 << 20  # bytes of a predictor's description


class OtherBits(DataError):
    """A chunk is gone, and computed again it holds other bits than those that stored chunks follow from."""

    def __init__(self, message: str, key: bytes = b"", digest: bytes = b"") -> None:
        """key: the chunk's; digest: that of the chain's bits it had."""
        super().__init__(message, key, digest)

    @property
    def chunk(self) -> tuple[bytes, bytes]:
        """Key, and the digest of the chain's bits up to and with the chunk, as they were."""
        return self.args[1], self.args[2]

    def __str__(self) -> str:
        return str(self.args[0])


@dataclass(frozen=True)
class Decoded:
    """A stored generation of the same target whose chunks are encoded again."""

    predictor: bytes
    profile: bytes


@dataclass(frozen=True)
class Job:
    """What every actor of a job is told. Secrets are not among it: tenants are named by a hash of their salt."""

    store: Store
    model: ModelSource
    target: bytes
    cache_format: str
    chunk_tokens: int
    predictor_kind: str
    loop: str
    tenant: str  # of records without a salt of their own
    predictor: bytes = b""
    profile: bytes = b""
    verify: Verify = ALL
    window: int | None = None
    coder: str = coders.DEFAULT
    scale_mode: str = ""  # of an FP8 cache: one of SCALE_MODES
    scales: bytes = b""  # CacheScales of an FP8 cache; empty also as long as they are not known
    decoded: Decoded | None = None  # where the truth is read from; None: the target computes it

    @property
    def rung(self) -> Rung:
        """How its predictor is made."""
        return Rung(self.predictor_kind, self.loop, self.window)

    @property
    def scaled(self) -> bool:
        """Whether all is known that the chunks' keys depend on."""
        return not self.scale_mode or bool(self.scales)

    @property
    def cache_scales(self) -> CacheScales | None:
        """The scales of an FP8 cache. DataError where they are malformed."""
        return CacheScales.from_bytes(self.scales) if self.scales else None


@dataclass(frozen=True)
class Device:
    """Where an actor computes: a torch device, whether transformers spreads the target over several, and threads."""

    name: str
    spread: bool
    threads: int


@dataclass(frozen=True)
class PromptRef:
    """A prompt as an actor sees it: where its tokens are, and its chain of keys."""

    id: str
    part: str
    row: int
    n_tokens: int
    keys: tuple[bytes, ...]
    tenant: str = ""
    root: bytes = b""  # key of the empty prefix, from which the keys follow

    def to_plain(self) -> dict[str, Any]:
        """As data that JSON can say."""
        return asdict(self) | {"keys": [key.hex() for key in self.keys], "root": self.root.hex()}

    @staticmethod
    def from_plain(data: Mapping[str, Any]) -> PromptRef:
        """Read what `to_plain` gave."""
        return PromptRef(**(dict(data) | {"keys": _keys(data["keys"]), "root": bytes.fromhex(data["root"])}))


@dataclass(frozen=True)
class Group:
    """Prompts for one actor call, in token order."""

    prompts: tuple[PromptRef, ...]
    todo: frozenset[bytes]  # chunks without a committed row, or whose blob is lost
    lost: Mapping[bytes, bytes]  # chunk key -> digest of its chain's raw bits, from the committed row
    gone: Mapping[bytes, bytes] = field(
        default_factory=dict
    )  # the same where the row is gone, too, from rows that follow

    def to_json(self) -> str:
        """As text; `from_json` reads it back."""
        prompts = [prompt.to_plain() for prompt in self.prompts]
        lost, gone = ({k.hex(): digest.hex() for k, digest in some.items()} for some in (self.lost, self.gone))
        return json.dumps({"prompts": prompts, "todo": sorted(k.hex() for k in self.todo), "lost": lost, "gone": gone})

    @staticmethod
    def from_json(text: str) -> Group:
        """Read what `to_json` wrote."""
        data = json.loads(text)
        prompts = tuple(map(PromptRef.from_plain, data["prompts"]))
        lost, gone = (
            {bytes.fromhex(key): bytes.fromhex(digest) for key, digest in data[name].items()}
            for name in ("lost", "gone")
        )
        return Group(prompts, frozenset(_keys(data["todo"])), lost, gone)


def make_group(
    prompts: Iterable[Prompt],
    stored: frozenset[bytes],
    lost: Mapping[bytes, bytes],
    gone: Mapping[bytes, bytes] | None = None,
) -> Group:
    """A group of planned prompts, with what an actor has to know about their chunks."""
    refs = tuple(PromptRef(p.id, p.part, p.row, p.n_tokens, tuple(p.all_keys()), p.tenant, p.root) for p in prompts)
    keys = {key for ref in refs for key in ref.keys}
    gone = gone or {}
    return Group(
        refs,
        frozenset(keys - stored),
        {key: lost[key] for key in keys & lost.keys()},
        {key: gone[key] for key in keys & gone.keys()},
    )


@dataclass(frozen=True)
class ChunkFigures:
    """Sizes of one stored chunk. `ideal_bits_*` are None where the chunk was not encoded by this run."""

    key: bytes
    outcome: str
    tokens: int
    raw_bytes: int
    stored_bytes: int
    header_bytes: int
    bytes_k: int
    bytes_v: int
    scalars_k: int
    scalars_v: int
    ideal_bits_k: float | None = None
    ideal_bits_v: float | None = None


@dataclass
class GroupResult:
    """What one group came to. Figures and keys only; the verify stage adds the last two fields."""

    prompts: tuple[PromptRef, ...]
    chunks: list[ChunkFigures]
    index_part: str  # "" when there was nothing to commit
    target_tokens: int  # run through the target
    target_seconds: float  # spent in it
    seconds: float  # spent on the group as a whole, loading of models not included
    costs: Costs | None = None  # of the `measured` chunks that this group encoded
    measured: int = 0
    verified: list[bytes] = field(default_factory=list)
    failed: dict[bytes, str] = field(default_factory=dict)  # key -> what is wrong, naming the blob

    def to_json(self) -> str:
        """As text; `from_json` reads it back."""
        data = asdict(replace(self, costs=None))
        data["costs"] = None if self.costs is None else self.costs.to_plain()
        data["prompts"] = [prompt.to_plain() for prompt in self.prompts]
        data["chunks"] = [asdict(c) | {"key": c.key.hex()} for c in self.chunks]
        data["verified"] = [key.hex() for key in self.verified]
        data["failed"] = {key.hex(): message for key, message in self.failed.items()}
        return json.dumps(data)

    @staticmethod
    def from_json(text: str) -> GroupResult:
        """Read what `to_json` wrote."""
        data: dict[str, Any] = json.loads(text)
        data["prompts"] = tuple(map(PromptRef.from_plain, data["prompts"]))
        data["chunks"] = [ChunkFigures(**(c | {"key": bytes.fromhex(c["key"])})) for c in data["chunks"]]
        data["costs"] = Costs.from_plain(data["costs"])
        data["verified"] = list(_keys(data["verified"]))
        data["failed"] = {bytes.fromhex(key): message for key, message in data["failed"].items()}
        return GroupResult(**data)


def verify_groups(plan: Plan, figures: Mapping[bytes, ChunkFigures]) -> list[GroupResult]:
    """These chunks of a plan, which are stored, for the verify stage, as if they had just been encoded; each is in one group."""
    groups, seen = [], set[bytes]()
    for prompts in group_prompts(plan.prompts, plan.chunks, frozenset(plan.chunks.keys() - figures.keys())):
        refs = make_group(prompts, frozenset(), {}).prompts
        keys = dict.fromkeys(key for ref in refs for key in ref.keys if key in figures and key not in seen)
        seen.update(keys)
        groups.append(GroupResult(refs, [figures[key] for key in keys], "", 0, 0.0, 0.0))
    return groups


def _keys(texts: Iterable[str]) -> tuple[bytes, ...]:
    return tuple(bytes.fromhex(text) for text in texts)


def predictor_config(store: Store, fingerprint: bytes) -> dict[str, object]:
    """What a stored predictor says of itself, from the beginning of its file. Raises DataError, StorageError."""
    path = predictor_path(fingerprint)
    length = int.from_bytes(store.get(path, end=8), "little")
    try:
        if length > _MAX_HEADER:
            raise ValueError(f"its header has {length} bytes")
        header = json.loads(store.get(path, start=8, end=8 + length))
        found: dict[str, object] = json.loads(header["__metadata__"]["predictor"])
        return dict(found)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise DataError(f"the predictor {store.uri}/{path} does not say what it is ({error!s:.100})") from None


def put_predictor(store: Store, predictor: codec.Predictor, charge: Charge | None = None) -> bytes:
    """Put a predictor into the store, unless it is there; its fingerprint. Raises StorageError, and what `charge` does."""
    put_charged(store, predictor_path(predictor.fingerprint), predictor.to_bytes(), charge)
    return predictor.fingerprint


def put_profile(store: Store, profile: codec.Profile, charge: Charge | None = None) -> bytes:
    """Put a profile into the store, unless it is there; its id. Raises StorageError, and what `charge` does."""
    put_charged(store, profile_path(profile.id), profile.to_bytes(), charge)
    return profile.id


def put_charged(store: Store, path: str, data: bytes, charge: Charge | None) -> None:
    """Put an object into the store, unless it is there. Raises StorageError, and what `charge` does, which is asked before."""
    if charge is not None and not store.exists(path):
        charge(store, path, len(data))
    store.put_new(path, data)


def load_predictor(store: Store, fingerprint: bytes, device: str) -> codec.Predictor:
    """Read a predictor from the store and check that it is the one asked for.

    Raises:
        DataError: malformed, or another predictor's bytes.
        StorageError: missing or unreadable.
    """
    path = predictor_path(fingerprint)
    predictor = codec.Predictor.from_bytes(store.get(path), device=device)
    if predictor.fingerprint != fingerprint:
        raise DataError(f"{store.uri}/{path} holds another predictor than the one it is named for; restore it")
    return predictor


def load_profile(store: Store, profile_id: bytes, *, target: bytes, cache_format: str) -> codec.Profile:
    """Read a profile from the store and check that it is the one asked for and made for this target.

    Raises:
        DataError: malformed, another profile's bytes, or made for something else.
        StorageError: missing or unreadable.
    """
    path = profile_path(profile_id)
    profile = codec.Profile.from_bytes(store.get(path))
    if profile.id != profile_id:
        raise DataError(f"{store.uri}/{path} holds another profile than the one it is named for; restore it")
    if profile.target != target or profile.cache_format != cache_format:
        raise DataError(f"{store.uri}/{path} was made for another target or cache format than this job's")
    return profile
