"""Which nodes of which sequences are worth a verify row: the step's plan, and policies that give each tree a budget.

A budget is the number of rows a sequence gets in the verify pass, its root included. ``DraftTree.rerank`` spends it
on each tree's most valuable nodes. Does not know costs or time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from jaxtyping import Int
from torch import Tensor

from eagle_ray.speculative.tree import DraftTree

Policy = Callable[[DraftTree, int], Int[Tensor, " B"]]


@dataclass(frozen=True, slots=True)
class Plan:
    """What one step may spend, decided on the host before anything is drafted.

    max_depth: levels to draft; 0 is a step of plain decoding. width: nodes kept and children drawn at each level.
    num_nodes: most verify rows of one sequence, root included. num_rows: rows of the whole verify pass.
    """

    max_depth: int
    width: int
    num_nodes: int
    num_rows: int
    policy: Policy


def allocate(tree: DraftTree, plan: Plan) -> Int[Tensor, " B"]:
    """Verify rows for each sequence, root included; their sum is at most plan.num_rows."""
    return plan.policy(tree, plan.num_nodes)


def uniform(tree: DraftTree, num_nodes: int) -> Int[Tensor, " B"]:
    """The same number of rows for every sequence, as EAGLE-2 was published; fewer only where a tree has fewer."""
    return tree.valid.sum(1).clamp(max=num_nodes)
