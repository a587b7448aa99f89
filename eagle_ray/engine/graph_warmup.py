"""Capture graphs before the first request instead of while serving.

    capture(engine, max_nodes=60, max_depth=6, top_k=10)       # a planner that may choose any plan within these bounds
    capture_fixed(engine)                                      # a planner with one plan

Captured for greedy and for sampled sequences, largest batch first: a plain step; passes of every bucket of rows up
to the largest measured one; drafts of every width and depth, each with one of those passes. Short prompts come
first, then longer contexts. Whatever is not reached within CAPTURE_S, and whatever needs top-p, top-k, min-p or
log-probabilities, is captured at its first use.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator

from eagle_ray.engine.calibrate import (
    SHORT_OUTPUT,
    SHORT_PROMPT,
    CalibrationRun,
    CalibrationSetting,
    ProxyPlanner,
    ScriptedPlanner,
    calibration_mode,
    max_rows,
    scripted_planner,
)
from eagle_ray.engine.engine import Engine
from eagle_ray.planner.budget_planner import WIDTHS
from eagle_ray.planner.cost_model import BUCKETS

log = logging.getLogger("eagle_ray")

CAPTURE_S = 60.0  # seconds of a start-up that may go into recording
LOG_EVERY_S = 5.0  # seconds between two lines of progress
TEMPERATURES = 0.0, 1.0

SettingsOf = Callable[[int], Iterable[CalibrationSetting]]
"""Yields the settings worth recording for a maximum batch size."""


def capture(engine: Engine, max_nodes: int, max_depth: int, top_k: int) -> None:
    """Capture the steps of an engine with graphs. The engine is left idle and its counters unchanged."""
    _record(engine, scripted_planner(engine, top_k), lambda most: _trees(most, max_nodes, max_depth, top_k))


def capture_fixed(engine: Engine) -> None:
    """Capture the steps of an engine with a fixed planner: plain decoding, uniform or static."""
    _record(
        engine, ProxyPlanner(engine.planner), lambda most: (CalibrationSetting(n, 1, 0, 0) for n in _batch_sizes(most))
    )


def _record(engine: Engine, planner: ScriptedPlanner, settings_of: SettingsOf) -> None:
    graphs, started = engine.graphs, time.monotonic()
    told = started
    with calibration_mode(engine, planner) as bench:
        steps = list(_steps(engine, bench, settings_of))
        for i, (length, temperature, setting) in enumerate(steps):
            now = time.monotonic()
            if not graphs.is_enabled or now - started > CAPTURE_S:
                log.info("recording ahead ends after %d of %d steps", i, len(steps))
                break
            if now - told > LOG_EVERY_S:
                log.info("recording ahead: %d of %d steps, %s", i, len(steps), graphs.summary)
                told = now
            if i and (length, temperature) != steps[i - 1][:2]:
                bench.clear()
            bench.temperature = temperature
            bench.run_step(setting, length)
    log.info("recorded ahead in %.1f s: %s", time.monotonic() - started, graphs.summary)


def _steps(
    engine: Engine, bench: CalibrationRun, settings_of: SettingsOf
) -> Iterator[tuple[int, float, CalibrationSetting]]:
    """Yield prompt length, temperature and setting: all with short prompts, then with longer contexts."""
    lengths = [SHORT_PROMPT, *(bound + 1 for bound in engine.graphs.contexts[:-1])]
    for length in lengths:
        if length > SHORT_PROMPT and length + SHORT_OUTPUT > engine.max_model_len:
            break
        for temperature in TEMPERATURES:
            for setting in settings_of(bench.max_concurrent(length)):
                yield length, temperature, setting


def _trees(most: int, max_nodes: int, max_depth: int, top_k: int) -> Iterator[CalibrationSetting]:
    """Yield trees for at most `most` sequences."""
    limit, widths = max_rows(most, max_nodes), (*(w for w in WIDTHS if w < top_k), top_k)
    drafts = [(w, d) for w in widths for d in range(min(w, 2), max_depth + 1)]  # one level is of one node's children
    for batch_size in _batch_sizes(most):
        num_rows = min(batch_size * (1 + max_nodes), limit)
        rows = [n for n in BUCKETS if batch_size <= n <= num_rows] or [batch_size * 2]
        yield CalibrationSetting(batch_size, 1, 0, 0)
        for n in rows:
            yield _tree(batch_size, n, top_k, max_depth)
        for i, draft in enumerate(reversed(drafts)):
            yield _tree(batch_size, rows[i % len(rows)], *draft)


def _batch_sizes(most: int) -> list[int]:
    """Return one batch size per bucket, the largest first."""
    return [most, *(n for n in reversed(BUCKETS) if n < most)]


def _tree(batch_size: int, num_rows: int, width: int, depth: int) -> CalibrationSetting:
    return CalibrationSetting(batch_size, max(num_rows // batch_size, 1), width, depth, num_rows)
