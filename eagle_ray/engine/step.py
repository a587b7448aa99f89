"""DecodeStep: one decoding step of a batch, from its launch to what its planner observes and what is recorded of it.

The host reads a step as one integer tensor, made by `step_record` on the device and taken apart by
`StepOutput.of`; only these two know the order of its parts. UnflushedStats adds up what is counted.
Log-probabilities that sequences request are recorded under the unprocessed logits:

    record_outputs(sequence, logprobs=[-0.1], ranked=[[(17, -0.1), (4, -2.5)]])
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from typing import Protocol
from zlib import crc32

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from eagle_ray.core.counters import (
    CONFIDENCE_BINS,
    CONFIDENCE_UNIT,
    AcceptanceStats,
    ConfidenceCounts,
)
from eagle_ray.core.decode_batch import DecodeBatch
from eagle_ray.core.device import DeviceToHost, StepTimer, StepTimes
from eagle_ray.core.sequence import Sequence, SequenceStatus, TopLogprobs
from eagle_ray.engine.head_check import DraftsUnderWay
from eagle_ray.kernels import tree_ops
from eagle_ray.methods.drafter import Draft, Drafter
from eagle_ray.planner.planner import Allocation, Planner, StepOutcome
from eagle_ray.sampling.sampler import SLICE_ROWS, log_probs_of
from eagle_ray.tree.draft_tree import TOKEN_STEP, DraftTree, VerifyResult
from eagle_ray.tree.expand import DraftPlan

# Two ConfidenceCounts of three lists: as drafted and as calibrated.
NUM_COUNTS = 6 * CONFIDENCE_BINS
MAX_STEPS = 256  # steps of a sequence before its statistics are flushed; 512 slots take 2 MB


class DraftCheck(Protocol):
    """Protocol of a count of a head's first drafts, which HeadCheck implements."""

    @property
    def is_over(self) -> bool:
        """Return whether enough drafts are counted."""

    def launched(
        self, batch: DecodeBatch, plan: DraftPlan, draft: Draft, result: VerifyResult
    ) -> DraftsUnderWay | None:
        """Start counting a launched step. Return None if the step has no drafts to count."""

    def add(self, taken: Iterable[bool], num_accepted: Iterable[int]) -> str | None:
        """Count one step's drafts. Return a warning if the head does not seem to fit the target, else None."""


@dataclass(frozen=True, slots=True)
class StepShape:
    """The sizes of a verify step.

    Attributes:
        num_nodes: nodes per tree, root included.
        num_rows: rows of the pass.
        max_depth: upper bound on the nodes' depths; 0 if only roots are verified.
        logprobs: whether the record has log-probabilities.
        num_tops: number of likeliest tokens that are recorded for each output token.
    """

    num_nodes: int
    num_rows: int
    max_depth: int
    logprobs: bool
    num_tops: int


@dataclass(frozen=True, slots=True)
class StepOutput:
    """The results of one step on the host: arrays with one row per sequence.

    Attributes:
        tokens: the accepted drafts and the bonus token; those past num_accepted + 1 are arbitrary.
        drafted_by_depth: number of verified nodes by depth; D is 0 in a plain step, which has no
            confidences either.
        confidences: ConfidenceCounts, first of drafted, then of calibrated probabilities.
        trees: checksums of the verified trees (DraftTree.sums); no column in a plain step.
        logprobs: log-probabilities of the tokens; no columns if not requested.
        num_tokens: number of new tokens: those up to the first node of the accepted path for which
            the target computed no finite number.
        is_finite: whether there is no such node.
    """

    num_accepted: Int[np.ndarray, " B"]
    tokens: Int[np.ndarray, "B D1"]
    drafted_by_depth: Int[np.ndarray, "B D"]
    confidences: Int[np.ndarray, "B C"]
    trees: Int[np.ndarray, "B _"]
    logprobs: Float[np.ndarray, "B _"]
    num_tokens: Int[np.ndarray, " B"]
    is_finite: Bool[np.ndarray, " B"]

    @classmethod
    def of(cls, record: Int[np.ndarray, "B X"], max_depth: int) -> StepOutput:
        """Unpack the integer tensor that `step_record` made."""
        num_counts = NUM_COUNTS if max_depth else 0
        num_sums = 1 if max_depth else 0
        tokens = 1
        by_depth = tokens + max_depth + 1
        confidences = by_depth + max_depth
        trees = confidences + num_counts
        bits = trees + num_sums
        stated = record[:, 0]
        is_finite = stated >= 0
        num_tokens = np.where(is_finite, stated + 1, -1 - stated)
        return cls(
            num_accepted=np.maximum(num_tokens - 1, 0),
            tokens=record[:, tokens:by_depth],
            drafted_by_depth=record[:, by_depth:confidences],
            confidences=record[:, confidences:trees],
            trees=record[:, trees:bits],
            logprobs=record[:, bits:].astype(np.int32).view(np.float32),
            num_tokens=num_tokens,
            is_finite=is_finite,
        )

    def token_lists(self) -> list[list[int]]:
        """Return each sequence's new tokens."""
        counts = self.num_tokens.tolist()
        return [row[:count] for row, count in zip(self.tokens.tolist(), counts, strict=True)]


