"""Flight: a step that was launched and whose results the host has not read.

    flight = engine._launch(batch, plan, draft, watch)
    rows, *tops = flight.copy.read()

Does not know what is made of the results.
"""

from __future__ import annotations

from dataclasses import dataclass

from eagle_ray.drafting.drafter import Draft
from eagle_ray.engine.host_copy import HostCopy
from eagle_ray.engine.planner import Allocation, Outcome, Planner
from eagle_ray.engine.scheduler import Batch
from eagle_ray.engine.sequence import Status
from eagle_ray.engine.stopwatch import Seconds, Stopwatch
from eagle_ray.engine.verify_step import StepShape
from eagle_ray.speculative.plan import Plan
from eagle_ray.speculative.verify import VerifyResult


@dataclass(slots=True)
class Flight:
    """planner: who planned it, and hears of it. draft: its num_caught_up comes later where the step was launched ahead.

    result: on the device, until the next step is launched. is_first: as in Outcome.
    """

    planner: Planner
    batch: Batch
    plan: Plan
    draft: Draft
    allocation: Allocation
    shape: StepShape
    result: VerifyResult
    copy: HostCopy
    watch: Stopwatch
    is_first: bool

    @property
    def is_wanted(self) -> bool:
        """Whether any of its sequences still runs."""
        return any(sequence.status is Status.RUNNING for sequence in self.batch.sequences)

    @property
    def most_tokens(self) -> int:
        """That any of its sequences can get from it."""
        return self.draft.depth + 1

    @property
    def share_beside(self) -> float:
        """Of its pass that is the prompts', by rows."""
        return self.batch.num_beside / (self.shape.num_rows + self.batch.num_beside)

    def outcome(self, num_cached: int, num_accepted: int, num_prompt_tokens: int, seconds: Seconds) -> Outcome:
        """What its planner hears, once it is read."""
        return Outcome(
            plan=self.plan,
            batch_size=len(self.batch),
            num_cached=num_cached,
            depth=len(self.draft.levels),
            num_caught_up=self.draft.num_caught_up,
            num_rows=self.shape.num_rows,
            num_accepted=num_accepted,
            num_prompt_tokens=num_prompt_tokens,
            seconds=seconds,
            is_first=self.is_first,
            num_expected=self.allocation.expected,
            num_beside=self.batch.num_beside,
        )
