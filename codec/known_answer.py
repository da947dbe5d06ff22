"""The known answer: a digest that every process must reproduce on its own device before it encodes or decodes."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from codec import exact
from codec.checksums import digest
from codec.chunk import check_pair
from codec.errors import CorruptBlob, KnownAnswerMismatch
from codec.formats import NumberFormat
from codec.loop import Pair, follow
from codec.predictor import Predictor
from codec.profile import Profile

KNOWN_TOKENS = 48


def known_answer(predictor: Predictor, profile: Profile) -> bytes:
    """Digest of the guesses and bitstreams of a made-up prompt: fixed tokens, and a truth near the guesses with every kind of outlier.

    It runs through predictor, loop, residual model and coder as real chunks do, in two chunks of one prompt, and the first chunk
    back again: decoding is other code than encoding. 16 bytes.
    """
    check_pair(predictor, profile)
    c, fmt = predictor.config, profile.format
    tokens = torch.arange(KNOWN_TOKENS, dtype=torch.int64) * 7919 % min(c.vocab, 50021)
    tokens = tokens[: predictor.context_length]
    scales = None if profile.scales is None else torch.from_numpy(profile.scales.values).to(predictor.device)
    state, digests = predictor.new_state(), [digest(exact.elementwise_sample(predictor.device))]
    for begin in range(0, len(tokens), KNOWN_TOKENS // 2):
        part = tokens[begin : begin + KNOWN_TOKENS // 2]
        run, writer = predictor.run([state], [part]), profile.coder.writer(*profile.sizes(len(part)))
        carry: object = None
        given: list[tuple[Pair, Pair, object]] = []
        for layer in range(c.layers):
            guess, turn = run.guess(layer)[0], run.turns()[0]
            near = [g if scales is None else g / scales[layer, n][:, None, None] for n, g in enumerate(guess)]
            truth = _made_up_truth(near[0], layer, fmt), _made_up_truth(near[1], layer + 1, fmt)
            given.append((guess, turn, carry))
            writer.layer()
            coded = profile.loop_codec.encode(layer, truth, guess, turn, False, writer, carry)
            carry = coded.next.carry
            digests.append(digest(b"".join(_bits(t) for t in (*guess, run.h))))
            if layer < c.layers - 1:
                follow(run, layer, [coded.next])
        run.commit()
        streams = writer.finish().streams
        digests.append(digest(b"".join(streams)))
        if begin == 0:
            digests.append(_decoded(profile, streams, len(part), given))
    return digest(b"".join(digests))


def _decoded(profile: Profile, streams: list[bytes], tokens: int, given: list[tuple[Pair, Pair, object]]) -> bytes:
    """Digest of what streams decode to; given: guess, turn and carry of every layer."""
    parts = []
    try:
        reader = profile.coder.reader(streams, *profile.sizes(tokens))
        for layer, (guess, turn, carry) in enumerate(given):
            reader.layer()
            values = profile.loop_codec.decode(layer, reader, guess, turn, carry).values
            parts += [profile.format.little_endian(t) for t in values]
        reader.finish()
    except CorruptBlob:
        return b"corrupt"
    return digest(b"".join(parts))


def _bits(t: Tensor) -> bytes:
    return bytes(t.cpu().contiguous().view(torch.int32).numpy().astype("<i4").tobytes())


def _made_up_truth(guess: Tensor, seed: int, fmt: NumberFormat) -> Tensor:
    """Patterns near the guess's, and now and then any pattern at all."""
    i = np.arange(guess.numel(), dtype=np.int64).reshape(tuple(guess.shape)) + 977 * seed
    if not bool(guess.any()):  # near a guess of nothing lies the zero cell alone: take values between -2 and 2
        guess = torch.from_numpy((i * 40503 % 65521 - 32760) * 2.0**-14).to(torch.float32)
    patterns = fmt.patterns(guess.clamp(-fmt.max_finite, fmt.max_finite).to(fmt.dtype))
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
