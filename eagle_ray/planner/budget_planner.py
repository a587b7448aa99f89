"""BudgetPlanner: one row budget for the whole batch, spent where a second yields the most tokens.

The rate of a step is (sequences + drafts expected to be accepted) / (seconds to draft + to verify + overhead). The best
rate is the price of a second, and every part of a step must be worth its price:

    before drafting   take the width and depth with the best rate, or a plain step (`plan_search.py`)
    between levels    stop if the next level's nodes would not pay for drafting them
    after drafting    verify as many of the batch's best candidates as pay for their rows

The planner is in one of four modes, reviewed every REVIEW_EVERY steps and when the batch size changes:

    WARM_UP -> ON or OFF     after NUM_PROBES drafts; on a CPU each is for a part of the batch
    ON -> OFF                if drafts promise less than 1 - HYSTERESIS times plain decoding's rate
    OFF -> ON                if they promise more than 1 + HYSTERESIS times, and the cost of catching up
    OFF -> PROBING           if a probe is due and a trial by the whole batch is promising
    PROBING -> ON or OFF     after REVIEW_EVERY steps that draft for the whole batch

It learns only from what it runs. So single steps are probes: OFF, a draft, on a CPU for a part of the batch; ON, a
plain step or the widest draft (`ProbeSchedule`).
"""

from __future__ import annotations

from dataclasses import replace
from enum import Enum, auto
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from eagle_ray.core.decode_batch import DecodeBatch
from eagle_ray.core.device import to_device
from eagle_ray.core.tree_bounds import TreeBounds
from eagle_ray.methods.drafter import Draft
from eagle_ray.models.graphs import PassSizes
from eagle_ray.planner.acceptance_model import MEMORY, AcceptanceByBatchSize, AcceptanceModel
from eagle_ray.planner.cost_model import StepCosts
from eagle_ray.planner.plan_search import REVIEW_EVERY, PlanEstimate, PlanSearch
from eagle_ray.planner.planner import Allocation, StepOutcome
from eagle_ray.planner.probe_schedule import ProbeSchedule
from eagle_ray.tree.budget import Budget, Candidates
from eagle_ray.tree.expand import PLAIN, DraftPlan, Growing

WIDTHS = (1, 2, 3, 4, 6, 8, 10)
NUM_PROBES = 4  # of the warm-up; on a CPU each drafts for a quarter of the batch, as catching up costs
HYSTERESIS = 0.03  # of plain decoding's rate


class Mode(Enum):
    """What the planner does at an ordinary step."""

    WARM_UP = auto()  # probes alone
    OFF = auto()  # plain steps
    PROBING = auto()  # draft for the whole batch although that is not expected to pay
    ON = auto()  # the best plan


