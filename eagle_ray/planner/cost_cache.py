"""Cache the measured step costs of a machine: one JSON file per pair, device, dtype and number of threads.

    ~/.cache/eagle_ray/costs/1f0c...json        (EAGLE_RAY_CACHE names another place for ~/.cache/eagle_ray)

If a file cannot be read or written, the costs are measured again.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

from eagle_ray.core.json_text import dump_json
from eagle_ray.planner.cost_model import CostCurve, StepCosts
from eagle_ray.storage.cache_directory import cached_file, locked
from eagle_ray.storage.local import write_atomic

log = logging.getLogger("eagle_ray")
COSTS_VERSION = 9  # the files' format; costs of another version are measured again
CURVES = ("verify", "catch_up", "expand", "plain_overhead", "draft_overhead")
LOCK_LIMIT_S = 120.0  # longer than any measurement takes
NUMBERS = ("attention_per_token", "attention_per_row", "per_sequence")
# Exceptions of reading a file.
COST_FILE_DAMAGES = (
    ValueError,
    KeyError,
    TypeError,
    AttributeError,
    OverflowError,
    RecursionError,
)

used_files: set[Path] = set()  # files of costs that this process has read or measured


def cached_costs(parts: dict[str, object], measure: Callable[[], StepCosts]) -> StepCosts:
    """Return the stored costs for exactly this key, or measure and store them.

    Processes of one machine that start together measure once: the others wait for the first one.
    """
    path = cache_path(parts)
    costs = _read(path)
    if costs is None:
        with _measuring(path):
            costs = _read(path)
            if costs is None:
                costs = measure()
                keep_costs(parts, costs)
    used_files.add(path)
    return costs


def latest_costs(fits: Callable[[Mapping[str, Any]], bool]) -> StepCosts | None:
    """Return the costs that this machine has stored last, among those whose key fits; None if there are none.

    Args:
        fits: returns whether the key of a file is wanted.
    """
    folder = cache_path({}).parent
    files = sorted(folder.glob("*.json"), key=lambda path: path.stat().st_mtime, reverse=True)
    for path in files:
        try:
            stored = json.loads(path.read_text("utf-8"))
            if fits(stored["of"]) and cache_path(stored["of"]) == path:
                return costs_of(stored["costs"])
        except (OSError, *COST_FILE_DAMAGES) as error:
            log.debug("%s: %s", path, error)
    return None


def used_costs() -> list[Path]:
    """Return the cost files that this process has read or written."""
    return sorted(path for path in used_files if path.is_file())


def adopt_costs(name: str, data: bytes) -> None:
    """Store another machine's cost file of this name, unless this machine has one.

    Raises ValueError if it is damaged or its content belongs to another name.
    """
    try:
        stored = json.loads(data)
        parts = stored["of"]
        costs = costs_of(stored["costs"])
        path = cache_path(parts)
    except COST_FILE_DAMAGES as error:
        raise ValueError(f"it holds no costs of steps ({type(error).__name__}: {error})") from None
    if path.name != name:
        raise ValueError("it holds costs of other parts or of another version")
    if not path.exists():
        keep_costs(parts, costs)


@contextmanager
def _measuring(path: Path) -> Iterator[None]:
    """Let one process of this machine measure at a time. Where nothing can be kept, each measures on its own."""
    with ExitStack() as stack:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            waiting = (
                "waiting for another process of this machine, which measures the cost of steps"
            )
            stack.enter_context(locked(path.with_suffix(".lock"), waiting, LOCK_LIMIT_S))
        except OSError as error:
            log.debug("%s: %s", path, error)
        yield


def cache_path(parts: dict[str, object]) -> Path:
    """Return the path of the cost file for a key, given as named parts."""
    # With keys as a file has them, which adopt_costs compares.
    as_read = json.loads(dump_json(parts, default=str))
    return cached_file("costs", as_read | {"version": COSTS_VERSION}, ".json")


def costs_json(costs: StepCosts) -> dict[str, object]:
    """Return the cost curves as JSON: lists of rows and seconds."""
    curves = {name: getattr(costs, name) for name in CURVES}
    numbers = {name: getattr(costs, name) for name in NUMBERS}
    return {name: {"rows": c.rows, "seconds": c.seconds} for name, c in curves.items()} | numbers


def costs_of(stored: dict[str, Any]) -> StepCosts:
    """Parse the cost curves that `costs_json` wrote. Raises an error of COST_FILE_DAMAGES for other content."""
    parts: dict[str, Any] = {name: float(stored[name]) for name in NUMBERS}
    if not all(map(math.isfinite, parts.values())):
        raise ValueError("a cost is no number of seconds")
    for name in CURVES:
        parts[name] = _curve_of(stored[name])
    return StepCosts(**parts)


def _curve_of(stored: dict[str, Any]) -> CostCurve:
    rows = [int(number) for number in stored["rows"]]
    seconds = [float(number) for number in stored["seconds"]]
    is_whole = len(rows) == len(seconds) > 0 and all(a < b for a, b in pairwise(rows))
    if not is_whole or not all(math.isfinite(number) and number >= 0 for number in seconds):
        raise ValueError("a curve is not one of rising rows and their seconds")
    return CostCurve(rows, seconds)


def _read(path: Path) -> StepCosts | None:
    try:
        return costs_of(json.loads(path.read_text("utf-8"))["costs"])
    except FileNotFoundError:
        return None
    except (OSError, *COST_FILE_DAMAGES) as error:
        log.warning("the costs kept in %s cannot be read (%s): measuring again", path, error)
        return None


def keep_costs(parts: dict[str, object], costs: StepCosts) -> None:
    """Store the costs of a key. The write is atomic, so several workers may do it at once."""
    path = cache_path(parts)
    text = dump_json({"of": parts, "costs": costs_json(costs)}, default=str, indent=1)
    try:
        write_atomic(str(path), text.encode())
    except OSError as error:
        log.warning(
            "the costs cannot be kept in %s (%s): the next start measures again", path, error
        )
