"""DraftTree: B trees of candidate tokens as six [B, N] tensors, and their packing into the rows of a verify pass.

Node 0 is the root, the last committed token. Invariants of every tree (``check_tree`` in the
tests): parents come before their children; nodes are in breadth-first order; a child's log value
never exceeds its parent's; siblings have different tokens; valid nodes are a prefix of each row.

        0 root          tokens   [the, cat, dog, sat]
       / \\              parents  [ -1,   0,   0,   1]
      1   2             depths   [  0,   1,   1,   2]
      |
      3
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from eagle_ray.kernels import tree_ops
from eagle_ray.tree.ancestor_words import diagonal_words, unpack_ancestors

TOKEN_STEP = 1 << 20  # in `sums`, between two tokens: more than a tree has nodes
_PADDING = (0, -1, 0, -torch.inf, -torch.inf, False)  # padding value of each of DraftTree's tensors


@dataclass(frozen=True, slots=True)
class DraftTree:
    """B trees, nodes in breadth-first order, node 0 is the root.

    Attributes:
        parents: index of the parent; -1 for the root and for padding.
        log_values: fp32, calibrated log-probability of the path from the root; 0 for the root, -inf
            for padding.
        draft_log_probs: fp32, the drafter's own log-probability of the node given its parent; 0 for
            the root, -inf for padding.
        valid: false for padding. Valid nodes are a prefix of each row, except among candidates that
            are not reranked yet.
    """

    tokens: Int[Tensor, "B N"]
    parents: Int[Tensor, "B N"]
    depths: Int[Tensor, "B N"]
    log_values: Float[Tensor, "B N"]
    draft_log_probs: Float[Tensor, "B N"]
    valid: Bool[Tensor, "B N"]

    @classmethod
    def of_roots(cls, roots: Int[Tensor, " B"]) -> DraftTree:
        """Return trees that have only a root: a step of plain decoding."""
        tokens = roots[:, None]
        zeros = torch.zeros_like(tokens)
        values = zeros.float()
        return cls(
            tokens=tokens,
            parents=zeros - 1,
            depths=zeros,
            log_values=values,
            draft_log_probs=values,
            valid=torch.ones_like(tokens, dtype=torch.bool),
        )

    @property
    def num_nodes(self) -> int:
        """Return N, padding and root included."""
        return self.tokens.shape[1]

    def rerank(self, keep: Bool[Tensor, "B N"], num_nodes: int) -> DraftTree:
        """Return the trees of the kept nodes, [B, num_nodes] (EAGLE-2, section 4.2).

        Args:
            keep: true for kept nodes; it must include the root, and the ancestors of every kept
                node.
            num_nodes: size of the result, at least the number of kept nodes of each tree.
        """
        if self.num_nodes == 1:
            return self
        if tree_ops.available(keep.device):
            tensors = tree_ops.select_nodes(self.tensors, keep, min(num_nodes, self.num_nodes))
            return DraftTree(*tensors)
        return self.rerank_portably(keep, num_nodes)

    def rerank_portably(self, keep: Bool[Tensor, "B N"], num_nodes: int) -> DraftTree:
        """Compute `rerank` with torch operations, on any device."""
        # Kept nodes stay breadth-first; what is not kept comes last, as no node.
        index = torch.arange(self.num_nodes, device=keep.device)
        index = torch.where(keep, index, self.num_nodes)
        in_order = index.sort(1).values
        return self.select(in_order[:, :num_nodes])

    def spread(self, members: Int[Tensor, " M"], roots: Int[Tensor, " B"]) -> DraftTree:
        """Spread these trees over a batch of B: tree m becomes tree members[m], all other trees are roots alone."""
        roots_alone = DraftTree.of_roots(roots)
        spread = []
        for own, alone, padding in zip(self.tensors, roots_alone.tensors, _PADDING, strict=True):
            rows = own.new_full((len(roots), self.num_nodes), padding)
            rows[:, 0] = alone[:, 0]
            spread.append(rows.index_copy(0, members, own))
        return DraftTree(*spread)

    def head(self, num_trees: int) -> DraftTree:
        """Return the first num_trees trees."""
        return DraftTree(*(tensor[:num_trees] for tensor in self.tensors))

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Return all tensors, in the order of the constructor's arguments."""
        return (
            self.tokens,
            self.parents,
            self.depths,
            self.log_values,
            self.draft_log_probs,
            self.valid,
        )

    def sums(self) -> Int[Tensor, " B"]:
        """Return a checksum of each tree over its tokens and parents."""
        # An odd weight for each place, so that no two places can be exchanged.
        weights = torch.arange(1, 2 * self.num_nodes, 2, device=self.tokens.device)
        nodes = torch.add(self.parents, self.tokens, alpha=TOKEN_STEP)
        weighted = nodes * weights
        return (weighted * self.valid).sum(1)

    def to(self, device: torch.device | str) -> DraftTree:
        """Return the trees on another device."""
        return DraftTree(*(tensor.to(device, non_blocking=True) for tensor in self.tensors))

    def best(self, num_nodes: int) -> Int[Tensor, "B M"]:
        """Return the indices of the most valuable nodes of each tree, in breadth-first order; N stands for no node.

        Values must not rise along a path, and parents must come before their children.
        """
        count = self.num_nodes
        index = torch.arange(count, device=self.tokens.device)
        nodes = index.expand_as(self.tokens)
        if num_nodes < count:
            by_value = self.log_values.sort(dim=1, descending=True, stable=True).indices
            nodes = by_value[:, :num_nodes]

        # Sort by depth, then by index.
        last = count * count  # the key of padding
        keys = self.depths * count + index
        keys = torch.where(self.valid, keys, last)
        keys = keys.gather(1, nodes)
        keys = keys.sort(1).values
        return torch.where(keys < last, keys % count, count)

    def select(self, nodes: Int[Tensor, "B M"]) -> DraftTree:
        """Return the trees reduced to the given nodes.

        Args:
            nodes: indices of the nodes, parents before their children; N for no node.
        """
        batch, num_nodes = self.tokens.shape
        is_node = nodes < num_nodes
        nodes = nodes.clamp(max=num_nodes - 1)

        # The new index of each old node; what is no node is written to a last column.
        index_of = nodes.new_zeros(batch, num_nodes + 1)
        new_index = torch.arange(nodes.shape[1], device=nodes.device)
        old_index = torch.where(is_node, nodes, num_nodes)
        index_of.scatter_(1, old_index, new_index.expand_as(nodes))

        # A parent is selected with its child, so it has a new index. Roots have no parent.
        old_parents = self.parents.gather(1, nodes)
        has_parent = is_node & (old_parents >= 0)
        parents = index_of.gather(1, old_parents.clamp(min=0))

        tokens = self.tokens.gather(1, nodes)
        depths = self.depths.gather(1, nodes)
        log_values = self.log_values.gather(1, nodes)
        draft_log_probs = self.draft_log_probs.gather(1, nodes)
        return DraftTree(
            tokens=torch.where(is_node, tokens, 0),
            parents=torch.where(has_parent, parents, -1),
            depths=torch.where(is_node, depths, 0),
            log_values=torch.where(is_node, log_values, -torch.inf),
            draft_log_probs=torch.where(is_node, draft_log_probs, -torch.inf),
            valid=is_node,
        )

    def ancestors(self, max_depth: int) -> Bool[Tensor, "B N N"]:
        """Return a mask [b, i, j] that is true if node j is node i or an ancestor of it.

        Args:
            max_depth: upper bound on the depths.
        """
        if self.num_nodes == 1:
            return torch.ones(len(self.tokens), 1, 1, dtype=torch.bool, device=self.tokens.device)
        if tree_ops.available(self.parents.device):
            return tree_ops.ancestors(self.parents)
        return unpack_ancestors(self.ancestor_words(max_depth), self.num_nodes)

    def ancestor_words(self, max_depth: int) -> Int[Tensor, "B N words"]:
        """Return `ancestors` as bits of int64 words, by pointer doubling."""
        batch, num_nodes = self.tokens.shape
        words = diagonal_words(num_nodes, self.tokens.device)
        words = words.expand(batch, -1, -1)
        if num_nodes == 1:
            return words

        # Each turn a node sees what the node `distance` levels above it sees; roots see themselves.
        node = torch.arange(num_nodes, device=self.tokens.device)
        jump = torch.where(self.parents >= 0, self.parents, node)
        distance = 1
        while True:
            seen_from = jump[:, :, None].expand_as(words)
            words = words | words.gather(1, seen_from)
            distance *= 2
            if distance > max_depth:
                return words
            jump = jump.gather(1, jump)

    def confidences(self) -> Float[Tensor, "B N"]:
        """Return each node's calibrated probability given that its parent is accepted; 1 for roots, 0 for padding."""
        parents = self.parents.clamp(min=0)
        parent_values = self.log_values.gather(1, parents)
        has_parent = self.parents >= 0
        parent_values = torch.where(has_parent, parent_values, 0.0)
        ratio = (self.log_values - parent_values).exp()
        return torch.where(self.valid, ratio, 0.0)

    def draft_confidences(self) -> Float[Tensor, "B N"]:
        """Return the drafter's own probability of each node given its parent."""
        return self.draft_log_probs.exp()

    def pack(
        self, lengths: Int[Tensor, " B"], num_rows: int, sizes: list[int] | None = None
    ) -> VerifyRows:
        """Pack the valid nodes into the rows of one pass.

        If num_rows is B * N, row b * N + i is node i of tree b, and padding nodes are padding rows.
        Otherwise the trees follow one another and padding rows come last.

        Args:
            lengths: cached tokens of each sequence.
            num_rows: number of rows, at least the number of valid nodes.
            sizes: number of valid nodes of each tree, if the host knows it.
        """
        if tree_ops.available(lengths.device):
            tokens, positions, seq, node, row_of = tree_ops.pack_rows(
                self.tensors, lengths, num_rows
            )
            return VerifyRows(tokens, positions, seq, node, row_of, sizes)
        return self.pack_portably(lengths, num_rows, sizes)

    def pack_portably(
        self, lengths: Int[Tensor, " B"], num_rows: int, sizes: list[int] | None = None
    ) -> VerifyRows:
        """Compute `pack` with torch operations, on any device."""
        batch, num_nodes = self.tokens.shape
        device = lengths.device
        positions = lengths[:, None] + self.depths
        tree = torch.arange(batch, device=device)
        tree = tree[:, None].expand(batch, num_nodes)
        seq = torch.where(self.valid, tree, -1)
        node = torch.arange(num_nodes, device=device)
        node = node.expand(batch, num_nodes)

        # The rectangle: every node has a row of its own, padding included.
        if num_rows == batch * num_nodes:
            row_of = torch.arange(num_rows, device=device)
            return VerifyRows(
                tokens=self.tokens.reshape(-1),
                positions=positions.reshape(-1),
                seq=seq.reshape(-1),
                node=node.reshape(-1),
                row_of=row_of.view(batch, num_nodes),
                sizes=sizes,
            )

        # Packed: padding nodes are written to a last row, which is cut off.
        counts = self.valid.sum(1)
        first = counts.cumsum(0) - counts
        row = first[:, None] + node
        row_of = torch.where(self.valid, row, num_rows)
        return VerifyRows(
            tokens=_place(self.tokens, row_of, num_rows, 0),
            positions=_place(positions, row_of, num_rows, 0),
            seq=_place(seq, row_of, num_rows, -1),
            node=_place(node, row_of, num_rows, 0),
            row_of=row_of.clamp(max=num_rows - 1),
            sizes=sizes,
        )


