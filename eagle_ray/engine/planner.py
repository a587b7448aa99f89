"""UniformPlanner: what each step may spend, the same for every sequence at every step, as EAGLE-2 was published.

Does not know costs yet: the tree is the one that was configured.
"""

from __future__ import annotations

from eagle_ray.speculative.budget import Plan, uniform


class UniformPlanner:
    """max_nodes: drafted nodes per sequence, root excluded. max_depth: longest draft path. top_k: beam width.

    All 0 is plain decoding. No path is longer than the number of nodes, so levels past max_nodes are not drafted.
    """

    def __init__(self, max_nodes: int, max_depth: int, top_k: int):
        self._max_depth = min(max_depth, max_nodes)
        self._width = top_k
        num_candidates = top_k + (self._max_depth - 1) * top_k**2 if self._max_depth else 0
        self._num_nodes = 1 + min(max_nodes, num_candidates)

    def plan(self, batch_size: int) -> Plan:
        """The next step's plan for batch_size running sequences."""
        return Plan(self._max_depth, self._width, self._num_nodes, batch_size * self._num_nodes, uniform)
