"""EagleDrafter: an EAGLE-1/2 head that grows the dynamic tree of EAGLE-2 from the target's features.

Its cache holds one row per (token i+1, feature i) pair of each sequence, always made from the *target's* features, so
what it drafted itself is forgotten after each step. With n tokens in the target's cache it holds n rows, the last of
them for the root; that row's output is the feature from which level 1 is drafted.

    pairs   (t1,f0) (t2,f1) ... (root,f[n-1]) | level-1 nodes | level-2 nodes | ...
    column     0       1             n-1      |  n .. n+K-1   | n+K .. n+2K-1 |

Does not know budgets, acceptance or requests.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from eagle_ray.models.attention import PromptLayout, TreeLayout
from eagle_ray.models.heads import EagleHead
from eagle_ray.models.kv_cache import BatchSlots, KVCache
from eagle_ray.models.target import Prompts, Target
from eagle_ray.speculative.budget import Plan
from eagle_ray.speculative.expand import Frontier, TreeBuilder
from eagle_ray.speculative.tree import DraftTree, VerifyRows
from eagle_ray.speculative.verify import VerifyResult


class EagleDrafter:
    """The head, its one-layer cache and, for each slot, the feature that the next tree grows from.

    capacity: columns of a slot: the longest sequence and the drafted levels.
    """

    def __init__(self, head: EagleHead, target: Target, capacity: int):
        self._head = head.to(device=target.device, dtype=target.dtype).eval().requires_grad_(False)
        self._target = target
        self._embed = head.embed_tokens or target.embed_tokens
        config = head.config
        self.cache = KVCache(
            target.cache.blocks, 1, config.num_key_value_heads, config.head_dim, target.dtype, target.device
        )
        self._root_features = torch.zeros(
            target.cache.num_slots, target.hidden_size, dtype=target.dtype, device=target.device
        )

    def num_passes(self, plan: Plan) -> int:
        """One for extending, which yields level 1, and one for every further level."""
        return max(plan.max_depth, 1)

    def prefill(self, prompts: Prompts, next_tokens: Int[Tensor, " R"], features: Float[Tensor, "R H"]) -> None:
        """The chunks' pairs: every row's feature and the token after it."""
        layout = PromptLayout(self.cache, prompts.slots, prompts.starts, prompts.lengths)
        hidden = self._run(next_tokens, features, prompts.positions, layout)
        self._root_features[prompts.slots] = hidden[prompts.last]

    def draft(self, batch: BatchSlots, roots: Int[Tensor, " B"], plan: Plan) -> DraftTree:
        """EAGLE-2's expansion: the top `width` of each level get `width` children each (section 4.1)."""
        builder = TreeBuilder(roots, plan.width)
        features = self._root_features[batch.slots][:, None]
        builder.grow(*self._children(features, plan.width))
        ancestors = None
        for level in range(1, plan.max_depth):
            frontier = builder.frontier()
            ancestors = _descend(ancestors, frontier)
            features = self._level(batch, level, frontier, features, ancestors)
            builder.grow(*self._children(features, plan.width))
        return builder.build()

    def extend(self, batch: BatchSlots, rows: VerifyRows, result: VerifyResult, features: Float[Tensor, "R H"]) -> None:
        """Append the pairs of the accepted path and the bonus token; rows past them are padding, never seen."""
        path_rows = rows.row_of.gather(1, result.accepted_nodes.clamp(min=0))
        num_rows = path_rows.shape[1]
        causal = torch.ones(num_rows, num_rows, dtype=torch.bool, device=path_rows.device).tril()
        depths = torch.arange(num_rows, device=path_rows.device).expand_as(path_rows)
        layout = self._layout(batch, depths, causal.expand(len(path_rows), -1, -1), depths)
        positions = batch.lengths[:, None] + depths
        hidden = self._run(result.tokens.flatten(), features[path_rows.flatten()], positions.flatten(), layout)
        last = torch.arange(len(path_rows), device=path_rows.device) * num_rows + result.num_accepted
        self._root_features[batch.slots] = hidden[last]

    def _level(
        self,
        batch: BatchSlots,
        level: int,
        frontier: Frontier,
        features: Float[Tensor, "B P H"],
        ancestors: Bool[Tensor, "B F M"],
    ) -> Float[Tensor, "B F H"]:
        """Run the head on the frontier of `level`; features are those of the frontier before it."""
        parents = frontier.parent_rows[:, :, None].expand(-1, -1, features.shape[2])
        width = frontier.tokens.shape[1]
        column = torch.arange(ancestors.shape[2], device=batch.slots.device)
        offsets = column[-width:].expand_as(frontier.tokens)
        depths = torch.full_like(frontier.tokens, level - 1)
        column_depths = (column // width).expand(len(batch.slots), -1)
        layout = self._layout(batch, offsets, ancestors, column_depths)
        positions = batch.lengths[:, None] + depths
        inputs = features.gather(1, parents).flatten(0, 1)
        hidden = self._run(frontier.tokens.flatten(), inputs, positions.flatten(), layout)
        return hidden.view(*frontier.tokens.shape, -1)

    def _layout(
        self,
        batch: BatchSlots,
        offsets: Int[Tensor, "B F"],
        ancestors: Bool[Tensor, "B F M"],
        column_depths: Int[Tensor, "B M"],
    ) -> TreeLayout:
        """Rows written `offsets` columns after the committed pairs."""
        return TreeLayout(
            cache=self.cache,
            batch=batch,
            cells=self.cache.cells(batch.slots[:, None], batch.lengths[:, None] + offsets).flatten(),
            ancestors=ancestors,
            depths=column_depths[:, -offsets.shape[1] :],
            column_depths=column_depths,
        )

    def _children(
        self, features: Float[Tensor, "B F H"], width: int
    ) -> tuple[Float[Tensor, "B F K"], Int[Tensor, "B F K"]]:
        """The head's most probable next tokens and their fp32 log-probabilities; no temperature, no processors."""
        logits = self._target.logits(features).float()
        best, tokens = logits.topk(min(width, logits.shape[-1]), -1)
        return best - logits.logsumexp(-1, keepdim=True), tokens

    def _run(
        self,
        tokens: Int[Tensor, " R"],
        features: Float[Tensor, "R H"],
        positions: Int[Tensor, " R"],
        layout: PromptLayout | TreeLayout,
    ) -> Float[Tensor, "R H"]:
        return self._head(self._embed(tokens)[None], features[None], positions[None], layout)[0]


def tree_columns(max_nodes: int, max_depth: int, width: int) -> int:
    """Columns past its cached tokens that a sequence's step may write: the target's nodes or the drafter's levels."""
    return max(max_nodes + 1, max_depth + 1, 1 + max_depth * width)


def _descend(ancestors: Bool[Tensor, "B P M"] | None, frontier: Frontier) -> Bool[Tensor, "B F M2"]:
    """Which tree columns the new frontier sees: its parents' and, in F new columns, each node itself."""
    batch, width = frontier.tokens.shape
    itself = torch.eye(width, dtype=torch.bool, device=frontier.tokens.device).expand(batch, width, width)
    if ancestors is None:
        return itself
    parents = frontier.parent_rows[:, :, None].expand(-1, -1, ancestors.shape[2])
    return torch.cat([ancestors.gather(1, parents), itself], 2)
