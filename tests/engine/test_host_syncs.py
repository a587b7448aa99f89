"""A step makes one device-to-host copy: anything else would stall a GPU and break graph capture.

Checked on a CPU by watching which operations the step dispatches.
"""

import torch

from eagle_ray.core.tree_bounds import TreeBounds
from eagle_ray.methods.calibration import Calibration
from eagle_ray.methods.eagle.published_trees import StaticPlanner
from eagle_ray.methods.lookup.token_recycling import RecyclingDrafter
from eagle_ray.planner.budget_planner import NUM_PROBES, BudgetPlanner
from eagle_ray.tree.static_tree import MC_SIM_7B_63
from jobs.bench.simulated_costs import flat
from tests.support.operations import WatchCopies, WatchOperations, watched_step
from tests.support.toy_models import llama_engine


def test_a_speculative_step_copies_once():
    assert watched_step(llama_engine(3, 12, 4, 4)) == ([], ["numpy"])


def test_a_step_of_a_static_tree_copies_once():
    engine = llama_engine(3, 25, 5, 4)
    engine.planner = StaticPlanner(MC_SIM_7B_63)
    assert watched_step(engine) == ([], ["numpy"])


def test_recycling_what_the_target_said_asks_for_nothing_more():
    engine = llama_engine(3, 12, 4, 4)
    engine.drafter = RecyclingDrafter(engine.target.vocab_size, 4, calibration=Calibration(4))
    assert watched_step(engine) == ([], ["numpy"])


def test_a_plain_step_copies_once():
    assert watched_step(llama_engine(3)) == ([], ["numpy"])


def planner_that_drafts(engine) -> BudgetPlanner:
    """A planner past its warm-up, whose drafts pay."""
    planner = BudgetPlanner(TreeBounds(12, 4, 4), flat(head_share=0.01), can_sync=False)
    model = planner.acceptance_by_size.last.model
    model.observe([torch.full((3, 1, 4), -0.5)] + [torch.full((3, 4, 4), -0.5)] * 3, 4)
    model.sync()
    planner.num_offers, planner.num_drafts = NUM_PROBES, 1
    planner.modes.charge(1.0, 1.0, is_drafting=False)
    engine.planner = planner
    return planner


def test_a_step_under_the_global_budget_copies_once():
    """The number of rows comes from the drafts before, not from this one's values."""
    engine = llama_engine(3, 12, 4, 4)
    planner = planner_that_drafts(engine)
    assert watched_step(engine) == ([], ["numpy"])
    assert planner.num_drafts == 3


def test_step_gets_the_rows_that_recent_drafts_would_pay_for():
    engine = llama_engine(3, 12, 4, 4)
    planner, allocated = planner_that_drafts(engine), []
    allocate = planner.allocate
    planner.allocate = lambda *given: allocated.append(allocate(*given)) or allocated[-1]
    watched_step(engine)
    assert all(found.num_rows > 3 and found.expected > 0 for found in allocated)


def test_a_step_that_the_global_planner_leaves_plain_copies_once():
    engine = llama_engine(3, 12, 4, 4)
    engine.planner = BudgetPlanner(TreeBounds(12, 4, 4), flat(head_share=5.0), can_sync=False)
    engine.planner.num_offers = NUM_PROBES
    engine.planner.modes.charge(1.0, 1.0, is_drafting=False)
    assert watched_step(engine) == ([], ["numpy"])


def test_the_watch_sees_what_it_should():
    with WatchOperations() as operations, WatchCopies() as copies:
        x = torch.arange(3)
        x[x > 1].sum().item()
        bool(x[0])
    assert "nonzero" in operations.seen or "index" in operations.seen
    assert {"item", "__bool__"} <= set(copies.seen)
