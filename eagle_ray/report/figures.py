"""Figures of the report: the numbers in ``_summary.json`` as plots.

Each is a function, such as `acceptance_by_depth(summary["total"])`. A figure without numbers is
None.
"""

from __future__ import annotations

from typing import Any

from eagle_ray.report.plot import Axis, Plot, percent

# Widths of a plot over time in SVG units; the style sheet shows one of the two.
WIDE_WIDTH = 720
NARROW_WIDTH = 460
LARGEST_DOT = 9.0  # pixels of its radius
SMALLEST_DOT = 2.0  # pixels of its radius


def acceptance_by_depth(counts: dict[str, Any]) -> str | None:
    """Plot the share of decode steps that accepted a draft token at each depth."""
    accepted = counts["accepted_by_depth"]
    steps = counts["steps"]
    if not accepted or not steps:
        return None

    points = []
    notes = []
    for depth, count in enumerate(accepted, 1):
        share = count / steps
        points.append((depth, share))
        notes.append((depth, share, _short_percent(share)))

    x = Axis.of_integers(1, len(points), "depth of the draft token")
    y = Axis.over(0, 1, "share of steps", percent)
    plot = Plot(x, y)
    marks = [plot.bars(points, 0.7)]
    if len(points) <= 10:  # more notes would overlap
        marks.append(plot.notes(notes))
    title = "share of steps that accepted a draft token, by its depth"
    return plot.svg(title, marks)


def _short_percent(share: float) -> str:
    digits = 3 if share < 0.1 else 2
    return percent(round(share, digits))


def calibration(counts: dict[str, Any]) -> str | None:
    """Plot the accepted share of draft nodes over their probability. The area of a dot is the number of nodes."""
    if not sum(counts["confidence_nodes"]):
        return None
    x = Axis.over(0, 1, "probability given to the draft token", percent)
    y = Axis.over(0, 1, "accepted", percent)
    plot = Plot(x, y)
    diagonal = plot.line([(0, 0), (1, 1)], "even")
    before = plot.dots(_bins(counts, "confidence"), "two")
    after = plot.dots(_bins(counts, "calibrated"), "one")
    title = "accepted share of draft tokens by the probability they were given"
    return plot.svg(title, [diagonal, before, after])


def _bins(counts: dict[str, Any], name: str) -> list[tuple[float, float, float]]:
    """Return the dots of a plot over probabilities: x, y and radius of each bin that has nodes."""
    nodes = counts[f"{name}_nodes"]
    accepted = counts[f"{name}_accepted"]
    expected = counts[f"{name}_expected"]
    largest = max(nodes)
    dots = []
    for n, a, e in zip(nodes, accepted, expected, strict=True):
        if n:
            radius = _radius(n, largest)
            dots.append((e / n, a / n, radius))
    return dots


def _radius(count: float, largest: float) -> float:
    """Return the radius of a dot whose area is its count."""
    share = count / largest
    return max(SMALLEST_DOT, LARGEST_DOT * share**0.5)


def rows_by_value(counts: dict[str, Any] | None, title: str) -> str | None:
    """Plot the rows of each bin of a histogram."""
    if counts is None:
        return None
    low = counts["low"]
    width = counts["width"]
    each = counts["counts"]
    x = Axis.over(low, low + width * len(each), title)
    plot = Plot(x, Axis.over(0, max(each), "rows", finest=1))
    # A bar stands over the middle of its interval.
    points = [(low + width * (i + 0.5), count) for i, count in enumerate(each)]
    bars = plot.bars(points, 0.9 * width)
    return plot.svg(f"rows by {title}", [bars])


def confidence(calibration: dict[str, Any] | None) -> str | None:
    """Plot the share of right rows over their confidence. The area of a dot is the number of rows."""
    if calibration is None:
        return None
    rows = calibration["rows"]
    dots = []
    for count, mean, right in zip(
        rows, calibration["confidence"], calibration["right"], strict=True
    ):
        if count:
            share = right / count
            radius = _radius(count, max(rows))
            dots.append((mean, share, radius))
    plot = Plot(
        Axis.over(0, 1, "share of the best continuation in the probabilities of all", percent),
        Axis.over(0, 1, "right", percent),
    )
    diagonal = plot.line([(0, 0), (1, 1)], "even")
    marks = [diagonal, plot.dots(dots)]
    return plot.svg("share of right rows by their confidence", marks)


def steps_by_budget(budget: dict[str, list[int]]) -> str:
    """Plot the share of steps over the number of rows that a sequence had in a step."""
    total = sum(budget["steps"])
    shares = [steps / total for steps in budget["steps"]]
    points = zip(budget["budget"], shares, strict=True)
    y = Axis.over(0, max(shares), "share of steps", percent)
    plot = Plot(_budgets(budget), y)
    bars = plot.bars(points, 0.7)
    return plot.svg("share of steps by the rows they were given", [bars])


def tau_by_budget(budget: dict[str, list[int]]) -> str:
    """Plot tokens per step, including the bonus token, over the budget. The area of a dot is the number of steps."""
    steps = budget["steps"]
    largest = max(steps)
    points = []
    taus = []
    for rows, num_steps, accepted in zip(budget["budget"], steps, budget["accepted"], strict=True):
        tau = 1 + accepted / num_steps
        taus.append(tau)
        points.append((rows, tau, _radius(num_steps, largest)))

    highest = max(2, *taus)
    plot = Plot(_budgets(budget), Axis.over(1, highest, "tokens per step"))
    dots = plot.dots(points)
    return plot.svg("tokens of a step by the rows it was given", [dots])


def _budgets(budget: dict[str, list[int]]) -> Axis:
    title = "verify rows of a sequence in one step, its root included"
    return Axis.of_integers(1, max(budget["budget"]), title)


def speed(timeline: dict[str, Any]) -> str:
    """Plot tokens per second over time, summed over all workers."""
    return _over_time(timeline, "tokens_per_s", "tokens/s, all workers")


def busy_slots(timeline: dict[str, Any], slots: int) -> str:
    """Plot the busy slots over time, summed over all workers.

    If the run has one attempt, a horizontal line shows the total number of slots.

    Args:
        slots: slots of one worker.
    """
    num_slots = None
    if len(timeline["attempts"]) == 1:
        num_slots = slots * max(1, len(timeline["workers"]))
    return _over_time(timeline, "busy_slots", "busy slots, all workers", level=num_slots)


def _over_time(timeline: dict[str, Any], name: str, title: str, level: float | None = None) -> str:
    bin_s = timeline["bin_s"]
    seconds = bin_s * timeline["num_bins"]
    workers = timeline["workers"].values()
    by_worker = [worker[name] for worker in workers]
    values = [sum(of_bin) for of_bin in zip(*by_worker, strict=True)]

    top = max(*values, level or 0)
    y = Axis.over(0, top, title, finest=1)
    wide = Axis.of_time(seconds, "time at work", 8)
    narrow = Axis.of_time(seconds, "time at work", 4)
    plots = {
        "wide": Plot(wide, y, WIDE_WIDTH, 200),
        "narrow": Plot(narrow, y, NARROW_WIDTH, 200),
    }

    variants = []
    for kind, plot in plots.items():
        marks = []
        for attempt in timeline["attempts"][1:]:
            marks.append(plot.upright(attempt["offset_s"]))  # the attempt before it ended here
        if level:
            marks.append(plot.level(level))
        marks.append(plot.steps(values, bin_s))
        svg = plot.svg(f"{title}, over time", marks, kind)
        variants.append(svg)
    return "".join(variants)
