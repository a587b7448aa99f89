"""Planners of drafts, and the step costs that they plan with: measured once, then read from the cost cache."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from eagle_ray.assembly.acceptance import keep_acceptance, watch_head
from eagle_ray.assembly.pair_key import pair_key
from eagle_ray.attention.backend import backend_name
from eagle_ray.config import ModelConfig, SpeculativeConfig
from eagle_ray.core.errors import RankError
from eagle_ray.core.start_log import StartLog
from eagle_ray.engine.calibrate import BUDGET_S, calibrate_costs, measured_sizes, warm_up
from eagle_ray.engine.engine import Engine
from eagle_ray.engine.graph_warmup import capture, capture_fixed
from eagle_ray.methods.drafter import Drafter
from eagle_ray.methods.method import plans_alone
from eagle_ray.models.runtime import cpu_name
from eagle_ray.planner.budget_planner import BudgetPlanner
from eagle_ray.planner.cost_cache import cache_path, cached_costs
from eagle_ray.planner.cost_model import StepCosts
from eagle_ray.planner.planner import DraftKind, Planner, UniformPlanner

log = logging.getLogger("eagle_ray")

RECORDING = "recording steps as CUDA graphs"


def plan_drafts(
    engine: Engine,
    speculative: SpeculativeConfig,
    start: StartLog,
    model: ModelConfig | None = None,
) -> None:
    """Capture the engine's graphs on a GPU, and set the planner of speculative.budget unless the method has its own.

    Args:
        model: configuration of the pair, by which an acceptance record is found; None uses no
            record.
    """
    method = speculative.merged_methods
    is_fixed = plans_alone(method)
    if engine.graphs is not None and engine.target.device.type == "cuda":
        with start.part("recorded", RECORDING):
            if method == "none":
                capture_fixed(engine)
            elif speculative.budget == "global" and not is_fixed:
                capture(engine)
            else:
                with _plain_if_planner_fails(engine):
                    capture_fixed(engine)
    if method != "none" and not is_fixed:
        with _plain_if_planner_fails(engine):
            engine.planner = planner_for(engine, speculative, start)
            if model is not None:
                keep_acceptance(engine, model, speculative)


@contextmanager
def _plain_if_planner_fails(engine: Engine) -> Iterator[None]:
    """Let the engine decode plainly if its planner cannot be made. A failed step or a lost rank is raised."""
    try:
        yield
    except RankError:
        raise
    except Exception as error:
        if not engine.is_intact:
            raise
        engine.drop_planner(error)


def take_first_steps(engine: Engine, model: ModelConfig, speculative: SpeculativeConfig) -> None:
    """Run an idle engine's first steps, so that one-time work is done before requests. Drafts are
    counted from then on."""
    warm_up(engine)
    watch_head(engine, model, speculative)


def planner_for(engine: Engine, speculative: SpeculativeConfig, start: StartLog) -> Planner:
    """Return the planner of speculative.budget."""
    if speculative.budget == "uniform":
        return UniformPlanner(engine.bounds)
    costs = _costs_of(engine, speculative, start)
    graphs = engine.graphs
    can_sync = engine.target.device.type == "cpu" and graphs is None
    sizes = graphs.pass_sizes(engine.bounds) if graphs else None
    drafter = engine.drafter
    lookup_hits = engine.lookup_hits if drafter.has_lookups else None
    return BudgetPlanner(engine.bounds, costs, can_sync, sizes, kinds_of(drafter), lookup_hits)


def kinds_of(drafter: Drafter) -> list[DraftKind]:
    """Return the kinds of drafts that a drafter can make: by a model, by lookups, or both."""
    kinds = [DraftKind.MODEL] if drafter.has_model or not drafter.has_lookups else []
    return [*kinds, DraftKind.LOOKUPS] if drafter.has_lookups else kinds


def _costs_of(engine: Engine, speculative: SpeculativeConfig, start: StartLog) -> StepCosts:
    """Return the costs that an earlier start stored, or measure them."""
    parts = cost_key(engine, speculative)
    seconds = BUDGET_S[engine.target.device.type]

    def measured() -> StepCosts:
        line = f"measuring the cost of steps: for up to {seconds:.0f} s, kept in {cache_path(parts)} for later starts"
        with start.part("measured", line):
            return calibrate_costs(engine)

    return cached_costs(parts, measured)


def cost_key(engine: Engine, speculative: SpeculativeConfig) -> dict[str, object]:
    """Return the key of the cost cache: everything that this engine's step costs depend on, by name."""
    target = engine.target
    key = pair_key(engine, speculative) | {
        "dtype": str(target.dtype),
        "device": torch.cuda.get_device_name() if target.device.type == "cuda" else cpu_name(),
        "kernels": backend_name(target.cache),
        "threads": torch.get_num_threads(),
        "team": engine.uses_team,
        "torch": torch.__version__,
        "slots": target.cache.num_slots,
        # Not the KV tokens, which differ with a card's free memory.
        "measured": measured_sizes(engine),
    }
    key |= {} if engine.graphs is None else {"graphs": True}
    return key | ({"kv_dtype": str(target.cache.keys.dtype)} if target.cache.is_rounded else {})
