"""Tables of a run and of two runs, for terminals, files and job logs. Every number comes from ``_summary.json``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from eagle_ray.report.choices import choices_line
from eagle_ray.report.cost import bounds_lines, cost_lines, spend_line
from eagle_ray.report.documents import documents_line
from eagle_ray.report.promises import promise_line
from eagle_ray.report.text import (
    INTERVAL,
    NO_VALUE,
    counted,
    interval_text,
    interval_words,
    number,
    render,
)

FALLBACK_NAMES = {
    "kernels": "Triton's kernels",
    "graphs": "CUDA graphs",
    "sums": "sums over ranks by symmetric memory",
}
MAX_PRINTED_DIFFERENCES = 10
# Error codes of rows that are too long, each with the key that decides how long a row may be.
TOO_LONG = {"prompt_too_long": "model.max_model_len", "kv_space": "execution.kv_tokens"}


def run_table(summary: dict[str, Any]) -> str:
    """Return one line per group, a total, and notes on speed, drafts, checks and errors of a run."""
    header = [
        summary["by"] or "",
        "rows",
        "errors",
        "tokens",
        "tau",
        "nodes/step",
        "tokens/s of a row",
    ]
    total = summary["total"]
    lines = {f"turn {turn}": counts for turn, counts in summary.get("turns", {}).items()}
    lines |= {name or "(none)": counts for name, counts in summary["groups"].items()}
    lines["all"] = total
    table = render(header, [_run_line(name, counts) for name, counts in lines.items()])

    work = summary["last_work"]
    notes = [
        _work(work),
        *cost_lines(summary.get("cost"), summary.get("estimate")),
        *bounds_lines(summary.get("bounds")),
        promise_line(summary.get("bounds")),
        spend_line(summary.get("spend")),
        _steps(work),
        _planner_errors(work),
        draft_warning_line(work),
        *_fallbacks(work),
        _depths(total),
        _calibration(total),
        choices_line(summary.get("choices")),
        documents_line(summary.get("documents")),
        _baseline(summary.get("baseline_rows")),
        _verification(summary.get("verify_rows")),
        _tally("finished by", "finish_reasons", summary),
        _tally("errors", "error_codes", summary),
        _too_long(total["error_codes"]),
    ]
    return "\n".join([table, "", *filter(None, notes)])


def difference_line(row: dict[str, Any]) -> str:
    """Return one line about a row with an output that differs from plain decoding."""
    return (
        f"id {row['request_id']} sample {row['sample_index']} differs from plain decoding at output token "
        f"{row['position']}: {row['token']}; plain decoding gives {row['plain_token']} ({rounding_words(row)})"
    )


def rounding_words(row: dict[str, Any]) -> str:
    """Return words on whether rounding explains a row's difference from plain decoding, and how."""
    if not row["near_tie"]:
        return "not explained by rounding"
    return "edge of top-k, top-p or min-p" if row.get("cause") == "cut" else "near-tie"


def side_by_side_table(numbers: dict[str, Any]) -> str:
    """Return a table of two runs over equal inputs: one line per group, a total, and the first output differences."""
    header = [
        numbers["by"] or "",
        "rows A",
        "rows B",
        "tau A",
        "tau B",
        "tokens/s A",
        "tokens/s B",
        "B / A",
        INTERVAL,
    ]
    pairs = {name or "(none)": pair for name, pair in numbers["groups"].items()}
    pairs["all"] = numbers["total"]
    table = render(header, [_pair_line(name, pair) for name, pair in pairs.items()])

    identical = number(numbers["identical"])
    both = number(numbers["rows"]["both"])
    lines = [table, ""]
    lines.append(f"{identical} of the {both} rows that both have are token for token the same")

    differing = numbers["differing"]
    lines += [_difference(difference) for difference in differing[:MAX_PRINTED_DIFFERENCES]]
    num_more = len(differing) - MAX_PRINTED_DIFFERENCES
    if num_more > 0:
        lines.append(f"  and {number(num_more)} more")
    return "\n".join(lines)


