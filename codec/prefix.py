"""Whole prefixes: all chunks of a prompt decoded together, one layer after another (DESIGN 5).

A layer of every chunk needs only the layers below it, so one pass of the predictor over all tokens does what codec.decode does chunk
by chunk, with the same bits; and what is asked of a few layers ends after them. What is not to be continued keeps no layer that is
done: such a pass holds blobs, the predictor's hidden state and one layer, whatever the number of layers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from codec import blob as blobs
from codec.chunk import ChunkIdentity, DecodeTask, check_blob, check_pair, checked_layer
from codec.errors import BlobError, ChunkFailed
from codec.loop import Next, follow
from codec.predictor import Predictor, PredictorState, Run
from codec.predictor.base import begins
from codec.profile import Profile

Pair = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class PrefixTask:
    """Consecutive chunks of one prompt: the state before them, their token ids int64 [T], a blob and an identity each.

    after: which task before it in the batch holds the chunks before these, several may name the same; the state must then be empty.
    """

    state: PredictorState
    token_ids: Tensor
    blobs: Sequence[bytes]
    identities: Sequence[ChunkIdentity]
    after: int | None = None


def decode_prefixes(
    predictor: Predictor, profile: Profile, tasks: Sequence[PrefixTask], *, keep: bool = True
) -> Iterator[list[Pair]]:
    """Decode chunks of several prompts, yielding a layer of all of them at a time, found equal to its checksums.

    Yields, layer by layer, (K, V) of every task, [kv_heads, T, head_dim] in the cache's dtype. The tokens, with those of the tasks
    before them, become part of the tasks' states when the last layer has been taken; a pass that fails or is given up leaves the
    states as they were. keep: False where nothing will continue from the states; they stay as they are.

    Raises:
        ChunkFailed: a chunk is damaged, is not what its identity says, or decodes to other bits than were stored.
        UserError: the token ids are too many, or none that the predictor has.
    """
    check_pair(predictor, profile)
    after = [t.after for t in tasks]
    first = begins([t.state.length for t in tasks], [len(t.token_ids) for t in tasks], after)
    parts = [
        _Chunk(predictor, profile, task, begin, number, chunk)
        for number, (task, begin) in enumerate(zip(tasks, first, strict=True))
        for chunk in range(len(task.blobs))
    ]
    run = predictor.run([t.state for t in tasks], [t.token_ids for t in tasks], after=after, keep=keep)
    last = predictor.config.layers - 1
    for layer in range(last + 1):
        found, steps = _layer(run, layer, parts, len(tasks))
        if layer < last:
            follow(run, layer, steps)
        elif keep:
            run.commit()
        del steps  # whoever takes the layer does not need them
        yield found
        del found  # nor does the next layer need this one


def _layer(run: Run, layer: int, parts: Sequence[_Chunk], tasks: int) -> tuple[list[Pair], list[Next]]:
    """A layer of every task, and how the predictor goes on with it."""
    guesses, turns = run.guess(layer), run.turns()
    found: list[list[Pair]] = [[] for _ in range(tasks)]
    steps: list[list[Next]] = [[] for _ in range(tasks)]
    for part in parts:
        values, step = part.decode(layer, guesses[part.task], turns[part.task])
        found[part.task].append(values)
        steps[part.task].append(step)
    pairs = [_cat([k for k, _ in pairs], [v for _, v in pairs]) for pairs in found]
    return pairs, [_joined(s) for s in steps]


class _Chunk:
    """One chunk while its layers are decoded."""

    def __init__(
        self, predictor: Predictor, profile: Profile, task: PrefixTask, first: int, number: int, chunk: int
    ) -> None:
        """first: the place of the task's first token."""
        self.task, self._chunk = number, chunk
        starts = [i.first_token - first for i in task.identities] + [len(task.token_ids)]
        begin, end = starts[chunk], starts[chunk + 1]
        if starts[0] != 0 or begin >= end or len(task.blobs) != len(task.identities):
            raise ValueError(f"chunk {chunk} of a prefix begins at token {begin} and ends at {end}")
        self._span = slice(begin, end)
        self._profile = profile
        self._carry: object = None
        place = PredictorState()
        place.length = first + begin
        try:
            given = DecodeTask(place, task.token_ids[self._span], task.blobs[chunk], task.identities[chunk])
            self._header = check_blob(predictor, profile, given)
            streams = blobs.streams(given.blob, self._header)
            self._reader = profile.coder.reader(streams, *profile.sizes(self._header.tokens))
        except BlobError as error:
            raise ChunkFailed(str(error), self.task, self._chunk) from error

    def decode(self, layer: int, guess: Pair, turn: Pair) -> tuple[Pair, Next]:
        """Its K and V of a layer, and how the predictor goes on."""
        own_guess = guess[0][:, self._span], guess[1][:, self._span]
        own_turn = turn[0][self._span], turn[1][self._span]
        try:
            self._reader.layer()
            part = self._profile.loop_codec.decode(layer, self._reader, own_guess, own_turn, self._carry)
            values = checked_layer(layer, part, self._header, self._profile.format)
            if layer == len(self._header.layers) - 1:
                self._reader.finish()
        except BlobError as error:
            raise ChunkFailed(str(error), self.task, self._chunk) from error
        self._carry = part.next.carry
        return values, part.next


def _joined(steps: Sequence[Next]) -> Next:
    """What the predictor goes on with over the tokens of all chunks."""
    corrections = [step.correction for step in steps if step.correction is not None]
    attend = _cat([step.attend[0] for step in steps], [step.attend[1] for step in steps])
    return Next(attend, torch.cat(corrections) if corrections else None)


def _cat(keys: Sequence[Tensor], values: Sequence[Tensor]) -> Pair:
    """Along the tokens; by bits where the dtype has no concatenation of its own."""
    if len(keys) == 1:
        return keys[0], values[0]
    dtype = keys[0].dtype
    if dtype.itemsize == 1:
        return tuple(torch.cat([t.view(torch.uint8) for t in part], 1).view(dtype) for part in (keys, values))  # type: ignore[return-value]
    return torch.cat(list(keys), 1), torch.cat(list(values), 1)
