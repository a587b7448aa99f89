"""MedusaDrafter: heads that read one feature of the target, and the drafted path if they use it, on
EAGLE-2's dynamic tree.

The only state per sequence is the feature after its last cached token: what the target's lm_head
read when the root was sampled. There is no cache and no catching up: plain steps leave the newest
feature behind, too.

    feature  root | level 1 | level 2         head 0 ranks level 1 from (feature, root), head 1 level 2 from
                                              (feature, root, level-1 node), ... Medusa's from the feature alone
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from eagle_ray.core.decode_batch import DecodeSlots
from eagle_ray.core.sampling_batch import SamplingBatch
from eagle_ray.methods.calibration import Calibration
from eagle_ray.methods.candidate_ranker import CandidateRanker, corrections
from eagle_ray.methods.coupling import Coupling
from eagle_ray.methods.drafter import Draft, NullDrafter, TokenSequence, VerifyOutput
from eagle_ray.methods.medusa.heads import HydraHeads, MedusaHeads
from eagle_ray.methods.method import DraftSettings
from eagle_ray.models.target import PromptBatch, TargetModel
from eagle_ray.tree.draft_tree import VerifyResult
from eagle_ray.tree.expand import DraftPlan, Frontier, TreeBuilder


class MedusaDrafter(NullDrafter):
    """Drafts with Medusa or Hydra heads.

    Args:
        heads: Medusa's or Hydra's heads.
        calibration, coupling: corrections of the heads' probabilities, as in CandidateRanker.
    """

    supports_graphs = False
    has_model = True

    def __init__(
        self,
        heads: MedusaHeads | HydraHeads,
        target: TargetModel,
        calibration: Calibration | None = None,
        coupling: Coupling | None = None,
    ):
        self.heads = heads.to(device=target.device, dtype=target.dtype).eval().requires_grad_(False)
        # The heads differ by level: it is given logits.
        self.ranking = CandidateRanker(nn.Identity(), calibration, coupling)
        self._target = target
        self._features = torch.zeros(
            target.cache.num_slots, target.feature_size, dtype=target.dtype, device=target.device
        )

    def prefill_deferred(
        self, prompts: PromptBatch, next_tokens: Int[Tensor, " R"], features: Float[Tensor, "R H"]
    ) -> None:
        slots = torch.tensor(prompts.slots, device=features.device)
        self._features.index_copy_(0, slots, features[prompts.last])

    def draft(
        self,
        batch: DecodeSlots,
        roots: Int[Tensor, " B"],
        plan: DraftPlan,
        sampling: SamplingBatch,
        texts: Sequence[TokenSequence],
    ) -> Draft:
        """Expand the most valuable nodes of each level; at most one level per head."""
        at = batch
        own_roots = roots
        ends = sampling.ends
        members = None
        if plan.members is not None:
            members = torch.tensor(plan.members, device=roots.device)
            at = batch.select(plan.members)
            own_roots = roots[members]
            ends = ends[members]

        builder = TreeBuilder(own_roots, plan.width, plan.static_tree, ends)
        self.ranking.start(sampling, at.lengths, plan.members)
        self._grow(builder, at, plan, own_roots)
        tree = builder.build()
        if members is not None:
            tree = tree.spread(members, roots)
        return Draft(tree, builder.levels, builder.depth, len(at.host_slots))

    def extend(self, batch: DecodeSlots, verified: VerifyOutput) -> None:
        """Store the target's feature at the last accepted node of each sequence."""
        result = verified.result
        last = result.accepted_nodes.gather(1, result.num_accepted[:, None])
        rows = verified.rows.row_of.gather(1, last)[:, 0]
        self._features.index_copy_(0, batch.slots, verified.features[rows])

    def on_verified(self, result: VerifyResult) -> None:
        """Update ranking and calibration from the target's samples, if trees were drafted."""
        self.ranking.update(result)

    def reset_learning(self) -> None:
        self.ranking.reset()

    @property
    def cost_key(self) -> dict[str, Any]:
        return self.heads.shape

    def _grow(
        self, builder: TreeBuilder, at: DecodeSlots, plan: DraftPlan, roots: Int[Tensor, " M"]
    ) -> None:
        """Grow levels until the plan is fulfilled or no head is left."""
        feature = self._features[at.slots]
        frontier = None
        path = self._target.embed_tokens(roots)[:, None, None]
        while builder.depth < min(plan.max_depth, self.heads.num_levels):
            if builder.depth:
                if plan.should_stop and plan.should_stop(builder):
                    return
                frontier = builder.frontier()
                path = self._extended(path, frontier)
            logits = self.heads.logits(builder.depth, feature, path, self._target.logits)
            children = self.ranking.children(logits, frontier, plan.children)
            builder.grow(children.log_probs, children.tokens, children.draft_log_probs)

    def _extended(
        self, path: Float[Tensor, "B P L H"], frontier: Frontier
    ) -> Float[Tensor, "B F L1 H"]:
        """Return the embeddings of the paths to a frontier's nodes, from those to their parents."""
        rows = frontier.parent_rows[:, :, None, None].expand(-1, -1, *path.shape[2:])
        parents = path.gather(1, rows)
        embeddings = self._target.embed_tokens(frontier.tokens)
        return torch.cat([parents, embeddings[:, :, None]], 2)


def make_drafter(
    speculative: DraftSettings, target: TargetModel, weights: MedusaHeads | HydraHeads
) -> MedusaDrafter:
    """Return the drafter over loaded heads."""
    return MedusaDrafter(weights, target, *corrections(speculative, target.device))
