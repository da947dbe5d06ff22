"""The coders a profile can name: how a chunk's scalars, under their laws, become bitstreams.

    rans24x64-1             lane-interleaved rANS (codec.rans), one stream for some layers (rans.layers_a_stream); the default
    constriction-ans24/0.5  the ANS coder of constriction (codec.entropy), one stream a tensor

Both code the same laws; they are not bound to the same symbols. A writer is given layer after layer, V before K in the closed loop, K
before V in the open one, and a reader is asked in that order. `side` is 0 for K and 1 for V.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Generic, Protocol, TypeVar

import numpy as np

from codec import entropy, rans, rans_plain, scalars
from codec.cells import Ints
from codec.errors import CorruptBlob
from codec.formats import NumberFormat
from codec.geometry import Floats
from codec.residual import CellModel, ChannelScales, place_values, scale_integers
from codec.scalar_kernels import Tables
from codec.scalar_put import room_for
from codec.scalars import Sink, Source

DEFAULT = rans.NAME
NAMES = (rans.NAME, entropy.BACKEND)


@dataclass(frozen=True)
class Written:
    """The bitstreams of a chunk, in order, and how many of their bytes K and V took."""

    streams: list[bytes]
    bytes_k: int
    bytes_v: int


class Writer(Protocol):
    """Takes the scalars of one chunk. Both methods that take them return how many of them escaped."""

    def layer(self) -> None:
        """The next layer begins."""

    @property
    def sink(self) -> Sink | None:
        """What compiled loops write to; None where they cannot."""

    def channels(self, side: int, patterns: Ints, mean: Floats, sigma: Floats) -> int:
        """Channels [n, T], one after another, under means and sigmas of their shape."""

    def tensor(self, side: int, patterns: Ints, mean: Floats, scales: ChannelScales) -> int:
        """A whole tensor [J, T, D] under means of its shape; scales broadcast to it."""

    def finish(self) -> Written:
        """All streams; nothing can be added any more."""


class Reader(Protocol):
    """Reads the scalars of one chunk as its writer took them. All methods raise CorruptBlob."""

    @property
    def source(self) -> Source | None:
        """What compiled loops read from; None where they cannot."""

    def layer(self) -> None:
        """The next layer begins."""

    def channel(self, side: int, mean: Floats, sigma: Floats) -> Ints:
        """The next channel's patterns [T]."""

    def tensor(self, side: int, mean: Floats, scales: ChannelScales) -> Ints:
        """The next tensor's patterns [J, T, D]."""

    def finish(self) -> None:
        """Raise unless every bit was used."""


@dataclass(frozen=True)
class Coder:
    """One of NAMES for the table and format of a profile. reference: the plain paths."""

    name: str
    table: Ints
    format: NumberFormat
    reference: bool = False

    @cached_property
    def tables(self) -> Tables:
        """Of rANS."""
        return scalars.tables_of(self.table, self.format)

    @cached_property
    def model(self) -> CellModel:
        """Of constriction."""
        return CellModel(self.table, self.format, self.reference)

    def writer(self, layers: int, scalars: int) -> Writer:
        """For a chunk of so many layers of so many scalars each, K and V."""
        if self.name != rans.NAME:
            return _SeparateWriter(self.model, self.format)
        return _LaneWriter(self, _Shared(layers, scalars, self.format.coarse))

    def reader(self, streams: Sequence[bytes | memoryview], layers: int, scalars: int) -> Reader:
        """For the streams of such a chunk. Raises CorruptBlob."""
        if self.name != rans.NAME:
            return _SeparateReader(self.model, self.format, streams)
        shared = _Shared(layers, scalars, self.format.coarse)
        if len(streams) != shared.streams:
            raise CorruptBlob(
                f"The blob has {len(streams)} bitstreams where its coder writes {shared.streams}; it is corrupt, or of a version "
                "before the first release."
            )
        return _PlainReader(self, streams, shared) if self.reference else _LaneReader(self, streams, shared)


