"""Planning on the driver: which prompts are taken, which chunks are new, and which actor call gets what.

Nothing here reads or writes; the stages hand in rows and sets and get plain data back.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from codec.errors import UserError

KEY_BYTES = 32
GROUP_PROMPTS = 16  # a larger group of prompts with one first chunk is split, so that several actors share it


@dataclass(frozen=True)
class Prompt:
    """One tokenised prompt, without its tokens: they stay in the store at row `row` of the Parquet part `part`."""

    id: str
    n_tokens: int
    keys: bytes  # the chunks' 32-byte keys, one after another
    part: str
    row: int
    content: bytes  # digest of the record's content, to tell a copy from a clash of ids
    position: tuple[int, int]  # (file, record) in corpus order
    source: str  # "file:line", for messages
    tenant: str = ""  # hex digest of its salt, "" without one
    root: bytes = b""  # key of the empty prefix, from which its keys follow

    @property
    def chunks(self) -> int:
        """Number of chunks, the partial last one included."""
        return len(self.keys) // KEY_BYTES

    def key(self, index: int) -> bytes:
        """Key of chunk `index`: the hash of all tokens to that chunk's end."""
        return self.keys[index * KEY_BYTES : (index + 1) * KEY_BYTES]

    def all_keys(self) -> list[bytes]:
        """Keys of all chunks in order."""
        return [self.key(index) for index in range(self.chunks)]


@dataclass(frozen=True)
class Bad:
    """One record that cannot be used, and why."""

    source: str
    reason: str
    position: tuple[int, int]


@dataclass(frozen=True)
class Admitted:
    """What is left of the corpus after the limit, identical copies and bad records."""

    prompts: list[Prompt]
    bad: list[Bad]
    duplicates: int


def admit(
    prompts: Iterable[Prompt],
    bad: Iterable[Bad],
    *,
    limit: int | None,
    skip_bad: bool,
    corpus: str,
    one_corpus: bool = True,
) -> Admitted:
    """Put the corpus in order and decide what belongs to the job.

    The first `limit` distinct prompts are taken, in the order of files and records; what comes after the last of
    them is not looked at. A record with an id seen before is a copy (counted, left out) when its content is equal; ids of
    different tenants have nothing to do with each other, and so it is with all ids where the prompts are not of `one_corpus`.

    Raises:
        UserError: two records share an id and differ; a bad record without `skip_bad`; no prompt at all.
    """
    taken: dict[tuple[str, str, bytes], Prompt] = {}
    duplicates = 0
    end: tuple[int, int] | None = None
    for prompt in sorted(prompts, key=lambda p: p.position):
        if limit is not None and len(taken) == limit:
            break
        known = taken.setdefault(
            (prompt.tenant, prompt.id, b"" if one_corpus else prompt.content + prompt.keys[-KEY_BYTES:]), prompt
        )
        end = prompt.position
        if known is prompt:
            continue
        if known.content != prompt.content:
            raise UserError(
                f"the id {prompt.id!r} stands for two different prompts, at {known.source} and at {prompt.source}; "
                "give each prompt an id of its own"
            )
        duplicates += 1
    full = limit is not None and len(taken) == limit
    seen = sorted((b for b in bad if not (full and end is not None and b.position > end)), key=lambda b: b.position)
    if seen and not skip_bad:
        others = f" (and {len(seen) - 1} more bad records)" if len(seen) > 1 else ""
        raise UserError(f"{seen[0].source}: {seen[0].reason}{others}; mend the corpus or pass --skip-bad")
    if not taken:
        raise UserError(f"the corpus {corpus} holds no prompt that can be used")
    return Admitted(list(taken.values()), seen, duplicates)


@dataclass(frozen=True)
class Chunk:
    """One distinct chunk of the corpus."""

    index: int
    first_token: int
    tokens: int


@dataclass(frozen=True)
class Plan:
    """What a job will do: its prompts, its distinct chunks, and groups of prompts that still need work."""

    prompts: list[Prompt]
    chunk_tokens: int
    chunks: dict[bytes, Chunk]
    stored: frozenset[bytes]  # chunks with an index row and a blob
    lost: frozenset[bytes]  # chunks with an index row whose blob is gone
    groups: list[list[Prompt]] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        """Tokens of all prompts, shared prefixes counted once a prompt."""
        return sum(prompt.n_tokens for prompt in self.prompts)

    @property
    def occurrences(self) -> int:
        """Chunks of all prompts, shared ones counted once a prompt."""
        return sum(prompt.chunks for prompt in self.prompts)

    @property
    def shared(self) -> int:
        """Occurrences that another prompt of the same corpus has already paid for."""
        return self.occurrences - len(self.chunks)

    @property
    def new(self) -> list[bytes]:
        """Keys of the chunks that are to be computed and stored, in corpus order."""
        return [key for key in self.chunks if key not in self.stored]

    @property
    def new_tokens(self) -> int:
        """Tokens of the new chunks."""
        return sum(self.chunks[key].tokens for key in self.new)


def make_plan(
    prompts: Sequence[Prompt], chunk_tokens: int, *, stored: frozenset[bytes], lost: frozenset[bytes] = frozenset()
) -> Plan:
    """Find the distinct chunks and group the prompts that have new ones.

    Args:
        prompts: admitted prompts in corpus order.
        chunk_tokens: tokens of a full chunk.
        stored: keys of chunks that need no work.
        lost: keys of chunks that once were stored and are gone; never a part of `stored`.
    """
    chunks: dict[bytes, Chunk] = {}
    for prompt in prompts:
        for index in range(prompt.chunks):
            first = index * chunk_tokens
            chunks.setdefault(prompt.key(index), Chunk(index, first, min(chunk_tokens, prompt.n_tokens - first)))
    todo = [prompt for prompt in prompts if any(key not in stored for key in prompt.all_keys())]
    return Plan(list(prompts), chunk_tokens, chunks, stored, lost, group_prompts(todo, chunks, stored))


def group_prompts(
    prompts: Sequence[Prompt], chunks: Mapping[bytes, Chunk], stored: frozenset[bytes], size: int = GROUP_PROMPTS
) -> list[list[Prompt]]:
    """Group prompts that share their first chunk, sorted so that longer shared prefixes stand side by side.

    The keys of a chain are hashes of whole prefixes, so sorting by the concatenated keys puts all prompts that share
    k chunks next to one another for every k. Prompts whose chunks are all those of an earlier one need no second look
    and are left out. Groups with most new tokens come first: the actors finish at about the same time.
    """
    groups: list[list[Prompt]] = []
    costs: list[int] = []
    seen: set[bytes] = set()
    for prompt in sorted(prompts, key=lambda p: (p.keys, p.position)):
        fresh = [key for key in prompt.all_keys() if key not in stored and key not in seen]
        if not fresh:
            continue
        seen.update(fresh)
        tokens = sum(chunks[key].tokens for key in fresh)
        if groups and groups[-1][0].key(0) == prompt.key(0) and len(groups[-1]) < size:
            groups[-1].append(prompt)
            costs[-1] += tokens
        else:
            groups.append([prompt])
            costs.append(tokens)
    order = sorted(range(len(groups)), key=lambda i: (-costs[i], groups[i][0].position))
    return [groups[i] for i in order]
