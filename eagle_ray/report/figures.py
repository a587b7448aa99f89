"""Figures of the report as inline SVG: two axes with round ticks, and bars, lines and dots between them.

Colours come from CSS classes of the page, so they follow its light and dark modes. Sizes are in pixels.

    >>> plot = Plot(Axis.of_integers(1, 6, "depth"), Axis.over(0, 1, "share of steps", percent))
    >>> svg = plot.svg("acceptance by depth", [plot.bars([(1, 0.8), (2, 0.5)], width=0.7)])

Plots of the numbers in ``_summary.json`` are functions, such as `acceptance_by_depth(summary["total"])`. A figure
without numbers is None.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

Point = tuple[float, float]
ROUND = (1, 2, 2.5, 5, 10)
TIMES_S = (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 14400, 28800, 43200, 86400)
TIME_UNITS = ((86400, "d"), (3600, "h"), (60, "min"))
LEFT, RIGHT, TOP, BOTTOM = 48, 22, 30, 42  # margins for tick labels and titles, in pixels
WIDE, NARROW = 720, 460  # widths of a plot over time in SVG units; the style sheet shows one of the two
LARGEST_DOT = 9.0  # pixels


def plain(value: float) -> str:
    """Format a tick with few digits, such as 12,000 or 2.5."""
    return f"{value:,.0f}" if value == round(value) else f"{value:.4g}"


def percent(value: float) -> str:
    return f"{100 * value:.4g} %"


@dataclass(frozen=True, slots=True)
class Axis:
    """Axis from `low` to `high` in the unit that its title names. `show` formats a tick."""

    low: float
    high: float
    title: str
    ticks: Sequence[float]
    show: Callable[[float], str]

    @classmethod
    def over(cls, low: float, high: float, title: str, show: Callable[[float], str] = plain, finest: float = 0) -> Axis:
        """Return an axis that is widened to about five round ticks.

        finest: minimum distance of two ticks, such as 1 for counts.
        """
        step = max(_round_step((high - low) / 5 or 1), finest)
        first, last = math.floor(low / step), math.ceil(round(high / step, 6))
        ticks = [round(step * i, 10) for i in range(first, max(last, first + 1) + 1)]
        return cls(ticks[0], ticks[-1], title, ticks, show)

    @classmethod
    def of_time(cls, seconds: float, title: str, max_steps: int = 8) -> Axis:
        """Return an axis from 0 to `seconds`. Its tick labels use the largest unit that is not above their distance."""
        step = next((step for step in TIMES_S if seconds <= max_steps * step), seconds / max_steps)
        size, unit = next(((size, unit) for size, unit in TIME_UNITS if step >= size), (1, "s"))
        ticks = [step * i for i in range(int(seconds / step + 1e-6) + 1)]
        return cls(0, seconds, title, ticks, lambda value: f"{value / size:.4g} {unit}")

    @classmethod
    def of_integers(cls, low: int, high: int, title: str) -> Axis:
        """Return an axis of integers that is 0.6 wider on both sides, for bars. It has at most about 12 ticks."""
        every = math.ceil((high - low + 1) / 12)
        return cls(low - 0.6, high + 0.6, title, [n for n in range(low, high + 1) if n % every == 0], plain)


@dataclass(frozen=True, slots=True)
class Plot:
    """Plot of two axes. Its methods return marks as SVG strings, which svg() combines."""

    x: Axis
    y: Axis
    width: int = 460
    height: int = 250

    def svg(self, label: str, marks: Iterable[str], kind: str = "plot") -> str:
        """Return the whole figure.

        Args:
            label: text for screen readers.
            marks: SVG strings of the other methods.
            kind: CSS class of the figure.
        """
        size = f'viewBox="0 0 {self.width} {self.height}"'
        opening = f'<svg class="{kind}" {size} role="img" aria-label="{escape(label)}">'
        return "".join([opening, *self._grid(), *self._x_ticks(), *self._titles(), *marks, "</svg>"])

    def bars(self, points: Iterable[Point], width: float, kind: str = "one") -> str:
        """Return bars from the x axis up to the points. width: width of a bar in units of the x axis."""
        return "".join(self._bar(x, y, width, kind) for x, y in points)

    def line(self, points: Iterable[Point], kind: str = "one") -> str:
        return f'<path class="line {kind}" d="M{self._path(points)}"/>'

    def steps(self, values: Sequence[float], width: float, kind: str = "one") -> str:
        """Return a step function and the area under it: value i holds from i * width to (i + 1) * width.

        The last step ends at the end of the axis.
        """
        sides = ((min(width * i, self.x.high), min(width * (i + 1), self.x.high)) for i in range(len(values)))
        corners = [(x, value) for value, pair in zip(values, sides, strict=True) for x in pair]
        ground = [(corners[-1][0], self.y.low), (0, self.y.low)]
        area = f'<path class="area {kind}" d="M{self._path([*corners, *ground])} Z"/>'
        return area + self.line(corners, kind)

    def dots(self, points: Iterable[tuple[float, float, float]], kind: str = "one") -> str:
        """Return dots from tuples (x, y, radius in pixels)."""
        dots = ((*self._at(x, y), radius) for x, y, radius in points)
        return "".join(f'<circle class="dot {kind}" cx="{x:.1f}" cy="{y:.1f}" r="{r:.1f}"/>' for x, y, r in dots)

    def notes(self, points: Iterable[tuple[float, float, str]]) -> str:
        """Return labels above points, from tuples (x, y, text)."""
        return "".join(_text(*self._at(x, y), text, "middle", "note", up=6) for x, y, text in points)

    def upright(self, x: float) -> str:
        """Return a vertical line at x."""
        return f'<path class="divide" d="M{self._path([(x, self.y.low), (x, self.y.high)])}"/>'

    def level(self, y: float) -> str:
        """Return a horizontal line at y."""
        return f'<path class="divide" d="M{self._path([(self.x.low, y), (self.x.high, y)])}"/>'

    def _bar(self, x: float, y: float, width: float, kind: str) -> str:
        (left, top), (right, bottom) = self._at(x - width / 2, y), self._at(x + width / 2, self.y.low)
        size = f'width="{right - left:.1f}" height="{bottom - top:.1f}"'
        return f'<rect class="bar {kind}" x="{left:.1f}" y="{top:.1f}" {size}/>'

    def _at(self, x: float, y: float) -> Point:
        """Convert axis values to pixels from the left and from the top."""
        across = (x - self.x.low) / (self.x.high - self.x.low)
        up = (y - self.y.low) / (self.y.high - self.y.low)
        left = LEFT + across * (self.width - LEFT - RIGHT)
        return left, self.height - BOTTOM - up * (self.height - TOP - BOTTOM)

    def _path(self, points: Iterable[Point]) -> str:
        return " L".join(f"{x:.1f} {y:.1f}" for x, y in (self._at(*point) for point in points))

    def _grid(self) -> Iterator[str]:
        for tick in self.y.ticks:
            left, y = self._at(self.x.low, tick)
            kind = "axis" if tick == self.y.low else "grid"
            yield f'<path class="{kind}" d="M{left:.1f} {y:.1f} H{self.width - RIGHT}"/>'
            yield _text(LEFT - 8, y + 4, self.y.show(tick), "end")

    def _x_ticks(self) -> Iterator[str]:
        for tick in self.x.ticks:
            x, y = self._at(tick, self.y.low)
            yield f'<path class="axis" d="M{x:.1f} {y:.1f} v4"/>'
            yield _text(x, y + 17, self.x.show(tick), "middle")

    def _titles(self) -> Iterator[str]:
        """Yield the title of the y axis, horizontal above it, and of the x axis, below its right end."""
        yield _text(0, 14, self.y.title, "start", "title")
        yield _text(self.width - RIGHT, self.height - 6, self.x.title, "end", "title")


def sparkline(values: Sequence[float], limit: float, width: int = 150, height: int = 26) -> str:
    """Return a small plot without axes for a table cell. Values range from 0 to `limit` and are clipped there."""
    step, ground = width / len(values), height - 1
    tops = [ground - (height - 3) * min(value / limit, 1) if limit else ground for value in values]
    outline = " L".join(f"{step * (i + side):.1f} {top:.1f}" for i, top in enumerate(tops) for side in (0, 1))
    area = f'<path class="area one" d="M0 {ground} L{outline} L{width} {ground} Z"/>'
    return f'<svg class="spark" viewBox="0 0 {width} {height}" aria-hidden="true">{area}</svg>'


def _text(x: float, y: float, text: str, anchor: str, kind: str = "tick", up: float = 0) -> str:
    place = f'x="{x:.1f}" y="{y - up:.1f}" text-anchor="{anchor}"'
    return f'<text class="{kind}" {place}>{escape(text)}</text>'


def _round_step(minimum: float) -> float:
    """Return the smallest of 1, 2, 2.5, 5 times a power of ten that is at least `minimum`."""
    power = 10 ** math.floor(math.log10(minimum))
    return next(factor * power for factor in ROUND if factor * power >= minimum * (1 - 1e-9))


def acceptance_by_depth(counts: dict[str, Any]) -> str | None:
    """Plot the share of decode steps that accepted a draft token at each depth."""
    accepted, steps = counts["accepted_by_depth"], counts["steps"]
    if not accepted or not steps:
        return None
    points = [(depth, count / steps) for depth, count in enumerate(accepted, 1)]
    depths = Axis.of_integers(1, len(points), "depth of the draft token")
    plot = Plot(depths, Axis.over(0, 1, "share of steps", percent))
    notes = [(depth, share, percent(round(share, 3 if share < 0.1 else 2))) for depth, share in points]
    marks = [plot.bars(points, 0.7)] + ([plot.notes(notes)] if len(points) <= 10 else [])
    return plot.svg("share of steps that accepted a draft token, by its depth", marks)


def calibration(counts: dict[str, Any]) -> str | None:
    """Plot the accepted share of draft nodes over their probability. The area of a dot is the number of nodes."""
    if not sum(counts["confidence_nodes"]):
        return None
    plot = Plot(Axis.over(0, 1, "probability given to the draft token", percent), Axis.over(0, 1, "accepted", percent))
    marks = [plot.line([(0, 0), (1, 1)], "even")]
    for name, kind in (("confidence", "two"), ("calibrated", "one")):
        marks.append(plot.dots(_bins(counts, name), kind))
    return plot.svg("accepted share of draft tokens by the probability they were given", marks)


def _bins(counts: dict[str, Any], name: str) -> list[tuple[float, float, float]]:
    nodes, accepted, expected = (counts[f"{name}_{part}"] for part in ("nodes", "accepted", "expected"))
    return [
        (e / n, a / n, max(2.0, LARGEST_DOT * (n / max(nodes)) ** 0.5))
        for n, a, e in zip(nodes, accepted, expected, strict=True)
        if n
    ]


def steps_by_budget(budget: dict[str, list[int]]) -> str:
    """Plot the share of steps over the number of rows that a sequence had in a step."""
    total = sum(budget["steps"])
    points = [(rows, steps / total) for rows, steps in zip(budget["budget"], budget["steps"], strict=True)]
    high = max(share for _, share in points)
    plot = Plot(_budgets(budget), Axis.over(0, high, "share of steps", percent))
    return plot.svg("share of steps by the rows they were given", [plot.bars(points, 0.7)])


def tau_by_budget(budget: dict[str, list[int]]) -> str:
    """Plot tokens per step, including the bonus token, over the budget. The area of a dot is the number of steps."""
    rows, steps = budget["budget"], budget["steps"]
    taus = [1 + accepted / count for accepted, count in zip(budget["accepted"], steps, strict=True)]
    sizes = [max(2.0, LARGEST_DOT * (count / max(steps)) ** 0.5) for count in steps]
    plot = Plot(_budgets(budget), Axis.over(1, max(2, *taus), "tokens per step"))
    return plot.svg("tokens of a step by the rows it was given", [plot.dots(zip(rows, taus, sizes, strict=True))])


def _budgets(budget: dict[str, list[int]]) -> Axis:
    return Axis.of_integers(1, max(budget["budget"]), "verify rows of a sequence in one step, its root included")


def speed(timeline: dict[str, Any]) -> str:
    """Plot tokens per second over time, summed over all workers."""
    return _over_time(timeline, "tokens_per_s", "tokens/s, all workers")


def busy_slots(timeline: dict[str, Any], slots: int) -> str:
    """Plot the busy slots over time, summed over all workers. slots: slots of one worker.

    If the run has one attempt, a horizontal line shows the total number of slots.
    """
    num_slots = slots * max(1, len(timeline["workers"])) if len(timeline["attempts"]) == 1 else None
    return _over_time(timeline, "busy_slots", "busy slots, all workers", level=num_slots)


def _over_time(timeline: dict[str, Any], name: str, title: str, level: float | None = None) -> str:
    values = [sum(column) for column in zip(*(w[name] for w in timeline["workers"].values()), strict=True)]
    bin_s = timeline["bin_s"]
    y = Axis.over(0, max(*values, level or 0), title, finest=1)
    variants = []
    for kind, width, max_steps in (("wide", WIDE, 8), ("narrow", NARROW, 4)):
        x = Axis.of_time(bin_s * timeline["num_bins"], "time at work", max_steps)
        plot = Plot(x, y, width, 200)
        marks = [plot.upright(attempt["offset_s"]) for attempt in timeline["attempts"][1:]]
        if level:
            marks.append(plot.level(level))
        variants.append(plot.svg(f"{title}, over time", [*marks, plot.steps(values, bin_s)], kind))
    return "".join(variants)
