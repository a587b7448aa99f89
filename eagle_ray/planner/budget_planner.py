"""BudgetPlanner: one budget for the whole batch, spent where a second buys most tokens.

A kind of step is worth (sequences + drafts expected to be accepted) / (seconds to draft + to verify + the rest). The
best such rate is the price of a second, and what a single step does has to be worth its price:

    before drafting   the width and depth with the best rate by recent acceptance in batches of about this size, or
                      none at all: a plain step. Drafts are given up below KEPT times plain decoding's rate and taken
                      up again from MARGIN times on, where what was missed pays for itself too
    between levels    stop once the next level's nodes would not pay for drafting them
    after drafting    as many of the batch's best candidates as pay for their rows, over the buckets of the cost curve

What is not done is not learnt about. So now and then drafts are made although they should not be, for a few sequences
or, where they nearly pay, for everyone and some steps; or a step is plain or drafts wider than it would: a probe. What
probes cost, beyond what their tokens are worth, is at most PROBE_SHARE of the time, and LOOKING_SHARE while there are
drafts; but for the first ones, and for one in FORGIVEN steps, AGAIN plain steps after drafts were given up, whatever
was spent before.
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
PROBE_SHARE = 0.005  # of the time, while nothing is drafted
LOOKING_SHARE = 0.001  # of the time while something is: most is learnt from looking a little deeper and wider
PROBE_FLOOR = 0.1  # of a plain step: what a probe is taken to cost at least, which makes one of twenty steps the most
UNHEARD = 1  # steps that may be planned and not heard of: so long it is not known what a probe has cost
TRIAL_THRESHOLD = 0.8  # of plain decoding's rate that drafts must promise to be tried by everyone, for TRIAL steps
TRIAL = 16
LEAST_TAU = 1.1  # that they must promise besides: fewer tokens would not be worth having at any cost
PROBED = 8  # where they promise less a probe is for one of so many sequences: each must first read what it missed
FIRST_PROBES = 4  # drafts with something in them from which the first opinion is formed
FIRST_LOOKS = 64  # drafts after which it is formed even so: a drafter that reads texts may have nothing for a while
FIRST_MEMBERS, FIRST_PROBED = 2, 4  # sequences of each of them: so many, or one of so many if that is more
FIRST_STEPS, HEARD = 64, 0.25  # after the first steps so many are heard of, at random: lessons come at regular ones
SETTLED = 32  # drafts after which a step takes what it usually does: a drafter learns at each of the first 30
OBSERVE_EVERY = 8  # drafting steps, at least; a power of two, as LOOK_EVERY, so that such a step is observed
MEMBERS_EVERY = 2  # sequences of a batch for each step more between observations, to a power of two
LOOK_EVERY = 32  # drafting steps: a level deeper and a little wider than what promises most
AGAIN, FORGIVEN = 32, 512  # plain steps after which drafts that were given up are tried again, once in so many steps
REVIEW_EVERY = 16  # steps for which a decision about width and depth holds, the batch being the same
ON_THRESHOLD = (
    1.02  # times plain decoding's rate that drafts must promise before they are made: promises are a little off
)
OFF_THRESHOLD = 0.97  # likewise to go on with them: what they really take is only heard of while they are made
HORIZON = 64  # plain steps in which turning drafts on must earn what the catching up costs
PROMPT_MEMORY = 0.98  # per step, of how many prompt tokens come along with one


@dataclass(frozen=True, slots=True)
class PlanEstimate:
    """A kind of draft and what a step with it is expected to yield.

    rate: tokens a second. num_rows: of its pass. tau: tokens of a sequence.
    """

    rate: float
    width: int = 0
    depth: int = 0
    num_rows: int = 0
    tau: float = 1.0


class BudgetPlanner:
    """max_nodes, max_depth, top_k: bounds on each sequence's tree, as for UniformPlanner, and not more than it needs.

    can_sync: whether asking the device between levels is cheap, as on a CPU; otherwise depth is decided beforehand, and
    a step that drafts asks once, for the values by which it sets the number of rows. padded: how many rows a pass for
    so many has.
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
        self.foreseen_s = self.foreseen_plain_s = 0.0  # of all steps, by the costs: as taken, without drafts
        self._by_size = ExpectationsBySize(AcceptanceModel(widths, self._max_depth))
        self._now = self._by_size.last  # of the batch that is planned for
        self._best = PlanEstimate(0.0)
        self._draw = random.Random(0)
        self._drafting = True
        self._num_steps = self._num_missed = 0  # steps; tokens that a drafter has not read since it last drafted
        self._num_drafts = self._num_offers = 0  # drafts asked for, and those of them that held anything
        self._probe_balance = 0.0  # seconds of probes not yet made up for by their share of the time since
        self._forgiven_at = -FORGIVEN  # the step at which debts last were, drafts being given up
        self._plain_is_next = True  # of probes while something is drafted
        self._probed_at = -1 - UNHEARD  # the step before which the last probe was launched
        self._trial_until = 0  # the step before which everyone drafts to see whether it pays
        self._reviewed = (0, 0)  # batch size and step of the last decision
        self._prompt_tokens = 0.0  # of new prompts, computed along with a step on average
        self._rows_each = 2.0  # rows of the last draft's pass, for each sequence

    @property
    def will_draft(self) -> bool:
        return self._drafting or self._is_trial

    def plan(self, batch: DecodeBatch) -> DraftPlan:
        if self._can_sync and max(batch.remaining_tokens) <= 1:  # each has one token to go, which needs no draft
            return PLAIN
        if self._is_warming_up:
            return self._probe(batch, max(FIRST_MEMBERS, len(batch) // FIRST_PROBED))
        self._now = self._by_size.of(len(batch))
        self._review(batch)
        if self._is_trial:
            return self._try_out(batch)
        if self._probe_balance <= 0 and self._num_steps > self._probed_at + UNHEARD:
            return self._next_probe(batch)
        if not self._drafting:
            return PLAIN
        return self._best_plan(batch)

    @property
    def _is_warming_up(self) -> bool:
        return self._num_offers < FIRST_PROBES and self._num_drafts < FIRST_LOOKS

    def _is_among_the_first(self, plan: DraftPlan) -> bool:
        """Whether the plan is that of a probe which formed the first opinion."""
        return plan.probe and self._num_offers <= FIRST_PROBES and self._num_drafts <= FIRST_LOOKS

    @property
    def _is_trial(self) -> bool:
        return self._num_steps < self._trial_until

    def _plan(self, depth: int, width: int, **rest: Any) -> DraftPlan:
        return DraftPlan(depth, width, num_children=self._top_k, **rest)

    def _best_plan(self, batch: DecodeBatch) -> DraftPlan:
        """What promises most: as deep as each further level pays, or as has lately been best.

        Now and then a level deeper or a little wider: near the best it costs next to nothing to look around.
        """
        looks = self._num_drafts % max(LOOK_EVERY, _observe_every(len(batch))) == 0
        width, more = self._best.width, int(looks)
        if looks:
            width = next((w for w in self._now.curves.widths if w > width), width)
        if not self._can_sync:
            return self._plan(min(self._best.depth + more, self._max_depth), width)
        price = self._opportunity_rate(len(batch), batch.num_cached)
        num_rows = len(batch) * self._rows_each
        row_price = price * self.costs.row(num_rows, batch.num_cached, len(batch), batch.num_prefill_rows)
        level_price = price * self.costs.level(len(batch) * width)
        unpaid = 0

        def enough(builder: TreeBuilder) -> bool:
            nonlocal unpaid
            unpaid += unpaid > 0 or not self._pays(builder, level_price, row_price)
            return unpaid > more

        return self._plan(min(self._max_depth, max(batch.remaining_tokens) - 1), width, should_stop=enough)

    def allocate(self, draft: Draft, plan: DraftPlan, batch: DecodeBatch) -> Allocation:
        """The bucket with the best rate, filled with the most valuable nodes of the batch."""
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
        self._rows_each = rows[best] / size
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
        elif outcome.plan.probe or self._num_steps < FIRST_STEPS or self._draw.random() < HEARD:
            self.costs.learn(outcome, foreseen, self._is_usual(outcome.plan))
        self._num_steps += 1
        self._count_missed(outcome)
        self._probe_balance -= (LOOKING_SHARE if outcome.depth else PROBE_SHARE) * outcome.seconds.total
        self._prompt_tokens = PROMPT_MEMORY * self._prompt_tokens + (1 - PROMPT_MEMORY) * outcome.num_prompt_tokens
        if self._is_warming_up or self._is_among_the_first(outcome.plan):
            return  # nothing was calibrated: later drafts keep what they promise better
        if outcome.plan.probe:
            self._probe_balance = max(self._probe_balance, 0.0) + self._probe_cost(outcome)
        self._by_size.of(outcome.batch_size).update(outcome.num_accepted, outcome.num_expected)

    def _count_missed(self, outcome: StepOutcome) -> None:
        if outcome.plan.is_drafting and not outcome.plan.members:
            self._num_missed = 0
        else:
            self._num_missed += outcome.batch_size + outcome.num_prompt_tokens

    def _is_usual(self, plan: DraftPlan) -> bool:
        """Whether a step with this draft leaves as much to do besides as most: the widest look leaves several times as
        much, and where nothing else is drafted drafts would come to look dear by it.
        """
        return not plan.is_drafting or (self._num_drafts > SETTLED and plan.width <= self._best.width)

    def _observe(self, draft: Draft, plan: DraftPlan, batch: DecodeBatch) -> None:
        """Note what a draft is worth; where there was nothing more, a deeper one would have been worth the same."""
        if plan.probe or self._num_drafts % _observe_every(len(batch)) == 0:
            levels = self._to_full_depth(draft, plan, len(batch))
            self._now.curves.observe(levels, plan.width, draft.extra_log_values, self._rooms(levels, plan, batch))
        self._num_drafts += 1
        self._num_offers += draft.depth > 0

    def _rooms(self, levels: list[Tensor], plan: DraftPlan, batch: DecodeBatch) -> Int[Tensor, " M"] | None:
        """Tokens that each sequence which was drafted for may still produce; None where all levels fit."""
        if min(batch.remaining_tokens) > len(levels):
            return None
        return (
            batch.remaining_at
            if plan.members is None
            else batch.remaining_at[to_device(plan.members, batch.remaining_at.device)]
        )

    def _to_full_depth(self, draft: Draft, plan: DraftPlan, size: int) -> list[Float[Tensor, "M _ K"]]:
        """The draft's levels; where it is all there was, with empty ones below."""
        if not draft.is_all or len(draft.levels) >= self._max_depth:
            return draft.levels
        shape = plan.num_members(size), plan.width, plan.children
        nothing = torch.full(shape, -torch.inf, device=draft.tree.tokens.device)
        levels = draft.levels or [nothing[:, :1]]
        return levels + [nothing] * (self._max_depth - len(levels))

    def _profits(self, batch: DecodeBatch, rows: list[int], gains: list[float]) -> np.ndarray:
        """Tokens gained by verifying so many rows, less those that the seconds bring in elsewhere."""
        seconds = self.costs.passes(rows, batch.num_cached, len(batch), batch.num_prefill_rows)
        return self._now.accuracy * np.asarray(gains) - self._opportunity_rate(len(batch), batch.num_cached) * seconds

    def _opportunity_rate(self, size: int, num_cached: int) -> float:
        """Of a second, in tokens: what a second of the best kind of step brings in on average, drafts or none.

        A step is not to have the best rate that it can have by itself: where texts are hard that is a poor one, and a
        second spent on raising it is worth more in the steps to come; where they are easy it is the other way round.
        """
        return max(self._best.rate, self._plain_rate(size, num_cached))

    def _plain_rate(self, size: int, num_cached: int) -> float:
        """Tokens a second without drafts."""
        return size / self._plain_seconds(size, num_cached)

    def _plain_seconds(self, size: int, num_cached: int) -> float:
        """Of a plain step, in the pass that there is for so many rows."""
        return self.costs.plain_step(size, num_cached, self._padded(size))

    def _sizes(self, size: int, num_candidates: int) -> list[int]:
        """Rows that the step may have verified; in a trial as many as drafts promise most with, not as seem to pay."""
        if self._is_trial:
            return [min(self._best.num_rows, size + num_candidates)]
        return [size, *self._buckets(size, num_candidates)]

    def _passes(self, rows: list[int]) -> list[int]:
        """Those of the passes that there are which take so many rows."""
        return sorted({self._padded(n) for n in rows})

    def _buckets(self, size: int, num_candidates: int) -> list[int]:
        """Rows that a pass may have beyond the roots of `size` sequences: a CPU takes any number, a GPU's are set."""
        return _between(FINE_BUCKETS if self._can_sync else BUCKETS, size, num_candidates)

    def _budget(self, draft: Draft, batch: DecodeBatch) -> Budget:
        """Every tree within its bounds; nodes deeper than a sequence has tokens to go are worth nothing."""
        max_depths = None
        if min(batch.remaining_tokens) <= draft.depth:
            max_depths = batch.remaining_at - 1
        return Budget(num_rows=0, num_nodes=1 + self._max_nodes, max_depths=max_depths)

    def _review(self, batch: DecodeBatch) -> None:
        """Decide anew whether to draft, and how wide and deep."""
        size, step = self._reviewed
        if size == len(batch) and self._num_steps < step + REVIEW_EVERY:
            return
        self._reviewed = len(batch), self._num_steps
        plain = self._plain_rate(len(batch), batch.num_cached)
        self._best = self._search_plans(batch)
        hurdle = OFF_THRESHOLD
        if not self._drafting:
            backlog = min(self._num_missed, batch.num_cached, HORIZON * len(batch))
            hurdle = ON_THRESHOLD + self.costs.read(backlog) / (HORIZON * len(batch) / plain)
        before, self._drafting = self._drafting, self._best.rate > plain * hurdle
        if before and not self._drafting and self._num_steps >= self._forgiven_at + FORGIVEN:
            self._forgiven_at = self._num_steps
            self._probe_balance = min(self._probe_balance, PROBE_SHARE * AGAIN * len(batch) / plain)

    def _search_plans(self, batch: DecodeBatch) -> PlanEstimate:
        """The width and depth with the best rate, by what such drafts have lately been worth."""
        size, costs, widths = len(batch), self.costs, self._now.curves.widths
        rows = [n for n in self._passes(self._buckets(size, size * self._max_nodes)) if n > size]
        gains = self._now.accuracy * size * self._now.curves.expected([n / size - 1 for n in rows])
        prompts = self._prompt_tokens * costs.read.per_row  # a head that drafts reads new prompts too
        levels = costs.further_levels(size, widths, self._max_depth)
        drafted = costs.read.at(size + gains) + levels[:, :, None]  # it reads what a step like it has brought in
        spent = prompts + costs.draft_rest(size) + drafted
        rates = (size + gains) / (spent + costs.passes(rows, batch.num_cached, size))
        rates[1:, 0] = 0.0  # a single level is of one node's children, however wide the draft
        width, depth, n = np.unravel_index(rates.argmax(), rates.shape)
        tau = 1 + float(gains[width, depth, n]) / size
        return PlanEstimate(float(rates[width, depth, n]), widths[width], int(depth) + 1, rows[n], tau)

    def _pays(self, builder: TreeBuilder, level_price: float, row_price: float) -> bool:
        """Whether one more level is expected to bring in more than what it takes. Both prices are in tokens.

        Its nodes are worth what they bring in beyond their rows, which are taken to cost what rows near the last
        number of them do. On the host, node by node, up to where it is clear: mostly after two or three.
        """
        children = self._now.curves.children(builder.depth + 1)
        trust, gain = self._now.accuracy, 0.0
        for value in builder.frontier().log_values.exp().flatten().tolist():
            for child in children:
                more = trust * value * child - row_price
                if more <= 0:  # those after it are worth less
                    break
                gain += more
            if gain > level_price:
                return True
        return False

    def _next_probe(self, batch: DecodeBatch) -> DraftPlan:
        """Where nothing is drafted a trial or a draft for some; else by turns a plain step and the widest draft."""
        if not self._drafting:
            plain = self._plain_rate(len(batch), batch.num_cached)
            if self._best.rate < TRIAL_THRESHOLD * plain or self._best.tau < LEAST_TAU:
                return self._probe(batch, max(1, len(batch) // PROBED))
            self._trial_until, self._reviewed = self._num_steps + TRIAL, (len(batch), self._num_steps)
            return self._try_out(batch)
        if self._plain_is_next:
            return replace(PLAIN, probe=True)
        return self._probe(batch, len(batch))

    def _try_out(self, batch: DecodeBatch) -> DraftPlan:
        """What promises most, in order to see whether it keeps that."""
        return replace(self._best_plan(batch), probe=True)

    def _probe(self, batch: DecodeBatch, num_members: int) -> DraftPlan:
        """The widest draft for some of the sequences, by turns."""
        members = None
        if num_members < len(batch):
            first = self._num_drafts * num_members
            members = tuple(sorted((first + i) % len(batch) for i in range(num_members)))
        enough = (lambda builder: self._cannot_pay(builder, batch)) if self._can_sync else None
        return self._plan(self._max_depth, self._top_k, members=members, should_stop=enough, probe=True)

    def _cannot_pay(self, builder: TreeBuilder, batch: DecodeBatch) -> bool:
        """Whether no level more could pay if the whole batch were drafted for and children were as good as parents."""
        level = builder.levels[-1].flatten(1)
        beam = level.topk(min(self._top_k, level.shape[1]), dim=1).values
        everyone = len(batch) / len(beam)
        price = self._plain_rate(len(batch), batch.num_cached)
        return everyone * beam.exp().sum().item() < price * self.costs.level(everyone * beam.numel())

    def _probe_cost(self, probe: StepOutcome) -> float:
        """Seconds that a probe took, prompts left out, beyond those in which its tokens would be made without it."""
        size, num_cached = probe.batch_size, probe.num_cached
        worth = (size + probe.num_accepted) / self._opportunity_rate(size, num_cached)
        spent = probe.seconds.total - self.costs.beside(probe)
        return max(spent - worth, PROBE_FLOOR * self._plain_seconds(size, num_cached))


def _observe_every(size: int) -> int:
    """Drafting steps from one observation to the next: a power of two."""
    return 1 << max(OBSERVE_EVERY, size // MEMBERS_EVERY).bit_length() - 1


def _between(buckets: Sequence[int], size: int, num_candidates: int) -> list[int]:
    """Those that hold `size` sequences' roots and some of the candidates, and what holds them all."""
    most = size + num_candidates
    return [*(n for n in buckets if size < n < most), most]
