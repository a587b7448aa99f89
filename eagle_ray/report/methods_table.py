"""Comparison of drafting methods as text: speed-up and tau by task, as in the EAGLE papers, and a table of details.

    T = 0: speed-up over plain decoding, tau
    method         chat        code         all
    eagle1   2.10x 2.95  2.61x 3.60  2.34x 3.21

Every number comes from the JSON of the evaluation.
"""

from __future__ import annotations

from typing import Any

from eagle_ray.report.text import ABSENT, number, render

LEGEND = """\
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
        parts += [f"T = {temperature:g}: speed-up over plain decoding, tau\n{_by_task(cells)}", _details(cells)]
        parts += [_chosen(choice) for choice in numbers["choices"] if choice["temperature"] == temperature]
    return "\n\n".join([*parts, _legend(numbers)])


def _legend(numbers: dict[str, Any]) -> str:
    num_prompts, takes = max(cell["questions"] for cell in numbers["cells"]), numbers["interval_takes"]
    if num_prompts >= takes:
        return LEGEND
    return f"{LEGEND}\n[{ABSENT}]: an interval takes {takes} prompts, these are {num_prompts}"


def _about(numbers: dict[str, Any]) -> str:
    where = f"{numbers['device']}, threads: {numbers['threads']}, {numbers['dtype']}, torch {numbers['torch']}"
    return f"{numbers['target']}, batches of {numbers['batch']}, on {where}"


def _by_task(cells: list[dict[str, Any]]) -> str:
    tasks = list(dict.fromkeys(cell["task"] for cell in cells))
    methods = dict.fromkeys(cell["method"] for cell in cells)
    by_place = {(cell["method"], cell["task"]): cell for cell in cells}
    lines = [[method, *(_speed_and_tau(by_place[method, task]) for task in tasks)] for method in methods]
    return render(["method", *("all" if task is None else task for task in tasks)], lines)


def _speed_and_tau(cell: dict[str, Any]) -> str:
    return f"{cell['speed_up']['mean']:.2f}x {number(cell['tau'], 2)}"


def _details(cells: list[dict[str, Any]]) -> str:
    header = ["all tasks", "speed-up", "tau", "tau less that of", "nodes", "accepted", "error", "same"]
    return render(header, [_detail(cell) for cell in cells if cell["task"] is None])


def _detail(cell: dict[str, Any]) -> list[str]:
    error, accepted = cell["calibration_error"], cell["accepted_by_depth"]
    return [
        cell["method"],
        _interval(cell["speed_up"], ".2f", "x"),
        number(cell["tau"], 2),
        ABSENT if cell["tau_less"] is None else f"{_interval(cell['tau_less'], '+.2f')} {cell['tau_less']['of']}",
        number(cell["nodes_per_step"], 1),
        " ".join(f"{share:.0%}" for share in accepted) or ABSENT,
        ABSENT if error["drafted"] is None else f"{error['drafted']:.3f} {error['calibrated']:.3f}",
        _same(cell["identity"]),
    ]


def _chosen(choice: dict[str, Any]) -> str:
    """Return what method auto chose, and the rates of its trial."""
    if choice["method"] is None:
        return "auto: its trial did not end; give more prompts"
    rates = sorted(choice["tokens_per_s"].items(), key=lambda item: -item[1])
    listed = ", ".join(f"{method} {number(rate)}" for method, rate in rates)
    return f"auto chose {choice['method']} (decoded tokens per second in its trial: {listed})"


def _interval(interval: dict[str, Any], form: str, unit: str = "") -> str:
    if interval["low"] is None:
        return f"{interval['mean']:{form}}{unit} [{ABSENT}]"
    return f"{interval['mean']:{form}}{unit} [{interval['low']:{form}}, {interval['high']:{form}}]"


def _same(identity: dict[str, Any]) -> str:
    """Return how many outputs are identical to plain decoding, and how many differences rounding explains."""
    differing = identity["num_compared"] - identity["num_equal"]
    same = f"{identity['num_equal']} of {identity['num_compared']}"
    edges = f", {identity['num_edges']} at a filter's edge" if identity["num_edges"] else ""
    return f"{same}, {identity['num_near_ties']} near-ties{edges}" if differing else same