@dataclass(frozen=True)
class _Shared:
    """How layers of so many scalars each share streams."""

    layers: int
    scalars: int
    coarse: bool

    @property
    def most(self) -> int:
        """Layers of one stream."""
        return rans.layers_a_stream(self.scalars, self.coarse)

    @property
    def streams(self) -> int:
        """How many."""
        return -(-self.layers // self.most)

    def lanes(self, layer: int) -> int:
        """Of the stream that begins with this layer; 0 where none does."""
        return 0 if layer % self.most else rans.lane_count(self.scalars * min(self.most, self.layers - layer))


class _LaneWriter:
    def __init__(self, coder: Coder, shared: _Shared) -> None:
        self._coder, self._shared, self._layer = coder, shared, 0
        self._encoder = rans.Encoder(1, room_for(shared.scalars * min(shared.most, shared.layers)))
        self._sides: list[int] = []
        self._streams: list[bytes] = []
        self._bytes = [0, 0]

    def layer(self) -> None:
        """See Writer."""
        lanes = self._shared.lanes(self._layer)
        if lanes:
            self._close()
            self._encoder.begin(lanes)
        self._layer += 1

    def _close(self) -> None:
        """Code what the layers of a stream have given."""
        if self._layer == 0:
            return
        parts, lanes = self._encoder.parts, self._encoder.lanes
        stream, sizes = rans_plain.encode(parts, lanes) if self._coder.reference else self._encoder.finish()
        for size, side in zip(sizes, self._sides, strict=True):
            self._bytes[side] += size
        self._sides = []
        self._streams.append(stream)

    @property
    def sink(self) -> Sink | None:
        """See Writer."""
        return None if self._coder.reference else Sink(self._encoder, self._coder.tables, self._add)

    def _add(self, side: int, symbols: rans.Symbols) -> None:
        self._encoder.add(symbols)
        self._sides.append(side)

    def channels(self, side: int, patterns: Ints, mean: Floats, sigma: Floats) -> int:
        """See Writer."""
        if self._coder.reference:
            return self._gridded(side, patterns, mean, *scale_integers(sigma, self._coder.format))
        tables = self._coder.tables
        symbols, escapes = scalars.put_scaled(patterns, mean, sigma, tables, self._encoder.lanes, self._encoder)
        self._add(side, symbols)
        return escapes

    def tensor(self, side: int, patterns: Ints, mean: Floats, scales: ChannelScales) -> int:
        """See Writer."""
        return self._gridded(side, patterns.reshape(-1, patterns.shape[-1]), *_rows(mean, scales))

    def _gridded(self, side: int, patterns: Ints, mean: Floats, grid: Ints, reciprocal: Ints) -> int:
        law = patterns, mean, grid, reciprocal, self._coder.tables, self._encoder.lanes
        put = rans_plain.put(*law) if self._coder.reference else scalars.put_gridded(*law, self._encoder)
        self._add(side, put[0])
        return put[1]

    def finish(self) -> Written:
        """See Writer."""
        self._close()
        self._layer = 0  # nothing is open
        self._encoder = rans.Encoder(1)  # whoever goes on with the streams is done with the room for symbols
        return Written(self._streams, *self._bytes)


StreamDecoder = TypeVar("StreamDecoder", rans.Decoder, rans_plain.Decoder)


class _InTurn(Generic[StreamDecoder]):
    """Reads streams in turn, each while the layers that share it are read."""

    opened: type[StreamDecoder]

    def __init__(self, coder: Coder, streams: Sequence[bytes | memoryview], shared: _Shared) -> None:
        self._coder, self._streams, self._shared, self._layer = coder, list(streams), shared, 0
        self._decoders: list[StreamDecoder] = []

    def layer(self) -> None:
        """See Reader."""
        lanes = self._shared.lanes(self._layer)
        if lanes:
            self.finish()
            self._decoders = [self.opened(self._streams.pop(0), lanes)]
        self._layer += 1

    @property
    def _decoder(self) -> StreamDecoder:
        return self._decoders[0]

    def finish(self) -> None:
        """See Reader."""
        for decoder in self._decoders:
            decoder.finish()


class _LaneReader(_InTurn[rans.Decoder]):
    opened = rans.Decoder

    @property
    def source(self) -> Source | None:
        """See Reader."""
        return Source(self._decoder, self._coder.tables)

    def channel(self, side: int, mean: Floats, sigma: Floats) -> Ints:
        """See Reader."""
        found: Ints = scalars.read_scaled(self._decoder, mean[None], sigma[None], self._coder.tables)[0]
        return found

    def tensor(self, side: int, mean: Floats, scales: ChannelScales) -> Ints:
        """See Reader."""
        return scalars.read_gridded(self._decoder, *_rows(mean, scales), self._coder.tables).reshape(mean.shape)


class _PlainReader(_InTurn[rans_plain.Decoder]):
    """The same in plain integers."""

    opened = rans_plain.Decoder
    source = None

    def channel(self, side: int, mean: Floats, sigma: Floats) -> Ints:
        """See Reader."""
        scales = scale_integers(sigma, self._coder.format)
        return self._decoder.row(mean, *scales, self._coder.tables)

    def tensor(self, side: int, mean: Floats, scales: ChannelScales) -> Ints:
        """See Reader."""
        rows = zip(*_rows(mean, scales), strict=True)
        found: Ints = np.stack([self._decoder.row(*row, self._coder.tables) for row in rows])
        return found.reshape(mean.shape)


def _rows(mean: Floats, scales: ChannelScales) -> tuple[Floats, Ints, Ints]:
    """Means [J, T, D], and grid and reciprocal that broadcast to them, as rows [J * T, D]."""
    dims = mean.shape[-1]
    grid, reciprocal = (np.broadcast_to(x, mean.shape).reshape(-1, dims) for x in (scales.grid, scales.reciprocal))
    return mean.reshape(-1, dims), grid, reciprocal


class _SeparateWriter:
    sink = None

    def __init__(self, model: CellModel, fmt: NumberFormat) -> None:
        self._model, self._fmt = model, fmt
        self._sides: tuple[list[bytes], list[bytes]] = ([], [])

    def layer(self) -> None:
        """See Writer."""

    def channels(self, side: int, patterns: Ints, mean: Floats, sigma: Floats) -> int:
        """See Writer."""
        where = place_values(mean, ChannelScales(*scale_integers(sigma, self._fmt)), self._fmt)
        return self._add(side, entropy.encode_groups(patterns, where, self._model, self._fmt))

    def tensor(self, side: int, patterns: Ints, mean: Floats, scales: ChannelScales) -> int:
        """See Writer."""
        where = place_values(mean, scales, self._fmt).flat()
        return self._add(side, entropy.encode_tensor(patterns.reshape(-1), where, self._model, self._fmt))

    def _add(self, side: int, coded: tuple[bytes, int]) -> int:
        self._sides[side].append(coded[0])
        return coded[1]

    def finish(self) -> Written:
        """See Writer."""
        streams = [stream for pair in zip(*self._sides, strict=True) for stream in pair]
        return Written(streams, sum(map(len, self._sides[0])), sum(map(len, self._sides[1])))


class _SeparateReader:
    source = None

    def __init__(self, model: CellModel, fmt: NumberFormat, streams: Sequence[bytes | memoryview]) -> None:
        self._model, self._fmt, self._streams = model, fmt, list(streams)
        self._at = 0
        self._coders: list[entropy.Decoder] = []

    def layer(self) -> None:
        """See Reader."""
        for coder in self._coders:
            coder.finish()
        pair = self._streams[self._at : self._at + 2]
        if len(pair) != 2:
            raise CorruptBlob("The blob has fewer bitstreams than tensors; it is corrupt.")
        self._coders = [entropy.Decoder(stream) for stream in pair]
        self._at += 2

    def channel(self, side: int, mean: Floats, sigma: Floats) -> Ints:
        """See Reader."""
        where = place_values(mean[None], ChannelScales(*scale_integers(sigma[None], self._fmt)), self._fmt)
        return entropy.decode_groups(self._coders[side], where, self._model, self._fmt)

    def tensor(self, side: int, mean: Floats, scales: ChannelScales) -> Ints:
        """See Reader."""
        where = place_values(mean, scales, self._fmt).flat()
        return entropy.decode_rest(self._coders[side], where, self._model, self._fmt).reshape(mean.shape)

    def finish(self) -> None:
        """See Reader."""
        for coder in self._coders:
            coder.finish()
        if self._at != len(self._streams):
            raise CorruptBlob("The blob has more bitstreams than tensors; it is corrupt.")
