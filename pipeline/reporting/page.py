"""The page of a report: one HTML file that needs nothing else. The template escapes whatever comes from data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import jinja2
import numpy as np
from markupsafe import Markup

import codec
from pipeline.health import SIDES, Health
from pipeline.reporting import charts
from pipeline.reporting.charts import Axis, Frame, Point, Series
from pipeline.reporting.facts import Facts, GenerationFacts
from pipeline.reporting.frontier import Rung
from pipeline.reporting.prefixes import Sharing, sharing
from pipeline.runs import RunRecord

RUNS_SHOWN = 40
PROMPTS_SHOWN = 1500


@dataclass(frozen=True)
class HeatMap:
    """A picture, and the bits a scalar that its two ends of the scale stand for."""

    picture: Markup
    low: float
    high: float


@dataclass(frozen=True)
class Section:
    """What the page says about one generation."""

    facts: GenerationFacts
    heat: HeatMap | None
    health: Markup | None
    warning: str | None
    lengths: Markup | None
    sharing: Sharing


def render(facts: Facts, frontier: Sequence[Rung], when: datetime) -> str:
    """The page as HTML."""
    everything = facts.generations
    sums = {name: sum(gen.sums[name] for gen in everything) for name in ("raw_bytes", "stored_bytes", "tokens")}
    return environment().get_template("page.html.j2").render(
        facts=facts, when=when, sums=sums, sections=[_section(gen) for gen in everything],
        most=max((max(gen.sums["raw_bytes"], gen.all_bytes) for gen in everything), default=1) or 1,
        history=history(facts.runs), shown=facts.runs[::-1][:12], frontier=ladder(frontier), rungs=frontier,
    )  # fmt: skip


def environment() -> jinja2.Environment:
    """Templates of this package; everything that is not Markup is escaped, and a name that is not there is an error."""
    made = jinja2.Environment(
        loader=jinja2.PackageLoader("pipeline.reporting", "templates"), autoescape=True, undefined=jinja2.StrictUndefined,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    made.filters |= {"size": charts.size, "moment": _moment}
    return made


def _moment(text: str) -> str:
    return text[:16].replace("T", " ")


def _section(gen: GenerationFacts) -> Section:
    drawn = gen.health
    warning = None if drawn is None else drawn.warning()
    chart = None if drawn is None else health(drawn)
    return Section(gen, heat_maps(gen), chart, warning, lengths(gen), sharing(gen.prompts))


# ---------------------------------------------------------------- charts
def heat_maps(gen: GenerationFacts) -> HeatMap | None:
    """Ideal bits a scalar by layer (across) and head (down), K above V in one scale."""
    if gen.costs is None:
        return None
    per_head = gen.costs.scalars[:, :, None] / gen.costs.heads.shape[2]
    bits = gen.costs.heads / per_head  # [layers, 2, heads]
    low, high = float(bits.min()), float(bits.max())
    rows = [
        (f"{side} {head}", bits[:, number, head].tolist())
        for number, side in enumerate(SIDES)
        for head in range(bits.shape[2])
    ]
    label = f"bits a scalar by layer and head, from {low:.2f} to {high:.2f}"
    return HeatMap(charts.heat(rows, low, high, label, "bits"), low, high)


def lengths(gen: GenerationFacts) -> Markup | None:
    """A dot a prompt: its length and its ratio."""
    prompts = gen.prompts[:: max(1, len(gen.prompts) // PROMPTS_SHOWN)]
    if not prompts:
        return None
    points = [
        Point(
            p.tokens, p.raw_bytes / p.stored_bytes, f"{p.id}: {p.tokens:,} tokens, {p.raw_bytes / p.stored_bytes:.2f}x"
        )
        for p in prompts
    ]
    x = Axis.over("tokens of the prompt", [p.x for p in points])
    y = Axis.over("ratio", [p.y for p in points])
    return charts.plot(Frame(x, y), [Series("prompts", points)], "ratio of every prompt against its length")


def health(found: Health) -> Markup:
    """Three rows over the layers: spread and miss beside their promise, and what both are above it."""
    layers = range(len(found.spread))
    x = Axis("layer", -0.6, len(layers) - 0.4)
    marks = [(float(n), str(n)) for n in layers[:: -(-len(layers) // 15)]]
    parts = (("spread", found.spread, found.promised), ("miss", found.miss, np.full_like(found.miss, codec.MISS)))
    out = []
    for name, observed, promised in parts:
        series = []
        for side, kv in enumerate(SIDES):
            line = [Point(n, float(promised[n, side])) for n in layers]
            dots = [
                Point(
                    n,
                    float(observed[n, side]),
                    f"layer {n} {kv}: {name} {observed[n, side]:.2f}, promised {promised[n, side]:.2f}",
                )
                for n in layers
            ]
            series += [
                Series(f"{kv} promised", line, "dashes", side),
                Series(f"{kv} observed", dots, "dots small", side),
            ]
        values = [float(v) for v in np.concatenate([observed, promised]).ravel()]
        frame = Frame(x, Axis.over(f"{name}, bits", values), 210.0, marks=marks)
        out.append(charts.plot(frame, series, f"{name} cost by layer beside what calibration promised"))
    excess = [
        Point(n, float(found.excess[n].mean()), f"layer {n}: {found.excess[n].mean():+.2f} bits a scalar")
        for n in layers
    ]
    y = Axis.over("beside promise, bits", [p.y for p in excess] + [0.3, -0.3], zero=True)
    bars = [
        Series("above the promise", [p for p in excess if p.y > 0], "bars", "bad"),
        Series("below the promise", [p for p in excess if p.y <= 0], "bars", "good"),
    ]
    out.append(
        charts.plot(Frame(x, y, 190.0, marks=marks), bars, "bits a scalar beside calibration's promise, by layer")
    )
    return Markup("").join(out)


def history(runs: Sequence[RunRecord]) -> Markup | None:
    """A bar a run: chunks verified, and above them those that failed."""
    shown = list(runs)[-RUNS_SHOWN:]
    if not shown:
        return None
    good, bad = [], []
    for n, run in enumerate(shown):
        counts = f"{run.chunks_verified:,} verified, {run.verification_failures:,} failed"
        title = f"{_moment(run.started)} {run.job} {run.model}: {counts}, {run.outcome}"
        good.append(Point(n, run.chunks_verified, title))
        if run.verification_failures:
            bad.append(Point(n, run.verification_failures, title))
    x = Axis("runs, the latest last", -0.7, max(len(shown), 8) - 0.3)
    marks = [(float(n), _moment(run.started)[5:10]) for n, run in enumerate(shown)][:: max(1, len(shown) // 8)]
    y = Axis.over("chunks", [p.y for p in good] + [1.0], zero=True)
    series = [Series("verified", good, "bars", "good"), Series("failed", bad, "bars", "bad")]
    return charts.plot(Frame(x, y, 240.0, charts.WIDE, marks), series, "chunks verified and failed, run by run")


def ladder(rungs: Sequence[Rung]) -> Markup | None:
    """Bits against seconds: what is spent on predicting, and what it saves. The line joins rungs that no other beats in both."""
    if not rungs:
        return None
    x = Axis.over("seconds per 1,000 tokens", [one.seconds for one in rungs], log=True)
    y = Axis.over("bits a scalar", [one.bits for one in rungs])
    kinds = sorted({one.kind for one in rungs})
    series = [
        Series(
            kind,
            [Point(one.seconds, one.bits, one.title, one.name) for one in rungs if one.kind == kind],
            "dots",
            number,
        )
        for number, kind in enumerate(kinds)
    ]
    for number, kind in enumerate(kinds):
        best: list[Any] = []
        for one in sorted((one for one in rungs if one.kind == kind), key=lambda one: (one.seconds, one.bits)):
            if not best or one.bits < best[-1].y:
                best.append(Point(one.seconds, one.bits))
        if len(best) > 1:
            series.insert(0, Series(f"frontier: {kind}", best, "line", number))
    return charts.plot(Frame(x, y, 340.0, charts.WIDE), series, "bits a scalar of every rung against the time it takes")
