"""Report of a GPU benchmark as Markdown tables, an HTML page of plots, and a section for jobs/results/gpu.md.

    section(json.loads(Path("results.json").read_text()))

Its input is the JSON of `jobs/bench/gpu`, which may be incomplete.
"""

from __future__ import annotations

import math
from html import escape
from importlib.resources import files
from typing import Any

from eagle_ray.report.figures import Axis, Plot

Found = dict[str, Any]
ACCEPTANCE = "acceptance is the embedded toy pair's own, costs are the shape's"
CELL_COLUMNS = ("shape", "context", "batch", "way", "tree", "tokens/s", "over plain", "95 %", "at least", "predicted")
CELL_COLUMNS += ("tau", "rows", "step ms", "draft", "verify", "rest", "host", "same")


def section(found: Found) -> str:
    """Return the dated Markdown section: setup, failed checks, tables, and failed or skipped measurements."""
    about, failed = found["about"], [c for c in found["checks"] if c["ok"] is False]
    title = "the same code on a CPU (smoke: says nothing of a GPU)" if about.get("smoke") else "on a GPU"
    lines = [f"## {about.get('date')} · {title}", "", _label(about), ""]
    lines += [f"Checks: {sum(c['ok'] is True for c in found['checks'])} passed, {len(failed)} FAILED"]
    lines += [f"- **{c['name']}**: {c['detail']}" for c in failed]
    lines += ["", markdown_tables(found)]
    for name, items in (("Failed", found["failed"]), ("Skipped", found["skipped"])):
        lines += [f"{name}: " + ("; ".join(items) if items else "nothing") + "."]
    return "\n".join(lines) + "\n"


def markdown(found: Found) -> str:
    """Return a Markdown document with a table of all checks, then the section."""
    said = {True: "ok", False: "**FAILED**", None: "not asked"}
    rows = [[c["name"], said[c["ok"]], c["detail"]] for c in found["checks"]]
    return "# Results\n\n" + table(("check", "", "what was seen"), rows) + "\n" + section(found)


def markdown_tables(found: Found) -> str:
    parts = [_shapes(found), _cells(found), _drains(found), _synthetic(found), _peers(found)]
    return "\n".join(part for part in parts if part)


def table(columns: tuple[str, ...], rows: list[list[Any]]) -> str:
    lines = [columns, ("---",) * len(columns), *rows]
    return "".join("| " + " | ".join(str(cell) for cell in line) + " |\n" for line in lines)


def _label(about: Found) -> str:
    label = f"{about.get('device')}, {about.get('dtype')}, torch {about.get('torch')}, triton {about.get('triton')}, "
    label += f"transformers {about.get('transformers')}, Python {about.get('python')}, commit {about.get('commit')}; "
    label += f"`{about.get('command')}`, {about.get('rounds')} interleaved rounds of {about.get('window_s')} s, decode "
    label += f"steps alone, {about.get('minutes', 'not yet all')} minutes in all. Widened pairs: {ACCEPTANCE}."
    if "copy_gb_s" in about:
        label += f" Copy bandwidth {about['copy_gb_s']:.0f} GB/s, read and written."
    return label


def _shapes(found: Found) -> str:
    columns = ("shape", "weights a pass reads", "made in", "kernels", "graphs", "captured in", "their memory", "peak")
    rows = [
        [
            name,
            f"{s['pass_weights']:.3g}",
            f"{s['made_s']:.1f} s",
            "Triton" if s["kernels"] else "portable",
            s.get("num_graphs", "") if s["graphs"] else "none",
            f"{s.get('graphs_s', 0):.1f} s",
            f"{s.get('graphs_gib', 0):.2f} GiB",
            f"{s.get('peak_gib', math.nan):.1f} GiB",
        ]
        for name, s in found["shapes"].items()
    ]
    apart = [
        f"By themselves, {name}, {where}: " + ", ".join(f"{part} {ms:.3f} ms" for part, ms in parts.items()) + ".\n"
        for name, s in found["shapes"].items()
        for where, parts in s.get("parts_ms", {}).items()
    ]
    return (table(columns, rows) + "\n" + "".join(apart)) if rows else ""


def _cells(found: Found) -> str:
    rows = [_cell(cell) for cell in found["cells"]]
    lines = [
        f"Plain decoding, {c['shape']}, batch {c['batch']}, context {c['context']}: {c['roofline']:.0%} of the "
        f"roofline ({c['step_bytes'] / 1e9:.2f} GB a step).\n"
        for c in found["cells"]
        if "roofline" in c
    ]
    return (table(CELL_COLUMNS, rows) + "\n" + "".join(lines)) if rows else ""


def _cell(cell: Found) -> list[str]:
    ratio, same = cell["over_plain"], cell["identity"]
    ties = f" ({same['num_near_ties']} ties)" if same["num_near_ties"] else ""
    parts = [f"{cell['parts_ms'][part]:.2f}" for part in ("draft", "verify", "rest", "host")]
    return [
        *(cell[key] for key in ("shape", "context", "batch", "way", "tree")),
        f"{cell['tokens_per_second']:.1f}",
        *_ratio(ratio),
        _times(cell["predicted_ratio"]),
        f"{cell['tau']:.2f}",
        f"{cell['rows_per_pass']:.1f}",
        f"{cell['step_ms']:.2f}",
        *parts,
        f"{same['num_equal']}/{same['num_compared']}{ties}",
    ]