def contain_any(token_lists: list[list[int]], token_ids: Collection[int]) -> list[bool]:
    """Return for each list whether it contains any of these tokens."""
    wanted = frozenset(token_ids)
    return [not wanted.isdisjoint(tokens) for tokens in token_lists]


@dataclass(slots=True)
class DecodeStep:
    """A launched decoding step, and everything needed to read and record it.

    Attributes:
        planner: planner that planned the step and observes its outcome.
        draft: candidates of the step; num_catch_up is filled in later if the step was launched
            ahead.
        result: accepted paths, on the device, until the next step is launched.
        copy: copy of the results to the host, in progress.
        is_first, num_level_rows: as in StepOutcome.
        num_cached: tokens cached before the step if it was launched ahead, once they are known.
        checked_drafts: HeadCheck's counts of the step; None if nothing is counted.
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
    checked_drafts: DraftsUnderWay | None = None

    @property
    def has_running(self) -> bool:
        """Return whether any sequence of the step is still running."""
        return any(sequence.status is SequenceStatus.RUNNING for sequence in self.batch.sequences)

    @property
    def max_new_tokens(self) -> int:
        """Return the maximum number of tokens that one of its sequences can get."""
        return self.draft.depth + 1

    @property
    def prefill_fraction(self) -> float:
        """Return the share of the pass's rows that are prompt rows."""
        return self.batch.num_prefill_rows / (self.shape.num_rows + self.batch.num_prefill_rows)

    @property
    def draft_passes(self) -> np.ndarray:
        """Return for each sequence how many passes of the drafter's model drafted for it."""
        passes = np.zeros(len(self.batch), dtype=np.int64)
        members = slice(None) if self.plan.members is None else list(self.plan.members)
        passes[members] = self.draft.num_passes
        return passes

    def read(self) -> tuple[StepOutput, list[np.ndarray]]:
        """Wait for the results. Return them, with the ids and log-probabilities of the likeliest tokens."""
        record, *tops = self.copy.arrays()
        self.timer.arrived()
        return StepOutput.of(record, self.shape.max_depth), tops

    def checksum(self, output: StepOutput) -> int:
        """Return a checksum over the plan, the verified trees and the accepted tokens, without padding.

        Ranks compare it. Confidences are left out: on GPUs of different kinds a head that each rank
        computes whole may score in other last bits, which is harmless as long as the trees are
        equal.
        """
        sizes = [
            self.plan.max_depth,
            self.shape.num_nodes,
            self.shape.num_rows,
            self.draft.num_catch_up,
        ]
        trees = output.trees.tolist()
        tokens = output.token_lists()
        return crc32(repr((sizes, self.batch.at.host_slots, trees, tokens)).encode())

    def sync_lengths(self, drafter: Drafter) -> None:
        """Update the lengths of a step that was launched before they were known, in the drafter's cache, too."""
        sequences = self.batch.sequences
        self.num_cached = sum(sequence.num_cached for sequence in sequences)
        if not self.plan.is_drafting or self.plan.lookups_only:
            return

        running = [s for s in sequences if s.status is SequenceStatus.RUNNING]
        slots = [sequence.slot for sequence in running]
        lengths = [sequence.num_cached for sequence in running]
        num_pairs = drafter.mark_consumed(slots, lengths)
        self.draft = replace(self.draft, num_catch_up=num_pairs)

    def outcome(
        self,
        num_accepted: int,
        num_prompt_tokens: int,
        seconds: StepTimes,
        accepted_each: list[int],
    ) -> StepOutcome:
        """Return the step's outcome for the planner."""
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
            num_pair_rows=self.draft.num_pair_rows,
            caught_up_before=self.draft.caught_up_before,
            sequences=self.batch.sequences,
            accepted_each=accepted_each,
            expected_each=self.allocation.expected_each,
        )


