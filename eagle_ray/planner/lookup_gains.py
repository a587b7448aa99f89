"""LookupGains: measure whether steps that draft by lookups alone pay, and decide when to try them.

    gains.update(outcome, more_s)               # accepted drafts, and the seconds beyond those of a plain step
    gains.rate(batch_size, plain_s)             # tokens per second of a step with lookups
    gains.promise(counts)      # a trial out of turn: texts repeat what was read

Lookups propose nothing in most steps and long drafts in a few. An average yield per number of rows
would say that a few rows pay in every step, or in none. So the average is over the tokens gained by
steps, each with as many rows as its own draft was worth.
"""

from __future__ import annotations

from dataclasses import dataclass

from eagle_ray.core.tree_bounds import TreeBounds
from eagle_ray.planner.acceptance_model import EMA_RATE, FADED, MEMORY, PRIOR_COUNT, AcceptanceModel
from eagle_ray.planner.calibrated_acceptance import AcceptanceByBatchSize, octave
from eagle_ray.planner.planner import StepOutcome
from eagle_ray.planner.probe_schedule import ProbeSchedule

LOOKUP_SHARE = 0.001  # share of the time for trials of lookups
TRIAL_STEPS = 8  # one after the other, since lookups seldom propose anything
FIRST_TRIAL_STEPS = 24  # steps of the first trial, when texts are short
MIN_FORESEEN = 0.3  # share of the tokens that must be foreseen for a trial out of turn
MORE_FORESEEN = 1.25  # times the share at the last trial that did not pay


@dataclass(frozen=True, slots=True)
class _Sums:
    """Decaying sums over sequences and steps: accepted drafts, seconds beyond plain steps, and how many there were."""

    accepted: float = 0.0
    seconds: float = 0.0
    count: float = 0.0


class LookupGains:
    """Gains of lookups by octave of batch sizes, and the schedule of trials while lookups are off.

    Attributes:
        acceptance_by_size: acceptance of looked-up drafts, by batch size.
        schedule: schedule of trials.
        num_drafts: drafts by lookups alone so far.
    """

    def __init__(self, bounds: TreeBounds):
        self.acceptance_by_size = AcceptanceByBatchSize(AcceptanceModel((1,), bounds.depth))
        self.schedule = ProbeSchedule(LOOKUP_SHARE, MEMORY)
        self.num_drafts = 0
        self._by_octave: dict[int, _Sums] = {}
        self._last = _Sums()
        self._trial_steps = FIRST_TRIAL_STEPS  # steps of the trial that are left
        self._trial_s = 0.0
        self._counts = 0, 0  # tokens read, and foreseen ones, when they were last looked at
        self._share = 0.0
        self._share_unpaid = 0.0

    @property
    def is_trying(self) -> bool:
        """Return whether a trial goes on."""
        return self._trial_steps > 0

    def promise(self, counts: tuple[int, int] | None) -> bool:
        """Return whether recently read tokens repeat earlier ones often enough to start a trial before it is due.

        Args:
            counts: all tokens read so far, and how many of them lookups would have predicted; None
                if they are not counted.
        """
        last_read, last_foreseen = self._counts
        if counts is None or counts[0] <= last_read:
            return False
        num_read, num_foreseen = counts
        self._share = (num_foreseen - last_foreseen) / (num_read - last_read)
        self._counts = counts
        return self._share >= max(MIN_FORESEEN, MORE_FORESEEN * self._share_unpaid)

    def begin_trial(self, step: int) -> None:
        """Start a trial: the next steps draft by lookups."""
        self.schedule.begin(step)
        self._trial_steps = TRIAL_STEPS
        self._trial_s = 0.0

    def count_trial_step(self, cost_s: float, plain_s: float) -> None:
        """Count a step of a trial. The trial ends early once it has lost more time than a plain step takes.

        Args:
            cost_s: seconds of the step beyond those that its tokens would have taken otherwise;
                negative for a gain.
        """
        self._trial_s += cost_s
        self._trial_steps -= 1
        if self._trial_s > plain_s:
            self._trial_steps = 0

    def fade(self) -> None:
        """Reduce the weight of all earlier steps, because the texts have changed."""
        self._share_unpaid = 0.0
        self._by_octave.clear()
        known = self._last
        self._last = _Sums(
            accepted=FADED * known.accepted,
            seconds=FADED * known.seconds,
            count=FADED * known.count,
        )

    def end_trial(self, size: int, plain_s: float) -> None:
        """End a trial and schedule the next one, later and later as long as lookups cost more than they gain."""
        if self.rate(size, plain_s) > size / plain_s:
            self.schedule.resume()
            self._share_unpaid = 0.0
        else:
            self.schedule.back_off()
            self._share_unpaid = self._share

    def update(self, outcome: StepOutcome, more_s: float) -> None:
        """Observe a step that drafted by lookups alone.

        Args:
            more_s: seconds of the step beyond those of a plain step.
        """
        size = outcome.batch_size
        num_members = outcome.plan.num_members(size)
        decay = (1 - EMA_RATE) ** num_members
        known = self._of(size)
        updated = _Sums(
            accepted=decay * known.accepted + outcome.num_accepted,
            seconds=decay * known.seconds + more_s,
            count=decay * known.count + num_members,
        )
        self._by_octave[octave(size)] = updated
        self._last = updated

    def rate(self, size: int, plain_s: float) -> float:
        """Return the expected tokens per second of steps with lookups, given the seconds of a plain step."""
        known = self._of(size)
        each = size / (known.count + PRIOR_COUNT)
        num_tokens = size + each * known.accepted
        seconds = max(plain_s + each * known.seconds, plain_s / 2)
        return num_tokens / seconds

    def _of(self, size: int) -> _Sums:
        return self._by_octave.get(octave(size), self._last)
