"""EagleDrafter: a draft head that grows EAGLE-2's dynamic tree, or a static one, from the target's features.

Position j of its KV cache holds the pair (token j, feature j-1) of a sequence. The feature is always the *target's*,
so drafted pairs are discarded after each step. A pair depends on no later token, as in the target's cache. With n
tokens in the target's cache the root is token n, and the output of its pair is the feature from which level 1 is
drafted. Position 0 has no pair and is masked; only a draft model, which reads tokens alone, uses it.

    pairs     - (t1,f0) (t2,f1) ... (root,f[n-1]) | level-1 nodes | level-2 nodes | ...
    position  0    1       2            n         | n+1 .. n+K    | n+K+1 .. n+2K | ...

Pairs wait in a queue until the next draft. After a long time without drafts the oldest ones are dropped, and the
head continues with a shorter context.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from eagle_ray.async_copy import copy_to_device, to_device
from eagle_ray.attention.backend import prefill_metadata, tree_metadata
from eagle_ray.attention.metadata import AttentionMetadata
from eagle_ray.attention.triton_attention import uses_triton
from eagle_ray.drafters.candidate_ranker import CandidateRanker, RankingFeedback
from eagle_ray.drafters.draft_buffers import DraftBuffers, DraftShape, PaddedDraft
from eagle_ray.drafters.drafter import Draft, TokenSequence, VerifyOutput
from eagle_ray.drafters.feature_buffer import FeatureBuffer
from eagle_ray.drafters.idle_batch import idle_batch
from eagle_ray.graph_protocol import GraphRunner, PaddedInput
from eagle_ray.kernels.availability import retry_portable
from eagle_ray.kv.kv_cache import DecodeSlots, KVCache
from eagle_ray.models.eagle_heads import DraftHead
from eagle_ray.models.head_decoder import head_forward
from eagle_ray.models.target import PrefillBatch, TargetModel
from eagle_ray.sampling.calibration import Calibration
from eagle_ray.sampling.coupling import Coupling
from eagle_ray.sampling.sampler import SamplingBatch, SamplingParams
from eagle_ray.tree.accept import VerifyResult
from eagle_ray.tree.draft_plan import DraftPlan
from eagle_ray.tree.draft_tree import DraftTree
from eagle_ray.tree.expand import Frontier, TreeBuilder
from eagle_ray.tree.tree_mask import unpack_mask

NARROW = 4  # the width that is recorded besides the widest, for batches of
NARROW_FROM = 16  # sequences: below, a level takes about as long for any width
QUEUE_WINDOW = 128  # pairs kept of each slot: the past that a head needs most, at H floats a pair


@dataclass(frozen=True, slots=True)
class PendingPairs:
    """Pairs that the head has not read yet: for each of B sequences, positions `starts` up to its root's.

    Attributes:
        first: first position that each sequence attends to.
        host_starts: starts on the host; empty if a captured pass is for any starts.
        longest: an upper bound of the pairs per sequence.
        unpack: rows of the rectangle B x longest that are pairs; None is all.
    """

    first: Int[Tensor, " B"]
    starts: Int[Tensor, " B"]
    host_starts: list[int]
    longest: int
    unpack: Int[Tensor, " R"] | None = None


@dataclass(frozen=True, slots=True)
class Grown:
    """A draft: the tree, the log values by level, and the feedback from which ranking learns."""

    tree: DraftTree
    levels: list[Float[Tensor, "B _ K"]]
    lesson: RankingFeedback


class EagleDrafter:
    """The head, its one-layer KV cache, which uses the target's block table, and the queue of unread pairs.

    Args:
        window: maximum number of queued pairs per slot.
        calibration, coupling: as in CandidateRanker; None is EAGLE-2's own ranking.
        token_ids: rows of the target's lm_head that a head without an lm_head of its own uses; None is all.
    """

    prefill_passes = 1
    supports_graphs = True

    def __init__(
        self,
        head: DraftHead,
        target: TargetModel,
        window: int = QUEUE_WINDOW,
        calibration: Calibration | None = None,
        coupling: Coupling | None = None,
        token_ids: Int[Tensor, " Dv"] | None = None,
    ):
        self.head = head.to(device=target.device, dtype=target.dtype).eval().requires_grad_(False)
        lm_head = target.logits if token_ids is None else target.logits_over(token_ids)
        self._token_ids = head.token_ids if token_ids is None else token_ids
        self.ranking = CandidateRanker(
            partial(head.logits, target_logits=lm_head), calibration, coupling, self._token_ids
        )
        self.builder = TreeBuilder  # how trees grow; ablations of EAGLE-2 grow them otherwise
        self._target = target
        self._graphs: GraphRunner | None = None
        self._max_depth = 0  # of replayed drafts
        self._buffers: dict[int, DraftBuffers] = {}  # by children per node, which is the widest frontier too
        self._padded: dict[tuple, PaddedDraft] = {}
        self._forward = head_forward(self.head)
        self._embed = head.embed_tokens or target.embed_tokens
        kv_spec, num_slots = head.kv_spec, target.cache.num_slots
        self.cache = KVCache(
            target.cache.blocks,
            kv_spec.num_layers,
            kv_spec.num_kv_heads,
            kv_spec.key_dim,
            target.dtype,
            target.device,
            kv_spec.value_dim,
        )
        self._queue = FeatureBuffer(num_slots, window, target.feature_size, target.dtype, target.device)
        num_lists = num_slots + 1  # the last is the null slot's
        self._first = [head.first_column] * num_lists  # the first column that each slot's sequence sees
        self._end = [head.first_column] * num_lists  # the first column that the head has not read yet

    def attach_prefix(
        self,
        slots: list[int],
        firsts: list[int],
        columns: list[int],
        tokens: Int[Tensor, " B"],
        features: Float[Tensor, "B F"],
    ) -> None:
        for slot, first, column in zip(slots, firsts, columns, strict=True):
            self._first[slot], self._end[slot] = max(first, self.head.first_column), column
        places = to_device([slots, columns], features.device)
        self._queue.put(places[0], places[1], tokens, features, torch.ones_like(tokens, dtype=torch.bool))

    def prefill(self, prompts: PrefillBatch, next_tokens: Int[Tensor, " R"], features: Float[Tensor, "R F"]) -> None:
        """Read each sequence's queued pairs and the chunk's new pairs, except the last, which the next draft or chunk
        reads.
        """
        self._register(prompts)
        columns = [self._end[slot] for slot in prompts.slots]
        waiting = [start + 1 - column for start, column in zip(prompts.starts, columns, strict=True)]
        queued = self._queued(prompts.slots, columns, waiting)
        self._enqueue(prompts, next_tokens, features)
        rows = to_device(_followed(waiting, prompts.lengths), features.device)
        tokens, features = (torch.cat(both)[rows] for both in zip(queued, (next_tokens, features), strict=True))
        counts = [w + n - 1 for w, n in zip(waiting, prompts.lengths, strict=True)]
        self._read_prompts(prompts.slots, columns, counts, tokens, features)

    def prefill_deferred(
        self, prompts: PrefillBatch, next_tokens: Int[Tensor, " R"], features: Float[Tensor, "R F"]
    ) -> None:
        self._register(prompts)
        self._enqueue(prompts, next_tokens, features)

    def draft(
        self,
        batch: DecodeSlots,
        roots: Int[Tensor, " B"],
        plan: DraftPlan,
        sampling: SamplingBatch,
        texts: Sequence[TokenSequence],
    ) -> Draft:
        """Expand as EAGLE-2 does: the top `width` nodes of each level get children (section 4.1)."""
        at = batch if plan.members is None else batch.select(plan.members)
        for slot, length in zip(at.host_slots, at.host_lengths, strict=True):
            self._evict(slot, length)
        grown, num_pairs = None, sum(self._waiting(at))
        if self._is_replayed(plan):
            self._read_all_but(self._most_pairs(plan), at)
            grown = self._replayed(at, roots, plan, sampling, self._graphs)
        if grown is None:
            grown = retry_portable(lambda: self._eager(at, roots, plan, sampling))
        self.mark_consumed(at.host_slots, at.host_lengths)
        return Draft(grown.tree, grown.levels, len(grown.levels), num_pairs)

    def _eager(self, at: DecodeSlots, roots: Int[Tensor, " B"], plan: DraftPlan, sampling: SamplingBatch) -> Grown:
        """Return a draft for the plan's members, of any shape."""
        members = None if plan.members is None else to_device(plan.members, roots.device)
        self.ranking.start(sampling, at.lengths, plan.members)
        theirs = (roots, sampling.ends) if members is None else (roots[members], sampling.ends[members])
        grown = self._grown(at, *theirs, plan, self._backlog(at))
        return grown if members is None else replace(grown, tree=grown.tree.spread(members, roots))

    def use_graphs(self, runner: GraphRunner | None, max_depth: int = 0) -> None:
        self._graphs, self._max_depth = runner, max_depth
        self._buffers.clear()
        self._padded.clear()

    def draft_async(
        self, at: DecodeSlots, roots: Int[Tensor, " B"], plan: DraftPlan, sampling: SamplingBatch
    ) -> Draft | None:
        """Replay a draft while the host knows only upper bounds of the lengths.

        Returns None if the draft cannot be replayed, or if more pairs may be waiting than it reads.
        """
        if not self._is_replayed(plan) or max(self._waiting(at)) > self._most_pairs(plan):
            return None
        grown = self._replayed(at, roots, plan, sampling, self._graphs)
        return None if grown is None else Draft(grown.tree, grown.levels, len(grown.levels), 0)

    def mark_consumed(self, slots: list[int], lengths: list[int]) -> int:
        """Record that the pairs up to these slots' roots have been read. Return how many of them had waited."""
        ends = [length + 1 for length in lengths]
        num_pairs = sum(ends) - sum(self._end[slot] for slot in slots)
        for slot, end in zip(slots, ends, strict=True):
            self._end[slot] = end
        return num_pairs

    def _is_replayed(self, plan: DraftPlan) -> bool:
        """Return whether graphs are enabled and the draft's shape is known in advance."""
        works = self._graphs is not None and self._graphs.is_enabled
        return works and plan.members is None and plan.should_stop is None

    def _replayed(
        self, at: DecodeSlots, roots: Int[Tensor, " B"], plan: DraftPlan, sampling: SamplingBatch, graphs: GraphRunner
    ) -> Grown | None:
        """Return a replayed draft of the plan's full depth for the whole batch, or None if replaying fails."""
        if not self._grows_by_level(plan):
            return self._replayed_whole(at, roots, plan, sampling, graphs)
        draft = self._padded_draft(len(roots), plan, sampling, graphs)
        bound, num, depth = graphs.context(at.max_length), len(roots), plan.max_depth
        level = self._level_pass(draft, bound)
        if depth > 1 and not self._record_level(draft, bound):  # before the draft, which recording overwrites
            return None
        widest = self._widest_draft(len(roots), plan, sampling, graphs)
        graphs.run(*self._first_pass(widest, at, roots, sampling, bound))
        for _ in range(depth - 1):
            graphs.run(*level)
        if not graphs.is_enabled:
            return None
        kinds = (sampling.temperature > 0).long()
        lesson = RankingFeedback(
            slice(num), sampling, draft.lengths[:num], draft.features(num, depth), draft.offered(kinds, num, depth)
        )
        self.ranking.lesson = lesson
        return Grown(draft.tree(num, depth), draft.levels(num, depth), lesson)

    def recordings(self, top_k: int, max_length: int, params: SamplingParams) -> Iterator[Callable[[], None]]:
        """Yield what records each pass of drafts with top_k children per node, the largest first."""
        graphs = self._graphs
        assert graphs is not None
        widths = sorted({min(NARROW, top_k), top_k}, reverse=True)
        sizes = {graphs.draft_size(n) for n in range(1, self._target.cache.num_slots + 1)}
        for size in sorted(sizes, reverse=True):
            for width in widths:
                yield partial(self._record_draft, size, DraftPlan(2, width, num_children=top_k), max_length, params)

    def _record_draft(self, batch_size: int, plan: DraftPlan, max_length: int, params: SamplingParams) -> None:
        """Record the passes that are replayed for drafts of this size."""
        graphs, batch = self._graphs, idle_batch(batch_size, self._target, max_length, params)
        assert graphs is not None
        bound = graphs.context(max_length)
        widest = self._widest_draft(batch_size, plan, batch.sampling, graphs)
        graphs.record(*self._first_pass(widest, batch.at, batch.roots, batch.sampling, bound))
        if self._max_depth > 1:
            self._record_level(self._padded_draft(batch_size, plan, batch.sampling, graphs), bound)

    def _grows_by_level(self, plan: DraftPlan) -> bool:
        """Return whether the draft is replayed level by level; static trees and other ways to grow are one pass."""
        is_eagle2 = plan.static_tree is None and self.builder is TreeBuilder
        return is_eagle2 and plan.width <= plan.children and plan.max_depth <= self._max_depth

    def _padded_draft(
        self, batch_size: int, plan: DraftPlan, sampling: SamplingBatch, graphs: GraphRunner
    ) -> PaddedDraft:
        """Return the draft that is replayed for the plan: narrow for narrow plans of large batches."""
        size = graphs.draft_size(batch_size)
        is_narrow = plan.width <= NARROW < plan.children and size >= NARROW_FROM
        return self._draft_of(size, NARROW if is_narrow else plan.children, plan.children, sampling, graphs)

    def _widest_draft(
        self, batch_size: int, plan: DraftPlan, sampling: SamplingBatch, graphs: GraphRunner
    ) -> PaddedDraft:
        """Return the draft whose first level is replayed: a narrower one goes on from there."""
        return self._draft_of(graphs.draft_size(batch_size), plan.children, plan.children, sampling, graphs)

    def _draft_of(
        self, size: int, width: int, children: int, sampling: SamplingBatch, graphs: GraphRunner
    ) -> PaddedDraft:
        """Return the part of the buffers for such a draft; the buffers are made at first use."""
        kind = graphs.sampling_kind(sampling.kind)
        key = size, width, children, kind
        if key not in self._padded:
            if children not in self._buffers:
                most = graphs.draft_size(self._target.cache.num_slots)
                shape, num_ends = DraftShape(most, children, children, self._max_depth), sampling.ends.shape[1]
                parts = self.head.config.hidden_size, num_ends, self._target.dtype, self._target.device
                self._buffers[children] = DraftBuffers(shape, *parts)
            self._padded[key] = PaddedDraft(self._buffers[children], size, width, kind)
        return self._padded[key]

    def _first_pass(
        self, draft: PaddedDraft, at: DecodeSlots, roots: Int[Tensor, " B"], sampling: SamplingBatch, bound: int
    ) -> tuple[tuple, Callable[..., None], list[PaddedInput]]:
        """Return key, function and inputs of the pass that reads the pending pairs and ranks the roots' children."""
        longest, size, shape = draft.shape.depth + 1, draft.batch, (draft.batch,)
        first, starts = self._columns(at)
        inputs = [
            PaddedInput(at.slots, shape, self.cache.blocks.null_slot),
            *(PaddedInput(x, shape) for x in (at.lengths, roots, first, starts)),
            *sampling.padded(size),
        ]

        def run(slots: Tensor, lengths: Tensor, roots: Tensor, first: Tensor, starts: Tensor, *chosen: Tensor) -> None:
            draft.start(slots, lengths, roots, first, *chosen)
            at, pending = DecodeSlots.with_max_length(slots, lengths, bound), PendingPairs(first, starts, [], longest)
            self._append(draft, self._catch_up(at, pending)[:, None])

        return ("first level", *draft.key, bound), run, inputs

    def _level_pass(self, draft: PaddedDraft, bound: int) -> tuple[tuple, Callable[[], None], list[PaddedInput]]:
        """Return key, function and (no) inputs of the pass that grows a draft by a level, whichever is next."""

        def run() -> None:
            self._append(draft, self._padded_level(draft, bound))

        return ("further level", *draft.key, bound), run, []

    def _record_level(self, draft: PaddedDraft, bound: int) -> bool:
        """Record the pass of a level, on padding alone, if needed; return whether it can be replayed."""
        graphs, level = self._graphs, self._level_pass(draft, bound)
        assert graphs is not None
        if graphs.has(level[0]):
            return True
        draft.clear(self.cache.blocks.null_slot)
        return graphs.record(*level)

    def _append(self, draft: PaddedDraft, features: Float[Tensor, "B F H"]) -> None:
        """Rank the children of a frontier with these features and append them."""
        self.ranking.start(draft.sampling, draft.lengths)
        tokens, scores, own = self.ranking.rank(draft.level, features, draft.shape.children)
        draft.append(features, tokens, scores, own, self.ranking.calibration)

    def _padded_level(self, draft: PaddedDraft, bound: int) -> Float[Tensor, "B W H"]:
        """Run the head on the draft's frontier."""
        frontier, width = draft.next_frontier(), draft.width
        root = draft.lengths[:, None] + 1
        places = root + (draft.level - 1) * width + torch.arange(width, device=root.device)
        at = DecodeSlots.with_max_length(draft.slots, draft.lengths, bound).shifted(1)
        words, depth = draft.words, (draft.level - 1).expand(draft.batch, width)
        layout = tree_metadata(
            self.cache,
            at,
            cells=self.cache.slot_mapping(draft.slots[:, None], places).flatten(),
            ancestors=words if uses_triton(self.cache) else unpack_mask(words, draft.shape.num_columns),
            depths=depth,
            column_depths=draft.column_depths.expand(draft.batch, -1),
            first=draft.first,
        )
        hidden = self._run(frontier.tokens.flatten(), draft.inputs().flatten(0, 1), (root + depth).flatten(), layout)
        return hidden.view(*frontier.tokens.shape, -1)

    def _most_pairs(self, plan: DraftPlan) -> int:
        """Return the most pairs per sequence that a replayed draft reads: those that the deepest draft can leave."""
        return max(plan.max_depth, self._max_depth) + 1

    def _replayed_whole(
        self, at: DecodeSlots, roots: Int[Tensor, " B"], plan: DraftPlan, sampling: SamplingBatch, graphs: GraphRunner
    ) -> Grown | None:
        """Return a draft that is one recorded pass, for static trees and other ways to grow."""
        longest, size, bound = self._most_pairs(plan), graphs.batch_size(len(roots)), graphs.context(at.max_length)
        first, starts = self._columns(at)
        nowhere, shape = self.cache.blocks.null_slot, (size,)
        inputs = [
            PaddedInput(at.slots, shape, nowhere),
            *(PaddedInput(x, shape) for x in (at.lengths, roots, first, starts)),
        ]
        kind = graphs.sampling_kind(sampling.kind)
        key = ("draft", size, bound, plan.width, plan.children, plan.max_depth, plan.static_tree, kind, self.builder)

        def grow(
            slots: Tensor, lengths: Tensor, roots: Tensor, first: Tensor, starts: Tensor, *chosen: Tensor
        ) -> Grown:
            sampling = SamplingBatch.bound(kind, *chosen)
            self.ranking.start(sampling, lengths)
            at, backlog = DecodeSlots.with_max_length(slots, lengths, bound), PendingPairs(first, starts, [], longest)
            return self._grown(at, roots, sampling.ends, plan, backlog)

        grown = graphs.run(key, grow, inputs + sampling.padded(size))
        if not graphs.is_enabled:
            return None
        self.ranking.lesson = replace(grown.lesson, sampling=sampling)
        num = len(roots)
        return Grown(grown.tree.head(num), [level[:num] for level in grown.levels], grown.lesson)

    def _grown(
        self,
        at: DecodeSlots,
        roots: Int[Tensor, " B"],
        ends: Int[Tensor, "B E"],
        plan: DraftPlan,
        backlog: PendingPairs,
    ) -> Grown:
        """Read the pending pairs, then expand level by level until the plan is fulfilled."""
        builder = self.builder(roots, plan.width, plan.static_tree, ends)
        features = self._catch_up(at, backlog)[:, None]
        self._grow(builder, features, None, plan.children)
        at, seen = at.shifted(1), None
        while builder.depth < plan.max_depth and not (plan.should_stop and plan.should_stop(builder)):
            frontier = builder.frontier()
            seen = _descend(seen, frontier, builder.depth - 1)
            features = self._level(at, frontier, features, seen, backlog.first)
            self._grow(builder, features, frontier, plan.children)
        return Grown(builder.build(), builder.levels, self.ranking.lesson)

    def extend(self, batch: DecodeSlots, verified: VerifyOutput) -> None:
        """Queue the pairs of the accepted path and the bonus token."""
        result = verified.result
        path_rows = verified.rows.row_of.gather(1, result.accepted_nodes.clamp(min=0))
        offset = torch.arange(path_rows.shape[1], device=path_rows.device)
        columns = batch.lengths[:, None] + 1 + offset
        slots = batch.slots[:, None].expand_as(columns)
        valid = offset <= result.num_accepted[:, None]
        self._queue.put(
            slots.flatten(),
            columns.flatten(),
            result.tokens.flatten(),
            verified.features[path_rows.flatten()],
            valid.flatten(),
        )

    def on_verified(self, result: VerifyResult) -> None:
        """Update ranking and calibration from the target's samples, if trees were drafted."""
        self.ranking.update(result)

    def _register(self, prompts: PrefillBatch) -> None:
        """Start new sequences at their first chunk; evict pairs of other sequences that waited too long."""
        for slot, start in zip(prompts.slots, prompts.starts, strict=True):
            if start == 0:
                self._first[slot] = self._end[slot] = self.head.first_column
            self._evict(slot, start)
        if self.head.first_column == 0:
            self._queue_first_tokens(prompts)

    def _queue_first_tokens(self, prompts: PrefillBatch) -> None:
        """Queue the pairs of position 0: first tokens, without a feature."""
        device, count = prompts.tokens.device, len(prompts.slots)
        firsts = [0, *accumulate(prompts.lengths[:-1])]
        slots, starts, rows = to_device([prompts.slots, prompts.starts, firsts], device)
        nothing = torch.zeros(count, self._target.feature_size, dtype=self._target.dtype, device=device)
        self._queue.put(slots, torch.zeros_like(slots), prompts.tokens[rows], nothing, starts == 0)

    def _evict(self, slot: int, newest: int) -> None:
        """Drop pairs that are no longer in the queue, of which position `newest` is the last."""
        oldest = newest + 1 - self._queue.window
        if oldest > self._end[slot]:
            self._first[slot] = self._end[slot] = oldest

    def _enqueue(self, prompts: PrefillBatch, next_tokens: Int[Tensor, " R"], features: Float[Tensor, "R F"]) -> None:
        """Queue the newest pairs of each chunk."""
        places = to_device([prompts.slots, prompts.starts, prompts.lengths], features.device)
        slots, starts, lengths = places.repeat_interleave(places[2], dim=1, output_size=sum(prompts.lengths))
        newest = prompts.positions >= starts + lengths - self._queue.window
        self._queue.put(slots, prompts.positions + 1, next_tokens, features, newest)

    def _queued(
        self, slots: list[int], columns: list[int], counts: list[int]
    ) -> tuple[Int[Tensor, " R"], Float[Tensor, "R F"]]:
        """Return the counts[b] queued pairs of each slot, starting at columns[b]."""
        spans = zip(slots, columns, counts, strict=True)
        places = [(slot, column + i) for slot, column, count in spans for i in range(count)]
        wanted = to_device(places, self._queue.device).view(-1, 2)
        return self._queue.take(wanted[:, 0], wanted[:, 1])

    def _read_prompts(
        self,
        slots: list[int],
        columns: list[int],
        counts: list[int],
        tokens: Int[Tensor, " R"],
        features: Float[Tensor, "R F"],
    ) -> None:
        """Run the head over counts[b] pairs of each slot from columns[b] on, as separate prompts."""
        spans = [span for span in zip(slots, columns, counts, strict=True) if span[2] > 0]
        if not spans:
            return
        slots, columns, counts = (list(x) for x in zip(*spans, strict=True))
        layout = prefill_metadata(self.cache, slots, [self._first[slot] for slot in slots], columns, counts)
        places = [torch.arange(column, column + n) for column, n in zip(columns, counts, strict=True)]
        features = self.head.project_features(features)
        self._run(tokens, features, copy_to_device(torch.cat(places), tokens.device), layout)
        for slot, column, count in spans:
            self._end[slot] = column + count

    def reset_learning(self) -> None:
        self.ranking.reset()

    @property
    def cost_key(self) -> dict[str, Any]:
        ids, kind = self._token_ids, type(self.head).__name__
        return {"head": kind, "config": self.head.config.to_dict(), "drafted": None if ids is None else len(ids)}

    def _waiting(self, at: DecodeSlots) -> list[int]:
        """Return the number of queued pairs of each sequence, root included."""
        return [length + 1 - self._end[slot] for slot, length in zip(at.host_slots, at.host_lengths, strict=True)]

    def _columns(self, at: DecodeSlots) -> Int[Tensor, "2 B"]:
        """Return each sequence's first visible position and its first unread position."""
        return to_device([[of[slot] for slot in at.host_slots] for of in (self._first, self._end)], at.slots.device)

    def _backlog(self, at: DecodeSlots) -> PendingPairs:
        """Return all unread pairs, packed if sequences have different numbers of them."""
        counts, (first, starts) = self._waiting(at), self._columns(at)
        longest, unpack = max(counts), None
        if min(counts) < longest:
            rows = [b * longest + i for b, count in enumerate(counts) for i in range(count)]
            unpack = to_device(rows, at.slots.device)
        return PendingPairs(first, starts, [self._end[slot] for slot in at.host_slots], longest, unpack)

    def _read_all_but(self, most: int, at: DecodeSlots) -> None:
        """Read all pairs but each sequence's last if more are queued than a draft reads, as after many plain steps."""
        counts = [count - 1 for count in self._waiting(at)]
        if max(counts) < most:
            return
        columns = [self._end[slot] for slot in at.host_slots]
        tokens, features = self._queued(at.host_slots, columns, counts)
        self._read_prompts(at.host_slots, columns, counts, tokens, features)

    def _catch_up(self, at: DecodeSlots, backlog: PendingPairs) -> Float[Tensor, "B H"]:
        """Run the head once over the unread pairs and return the output of each root's pair."""
        device, longest, unpack = at.slots.device, backlog.longest, backlog.unpack
        index, counts = torch.arange(longest, device=device), at.lengths + 1 - backlog.starts
        real = index < counts[:, None]
        columns = backlog.starts[:, None] + index
        slots = at.slots[:, None].expand_as(columns)
        cells = self.cache.slot_mapping(slots, torch.where(real, columns, self.cache.blocks.null_position))
        packed = slots.flatten(), columns.flatten(), cells.flatten()
        if unpack is None:
            row = longest * torch.arange(len(counts), device=device)
        else:
            row, packed = counts.cumsum(0) - counts, tuple(x[unpack] for x in packed)
        tokens, features = self._queue.take(*packed[:2])
        causal = torch.ones(longest, longest, dtype=torch.bool, device=device).tril()
        layout = self._layout(
            DecodeSlots(at.slots, backlog.starts, at.host_slots, backlog.host_starts, at.bound),
            cells=packed[2],
            ancestors=causal.expand(len(counts), -1, -1),
            column_depths=index.expand(len(counts), -1),
            first=backlog.first,
            row_of=None if unpack is None else torch.where(real, row[:, None] + index, 0),
            unpack=unpack,
        )
        hidden = self._run(tokens, self.head.project_features(features), packed[1], layout)
        return hidden[row + counts - 1]

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
        width, num_columns = seen.ancestors.shape[1:]
        places = torch.arange(num_columns - width, num_columns, device=batch.slots.device)
        layout = self._layout(
            batch,
            cells=self.cache.slot_mapping(batch.slots[:, None], batch.lengths[:, None] + places).flatten(),
            ancestors=seen.ancestors,
            column_depths=seen.depths.expand(len(batch.slots), -1),
            first=first,
        )
        columns = (batch.lengths[:, None] + seen.depth).expand(-1, width)  # where these nodes will stand if accepted
        inputs = features.gather(1, parents).flatten(0, 1)
        hidden = self._run(frontier.tokens.flatten(), inputs, columns.flatten(), layout)
        return hidden.view(*frontier.tokens.shape, -1)

    def _layout(
        self,
        batch: DecodeSlots,
        cells: Int[Tensor, " R"],
        ancestors: Bool[Tensor, "B F M"],
        column_depths: Int[Tensor, "B M"],
        first: Int[Tensor, " B"],
        row_of: Int[Tensor, "B F"] | None = None,
        unpack: Int[Tensor, " R"] | None = None,
    ) -> AttentionMetadata:
        """Return metadata of rows that attend to their slot from its first pair on."""
        return tree_metadata(
            self.cache,
            batch,
            cells=cells,
            ancestors=ancestors,
            depths=column_depths[:, -ancestors.shape[1] :],
            column_depths=column_depths,
            first=first,
            row_of=row_of,
            unpack=unpack,
        )

    def _grow(
        self, builder: TreeBuilder, features: Float[Tensor, "B F H"], frontier: Frontier | None, width: int
    ) -> None:
        """Return the ranked children of a frontier, or of the roots if it is None."""
        children = self.ranking.children(features, frontier, width)
        builder.grow(children.log_probs, children.tokens, children.draft_log_probs)

    def _run(
        self,
        tokens: Int[Tensor, " R"],
        features: Float[Tensor, "R F"],
        columns: Int[Tensor, " R"],
        layout: AttentionMetadata,
    ) -> Float[Tensor, "R H"]:
        return self._forward(self._embed(tokens), features, columns - self.head.first_column, layout)


