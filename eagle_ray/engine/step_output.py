"""StepOutput: what the host learns of a step, copied from the device as one integer tensor.

The device side is `step_record`, the host side `StepOutput.of`; only these two know the columns.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from eagle_ray.tree.accept import VerifyResult
from eagle_ray.tree.acceptance_stats import CONFIDENCE_BINS, CONFIDENCE_UNIT, AcceptanceStats, ConfidenceCounts
from eagle_ray.tree.draft_tree import DraftTree


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What the host learns of one sequence from one step.

    tokens: the accepted drafts and the bonus token. logprobs: theirs, empty if not requested.
    """

    tokens: list[int]
    drafted_by_depth: list[int]
    drafted: ConfidenceCounts
    calibrated: ConfidenceCounts
    logprobs: list[float]

    @classmethod
    def of(cls, row: list[int], max_depth: int) -> StepOutput:
        """Read one row of `step_record`."""
        num_tokens, num_bins = row[0] + 1, CONFIDENCE_BINS if max_depth else 0
        ends = list(accumulate((1, max_depth + 1, max_depth, *[num_bins] * 6)))
        tokens, by_depth, *bins = (row[start:end] for start, end in pairwise(ends))
        bits = row[ends[-1] :]
        logprobs = torch.tensor(bits, dtype=torch.int32).view(torch.float32).tolist() if bits else []
        drafted, calibrated = ConfidenceCounts(*bins[:3]), ConfidenceCounts(*bins[3:])
        return cls(tokens[:num_tokens], by_depth, drafted, calibrated, logprobs[:num_tokens])

    def count(self, stats: AcceptanceStats) -> None:
        """Add this step to a sequence's statistics."""
        stats.add_step(len(self.tokens) - 1, self.drafted_by_depth)
        stats.drafted.add(self.drafted)
        stats.calibrated.add(self.calibrated)


def step_record(
    tree: DraftTree, result: VerifyResult, max_depth: int, logprobs: Float[Tensor, "B D1"] | None
) -> Int[Tensor, "B X"]:
    """Everything the host needs of a step in one integer tensor: one copy instead of six.

    Columns: num_accepted, tokens [D+1]; where there are drafts, verified nodes by depth [D] and ConfidenceCounts
    [3 * CONFIDENCE_BINS], as drafted and as calibrated; where asked for, the bits of the log-probabilities [D+1].
    """
    parts = [result.num_accepted[:, None], result.tokens]
    if max_depth:
        judged, accepted = _judged(tree, result)
        parts.append(_drafted_by_depth(tree, max_depth))
        parts += _confidence_counts(tree.draft_confidences(), judged, accepted)
        parts += _confidence_counts(tree.confidences(), judged, accepted)
    if logprobs is not None:
        parts.append(logprobs.view(torch.int32).long())
    return torch.cat(parts, 1)


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
