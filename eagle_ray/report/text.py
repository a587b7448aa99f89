"""Plain text of tables and numbers, for terminals, files and job logs.

>>> print(render(["task", "rows"], [["code", "4"], ["math", "12"]]))
task  rows
code     4
math    12
"""

from __future__ import annotations

from typing import Any

NO_VALUE = "-"
TOO_FEW = "too few rows"
INTERVAL = "95 % interval"
GIB = 1 << 30


def render(header: list[str], rows: list[list[str]]) -> str:
    """Return a table with two spaces between columns. The first column is left-aligned, the others right-aligned."""
    lines = [header, *rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
    return "\n".join(_line(line, widths) for line in lines)


def number(value: float | None, digits: int = 0) -> str:
    """Format a number with thousands separators, or return NO_VALUE for None."""
    return NO_VALUE if value is None else f"{value:,.{digits}f}"


def counted(number: float, noun: str) -> str:
    """Return text such as 1 core, 2 cores, 0.5 cores."""
    plural = "" if number == 1 else "s"
    return f"{number:g} {noun}{plural}"


def gib(num_bytes: float) -> str:
    """Format bytes as GiB, such as "12.3 GiB", or as MiB below one GiB."""
    if num_bytes >= GIB:
        return f"{num_bytes / GIB:,.1f} GiB"
    return f"{num_bytes / (1 << 20):,.0f} MiB"


def interval_text(speeds: dict[str, Any]) -> str:
    """Return the interval of a speed-up as [low, high], or TOO_FEW if it has none."""
    interval = speeds.get("speed_up_interval")
    if interval is None:
        return TOO_FEW
    low, high = interval
    return f"[{low:.2f}, {high:.2f}]"


def interval_words(measured: dict[str, Any]) -> str:
    """Return the interval, or its absence, as the end of a sentence."""
    text = interval_text(measured)
    if text == TOO_FEW:
        return f"{text} for an interval"
    return f"{INTERVAL} {text}"


def _line(cells: list[str], widths: list[int]) -> str:
    (first, first_width), *others = zip(cells, widths, strict=True)
    parts = [first.ljust(first_width)]
    parts += [cell.rjust(width) for cell, width in others]
    return "  ".join(parts).rstrip()
