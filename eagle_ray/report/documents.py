"""Summarise rows that are scored as whole documents: bits per byte and perplexity.

    summary = documents_summary(read)
    summary["bits_per_byte"], summary["perplexity"]      # 0.93, 14.2

Both are over all documents together, so long ones count more. Bits per byte compare targets with
different tokenizers; perplexity is per token.
"""

from __future__ import annotations

import math
from typing import Any

import pyarrow.compute as pc

from eagle_ray.report.histogram import histogram
from eagle_ray.report.summary import ReadColumns
from eagle_ray.report.text import counted

READ_DOCUMENT_COLUMNS = ["loglikelihood", "tokens", "bytes", "bits_per_byte"]


def documents_summary(read: ReadColumns) -> dict[str, Any] | None:
    """Return the summary of scored documents: rows, tokens, bytes and bits per byte; None if there are none."""
    rows: list[dict[str, Any]] = []
    for table in read(READ_DOCUMENT_COLUMNS):
        rows += table.filter(pc.is_valid(table["loglikelihood"])).to_pylist()
    if not rows:
        return None
    total = math.fsum(row["loglikelihood"] for row in rows)
    num_tokens = sum(row["tokens"] for row in rows)
    sizes = [row["bytes"] for row in rows]
    num_bytes = None if None in sizes else sum(sizes)
    each = [row["bits_per_byte"] for row in rows if row["bits_per_byte"] is not None]
    return {
        "rows": len(rows),
        "tokens": num_tokens,
        "bytes": num_bytes,
        "perplexity": math.exp(-total / num_tokens) if num_tokens else None,
        "bits_per_byte": -total / (num_bytes * math.log(2)) if num_bytes else None,
        "by_document": histogram(each),
    }


def documents_line(summary: dict[str, Any] | None) -> str:
    """Return one line about the scored documents of a run; empty without any."""
    if not summary:
        return ""
    parts = [counted(summary["rows"], "row"), counted(summary["tokens"], "token")]
    if summary["bits_per_byte"] is not None:
        parts.append(f"{summary['bits_per_byte']:.3f} bits per byte")
    if summary["perplexity"] is not None:
        parts.append(f"perplexity {summary['perplexity']:.4g}")
    return f"documents: {', '.join(parts)}"
