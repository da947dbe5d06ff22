"""Decoding a store from stored bytes alone, chain by chain: predictors, profiles, prompts and blobs, without the target.

What there is to decode is cut into tasks, each a few prompts that share a prefix. They are worked off one after another in this
process, or by actors (pipeline/deep_actors.py); both do the same with a task.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field

import codec
from codec.errors import DataError, StorageError
from pipeline.audit import CORRUPT, MISMATCHED, QUARANTINE, Audit
from pipeline.catalogue import StoredPrompt, stored_prompts
from pipeline.paths import blob_path, profile_path
from pipeline.plan import GROUP_PROMPTS
from pipeline.prompts import PromptReader
from pipeline.store import Store
from pipeline.survey import Survey
from pipeline.verify import ChainVerifier, Findings, differing_chain
from pipeline.work import PromptRef, load_predictor, load_profile


@dataclass(frozen=True)
class Space:
    """Where the chunks of one generation lie, and how long they are."""

    store: Store
    target: bytes
    profile: bytes
    chunk_tokens: int


@dataclass(frozen=True)
class Task:
    """Prompts of one generation, in token order, and which of their chunks are to be decoded."""

    target: bytes
    profile: bytes
    cache_format: str
    chunk_tokens: int
    prompts: tuple[PromptRef, ...]
    wanted: dict[bytes, bytes]  # chunk key -> digest of the chain's bits up to and with it, from its index row

    @property
    def tokens(self) -> int:
        """Tokens of the chunks that are wanted, at most."""
        return self.chunk_tokens * len(self.wanted)

    def to_json(self) -> str:
        """As text; `from_json` reads it back."""
        wanted = {key.hex(): digest.hex() for key, digest in self.wanted.items()}
        plain = {"target": self.target.hex(), "profile": self.profile.hex(), "wanted": wanted}
        prompts = [prompt.to_plain() for prompt in self.prompts]
        same = {"cache_format": self.cache_format, "chunk_tokens": self.chunk_tokens}
        return json.dumps(plain | same | {"prompts": prompts})

    @staticmethod
    def from_json(text: str) -> Task:
        """Read what `to_json` wrote."""
        data = json.loads(text)
        data |= {name: bytes.fromhex(data[name]) for name in ("target", "profile")}
        data["prompts"] = tuple(map(PromptRef.from_plain, data["prompts"]))
        data["wanted"] = {bytes.fromhex(key): bytes.fromhex(digest) for key, digest in data["wanted"].items()}
        return Task(**data)


@dataclass
class Decoded:
    """What became of a task."""

    target: bytes
    profile: bytes
    verified: int = 0
    failed: dict[bytes, str] = field(default_factory=dict)  # key -> what is wrong
    behind: list[bytes] = field(default_factory=list)  # keys that were not decoded, as a chunk before them failed
    unusable: str = ""  # what is wrong with the profile or its predictor; then nothing was decoded

    def add(self, findings: Findings) -> None:
        """Take in what one prompt came to."""
        self.verified += len(findings.verified)
        self.failed |= {key: text for key, text in findings.failed.items() if key not in findings.behind}
        self.behind += sorted(findings.behind)

    def to_json(self) -> str:
        """As text; `from_json` reads it back."""
        data = asdict(self) | {"target": self.target.hex(), "profile": self.profile.hex()}
        failed = {key.hex(): text for key, text in self.failed.items()}
        return json.dumps(data | {"failed": failed, "behind": [key.hex() for key in self.behind]})

    @staticmethod
    def from_json(text: str) -> Decoded:
        """Read what `to_json` wrote."""
        data = json.loads(text)
        data |= {name: bytes.fromhex(data[name]) for name in ("target", "profile")}
        data["failed"] = {bytes.fromhex(key): what for key, what in data["failed"].items()}
        data["behind"] = [bytes.fromhex(key) for key in data["behind"]]
        return Decoded(**data)


class Decoder:
    """Works tasks off, and keeps profile, predictor and the state of the last prompt from one to the next."""

    def __init__(self, store: Store, device: str) -> None:
        self._store, self._device = store, device
        self._reader = PromptReader(store)
        self._place: tuple[bytes, bytes, int] | None = None
        self._verifier: ChainVerifier | None = None

    def decode(self, task: Task) -> Decoded:
        """Decode what a task wants.

        Raises:
            DataError: this machine computes other bits than the one that made a profile, so it can say nothing; a prompts
                part is damaged.
            StorageError: a prompts part cannot be read.
        """
        done, left = Decoded(task.target, task.profile), set(task.wanted)
        place = (task.target, task.profile, task.chunk_tokens)
        if self._verifier is None or self._place != place:
            try:
                profile = load_profile(self._store, task.profile, target=task.target, cache_format=task.cache_format)
                predictor = load_predictor(self._store, profile.predictor, self._device)
            except (DataError, StorageError) as error:
                done.unusable = str(error)
                return done
            codec.check_known_answer(predictor, profile)
            space = Space(self._store, task.target, task.profile, task.chunk_tokens)
            self._verifier, self._place = ChainVerifier(space, predictor, profile, differing_chain), place
        for prompt in task.prompts:
            mine = frozenset(left.intersection(prompt.keys))
            left -= mine
            tokens = self._reader.tokens(prompt.part, prompt.row, prompt.n_tokens)
            done.add(self._verifier.prompt(tokens, prompt.keys, mine, task.wanted))
        return done


Work = Callable[[list[Task]], Iterable[Decoded]]


def decode_store(found: Audit, work: Work, tell: Callable[[str], None] = lambda text: None) -> None:
    """Decode the selected chunks of an audit, and add what is wrong to its faults; `work` does the tasks.

    What has a fault already is not decoded, nor what follows from it.

    Raises:
        DataError, StorageError: as `Decoder.decode`.
    """
    todo = list(tasks(found))
    total = sum(len(task.wanted) for task in todo)
    for done in work(todo) if todo else ():
        _note(found, done)
        tell(f"decoded {found.decoded:,} of {total:,} chunks")


def here(store: Store, device: str) -> Work:
    """To do tasks in this process."""
    return lambda todo: map(Decoder(store, device).decode, todo)


def tasks(found: Audit) -> Iterator[Task]:
    """What of an audit is to be decoded, each chunk once."""
    faulty = {fault.path for fault in found.faults}

    def wanted(gen: Survey, key: bytes) -> bytes | None:
        if not found.selects(key) or key not in gen.blobs or gen.blobs[key].path in faulty:
            return None
        return gen.chain_digest(key)

    for gen in found.generations:
        if gen.profile in found.unusable:
            continue
        prompts = stored_prompts(found.store, gen.target, gen.roots, gen.has, broken=lambda *_: None)
        taken: set[bytes] = set()
        group: list[StoredPrompt] = []
        mine: dict[bytes, bytes] = {}
        for prompt in sorted(prompts, key=lambda p: (p.chunk_tokens, p.keys)):
            fresh = {key: digest for key in prompt.keys if key not in taken and (digest := wanted(gen, key))}
            if not fresh:
                continue
            if group and (group[0].keys[0] != prompt.keys[0] or len(group) == GROUP_PROMPTS):
                yield _task(gen, group, mine)
                group, mine = [], {}
            taken |= fresh.keys()
            group.append(prompt)
            mine |= fresh
        if group:
            yield _task(gen, group, mine)


def _task(gen: Survey, group: list[StoredPrompt], wanted: dict[bytes, bytes]) -> Task:
    prompts = tuple(PromptRef(p.id, p.part, p.row, p.n_tokens, p.keys, p.tenant, p.root) for p in group)
    return Task(gen.target, gen.profile, min(gen.formats), group[0].chunk_tokens, prompts, wanted)


def _note(found: Audit, done: Decoded) -> None:
    """Only the first chunk of a chain that fails is a fault of its own."""
    if done.unusable and done.profile not in found.unusable:
        found.add(MISMATCHED, profile_path(done.profile), done.unusable)
        found.unusable.add(done.profile)
    found.decoded += done.verified
    found.undecoded += len(done.behind)
    known = {fault.path for fault in found.faults} if done.failed else set()
    gen = next(gen for gen in found.generations if gen.owner == (done.target, done.profile))
    for key, message in done.failed.items():
        path = blob_path(done.target, done.profile, key)
        if path not in known:
            found.add(MISMATCHED if "index row" in message else CORRUPT, path, message, QUARANTINE, gen)
