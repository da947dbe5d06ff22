"""Whole prefixes: all chunks of a prompt decoded together, one layer after another (DESIGN 5).

A layer of every chunk needs only the layers below it, so one pass of the predictor over all tokens does what codec.decode does chunk
by chunk, with the same bits; and what is asked of a few layers ends after them. What is not to be continued keeps no layer that is
done: such a pass holds blobs, the predictor's hidden state and one layer, whatever the number of layers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from codec import blob as blobs
from codec import exact
from codec.chunk import ChunkIdentity, DecodeTask, check_blob, check_pair, checked_layer
from codec.errors import BlobError, ChunkFailed
from codec.formats import bits
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
        found, steps = _layer(run, layer, parts, [len(t.token_ids) for t in tasks])
        if layer < last:
            follow(run, layer, steps)
        elif keep:
            run.commit()
        del steps  # whoever takes the layer does not need them
        yield found
        del found  # nor does the next layer need this one


def _layer(run: Run, layer: int, parts: Sequence[_Chunk], lengths: Sequence[int]) -> tuple[list[Pair], list[Next]]:
    """A layer of every task, of so many tokens each, and how the predictor goes on with it."""
    guesses, turns = run.guess(layer), run.turns()
    found = [_Joined(tokens) for tokens in lengths]
    for part in parts:
        part.decode(layer, guesses[part.task], turns[part.task], found[part.task])
    return [joined.values for joined in found], [joined.next for joined in found]


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
            streams = blobs.streams(memoryview(given.blob), self._header)
            self._reader = profile.coder.reader(streams, *profile.sizes(self._header.tokens))
        except BlobError as error:
            raise ChunkFailed(str(error), self.task, self._chunk) from error

    def decode(self, layer: int, guess: Pair, turn: Pair, joined: _Joined) -> None:
        """Put its K and V of a layer, and how the predictor goes on, where those of all chunks are."""
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
        joined.put(self._span, values, part.next)


class _Joined:
    """What the chunks of a task say of a layer, side by side: each is copied as it comes and let go, so that none is held twice."""

    def __init__(self, tokens: int) -> None:
        self._tokens = tokens
        self._parts: dict[str, Tensor] = {}

    def put(self, span: slice, values: Pair, step: Next) -> None:
        """Of the tokens of a chunk."""
        for name, part in zip(("k", "v", "attend_k", "attend_v"), (*values, *step.attend), strict=True):
            self._put(name, span, part, 1)
        if step.correction is not None:
            self._put("correction", span, step.correction, 0)

    @property
    def values(self) -> Pair:
        """K and V of all chunks."""
        return self._parts["k"], self._parts["v"]

    @property
    def next(self) -> Next:
        """What the predictor goes on with over the tokens of all chunks."""
        return Next((self._parts["attend_k"], self._parts["attend_v"]), self._parts.get("correction"))

    def _put(self, name: str, span: slice, part: Tensor, dim: int) -> None:
        if part.shape[dim] == self._tokens:  # one chunk is all
            self._parts[name] = part
            return
        source = bits(part)  # some dtypes can do nothing but be looked at as others
        if name not in self._parts:
            shape = list(part.shape)
            shape[dim] = self._tokens
            self._parts[name] = exact.empty(shape, source.dtype, part.device).view(part.dtype)
        whole = bits(self._parts[name])
        whole.narrow(dim, span.start, span.stop - span.start).copy_(source)
