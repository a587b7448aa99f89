"""DraftTree: B trees of candidate tokens as six [B, N] tensors, their packing into the rows of one verify pass, and the
accepted paths.

Node 0 is the root, the last committed token. Invariants of every tree (``check_tree`` in the tests): parents come
before their children; nodes are in breadth-first order; a child's log value never exceeds its parent's; siblings have
different tokens; valid nodes are a prefix of each row.

        0 root          tokens   [the, cat, dog, sat]
       / \\              parents  [ -1,   0,   0,   1]
      1   2             depths   [  0,   1,   1,   2]
      |
      3

The target samples a token at every node. From the root, the accepted path follows the child that has the sampled token.
If no child has it, the sampled token is the bonus token. So every emitted token is the target's own, greedy or sampled.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from eagle_ray.kernels import tree_ops

NODES_PER_WORD = 64  # of a mask of ancestors: node j is bit j % 64 of word j // 64
TOKEN_STEP = 1 << 20  # in `sums`, between two tokens: more than a tree has nodes


@dataclass(frozen=True, slots=True)
class DraftTree:
    """B trees, nodes in breadth-first order, node 0 is the root.

    Attributes:
        parents: index of the parent; -1 for the root and for padding.
        log_values: fp32, calibrated log-probability of the path from the root; 0 for the root, -inf for padding.
        draft_log_probs: fp32, the drafter's own log-probability of the node given its parent; 0 and -inf likewise.
        valid: false for padding; true values are a prefix of each row, but for candidates that were not reranked yet.
    """

    tokens: Int[Tensor, "B N"]
    parents: Int[Tensor, "B N"]
    depths: Int[Tensor, "B N"]
    log_values: Float[Tensor, "B N"]
    draft_log_probs: Float[Tensor, "B N"]
    valid: Bool[Tensor, "B N"]

    @classmethod
    def of_roots(cls, roots: Int[Tensor, " B"]) -> DraftTree:
        """Return trees of one root each: a step of plain decoding."""
        tokens = roots[:, None]
        zeros = torch.zeros_like(tokens)
        return cls(tokens, zeros - 1, zeros, zeros.float(), zeros.float(), torch.ones_like(tokens, dtype=torch.bool))

    @property
    def num_nodes(self) -> int:
        """Return N, padding and root included."""
        return self.tokens.shape[1]

    def rerank(self, keep: Bool[Tensor, "B N"], num_nodes: int) -> DraftTree:
        """Return the trees of the kept nodes, [B, num_nodes] (EAGLE-2, section 4.2).

        Args:
            keep: must hold the root, and the ancestors of every node that it holds.
            num_nodes: at least the number of kept nodes of each tree.
        """
        if self.num_nodes == 1:
            return self
        if tree_ops.available(keep.device):
            return DraftTree(*tree_ops.select_nodes(self.tensors, keep, min(num_nodes, self.num_nodes)))
        return self.rerank_portably(keep, num_nodes)

    def rerank_portably(self, keep: Bool[Tensor, "B N"], num_nodes: int) -> DraftTree:
        """Do what `rerank` does by torch, on any device."""
        index = torch.arange(self.num_nodes, device=keep.device)
        return self.select(torch.where(keep, index, self.num_nodes).sort(1).values[:, :num_nodes])

    def spread(self, members: Int[Tensor, " M"], roots: Int[Tensor, " B"]) -> DraftTree:
        """Return a batch of B trees: tree members[m] is tree m of these, every other tree is its root alone."""
        batch = DraftTree.of_roots(roots)

        def place(own: Tensor, alone: Tensor, padding: int | float) -> Tensor:
            rows = own.new_full((len(roots), self.num_nodes), padding)
            rows[:, 0] = alone[:, 0]
            return rows.index_copy(0, members, own)

        return DraftTree(
            tokens=place(self.tokens, batch.tokens, 0),
            parents=place(self.parents, batch.parents, -1),
            depths=place(self.depths, batch.depths, 0),
            log_values=place(self.log_values, batch.log_values, -torch.inf),
            draft_log_probs=place(self.draft_log_probs, batch.draft_log_probs, -torch.inf),
            valid=place(self.valid, batch.valid, False),
        )

    def head(self, num_trees: int) -> DraftTree:
        """Return the first num_trees trees."""
        return DraftTree(*(tensor[:num_trees] for tensor in self.tensors))

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Return all tensors, in the order of the constructor's arguments."""
        return self.tokens, self.parents, self.depths, self.log_values, self.draft_log_probs, self.valid

    def sums(self) -> Int[Tensor, " B"]:
        """Return a number for each tree that differs, most likely, where a token, a parent or a node's place does."""
        weights = torch.arange(1, 2 * self.num_nodes, 2, device=self.tokens.device)
        nodes = torch.add(self.parents, self.tokens, alpha=TOKEN_STEP) * weights
        return (nodes * self.valid).sum(1)

    def to(self, device: torch.device | str) -> DraftTree:
        """Return the trees on another device."""
        return DraftTree(*(tensor.to(device, non_blocking=True) for tensor in self.tensors))

    def best(self, num_nodes: int) -> Int[Tensor, "B M"]:
        """Return the indices of the most valuable nodes of each tree, breadth-first; N, past them, for no node.

        Values must not rise along a path, and parents come before their children.
        """
        count = self.num_nodes
        nodes = torch.arange(count, device=self.tokens.device).expand_as(self.tokens)
        if num_nodes < count:
            nodes = self.log_values.sort(dim=1, descending=True, stable=True).indices[:, :num_nodes]
        last = count * count  # the key of padding
        keys = torch.where(self.valid, self.depths * count + torch.arange(count, device=nodes.device), last)
        keys = keys.gather(1, nodes).sort(1).values
        return torch.where(keys < last, keys % count, count)

    def select(self, nodes: Int[Tensor, "B M"]) -> DraftTree:
        """Return the subtrees of the given nodes. nodes: indices, parents before their children; N for no node."""
        batch, num_nodes = self.tokens.shape
        is_node = nodes < num_nodes
        nodes = nodes.clamp(max=num_nodes - 1)
        new_index = torch.arange(nodes.shape[1], device=nodes.device).expand_as(nodes)
        index_of = nodes.new_zeros(batch, num_nodes + 1)
        index_of.scatter_(1, torch.where(is_node, nodes, num_nodes), new_index)
        old_parents = self.parents.gather(1, nodes)
        parents = index_of.gather(1, old_parents.clamp(min=0))
        return DraftTree(
            tokens=torch.where(is_node, self.tokens.gather(1, nodes), 0),
            parents=torch.where(is_node & (old_parents >= 0), parents, -1),
            depths=torch.where(is_node, self.depths.gather(1, nodes), 0),
            log_values=torch.where(is_node, self.log_values.gather(1, nodes), -torch.inf),
            draft_log_probs=torch.where(is_node, self.draft_log_probs.gather(1, nodes), -torch.inf),
            valid=is_node,
        )

    def ancestors(self, max_depth: int) -> Bool[Tensor, "B N N"]:
        """Return a mask [b, i, j]: node j is node i or an ancestor of it. max_depth: a bound on the depths."""
        if self.num_nodes == 1:
            return torch.ones(len(self.tokens), 1, 1, dtype=torch.bool, device=self.tokens.device)
        if tree_ops.available(self.parents.device):
            return tree_ops.ancestors(self.parents)
        return unpack_ancestors(self.ancestor_words(max_depth), self.num_nodes)

    def ancestor_words(self, max_depth: int) -> Int[Tensor, "B N words"]:
        """Return `ancestors` as bits of int64 words, by pointer doubling."""
        batch, num_nodes = self.tokens.shape
        words = _diagonal(num_nodes, self.tokens.device).expand(batch, -1, -1)
        if num_nodes == 1:
            return words
        jump = torch.where(self.parents >= 0, self.parents, torch.arange(num_nodes, device=self.tokens.device))
        distance = 1
        while True:
            words = words | words.gather(1, jump[:, :, None].expand_as(words))
            distance *= 2
            if distance > max_depth:
                return words
            jump = jump.gather(1, jump)

    def confidences(self) -> Float[Tensor, "B N"]:
        """Return each node's calibrated probability given that its parent is accepted; 1 for roots, 0 for padding."""
        parent_values = self.log_values.gather(1, self.parents.clamp(min=0))
        ratio = (self.log_values - torch.where(self.parents >= 0, parent_values, 0.0)).exp()
        return torch.where(self.valid, ratio, 0.0)

    def draft_confidences(self) -> Float[Tensor, "B N"]:
        """Return the drafter's own probability of each node given its parent."""
        return self.draft_log_probs.exp()

    def pack(self, lengths: Int[Tensor, " B"], num_rows: int, sizes: list[int] | None = None) -> VerifyRows:
        """Lay the valid nodes out as the rows of one pass.

        If num_rows is B * N, row b * N + i is node i of tree b, and padding nodes are padding rows. Otherwise the trees
        follow one another and padding rows come last.

        Args:
            lengths: cached tokens of each sequence.
            num_rows: at least the number of valid nodes.
            sizes: valid nodes of each tree, if the host knows them.
        """
        batch, num_nodes = self.tokens.shape
        positions = lengths[:, None] + self.depths
        seq = torch.arange(batch, device=lengths.device)[:, None].expand(batch, num_nodes)
        node = torch.arange(num_nodes, device=lengths.device).expand(batch, num_nodes)
        seq = torch.where(self.valid, seq, -1)
        if num_rows == batch * num_nodes:
            row_of = torch.arange(num_rows, device=lengths.device).view(batch, num_nodes)
            tokens, positions, seq, node = (x.reshape(-1) for x in (self.tokens, positions, seq, node))
            return VerifyRows(tokens, positions, seq, node, row_of, sizes)
        counts = self.valid.sum(1)
        first = (counts.cumsum(0) - counts)[:, None]
        row_of = torch.where(self.valid, first + node, num_rows)

        def place(values: Int[Tensor, "B N"], padding: int) -> Int[Tensor, " R"]:
            rows = values.new_full((num_rows + 1,), padding)
            return rows.scatter(0, row_of.reshape(-1), values.reshape(-1))[:num_rows]

        tensors = (place(self.tokens, 0), place(positions, 0), place(seq, -1), place(node, 0))
        return VerifyRows(*tensors, row_of.clamp(max=num_rows - 1), sizes)


