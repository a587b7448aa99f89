"""StepRecord: what the host learns of a step, copied from the device as one integer tensor.

The device side is `step_record`, the host side `StepRecord.of`; they agree on the columns and nobody else reads them.
Does not know sequences or what is done with the counts.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from jaxtyping import Float, Int
from torch import Tensor

from eagle_ray.speculative.stats import CONFIDENCE_BINS, AcceptanceStats
from eagle_ray.speculative.tree import DraftTree
from eagle_ray.speculative.verify import VerifyResult


@dataclass(frozen=True, slots=True)
class StepRecord:
    """What the host learns of one sequence from one step.

    tokens: the accepted drafts and the bonus token. logprobs: theirs, empty where nobody asked.
    """

    tokens: list[int]
    drafted_by_depth: list[int]
    confidence_nodes: list[int]
    confidence_accepted: list[int]
    logprobs: list[float]

    @classmethod
    def of(cls, row: list[int], max_depth: int) -> StepRecord:
        """Read one row of `step_record`."""
        num_tokens, num_bins = row[0] + 1, CONFIDENCE_BINS if max_depth else 0
        ends = list(accumulate((1, max_depth + 1, max_depth, num_bins, num_bins)))
        tokens, drafted, nodes, accepted = (row[start:end] for start, end in pairwise(ends))
        bits = row[ends[-1] :]
        logprobs = torch.tensor(bits, dtype=torch.int32).view(torch.float32).tolist() if bits else []
        return cls(tokens[:num_tokens], drafted, nodes, accepted, logprobs[:num_tokens])

    def count(self, stats: AcceptanceStats) -> None:
        """Add this step to a sequence's statistics."""
        stats.add_step(len(self.tokens) - 1, self.drafted_by_depth)
        stats.add_confidences(self.confidence_nodes, self.confidence_accepted)


def step_record(
    tree: DraftTree, result: VerifyResult, max_depth: int, logprobs: Float[Tensor, "B D1"] | None
) -> Int[Tensor, "B X"]:
    """Everything the host needs of a step in one integer tensor: one copy instead of six.

    Columns: num_accepted, tokens [D+1]; where there are drafts, verified nodes by depth [D] and confidence bins
    [2 * CONFIDENCE_BINS]; where they are asked for, the bits of the log-probabilities [D+1].
    """
    parts = [result.num_accepted[:, None], result.tokens]
    if max_depth:
        parts += [_drafted_by_depth(tree, max_depth), *_confidence_bins(tree, result)]
    if logprobs is not None:
        parts.append(logprobs.view(torch.int32).long())
    return torch.cat(parts, 1)


def _drafted_by_depth(tree: DraftTree, max_depth: int) -> Int[Tensor, "B D"]:
    drafted = tree.valid & (tree.parents >= 0)
    counts = tree.depths.new_zeros(len(tree.tokens), max_depth + 1)
    return counts.scatter_add(1, tree.depths, drafted.long())[:, 1:]


def _confidence_bins(tree: DraftTree, result: VerifyResult) -> tuple[Int[Tensor, "B K"], Int[Tensor, "B K"]]:
    """Nodes whose parent was accepted, and those of them that were too, by the drafter's conditional probability."""
    batch, num_nodes = tree.tokens.shape
    on_path = torch.zeros(batch, num_nodes + 1, dtype=torch.bool, device=tree.tokens.device)
    path = torch.where(result.accepted_nodes >= 0, result.accepted_nodes, num_nodes)
    on_path = on_path.scatter(1, path, True)[:, :num_nodes]
    judged = (tree.parents >= 0) & on_path.gather(1, tree.parents.clamp(min=0))
    bins = (tree.confidences() * CONFIDENCE_BINS).long().clamp(max=CONFIDENCE_BINS - 1)
    empty = torch.zeros(batch, CONFIDENCE_BINS, dtype=torch.int64, device=bins.device)
    return empty.scatter_add(1, bins, judged.long()), empty.scatter_add(1, bins, (judged & on_path).long())
