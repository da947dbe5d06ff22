"""Restoring in one process: `restore` for one prompt, a `Restorer` for many of one target.

    restored = pipeline.restore("s3://bucket/prefixes", "path/of/the/model", token_ids)
    cache = restored.as_dynamic_cache(model)
    model.generate(token_ids, cache=cache)

Everything comes from the store: index, predictor, profile, blobs. Of the target only its fingerprint is needed.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import codec
from codec.errors import ChunkFailed, DataError, KnownAnswerMismatch, UserError
from codec.scales import CacheScales
from pipeline.restoration.arriving import decode_arriving
from pipeline.restoration.catalogue import Catalogue, Generation, Ids, Match, token_array
from pipeline.restoration.prefix import Decoder, Pair, Prefix, read_prefix, unstored
from pipeline.restoration.span import Range, Span
from pipeline.restoration.targets import find_target, followed
from pipeline.store import ObjectMissing, Store
from pipeline.target import check_device

LOADED = 2  # predictors that a restorer keeps


@dataclass(frozen=True)
class RestoredChunk:
    """(K, V) of the layers asked for, [heads, tokens, head_dim] each, of the tokens from `first_token` on."""

    first_token: int
    tokens: int
    layers: list[Pair]


class Restoration:
    """The longest stored prefix of one prompt, checked. Nothing is decoded before it is asked for.

    tokens: its length, 0 where nothing of the prompt is stored. asked: the prompt's length. notes: why it is not longer.
    """

    def __init__(
        self, prefix: Prefix | None, decoder: Decoder | None, asked: int, notes: Sequence[str], span: Span,
        decoded: list[Pair] | None = None,
    ) -> None:  # fmt: skip
        self._prefix, self._decoder, self.asked, self.span = prefix, decoder, asked, span
        self.notes = list(notes)
        self._decoded = decoded

    @property
    def tokens(self) -> int:
        """How many tokens of the prompt come back."""
        return 0 if self._prefix is None else self._prefix.tokens

    @property
    def damaged(self) -> bool:
        """Whether more of the prompt was stored than is still intact."""
        return self._prefix is not None and self._prefix.damaged

    @property
    def prefix(self) -> Prefix:
        """The chunks behind it. UserError where nothing is stored."""
        if self._prefix is None or not self.tokens:
            raise UserError(f"nothing of this prompt can be restored: {'; '.join(self.notes)}")
        return self._prefix

    @property
    def decoder(self) -> Decoder:
        """What decodes it. UserError where nothing is stored."""
        if self._decoder is None:
            raise UserError(f"nothing of this prompt can be restored: {'; '.join(self.notes)}")
        return self._decoder

    @property
    def generation(self) -> Generation:
        """Which of the target's caches it is part of."""
        return self.prefix.generation

    @property
    def cache_format(self) -> str:
        """The cache's number format, a name of codec.formats."""
        return self.generation.cache_format

    @property
    def scales(self) -> CacheScales | None:
        """What the values of an FP8 cache are multiplied by, of all layers and heads; None of any other."""
        return self.decoder.profile.scales

    @property
    def digest(self) -> bytes:
        """16 bytes that name the raw bits of K and V of this prefix."""
        return self.prefix.digest

    def layers(self) -> Iterator[tuple[int, Pair]]:
        """Decode layer by layer: its number, and (K, V) of all tokens, [heads, tokens, head_dim] in the cache's dtype (FP8: as stored).

        Ends after the last layer asked for. Each layer was found equal to its checksums before it is yielded.

        Raises:
            ChunkFailed: a chunk decodes to other bits than were stored. What was yielded so far belongs to a longer prefix than
                can be had and must be thrown away; this restoration is shorter from then on, and can be asked again.
        """
        if not self.tokens:
            return
        first, end = self.span.layers
        if self._decoded is not None:
            yield from enumerate(self._decoded, first)
            return
        task = self.prefix.task(self.decoder.predictor.new_state())
        decoding = codec.decode_prefixes(self.decoder.predictor, self.decoder.profile, [task], keep=False)
        try:
            for number, (pair,) in zip(range(end), decoding, strict=False):
                if number >= first:
                    yield number, (self.span.cut(pair[0]), self.span.cut(pair[1]))
        except ChunkFailed as error:
            self.shorten(error)
            raise
        finally:
            decoding.close()  # type: ignore[attr-defined]

    def chunks(self, first: int = 0, end: int | None = None) -> Iterator[RestoredChunk]:
        """Decode chunk by chunk, those numbered first … end - 1.

        With a rung that needs no model, decoding begins at `first`; with any other the chunks before it are decoded too.
        Raises ChunkFailed as `layers`; the chunks before are then still good.
        """
        if not self.tokens:
            return
        prefix, decoder = self.prefix, self.decoder
        end = len(prefix.chunks) if end is None else min(end, len(prefix.chunks))
        state = decoder.predictor.new_state(forgets=True)
        begin = 0
        if isinstance(decoder.predictor, codec.ModelFree) and first < end:
            begin, state = first, decoder.predictor.state_at(prefix.chunks[first].first_token)
        for number in range(begin, end):
            layers = self._chunk(prefix, state, number)
            if number >= first:
                chunk = prefix.chunks[number]
                yield RestoredChunk(chunk.first_token, chunk.tokens, layers)

    def load(self) -> list[Pair]:
        """(K, V) of every layer asked for; [] where nothing is stored. Where a chunk fails, the prefix before it: see `notes`.

        What was decoded already (`decode` of Restorer.restore) is handed over as it is.
        """
        if self._decoded is not None:
            return self._decoded
        while self.tokens:
            try:
                return [pair for _, pair in self.layers()]
            except ChunkFailed:
                continue  # it is shorter now
        return []

    def as_dynamic_cache(self, model: Any, *, leave: int = 1) -> Any:
        """A transformers DynamicCache that `model` (of transformers, on any devices) continues from; see hf_cache.

        leave: of a prompt that is stored to its end, so many tokens are left out, because generating needs at least one to read.
        """
        from pipeline.restoration.hf_cache import dynamic_cache  # transformers takes seconds

        return dynamic_cache(self, model, leave)

    def shorten(self, error: ChunkFailed) -> None:
        """Let the prefix end before the chunk that failed, and note why."""
        place = self.prefix.place(error.chunk)
        self._prefix, self._decoded = self.prefix.first(error.chunk), None
        self.notes.append(f"the prefix ends after {self.tokens} tokens: {place}: {error}")

    def _chunk(self, prefix: Prefix, state: codec.PredictorState, number: int) -> list[Pair]:
        task, (first, end) = prefix.task(state, number, number + 1), self.span.layers
        try:
            decoded = list(codec.decode_prefixes(self.decoder.predictor, self.decoder.profile, [task]))
        except ChunkFailed as error:
            self.shorten(ChunkFailed(str(error), 0, number))
            raise
        return [(self.span.cut(k), self.span.cut(v)) for ((k, v),) in decoded[first:end]]


