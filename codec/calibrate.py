"""Calibration: residual moments of a sample, frozen into a profile."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from codec import narrow, token_scale
from codec.bins import Bins, density_table
from codec.chunk import Layers
from codec.closed_loop import ClosedLoop, Laws, carried_features
from codec.coders import DEFAULT
from codec.errors import UserError
from codec.formats import NumberFormat, number_format
from codec.geometry import Floats, Geometry
from codec.joint_fit import LayerMoments, fit
from codec.joint_model import JointLayer
from codec.known_answer import known_answer
from codec.loop import Next, follow
from codec.predictor import Predictor, PredictorState, Shape
from codec.profile import Arrays, Profile, ProfileFacts
from codec.residual import gaussian_table, quantise_scales
from codec.scales import CacheScales

_ABSURD = 2.0**20  # no cache holds such a residual on purpose; one of them must not decide a channel's scale


FitLayer = Callable[[Iterable[LayerMoments]], tuple[JointLayer, int]]


@dataclass
class Moments:
    """Sums of squared residuals, float64 [layers, 2 (K, V), kv_heads, head_dim], how many finite ones each sums, and tokens."""

    squares: NDArray[np.float64]
    counts: NDArray[np.int64]
    tokens: int = 0

    @classmethod
    def zero(cls, config: Shape) -> Moments:
        """Of nothing yet."""
        shape = (config.layers, 2, config.kv_heads, config.head_dim)
        return cls(np.zeros(shape), np.zeros(shape, np.int64))

    def add(self, other: Moments) -> None:
        """Merge in place. The caller keeps a fixed order, so that a repeated calibration gives the same profile."""
        self.squares += other.squares
        self.counts += other.counts
        self.tokens += other.tokens


def measure(
    predictor: Predictor, state: PredictorState, token_ids: Tensor, truth: Layers, scales: CacheScales | None = None
) -> Moments:
    """Residual moments of one chunk (shapes as in `codec.encode`); takes its tokens into `state`.

    Of a cache with scales residuals are in units of them.
    """
    moments = Moments.zero(predictor.config)
    moments.tokens = len(token_ids)
    run = predictor.run([state], [token_ids])
    for layer in range(predictor.config.layers):
        kv = run.guess(layer)
        for tensor in range(2):
            guess = kv[0][tensor].cpu().double()
            if scales is not None:
                guess = guess / torch.from_numpy(scales.values[layer, tensor].astype(np.float64))[:, None, None]
            r = truth[layer][tensor].cpu().double() - guess
            finite = r.abs() <= _ABSURD  # not so for a NaN
            moments.squares[layer, tensor] = torch.where(finite, r, torch.zeros_like(r)).square().sum(1).numpy()
            moments.counts[layer, tensor] = finite.sum(1).numpy()
        if layer < predictor.config.layers - 1:
            run.advance(layer, kv)
    run.commit()
    return moments


def freeze(
    predictor: Predictor,
    target: bytes,
    cache_format: str,
    moments: Moments,
    *,
    prefill_tokens: int,
    scales: CacheScales | None = None,
    coder: str = DEFAULT,
) -> Profile:
    """Moments to an open-loop profile with its known-answer digest. Raises UserError when there was nothing to calibrate on."""
    if moments.tokens < 1:
        raise UserError("Calibration saw no token; give it a corpus with at least one prompt.")
    fmt = number_format(cache_format)
    sigma = np.maximum(np.sqrt(moments.squares / np.maximum(moments.counts, 1)), 1e-4)
    quantised = [[quantise_scales(s, fmt) for s in layer] for layer in sigma]
    tensors: Arrays = {
        "grid": np.array([[s.grid[:, 0] for s in layer] for layer in quantised], dtype=np.int16),
        "reciprocal": np.array([[s.reciprocal[:, 0] for s in layer] for layer in quantised], dtype=np.int32),
    }
    work = _Work(predictor, target, cache_format, prefill_tokens, scales, coder)
    return work.profile("open", moments.tokens, tensors)


@dataclass(frozen=True)
class _Work:
    """What every profile says beside its loop's tensors."""

    predictor: Predictor
    target: bytes
    cache_format: str
    prefill_tokens: int
    scales: CacheScales | None
    coder: str

    def profile(self, loop: str, tokens: int, tensors: Arrays, history: int = 0) -> Profile:
        """Facts and tensors put together, with the known answer."""
        c = self.predictor.config
        facts = ProfileFacts(
            target=self.target.hex(), predictor=self.predictor.fingerprint.hex(), cache_format=self.cache_format, loop=loop,
            prefill_tokens=self.prefill_tokens, layers=c.layers, hidden=c.hidden, kv_heads=c.kv_heads, head_dim=c.head_dim,
            rope_dim=c.rope_dim, calibration_tokens=tokens, history=history,
            scale_mode="" if self.scales is None else self.scales.mode, coder=self.coder,
        )  # fmt: skip
        more: Arrays = {"table": gaussian_table()}
        if self.scales is not None:
            more["scales"] = self.scales.values
        if loop == "closed" and number_format(self.cache_format).coarse:
            more["density"] = density_table()
        profile = Profile(facts, tensors | more)
        profile._check()  # what is written must be readable
        return replace(profile, facts=replace(facts, known_answer=known_answer(self.predictor, profile).hex()))