class BudgetPlanner:
    """Plans by measured costs and observed acceptance.

    Args:
        can_sync: reading values from the device between levels is cheap, as on a CPU. Otherwise the depth is decided
            before drafting and the number of rows by the acceptance model, so that only a probe waits for the device.
        sizes: the passes that are replayed; None if steps are not, and any size runs.

    Attributes:
        predicted_s: predicted seconds of all steps so far.
        predicted_plain_s: likewise, if each had been a plain step.
        search: rates of plans by the current costs.
        acceptance: of drafts at the current batch size.
        best: the best plan of the last review.
        next_review: the step of the next review.
    """

    def __init__(self, bounds: TreeBounds, costs: StepCosts, can_sync: bool = True, sizes: PassSizes | None = None):
        self._bounds = bounds
        self._can_sync, self._replays = can_sync, sizes is not None
        self.mode = Mode.WARM_UP
        self.predicted_s = 0.0
        self.predicted_plain_s = 0.0
        self.search = PlanSearch(bounds, costs, can_sync, sizes or PassSizes())
        self.probes = ProbeSchedule()
        widths = (*(w for w in WIDTHS if w < bounds.top_k), bounds.top_k)
        self.acceptance_by_size = AcceptanceByBatchSize(AcceptanceModel(widths, self._bounds.depth))
        self.acceptance = self.acceptance_by_size.last
        self.best = PlanEstimate(0.0)
        self.next_review = 0
        self._review_size = 0  # batch size of the last review
        self._repeats_probe = False  # at the next step
        self._plain_is_next = True  # the kind of the next probe while drafts are on
        self._num_steps = 0
        self.num_drafts = 0
        self.num_offers = 0  # nonempty drafts
        self._num_missed = 0  # tokens that the drafter has to catch up on
        self._prompt_tokens = 0.0  # new prompt tokens per step, on average
        self._rows_per_sequence = 2.0  # rows per sequence in the last drafting step

    @property
    def costs(self) -> StepCosts:
        """Return the costs of steps as known so far."""
        return self.search.costs

    @property
    def will_draft(self) -> bool:
        return self.mode is not Mode.OFF

    def plan(self, batch: DecodeBatch) -> DraftPlan:
        if self._can_sync and max(batch.remaining_tokens) <= 1:  # each has one token left, which needs no draft
            return PLAIN
        self.acceptance = self.acceptance_by_size.of(len(batch))
        if self.mode is not Mode.WARM_UP or self._is_warm:
            self.review(batch)
        if self.mode is Mode.WARM_UP:
            return self._draft_probe(batch)
        if self.mode is Mode.PROBING:
            return self._as_probe(self._best_plan(batch))
        if self._repeats_probe:
            self._repeats_probe = False
            return self._draft_probe(batch)
        if self.probes.is_due(self._num_steps):
            return self._next_probe(batch)
        return self._best_plan(batch) if self.mode is Mode.ON else PLAIN

    def allocate(self, draft: Draft, plan: DraftPlan, batch: DecodeBatch) -> Allocation:
        """Return the number of rows with the best rate, filled with the most valuable nodes of the batch."""
        size = len(batch)
        if not draft.depth:
            if plan.is_drafting:
                self._observe_draft(draft, plan, batch)
            return Allocation(draft.tree.valid, 1, size)
        candidates = Candidates.of(draft.tree, self._budget(draft, batch))
        rows = self._row_counts(size, len(candidates.log_values))
        gains = self._gains(rows, candidates, draft, plan, size)
        if plan.is_drafting:
            self._observe_draft(draft, plan, batch)  # last, since a query of the acceptance model waits for its copy
        best = int(self._profits(batch, rows, gains).argmax())
        self._rows_per_sequence = rows[best] / size
        keep = candidates.keep(rows[best])
        sizes = keep.sum(1).tolist() if self._can_sync else None
        num_nodes = max(sizes) if sizes else min(self._bounds.num_nodes, draft.tree.num_nodes)
        return Allocation(keep, num_nodes, rows[best], gains[best], sizes)

    def observe(self, outcome: StepOutcome) -> None:
        predicted = self.costs.predict(outcome)
        self.predicted_s += predicted.total - self.costs.prefill_seconds(outcome)
        self.predicted_plain_s += self.search.plain_seconds(outcome.batch_size, outcome.num_cached)
        if outcome.is_first:
            outcome = replace(outcome, seconds=predicted)
        else:
            self.costs.update(outcome, predicted, self._is_usual(outcome.plan))
        self._num_steps += 1
        self._count_missed(outcome)
        self._prompt_tokens += (outcome.num_prompt_tokens - self._prompt_tokens) / MEMORY
        if self.mode is Mode.WARM_UP or self._is_warm_up_probe(outcome.plan):
            return  # drafts were not calibrated yet, so their acceptance says little
        self.probes.pay(outcome.seconds.total)
        if outcome.plan.probe:
            self.probes.charge(self._probe_cost(outcome))
        self.acceptance_by_size.of(outcome.batch_size).update(outcome.num_accepted, outcome.num_expected_drafts)

    # modes

    @property
    def _is_warm(self) -> bool:
        """Return whether enough was drafted to decide; lookup drafters start with empty drafts."""
        return self.num_offers >= NUM_PROBES or self.num_drafts >= MEMORY

    def _is_warm_up_probe(self, plan: DraftPlan) -> bool:
        """Return whether the plan is one of the warm-up's. Steps overlap, so it may be observed after the warm-up."""
        return plan.probe and self.num_offers <= NUM_PROBES and self.num_drafts <= MEMORY

    def review(self, batch: DecodeBatch) -> None:
        """Search for the best plan and choose the mode, if the last review is too old or of another batch size."""
        is_due = self._num_steps >= self.next_review
        if not is_due and len(batch) == self._review_size:
            return
        self.best = self.search.best(batch, self.acceptance, self._prompt_tokens)
        self._review_size = len(batch)
        if self.mode is Mode.PROBING and not is_due:
            return
        self.next_review = self._num_steps + REVIEW_EVERY
        previous, self.mode = self.mode, Mode.ON if self._pays_off(batch) else Mode.OFF
        if previous is Mode.ON and self.mode is Mode.OFF:
            self.probes.allow_retry(self.search.plain_seconds(len(batch), batch.num_cached))

    def _pays_off(self, batch: DecodeBatch) -> bool:
        """Return whether the best plan's rate is above the hurdle of the current mode."""
        size, hurdle = len(batch), 1 - HYSTERESIS
        if self.mode in (Mode.OFF, Mode.PROBING):
            catch_up_s = self.costs.catch_up(min(self._num_missed, batch.num_cached, MEMORY * size))
            hurdle = 1 + HYSTERESIS + catch_up_s / (MEMORY * self.search.plain_seconds(size, batch.num_cached))
        return self.best.rate > hurdle * self.search.plain_rate(size, batch.num_cached)

    # plans

    def _plan(self, depth: int, width: int, **rest: Any) -> DraftPlan:
        return DraftPlan(depth, width, num_children=self._bounds.top_k, **rest)

    def _best_plan(self, batch: DecodeBatch) -> DraftPlan:
        """Return the plan with the best expected rate: as deep as each level pays, or as has recently been best.

        Now and then it is a level deeper or a little wider. Near the optimum that costs little.
        """
        explores = self.num_drafts % (NUM_PROBES * REVIEW_EVERY) == 0
        width, more = self.best.width, int(explores)
        if explores:
            width = next((w for w in self.acceptance.model.widths if w > width), width)
        if not self._can_sync:
            return self._plan(min(self.best.depth + more, self._bounds.depth), width)
        price = self._opportunity_rate(len(batch), batch.num_cached)
        num_rows = len(batch) * self._rows_per_sequence
        row_price = price * self.costs.row_seconds(num_rows, batch.num_cached, len(batch), batch.num_prefill_rows)
        level_price = price * self.costs.expand(len(batch) * width)
        unpaid = 0

        def should_stop(builder: Growing) -> bool:
            nonlocal unpaid
            unpaid += unpaid > 0 or not self._pays(builder, level_price, row_price)
            return unpaid > more

        return self._plan(min(self._bounds.depth, max(batch.remaining_tokens) - 1), width, should_stop=should_stop)

    def _pays(self, builder: Growing, level_price: float, row_price: float) -> bool:
        """Return whether one more level is expected to yield more than it costs. Both prices are in tokens.

        A node is worth what it yields beyond the price of its row. Computed on the host, node by node, until the answer
        is clear, mostly after two or three nodes.
        """
        children = self.acceptance.model.children(builder.depth + 1)
        accuracy, gain = self.acceptance.accuracy, 0.0
        for value in builder.frontier().log_values.exp().flatten().tolist():
            for child in children:
                more = accuracy * value * child - row_price
                if more <= 0:  # the following ones are worth less
                    break
                gain += more
            if gain > level_price:
                return True
        return False

    # probes

    def _next_probe(self, batch: DecodeBatch) -> DraftPlan:
        """Return the next probe. ON: a plain step or the widest draft, by turns.

        OFF: a trial, which also observes the cost of drafting for the whole batch, if it is promising; otherwise a
        draft, and another at the next step if drafts are replayed.
        """
        self.probes.begin(self._num_steps)
        if self.mode is Mode.ON:
            self._plain_is_next = not self._plain_is_next
            return self._widest_plan(batch, None) if self._plain_is_next else self._as_probe(PLAIN)
        if not self._is_trial_promising(batch):
            # After plain steps a replayed draft catches up in a pass of its own. Only the next one shows its cost.
            self._repeats_probe = self._replays
            return self._draft_probe(batch)
        self.mode, self.next_review = Mode.PROBING, self._num_steps + REVIEW_EVERY
        return self._as_probe(self._best_plan(batch))

    def _is_trial_promising(self, batch: DecodeBatch) -> bool:
        """Return whether a trial is expected to yield a draft per sequence and to lose no more than two plain steps."""
        plain_rate = self.search.plain_rate(len(batch), batch.num_cached)
        return REVIEW_EVERY * (self.best.tau - 1) >= 1 and self.best.rate >= (1 - 2 / REVIEW_EVERY) * plain_rate

    def _as_probe(self, plan: DraftPlan) -> DraftPlan:
        return replace(plan, probe=True)

    def _draft_probe(self, batch: DecodeBatch) -> DraftPlan:
        """Return the widest draft for a part of the batch, by turns.

        If steps are replayed it is for the whole batch: on an H200 a replayed draft took 4 to 12 ms for 4 to 64
        sequences, and an eager one for a quarter of them 13 to 20 ms, the first one half a second.
        """
        size, num_members = len(batch), -(-len(batch) // NUM_PROBES)
        if num_members == size or self._replays:
            return self._widest_plan(batch, None)
        first = self.num_drafts * num_members
        return self._widest_plan(batch, tuple(sorted((first + i) % size for i in range(num_members))))

    def _widest_plan(self, batch: DecodeBatch, members: tuple[int, ...] | None) -> DraftPlan:
        should_stop = (lambda builder: self._cannot_pay(builder, batch)) if self._can_sync else None
        return self._plan(self._bounds.depth, self._bounds.top_k, members=members, should_stop=should_stop, probe=True)

    def _cannot_pay(self, builder: Growing, batch: DecodeBatch) -> bool:
        """Return whether no further level could pay, even if the whole batch drafted and children matched parents."""
        level = builder.levels[-1].flatten(1)
        beam = level.topk(min(self._bounds.top_k, level.shape[1]), dim=1).values
        scale = len(batch) / len(beam)
        price = self.search.plain_rate(len(batch), batch.num_cached)
        return scale * beam.exp().sum().item() < price * self.costs.expand(scale * beam.numel())

    def _probe_cost(self, probe: StepOutcome) -> float:
        """Return the seconds of a probe, without prompts, beyond those that its tokens would take otherwise."""
        worth = (probe.batch_size + probe.num_accepted) / self._opportunity_rate(probe.batch_size, probe.num_cached)
        return probe.seconds.total - self.costs.prefill_seconds(probe) - worth

    # budgets

    def _row_counts(self, size: int, num_candidates: int) -> list[int]:
        """Return the numbers of rows to choose from; in a trial only the best plan's number."""
        if self.mode is Mode.PROBING:
            return self.search.padded([min(self.best.num_rows, size + num_candidates)])
        return self.search.row_counts(size, num_candidates)

    def _budget(self, draft: Draft, batch: DecodeBatch) -> Budget:
        """Return the budget: trees within their bounds, and no nodes deeper than a sequence's remaining tokens."""
        max_depths = None
        if min(batch.remaining_tokens) <= draft.depth:
            max_depths = batch.remaining_on_device - 1
        return Budget(num_rows=0, num_nodes=self._bounds.num_nodes, max_depths=max_depths)

    def _gains(self, rows: list[int], candidates: Candidates, draft: Draft, plan: DraftPlan, size: int) -> list[float]:
        """Return the accepted drafts to expect of each number of rows: by this draft's values, or by recent drafts' if
        reading them would let the device wait.
        """
        sizes = [min(n - size, len(candidates.log_values)) for n in rows]
        if self._can_sync or plan.probe:
            return candidates.expected(sizes)
        model, num_members = self.acceptance.model, plan.num_members(size)
        width = max(i for i, known in enumerate(model.widths) if known <= plan.width)
        curve = model.expected([n / num_members for n in sizes])[width, min(draft.depth, self._bounds.depth) - 1]
        return (num_members * curve).tolist()

    def _profits(self, batch: DecodeBatch, rows: list[int], gains: list[float]) -> np.ndarray:
        """Return the tokens gained by verifying each number of rows, less the price of the seconds."""
        seconds = self.costs.verify_seconds_by_rows(rows, batch.num_cached, len(batch), batch.num_prefill_rows)
        price = self._opportunity_rate(len(batch), batch.num_cached)
        return self.acceptance.accuracy * np.asarray(gains) - price * seconds

    def _opportunity_rate(self, size: int, num_cached: int) -> float:
        """Return the price of a second in tokens: the average rate of the best kind of step, with or without drafts.

        A step should not maximise its own rate. If its texts are hard, a second is worth more in the steps to come; if
        they are easy, it is worth less there.
        """
        return max(self.best.rate, self.search.plain_rate(size, num_cached))

    # observations

    def _count_missed(self, outcome: StepOutcome) -> None:
        if outcome.plan.is_drafting and not outcome.plan.members:
            self._num_missed = 0
        else:
            self._num_missed += outcome.batch_size + outcome.num_prompt_tokens

    def _is_usual(self, plan: DraftPlan) -> bool:
        """Return whether the overhead of a step with this plan is typical.

        The widest drafts have much more, and so do the first ones, since a drafter updates its calibration after each.
        """
        return not plan.is_drafting or (self.num_drafts > MEMORY and plan.width <= self.best.width)

    def _observe_draft(self, draft: Draft, plan: DraftPlan, batch: DecodeBatch) -> None:
        """Update the acceptance model with a draft's values."""
        if plan.probe or self.num_drafts % REVIEW_EVERY == 0:
            levels = self._to_full_depth(draft, plan, len(batch))
            remaining = self._remaining_tokens(levels, plan, batch)
            self.acceptance.model.observe(levels, plan.width, draft.extra_log_values, remaining)
        self.num_drafts += 1
        self.num_offers += draft.depth > 0

    def _remaining_tokens(self, levels: list[Tensor], plan: DraftPlan, batch: DecodeBatch) -> Int[Tensor, " M"] | None:
        """Return the remaining tokens of the sequences that were drafted for, or None if all levels fit."""
        if min(batch.remaining_tokens) > len(levels):
            return None
        if plan.members is None:
            return batch.remaining_on_device
        return batch.remaining_on_device[to_device(plan.members, batch.remaining_on_device.device)]

    def _to_full_depth(self, draft: Draft, plan: DraftPlan, size: int) -> list[Float[Tensor, "M _ K"]]:
        """Return the draft's levels, with empty ones below if the drafter had nothing more to propose."""
        if not draft.is_exhausted or len(draft.levels) >= self._bounds.depth:
            return draft.levels
        shape = plan.num_members(size), plan.width, plan.children
        nothing = torch.full(shape, -torch.inf, device=draft.tree.tokens.device)
        levels = draft.levels or [nothing[:, :1]]
        return levels + [nothing] * (self._bounds.depth - len(levels))
