"""Lane-interleaved rANS: many independent states over one stream of words, coded by integers alone.

A *symbol* is an interval [start, start + freq) of the 2**PRECISION slots. The state x of a symbol's lane, in [LOW, 2**63), takes it in:

    encode: if x >= freq << 39: write the low 32 bits of x as a word; x >>= 32
            x = (x // freq << 24) + x % freq + start
    decode: slot = x % 2**24 finds the symbol; x = freq * (x >> 24) + slot - start; if x < LOW: x = x << 32 | the next word

(J. Duda, "Asymmetric numeral systems", arXiv:1311.2540; lanes that share one stream: F. Giesen, "Interleaved entropy coders",
arXiv:1402.3392.) Encoding takes all symbols in reverse, so that the decoder's words come in order. The stream is the lanes' final
states, 8 bytes each, then the words, little-endian. A lane costs 4 bytes more than it holds, so its state goes on through some layers.

Three paths give the same bytes: compiled loops here, plain integers in codec.rans_plain, tensors in codec.rans_torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from codec.errors import CorruptBlob
from codec.kernels import apart, compiled, inlined

PRECISION = 24
LOW = 1 << 31
MAX_LANES = 32
SCALARS_A_LANE = 1 << 14  # at 1 bit a scalar the 4 bytes that a lane costs are then 0.2 %
STREAM_SCALARS = 1 << 20  # an encoder holds all symbols of a stream
COARSE_SCALARS = 3 << 20  # at fewer bits a scalar, what a lane costs wants longer streams
NAME = "rans24x64-1"
Words = NDArray[np.uint32]
States = NDArray[np.uint64]
Codes = NDArray[np.uint64]
LANE_SHIFT, FREQ_SHIFT = 24, 32

_PRECISION, _WORD, _LOW = np.uint64(PRECISION), np.uint64(32), np.uint64(LOW)
_LIMIT_SHIFT = np.uint64(63 - PRECISION)
_SLOTS = np.uint64((1 << PRECISION) - 1)
_WORD_MASK = np.uint64(0xFFFFFFFF)
_LANE_SHIFT, _FREQ_SHIFT, _LANES = np.uint64(LANE_SHIFT), np.uint64(FREQ_SHIFT), np.uint64(MAX_LANES - 1)


def layers_a_stream(scalars: int, coarse: bool) -> int:
    """How many layers of so many scalars, K and V, share a stream: as many as have STREAM_SCALARS at most (of a coarse format
    COARSE_SCALARS), but one layer at least."""
    return max(1, (COARSE_SCALARS if coarse else STREAM_SCALARS) // max(1, scalars))


def lane_count(scalars: int) -> int:
    """Lanes of a stream of so many scalars: one for SCALARS_A_LANE, rounded down to a power of two, at least 1, at most MAX_LANES."""
    return min(MAX_LANES, 1 << max((scalars // SCALARS_A_LANE).bit_length() - 1, 0))


@dataclass(frozen=True)
class Symbols:
    """Symbols in the order in which they are decoded: uint64 [n], start | lane << LANE_SHIFT | freq << FREQ_SHIFT. 1 <= freq <= 2**24."""

    codes: Codes

    @classmethod
    def of(cls, start: NDArray[Any], freq: NDArray[Any], lane: NDArray[Any]) -> Symbols:
        """From arrays of integers [n]."""
        start, freq, lane = (x.astype(np.uint64) for x in (start, freq, lane))
        return cls(start | lane << np.uint64(LANE_SHIFT) | freq << np.uint64(FREQ_SHIFT))

    def __len__(self) -> int:
        return len(self.codes)

    @property
    def start(self) -> Codes:
        """First slots [n]."""
        return self.codes & _SLOTS

    @property
    def freq(self) -> Codes:
        """Slots [n]."""
        return self.codes >> np.uint64(FREQ_SHIFT)

    @property
    def lane(self) -> Codes:
        """Lanes [n]."""
        return self.codes >> np.uint64(LANE_SHIFT) & np.uint64(MAX_LANES - 1)


class Encoder:
    """Collects symbols in decoding order, part by part, and codes them when finished."""

    def __init__(self, lanes: int, most: int = 0) -> None:
        """most: symbols of a stream, where that is known: they then lie side by side."""
        self.lanes = lanes
        self._parts: list[Symbols] = []
        self._most = most
        self._room: Codes = np.empty(0, np.uint64)
        self._free = self._room

    def begin(self, lanes: int) -> None:
        """Begin another stream, in the same room."""
        self.lanes, self._parts, self._free = lanes, [], self._room

    @property
    def parts(self) -> list[Symbols]:
        """What was given so far."""
        return self._parts

    def room(self, symbols: int) -> Codes:
        """Where to write so many symbols of the next parts at most, without a copy of them being made.

        They are then added in the order in which they lie there, from its begin on.
        """
        if len(self._free) < symbols:
            self._room = self._free = np.empty(max(self._most, symbols), np.uint64)
        return self._free

    def add(self, part: Symbols) -> None:
        """The next symbols: those at the begin of what `room` gave, or any that lie elsewhere."""
        if np.shares_memory(part.codes, self._free):
            if part.codes.ctypes.data != self._free.ctypes.data:
                raise ValueError("symbols before these in the encoder's room were not added")
            self._free = self._free[len(part) :]
        self._parts.append(part)

    def finish(self) -> tuple[bytes, list[int]]:
        """The stream, and how many of its bytes each part took; the states count for the first."""
        states = np.full(self.lanes, LOW, np.uint64)
        scratch = np.empty(MAX_LANES, np.uint32), np.empty(MAX_LANES, np.int64)
        words: list[Words] = []
        out = np.empty(max(map(len, self._parts), default=0), np.uint32)
        for part in reversed(self._parts):
            words.append(out[_encode(part.codes, states, *scratch, out) :].copy())
        words.reverse()
        sizes = [4 * len(w) for w in words]
        if sizes:
            sizes[0] += 8 * self.lanes
        return b"".join(
            [states.astype("<u8").tobytes(), *(w.astype("<u4", copy=False).tobytes() for w in words)]
        ), sizes


class Decoder:
    """The states and words of a stream, to be read by compiled loops: `states` and `at` change as symbols are decoded."""

    def __init__(self, stream: bytes | memoryview, lanes: int) -> None:
        if len(stream) % 4 or len(stream) < 8 * lanes:
            raise CorruptBlob(
                f"A bitstream of {len(stream)} bytes cannot be one of {lanes} states and 32-bit words; the blob is corrupt."
            )
        self.states: States = np.frombuffer(stream, "<u8", lanes).astype(np.uint64)
        # one zero more: it is read where there is no word any more
        self.words: Words = np.frombuffer(b"".join((stream, bytes(4))), "<u4", offset=8 * lanes).astype(
            np.uint32, copy=False
        )
        self.at = np.zeros(1, np.int64)  # the next word
        self.steps = np.empty(lanes)  # scratch of the loops that read
        if bool((self.states < LOW).any()) or bool((self.states >= 1 << 63).any()):
            raise CorruptBlob("A bitstream's states are out of range; the blob is corrupt.")

    @property
    def place(self) -> tuple[States, Words, NDArray[np.int64]]:
        """What reading changes, and what it reads."""
        return self.states, self.words, self.at

    def check(self) -> None:
        """Raise CorruptBlob where more words were asked for than there are."""
        if self.at[0] >= len(self.words):
            raise CorruptBlob("A bitstream ends before its tensors do; the blob is corrupt.")

    def finish(self) -> None:
        """Raise CorruptBlob unless every bit was used."""
        self.check()
        if self.at[0] != len(self.words) - 1 or bool((self.states != LOW).any()):
            raise CorruptBlob("A bitstream holds more than its tensors need; the blob is corrupt.")


@inlined
def _lane(code: np.uint64) -> Any:
    return (code >> _LANE_SHIFT) & _LANES


@apart
def _one_a_lane(codes: Codes, first: int) -> Any:
    """Whether the MAX_LANES symbols from `first` on are those of lanes 0, 1, …"""
    other = np.uint64(0)
    for lane in range(MAX_LANES):
        other |= _lane(codes[np.uint64(first + lane)]) ^ np.uint64(lane)
    return other == np.uint64(0)


@apart
def _absorb_all(codes: Codes, first: int, states: States, words: Words, full: NDArray[np.int64]) -> None:
    """Take in one symbol a lane; `words`: the low words of the states before, `full`: 1 where they have to be written.

    A quotient is below 2**39, so that of float64 is off by one at most, and the rest shows it.
    """
    for lane in range(MAX_LANES):
        code = codes[np.uint64(first + lane)]
        x, f = states[lane], np.int64(code >> _FREQ_SHIFT)
        over = x >= np.uint64(f) << _LIMIT_SHIFT
        words[lane], full[lane] = np.uint32(x & _WORD_MASK), np.int64(over)
        y = np.int64(x >> _WORD if over else x)
        share = np.int64(np.float64(y) / np.float64(f))
        rest = y - share * f
        off = np.int64(rest >= f) - np.int64(rest < 0)
        states[lane] = np.uint64(((share + off) << PRECISION) + (rest - off * f)) + (code & _SLOTS)


@compiled
def _encode(codes: Codes, states: States, words: Words, full: NDArray[np.int64], out: Words) -> Any:
    """Take symbols into the states, last one first; words are written from the end of `out` on. Returns where they begin.

    words, full: scratch [MAX_LANES]. Most symbols come as one for every lane, and those are taken in together.
    """
    at, i, last = out.shape[0], codes.shape[0], np.uint64(MAX_LANES - 1)
    while i > 0:
        if i >= MAX_LANES and _lane(codes[np.uint64(i - 1)]) == last and _one_a_lane(codes, i - MAX_LANES):
            i -= MAX_LANES
            _absorb_all(codes, i, states, words, full)
            for k in range(MAX_LANES):
                lane = last - np.uint64(k)
                out[np.uint64(at - 1)] = words[lane]  # overwritten if it is none: there is room for a word a symbol
                at -= full[lane]
        else:
            i -= 1
            code = codes[np.uint64(i)]
            lane, f = _lane(code), code >> _FREQ_SHIFT
            x = states[lane]
            if x >= f << _LIMIT_SHIFT:
                at -= 1
                out[np.uint64(at)] = np.uint32(x & _WORD_MASK)
                x = x >> _WORD
            share = x // f
            states[lane] = (share << _PRECISION) + (x - share * f) + (code & _SLOTS)
    return at


@inlined
def taken(x: np.uint64, start: int, freq: int) -> np.uint64:
    """A state without the symbol that was found in it; below LOW it needs a word."""
    return np.uint64(freq) * (x >> _PRECISION) + (x & _SLOTS) - np.uint64(start)
