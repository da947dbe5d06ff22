"""What a recompression starts from: the generations of one target that readers are shown now, and the rung they were made with."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import codec
from codec.errors import UserError
from codec.predictor.config import MAX_CONTEXT
from pipeline.catalogue import Generation, generations, read_generation
from pipeline.current import Entry, Pair, read_pointers
from pipeline.paths import profile_path
from pipeline.restoration.targets import targets_named
from pipeline.store import Store
from pipeline.work import predictor_config


@dataclass(frozen=True)
class Made:
    """How a generation was made: the options that lead to it."""

    kind: str
    window: int | None
    loop: str
    coder: str
    cache_format: str
    scale_mode: str
    chunk_tokens: int


@dataclass(frozen=True)
class Replaced:
    """The generations that a recompression replaces, those in use first, with their rows.

    name: what readers will ask for; seen: what their pointer says; shared: whether readers of another name follow this target, too.
    """

    name: str
    target: bytes
    generations: list[Generation]
    made: Made
    seen: Entry | None
    shared: bool

    @property
    def pairs(self) -> set[Pair]:
        """Their names."""
        return {(gen.target, gen.profile) for gen in self.generations}

    @property
    def cache_format(self) -> str:
        """That of all of them: it is part of the target."""
        return self.made.cache_format


def find_replaced(store: Store, name: str | None, source: str | None, cache_format: str | None) -> Replaced:
    """What is to be recompressed.

    name: what readers will ask for, and unless `source` is given what they ask for now; None: what they ask for now. source:
    fingerprint of a target, or its beginning. Without either one target only must be in use. cache_format: which of a model's caches,
    where there are several.

    Raises:
        UserError: there is no such thing in the store, or there are several.
        DataError: what is there cannot be read.
    """
    pointers = read_pointers(store)
    if source is None and name is not None:
        pointed = {f: entry.target for f, entry in pointers.of_model(name).items()}
        mine = {target for f, target in pointed.items() if f == cache_format}  # else the format is a new one
        begun = {target for target, _ in pointers.staged}
        named = mine or set(pointed.values()) or targets_named(store, name, None).keys() - begun
        source = _only(store, f"the model {name!r}", named).hex()
    pairs = set(generations(store, target=source))
    if source is None:  # what was replaced waits for its deletion, and what is being filled is not in use yet
        pairs = (pairs - pointers.retired.keys() - pointers.staged.keys()) or pairs
    owners = {target for target, _ in pairs}
    target = _only(store, "a recompression without --model, --as and --from", owners)
    hidden = pointers.hidden(target)
    found = [gen for gen in generations(store, target=target.hex()).values() if gen.profile not in hidden]
    for gen in found:
        read_generation(store, gen)
    found = sorted((gen for gen in found if gen.rows), key=lambda gen: (-len(gen.rows), gen.profile))
    if not found:
        raise UserError(
            f"the store {store.uri} holds no chunk of the target {target.hex()[:16]}; nothing can be recompressed"
        )
    in_use = {entry.model: entry for entry in pointers.current_entries() if entry.target == target}
    profiles = {entry.profile for entry in in_use.values()}
    found.sort(key=lambda gen: gen.profile not in profiles)
    made = how_made(store, found[0])
    if name is None:
        names = Counter(row.model for rows in found[0].rows.values() for row in rows)
        name = min(in_use, default=names.most_common(1)[0][0])
    seen = pointers.current(name, made.cache_format)
    names_of_it = in_use.keys() | {other for gen in found for other in gen.models}
    return Replaced(name, target, found, made, seen, shared=bool(names_of_it - {name}))


def _only(store: Store, what: str, found: set[bytes]) -> bytes:
    if not found:
        raise UserError(f"the store {store.uri} holds nothing of {what}; pass --from FINGERPRINT, or --as NAME")
    if len(found) > 1:
        listed = ", ".join(target.hex()[:16] for target in sorted(found)[:4])
        raise UserError(
            f"{what} stands for {len(found)} targets in {store.uri} ({listed}); pass --from with one of them"
        )
    return next(iter(found))


def how_made(store: Store, gen: Generation) -> Made:
    """The options that lead to a generation, from its profile and the header of its predictor. Raises DataError, StorageError."""
    profile = codec.Profile.from_bytes(store.get(profile_path(gen.profile)))
    config = predictor_config(store, profile.predictor)
    window = config.get("window") or None
    steps = Counter(row.chunk_tokens for rows in gen.rows.values() for row in rows)
    return Made(
        str(config.get("kind")),
        window if isinstance(window, int) and 0 < window <= MAX_CONTEXT else None,
        profile.loop,
        profile.facts.coder,
        profile.cache_format,
        profile.facts.scale_mode,
        steps.most_common(1)[0][0],
    )
