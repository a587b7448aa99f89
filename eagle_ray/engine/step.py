"""DecodeStep: one decoding step of a batch, from its launch to what its planner observes and what is recorded of it.

The host reads a step as one integer tensor, made by `step_record` on the device and taken apart by `StepOutput.of`;
only these two know the order of its parts. UnflushedStats adds up what is counted. Log-probabilities that sequences
request are recorded under the unprocessed logits:

    record_outputs(sequence, logprobs=[-0.1], ranked=[[(17, -0.1), (4, -2.5)]])
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from itertools import accumulate
from zlib import crc32

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from eagle_ray.core.counters import CONFIDENCE_BINS, CONFIDENCE_UNIT, AcceptanceStats, ConfidenceCounts
from eagle_ray.core.decode_batch import DecodeBatch
from eagle_ray.core.device import DeviceToHost, StepTimer, StepTimes
from eagle_ray.core.sequence import Sequence, SequenceStatus, TopLogprobs
from eagle_ray.kernels import tree_ops
from eagle_ray.methods.drafter import Draft, Drafter
from eagle_ray.planner.planner import Allocation, Planner, StepOutcome
from eagle_ray.sampling.sampler import SLICE_ROWS, log_probs_of
from eagle_ray.tree.draft_tree import DraftTree, VerifyResult
from eagle_ray.tree.expand import DraftPlan

NUM_COUNTS = 6 * CONFIDENCE_BINS  # of ConfidenceCounts, as drafted and as calibrated
MAX_STEPS = 256  # of a sequence before its statistics are flushed; 512 slots take 2 MB


@dataclass(frozen=True, slots=True)
class StepShape:
    """The sizes of a verify step.

    Attributes:
        num_nodes: nodes per tree, root included.
        num_rows: rows of the pass.
        max_depth: a bound on the nodes' depths; 0 if only roots are verified.
        logprobs: whether the record has log-probabilities.
        num_tops: how many of the likeliest tokens are recorded.
    """

    num_nodes: int
    num_rows: int
    max_depth: int
    logprobs: bool
    num_tops: int


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What the host learns of one step: arrays with one row per sequence.

    Attributes:
        tokens: the accepted drafts and the bonus token; those past num_accepted + 1 are arbitrary.
        drafted_by_depth: verified nodes; D is 0 in a plain step, which has no confidences either.
        confidences: ConfidenceCounts as drafted, then as calibrated.
        trees: DraftTree.sums of the verified trees; no column in a plain step.
        logprobs: those of the tokens; no columns if not requested.
    """

    num_accepted: Int[np.ndarray, " B"]
    tokens: Int[np.ndarray, "B D1"]
    drafted_by_depth: Int[np.ndarray, "B D"]
    confidences: Int[np.ndarray, "B C"]
    trees: Int[np.ndarray, "B _"]
    logprobs: Float[np.ndarray, "B _"]

    @classmethod
    def of(cls, record: Int[np.ndarray, "B X"], max_depth: int) -> StepOutput:
        """Read a `step_record`."""
        num_counts = NUM_COUNTS if max_depth else 0
        ends = accumulate((1, max_depth + 1, max_depth, num_counts, int(max_depth > 0)))
        num_accepted, tokens, by_depth, confidences, trees, bits = np.split(record, list(ends), axis=1)
        logprobs = bits.astype(np.int32).view(np.float32)
        return cls(num_accepted[:, 0], tokens, by_depth, confidences, trees, logprobs)

    def token_lists(self) -> list[list[int]]:
        """Return each sequence's new tokens."""
        num_tokens = (self.num_accepted + 1).tolist()
        return [row[:count] for row, count in zip(self.tokens.tolist(), num_tokens, strict=True)]


def contain_any(token_lists: list[list[int]], token_ids: Collection[int]) -> list[bool]:
    """Return which of the lists have any of these tokens."""
    wanted = frozenset(token_ids)
    return [not wanted.isdisjoint(tokens) for tokens in token_lists]


@dataclass(slots=True)
class DecodeStep:
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

    def checksum(self, output: StepOutput) -> int:
        """Return a checksum over the plan, the verified trees and the accepted tokens, without padding.

        Confidences are left out. A head that is whole on every rank scores in other last bits on a GPU of another kind,
        which harms nothing until a tree differs.
        """
        sizes = [self.plan.max_depth, self.shape.num_nodes, self.shape.num_rows, self.draft.num_catch_up]
        computed = output.trees.tolist(), output.token_lists()
        return crc32(repr((sizes, self.batch.at.host_slots, *computed)).encode())

    def sync_lengths(self, drafter: Drafter) -> None:
        """Note the lengths of a step that was launched before they were known, and tell the drafter's model."""
        sequences = self.batch.sequences
        lengths = [sequence.num_cached for sequence in sequences]
        self.num_cached = sum(lengths)
        if not self.plan.is_drafting or self.plan.lookups_only:
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
            num_pair_rows=self.draft.num_pair_rows,
            caught_up_before=self.draft.caught_up_before,
        )