def with_coder(predictor: Predictor, profile: Profile, coder: str) -> Profile:
    """The same calibration for another coder: other bitstreams for the same laws. Raises WrongPredictor."""
    other = Profile(replace(profile.facts, coder=coder, known_answer=""), profile.tensors)
    return Profile(replace(other.facts, known_answer=known_answer(predictor, other).hex()), profile.tensors)


@dataclass(frozen=True)
class Sample:
    """One calibration prompt: token ids int64 [T]; true (K, V) of every layer; the target's hidden state entering every
    layer, float [layers][T, hidden], or none where no predictor has one; which tokens count, bool [T] (others only lead up to them)."""

    token_ids: Tensor
    truth: Layers
    hidden: list[Tensor]
    counted: NDArray[np.bool_] | None = None


class ClosedCalibration:
    """Calibration of the closed loop on some prompts, a layer at a time: `moments`, all prompts' merged and fitted, `advance`.

    The moments of a layer need the frozen gains of the layers below (DESIGN 4.7), so processes that share the work meet
    once a layer; each keeps the states of its own prompts. A coarse cache meets three times: what a bin tells depends on the
    law, so its moments are taken again under the law that was fitted.
    """

    def __init__(
        self,
        predictor: Predictor,
        cache_format: str,
        samples: Sequence[Sample],
        *,
        scales: CacheScales | None = None,
    ) -> None:
        self._predictor, self._fmt, self._samples = predictor, number_format(cache_format), list(samples)
        self._runs = [predictor.run([predictor.new_state()], [s.token_ids]) for s in samples]
        self._scales = None if scales is None else scales.values.astype(np.float64)
        self._history = predictor.history
        self._bins = Bins(gaussian_table(), density_table(), self._fmt) if self._fmt.coarse else None
        self._guesses: list[tuple[Tensor, Tensor]] = [(torch.empty(0), torch.empty(0))] * len(self._samples)
        self._carries: list[object] = [None] * len(self._samples)
        self._evidence: list[list[NDArray[Any]]] = [[] for _ in self._samples]

    @property
    def rounds(self) -> int:
        """How many times the moments of a layer are taken and fitted."""
        return 3 if self._fmt.coarse else 1

    def moments(self, layer: int, law: JointLayer | None = None) -> Iterator[LayerMoments]:
        """Moments of this layer, one a sample in their order; from the second round on under the law fitted before."""
        return (self.moments_of(i, layer, law) for i in range(len(self._samples)))

    def moments_of(self, i: int, layer: int, law: JointLayer | None = None) -> LayerMoments:
        """The same of one sample."""
        sample, run = self._samples[i], self._runs[i]
        if law is None:
            self._guesses[i] = run.guess(layer)[0]
        geometry = self._geometry(i, layer)
        values = [geometry.channels(self._fmt.values(self._fmt.patterns(t))) for t in sample.truth[layer]]
        residual = _ordered([x - g for x, g in zip(values, (geometry.k, geometry.v), strict=True)], geometry)
        features = residual
        if law is not None:
            laws, _ = self._known(i, layer, law)
            features = _ordered(laws.residual, geometry)
        error = np.zeros((geometry.tokens, 0))
        if sample.hidden:
            error = ((sample.hidden[layer].cpu().double() - run.h.cpu().double()) / run.rms.cpu().double()).numpy()
            error = np.where(np.abs(error) <= _ABSURD, error, 0.0)
        carried = carried_features(self._carries[i], self._history, residual.shape)
        counted = slice(None) if sample.counted is None else sample.counted
        carried = None if carried is None else carried[:, counted]
        return LayerMoments.of(carried, features[:, counted], residual[:, counted], error[counted])

    def advance(self, layer: int, frozen: JointLayer) -> None:
        """Take all samples through the frozen layer, as encoding will."""
        for i, run in enumerate(self._runs):
            laws, following = self._known(i, layer, frozen)
            counted = self._samples[i].counted
            self._evidence[i].append(self._seen(i, layer, laws, slice(None) if counted is None else counted))
            self._carries[i] = following.carry
            if layer < self._predictor.config.layers - 1:
                follow(run, layer, [following])

    def evidence(self) -> list[NDArray[Any]]:
        """What `sharpened` wants to know, one array a sample; after the last `advance`.

        Of a fine cache sums of squared innovations in blocks, int64 [layers, blocks, tokens that count]; of a coarse one code
        lengths in bits under narrower and wider laws, float64 [layers, N, laws] (codec.narrow).
        """
        return [np.stack(parts) for parts in self._evidence]

    def _seen(self, i: int, layer: int, laws: Laws, counted: slice | NDArray[np.bool_]) -> NDArray[Any]:
        if self._bins is None:
            return laws.energy[:, counted]
        geometry, sample = self._geometry(i, layer), self._samples[i]
        patterns = [geometry.channels(self._fmt.patterns(t)) for t in sample.truth[layer]]
        lengths = [
            narrow.code_lengths(self._bins, p[:, counted], mean[:, counted], sigma[:, counted])
            for p, mean, sigma in zip(patterns, laws.mean, laws.sigma, strict=True)
        ]
        return np.concatenate([lengths[1], lengths[0][geometry.k_order]])

    def _geometry(self, i: int, layer: int) -> Geometry:
        scales = None if self._scales is None else self._scales[layer]
        return Geometry(self._guesses[i], self._runs[i].turns()[0], self._predictor.config.rope_dim, scales)

    def _known(self, i: int, layer: int, law: JointLayer) -> tuple[Laws, Next]:
        truth, turn = self._samples[i].truth[layer], self._runs[i].turns()[0]
        return self._loop(layer, law).known(0, truth, self._guesses[i], turn, self._carries[i])

    def _loop(self, layer: int, law: JointLayer) -> ClosedLoop:
        scales = None if self._scales is None else self._scales[layer : layer + 1]
        rope_dim = self._predictor.config.rope_dim
        return ClosedLoop([law], rope_dim, self._fmt, history=self._history, scales=scales, bins=self._bins)


