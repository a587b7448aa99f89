"""DFlashDrafter: a tree from one pass of a block head (arXiv 2602.06036), as DDTree makes it (arXiv 2604.12989).

The cache holds the keys and values of the tokens' projected features (see methods/dflash/heads.py).
One pass over a root and mask tokens gives a distribution for each of the next positions. A node of
level d is a token of the d-th distribution, and its value the product of the probabilities along
its path, so the best nodes are best-first over products of marginals. All nodes of a level have the
same children.

With a path head (methods/dflash/paths.py) each node of a level has children of its own: the level's
logits plus what the node's token and the path before it add. The tree then grows as EAGLE's does,
from the best nodes of each level, and costs a small product a level in place of a pass.

    pairs     - (f0) (f1) ... (f[n-1]) | root  mask  mask  mask        rope position n of the root,
    position  0   1    2         n     | n+1   n+2   n+3   n+4         n+1 of the first mask, ...

Width and depth of the plan bound the tree, and its depth is the length of the block. A tree of
width W and K children per node holds the best M nodes of all trees if W >= M/2 and K >= M: the w-th
best node of a level with its r-th child has at least w*r - 1 nodes of the child's level before it,
and w of its own. The head of JetSpec (arXiv 2606.18394) differs in its mask alone: its released
engine builds trees from one pass, too, over masks and not over drafted tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from eagle_ray.attention.backend import tree_metadata
from eagle_ray.attention.metadata import AttentionMetadata
from eagle_ray.core.decode_batch import DecodeSlots
from eagle_ray.core.sampling_batch import SamplingBatch
from eagle_ray.core.sampling_settings import SamplingSettings
from eagle_ray.methods.calibration import Calibration
from eagle_ray.methods.candidate_ranker import corrections
from eagle_ray.methods.coupling import Coupling
from eagle_ray.methods.dflash.heads import BlockDecoder, DFlashHead
from eagle_ray.methods.dflash.paths import Embed
from eagle_ray.methods.drafter import idle_batch
from eagle_ray.methods.method import DraftSettings
from eagle_ray.methods.pair_drafter import (
    QUEUE_WINDOW,
    DraftedTree,
    PairDrafter,
    PendingPairs,
    Spans,
)
from eagle_ray.models.graphs import NARROW_FROM
from eagle_ray.models.target import TargetModel
from eagle_ray.tree.expand import DraftPlan, Frontier

SHORT_BLOCK = 4  # levels of the block that is recorded besides the longest
NARROW_TREE = 4  # nodes of each level of the tree that is recorded besides the widest: a block takes as long for any


class DFlashDrafter(PairDrafter):
    """Stores the keys and values of pairs' features in the head's cache, and drafts a block in one pass.

    Arguments as for PairDrafter; a pair's token is not read.
    """

    def __init__(
        self,
        head: DFlashHead,
        target: TargetModel,
        window: int = QUEUE_WINDOW,
        calibration: Calibration | None = None,
        coupling: Coupling | None = None,
        token_ids: Int[Tensor, " Dv"] | None = None,
    ):
        super().__init__(head, target, window, calibration, coupling, token_ids)
        self._decoder = BlockDecoder(self.head)
        lm_head = target.logits_over(token_ids)
        self._block_logits = partial(self.head.block_logits, target_logits=lm_head)

    @property
    def cost_key(self) -> dict[str, Any]:
        token_ids = self._token_ids
        return {
            "head": "dflash",
            "config": self.head.config.to_dict(),
            "block": repr(self.head.block),
            "drafted": None if token_ids is None else len(token_ids),
        }

    def recordings(
        self, top_k: int, max_length: int, params: SamplingSettings
    ) -> Iterator[Callable[[], None]]:
        """Yield the functions that record each pass of drafts with top_k children per node, the largest first."""
        plans = []
        for depth in sorted({min(SHORT_BLOCK, self._longest), self._longest}):
            for width in sorted({min(NARROW_TREE, top_k), top_k}):
                plans.append(DraftPlan(depth, width, num_children=top_k))
        for size in self._runner.sizes(self._padded_size, self._target.cache.num_slots):
            for plan in dict.fromkeys(self.recorded_plan(plan, size) for plan in reversed(plans)):
                yield partial(self._record_draft, size, plan, max_length, params)

    def _record_draft(
        self, batch_size: int, plan: DraftPlan, max_length: int, params: SamplingSettings
    ) -> None:
        """Record the pass that is replayed for drafts of this size."""
        batch = idle_batch(batch_size, self._target, max_length, params)
        first, _ = self._first_positions(batch.at)
        self._runner.record(*self._draft_pass(batch.at, batch.roots, first, plan, batch.sampling))

    def _replayed(
        self, at: DecodeSlots, roots: Int[Tensor, " B"], plan: DraftPlan, sampling: SamplingBatch
    ) -> DraftedTree | None:
        """Return a replayed draft of at least the plan's width and depth, or None if replaying fails."""
        recorded = self.recorded_plan(plan, self._padded_size(len(roots)))
        return super()._replayed(at, roots, recorded, sampling)

    def _padded_size(self, num_sequences: int, width: int = NARROW_TREE) -> int:
        """Return the sequences of the replayed pass, whatever the plan's width."""
        return self._runner.draft_size(num_sequences, NARROW_TREE)

    def recorded_plan(self, plan: DraftPlan, size: int) -> DraftPlan:
        """Return the plan of the recorded pass that a batch of this size replays; a few shapes serve all plans.

        More nodes than the plan asks for cost little, since the block is one pass, and the budget
        may choose them. A large batch has a short block only if it is narrow, too.
        """
        if plan.static_tree is not None:
            return plan
        width = self._runner.draft_width(max(plan.width, NARROW_TREE), plan.children, size)
        is_narrow = width < plan.children
        if not is_narrow:
            width = max(plan.width, plan.children)
        is_short = plan.max_depth <= SHORT_BLOCK < self._longest and (
            is_narrow or size < NARROW_FROM
        )
        if is_short:
            return replace(plan, max_depth=SHORT_BLOCK, width=width)
        depth = max(self._longest, min(plan.max_depth, self.head.block.num_levels))
        return replace(plan, max_depth=depth, width=width)

    @property
    def _longest(self) -> int:
        """Return the levels of the longest block that is replayed."""
        return min(self._max_depth, self.head.block.num_levels)

    def _num_passes(self, grown: DraftedTree) -> int:
        return 1

    def _read_spans(
        self, spans: Spans, tokens: Int[Tensor, " R"], features: Float[Tensor, "R F"]
    ) -> None:
        slots, positions = spans.rows(features.device)
        self._write(self.cache.slot_mapping(slots, positions), positions, features)

    def _catch_up(self, at: DecodeSlots, backlog: PendingPairs) -> Float[Tensor, "B 0"]:
        """Write the pending pairs' keys and values. A block reads its roots themselves, not these rows."""
        pending = self._pending_rows(at, backlog)
        self._write(pending.slot_mapping, pending.positions, pending.features)
        return pending.features.new_empty(len(at.slots), 0)

    def _expand(
        self,
        at: DecodeSlots,
        roots: Int[Tensor, " B"],
        ends: Int[Tensor, "B E"],
        plan: DraftPlan,
        first: Int[Tensor, " B"],
        features: Float[Tensor, "B 0"],
    ) -> DraftedTree:
        """Run one block, and grow the tree from its rows, level by level."""
        num_levels = min(plan.max_depth, self.head.block.num_levels)
        hidden = self._block(at, roots, num_levels, first)
        logits = self._block_logits(hidden)
        paths = None if self.head.path is None else Paths(self.head, self.embed_tokens, roots)

        builder = self.builder(roots, plan.width, plan.static_tree, ends)
        while builder.depth < num_levels:
            level = builder.depth
            if level and plan.should_stop and plan.should_stop(builder):
                break
            frontier = builder.frontier() if level else None

            # All nodes of a level have one row of the block, unless the head reads their paths.
            row = hidden[:, level, None]
            features = row
            scores = logits[:, level, None]
            confidence = None
            if paths is not None:
                features, scores = paths.step(level, frontier, row, scores)
                confidence = self.head.confidence(paths.tokens, row)
            children = self.ranking.scored_children(
                features, scores, frontier, plan.children, confidence
            )
            builder.grow(children.log_probs, children.tokens, children.draft_log_probs)
        return DraftedTree(builder.build(), builder.levels, self.ranking.feedback)

    def _block(
        self, at: DecodeSlots, roots: Int[Tensor, " B"], num_levels: int, first: Int[Tensor, " B"]
    ) -> Float[Tensor, "B L H"]:
        """Run the head over the roots and mask tokens, and return the outputs that predict each level."""
        block = self.head.block
        batch = len(roots)
        device = roots.device

        # A block's rows are its root and mask tokens, at the positions after what is cached.
        num_rows = block.num_rows(num_levels)
        depths = torch.arange(num_rows, device=device).expand(batch, -1)
        tokens = torch.where(depths == 0, roots[:, None], block.mask_token_id)
        positions = at.lengths[:, None] + 1 + depths
        slot_mapping = self.cache.slot_mapping(at.slots[:, None], positions).flatten()
        layouts: dict[bool, AttentionMetadata] = {}

        def layout_of(is_causal: bool) -> AttentionMetadata:
            if is_causal not in layouts:
                visible = torch.ones(num_rows, num_rows, dtype=torch.bool, device=device)
                if is_causal:
                    visible = visible.tril()
                visible = visible.expand(batch, -1, -1)
                layouts[is_causal] = tree_metadata(
                    self.cache, at.shifted(1), slot_mapping, visible, depths, depths, first=first
                )
            return layouts[is_causal]

        embeddings = self.embed_tokens(tokens.flatten())
        rope_positions = self._rope_positions(positions.flatten())
        hidden = self._decoder.run(embeddings, rope_positions, layout_of, num_rows)
        return hidden.view(batch, num_rows, -1)[:, num_rows - num_levels :]

    def _write(
        self,
        slot_mapping: Int[Tensor, " R"],
        positions: Int[Tensor, " R"],
        features: Float[Tensor, "R F"],
    ) -> None:
        self._decoder.write_context(
            self.cache, slot_mapping, self._rope_positions(positions), features
        )

    def _rope_positions(self, positions: Int[Tensor, " R"]) -> Int[Tensor, " R"]:
        """Return the rope positions of the features, or of the block's rows, at these positions."""
        return positions - self.head.first_position


