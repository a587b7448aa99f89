"""Figures of the report, as SVG plots of the numbers in ``_summary.json``. A figure without numbers is None.

acceptance_by_depth(summary["total"])      # '<svg ...'
"""

from __future__ import annotations

from typing import Any

from eagle_ray.report.svg import Axis, Plot, percent

WIDE, NARROW = 720, 460  # widths of a plot over time in SVG units; the style sheet shows one of the two
LARGEST_DOT = 9.0  # pixels


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