def _ordered(residual: Sequence[Floats], geometry: Geometry) -> Floats:
    """(K, V) residuals [J * D, T] in the coding order, 0 where no cache would hold such a thing on purpose, or for a NaN."""
    k, v = (np.where(np.abs(r) <= _ABSURD, r, 0.0) for r in residual)
    return np.concatenate([v, geometry.unrotate(k)])


def calibrate_closed(
    predictor: Predictor,
    target: bytes,
    cache_format: str,
    samples: Sequence[Sample],
    *,
    prefill_tokens: int,
    scales: CacheScales | None = None,
    fit_layer: FitLayer = fit,
    sharpen: bool = True,
    coder: str = DEFAULT,
) -> Profile:
    """Calibrate the closed loop in one process; `fit_layer` and `sharpen` are for ablations. Raises UserError without samples."""
    work = ClosedCalibration(predictor, cache_format, samples, scales=scales)
    layers, tokens = fit_layers(predictor.config.layers, work.rounds, work.moments, work.advance, fit_layer)
    if sharpen:
        layers = sharpened(layers, work.evidence(), number_format(cache_format))
    return freeze_closed(
        predictor, target, cache_format, layers, tokens, prefill_tokens=prefill_tokens, scales=scales, coder=coder
    )


def fit_layers(
    count: int,
    rounds: int,
    moments: Callable[[int, JointLayer | None], Iterable[LayerMoments]],
    advance: Callable[[int, JointLayer], None],
    fit_layer: FitLayer = fit,
) -> tuple[list[JointLayer], int]:
    """The order of closed calibration, wherever its work is done: joint models of `count` layers, and how many tokens counted.

    moments, advance: as of ClosedCalibration, over all samples in a fixed order.
    """
    layers, tokens = [], 0
    for layer in range(count):
        law, tokens = fit_layer(moments(layer, None))
        for _ in range(rounds - 1):
            law, tokens = fit_layer(moments(layer, law))
        layers.append(law)
        advance(layer, law)
    return layers, tokens


