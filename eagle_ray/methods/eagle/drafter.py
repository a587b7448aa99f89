"""EagleDrafter: a draft head that grows EAGLE-2's dynamic tree, or a static one, from the target's features.

A pair depends on no later token, as in the target's cache (see pair_drafter.py). The output of the
root's pair is the feature from which level 1 is drafted; each further level is a pass over the
nodes of the one before.

    pairs     - (t1,f0) (t2,f1) ... (root,f[n-1]) | level-1 nodes | level-2 nodes | ...
    position  0    1       2            n         | n+1 .. n+K    | n+K+1 .. n+2K | ...
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from eagle_ray.attention.backend import prefill_metadata, tree_metadata
from eagle_ray.attention.metadata import AttentionMetadata
from eagle_ray.attention.triton_attention import uses_triton
from eagle_ray.core.decode_batch import DecodeSlots
from eagle_ray.core.sampling_batch import PaddedInput, SamplingBatch
from eagle_ray.core.sampling_settings import SamplingSettings
from eagle_ray.methods.calibration import Calibration
from eagle_ray.methods.candidate_ranker import RankingFeedback, corrections
from eagle_ray.methods.coupling import Coupling
from eagle_ray.methods.drafter import VerifyOutput, idle_batch
from eagle_ray.methods.eagle.draft_buffers import DraftBuffers, DraftShape, PaddedDraft
from eagle_ray.methods.eagle.draft_vocab import offered_tokens
from eagle_ray.methods.eagle.heads import DraftHead, head_forward
from eagle_ray.methods.eagle.quantized_draft import QuantizedDraft
from eagle_ray.methods.method import DraftSettings
from eagle_ray.methods.pair_drafter import (
    QUEUE_WINDOW,
    DraftedTree,
    PairDrafter,
    PendingPairs,
    Spans,
)
from eagle_ray.models.graphs import CudaGraphRunner
from eagle_ray.models.target import TargetModel
from eagle_ray.tree.ancestor_words import unpack_ancestors
from eagle_ray.tree.expand import DraftPlan, Frontier, TreeBuilder


class EagleDrafter(PairDrafter):
    """A head of one layer, or a draft model, that grows trees level by level. Arguments as for PairDrafter."""

    def __init__(
        self,
        head: DraftHead,
        target: TargetModel,
        window: int = QUEUE_WINDOW,
        calibration: Calibration | None = None,
        coupling: Coupling | None = None,
        token_ids: Int[Tensor, " Dv"] | None = None,
    ):
        super().__init__(head, target, window, calibration, coupling, token_ids)
        # By children per node, which is the widest frontier too.
        self.draft_buffers: dict[int, DraftBuffers] = {}
        self._padded: dict[tuple, PaddedDraft] = {}
        self._quantized: QuantizedDraft | None = None
        self._forward = head_forward(self.head)

    @property
    def _root_size(self) -> int:
        return self.head.config.hidden_size

    def use_graphs(self, runner: CudaGraphRunner | None, max_depth: int = 0) -> None:
        super().use_graphs(runner, max_depth)
        self.draft_buffers.clear()
        self._padded.clear()
        self._quantized = QuantizedDraft.of(
            self.head, self.embed_tokens, self._target_logits, self.cache, self.queue, max_depth
        )

    def _expand_eagerly(
        self, at: DecodeSlots, roots: Int[Tensor, " B"], ends: Int[Tensor, "B E"], plan: DraftPlan
    ) -> DraftedTree:
        """Compute `_expand` without graphs, in C++ where it supports the head and the plan.

        All levels are one call, unless Python ranks children by noise or decides where to stop.
        """
        draft = self._quantized
        if draft is None or not self._grows_by_level(plan):
            return super()._expand_eagerly(at, roots, ends, plan)
        started = self.ranking.feedback
        draft.start(at, self._spans(at), roots, started.sampling, plan, self.ranking.calibration)
        if plan.stops_by_rule and not self.ranking.is_coupled(started.sampling):
            draft.grow_all(plan, self.ranking.token_ids)
        else:
            self._grow_by_level(draft, plan)
        self.ranking.pending = draft.feedback(started)
        return DraftedTree(draft.tree, draft.levels, self.ranking.pending)

    def _grow_by_level(self, draft: QuantizedDraft, plan: DraftPlan) -> None:
        """Grow a started draft level by level: the reference of `QuantizedDraft.grow_all`."""
        draft.grow(self.ranking)
        while draft.depth < plan.max_depth and not (plan.should_stop and plan.should_stop(draft)):
            draft.grow(self.ranking)

    def _replayed(
        self, at: DecodeSlots, roots: Int[Tensor, " B"], plan: DraftPlan, sampling: SamplingBatch
    ) -> DraftedTree | None:
        """Return a replayed draft of the plan's full depth for the whole batch, or None if recording fails."""
        if not self._grows_by_level(plan):
            return super()._replayed(at, roots, plan, sampling)
        num = len(roots)
        depth = plan.max_depth
        runner = self._runner
        if not all(runner.replays(kind) for kind in ("first level", "further level")[:depth]):
            return None
        visible, num_rows = self._read_pairs(at, self._max_pairs(plan))
        draft = self._padded_draft(num, plan, sampling)
        bound = runner.context(at.max_length)
        level = self._level_pass(draft, bound)
        first = self._first_pass(
            self._widest_draft(num, plan, sampling), at, roots, visible, sampling
        )
        if not runner.record(*first) or (depth > 1 and not self._record_level(draft, bound)):
            return None  # both are recorded before the draft, which recording overwrites
        runner.run(*first)
        for _ in range(depth - 1):
            runner.run(*level)
        kinds = (sampling.temperature > 0).long()
        feedback = RankingFeedback(
            slice(num),
            sampling,
            draft.lengths[:num],
            draft.features(num, depth),
            draft.offered(kinds, num, depth),
        )
        feedback.is_learned = self._learns_in_pass
        self.ranking.pending = feedback
        return DraftedTree(draft.tree(num, depth), draft.levels(num, depth), feedback, num_rows)

    def extend(self, batch: DecodeSlots, verified: VerifyOutput) -> None:
        """Queue the pairs of the accepted path. If the tree is from a replayed draft, learn from the path as well."""
        super().extend(batch, verified)
        calibration = self.ranking.calibration
        if calibration is not None and self._learns_in_pass and verified.tree.num_nodes > 1:
            for buffers in self.draft_buffers.values():
                buffers.update_calibration(calibration, verified.result)

    @property
    def _learns_in_pass(self) -> bool:
        """Return whether `extend` updates the calibration: a GPU needs the kernel, as solving may not be recorded."""
        return self.queue.device.type == "cpu" or uses_triton(self.cache)

    @property
    def extend_key(self) -> tuple[Hashable, ...]:
        return tuple(sorted(self.draft_buffers))

    def reset_learning(self) -> None:
        super().reset_learning()
        with torch.inference_mode():  # in which the buffers were made
            for buffers in self.draft_buffers.values():
                buffers.restart()

    def recordings(
        self, top_k: int, max_length: int, params: SamplingSettings
    ) -> Iterator[Callable[[], None]]:
        """Yield functions that record each pass of levels with top_k children per node, the largest of a kind first."""
        runner = self._runner
        plan = DraftPlan(2, top_k)
        for size in runner.sizes(runner.draft_size, self._target.cache.num_slots):
            yield partial(self._record_first, size, plan, max_length, params)
        for size, width in runner.level_passes(top_k) if self._max_depth > 1 else []:
            narrow = replace(plan, width=width, num_children=top_k)
            yield partial(self._record_further, size, narrow, max_length, params)

    def _record_first(
        self, batch_size: int, plan: DraftPlan, max_length: int, params: SamplingSettings
    ) -> None:
        """Record the pass of the first level of drafts of this size."""
        batch = idle_batch(batch_size, self._target, max_length, params)
        widest = self._widest_draft(batch_size, plan, batch.sampling)
        first, _ = self._first_positions(batch.at)
        self._runner.record(*self._first_pass(widest, batch.at, batch.roots, first, batch.sampling))

    def _record_further(
        self, batch_size: int, plan: DraftPlan, max_length: int, params: SamplingSettings
    ) -> None:
        """Record the pass of further levels of drafts of this size and the plan's width."""
        sampling = idle_batch(batch_size, self._target, max_length, params).sampling
        self._record_level(
            self._padded_draft(batch_size, plan, sampling), self._runner.context(max_length)
        )

    def _grows_by_level(self, plan: DraftPlan) -> bool:
        """Return whether the draft is replayed level by level; static trees and other ways to grow are one pass."""
        is_eagle2 = plan.static_tree is None and self.builder is TreeBuilder
        return is_eagle2 and plan.width <= plan.children and plan.max_depth <= self._max_depth

    def _padded_draft(
        self, batch_size: int, plan: DraftPlan, sampling: SamplingBatch
    ) -> PaddedDraft:
        """Return the draft whose further levels are replayed: narrow for narrow plans of large batches."""
        width = self._runner.draft_width(plan.width, plan.children, batch_size)
        return self._draft_of(
            self._runner.draft_size(batch_size, width), width, plan.children, sampling
        )

    def _widest_draft(
        self, batch_size: int, plan: DraftPlan, sampling: SamplingBatch
    ) -> PaddedDraft:
        """Return the draft whose first level is replayed. A narrower one, of more sequences perhaps, goes on there."""
        return self._draft_of(
            self._runner.draft_size(batch_size), plan.children, plan.children, sampling
        )

    def _draft_of(
        self, size: int, width: int, children: int, sampling: SamplingBatch
    ) -> PaddedDraft:
        """Return a view of the buffers for a draft of this size. The buffers are allocated at first use."""
        kind = self._runner.sampling_kind(sampling.kind)
        key = size, width, children, kind
        if key not in self._padded:
            if children not in self.draft_buffers:
                num_slots = self._target.cache.num_slots
                num_ends = sampling.ends.shape[1]
                shape = DraftShape(num_slots, children, children, self._max_depth)
                parts = (
                    self.head.config.hidden_size,
                    num_ends,
                    self._target.dtype,
                    self._target.device,
                )
                self.draft_buffers[children] = DraftBuffers(shape, *parts)
            self._padded[key] = PaddedDraft(self.draft_buffers[children], size, width, kind)
        return self._padded[key]

    def _first_pass(
        self,
        draft: PaddedDraft,
        at: DecodeSlots,
        roots: Int[Tensor, " B"],
        first: Int[Tensor, " B"],
        sampling: SamplingBatch,
    ) -> tuple[tuple, Callable[..., None], list[PaddedInput]]:
        """Return key, function and inputs of the pass that ranks the roots' children.

        Args:
            first: the first position that each sequence attends to.
        """
        size = draft.batch
        every = (self._target.cache.num_slots,)
        inputs = [
            PaddedInput(at.slots, every, self.cache.blocks.null_slot),
            *(PaddedInput(x, every) for x in (at.lengths, first)),
            PaddedInput(roots, (size,)),
            *sampling.padded(size),
        ]

        def run(*tensors: Tensor) -> None:
            draft.start(*tensors)
            self._append(draft, self._root_features[:size, None])

        return ("first level", *draft.key), run, inputs

    def _level_pass(
        self, draft: PaddedDraft, bound: int
    ) -> tuple[tuple, Callable[[], None], list[PaddedInput]]:
        """Return key, function and (no) inputs of the pass that grows a draft by a level, whichever is next."""

        def run() -> None:
            self._append(draft, self._padded_level(draft, bound))

        return ("further level", *draft.key, bound), run, []

    def _record_level(self, draft: PaddedDraft, bound: int) -> bool:
        """Record the pass of a level, on padding alone, if needed; return whether it can be replayed."""
        level = self._level_pass(draft, bound)
        if self._runner.has(level[0]):
            return True
        draft.clear(self.cache.blocks.null_slot)
        return self._runner.record(*level)

    def _append(self, draft: PaddedDraft, features: Float[Tensor, "B F H"]) -> None:
        """Rank the children of a frontier with these features and append them."""
        self.ranking.start(draft.sampling, draft.lengths)
        tokens, scores, own = self.ranking.rank(draft.level, features, draft.shape.children)
        draft.append(features, tokens, scores, own, self.ranking.calibration)

    def _padded_level(self, draft: PaddedDraft, bound: int) -> Float[Tensor, "B W H"]:
        """Run the head on the draft's frontier."""
        frontier = draft.next_frontier()
        width = draft.width
        root = draft.lengths[:, None] + 1
        positions = root + (draft.level - 1) * width + torch.arange(width, device=root.device)
        at = DecodeSlots.with_max_length(draft.slots, draft.lengths, bound).shifted(1)
        words = draft.words
        depth = (draft.level - 1).expand(draft.batch, width)
        layout = tree_metadata(
            self.cache,
            at,
            slot_mapping=self.cache.slot_mapping(draft.slots[:, None], positions).flatten(),
            ancestors=words
            if uses_triton(self.cache)
            else unpack_ancestors(words, draft.shape.num_positions),
            depths=depth,
            position_depths=draft.position_depths.expand(draft.batch, -1),
            first=draft.first,
        )
        hidden = self._run(
            frontier.tokens.flatten(),
            draft.inputs().flatten(0, 1),
            (root + depth).flatten(),
            layout,
        )
        return hidden.view(*frontier.tokens.shape, -1)

    def _expand(
        self,
        at: DecodeSlots,
        roots: Int[Tensor, " B"],
        ends: Int[Tensor, "B E"],
        plan: DraftPlan,
        first: Int[Tensor, " B"],
        features: Float[Tensor, "B H"],
    ) -> DraftedTree:
        """Expand level by level until the plan is fulfilled."""
        builder = self.builder(roots, plan.width, plan.static_tree, ends)
        inputs = features[:, None]
        self._add_children(builder, inputs, None, plan.children)
        at = at.shifted(1)
        seen = None
        while builder.depth < plan.max_depth and not (
            plan.should_stop and plan.should_stop(builder)
        ):
            frontier = builder.frontier()
            seen = _descend(seen, frontier, builder.depth - 1)
            inputs = self._level(at, frontier, inputs, seen, first)
            self._add_children(builder, inputs, frontier, plan.children)
        return DraftedTree(builder.build(), builder.levels, self.ranking.feedback)

    @property
    def cost_key(self) -> dict[str, Any]:
        ids = self._token_ids
        kind = type(self.head).__name__
        return {
            "head": kind,
            "config": self.head.config.to_dict(),
            "drafted": None if ids is None else len(ids),
        }

    def _catch_up(self, at: DecodeSlots, backlog: PendingPairs) -> Float[Tensor, "B H"]:
        """Run the head once over the unread pairs and return the output of each root's pair."""
        device = at.slots.device
        longest = backlog.longest
        rows = self._pending_rows(at, backlog)
        index = torch.arange(longest, device=device)
        causal = torch.ones(longest, longest, dtype=torch.bool, device=device).tril()
        layout = self._layout(
            DecodeSlots(at.slots, backlog.starts, at.host_slots, backlog.host_starts, at.bound),
            slot_mapping=rows.slot_mapping,
            ancestors=causal.expand(len(at.slots), -1, -1),
            position_depths=index.expand(len(at.slots), -1),
            first=backlog.first,
            row_of=rows.row_of,
            unpack=rows.unpack,
            seq=rows.seq,
        )
        hidden = self._run(
            rows.tokens, self.head.project_features(rows.features), rows.positions, layout
        )
        return hidden[rows.last]

    def _read_spans(
        self, spans: Spans, tokens: Int[Tensor, " R"], features: Float[Tensor, "R F"]
    ) -> None:
        firsts = self._first[spans.slots].tolist()
        parts = (spans.starts, spans.counts)
        # Few layers.
        layout = prefill_metadata(self.cache, spans.slots, firsts, *parts, chain_rows=sys.maxsize)
        self._run(
            tokens, self.head.project_features(features), spans.rows(tokens.device)[1], layout
        )

    def _level(
        self,
        batch: DecodeSlots,
        frontier: Frontier,
        features: Float[Tensor, "B P H"],
        seen: TreeMask,
        first: Int[Tensor, " B"],
    ) -> Float[Tensor, "B F H"]:
        """Run the head on a frontier, given the features of the frontier before it."""
        parents = frontier.parent_rows[:, :, None].expand(-1, -1, features.shape[2])
        width, num_positions = seen.ancestors.shape[1:]
        offsets = torch.arange(num_positions - width, num_positions, device=batch.slots.device)
        layout = self._layout(
            batch,
            slot_mapping=self.cache.slot_mapping(
                batch.slots[:, None], batch.lengths[:, None] + offsets
            ).flatten(),
            ancestors=seen.ancestors,
            position_depths=seen.depths.expand(len(batch.slots), -1),
            first=first,
        )
        # Where these nodes will stand if accepted.
        positions = (batch.lengths[:, None] + seen.depth).expand(-1, width)
        inputs = features.gather(1, parents).flatten(0, 1)
        hidden = self._run(frontier.tokens.flatten(), inputs, positions.flatten(), layout)
        return hidden.view(*frontier.tokens.shape, -1)

    def _layout(
        self,
        batch: DecodeSlots,
        slot_mapping: Int[Tensor, " R"],
        ancestors: Bool[Tensor, "B F M"],
        position_depths: Int[Tensor, "B M"],
        first: Int[Tensor, " B"],
        row_of: Int[Tensor, "B F"] | None = None,
        unpack: Int[Tensor, " R"] | None = None,
        seq: Int[Tensor, " R"] | None = None,
    ) -> AttentionMetadata:
        """Return metadata of rows that attend to their slot from its first pair on."""
        return tree_metadata(
            self.cache,
            batch,
            slot_mapping=slot_mapping,
            ancestors=ancestors,
            depths=position_depths[:, -ancestors.shape[1] :],
            position_depths=position_depths,
            first=first,
            row_of=row_of,
            unpack=unpack,
            seq=seq,
        )

    def _add_children(
        self,
        builder: TreeBuilder,
        features: Float[Tensor, "B F H"],
        frontier: Frontier | None,
        width: int,
    ) -> None:
        """Add the ranked children of a frontier, or of the roots if it is None."""
        children = self.ranking.children(features, frontier, width)
        builder.grow(children.log_probs, children.tokens, children.draft_log_probs)

    def _run(
        self,
        tokens: Int[Tensor, " R"],
        features: Float[Tensor, "R F"],
        positions: Int[Tensor, " R"],
        layout: AttentionMetadata,
    ) -> Float[Tensor, "R H"]:
        return self._forward(
            self.embed_tokens(tokens), features, positions - self.head.first_position, layout
        )


