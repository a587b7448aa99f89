"""DraftPlan: what one step drafts. TreeBuilder: candidates level by level, EAGLE-2's expansion for B trees at once.

    builder = TreeBuilder(roots, width=10)
    builder.grow(log_probs, tokens)          # level 1: children of the roots
    while more levels are wanted:
        frontier = builder.frontier()        # the nodes of the last level that are worth children
        builder.grow(log_probs, tokens)      # their children
    tree = builder.build()

The nodes of a frontier are chosen by value, or given by a static tree.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from eagle_ray.tree.draft_tree import DraftTree
from eagle_ray.tree.static_tree import StaticTree


@dataclass(frozen=True, slots=True)
class Frontier:
    """The F nodes of the last level that get children next.

    Attributes:
        parent_rows: parent of each node, as an index into the previous frontier (0, the root, at
            level 1).
        log_values: log values of their paths; -inf is padding, whose children are padding too.
    """

    tokens: Int[Tensor, "B F"]
    parent_rows: Int[Tensor, "B F"]
    log_values: Float[Tensor, "B F"]


@runtime_checkable
class PartialDraft(Protocol):
    """Protocol of draft trees that are still growing, between two levels.

    Attributes:
        depth: number of levels so far.
        levels: log values of each level.
    """

    @property
    def depth(self) -> int: ...

    @property
    def levels(self) -> list[Float[Tensor, "B _ K"]]: ...

    def frontier(self) -> Frontier: ...


@dataclass(frozen=True, slots=True)
class PriceRule:
    """The rule that ends a draft before the first level that is expected to yield less than it costs, both in tokens.

    A node's gain is its expected yield minus the price of its row. Gains are summed in fp64, node
    by node, until the answer is clear, mostly after two or three nodes.

    Attributes:
        children: conditional probability of an expanded node's children, by depth and rank; deeper
            levels resemble the last one.
        accuracy: ratio of accepted drafts to those that the probabilities promise.
        num_more: number of levels to draft beyond those that pay.
    """

    children: Sequence[Sequence[float]]
    accuracy: float
    level_price: float
    row_price: float
    num_more: int = 0

    def should_stop(self) -> Callable[[PartialDraft], bool]:
        """Return a stop function for one draft, to be called before each level after the first."""
        num_unpaid = 0

        def stops(draft: PartialDraft) -> bool:
            nonlocal num_unpaid
            num_unpaid += num_unpaid > 0 or not self.pays(draft)
            return num_unpaid > self.num_more

        return stops

    def pays(self, draft: PartialDraft) -> bool:
        """Return whether one more level is expected to yield more than it costs."""
        children = self.children[min(draft.depth, len(self.children) - 1)]
        gain = 0.0
        for log_value in draft.frontier().log_values.flatten().tolist():
            value = self.accuracy * math.exp(log_value)
            for child in children:
                more = value * child - self.row_price
                if more <= 0:  # the following ones are worth less
                    break
                gain += more
            if gain > self.level_price:
                return True
        return False


class TreeBuilder:
    """Builds candidate trees level by level: collects all proposed children and chooses each next frontier.

    Args:
        width: maximum nodes of a frontier, which are the most valuable ones.
        shape: static tree that gives the nodes of each frontier instead.
        ends: end-of-sequence tokens, whose children get no value; None if there are none.
    """

    def __init__(
        self,
        roots: Int[Tensor, " B"],
        width: int,
        shape: StaticTree | None = None,
        ends: Int[Tensor, "B E"] | None = None,
    ):
        tree = DraftTree.of_roots(roots)
        self._width = width
        self._shape = shape
        self._ends = ends
        self._tokens = [tree.tokens]
        self._parents = [tree.parents]
        self._log_values = [tree.log_values]
        self._draft_log_probs = [tree.draft_log_probs]
        self._frontier_nodes = torch.zeros_like(tree.tokens)
        self._frontier_values = tree.log_values
        self._frontier: Frontier | None = None  # the last level's, once it was asked for
        self._num_nodes = 1
        self.levels: list[Float[Tensor, "B _ K"]] = []

    @property
    def depth(self) -> int:
        """Return the number of levels grown so far. `levels` has their log values."""
        return len(self.levels)

    def grow(
        self,
        log_probs: Float[Tensor, "B F K"],
        tokens: Int[Tensor, "B F K"],
        draft_log_probs: Float[Tensor, "B F K"] | None = None,
    ) -> None:
        """Add K children to each frontier node, with their fp32 log-probabilities given that node; -inf is padding.

        Args:
            draft_log_probs: the drafter's own log-probabilities, if log_probs are calibrated.
        """
        values = _mask_nan(self._frontier_values[:, :, None] + log_probs)
        parents = self._frontier_nodes[:, :, None].expand(tokens.shape)
        self._frontier = None
        self.levels.append(values)
        self._log_values.append(values.flatten(1))
        own_log_probs = log_probs if draft_log_probs is None else draft_log_probs
        self._draft_log_probs.append(_mask_nan(own_log_probs).flatten(1))
        self._tokens.append(tokens.flatten(1))
        self._parents.append(parents.flatten(1))
        self._num_nodes += tokens[0].numel()

    def frontier(self) -> Frontier:
        """Return the `width` most valuable nodes of the last level, best first, ties to the earlier one.

        With a static tree, return the nodes of the level that have children in it, in its order.
        """
        if self._frontier is None:
            self._frontier = self._best_frontier()
        return self._frontier

    def _best_frontier(self) -> Frontier:
        tokens = self._tokens[-1]
        values = self._log_values[-1]
        if self._ends is not None:
            is_end = (tokens[:, :, None] == self._ends[:, None]).any(2)
            values = values.masked_fill(is_end, -torch.inf)

        # Choose among the level's nodes.
        batch, num_nodes = tokens.shape
        children_each = num_nodes // self._frontier_nodes.shape[1]
        if self._shape is None:
            index = self.best_nodes(values)
        else:
            expanded = self._shape.expanded_at(self.depth, children_each, values.device)
            index = expanded.expand(batch, -1)

        first_of_level = self._num_nodes - num_nodes
        self._frontier_nodes = index + first_of_level
        self._frontier_values = values.gather(1, index)
        return Frontier(tokens.gather(1, index), index // children_each, self._frontier_values)

    def best_nodes(self, values: Float[Tensor, "B C"]) -> Int[Tensor, "B F"]:
        """Return the indices of the last level's nodes that form the next frontier."""
        return values.sort(dim=1, descending=True, stable=True).indices[:, : self._width]

    def build(self) -> DraftTree:
        """Return all candidates so far: 1 + F*K nodes per level, breadth-first. `rerank` by `valid` drops padding."""
        depths = [torch.full_like(level, depth) for depth, level in enumerate(self._tokens)]
        log_values = torch.cat(self._log_values, 1)
        return DraftTree(
            tokens=torch.cat(self._tokens, 1),
            parents=torch.cat(self._parents, 1),
            depths=torch.cat(depths, 1),
            log_values=log_values,
            draft_log_probs=torch.cat(self._draft_log_probs, 1),
            valid=log_values > -torch.inf,
        )


