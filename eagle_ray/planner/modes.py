"""PlannerModes: switch between plain decoding, drafts and lookups for ordinary steps.

The mode is reviewed every REVIEW_EVERY steps and when the batch size changes:

    WARM_UP -> ON or OFF     after NUM_PROBES drafts; on a CPU each is for a part of the batch
    ON -> OFF                if drafts promise less than 1 - HYSTERESIS times plain decoding's rate
    OFF -> ON                if they promise more than 1 + HYSTERESIS times, and the cost of catching up
    OFF -> PROBING           if a probe is due and a trial by the whole batch is promising
    PROBING -> ON or OFF     after REVIEW_EVERY steps that draft for the whole batch, or once they have lost much

If the drafter looks up drafts as well, ON has two kinds (`DraftKind`): drafts of the model, which
contain what is looked up, and lookups alone. The kind with the better rate runs, so lookups may be
on where the model does not pay.
"""

from __future__ import annotations

from enum import Enum, auto

from eagle_ray.core.decode_batch import DecodeBatch
from eagle_ray.planner.acceptance_model import MEMORY
from eagle_ray.planner.calibrated_acceptance import CalibratedAcceptance, octave
from eagle_ray.planner.lookup_gains import LookupGains
from eagle_ray.planner.plan_search import REVIEW_EVERY, PlanEstimate, PlanSearch
from eagle_ray.planner.planner import DraftKind, StepOutcome
from eagle_ray.planner.probe_schedule import ProbeSchedule
from eagle_ray.planner.sequence_worth import SequenceWorths
from eagle_ray.planner.text_histogram import TextHistogram

# Share of plain decoding's rate.
HYSTERESIS = 0.03
# Plain steps that a trial by the whole batch may be expected to lose; it ends once it has.
TRIAL_LOSS = 2.0
# Acceptance of each sequence's likeliest draft token: no cost that may have been mistaken would help.
POOR_ACCEPTANCE = 0.3
# Reviews in a row that may find drafts a little slower than plain decoding.
MAX_SLOW_REVIEWS = 2 * MEMORY // REVIEW_EVERY
# Steps between reviews while nothing is drafted and nothing new is known.
OFF_REVIEW_EVERY = 4 * REVIEW_EVERY


class Mode(Enum):
    """Whether ordinary steps draft: warm-up, on, off, or a trial."""

    WARM_UP = auto()  # probes alone
    OFF = auto()  # plain steps
    PROBING = auto()  # draft for the whole batch although that is not expected to pay
    ON = auto()  # the best plan


