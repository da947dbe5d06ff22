"""The rANS coder's torch path for `coder`: from laws on a device to bytes and back, many streams at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from codec import rans, rans_torch
from codec.cells import Ints
from codec.coders import Coder
from codec.errors import CorruptBlob, UserError
from codec.geometry import Floats
from codec.scalars_torch import Laws

# side, and patterns, mean, sigma [channels, T] in the order in which they are coded
Law = tuple[int, Ints, Floats, Floats]
Sides = dict[str, Callable[[], object]]


@dataclass(frozen=True)
class Streams:
    """Streams of one shape, on a device: B of them, each of R rows of T scalars."""

    lanes: int
    numbers: list[tuple[int, int]]  # of each: its chunk, and which of the chunk's streams it is
    patterns: Tensor  # [B, R, T] int64
    mean: Tensor  # [B, R, T] float64, as is sigma
    sigma: Tensor


def check_device(device: str) -> None:
    """Raise UserError where torch has no such device."""
    try:
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise UserError(f"--torch {device}: torch cannot compute there: {str(error).splitlines()[0]}") from None


def make_sides(
    chunks: Sequence[list[list[Law]]], wanted: Sequence[list[bytes]], coder: Coder, device: str
) -> tuple[Sides, bool]:
    """(what to time by name, whether bytes and patterns are those of the compiled path).

    chunks: of each its layers' laws; wanted: of each its streams.
    """
    laws = Laws(coder.tables, device)
    groups = _groups(chunks, coder, device)
    true = [[wanted[c][s] for c, s in group.numbers] for group in groups]
    good = sum(map(len, true)) == sum(map(len, wanted))
    for group, streams in zip(groups, true, strict=True):
        good &= encode(laws, group) == streams and _decodes(laws, group, streams)

    def encode_all() -> None:
        for group in groups:
            encode(laws, group)

    def decode_all() -> None:
        for group, streams in zip(groups, true, strict=True):
            _decodes(laws, group, streams)

    return {"encode_torch": encode_all, "decode_torch": decode_all}, good


def encode(laws: Laws, group: Streams) -> list[bytes]:
    """The bytes of every stream."""
    laid = zip(group.patterns, group.mean, group.sigma, strict=True)
    parts = [[laws.put(patterns, laws.place(mean, sigma), group.lanes)[0]] for patterns, mean, sigma in laid]
    return [stream for stream, _ in rans_torch.encode(parts, group.lanes)]


def decode(laws: Laws, group: Streams, streams: Sequence[bytes]) -> Tensor:
    """Patterns [B, R, T] on the device."""
    coder = rans_torch.Decoder(streams, group.lanes, laws)
    out = torch.empty_like(group.patterns)
    for row in range(out.shape[1]):
        out[:, row] = coder.row(laws.place(group.mean[:, row], group.sigma[:, row]))
    coder.finish()
    return out


def _decodes(laws: Laws, group: Streams, streams: Sequence[bytes]) -> bool:
    try:
        return torch.equal(decode(laws, group, streams), group.patterns)
    except CorruptBlob:  # the streams are right, so it was read wrong
        return False


def _groups(chunks: Sequence[list[list[Law]]], coder: Coder, device: str) -> list[Streams]:
    found: dict[tuple[int, ...], list[tuple[tuple[int, int], list[np.ndarray]]]] = {}
    for c, layers in enumerate(chunks):
        scalars = sum(patterns.size for _, patterns, _, _ in layers[0])
        most = rans.layers_a_stream(scalars, coder.format.coarse)
        for begin in range(0, len(layers), most):
            rows = [law[1:] for layer in layers[begin : begin + most] for law in layer]
            arrays = [np.concatenate(some) for some in zip(*rows, strict=True)]
            key = rans.lane_count(arrays[0].size), *arrays[0].shape
            found.setdefault(key, []).append(((c, begin // most), arrays))
    out = []
    for (lanes, *_), some in found.items():
        numbers, arrays = zip(*some, strict=True)
        stacked = (torch.from_numpy(np.stack(x)).to(device) for x in zip(*arrays, strict=True))
        out.append(Streams(lanes, list(numbers), *stacked))
    return out