@dataclass(frozen=True, slots=True)
class VerifyRows:
    """Trees packed into the R rows of one target pass.

    Attributes:
        positions: the row's position in its sequence; the root's is the number of cached tokens.
        seq: the row's sequence; -1 for padding rows.
        node: the row's node in that sequence's tree.
        row_of: the row of each node; any row for padding nodes.
        sizes: nodes of each tree, if the host knows them.
    """

    tokens: Int[Tensor, " R"]
    positions: Int[Tensor, " R"]
    seq: Int[Tensor, " R"]
    node: Int[Tensor, " R"]
    row_of: Int[Tensor, "B N"]
    sizes: list[int] | None = None

    @property
    def is_rectangle(self) -> bool:
        """Return whether row b * N + i is node i of tree b."""
        return self.tokens.shape[0] == self.row_of.numel()


@dataclass(frozen=True, slots=True)
class VerifyResult:
    """The accepted path of each tree. D1 is the longest possible draft path plus one.

    Attributes:
        accepted_nodes: nodes of the path; the first is 0, the root; -1 is padding.
        num_accepted: accepted drafts, root and bonus token excluded; -1 for a padding tree without root.
        tokens: the accepted drafts, then the bonus token: the first num_accepted + 1 of each row are valid.
    """

    accepted_nodes: Int[Tensor, "B D1"]
    num_accepted: Int[Tensor, " B"]
    tokens: Int[Tensor, "B D1"]


