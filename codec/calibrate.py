"""Calibration: residual moments of a sample, frozen into a profile, and the known answer that every process must reproduce."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from codec import exact
from codec.checksums import digest
from codec.chunk import Layers, guess_digest
from codec.entropy import encode_tensor
from codec.errors import KnownAnswerMismatch, UserError
from codec.formats import number_format
from codec.predictor import Predictor, PredictorState
from codec.predictor.config import PredictorConfig
from codec.profile import Profile, ProfileFacts
from codec.residual import Placement, gaussian_table, quantise_scales

KNOWN_TOKENS = 48
KNOWN_SCALARS = 4096


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
            finite = torch.isfinite(r)
            moments.squares[layer, tensor] = torch.where(finite, r, torch.zeros_like(r)).square().sum(1).numpy()
            moments.counts[layer, tensor] = finite.sum(1).numpy()
        if layer < predictor.config.layers - 1:
            run.advance(layer, kv)
    run.commit()
    return moments


def freeze(predictor: Predictor, target: bytes, cache_format: str, moments: Moments, *, prefill_tokens: int) -> Profile:
    """Moments to a profile with its known-answer digest. Raises UserError when there was nothing to calibrate on."""
    if moments.tokens < 1:
        raise UserError("Calibration saw no token; give it a corpus with at least one prompt.")
    fmt = number_format(cache_format)
    sigma = np.sqrt(moments.squares / np.maximum(moments.counts, 1))
    scales = [[quantise_scales(s, fmt) for s in layer] for layer in np.maximum(sigma, 1e-4)]
    c = predictor.config
    facts = ProfileFacts(
        target=target.hex(), predictor=predictor.fingerprint.hex(), cache_format=cache_format, loop="open", prefill_tokens=prefill_tokens,
        layers=c.layers, kv_heads=c.kv_heads, head_dim=c.head_dim, calibration_tokens=moments.tokens,
    )  # fmt: skip
    grid = np.array([[s.grid[:, 0] for s in layer] for layer in scales], dtype=np.int16)
    reciprocal = np.array([[s.reciprocal[:, 0] for s in layer] for layer in scales], dtype=np.int32)
    profile = Profile(facts, grid, reciprocal, gaussian_table())
    return replace(profile, facts=replace(facts, known_answer=known_answer(predictor, profile).hex()))


def known_answer(predictor: Predictor, profile: Profile) -> bytes:
    """Digest of the guesses for fixed tokens through all layers, and of fixed integers through the coder; 16 bytes."""
    tokens = torch.arange(KNOWN_TOKENS, dtype=torch.int64) * 7919 % min(predictor.config.vocab, 50021)
    guesses = guess_digest(predictor, tokens[: predictor.context_length], KNOWN_TOKENS // 2)
    i = np.arange(KNOWN_SCALARS, dtype=np.int64)
    f, p = profile.facts, profile
    channel = i % (f.layers * 2 * f.kv_heads * f.head_dim)
    grid, reciprocal = (x.reshape(-1)[channel].astype(np.int64) for x in (p.grid, p.reciprocal))
    where = Placement((i * 2654435761 % 9001 - 4500) * 16, i * 40503 % 301 - 214, grid, reciprocal)
    patterns = i * 40503 % 65536  # mostly escapes and tails
    near = np.where(i % 4 > 0, (np.clip(grid + 7 - p.format.emin, 1, 29) << p.format.mantissa) + i % 97, patterns)
    stream, _ = encode_tensor(near, where, p.model, p.format)
    return digest(guesses + stream)


def check_known_answer(predictor: Predictor, profile: Profile) -> None:
    """To be called by every process on its device before its first chunk. Raises InexactBackend or KnownAnswerMismatch."""
    exact.prove_backend(predictor.device)
    got = known_answer(predictor, profile).hex()
    if got != profile.facts.known_answer:
        raise KnownAnswerMismatch(
            f"This process computes known-answer digest {got} where profile {profile.id.hex()[:16]} says "
            f"{profile.facts.known_answer}; its arithmetic or its libraries differ, so it must not encode or decode."
        )
