"""Caches that an engine computed, encoded into a store under a target of their own.

An engine's bits differ from those that transformers computes with the same weights, so its fingerprint, its profile and all its
keys are other ones, and no chain is made of both. Nothing can be computed again here. So where a chunk is stored with other bits
than the given cache holds, what follows in that cache is not stored: it follows from bits that the store does not have.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path
from typing import Any

import torch

import codec
from codec.errors import DataError, UserError
from codec.formats import bits
from codec.keys import chunk_keys, engine_target
from pipeline.actors import EncodeActor, VerifyActor
from pipeline.calibration import SAMPLE_PROMPTS, SAMPLE_TOKENS, find_profile, offer_profile
from pipeline.chain import Next
from pipeline.choice import choose
from pipeline.committed import find_committed
from pipeline.encode import Stored
from pipeline.engines.spool import SpooledCache, read
from pipeline.lease import at_work
from pipeline.model_source import ModelSource, load_config, run_format
from pipeline.options import Options
from pipeline.paths import prompts_path
from pipeline.progress import Reporter
from pipeline.prompts import part_bytes, part_name
from pipeline.reverify import marks_of, unseen
from pipeline.rung import LIMB_PROMPTS
from pipeline.store import Store
from pipeline.target import Target, load_target
from pipeline.tenancy import Roots, tenant_name
from pipeline.truth import KV, Truth
from pipeline.unverified import clear
from pipeline.work import WRITTEN, Device, Group, GroupResult, Job, PromptRef, put_predictor, put_profile

Tell = Callable[[str], None]


class NotBack(DataError):
    """A chunk of a given cache is stored and does not decode to the bits that were given."""


class Diverged(DataError):
    """A given cache holds other bits than the store has for the same tokens."""


@dataclass(frozen=True)
class Given:
    """What is given: the model that the engine ran, the engine's name, and how to encode. salt: of all prompts."""

    source: ModelSource
    engine: str
    predictor: str | None = None
    chunk_tokens: int = Options.chunk_tokens
    salt: bytes = b""


@dataclass
class Taken:
    """What became of the given caches. diverged: files of which not all could be stored; failed: what did not come back."""

    prompts: int = 0
    tokens: int = 0
    chunks: int = 0  # new ones
    raw_bytes: int = 0
    stored_bytes: int = 0
    diverged: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    again: set[bytes] = field(default_factory=set)  # chunks that an earlier call stored and this one verified

    def add(self, result: GroupResult) -> None:
        """Count what was stored of one cache."""
        for chunk in result.chunks:
            if chunk.outcome == WRITTEN:
                self.chunks += 1
                self.raw_bytes += chunk.raw_bytes
                self.stored_bytes += chunk.stored_bytes


class GivenCaches(Truth):
    """K and V of the cache that was given last: nothing is computed."""

    holds = False  # after the prompt nobody does

    def __init__(self) -> None:
        self.tokens, self.seconds = 0, 0.0
        self._layers: Sequence[KV] = ()
        self.reset()

    def use(self, layers: Sequence[KV]) -> None:
        """Go on with this prompt's cache: (K, V) of every layer, [kv_heads, T, head_dim]."""
        self._layers = layers

    def reset(self) -> None:
        """See Truth."""
        self._taken: Sequence[KV] = ()  # the cache of which something was taken last

    def next(self, chunk: Next) -> Sequence[KV]:
        """See Truth."""
        first = chunk.identity.first_token
        self._taken = self._layers
        self.tokens += len(chunk.ids)
        return _part(self._layers, first, first + len(chunk.ids))

    def truncate(self, tokens: int) -> None:
        """See Truth. Diverged where this prompt's cache holds other bits of them than the last one's."""
        if tokens and not _same(_part(self._taken, 0, tokens), _part(self._layers, 0, tokens)):
            raise Diverged("the cache begins with the tokens of another one, and with other bits")
        self._taken = self._layers

    def replace(self, chunk: Next, layers: Sequence[KV]) -> None:
        """See Truth. Diverged where the given bits are other ones."""
        first = chunk.identity.first_token
        if not _same(layers, _part(self._layers, first, first + len(chunk.ids))):
            raise Diverged(f"the tokens from {first} on are stored with other bits")
        self._taken = self._layers


