"""The closed loop (DESIGN 4): code a layer jointly, force what was decoded, correct the hidden state.

The law of each channel is codec.joint_model's. A decoder learns channels one after another, and so does the encoder of a coarse cache
(FP8), because what a bin tells depends on the law under which it was coded. `_one_by_one` says in plain array code what that means;
compiled loops (codec.walk) do the same for encoder and decoder alike.

Shapes: J key-value heads, D head dims, T tokens, N = 2 * J * D channels, M hidden dims.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from codec.bins import Bins
from codec.cells import Ints
from codec.coders import Reader, Writer
from codec.formats import Items, NumberFormat
from codec.geometry import Floats, Geometry
from codec.ideal import Cost, cost
from codec.joint_model import REACH, Features, JointLayer, Means, PairLaw, Ready
from codec.loop import CodedLayer, DecodedLayer, Next, Pair
from codec.scalars import Sink, Source
from codec.token_scale import BLOCK, CompiledTokenScale, TokenScale, innovations
from codec.walk import Walked, Walker

CORRECTION_MAX = 2.0**20  # in units of the state's RMS, which is below 2**100: the sum stays finite
Read = Callable[[int, int, Floats, Floats], Ints]  # 0 (K) or 1 (V), channel, mean and sigma [T] -> patterns [T]


@dataclass(frozen=True)
class Carry:
    """Features of the layers before, the latest first, [N, T] each, as many as the joint models look back; and, where tokens have
    scales of their own, the level of the layer before, int64 [T]."""

    features: tuple[Features, ...]
    level: Ints | None = None


@dataclass
class Laws:
    """Mean and sigma of every stored channel, and what its truth showed. K and V: [J * D, T]; features: [N, T].

    Of mean, sigma and residual nothing where only coding needed them.
    """

    mean: list[Floats]
    sigma: list[Floats]
    residual: list[Floats]  # what is known of truth minus guess; 0 where it must not steer anything
    forced: list[NDArray[Any]]  # the truth; the guess where it must not: float32 or float64
    features: Features
    energy: Ints  # sums over blocks of squared innovations in units of the model's own sigmas: [blocks, T]
    level: Ints | None = None


class ClosedLoop:
    """Codes layers under joint models.

    history: how many layers back the joint models look; scales float64 [layers, 2, J] and bins: of a coarse cache; reference: the
    plain path.
    """

    def __init__(
        self,
        layers: Sequence[JointLayer],
        rope_dim: int,
        fmt: NumberFormat,
        *,
        history: int = 0,
        scales: Floats | None = None,
        bins: Bins | None = None,
        reference: bool = False,
    ) -> None:
        for layer in layers:
            layer.check()
        self._layers = [Ready(layer) for layer in layers]
        self._rope_dim, self._fmt, self._reference = rope_dim, fmt, reference
        self._history, self._scales, self._bins = history, scales, bins
        self._walker = Walker(fmt, bins)

    def encode(
        self, layer: int, truth: Pair, guess: Pair, turn: Pair, ideal: bool, writer: Writer, carry: object = None
    ) -> CodedLayer:
        """See LoopCodec."""
        geometry = self._geometry(layer, guess, turn)
        sink = writer.sink
        if sink is None or self._reference:
            laws, escapes = self._write(layer, geometry, truth, writer, carry)
        else:
            found, laws = self._compiled(layer, geometry, self._items(geometry, truth), carry, sink=sink, keep=ideal)
            escapes = found.escapes
            for side, symbols in zip((1, 0), found.symbols, strict=True):
                sink.take(side, symbols)
        costs = self._costs(layer, geometry, self._patterns(geometry, truth), laws) if ideal else None
        return CodedLayer(costs, escapes, self._next(layer, geometry, laws, carry))

    def _write(self, layer: int, geometry: Geometry, truth: Pair, writer: Writer, carry: object) -> tuple[Laws, int]:
        """Find all laws, then encode under them."""
        patterns, laws = self._patterns(geometry, truth), self._laws(layer, geometry, truth, carry)
        escapes = 0
        for side, order in ((1, slice(None)), (0, geometry.k_order)):
            mean, sigma = laws.mean[side], laws.sigma[side]
            escapes += writer.channels(side, patterns[side][order], mean[order], sigma[order])
        return laws, escapes

    def decode(self, layer: int, reader: Reader, guess: Pair, turn: Pair, carry: object = None) -> DecodedLayer:
        """See LoopCodec."""
        geometry = self._geometry(layer, guess, turn)
        if reader.source is not None and not self._reference:
            found, laws = self._compiled(layer, geometry, None, carry, source=reader.source)
            reader.source.coder.check()
            k, v = (self._fmt.shared(geometry.tensor(x)) for x in _halves(found.items))
        else:
            patterns = [np.empty((len(geometry.k_order), geometry.tokens), np.int64) for _ in range(2)]

            def read(side: int, row: int, mean: Floats, sigma: Floats) -> Ints:
                patterns[side][row] = reader.channel(side, mean, sigma)
                found: Ints = patterns[side][row]
                return found

            laws = self._one_by_one(layer, geometry, carry, read)
            k, v = (self._fmt.tensor(geometry.tensor(x)) for x in patterns)
        return DecodedLayer((k, v), self._next(layer, geometry, laws, carry))

    def known(self, layer: int, truth: Pair, guess: Pair, turn: Pair, carry: object = None) -> tuple[Laws, Next]:
        """What a known truth shows, and how to go on from it, without coding it (for calibration)."""
        geometry = self._geometry(layer, guess, turn)
        laws = self._laws(layer, geometry, truth, carry)
        return laws, self._next(layer, geometry, laws, carry)

    def _patterns(self, geometry: Geometry, truth: Pair) -> list[Ints]:
        return [geometry.channels(self._fmt.patterns(t)) for t in truth]

    def _items(self, geometry: Geometry, truth: Pair) -> Items:
        """K's channels, then V's: [2 * J * D, T]."""
        return geometry.stacked([self._fmt.items(t) for t in truth])

    def _costs(self, layer: int, geometry: Geometry, patterns: list[Ints], laws: Laws) -> tuple[Cost, Cost]:
        half = len(geometry.k_order)
        narrow = self._layers[layer].narrow[:, None]  # in the coding order: V, then pairs of K
        factors = [np.empty((half, 1)), narrow[:half]]
        factors[0][geometry.k_order] = narrow[half:]
        k, v = (
            cost(p, mean, sigma, self._fmt, geometry.shape[0], sigma / factor)
            for p, mean, sigma, factor in zip(patterns, laws.mean, laws.sigma, factors, strict=True)
        )
        return k, v

    # ------------------------------------------------------------ laws
    def _geometry(self, layer: int, guess: Pair, turn: Pair) -> Geometry:
        return Geometry(guess, turn, self._rope_dim, None if self._scales is None else self._scales[layer])

    def _laws(self, layer: int, geometry: Geometry, truth: Pair, carry: object) -> Laws:
        """Of a known truth, with all that a layer shows."""
        if self._reference:
            patterns = self._patterns(geometry, truth)
            return self._one_by_one(layer, geometry, carry, lambda side, row, mean, sigma: patterns[side][row])
        return self._compiled(layer, geometry, self._items(geometry, truth), carry, keep=True)[1]

    def _compiled(
        self, layer: int, geometry: Geometry, items: Items | None, carry: object, *, source: Source | None = None, sink: Sink | None = None,
        keep: bool = False,
    ) -> tuple[Walked, Laws]:  # fmt: skip
        """Walk a layer whose items [2 * J * D, T] are known, or read from a source: the same numbers as `_one_by_one`.

        sink: where known items are written. Without `keep`, laws lack means, sigmas and residuals.
        """
        ready = self._layers[layer]
        given = ready.given_sums(self._carried(ready, geometry, carry))
        scale = None if ready.scale is None else CompiledTokenScale(ready.scale, geometry.tokens, _level(carry))
        found = self._walker.walk(ready, geometry, given, scale, items, source=source, sink=sink, keep=keep)
        rows = [_halves(x) if keep else [] for x in (found.mean, found.sigma, found.residual)]
        level = None if scale is None else scale.level
        return found, Laws(rows[0], rows[1], rows[2], _halves(found.forced), found.features, found.energy, level)

    def _one_by_one(self, layer: int, geometry: Geometry, carry: object, read: Read) -> Laws:
        """V channel by channel, then K pair by pair; `read` gives the truth of each, told its law."""
        ready = self._layers[layer]
        means = Means(ready, geometry.tokens, ready.base(self._carried(ready, geometry, carry)))
        empty = [[np.empty_like(geometry.k) for _ in range(2)] for _ in range(4)]
        energy = np.zeros((-(-len(means.features) // BLOCK), geometry.tokens), np.int64)
        laws = Laws(empty[0], empty[1], empty[2], empty[3], means.features, energy)
        pace = _Pace(ready, geometry, carry, laws)
        for j in range(ready.values):
            pace.reach(j)
            mean = means.of(j)
            self._take(layer, laws, 1, j, j, (geometry.v[j], ready.step_v[j]), mean, ready.sigma[j], pace, read)
            means.features[j] = ready.features(laws.residual[1][j : j + 1], slice(j, j + 1))[0]
        for p in range(ready.values // 2):
            j, one = ready.values + 2 * p, slice(p, p + 1)
            pace.reach(j)
            law = PairLaw(ready, geometry, means.of(j)[None], means.of(j + 1)[None], one)
            rows = int(geometry.first_rows[p]), int(geometry.second_rows[p])
            mean, sigma = law.mean_first, law.sigma_first
            for half, row in enumerate(rows):
                at = geometry.k[row], ready.step_k[p]
                self._take(layer, laws, 0, row, j + half, at, mean[0], sigma[0], pace, read)
                if half == 0:
                    mean, sigma = law.second(laws.residual[0][row : row + 1]), law.sigma_second
            turned = geometry.unrotate_pair(laws.residual[0][rows[0]], laws.residual[0][rows[1]], p)
            means.features[j : j + 2] = ready.features(turned, slice(j, j + 2))
        laws.level = pace.finish()
        return laws

    def _take(
        self, layer: int, laws: Laws, side: int, row: int, j: int, at: tuple[Floats, Floats], mean: Floats, sigma: Floats, pace: _Pace,
        read: Read,
    ) -> None:  # fmt: skip
        """Read channel j of the coding order, which is stored as `row`, under its law and write down what it showed.

        at: guess and step; mean: of the residual; sigma: the model's own.
        """
        mine = np.broadcast_to(pace.spread(sigma), laws.features.shape[1])
        coded = mine * self._layers[layer].narrow[j]
        laws.mean[side][row], laws.sigma[side][row] = at[0] + mean, coded
        patterns = read(side, row, laws.mean[side][row], coded)
        laws.residual[side][row], laws.forced[side][row] = self._observed(patterns, *at, laws.mean[side][row], mine)
        laws.energy[j // BLOCK] += innovations(laws.residual[side][row] - mean, sigma)

    def _observed(
        self, patterns: Ints, guess: Floats, step: Floats, mean: Floats | None = None, sigma: Floats | None = None
    ) -> tuple[Floats, Floats]:
        """(residual, forced): the guess stands in where the truth is not finite, or so far off that it must not steer anything."""
        real = self._fmt.values(patterns)
        with np.errstate(invalid="ignore", over="ignore"):
            known = real
            if self._bins is not None:
                assert mean is not None and sigma is not None
                known = self._bins.centre(patterns, mean, sigma)
            residual = known - guess
            trusted = np.isfinite(real) & (np.abs(residual) <= step * REACH)
        return np.where(trusted, residual, 0.0), np.where(trusted, real, guess)

    # ------------------------------------------------------------ going on
    def _carried(self, ready: Ready, geometry: Geometry, carry: object) -> Features | None:
        return carried_features(carry, self._history, (len(ready.step), geometry.tokens))

    def _next(self, layer: int, geometry: Geometry, laws: Laws, carry: object) -> Next:
        """Attend to what is known to be true, and correct the state by what it showed."""
        correction = torch.from_numpy(self._layers[layer].correction(laws.features, CORRECTION_MAX))
        before = carry.features if isinstance(carry, Carry) else ()
        following = Carry((laws.features, *before)[: self._history], laws.level)
        return Next(geometry.real(*laws.forced), correction.to(geometry.device), following)


class _Pace:
    """The tokens' own scales while channels are taken one by one; nothing where a layer has none."""

    def __init__(self, ready: Ready, geometry: Geometry, carry: object, laws: Laws) -> None:
        self._laws, self._factor = laws, np.ones(1)
        self._scale = None if ready.scale is None else TokenScale(ready.scale, geometry.tokens, _level(carry))

    def reach(self, j: int) -> None:
        """Channel j is next; at the begin of a block, all before it are known."""
        if self._scale is not None and j % BLOCK == 0:
            if j:
                self._scale.add(self._laws.energy[j // BLOCK - 1], BLOCK)
            self._factor = self._scale.of(j // BLOCK)

    def spread(self, sigma: Floats) -> Floats:
        """A sigma of the model, times the factors of this block."""
        return sigma * self._factor

    def finish(self) -> Ints | None:
        """The level of the layer."""
        if self._scale is None:
            return None
        self._scale.add(self._laws.energy[-1], (len(self._laws.features) - 1) % BLOCK + 1)
        return self._scale.level


def _halves(rows: NDArray[Any]) -> list[NDArray[Any]]:
    """K's rows and V's."""
    n = len(rows) // 2
    return [rows[:n], rows[n:]]


def _level(carry: object) -> Ints | None:
    return carry.level if isinstance(carry, Carry) else None


def carried_features(carry: object, history: int, shape: tuple[int, int]) -> Features | None:
    """Features of the `history` layers before as one array [history * N, T], zeros for those that are not there; None for no history.

    shape: (N, T).
    """
    if not history:
        return None
    parts = list(carry.features) if isinstance(carry, Carry) else []
    return np.concatenate(parts + [np.zeros(shape, np.int8)] * (history - len(parts)))
