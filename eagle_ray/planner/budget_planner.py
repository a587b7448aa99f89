"""BudgetPlanner: choose each step's draft and number of verified rows to maximise tokens per second of the whole batch.

The rate of a step is (sequences + drafts expected to be accepted) / (seconds to draft + to verify +
overhead). The best rate is the price of a second, and every part of a step must be worth its price:

    before drafting   take the width and depth with the best rate, or a plain step (`plan_search.py`)
    between levels    stop if the next level's nodes would not pay for drafting them
    after drafting    verify as many of the batch's best candidates as pay for their rows

Whether drafts are on, and of which kind, is the mode (`modes.py`).

It learns only from steps that it runs, so now and then a step is a probe. While drafts are off, or
by lookups alone, probes are a model's draft (on a CPU for a part of the batch) and a few steps with
lookups. While the model drafts, they are a plain step, the widest draft and lookups alone, by
turns. A kind whose drafts are hardly accepted is probed more and more rarely until the texts change
(`ProbeSchedule`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from eagle_ray.core.decode_batch import DecodeBatch
from eagle_ray.core.device import StepTimes, to_device
from eagle_ray.core.tree_bounds import TreeBounds
from eagle_ray.methods.drafter import Draft
from eagle_ray.models.graphs import PassSizes
from eagle_ray.planner.acceptance_model import MEMORY, AcceptanceModel
from eagle_ray.planner.calibrated_acceptance import AcceptanceByBatchSize, CalibratedAcceptance
from eagle_ray.planner.cost_model import StepCosts
from eagle_ray.planner.lookup_gains import LookupGains
from eagle_ray.planner.modes import OFF_REVIEW_EVERY, Mode, PlannerModes
from eagle_ray.planner.plan_search import REVIEW_EVERY, PlanSearch
from eagle_ray.planner.planner import Allocation, DraftKind, StepOutcome
from eagle_ray.planner.sequence_worth import SequenceWorths
from eagle_ray.tree.budget import Budget, Candidates
from eagle_ray.tree.expand import PLAIN_PLAN, DraftPlan, PartialDraft, PriceRule

PLANNED_WIDTHS = (1, 2, 3, 4, 6, 8, 10)
# Probes of the warm-up; on a CPU each drafts for a quarter of the batch, as catching up costs.
NUM_PROBES = 4
# Sequences of such a probe: their drafts say enough, and those of larger batches take long.
MAX_PROBED = 4
FIRST_OVERHEAD = 1.7  # times the measured overhead that the first drafts may show to be typical


def acceptance_model(bounds: TreeBounds) -> AcceptanceModel:
    """Return an AcceptanceModel for the widths and depths that a planner may choose within the bounds."""
    widths = (*(w for w in PLANNED_WIDTHS if w < bounds.top_k), bounds.top_k)
    return AcceptanceModel(widths, bounds.depth)


class BudgetPlanner:
    """A planner that maximises tokens per second, from measured costs and observed acceptance.

    Args:
        can_sync: whether reading values from the device between levels is cheap, as on a CPU. If
            not, the depth is decided before drafting and the number of rows by the acceptance
            model, so that only a probe waits for the device.
        sizes: sizes of the passes that are replayed; None if steps run eagerly at any size.
        kinds: kinds of drafts that the drafter can make.
        lookup_hits: indexes a batch's texts and returns `Drafter.lookup_hits`; None without
            lookups.

    Attributes:
        modes: whether drafts are on, and of which kind.
        predicted_s: predicted seconds of all steps so far.
        predicted_plain_s: predicted seconds of these steps if each had been a plain one.
        search: search for the best plan at the current costs.
        acceptance: acceptance of drafts at the current batch size.
        worths: value of the drafts of single sequences; None if values are not read from the
            device.
    """

    def __init__(
        self,
        bounds: TreeBounds,
        costs: StepCosts,
        can_sync: bool = True,
        sizes: PassSizes | None = None,
        kinds: Collection[DraftKind] = (DraftKind.MODEL,),
        lookup_hits: Callable[[DecodeBatch], tuple[int, int] | None] | None = None,
    ):
        self._lookup_hits = lookup_hits
        self._bounds = bounds
        self._has_model = DraftKind.MODEL in kinds
        self._lookups = LookupGains(bounds) if DraftKind.LOOKUPS in kinds else None
        self._can_sync = can_sync
        self._replays = sizes is not None
        self.predicted_s = 0.0
        self.predicted_plain_s = 0.0
        self.search = PlanSearch(bounds, costs, can_sync, sizes or PassSizes())
        self.modes = PlannerModes(self.search, self._lookups, self._has_model)
        self.acceptance_by_size = AcceptanceByBatchSize(acceptance_model(bounds))
        self.acceptance = self.acceptance_by_size.last
        self.worths = SequenceWorths() if can_sync and self._has_model else None
        self._sequences: Sequence[object] = []  # of the last step
        self._is_known = False  # acceptance was known before the first draft
        self._repeats_probe = False  # at the next step
        self._probes_anew = False  # the next probe is the first one since the texts have changed
        self._num_probes_on = 0  # probes while the model is on
        self._last_draft = 0  # the last step that drafted or might have
        self.num_drafts = 0
        self.num_offers = 0  # nonempty drafts
        self._rows_per_sequence = 2.0  # rows per sequence in the last drafting step

    @property
    def costs(self) -> StepCosts:
        """Return the costs of a step's parts, as corrected so far."""
        return self.search.costs

    @property
    def will_draft(self) -> bool:
        is_model = self._has_model and self.modes.kind is DraftKind.MODEL
        return is_model and self.modes.mode is not Mode.OFF

    def acceptance_state(self) -> dict[str, Tensor]:
        """Return the observed acceptance of drafts, which `load_acceptance` accepts."""
        return self.acceptance_by_size.usual.model.state()

    def load_acceptance(self, state: Mapping[str, Tensor]) -> None:
        """Restore observed acceptance before the first step, so that no warm-up probes are needed.

        Raises ValueError and KeyError as AcceptanceModel.load_state does.
        """
        self.acceptance_by_size.last.load_state(state)
        self._is_known = True

    def plan(self, batch: DecodeBatch) -> DraftPlan:
        if self._can_sync and max(batch.remaining_tokens) <= 1:
            return PLAIN_PLAN  # each has one token left, which needs no draft
        self.acceptance = self.acceptance_by_size.of(len(batch))
        if self.modes.mode is not Mode.WARM_UP or self._is_warm:
            self._review(batch)

        if self.modes.mode is Mode.WARM_UP:
            return PLAIN_PLAN if self._lacks_plain_steps(batch) else self._draft_probe(batch)
        if self.modes.mode is Mode.PROBING:
            return self._as_probe(self._best_plan(batch))
        if self._repeats_probe:
            self._repeats_probe = False
            return self._draft_probe(batch)
        if self.modes.runs(DraftKind.MODEL):
            return self._next_probe(batch) if self.modes.is_probe_due else self._plan_on(batch)
        return self._plan_without_model(batch)

    def _review(self, batch: DecodeBatch) -> None:
        """Review the mode if that is due, or at once if drafts for these sequences are worth less than they were."""
        worths = self.worths
        if worths is not None:
            sequences = [*batch.sequences]
            if sequences != self._sequences:
                self._sequences = sequences
                worths.keep_only(sequences)
                if len(sequences) == 1 or self.modes.is_resting:
                    self.modes.review_soon()
            if self._pays_no_longer(worths, batch):
                self.modes.review_soon()
        self.modes.review(batch, self.acceptance, worths)

    def _pays_no_longer(self, worths: SequenceWorths, batch: DecodeBatch) -> bool:
        """Return whether drafts paid at the last review and do not pay for the sequences that are drafted for now."""
        if not self.modes.runs(DraftKind.MODEL) or self.modes.is_resting:
            return False
        members = self.modes.best.members
        min_worth = 0.0 if members is None else members.min_worth
        known = 1.0 if members is None else members.worth
        now = [worth for worth in map(worths.of, batch.sequences) if worth >= min_worth]
        mean = sum(now) / len(now) if now else 0.0
        return not self.modes.pays(batch, mean / known)

    def _plan_on(self, batch: DecodeBatch) -> DraftPlan:
        """Return the best plan for those sequences whose drafts are worth their seconds, or a plain step."""
        if self.worths is None:
            return self._best_plan(batch)
        best = self.modes.best.members
        min_worth = 0.0 if best is None else best.min_worth
        if self.modes.is_resting:
            min_worth = math.inf
        members = self.worths.members(batch.sequences, min_worth, self.modes.num_steps)
        if not members:
            return PLAIN_PLAN
        return self._best_plan(batch, None if len(members) == len(batch) else members)

    def _plan_without_model(self, batch: DecodeBatch) -> DraftPlan:
        """Return the plan of a step while the model is off: plain or by lookups alone, unless a probe is due."""
        if self.modes.num_steps % OFF_REVIEW_EVERY == 0 and self.modes.texts_have_changed(batch):
            self.modes.restart_probes(batch, self.acceptance)
            self._probes_anew = True
        if self.modes.is_probe_due:
            return self._next_probe(batch)
        if self.modes.runs(DraftKind.LOOKUPS):
            return self._lookups_plan(batch)
        if self._lookups is None:
            return PLAIN_PLAN
        if not self._lookups.is_trying and self._is_trial_due(self._lookups, batch):
            self._lookups.begin_trial(self.modes.num_steps)
        if not self._lookups.is_trying:
            return PLAIN_PLAN
        self.modes.remember_texts(batch)
        return self._as_probe(self._lookups_plan(batch))

    def _is_trial_due(self, lookups: LookupGains, batch: DecodeBatch) -> bool:
        """Return whether lookups are to be tried: their turn has come, or the texts repeat what was read."""
        if lookups.schedule.is_due(self.modes.num_steps):
            return True
        if self._lookup_hits is None or self.modes.num_steps % OFF_REVIEW_EVERY:
            return False
        return lookups.promise(self._lookup_hits(batch))

    def allocate(self, draft: Draft, plan: DraftPlan, batch: DecodeBatch) -> Allocation:
        """Choose the number of rows with the best rate, and fill it with the batch's most valuable nodes."""
        size = len(batch)
        if not draft.depth:
            if plan.is_drafting:
                self._observe_draft(draft, plan, batch)
            return Allocation(draft.tree.valid, 1, size)

        candidates = Candidates.of(draft.tree, self._budget(draft, plan, batch))
        rows = self._row_counts(size, len(candidates.log_values))
        gains = self._gains(rows, candidates, draft, plan, size)
        if plan.is_drafting:
            # After the gains, since a query of the acceptance model waits for its copy.
            self._observe_draft(draft, plan, batch)

        best = int(self._profits(batch, rows, gains, plan).argmax())
        num_rows = rows[best]
        self._rows_per_sequence = num_rows / size
        if self._can_sync:
            keep, sizes = candidates.keep_and_count(num_rows)
            each = self._expected_each(draft, plan, keep)
            return Allocation(keep, max(sizes), num_rows, gains[best], sizes, each)
        num_nodes = min(self._bounds.num_nodes, draft.tree.num_nodes)
        return Allocation(candidates.keep(num_rows), num_nodes, num_rows, gains[best])

    def observe(self, outcome: StepOutcome) -> None:
        self.modes.count(outcome)
        if self._may_skip(outcome):
            self._observe_plain(outcome)
            return

        # Compare the step with its prediction, and correct the costs.
        predicted = self.costs.predict(outcome)
        plain_s = self.search.plain_seconds(outcome.batch_size, outcome.num_cached)
        predicted_s = predicted.total - self.costs.prefill_seconds(outcome)
        self.predicted_s += predicted_s
        self.predicted_plain_s += plain_s
        if outcome.is_first:
            outcome = replace(outcome, seconds=predicted)
        else:
            self.costs.update(outcome, predicted, self._max_overhead(outcome.plan))

        if outcome.plan.lookups_only:
            self._observe_lookups(outcome, predicted, plain_s)
            return
        if self.modes.mode is Mode.WARM_UP or self._is_warm_up_probe(outcome.plan):
            return  # drafts were not calibrated yet, so their acceptance says little
        self._pay(outcome)
        if outcome.plan.probe:
            self.modes.charge(self._probe_cost(outcome), plain_s, outcome.plan.is_drafting)
        if outcome.plan.is_drafting and self.modes.mode is Mode.OFF:
            self.modes.review_soon()
        acceptance = self.acceptance_by_size.of(outcome.batch_size)
        acceptance.update(outcome.num_accepted, outcome.num_expected_drafts)
        if self.worths is not None and outcome.expected_each:
            self.worths.observe_result(
                outcome.sequences, outcome.accepted_each, outcome.expected_each
            )

    # modes

    @property
    def _is_warm(self) -> bool:
        """Return whether enough was drafted to decide; a model's drafts may be empty at first."""
        if self._is_known or not self._has_model:
            return True
        return self.num_offers >= NUM_PROBES or self.num_drafts >= MEMORY

    def _lacks_plain_steps(self, batch: DecodeBatch) -> bool:
        """Return whether the warm-up needs a plain step: the measured ones were greedy and sampled rows cost more."""
        is_new = self.modes.num_steps < NUM_PROBES
        return not self._replays and batch.sampling.any_sampled and is_new

    def _is_warm_up_probe(self, plan: DraftPlan) -> bool:
        """Return whether the plan is one of the warm-up's. Steps overlap, so it may be observed after the warm-up."""
        is_early = self.num_offers <= NUM_PROBES and self.num_drafts <= MEMORY
        return plan.probe and is_early and not self._is_known

    # plans

    def _plan(self, depth: int, width: int, **rest: Any) -> DraftPlan:
        return DraftPlan(depth, width, num_children=self._bounds.top_k, **rest)

    def _lookups_plan(self, batch: DecodeBatch) -> DraftPlan:
        """Return the plan that drafts by lookups alone, as deep as they go."""
        depth = self._bounds.depth
        if self._can_sync:
            depth = min(depth, max(batch.remaining_tokens) - 1)
        return self._plan(depth, self._bounds.top_k, lookups_only=True)

    def _best_plan(self, batch: DecodeBatch, members: tuple[int, ...] | None = None) -> DraftPlan:
        """Return the plan with the best expected rate: as deep as each level pays, or as has recently been best.

        Now and then it is a level deeper or a little wider. Near the optimum that costs little.

        Args:
            members: as in DraftPlan.
        """
        explores = self.num_drafts % (NUM_PROBES * REVIEW_EVERY) == 0
        more = int(explores)
        width = self.modes.best.width
        if explores:
            width = next((w for w in self.acceptance.model.widths if w > width), width)
        if not self._can_sync:
            return self._plan(min(self.modes.best.depth + more, self._bounds.depth), width)

        # The price of a row and of a level, in tokens.
        size = len(batch)
        price = self.modes.opportunity_rate(size, batch.num_cached)
        num_rows = size * self._rows_per_sequence
        row_price = price * self.costs.row_seconds(
            num_rows, batch.num_cached, size, batch.num_prefill_rows
        )
        num_members = size if members is None else len(members)
        level_price = price * self.costs.expand(num_members * width)
        rule = PriceRule(
            self.acceptance.model.children_by_depth,
            self.acceptance.accuracy * self._mean_accuracy(batch, members),
            level_price,
            row_price,
            more,
        )
        depth = min(self._bounds.depth, max(batch.remaining_tokens) - 1)
        return self._plan(
            depth, width, members=members, should_stop=rule.should_stop(), price_rule=rule
        )

    def _mean_accuracy(self, batch: DecodeBatch, members: tuple[int, ...] | None) -> float:
        """Return the accepted drafts of these sequences for each that the average sequence would have."""
        if self.worths is None:
            return 1.0
        chosen = self._members_of(batch, members)
        return sum(map(self.worths.accuracy, chosen)) / len(chosen)

    def _members_of(self, batch: DecodeBatch, members: tuple[int, ...] | None) -> Sequence[object]:
        if members is None:
            return batch.sequences
        return [batch.sequences[i] for i in members]

    # probes

    def _next_probe(self, batch: DecodeBatch) -> DraftPlan:
        """Return the next probe. ON with the model: a plain step, the widest draft or lookups alone, by turns.

        Otherwise: a trial, which also observes the cost of drafting for the whole batch, if it is
        promising; or a draft, and another at the next step if drafts are replayed.
        """
        self.modes.begin_probe()
        if self.modes.runs(DraftKind.MODEL):
            return self._next_probe_on(batch)
        if not self.modes.is_trial_promising(batch):
            # After plain steps a replayed draft catches up in a pass of its own. Only the next one
            # shows its cost.
            self._repeats_probe = self._replays
            return self._draft_probe(batch)
        self.modes.begin_trial()
        return self._as_probe(self._best_plan(batch))

    def _next_probe_on(self, batch: DecodeBatch) -> DraftPlan:
        """Return the next probe while the model is on."""
        turn = self._num_probes_on % (2 if self._lookups is None else 3)
        self._num_probes_on += 1
        if turn == 0:
            return self._as_probe(PLAIN_PLAN)
        if turn == 1:
            return self.widest_plan(batch, None)
        return self._as_probe(self._lookups_plan(batch))

    def _as_probe(self, plan: DraftPlan) -> DraftPlan:
        return replace(plan, probe=True)

    def _draft_probe(self, batch: DecodeBatch) -> DraftPlan:
        """Return the widest draft for a part of the batch, by turns.

        If steps are replayed it is for the whole batch: on an H200 a replayed draft took 4 to 12 ms
        for 4 to 64 sequences, and an eager one for a quarter of them 13 to 20 ms, the first one
        half a second.
        """
        size = len(batch)
        num_members = min(-(-size // NUM_PROBES), MAX_PROBED)
        if self._probes_anew:
            self._probes_anew = False
            num_members = min(size, MAX_PROBED)
        if num_members == size or self._replays:
            return self.widest_plan(batch, None)
        first = self.num_drafts * num_members
        members = sorted((first + i) % size for i in range(num_members))
        return self.widest_plan(batch, tuple(members))

    def widest_plan(self, batch: DecodeBatch, members: tuple[int, ...] | None) -> DraftPlan:
        """Return the plan of a probe: maximum width and depth, stopped only when no further level can pay."""
        should_stop = (lambda builder: self._cannot_pay(builder, batch)) if self._can_sync else None
        return self._plan(
            self._bounds.depth,
            self._bounds.top_k,
            members=members,
            should_stop=should_stop,
            probe=True,
        )

    def _cannot_pay(self, builder: PartialDraft, batch: DecodeBatch) -> bool:
        """Return whether no further level could pay, even if the whole batch drafted and children matched parents."""
        level = builder.levels[-1].flatten(1)
        beam = level.topk(min(self._bounds.top_k, level.shape[1]), dim=1).values
        scale = len(batch) / len(beam)
        gain = scale * beam.exp().sum().item()
        price = self.search.plain_rate(len(batch), batch.num_cached)
        return gain < price * self.costs.expand(scale * beam.numel())

    def _probe_cost(self, probe: StepOutcome) -> float:
        """Return the seconds of a probe, without prompts, beyond those that its tokens would take otherwise."""
        rate = self.modes.opportunity_rate(probe.batch_size, probe.num_cached)
        worth = (probe.batch_size + probe.num_accepted) / rate
        return probe.seconds.total - self.costs.prefill_seconds(probe) - worth

    # budgets

    def _expected_each(
        self, draft: Draft, plan: DraftPlan, keep: Bool[Tensor, "B N"]
    ) -> list[float]:
        """Return how many of each sequence's verified drafts would be accepted if it were an average one."""
        if self.worths is None or plan.lookups_only or not plan.is_drafting:
            return []
        values = draft.tree.log_values.exp() * keep
        with_root = values.sum(1).tolist()
        return [self.acceptance.accuracy * (value - 1) for value in with_root]

    def _row_counts(self, size: int, num_candidates: int) -> list[int]:
        """Return the numbers of rows to choose from; in a trial only the best plan's number."""
        if self.modes.mode is Mode.PROBING:
            return self.search.padded([min(self.modes.best.num_rows, size + num_candidates)])
        return self.search.row_counts(size, num_candidates)

    def _budget(self, draft: Draft, plan: DraftPlan, batch: DecodeBatch) -> Budget:
        """Return the budget: trees within their bounds, and no nodes deeper than a sequence's remaining tokens.

        Nodes of a sequence whose drafts are accepted more often than their values say count for more.
        """
        max_depths = None
        if min(batch.remaining_tokens) <= draft.depth:
            max_depths = batch.remaining_on_device - 1
        return Budget(
            num_rows=0,
            num_nodes=self._bounds.num_nodes,
            max_depths=max_depths,
            log_weights=self._log_weights(draft, plan, batch),
        )

    def _log_weights(
        self, draft: Draft, plan: DraftPlan, batch: DecodeBatch
    ) -> Float[Tensor, " B"] | None:
        if self.worths is None or plan.lookups_only or not plan.is_drafting:
            return None
        accuracies = [self.worths.accuracy(sequence) for sequence in batch.sequences]
        return torch.tensor(accuracies, device=draft.tree.tokens.device).log()

    def _gains(
        self, rows: list[int], candidates: Candidates, draft: Draft, plan: DraftPlan, size: int
    ) -> list[float]:
        """Return the accepted drafts to expect of each number of rows.

        They are by this draft's values, or by recent drafts' if reading them would let the device
        wait.
        """
        sizes = [min(n - size, len(candidates.log_values)) for n in rows]
        if self._can_sync or plan.probe:
            return candidates.expected(sizes)

        model = self._acceptance_of(plan, size).model
        num_members = plan.num_members(size)
        curves = model.expected([n / num_members for n in sizes])
        width = max(i for i, known in enumerate(model.widths) if known <= plan.width)
        depth = min(draft.depth, self._bounds.depth)
        return (num_members * curves[width, depth - 1]).tolist()

    def _profits(
        self, batch: DecodeBatch, rows: list[int], gains: list[float], plan: DraftPlan
    ) -> np.ndarray:
        """Return the tokens gained by verifying each number of rows, less the price of the seconds."""
        size = len(batch)
        num_rows = np.asarray(rows)
        seconds = self.costs.verify_seconds_by_rows(
            rows, batch.num_cached, size, batch.num_prefill_rows
        )
        seconds = seconds + self.costs.rows_overhead(num_rows, size)
        if plan.lookups_only:
            has_drafts = num_rows > size
            seconds += np.where(has_drafts, self.costs.tree_overhead(size), 0.0)
        price = self.modes.opportunity_rate(size, batch.num_cached)
        accuracy = self._acceptance_of(plan, size).accuracy
        return accuracy * np.asarray(gains) - price * seconds

    def _acceptance_of(self, plan: DraftPlan, size: int) -> CalibratedAcceptance:
        """Return the acceptance of drafts of the plan's kind, of the model or of look-ups alone, at this batch size."""
        if plan.lookups_only and self._lookups is not None:
            return self._lookups.acceptance_by_size.of(size)
        return self.acceptance

    # observations

    def _pay(self, outcome: StepOutcome) -> None:
        self.modes.pay(outcome.seconds.total)
        if self._lookups is not None:
            self._lookups.schedule.pay(outcome.seconds.total)

    def _may_skip(self, outcome: StepOutcome) -> bool:
        """Return whether a step need not correct the costs: most plain steps while nothing has been drafted for long.

        The ones right after a draft tell what it costs beyond them.
        """
        step = self.modes.num_steps
        is_off = self.modes.mode is Mode.OFF or self.modes.is_resting
        if not is_off or outcome.plan.is_drafting:
            self._last_draft = step
            return False
        return step > self._last_draft + 2 * OFF_REVIEW_EVERY and step % REVIEW_EVERY > 0

    def _observe_plain(self, outcome: StepOutcome) -> None:
        """Observe a plain step while nothing is drafted: its costs are those of the next one that is looked at."""
        self.predicted_s += outcome.seconds.total
        self.predicted_plain_s += outcome.seconds.total
        self._pay(outcome)

    def _observe_lookups(self, outcome: StepOutcome, predicted: StepTimes, plain_s: float) -> None:
        """Observe a step with lookups alone.

        Args:
            predicted: its predicted seconds.
            plain_s: those of a plain step.
        """
        self._pay(outcome)
        lookups = self._lookups
        if lookups is None:
            return

        # A draft that catches up takes longer than lookups do.
        size = outcome.batch_size
        seconds = outcome.seconds
        catches_up = outcome.num_catch_up > outcome.usual_catch_up
        draft_s = predicted.draft if catches_up else seconds.draft
        verify_s = predicted.verify - self.costs.prefill_seconds(outcome)
        lookups.update(outcome, draft_s + verify_s + seconds.overhead - plain_s)
        acceptance = lookups.acceptance_by_size.of(size)
        acceptance.update(outcome.num_accepted, outcome.num_expected_drafts)

        if not outcome.plan.probe:
            return
        if self.modes.runs(DraftKind.MODEL):
            self.modes.charge(self._probe_cost(outcome), plain_s, is_drafting=False)
            return
        cost_s = self._probe_cost(outcome)
        lookups.schedule.charge(cost_s)
        lookups.count_trial_step(cost_s, plain_s)
        if not lookups.is_trying:
            lookups.end_trial(size, plain_s)
            self.modes.review_soon()

    def _max_overhead(self, plan: DraftPlan) -> float:
        """Return the factor by which the overhead of a step with this plan may exceed the measured one.

        The widest drafts have much more, and so do the first ones, since a drafter updates its
        calibration after each.
        """
        if plan.is_drafting and plan.width > self.modes.best.width:
            return 0.0
        return FIRST_OVERHEAD if plan.is_drafting and self.num_drafts <= MEMORY else math.inf

    def _observe_draft(self, draft: Draft, plan: DraftPlan, batch: DecodeBatch) -> None:
        """Update the acceptance model with a draft's values."""
        if plan.lookups_only:
            self._observe_lookup_draft(draft, plan, batch)
            return
        self._observe_first_values(draft, plan, batch)
        if plan.probe or self.num_drafts % REVIEW_EVERY == 0:
            levels = self._to_full_depth(draft, plan, len(batch))
            remaining = self._remaining_tokens(levels, plan, batch)
            is_stopped = self._can_sync and not plan.probe and len(levels) < plan.max_depth
            self.acceptance.model.observe(
                levels, plan.width, draft.extra_log_values, remaining, is_stopped
            )
        self.num_drafts += 1
        self.num_offers += draft.depth > 0

    def _observe_first_values(self, draft: Draft, plan: DraftPlan, batch: DecodeBatch) -> None:
        """Update what the drafts of each sequence are worth by its likeliest first token."""
        if self.worths is None:
            return
        sequences = self._members_of(batch, plan.members)
        values = [0.0] * len(sequences)
        if draft.levels:
            values = draft.levels[0].flatten(1).amax(1).exp().tolist()
        self.worths.observe_draft(sequences, values)

    def _observe_lookup_draft(self, draft: Draft, plan: DraftPlan, batch: DecodeBatch) -> None:
        """Update what looked-up drafts are worth by their number of rows, which on a GPU decides the rows."""
        if self._lookups is None:
            return
        self._lookups.num_drafts += 1
        if self._can_sync or (self._lookups.num_drafts % REVIEW_EVERY and not plan.probe):
            return

        # Looked-up nodes do not depend on the width, so no level has any.
        num_members = plan.num_members(len(batch))
        nothing = torch.full((num_members, 1, 1), -torch.inf, device=draft.tree.tokens.device)
        levels = [nothing] * self._bounds.depth
        by_depth = [level.flatten(1) for level in draft.levels] or [nothing[:, 0]]
        remaining = self._remaining_tokens(by_depth, plan, batch)
        model = self._lookups.acceptance_by_size.of(len(batch)).model
        model.observe(levels, 1, by_depth, remaining)

    def _remaining_tokens(
        self, levels: list[Tensor], plan: DraftPlan, batch: DecodeBatch
    ) -> Int[Tensor, " M"] | None:
        """Return the remaining tokens of the sequences that were drafted for, or None if all levels fit."""
        if min(batch.remaining_tokens) > len(levels):
            return None
        remaining = batch.remaining_on_device
        if plan.members is None:
            return remaining
        return remaining[to_device(plan.members, remaining.device)]

    def _to_full_depth(
        self, draft: Draft, plan: DraftPlan, size: int
    ) -> list[Float[Tensor, "M _ K"]]:
        """Return the draft's levels, with empty ones below if the drafter had nothing more to propose."""
        if not draft.is_exhausted or len(draft.levels) >= self._bounds.depth:
            return draft.levels
        shape = plan.num_members(size), plan.width, plan.children
        nothing = torch.full(shape, -torch.inf, device=draft.tree.tokens.device)
        levels = draft.levels or [nothing[:, :1]]
        return levels + [nothing] * (self._bounds.depth - len(levels))
