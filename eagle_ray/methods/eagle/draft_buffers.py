"""DraftBuffers: a draft in fixed tensors, so that one recorded level serves every level of every draft.

    buffers.start(slots, lengths, first, sampling)                       # the sequences, at the beginning of a draft
    buffers.append(tokens, scores, own, calibration)                     # level 1: children of the roots
    buffers.append(...)                                                  # each further level, of the frontier's nodes

`TreeBuilder` does the same with tensors as large as each draft. Here the level is a number on the
device, and its nodes go where that number says:

    nodes      root | K of level 1 | W * K of level 2 | W * K of level 3 | ...
    positions  root | W of frontier 1 | W of frontier 2 | ...                     in the head's cache, after the root

Frontier l has the W nodes of level l that are worth children, best first, ties to the earlier one.
Unused positions are hidden by the frontier's ancestor words.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from eagle_ray.core.sampling_batch import Kind, SamplingBatch
from eagle_ray.kernels.availability import use_triton
from eagle_ray.methods.calibration import Calibration, ProposalLevel, Proposals, target_path
from eagle_ray.tree.ancestor_words import NODES_PER_WORD, num_ancestor_words
from eagle_ray.tree.draft_tree import DraftTree, VerifyResult
from eagle_ray.tree.expand import Frontier

MAX_LEVEL_NODES = 1024  # nodes of a level that the kernel appends: it ranks them in registers


@dataclass(frozen=True, slots=True)
class DraftShape:
    """The largest draft: of `batch` sequences, `width` nodes per frontier, `children` per node, `depth` levels."""

    batch: int
    width: int
    children: int
    depth: int

    @property
    def num_nodes(self) -> int:
        """Return the nodes of a tree, root included."""
        return 1 + self.children + (self.depth - 1) * self.width * self.children

    @property
    def num_positions(self) -> int:
        """Return how many KV positions to reserve for all frontiers of a draft; at least one frontier's."""
        return max(self.depth - 1, 1) * self.width

    def num_bytes(self, hidden_size: int, itemsize: int) -> int:
        """Return about the bytes of DraftBuffers of this shape.

        Args:
            itemsize: bytes of a number of the features.
        """
        num_words = num_ancestor_words(self.num_positions)
        frontier = 2 * 8 * (self.depth + 1) + 8 * (num_words + 2)
        nodes = (2 * 8 + 2 * 4) * self.num_nodes
        frontiers = frontier * self.width
        levels = (8 + 4) * self.depth * self.width * self.children
        features = itemsize * hidden_size * self.depth * self.width
        return self.batch * (nodes + frontiers + levels + features)