@dataclass(frozen=True, slots=True)
class TreeMask:
    """The tree positions that each node of the last frontier attends to, and the depths of all M positions so far.

    Attributes:
        depth: depth of that frontier, which has the last positions.
    """

    ancestors: Bool[Tensor, "B F M"]
    depths: Int[Tensor, " M"]
    depth: int


def _descend(seen: TreeMask | None, frontier: Frontier, depth: int) -> TreeMask:
    """Return the mask of the next frontier: a node attends to what its parent does and, in F new
    positions, to itself.
    """
    batch, width = frontier.tokens.shape
    itself = torch.eye(width, dtype=torch.bool, device=frontier.tokens.device).expand(
        batch, width, width
    )
    depths = frontier.tokens.new_full((width,), depth)
    if seen is None:
        return TreeMask(itself, depths, depth)
    parents = frontier.parent_rows[:, :, None].expand(-1, -1, seen.ancestors.shape[2])
    ancestors = torch.cat([seen.ancestors.gather(1, parents), itself], 2)
    return TreeMask(ancestors, torch.cat([seen.depths, depths]), depth)


def make_drafter(
    speculative: DraftSettings, target: TargetModel, weights: DraftHead
) -> EagleDrafter:
    """Return the drafter over a loaded head."""
    calibration, coupling = corrections(speculative, target.device)
    token_ids = offered_tokens(speculative, target, weights)
    return EagleDrafter(
        weights, target, calibration=calibration, coupling=coupling, token_ids=token_ids
    )