def _pair_line(name: str, pair: dict[str, Any]) -> list[str]:
    a = pair["a"]
    b = pair["b"]
    speed_up = pair["speed_up"]
    return [
        name,
        number(a["rows"]),
        number(b["rows"]),
        number(a["mean_acceptance_length"], 2),
        number(b["mean_acceptance_length"], 2),
        number(a["decode_tokens_per_s"]),
        number(b["decode_tokens_per_s"]),
        f"{speed_up:.2f}x" if speed_up else NO_VALUE,
        interval_text(pair) if speed_up else NO_VALUE,
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
    steps = engine["num_steps"]
    reused = engine["num_reused_tokens"]
    num_prompt_tokens = engine["num_prefill_tokens"] + reused
    parts = [
        f"{number(steps)} steps of {engine['num_verify_rows'] / steps:.1f} verified rows",
        _off(engine["num_plain_steps"] / steps, engine["num_probes"]),
        f"{number(reused)} of {number(num_prompt_tokens)} prompt tokens reused",
    ]
    if engine["num_preemptions"]:
        parts.append(f"{engine['num_preemptions']} pre-emptions")
    return f"engine: {', '.join(parts)}"


def _planner_errors(work: dict[str, Any] | None) -> str:
    """Return the workers that drafted nothing more because their planner failed, with the first reason."""
    errors = (work or {}).get("planner_errors", {})
    if not errors:
        return ""
    first_reason = next(iter(errors.values()))
    return f"no drafts after the planner failed in {', '.join(errors)}: {first_reason}"


def draft_warning_line(work: dict[str, Any] | None) -> str:
    """Return the first worker's warning about the head."""
    warnings = (work or {}).get("draft_warnings", {})
    if not warnings:
        return ""
    others = len(warnings) - 1
    more = f" (so do {counted(others, 'other worker')})" if others else ""
    return f"WARNING: {next(iter(warnings.values()))}{more}"


def _fallbacks(work: dict[str, Any] | None) -> list[str]:
    """Return how many workers ran without a part of the fast path on a CUDA device, with the first reason of each."""
    by_worker = (work or {}).get("fallbacks", {}).values()
    lines = []
    for part, name in FALLBACK_NAMES.items():
        reasons = [each[part] for each in by_worker if part in each]
        if reasons:
            lines.append(
                f"WARNING: slower, without {name} in {len(reasons)} workers: {reasons[0]} (see `eagle-ray doctor`)"
            )
    return lines


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
    differing = verified["differing"]
    if differing:
        num_cuts = sum(row.get("cause") == "cut" for row in differing)
        num_ties = sum(row["near_tie"] for row in differing) - num_cuts
        others = f"; of the others {num_ties} part at a near-tie, {num_cuts} at the edge of top-k, top-p or min-p"
    identical = number(verified["identical"])
    return f"verified: {identical} of {number(verified['rows'])} rows are plain decoding's{others}"


def _depths(counts: dict[str, Any]) -> str:
    """Return the share of steps that accepted a draft token at each depth."""
    steps = counts["steps"]
    if not counts["accepted_by_depth"] or not steps:
        return ""
    shares = [f"{accepted / steps:.0%}" for accepted in counts["accepted_by_depth"]]
    if set(shares) == {"0%"}:
        return ""
    return f"steps that accepted depth 1, 2, ...: {' '.join(shares)}"


def _calibration(counts: dict[str, Any]) -> str:
    """Return the expected calibration errors of the drafted and of the calibrated probabilities."""
    drafted = counts["ece_drafted"]
    calibrated = counts["ece_calibrated"]
    if drafted is None:
        return ""
    return f"calibration error: {drafted:.3f} as drafted, {calibrated:.3f} calibrated"


def _tally(title: str, name: str, summary: dict[str, Any]) -> str:
    counts = summary["total"][name]
    if not counts:
        return ""
    parts = [f"{key} {count:,}" for key, count in counts.items()]
    return f"{title}: {', '.join(parts)}"


def _too_long(error_codes: Mapping[str, int]) -> str:
    """Return how many rows did not fit, and the keys that change it; empty if all did."""
    counts = {code: error_codes.get(code, 0) for code in TOO_LONG}
    if not any(counts.values()):
        return ""
    keys = " or ".join(key for code, key in TOO_LONG.items() if counts[code])
    return f"too long: {sum(counts.values()):,} rows do not fit. Raise {keys}, and run with --retry-errors."
