"""int8-mixed: which activations get a second limb, for a budget of integer products."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from codec.predictor.config import LIMBED, PredictorConfig
from codec.predictor.decoder import DecoderPredictor

BUDGET = 1.4  # integer products of int8-mixed, in those of int8


def products(config: PredictorConfig) -> dict[str, int]:
    """Integer products a token of one layer's projections, with one limb each."""
    c = config
    inner, wide = c.hidden * c.heads * c.head_dim, c.hidden * c.intermediate
    return {"q": inner, "o": inner, "gate": wide, "up": wide, "down": wide}


def budget(config: PredictorConfig, times: float = BUDGET) -> int:
    """Products a token that second limbs may add: `times` those of int8, less those of int8 and of K and V's own limbs.

    K and V count with the limbs they have: two by two in the closed loop, in the open loop one, or two for int8-mixed. The last layer
    computes nothing else.
    """
    c = config
    kv = 2 * c.hidden * c.kv_heads * c.head_dim * c.layers
    rest = (c.layers - 1) * sum(products(c).values())  # exact: Python integers
    plain, mixed = (4 * kv, 4 * kv) if c.exact_kv else (kv, 2 * kv)
    return int(times * (plain + rest)) - (mixed + rest)


def sensitivities(
    predictor: DecoderPredictor, prompts: Sequence[Tensor]
) -> Tensor:  # exact: computed once, the choice is stored
    """Mean squared error of a layer's output when one projection has one limb, relative to the state: float64 [layers, 5].

    predictor: an int8 or an int8-a16, whose layers are run with two limbs throughout;
    prompts: token ids, int64 [T] each; columns as in LIMBED. Each layer starts from an accurate state.
    """
    c, predictor = predictor.config, copy.copy(predictor)
    predictor.layers = [
        replace(w, **{name: getattr(w, name).in_form("int8-a16") for name in LIMBED}) for w in predictor.layers
    ]
    out = torch.zeros(c.layers, len(LIMBED), dtype=torch.float64)
    run = predictor.run([predictor.new_state() for _ in prompts], prompts)
    for layer in range(c.layers - 1):
        kv, w = run.guess(layer), predictor.layers[layer]
        want, _ = run.output(w, layer, kv)
        size = want.to(torch.float64).square().mean(1).clamp_min(2.0**-100)
        for column, name in enumerate(LIMBED):
            got, _ = run.output(replace(w, **{name: getattr(w, name).in_form("int8")}), layer, kv)
            error = (got.to(torch.float64) - want.to(torch.float64)).square().mean(1)
            out[layer, column] = (error / size).mean()
        run.advance(layer, kv)
    return out


def choose_limbs(config: PredictorConfig, gains: Tensor, times: float = BUDGET) -> Tensor:
    """Limbs of each projection's activations, int32 [layers, 5], 1 or 2: most gain a product first, within the budget.

    gains: float64 [layers, 5], what a second limb is worth. The last layer's projections are never computed: 1.
    """
    each = products(config)
    cost = torch.tensor([each[name] for name in LIMBED], dtype=torch.float64)
    worth = (gains / cost)[:-1].reshape(-1)
    left = budget(config, times)
    limbs = torch.ones(config.layers, len(LIMBED), dtype=torch.int32)
    for place in torch.argsort(worth, descending=True, stable=True).tolist():
        layer, column = divmod(place, len(LIMBED))
        if float(worth[place]) > 0 and each[LIMBED[column]] <= left:
            limbs[layer, column] = 2
            left -= each[LIMBED[column]]
    return limbs