def _drains(found: Found) -> str:
    columns = ("job", "way", "seconds", "tokens/s", "over plain", "predicted", "tau", "same")
    rows = [
        [
            f"{d['shape']}, {d['rows']} rows, {d['batch']} slots, context {d['context']}",
            d["way"],
            f"{d['seconds']:.1f}",
            f"{d['tokens_per_second']:.1f}",
            _times(d["over_plain"]),
            _times(d["predicted_ratio"]),
            f"{d['tau']:.2f}",
            f"{d['identity']['num_equal']}/{d['identity']['num_compared']}",
        ]
        for d in found["drains"]
    ]
    return table(columns, rows) if rows else ""


def _synthetic(found: Found) -> str:
    columns = (
        "random weights, stated acceptance",
        "batch",
        "tokens/s",
        "over plain",
        "95 %",
        "at least",
        "predicted",
        "tau",
    )
    rows = [
        [
            f"{s['shape']}: {', '.join(map(str, s['acceptance']))}" + ("" if s["right"] else " **WRONG TOKENS**"),
            s["batch"],
            f"{s['tokens_per_second']:.1f}",
            *_ratio(s["over_plain"]),
            _times(s["predicted_ratio"]),
            f"{s['tau']:.2f}",
        ]
        for s in found["synthetic"]
    ]
    return table(columns, rows) if rows else ""


def _peers(found: Found) -> str:
    rows = [
        [p["peer"], p["shape"], p["batch"], p.get("failed") or f"{p['tokens_per_second']:.1f}"] for p in found["peers"]
    ]
    return table(("transformers' own", "shape", "batch", "tokens/s, prompts and all"), rows) if rows else ""


def _ratio(ratio: Found) -> list[str]:
    if not math.isfinite(ratio["high"]):
        return [_times(ratio["mean"]), "-", "-"]
    return [_times(ratio["mean"]), f"[{ratio['low']:.3f}, {ratio['high']:.3f}]", f"{ratio['bound']:.3f}x"]


def _times(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.3f}x"


def page(found: Found) -> str:
    """Return a self-contained HTML page with speed over batch size, for each shape and context and synthetic pair."""
    about = found["about"]
    figures = [_over_batches(found, shape, context) for shape, context in _groups(found)]
    figures += [_break_even(found, shape) for shape in dict.fromkeys(s["shape"] for s in found["synthetic"])]
    body = f"<h1>Decoding on {escape(str(about.get('device')))}</h1><p class='soft'>{escape(_label(about))}</p>"
    shown = "".join(figures) or "<p>Nothing was measured yet.</p>"
    style = files("eagle_ray.report").joinpath("templates", "style.css").read_text("utf-8")
    head = f"<meta charset='utf-8'><title>GPU benchmark</title><style>{style}</style>"
    main = f"<main>{body}<div class='pair'>{shown}</div></main>"
    return f"<!doctype html><html lang='en'><head>{head}</head><body>{main}</body></html>"


def _groups(found: Found) -> list[tuple[str, int]]:
    return list(dict.fromkeys((c["shape"], c["context"]) for c in found["cells"] if c["way"] == "ours"))


def _over_batches(found: Found, shape: str, context: int) -> str:
    here = [c for c in found["cells"] if (c["shape"], c["context"]) == (shape, context)]
    series = {
        way: sorted((math.log2(c["batch"]), c["over_plain"]["mean"]) for c in here if c["way"] == way)
        for way in ("ours", "fixed", "eagle2")
    }
    predicted = sorted(
        (math.log2(c["batch"]), c["predicted_ratio"]) for c in here if c["way"] == "ours" and c["predicted_ratio"]
    )
    plot = _plot([y for points in (*series.values(), predicted) for _, y in points], here)
    marks = [plot.level(1), plot.line(predicted, "even") if predicted else "", plot.line(series["ours"])]
    marks += [
        plot.dots((x, y, 3) for x, y in series["ours"]),
        plot.dots(((x, y, 4) for x, y in series["fixed"]), "two"),
    ]
    marks += [plot.notes((x, y, "E2") for x, y in series["eagle2"])]
    said = (
        f"{shape}, context {context:,}: ours (line), what costs and acceptance foresee of it (dashes), the best fixed "
    )
    said += "tree (rings) and EAGLE-2's published tree (E2), over plain decoding"
    return _figure(plot, marks, said)


def _break_even(found: Found, shape: str) -> str:
    here = [s for s in found["synthetic"] if s["shape"] == shape]
    by_acceptance: dict[float, list[tuple[float, float]]] = {}
    for s in here:
        by_acceptance.setdefault(s["acceptance"][0], []).append((math.log2(s["batch"]), s["over_plain"]["mean"]))
    plot = _plot([s["over_plain"]["mean"] for s in here], here)
    marks = [plot.level(1)]
    for chance, points in sorted(by_acceptance.items()):
        points.sort()
        marks += [plot.line(points), plot.notes([(*points[0], f"{chance:g}")])]
    return _figure(
        plot, marks, f"{shape}, random weights: ours over plain decoding by the stated chance of the first child"
    )


def _plot(ratios: list[float], cells: list[Found]) -> Plot:
    exponents = sorted({math.log2(c["batch"]) for c in cells})
    x = Axis(exponents[0] - 0.4, exponents[-1] + 0.4, "sequences", exponents, lambda e: f"{2**e:g}")
    return Plot(x, Axis.over(0, max([*ratios, 1.0]), "times plain decoding"))


def _figure(plot: Plot, marks: list[str], said: str) -> str:
    return f"<figure>{plot.svg(said, marks)}<figcaption>{escape(said)}</figcaption></figure>"