class Workshop:
    """Predictors of one store in this process, loaded at their first use; a few are kept. Needs neither index nor salt.

    Threads may share it.
    """

    def __init__(self, store: Store, device: str = "cpu") -> None:
        """device: where predictors compute. Raises UserError where there is none."""
        check_device(device)
        self.store = store
        self._device = device
        self._decoders: OrderedDict[bytes, Decoder] = OrderedDict()
        self._lock = threading.Lock()

    def open(
        self, ids: Ids, matches: Sequence[Match], notes: Sequence[str] = (), layers: Range | None = None, heads: Range | None = None,
        *, decode: bool = False,
    ) -> Restoration:  # fmt: skip
        """Of these stored prefixes of a prompt the longest one that is intact: a damaged long one may be shorter than another.

        ids: the prompt's, int64 [T]; matches: the longest first. decode: as of Restorer.restore. Raises as Restorer.restore.
        """
        if decode and matches and (whole := self._decoded(ids, matches[0], notes, layers, heads)):
            return whole
        said = list(notes)
        best: Prefix | None = None
        used: Decoder | None = None
        for match in matches:
            if best is not None and match.tokens <= best.tokens:
                break
            try:
                decoder = self.decoder(match.generation)
            except KnownAnswerMismatch:
                raise
            except (DataError, ObjectMissing) as error:
                said.append(str(error))
                continue
            found = read_prefix(self.store, match, decoder, ids)
            if best is None or found.tokens > best.tokens:
                best, used = found, decoder
        if best is None or used is None:
            if said:
                raise DataError("; ".join(said))
            return Restoration(None, None, len(ids), ["nothing of the prompt is stored"], Span((0, 0), (0, 0)))
        return Restoration(best, used, len(ids), [*said, *([best.end] if best.end else [])], _span(used, layers, heads))

    def _decoded(
        self, ids: Ids, match: Match, notes: Sequence[str], layers: Range | None, heads: Range | None
    ) -> Restoration | None:
        """A match restored while it arrives; None where not all of it is right, so that it takes the closer look of `open`."""
        try:
            decoder = self.decoder(match.generation)
            span = _span(decoder, layers, heads)
            prefix, found = decode_arriving(self.store, match, decoder, ids, span)
        except KnownAnswerMismatch:
            raise
        except (DataError, ObjectMissing):  # ChunkFailed is one
            return None
        end = [] if match.tokens == len(ids) else [unstored(match)]
        return Restoration(prefix, decoder, len(ids), [*notes, *end], span, found)

    def decoder(self, generation: Generation) -> Decoder:
        """Predictor and profile of a generation. Raises DataError, StorageError."""
        with self._lock:
            if generation.profile not in self._decoders:
                while len(self._decoders) >= LOADED:
                    self._decoders.popitem(last=False)
                self._decoders[generation.profile] = Decoder.load(self.store, generation, self._device)
            self._decoders.move_to_end(generation.profile)
            return self._decoders[generation.profile]