class UnflushedStats:
    """Per-slot statistics of recent steps in arrays, until `flush` adds them to a sequence's own.

    Adding arrays takes 0.1 ms per step of 256 sequences, where counting sequence by sequence takes
    2 ms.
    """

    def __init__(self, num_slots: int, num_spec_tokens: int):
        self._owners: dict[int, Sequence] = {}  # slot -> sequence that its statistics belong to
        self._by_depth = np.zeros((num_slots, num_spec_tokens), dtype=np.int64)
        self._confidences = np.zeros((num_slots, NUM_COUNTS), dtype=np.int64)
        self._draft_passes = np.zeros(num_slots, dtype=np.int64)
        self._num_steps = np.zeros(num_slots, dtype=np.int64)
        self._budgets = np.zeros((num_slots, MAX_STEPS), dtype=np.int64)
        self._accepted = np.zeros((num_slots, MAX_STEPS), dtype=np.int64)

    def add(
        self,
        sequences: list[Sequence],
        output: StepOutput,
        rows: list[int],
        passes: Int[np.ndarray, " R"],
    ) -> None:
        """Add one step of running sequences.

        Args:
            rows: the sequences' rows of the output.
            passes: the drafter's passes for each of them.
        """
        slots = np.array([sequence.slot for sequence in sequences])
        self._owners.update(zip(slots.tolist(), sequences, strict=True))

        step = self._num_steps[slots]
        by_depth = output.drafted_by_depth[rows]
        self._budgets[slots, step] = by_depth.sum(1) + 1
        self._accepted[slots, step] = output.num_accepted[rows]
        self._num_steps[slots] = step + 1
        self._draft_passes[slots] += passes

        depth = by_depth.shape[1]
        if depth:
            self._by_depth[slots, :depth] += by_depth
            self._confidences[slots] += output.confidences[rows]

        full = slots[step + 1 == MAX_STEPS]
        for slot in full.tolist():
            self._flush(slot)

    def flush(self, sequence: Sequence) -> None:
        """Add a sequence's counts to its own statistics. It must still hold its slot, or have just left it."""
        if self._owners.get(sequence.slot) is sequence:
            self._flush(sequence.slot)

    def flush_all(self) -> None:
        for slot in list(self._owners):
            self._flush(slot)

    def _flush(self, slot: int) -> None:
        sequence = self._owners.pop(slot)
        num_steps = int(self._num_steps[slot])
        budgets = self._budgets[slot, :num_steps]
        accepted = self._accepted[slot, :num_steps]

        num_spec_tokens = self._by_depth.shape[1]
        histogram = np.bincount(accepted, minlength=num_spec_tokens + 1)
        bins = self._confidences[slot].reshape(6, CONFIDENCE_BINS).tolist()
        num_plain_steps = int((budgets == 1).sum())
        counted = AcceptanceStats(
            num_spec_tokens,
            histogram=histogram.tolist(),
            proposed_by_depth=self._by_depth[slot].tolist(),
            drafted=ConfidenceCounts(*bins[:3]),
            calibrated=ConfidenceCounts(*bins[3:]),
            num_plain_steps=num_plain_steps,
            per_step_budget=budgets.tolist(),
            per_step_accepted=accepted.tolist(),
        )
        sequence.stats.add(counted)
        sequence.target_forwards += num_steps
        sequence.draft_forwards += int(self._draft_passes[slot])
        for counts in (self._by_depth, self._confidences, self._draft_passes, self._num_steps):
            counts[slot] = 0


