"""Counters: EngineCounters for an engine, AcceptanceStats for the drafts of one sequence.

They need no torch, so any process can use them. Only counts are stored, so that
``AcceptanceStats.merge`` can add up rows, tasks and runs; ratios are derived.

    >>> stats = AcceptanceStats.empty(num_spec_tokens=2)
    >>> stats.add_step(num_accepted=1, drafted_by_depth=[3, 2])
    >>> stats.mean_acceptance_length
    2.0
"""

from __future__ import annotations

from dataclasses import dataclass, field

CONFIDENCE_BINS = 10  # equal bins over (0, 1) of a node's conditional probability
# Probabilities are summed as integers of this unit: such sums are exact in any order.
CONFIDENCE_UNIT = 2**-20


@dataclass(slots=True)
class ConfidenceCounts:
    """Verified nodes whose parent was accepted, in bins of their probability.

    For each of CONFIDENCE_BINS: the number of nodes; of accepted ones, which the target sampled;
    and the sum of the nodes' probabilities in CONFIDENCE_UNIT. With perfect calibration that sum
    equals the accepted ones.
    """

    nodes: list[int] = field(default_factory=lambda: [0] * CONFIDENCE_BINS)
    accepted: list[int] = field(default_factory=lambda: [0] * CONFIDENCE_BINS)
    expected: list[int] = field(default_factory=lambda: [0] * CONFIDENCE_BINS)

    def add(self, other: ConfidenceCounts) -> None:
        _add(self.nodes, other.nodes)
        _add(self.accepted, other.accepted)
        _add(self.expected, other.expected)

    @property
    def calibration_error(self) -> float | None:
        """Return the expected calibration error: |mean probability - accepted share|, weighted by nodes."""
        gaps = (
            abs(e * CONFIDENCE_UNIT - a) for e, a in zip(self.expected, self.accepted, strict=True)
        )
        return sum(gaps) / sum(self.nodes) if sum(self.nodes) else None


@dataclass(slots=True)
class AcceptanceStats:
    """Counts over the target decode passes ("steps") of one sequence, before any cut at EOS or max_tokens.

    Attributes:
        num_spec_tokens: longest possible draft path (max_depth); 0 for plain decoding.
        histogram: steps that accepted j draft tokens, at index j; length num_spec_tokens + 1.
        proposed_by_depth: verified nodes at depth i + 1, at index i; length num_spec_tokens.
        drafted, calibrated: counts of nodes by the probability that the drafter's head gave them,
            and by the calibrated probability.
    """

    num_spec_tokens: int
    histogram: list[int]
    proposed_by_depth: list[int]
    drafted: ConfidenceCounts = field(default_factory=ConfidenceCounts)
    calibrated: ConfidenceCounts = field(default_factory=ConfidenceCounts)
    num_plain_steps: int = 0
    num_discarded_tokens: int = 0
    per_step_budget: list[int] = field(default_factory=list)
    per_step_accepted: list[int] = field(default_factory=list)

    @classmethod
    def empty(cls, num_spec_tokens: int) -> AcceptanceStats:
        """Return statistics of no steps, for drafts of at most num_spec_tokens tokens."""
        return cls(num_spec_tokens, [0] * (num_spec_tokens + 1), [0] * num_spec_tokens)

    def add_step(self, num_accepted: int, drafted_by_depth: list[int]) -> None:
        """Count one target pass that verified drafted_by_depth nodes and accepted num_accepted of them."""
        self.histogram[num_accepted] += 1
        num_drafted = sum(drafted_by_depth)
        self.num_plain_steps += num_drafted == 0
        _add(self.proposed_by_depth, drafted_by_depth)
        self.per_step_budget.append(num_drafted + 1)
        self.per_step_accepted.append(num_accepted)

    def merge(self, other: AcceptanceStats) -> AcceptanceStats:
        """Return the sum of both; the longer num_spec_tokens wins. Per-step lists are concatenated."""
        merged = AcceptanceStats.empty(max(self.num_spec_tokens, other.num_spec_tokens))
        merged.add(self)
        merged.add(other)
        return merged

    def add(self, later: AcceptanceStats) -> None:
        """Add the counts of later steps, whose drafts must not be longer than num_spec_tokens."""
        _add(self.histogram, later.histogram)
        _add(self.proposed_by_depth, later.proposed_by_depth)
        self.drafted.add(later.drafted)
        self.calibrated.add(later.calibrated)
        self.num_plain_steps += later.num_plain_steps
        self.num_discarded_tokens += later.num_discarded_tokens
        self.per_step_budget += later.per_step_budget
        self.per_step_accepted += later.per_step_accepted

    @property
    def num_steps(self) -> int:
        """Return the number of decode passes of the target, drafted or not, without prefill."""
        return sum(self.histogram)

    @property
    def num_accepted_draft_tokens(self) -> int:
        return sum(j * count for j, count in enumerate(self.histogram))

    @property
    def num_draft_tokens(self) -> int:
        """Return the number of verified nodes, without roots."""
        return sum(self.proposed_by_depth)

    @property
    def accepted_by_depth(self) -> list[int]:
        """Return, as entry i, the number of steps that accepted a draft token at depth i + 1."""
        return [sum(self.histogram[depth:]) for depth in range(1, self.num_spec_tokens + 1)]

    @property
    def mean_acceptance_length(self) -> float | None:
        """Return tau: tokens per target pass, bonus token included; None before the first step."""
        return 1 + self.num_accepted_draft_tokens / self.num_steps if self.num_steps else None

    @property
    def draft_acceptance_rate(self) -> float | None:
        """Return accepted over verified draft tokens; None if none was verified."""
        return (
            self.num_accepted_draft_tokens / self.num_draft_tokens
            if self.num_draft_tokens
            else None
        )