def _part(layers: Sequence[KV], first: int, end: int) -> list[KV]:
    return [(k[:, first:end].contiguous(), v[:, first:end].contiguous()) for k, v in layers]


def _same(found: Sequence[KV], wanted: Sequence[KV]) -> bool:
    pairs = [(a, b) for p, q in zip(found, wanted, strict=True) for a, b in zip(p, q, strict=True)]
    return all(torch.equal(bits(a.cpu().contiguous()), bits(b.cpu().contiguous())) for a, b in pairs)


class _GivenActor(EncodeActor):
    """The main job's encoder, of given caches. The index says that it is not known how the engine ran."""

    def __init__(self, job: Job, device: Device, engine: str) -> None:
        super().__init__(job, device, Reporter(None))
        self.caches, self._engine = GivenCaches(), engine

    def _truth(self) -> Truth:
        return self.caches

    def _row(self, chunk: Stored, owner: PromptRef) -> dict[str, Any]:
        row = super()._row(chunk, owner)
        return row | {"prefill_tokens": 0, "host_arch": "", "torch_version": "", "device": self._engine}


def store_caches(
    store: Store, files: Sequence[Path], given: Given, device: Device, tell: Tell = lambda text: None
) -> Taken:
    """Bring spooled caches into a store; the first time for a model, a predictor and a profile are made from some of them.

    What is stored already is left as it is, so it can be called again. A file that fails keeps no other from
    being stored. `tell` hears what is done, and what is not.

    Raises:
        UserError: there are none, or they are not of this model.
        DataError: a file or something in the store is damaged, or a new chunk does not decode to the bits that were given.
        StorageError: a file or the store cannot be read or written.
    """
    if not files:
        raise UserError("there are no saved caches to store")
    taken = Taken()
    with at_work(store):
        for (fmt, scales), some in _kinds(files):
            job, root = _job(store, given, fmt, scales)
            job = find_profile(job) or _calibrated(job, given, some, device, tell)
            actor, verifier = _GivenActor(job, device, given.engine), VerifyActor(job, device, Reporter(None))
            marks = marks_of(job)
            for path in some:
                try:
                    _store(actor, verifier, job, root, path, marks, taken, tell)
                except NotBack as error:
                    taken.failed.append(str(error))
                    tell(str(error))
            clear(store, marks, taken.again)
    if taken.failed:
        raise NotBack(f"{len(taken.failed)} of {taken.prompts} saved caches do not come back: {taken.failed[0]}")
    return taken


def _kinds(files: Sequence[Path]) -> Iterator[tuple[tuple[str, bytes], list[Path]]]:
    """The files by format and scales, in the order of their tokens, so that a shared prefix is taken once."""
    kinds = []
    for path in files:
        cache = read(path)
        scales = b"" if cache.scales is None else cache.scales.to_bytes()
        kinds.append(((cache.cache_format, scales), cache.ids.tolist(), path))
    for kind, some in groupby(sorted(kinds), key=lambda one: one[0]):
        yield kind, [path for _, _, path in some]


def _job(store: Store, given: Given, fmt: str, scales: bytes) -> tuple[Job, bytes]:
    """The job of one kind of cache, and the key of the empty prefix."""
    choice = choose(given.predictor, "closed", None, load_config(given.source))
    target = engine_target(given.source.fingerprint(fmt), given.engine)
    job = Job(
        store, given.source, target, fmt, given.chunk_tokens, choice.kind, "closed", tenant_name(given.salt), scales=scales
    )  # fmt: skip
    if job.cache_scales is not None:
        job = replace(job, scale_mode=job.cache_scales.mode)
    roots = Roots.make(
        target=target, cache_format=fmt, chunk_tokens=given.chunk_tokens, rope_regime=choice.rope_regime, scales=scales,
        salt=given.salt,
    )  # fmt: skip
    return job, roots.root


