"""The best plan by cost, for drafts of one pass: dear rows make blocks and trees smaller, cheap ones larger."""

from dataclasses import dataclass, replace

import pytest
import torch

from eagle_ray.core.tree_bounds import TreeBounds
from eagle_ray.models.graphs import PassSizes
from eagle_ray.planner.acceptance_model import AcceptanceModel
from eagle_ray.planner.budget_planner import PLANNED_WIDTHS
from eagle_ray.planner.calibrated_acceptance import CalibratedAcceptance
from eagle_ray.planner.cost_model import CostCurve, StepCosts
from eagle_ray.planner.plan_search import PlanEstimate, PlanSearch
from eagle_ray.tree.expand import TreeBuilder
from jobs.bench.simulated_costs import flat

DEPTH, TOP_K, NODES = 15, 10, 60
BOUNDS = TreeBounds(NODES, DEPTH, TOP_K)


@dataclass
class Batch:
    """As much of a DecodeBatch as the search reads."""

    size: int
    num_cached: int = 0

    def __len__(self) -> int:
        return self.size


@pytest.fixture(scope="module")
def acceptance() -> CalibratedAcceptance:
    """Of a block head: a position's best token has probability 0.8, at the next one 0.78, ..., each
    further child a fifth of the one before.
    """
    builder = TreeBuilder(torch.zeros(4, dtype=torch.int64), TOP_K)
    for level in range(DEPTH):
        probs = (0.8 - 0.02 * level) * torch.tensor([0.2**rank for rank in range(TOP_K)])
        parents = builder.frontier().tokens.shape[1] if level else 1
        builder.grow(probs.log().expand(4, parents, -1), torch.arange(TOP_K).expand(4, parents, -1))
    model = AcceptanceModel(PLANNED_WIDTHS, DEPTH)
    model.observe(builder.levels, TOP_K)
    return CalibratedAcceptance(model)


def one_pass(costs: StepCosts) -> StepCosts:
    """The same target with a head of one pass: after it a level costs next to nothing, however wide."""
    return replace(costs, expand=CostCurve([1], [1e-5]))


def best(costs: StepCosts, acceptance: CalibratedAcceptance, size: int) -> PlanEstimate:
    search = PlanSearch(BOUNDS, one_pass(costs), True, PassSizes())
    return search.best(Batch(size), acceptance, num_prompt_tokens=0.0)


def test_blocks_are_shorter_and_trees_smaller_in_larger_batches(acceptance):
    """A pass is free up to 64 rows: one sequence has them all, 64 have one each."""
    plans = [best(flat(free_rows=64), acceptance, size) for size in (1, 8, 64)]
    depths = [plan.depth for plan in plans]
    rows = [plan.num_rows / size for plan, size in zip(plans, (1, 8, 64), strict=True)]
    assert depths[0] >= 10 and depths == sorted(depths, reverse=True) and depths[2] <= 4
    assert rows[0] >= 24 and rows == sorted(rows, reverse=True) and rows[2] <= 4


@pytest.mark.parametrize("size", [1, 8])
def test_cheap_rows_buy_longer_blocks_and_more_nodes(acceptance, size):
    dear, cheap = (best(flat(free_rows=n), acceptance, size) for n in (4, 256))
    assert (
        cheap.depth > dear.depth
        and cheap.num_rows > 2 * dear.num_rows
        and cheap.width >= dear.width
    )
    assert cheap.tau > dear.tau


def test_where_every_row_is_dear_nothing_is_drafted_for_long(acceptance):
    """Rows cost in full from the first: a plan of several levels promises less than plain decoding."""
    linear = replace(flat(), verify=CostCurve([1, 1024], [0.01, 10.24]))
    plan = best(linear, acceptance, 16)
    search = PlanSearch(BOUNDS, one_pass(linear), True, PassSizes())
    assert plan.rate < search.plain_rate(16, 0)


def test_where_levels_are_padded_a_wider_draft_costs_nothing(acceptance):
    """Levels whose rows are dear are narrow, unless they are replayed in passes for the widest."""
    costs = replace(flat(free_rows=256), expand=CostCurve([1, 40], [1e-4, 0.02]))
    padded = PassSizes(level_rows=lambda size, width: size * TOP_K)
    narrow, wide = (
        PlanSearch(BOUNDS, costs, True, sizes).best(Batch(4), acceptance, num_prompt_tokens=0.0)
        for sizes in (PassSizes(), padded)
    )
    assert narrow.width <= 3 and wide.width > narrow.width
