"""``_STOPPED.json``: why a run stopped at a bound with rows left, and the command that continues it.

    {"reason": "max_dollars", "rows_left": 5210, "spent": 39.6, "dollars_left": 21.3, "command": "eagle-ray run ..."}

The next attempt deletes it. An output with this file has no ``_SUCCESS``, so readers of finished
runs skip it.
"""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Any

from eagle_ray.batch.driver.claim import Claim
from eagle_ray.batch.driver.run_bounds import DEADLINE
from eagle_ray.config.records import ProgressRecord
from eagle_ray.report.cost import money
from eagle_ray.runs.job_errors import BoundReached
from eagle_ray.runs.layout import PROGRESS, STOPPED_FILE, read_derived_record
from eagle_ray.runs.run import now_text
from eagle_ray.storage.path import json_bytes

# Words of a command line after which no value is recorded: on_finish may hold secrets.
SECRET_SECTION = "on_finish"
CLI_NAME = "eagle-ray"


def check_not_stopped(claimed: Claim, reason: str) -> None:
    """Write ``_STOPPED.json`` and raise BoundReached, unless all rows are complete despite the bound.

    Args:
        reason: key of `execution` whose bound stopped the run.
    """
    rows_left = claimed.count().num_missing
    if not rows_left:
        return
    run = claimed.run
    bounds = claimed.start.bounds
    progress = read_derived_record(run.output / PROGRESS, ProgressRecord) or {}
    forecast = progress.get("forecast") or {}
    record = {
        "run_id": run.run_id,
        "attempt": run.attempt,
        "stopped_at": now_text(),
        "reason": reason,
        "finish_by": bounds.finish_by and bounds.finish_by.isoformat(timespec="seconds"),
        "max_dollars": bounds.max_dollars,
        "rows_left": rows_left,
        "spent": forecast.get("spent"),
        "dollars_left": _dollars_left(forecast),
        "seconds_left": progress.get("seconds_left"),
        "command": command_of(sys.argv),
    }
    run.publish(STOPPED_FILE, json_bytes(record))
    raise BoundReached(_words(record))


def command_of(arguments: list[str]) -> str | None:
    """Return this process's command line for a user to repeat; None if it is not eagle-ray's, or
    may contain a secret."""
    program, *words = arguments
    if Path(program).name != CLI_NAME or any(SECRET_SECTION in word for word in words):
        return None
    return shlex.join([CLI_NAME, *words])


def _dollars_left(forecast: dict[str, Any]) -> float | None:
    """Return the expected price of the rows that are left."""
    if forecast.get("dollars") is None or forecast.get("spent") is None:
        return None
    return max(0.0, forecast["dollars"] - forecast["spent"])


def _words(record: dict[str, Any]) -> str:
    if record["reason"] == DEADLINE:
        bound = f"execution.finish_by ({record['finish_by']})"
        todo = "with a later one, or none"
    else:
        bound = f"execution.max_dollars ({money(record['max_dollars'])})"
        todo = "with more, or without it"
    price = record["dollars_left"]
    rest = "" if price is None else f", about {money(price)} more"
    return (
        f"{bound} is reached with {record['rows_left']} rows left{rest}. Run the same command again {todo}, "
        "and it goes on"
    )
