"""HTML reports of a run and of a training run: each one self-contained file without scripts.

    html = page(read_json(run / "_summary.json"), read_json(run / "_run.json"))
    html = training_page(read_json(run / "training.json"))

The pages' texts are in `templates/`; this module computes what a template cannot.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

from eagle_ray.report import figures, promises
from eagle_ray.report.cost import duration, money
from eagle_ray.report.figures import WIDE_WIDTH
from eagle_ray.report.plot import Axis, Plot, percent, plain, sparkline
from eagle_ray.report.run_table import draft_warning_line, rounding_words
from eagle_ray.report.scores import score_table
from eagle_ray.report.text import INTERVAL, NO_VALUE, interval_text, interval_words, number
from eagle_ray.report.timeline import OTHER_WORKERS
from eagle_ray.report.tree_figure import draft_tree

RUNNING = "not ended: still running, or killed"
MAX_SHOWN_DIFFERENCES = 50  # rows that differ from plain decoding
MAX_POINTS = 240  # points of a curve; more steps are averaged
FEW_POINTS = 20  # points of a curve; fewer are drawn as dots, too
CURVE_KINDS = ("one", "two", "even")  # CSS classes of curves in one plot
Point = tuple[float, float]


def page(summary: dict[str, Any], record: dict[str, Any]) -> str:
    """Return the report of a run.

    Args:
        summary: content of ``_summary.json``; it may have `scores`.
        record: content of ``_run.json``.
    """
    config = record["config"]
    values = {
        "summary": summary,
        "record": record,
        "models": _models(config["model"], config["speculative"]["method"]),
        "scores": score_table(summary["scores"]) if summary.get("scores") else None,
        "running": RUNNING,
        "interval": INTERVAL,
        "max_differences": MAX_SHOWN_DIFFERENCES,
        "draft_warning": draft_warning_line(summary.get("last_work")),
    }
    if timeline := summary.get("timeline"):
        workers = timeline["workers"]
        values["slots"] = _slots(timeline, config["execution"]["slots"])
        single = [worker for name, worker in workers.items() if name != OTHER_WORKERS]
        values["fastest"] = max(max(worker["tokens_per_s"]) for worker in single)
    return _environment().get_template("run.html.j2").render(values)


def _models(model: dict[str, Any], method: str) -> list[str]:
    """Return the models and the method of a run, such as ["target a/b", "drafts of c/d", "method auto"]."""
    drafts = model["draft"] if isinstance(model["draft"], list) else [model["draft"]]
    named = " and ".join(draft for draft in drafts if draft)
    lines = [f"target {model['target']}"]
    if named:
        lines.append(f"drafts of {named}")
    lines.append(f"method {method}")
    return lines


def _slots(timeline: dict[str, Any], setting: int | str) -> int:
    """Return the slots of a worker, or the most that one was seen to use if they were set by its GPU."""
    if setting != "auto":
        return int(setting)
    num_slots = 1
    for worker in timeline["workers"].values():
        for busy in worker["busy_slots"]:
            num_slots = max(num_slots, math.ceil(busy))
    return num_slots


def training_page(record: dict[str, Any]) -> str:
    """Return the report of a training run."""
    curves = record["curves"]
    steps = curves.get("steps", [])
    results = curves.get("held_out", [])

    # Agreement is measured by depth; the first and the last one are shown.
    _, first_means, _ = steps[0] if steps else (0, {}, 0)
    depths = [name for name in first_means if name.startswith("agreement")]
    shown = [depths[0], depths[-1]] if len(depths) > 1 else depths
    agreements = [curve(steps, name) for name in shown]

    held_out = [(step, result) for step, result in results if result["tau"] is not None]
    taus = [(float(step), result["tau"]) for step, result in held_out]
    last_tau = None
    if results:
        _, last_result = results[-1]
        last_tau = last_result["tau"]

    values = {
        "record": record,
        "tau": last_tau,
        "loss": _over_steps(record, [curve(steps, "loss")], "loss", plain),
        "agreement": _over_steps(record, agreements, "agreement", percent, high=1.0),
        "depths": [name.removeprefix("agreement_") for name in shown],
        "held_out": held_out,
        "held_out_tau": _over_steps(record, [taus], "tau", plain, low=1.0),
    }
    return _environment().get_template("training.html.j2").render(values)


def curve(steps: Sequence[Sequence[Any]], name: str) -> list[Point]:
    """Return a training curve as means over at most MAX_POINTS groups of consecutive steps."""
    points = [(float(step), means[name]) for step, means, _ in steps if name in means]
    size = math.ceil(len(points) / MAX_POINTS) or 1
    averaged = []
    for start in range(0, len(points), size):
        group = points[start : start + size]
        num_points = len(group)
        total_x = sum(x for x, _ in group)
        total_y = sum(y for _, y in group)
        averaged.append((total_x / num_points, total_y / num_points))
    return averaged


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

    x_axis = Axis.over(0, record["num_steps"], "step", finest=1)
    y_axis = Axis.over(min(low, *values), max(high, *values), title, show)
    plot = Plot(x_axis, y_axis, width=WIDE_WIDTH)

    lines = []
    dots = []
    for points, kind in zip(curves, CURVE_KINDS, strict=False):
        lines.append(plot.line(points, kind))
        if len(points) < FEW_POINTS:
            dots.append(plot.dots([(x, y, 3.0) for x, y in points], kind))
    return plot.svg(f"{title} over steps", [*lines, *dots])


@cache
def _environment() -> Any:
    from jinja2 import Environment, PackageLoader  # only where a page is written

    environment = Environment(
        loader=PackageLoader("eagle_ray.report"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    shown = (
        number,
        duration,
        money,
        percent,
        interval_text,
        interval_words,
        rounding_words,
        sparkline,
    )
    environment.filters |= {function.__name__: function for function in shown}
    environment.filters |= {"moment": _moment, "estimated": _estimated}
    environment.globals |= {
        "figures": figures,
        "promises": promises,
        "draft_tree": draft_tree,
        "duration": duration,
        "money": money,
    }
    return environment


def _moment(text: str) -> str:
    """Format a timestamp of the record as 2026-11-21 12:00:00."""
    return text.replace("T", " ").removesuffix("+00:00")


def _estimated(values: list[float] | None, show: Callable[[float], str]) -> list[str]:
    """Return two table cells, an estimate and its interval; both are empty marks if there is no estimate."""
    if values is None:
        return [NO_VALUE, NO_VALUE]
    expected, low, high = values
    return [show(expected), f"{show(low)} to {show(high)}"]
