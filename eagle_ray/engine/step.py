"""Step: one decoding step of a batch, from its launch to what its planner observes."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from eagle_ray.core.async_copy import DeviceToHost
from eagle_ray.core.decode_batch import DecodeBatch
from eagle_ray.core.sequence import SequenceStatus
from eagle_ray.core.step_timer import StepTimer, StepTimes
from eagle_ray.engine.step_output import StepOutput
from eagle_ray.engine.verify import StepShape
from eagle_ray.methods.drafter import Draft, Drafter
from eagle_ray.planner.planner import Allocation, Planner, StepOutcome
from eagle_ray.tree.accept import VerifyResult
from eagle_ray.tree.draft_plan import DraftPlan


@dataclass(slots=True)
class Step:
    """A launched step, and everything that is needed to finish it.

    Attributes:
        planner: planned the step and observes its outcome.
        draft: its num_catch_up is filled in later if the step was launched ahead.
        result: on the device, until the next step is launched.
        copy: the results on their way to the host.
        is_first, num_level_rows: see StepOutcome.
        num_cached: tokens cached before the step if it was launched ahead, once they are known.
    """

    planner: Planner
    batch: DecodeBatch
    plan: DraftPlan
    draft: Draft
    allocation: Allocation
    shape: StepShape
    result: VerifyResult
    copy: DeviceToHost
    timer: StepTimer
    is_first: bool
    num_level_rows: int | None
    num_cached: int | None = None

    @property
    def has_running(self) -> bool:
        """Return whether any of its sequences still runs."""
        return any(sequence.status is SequenceStatus.RUNNING for sequence in self.batch.sequences)

    @property
    def max_new_tokens(self) -> int:
        """Return the most tokens that one of its sequences can get."""
        return self.draft.depth + 1

    @property
    def prefill_fraction(self) -> float:
        """Return the share of the pass's rows that are prompt rows."""
        return self.batch.num_prefill_rows / (self.shape.num_rows + self.batch.num_prefill_rows)

    @property
    def draft_passes(self) -> np.ndarray:
        """Return the drafter's passes for each sequence."""
        passes = np.zeros(len(self.batch), dtype=np.int64)
        passes[slice(None) if self.plan.members is None else list(self.plan.members)] = self.draft.num_passes
        return passes

    def read(self) -> tuple[StepOutput, list[np.ndarray]]:
        """Return the results once they are on the host, and ids and log-probabilities of the likeliest tokens."""
        record, *tops = self.copy.arrays()
        self.timer.arrived()
        return StepOutput.of(record, self.shape.max_depth), tops

    def sync_lengths(self, drafter: Drafter) -> None:
        """Note the lengths of a step that was launched before they were known, and tell the drafter."""
        sequences = self.batch.sequences
        lengths = [sequence.num_cached for sequence in sequences]
        self.num_cached = sum(lengths)
        if not self.plan.is_drafting:
            return
        running = [i for i, sequence in enumerate(sequences) if sequence.status is SequenceStatus.RUNNING]
        num_pairs = drafter.mark_consumed([sequences[i].slot for i in running], [lengths[i] for i in running])
        self.draft = replace(self.draft, num_catch_up=num_pairs)

    def outcome(self, num_accepted: int, num_prompt_tokens: int, seconds: StepTimes) -> StepOutcome:
        """Return what the planner observes once the step is read."""
        return StepOutcome(
            plan=self.plan,
            batch_size=len(self.batch),
            num_cached=self.batch.num_cached if self.num_cached is None else self.num_cached,
            depth=len(self.draft.levels),
            num_catch_up=self.draft.num_catch_up,
            num_rows=self.shape.num_rows,
            num_accepted=num_accepted,
            num_prompt_tokens=num_prompt_tokens,
            seconds=seconds,
            is_first=self.is_first,
            num_expected_drafts=self.allocation.expected,
            num_prefill_rows=self.batch.num_prefill_rows,
            num_level_rows=self.num_level_rows,
            caught_up_before=self.draft.caught_up_before,
        )
