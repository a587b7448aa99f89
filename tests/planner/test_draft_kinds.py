"""Which kind of drafts is on, in a world of made-up texts, drafts and seconds: a model's, lookups alone, or none."""

import random
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
import torch

from eagle_ray.core.tree_bounds import TreeBounds
from eagle_ray.methods.drafter import Draft
from eagle_ray.planner.acceptance_model import MEMORY
from eagle_ray.planner.budget_planner import NUM_PROBES, BudgetPlanner
from eagle_ray.planner.cost_model import CostCurve
from eagle_ray.planner.modes import OFF_REVIEW_EVERY, Mode
from eagle_ray.planner.planner import DraftKind, StepOutcome
from eagle_ray.tree.expand import DraftPlan, TreeBuilder
from jobs.bench.simulated_costs import SimulatedPlanner, flat

BOUNDS = TreeBounds(8, 4, 2)
BOTH = tuple(DraftKind)
NUM_SEQUENCES = 4


@dataclass
class Batch:
    """As much of a DecodeBatch as a planner reads."""

    sequences: list[SimpleNamespace]
    num_cached: int = 400
    num_prefill_rows: int = 0
    sampling: SimpleNamespace = field(default_factory=lambda: SimpleNamespace(any_sampled=False))

    def __len__(self) -> int:
        return len(self.sequences)

    @property
    def remaining_tokens(self) -> list[int]:
        return [100] * len(self)

    @property
    def remaining_on_device(self) -> torch.Tensor:
        return torch.tensor(self.remaining_tokens)


@dataclass
class SimulatedTexts:
    """Texts of which a model's drafts are accepted with one probability, and what is looked up with another.

    Attributes:
        share_found: steps in which lookups propose anything.
        first_id: of the tokens that the texts consist of.
    """

    model: float
    lookups: float
    share_found: float = 1.0
    first_id: int = 0
    draw: random.Random = field(default_factory=lambda: random.Random(0))

    def run(
        self, planner: SimulatedPlanner, num_steps: int, size: int = NUM_SEQUENCES
    ) -> list[DraftPlan]:
        """Return the plans of some steps."""
        draw = self.draw
        plans = []
        for _ in range(num_steps):
            ids = [
                draw.choices(range(self.first_id, self.first_id + 40), k=64) for _ in range(size)
            ]
            batch = Batch([SimpleNamespace(prompt_ids=[], output_ids=each) for each in ids])
            plan = planner.plan(batch)
            draft = self._draft(plan, size)
            allocation = planner.allocate(draft, plan, batch)
            kept = draft.tree.log_values.exp()[:, 1:][allocation.keep[:, 1:]].sum().item()
            accepted = int(kept) + (draw.random() < kept % 1)
            sizes = plan, size, batch.num_cached, len(draft.levels), size, allocation.num_rows
            outcome = StepOutcome(
                *sizes, accepted, 0, None, num_expected_drafts=allocation.expected
            )
            planner.observe(outcome)
            plans.append(plan)
        return plans

    def _draft(self, plan: DraftPlan, size: int) -> Draft:
        roots = torch.zeros(size, dtype=torch.int64)
        is_found = not plan.lookups_only or self.draw.random() < self.share_found
        probability = self.lookups if plan.lookups_only else self.model
        if not plan.is_drafting or not is_found or not probability:
            return Draft(Draft.empty(roots).tree, [], 0, 0, is_exhausted=True)
        members = list(range(size) if plan.members is None else plan.members)
        builder = TreeBuilder(roots[members], 1)
        while builder.depth < plan.max_depth and not (
            builder.depth and plan.should_stop and plan.should_stop(builder)
        ):
            if builder.depth:
                builder.frontier()
            children = torch.full((len(members), 1, 1), probability)
            builder.grow(children.log(), torch.ones(len(members), 1, 1, dtype=torch.int64))
        tree = builder.build()
        if plan.members is not None:
            tree = tree.spread(torch.tensor(members), roots)
        return Draft(tree, builder.levels, 0 if plan.lookups_only else builder.depth, size)


def planner_of(
    *kinds: DraftKind, can_sync: bool = True, head_share: float = 0.3
) -> SimulatedPlanner:
    return SimulatedPlanner(
        BudgetPlanner(BOUNDS, flat(head_share=head_share), can_sync, kinds=kinds), flat()
    )


def share(plans: list[DraftPlan], kind: DraftKind) -> float:
    return sum(
        p.is_drafting and p.lookups_only == (kind is DraftKind.LOOKUPS) for p in plans
    ) / len(plans)


@pytest.mark.parametrize("can_sync", [True, False])
def test_lookups_are_on_and_the_model_off_where_only_lookups_pay(can_sync):
    world, planner = SimulatedTexts(model=0.05, lookups=0.8), planner_of(*BOTH, can_sync=can_sync)
    world.run(planner, 100)
    plans = world.run(planner, 400)
    assert planner.planner.modes.mode is Mode.ON and planner.planner.modes.kind is DraftKind.LOOKUPS
    assert not planner.will_draft
    assert share(plans, DraftKind.LOOKUPS) > 0.95 and share(plans, DraftKind.MODEL) < 0.03


def test_lookups_that_seldom_find_anything_stay_on_if_that_pays():
    """In one step of ten they propose four tokens; on an average over steps no number of rows would pay."""
    dear_rows = flat(free_rows=1)
    world = SimulatedTexts(model=0.05, lookups=0.97, share_found=0.1)
    planner = SimulatedPlanner(BudgetPlanner(BOUNDS, flat(free_rows=1), kinds=BOTH), dear_rows)
    world.run(planner, 400, size=1)
    assert share(world.run(planner, 400, size=1), DraftKind.LOOKUPS) > 0.9


