"""The joint model of a layer: encoder and decoder integers alike, laws and fits against references, calibration."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import codec
from codec import errors
from codec.bins import Bins, density_table
from codec.closed_loop import Carry, ClosedLoop
from codec.coders import DEFAULT, NAMES, Coder
from codec.formats import BF16, FORMATS, NumberFormat
from codec.geometry import Geometry
from codec.joint_fit import LayerMoments, fit
from codec.joint_model import COEFFICIENT_MAX, FEATURE_MAX, JointLayer, Means, PairLaw, Ready
from codec.narrow import FACTORS
from codec.residual import gaussian_table
from tests import codec_samples as samples
from tests.float_model import world
from tests.test_closed_loop import check_round_trip, prompt


# ---------------------------------------------------------------- encoder and decoder alike
def any_loop(
    rng: np.random.Generator, joint: JointLayer, rope_dim: int, fmt: NumberFormat, heads: int, reference: bool = False
) -> ClosedLoop:
    """A loop of one layer; of a coarse cache with scales and bins."""
    scales = 2.0 ** rng.uniform(-3, 3, (1, 2, heads)) if fmt.coarse else None
    bins = Bins(gaussian_table(), density_table(), fmt) if fmt.coarse else None
    return ClosedLoop([joint], rope_dim, fmt, history=joint.history, scales=scales, bins=bins, reference=reference)


def ready_of(joint: JointLayer) -> Ready:
    return Ready(joint)


def any_joint(
    rng: np.random.Generator,
    pairs: int,
    hidden: int = 8,
    extreme: bool = False,
    history: int = 0,
    scaled: bool = False,
    narrow: bool = False,
) -> JointLayer:
    """A joint model within the bounds of a profile, and no more sensible than that."""
    n = 4 * pairs
    coefficient = np.tril(rng.integers(-COEFFICIENT_MAX, COEFFICIENT_MAX, (n, n)), -1)
    if extreme:
        coefficient = np.tril(np.where(rng.random((n, n)) < 0.5, -COEFFICIENT_MAX, COEFFICIENT_MAX), -1)
    first = np.arange(n // 2, n, 2)
    coefficient[first + 1, first] = 0
    return JointLayer(
        step=rng.integers(-20, 4, n), coefficient=coefficient.astype(np.int16), unit=rng.integers(-40, -20, n),
        given=rng.integers(-128, 128, (n, history * n)).astype(np.int8),
        given_unit=rng.integers(-40, -20, n), bias=rng.standard_normal(n).astype(np.float32),
        sigma=(2.0 ** rng.uniform(-12, 6, n)).astype(np.float32), inside=rng.uniform(-2, 2, n // 4).astype(np.float32),
        gain=rng.integers(-128, 128, (hidden, n)).astype(np.int8), gain_unit=rng.integers(-60, -30, hidden),
        scale=rng.integers(-600, 600, (-(-n // 32), 4)).astype(np.int16) if scaled else None,
        narrow=rng.choice(FACTORS, n).astype(np.float32) if narrow else None,
    )  # fmt: skip


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.integers(0, 2**32 - 1), st.integers(1, 40), st.integers(1, 9), st.booleans())
def test_means_one_by_one_equal_one_product(seed: int, pairs: int, tokens: int, extreme: bool) -> None:
    rng = np.random.default_rng(seed)
    ready = ready_of(any_joint(rng, pairs, extreme=extreme))
    features = rng.integers(-FEATURE_MAX, FEATURE_MAX + 1, (4 * pairs, tokens)).astype(np.int8)
    if extreme:
        features = np.where(features < 0, -FEATURE_MAX, FEATURE_MAX).astype(np.int8)
    exactly = ready.lower.astype(np.int64) @ features.astype(np.int64)
    whole = exactly.astype(np.float64) * ready.unit + ready.bias
    means, n = Means(ready, tokens, ready.bias), 2 * pairs
    rows = means.features
    for j in range(n):
        assert np.array_equal(means.of(j), whole[j])
        rows[j] = features[j]
    for j in range(n, 2 * n, 2):  # both means of a pair are asked for before either feature is known
        assert np.array_equal(np.stack([means.of(j), means.of(j + 1)]), whole[j : j + 2])
        rows[j : j + 2] = features[j : j + 2]


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    st.sampled_from(list(FORMATS)), st.integers(0, 2**32 - 1), st.integers(1, 2), st.sampled_from([1, 2, 5, 9]), st.integers(0, 9),
    st.sampled_from([1, 2, 6, 17, 40]), st.integers(0, 2),
)  # fmt: skip
def test_any_joint_model_round_trips_any_truth(
    name: str, seed: int, heads: int, half: int, turned: int, tokens: int, history: int
) -> None:
    """Guesses, truths, angles and models that have nothing to do with one another; truth in memory of another order."""
    rng, fmt, dim = np.random.default_rng(seed), FORMATS[name], 2 * half
    rope_dim = 2 * min(turned, half)
    joint = any_joint(rng, heads * half, history=history, scaled=seed % 3 > (1 if fmt.coarse else 0), narrow=fmt.coarse)
    loop = any_loop(rng, joint, rope_dim, fmt, heads)
    level = rng.integers(-60, 60, tokens) if joint.scale is not None else None
    carry = Carry((rng.integers(-FEATURE_MAX, FEATURE_MAX, (4 * heads * half, tokens)).astype(np.int8),), level)
    shape = (heads, tokens, dim)
    guess: Any = tuple(
        torch.from_numpy((rng.standard_normal(shape) * 2.0 ** rng.uniform(-8, 8)).astype(np.float32)) for _ in range(2)
    )
    angle = torch.from_numpy(rng.uniform(0, 7, (tokens, rope_dim // 2)).astype(np.float32))
    near = [fmt.patterns(samples.cast(g, fmt)) ^ rng.integers(0, 40, shape) for g in guess]
    far = rng.integers(0, 1 << fmt.item_bits, shape)
    truth: Any = tuple(fmt.tensor(np.where(rng.random(shape) < 0.3, far, x)) for x in near)
    kept, truth = [t.clone() for t in truth], tuple(t.transpose(0, 2).contiguous().transpose(0, 2) for t in truth)
    turn = torch.cos(angle), torch.sin(angle)
    plain = any_loop(np.random.default_rng(seed + 1), joint, rope_dim, fmt, heads, reference=True)
    plain._scales = loop._scales
    scalars = seed % 2**19  # of the chunk whose first layer this is: 1 to 32 lanes
    for coder_name in NAMES:
        coders = [Coder(coder_name, gaussian_table(), fmt, reference) for reference in (False, True)]
        written = []
        for coder, some, ideal in ((coders[0], loop, True), (coders[0], loop, False), (coders[1], plain, False)):
            writer = coder.writer(1, scalars)
            writer.layer()
            coded = some.encode(0, truth, guess, turn, ideal, writer, carry)
            written.append((writer.finish(), coded.escapes))
        assert written[1] == written[2], "compiled and plain"
        assert written[0] == written[1], "with costs and without"
        streams = written[0][0].streams
        for coder, some in itertools.product(coders, (loop, plain)):
            reader = coder.reader(streams, 1, scalars)
            reader.layer()
            decoded = some.decode(0, reader, guess, turn, carry)
            reader.finish()
            assert samples.same_bits([decoded.values], [kept])
    for told in (decoded.next, loop.known(0, truth, guess, turn, carry)[1]):
        if isinstance(coded.next.carry, Carry):
            assert isinstance(told.carry, Carry)
            assert len(told.carry.features) == min(history, 2)
            assert np.array_equal(told.carry.level, coded.next.carry.level)  # type: ignore[arg-type]
            assert all(
                np.array_equal(*pair) for pair in zip(told.carry.features, coded.next.carry.features, strict=True)
            )
        assert all(torch.equal(a, b) for a, b in zip(told.attend, coded.next.attend, strict=True))
        assert told.correction is not None and coded.next.correction is not None
        assert torch.equal(told.correction, coded.next.correction)
    assert all(torch.isfinite(a).all() for a in coded.next.attend) and torch.isfinite(coded.next.correction).all()


@settings(max_examples=30, deadline=None, derandomize=True)
@given(st.binary(max_size=600), st.integers(0, 2**32 - 1))
def test_any_stream_decodes_to_something_or_is_refused(stream: bytes, seed: int) -> None:
    rng = np.random.default_rng(seed)
    loop = ClosedLoop([any_joint(rng, 4)], 8, BF16)
    guess: Any = tuple(torch.from_numpy(rng.standard_normal((1, 5, 8)).astype(np.float32)) for _ in range(2))
    turn = torch.ones(5, 4), torch.zeros(5, 4)
    cut = len(stream) // 2 // 4 * 4
    streams = {DEFAULT: [stream]}
    for name in NAMES:
        coder = Coder(name, gaussian_table(), BF16)
        try:
            reader = coder.reader(streams.get(name, [stream[:cut], stream[cut:]]), 1, 5)
            reader.layer()
            decoded = loop.decode(0, reader, guess, turn)
        except errors.CorruptBlob:
            continue
        assert decoded.values[0].shape == (1, 5, 8)


def test_an_outlier_steers_nothing_and_a_large_residual_is_clamped() -> None:
    rng = np.random.default_rng(0)
    joint = replace(any_joint(rng, 3), step=np.full(12, -8))
    loop = ClosedLoop([joint], 6, BF16)
    guess = torch.zeros(1, 1, 6), torch.zeros(1, 1, 6)
    turn = torch.ones(1, 3), torch.zeros(1, 3)
    reach = 2.0**-8 * FEATURE_MAX

    def features(value: float) -> Any:
        truth = torch.zeros(1, 1, 6, dtype=torch.bfloat16), torch.full((1, 1, 6), value, dtype=torch.bfloat16)
        return loop.known(0, truth, guess, turn)[0].features[:6]

    assert (features(0.25) == 64).all() and (features(reach * 2) == FEATURE_MAX).all()
    assert (features(-reach * 3) == -FEATURE_MAX).all()
    for value in (reach * 9, -3e38, math.inf, math.nan):
        assert (features(value) == 0).all()


def test_absurd_sizes_are_refused() -> None:
    joint = any_joint(np.random.default_rng(0), 2)
    joint.check()
    replace(joint, step=np.broadcast_to(np.int64(0), ((1 << 17) - 1,))).check()
    with pytest.raises(errors.InexactBackend, match="joint model"):
        replace(joint, step=np.broadcast_to(np.int64(0), (1 << 17,))).check()


# ---------------------------------------------------------------- laws and fits against references
def rotation(angle: float) -> Any:
    return np.array([[math.cos(angle), -math.sin(angle)], [math.sin(angle), math.cos(angle)]])


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.integers(0, 2**32 - 1))
def test_pair_law_is_a_rotated_gaussian(seed: int) -> None:
    rng, tokens, pairs = np.random.default_rng(seed), 6, 3
    joint = replace(any_joint(rng, pairs), sigma=rng.uniform(0.1, 3, 4 * pairs).astype(np.float32))
    angle = rng.uniform(0, 2 * math.pi, (tokens, pairs))
    zeros = torch.zeros(1, tokens, 2 * pairs)
    geometry = Geometry((zeros, zeros), (torch.from_numpy(np.cos(angle)), torch.from_numpy(np.sin(angle))), 2 * pairs)
    a, b, seen = (rng.standard_normal((pairs, tokens)) for _ in range(3))
    law = PairLaw(ready_of(joint), geometry, a, b)
    second = law.second(seen)
    for p in range(pairs):
        n = 2 * pairs + 2 * p
        w, va, vi = float(joint.inside[p]), float(joint.sigma[n]) ** 2, float(joint.sigma[n + 1]) ** 2
        covariance = np.array([[va, w * va], [w * va, w * w * va + vi]])
        for t in range(tokens):
            turn = rotation(angle[t, p])
            mean, turned = turn @ [a[p, t], b[p, t] + w * a[p, t]], turn @ covariance @ turn.T
            slope = turned[1, 0] / turned[0, 0]
            want = (
                mean[0],
                turned[0, 0] ** 0.5,
                mean[1] + slope * (seen[p, t] - mean[0]),
                (turned[1, 1] - slope * turned[0, 1]) ** 0.5,
            )
            got = (law.mean_first[p, t], law.sigma_first[p, t], second[p, t], law.sigma_second[p, t])
            assert np.allclose(got, want, rtol=1e-7, atol=1e-9)  # fmt: skip


def test_unrotating_undoes_the_predictors_rotation() -> None:
    from codec.predictor.rope import rotate

    rng = np.random.default_rng(1)
    x = torch.from_numpy(rng.standard_normal((2, 5, 10))).float()
    angle = torch.from_numpy(rng.uniform(0, 7, (5, 3))).float()
    turn = torch.cos(angle), torch.sin(angle)
    geometry = Geometry((x, x), turn, 6)
    back = geometry.unrotate(geometry.channels(rotate(x, *turn).double().numpy()))
    plain = geometry.channels(x.double().numpy())
    assert np.allclose(back[0::2], plain[geometry.first_rows], atol=1e-5)
    assert np.allclose(back[1::2], plain[geometry.second_rows], atol=1e-5)
    assert sorted(geometry.k_order.tolist()) == list(range(20))
    assert np.array_equal(geometry.tensor(geometry.channels(x.numpy())), x.numpy())


def test_fit_recovers_a_regression() -> None:
    rng, n, hidden, tokens = np.random.default_rng(5), 12, 7, 200_000
    coefficient = np.tril(rng.uniform(-0.6, 0.6, (n, n)), -1)
    sigma, gain = 2.0 ** rng.uniform(-6, 1, n), rng.uniform(-1, 1, (hidden, n))
    scale = np.diag(sigma)
    coefficient = scale @ coefficient @ np.linalg.inv(scale)  # channels of very different size
    f = np.linalg.solve(np.eye(n) - coefficient, sigma[:, None] * rng.standard_normal((n, tokens)))
    noise = 0.1 * rng.standard_normal((tokens, hidden))
    half, moments = tokens // 3, []
    for piece in (slice(0, half), slice(half, tokens)):
        error = f[:, piece].T @ gain.T + noise[piece]
        moments.append(LayerMoments.of(None, f[:, piece], f[:, piece], error))
    joint, counted = fit(moments)
    assert counted == tokens
    got = joint.coefficient * 2.0 ** joint.unit[:, None].astype(float) / 2.0 ** joint.step[None].astype(float)
    first = np.arange(n // 2, n, 2)
    assert (joint.coefficient[first + 1, first] == 0).all() and not np.triu(joint.coefficient).any()
    got[first + 1, first] = joint.inside
    relative = np.linalg.inv(scale) @ (got - coefficient) @ scale
    assert np.abs(relative).max() < 0.05
    assert np.allclose(joint.sigma, sigma, rtol=0.03)
    own = joint.gain * 2.0 ** joint.gain_unit[:, None].astype(float) / 2.0 ** joint.step[None].astype(float)
    assert np.abs((own - gain) @ scale).max() < 0.03
    spread = f.std(1)
    assert (spread / 2.0**joint.step > 7.9).all() and (spread / 2.0**joint.step <= 16 * 1.01).all()


def test_fit_knows_that_features_are_rounded() -> None:
    """Channels that differ by less than a feature's step: what is promised is what is left, on tokens that were not fitted to."""
    rng, n = np.random.default_rng(6), 16

    def residuals(tokens: int) -> Any:
        return rng.standard_normal((1, tokens)) + 0.04 * rng.standard_normal((n, tokens))

    def moments(x: Any) -> LayerMoments:
        return LayerMoments.of(None, x, x, np.zeros((x.shape[1], 0)))

    joint, _ = fit([moments(residuals(2000)) for _ in range(6)])
    ready, fresh = ready_of(joint), residuals(20_000)
    means = (ready.lower.astype(np.float64) @ ready.features(fresh)) * ready.unit + ready.bias
    left = ((fresh - means)[: n // 2] ** 2).mean(1)  # V: of pairs a's own value is known beside its feature
    promised = np.square(joint.sigma[: n // 2].astype(np.float64))
    assert np.allclose(left / promised, 1, atol=0.06)


def test_fit_of_nothing_and_of_constants() -> None:
    with pytest.raises(errors.UserError, match="no token"):
        fit([LayerMoments.of(None, np.zeros((8, 0)), np.zeros((8, 0)), np.zeros((0, 3)))])
    still, _ = fit([LayerMoments.of(None, np.zeros((8, 5)), np.zeros((8, 5)), np.zeros((5, 3)))])
    assert (still.sigma > 0).all() and not still.coefficient.any() and not still.gain.any()


def test_calibration_shared_among_processes_gives_the_same_profile() -> None:
    from codec.calibrate import ClosedCalibration, fit_layers, freeze_closed, sharpened

    w = world()
    parts = w.samples("bf16")
    workers = [ClosedCalibration(w.predictor, "bf16", some) for some in (parts[:5], parts[5:])]

    def advance(layer: int, law: JointLayer) -> None:
        for worker in workers:
            worker.advance(layer, law)

    layers, tokens = fit_layers(
        w.predictor.config.layers, 1, lambda layer, law: [m for x in workers for m in x.moments(layer, law)], advance
    )
    assert tokens == sum(len(s.token_ids) for s in parts)
    layers = sharpened(layers, [e for x in workers for e in x.evidence()], BF16)
    shared = freeze_closed(w.predictor, samples.TARGET, "bf16", layers, tokens, prefill_tokens=64)
    assert shared.to_bytes() == w.profile("closed").to_bytes()


def test_tokens_that_do_not_count_only_lead_up() -> None:
    from codec.calibrate import ClosedCalibration

    w = world()
    sample = w.samples("bf16")[0]
    some = np.arange(100) % 3 == 0
    whole = ClosedCalibration(w.predictor, "bf16", [sample]).moments_of(0, 0)
    apart = [
        ClosedCalibration(w.predictor, "bf16", [replace(sample, counted=m)]).moments_of(0, 0) for m in (some, ~some)
    ]
    assert [m.tokens for m in apart] == [34, 66] and whole.tokens == 100
    apart[0].add(apart[1])
    assert np.allclose(apart[0].gram, whole.gram) and np.allclose(apart[0].cross, whole.cross)


def test_calibration_survives_values_that_are_not_finite() -> None:
    from codec.calibrate import calibrate_closed

    w = world()
    parts = w.samples("bf16")[:4]
    clean = calibrate_closed(w.predictor, samples.TARGET, "bf16", parts, prefill_tokens=64)
    truth, hidden = [(k.clone(), v.clone()) for k, v in parts[0].truth], [h.clone() for h in parts[0].hidden]
    spoiled = [replace(parts[0], truth=truth, hidden=hidden), *parts[1:]]
    spoiled[0].truth[0][0][0, 3, 2], spoiled[0].truth[1][1][1, 5, 0] = math.nan, math.inf
    spoiled[0].truth[2][1][1, 7, 0], spoiled[0].hidden[2][3, 5] = 3e38, math.nan
    profile = calibrate_closed(w.predictor, samples.TARGET, "bf16", spoiled, prefill_tokens=64)
    assert codec.Profile.from_bytes(profile.to_bytes()).id == profile.id != clean.id
    ids, values = prompt()
    sizes = [len(c[0].blob) for c in (check_round_trip(w, p, ids, values, 100) for p in (clean, profile))]
    assert sizes[1] < 1.05 * sizes[0]


def test_pair_law_survives_what_cancels() -> None:
    """One large and one tiny innovation, turned so that they nearly cancel: sigma stays what the determinant says."""
    joint = any_joint(np.random.default_rng(0), 3)
    sigma = joint.sigma.copy()
    sigma[6::2], sigma[7::2] = 2.0**20, 2.0**-20
    angle = 3 * math.pi / 4 + np.linspace(-1e-7, 1e-7, 50)[:, None] * np.ones((1, 3))
    zeros = torch.zeros(1, 50, 6)
    geometry = Geometry((zeros, zeros), (torch.from_numpy(np.cos(angle)), torch.from_numpy(np.sin(angle))), 6)
    law = PairLaw(
        ready_of(replace(joint, sigma=sigma, inside=np.ones(3, np.float32))),
        geometry,
        np.zeros((3, 50)),
        np.zeros((3, 50)),
    )
    assert np.allclose(law.sigma_first * law.sigma_second, 1.0, rtol=1e-9)


def test_an_absurd_gain_leaves_the_state_finite() -> None:
    w, profile, (ids, values) = world(), world().profile("closed"), prompt()
    units = np.full_like(profile.tensors["gain_unit"], 127)
    check_round_trip(w, replace(profile, tensors=profile.tensors | {"gain_unit": units}), ids, values, 35)
    run = w.predictor.run([w.predictor.new_state()], [ids])
    guess = run.guess(0)[0]
    loop = replace(profile, tensors=profile.tensors | {"gain_unit": units}).loop_codec
    told = loop.known(0, values[0], guess, run.turns()[0])[1]
    run.advance(0, [told.attend], [told.correction])
    assert torch.isfinite(run.h).all()


@pytest.mark.parametrize(("hidden", "history"), [(4096, 0), (0, 2)], ids=["predictor", "linear"])
def test_the_profile_of_an_8b_model_is_small(hidden: int, history: int) -> None:
    """Llama-3-8B: 8 key-value heads of 128 dims, 32 layers, 16.06 GB of bf16 weights."""
    facts = codec.profile.ProfileFacts(
        target="", predictor="", cache_format="bf16", loop="closed", prefill_tokens=256, layers=32, hidden=hidden, kv_heads=8,
        head_dim=128, rope_dim=128, calibration_tokens=1, history=history,
    )  # fmt: skip
    layout = codec.Profile(facts, {})._layout()
    size = sum(math.prod(shape) * np.dtype(dtype).itemsize for shape, dtype in layout.values())
    assert 0.01 * 16.06e9 < size < 0.03 * 16.06e9
