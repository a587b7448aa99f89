"""Predict a step of a worker whose slots are all in use, on any card whose step costs are known.

    step = steady_step(costs, bounds, FullBatch(64, num_cached=64 * 400), acceptance)
    step.seconds, step.tau                     # 0.0102, 1.8

It is the step that BudgetPlanner would run: plain, or with the width, depth and number of rows of
the best rate.
"""

from __future__ import annotations

from dataclasses import dataclass

from eagle_ray.core.tree_bounds import TreeBounds
from eagle_ray.models.graphs import PassSizes
from eagle_ray.planner.calibrated_acceptance import CalibratedAcceptance
from eagle_ray.planner.cost_model import StepCosts
from eagle_ray.planner.plan_search import PlanSearch


@dataclass(frozen=True, slots=True)
class FullBatch:
    """The batch of a worker whose slots are all in use: `size` sequences with `num_cached` cached tokens together."""

    size: int
    num_cached: int

    def __len__(self) -> int:
        return self.size


@dataclass(frozen=True, slots=True)
class SteadyStep:
    """The predicted step of a full batch.

    Attributes:
        seconds: seconds of the step without prompts.
        tau: tokens per sequence and step.
        prompt_token_s: seconds added per prompt token in the pass.
    """

    seconds: float
    tau: float
    prompt_token_s: float


def steady_step(
    costs: StepCosts,
    bounds: TreeBounds,
    batch: FullBatch,
    acceptance: CalibratedAcceptance | None,
) -> SteadyStep:
    """Return the step with the best rate.

    Args:
        acceptance: acceptance of drafts; None for plain decoding.
    """
    search = PlanSearch(bounds, costs, fine=False, sizes=PassSizes())
    plain = SteadyStep(
        search.plain_seconds(len(batch), batch.num_cached), 1.0, costs.verify.per_row
    )
    if acceptance is None:
        return plain
    best = search.best(batch, acceptance, num_prompt_tokens=0.0)
    if best.rate <= search.plain_rate(len(batch), batch.num_cached):
        return plain
    seconds = best.tau * len(batch) / best.rate
    return SteadyStep(seconds, best.tau, costs.verify.per_row + costs.catch_up.per_row)
