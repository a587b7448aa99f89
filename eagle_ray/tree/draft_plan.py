"""DraftPlan: what one step drafts, decided before drafting. The budget later chooses which nodes are verified."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from eagle_ray.tree.expand import TreeBuilder
from eagle_ray.tree.static_tree import StaticTree


@dataclass(frozen=True, slots=True)
class DraftPlan:
    """The shape of one step's drafts.

    Attributes:
        max_depth: maximum levels; 0 is a step of plain decoding, in which no drafter runs.
        width: nodes of each level that are expanded.
        members: indices of the batch's sequences to draft for, ascending; None is all.
        should_stop: called before each level after the first; true ends the drafting there.
        static_tree: the nodes to expand, if they do not depend on values; no deeper and no wider than the plan.
        probe: the step is taken to measure what drafts cost or yield, not because it promises most.
        num_children: children per expanded node; None is width.
    """

    max_depth: int
    width: int
    members: tuple[int, ...] | None = None
    should_stop: Callable[[TreeBuilder], bool] | None = None
    static_tree: StaticTree | None = None
    probe: bool = False
    num_children: int | None = None

    @property
    def children(self) -> int:
        """Return the children per expanded node. They cost little, since the node's logits are computed anyway."""
        return self.width if self.num_children is None else self.num_children

    def restrict_to(self, members: tuple[int, ...] | None) -> DraftPlan:
        """Return the plan for those of its sequences that are in `members`; None is the whole batch."""
        if members is None or not self.is_drafting:
            return self
        both = members if self.members is None else tuple(m for m in self.members if m in members)
        return replace(self, members=both) if both else PLAIN

    def num_members(self, batch_size: int) -> int:
        """Return how many of a batch's sequences are drafted for."""
        return batch_size if self.members is None else len(self.members)

    @property
    def is_drafting(self) -> bool:
        return self.max_depth > 0

    @property
    def has_known_shape(self) -> bool:
        """Return whether it drafts the same levels for the whole batch, whatever their values: it can be replayed."""
        return self.is_drafting and self.members is None and self.should_stop is None


PLAIN = DraftPlan(max_depth=0, width=0)
