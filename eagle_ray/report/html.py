"""HTML report of a run: one self-contained file without scripts.

The numbers come from ``_summary.json``, the settings from ``_run.json``.

    html = page(read_json(run / "_summary.json"), read_json(run / "_run.json"))
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from html import escape
from typing import Any

from eagle_ray.report import figures
from eagle_ray.report.cost import duration, money
from eagle_ray.report.scores import score_table
from eagle_ray.report.style import STYLE
from eagle_ray.report.svg import percent, sparkline
from eagle_ray.report.text import ABSENT, INTERVAL, interval_text, interval_words, number, rounding_words
from eagle_ray.report.timeline import OTHERS

Counts = dict[str, Any]
Cells = Sequence[str]
RUNNING = "not ended: still running, or killed"
MOST_DIFFERENCES = 50


def page(summary: dict[str, Any], record: dict[str, Any]) -> str:
    """Return the whole HTML file. It omits sections without numbers. summary may have `scores`, too."""
    title = f"{escape(record['name'])} · eagle_ray"
    sections = [
        _head(summary, record),
        _facts(summary),
        _categories(summary),
        _scores(summary),
        _drafts(summary),
        _budget(summary),
        _over_time(summary, record),
        _cost(summary),
        _measured(summary),
        _compared(summary),
        _verified(summary),
        _errors(summary["total"]),
        _attempts(record),
        _foot(summary, record),
    ]
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>{title}</title>\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<style>\n{STYLE}\n</style>\n</head>\n<body>\n<main>\n{chr(10).join(filter(None, sections))}\n</main>\n"
        "</body>\n</html>\n"
    )


def _head(summary: dict[str, Any], record: dict[str, Any]) -> str:
    config = record["config"]
    draft = config["model"]["draft"]
    drafts = draft if isinstance(draft, list) else [draft]
    models = [config["model"]["target"], *drafts, config["speculative"]["method"]]
    outcome = record["attempts"][-1].get("outcome", RUNNING)
    state = escape(outcome) if outcome in ("done", RUNNING) else f'<span class="bad">{escape(outcome)}</span>'
    return (
        f"<h1>{escape(record['name'])}</h1>\n"
        f'<p class="soft">{" · ".join(escape(name) for name in models if name)} · run <code>{summary["run_id"]}</code>'
        f" · {state}</p>"
    )


def _facts(summary: dict[str, Any]) -> str:
    total, work = summary["total"], summary.get("last_work") or {}
    busy = work.get("busy_slots")
    facts = [
        ("rows", number(total["rows"]), ""),
        ("error rows", number(total["errors"]), ""),
        ("output tokens", number(total["output_tokens"]), ""),
        ("tau, tokens per target pass", number(total["mean_acceptance_length"], 2), ""),
        ("speed, all workers", number(work.get("tokens_per_s")), "tokens/s"),
        ("slots busy", ABSENT if busy is None else f"{100 * busy:.0f}", "" if busy is None else "%"),
    ]
    cells = (
        f"<div><dt>{name}</dt><dd>{value}{f' <small>{unit}</small>' if unit else ''}</dd></div>"
        for name, value, unit in facts
    )
    return f'<dl class="facts">{"".join(cells)}</dl>'


def _categories(summary: dict[str, Any]) -> str:
    """Return one line per group with its tau as a bar, and a total."""
    groups = summary["groups"]
    if not groups:
        return ""
    longest = max(counts["mean_acceptance_length"] or 0 for counts in groups.values())
    rows = [_category(name or "(none)", counts, longest) for name, counts in groups.items()]
    header = [summary["by"], "rows", "errors", "tokens", "nodes/step", "tokens/s of a row", "tau", ""]
    table = _table(header, rows, left=(0, 7), total=_category("all", summary["total"], longest))
    return _section(f"By {summary['by']}", table, "tau counts tokens per pass of the target: 1 is plain decoding.")


def _category(name: str, counts: Counts, longest: float) -> list[str]:
    tau = counts["mean_acceptance_length"]
    bar = f'<div class="bar-cell"><i style="width: {170 * tau / longest:.0f}px"></i></div>' if tau else ""
    return [
        escape(name),
        number(counts["rows"]),
        number(counts["errors"]),
        number(counts["output_tokens"]),
        number(counts["nodes_per_step"], 1),
        number(counts["decode_tokens_per_s"]),
        number(tau, 2),
        bar,
    ]


def _scores(summary: dict[str, Any]) -> str:
    """Return the section on the scores that `eagle-ray report` was asked for."""
    scores = summary.get("scores")
    if not scores:
        return ""
    table = score_table(scores)
    cells = [[escape(cell) for cell in line] for line in [*table.groups, table.total]]
    note = escape(table.note[0].upper() + table.note[1:])
    return _section("Scores", _table(table.header, cells[:-1], total=cells[-1]), f"{note}.")


def _drafts(summary: dict[str, Any]) -> str:
    total = summary["total"]
    depth, calibration = figures.acceptance_by_depth(total), figures.calibration(total)
    if depth is None and calibration is None:
        return ""
    pair = [
        _figure(depth, f"Of {number(total['steps'])} decode steps, those that kept a draft token at this depth."),
        _figure(calibration, _calibration_words(total)),
    ]
    return _section("Drafts", f'<div class="pair">{"".join(pair)}</div>')


def _calibration_words(total: Counts) -> str:
    if total["ece_drafted"] is None:
        return ""
    return (
        f'<span class="key two"></span>as the head said: off by {100 * total["ece_drafted"]:.1f} points on average; '
        f'<span class="key one"></span>as calibrated: {100 * total["ece_calibrated"]:.1f}. On the dashed line what is '
        "said is what happens; a dot's area is how many there were."
    )


def _budget(summary: dict[str, Any]) -> str:
    budget = summary.get("budget")
    if not budget:
        return ""
    pair = [
        _figure(figures.steps_by_budget(budget), "One row is a plain step: nothing was drafted."),
        _figure(figures.tau_by_budget(budget), "What such a step yielded; a dot's area is how many there were."),
    ]
    return _section("Budget of a step", f'<div class="pair">{"".join(pair)}</div>')


def _over_time(summary: dict[str, Any], record: dict[str, Any]) -> str:
    timeline = summary.get("timeline")
    if not timeline:
        return ""
    slots = _slots(timeline, record["config"]["execution"]["slots"])
    cut = " Dashed uprights: a new attempt; the time between attempts is left out."
    words = f"In stretches of {timeline['bin_s']:g} s.{cut if len(timeline['attempts']) > 1 else ''}"
    parts = [
        _figure(figures.speed(timeline), words),
        _figure(figures.busy_slots(timeline, slots), f"Slots that held a row; each worker has {slots}."),
        _workers(timeline, slots),
    ]
    return _section("Over time", "\n".join(parts))


def _slots(timeline: dict[str, Any], setting: int | str) -> int:
    """Return the slots of a worker, or the most that one was seen to use if they were set by its GPU."""
    if setting != "auto":
        return int(setting)
    return max(1, *(math.ceil(busy) for worker in timeline["workers"].values() for busy in worker["busy_slots"]))


def _workers(timeline: dict[str, Any], slots: int) -> str:
    workers = timeline["workers"]
    fastest = max(max(worker["tokens_per_s"]) for name, worker in workers.items() if name != OTHERS)
    speeds, busy = f"tokens/s, 0 to {number(fastest)}", f"busy slots, 0 to {slots}"
    header = ["worker", "rows", "tokens", speeds, "mean", busy, "mean"]
    rows = [
        [
            f"<code>{escape(name)}</code>",
            number(worker["rows"]),
            number(worker["output_tokens"]),
            sparkline(worker["tokens_per_s"], fastest),
            number(worker["mean_tokens_per_s"]),
            sparkline(worker["busy_slots"], slots),
            number(worker["mean_busy_slots"], 1),
        ]
        for name, worker in workers.items()
    ]
    return f"<h3>Per worker</h3>{_table(header, rows, left=(0, 3, 5))}"


def _cost(summary: dict[str, Any]) -> str:
    """Return the section on time and, if there is a price, dollars, with the estimate made before the run."""
    spent, estimate = summary.get("cost"), summary.get("estimate")
    if not spent or (spent["dollars"] is None and not estimate):
        return ""
    rows = [["time, loading and all attempts", duration(spent["elapsed_s"]), "", ""]]
    if spent["dollars"] is not None:
        rows.append(["dollars", money(spent["dollars"]), "", ""])
    if estimate:
        rows[0][2:] = _estimated(estimate["seconds"], duration)
    if estimate and len(rows) > 1:
        rows[1][2:] = _estimated(estimate["dollars"], money)
    words = f"{number(spent['rows_per_s'], 2)} rows/s and {number(spent['tokens_per_s'])} tokens/s."
    if spent["dollars"] is not None:
        words += (
            f" {number(spent['rows_per_dollar'])} rows and {number(spent['tokens_per_dollar'])} tokens per dollar: "
            f"{spent['hours']:.3g} {spent['unit']} hours at {money(spent['price_per_hour'])}."
        )
    return _section("Time and cost", _table(["", "taken", "estimated", INTERVAL], rows), words)


def _estimated(values: list[float] | None, show: Callable[[float], str]) -> list[str]:
    """Return the cells of an estimate and its interval; it has no dollars if there was no price then."""
    if values is None:
        return [ABSENT, ABSENT]
    expected, low, high = values
    return [show(expected), f"{show(low)} to {show(high)}"]


def _measured(summary: dict[str, Any]) -> str:
    """Return the section on report.baseline_rows: rows decoded in one worker with and without drafts."""
    speeds = summary.get("baseline_rows")
    if not speeds or not speeds["rows"]:
        return ""
    header = ["", "tokens/s"]
    rows = [["with drafts", number(speeds["tokens_per_s"])], ["without", number(speeds["plain_tokens_per_s"])]]
    words = (
        f"{number(speeds['rows'])} rows of {number(speeds['output_tokens'])} tokens, decoded both ways by one worker "
        f"in {speeds['slots']} slots, in turns: <b>{number(speeds['speed_up'], 2)} times</b> as fast with drafts, "
        f"{interval_words(speeds)}."
    )
    return _section("Against plain decoding", _table(header, rows), words)


def _compared(summary: dict[str, Any]) -> str:
    """Return the section on a plain-decoding run over equal inputs, as the demo makes one."""
    baseline = summary.get("baseline")
    if not baseline:
        return ""
    groups = baseline["groups"] | {"all": baseline["total"]}
    rows = [_speed_up(name, speeds) for name, speeds in groups.items()]
    header = [summary["by"] or "", "rows", "tokens/s", "plain tokens/s", "speed-up", INTERVAL]
    words = (
        "Tokens per second of one row after its first token. "
        f"{number(baseline['identical'])} of {number(baseline['total']['rows'])} outputs are the same, token for token."
    )
    return _section("Against a run of plain decoding", _table(header, rows[:-1], total=rows[-1]), words)


def _speed_up(name: str, speeds: dict[str, Any]) -> list[str]:
    times = number(speeds["speed_up"], 2)
    return [
        escape(name),
        number(speeds["rows"]),
        number(speeds["decode_tokens_per_s"]),
        number(speeds["baseline_decode_tokens_per_s"]),
        times if times == ABSENT else f"{times}x",
        times if times == ABSENT else interval_text(speeds),
    ]


def _verified(summary: dict[str, Any]) -> str:
    """Return the section on report.verify_rows: stored outputs compared with plain decoding."""
    checked = summary.get("verify_rows")
    if not checked or not checked["rows"]:
        return ""
    differing = checked["differing"]
    same, rows = number(checked["identical"]), number(checked["rows"])
    words = f"{same} of {rows} stored outputs are plain decoding's, token for token."
    if not differing:
        return _section("Verified", "", words)
    header = ["row", "sample", "first differing token", "stored", "plain", "gap", "rounding"]
    words += " Gap: by how much plain decoding preferred its own token, in logits."
    return _section("Verified", _table(header, [_difference(d) for d in differing[:MOST_DIFFERENCES]]), words)


def _difference(difference: dict[str, Any]) -> list[str]:
    token, plain_token = difference["token"], difference["plain_token"]
    return [
        f"<code>{escape(difference['request_id'])}</code>",
        str(difference["sample_index"]),
        number(difference["position"]),
        "end" if token is None else str(token),
        "end" if plain_token is None else str(plain_token),
        ABSENT if difference["gap"] is None else f"{difference['gap']:.2g}",
        rounding_words(difference),
    ]


def _errors(total: Counts) -> str:
    if not total["error_codes"]:
        return ""
    codes = sorted(total["error_codes"].items(), key=lambda item: -item[1])
    shares = [percent(round(count / total["rows"], 4)) for _, count in codes]
    rows = [
        [f"<code>{escape(code)}</code>", number(count), share]
        for (code, count), share in zip(codes, shares, strict=True)
    ]
    return _section("Error rows", _table(["error_code", "rows", "of all rows"], rows))


def _attempts(record: dict[str, Any]) -> str:
    rows = [
        [
            str(attempt["attempt"]),
            _moment(attempt["started_at"]),
            _moment(attempt.get("finished_at", ABSENT)),
            escape(attempt.get("outcome", RUNNING)),
        ]
        for attempt in record["attempts"]
    ]
    return _section("Attempts", _table(["attempt", "started, UTC", "ended, UTC", "outcome"], rows, left=(0, 1, 2, 3)))


def _moment(text: str) -> str:
    """Format a timestamp of the record as 2026-11-21 12:00:00."""
    return escape(text.replace("T", " ").removesuffix("+00:00"))


def _foot(summary: dict[str, Any], record: dict[str, Any]) -> str:
    versions = ", ".join(f"{escape(name)} {escape(version)}" for name, version in record["versions"].items())
    return (
        "<footer>Numbers: <code>_summary.json</code>; settings and machine: <code>_run.json</code>. "
        f"Configuration {escape(summary['config_hash'])}. {versions}.</footer>"
    )


def _section(title: str, body: str, words: str = "") -> str:
    paragraph = f'\n<p class="soft">{words}</p>' if words else ""
    return f"<section>\n<h2>{escape(title)}</h2>{paragraph}\n{body}\n</section>"


def _figure(svg: str | None, words: str) -> str:
    return "" if svg is None else f"<figure>{svg}<figcaption>{words}</figcaption></figure>"


def _table(header: Sequence[str], rows: Sequence[Cells], left: Sequence[int] = (0,), total: Cells | None = None) -> str:
    """Return a table that shows each row as a block of labelled values on narrow screens.

    Args:
        header: column titles in plain text.
        rows: cells in HTML.
        left: indices of left-aligned columns; the others hold numbers.
        total: cells of a last line that sums up the others.
    """
    places = [' class="left"' if i in left else "" for i in range(len(header))]
    labels = [f' data-label="{escape(cell)}"' if cell else "" for cell in header]
    marks = [place + label for place, label in zip(places, labels, strict=True)]
    head = "".join(f"<th{place}>{escape(cell)}</th>" for place, cell in zip(places, header, strict=True))
    body = "".join(f"<tr>{_cells(marks, row)}</tr>" for row in rows)
    last = "" if total is None else f'<tr class="sum">{_cells(marks, total)}</tr>'
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}{last}</tbody></table></div>'


def _cells(marks: Cells, row: Cells) -> str:
    return "".join(f"<td{mark}>{cell}</td>" for mark, cell in zip(marks, row, strict=True))