def step_record(
    tree: DraftTree,
    result: VerifyResult,
    max_depth: int,
    logprobs: Float[Tensor, "B D1"] | None,
    is_finite: Bool[Tensor, "B D1"],
) -> Int[Tensor, "B X"]:
    """Pack all results of a step that the host needs into one integer tensor, for one copy.

    Columns, in this order:

        num_accepted, or -1 - the number of finite nodes [1]
        tokens                                          [D+1]
        verified nodes by depth                         [D]           if there are drafts
        ConfidenceCounts, as drafted and as calibrated  [NUM_COUNTS]  if there are drafts
        DraftTree.sums                                  [1]           if there are drafts
        bits of the log-probabilities                   [D+1]         if requested

    Args:
        is_finite: whether the target computed finite numbers for each node of the accepted path; the
            root's in place of padding.
    """
    parts: list[Tensor] = []
    if max_depth and tree_ops.available(tree.tokens.device):
        path = result.accepted_nodes, result.num_accepted, result.tokens
        sizes = CONFIDENCE_BINS, CONFIDENCE_UNIT, TOKEN_STEP
        parts.append(tree_ops.record_trees(tree.tensors, path, *sizes))
    else:
        parts += _record_parts(tree, result, max_depth)
    if logprobs is not None:
        parts.append(logprobs.view(torch.int32).long())
    record = torch.cat(parts, 1) if len(parts) > 1 else parts[0]
    num_finite = is_finite.cumprod(1).sum(1)
    record[:, 0] = torch.where(is_finite.all(1), result.num_accepted, -1 - num_finite)
    return record


def _record_parts(
    tree: DraftTree, result: VerifyResult, max_depth: int
) -> list[Int[Tensor, "B _"]]:
    """Return the columns of a record, without log-probabilities, by torch, on any device."""
    parts = [result.num_accepted[:, None], result.tokens]
    if max_depth:
        parts += node_counts(tree, result, max_depth)
        parts.append(tree.sums()[:, None])
    return parts


def node_counts(tree: DraftTree, result: VerifyResult, max_depth: int) -> list[Int[Tensor, "B _"]]:
    """Return the columns of a step's record that count nodes. Computed by torch operations, on any device."""
    judged, accepted = _judged(tree, result)
    by_depth = _drafted_by_depth(tree, max_depth)
    drafted = _confidence_counts(tree.draft_confidences(), judged, accepted)
    calibrated = _confidence_counts(tree.confidences(), judged, accepted)
    return [by_depth, *drafted, *calibrated]


def _drafted_by_depth(tree: DraftTree, max_depth: int) -> Int[Tensor, "B D"]:
    drafted = tree.valid & (tree.parents >= 0)
    counts = tree.depths.new_zeros(len(tree.tokens), max_depth + 1)
    return counts.scatter_add(1, tree.depths, drafted.long())[:, 1:]


def _judged(
    tree: DraftTree, result: VerifyResult
) -> tuple[Bool[Tensor, "B N"], Bool[Tensor, "B N"]]:
    """Return the nodes whose parent was accepted, and the accepted ones among them."""
    batch_size, num_nodes = tree.tokens.shape

    # Padding of a path goes to one node more than there are, which is cut off.
    path = torch.where(result.accepted_nodes >= 0, result.accepted_nodes, num_nodes)
    on_path = torch.zeros(batch_size, num_nodes + 1, dtype=torch.bool, device=tree.tokens.device)
    on_path = on_path.scatter(1, path, True)[:, :num_nodes]

    has_parent = tree.parents >= 0
    judged = has_parent & on_path.gather(1, tree.parents.clamp(min=0))
    return judged, judged & on_path


def _confidence_counts(
    confidences: Float[Tensor, "B N"], judged: Bool[Tensor, "B N"], accepted: Bool[Tensor, "B N"]
) -> list[Int[Tensor, "B K"]]:
    """Return the columns of ConfidenceCounts, in its order."""
    bins = (confidences * CONFIDENCE_BINS).long().clamp(max=CONFIDENCE_BINS - 1)
    units = (confidences / CONFIDENCE_UNIT).round().long()
    empty = bins.new_zeros(len(bins), CONFIDENCE_BINS)
    return [
        empty.scatter_add(1, bins, judged.long()),
        empty.scatter_add(1, bins, accepted.long()),
        empty.scatter_add(1, bins, units * judged),
    ]


