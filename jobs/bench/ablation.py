"""`ablation`: what each part of the method is worth, in bits a scalar: the codec without it, calibrated anew, on the same caches.

The target runs once over the calibration prompts; every variant is then calibrated on them and encodes the evaluation prompts. Nothing
is decoded here: `rate` does that for the whole.

variants         by name: bits_per_scalar, bits_k, bits_v of the blobs and bitstreams as in `rate`, and costs: the bits a scalar more than
                 `all parts`; a part that does not pay has a cost of 0 or less
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

import codec
from codec.errors import UserError
from codec.joint_fit import fit
from codec.predictor.config import KINDS
from jobs.bench import rate
from jobs.bench.machine import describe
from jobs.bench.rate import Settings
from pipeline.calibration import closed_sample
from pipeline.rung import Rung
from pipeline.store import Store
from pipeline.target import Target

Note = Callable[[str], None]
WHOLE = "all parts"
_OFF = (1e12,)  # a ridge under which nothing is left of a regression


@dataclass(frozen=True)
class Variant:
    """The codec without some part."""

    name: str
    exact_kv: bool = True
    smooth: bool = True
    correct: bool = True
    joint: bool = True
    sharpen: bool = True
    cross_validate: bool = True


VARIANTS = (
    Variant(WHOLE),
    Variant("K and V projections in the rung's own format", exact_kv=False),
    Variant("activations not smoothed", smooth=False),
    Variant("no correction of the hidden state", correct=False),
    Variant("no joint model of a layer", joint=False),
    Variant("sigmas the same for all tokens, laws not narrowed", sharpen=False),
    Variant("ridges and sigmas not cross-validated", cross_validate=False),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `rate`."""
    rate.add_arguments(parser)


def run(arguments: argparse.Namespace, note: Note) -> dict[str, Any]:
    """Measure all variants that the rung has, and the open loop."""
    settings = Settings(**{name: getattr(arguments, name) for name in Settings.__dataclass_fields__})
    settings.check()
    if settings.loop != "closed":
        raise UserError("ablation takes parts from the closed loop and adds the open one itself; leave --loop out")
    return measure(settings, note)


def rows(result: dict[str, Any]) -> list[tuple[str, str]]:
    """The figures for people."""
    s, m = result["settings"], result["machine"]
    out = [
        ("codec", f"{s['predictor']}, {s['cache_dtype']} cache, {s['prompts'][1]} prompts of {s['tokens']:,} tokens")
    ]
    for name, v in result["variants"].items():
        bits = f"{v['bits_per_scalar']:.3f} bits (K {v['bits_k']:.3f}, V {v['bits_v']:.3f})"
        out.append((name, bits if name == WHOLE else f"{bits}, {v['costs']:+.3f}"))
    return [*out, ("machine", f"{m['cpu']}, {s['threads']} threads of {m['cores']} cores, torch {m['torch']}")]


@torch.no_grad()
def measure(settings: Settings, note: Note) -> dict[str, Any]:
    """Figures of all variants; UserError, DataError, StorageError as in `rate`."""
    target, identity, train, test = rate.prepare(settings, note)
    note(f"running the target on {len(train)} calibration prompts")
    guesses = settings.predictor in KINDS  # the others have no state to correct and no projections
    samples = [closed_sample(target, tokens, settings.chunk_tokens, states=guesses) for tokens in train]
    rung = Rung(settings.predictor, settings.loop, settings.window)
    ranges = rung.ranges(target, train) if rung.calibrated else None
    found: dict[str, dict[str, float]] = {}
    for variant in VARIANTS:
        if (variant.smooth or ranges is not None) and (guesses or (variant.exact_kv and variant.correct)):
            note(f"variant: {variant.name}")
            predictor = _predictor(variant, rung, target, ranges, train)
            profile = _profile(variant, predictor, target, identity, samples, settings)
            found[variant.name] = _encode(settings, target, predictor, profile, test)
    if guesses:
        note("variant: open loop")
        with tempfile.TemporaryDirectory(prefix="kv-ablation-") as folder:
            opened = replace(settings, loop="open")
            pair = rate.calibrate(opened, target, identity, Store.open(folder), train, note)
        found["open loop"] = _encode(settings, target, *pair, test)
    for figures in found.values():
        figures["costs"] = figures["bits_per_scalar"] - found[WHOLE]["bits_per_scalar"]
    return {"variants": found, "settings": rate.shown(settings, target), "machine": describe()}


def _predictor(
    variant: Variant, rung: Rung, target: Target, ranges: codec.Ranges | None, prompts: Sequence[torch.Tensor]
) -> codec.Predictor:
    own = (
        rung if variant.exact_kv else replace(rung, loop="open")
    )  # the open loop's predictor has them in the rung's format
    return own.build(target, ranges if variant.smooth else None, prompts)


def _profile(
    variant: Variant,
    predictor: codec.Predictor,
    target: Target,
    identity: bytes,
    samples: Sequence[codec.ClosedSample],
    settings: Settings,
) -> codec.Profile:
    options: dict[str, Any] = {}
    if not variant.joint:
        options["ridges"] = _OFF
    if not variant.correct:
        options["gain_ridges"] = _OFF
    if not variant.cross_validate:
        options["cross_validate"] = False
    return codec.calibrate_closed(
        predictor, identity, target.cache_format, samples, prefill_tokens=settings.chunk_tokens, scales=target.scales,
        fit_layer=partial(fit, **options), sharpen=variant.sharpen,
    )  # fmt: skip


def _encode(
    settings: Settings,
    target: Target,
    predictor: codec.Predictor,
    profile: codec.Profile,
    test: Sequence[torch.Tensor],
) -> dict[str, float]:
    with tempfile.TemporaryDirectory(prefix="kv-ablation-") as folder:
        store = Store.open(str(Path(folder) / "store"))
        encoded = rate.encode_prompts(settings, target, predictor, profile, store, test, lambda text: None)
    scalars_k, scalars_v = (sum(getattr(s, f"scalars_{side}") for s in encoded.stats) for side in "kv")
    bytes_k, bytes_v = (sum(getattr(s, f"bytes_{side}") for s in encoded.stats) for side in "kv")
    bits = 8 * encoded.stored_bytes / (scalars_k + scalars_v)
    return {"bits_per_scalar": bits, "bits_k": 8 * bytes_k / scalars_k, "bits_v": 8 * bytes_v / scalars_v}
