"""EnsembleCalibration: map the probabilities of several drafters for a child to the rate at which
the target samples it.

A child that only one drafter proposes has that drafter's probability; probabilities of several
drafters are combined:

    P = sigmoid(sum over drafters that propose it of a * logit(p) + sum over the others of b + c)

on conditional probabilities, with weights per level and kind of row, fitted to the target's
samples, separately for drafters that propose a child alone and together. The start is the mean of
the logits. P is at most 1, so values never rise along a path. As in Calibration, all proposed
children of a reached node are observed, verified or not.

A child that a drafter lacks counts against it only if the drafter proposes another child for that
sequence. Steps in which no model drafts have weights of their own, because there the model might
have proposed a lookup's child, too.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import logsigmoid

from eagle_ray.kernels import cpu_ops
from eagle_ray.methods.calibration import NUM_ROW_KINDS, OnlineFit, logit
from eagle_ray.tree.draft_tree import DraftTree
from eagle_ray.tree.tree_merge import Merged, merge_trees


@dataclass(frozen=True, slots=True)
class BlendedTree:
    """The draft trees of several drafters, merged into one tree a row, with a value for each node.

    Attributes:
        tree: the merged tree, whose log values are the combined ones.
        log_probs: log-probability of a node given its parent by each drafter; -inf if that drafter
            lacks the node.
        extra: log values, by depth, of the nodes that the model does not propose; -inf for all
            others.
    """

    tree: DraftTree
    log_probs: Float[Tensor, "B N A"]
    extra: Float[Tensor, "D B N"]


class EnsembleCalibration:
    """Weights that combine the probabilities of `num_drafters` drafters, for each of the first `levels` levels."""

    def __init__(self, levels: int, num_drafters: int, device: torch.device | str = "cpu"):
        alone = [1.0] * num_drafters
        together = [1 / num_drafters] * num_drafters
        lacks = [0.0] * num_drafters
        slopes = 2 * num_drafters
        offsets = num_drafters + 1
        self.fit = OnlineFit(
            [*alone, *together, *lacks, 0.0],
            [*[0.0] * slopes, *[-12.0] * offsets],
            [*[6.0] * slopes, *[12.0] * offsets],
            levels=levels,
            sets=2 * NUM_ROW_KINDS,
            precision=10.0,
            device=device,
        )

    @property
    def num_levels(self) -> int:
        return len(self.fit.parameters)

    @staticmethod
    def sets(kinds: Int[Tensor, " B"], has_model: bool = True) -> Int[Tensor, " B"]:
        """Return the index of the weights that each row uses: by its kind, and by whether a model drafted in this step.

        Args:
            kinds: 1 for sampled rows, 0 for greedy ones.
            has_model: whether a model drafted, or lookups alone.
        """
        return kinds if has_model else kinds + NUM_ROW_KINDS

    def apply(
        self, depths: Int[Tensor, "B N"], sets: Int[Tensor, " B"], log_probs: Float[Tensor, "B N A"]
    ) -> Float[Tensor, "B N"]:
        """Combine the drafters' probabilities of each node into the log-probability that the target samples it next.

        Args:
            depths: depths of the nodes, 1 for the roots' children; roots may have any value. Depths
                past the last level have its weights.
            sets: set of weights of each row, from `sets()`.
            log_probs: conditional log-probability of a node by each drafter, already calibrated for
                that drafter; -inf if the drafter lacks the node. The root comes first.
        """
        levels = (depths - 1).clamp(0, self.num_levels - 1)
        weights = self.fit.parameters[levels, sets[:, None]]
        return logsigmoid((_features(log_probs) * weights).sum(-1))

    def merge(
        self,
        trees: Sequence[DraftTree | None],
        max_depth: int,
        sets: Int[Tensor, " B"],
        model: int | None = None,
    ) -> BlendedTree:
        """Merge trees on the same roots and give every node its value.

        Args:
            trees: trees of each drafter; None if it did not draft.
            max_depth: an upper bound on the depths of their nodes.
            sets: set of weights of each row, from `sets()`.
            model: index of the drafter that is the model; `BlendedTree.extra` has the nodes it does
                not propose. None puts all nodes there.
        """
        drafted = [tree for tree in trees if tree is not None]
        device = drafted[0].tokens.device
        if cpu_ops.available(device, torch.float32) and cpu_ops.has_function("merge_blended"):
            return self._merge_natively(trees, max_depth, sets, -1 if model is None else model)

        return self.value(merge_trees(trees, max_depth), max_depth, sets, model)

    def value(
        self,
        merged: Merged,
        max_depth: int,
        sets: Int[Tensor, " B"],
        model: int | None,
        num_nodes: int | None = None,
    ) -> BlendedTree:
        """Return the tree of an earlier merge with calibrated values of its nodes. Arguments as for `merge`.

        Args:
            num_nodes: maximum nodes to return. If there are more, the best ones remain,
                breadth-first. None returns all, in their order.
        """
        log_probs = merged.log_probs_by_drafter
        conditional = self.apply(merged.tree.depths, sets, log_probs)
        tree = merged.with_log_probs(conditional, max_depth)
        if num_nodes is not None:
            nodes = tree.best(num_nodes)
            index = nodes.clamp(max=tree.num_nodes - 1)[:, :, None]
            log_probs = log_probs.gather(1, index.expand(-1, -1, log_probs.shape[2]))
            tree = tree.select(nodes)

        # The log values by depth, without the model's nodes.
        values = tree.log_values
        if model is not None:
            values = values.masked_fill(log_probs[..., model] > -torch.inf, -torch.inf)
        depths = torch.arange(1, max_depth + 1, device=values.device)[:, None, None]
        extra = torch.where(tree.depths == depths, values, -torch.inf)
        return BlendedTree(tree, log_probs, extra)

    def _merge_natively(
        self, trees: Sequence[DraftTree | None], max_depth: int, sets: Int[Tensor, " B"], model: int
    ) -> BlendedTree:
        """Compute `merge` in C++: in torch its 30 small operations take about a millisecond."""
        weights = self.fit.parameters
        num_drafters = len(trees)
        rows = len(sets)

        # What the kernel writes, for as many nodes as there may be.
        num_nodes = sum(tree.num_nodes for tree in trees if tree is not None)
        tokens = torch.zeros(rows, num_nodes, dtype=torch.int64)
        parents = torch.full((rows, num_nodes), -1)
        depths = torch.zeros(rows, num_nodes, dtype=torch.int64)
        log_values = torch.full((rows, num_nodes), -torch.inf)
        draft_log_probs = torch.full((rows, num_nodes), -torch.inf)
        valid = torch.zeros(rows, num_nodes, dtype=torch.bool)
        log_probs = torch.full((rows, num_nodes, num_drafters), -torch.inf)
        extra = torch.full((max_depth, rows, num_nodes), -torch.inf)
        largest = ctypes.c_int64()
        written = [tokens, parents, depths, log_values, draft_log_probs, valid, log_probs, extra]
        pointers = [tensor.data_ptr() for tensor in written]
        out = cpu_ops.MergedTrees(rows, num_nodes, max_depth, *pointers, ctypes.addressof(largest))

        # What it reads, which must last until it returns.
        candidates = (cpu_ops.CandidateTree * num_drafters)()
        lasting = []
        for i, tree in enumerate(trees):
            if tree is not None:
                tensors = [tensor.contiguous() for tensor in tree.tensors]
                lasting.append(tensors)
                candidates[i] = cpu_ops.CandidateTree(
                    tree.num_nodes, *(tensor.data_ptr() for tensor in tensors)
                )
        blend = cpu_ops.Blend(
            num_drafters, *weights.shape[:2], model, weights.data_ptr(), sets.data_ptr()
        )
        cpu_ops.function_for("merge_blended")(candidates, blend, out, cpu_ops.num_threads())

        real = slice(largest.value)
        merged = DraftTree(
            tokens=tokens[:, real],
            parents=parents[:, real],
            depths=depths[:, real],
            log_values=log_values[:, real],
            draft_log_probs=draft_log_probs[:, real],
            valid=valid[:, real],
        )
        return BlendedTree(merged, log_probs[:, real], extra[:, :, real])

    def update(
        self,
        sets: Int[Tensor, " B"],
        log_probs: Float[Tensor, "B N A"],
        offered: Bool[Tensor, "L B N"],
        picked: Bool[Tensor, "L B N"],
    ) -> None:
        """Fit to what the target sampled after one node per row on each of the first L levels.

        Args:
            sets: set of weights of each row, from `sets()`.
            log_probs: as passed to `apply`.
            offered: true for the proposed children of the node on each level; false everywhere if
                the node was not reached.
            picked: true for the child with the token that the target sampled.
        """
        x = _features(log_probs)
        num_levels = len(offered)
        num_weights = x.shape[2]
        weights = self.fit.parameters[:num_levels, sets]
        predicted = torch.sigmoid(torch.einsum("bnp,lbp->lbn", x, weights))

        # Gradient and Fisher information of each row, by level.
        missed = offered * (picked.float() - predicted)
        gradient = torch.einsum("lbn,bnp->lbp", missed, x)
        pairs = (x[..., None] * x[..., None, :]).flatten(2)
        variance = offered * predicted * (1 - predicted)
        fisher = torch.einsum("lbn,bnq->lbq", variance, pairs)

        # Summed over the rows of each set of weights.
        in_set = torch.stack([sets == number for number in range(2 * NUM_ROW_KINDS)]).float()
        set_fisher = (in_set @ fisher).view(num_levels, 2 * NUM_ROW_KINDS, num_weights, num_weights)
        counts = offered.any(2).float() @ in_set.T
        self.fit.update(in_set @ gradient, set_fisher, counts)


def children_on_path(
    tree: DraftTree, picks: Int[Tensor, "B D1"], num_accepted: Int[Tensor, " B"], num_levels: int
) -> tuple[Bool[Tensor, "L B N"], Bool[Tensor, "L B N"]]:
    """Follow the target's tokens through a tree, for the training of the calibration.

    Args:
        picks: the target's tokens after the roots, of which num_accepted + 1 are known.

    Returns:
        For each of the first num_levels levels, the children of the node on the target's path, and
        which of them has the target's next token.
    """
    node = torch.zeros_like(num_accepted)
    reached = num_accepted >= 0
    offered = []
    picked = []
    for level in range(num_levels):
        reached = reached & (num_accepted >= level)
        children = (tree.parents == node[:, None]) & reached[:, None]
        taken = children & (tree.tokens == picks[:, level, None])
        offered.append(children)
        picked.append(taken)
        node = taken.long().argmax(1)
        reached = taken.any(1)
    return torch.stack(offered), torch.stack(picked)


def _features(log_probs: Float[Tensor, "B N A"]) -> Float[Tensor, "B N P"]:
    """Return the logits of drafters that propose alone, of those that propose together, which
    drafters lack the child although they propose others, and 1.
    """
    offers = log_probs > -torch.inf
    lacks = ~offers & offers[:, 1:].any(1, keepdim=True)
    logits = torch.where(offers, logit(log_probs), 0.0)
    alone = offers.sum(-1, keepdim=True) == 1
    one = torch.ones_like(logits[..., :1])
    return torch.cat([logits * alone, logits * ~alone, lacks.float(), one], -1)
