"""What a machine's steps cost, kept between runs: one small JSON file per pair, device, dtype and number of threads.

    ~/.cache/eagle_ray/costs/1f0c...json        (EAGLE_RAY_CACHE names another place for ~/.cache/eagle_ray)

A file that cannot be read or written is as good as none: the costs are measured again.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from eagle_ray.cache_directory import cache_home
from eagle_ray.planner.cost_model import CostCurve, StepCosts

log = logging.getLogger("eagle_ray")
VERSION = 7  # of the files; costs of another version are measured again
CURVES = ("verify", "catch_up", "expand", "plain_overhead", "draft_overhead")
NUMBERS = ("attention_per_token", "attention_per_row", "per_sequence")


def cached_costs(parts: dict[str, object], measure: Callable[[], StepCosts]) -> StepCosts:
    """Return the costs kept for exactly these parts, or measure and keep them."""
    costs = _read(cache_path(parts))
    if costs is None:
        costs = measure()
        keep_costs(parts, costs)
    return costs


def cache_path(parts: dict[str, object]) -> Path:
    """parts: whatever the costs depend on, by name."""
    text = json.dumps(parts | {"version": VERSION}, sort_keys=True, default=str)
    return cache_home() / "costs" / f"{hashlib.sha256(text.encode()).hexdigest()[:16]}.json"


def costs_json(costs: StepCosts) -> dict[str, object]:
    """Curves as lists of rows and seconds."""
    curves = {name: getattr(costs, name) for name in CURVES}
    numbers = {name: getattr(costs, name) for name in NUMBERS}
    return {name: {"rows": c.rows, "seconds": c.seconds} for name, c in curves.items()} | numbers


def costs_of(kept: dict[str, Any]) -> StepCosts:
    """Back from costs_json. Raises KeyError, TypeError or ValueError for anything else."""
    parts: dict[str, Any] = {name: float(kept[name]) for name in NUMBERS}
    for name in CURVES:
        parts[name] = CostCurve(list(kept[name]["rows"]), list(kept[name]["seconds"]))
    return StepCosts(**parts)


def _read(path: Path) -> StepCosts | None:
    try:
        return costs_of(json.loads(path.read_text("utf-8"))["costs"])
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        log.warning("the costs kept in %s cannot be read (%s): measuring again", path, error)
        return None


def keep_costs(parts: dict[str, object], costs: StepCosts) -> None:
    """Keep the costs for later calls with these parts. Written atomically, so several workers may do it at once."""
    path = cache_path(parts)
    mine = path.with_suffix(f".{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        mine.write_text(json.dumps({"of": parts, "costs": costs_json(costs)}, default=str, indent=1), "utf-8")
        os.replace(mine, path)
    except OSError as error:
        log.warning("the costs cannot be kept in %s (%s): the next start measures again", path, error)
