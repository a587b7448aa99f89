"""Format a comparison of draft methods as text, by task as in the EAGLE papers.

    T = 0: speed-up over plain decoding, tau
    method         chat        code         all
    eagle1   2.10x 2.95  2.61x 3.60  2.34x 3.21

A line of details for each method follows.
"""

from __future__ import annotations

from typing import Any

from eagle_ray.report.text import NO_VALUE, number, render

COMPARISON_LEGEND = """\
speed-up: tokens a second over plain decoding's in the same round, prompts included; geometric mean, 95 % interval
tau: tokens per pass of the target; nodes: verified drafts per pass; accepted: share of passes, by depth 1, 2, ...
error: calibration error of the drafter's probabilities, as they were drafted and as they were used
same: outputs that are token for token plain decoding's"""


def evaluation_text(numbers: dict[str, Any]) -> str:
    """Return the table by task and the table of details for each temperature."""
    temperatures = dict.fromkeys(cell["temperature"] for cell in numbers["cells"])
    parts = [_about(numbers)]
    for temperature in temperatures:
        cells = [cell for cell in numbers["cells"] if cell["temperature"] == temperature]
        title = f"T = {temperature:g}: speed-up over plain decoding, tau"
        parts.append(f"{title}\n{_by_task(cells)}")
        parts.append(_details(cells))
    parts.append(_legend(numbers))
    return "\n\n".join(parts)


def pairs_table(numbers: dict[str, Any]) -> str:
    """Return a line for each pair of target and draft, over all tasks, and a table for each temperature."""
    targets = numbers["targets"]
    first = targets[0]["cells"]
    tables = []
    for temperature in dict.fromkeys(cell["temperature"] for cell in first):
        header = [f"T = {temperature:g}", "target", "draft", "speed-up", "tau", "nodes", "same"]
        lines = [line for each in targets for line in _pair_lines(each, temperature)]
        tables.append(render(header, lines))
    return "\n\n".join(tables)


def _pair_lines(numbers: dict[str, Any], temperature: float) -> list[list[str]]:
    """Return the lines of one target's pairs, without plain decoding, which they are compared with."""
    lines = []
    for cell in numbers["cells"]:
        draft = numbers["methods"][cell["method"]]["draft"]
        is_own = cell["temperature"] == temperature and cell["task"] is None
        if is_own and cell["method"] != "plain":
            lines.append(
                [
                    cell["method"],
                    numbers["target"],
                    draft or NO_VALUE,
                    _interval(cell["speed_up"], ".2f", "x"),
                    number(cell["tau"], 2),
                    number(cell["nodes_per_step"], 1),
                    _same(cell["identity"]),
                ]
            )
    return lines


def _legend(numbers: dict[str, Any]) -> str:
    num_prompts = max(cell["questions"] for cell in numbers["cells"])
    takes = numbers["interval_takes"]
    if num_prompts >= takes:
        return COMPARISON_LEGEND
    return f"{COMPARISON_LEGEND}\n[{NO_VALUE}]: an interval takes {takes} prompts, these are {num_prompts}"


def _about(numbers: dict[str, Any]) -> str:
    where = f"{numbers['device']}, threads: {numbers['threads']}, {numbers['dtype']}, torch {numbers['torch']}"
    return f"{numbers['target']}, batches of {numbers['batch']}, on {where}"


def _by_task(cells: list[dict[str, Any]]) -> str:
    tasks = list(dict.fromkeys(cell["task"] for cell in cells))
    methods = dict.fromkeys(cell["method"] for cell in cells)
    by_place = {(cell["method"], cell["task"]): cell for cell in cells}
    header = ["method"]
    header += ["all" if task is None else task for task in tasks]
    lines = []
    for method in methods:
        own = [_speed_and_tau(by_place[method, task]) for task in tasks]
        lines.append([method, *own])
    return render(header, lines)


def _speed_and_tau(cell: dict[str, Any]) -> str:
    return f"{cell['speed_up']['mean']:.2f}x {number(cell['tau'], 2)}"


def _details(cells: list[dict[str, Any]]) -> str:
    header = [
        "all tasks",
        "speed-up",
        "tau",
        "tau less that of",
        "nodes",
        "accepted",
        "error",
        "same",
    ]
    return render(header, [_detail(cell) for cell in cells if cell["task"] is None])


def _detail(cell: dict[str, Any]) -> list[str]:
    return [
        cell["method"],
        _interval(cell["speed_up"], ".2f", "x"),
        number(cell["tau"], 2),
        _tau_less(cell["tau_less"]),
        number(cell["nodes_per_step"], 1),
        " ".join(f"{share:.0%}" for share in cell["accepted_by_depth"]) or NO_VALUE,
        _errors(cell["calibration_error"]),
        _same(cell["identity"]),
    ]


def _tau_less(difference: dict[str, Any] | None) -> str:
    """Return by how much tau exceeds that of another method, which is named."""
    if difference is None:
        return NO_VALUE
    return f"{_interval(difference, '+.2f')} {difference['of']}"


def _errors(error: dict[str, Any]) -> str:
    """Return the calibration errors of the drafted and of the calibrated probabilities."""
    if error["drafted"] is None:
        return NO_VALUE
    return f"{error['drafted']:.3f} {error['calibrated']:.3f}"


def _interval(interval: dict[str, Any], form: str, unit: str = "") -> str:
    mean = f"{interval['mean']:{form}}{unit}"
    if interval["low"] is None:
        return f"{mean} [{NO_VALUE}]"
    return f"{mean} [{interval['low']:{form}}, {interval['high']:{form}}]"


def _same(identity: dict[str, Any]) -> str:
    """Return how many outputs are identical to plain decoding, and how many differences rounding explains."""
    num_equal = identity["num_equal"]
    num_compared = identity["num_compared"]
    same = f"{num_equal} of {num_compared}"
    if num_equal == num_compared:
        return same
    edges = f", {identity['num_edges']} at a filter's edge" if identity["num_edges"] else ""
    return f"{same}, {identity['num_near_ties']} near-ties{edges}"