class Paths:
    """State of a path head while a tree grows: the tokens and recurrent states of the last level's nodes.

    Attributes:
        tokens: tokens of the level's expanded nodes.
    """

    def __init__(self, head: DFlashHead, embed: Embed, roots: Int[Tensor, " B"]):
        assert head.path is not None
        self._path = head.path
        self._embed = embed
        self._state = head.norm.weight.new_zeros(len(roots), 1, self._path.state_size)
        self.tokens = roots[:, None]

    def step(
        self,
        level: int,
        frontier: Frontier | None,
        hidden: Float[Tensor, "B 1 H"],
        logits: Float[Tensor, "B 1 Dv"],
    ) -> tuple[Float[Tensor, "B F I"], Float[Tensor, "B F Dv"]]:
        """Advance to a level's expanded nodes. Return their features, which the head's `logits`
        reads, and their logits.

        Args:
            level: level of the nodes; the root's is 0.
            frontier: the expanded nodes; None for the roots.
            hidden: output of the block's row that predicts their children.
            logits: logits of that row.
        """
        state = self._state
        if frontier is not None:
            self.tokens = frontier.tokens
            parents = frontier.parent_rows[:, :, None].expand(-1, -1, state.shape[2])
            state = state.gather(1, parents)
        latents, self._state = self._path.step(self._embed, self.tokens, hidden, state, level)
        features = torch.cat([hidden.expand(*latents.shape[:2], -1), latents], -1)
        return features, self._path.scores(logits, latents)


def make_drafter(
    speculative: DraftSettings, target: TargetModel, weights: DFlashHead
) -> DFlashDrafter:
    """Return the drafter over a loaded head."""
    num_signals = int(weights.confidence_head is not None)
    calibration, coupling = corrections(speculative, target.device, num_signals)
    return DFlashDrafter(weights, target, calibration=calibration, coupling=coupling)