def _place(
    values: Int[Tensor, "B N"], row_of: Int[Tensor, "B N"], num_rows: int, padding: int
) -> Int[Tensor, " R"]:
    """Return each node's value at its row, padding elsewhere; row num_rows is dropped."""
    rows = values.new_full((num_rows + 1,), padding)
    rows = rows.scatter(0, row_of.reshape(-1), values.reshape(-1))
    return rows[:num_rows]


@dataclass(frozen=True, slots=True)
class VerifyRows:
    """Trees packed into the R rows of one target pass.

    Attributes:
        positions: position of each row in its sequence; a root's is the number of cached tokens.
        seq: sequence of each row; -1 for padding rows.
        node: index of each row's node in its tree.
        row_of: row of each node; arbitrary for padding nodes.
        sizes: number of nodes of each tree, if the host knows it.
    """

    tokens: Int[Tensor, " R"]
    positions: Int[Tensor, " R"]
    seq: Int[Tensor, " R"]
    node: Int[Tensor, " R"]
    row_of: Int[Tensor, "B N"]
    sizes: list[int] | None = None

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Return all tensors, in the order of the constructor's arguments."""
        return self.tokens, self.positions, self.seq, self.node, self.row_of

    @property
    def is_rectangle(self) -> bool:
        """Return whether row b * N + i is node i of tree b."""
        return self.tokens.shape[0] == self.row_of.numel()


@dataclass(frozen=True, slots=True)
class VerifyResult:
    """The accepted path of each tree. D1 is the longest possible draft path plus one.

    Attributes:
        accepted_nodes: indices of the nodes on the path, beginning with the root, 0; -1 is padding.
        num_accepted: accepted drafts, root and bonus token excluded; -1 for a padding tree without
            root.
        tokens: accepted drafts, then the bonus token; the first num_accepted + 1 of each row are
            valid.
    """

    accepted_nodes: Int[Tensor, "B D1"]
    num_accepted: Int[Tensor, " B"]
    tokens: Int[Tensor, "B D1"]
