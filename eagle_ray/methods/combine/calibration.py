"""EnsembleCalibration: map the probabilities of several drafters for a child to the rate at which the target samples
it.

A child that only one drafter proposes has that drafter's probability; probabilities of several drafters are
combined:

    P = sigmoid(sum over drafters that propose it of a * logit(p) + sum over the others of b + c)

on conditional probabilities, with weights per level and kind of row, fitted to the target's samples, separately for
drafters that propose a child alone and together. The start is the mean of the logits. P is at most 1, so values
never rise along a path. As in Calibration, all proposed children of a reached node are observed, verified or not.

That a drafter lacks a child counts only if it proposes something else for that sequence. Steps in which no model drafts
have weights of their own: there a lookup's child is also one that the model would have proposed.
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
from eagle_ray.methods.calibration import KINDS, OnlineFit, logit
from eagle_ray.tree.draft_tree import DraftTree
from eagle_ray.tree.tree_merge import Merged, merge_trees


@dataclass(frozen=True, slots=True)
class BlendedTree:
    """The nodes of several drafters as one tree, with their values.

    Attributes:
        log_probs: a node's log-probability given its parent by each drafter, -inf if it lacks the node.
        extra: by depth, the log values of nodes that the model does not propose.
    """

    tree: DraftTree
    log_probs: Float[Tensor, "B N A"]
    extra: Float[Tensor, "D B N"]


class EnsembleCalibration:
    """Weights for children that A drafters propose on up to `levels` levels."""

    def __init__(self, levels: int, num_drafters: int, device: torch.device | str = "cpu"):
        alone, together, lacks = [1.0] * num_drafters, [1 / num_drafters] * num_drafters, [0.0] * num_drafters
        slopes, offsets = 2 * num_drafters, num_drafters + 1
        self.fit = OnlineFit(
            [*alone, *together, *lacks, 0.0],
            [*[0.0] * slopes, *[-12.0] * offsets],
            [*[6.0] * slopes, *[12.0] * offsets],
            levels=levels,
            sets=2 * KINDS,
            precision=10.0,
            device=device,
        )

    @property
    def num_levels(self) -> int:
        return len(self.fit.parameters)

    @staticmethod
    def sets(kinds: Int[Tensor, " B"], has_model: bool = True) -> Int[Tensor, " B"]:
        """Return the weights of each row. kinds: 1 for sampled rows, 0 for greedy ones. has_model: a model drafted."""
        return kinds if has_model else kinds + KINDS

    def apply(
        self, depths: Int[Tensor, "B N"], sets: Int[Tensor, " B"], log_probs: Float[Tensor, "B N A"]
    ) -> Float[Tensor, "B N"]:
        """Return conditional log-probabilities of nodes.

        depths: 1 for the roots' children; roots may have any value. The last level's weights are those of deeper ones.
        log_probs: calibrated log-probabilities by drafter, -inf if a drafter lacks the node; the root comes first.
        """
        weights = self.fit.parameters[(depths - 1).clamp(0, self.num_levels - 1), sets[:, None]]
        return logsigmoid((_features(log_probs) * weights).sum(-1))

    def merge(
        self, trees: Sequence[DraftTree | None], max_depth: int, sets: Int[Tensor, " B"], model: int | None = None
    ) -> BlendedTree:
        """Merge trees on the same roots and give every node its value.

        Args:
            trees: trees of each drafter; None if it did not draft.
            max_depth: at least their depths.
            model: the drafter whose nodes are not among `BlendedTree.extra`.
        """
        drafted = [tree for tree in trees if tree is not None]
        device = drafted[0].tokens.device
        if cpu_ops.available(device, torch.float32) and cpu_ops.has_function("merge_blended"):
            return self._merge_natively(trees, max_depth, sets, -1 if model is None else model)

        return self.value(merge_trees(trees, max_depth), max_depth, sets, model)

    def value(
        self, merged: Merged, max_depth: int, sets: Int[Tensor, " B"], model: int | None, num_nodes: int | None = None
    ) -> BlendedTree:
        """Give the nodes of a merged tree their values. Arguments as for `merge`.

        Args:
            num_nodes: return the best ones, breadth-first, if there are more; None is all, as they are.
        """
        log_probs = merged.log_probs_by_drafter
        tree = merged.with_log_probs(self.apply(merged.tree.depths, sets, log_probs), max_depth)
        if num_nodes is not None:
            nodes = tree.best(num_nodes)
            log_probs = log_probs.gather(
                1, nodes.clamp(max=tree.num_nodes - 1)[:, :, None].expand(-1, -1, log_probs.shape[2])
            )
            tree = tree.select(nodes)
        values = tree.log_values
        if model is not None:
            values = values.masked_fill(log_probs[..., model] > -torch.inf, -torch.inf)
        depths = torch.arange(1, max_depth + 1, device=values.device)[:, None, None]
        return BlendedTree(tree, log_probs, torch.where(tree.depths == depths, values, -torch.inf))

    def _merge_natively(
        self, trees: Sequence[DraftTree | None], max_depth: int, sets: Int[Tensor, " B"], model: int
    ) -> BlendedTree:
        """Do what `merge` does by a kernel of the CPU: some 30 small operations take about a millisecond."""
        weights, num_drafters = self.fit.parameters, len(trees)
        rows = len(sets)
        num_nodes = sum(tree.num_nodes for tree in trees if tree is not None)
        ints = torch.zeros(2, rows, num_nodes, dtype=torch.int64)
        parents = torch.full((rows, num_nodes), -1)
        valid = torch.zeros(rows, num_nodes, dtype=torch.bool)
        floats = torch.full((2 + max_depth, rows, num_nodes), -torch.inf)
        log_probs = torch.full((rows, num_nodes, num_drafters), -torch.inf)
        largest = ctypes.c_int64()

        candidates = (cpu_ops.CandidateTree * num_drafters)()
        lasting = [None if tree is None else [x.contiguous() for x in tree.tensors] for tree in trees]
        for i, tensors in enumerate(lasting):
            if tensors is not None:
                candidates[i] = cpu_ops.CandidateTree(tensors[0].shape[1], *(x.data_ptr() for x in tensors))
        blend = cpu_ops.Blend(num_drafters, *weights.shape[:2], model, weights.data_ptr(), sets.data_ptr())
        pointers = (
            *(x.data_ptr() for x in (ints[0], parents, ints[1], floats[0], floats[1], valid, log_probs, floats[2:])),
            ctypes.addressof(largest),
        )
        out = cpu_ops.MergedTrees(rows, num_nodes, max_depth, *pointers)
        cpu_ops.function_for("merge_blended")(candidates, blend, out, torch.get_num_threads())

        real = slice(largest.value)
        tree = DraftTree(*(x[:, real] for x in (ints[0], parents, ints[1], floats[0], floats[1], valid)))
        return BlendedTree(tree, log_probs[:, real], floats[2:, :, real])

    def update(
        self,
        sets: Int[Tensor, " B"],
        log_probs: Float[Tensor, "B N A"],
        offered: Bool[Tensor, "L B N"],
        picked: Bool[Tensor, "L B N"],
    ) -> None:
        """Observe the target's sample after one node of each row on each of the first L levels.

        offered: the proposed children, none if the node was not reached. picked: the child with the target's token.
        """
        x, levels = _features(log_probs), slice(len(offered))
        predicted = torch.sigmoid(torch.einsum("bnp,lbp->lbn", x, self.fit.parameters[levels, sets]))
        of_set = torch.stack([sets == number for number in range(2 * KINDS)]).float()
        gradient = torch.einsum("lbn,bnp->lbp", offered * (picked.float() - predicted), x)
        pairs = (x[..., None] * x[..., None, :]).flatten(2)
        fisher = torch.einsum("lbn,bnq->lbq", offered * predicted * (1 - predicted), pairs)
        size = (len(offered), 2 * KINDS, x.shape[2], x.shape[2])
        self.fit.update(of_set @ gradient, (of_set @ fisher).view(size), offered.any(2).float() @ of_set.T)


def children_on_path(
    tree: DraftTree, picks: Int[Tensor, "B D1"], num_accepted: Int[Tensor, " B"], num_levels: int
) -> tuple[Bool[Tensor, "L B N"], Bool[Tensor, "L B N"]]:
    """Return, for the first levels, the children of the node on the target's path and the one with its next token.

    Args:
        picks: the target's tokens after the roots, of which num_accepted + 1 are known.
    """
    node, reached = torch.zeros_like(num_accepted), num_accepted >= 0
    offered, picked = [], []
    for level in range(num_levels):
        reached = reached & (num_accepted >= level)
        children = (tree.parents == node[:, None]) & reached[:, None]
        taken = children & (tree.tokens == picks[:, level, None])
        offered.append(children)
        picked.append(taken)
        node, reached = taken.long().argmax(1), taken.any(1)
    return torch.stack(offered), torch.stack(picked)


def _features(log_probs: Float[Tensor, "B N A"]) -> Float[Tensor, "B N P"]:
    """Return the logits of drafters that propose alone, of those that propose together, which drafters lack the child
    although they propose others, and 1.
    """
    offers = log_probs > -torch.inf
    lacks = ~offers & offers[:, 1:].any(1, keepdim=True)
    logits = torch.where(offers, logit(log_probs), 0.0)
    alone = offers.sum(-1, keepdim=True) == 1
    one = torch.ones_like(logits[..., :1])
    return torch.cat([logits * alone, logits * ~alone, lacks.float(), one], -1)
