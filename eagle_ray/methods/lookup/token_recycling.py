"""RecyclingDrafter: draft the tokens that the target ranked best after each token earlier (Token
Recycling, 2408.08696).

The logits of every verified row rank the tokens after its token. The best K are kept per token,
accepted or not; a tree grows by looking up each node's token:

    tokens   [V, K]   the best tokens after token v when it was last verified
    scores   [V, K]   their log-probabilities; -inf if v was never verified

No model runs and nothing syncs with the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from eagle_ray.core.decode_batch import DecodeSlots
from eagle_ray.core.sampling_batch import SamplingBatch
from eagle_ray.methods.calibration import Calibration, ProposalRecorder
from eagle_ray.methods.drafter import Draft, NullDrafter, TokenSequence, VerifyOutput
from eagle_ray.methods.method import DraftSettings
from eagle_ray.models.target import TargetModel
from eagle_ray.tree.expand import DraftPlan, TreeBuilder


class RecyclingDrafter(NullDrafter):
    """Proposes the tokens that the target ranked highest after each token.

    Args:
        max_children: K, the maximum number of children per node.
    """

    supports_graphs = False
    reads_logits = True

    def __init__(
        self,
        vocab_size: int,
        max_children: int,
        device: torch.device | str = "cpu",
        calibration: Calibration | None = None,
    ):
        self._offers = ProposalRecorder(calibration)
        # The last row takes what padding rows say.
        shape = (vocab_size + 1, min(max_children, vocab_size))
        self._tokens = torch.zeros(shape, dtype=torch.int64, device=device)
        self._scores = torch.full(shape, -torch.inf, device=device)
        self._members: Int[Tensor, " M"] | slice = slice(None)
        self._is_empty = True
        self._is_untaught = False  # the last draft's picks are still to come

    @property
    def cost_key(self) -> dict[str, Any]:
        return {"kept": list(self._tokens.shape)}

    def draft(
        self,
        batch: DecodeSlots,
        roots: Int[Tensor, " B"],
        plan: DraftPlan,
        sampling: SamplingBatch,
        texts: Sequence[TokenSequence],
    ) -> Draft:
        """Draft level by level: each of the best `width` nodes gets the stored tokens after its own
        token as children."""
        if self._is_empty:
            return Draft(Draft.empty(roots).tree, [], 0, 0, is_exhausted=True)
        members = None if plan.members is None else torch.tensor(plan.members, device=roots.device)
        self._members = slice(None) if members is None else members
        tokens = roots[self._members][:, None]
        frontier = None
        builder = TreeBuilder(tokens[:, 0], plan.width, ends=sampling.ends[self._members])
        self._offers.begin((sampling.temperature > 0).long()[self._members])
        self._is_untaught = True

        while builder.depth < plan.max_depth:
            if builder.depth:
                if plan.should_stop and plan.should_stop(builder):
                    break
                frontier = builder.frontier()
                tokens = frontier.tokens
            children = self._tokens[tokens][..., : plan.children]
            scores = self._scores[tokens][..., : plan.children]
            log_probs = self._offers.add(frontier, children, scores)
            builder.grow(log_probs, children, scores)

        tree = builder.build()
        tree = tree.rerank(tree.valid, tree.num_nodes)
        if members is not None:
            tree = tree.spread(members, roots)
        return Draft(tree, builder.levels, 0, len(tokens))

    def extend(self, batch: DecodeSlots, verified: VerifyOutput) -> None:
        """Store the best tokens of every verified row. Later rows overwrite earlier ones with the same token."""
        rows = verified.rows
        assert verified.logits is not None, "reads_logits asks for them"
        log_probs = verified.logits.float().log_softmax(-1)
        best = log_probs.topk(self._tokens.shape[1], -1)

        # The last row of each token, so that rows with one token write one thing, in any order.
        index = torch.where(rows.seq >= 0, rows.tokens, len(self._tokens) - 1)
        row = torch.arange(len(index), device=index.device)
        last_row = torch.zeros_like(self._tokens[:, 0]).scatter_reduce(0, index, row, "amax")
        last = last_row[index]
        self._tokens.index_copy_(0, index, best.indices[last])
        self._scores.index_copy_(0, index, best.values[last])
        self._is_empty = False

        if self._is_untaught:
            picks = verified.result.tokens[self._members]
            num_accepted = verified.result.num_accepted[self._members]
            self._offers.update(picks, num_accepted)
        self._is_untaught = False

    def reset_learning(self) -> None:
        self._offers.reset()
        self._scores.fill_(-torch.inf)
        self._is_empty = True
        self._is_untaught = False


def make_drafter(
    speculative: DraftSettings, target: TargetModel, weights: None
) -> RecyclingDrafter:
    calibration = Calibration(speculative.max_depth, target.device)
    return RecyclingDrafter(target.vocab_size, speculative.top_k, target.device, calibration)
