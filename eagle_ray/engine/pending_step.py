"""PendingStep: a step that was launched and whose results the host has not read."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from eagle_ray.core.async_copy import DeviceToHost
from eagle_ray.core.decode_batch import DecodeBatch
from eagle_ray.core.sequence import SequenceStatus
from eagle_ray.core.step_timer import StepTimer, StepTimes
from eagle_ray.engine.verify import StepShape
from eagle_ray.methods.drafter import Draft
from eagle_ray.planner.planner import Allocation, Planner, StepOutcome
from eagle_ray.tree.accept import VerifyResult
from eagle_ray.tree.draft_plan import DraftPlan


@dataclass(slots=True)
class PendingStep:
    """Everything about a launched step that is needed to finish it.

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