def _calibrated(job: Job, given: Given, files: Sequence[Path], device: Device, tell: Tell) -> Job:
    """Make predictor and profile from some of the caches, and put them into the store.

    The predictor's hidden state is compared with that of transformers' run of the model, which goes on from the given bits.
    """
    chosen = sorted(files, key=lambda path: path.name)[:SAMPLE_PROMPTS]
    caches = [_cut(read(path)) for path in chosen]
    tell(f"calibrating on {len(caches)} saved caches (once for this model)")
    target = load_target(given.source, run_format(given.source, job.cache_format), device.name)
    target = target.with_cache(job.cache_format, job.cache_scales)
    prompts = [cache.ids for cache in caches]
    ranges = job.rung.ranges(target, prompts) if job.rung.calibrated else None
    predictor = job.rung.build(target, ranges, prompts[:LIMB_PROMPTS])
    samples = [_sample(target, cache, job.chunk_tokens, states=bool(predictor.config.hidden)) for cache in caches]
    profile = codec.calibrate_closed(
        predictor,
        job.target,
        job.cache_format,
        samples,
        prefill_tokens=job.chunk_tokens,
        scales=job.cache_scales,
        coder=job.coder,
    )
    put_predictor(job.store, predictor)
    return offer_profile(job, put_profile(job.store, profile))


def _cut(cache: SpooledCache) -> SpooledCache:
    """What is measured of a prompt."""
    return replace(cache, ids=cache.ids[:SAMPLE_TOKENS], layers=_part(cache.layers, 0, SAMPLE_TOKENS))


def _sample(target: Target, cache: SpooledCache, step: int, *, states: bool) -> codec.ClosedSample:
    hidden: list[list[torch.Tensor]] = []
    own = target.new_cache()
    for begin in range(0, len(cache.ids) if states else 0, step):
        ids = cache.ids[begin : begin + step]
        hidden.append(target.prefill_states(own, ids)[1])
        target.replace(own, begin, _part(cache.layers, begin, begin + len(ids)))
    merged = [torch.cat(parts) for parts in zip(*hidden, strict=True)]
    return codec.ClosedSample(cache.ids, cache.layers, merged)


def _store(
    actor: _GivenActor,
    verifier: VerifyActor,
    job: Job,
    root: bytes,
    path: Path,
    marks: dict[str, frozenset[bytes]],
    taken: Taken,
    tell: Tell,
) -> None:
    cache = read(path)
    ids = cache.ids.tolist()
    keys = chunk_keys(root, ids, job.chunk_tokens)
    before = find_committed(job, set(keys))
    taken.prompts += 1
    taken.tokens += len(ids)
    todo = frozenset(keys) - before.figures.keys()
    row: Mapping[str, Any] = {
        "id": path.stem,
        "payload": "{}",
        "token_ids": ids,
        "n_tokens": len(ids),
        "tenant": job.tenant,
    }
    part = prompts_path(job.target, part_name([dict(row)]))
    ref = PromptRef(path.stem, part, 0, len(ids), tuple(keys), job.tenant, root)
    if todo:
        job.store.put_new(part, part_bytes([dict(row)]))
        actor.caches.use(cache.layers)
        try:
            for stored in actor({"group": [Group((ref,), todo, before.lost).to_json()]}):
                taken.add(_verified(verifier, stored, path))
        except Diverged as error:
            taken.diverged.append(str(path))
            tell(f"{path}: not all of it is stored: {error}")
    if not any(found & set(keys) for found in marks.values()):
        return
    if again := unseen(find_committed(job, set(keys)).figures, marks, taken.again):
        group = GroupResult((ref,), [*again.values()], "", 0, 0.0, 0.0)
        taken.again.update(_verified(verifier, {"result": [group.to_json()]}, path).verified)


def _verified(verifier: VerifyActor, stored: dict[str, list[str]], path: Path) -> GroupResult:
    """What was stored of one cache. Raises NotBack."""
    ((text,),) = (out["result"] for out in verifier(stored))
    result = GroupResult.from_json(text)
    for cause in result.failed.values():
        raise NotBack(f"{path} was stored, and does not come back: {cause}")
    return result