class UnflushedStats:
    """Statistics of the last steps, as arrays by slot, until `flush` adds them to the sequences' own.

    Adding arrays takes 0.1 ms per step of 256 sequences, where counting sequence by sequence takes 2 ms.
    """

    def __init__(self, num_slots: int, num_spec_tokens: int):
        self._owners: dict[int, Sequence] = {}  # by slot: whose statistics are there
        self._by_depth = np.zeros((num_slots, num_spec_tokens), dtype=np.int64)
        self._confidences = np.zeros((num_slots, NUM_COUNTS), dtype=np.int64)
        self._draft_passes = np.zeros(num_slots, dtype=np.int64)
        self._num_steps = np.zeros(num_slots, dtype=np.int64)
        self._budgets = np.zeros((num_slots, MAX_STEPS), dtype=np.int64)
        self._accepted = np.zeros((num_slots, MAX_STEPS), dtype=np.int64)

    def add(
        self, sequences: list[Sequence], output: StepOutput, rows: list[int], passes: Int[np.ndarray, " R"]
    ) -> None:
        """Add one step of running sequences.

        Args:
            rows: the sequences' rows of the output.
            passes: the drafter's passes for each of them.
        """
        slots = np.array([sequence.slot for sequence in sequences])
        self._owners.update(zip(slots.tolist(), sequences, strict=True))
        by_depth = output.drafted_by_depth[rows]
        step = self._num_steps[slots]
        self._budgets[slots, step] = by_depth.sum(1) + 1
        self._accepted[slots, step] = output.num_accepted[rows]
        self._num_steps[slots] = step + 1
        self._draft_passes[slots] += passes
        if by_depth.shape[1]:
            self._by_depth[slots, : by_depth.shape[1]] += by_depth
            self._confidences[slots] += output.confidences[rows]
        for slot in slots[step + 1 == MAX_STEPS].tolist():
            self._flush(slot)

    def flush(self, sequence: Sequence) -> None:
        """Add what is counted for a sequence to its own statistics. It holds its slot, or has only just left it."""
        if self._owners.get(sequence.slot) is sequence:
            self._flush(sequence.slot)

    def flush_all(self) -> None:
        for slot in list(self._owners):
            self._flush(slot)

    def _flush(self, slot: int) -> None:
        sequence, num_steps = self._owners.pop(slot), int(self._num_steps[slot])
        budgets, accepted = self._budgets[slot, :num_steps], self._accepted[slot, :num_steps]
        num_spec_tokens = self._by_depth.shape[1]
        bins = self._confidences[slot].reshape(6, CONFIDENCE_BINS).tolist()
        counted = AcceptanceStats(
            num_spec_tokens,
            histogram=np.bincount(accepted, minlength=num_spec_tokens + 1).tolist(),
            proposed_by_depth=self._by_depth[slot].tolist(),
            drafted=ConfidenceCounts(*bins[:3]),
            calibrated=ConfidenceCounts(*bins[3:]),
            num_plain_steps=int((budgets == 1).sum()),
            per_step_budget=budgets.tolist(),
            per_step_accepted=accepted.tolist(),
        )
        sequence.stats.add(counted)
        sequence.target_forwards += num_steps
        sequence.draft_forwards += int(self._draft_passes[slot])
        for counts in (self._by_depth, self._confidences, self._draft_passes, self._num_steps):
            counts[slot] = 0


def step_record(
    tree: DraftTree, result: VerifyResult, max_depth: int, logprobs: Float[Tensor, "B D1"] | None
) -> Int[Tensor, "B X"]:
    """Everything the host needs of a step in one integer tensor: one copy instead of six.

    Columns: num_accepted, tokens [D+1]; where there are drafts, verified nodes by depth [D], ConfidenceCounts
    [3 * CONFIDENCE_BINS], as drafted and as calibrated, and DraftTree.sums; where asked for, the bits of the
    log-probabilities [D+1].
    """
    parts = [result.num_accepted[:, None], result.tokens]
    if max_depth and tree_ops.available(tree.tokens.device):
        inputs = tree.parents, tree.depths, tree.log_values, tree.draft_log_probs, tree.valid, result.accepted_nodes
        parts.append(tree_ops.count_nodes(*inputs, CONFIDENCE_BINS, CONFIDENCE_UNIT))
    elif max_depth:
        parts += node_counts(tree, result, max_depth)
    if max_depth:
        parts.append(tree.sums()[:, None])
    if logprobs is not None:
        parts.append(logprobs.view(torch.int32).long())
    return torch.cat(parts, 1)


def node_counts(tree: DraftTree, result: VerifyResult, max_depth: int) -> list[Int[Tensor, "B _"]]:
    """Return the columns of a record that count nodes, by torch, on any device."""
    judged, accepted = _judged(tree, result)
    counts = [_drafted_by_depth(tree, max_depth)]
    counts += _confidence_counts(tree.draft_confidences(), judged, accepted)
    return counts + _confidence_counts(tree.confidences(), judged, accepted)


