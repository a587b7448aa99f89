"""BudgetPlanner: one row budget for the whole batch, spent where a second yields the most tokens.

The rate of a step is (sequences + drafts expected to be accepted) / (seconds to draft + to verify + overhead). The best
rate is the price of a second, and every part of a step must be worth its price:

    before drafting   take the width and depth with the best rate, by recent acceptance in batches of about this size,
    or
                      take a plain step. Drafts are turned off below OFF_THRESHOLD times plain decoding's rate and on
                      from ON_THRESHOLD times on, if catching up pays for itself too
    between levels    stop if the next level's nodes would not pay for drafting them
    after drafting    verify as many of the batch's best candidates as pay for their rows

The planner learns only from what it runs, so it occasionally probes: it drafts although drafts do not pay (for a few
sequences, or for all for some steps if drafts nearly pay), takes a plain step, or drafts wider than it would. What
probes cost beyond their tokens is at most PROBE_SHARE of the time, and LOOKING_SHARE while drafts are on. Exceptions:
the first probes, and one trial RETRY_AFTER plain steps after drafts were turned off, at most once in RETRY_EVERY steps.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from eagle_ray.async_copy import to_device
from eagle_ray.core.decode_batch import DecodeBatch
from eagle_ray.drafters.drafter import Draft
from eagle_ray.planner.acceptance_by_batch_size import ExpectationsBySize
from eagle_ray.planner.acceptance_model import AcceptanceModel
from eagle_ray.planner.cost_model import BUCKETS, StepCosts
from eagle_ray.planner.planner import Allocation, StepOutcome
from eagle_ray.tree.budget import Budget, Candidates
from eagle_ray.tree.draft_plan import PLAIN, DraftPlan
from eagle_ray.tree.expand import TreeBuilder

WIDTHS = (1, 2, 3, 4, 6, 8, 10)
FINE_BUCKETS = tuple(accumulate(range(64), lambda n, _: n + max(1, n // 8), initial=1))  # an eighth more each
PROBE_SHARE = 0.005  # of the time, while drafts are off
LOOKING_SHARE = 0.001  # of the time, while drafts are on: they are observed anyway
PROBE_FLOOR = 0.1  # of a plain step: the least that a probe is charged, so that at most one of twenty steps is one
UNOBSERVED_STEPS = 1  # steps that may be planned but not observed yet: the last probe's cost is not known so long
TRIAL_THRESHOLD = 0.8  # of plain decoding's rate that drafts must promise for a trial by the whole batch
TRIAL_STEPS = 16
MIN_TRIAL_TAU = 1.1  # tokens per sequence that they must promise besides
PROBE_FRACTION = 8  # other probes draft for one of so many sequences, since each must catch up first
FIRST_PROBES = 4  # nonempty drafts before the first decision
FIRST_DRAFTS = 64  # drafts, empty ones included, before the first decision: lookup drafters start with nothing
FIRST_MEMBERS, FIRST_FRACTION = 2, 4  # sequences in a first probe: so many, or one of so many if that is more
FIRST_STEPS, OBSERVED_SHARE = 64, 0.25  # after the first steps costs learn from a random share of them
SETTLED_AFTER = 32  # drafts after which steps take their usual time: a drafter learns at each of the first 30
OBSERVE_EVERY = 8  # drafting steps, at least; a power of two like LOOK_EVERY, so that a look is observed
MEMBERS_EVERY = 2  # sequences per additional step between observations
LOOK_EVERY = 32  # drafting steps between drafts that are a level deeper and a little wider than the best plan
RETRY_AFTER, RETRY_EVERY = 32, 512  # plain steps before drafts that were turned off are tried again; how often
REVIEW_EVERY = 16  # steps for which width and depth hold while the batch size does not change
ON_THRESHOLD = 1.02  # times plain decoding's rate that drafts must promise to be turned on
OFF_THRESHOLD = 0.97  # and to stay on: their real cost is only observed while they are on
HORIZON = 64  # plain steps in which turning drafts on must earn the cost of catching up
PROMPT_MEMORY = 0.98  # decay per step of the average number of prompt tokens


@dataclass(frozen=True, slots=True)
class PlanEstimate:
    """A width and depth, and what a step with them is expected to yield.

    Attributes:
        rate: tokens per second.
        num_rows: rows of the verify pass.
        tau: tokens per sequence.
    """

    rate: float
    width: int = 0
    depth: int = 0
    num_rows: int = 0
    tau: float = 1.0


class BudgetPlanner:
    """Plans by measured costs and observed acceptance.

    Args:
        max_nodes, max_depth, top_k: upper bounds of each sequence's tree, as for UniformPlanner.
        can_sync: reading values from the device between levels is cheap, as on a CPU. Otherwise the depth is decided
            before drafting, and a drafting step syncs once, to set the number of rows.
        padded: the rows of the pass that is run for a number of rows.
    """

    def __init__(
        self,
        max_nodes: int,
        max_depth: int,
        top_k: int,
        costs: StepCosts,
        can_sync: bool = True,
        padded: Callable[[int], int] = int,
    ):
        widths = (*(w for w in WIDTHS if w < top_k), top_k)
        self._max_nodes, self._max_depth, self._top_k = max_nodes, min(max_depth, max_nodes), top_k
        self.costs, self._can_sync, self._padded = costs, can_sync, padded
        self.foreseen_s = self.foreseen_plain_s = 0.0  # predicted seconds of all steps, as run and as plain steps
        self._by_size = ExpectationsBySize(AcceptanceModel(widths, self._max_depth))
        self._now = self._by_size.last  # for the current batch size
        self._best = PlanEstimate(0.0)
        self._random = random.Random(0)
        self._drafting = True
        self._num_steps = self._num_missed = 0  # missed: tokens that the drafter has to catch up on
        self._num_drafts = self._num_offers = 0  # drafts; nonempty drafts
        self._probe_balance = 0.0  # seconds of probes beyond their share of the time
        self._retried_at = -RETRY_EVERY  # the step at which a retry was last allowed
        self._plain_is_next = True  # the kind of the next probe while drafts are on
        self._probed_at = -1 - UNOBSERVED_STEPS  # the step of the last probe
        self._trial_until = 0  # the step at which the current trial ends
        self._decided = (0, 0)  # batch size and step of the last decision
        self._prompt_tokens = 0.0  # new prompt tokens per step, on average
        self._rows_per_sequence = 2.0  # rows per sequence in the last drafting step

    @property
    def will_draft(self) -> bool:
        return self._drafting or self._is_trial

    def plan(self, batch: DecodeBatch) -> DraftPlan:
        if self._can_sync and max(batch.remaining_tokens) <= 1:  # each has one token left, which needs no draft
            return PLAIN
        if self._is_warming_up:
            return self._probe(batch, max(FIRST_MEMBERS, len(batch) // FIRST_FRACTION))
        self._now = self._by_size.of(len(batch))
        self._decide(batch)
        if self._is_trial:
            return self._trial_plan(batch)
        if self._probe_balance <= 0 and self._num_steps > self._probed_at + UNOBSERVED_STEPS:
            return self._next_probe(batch)
        if not self._drafting:
            return PLAIN
        return self._best_plan(batch)

    @property
    def _is_warming_up(self) -> bool:
        return self._num_offers < FIRST_PROBES and self._num_drafts < FIRST_DRAFTS

    def _is_among_the_first(self, plan: DraftPlan) -> bool:
        """Return whether the plan is one of the probes before the first decision."""
        return plan.probe and self._num_offers <= FIRST_PROBES and self._num_drafts <= FIRST_DRAFTS

    @property
    def _is_trial(self) -> bool:
        return self._num_steps < self._trial_until

    def _plan(self, depth: int, width: int, **rest: Any) -> DraftPlan:
        return DraftPlan(depth, width, num_children=self._top_k, **rest)

    def _best_plan(self, batch: DecodeBatch) -> DraftPlan:
        """Return the plan with the best expected rate: as deep as each level pays, or as has recently been best.

        Now and then it is a level deeper or a little wider. Near the optimum that costs little.
        """
        looks = self._num_drafts % max(LOOK_EVERY, _observe_every(len(batch))) == 0
        width, more = self._best.width, int(looks)
        if looks:
            width = next((w for w in self._now.curves.widths if w > width), width)
        if not self._can_sync:
            return self._plan(min(self._best.depth + more, self._max_depth), width)
        price = self._opportunity_rate(len(batch), batch.num_cached)
        num_rows = len(batch) * self._rows_per_sequence
        row_price = price * self.costs.row(num_rows, batch.num_cached, len(batch), batch.num_prefill_rows)
        level_price = price * self.costs.level(len(batch) * width)
        unpaid = 0

        def enough(builder: TreeBuilder) -> bool:
            nonlocal unpaid
            unpaid += unpaid > 0 or not self._pays(builder, level_price, row_price)
            return unpaid > more

        return self._plan(min(self._max_depth, max(batch.remaining_tokens) - 1), width, should_stop=enough)

    def allocate(self, draft: Draft, plan: DraftPlan, batch: DecodeBatch) -> Allocation:
        """Return the number of rows with the best rate, filled with the most valuable nodes of the batch."""
        size = len(batch)
        if plan.probe and not self._is_warming_up:
            self._probed_at, self._plain_is_next = self._num_steps, plan.is_drafting
        if plan.is_drafting:
            self._observe(draft, plan, batch)
        if not draft.depth:
            return Allocation(draft.tree.valid, 1, size)
        candidates = Candidates.of(draft.tree, self._budget(draft, batch))
        num_candidates = len(candidates.log_values)
        rows = self._passes(self._sizes(size, num_candidates))
        gains = candidates.expected([min(n - size, num_candidates) for n in rows])
        best = int(self._profits(batch, rows, gains).argmax())
        self._rows_per_sequence = rows[best] / size
        keep = candidates.keep(rows[best])
        sizes = keep.sum(1).tolist() if self._can_sync else None
        most = max(sizes) if sizes else min(1 + self._max_nodes, draft.tree.num_nodes)
        return Allocation(keep, most, rows[best], gains[best], sizes)

    def observe(self, outcome: StepOutcome) -> None:
        foreseen = self.costs.predict(outcome)
        self.foreseen_s += foreseen.total - self.costs.beside(outcome)
        self.foreseen_plain_s += self._plain_seconds(outcome.batch_size, outcome.num_cached)
        if outcome.is_first:
            outcome = replace(outcome, seconds=foreseen)
        elif outcome.plan.probe or self._num_steps < FIRST_STEPS or self._random.random() < OBSERVED_SHARE:
            self.costs.learn(outcome, foreseen, self._is_usual(outcome.plan))
        self._num_steps += 1
        self._count_missed(outcome)
        self._probe_balance -= (LOOKING_SHARE if outcome.depth else PROBE_SHARE) * outcome.seconds.total
        self._prompt_tokens = PROMPT_MEMORY * self._prompt_tokens + (1 - PROMPT_MEMORY) * outcome.num_prompt_tokens
        if self._is_warming_up or self._is_among_the_first(outcome.plan):
            return  # drafts were not calibrated yet, so their acceptance says little
        if outcome.plan.probe:
            self._probe_balance = max(self._probe_balance, 0.0) + self._probe_cost(outcome)
        self._by_size.of(outcome.batch_size).update(outcome.num_accepted, outcome.num_expected)

    def _count_missed(self, outcome: StepOutcome) -> None:
        if outcome.plan.is_drafting and not outcome.plan.members:
            self._num_missed = 0
        else:
            self._num_missed += outcome.batch_size + outcome.num_prompt_tokens

    def _is_usual(self, plan: DraftPlan) -> bool:
        """Return whether the overhead of a step with this plan is typical; the widest drafts have much more."""
        return not plan.is_drafting or (self._num_drafts > SETTLED_AFTER and plan.width <= self._best.width)

    def _observe(self, draft: Draft, plan: DraftPlan, batch: DecodeBatch) -> None:
        """Update the acceptance model with a draft's values."""
        if plan.probe or self._num_drafts % _observe_every(len(batch)) == 0:
            levels = self._to_full_depth(draft, plan, len(batch))
            self._now.curves.observe(levels, plan.width, draft.extra_log_values, self._remaining(levels, plan, batch))
        self._num_drafts += 1
        self._num_offers += draft.depth > 0

    def _remaining(self, levels: list[Tensor], plan: DraftPlan, batch: DecodeBatch) -> Int[Tensor, " M"] | None:
        """Return the remaining tokens of the sequences that were drafted for, or None if all levels fit."""
        if min(batch.remaining_tokens) > len(levels):
            return None
        if plan.members is None:
            return batch.remaining_at
        return batch.remaining_at[to_device(plan.members, batch.remaining_at.device)]

    def _to_full_depth(self, draft: Draft, plan: DraftPlan, size: int) -> list[Float[Tensor, "M _ K"]]:
        """Return the draft's levels, with empty ones below if the drafter had nothing more to propose."""
        if not draft.is_all or len(draft.levels) >= self._max_depth:
            return draft.levels
        shape = plan.num_members(size), plan.width, plan.children
        nothing = torch.full(shape, -torch.inf, device=draft.tree.tokens.device)
        levels = draft.levels or [nothing[:, :1]]
        return levels + [nothing] * (self._max_depth - len(levels))

    def _profits(self, batch: DecodeBatch, rows: list[int], gains: list[float]) -> np.ndarray:
        """Return the tokens gained by verifying each number of rows, less the price of the seconds."""
        seconds = self.costs.passes(rows, batch.num_cached, len(batch), batch.num_prefill_rows)
        return self._now.accuracy * np.asarray(gains) - self._opportunity_rate(len(batch), batch.num_cached) * seconds

    def _opportunity_rate(self, size: int, num_cached: int) -> float:
        """Return the price of a second in tokens: the average rate of the best kind of step, with or without drafts.

        A step should not maximise its own rate. If its texts are hard, a second is worth more in the steps to come; if
        they are easy, it is worth less there.
        """
        return max(self._best.rate, self._plain_rate(size, num_cached))

    def _plain_rate(self, size: int, num_cached: int) -> float:
        """Return plain decoding's tokens per second."""
        return size / self._plain_seconds(size, num_cached)

    def _plain_seconds(self, size: int, num_cached: int) -> float:
        """Return the seconds of a plain step, in the pass that is run for that many rows."""
        return self.costs.plain_step(size, num_cached, self._padded(size))

    def _sizes(self, size: int, num_candidates: int) -> list[int]:
        """Return the numbers of rows to choose from; in a trial only the best plan's number."""
        if self._is_trial:
            return [min(self._best.num_rows, size + num_candidates)]
        return [size, *self._buckets(size, num_candidates)]

    def _passes(self, rows: list[int]) -> list[int]:
        """Return the rows of the passes that are run for these numbers of rows."""
        return sorted({self._padded(n) for n in rows})

    def _buckets(self, size: int, num_candidates: int) -> list[int]:
        """Return the numbers of rows, more than `size`, that a pass may have; a GPU has few of them."""
        return _between(FINE_BUCKETS if self._can_sync else BUCKETS, size, num_candidates)

    def _budget(self, draft: Draft, batch: DecodeBatch) -> Budget:
        """Return the budget: trees within their bounds, and no nodes deeper than a sequence's remaining tokens."""
        max_depths = None
        if min(batch.remaining_tokens) <= draft.depth:
            max_depths = batch.remaining_at - 1
        return Budget(num_rows=0, num_nodes=1 + self._max_nodes, max_depths=max_depths)

    def _decide(self, batch: DecodeBatch) -> None:
        """Decide whether to draft, and how wide and deep, if the last decision is too old."""
        size, step = self._decided
        if size == len(batch) and self._num_steps < step + REVIEW_EVERY:
            return
        self._decided = len(batch), self._num_steps
        plain = self._plain_rate(len(batch), batch.num_cached)
        self._best = self._search_plans(batch)
        hurdle = OFF_THRESHOLD
        if not self._drafting:
            backlog = min(self._num_missed, batch.num_cached, HORIZON * len(batch))
            hurdle = ON_THRESHOLD + self.costs.read(backlog) / (HORIZON * len(batch) / plain)
        before, self._drafting = self._drafting, self._best.rate > plain * hurdle
        if before and not self._drafting and self._num_steps >= self._retried_at + RETRY_EVERY:
            self._retried_at = self._num_steps
            self._probe_balance = min(self._probe_balance, PROBE_SHARE * RETRY_AFTER * len(batch) / plain)

    def _search_plans(self, batch: DecodeBatch) -> PlanEstimate:
        """Return the width and depth with the best rate, by recent acceptance."""
        size, costs, widths = len(batch), self.costs, self._now.curves.widths
        rows = [n for n in self._passes(self._buckets(size, size * self._max_nodes)) if n > size]
        gains = self._now.accuracy * size * self._now.curves.expected([n / size - 1 for n in rows])
        prompts = self._prompt_tokens * costs.read.per_row  # a drafting head reads new prompts too
        levels = costs.further_levels(size, widths, self._max_depth)
        drafted = costs.read.at(size + gains) + levels[:, :, None]  # it reads the tokens of the previous step
        spent = prompts + costs.draft_rest(size) + drafted
        rates = (size + gains) / (spent + costs.passes(rows, batch.num_cached, size))
        rates[1:, 0] = 0.0  # a single level has one parent, however wide the draft
        width, depth, n = np.unravel_index(rates.argmax(), rates.shape)
        tau = 1 + float(gains[width, depth, n]) / size
        return PlanEstimate(float(rates[width, depth, n]), widths[width], int(depth) + 1, rows[n], tau)

    def _pays(self, builder: TreeBuilder, level_price: float, row_price: float) -> bool:
        """Return whether one more level is expected to yield more than it costs. Both prices are in tokens.

        A node is worth what it yields beyond the price of its row. Computed on the host, node by node, until the answer
        is clear, mostly after two or three nodes.
        """
        children = self._now.curves.children(builder.depth + 1)
        trust, gain = self._now.accuracy, 0.0
        for value in builder.frontier().log_values.exp().flatten().tolist():
            for child in children:
                more = trust * value * child - row_price
                if more <= 0:  # the following ones are worth less
                    break
                gain += more
            if gain > level_price:
                return True
        return False

    def _next_probe(self, batch: DecodeBatch) -> DraftPlan:
        """Return the next probe. Off: a trial, or a draft for some sequences. On: a plain step or the widest draft."""
        if not self._drafting:
            plain = self._plain_rate(len(batch), batch.num_cached)
            if self._best.rate < TRIAL_THRESHOLD * plain or self._best.tau < MIN_TRIAL_TAU:
                return self._probe(batch, max(1, len(batch) // PROBE_FRACTION))
            self._trial_until, self._decided = self._num_steps + TRIAL_STEPS, (len(batch), self._num_steps)
            return self._trial_plan(batch)
        if self._plain_is_next:
            return replace(PLAIN, probe=True)
        return self._probe(batch, len(batch))

    def _trial_plan(self, batch: DecodeBatch) -> DraftPlan:
        """Return the best plan as a probe."""
        return replace(self._best_plan(batch), probe=True)

    def _probe(self, batch: DecodeBatch, num_members: int) -> DraftPlan:
        """Return the widest draft for some of the sequences, by turns."""
        members = None
        if num_members < len(batch):
            first = self._num_drafts * num_members
            members = tuple(sorted((first + i) % len(batch) for i in range(num_members)))
        enough = (lambda builder: self._cannot_pay(builder, batch)) if self._can_sync else None
        return self._plan(self._max_depth, self._top_k, members=members, should_stop=enough, probe=True)

    def _cannot_pay(self, builder: TreeBuilder, batch: DecodeBatch) -> bool:
        """Return whether no further level could pay, even if the whole batch drafted and children matched parents."""
        level = builder.levels[-1].flatten(1)
        beam = level.topk(min(self._top_k, level.shape[1]), dim=1).values
        everyone = len(batch) / len(beam)
        price = self._plain_rate(len(batch), batch.num_cached)
        return everyone * beam.exp().sum().item() < price * self.costs.level(everyone * beam.numel())

    def _probe_cost(self, probe: StepOutcome) -> float:
        """Return the seconds of a probe, without prompts, beyond those that its tokens would take otherwise."""
        size, num_cached = probe.batch_size, probe.num_cached
        worth = (size + probe.num_accepted) / self._opportunity_rate(size, num_cached)
        spent = probe.seconds.total - self.costs.beside(probe)
        return max(spent - worth, PROBE_FLOOR * self._plain_seconds(size, num_cached))


def _observe_every(size: int) -> int:
    """Return the drafting steps between observations, a power of two."""
    return 1 << max(OBSERVE_EVERY, size // MEMBERS_EVERY).bit_length() - 1


def _between(buckets: Sequence[int], size: int, num_candidates: int) -> list[int]:
    """Return the buckets that hold the roots and some candidates, and the number that holds all candidates."""
    most = size + num_candidates
    return [*(n for n in buckets if size < n < most), most]
