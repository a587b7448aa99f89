"""HTML reports of a run and of a training run: each one self-contained file without scripts.

    html = page(read_json(run / "_summary.json"), read_json(run / "_run.json"))
    html = training_page(read_json(run / "training.json"))

What the pages say stands in `templates/`; here stands what a template cannot compute.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

from eagle_ray.report import figures
from eagle_ray.report.cost import duration, money
from eagle_ray.report.figures import WIDE, Axis, Plot, percent, plain, sparkline
from eagle_ray.report.scores import score_table
from eagle_ray.report.text import ABSENT, INTERVAL, interval_text, interval_words, number, rounding_words
from eagle_ray.report.timeline import OTHERS
from eagle_ray.report.tree_figure import draft_tree

RUNNING = "not ended: still running, or killed"
MAX_DIFFERENCES = 50  # rows that differ from plain decoding
MAX_POINTS = 240  # of a curve; more steps are averaged
FEW_POINTS = 20  # of a curve; fewer are drawn as dots, too
KINDS = ("one", "two", "even")  # CSS classes of curves in one plot
Point = tuple[float, float]


def page(summary: dict[str, Any], record: dict[str, Any]) -> str:
    """Return the report of a run. summary may have `scores`, too."""
    config = record["config"]
    values = {
        "summary": summary,
        "record": record,
        "models": _models(config["model"], config["speculative"]["method"]),
        "scores": score_table(summary["scores"]) if summary.get("scores") else None,
        "running": RUNNING,
        "interval": INTERVAL,
        "max_differences": MAX_DIFFERENCES,
    }
    if timeline := summary.get("timeline"):
        workers = timeline["workers"]
        values["slots"] = _slots(timeline, config["execution"]["slots"])
        values["fastest"] = max(max(worker["tokens_per_s"]) for name, worker in workers.items() if name != OTHERS)
    return _environment().get_template("run.html.j2").render(values)


def _models(model: dict[str, Any], method: str) -> list[str]:
    """Return what a run decoded with, such as ["target a/b", "drafts of c/d", "method auto"]."""
    drafts = model["draft"] if isinstance(model["draft"], list) else [model["draft"]]
    named = " and ".join(draft for draft in drafts if draft)
    return [f"target {model['target']}", *([f"drafts of {named}"] if named else []), f"method {method}"]


def _slots(timeline: dict[str, Any], setting: int | str) -> int:
    """Return the slots of a worker, or the most that one was seen to use if they were set by its GPU."""
    if setting != "auto":
        return int(setting)
    return max(1, *(math.ceil(busy) for worker in timeline["workers"].values() for busy in worker["busy_slots"]))


def training_page(record: dict[str, Any]) -> str:
    """Return the report of a training run."""
    steps = record["curves"].get("steps", [])
    names = [name for name in (steps[0][1] if steps else ()) if name.startswith("agreement")]
    shown = [name for name in (names[:1] + names[-1:] if len(names) > 1 else names)]
    results = record["curves"].get("held_out", [])
    held_out = [(step, result) for step, result in results if result["tau"] is not None]
    taus = [(float(step), result["tau"]) for step, result in held_out]
    values = {
        "record": record,
        "tau": results[-1][1]["tau"] if results else None,
        "loss": _over_steps(record, [curve(steps, "loss")], "loss", plain),
        "agreement": _over_steps(record, [curve(steps, name) for name in shown], "agreement", percent, high=1.0),
        "depths": [name.removeprefix("agreement_") for name in shown],
        "held_out": held_out,
        "held_out_tau": _over_steps(record, [taus], "tau", plain, low=1.0),
    }
    return _environment().get_template("training.html.j2").render(values)


def curve(steps: Sequence[Sequence[Any]], name: str) -> list[Point]:
    """Return a mean of every step, averaged in at most MAX_POINTS groups of steps."""
    points = [(float(step), means[name]) for step, means, _ in steps if name in means]
    size = -(-len(points) // MAX_POINTS) or 1
    groups = [points[start : start + size] for start in range(0, len(points), size)]
    return [(sum(x for x, _ in group) / len(group), sum(y for _, y in group) / len(group)) for group in groups]


def _over_steps(
    record: dict[str, Any],
    curves: Sequence[list[Point]],
    title: str,
    show: Callable[[float], str],
    low: float = 0.0,
    high: float = 0.0,
) -> str | None:
    """Plot curves over training steps, on an axis that reaches from `low` to `high` or further; None without points."""
    values = [y for points in curves for _, y in points]
    if not values:
        return None
    axis = Axis.over(min(low, *values), max(high, *values), title, show)
    plot = Plot(Axis.over(0, record["num_steps"], "step", finest=1), axis, width=WIDE)
    marks = [plot.line(points, kind) for points, kind in zip(curves, KINDS, strict=False)]
    for points, kind in zip(curves, KINDS, strict=False):
        if len(points) < FEW_POINTS:
            marks.append(plot.dots([(x, y, 3.0) for x, y in points], kind))
    return plot.svg(f"{title} over steps", marks)


@cache
def _environment() -> Any:
    from jinja2 import Environment, PackageLoader  # only where a page is written

    environment = Environment(
        loader=PackageLoader("eagle_ray.report"), autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    shown = (number, duration, money, percent, interval_text, interval_words, rounding_words, sparkline)
    environment.filters |= {function.__name__: function for function in shown}
    environment.filters |= {"moment": _moment, "estimated": _estimated}
    environment.globals |= {"figures": figures, "draft_tree": draft_tree, "duration": duration, "money": money}
    return environment


def _moment(text: str) -> str:
    """Format a timestamp of the record as 2026-11-21 12:00:00."""
    return text.replace("T", " ").removesuffix("+00:00")


def _estimated(values: list[float] | None, show: Callable[[float], str]) -> list[str]:
    """Return the cells of an estimate and its interval; it has no dollars if there was no price then."""
    if values is None:
        return [ABSENT, ABSENT]
    expected, low, high = values
    return [show(expected), f"{show(low)} to {show(high)}"]
