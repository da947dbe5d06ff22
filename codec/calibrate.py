"""Calibration: residual moments of a sample, frozen into a profile, and the known answer that every process must reproduce."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from codec import exact
from codec.checksums import digest
from codec.chunk import Layers, check_pair
from codec.closed_loop import ClosedLoop, Geometry, JointLayer
from codec.errors import KnownAnswerMismatch, UserError
from codec.formats import NumberFormat, number_format
from codec.joint_fit import LayerMoments, fit, merge
from codec.loop import follow
from codec.predictor import Predictor, PredictorState
from codec.predictor.config import PredictorConfig
from codec.profile import Arrays, Profile, ProfileFacts
from codec.residual import CellModel, gaussian_table, quantise_scales

KNOWN_TOKENS = 48
_ABSURD = 2.0**20  # no cache holds such a residual on purpose; one of them must not decide a channel's scale


@dataclass
class Moments:
    """Sums of squared residuals, float64 [layers, 2 (K, V), kv_heads, head_dim], how many finite ones each sums, and tokens."""

    squares: NDArray[np.float64]
    counts: NDArray[np.int64]
    tokens: int = 0

    @classmethod
    def zero(cls, config: PredictorConfig) -> Moments:
        """Of nothing yet."""
        shape = (config.layers, 2, config.kv_heads, config.head_dim)
        return cls(np.zeros(shape), np.zeros(shape, np.int64))

    def add(self, other: Moments) -> None:
        """Merge in place. The caller keeps a fixed order, so that a repeated calibration gives the same profile."""
        self.squares += other.squares
        self.counts += other.counts
        self.tokens += other.tokens


def measure(predictor: Predictor, state: PredictorState, token_ids: Tensor, truth: Layers) -> Moments:
    """Residual moments of one chunk (shapes as in `codec.encode`); takes its tokens into `state`."""
    moments = Moments.zero(predictor.config)
    moments.tokens = len(token_ids)
    run = predictor.run([state], [token_ids])
    for layer in range(predictor.config.layers):
        kv = run.guess(layer)
        for tensor in range(2):
            r = truth[layer][tensor].cpu().double() - kv[0][tensor].cpu().double()
            finite = r.abs() <= _ABSURD  # not so for a NaN
            moments.squares[layer, tensor] = torch.where(finite, r, torch.zeros_like(r)).square().sum(1).numpy()
            moments.counts[layer, tensor] = finite.sum(1).numpy()
        if layer < predictor.config.layers - 1:
            run.advance(layer, kv)
    run.commit()
    return moments


def freeze(predictor: Predictor, target: bytes, cache_format: str, moments: Moments, *, prefill_tokens: int) -> Profile:
    """Moments to an open-loop profile with its known-answer digest. Raises UserError when there was nothing to calibrate on."""
    if moments.tokens < 1:
        raise UserError("Calibration saw no token; give it a corpus with at least one prompt.")
    fmt = number_format(cache_format)
    sigma = np.maximum(np.sqrt(moments.squares / np.maximum(moments.counts, 1)), 1e-4)
    scales = [[quantise_scales(s, fmt) for s in layer] for layer in sigma]
    tensors: Arrays = {
        "grid": np.array([[s.grid[:, 0] for s in layer] for layer in scales], dtype=np.int16),
        "reciprocal": np.array([[s.reciprocal[:, 0] for s in layer] for layer in scales], dtype=np.int32),
    }
    return _profile(predictor, target, cache_format, "open", prefill_tokens, moments.tokens, tensors)


def _profile(
    predictor: Predictor, target: bytes, cache_format: str, loop: str, prefill_tokens: int, tokens: int, tensors: Arrays
) -> Profile:
    c = predictor.config
    facts = ProfileFacts(
        target=target.hex(), predictor=predictor.fingerprint.hex(), cache_format=cache_format, loop=loop,
        prefill_tokens=prefill_tokens, layers=c.layers, hidden=c.hidden, kv_heads=c.kv_heads, head_dim=c.head_dim,
        rope_dim=c.rope_dim, calibration_tokens=tokens,
    )  # fmt: skip
    profile = Profile(facts, tensors | {"table": gaussian_table()})
    profile._check()  # what is written must be readable
    return replace(profile, facts=replace(facts, known_answer=known_answer(predictor, profile).hex()))


@dataclass(frozen=True)
class Sample:
    """One calibration prompt: token ids int64 [T]; true (K, V) of every layer; the target's hidden state entering every
    layer, float [layers][T, hidden]; which tokens count, bool [T] (others only lead up to them)."""

    token_ids: Tensor
    truth: Layers
    hidden: list[Tensor]
    counted: NDArray[np.bool_] | None = None


class ClosedCalibration:
    """Calibration of the closed loop on some prompts: `moments(l)`, then `freeze_layer(l, …)` with all prompts' moments merged.

    The moments of a layer need the frozen gains of the layers below (DESIGN 4.7), so processes that share the work meet
    once a layer; each keeps the states of its own prompts.
    """

    def __init__(self, predictor: Predictor, cache_format: str, samples: Sequence[Sample]) -> None:
        self._predictor, self._fmt, self._samples = predictor, number_format(cache_format), list(samples)
        self._runs = [predictor.run([predictor.new_state()], [s.token_ids]) for s in samples]
        self._model = CellModel(gaussian_table(), self._fmt)
        self._guesses: list[tuple[Tensor, Tensor]] = []

    def moments(self, layer: int) -> list[LayerMoments]:
        """Moments of this layer, one a sample in their order."""
        c, out = self._predictor.config, []
        self._guesses = [run.guess(layer)[0] for run in self._runs]
        for run, guess, sample in zip(self._runs, self._guesses, self._samples, strict=True):
            geometry = Geometry(guess, run.turns()[0], c.rope_dim)
            r = [geometry.channels(t.cpu().double().numpy()) for t in sample.truth[layer]]
            r = [x - g for x, g in zip(r, (geometry.k, geometry.v), strict=True)]
            r = [np.where(np.abs(x) <= _ABSURD, x, 0.0) for x in r]  # 0 for a NaN too
            f = np.concatenate([r[1], geometry.unrotate(r[0])])
            error = ((sample.hidden[layer].cpu().double() - run.h.cpu().double()) / run.rms.cpu().double()).numpy()
            error = np.where(np.abs(error) <= _ABSURD, error, 0.0)
            if sample.counted is not None:
                f, error = f[:, sample.counted], error[sample.counted]
            out.append(LayerMoments(f @ f.T, f @ error, f.shape[1]))
        return out

    def advance(self, layer: int, frozen: JointLayer) -> None:
        """Take all samples through the frozen layer, as encoding will."""
        loop = ClosedLoop([frozen], self._predictor.config.rope_dim, self._model, self._fmt)
        for run, guess, sample in zip(self._runs, self._guesses, self._samples, strict=True):
            follow(run, layer, [loop.next(0, sample.truth[layer], guess, run.turns()[0])])


def calibrate_closed(
    predictor: Predictor, target: bytes, cache_format: str, samples: Sequence[Sample], *, prefill_tokens: int
) -> Profile:
    """Calibrate the closed loop in one process. Raises UserError without samples."""
    work = ClosedCalibration(predictor, cache_format, samples)
    layers, tokens = [], 0
    for layer in range(predictor.config.layers):
        moments = merge(work.moments(layer))
        tokens = moments.tokens
        layers.append(fit(moments))
        if layer < predictor.config.layers - 1:
            work.advance(layer, layers[-1])
    return freeze_closed(predictor, target, cache_format, layers, tokens, prefill_tokens=prefill_tokens)


def freeze_closed(
    predictor: Predictor,
    target: bytes,
    cache_format: str,
    layers: Sequence[JointLayer],
    tokens: int,
    *,
    prefill_tokens: int,
) -> Profile:
    """Joint models of all layers to a profile with its known-answer digest."""
    lower = np.tril_indices(len(layers[0].step), -1)
    tensors: Arrays = {
        "step": np.stack([x.step for x in layers]).astype(np.int8),
        "unit": np.stack([x.unit for x in layers]).astype(np.int8),
        "coefficient": np.stack([x.coefficient[lower] for x in layers]).astype(np.int16),
        "sigma": np.stack([x.sigma for x in layers]).astype(np.float32),
        "inside": np.stack([x.inside for x in layers]).astype(np.float32),
        "gain": np.stack([x.gain for x in layers]).astype(np.int16),
        "gain_unit": np.stack([x.gain_unit for x in layers]).astype(np.int8),
    }
    return _profile(predictor, target, cache_format, "closed", prefill_tokens, tokens, tensors)


def known_answer(predictor: Predictor, profile: Profile) -> bytes:
    """Digest of the guesses and bitstreams of a made-up prompt: fixed tokens, and a truth near the guesses with every kind of outlier.

    It runs through predictor, loop, residual model and coder as real chunks do, in two chunks of one prompt; 16 bytes.
    """
    check_pair(predictor, profile)
    c, fmt = predictor.config, profile.format
    tokens = torch.arange(KNOWN_TOKENS, dtype=torch.int64) * 7919 % min(c.vocab, 50021)
    tokens = tokens[: predictor.context_length]
    state, digests = predictor.new_state(), [digest(exact.elementwise_sample(predictor.device))]
    for begin in range(0, len(tokens), KNOWN_TOKENS // 2):
        part = tokens[begin : begin + KNOWN_TOKENS // 2]
        run = predictor.run([state], [part])
        for layer in range(c.layers):
            guess = run.guess(layer)[0]
            truth = _made_up_truth(guess[0], layer, fmt), _made_up_truth(guess[1], layer + 1, fmt)
            coded = profile.loop_codec.encode(layer, truth, guess, run.turns()[0], False)
            exactly = b"".join(_bits(t) for t in (*guess, run.h))
            digests.append(digest(exactly + coded.streams[0] + coded.streams[1]))
            if layer < c.layers - 1:
                follow(run, layer, [coded.next])
        run.commit()
    return digest(b"".join(digests))


def _bits(t: Tensor) -> bytes:
    return bytes(t.cpu().contiguous().view(torch.int32).numpy().astype("<i4").tobytes())


def _made_up_truth(guess: Tensor, seed: int, fmt: NumberFormat) -> Tensor:
    """Patterns near the guess's, and now and then any pattern at all."""
    patterns = fmt.patterns(guess.clamp(-fmt.max_finite, fmt.max_finite).to(fmt.dtype))
    i = np.arange(patterns.size, dtype=np.int64).reshape(patterns.shape) + 977 * seed
    near = patterns ^ (i * 40503 % 65521 % (4 if fmt.coarse else 16))
    return fmt.tensor(np.where(i % 251 == 0, i * 2654435761 % (1 << fmt.item_bits), near))


def check_known_answer(predictor: Predictor, profile: Profile) -> None:
    """To be called by every process on its device before its first chunk. Raises InexactBackend or KnownAnswerMismatch."""
    exact.prove_backend(predictor.device)
    got = known_answer(predictor, profile).hex()
    if got != profile.facts.known_answer:
        raise KnownAnswerMismatch(
            f"This process computes known-answer digest {got} where profile {profile.id.hex()[:16]} says "
            f"{profile.facts.known_answer}; its arithmetic or its libraries differ, so it must not encode or decode."
        )