def accept_path(tree: DraftTree, rows: VerifyRows, picks: Int[Tensor, " R"], max_depth: int) -> VerifyResult:
    """Return the longest path of each tree on which every node has the token that the target sampled at its parent.

    Args:
        picks: the token that the target sampled after each row.
        max_depth: a bound on the depths, D1 - 1.
    """
    if tree_ops.available(picks.device):
        parts = tree.tokens, tree.parents, tree.depths, tree.valid, rows.row_of, picks, max_depth + 1
        return VerifyResult(*tree_ops.walk_paths(*parts))
    return accept_path_portably(tree, rows, picks, max_depth)


def accept_path_portably(tree: DraftTree, rows: VerifyRows, picks: Int[Tensor, " R"], max_depth: int) -> VerifyResult:
    """Do what `accept_path` does by torch, on any device."""
    picks_at = picks[rows.row_of]
    if max_depth == 0:
        return VerifyResult(torch.zeros_like(picks_at), torch.zeros_like(picks_at[:, 0]), picks_at)
    accepted = accepted_mask(tree, picks_at, max_depth)
    nodes = torch.full((tree.tokens.shape[0], max_depth + 2), -1, dtype=torch.int64, device=picks.device)
    index = torch.arange(tree.num_nodes, device=picks.device).expand_as(tree.tokens)
    dump = max_depth + 1  # rejected nodes are written to a last column, which is cut off
    nodes = nodes.scatter(1, torch.where(accepted, tree.depths, dump), index)[:, : max_depth + 1]
    return VerifyResult(
        accepted_nodes=nodes,
        num_accepted=accepted.sum(1) - 1,
        tokens=picks_at.gather(1, nodes.clamp(min=0)),
    )


