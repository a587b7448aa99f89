"""EagleDrafter: an EAGLE-1/2 head that grows the dynamic tree of EAGLE-2 from the target's features.

Column j of its cache holds the pair (token j, feature j-1) of a sequence, always made from the *target's* feature, so
what it drafted itself is forgotten after each step. A pair depends on no token past its own column, as in the target's
cache. With n tokens in the target's cache the root is token n, and the output of its pair is the feature from which
level 1 is drafted. Column 0 has no pair and is never seen.

    pairs   - (t1,f0) (t2,f1) ... (root,f[n-1]) | level-1 nodes | level-2 nodes | ...
    column  0    1       2            n         | n+1 .. n+K    | n+K+1 .. n+2K | ...

Pairs wait in a queue until a draft needs them; after a long while without drafts the oldest are lost, and the head
goes on with a shorter past. Does not know budgets, acceptance or requests.
"""

from __future__ import annotations

from itertools import chain

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from eagle_ray.drafting.drafter import Draft
from eagle_ray.drafting.pair_queue import PairQueue
from eagle_ray.drafting.ranking import Ranking
from eagle_ray.models.attention import TreeLayout
from eagle_ray.models.heads import EagleHead
from eagle_ray.models.kv_cache import BatchSlots, KVCache
from eagle_ray.models.target import Prompts, Target
from eagle_ray.speculative.calibration import Calibration
from eagle_ray.speculative.coupling import Coupling
from eagle_ray.speculative.expand import Frontier, TreeBuilder
from eagle_ray.speculative.plan import Plan
from eagle_ray.speculative.sampling import BatchSampling
from eagle_ray.speculative.tree import VerifyRows
from eagle_ray.speculative.verify import VerifyResult

QUEUE_WINDOW = 128  # pairs kept of each slot: the past that a head needs most, at H floats a pair