def _span(decoder: Decoder, layers: Range | None, heads: Range | None) -> Span:
    shape = decoder.predictor.config
    return Span.of(shape.layers, shape.kv_heads, layers, heads)


class Restorer:
    """The index of one target in memory, and the predictors it needs, loaded at their first use and kept."""

    def __init__(
        self,
        store: Store | str,
        model: str | os.PathLike[str],
        *,
        cache_dtype: str | None = None,
        salt: bytes = b"",
        device: str = "cpu",
    ) -> None:
        """model, cache_dtype: as targets.find_target takes them. salt: the tenant's. device: where the predictor computes.

        Raises UserError, DataError, StorageError.
        """
        self.store = Store.open(store, create=False) if isinstance(store, str) else store
        self.workshop = Workshop(self.store, device)
        self._asked = model, cache_dtype
        self.catalogue = Catalogue(self.store, find_target(self.store, model, cache_dtype))
        self._salt = salt

    @property
    def target(self) -> bytes:
        """The fingerprint of the target whose caches it gives."""
        return self.catalogue.target

    def refresh(self) -> None:
        """See what was committed since; where a name was asked for, follow it to the generation that is in use now.

        What is being restored goes on from the generation that it began with. Raises UserError, DataError, StorageError.
        """
        target = followed(self.store, *self._asked)
        if target not in (None, self.target):
            self.catalogue = Catalogue(self.store, target)  # one step: a reader sees the old one or the new one
            return
        self.catalogue.refresh()

    def restore(
        self,
        tokens: Sequence[int] | Any,
        *,
        layers: Range | None = None,
        heads: Range | None = None,
        decode: bool = False,
    ) -> Restoration:
        """The longest stored prefix of a prompt: its blobs are read and checked here, and decoded when they are asked for.

        tokens: ids, a list, array or tensor [T] or [1, T]. layers, heads: [first, end), for an engine that holds only these.
        decode: decode here, too, while blobs arrive, which is sooner done; for `load` and `as_dynamic_cache`, which then have all.

        Raises:
            UserError: no tokens, or a range that the cache does not have.
            DataError: what is needed to decode is damaged, or computes other bits here.
            StorageError: the store cannot be read.
        """
        ids = token_array(tokens)
        matches, notes = self.catalogue.find(ids, self._salt)
        return self.workshop.open(ids, matches, notes, layers, heads, decode=decode)


def restore(
    store: Store | str,
    model: str | os.PathLike[str],
    tokens: Sequence[int] | Any,
    *,
    cache_dtype: str | None = None,
    salt: bytes = b"",
    device: str = "cpu",
    layers: Range | None = None,
    heads: Range | None = None,
    decode: bool = False,
) -> Restoration:
    """The longest stored prefix of one prompt. For many prompts make a Restorer once: it keeps index and predictor.

    Arguments and errors: as of Restorer and Restorer.restore.
    """
    return Restorer(store, model, cache_dtype=cache_dtype, salt=salt, device=device).restore(
        tokens, layers=layers, heads=heads, decode=decode
    )