def test_the_better_kind_is_on_where_both_pay():
    world, planner = SimulatedTexts(model=0.9, lookups=0.3), planner_of(*BOTH, head_share=0.05)
    world.run(planner, 100)
    assert share(world.run(planner, 400), DraftKind.MODEL) > 0.9
    assert planner.will_draft
    world.model = 0.2
    world.lookups = 0.9
    world.run(planner, 400)
    assert share(world.run(planner, 400), DraftKind.LOOKUPS) > 0.9


@pytest.mark.parametrize("num_steps", [2000, pytest.param(7000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kinds", [BOTH, (DraftKind.MODEL,), (DraftKind.LOOKUPS,)])
def test_useless_probes_become_rare_and_resume_with_new_texts(kinds, num_steps):
    world, planner = SimulatedTexts(model=0.05, lookups=0.0), planner_of(*kinds)
    early = world.run(planner, 1000)
    planner.reset()
    late = world.run(planner, num_steps)
    assert sum(p.is_drafting and not p.lookups_only for p in early) <= NUM_PROBES + 6
    assert sum(p.is_drafting and not p.lookups_only for p in late) <= 6
    plain_s = len(late) * flat().plain_seconds(NUM_SEQUENCES, 400)
    assert planner.seconds < 1.005 * plain_s
    assert planner.planner.modes.mode is Mode.OFF and not planner.will_draft

    world.model = world.lookups = 0.9
    world.first_id = 500
    world.run(planner, 300)
    assert planner.planner.modes.mode is Mode.ON


def test_texts_that_go_on_as_before_do_not_restart_probes():
    """Though its tokens change at every step, as those of one kind of text do."""
    world, planner = SimulatedTexts(model=0.05, lookups=0.0), planner_of(DraftKind.MODEL)
    world.run(planner, 2000)
    world.model = 0.9
    plans = world.run(planner, 500)
    assert sum(p.is_drafting for p in plans) <= 1


def test_a_drafter_without_a_model_is_never_asked_for_its_drafts():
    world, planner = SimulatedTexts(model=0.9, lookups=0.9), planner_of(DraftKind.LOOKUPS)
    plans = world.run(planner, 300)
    assert share(plans, DraftKind.MODEL) == 0 and share(plans, DraftKind.LOOKUPS) > 0.9


def test_drafts_that_lose_a_little_do_not_stay_on_for_long():
    """A small loss is no reason to turn drafts off at once, since what they take is only observed while they are on."""
    world, planner = (
        SimulatedTexts(model=0.9, lookups=0.0),
        planner_of(DraftKind.MODEL, head_share=0.05),
    )
    world.run(planner, 100)
    ours = planner.planner
    assert ours.modes.mode is Mode.ON
    batch = Batch([SimpleNamespace(prompt_ids=[], output_ids=[1])] * NUM_SEQUENCES)
    best, plain_rate = (
        ours.search.best(batch, ours.acceptance, 0.0),
        ours.search.plain_rate(NUM_SEQUENCES, 400),
    )
    more_s = NUM_SEQUENCES * best.tau * (1 / (0.985 * plain_rate) - 1 / best.rate)
    for costs in (ours.costs, planner.costs):
        costs.draft_overhead = CostCurve([4], [costs.draft_overhead(4) + more_s])
    assert share(world.run(planner, 20), DraftKind.MODEL) > 0.8
    world.run(planner, 2 * MEMORY)
    assert ours.modes.mode is not Mode.ON


class IndexedTokens:
    """The tokens that an index has read, of which a share had followed the same run before."""

    def __init__(self) -> None:
        self.share = 0.0
        self._counts = [0, 0]

    def __call__(self, batch: Batch) -> tuple[int, int]:
        self._counts[0] += 1000
        self._counts[1] += round(1000 * self.share)
        return self._counts[0], self._counts[1]


@pytest.mark.parametrize("num_steps", [1500, pytest.param(6000, marks=pytest.mark.slow)])
def test_lookups_are_tried_as_soon_as_texts_repeat(num_steps):
    reads, world = IndexedTokens(), SimulatedTexts(model=0.02, lookups=0.0)
    planner = SimulatedPlanner(BudgetPlanner(BOUNDS, flat(), kinds=BOTH, lookup_hits=reads), flat())
    world.run(planner, num_steps)
    assert planner.planner.modes.mode is Mode.OFF
    reads.share, world.lookups = 0.9, 0.9
    plans = world.run(planner, 3 * OFF_REVIEW_EVERY)
    assert (
        planner.planner.modes.kind is DraftKind.LOOKUPS
        and share(plans[-OFF_REVIEW_EVERY:], DraftKind.LOOKUPS) > 0.9
    )


@pytest.mark.parametrize("num_steps", [1500, pytest.param(4000, marks=pytest.mark.slow)])
def test_repeating_texts_without_gain_are_not_tried_repeatedly(num_steps):
    reads, world = IndexedTokens(), SimulatedTexts(model=0.02, lookups=0.0)
    reads.share = 0.5
    planner = SimulatedPlanner(BudgetPlanner(BOUNDS, flat(), kinds=BOTH, lookup_hits=reads), flat())
    world.run(planner, 1000)
    plans = world.run(planner, num_steps)
    assert share(plans, DraftKind.LOOKUPS) < 0.01
