"""Charts as inline SVG: no script, no asset, colours from the page's style sheet, so that light and dark both work.

Whatever text comes in is escaped. Coordinates are in units of the picture: WIDE ones fill the page, NARROW ones half
of it, so that letters come out alike in both.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from markupsafe import Markup

WIDE, NARROW = 1040.0, 500.0
LEFT, RIGHT, TOP, BOTTOM = 62.0, 16.0, 14.0, 44.0
COLOURS = 8  # classes c0 … of the style sheet


def element(name: str, *children: str | Markup, **attributes: object) -> Markup:
    """One SVG element; children and attribute values are escaped unless they are Markup. `class_` is class, `_` in a name is "-"."""
    given = {key.rstrip("_").replace("_", "-"): value for key, value in attributes.items() if value is not None}
    texts = (f"{value:.2f}" if isinstance(value, float) else value for value in given.values())
    pairs = zip(given, texts, strict=True)
    inside = Markup("").join(Markup(' {}="{}"').format(Markup(key), text) for key, text in pairs)
    return Markup("<{0}{1}>{2}</{0}>").format(Markup(name), inside, Markup("").join(children))


def picture(children: Sequence[Markup], width: float, height: float, label: str) -> Markup:
    """A whole picture, with what it shows in words for those who cannot see it."""
    box = f"0 0 {width:.0f} {height:.0f}"
    return element("svg", *children, viewBox=box, role="img", aria_label=label, xmlns="http://www.w3.org/2000/svg")


@dataclass(frozen=True)
class Axis:
    """A range of values and how they are spread over a side of a picture."""

    name: str
    low: float
    high: float
    log: bool = False

    @staticmethod
    def over(name: str, values: Sequence[float], *, log: bool = False, zero: bool = False) -> Axis:
        """Over these values, with a little room; `zero`: from 0 on. Of a log axis all must be above 0."""
        low, high = (min(values), max(values)) if values else (1.0, 2.0)
        if log:
            return Axis(name, low / 1.25, high * 1.25, True)
        low = min(low, 0.0) if zero else low
        room = 0.06 * (high - low) or max(abs(high) * 0.1, 0.1)
        return Axis(name, low if zero and low == 0 else low - room, high + room)

    def at(self, value: float) -> float:
        """0 at the low end, 1 at the high one."""
        if self.log:
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)

    def ticks(self, most: int = 6) -> list[float]:
        """Round values within the range."""
        if self.log:
            first, last = math.floor(math.log10(self.low)), math.ceil(math.log10(self.high))
            parts = (1, 2, 5) if self.high <= 2000 * self.low else (1,)
            every = [m * 10.0**e for e in range(first, last + 1) for m in parts]
            inside = [value for value in every if self.low <= value <= self.high]
            return inside[:: max(1, math.ceil(len(inside) / (2 * most)))]
        rough = (self.high - self.low) / most
        power = 10.0 ** math.floor(math.log10(rough))
        step = next(m * power for m in (1, 2, 5, 10) if m * power >= rough * 0.999)
        first = math.ceil(self.low / step)
        return [step * n for n in range(first, math.floor(self.high / step + 1e-9) + 1)]


@dataclass(frozen=True)
class Point:
    """One value; `title` is shown where the mouse rests on it."""

    x: float
    y: float
    title: str = ""
    label: str = ""  # written beside it


@dataclass(frozen=True)
class Series:
    """Points of one kind. style: dots, line, dashes or bars; colour: 0 … COLOURS - 1, or "bad" and the like."""

    name: str
    points: Sequence[Point]
    style: str = "dots"
    colour: int | str = 0

    @property
    def classes(self) -> str:
        """Of the style sheet."""
        colour = f"c{self.colour % COLOURS}" if isinstance(self.colour, int) else self.colour
        return f"{self.style} {colour}"


@dataclass(frozen=True)
class Frame:
    """The box in which values are drawn."""

    x: Axis
    y: Axis
    height: float = 280.0
    width: float = NARROW
    marks: Sequence[tuple[float, str]] = field(default_factory=tuple)  # words for values of x instead of ticks

    def place(self, x: float, y: float) -> tuple[float, float]:
        """Where a value lies in the picture."""
        across = LEFT + self.x.at(x) * (self.width - LEFT - RIGHT)
        return across, self.height - BOTTOM - self.y.at(y) * (self.height - BOTTOM - TOP)

    def drawn(self) -> list[Markup]:
        """Grid, ticks and names of the axes."""
        out, foot = [], self.height - BOTTOM
        for value in self.y.ticks(5):
            _, y = self.place(self.x.low, value)
            out.append(element("line", class_="grid", x1=LEFT, x2=self.width - RIGHT, y1=y, y2=y))
            out.append(element("text", number(value), class_="tick end", x=LEFT - 8, y=y + 4))
        for value, text in self.marks or [(value, number(value)) for value in self.x.ticks(8)]:
            x, _ = self.place(value, self.y.low)
            at_end = x > self.width - 2 * RIGHT  # a long word in the middle of the edge would be cut
            out.append(
                element(
                    "text", text, class_=f"tick {'end' if at_end and len(text) > 4 else 'middle'}", x=x, y=foot + 17
                )
            )
        out.append(element("line", class_="axis", x1=LEFT, x2=self.width - RIGHT, y1=foot, y2=foot))
        middle = (LEFT + self.width - RIGHT) / 2
        out.append(element("text", self.x.name, class_="name middle", x=middle, y=self.height - 6))
        turn = f"rotate(-90 14 {foot / 2:.0f})"
        out.append(element("text", self.y.name, class_="name middle", x=14.0, y=foot / 2 + 6, transform=turn))
        return out


def plot(frame: Frame, series: Sequence[Series], label: str) -> Markup:
    """Series in a frame."""
    children = frame.drawn()
    for one in series:
        places = [frame.place(point.x, point.y) for point in one.points]
        if one.style in ("line", "dashes"):
            path = "M" + " L".join(f"{x:.1f} {y:.1f}" for x, y in places)
            children.append(element("path", element("title", one.name), class_=one.classes, d=path))
            continue
        width = (
            0.7 * abs(frame.place(1.0, frame.y.low)[0] - frame.place(0.0, frame.y.low)[0])
            if one.style == "bars"
            else 0.0
        )
        _, zero = frame.place(frame.x.low, min(max(0.0, frame.y.low), frame.y.high))
        for point, (x, y) in zip(one.points, places, strict=True):
            title = element("title", point.title or f"{one.name}: {point.y:.3g}")
            if one.style == "bars":
                extent = {"y": min(y, zero), "height": max(abs(zero - y), 0.5)}
                children.append(element("rect", title, class_=one.classes, x=x - width / 2, width=width, **extent))
            else:
                children.append(element("circle", title, class_=one.classes, cx=x, cy=y, r=5.0))
            if point.label:
                anchor, shift = ("end", -9.0) if x > frame.width - 150 else ("start", 9.0)
                children.append(element("text", point.label, class_=f"label {anchor}", x=x + shift, y=y - 7))
    return picture(children, frame.width, frame.height, label)


def heat(rows: Sequence[tuple[str, Sequence[float]]], low: float, high: float, label: str, unit: str) -> Markup:
    """A map of values [rows][columns] from `low` to `high`; columns are numbered below, a value is told by the mouse."""
    columns = max(len(values) for _, values in rows)
    width, height = (WIDE - LEFT - RIGHT) / columns, 26.0
    children = []
    for row, (name, values) in enumerate(rows):
        y = 4 + row * height
        children.append(element("text", name, class_="tick end", x=LEFT - 8, y=y + height / 2 + 4))
        for column, value in enumerate(values):
            share = 100 * (value - low) / (high - low) if high > low else 50.0
            title = element("title", f"layer {column}, {name}: {value:.2f} {unit}")
            colour = f"fill:color-mix(in oklab,var(--cold),var(--hot) {min(max(share, 0), 100):.0f}%)"
            x = LEFT + column * width
            children.append(
                element("rect", title, x=x + 0.5, y=y, width=width - 1, height=height - 2, rx=2.0, style=colour)
            )
    foot = 4 + len(rows) * height + 13
    every = max(1, math.ceil(columns / 16))
    for column in range(0, columns, every):
        children.append(element("text", str(column), class_="tick middle", x=LEFT + (column + 0.5) * width, y=foot))
    return picture(children, WIDE, foot + 6, label)


@dataclass(frozen=True)
class Block:
    """A run of chunks in the picture of prefixes: `width` prompts from `left` on, `depth` chunks from `top` on."""

    left: int
    width: int
    top: int
    depth: int
    title: str


def icicle(blocks: Sequence[Block], prompts: int, depth: int, label: str) -> Markup:
    """Prompts side by side, their chunks downwards; a block as wide as the prompts that share it."""
    height = min(340.0, 60.0 + 16.0 * depth)
    across, down = (NARROW - 2) / max(prompts, 1), (height - 2) / max(depth, 1)
    children = []
    for block in blocks:
        share = 100 * min(1.0, math.log2(block.width) / 5)
        colour = f"fill:color-mix(in oklab,var(--alone),var(--shared) {share:.0f}%)"
        box = {"x": 1 + block.left * across, "y": 1 + block.top * down}
        box |= {"width": max(block.width * across - 0.8, 0.4), "height": max(block.depth * down - 0.8, 0.4)}
        children.append(element("rect", element("title", block.title), rx=1.5, style=colour, **box))
    return picture(children, NARROW, height, label)


def number(value: float) -> str:
    """A tick's value, short."""
    if value and (abs(value) >= 1e5 or abs(value) < 1e-3):
        return f"{value:.0e}".replace("e-0", "e-").replace("e+0", "e")
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.6g}"


def size(count: float) -> str:
    """Bytes as a person says them."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if abs(count) < 1000 or unit == "TB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.3g} {unit}"
        count /= 1000
    raise AssertionError("not reached")