def _add(total: list[int], more: list[int]) -> None:
    for i, count in enumerate(more):
        total[i] += count


@dataclass(slots=True)
class EngineCounters:
    """Counts and seconds since the engine was made.

    Attributes:
        num_slot_steps: running sequences, summed over steps.
        num_plain_steps: steps in which nothing was drafted.
        num_probes: steps that the planner ran to learn from them.
        num_ahead: steps launched before the previous step was read.
        num_verify_rows: rows of all decode passes, padding included.
        num_prefill_passes: passes over prompt chunks alone.
        num_output_tokens: output tokens, including those of sequences in flight.
        busy_s: seconds spent inside step().
        prefill_s: seconds of busy_s spent on prompts; in a pass with decoding rows, their share of
            the rows.
        planner_error: reason why the planner failed, if it has; nothing is drafted from then on.
        draft_warning: probable fault of the head, if its first drafts were hardly ever accepted.
        fallbacks: reasons why Triton's kernels, CUDA graphs or sums over ranks by symmetric memory
            do not run on a CUDA device, by "kernels", "graphs" and "sums".
        running: category and tokens so far of each sequence that holds a slot.
    """

    num_slots: int
    num_steps: int = 0
    num_slot_steps: int = 0
    num_plain_steps: int = 0
    num_probes: int = 0
    num_ahead: int = 0
    num_verify_rows: int = 0
    num_prefill_passes: int = 0
    num_output_tokens: int = 0
    num_prefill_tokens: int = 0
    num_reused_tokens: int = 0
    num_preemptions: int = 0
    busy_s: float = 0.0
    prefill_s: float = 0.0
    planner_error: str | None = None
    draft_warning: str | None = None
    fallbacks: dict[str, str] = field(default_factory=dict)
    running: list[tuple[str, int]] = field(default_factory=list)

    @property
    def num_planner_failures(self) -> int:
        """Return 1 if the planner failed, otherwise 0."""
        return int(self.planner_error is not None)
