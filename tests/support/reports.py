"""Rows, run records and summaries that reports are made of."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from eagle_ray.config import load_config
from eagle_ray.report.summary import ReadColumns, RunStats, summary_json
from eagle_ray.requests.row_schema import output_schema, table_of
from eagle_ray.runs.part_files import read_tables
from eagle_ray.storage.path import StoragePath

SCHEMA = output_schema([pa.field("category", pa.string())])


def row(
    request_id: str, category: str | None, steps: int, accepted: int, decode_s: float = 1.0
) -> dict:
    """A greedy answer of 1 + steps + accepted tokens over drafts of one token."""
    return {
        "request_id": request_id,
        "sample_index": 0,
        "row_index": 0,
        "source_file": "a",
        "run_id": "r",
        "attempt": 1,
        "category": category,
        "status": "ok",
        "finish_reason": "length",
        "prompt_tokens": 4,
        "output_token_ids": list(range(1 + steps + accepted)),
        "completion_tokens": 1 + steps + accepted,
        "num_spec_steps": steps,
        "num_draft_tokens": 3 * steps,
        "num_accepted_draft_tokens": accepted,
        "acceptance_histogram": [steps - accepted, accepted],
        "proposed_by_depth": [3 * steps],
        "accepted_by_depth": [accepted],
        "decode_s": decode_s,
        "prefill_s": 0.1,
    }


def error(request_id: str, category: str | None) -> dict:
    kept = (
        "request_id",
        "sample_index",
        "row_index",
        "source_file",
        "run_id",
        "attempt",
        "category",
    )
    blank = {name: value for name, value in row(request_id, category, 1, 0).items() if name in kept}
    return blank | {"status": "error", "error_code": "prompt_too_long", "error_message": "too long"}


def reader(output: Path) -> ReadColumns:
    return partial(read_tables, StoragePath.of(output) / "data")


def write(output: Path, *files: list[dict]) -> Path:
    (output / "data").mkdir(parents=True)
    for i, rows in enumerate(files):
        pq.write_table(table_of(rows, SCHEMA), output / "data" / f"part-001-{i:06d}.parquet")
    return output


def group(**changes: Any) -> RunStats:
    """100 rows of 10 steps each: two tokens drafted in a step, one of them accepted in every second step."""
    counts = {
        "rows": 100,
        "prompt_tokens": 900,
        "output_tokens": 1600,
        "steps": 1000,
        "decode_s": 30.0,
    }
    drafts = {"draft_tokens": 2000, "accepted_draft_tokens": 500, "accepted_by_depth": [400, 100]}
    bins = {
        "confidence_nodes": [900, 600],
        "confidence_accepted": [50, 450],
        "confidence_expected": [90.0, 420.0],
    }
    calibrated = {name.replace("confidence", "calibrated"): value for name, value in bins.items()}
    return RunStats(**counts | drafts | bins | calibrated | changes)


def record(**changes: Any) -> dict[str, Any]:
    config = load_config(
        None, env={}, overrides={"input.path": "a.jsonl", "output.path": "b", "name": "<weekend>"}
    )
    attempt = {"attempt": 1, "started_at": "2026-11-21T12:00:00+00:00", "outcome": "done"}
    versions = {"python": "3.11", "ray": "2.60.0"}
    return {
        "name": config.name,
        "config": config.model_dump(),
        "attempts": [attempt],
        "versions": versions,
    } | changes


def summary(by: str | None = "category", **changes: Any) -> dict[str, Any]:
    groups = (
        {"code": group(), "chat & co": group(accepted_draft_tokens=100)} if by else {"": group()}
    )
    last_work = {"tokens_per_s": 1234.4, "busy_slots": 0.934}
    facts = {"run_id": "r1", "attempt": 1, "config_hash": "c0ffee", "last_work": last_work}
    return facts | summary_json(groups, by) | changes


TIMELINE = {
    "bin_s": 5,
    "num_bins": 3,
    "attempts": [
        {"attempt": n, "started_at": "2026-11-21T12:00:00", "offset_s": 7.5 * (n - 1)}
        for n in (1, 2)
    ],
    "workers": {
        f"host:{n}": {
            "rows": 4,
            "output_tokens": 77,
            "mean_tokens_per_s": 8.2,
            "mean_busy_slots": 3.25,
            "tokens_per_s": [10.0, 20.0, 5.0],
            "busy_slots": [1.0, 4.0, 2.5],
        }
        for n in (1, 2)
    },
}
COUNTS = {"low": -2.0, "width": 0.1, "counts": [1, 0, 3] * 6 + [2, 2]}
HISTORY = [
    [1.0, 0, 2, 0.0, None, None, 300.0, 96],
    [60.0, 20, 2, 0.1, 290.0, 330.0, 300.0, 96],
    [240.0, 96, 3, 0.4, 240.0, 240.0, 300.0, 96],
]
SECTIONS = {
    "Promised and happened": {
        "bounds": {
            "finish_by": "2026-11-30T06:00:00+00:00",
            "finished_at": "2026-11-30T05:59:00+00:00",
            "max_dollars": 1.0,
            "dollars": 0.4,
            "history": HISTORY,
            "promises": [{"at": 0.25, "error_s": 50.0, "relative": 0.2083}],
        }
    },
    "Continuations": {
        "choices": {
            "rows": 28,
            "label_mass": 0.91,
            "answered": 20,
            "accuracy": 0.75,
            "accuracy_by_byte": None,
            "calibration": {"rows": [0, 5, 15], "confidence": [0, 0.5, 0.9], "right": [0, 2, 13]},
            "best_scores": COUNTS,
            "margins": COUNTS,
        }
    },
    "Documents": {
        "documents": {
            "rows": 3,
            "tokens": 1234,
            "bytes": 4000,
            "perplexity": 14.25,
            "bits_per_byte": 0.93,
            "by_document": COUNTS,
        }
    },
    "Over time": {"timeline": TIMELINE},
    "Budget of a step": {"budget": {"budget": [1, 9], "steps": [10, 30], "accepted": [0, 60]}},
    "Against plain decoding": {
        "baseline_rows": {
            "asked": 50,
            "rows": 48,
            "slots": 16,
            "output_tokens": 999,
            "tokens_per_s": 300.0,
            "plain_tokens_per_s": 120.0,
            "speed_up": 2.5,
        }
    },
    "Verified": {
        "verify_rows": {
            "rows": 20,
            "identical": 19,
            "differing": [
                {
                    "request_id": "q<7>",
                    "sample_index": 1,
                    "position": 17,
                    "token": 5,
                    "plain_token": None,
                    "gap": 1e-5,
                    "near_tie": True,
                }
            ],
        }
    },
}
