"""The page of jobs/plan.py: seconds of every way to get a cache against the bandwidth of the link, and where they meet."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from markupsafe import Markup

from pipeline.economics import PREFILL, RAW, BreakEven, Case, Terms, Way, seconds
from pipeline.reporting import charts
from pipeline.reporting.charts import Axis, Frame, Point, Series
from pipeline.reporting.page import environment

BANDWIDTHS = (1e7, 1e11)  # bits a second, the two ends of the plot
_STEPS = 80


@dataclass(frozen=True)
class Plan:
    """What jobs/plan.py found out. about: model, cache format, machine and the like, by name."""

    case: Case
    terms: Terms
    ways: Sequence[Way]
    best: Way
    by: str
    meets: Mapping[str, BreakEven]
    about: Mapping[str, Any]


def render(plan: Plan, when: datetime) -> str:
    """The page as HTML."""
    template = environment().get_template("plan.html.j2")
    return template.render(plan=plan, when=when, chart=chart(plan), rate=rate, names=plan.case.ways)


def chart(plan: Plan) -> Markup:
    """A line a way, both axes logarithmic, and a mark at the bandwidth that was asked about."""
    low, high = min(BANDWIDTHS[0], plan.terms.bandwidth), max(BANDWIDTHS[1], plan.terms.bandwidth)
    links = [low * (high / low) ** (n / _STEPS) for n in range(_STEPS + 1)]
    series = []
    for number, name in enumerate(plan.case.ways):
        points = [Point(link, seconds(plan.case, link, name)) for link in links]
        series.append(Series(name, points, "dashes" if name in (PREFILL, RAW) else "line", number))
    dots = [
        Series(way.name, [Point(plan.terms.bandwidth, way.seconds, f"{way.name}: {way.seconds:.3g} s")], "dots", number)
        for number, way in enumerate(plan.ways)
    ]
    y = Axis.over("seconds", [point.y for one in series for point in one.points], log=True)
    marks = [(10.0**power, rate(10.0**power)) for power in range(7, 12)]
    frame = Frame(Axis("bandwidth", low, high, log=True), y, 400.0, charts.WIDE, marks)
    return charts.plot(frame, [*series, *dots], "seconds to get the cache, by bandwidth")


def rate(bits: float) -> str:
    """A bandwidth as a person says it."""
    for unit in ("b/s", "kb/s", "Mb/s", "Gb/s"):
        if bits < 999.5:
            return f"{bits:.3g} {unit}"
        bits /= 1000
    return f"{bits:.3g} Tb/s"
