"""Health of a profile: what layers cost beside what calibration promised."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch

import codec
from codec.errors import DataError
from codec.formats import FORMATS
from codec.ideal import cost, ideal_bits
from pipeline import index
from pipeline.health import DRIFT_BITS, DRIFT_LAYER_BITS, Costs, Health, of_groups
from pipeline.reporting.facts import layer_costs
from tests.stored import Kept, tokens_of


def test_a_gaussian_costs_what_it_should() -> None:
    """Two heads of different sigmas: spread is the mean log, the miss half a log2 e, and bits add up head by head."""
    rng, fmt = np.random.default_rng(0), FORMATS["fp32"]
    sigma = np.repeat([0.5, 4.0], 40_000).reshape(2, 40_000)
    guess = rng.normal(0, 3, sigma.shape)
    patterns = fmt.patterns(torch.from_numpy((guess + sigma * rng.standard_normal(sigma.shape)).astype(np.float32)))
    found = cost(patterns, guess, sigma, fmt, 2)
    assert found.spread == pytest.approx(40_000 * (math.log2(0.5) + math.log2(4.0)))
    assert found.miss / sigma.size == pytest.approx(codec.MISS, rel=0.02)
    assert found.heads.sum() == pytest.approx(ideal_bits(patterns, torch.from_numpy(guess), sigma, fmt))
    wrong = cost(patterns, guess, sigma / 2, fmt, 2)
    assert wrong.miss == pytest.approx(4 * found.miss, rel=0.02) and wrong.heads.sum() > found.heads.sum()
    narrowed = cost(patterns, guess, sigma / 2, fmt, 2, own=sigma)
    assert (narrowed.spread, narrowed.miss) == (found.spread, found.miss)


def test_what_is_no_number_costs_no_spread_and_an_outlier_decides_nothing() -> None:
    fmt = FORMATS["fp32"]
    patterns = fmt.patterns(torch.tensor([[float("nan"), float("inf"), 1e30, 0.0]]))
    found = cost(patterns, np.zeros((1, 4)), np.full((1, 4), 2.0), fmt, 1)
    assert found.spread == 2.0 and found.miss == 64 * codec.MISS


@pytest.mark.parametrize(("kind", "loop", "cache"), [("int8", "closed", "bf16"), ("int8", "open", "bf16"),
                                                     ("static", "closed", "bf16"), ("int8", "closed", "fp8_e4m3")])  # fmt: skip
def test_the_index_has_what_layers_cost_and_the_promise_is_about_right(
    tiny_model: Path, tmp_path: Path, kind: str, loop: str, cache: str
) -> None:
    train = [tokens_of(900 + n, 96) for n in range(6)]
    kept = Kept(tiny_model, tmp_path, kind=kind, loop=loop, cache=cache, calibration=train)
    kept.put({str(n): tokens_of(n, 96) for n in range(4)})
    table = index.read_rows(kept.store, target=kept.job.target, profile=kept.job.profile)
    costs, count = layer_costs(table)
    assert costs is not None and count == len(table) == 12
    assert costs.heads.shape == (3, 2, 2) and costs.scalars.sum() == 4 * 96 * 3 * 2 * 2 * 16
    for side, name in enumerate(("ideal_bits_k", "ideal_bits_v")):
        assert costs.heads[:, side].sum() == pytest.approx(sum(table[name].to_pylist()), rel=1e-5)
    health = Health.of(costs, kept.profile, count)
    assert -0.5 < health.mean_excess < 0.3
    plain = Costs.from_plain(costs.to_plain())
    assert plain is not None and all(np.array_equal(a, b) for a, b in zip(plain._all(), costs._all(), strict=True))


def test_another_target_than_the_profile_was_calibrated_for_shows(tiny_model: Path, tmp_path: Path) -> None:
    """Residuals three times as large as calibration saw: the miss rises, a warning names the layer, and nothing is lost."""
    kept = Kept(tiny_model, tmp_path, kind="int8")
    ids = torch.tensor(tokens_of(5, 64))
    truth, state = kept.truth(ids.tolist()), kept.predictor.new_state()
    where = codec.ChunkIdentity(kept.profile.target, bytes(32), codec.ROOT_DIGEST, 0)

    def health(layers: list[tuple[torch.Tensor, torch.Tensor]]) -> Health:
        state.truncate(0)
        stats = codec.encode(kept.predictor, kept.profile, state, ids, layers, where, ideal=True).stats
        assert stats.costs is not None
        found = of_groups([(Costs.of(stats.costs, stats.scalars_k, stats.scalars_v), 1), (None, 7)], kept.profile)
        assert found is not None and found.chunks == 1
        return found

    noise = torch.Generator().manual_seed(0)
    bent, (k, v) = list(truth), truth[-1]
    bent[-1] = k, (v.float() + 0.5 * v.float().std() * torch.randn(v.shape, generator=noise)).to(v.dtype)
    before, after = health(truth), health(bent)
    assert after.excess[2, 1] > before.excess[2, 1] + 0.5 and after.mean_excess > before.mean_excess
    layer, side, bits = after.worst
    assert (layer, side) == (2, "V") and after.drifted and bits > DRIFT_LAYER_BITS
    warning = after.warning()
    assert warning is not None and "layer 2 V" in warning and "\n" not in warning
    assert after.to_dict()["drifted"] is True and after.to_dict()["worst"]["layer"] == 2


def test_no_warning_where_the_promise_is_kept() -> None:
    promised = np.zeros((2, 2))
    good = Health(promised, promised + codec.MISS, promised, 3)
    assert good.mean_excess == 0 and not good.drifted and good.warning() is None
    assert Health(promised + 1.1 * DRIFT_BITS, promised + codec.MISS, promised, 3).drifted
    assert of_groups([(None, 2)], None) is None  # type: ignore[arg-type]


def test_figures_of_layers_that_contradict_each_other_are_refused() -> None:
    columns = {"layer_bits": [[1.0] * 4], "layer_spread": [[1.0] * 2], "layer_miss": [[1.0] * 2]}
    more = {"scalars_k": [8], "scalars_v": [8]}
    costs, count = layer_costs(pa.table(columns | more))
    assert costs is not None and count == 1 and costs.heads.shape == (1, 2, 2)
    assert costs.heads.sum() == pytest.approx(16.0)
    for name, values in {"layer_miss": [[1.0] * 4], "layer_bits": [[1.0] * 3], "layer_spread": [[]]}.items():
        with pytest.raises(DataError, match="figures of layers"):
            layer_costs(pa.table(columns | more | {name: values}))
    with pytest.raises(DataError, match="other shapes"):
        Costs.total([Costs(*(np.zeros((n, 2, 1)),) * 4) for n in (1, 2)])
    assert layer_costs(pa.table(columns | more | {"layer_bits": pa.array([None], pa.list_(pa.float32()))})) == (None, 0)