def _mask_nan(log_probs: Float[Tensor, "B F K"]) -> Float[Tensor, "B F K"]:
    """Mask candidates with NaN, as half precision may give: NaN would outrank the root."""
    return log_probs.masked_fill(log_probs.isnan(), -torch.inf)


@dataclass(frozen=True, slots=True)
class DraftPlan:
    """The shape of one step's drafts.

    Attributes:
        max_depth: maximum levels; 0 is a step of plain decoding, in which no drafter runs.
        width: number of nodes of each level that are expanded.
        members: indices of the batch's sequences to draft for, ascending; None is all.
        should_stop: function called before each level after the first; true ends the draft there.
        price_rule: rule that should_stop applies, for drafters that grow all levels in one call;
            None if it is another function.
        static_tree: nodes to expand, if they do not depend on values; no deeper and no wider than
            the plan.
        probe: whether the step is run to measure costs or acceptance, not because it is expected to
            be the best.
        num_children: number of children per expanded node; None is width.
        lookups_only: whether only lookups draft, up to max_depth; width is not used then.
    """

    max_depth: int
    width: int
    members: tuple[int, ...] | None = None
    should_stop: Callable[[PartialDraft], bool] | None = None
    static_tree: StaticTree | None = None
    probe: bool = False
    num_children: int | None = None
    lookups_only: bool = False
    price_rule: PriceRule | None = None

    @property
    def children(self) -> int:
        """Return the number of children per expanded node. They cost little, since the node's
        logits are computed anyway."""
        return self.width if self.num_children is None else self.num_children

    def restrict_to(self, members: tuple[int, ...] | None) -> DraftPlan:
        """Return the plan for those of its sequences that are in `members`; None is the whole batch."""
        if members is None or not self.is_drafting:
            return self
        if self.members is not None:
            members = tuple(m for m in self.members if m in members)
        return replace(self, members=members) if members else PLAIN_PLAN

    def num_members(self, batch_size: int) -> int:
        """Return how many of a batch's sequences are drafted for."""
        return batch_size if self.members is None else len(self.members)

    @property
    def stops_by_rule(self) -> bool:
        """Return whether the end of the draft depends on no function, except price_rule."""
        return self.should_stop is None or self.price_rule is not None

    def without_stop(self) -> DraftPlan:
        """Return the plan without a stop function, so that the draft goes to its full depth."""
        return replace(self, should_stop=None, price_rule=None)

    @property
    def is_drafting(self) -> bool:
        return self.max_depth > 0

    @property
    def has_known_shape(self) -> bool:
        """Return whether the plan drafts fixed levels for the whole batch, so that it can be replayed."""
        return self.is_drafting and self.members is None and self.should_stop is None


PLAIN_PLAN = DraftPlan(max_depth=0, width=0)
