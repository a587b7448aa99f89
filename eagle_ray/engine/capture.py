"""Recording ahead: the steps that are likely to come up, before the first request rather than in the middle of it.

    capture(engine, max_nodes=60, max_depth=6, top_k=10)

For greedy and for sampled sequences, the most at once first: a plain step; the passes of every bucket of rows up to the
largest that is measured; drafts of every width and depth, each with one of those passes. All behind short prompts. What
is not reached within CAPTURE_S, longer contexts, and what asks for top-p, top-k, min-p or log-probabilities are
recorded when they first come up. Does not know costs.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator

from eagle_ray.engine.costs import BUCKETS
from eagle_ray.engine.engine import Engine
from eagle_ray.engine.global_planner import WIDTHS
from eagle_ray.engine.measure import Setting, at_bench, most_rows_of

log = logging.getLogger("eagle_ray")

CAPTURE_S = 60.0  # seconds of a start-up that may go into recording
TELL_S = 5.0  # seconds between two lines of progress
TEMPERATURES = 0.0, 1.0


def capture(engine: Engine, max_nodes: int, max_depth: int, top_k: int) -> None:
    """Leaves an idle engine idle and uncounted. Without graphs, or once they do not work, there is nothing to do."""
    graphs, started = engine.graphs, time.monotonic()
    told = started
    with at_bench(engine, top_k) as bench:
        settings = list(_settings(bench.num_slots, max_nodes, max_depth, top_k))
        steps = [(temperature, setting) for temperature in TEMPERATURES for setting in settings]
        for i, (temperature, setting) in enumerate(steps):
            now = time.monotonic()
            if not graphs.works or now - started > CAPTURE_S:
                log.info("recording ahead ends after %d of %d steps", i, len(steps))
                break
            if now - told > TELL_S:
                log.info("recording ahead: %d of %d steps, %s", i, len(steps), graphs.summary)
                told = now
            if temperature != bench.temperature:
                bench.clear()
                bench.temperature = temperature
            bench.take(setting)
    log.info("recorded ahead in %.1f s: %s", time.monotonic() - started, graphs.summary)


def _settings(num_slots: int, max_nodes: int, max_depth: int, top_k: int) -> Iterator[Setting]:
    """Batches of every size, the largest first."""
    limit, widths = most_rows_of(num_slots, max_nodes), (*(w for w in WIDTHS if w < top_k), top_k)
    drafts = [(w, d) for w in widths for d in range(min(w, 2), max_depth + 1)]  # one level is of one node's children
    for batch_size in [num_slots, *(n for n in reversed(BUCKETS) if n < num_slots)]:
        most = min(batch_size * (1 + max_nodes), limit)
        rows = [n for n in BUCKETS if batch_size <= n <= most] or [batch_size * 2]
        yield Setting(batch_size, 1, 0, 0)
        if not max_nodes:
            continue
        for n in rows:
            yield _tree(batch_size, n, top_k, max_depth)
        for i, draft in enumerate(reversed(drafts)):
            yield _tree(batch_size, rows[i % len(rows)], *draft)


def _tree(batch_size: int, num_rows: int, width: int, depth: int) -> Setting:
    return Setting(batch_size, max(num_rows // batch_size, 1), width, depth, num_rows)