class DraftBuffers:
    """Tensors for the largest draft. `view` returns the part for fewer sequences or a narrower
    frontier, without a copy.

    Attributes:
        level: [1], levels appended so far.
        num_offered: [depth], for each level, the nodes whose children were appended and not yet
            used to update the calibration.
        features: [depth, batch, width, hidden], features of each frontier, from which its children
            were ranked; frontier 0 is the root alone.
    """

    def __init__(
        self,
        shape: DraftShape,
        hidden_size: int,
        num_ends: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ):
        self.shape = shape
        batch = shape.batch
        width = shape.width
        depth = shape.depth

        def whole(*size: int) -> Int[Tensor, "..."]:
            return torch.zeros(size, dtype=torch.int64, device=device)

        def real(*size: int) -> Float[Tensor, "..."]:
            return torch.zeros(size, dtype=torch.float32, device=device)

        # How far the draft is.
        self._progress = whole(1 + depth)
        self.level = self._progress[:1]
        self.num_offered = self._progress[1:]

        # The sequences.
        self.slots = whole(batch)
        self.lengths = whole(batch)
        self.first = whole(batch)

        # Their sampling parameters.
        self.seed = whole(batch)
        self.top_k = whole(batch)
        self.temperature = real(batch)
        self.top_p = real(batch)
        self.min_p = real(batch)
        self.ends = whole(batch, num_ends)

        # The trees.
        self.tokens = whole(batch, shape.num_nodes)
        self.parents = whole(batch, shape.num_nodes)
        self.log_values = real(batch, shape.num_nodes)
        self.draft_log_probs = real(batch, shape.num_nodes)

        # The newest frontier, and the tokens and parents of all of them.
        self.frontier_nodes = whole(batch, width)
        self.frontier_values = real(batch, width)
        self.words = whole(batch, width, num_ancestor_words(shape.num_positions))
        self.frontier_tokens = whole(depth + 1, batch, width)
        self.parent_rows = whole(depth + 1, batch, width)

        # What calibration learns from.
        self.offered = whole(depth, batch, width, shape.children)
        self.scores = real(depth, batch, width, shape.children)
        self.features = torch.zeros(depth, batch, width, hidden_size, dtype=dtype, device=device)

    def restart(self) -> None:
        """Begin a draft without levels."""
        self._progress.zero_()

    def update_calibration(self, calibration: Calibration, result: VerifyResult) -> None:
        """Update a calibration once from the target's tokens on the draft in these buffers.

        Nothing changes without a draft, or if all rows are padding. A graph can record it.
        """
        batch, length = result.tokens.shape
        depth = min(self.shape.depth, length)
        if use_triton(self.level.device):
            from eagle_ray.kernels.draft_level import update_fit

            return update_fit(self, calibration.fit, result.tokens, result.num_accepted, depth)
        kinds = (self.temperature[:batch] > 0).long()
        width = self.shape.width
        levels = [self.offered_level(i, batch, width if i else 1) for i in range(depth)]
        offered = Proposals(kinds, levels)
        path = target_path(levels, result.tokens, result.num_accepted, self.num_offered)
        calibration.update_on_path(offered, path, result.tokens)
        self.num_offered.masked_fill_((result.num_accepted >= 0).any(), 0)

    def offered_level(self, level: int, num: int, width: int) -> ProposalLevel:
        """Return one level's proposals: the children of the first `width` frontier nodes of the
        first `num` sequences."""
        frontier = None
        if level:
            rows = level, slice(num), slice(width)
            frontier = Frontier(
                self.frontier_tokens[rows],
                self.parent_rows[rows],
                self.frontier_values[:num, :width],
            )
        tokens = self.offered[level, :num, :width]
        scores = self.scores[level, :num, :width]
        return ProposalLevel(frontier, tokens, scores)


