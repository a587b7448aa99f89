"""Measure a pair's step costs on this machine and show them as tables with bars: ``eagle-ray bench cost``.

verify: a pass of the target, by rows
   rows        ms   x first
      1     38.20      1.00  ###########
      8     41.07      1.08  ############
"""

from __future__ import annotations

import torch

from eagle_ray.assembly.assemble import build_engine_from_config
from eagle_ray.assembly.costs import cost_key
from eagle_ray.assembly.engine_sizes import EngineArgs
from eagle_ray.config import JobConfig
from eagle_ray.core.errors import ConfigError
from eagle_ray.engine.calibrate import calibrate_costs
from eagle_ray.planner.cost_cache import cache_path, keep_costs
from eagle_ray.planner.cost_model import CostCurve, StepCosts

BAR = 48  # characters of the longest
TITLES = {
    "verify": "verify: a pass of the target, by rows",
    "catch_up": "catch up: the draft head's first pass of a step, with level 1, by tokens",
    "expand": "expand: one further level of drafts, by rows",
    "plain_overhead": "overhead of a step without drafts, by sequences",
    "draft_overhead": "overhead of a step with drafts, by sequences",
}


def bench_costs(config: JobConfig, threads: int | None) -> str:
    """Measure a job's pair, keep the costs for runs with as many CPU threads (None: torch's default), and show them.

    Raises ConfigError as build_engine_from_config does, and for a job without drafts.
    """
    if threads is not None:
        torch.set_num_threads(threads)
    speculative = config.speculative.model_copy(update={"budget": "uniform"})
    if speculative.method == "none":
        raise ConfigError("speculative.method: none drafts nothing, so there are no costs to compare; leave it out")
    pair = build_engine_from_config(
        config.model, speculative, EngineArgs(config.execution.slots, kv_tokens=config.execution.kv_tokens)
    )
    costs = calibrate_costs(pair.engine)
    parts = cost_key(pair.engine, speculative)
    keep_costs(parts, costs)
    return f"{costs_text(costs)}\n\nkept in {cache_path(parts)}"


def costs_text(costs: StepCosts) -> str:
    """Return every curve as the planner uses it, monotone."""
    parts = [f"{title}\n{_bars(getattr(costs, name))}" for name, title in TITLES.items()]
    context = (
        f"context: {costs.attention_per_token * 1e6:.3f} us more for each cached token, and "
        f"{costs.attention_per_row * 1e6:.3f} us with each row of its sequence beyond the first"
    )
    each = f"sequences: {costs.per_sequence * 1e6:.1f} us more for each of them"
    return "\n\n".join([*parts, f"{each}\n{context}"])


def _bars(curve: CostCurve) -> str:
    seconds = [curve(rows) for rows in curve.rows]
    lines = [f"{'rows':>8}{'ms':>10}{'x first':>10}"]
    for rows, s in zip(curve.rows, seconds, strict=True):
        bar = "#" * max(round(BAR * s / seconds[-1]), 1)
        lines.append(f"{rows:>8}{s * 1e3:>10.2f}{s / seconds[0]:>10.2f}  {bar}")
    return "\n".join(lines)