def tops(logits: Float[Tensor, "R V"], num_tops: int) -> list[TopLogprobs]:
    """Return the num_tops likeliest tokens of each row, ties in any order; nothing is computed if num_tops is 0."""
    if not num_tops:
        return [[] for _ in range(len(logits))]
    ids, log_probs = likeliest(logits, num_tops)
    return paired(ids.tolist(), log_probs.tolist())


def likeliest(
    logits: Float[Tensor, "R V"], num_tops: int
) -> tuple[Int[Tensor, "R K"], Float[Tensor, "R K"]]:
    """Return the ids and log-probabilities of the likeliest tokens of each row, on the device."""
    ids = []
    log_probs = []
    for rows in logits.split(SLICE_ROWS):
        top = rows.float().log_softmax(-1).topk(min(num_tops, rows.shape[-1]))
        ids.append(top.indices)
        log_probs.append(top.values)
    return torch.cat(ids), torch.cat(log_probs)


def log_probs_at(
    logits: Float[Tensor, "R V"], rows: Int[Tensor, " P"], tokens: Int[Tensor, " P"], num_tops: int
) -> tuple[Float[Tensor, " P"], tuple[Int[Tensor, "P K"], Float[Tensor, "P K"]] | None]:
    """Return the log-probability of a given token after each row, and the num_tops likeliest tokens
    there; None if 0."""
    log_probs = []
    top_ids = []
    top_log_probs = []
    for part, picked in zip(rows.split(SLICE_ROWS), tokens.split(SLICE_ROWS), strict=True):
        slice_logits = logits[part]
        log_probs.append(log_probs_of(slice_logits, picked))
        if num_tops:
            ids, values = likeliest(slice_logits, num_tops)
            top_ids.append(ids)
            top_log_probs.append(values)

    if not top_ids:
        return torch.cat(log_probs), None
    return torch.cat(log_probs), (torch.cat(top_ids), torch.cat(top_log_probs))


def paired(ids: list[list[int]], values: list[list[float]]) -> list[TopLogprobs]:
    """Zip the ids and log-probabilities of the likeliest tokens to one list of pairs per row."""
    return [list(zip(*row, strict=True)) for row in zip(ids, values, strict=True)]


def record_outputs(sequence: Sequence, logprobs: list[float], ranked: list[TopLogprobs]) -> None:
    """Record log-probabilities of output ids that are about to be appended.

    Args:
        logprobs: log-probability of each id.
        ranked: likeliest tokens at the position of each id, at least as many as requested.
    """
    sampling = sequence.sampling
    if not sampling.wants_logprobs:
        return
    sequence.output_logprobs += logprobs
    if sampling.num_top_logprobs:
        sequence.output_tops += [top[: sampling.num_top_logprobs] for top in ranked]


def record_prompts(sequence: Sequence, start: int, logits: Float[Tensor, "R V"]) -> None:
    """Record log-probabilities of prompt ids, from the logits after rows start, start + 1, ...

    Ids that an earlier prefill has recorded are left as they are.
    """
    # No row comes before the first id of a prompt.
    if not sequence.prompt_logprobs:
        sequence.prompt_logprobs.append(None)
        sequence.prompt_tops.append([])

    num_known = len(sequence.prompt_logprobs)
    ids = sequence.prompt_ids[num_known : start + len(logits) + 1]
    if not ids:
        return

    first_row = num_known - start - 1
    rows = logits[first_row:][: len(ids)]
    targets = torch.tensor(ids, dtype=torch.int64, device=logits.device)
    sequence.prompt_logprobs += log_probs_of(rows, targets).tolist()

    sampling = sequence.sampling
    num_tops = max(sampling.num_top_logprobs, sampling.num_top_prompt_logprobs)
    sequence.prompt_tops += tops(rows, num_tops)
