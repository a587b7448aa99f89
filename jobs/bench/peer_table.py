"""The readable table of a comparison, from the rows of its JSON file."""

from __future__ import annotations

from typing import Any

Row = dict[str, Any]


def table(rows: list[Row], dtype: str) -> str:
    """Return tokens/s by engine and batch size, what eagle_ray's defaults are times the best peers, and failures."""
    rows = [row for row in rows if row["dtype"] == dtype]
    batches = sorted({row["batch"] for row in rows})
    labels = list(dict.fromkeys(f"{row['engine']} {row['mode']}" for row in rows))
    cells = {(f"{row['engine']} {row['mode']}", row["batch"]): row for row in rows}

    lines = [_line(f"{dtype}, tokens/s (same outputs)", [f"batch {batch}" for batch in batches])]
    lines.append("|---|" + "---|" * len(batches))
    lines += [_line(label, [_cell(cells.get((label, batch))) for batch in batches]) for label in labels]
    plain = [best_rate(rows, batch, "plain") for batch in batches]
    chains = [best_rate(rows, batch, "chain") for batch in batches]
    ours = [_rate(cells.get(("eagle_ray default", batch))) for batch in batches]
    ours_plain = [_rate(cells.get(("eagle_ray plain", batch))) for batch in batches]
    lines.append(_line("eagle_ray plain / best plain peer", list(map(_ratio, ours_plain, plain))))
    lines.append(_line("eagle_ray default / best plain peer", list(map(_ratio, ours, plain))))
    lines.append(_line("eagle_ray default / best vLLM chain", list(map(_ratio, ours, chains))))
    return "\n".join(lines + _reasons(rows))


def best_rate(rows: list[Row], batch: int, mode: str) -> float | None:
    """Return the highest tokens/s of a peer in modes that start with ``mode``; None if there is none."""
    peers = [row for row in rows if row["batch"] == batch and row["engine"] != "eagle_ray"]
    rates = [row["tokens_per_s"] for row in peers if row["mode"].startswith(mode)]
    return max((rate for rate in rates if rate is not None), default=None)


def _rate(row: Row | None) -> float | None:
    return None if row is None else row["tokens_per_s"]


def _cell(row: Row | None) -> str:
    if row is None or row["tokens_per_s"] is None:
        return "-"
    same = "" if row["same"] is None else f" ({row['same']}/{row['of']})"
    return f"{row['tokens_per_s']:.1f}{same}"


def _ratio(ours: float | None, theirs: float | None) -> str:
    return "-" if ours is None or theirs is None else f"{ours / theirs:.2f}"


def _line(label: str, cells: list[str]) -> str:
    return f"| {label:40s} | " + " | ".join(f"{cell:>16s}" for cell in cells) + " |"


def _reasons(rows: list[Row]) -> list[str]:
    reasons = {f"{row['engine']} {row['mode']}": row["reason"] for row in rows if "reason" in row}
    return [f"{label}: {reason}" for label, reason in reasons.items()]
