"""ParallelDrafter: a P-EAGLE head, which drafts every level after the first in one pass of masks.

    pairs     - (t1,f0) (t2,f1) ... (root,f[n-1]) | mask  mask  mask        each mask with mask_hidden for a feature
    position  0    1       2            n         | n+1   n+2   n+3         row i predicts the token of level i + 1

The output of the root's pair predicts level 1. A mask attends to the pairs before it and to the
masks before it. All nodes of a level have one row, so they have the same children, as in a DFlash
head's tree: the value of a node is the product of the probabilities along its path.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import cast

import torch
from jaxtyping import Float, Int
from torch import Tensor

from eagle_ray.core.decode_batch import DecodeSlots
from eagle_ray.core.sampling_settings import SamplingSettings
from eagle_ray.methods.calibration import Calibration
from eagle_ray.methods.candidate_ranker import corrections
from eagle_ray.methods.coupling import Coupling
from eagle_ray.methods.eagle.drafter import EagleDrafter
from eagle_ray.methods.eagle.heads import DraftHead, PEagleHead
from eagle_ray.methods.method import DraftSettings
from eagle_ray.methods.pair_drafter import QUEUE_WINDOW, DraftedTree, PairDrafter
from eagle_ray.models.graphs import CudaGraphRunner
from eagle_ray.models.target import TargetModel
from eagle_ray.tree.expand import DraftPlan


class ParallelDrafter(EagleDrafter):
    """Reads pairs as EagleDrafter does, and drafts all levels at once. Arguments as for EagleDrafter."""

    def __init__(
        self,
        head: PEagleHead,
        target: TargetModel,
        window: int = QUEUE_WINDOW,
        calibration: Calibration | None = None,
        coupling: Coupling | None = None,
    ):
        super().__init__(cast(DraftHead, head), target, window, calibration, coupling)
        self._logits = partial(self.head.logits, target_logits=target.logits)

    def use_graphs(self, runner: CudaGraphRunner | None, max_depth: int = 0) -> None:
        PairDrafter.use_graphs(self, runner, max_depth)

    def recordings(
        self, top_k: int, max_length: int, params: SamplingSettings
    ) -> Iterator[Callable[[], None]]:
        """Yield nothing: the pass of a plan is recorded when the plan is first drafted."""
        return iter(())

    def _grows_by_level(self, plan: DraftPlan) -> bool:
        return False

    def _num_passes(self, grown: DraftedTree) -> int:
        return min(len(grown.levels), 2)

    def _expand(
        self,
        at: DecodeSlots,
        roots: Int[Tensor, " B"],
        ends: Int[Tensor, "B E"],
        plan: DraftPlan,
        first: Int[Tensor, " B"],
        features: Float[Tensor, "B H"],
    ) -> DraftedTree:
        """Run the masks, and grow the tree from the rows, level by level."""
        rows = features[:, None]
        if plan.max_depth > 1:
            rows = torch.cat([rows, self._masks(at, first, plan.max_depth - 1)], 1)
        logits = self._logits(rows)

        builder = self.builder(roots, plan.width, plan.static_tree, ends)
        while builder.depth < plan.max_depth:
            level = builder.depth
            if level and plan.should_stop and plan.should_stop(builder):
                break
            frontier = builder.frontier() if level else None
            own = slice(level, level + 1)
            children = self.ranking.scored_children(
                rows[:, own], logits[:, own], frontier, plan.children
            )
            builder.grow(children.log_probs, children.tokens, children.draft_log_probs)
        return DraftedTree(builder.build(), builder.levels, self.ranking.feedback)

    def _masks(
        self, at: DecodeSlots, first: Int[Tensor, " B"], num_masks: int
    ) -> Float[Tensor, "B M H"]:
        """Return the outputs of the masks after each root's pair."""
        batch = len(at.slots)
        device = at.slots.device
        depths = torch.arange(num_masks, device=device)
        positions = at.lengths[:, None] + 1 + depths
        causal = torch.ones(num_masks, num_masks, dtype=torch.bool, device=device).tril()
        layout = self._layout(
            at.shifted(1),
            slot_mapping=self.cache.slot_mapping(at.slots[:, None], positions).flatten(),
            ancestors=causal.expand(batch, -1, -1),
            position_depths=depths.expand(batch, -1),
            first=first,
        )
        tokens = torch.full_like(positions, self.head.mask_token_id).flatten()
        feature = self.head.project_features(self.head.mask_hidden.flatten())
        hidden = self._run(tokens, feature.expand(len(tokens), -1), positions.flatten(), layout)
        return hidden.view(batch, num_masks, -1)


def make_parallel_drafter(
    speculative: DraftSettings, target: TargetModel, weights: PEagleHead
) -> ParallelDrafter:
    """Return the drafter over a loaded head."""
    calibration, coupling = corrections(speculative, target.device)
    return ParallelDrafter(weights, target, calibration=calibration, coupling=coupling)
