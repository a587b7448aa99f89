"""DraftBuffers: a draft in fixed tensors, so that one recorded level serves every level of every draft.

    buffers.start(slots, lengths, first, sampling)                       # the sequences, at the beginning of a draft
    buffers.append(tokens, scores, own, calibration)                     # level 1: children of the roots
    buffers.append(...)                                                  # each further level, of the frontier's nodes

`TreeBuilder` does the same with tensors as large as each draft. Here the level is a number on the device, and its nodes
go where that number says:

    nodes      root | K of level 1 | W * K of level 2 | W * K of level 3 | ...
    positions  root | W of frontier 1 | W of frontier 2 | ...                     in the head's cache, after the root

Frontier l has the W nodes of level l that are worth children, best first, ties to the earlier one. Unused positions
are hidden by the frontier's ancestor words.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from eagle_ray.core.sampling_batch import Kind, SamplingBatch
from eagle_ray.kernels.availability import use_triton
from eagle_ray.methods.calibration import Calibration, ProposalLevel, Proposals, target_path
from eagle_ray.tree.draft_tree import NODES_PER_WORD, DraftTree, VerifyResult, num_ancestor_words
from eagle_ray.tree.expand import Frontier

MAX_LEVEL_NODES = 1024  # of a level that the kernel appends: it ranks them in registers


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
        """Return the positions of all frontiers; one draft of a single level has none that are used."""
        return max(self.depth - 1, 1) * self.width

    def num_bytes(self, hidden_size: int, itemsize: int) -> int:
        """Return about the bytes of DraftBuffers of this shape. itemsize: of a number of the features."""
        of_nodes = (2 * 8 + 2 * 4) * self.num_nodes
        of_frontiers = (2 * 8 * (self.depth + 1) + 8 * (num_ancestor_words(self.num_positions) + 2)) * self.width
        of_levels = (8 + 4) * self.depth * self.width * self.children
        of_features = itemsize * hidden_size * self.depth * self.width
        return self.batch * (of_nodes + of_frontiers + of_levels + of_features)


class DraftBuffers:
    """Tensors of the largest draft; `view` returns those of fewer sequences or a narrower frontier, in place.

    Attributes:
        level: [1], levels appended so far.
        num_offered: [depth], nodes of each level whose children were appended and from which nothing was learned yet.
        features: [depth, batch, width, hidden], of each frontier, from which a level's children were ranked; frontier 0
            is the root alone.
    """

    def __init__(
        self, shape: DraftShape, hidden_size: int, num_ends: int, dtype: torch.dtype, device: torch.device | str
    ):
        self.shape = shape
        batch, width, children, depth = shape.batch, shape.width, shape.children, shape.depth

        def whole(*size: int) -> Int[Tensor, "..."]:
            return torch.zeros(size, dtype=torch.int64, device=device)

        def real(*size: int) -> Float[Tensor, "..."]:
            return torch.zeros(size, dtype=torch.float32, device=device)

        self._progress = whole(1 + depth)
        self.level, self.num_offered = self._progress[:1], self._progress[1:]
        self.slots, self.lengths, self.first, self.seed, self.top_k = (whole(batch) for _ in range(5))
        self.temperature, self.top_p, self.min_p = (real(batch) for _ in range(3))
        self.ends = whole(batch, num_ends)
        self.tokens, self.parents = whole(batch, shape.num_nodes), whole(batch, shape.num_nodes)
        self.log_values, self.draft_log_probs = real(batch, shape.num_nodes), real(batch, shape.num_nodes)
        self.frontier_nodes, self.frontier_values = whole(batch, width), real(batch, width)
        self.words = whole(batch, width, num_ancestor_words(shape.num_positions))
        self.frontier_tokens, self.parent_rows = whole(depth + 1, batch, width), whole(depth + 1, batch, width)
        self.offered = whole(depth, batch, width, children)
        self.scores = real(depth, batch, width, children)
        self.features = torch.zeros(depth, batch, width, hidden_size, dtype=dtype, device=device)

    def restart(self) -> None:
        """Begin a draft without levels."""
        self._progress.zero_()

    def update_calibration(self, calibration: Calibration, result: VerifyResult) -> None:
        """Update a calibration from the target's tokens on the draft in these buffers, once.

        Without a draft, and on padding alone, nothing is changed. It can be recorded.
        """
        batch, length = result.tokens.shape
        depth = min(self.shape.depth, length)
        if use_triton(self.level.device):
            from eagle_ray.kernels.draft_level import update_fit

            return update_fit(self, calibration.fit, result.tokens, result.num_accepted, depth)
        kinds = (self.temperature[:batch] > 0).long()
        offered = Proposals(kinds, [self.offered_level(i, batch, self.shape.width if i else 1) for i in range(depth)])
        path = target_path(offered.levels, result.tokens, result.num_accepted, self.num_offered)
        calibration.update_on_path(offered, path, result.tokens)
        self.num_offered.masked_fill_((result.num_accepted >= 0).any(), 0)

    def offered_level(self, level: int, num: int, width: int) -> ProposalLevel:
        """Return what `width` nodes of a level of the first `num` sequences were offered."""
        frontier = None
        if level:
            rows = level, slice(num), slice(width)
            frontier = Frontier(self.frontier_tokens[rows], self.parent_rows[rows], self.frontier_values[:num, :width])
        return ProposalLevel(frontier, self.offered[level, :num, :width], self.scores[level, :num, :width])


class PaddedDraft:
    """One draft's part of the buffers: its first `batch` sequences, with frontiers of `width` nodes.

    Args:
        kind: kind of sampling.
    """

    def __init__(self, buffers: DraftBuffers, batch: int, width: int, kind: Kind):
        self._all, self.batch, self.width, self._kind = buffers, batch, width, kind
        self.shape = DraftShape(batch, width, buffers.shape.children, buffers.shape.depth)
        self.level = buffers.level
        self.slots, self.lengths, self.first = (x[:batch] for x in (buffers.slots, buffers.lengths, buffers.first))
        device = self.slots.device
        node = torch.arange(self.shape.num_nodes, device=device)
        self._depths = torch.where(node > buffers.shape.children, 1 + (node - 1 - buffers.shape.children).div(
            width * buffers.shape.children, rounding_mode="floor") + 1, (node > 0).long())  # fmt: skip
        self.position_depths = torch.arange(self.shape.num_positions, device=device) // width

    @property
    def sampling(self) -> SamplingBatch:
        of, rows = self._all, slice(self.batch)
        fields = (of.temperature, of.top_p, of.top_k, of.min_p, of.seed, of.ends)
        return SamplingBatch.bound(self._kind, *(x[rows] for x in fields))

    def clear(self, null_slot: int) -> None:
        """Leave a draft of padding alone, one level deep."""
        of = self._all
        for tensor in (of.lengths, of.first, of.tokens, of.frontier_tokens, of.parent_rows, of.words):
            tensor.zero_()
        of.slots.fill_(null_slot)
        of.level.fill_(1)

    def start(self, slots: Tensor, lengths: Tensor, first: Tensor, roots: Tensor, *chosen: Tensor) -> None:
        """Begin a draft.

        Args:
            slots, lengths, first: inputs of the largest batch, padded: levels may be padded to more sequences.
            roots: roots of this draft.
            chosen: sampling of this draft, as SamplingBatch.bound takes it.
        """
        of, rows = self._all, slice(self.batch)
        for own, new in zip((of.slots, of.lengths, of.first), (slots, lengths, first), strict=True):
            own.copy_(new)
        fields = (of.tokens[:, 0], of.temperature, of.top_p, of.top_k, of.min_p, of.seed, of.ends)
        for own, new in zip(fields, (roots, *chosen), strict=True):
            own[rows].copy_(new)
        of.restart()
        of.parents[rows, 0] = -1
        of.log_values[rows, 0] = of.draft_log_probs[rows, 0] = 0.0
        of.frontier_values[rows] = -torch.inf
        of.frontier_values[rows, 0] = 0.0
        of.frontier_nodes[rows] = 0

    @property
    def key(self) -> tuple:
        """Return what the recorded passes of this draft depend on."""
        return self.batch, self.width, self.shape.children, self._kind

    def next_frontier(self) -> Frontier:
        """Return the nodes that get children next, of the deepest level at most."""
        self.level.clamp_(max=self.shape.depth - 1)  # recording runs a level more often than there are levels
        return self.frontier(self.level)

    @property
    def words(self) -> Int[Tensor, "B W words"]:
        """Return the positions that each frontier node sees, over num_positions."""
        return self._all.words[: self.batch, : self.width, : num_ancestor_words(self.shape.num_positions)]

    def inputs(self) -> Float[Tensor, "B W H"]:
        """Return the features of the frontier's parents."""
        of = self._all
        before = of.features.index_select(0, (self.level - 1).clamp(min=0))[0, : self.batch, : self.width]
        rows = self.frontier(self.level).parent_rows[:, :, None].expand(-1, -1, before.shape[2])
        return before.gather(1, rows)

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
            features: from which they were ranked; F is 1 at the first level, and the width after it.
            scores: log-probabilities given their parents, before calibration; -inf is padding.
            own: the head's own log-probabilities.
        """
        of, num = self._all, features.shape[1]
        rows, level = slice(self.batch), self.level
        of.features[:, rows, :num].index_copy_(0, level, features[None])
        if use_triton(level.device) and num * self.shape.children <= MAX_LEVEL_NODES:
            self._append_fused(tokens, scores, own, calibration)
        else:
            self._append_nodes(tokens, scores, own, calibration)
        level += 1

    def _append_fused(self, tokens: Tensor, scores: Tensor, own: Tensor, calibration: Calibration | None) -> None:
        from eagle_ray.kernels.draft_level import append_level

        fitted = None if calibration is None else calibration.fit.parameters
        append_level(self._all, self.width, num_ancestor_words(self.shape.num_positions), tokens, scores, own, fitted)

    def _append_nodes(self, tokens: Tensor, scores: Tensor, own: Tensor, calibration: Calibration | None) -> None:
        of, rows, num, level = self._all, slice(self.batch), tokens.shape[1], self.level
        of.offered[:, rows, :num].index_copy_(0, level, tokens[None])
        of.scores[:, rows, :num].index_copy_(0, level, scores[None])
        of.num_offered.index_fill_(0, level, num)
        kinds = (of.temperature[rows] > 0).long()
        log_probs = scores if calibration is None else calibration.apply(level, kinds, scores)
        self._add_nodes(tokens, log_probs, own)

    def _add_nodes(self, tokens: Tensor, log_probs: Tensor, own: Tensor) -> None:
        of, rows, (_, num, children) = self._all, slice(self.batch), tokens.shape
        later = 1 + children + (self.level - 1) * self.width * children
        start = torch.where(self.level == 0, 1, later)
        values = of.frontier_values[rows, :num, None] + log_probs
        values = values.masked_fill(values.isnan(), -torch.inf)
        parents = of.frontier_nodes[rows, :num, None].expand(tokens.shape)
        own = own.masked_fill(own.isnan(), -torch.inf)
        index = start + torch.arange(num * children, device=start.device)
        for tensor, new in zip(
            (of.tokens, of.parents, of.log_values, of.draft_log_probs), (tokens, parents, values, own), strict=True
        ):
            tensor[rows].index_copy_(1, index, new.flatten(1))
        self._choose(tokens.flatten(1), values.flatten(1), start)

    def _choose(self, tokens: Int[Tensor, "B C"], values: Float[Tensor, "B C"], start: Int[Tensor, " 1"]) -> None:
        """Make the best of the level's nodes the next frontier; ends of sequences get no children."""
        of, rows, children = self._all, slice(self.batch), self.shape.children
        is_end = (tokens[:, :, None] == of.ends[rows, None]).any(2)
        values = values.masked_fill(is_end, -torch.inf)
        best, index = values.sort(dim=1, descending=True, stable=True)
        best, index = best[:, : self.width], index[:, : self.width]
        parent_rows = index // children
        of.frontier_values[rows, : self.width], of.frontier_nodes[rows, : self.width] = best, index + start
        following = self.level + 1
        chosen = tokens.gather(1, index)
        of.frontier_tokens[:, rows, : self.width].index_copy_(0, following, chosen[None])
        of.parent_rows[:, rows, : self.width].index_copy_(0, following, parent_rows[None])
        self._see(parent_rows)

    def _see(self, parent_rows: Int[Tensor, "B W"]) -> None:
        """Let each node of the next frontier see what its parent does, and itself."""
        words = self.words
        above = words.gather(1, parent_rows[:, :, None].expand_as(words))
        above = torch.where(self.level == 0, 0, above)
        position = self.level * self.width + torch.arange(self.width, device=words.device)
        word = torch.arange(words.shape[2], device=words.device)
        own = torch.where(word == (position // NODES_PER_WORD)[:, None], 1 << (position % NODES_PER_WORD)[:, None], 0)
        words.copy_(above | own)

    # Results, for as many levels as the host has had run.

    def tree(self, num: int, depth: int) -> DraftTree:
        """Return the trees of the first `num` sequences."""
        count = DraftShape(num, self.width, self.shape.children, depth).num_nodes
        of = self._all
        tokens, parents, values, own = (
            x[:num, :count] for x in (of.tokens, of.parents, of.log_values, of.draft_log_probs)
        )
        return DraftTree(tokens, parents, self._depths[:count].expand(num, -1), values, own, values > -torch.inf)

    def levels(self, num: int, depth: int) -> list[Float[Tensor, "B _ K"]]:
        """Return the log values of each level's nodes, by parent."""
        children, first = self.shape.children, self._all.log_values[:num, 1 : 1 + self.shape.children]
        rest = self._all.log_values[:num, 1 + children :].split(self.width * children, 1)[: depth - 1]
        return [first[:, None], *(level.unflatten(1, (self.width, children)) for level in rest)]

    def offered(self, kinds: Int[Tensor, " B"], num: int, depth: int) -> Proposals:
        """Return what was offered, for learning."""
        return Proposals(kinds, [self._all.offered_level(i, num, self.width if i else 1) for i in range(depth)])

    def features(self, num: int, depth: int) -> list[Float[Tensor, "B _ H"]]:
        return [self._all.features[i, :num, : self.width if i else 1] for i in range(depth)]

    def frontier(self, level: int | Tensor, num: int | None = None) -> Frontier:
        """Return the frontier that gets children at this level; its values are those of the newest one."""
        of, rows, width = self._all, slice(num or self.batch), self.width
        if isinstance(level, int):
            tokens, parent_rows = of.frontier_tokens[level], of.parent_rows[level]
        else:
            tokens, parent_rows = (x.index_select(0, level)[0] for x in (of.frontier_tokens, of.parent_rows))
        return Frontier(tokens[rows, :width], parent_rows[rows, :width], of.frontier_values[rows, :width])
