"""Made-up joint models of any width, to see what a scalar costs: sizes like a real model's, numbers at random."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from codec import rans
from codec.closed_loop import ClosedLoop
from codec.coders import Coder
from codec.errors import DataError
from codec.formats import BF16
from codec.joint_model import JointLayer
from codec.loop import Pair
from codec.residual import gaussian_table
from codec.token_scale import BLOCK, TERMS
from jobs.bench.turns import Note, take_turns

HEAD_DIM = 64
HIDDEN = 4  # dims of the hidden state are this many times d_kv, as of Llama 3 8B
LAYERS = 32  # of the chunk whose layer this would be: it decides how many lanes there are
_SIGMA = 0.006  # about three bits a scalar


@dataclass(frozen=True)
class Sweep:
    """Widths of K and V of a token, multiples of HEAD_DIM; tokens of a chunk; repeats of every side; layers that the joint models look
    back; whose seconds count."""

    widths: Sequence[int]
    tokens: int
    repeats: int
    looks_back: int = 0
    clock: Callable[[], float] = time.process_time


def joint_model(d_kv: int, rng: np.random.Generator, looks_back: int = 0) -> JointLayer:
    """One of that width in which every channel depends a little on all those before it."""
    n = 2 * d_kv
    coefficient = np.tril(rng.normal(0, 3000, (n, n)), -1).astype(np.int16)
    first = np.arange(n // 2, n, 2)
    coefficient[first + 1, first] = 0
    # features are about 2**3 steps: all of them together move a mean by a fraction of sigma
    unit = np.full(n, int(np.floor(np.log2(_SIGMA / 4 / (3000 * 8 * n**0.5)))))
    hidden = HIDDEN * d_kv
    return JointLayer(
        step=np.full(n, int(np.floor(np.log2(_SIGMA))) - 3), coefficient=coefficient, unit=unit,
        given=rng.integers(-128, 128, (n, looks_back * n)).astype(np.int8), given_unit=np.full(n, -20), bias=np.zeros(n, np.float32),
        sigma=np.full(n, _SIGMA, np.float32), inside=rng.uniform(-0.3, 0.3, n // 4).astype(np.float32),
        gain=rng.integers(-128, 128, (hidden, n)).astype(np.int8), gain_unit=np.full(hidden, -20),
        scale=np.zeros((-(-n // BLOCK), TERMS), np.int16),
    )  # fmt: skip


class _Made:
    """A layer of a made-up cache: truth near its guess, and what codes it."""

    def __init__(self, width: int, tokens: int, rng: np.random.Generator, looks_back: int = 0) -> None:
        shape = (width // HEAD_DIM, tokens, HEAD_DIM)
        self.scalars = 2 * width * tokens
        self._loop = ClosedLoop([joint_model(width, rng, looks_back)], HEAD_DIM, BF16, history=looks_back)
        self._coder = Coder(rans.NAME, gaussian_table(), BF16)
        self._guess = self._pair(rng, shape)
        noise = self._pair(rng, shape)
        k, v = ((g + _SIGMA * n).bfloat16() for g, n in zip(self._guess, noise, strict=True))
        self._truth = k, v
        angle = torch.from_numpy(rng.uniform(0, 6, (tokens, HEAD_DIM // 2)).astype(np.float32))
        self._turn = torch.cos(angle), torch.sin(angle)
        self._streams = self.encode()
        if not all(
            torch.equal(a.view(torch.int16), b.view(torch.int16))
            for a, b in zip(self.decode(), self._truth, strict=True)
        ):
            raise DataError(f"a made-up cache of width {width} did not come back as it was; the coder is broken here")

    @staticmethod
    def _pair(rng: np.random.Generator, shape: tuple[int, ...]) -> Pair:
        k, v = (torch.from_numpy(rng.standard_normal(shape).astype(np.float32)) for _ in range(2))
        return k, v

    def encode(self) -> list[bytes]:
        writer = self._coder.writer(1, LAYERS * self.scalars)
        writer.layer()
        self._loop.encode(0, self._truth, self._guess, self._turn, False, writer)
        return writer.finish().streams

    def decode(self) -> Pair:
        reader = self._coder.reader(self._streams, 1, LAYERS * self.scalars)
        reader.layer()
        values = self._loop.decode(0, reader, self._guess, self._turn).values
        reader.finish()
        return values


def sweep(given: Sweep, note: Note) -> dict[int, dict[str, float]]:
    """By width: nanoseconds by the clock a scalar of decoding a layer and of encoding it, medians.

    Raises DataError where it comes back wrong.
    """
    rng, sides = np.random.default_rng(0), {}
    for width in given.widths:
        made = _Made(width, given.tokens, rng, given.looks_back)
        sides |= {f"d_kv {width}, decode": made.decode, f"d_kv {width}, encode": made.encode}
    seconds = {
        name: statistics.median(times) for name, times in take_turns(sides, given.repeats, note, given.clock).items()
    }

    def cost(width: int, way: str) -> float:
        return seconds[f"d_kv {width}, {way}"] * 1e9 / (2 * width * given.tokens)

    return {
        width: {"ns_per_scalar": cost(width, "decode"), "encode_ns_per_scalar": cost(width, "encode")}
        for width in given.widths
    }
