"""Plot: two axes with round ticks, and bars, lines and dots between them, as inline SVG.

Colours come from CSS classes of the page, so they follow its light and dark modes. Sizes are in
pixels.

    >>> plot = Plot(Axis.of_integers(1, 6, "depth"), Axis.over(0, 1, "share of steps", percent))
    >>> svg = plot.svg("acceptance by depth", [plot.bars([(1, 0.8), (2, 0.5)], width=0.7)])
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape

Point = tuple[float, float]
ROUND_STEPS = (1, 2, 2.5, 5, 10)
TIMES_S = (
    0.1,
    0.2,
    0.5,
    1,
    2,
    5,
    10,
    20,
    30,
    60,
    120,
    300,
    600,
    1200,
    1800,
    3600,
    7200,
    14400,
    28800,
    43200,
    86400,
)
TIME_UNITS = ((86400, "d"), (3600, "h"), (60, "min"))
# Margins for tick labels and titles, in pixels.
LEFT = 48
RIGHT = 22
TOP = 30
BOTTOM = 42


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
    def over(
        cls,
        low: float,
        high: float,
        title: str,
        show: Callable[[float], str] = plain,
        finest: float = 0,
    ) -> Axis:
        """Return an axis that is widened to about five round ticks.

        Args:
            finest: minimum distance of two ticks, such as 1 for counts.
        """
        step = max(_round_step((high - low) / 5 or 1), finest)
        first = math.floor(low / step)
        last = max(math.ceil(round(high / step, 6)), first + 1)
        ticks = [round(step * i, 10) for i in range(first, last + 1)]
        return cls(ticks[0], ticks[-1], title, ticks, show)

    @classmethod
    def of_time(cls, seconds: float, title: str, max_steps: int = 8) -> Axis:
        """Return an axis from 0 to `seconds`. Its tick labels use the largest unit that is not above their distance."""
        round_steps = (step for step in TIMES_S if seconds <= max_steps * step)
        step = next(round_steps, seconds / max_steps)
        units = (unit for unit in TIME_UNITS if step >= unit[0])
        size, name = next(units, (1, "s"))

        def show(value: float) -> str:
            return f"{value / size:.4g} {name}"

        num_steps = int(seconds / step + 1e-6)
        ticks = [step * i for i in range(num_steps + 1)]
        return cls(0, seconds, title, ticks, show)

    @classmethod
    def of_integers(cls, low: int, high: int, title: str) -> Axis:
        """Return an axis of integers that is 0.6 wider on both sides, for bars. It has at most about 12 ticks."""
        every = math.ceil((high - low + 1) / 12)
        ticks = [n for n in range(low, high + 1) if n % every == 0]
        return cls(low - 0.6, high + 0.6, title, ticks, plain)


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
        axes = [*self._grid(), *self._x_ticks(), *self._titles()]
        return "".join([opening, *axes, *marks, "</svg>"])

    def bars(self, points: Iterable[Point], width: float, kind: str = "one") -> str:
        """Return bars from the x axis up to the points.

        Args:
            width: width of a bar in units of the x axis.
        """
        return "".join(self._bar(x, y, width, kind) for x, y in points)

    def line(self, points: Iterable[Point], kind: str = "one") -> str:
        return f'<path class="line {kind}" d="M{self._path(points)}"/>'

    def steps(self, values: Sequence[float], width: float, kind: str = "one") -> str:
        """Return a step function and the area under it: value i holds from i * width to (i + 1) * width.

        The last step ends at the end of the axis.
        """
        corners = []
        end = 0.0
        for i, value in enumerate(values):
            start = min(width * i, self.x.high)
            end = min(width * (i + 1), self.x.high)
            corners.append((start, value))
            corners.append((end, value))

        ground = [(end, self.y.low), (0, self.y.low)]
        outline = self._path([*corners, *ground])
        area = f'<path class="area {kind}" d="M{outline} Z"/>'
        return area + self.line(corners, kind)

    def dots(self, points: Iterable[tuple[float, float, float]], kind: str = "one") -> str:
        """Return dots from tuples (x, y, radius in pixels)."""
        marks = []
        for x, y, radius in points:
            left, top = self._at(x, y)
            place = f'cx="{left:.1f}" cy="{top:.1f}" r="{radius:.1f}"'
            marks.append(f'<circle class="dot {kind}" {place}/>')
        return "".join(marks)

    def notes(self, points: Iterable[tuple[float, float, str]]) -> str:
        """Return labels above points, from tuples (x, y, text)."""
        marks = []
        for x, y, text in points:
            left, top = self._at(x, y)
            marks.append(_text(left, top, text, "middle", "note", up=6))
        return "".join(marks)

    def upright(self, x: float) -> str:
        """Return a vertical line at x."""
        return f'<path class="divide" d="M{self._path([(x, self.y.low), (x, self.y.high)])}"/>'

    def level(self, y: float) -> str:
        """Return a horizontal line at y."""
        return f'<path class="divide" d="M{self._path([(self.x.low, y), (self.x.high, y)])}"/>'

    def _bar(self, x: float, y: float, width: float, kind: str) -> str:
        left, top = self._at(x - width / 2, y)
        right, bottom = self._at(x + width / 2, self.y.low)
        size = f'width="{right - left:.1f}" height="{bottom - top:.1f}"'
        return f'<rect class="bar {kind}" x="{left:.1f}" y="{top:.1f}" {size}/>'

    def _at(self, x: float, y: float) -> Point:
        """Convert axis values to pixels from the left and from the top."""
        across = (x - self.x.low) / (self.x.high - self.x.low)
        up = (y - self.y.low) / (self.y.high - self.y.low)
        inner_width = self.width - LEFT - RIGHT
        inner_height = self.height - TOP - BOTTOM
        left = LEFT + across * inner_width
        top = self.height - BOTTOM - up * inner_height
        return left, top

    def _path(self, points: Iterable[Point]) -> str:
        pixels = [self._at(x, y) for x, y in points]
        return " L".join(f"{left:.1f} {top:.1f}" for left, top in pixels)

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
    step = width / len(values)
    ground = height - 1
    corners = []
    for i, value in enumerate(values):
        top = ground - (height - 3) * min(value / limit, 1) if limit else ground
        corners.append(f"{step * i:.1f} {top:.1f}")
        corners.append(f"{step * (i + 1):.1f} {top:.1f}")
    outline = " L".join(corners)
    area = f'<path class="area one" d="M0 {ground} L{outline} L{width} {ground} Z"/>'
    return f'<svg class="spark" viewBox="0 0 {width} {height}" aria-hidden="true">{area}</svg>'


def _text(x: float, y: float, text: str, anchor: str, kind: str = "tick", up: float = 0) -> str:
    place = f'x="{x:.1f}" y="{y - up:.1f}" text-anchor="{anchor}"'
    return f'<text class="{kind}" {place}>{escape(text)}</text>'


def _round_step(minimum: float) -> float:
    """Return the smallest of 1, 2, 2.5, 5 times a power of ten that is at least `minimum`."""
    power = 10 ** math.floor(math.log10(minimum))
    return next(factor * power for factor in ROUND_STEPS if factor * power >= minimum * (1 - 1e-9))
