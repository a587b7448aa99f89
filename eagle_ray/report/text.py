"""Plain-text tables for terminals, files and job logs. Every number comes from ``_summary.json``.

>>> print(render(["task", "rows"], [["code", "4"], ["math", "12"]]))
task  rows
code     4
math    12
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from eagle_ray.report.cost import cost_lines

ABSENT = "-"
TOO_FEW = "too few rows"
INTERVAL = "95 % interval"
FALLBACK_NAMES = {"kernels": "Triton's kernels", "graphs": "CUDA graphs"}
MAX_DIFFERENCES = 10
GIB = 1 << 30
ACCEPTED = " *"  # after a node of a tree's picture
LONGEST_TEXT = 24  # characters of a token in a tree's picture
# Error codes of rows that are too long, each with the key that decides how long a row may be.
TOO_LONG = {"prompt_too_long": "model.max_model_len", "kv_space": "execution.kv_tokens"}


def render(header: list[str], rows: list[list[str]]) -> str:
    """Return a table with two spaces between columns. The first column is left-aligned, the others right-aligned."""
    lines = [header, *rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
    return "\n".join(_line(line, widths) for line in lines)


def number(value: float | None, digits: int = 0) -> str:
    """Format a number with thousands separators, or return ABSENT for None."""
    return ABSENT if value is None else f"{value:,.{digits}f}"


def counted(number: float, noun: str) -> str:
    """Return text such as 1 core, 2 cores, 0.5 cores."""
    return f"{number:g} {noun}" + ("" if number == 1 else "s")


def gib(num_bytes: float) -> str:
    """Return text such as 12.3 GiB; MiB below one."""
    return f"{num_bytes / GIB:,.1f} GiB" if num_bytes >= GIB else f"{num_bytes / (1 << 20):,.0f} MiB"


def interval_text(speeds: dict[str, Any]) -> str:
    """Return the interval of a speed-up as [low, high], or TOO_FEW if it has none."""
    interval = speeds.get("speed_up_interval")
    return TOO_FEW if interval is None else f"[{interval[0]:.2f}, {interval[1]:.2f}]"


def interval_words(measured: dict[str, Any]) -> str:
    """Return the interval, or its absence, as the end of a sentence."""
    text = interval_text(measured)
    return f"{text} for an interval" if text == TOO_FEW else f"{INTERVAL} {text}"


def run_table(summary: dict[str, Any]) -> str:
    """Return one line per group, a total, and notes on speed, drafts, checks and errors of a run."""
    header = [summary["by"] or "", "rows", "errors", "tokens", "tau", "nodes/step", "tokens/s of a row"]
    groups = {name or "(none)": counts for name, counts in summary["groups"].items()} | {"all": summary["total"]}
    turns = {f"turn {turn}": counts for turn, counts in summary.get("turns", {}).items()}
    table = render(header, [_run_line(name, counts) for name, counts in (turns | groups).items()])
    drafts = [_depths(summary["total"]), _calibration(summary["total"])]
    work = summary["last_work"]
    checks = [_baseline(summary.get("baseline_rows")), _verification(summary.get("verify_rows"))]
    spent = cost_lines(summary.get("cost"), summary.get("estimate"))
    notes = [
        _work(work),
        *spent,
        _steps(work),
        _planner_errors(work),
        *_fallbacks(work),
        *drafts,
        *checks,
        _tally("finished by", "finish_reasons", summary),
    ]
    errors = [_tally("errors", "error_codes", summary), _too_long(summary["total"]["error_codes"])]
    return "\n".join([table, "", *filter(None, [*notes, *errors])])


def difference_line(row: dict[str, Any]) -> str:
    """Return one line about a row with an output that differs from plain decoding."""
    return (
        f"id {row['request_id']} sample {row['sample_index']} differs from plain decoding at output token "
        f"{row['position']}: {row['token']}; plain decoding gives {row['plain_token']} ({rounding_words(row)})"
    )


def rounding_words(row: dict[str, Any]) -> str:
    """Describe whether and how rounding explains that a row differs from plain decoding."""
    if not row["near_tie"]:
        return "not explained by rounding"
    return "edge of top-k, top-p or min-p" if row.get("cause") == "cut" else "near-tie"


def side_by_side_table(numbers: dict[str, Any]) -> str:
    """Return a table of two runs over equal inputs: one line per group, a total, and the first output differences."""
    header = [numbers["by"] or "", "rows A", "rows B", "tau A", "tau B", "tokens/s A", "tokens/s B", "B / A", INTERVAL]
    groups = {name or "(none)": pair for name, pair in numbers["groups"].items()} | {"all": numbers["total"]}
    table = render(header, [_pair_line(name, pair) for name, pair in groups.items()])
    rows, differing = numbers["rows"], numbers["differing"]
    same = (
        f"{number(numbers['identical'])} of the {number(rows['both'])} rows that both have are token for token the same"
    )
    shown = [_difference(difference) for difference in differing[:MAX_DIFFERENCES]]
    more = [f"  and {number(len(differing) - len(shown))} more"] if len(differing) > len(shown) else []
    return "\n".join([table, "", same, *shown, *more])


def _pair_line(name: str, pair: dict[str, Any]) -> list[str]:
    a, b, speed_up = pair["a"], pair["b"], pair["speed_up"]
    return [
        name,
        number(a["rows"]),
        number(b["rows"]),
        number(a["mean_acceptance_length"], 2),
        number(b["mean_acceptance_length"], 2),
        number(a["decode_tokens_per_s"]),
        number(b["decode_tokens_per_s"]),
        f"{speed_up:.2f}x" if speed_up else ABSENT,
        interval_text(pair) if speed_up else ABSENT,
    ]


def _difference(difference: dict[str, Any]) -> str:
    place = difference["position"]
    where = "an error row in one of them" if place is None else f"from token {place} on"
    return f"  differs: {difference['request_id']} sample {difference['sample_index']}, {where}"


def _run_line(name: str, counts: dict[str, Any]) -> list[str]:
    return [
        name,
        number(counts["rows"]),
        number(counts["errors"]),
        number(counts["output_tokens"]),
        number(counts["mean_acceptance_length"], 2),
        number(counts["nodes_per_step"], 1),
        number(counts["decode_tokens_per_s"]),
    ]


def _work(work: dict[str, Any] | None) -> str:
    """Return the speed of the last attempt that generated rows, over all workers."""
    if not work or not work["tokens_per_s"]:
        return ""
    busy = f", slots {work['busy_slots']:.0%} busy" if work["busy_slots"] else ""
    return f"speed: {number(work['tokens_per_s'])} tokens/s, all workers together{busy}"


def _steps(work: dict[str, Any] | None) -> str:
    """Return the steps of the engines, their verified rows, plain steps, reused prompt tokens and preemptions."""
    engine = (work or {}).get("engine")
    if not engine or not engine["num_steps"]:
        return ""
    steps, reused = engine["num_steps"], engine["num_reused_tokens"]
    parts = [
        f"{number(steps)} steps of {engine['num_verify_rows'] / steps:.1f} verified rows",
        _off(engine["num_plain_steps"] / steps, engine["num_probes"]),
        f"{number(reused)} of {number(engine['num_prefill_tokens'] + reused)} prompt tokens reused",
        f"{engine['num_preemptions']} pre-emptions" if engine["num_preemptions"] else "",
    ]
    return f"engine: {', '.join(filter(None, parts))}"


def _planner_errors(work: dict[str, Any] | None) -> str:
    """Return the workers that drafted nothing more because their planner failed, with the first reason."""
    errors = (work or {}).get("planner_errors", {})
    return f"no drafts after the planner failed in {', '.join(errors)}: {next(iter(errors.values()))}" if errors else ""


def _fallbacks(work: dict[str, Any] | None) -> list[str]:
    """Return how many workers ran without kernels or CUDA graphs on a CUDA device, with the first reason of each."""
    by_worker = (work or {}).get("fallbacks", {}).values()
    reasons = {part: [each[part] for each in by_worker if part in each] for part in FALLBACK_NAMES}
    return [
        f"WARNING: slower, without {FALLBACK_NAMES[part]} in {len(texts)} workers: {texts[0]} (see `eagle-ray doctor`)"
        for part, texts in reasons.items()
        if texts
    ]


def _off(share: float, num_probes: int) -> str:
    """Return the share of steps without drafts, with the reason if the planner chose this for most steps."""
    why = " (here drafts cost more than they gain)" if share > 0.5 and num_probes else ""
    return f"{share:.0%} without drafts{why}, {num_probes} probes"


def _baseline(measured: dict[str, Any] | None) -> str:
    """Return the measured speed-up over plain decoding (report.baseline_rows)."""
    if not measured or not measured["rows"]:
        return ""
    return (
        f"speed-up: {measured['speed_up']:.2f}x over plain decoding, {interval_words(measured)}\n"
        f"  {number(measured['tokens_per_s'])} against {number(measured['plain_tokens_per_s'])} tokens/s of one worker "
        f"({number(measured['rows'])} rows both ways)"
    )


def _verification(verified: dict[str, Any] | None) -> str:
    """Return how many outputs are identical to plain decoding (report.verify_rows)."""
    if not verified or not verified["rows"]:
        return ""
    others = ""
    if verified["differing"]:
        num_cuts = sum(row.get("cause") == "cut" for row in verified["differing"])
        num_ties = sum(row["near_tie"] for row in verified["differing"]) - num_cuts
        others = f"; of the others {num_ties} part at a near-tie, {num_cuts} at the edge of top-k, top-p or min-p"
    return f"verified: {number(verified['identical'])} of {number(verified['rows'])} rows are plain decoding's{others}"


def _depths(counts: dict[str, Any]) -> str:
    """Return the share of steps that accepted a draft token at each depth."""
    if not counts["accepted_by_depth"] or not counts["steps"]:
        return ""
    shares = [f"{accepted / counts['steps']:.0%}" for accepted in counts["accepted_by_depth"]]
    return "" if set(shares) == {"0%"} else f"steps that accepted depth 1, 2, ...: {' '.join(shares)}"


def _calibration(counts: dict[str, Any]) -> str:
    """Return the expected calibration errors of the drafted and of the calibrated probabilities."""
    drafted, calibrated = counts["ece_drafted"], counts["ece_calibrated"]
    return "" if drafted is None else f"calibration error: {drafted:.3f} as drafted, {calibrated:.3f} calibrated"


def _tally(title: str, name: str, summary: dict[str, Any]) -> str:
    counts = summary["total"][name]
    return f"{title}: {', '.join(f'{key} {count:,}' for key, count in counts.items())}" if counts else ""


def _too_long(error_codes: Mapping[str, int]) -> str:
    """Return how many rows did not fit, and the keys that change it; empty if all did."""
    counts = {code: error_codes.get(code, 0) for code in TOO_LONG}
    if not any(counts.values()):
        return ""
    keys = " or ".join(key for code, key in TOO_LONG.items() if counts[code])
    return f"too long: {sum(counts.values()):,} rows do not fit. Raise {keys}, and run with --retry-errors."


def _line(cells: list[str], widths: list[int]) -> str:
    first, *rest = zip(cells, widths, strict=True)
    return "  ".join([first[0].ljust(first[1]), *(cell.rjust(width) for cell, width in rest)]).rstrip()


@dataclass(frozen=True, slots=True)
class PictureNode:
    """A node of a draft tree.

    Attributes:
        parent: its index in the list; -1 for the root, which comes first.
        probability: that the target accepts it and all above it, as the planner believes.
        is_verified: it has a row in the verify pass.
        is_accepted: the target chose it, and all above it.
    """

    text: str
    parent: int
    probability: float
    is_verified: bool
    is_accepted: bool

    def as_json(self) -> dict[str, Any]:
        """Return the node with its text as it is shown."""
        return asdict(self) | {"text": _quoted(self.text), "probability": round(self.probability, 4)}


def tree_picture(nodes: Sequence[PictureNode]) -> str:
    """Return the verified nodes as a tree, siblings in the given order, and a line for the others.

    >>> nodes = [PictureNode("Paris", -1, 1.0, True, True), PictureNode(" is", 0, 0.9, True, True),
    ...          PictureNode(",", 0, 0.1, True, False), PictureNode(" the", 1, 0.7, True, True)]
    >>> print(tree_picture(nodes))
    "Paris"
    ├── " is" 0.90 *
    │   └── " the" 0.70 *
    └── "," 0.10
    """
    children: dict[int, list[int]] = {}
    for i, node in enumerate(nodes):
        if node.is_verified and i:
            children.setdefault(node.parent, []).append(i)
    lines = [_quoted(nodes[0].text), *_branches(nodes, children, 0, "")]
    num_others = sum(not node.is_verified for node in nodes)
    return "\n".join([*lines, *([f"({num_others} more candidates were not worth a row)"] if num_others else [])])


def _branches(nodes: Sequence[PictureNode], children: dict[int, list[int]], parent: int, indent: str) -> Iterator[str]:
    below = children.get(parent, [])
    for i in below:
        is_last, node = i == below[-1], nodes[i]
        mark = ACCEPTED if node.is_accepted else ""
        yield f"{indent}{'└──' if is_last else '├──'} {_quoted(node.text)} {node.probability:.2f}{mark}"
        yield from _branches(nodes, children, i, indent + ("    " if is_last else "│   "))


def _quoted(text: str) -> str:
    shown = text.replace("\n", "\\n").replace("\t", "\\t")
    return f'"{shown[:LONGEST_TEXT]}{"..." if len(shown) > LONGEST_TEXT else ""}"'
