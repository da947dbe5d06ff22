"""Attention over a window and centroids of what lies before: equal to its definition, whatever the chunks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import codec
from codec import errors, exact
from codec.predictor import fused
from codec.predictor.attention import Seen, attend, block_length, runs
from codec.predictor.far import NONE, ROUNDS, SHARE, SINKS, VALUE_UNIT, far, groups_before, log2
from tests import codec_samples as samples


def plain_centroids(keys: list[list[int]], values: list[list[int]]) -> list[tuple[list[int], list[int], int]]:
    """(key, value, tokens) of a group's centroids by Lloyd's k-means in whole numbers: the definition."""

    def mean(rows: list[list[int]]) -> list[int]:
        return [int(np.round(sum(column) / len(rows))) for column in zip(*rows, strict=True)]

    count = max(1, len(keys) // SHARE)
    stride = len(keys) // count
    centres = [keys[stride // 2 + stride * c] for c in range(count)]
    for _ in range(ROUNDS):
        distances = [[sum((a - b) ** 2 for a, b in zip(key, c, strict=True)) for c in centres] for key in keys]
        nearest = [row.index(min(row)) for row in distances]
        members = [[t for t, c in enumerate(nearest) if c == n] for n in range(count)]
        centres = [mean([keys[t] for t in m]) if m else c for m, c in zip(members, centres, strict=True)]
    held = [mean([values[t] for t in m]) if m else [0] * len(values[0]) for m in members]
    return [(c, v, len(m)) for c, v, m in zip(centres, held, members, strict=True)]


def in_bytes(key: list[int], value: list[int], scale: float) -> tuple[list[int], list[int], float]:
    """A centroid as it is kept: (key, value, the key's scale) in 8 bits each; values in units of VALUE_UNIT."""
    shift = max(0, max(abs(x) for x in key).bit_length() - 7)
    key = [int(np.clip(np.round(x / 2**shift), -127, 127)) for x in key]
    return key, [int(np.clip(np.round(x / VALUE_UNIT), -127, 127)) for x in value], scale * 2.0**shift


def plain_attention(q: Tensor, seen: Seen, step: Tensor, window: int) -> Tensor:
    """Every query against every key that it may see, and the centroids of what lies before, one query at a time: the definition."""
    heads, tokens, dim = q.shape
    groups, total = heads // seen.keys.shape[0], seen.keys.shape[1]
    qi, qs = exact.row_integers(q)
    out = torch.zeros(tokens, heads, dim)
    for h in range(heads):
        j = h // groups
        rows = [
            (k.double(), float(s), v.double(), 0.0)
            for k, s, v in zip(seen.keys[j], seen.key_scale[j, :, 0], seen.values[j], strict=True)
        ]
        for t in range(tokens):
            place = total - tokens + t
            behind = max(0, place // window * window - SINKS) // window if window else 0
            begin = SINKS + behind * window if behind else 0
            may = rows[: min(SINKS, place + 1)] + rows[max(begin, SINKS) : place + 1]
            for g in range(behind):
                group = range(SINKS + g * window, SINKS + (g + 1) * window)
                scale = max(rows[i][1] for i in group)
                k = [[int(np.round(float(x) * rows[i][1] / scale)) for x in rows[i][0]] for i in group]
                for key, value, n in plain_centroids(k, [[int(x) for x in rows[i][2]] for i in group]):
                    bias = float(np.float32(log2(n) if n else NONE))
                    key, value, own = in_bytes(key, value, scale)
                    may.append((torch.tensor(key).double(), own, torch.tensor(value).double() * VALUE_UNIT, bias))
            scores = torch.stack([(qi[h, t].double() * k).sum() * s for k, s, _, _ in may])
            biases = torch.tensor([b for *_, b in may])
            scaled = scores.float() * (qs[h, t] * (exact.LOG2E / dim**0.5)) + biases
            weights, norm = exact.weights_from_scores(scaled.clamp(-1e30, 1e30)[None], None)
            o = (weights[0, :, None] * torch.stack([v for _, _, v, _ in may])).sum(0) / norm[0] * step[j, 0].double()
            out[t, h] = o.float()
    return out.view(tokens, heads * dim)


@pytest.mark.parametrize("window", [0, 1, 2, 4, 5, 9, 30, 200])
def test_attention_equals_its_definition(window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(window)
    q = torch.randn(4, 19, 8, generator=generator)
    sizes = torch.tensor([1.0, 3.0, 0.1])[torch.arange(50) % 3][:, None]  # scales of their own
    keys, scale = exact.row_integers(torch.randn(2, 50, 8, generator=generator) * sizes)
    values = torch.randint(-30000, 30000, (2, 50, 8), generator=generator).to(torch.int16)
    step = torch.tensor([2.0**-12, 2.0**-9])[:, None, None]
    seen = Seen(keys.to(torch.int16), scale, values)
    want = plain_attention(q, seen, step, window)
    for at_once in (1, 700, 1 << 18):
        monkeypatch.setattr("codec.predictor.attention._SCORES_AT_ONCE", at_once)
        assert torch.equal(attend(q, seen, step, window), want)


def test_windows_are_cut_before_anything_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cost of a query grows with its context by a centroid for SHARE tokens, and by nothing else."""
    monkeypatch.setattr(fused, "ENABLED", False)
    seen: list[int] = []
    product, work = exact.product, []
    for total in (4 + 64 * 6, 4 + 64 * 66):
        keys = torch.ones(2, total, 8, dtype=torch.int16)
        known = Seen(keys, torch.ones(2, total, 1), keys).with_far(64)
        monkeypatch.setattr(
            exact, "product", lambda a, b: (seen.append(a.shape[-2] * a.shape[-1] * b.shape[-1]), product(a, b))[1]
        )
        attend(torch.ones(4, 64, 8), known, torch.ones(2, 1, 1), 64)
        monkeypatch.setattr(exact, "product", product)
        work.append(sum(seen))
        seen.clear()
    assert work[1] - work[0] == 2 * (2 * 64) * 8 * 60 * (64 // SHARE), "scores and values, 2 heads a key-value head"
    assert block_length(4, 10**4, 32) == 64


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("window", [16, 48, 200])
def test_centroids_are_lloyds(window: int, compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ties, keys that are all alike (so that centroids stay empty), and keys of very different sizes."""
    monkeypatch.setattr(fused, "ENABLED", compiled)
    generator = torch.Generator().manual_seed(window)
    keys = torch.randint(-3, 4, (2, 2 * window, 4), generator=generator).to(torch.int16)
    keys[0, :window] = 7
    keys[1, window:] = torch.randint(-exact.ROW_MAX, exact.ROW_MAX, (window, 4), generator=generator).to(torch.int16)
    values = torch.randint(-exact.ROW_MAX, exact.ROW_MAX, keys.shape, generator=generator).to(torch.int16)
    scale = torch.exp2(torch.randint(-3, 4, (2, 2 * window, 1), generator=generator).to(torch.float32))
    found, count = far(keys, scale, values, window), max(1, window // SHARE)
    for j in range(2):
        for g in range(2):
            part, own = slice(g * window, (g + 1) * window), slice(g * count, (g + 1) * count)
            most = scale[j, part].max()
            whole = torch.round(keys[j, part] * (scale[j, part] / most)).to(torch.int64).tolist()
            want = plain_centroids(whole, values[j, part].tolist())
            small = [in_bytes(k, v, float(most)) for k, v, _ in want]
            assert found.keys[j, own].tolist() == [k for k, _, _ in small]
            assert found.values[j, own].tolist() == [v for _, v, _ in small]
            assert found.bias[j, own, 0].tolist() == [float(np.float32(log2(n) if n else NONE)) for *_, n in want]
            assert found.key_scale[j, own, 0].tolist() == [s for _, _, s in small]


@pytest.mark.parametrize("window", [1, 2, 3, 4, 5, 9, 64])
def test_runs_change_where_another_group_is_left_behind(window: int) -> None:
    places = {place: behind for begin, end, behind in runs(3, 300, window) for place in range(begin, end)}
    assert list(places) == list(range(3, 300))
    for place, behind in places.items():
        assert behind == groups_before(place, window)
        seen = place + 1 - behind * window
        assert seen >= min(place + 1, window), "the window holds as many tokens, the sinks among them"
        assert seen <= 2 * window + SINKS + window, "and not many more"
    starts = [begin for begin, *_ in runs(3, 300, window)]
    assert all(begin % window == 0 for begin in starts[1:])


def test_logarithms_in_whole_numbers() -> None:
    assert [log2(1 << n) for n in range(20)] == list(range(20))
    assert all(0 <= np.log2(n) - log2(n) < 2.0**-29 for n in range(1, 3000))


WINDOWED = samples.SMALL | {"num_hidden_layers": 3}


@pytest.mark.parametrize("window", [1, 7, 40, 500])
def test_windowed_guesses_do_not_depend_on_chunks_or_batches(window: int) -> None:
    predictor = codec.build_predictor(WINDOWED, samples.weights(WINDOWED), "int8", exact_kv=True, window=window)
    ids, other = samples.tokens(120, vocab=257), samples.tokens(33, vocab=257, seed=3)
    whole = samples.guesses(predictor, predictor.new_state(), ids)
    for chunk in (1 if window == 7 else 5, 16, 64, 119):
        state = predictor.new_state()
        for begin in range(0, len(ids), chunk):
            part = ids[begin : begin + chunk]
            for got, want in zip(samples.guesses(predictor, state, part), whole, strict=True):
                for g, w in zip(got, want, strict=True):
                    assert torch.equal(g, w[:, begin : begin + chunk])
            predictor.advance(state, part)
    run = predictor.run([predictor.new_state(), predictor.new_state()], [other, ids])
    for layer in range(3):
        guesses = run.guess(layer)
        assert all(torch.equal(g, w) for g, w in zip(guesses[1], whole[layer], strict=True))
        if layer < 2:
            run.advance(layer, guesses)


def test_a_window_is_part_of_the_predictor_and_truncation_goes_on_working() -> None:
    tensors, ids = samples.weights(WINDOWED), samples.tokens(100, vocab=257)
    made = {w: codec.build_predictor(WINDOWED, tensors, "int8", window=w) for w in (0, 20, 99, 100)}
    assert len({p.fingerprint for p in made.values()}) == 4
    last = {w: samples.guesses(p, p.new_state(), ids)[2][0] for w, p in made.items()}
    assert torch.equal(last[100], last[0]) and not torch.equal(last[20], last[0])
    assert torch.equal(last[20][:, :20], last[0][:, :20]), "nothing is out of sight yet"
    state = samples.state_after(made[20], ids)
    state.truncate(50)
    again = samples.guesses(made[20], state, ids[50:])
    assert torch.equal(again[2][0], last[20][:, 50:])


@pytest.mark.parametrize("window", [-1, 1.0, True, "9", None, 1 << 25])
def test_windows_of_stored_predictors_are_checked(window: Any) -> None:
    with pytest.raises(errors.PredictorError, match="window"):
        replace(samples.tiny().config, window=window).check()
