"""PairDrafter: the KV cache over (token, feature) pairs and the queue of unread ones, which several drafters share.

Position j of the KV cache holds the pair (token j, feature j-1) of a sequence. The feature is
always the *target's*, so what a step drafts is discarded after it. With n tokens in the target's
cache the root is token n. Position 0 has no pair and is masked; only a draft model, which reads
tokens alone, uses it.

    pairs     - (t1,f0) (t2,f1) ... (root,f[n-1]) | drafted nodes
    position  0    1       2            n         | n+1 ...

Pairs wait in a queue until the next draft. After a long time without drafts the oldest ones are
dropped, and the head continues with a shorter context.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from eagle_ray.core.decode_batch import DecodeSlots
from eagle_ray.core.device import copy_to_device, to_device
from eagle_ray.core.sampling_batch import PaddedInput, SamplingBatch
from eagle_ray.core.sampling_settings import SamplingSettings
from eagle_ray.kernels import tree_ops
from eagle_ray.kernels.availability import retry_portable
from eagle_ray.kv.kv_cache import KVCache
from eagle_ray.methods.calibration import Calibration
from eagle_ray.methods.candidate_ranker import CandidateRanker, RankingFeedback
from eagle_ray.methods.coupling import Coupling
from eagle_ray.methods.drafter import Draft, Drafter, TokenSequence, VerifyOutput, idle_batch
from eagle_ray.models.graphs import CudaGraphRunner
from eagle_ray.models.target import PromptBatch, TargetModel
from eagle_ray.tree.draft_tree import DraftTree, VerifyResult
from eagle_ray.tree.expand import DraftPlan, TreeBuilder

QUEUE_WINDOW = 128  # pairs kept of each slot: the past that a head needs most, at H floats a pair


@dataclass(frozen=True, slots=True)
class Spans:
    """Runs of consecutive pairs, R in all: counts[b] pairs of slots[b], from position starts[b] on."""

    slots: list[int]
    starts: list[int]
    counts: list[int]

    def without_empty(self) -> Spans:
        """Return the spans that have at least one pair."""
        spans = Spans([], [], [])
        for slot, start, count in zip(self.slots, self.starts, self.counts, strict=True):
            if count > 0:
                spans.slots.append(slot)
                spans.starts.append(start)
                spans.counts.append(count)
        return spans

    def rows(self, device: torch.device | str) -> Int[Tensor, "2 R"]:
        """Return the slot and the position of each pair."""
        positions = []
        for start, count in zip(self.starts, self.counts, strict=True):
            positions.append(np.arange(start, start + count))
        slots = np.repeat(self.slots, self.counts)
        both = np.stack([slots, np.concatenate(positions)])
        return copy_to_device(torch.from_numpy(both), device)


@dataclass(frozen=True, slots=True)
class PendingPairs:
    """Pairs that the head has not read yet: for each of B sequences, from position `starts` up to its root's.

    Attributes:
        first: first position that each sequence attends to.
        host_starts: the host's copy of starts; empty if a captured pass serves any starts.
        longest: upper bound on the pairs of a sequence.
        num_rows: rows of a pass that packs the pairs one after another, at least their number; None
            pads to a rectangle of B x longest rows.
    """

    first: Int[Tensor, " B"]
    starts: Int[Tensor, " B"]
    host_starts: list[int]
    longest: int
    num_rows: int | None = None


@dataclass(frozen=True, slots=True)
class PendingRows:
    """The R rows of a pass that reads pending pairs: packed, or padded to a rectangle of B x longest.

    Attributes:
        positions: position of each row in its sequence.
        slot_mapping: where the KV cache stores each row.
        last: row of each sequence's root.
        row_of: row of each pair of the rectangle; None if the rows are the rectangle.
        unpack: index in the rectangle of each row; None if the rows are the rectangle.
        seq: the sequence of each row, -1 for padding; None if the rows are the rectangle.
    """

    tokens: Int[Tensor, " R"]
    features: Float[Tensor, "R F"]
    positions: Int[Tensor, " R"]
    slot_mapping: Int[Tensor, " R"]
    last: Int[Tensor, " B"]
    row_of: Int[Tensor, "B longest"] | None
    unpack: Int[Tensor, " R"] | None
    seq: Int[Tensor, " R"] | None


@dataclass(frozen=True, slots=True)
class DraftedTree:
    """A pair drafter's result: the tree, the log values by level, and the feedback for the ranker's update.

    Attributes:
        num_pair_rows: as in Draft.
    """

    tree: DraftTree
    levels: list[Float[Tensor, "B _ K"]]
    feedback: RankingFeedback
    num_pair_rows: int | None = None


class PairDrafter(Drafter, ABC):
    """A drafter whose head reads (token, feature) pairs: their KV cache and the queue of unread ones.

    The cache uses the target's block table. A subclass reads the pairs and drafts.

    Args:
        window: maximum number of queued pairs per slot.
        calibration: as in CandidateRanker; None is EAGLE-2's own ranking.
        coupling: likewise.
        token_ids: rows of the target's lm_head that a head without an lm_head of its own uses; None
            is all.
    """

    prefill_passes = 1  # passes of one `prefill`
    supports_graphs = True
    has_model = True

    def __init__(
        self,
        head: Any,
        target: TargetModel,
        window: int = QUEUE_WINDOW,
        calibration: Calibration | None = None,
        coupling: Coupling | None = None,
        token_ids: Int[Tensor, " Dv"] | None = None,
    ):
        self.head = head.to(device=target.device, dtype=target.dtype).eval().requires_grad_(False)
        self._target_logits = target.logits_over(token_ids)
        self._token_ids = head.token_ids if token_ids is None else token_ids
        self.ranking = CandidateRanker(
            partial(head.logits, target_logits=self._target_logits),
            calibration,
            coupling,
            self._token_ids,
        )
        self.builder = TreeBuilder  # how trees grow; ablations of EAGLE-2 grow them otherwise
        self._target = target
        self._graphs: CudaGraphRunner | None = None
        self._max_depth = 0  # levels of replayed drafts
        # Result of the last replayed pass over pairs.
        self._root_features = self._buffer_of_roots(0)
        self.embed_tokens = head.embed_tokens or target.embed_tokens

        spec = head.kv_spec
        num_slots = target.cache.num_slots
        self.cache = KVCache(
            target.cache.blocks,
            spec.num_layers,
            spec.num_kv_heads,
            spec.key_dim,
            target.dtype,
            target.device,
            spec.value_dim,
        )
        self.queue = FeatureBuffer(
            num_slots, window, target.feature_size, target.dtype, target.device
        )

        # The first position that each slot's sequence sees, and the first one that the head has not
        # read yet. The last is the null slot's.
        self._first = np.full(num_slots + 1, head.first_position)
        self._end = self._first.copy()

    def use_graphs(self, runner: CudaGraphRunner | None, max_depth: int = 0) -> None:
        self._graphs = runner
        self._max_depth = max_depth
        num_slots = 0 if runner is None else self._target.cache.num_slots
        self._root_features = self._buffer_of_roots(num_slots)

    @property
    def _runner(self) -> CudaGraphRunner:
        """Return the graph runner that `use_graphs` set."""
        assert self._graphs is not None
        return self._graphs

    @abstractmethod
    def _catch_up(self, at: DecodeSlots, backlog: PendingPairs) -> Float[Tensor, "B H"]:
        """Read the pending pairs and return what a draft needs of each root's."""

    @abstractmethod
    def _expand(
        self,
        at: DecodeSlots,
        roots: Int[Tensor, " B"],
        ends: Int[Tensor, "B E"],
        plan: DraftPlan,
        first: Int[Tensor, " B"],
        features: Float[Tensor, "B H"],
    ) -> DraftedTree:
        """Grow trees until the plan is fulfilled.

        Args:
            first: the first position that each sequence attends to.
            features: what `_catch_up` returned.
        """

    @abstractmethod
    def _read_spans(
        self, spans: Spans, tokens: Int[Tensor, " R"], features: Float[Tensor, "R F"]
    ) -> None:
        """Read spans of pairs into the cache, one prompt per slot. No span is empty."""

    @property
    def _root_size(self) -> int:
        """Return the size H of the vector that `_catch_up` returns for each root."""
        return 0

    def _buffer_of_roots(self, num_slots: int) -> Float[Tensor, "slots H"]:
        target = self._target
        return torch.zeros(num_slots, self._root_size, dtype=target.dtype, device=target.device)

    def _num_passes(self, grown: DraftedTree) -> int:
        """Return the passes of the head that a draft took: one per level."""
        return len(grown.levels)

    def attach_prefix(
        self,
        slots: list[int],
        firsts: list[int],
        lengths: list[int],
        tokens: Int[Tensor, " B"],
        features: Float[Tensor, "B F"],
    ) -> None:
        for slot, first, length in zip(slots, firsts, lengths, strict=True):
            self._first[slot] = max(first, self.head.first_position)
            self._end[slot] = length
        index, positions = to_device([slots, lengths], features.device)
        is_valid = torch.ones_like(tokens, dtype=torch.bool)
        self.queue.put(index, positions, tokens, features, is_valid)

    def prefill(
        self, prompts: PromptBatch, next_tokens: Int[Tensor, " R"], features: Float[Tensor, "R F"]
    ) -> None:
        """Read each sequence's pairs of a chunk. The chunk's last pair is left to the next chunk or draft."""
        self._register(prompts)

        # Pairs from before the chunk, read now since the chunk's may take their rows in the queue.
        starts = self._end[prompts.slots].tolist()
        waiting = [chunk + 1 - start for chunk, start in zip(prompts.starts, starts, strict=True)]
        queued_tokens, queued_features = self._queued(Spans(prompts.slots, starts, waiting))
        self._enqueue(prompts, next_tokens, features)

        # Each sequence's queued pairs, and then its chunk's.
        rows = to_device(_followed(waiting, prompts.lengths), features.device)
        tokens = torch.cat([queued_tokens, next_tokens])[rows]
        features = torch.cat([queued_features, features])[rows]
        counts = [w + n - 1 for w, n in zip(waiting, prompts.lengths, strict=True)]
        self._read_prompts(Spans(prompts.slots, starts, counts), tokens, features)

    def prefill_deferred(
        self, prompts: PromptBatch, next_tokens: Int[Tensor, " R"], features: Float[Tensor, "R F"]
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
        """Read the pending pairs and grow the plan's trees."""
        at = batch if plan.members is None else batch.select(plan.members)
        self._evict(at.host_slots, at.host_lengths)
        num_pairs = int(self._waiting(at).sum())

        # Replay the draft if there is a recording for it.
        grown = None
        before = False
        if self._graphs is not None and plan.has_known_shape:
            before = self._read_all_but(self._max_pairs(plan), at)
            grown = self._replayed(at, roots, plan, sampling)
        if grown is None:
            grown = retry_portable(lambda: self._eager(at, roots, plan, sampling))

        self.mark_consumed(at.host_slots, at.host_lengths)
        return Draft(
            grown.tree,
            grown.levels,
            self._num_passes(grown),
            num_pairs,
            caught_up_before=before,
            num_pair_rows=grown.num_pair_rows,
        )

    def draft_async(
        self,
        at: DecodeSlots,
        roots: Int[Tensor, " B"],
        plan: DraftPlan,
        sampling: SamplingBatch,
        texts: Sequence[TokenSequence],
    ) -> Draft | None:
        """Replay a draft, or return None if it cannot be replayed, or if more pairs may wait than it reads."""
        if self._graphs is None or not plan.has_known_shape:
            return None
        if self._waiting(at).max() > self._max_pairs(plan):
            return None
        grown = self._replayed(at, roots, plan, sampling)
        if grown is None:
            return None
        return Draft(
            grown.tree, grown.levels, self._num_passes(grown), 0, num_pair_rows=grown.num_pair_rows
        )

    def mark_consumed(self, slots: list[int], lengths: list[int]) -> int:
        index = np.array(slots, dtype=np.int64)
        ends = np.array(lengths, dtype=np.int64) + 1
        num_pairs = int((ends - self._end[index]).sum())
        self._end[index] = ends
        return num_pairs

    def extend(self, batch: DecodeSlots, verified: VerifyOutput) -> None:
        """Queue the pairs of the accepted path and the bonus token."""
        queue = self.queue
        if not tree_ops.available(queue.device):
            return self.extend_portably(batch, verified)
        result = verified.result
        return tree_ops.queue_path(
            (queue.tokens, queue.features),
            queue.window,
            batch.slots,
            batch.lengths,
            (result.accepted_nodes, result.num_accepted, result.tokens),
            verified.rows.row_of,
            verified.features,
        )

    def extend_portably(self, batch: DecodeSlots, verified: VerifyOutput) -> None:
        """Run `extend` by torch operations, which every device supports."""
        result = verified.result
        path_rows = verified.rows.row_of.gather(1, result.accepted_nodes.clamp(min=0))
        offset = torch.arange(path_rows.shape[1], device=path_rows.device)
        positions = batch.lengths[:, None] + 1 + offset
        slots = batch.slots[:, None].expand_as(positions)
        valid = offset <= result.num_accepted[:, None]
        self.queue.put(
            slots.flatten(),
            positions.flatten(),
            result.tokens.flatten(),
            verified.features[path_rows.flatten()],
            valid.flatten(),
        )

    def on_verified(self, result: VerifyResult) -> None:
        """Update ranking and calibration from the target's samples, if trees were drafted."""
        self.ranking.update(result)

    def reset_learning(self) -> None:
        self.ranking.reset()

    def state(self) -> dict[str, Tensor]:
        """Return the ranker's learned state."""
        return self.ranking.state()

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        self.ranking.load_state(state)

    def _eager(
        self, at: DecodeSlots, roots: Int[Tensor, " B"], plan: DraftPlan, sampling: SamplingBatch
    ) -> DraftedTree:
        """Return a draft for the plan's members, of any shape."""
        self.ranking.start(sampling, at.lengths, plan.members)
        if plan.members is None:
            return self._expand_eagerly(at, roots, sampling.ends, plan)
        members = to_device(plan.members, roots.device)
        grown = self._expand_eagerly(at, roots[members], sampling.ends[members], plan)
        return replace(grown, tree=grown.tree.spread(members, roots))

    def _expand_eagerly(
        self, at: DecodeSlots, roots: Int[Tensor, " B"], ends: Int[Tensor, "B E"], plan: DraftPlan
    ) -> DraftedTree:
        """Read all pending pairs, however many, then grow trees until the plan is fulfilled."""
        backlog = self._backlog(at)
        features = self._catch_up(at, backlog)
        return self._expand(at, roots, ends, plan, backlog.first, features)

    def _replayed(
        self, at: DecodeSlots, roots: Int[Tensor, " B"], plan: DraftPlan, sampling: SamplingBatch
    ) -> DraftedTree | None:
        """Return a draft for the whole batch, or None if recording fails.

        One recorded pass reads the pending pairs, another is the whole draft of this plan.
        """
        if not self._runner.replays("draft"):
            return None
        first, num_rows = self._read_pairs(at, self._max_pairs(plan))
        draft = self._draft_pass(at, roots, first, plan, sampling)
        if not self._runner.record(*draft):
            return None
        grown = self._runner.run(*draft)
        self.ranking.pending = replace(grown.feedback, sampling=sampling)

        # The recorded pass may be for more sequences.
        num = len(roots)
        levels = [level[:num] for level in grown.levels]
        return DraftedTree(grown.tree.head(num), levels, grown.feedback, num_rows)

    def _read_pairs(self, at: DecodeSlots, max_pairs: int) -> tuple[Int[Tensor, " B"], int]:
        """Read the pending pairs by a recorded pass. Return each sequence's first visible position, and its rows."""
        first, starts = self._first_positions(at)
        num_rows = self._runner.pair_rows(self._max_pending(at), max_pairs)
        self._runner.run(*self._pairs_pass(at, first, starts, num_rows, max_pairs))
        return first, num_rows

    def _pairs_pass(
        self,
        at: DecodeSlots,
        first: Int[Tensor, " B"],
        starts: Int[Tensor, " B"],
        num_rows: int,
        max_pairs: int,
    ) -> tuple[tuple, Callable[..., None], list[PaddedInput]]:
        """Return key, function and inputs of the pass that reads the pending pairs, up to max_pairs of a sequence.

        Every sequence has a pair, so there are no more sequences than rows. Padding has none: it
        starts after its end.
        """
        size = min(num_rows, self._target.cache.num_slots)
        bound = self._runner.context(at.max_length)
        inputs = [
            PaddedInput(at.slots, (size,), self.cache.blocks.null_slot),
            PaddedInput(at.lengths, (size,)),
            PaddedInput(first, (size,)),
            PaddedInput(starts, (size,), 1),
        ]

        def read(slots: Tensor, lengths: Tensor, first: Tensor, starts: Tensor) -> None:
            at = DecodeSlots.with_max_length(slots, lengths, bound)
            features = self._catch_up(at, PendingPairs(first, starts, [], max_pairs, num_rows))
            self._root_features[:size].copy_(features)

        return ("pairs", num_rows, max_pairs, bound), read, inputs

    def _draft_pass(
        self,
        at: DecodeSlots,
        roots: Int[Tensor, " B"],
        first: Int[Tensor, " B"],
        plan: DraftPlan,
        sampling: SamplingBatch,
    ) -> tuple[tuple, Callable[..., DraftedTree], list[PaddedInput]]:
        """Return key, function and inputs of the pass that is a whole draft of this plan."""
        runner = self._runner
        size = self._padded_size(len(roots), plan.width)
        bound = runner.context(at.max_length)
        inputs = [
            PaddedInput(at.slots, (size,), self.cache.blocks.null_slot),
            PaddedInput(at.lengths, (size,)),
            PaddedInput(roots, (size,)),
            PaddedInput(first, (size,)),
        ]
        kind = runner.sampling_kind(sampling.kind)
        key = (
            "draft",
            size,
            bound,
            plan.width,
            plan.children,
            plan.max_depth,
            plan.static_tree,
            kind,
            self.builder,
        )

        def grow(
            slots: Tensor, lengths: Tensor, roots: Tensor, first: Tensor, *chosen: Tensor
        ) -> DraftedTree:
            sampling = SamplingBatch.bound(kind, *chosen)
            self.ranking.start(sampling, lengths)
            at = DecodeSlots.with_max_length(slots, lengths, bound)
            return self._expand(at, roots, sampling.ends, plan, first, self._root_features[:size])

        return key, grow, inputs + sampling.padded(size)

    def pair_recordings(self, max_length: int) -> Iterator[Callable[[], None]]:
        max_pairs = self._max_depth + 1
        padded = partial(self._runner.pair_rows, max_pairs=max_pairs)
        largest = self._target.cache.num_slots * max_pairs if self._max_depth else 0
        for num_rows in self._runner.sizes(padded, largest):
            yield partial(self._record_pairs, num_rows, max_pairs, max_length)

    def _record_pairs(self, num_rows: int, max_pairs: int, max_length: int) -> None:
        at = idle_batch(1, self._target, max_length, SamplingSettings()).at
        first, starts = self._first_positions(at)
        self._runner.record(*self._pairs_pass(at, first, starts, num_rows, max_pairs))

    def _padded_size(self, num_sequences: int, width: int) -> int:
        """Return the sequences of the pass that is replayed for a whole draft of this width."""
        return self._runner.draft_size(num_sequences, width)

    def _max_pairs(self, plan: DraftPlan) -> int:
        """Return the maximum of pairs per sequence that a replayed draft reads: what the deepest draft can leave."""
        return max(plan.max_depth, self._max_depth) + 1

    def _register(self, prompts: PromptBatch) -> None:
        """Start new sequences at their first chunk; evict pairs of other sequences that waited too long."""
        for slot, start in zip(prompts.slots, prompts.starts, strict=True):
            if start == 0:
                self._first[slot] = self.head.first_position
                self._end[slot] = self.head.first_position
        self._evict(prompts.slots, prompts.starts)
        if self.head.first_position == 0:
            self._queue_first_tokens(prompts)

    def _queue_first_tokens(self, prompts: PromptBatch) -> None:
        """Queue the pairs of position 0: first tokens, without a feature."""
        target = self._target
        device = prompts.tokens.device
        firsts = [0, *accumulate(prompts.lengths[:-1])]
        slots, starts, rows = to_device([prompts.slots, prompts.starts, firsts], device)
        positions = torch.zeros_like(slots)
        nothing = torch.zeros(len(slots), target.feature_size, dtype=target.dtype, device=device)
        self.queue.put(slots, positions, prompts.tokens[rows], nothing, starts == 0)

    def _evict(self, slots: list[int], newest: list[int]) -> None:
        """Drop the slots' pairs that are no longer in the queue, of which position newest[i] is the last."""
        index = np.array(slots, dtype=np.int64)
        oldest = np.array(newest, dtype=np.int64) + 1 - self.queue.window
        is_late = oldest > self._end[index]
        late = index[is_late]
        self._first[late] = oldest[is_late]
        self._end[late] = oldest[is_late]

    def _enqueue(
        self, prompts: PromptBatch, next_tokens: Int[Tensor, " R"], features: Float[Tensor, "R F"]
    ) -> None:
        """Queue the newest pairs of each chunk."""
        spans = to_device([prompts.slots, prompts.starts, prompts.lengths], features.device)
        slots, starts, lengths = spans.repeat_interleave(
            spans[2], dim=1, output_size=sum(prompts.lengths)
        )
        newest = prompts.positions >= starts + lengths - self.queue.window
        self.queue.put(slots, prompts.positions + 1, next_tokens, features, newest)

    def _queued(self, spans: Spans) -> tuple[Int[Tensor, " R"], Float[Tensor, "R F"]]:
        """Return queued pairs."""
        return self.queue.take(*spans.rows(self.queue.device))

    def _read_prompts(
        self, spans: Spans, tokens: Int[Tensor, " R"], features: Float[Tensor, "R F"]
    ) -> None:
        """Run the head over pairs, each slot's as a prompt of its own."""
        spans = spans.without_empty()
        if spans.slots:
            self._read_spans(spans, tokens, features)
            self._end[spans.slots] = np.add(spans.starts, spans.counts)

    def _waiting(self, at: DecodeSlots) -> Int[np.ndarray, " B"]:
        """Return the number of queued pairs of each sequence, root included."""
        return np.array(at.host_lengths) + 1 - self._end[at.host_slots]

    def _first_positions(self, at: DecodeSlots) -> Int[Tensor, "2 B"]:
        """Return each sequence's first visible position and its first unread position."""
        return copy_to_device(torch.from_numpy(self._spans(at)), at.slots.device)

    def _spans(self, at: DecodeSlots) -> Int[np.ndarray, "2 B"]:
        """Return `_first_positions` on the host."""
        return np.stack([self._first[at.host_slots], self._end[at.host_slots]])

    def _max_pending(self, at: DecodeSlots) -> int:
        """Return the number of all queued pairs, or an upper bound of it if the lengths are bounds."""
        return at.total_length + len(at.host_slots) - int(self._end[at.host_slots].sum())

    def _backlog(self, at: DecodeSlots) -> PendingPairs:
        """Return all unread pairs, packed if sequences have different numbers of them."""
        first, starts = self._first_positions(at)
        host_starts = self._end[at.host_slots].tolist()
        counts = self._waiting(at).tolist()
        longest = max(counts)
        num_rows = sum(counts) if min(counts) < longest else None
        return PendingPairs(first, starts, host_starts, longest, num_rows)

    def _read_all_but(self, max_pairs: int, at: DecodeSlots) -> bool:
        """Read all pairs but each sequence's last, if more are queued than a draft reads. Return whether they were."""
        counts = (self._waiting(at) - 1).tolist()
        if max(counts) < max_pairs:
            return False
        spans = Spans(at.host_slots, self._end[at.host_slots].tolist(), counts)
        self._read_prompts(spans, *self._queued(spans))
        return True

    def _pending_rows(self, at: DecodeSlots, backlog: PendingPairs) -> PendingRows:
        """Return the unread pairs as packed rows, each sequence's one after another."""
        device = at.slots.device
        longest = backlog.longest
        counts = at.lengths + 1 - backlog.starts
        batch = len(counts)
        if backlog.num_rows is None:
            # The rectangle: row b * longest + i is pair i of sequence b.
            row = torch.arange(batch * longest, device=device)
            first_rows = longest * torch.arange(batch, device=device)
            seq = row // longest
            index = row - first_rows[seq]
            is_pair = index < counts[seq]
            row_of = None
            unpack = None
            packed = None
        else:
            # The pairs of each sequence follow those of the one before; padding rows come last.
            row = torch.arange(backlog.num_rows, device=device)
            ends = counts.cumsum(0)
            first_rows = ends - counts
            is_pair = row < ends[-1]
            seq = torch.searchsorted(ends, row, right=True).clamp(max=batch - 1)
            index = torch.where(is_pair, row - first_rows[seq], 0)
            pair = torch.arange(longest, device=device)
            row_of = torch.where(pair < counts[:, None], first_rows[:, None] + pair, 0)
            unpack = seq * longest + index
            packed = torch.where(is_pair, seq, -1)

        slots = at.slots[seq]
        positions = backlog.starts[seq] + index
        written = torch.where(is_pair, positions, self.cache.blocks.null_position)
        tokens, features = self.queue.take(slots, positions)
        return PendingRows(
            tokens=tokens,
            features=features,
            positions=positions,
            slot_mapping=self.cache.slot_mapping(slots, written),
            last=(first_rows + counts - 1).clamp(min=0),
            row_of=row_of,
            unpack=unpack,
            seq=packed,
        )


def _followed(waiting: list[int], lengths: list[int]) -> list[int]:
    """Return the order of queued pairs and chunk rows by sequence, without the last row of each chunk."""
    rows: list[int] = []
    queued = 0
    row = sum(waiting)
    for count, length in zip(waiting, lengths, strict=True):
        rows += range(queued, queued + count)
        rows += range(row, row + length - 1)
        queued += count
        row += length
    return rows


class FeatureBuffer:
    """A ring buffer per slot of the newest pairs, so that drafting can resume with a context after plain steps.

    Args:
        window: pairs stored per slot; position j overwrites j - window.
        num_slots: slots of the engine; one more is added for padding.
    """

    def __init__(
        self,
        num_slots: int,
        window: int,
        hidden_size: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ):
        self.window = window
        self.device = torch.device(device)
        self._nowhere = (num_slots + 1) * window  # a last row takes what is not to be kept
        self.tokens = torch.zeros(self._nowhere + 1, dtype=torch.int64, device=device)
        self.features = torch.zeros(self._nowhere + 1, hidden_size, dtype=dtype, device=device)

    def put(
        self,
        slots: Int[Tensor, " R"],
        positions: Int[Tensor, " R"],
        tokens: Int[Tensor, " R"],
        features: Float[Tensor, "R H"],
        valid: Bool[Tensor, " R"],
    ) -> None:
        """Store the valid pairs. Two pairs of one slot must not be `window` positions apart."""
        indices = torch.where(valid, self._indices(slots, positions), self._nowhere)
        self.tokens.index_copy_(0, indices, tokens)
        self.features.index_copy_(0, indices, features)

    def take(
        self, slots: Int[Tensor, " R"], positions: Int[Tensor, " R"]
    ) -> tuple[Int[Tensor, " R"], Float[Tensor, "R H"]]:
        """Return the pairs at these positions, which must be among each slot's last `window`."""
        indices = self._indices(slots, positions)
        return self.tokens[indices], self.features[indices]

    def _indices(self, slots: Int[Tensor, " R"], positions: Int[Tensor, " R"]) -> Int[Tensor, " R"]:
        return slots * self.window + positions % self.window
