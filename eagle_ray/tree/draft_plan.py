"""Plan: what one step may draft, decided before anything is drafted.

Does not know which of the drafted nodes will be verified: that is the budget's, once their values are known.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from eagle_ray.tree.expand import TreeBuilder
from eagle_ray.tree.static_tree import StaticTree


@dataclass(frozen=True, slots=True)
class DraftPlan:
    """max_depth: most levels to draft; 0 is a step of plain decoding, in which no drafter runs.

    width: nodes of each level that are given children, num_children of them each (None: width). members: the sequences
    of the batch to draft for, ascending; None is all of them. enough: asked before each level after the first; True
    ends the drafting there. shape: which nodes get children, where that does not depend on their values; no deeper and
    no wider than the plan. probe: whether this is done in order to learn what it costs or yields, and not because it
    promises most.
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
        """Drawn of each node: more of them cost next to nothing, as its logits are there."""
        return self.width if self.num_children is None else self.num_children

    def restrict_to(self, members: tuple[int, ...] | None) -> DraftPlan:
        """The same for those of its sequences that are among `members` (None: all of the batch)."""
        if members is None or not self.is_drafting:
            return self
        both = members if self.members is None else tuple(m for m in self.members if m in members)
        return replace(self, members=both) if both else PLAIN

    def num_members(self, batch_size: int) -> int:
        """How many of a batch's sequences are drafted for."""
        return batch_size if self.members is None else len(self.members)

    @property
    def max_candidates(self) -> int:
        """Nodes of the largest tree that such a plan drafts, root included."""
        return 1 + self.children + (self.max_depth - 1) * self.width * self.children if self.is_drafting else 1

    @property
    def is_drafting(self) -> bool:
        return self.max_depth > 0


PLAIN = DraftPlan(max_depth=0, width=0)
