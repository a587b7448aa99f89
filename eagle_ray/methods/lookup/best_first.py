"""Grow draft trees best first: the most probable node of all that could be added is added next.

                 root
               .6 /  \\ .3        added first: a (0.6), then b (0.54), c (0.486), d (0.3), ...
                 a    d          each of its parent's children with the product of the probabilities on its path
              .9 |
                 b               so a certain continuation becomes a long chain, an uncertain one a wide tree
              .9 |
                 c

`grow_trees` takes a cursor per sequence, whatever it reads from (see drafter.py). lookup_index.cpp grows equal trees.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from math import exp, expm1, log, log1p
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int, Int32, Int64
from torch import Tensor

from eagle_ray.core.tree_bounds import TreeBounds
from eagle_ray.methods.calibration import LARGEST_LOGIT
from eagle_ray.tree.draft_tree import DraftTree

Children = list[tuple[int, float]]  # tokens and their probabilities, the likeliest first
ChildRule = Callable[[int, float, bool], float]  # level, log-probability, whether it is the first child: log value
Texts = tuple[Int64[Tensor, " texts"], Int32[Tensor, " tokens"]]  # their lengths, and the tokens of all
MIN_LOG_VALUE = log(1 / 256)  # of a path that is drafted
LARGEST_LOG_PROB = -1e-7  # as calibration.logit clamps it


@runtime_checkable
class Cursor(Protocol):
    """A position in an index: the end of a text, or of a path drafted on it."""

    def children(self, width: int) -> Children:
        """Return at most `width` tokens with their probabilities, likeliest first; they sum to 1 at most."""

    def after(self, token: int) -> Cursor:
        """Return the cursor after one of the children."""


@dataclass(frozen=True, slots=True)
class GrowthRequest:
    """What the trees of M sequences are to be.

    Attributes:
        bounds: bounds of each tree.
        ends: tokens that are the last of their sequence, which get no children; -1 is none. On the CPU.
        parameters: parameters of the calibration, by level and kind of row, on the CPU; None: no calibration.
        kinds: kind of each row, see Calibration.
        is_padded: give every tree the nodes of the largest tree within the bounds, and not of the largest one grown.
    """

    bounds: TreeBounds
    ends: Int[Tensor, "M E"] | None = None
    parameters: Float[Tensor, "D kinds 3"] | None = None
    kinds: Sequence[int] = ()
    is_padded: bool = False


@dataclass(frozen=True, slots=True)
class GrownTrees:
    """Trees on the CPU.

    Attributes:
        levels: log values of the nodes by depth, padded with -inf to those of the widest level.
    """

    tree: DraftTree
    levels: list[Float[Tensor, "M 1 K"]]


@dataclass(frozen=True, slots=True)
class _Node:
    parent: int  # its index in the order in which nodes were added; -1 for the root
    token: int
    depth: int
    log_value: float
    log_prob: float


def grow_trees(cursors: Sequence[Cursor], roots: Sequence[int], request: GrowthRequest) -> GrownTrees:
    """Return a tree for each cursor. roots: the last token of each text."""
    ends = [set()] * len(roots) if request.ends is None else [set(row) for row in request.ends.tolist()]
    rules = _rules(request, len(roots))
    nodes = [
        _in_levels(_grow(cursor, root, request.bounds, own_ends, rule))
        for cursor, root, own_ends, rule in zip(cursors, roots, ends, rules, strict=True)
    ]
    num_nodes = request.bounds.num_nodes if request.is_padded else max(map(len, nodes))
    return _packed(nodes, num_nodes)


def _rules(request: GrowthRequest, num_rows: int) -> list[ChildRule]:
    if request.parameters is None:
        return [lambda level, log_prob, is_first: log_prob] * num_rows
    parameters = request.parameters.tolist()
    return [_calibrated([level[kind] for level in parameters]) for kind in request.kinds]


def _calibrated(parameters: list[list[float]]) -> ChildRule:
    """Return what Calibration.apply computes for rows of one kind."""

    def rule(level: int, log_prob: float, is_first: bool) -> float:
        slope, offset, first = parameters[min(level, len(parameters) - 1)]
        clamped = min(log_prob, LARGEST_LOG_PROB)
        logit = clamped - log(-expm1(clamped))
        mapped = slope * min(max(logit, -LARGEST_LOGIT), LARGEST_LOGIT) + offset + (first if is_first else 0.0)
        return min(mapped, 0.0) - log1p(exp(-abs(mapped)))

    return rule


def _grow(cursor: Cursor, root: int, bounds: TreeBounds, ends: set[int], rule: ChildRule) -> list[_Node]:
    """Return the nodes of a tree in the order in which they are added, the root first."""
    nodes: list[_Node] = []
    waiting: list[tuple[float, int, _Node, Cursor]] = [(0.0, 0, _Node(-1, root, 0, 0.0, 0.0), cursor)]
    num_seen = 1
    while waiting and len(nodes) <= bounds.max_nodes:
        _, _, node, before = heappop(waiting)
        nodes.append(node)
        if node.depth == bounds.max_depth or (node.depth and node.token in ends):
            continue
        at = before if node.depth == 0 else before.after(node.token)
        for rank, (token, probability) in enumerate(at.children(bounds.top_k)):
            log_prob = log(probability)
            log_value = node.log_value + rule(node.depth, log_prob, rank == 0)
            if log_value < MIN_LOG_VALUE:
                break
            child = _Node(len(nodes) - 1, token, node.depth + 1, log_value, log_prob)
            heappush(waiting, (-log_value, num_seen, child, at))
            num_seen += 1
    return nodes


def _in_levels(nodes: list[_Node]) -> list[_Node]:
    """Return nodes in breadth-first order, those of a level in the order in which they were added."""
    order = sorted(range(len(nodes)), key=lambda i: nodes[i].depth)
    index = {old: new for new, old in enumerate(order)}
    return [
        _Node(index.get(node.parent, -1), node.token, node.depth, node.log_value, node.log_prob)
        for node in (nodes[i] for i in order)
    ]


def _packed(rows: list[list[_Node]], num_nodes: int) -> GrownTrees:
    padding = _Node(-1, 0, 0, -torch.inf, -torch.inf)
    padded = [row + [padding] * (num_nodes - len(row)) for row in rows]
    integers = torch.tensor([[(node.token, node.parent, node.depth) for node in row] for row in padded])
    floats = torch.tensor([[(node.log_value, node.log_prob) for node in row] for row in padded])
    valid = torch.arange(num_nodes) < torch.tensor([len(row) for row in rows])[:, None]
    tokens, parents, depths = integers.unbind(2)
    log_values, log_probs = floats.unbind(2)
    tree = DraftTree(tokens, parents, depths, log_values, log_probs, valid)

    depth = max(node.depth for row in rows for node in row)
    by_depth = [[[node.log_value for node in row if node.depth == d] for row in rows] for d in range(1, depth + 1)]
    width = max((len(values) for level in by_depth for values in level), default=0)
    levels = [[[values + [-torch.inf] * (width - len(values))] for values in level] for level in by_depth]
    return GrownTrees(tree, list(torch.tensor(levels)))