def _followed(waiting: list[int], lengths: list[int]) -> list[int]:
    """Return the order of queued pairs and chunk rows by sequence, without the last row of each chunk."""
    rows, queued, row = [], 0, sum(waiting)
    for count, length in zip(waiting, lengths, strict=True):
        rows += [*range(queued, queued + count), *range(row, row + length - 1)]
        queued, row = queued + count, row + length
    return rows


def tree_columns(max_nodes: int, max_depth: int, width: int) -> int:
    """Return how many positions past its cached tokens a step may write: the target's nodes, or root and levels."""
    return max(max_nodes + 1, max_depth + 1, 1 + max(max_depth - 1, 0) * width)


@dataclass(frozen=True, slots=True)
class TreeMask:
    """The tree positions that each node of the last frontier attends to, and the depths of all M positions so far.

    Attributes:
        depth: of that frontier, which has the last positions.
    """

    ancestors: Bool[Tensor, "B F M"]
    depths: Int[Tensor, " M"]
    depth: int


def _descend(seen: TreeMask | None, frontier: Frontier, depth: int) -> TreeMask:
    """Return the mask of the next frontier: a node attends to what its parent does and, in F new positions,
    to itself.
    """
    batch, width = frontier.tokens.shape
    itself = torch.eye(width, dtype=torch.bool, device=frontier.tokens.device).expand(batch, width, width)
    depths = frontier.tokens.new_full((width,), depth)
    if seen is None:
        return TreeMask(itself, depths, depth)
    parents = frontier.parent_rows[:, :, None].expand(-1, -1, seen.ancestors.shape[2])
    ancestors = torch.cat([seen.ancestors.gather(1, parents), itself], 2)
    return TreeMask(ancestors, torch.cat([seen.depths, depths]), depth)