def sharpened(layers: Sequence[JointLayer], evidence: Sequence[NDArray[Any]], fmt: NumberFormat) -> list[JointLayer]:
    """The joint models with what changes sigmas but no mean, fitted to `ClosedCalibration.evidence` of all samples.

    Of a fine cache scales for tokens; of a coarse one, whose symbols tell too little of innovations for them, narrower laws.
    """
    if fmt.coarse:
        factors = narrow.fit(evidence)
        return [replace(layer, narrow=factor) for layer, factor in zip(layers, factors, strict=True)]
    scales = token_scale.fit(evidence, token_scale.block_sizes(len(layers[0].step)))
    return [replace(layer, scale=scale) for layer, scale in zip(layers, scales, strict=True)]


def freeze_closed(
    predictor: Predictor,
    target: bytes,
    cache_format: str,
    layers: Sequence[JointLayer],
    tokens: int,
    *,
    prefill_tokens: int,
    scales: CacheScales | None = None,
    coder: str = DEFAULT,
) -> Profile:
    """Joint models of all layers to a profile with its known-answer digest."""
    n = len(layers[0].step)
    stored: dict[str, type] = {"step": np.int8, "unit": np.int8, "bias": np.float32,
              "sigma": np.float32, "inside": np.float32, "gain": np.int8, "gain_unit": np.int8}  # fmt: skip
    # what `sharpened` did not set changes nothing
    if number_format(cache_format).coarse:
        layers = [x if x.narrow is not None else replace(x, narrow=np.ones(n, np.float32)) for x in layers]
        stored["narrow"] = np.float32
    else:
        flat = np.zeros((len(token_scale.block_sizes(n)), token_scale.TERMS), np.int16)
        layers = [x if x.scale is not None else replace(x, scale=flat) for x in layers]
        stored["scale"] = np.int16
    if layers[0].history:
        stored |= {"given": np.int8, "given_unit": np.int8}
    tensors: Arrays = {name: np.stack([getattr(x, name) for x in layers]).astype(t) for name, t in stored.items()}
    lower = np.tril_indices(n, -1)
    tensors["coefficient"] = np.stack([x.coefficient[lower] for x in layers]).astype(np.int16)
    work = _Work(predictor, target, cache_format, prefill_tokens, scales, coder)
    return work.profile("closed", tokens, tensors, layers[0].history)
