"""HTML report of a training run: one self-contained file without scripts.

html = training_page(read_json(run / "training.json"))
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

from eagle_ray.report.style import STYLE
from eagle_ray.report.svg import Axis, Plot, percent, plain
from eagle_ray.report.text import number

WIDE = 720  # width of a plot in SVG units
MAX_POINTS = 240  # of a curve; more steps are averaged
KINDS = ("one", "two", "even")  # CSS classes of curves in one plot
Point = tuple[float, float]


def training_page(record: dict[str, Any]) -> str:
    """Return the whole HTML file."""
    title = f"{escape(record['name'])} · eagle_ray"
    sections = [_head(record), _facts(record), _loss(record), _agreement(record), _held_out(record), _usage(record)]
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>{title}</title>\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<style>\n{STYLE}\n</style>\n</head>\n<body>\n<main>\n{chr(10).join(filter(None, sections))}\n</main>\n"
        "</body>\n</html>\n"
    )


def curve(steps: Sequence[Sequence[Any]], name: str) -> list[Point]:
    """Return a mean of every step, averaged in at most MAX_POINTS groups of steps."""
    points = [(float(step), means[name]) for step, means, _ in steps if name in means]
    size = -(-len(points) // MAX_POINTS) or 1
    groups = [points[start : start + size] for start in range(0, len(points), size)]
    return [(sum(x for x, _ in group) / len(group), sum(y for _, y in group) / len(group)) for group in groups]


def _head(record: dict[str, Any]) -> str:
    config = record["config"]
    parts = [config["head"]["method"], config["model"]["target"]]
    return f'<h1>{escape(record["name"])}</h1>\n<p class="soft">{" · ".join(map(escape, parts))}</p>'


def _facts(record: dict[str, Any]) -> str:
    held_out = record["curves"].get("held_out", [])
    tau = held_out[-1][1]["tau"] if held_out else None
    facts = [
        ("steps", number(record["num_steps"])),
        ("documents", number(record["num_documents"])),
        ("tokens", number(record["num_tokens"])),
        ("parameters", number(record["num_parameters"])),
        ("draft vocabulary", number(record["draft_vocab_size"])),
        ("held-out tau", number(tau, 2)),
    ]
    cells = "".join(f"<div><dt>{name}</dt><dd>{value}</dd></div>" for name, value in facts)
    return f'<dl class="facts">{cells}</dl>'


def _loss(record: dict[str, Any]) -> str:
    points = curve(record["curves"].get("steps", []), "loss")
    return _section("Loss", _plot(record, [points], "loss", plain), "Mean of each step over its answer tokens.")


def _agreement(record: dict[str, Any]) -> str:
    steps = record["curves"].get("steps", [])
    names = [name for name in (steps[0][1] if steps else ()) if name.startswith("agreement")]
    shown = [name for name in (names[:1] + names[-1:] if len(names) > 1 else names)]
    figure = _plot(record, [curve(steps, name) for name in shown], "agreement", percent, high=1.0)
    depths = " and ".join(name.removeprefix("agreement_") for name in shown)
    words = f"Share of positions where the head's best token is the one that the target prefers, at depth {depths}."
    return _section("Agreement", figure, words)


def _held_out(record: dict[str, Any]) -> str:
    results = record["curves"].get("held_out", [])
    points = [(float(step), result["tau"]) for step, result in results if result["tau"] is not None]
    if not points:
        return ""
    tree = record["config"]["evaluation"]
    words = (
        f"Tokens per pass of the target on {tree['prompts']} held-out prompts, greedy, measured by the engine with "
        f"{tree['max_nodes']} nodes, {tree['max_depth']} levels, top-{tree['top_k']}. 1 is plain decoding."
    )
    figure = _plot(record, [points], "tau", plain, low=1.0)
    rows = "".join(
        f'<tr><td class="left">{step:,.0f}</td><td>{result["tau"]:.2f}</td>'
        f"<td>{' '.join(f'{share:.2f}' for share in result['accepted_by_depth'])}</td></tr>"
        for step, result in results
        if result["tau"] is not None
    )
    head = '<tr><th class="left">step</th><th>tau</th><th>accepted by depth</th></tr>'
    table = f'<div class="scroll"><table><thead>{head}</thead><tbody>{rows}</tbody></table></div>'
    return _section("Held-out tau", figure + table, words)


def _usage(record: dict[str, Any]) -> str:
    return _section("Use", f"<pre><code>{escape(record['usage'])}</code></pre>")


def _plot(
    record: dict[str, Any], curves: Sequence[list[Point]], title: str, show: Any, low: float = 0.0, high: float = 0.0
) -> str:
    values = [y for points in curves for _, y in points]
    if not values:
        return ""
    axis = Axis.over(min(low, *values), max(high, *values), title, show)
    plot = Plot(Axis.over(0, record["num_steps"], "step", finest=1), axis, width=WIDE)
    marks = [plot.line(points, kind) for points, kind in zip(curves, KINDS, strict=False)]
    dots = [plot.dots([(x, y, 3.0) for x, y in points], kind) for points, kind in zip(curves, KINDS, strict=False)]
    few = [mark for mark, points in zip(dots, curves, strict=True) if len(points) < 20]
    return f"<figure>{plot.svg(f'{title} over steps', marks + few)}</figure>"


def _section(title: str, body: str, words: str = "") -> str:
    if not body:
        return ""
    paragraph = f'\n<p class="soft">{words}</p>' if words else ""
    return f"<section>\n<h2>{escape(title)}</h2>{paragraph}\n{body}\n</section>"
