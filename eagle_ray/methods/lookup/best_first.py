"""Grow draft trees best first: the most probable node of all that could be added is added next.

                 root
               .6 /  \\ .3        added first: a (0.6), then b (0.54), c (0.486), d (0.3), ...
                 a    d          each of its parent's children with the product of the probabilities on its path
              .9 |
                 b               so a certain continuation becomes a long chain, an uncertain one a wide tree
              .9 |
                 c

`grow_trees` takes a cursor per sequence, whatever it reads from (see drafter.py). lookup_index.cpp
grows equal trees.
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
# From level, log-probability and whether it is the first child to the log value.
ChildRule = Callable[[int, float, bool], float]
# Lengths of the texts, and the tokens of all.
Texts = tuple[Int64[Tensor, " texts"], Int32[Tensor, " tokens"]]
MIN_LOG_VALUE = log(1 / 256)  # log value of a path that is drafted
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
    """Limits and calibration for growing the trees of M sequences.

    Attributes:
        bounds: bounds of each tree.
        ends: end-of-sequence tokens, which get no children; -1 is none. On the CPU.
        parameters: parameters of the calibration, by level and kind of row, on the CPU; None: no
            calibration.
        kinds: 1 for sampled rows, 0 for greedy ones.
        is_padded: pad trees to the node count of the bounds instead of the largest tree grown.
    """

    bounds: TreeBounds
    ends: Int[Tensor, "M E"] | None = None
    parameters: Float[Tensor, "D kinds 3"] | None = None
    kinds: Sequence[int] = ()
    is_padded: bool = False


@dataclass(frozen=True, slots=True)
class GrownTrees:
    """Trees grown best first, on the CPU.

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


def grow_trees(
    cursors: Sequence[Cursor], roots: Sequence[int], request: GrowthRequest
) -> GrownTrees:
    """Return a tree for each cursor.

    Args:
        roots: the last token of each text.
    """
    ends: list[set[int]] = [set()] * len(roots)
    if request.ends is not None:
        ends = [set(row) for row in request.ends.tolist()]
    rules = _rules(request, len(roots))
    nodes = []
    for cursor, root, own_ends, rule in zip(cursors, roots, ends, rules, strict=True):
        grown = _grow(cursor, root, request.bounds, own_ends, rule)
        nodes.append(_in_levels(grown))

    num_nodes = max(len(row) for row in nodes)
    if request.is_padded:
        num_nodes = request.bounds.num_nodes
    return _packed(nodes, num_nodes)


def _rules(request: GrowthRequest, num_rows: int) -> list[ChildRule]:
    """Return the rule of each row."""
    if request.parameters is None:
        return [_uncalibrated] * num_rows
    parameters = request.parameters.tolist()
    rules = []
    for kind in request.kinds:
        of_kind = [level[kind] for level in parameters]
        rules.append(_calibrated(of_kind))
    return rules


def _uncalibrated(level: int, log_prob: float, is_first: bool) -> float:
    return log_prob


def _calibrated(parameters: list[list[float]]) -> ChildRule:
    """Return a rule that computes Calibration.apply for rows of one kind."""

    def rule(level: int, log_prob: float, is_first: bool) -> float:
        deepest = len(parameters) - 1
        slope, offset, first = parameters[min(level, deepest)]
        clamped = min(log_prob, LARGEST_LOG_PROB)
        logit = clamped - log(-expm1(clamped))
        bounded = min(max(logit, -LARGEST_LOGIT), LARGEST_LOGIT)
        of_rank = first if is_first else 0.0
        mapped = slope * bounded + offset + of_rank
        log_of_sum = log1p(exp(-abs(mapped)))
        return min(mapped, 0.0) - log_of_sum

    return rule


def _grow(
    cursor: Cursor, root: int, bounds: TreeBounds, ends: set[int], rule: ChildRule
) -> list[_Node]:
    """Return the nodes of a tree in the order in which they are added, the root first."""
    nodes: list[_Node] = []
    # A heap of nodes that may be added, the most probable first, with the cursors at their parents.
    root_node = _Node(-1, root, 0, 0.0, 0.0)
    waiting: list[tuple[float, int, _Node, Cursor]] = [(0.0, 0, root_node, cursor)]
    num_seen = 1
    while waiting and len(nodes) <= bounds.max_nodes:
        _, _, node, before = heappop(waiting)
        nodes.append(node)
        if node.depth == bounds.max_depth:
            continue
        if node.depth > 0 and node.token in ends:
            continue

        # Its children wait, up to the first one that is not worth a node.
        at = before if node.depth == 0 else before.after(node.token)
        children = at.children(bounds.top_k)
        for rank, (token, probability) in enumerate(children):
            log_prob = log(probability)
            is_first = rank == 0
            log_value = node.log_value + rule(node.depth, log_prob, is_first)
            if log_value < MIN_LOG_VALUE:
                break
            parent = len(nodes) - 1
            child = _Node(parent, token, node.depth + 1, log_value, log_prob)
            entry = (-log_value, num_seen, child, at)
            heappush(waiting, entry)
            num_seen += 1
    return nodes


def _in_levels(nodes: list[_Node]) -> list[_Node]:
    """Return nodes in breadth-first order, those of a level in the order in which they were added."""
    order = sorted(range(len(nodes)), key=lambda i: nodes[i].depth)
    index = {old: new for new, old in enumerate(order)}
    ordered = []
    for old in order:
        node = nodes[old]
        parent = index.get(node.parent, -1)
        ordered.append(_Node(parent, node.token, node.depth, node.log_value, node.log_prob))
    return ordered


def _packed(rows: list[list[_Node]], num_nodes: int) -> GrownTrees:
    """Return the nodes of each tree as tensors, padded to num_nodes."""
    padding = _Node(-1, 0, 0, -torch.inf, -torch.inf)
    padded = []
    for row in rows:
        missing = num_nodes - len(row)
        padded.append(row + [padding] * missing)

    def field(name: str) -> Tensor:
        return torch.tensor([[getattr(node, name) for node in row] for row in padded])

    sizes = torch.tensor([len(row) for row in rows])
    tree = DraftTree(
        tokens=field("token"),
        parents=field("parent"),
        depths=field("depth"),
        log_values=field("log_value"),
        draft_log_probs=field("log_prob"),
        valid=torch.arange(num_nodes) < sizes[:, None],
    )

    # The log values by depth, padded to the widest level.
    depth = max(node.depth for row in rows for node in row)
    by_depth: list[list[list[float]]] = [[[] for _ in rows] for _ in range(depth)]
    for i, row in enumerate(rows):
        for node in row[1:]:
            values = by_depth[node.depth - 1][i]
            values.append(node.log_value)

    sizes_of_levels = [len(values) for level in by_depth for values in level]
    width = max(sizes_of_levels, default=0)
    levels = []
    for level in by_depth:
        for values in level:
            missing = width - len(values)
            values += [-torch.inf] * missing
        levels.append(torch.tensor(level)[:, None])
    return GrownTrees(tree, levels)