class PaddedDraft:
    """One draft's view of the buffers: the first `batch` sequences, with frontiers of `width` nodes.

    Args:
        kind: kind of sampling.
    """

    def __init__(self, buffers: DraftBuffers, batch: int, width: int, kind: Kind):
        self._all = buffers
        self.batch = batch
        self.width = width
        self._kind = kind
        children = buffers.shape.children
        self.shape = DraftShape(batch, width, children, buffers.shape.depth)
        self.level = buffers.level
        self.slots = buffers.slots[:batch]
        self.lengths = buffers.lengths[:batch]
        self.first = buffers.first[:batch]

        # The root, its children, and then levels of `width` times as many nodes.
        device = self.slots.device
        node = torch.arange(self.shape.num_nodes, device=device)
        later = node - 1 - children
        later_depth = 1 + later.div(width * children, rounding_mode="floor") + 1
        self._depths = torch.where(node > children, later_depth, (node > 0).long())
        self.position_depths = torch.arange(self.shape.num_positions, device=device) // width

    @property
    def sampling(self) -> SamplingBatch:
        """Return the sampling parameters of this draft's sequences."""
        of = self._all
        rows = slice(self.batch)
        return SamplingBatch.bound(
            self._kind,
            of.temperature[rows],
            of.top_p[rows],
            of.top_k[rows],
            of.min_p[rows],
            of.seed[rows],
            of.ends[rows],
        )

    def clear(self, null_slot: int) -> None:
        """Reset to a draft of one level that is all padding."""
        of = self._all
        of.slots.fill_(null_slot)
        of.lengths.zero_()
        of.first.zero_()
        of.tokens.zero_()
        of.frontier_tokens.zero_()
        of.parent_rows.zero_()
        of.words.zero_()
        of.level.fill_(1)

    def start(
        self, slots: Tensor, lengths: Tensor, first: Tensor, roots: Tensor, *chosen: Tensor
    ) -> None:
        """Begin a draft: set its sequences, roots and sampling parameters.

        Args:
            slots, lengths, first: slot, cached tokens and first visible position of each sequence,
                padded to the largest batch, since levels may be padded to more sequences.
            roots: root tokens of this draft.
            chosen: sampling of this draft, as SamplingBatch.bound takes it.
        """
        of = self._all
        rows = slice(self.batch)
        of.slots.copy_(slots)
        of.lengths.copy_(lengths)
        of.first.copy_(first)
        fields = (of.temperature, of.top_p, of.top_k, of.min_p, of.seed, of.ends)
        for own, new in zip(fields, chosen, strict=True):
            own[rows].copy_(new)

        # A root alone, which is the only node of the first frontier.
        of.restart()
        of.tokens[rows, 0].copy_(roots)
        of.parents[rows, 0] = -1
        of.log_values[rows, 0] = 0.0
        of.draft_log_probs[rows, 0] = 0.0
        of.frontier_values[rows] = -torch.inf
        of.frontier_values[rows, 0] = 0.0
        of.frontier_nodes[rows] = 0

    @property
    def key(self) -> tuple:
        """Return everything that recorded passes of this draft depend on, as a key of recordings."""
        return self.batch, self.width, self.shape.children, self._kind

    def next_frontier(self) -> Frontier:
        """Return the frontier whose children are drafted next; past the deepest level, that level's."""
        # Recording runs a level more often than there are levels.
        self.level.clamp_(max=self.shape.depth - 1)
        return self.frontier(self.level)

    @property
    def words(self) -> Int[Tensor, "B W words"]:
        """Return the ancestor mask of each frontier node over num_positions positions, as bits in words."""
        num_words = num_ancestor_words(self.shape.num_positions)
        return self._all.words[: self.batch, : self.width, :num_words]

    def inputs(self) -> Float[Tensor, "B W H"]:
        """Return the features of the frontier's parents, which the head reads next."""
        level_before = (self.level - 1).clamp(min=0)
        features = self._all.features.index_select(0, level_before)[0]
        before = features[: self.batch, : self.width]
        parent_rows = self.frontier(self.level).parent_rows
        return before.gather(1, parent_rows[:, :, None].expand(-1, -1, before.shape[2]))

    def append(
        self,
        features: Float[Tensor, "B F H"],
        tokens: Int[Tensor, "B F K"],
        scores: Float[Tensor, "B F K"],
        own: Float[Tensor, "B F K"],
        calibration: Calibration | None,
    ) -> None:
        """Add a level's children and choose the next frontier among them.

        Args:
            features: features from which the children were ranked; F is 1 on the first level, then
                the width.
            scores: log-probabilities given their parents, before calibration; -inf is padding.
            own: the head's own log-probabilities.
        """
        num = features.shape[1]
        level = self.level
        stored = self._all.features[:, : self.batch, :num]
        stored.index_copy_(0, level, features[None])
        if use_triton(level.device) and num * self.shape.children <= MAX_LEVEL_NODES:
            self._append_fused(tokens, scores, own, calibration)
        else:
            self._append_nodes(tokens, scores, own, calibration)
        level += 1

    def _append_fused(
        self, tokens: Tensor, scores: Tensor, own: Tensor, calibration: Calibration | None
    ) -> None:
        from eagle_ray.kernels.draft_level import append_level

        fitted = None if calibration is None else calibration.fit.parameters
        append_level(
            self._all,
            self.width,
            num_ancestor_words(self.shape.num_positions),
            tokens,
            scores,
            own,
            fitted,
        )

    def _append_nodes(
        self, tokens: Tensor, scores: Tensor, own: Tensor, calibration: Calibration | None
    ) -> None:
        """Compute `_append_fused` with torch operations."""
        of = self._all
        rows = slice(self.batch)
        num = tokens.shape[1]
        level = self.level
        offered = of.offered[:, rows, :num]
        offered.index_copy_(0, level, tokens[None])
        stored = of.scores[:, rows, :num]
        stored.index_copy_(0, level, scores[None])
        of.num_offered.index_fill_(0, level, num)
        log_probs = scores
        if calibration is not None:
            # Greedy sequences and sampled ones are calibrated apart.
            kinds = (of.temperature[rows] > 0).long()
            log_probs = calibration.apply(level, kinds, scores)
        self._add_nodes(tokens, log_probs, own)

    def _add_nodes(self, tokens: Tensor, log_probs: Tensor, own: Tensor) -> None:
        """Add a level's nodes to the trees, and choose the next frontier among them."""
        of = self._all
        rows = slice(self.batch)
        _, num, children = tokens.shape

        # The root and its children come before the levels of `width` times as many nodes.
        later = 1 + children + (self.level - 1) * self.width * children
        start = torch.where(self.level == 0, 1, later)
        index = start + torch.arange(num * children, device=start.device)

        values = of.frontier_values[rows, :num, None] + log_probs
        values = values.masked_fill(values.isnan(), -torch.inf)
        parents = of.frontier_nodes[rows, :num, None].expand(tokens.shape)
        own = own.masked_fill(own.isnan(), -torch.inf)
        of.tokens[rows].index_copy_(1, index, tokens.flatten(1))
        of.parents[rows].index_copy_(1, index, parents.flatten(1))
        of.log_values[rows].index_copy_(1, index, values.flatten(1))
        of.draft_log_probs[rows].index_copy_(1, index, own.flatten(1))
        self._choose(tokens.flatten(1), values.flatten(1), start)

    def _choose(
        self, tokens: Int[Tensor, "B C"], values: Float[Tensor, "B C"], start: Int[Tensor, " 1"]
    ) -> None:
        """Make the best of the level's nodes the next frontier; ends of sequences get no children."""
        of = self._all
        rows = slice(self.batch)
        width = self.width
        is_end = (tokens[:, :, None] == of.ends[rows, None]).any(2)
        values = values.masked_fill(is_end, -torch.inf)
        best, index = values.sort(dim=1, descending=True, stable=True)
        index = index[:, :width]
        of.frontier_values[rows, :width] = best[:, :width]
        of.frontier_nodes[rows, :width] = index + start

        following = self.level + 1
        chosen = tokens.gather(1, index)
        frontier_tokens = of.frontier_tokens[:, rows, :width]
        frontier_tokens.index_copy_(0, following, chosen[None])
        parent_rows = index // self.shape.children
        stored = of.parent_rows[:, rows, :width]
        stored.index_copy_(0, following, parent_rows[None])
        self._see(parent_rows)

    def _see(self, parent_rows: Int[Tensor, "B W"]) -> None:
        """Let each node of the next frontier attend to its parent's ancestors, its parent and itself."""
        words = self.words
        above = words.gather(1, parent_rows[:, :, None].expand_as(words))
        above = torch.where(self.level == 0, 0, above)

        position = self.level * self.width + torch.arange(self.width, device=words.device)
        own_word = position // NODES_PER_WORD
        own_bit = 1 << (position % NODES_PER_WORD)
        word = torch.arange(words.shape[2], device=words.device)
        own = torch.where(word == own_word[:, None], own_bit[:, None], 0)
        words.copy_(above | own)

    # Results, for as many levels as the host has had run.

    def tree(self, num: int, depth: int) -> DraftTree:
        """Return the trees of the first `num` sequences."""
        count = DraftShape(num, self.width, self.shape.children, depth).num_nodes
        of = self._all
        log_values = of.log_values[:num, :count]
        return DraftTree(
            tokens=of.tokens[:num, :count],
            parents=of.parents[:num, :count],
            depths=self._depths[:count].expand(num, -1),
            log_values=log_values,
            draft_log_probs=of.draft_log_probs[:num, :count],
            valid=log_values > -torch.inf,
        )

    def levels(self, num: int, depth: int) -> list[Float[Tensor, "B _ K"]]:
        """Return the log values of each level's nodes, grouped by parent."""
        children = self.shape.children
        log_values = self._all.log_values[:num]
        first = log_values[:, 1 : 1 + children]
        later = log_values[:, 1 + children :].split(self.width * children, 1)
        levels = [first[:, None]]
        for level in later[: depth - 1]:
            levels.append(level.unflatten(1, (self.width, children)))
        return levels

    def offered(self, kinds: Int[Tensor, " B"], num: int, depth: int) -> Proposals:
        """Return all proposed children, from which the calibration is updated."""
        levels = []
        for i in range(depth):
            # The first level has one parent: the root.
            width = self.width if i else 1
            levels.append(self._all.offered_level(i, num, width))
        return Proposals(kinds, levels)

    def features(self, num: int, depth: int) -> list[Float[Tensor, "B _ H"]]:
        widths = [1, *[self.width] * (depth - 1)]
        return [self._all.features[i, :num, : widths[i]] for i in range(depth)]

    def frontier(self, level: int | Tensor, num: int | None = None) -> Frontier:
        """Return the nodes whose children are drafted at a level. Only the newest level's values are valid."""
        of = self._all
        if isinstance(level, int):
            tokens = of.frontier_tokens[level]
            parent_rows = of.parent_rows[level]
        else:  # on the device
            tokens = of.frontier_tokens.index_select(0, level)[0]
            parent_rows = of.parent_rows.index_select(0, level)[0]
        rows = slice(num or self.batch)
        width = self.width
        return Frontier(
            tokens[rows, :width], parent_rows[rows, :width], of.frontier_values[rows, :width]
        )