def accepted_mask(tree: DraftTree, picks_at: Int[Tensor, "B N"], max_depth: int) -> Bool[Tensor, "B N"]:
    """Return the nodes of the accepted paths, roots included."""
    parents = tree.parents.clamp(min=0)
    picked = (tree.tokens == picks_at.gather(1, parents)) & tree.valid
    picked[:, 0] = tree.valid[:, 0]
    accepted = picked
    for _ in range(max_depth - 1):
        accepted = picked & accepted.gather(1, parents)
    return accepted


def num_ancestor_words(num_nodes: int) -> int:
    """Return the words of a node's mask."""
    return -(-num_nodes // NODES_PER_WORD)


def _diagonal(num_nodes: int, device: torch.device | str) -> Int[Tensor, "N words"]:
    """Return the mask in which each of N nodes sees its own position."""
    node = torch.arange(num_nodes, device=device)
    words = torch.zeros(num_nodes, num_ancestor_words(num_nodes), dtype=torch.int64, device=device)
    return words.scatter_(1, (node // NODES_PER_WORD)[:, None], (1 << (node % NODES_PER_WORD))[:, None])


def pack_ancestors(seen: Bool[Tensor, "*rows M"]) -> Int[Tensor, "*rows words"]:
    """Return masks as words, which a GPU's attention reads: nodes 0, 1 and 3 are 0b1011."""
    padding = num_ancestor_words(seen.shape[-1]) * NODES_PER_WORD - seen.shape[-1]
    bits = F.pad(seen.to(torch.int64), (0, padding)).unflatten(-1, (-1, NODES_PER_WORD))
    return (bits << torch.arange(NODES_PER_WORD, device=seen.device)).sum(-1)


def unpack_ancestors(words: Int[Tensor, "*rows words"], num_nodes: int) -> Bool[Tensor, "*rows M"]:
    """Return the bits of masks."""
    bits = words[..., None] >> torch.arange(min(num_nodes, NODES_PER_WORD), device=words.device) & 1
    return bits.flatten(-2)[..., :num_nodes].bool()