class EagleDrafter:
    """The head, its one-layer cache and the pairs that it has not read yet.

    capacity: columns of a slot: the longest sequence and the drafted levels. calibration, coupling: see Ranking;
    without them, EAGLE-2's own ranking.
    """

    prefill_passes = 1

    def __init__(
        self,
        head: EagleHead,
        target: Target,
        capacity: int,
        window: int = QUEUE_WINDOW,
        calibration: Calibration | None = None,
        coupling: Coupling | None = None,
    ):
        self.ranking = Ranking(target.logits, calibration, coupling)
        self._head = head.to(device=target.device, dtype=target.dtype).eval().requires_grad_(False)
        self._target = target
        self._embed = head.embed_tokens or target.embed_tokens
        config, num_slots = head.config, target.cache.num_slots
        self.cache = KVCache(
            1, num_slots, config.num_key_value_heads, capacity, config.head_dim, target.dtype, target.device
        )
        self._queue = PairQueue(num_slots, window, target.hidden_size, target.dtype, target.device)
        self._first = [1] * num_slots  # the first column that each slot's sequence sees
        self._end = [1] * num_slots  # the first column that the head has not read yet

    def begin(self, slot: int, column: int = 1) -> None:
        """A new sequence in `slot`, of which the first `column` columns are never seen."""
        self._first[slot] = self._end[slot] = column

    def prefill(self, prompts: Prompts, next_tokens: Int[Tensor, " R"], features: Float[Tensor, "R H"]) -> None:
        """Read every pair but each prompt's last, which the next draft or chunk reads from the queue."""
        self.observe(prompts, next_tokens, features)
        lengths = [n - 1 for n in prompts.lengths]
        if sum(lengths) == 0:
            return
        keep = list(chain.from_iterable(range(end - n, end - 1) for n, end in _spans(prompts.lengths)))
        rows = torch.tensor(keep, device=features.device)
        columns = [1 for _ in prompts.slots]
        self._read(prompts.slots, columns, lengths, next_tokens[rows], features[rows])

    def observe(self, prompts: Prompts, next_tokens: Int[Tensor, " R"], features: Float[Tensor, "R H"]) -> None:
        for slot in prompts.slots:
            self.begin(slot)
        slots = torch.tensor(prompts.slots, device=features.device)
        lengths = torch.tensor(prompts.lengths, device=features.device)
        newest = prompts.positions >= (lengths - self._queue.window).repeat_interleave(lengths)
        self._queue.put(slots.repeat_interleave(lengths), prompts.positions + 1, next_tokens, features, newest)

    def draft(self, batch: BatchSlots, roots: Int[Tensor, " B"], plan: Plan, sampling: BatchSampling) -> Draft:
        """EAGLE-2's expansion: the top `width` of each level get `width` children each (section 4.1)."""
        members = None if plan.members is None else torch.tensor(plan.members, device=roots.device)
        at = batch if plan.members is None else batch.select(plan.members)
        builder = TreeBuilder(roots if members is None else roots[members], plan.width)
        self.ranking.begin(sampling, at.lengths, plan.members)
        features, num_caught_up = self._catch_up(at)
        features, ancestors = features[:, None], None
        self._grow(builder, features, None, plan.width)
        at = at.advanced(1)
        while builder.depth < plan.max_depth and not (plan.enough and plan.enough(builder)):
            frontier = builder.frontier()
            ancestors = _descend(ancestors, frontier)
            features = self._level(at, builder.depth, frontier, features, ancestors)
            self._grow(builder, features, frontier, plan.width)
        tree = builder.build()
        tree = tree if members is None else tree.spread(members, roots)
        return Draft(tree, builder.levels, builder.depth, num_caught_up)

    def extend(self, batch: BatchSlots, rows: VerifyRows, result: VerifyResult, features: Float[Tensor, "R H"]) -> None:
        """Queue the pairs of the accepted path and the bonus token; where trees were drafted, learn from the picks."""
        self.ranking.learn(result)
        path_rows = rows.row_of.gather(1, result.accepted_nodes.clamp(min=0))
        offset = torch.arange(path_rows.shape[1], device=path_rows.device)
        columns = batch.lengths[:, None] + 1 + offset
        slots = batch.slots[:, None].expand_as(columns)
        valid = offset <= result.num_accepted[:, None]
        self._queue.put(
            slots.flatten(), columns.flatten(), result.tokens.flatten(), features[path_rows.flatten()], valid.flatten()
        )

    def forget(self) -> None:
        self.ranking.forget()

    def _catch_up(self, batch: BatchSlots) -> tuple[Float[Tensor, "B H"], int]:
        """Read what waits in the queue, the root's pair last; that pair's outputs, and how many pairs were read."""
        for slot, length in zip(batch.host_slots, batch.host_lengths, strict=True):
            oldest = length + 1 - self._queue.window
            if oldest > self._end[slot]:
                self.begin(slot, oldest)
        columns = [self._end[slot] for slot in batch.host_slots]
        counts = [length + 1 - column for length, column in zip(batch.host_lengths, columns, strict=True)]
        wanted = torch.tensor(
            [place for s, c, n in zip(batch.host_slots, columns, counts, strict=True) for place in _cells(s, c, n)],
            device=batch.slots.device,
        )
        tokens, features = self._queue.take(wanted[:, 0], wanted[:, 1])
        return self._read(batch.host_slots, columns, counts, tokens, features), sum(counts)

    def _read(
        self,
        slots: list[int],
        columns: list[int],
        counts: list[int],
        tokens: Int[Tensor, " R"],
        features: Float[Tensor, "R H"],
    ) -> Float[Tensor, "B H"]:
        """One pass of the head over counts[b] pairs of each slot, from columns[b] on; the output of each last one."""
        device, longest = tokens.device, max(counts)
        at = BatchSlots.of(slots, columns, device)
        lengths = torch.tensor(counts, device=device)
        index = torch.arange(longest, device=device)
        real = index < lengths[:, None]
        row_of = (lengths.cumsum(0) - lengths)[:, None] + index
        unpack = torch.tensor(
            [b * longest + i for b, n in enumerate(counts) for i in range(n)], dtype=torch.int64, device=device
        )
        places = at.lengths[:, None] + index
        causal = torch.ones(longest, longest, dtype=torch.bool, device=device).tril()
        rectangle = min(counts) == longest
        layout = self._layout(
            at,
            cells=self.cache.cells(at.slots[:, None], places).flatten()[unpack],
            ancestors=causal.expand(len(slots), -1, -1),
            column_depths=index.expand(len(slots), -1),
            row_of=None if rectangle else torch.where(real, row_of, 0),
            unpack=None if rectangle else unpack,
        )
        hidden = self._run(tokens, features, places.flatten()[unpack] - 1, layout)
        for slot, column, count in zip(slots, columns, counts, strict=True):
            self._end[slot] = column + count
        return hidden[lengths.cumsum(0) - 1]

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
        places = batch.lengths[:, None] + column[-width:]
        layout = self._layout(
            batch,
            cells=self.cache.cells(batch.slots[:, None], places).flatten(),
            ancestors=ancestors,
            column_depths=(column // width).expand(len(batch.slots), -1),
        )
        positions = (batch.lengths[:, None] + level - 2).expand(-1, width)
        inputs = features.gather(1, parents).flatten(0, 1)
        hidden = self._run(frontier.tokens.flatten(), inputs, positions.flatten(), layout)
        return hidden.view(*frontier.tokens.shape, -1)

    def _layout(
        self,
        batch: BatchSlots,
        cells: Int[Tensor, " R"],
        ancestors: Bool[Tensor, "B F M"],
        column_depths: Int[Tensor, "B M"],
        row_of: Int[Tensor, "B F"] | None = None,
        unpack: Int[Tensor, " R"] | None = None,
    ) -> TreeLayout:
        """Rows that see their slot from the first column it has a pair in."""
        first = torch.tensor([self._first[slot] for slot in batch.host_slots], device=cells.device)
        return TreeLayout(
            cache=self.cache,
            batch=batch,
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
        """The children of a frontier (None: of the roots), ranked."""
        children = self.ranking.children(features, frontier, width)
        builder.grow(children.log_probs, children.tokens, children.draft_log_probs)

    def _run(
        self,
        tokens: Int[Tensor, " R"],
        features: Float[Tensor, "R H"],
        positions: Int[Tensor, " R"],
        layout: TreeLayout,
    ) -> Float[Tensor, "R H"]:
        return self._head(self._embed(tokens)[None], features[None], positions[None], layout)[0]


def _spans(lengths: list[int]) -> list[tuple[int, int]]:
    """(length, end) of prompts that stand one after the other."""
    ends, end = [], 0
    for length in lengths:
        end += length
        ends.append(end)
    return list(zip(lengths, ends, strict=True))


def _cells(slot: int, column: int, count: int) -> list[tuple[int, int]]:
    return [(slot, column + i) for i in range(count)]


def _descend(ancestors: Bool[Tensor, "B P M"] | None, frontier: Frontier) -> Bool[Tensor, "B F M2"]:
    """Which tree columns the new frontier sees: its parents' and, in F new columns, each node itself."""
    batch, width = frontier.tokens.shape
    itself = torch.eye(width, dtype=torch.bool, device=frontier.tokens.device).expand(batch, width, width)
    if ancestors is None:
        return itself
    parents = frontier.parent_rows[:, :, None].expand(-1, -1, ancestors.shape[2])
    return torch.cat([ancestors.gather(1, parents), itself], 2)
