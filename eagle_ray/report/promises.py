"""Compare the end and cost that a run with a deadline or budget predicted over time with what happened.

    promises(history)      # [{"at": 0.25, "error_s": -41.0, "relative": -0.02}, ...]

Points come from `_progress.json`: lists of the values named in POINT, in seconds of all attempts.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from eagle_ray.report.cost import duration, money
from eagle_ray.report.figures import NARROW_WIDTH, WIDE_WIDTH
from eagle_ray.report.plot import Axis, Plot

# Seconds of all attempts; rows done; workers that are paid for; dollars so far; the foreseen end,
# expected and in 95 % of cases, and the deadline; rows to do.
POINT = (
    "elapsed_s",
    "rows",
    "workers",
    "dollars",
    "ends_s",
    "surely_s",
    "deadline_s",
    "rows_to_do",
)
PROMISE_SHARES = (
    0.1,
    0.25,
    0.5,
    0.75,
)  # of the time that the run took, at which promises are looked at
Point = Sequence[float | None]


def values_of(history: Sequence[Point], name: str) -> list[tuple[float, float]]:
    """Return the time and the value of the points that have this value."""
    index = POINT.index(name)
    pairs = []
    for point in history:
        seconds = point[0]
        value = point[index]
        if seconds is not None and value is not None:
            pairs.append((seconds, value))
    return pairs


def promises(history: Sequence[Point]) -> list[dict[str, float]]:
    """Return the errors of the predicted end, after some shares of the run's time."""
    if len(history) < 2:
        return []
    ended = history[-1][0] or 0.0
    errors = []
    for share in PROMISE_SHARES:
        made = [end for at, end in values_of(history, "ends_s") if at >= share * ended]
        if made and ended > 0:
            error = made[0] - ended
            errors.append(
                {"at": share, "error_s": round(error, 1), "relative": round(error / ended, 4)}
            )
    return errors


def promise_line(outcome: dict[str, Any] | None) -> str | None:
    """Return one line on the error of the predicted end, or None if none was predicted."""
    made = (outcome or {}).get("promises")
    if not made:
        return None
    parts = []
    for promise in made:
        seconds = promise["error_s"]
        side = "late" if promise["error_s"] > 0 else "early"
        parts.append(
            f"{duration(abs(seconds))} too {side} ({abs(promise['relative']):.0%}) after {promise['at']:.0%}"
        )
    return f"promised end: {', '.join(parts)} of the time"


def rows_and_deadline(history: Sequence[Point]) -> str | None:
    """Plot the rows that are done, the predicted ends and the deadline."""
    rows = values_of(history, "rows")
    if len(rows) < 2:
        return None
    todo = max(value for _, value in values_of(history, "rows_to_do"))
    deadlines = values_of(history, "deadline_s")
    deadline = deadlines[-1][1] if deadlines else None
    return _variants(
        history,
        "rows done",
        max(todo, 1.0),
        [(rows, "one")],
        "rows that are done over time, and the deadline",
        deadline,
        level=todo,
    )


def foreseen_ends(history: Sequence[Point]) -> str | None:
    """Plot the predicted end, expected and in 95 % of cases, over the time of the prediction."""
    expected = values_of(history, "ends_s")
    if len(expected) < 2:
        return None
    surely = values_of(history, "surely_s")
    deadlines = values_of(history, "deadline_s")
    level = deadlines[-1][1] if deadlines else None
    top = max([value for _, value in [*expected, *surely]] + [level or 0.0])
    size = 1.0
    unit = "s"
    if top > 7200:
        size = 3600.0
        unit = "h"
    elif top > 120:
        size = 60.0
        unit = "min"
    curves = [
        ([(x, y / size) for x, y in each], kind)
        for each, kind in ((expected, "one"), (surely, "two"))
    ]
    return _variants(
        history,
        f"foreseen end, {unit}",
        top / size,
        [(points, kind) for points, kind in curves if len(points) > 1],
        "the foreseen end over time",
        None,
        level=None if level is None else level / size,
    )


def workers_over_time(history: Sequence[Point]) -> str | None:
    """Plot the number of workers that were paid for over time."""
    points = values_of(history, "workers")
    if len(points) < 2:
        return None
    top = max(value for _, value in points)
    stairs = [points[0]]
    for before, after in pairwise(points):
        stairs += [(after[0], before[1]), after]
    return _variants(history, "workers", max(top, 1.0), [(stairs, "one")], "workers over time")


def dollars_over_time(history: Sequence[Point], max_dollars: float | None) -> str | None:
    """Plot the spent dollars over time, and their limit."""
    points = values_of(history, "dollars")
    if len(points) < 2 or not points[-1][1]:
        return None
    top = max(points[-1][1], max_dollars or 0.0)
    title = f"dollars, {money(points[-1][1])} at the end"
    return _variants(history, title, top, [(points, "one")], "dollars over time", level=max_dollars)


def _variants(
    history: Sequence[Point],
    title: str,
    top: float,
    curves: Sequence[tuple[list[tuple[float, float]], str]],
    label: str,
    upright: float | None = None,
    level: float | None = None,
) -> str:
    """Return a wide and a narrow plot over the time of all attempts."""
    seconds = max(history[-1][0] or 1.0, upright or 0.0, 1.0)
    variants = []
    for kind, width, steps in (("wide", WIDE_WIDTH, 8), ("narrow", NARROW_WIDTH, 4)):
        x = Axis.of_time(seconds, "time of all attempts", steps)
        plot = Plot(x, Axis.over(0, top, title), width, 200)
        marks = [] if level is None else [plot.level(level)]
        if upright is not None:
            marks.append(plot.upright(upright))
        marks += [plot.line(points, curve) for points, curve in curves]
        variants.append(plot.svg(label, marks, kind))
    return "".join(variants)