def _drafted_by_depth(tree: DraftTree, max_depth: int) -> Int[Tensor, "B D"]:
    drafted = tree.valid & (tree.parents >= 0)
    counts = tree.depths.new_zeros(len(tree.tokens), max_depth + 1)
    return counts.scatter_add(1, tree.depths, drafted.long())[:, 1:]


def _judged(tree: DraftTree, result: VerifyResult) -> tuple[Bool[Tensor, "B N"], Bool[Tensor, "B N"]]:
    """Nodes whose parent was accepted, and those of them that were too."""
    batch, num_nodes = tree.tokens.shape
    on_path = torch.zeros(batch, num_nodes + 1, dtype=torch.bool, device=tree.tokens.device)
    path = torch.where(result.accepted_nodes >= 0, result.accepted_nodes, num_nodes)
    on_path = on_path.scatter(1, path, True)[:, :num_nodes]
    judged = (tree.parents >= 0) & on_path.gather(1, tree.parents.clamp(min=0))
    return judged, judged & on_path


def _confidence_counts(
    confidences: Float[Tensor, "B N"], judged: Bool[Tensor, "B N"], accepted: Bool[Tensor, "B N"]
) -> list[Int[Tensor, "B K"]]:
    """Return the columns of ConfidenceCounts, in its order."""
    bins = (confidences * CONFIDENCE_BINS).long().clamp(max=CONFIDENCE_BINS - 1)
    units = (confidences / CONFIDENCE_UNIT).round().long() * judged
    empty = bins.new_zeros(len(bins), CONFIDENCE_BINS)
    return [empty.scatter_add(1, bins, counts) for counts in (judged.long(), accepted.long(), units)]


def tops(logits: Float[Tensor, "R V"], num_tops: int) -> list[TopLogprobs]:
    """Return the num_tops likeliest tokens of each row, ties in any order. Nothing is computed for 0."""
    if not num_tops:
        return [[] for _ in range(len(logits))]
    return paired(*(values.tolist() for values in likeliest(logits, num_tops)))


def likeliest(logits: Float[Tensor, "R V"], num_tops: int) -> tuple[Int[Tensor, "R K"], Float[Tensor, "R K"]]:
    """Return the likeliest ids and their log-probabilities, on the device."""
    parts = [rows.float().log_softmax(-1).topk(min(num_tops, rows.shape[-1])) for rows in logits.split(SLICE_ROWS)]
    return torch.cat([part.indices for part in parts]), torch.cat([part.values for part in parts])


def log_probs_at(
    logits: Float[Tensor, "R V"], rows: Int[Tensor, " P"], tokens: Int[Tensor, " P"], num_tops: int
) -> tuple[Float[Tensor, " P"], tuple[Int[Tensor, "P K"], Float[Tensor, "P K"]] | None]:
    """Return the log-probability of a token after each of some rows, and the num_tops likeliest there; None for 0."""
    log_probs, tops = [], []
    for part, picked in zip(rows.split(SLICE_ROWS), tokens.split(SLICE_ROWS), strict=True):
        slice_logits = logits[part]
        log_probs.append(log_probs_of(slice_logits, picked))
        if num_tops:
            tops.append(likeliest(slice_logits, num_tops))
    parts = tuple(torch.cat(values) for values in zip(*tops, strict=True))
    return torch.cat(log_probs), (parts[0], parts[1]) if parts else None


def paired(ids: list[list[int]], values: list[list[float]]) -> list[TopLogprobs]:
    """Return pairs of the likeliest ids and their log-probabilities, by row."""
    return [list(zip(*row, strict=True)) for row in zip(ids, values, strict=True)]


def record_outputs(sequence: Sequence, logprobs: list[float], ranked: list[TopLogprobs]) -> None:
    """Record log-probabilities of output ids that are about to be appended. ranked: at least the requested number."""
    sampling = sequence.sampling
    if sampling.wants_logprobs:
        sequence.output_logprobs += logprobs
    if sampling.wants_logprobs and sampling.num_top_logprobs:
        sequence.output_tops += [top[: sampling.num_top_logprobs] for top in ranked]


def record_prompts(sequence: Sequence, start: int, logits: Float[Tensor, "R V"]) -> None:
    """Record log-probabilities of the prompt ids after rows start, start + 1, ...; a repeated prefill has
    them already.
    """
    if not sequence.prompt_logprobs:
        sequence.prompt_logprobs.append(None)
        sequence.prompt_tops.append([])
    known = len(sequence.prompt_logprobs)
    ids = sequence.prompt_ids[known : start + len(logits) + 1]
    if not ids:
        return
    rows = logits[known - start - 1 :][: len(ids)]
    targets = torch.tensor(ids, dtype=torch.int64, device=logits.device)
    sequence.prompt_logprobs += log_probs_of(rows, targets).tolist()
    sampling = sequence.sampling
    sequence.prompt_tops += tops(rows, max(sampling.num_top_logprobs, sampling.num_top_prompt_logprobs))