class PlannerModes:
    """The current mode, reviewed by the rates that the plans promise.

    Args:
        search: search for the best plan at the current costs.
        lookups: measured gains of lookups alone; None if nothing is looked up.
        has_model: whether a model can draft.

    Attributes:
        mode: mode of ordinary steps.
        kind: kind of the drafts that are on, or that were on last.
        best: best plan of the last review, for that review's batch.
        next_review: number of the step with the next review.
        num_steps: number of steps so far.
    """

    def __init__(self, search: PlanSearch, lookups: LookupGains | None, has_model: bool):
        self._search = search
        self._lookups = lookups
        self._has_model = has_model
        self.mode = Mode.WARM_UP
        self.kind = DraftKind.MODEL if has_model else DraftKind.LOOKUPS
        self.best = PlanEstimate(0.0)
        self._average_rate = 0.0  # of the best plan for average sequences
        self._is_worth_it = True  # drafts for the sequences of the last review
        self.next_review = 0
        self.num_steps = 0
        self._probes = ProbeSchedule()  # probes of the model; while it is on, of anything else
        self._texts = TextHistogram()  # the texts of the last probe
        self._review_size = 0  # batch size of the last review
        self._num_unpaid = 0  # reviews in a row that left drafts on at a small loss
        # Whether the next review judges a probe of the model, which ran while it was off.
        self._judges_probe = False
        # What the steps of the last trial cost beyond what their tokens would have taken.
        self._trial_s = 0.0
        self._num_missed = 0  # tokens that the drafter has to catch up on
        self._prompt_tokens = 0.0  # new prompt tokens per step, on average

    def runs(self, kind: DraftKind) -> bool:
        """Return whether drafts of this kind are on."""
        return self.mode is Mode.ON and self.kind is kind

    def count(self, outcome: StepOutcome) -> None:
        """Count a step, its tokens that the drafter has not read, and its prompt tokens."""
        self.num_steps += 1
        if outcome.plan.is_drafting and not outcome.plan.members and not outcome.plan.lookups_only:
            self._num_missed = 0
        else:
            self._num_missed += outcome.batch_size + outcome.num_prompt_tokens
        self._prompt_tokens += (outcome.num_prompt_tokens - self._prompt_tokens) / MEMORY

    @property
    def is_resting(self) -> bool:
        """Return whether drafts of the model are on in general but do not pay for this batch's sequences."""
        return self.runs(DraftKind.MODEL) and not self._is_worth_it

    def review(
        self,
        batch: DecodeBatch,
        acceptance: CalibratedAcceptance,
        worths: SequenceWorths | None = None,
    ) -> None:
        """Choose the mode by a new search for the best plan, if the last review is too old or had another batch size.

        While nothing is drafted, all batch sizes of an octave count as one.

        Args:
            worths: value of single sequences' drafts; None if unknown.
        """
        is_due = self.num_steps >= self.next_review
        if not is_due and self._is_reviewed(len(batch)):
            return
        if self._has_model:
            self._search_plans(batch, acceptance, worths)
        self._review_size = len(batch)
        if self.mode is Mode.PROBING and not is_due:
            return
        self._choose(batch, acceptance)
        rests = self.mode is Mode.OFF or self.is_resting
        wait = OFF_REVIEW_EVERY if rests else REVIEW_EVERY
        self.next_review = self.num_steps + wait

    def _search_plans(
        self,
        batch: DecodeBatch,
        acceptance: CalibratedAcceptance,
        worths: SequenceWorths | None,
    ) -> None:
        """Search for the best plan for average sequences, and for those of the batch that are worth drafts."""
        average = self._search.best(batch, acceptance, self._prompt_tokens)
        self._average_rate = average.rate
        self.best = average
        # Fewer sequences only where drafts for more of them would not pay: the curves are of whole
        # batches, so they promise too much for the easy part of one.
        for group in [] if worths is None else worths.groups(batch.sequences):
            self.best = self._search.best(batch, acceptance, self._prompt_tokens, group)
            if self.pays(batch):
                break
        self._is_worth_it = self.pays(batch)

    def pays(self, batch: DecodeBatch, share: float = 1.0) -> bool:
        """Return whether drafts for the chosen sequences of the batch pay, or nearly so.

        Args:
            share: present value of drafts as a ratio to that at the last review.
        """
        size = len(batch)
        tau = 1 + share * (self.best.tau - 1)
        rate = self.best.rate * tau / self.best.tau
        return rate >= (1 - HYSTERESIS) * self._search.plain_rate(size, batch.num_cached)

    def review_soon(self) -> None:
        """Review at the next step at the latest."""
        self.next_review = min(self.next_review, self.num_steps)

    def opportunity_rate(self, size: int, num_cached: int) -> float:
        """Return the price of a second in tokens: the average rate of the best kind of step.

        A step should not maximise its own rate. If its texts are hard, a second yields more in
        later steps; if they are easy, it yields less there.
        """
        plain_s = self._search.plain_seconds(size, num_cached)
        rates = self._rates(size, plain_s)
        if self._has_model:
            rates[DraftKind.MODEL] = self._average_rate
        return max(size / plain_s, *rates.values())

    # probes

    @property
    def is_probe_due(self) -> bool:
        """Return whether a probe may run: a draft of the model, or while it is on a plain step, a
        wider draft or lookups alone."""
        return self._has_model and self._probes.is_due(self.num_steps)

    def begin_probe(self) -> None:
        """Record that a probe runs at this step."""
        self._probes.begin(self.num_steps)

    def charge(self, cost_s: float, plain_s: float, is_drafting: bool) -> None:
        """Add the cost of a probe, with or without drafts. A trial that has lost much ends.

        Args:
            cost_s: seconds of the probe beyond those that its tokens would have taken otherwise.
            plain_s: seconds of a plain step.
            is_drafting: whether the model drafted. If the model is off, the next review then judges
                the probe.
        """
        self._probes.charge(cost_s)
        self._trial_s += cost_s
        if self.mode is Mode.PROBING and self._trial_s > TRIAL_LOSS * plain_s:
            self.review_soon()
        self._judges_probe = is_drafting and not self.runs(DraftKind.MODEL)

    def pay(self, seconds: float) -> None:
        """Reduce the debt of probes by the allowed share of a step's seconds."""
        self._probes.pay(seconds)

    def texts_have_changed(self, batch: DecodeBatch) -> bool:
        """Return whether the batch's texts differ clearly from those of the last probe."""
        return self._texts.have_changed(batch)

    def remember_texts(self, batch: DecodeBatch) -> None:
        """Store the texts of a probe's batch, for `texts_have_changed`."""
        self._texts.remember(batch)

    def restart_probes(self, batch: DecodeBatch, acceptance: CalibratedAcceptance) -> None:
        """Make the next probe due soon, because the texts have changed."""
        plain_s = self._search.plain_seconds(len(batch), batch.num_cached)
        self.remember_texts(batch)
        self._probes.restart(plain_s)
        acceptance.fade()
        if self._lookups is not None:
            self._lookups.schedule.restart(plain_s)
            self._lookups.fade()

    # trials

    def is_trial_promising(self, batch: DecodeBatch) -> bool:
        """Return whether a trial should gain one accepted draft per sequence and lose no more than two steps' time."""
        size = len(batch)
        plain_s = self._search.plain_seconds(size, batch.num_cached)
        lookups_rate = self._rates(size, plain_s).get(DraftKind.LOOKUPS, 0.0)
        rate = max(size / plain_s, lookups_rate)
        yields_drafts = REVIEW_EVERY * (self.best.tau - 1) >= 1
        loses_little = self.best.rate >= (1 - TRIAL_LOSS / REVIEW_EVERY) * rate
        return yields_drafts and loses_little

    def begin_trial(self) -> None:
        """Start a trial: draft for the whole batch until the next review."""
        self.mode = Mode.PROBING
        self.kind = DraftKind.MODEL
        self._trial_s = 0.0
        self.next_review = self.num_steps + REVIEW_EVERY

    # reviews

    def _is_reviewed(self, size: int) -> bool:
        """Return whether the last review was for batches of this size."""
        if self.mode is Mode.OFF:
            return octave(size) == octave(self._review_size)
        return size == self._review_size

    def _choose(self, batch: DecodeBatch, acceptance: CalibratedAcceptance) -> None:
        """Turn on the kind of drafts with the best rate of those that pay, or none."""
        size = len(batch)
        plain_s = self._search.plain_seconds(size, batch.num_cached)
        previous = self.mode, self.kind
        paying = {}
        for kind, rate in self._rates(size, plain_s).items():
            if rate > self._hurdle(kind, batch, plain_s) * size / plain_s:
                paying[kind] = rate

        # The kind that is on stays on if another one is hardly better.
        if self.runs(self.kind) and self.kind in paying:
            paying[self.kind] *= 1 + HYSTERESIS
        self.mode = Mode.ON if paying else Mode.OFF
        if paying:
            self.kind = max(paying, key=paying.__getitem__)
        self._schedule_probes(previous, batch, plain_s, acceptance)

    def _rates(self, size: int, plain_s: float) -> dict[DraftKind, float]:
        """Return the tokens per second that each kind of drafts promises."""
        rates = {}
        if self._has_model:
            rates[DraftKind.MODEL] = max(self.best.rate, self._average_rate)
        if self._lookups is not None:
            rates[DraftKind.LOOKUPS] = self._lookups.rate(size, plain_s)
        return rates

    def _hurdle(self, kind: DraftKind, batch: DecodeBatch, plain_s: float) -> float:
        """Return how many times plain decoding's rate a kind must promise to be on.

        What lookups promise is what they brought in, so they are off as soon as that is less than
        they take.
        """
        if kind is DraftKind.LOOKUPS:
            return 1.0 if self.runs(kind) else 1 + HYSTERESIS / 3
        if self.runs(kind):
            return 1 - HYSTERESIS if self._num_unpaid < MAX_SLOW_REVIEWS else 1.0

        # The first draft also reads what the drafter has missed.
        num_missed = min(self._num_missed, batch.num_cached, MEMORY * len(batch))
        catch_up_s = self._search.costs.catch_up(num_missed)
        return 1 + HYSTERESIS + catch_up_s / (MEMORY * plain_s)

    def _schedule_probes(
        self,
        previous: tuple[Mode, DraftKind],
        batch: DecodeBatch,
        plain_s: float,
        acceptance: CalibratedAcceptance,
    ) -> None:
        """Set when the model is probed next, after its mode was chosen."""
        was_on = previous == (Mode.ON, DraftKind.MODEL)
        is_on = self.runs(DraftKind.MODEL)
        if is_on and self.best.rate * plain_s < len(batch):
            self._num_unpaid += 1
        else:
            self._num_unpaid = 0

        if is_on:
            self._probes.resume()
        elif was_on:
            self._probes.allow_retry(plain_s)
        elif self._has_model and (self._judges_probe or previous[0] is Mode.WARM_UP):
            self.remember_texts(batch)
            likeliest = acceptance.accuracy * float(acceptance.model.expected([1.0])[0, 0, 0])
            if likeliest < POOR_ACCEPTANCE:
                self._probes.back_off()
        self._judges_probe = False
