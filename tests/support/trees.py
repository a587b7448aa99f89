"""Draft trees: strategies that grow them, the laws that all obey, and a planner that records them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from hypothesis import strategies as st

from eagle_ray.methods.drafter import Draft
from eagle_ray.planner.planner import UniformPlanner
from eagle_ray.tree.draft_tree import DraftTree
from eagle_ray.tree.expand import TreeBuilder
from tests.support.toy_models import best_nodes


def grown_trees(seed: int, batch: int, depth: int, width: int, ties: bool) -> DraftTree:
    """B trees grown from random conditional probabilities; with `ties` many are equal, some exactly 1."""
    generator = torch.Generator().manual_seed(seed)
    builder = TreeBuilder(torch.randint(0, 50, (batch,), generator=generator), width)
    parents = 1
    for level in range(depth):
        if level:
            parents = builder.frontier().tokens.shape[1]
        log_probs = (torch.randn(batch, parents, 50, generator=generator) * 2).log_softmax(-1)
        log_probs = (log_probs * 2).round() / 2 if ties else log_probs
        children = log_probs.clamp(max=0).topk(width, -1)
        builder.grow(children.values, children.indices)
    return builder.build()


def as_paths(tree: DraftTree, b: int, values: torch.Tensor) -> dict[tuple[int, ...], float]:
    """Slow and obvious: each node's path of tokens, with its value."""
    found = {}
    for node in range(1, tree.num_nodes):
        path, up = [], node
        while tree.valid[b, node] and up > 0:
            path.insert(0, int(tree.tokens[b, up]))
            up = int(tree.parents[b, up])
        if path:
            found[tuple(path)] = float(values[b, node])
    return found


def conditional_log_probs(tree: DraftTree) -> torch.Tensor:
    return tree.log_values - tree.log_values.gather(1, tree.parents.clamp(min=0))


def some_trees(seed: int, count: int, batch: int, ties: bool) -> list[DraftTree]:
    """Trees of few tokens on the same roots, so that many paths are in several of them; some have no node at all."""
    generator, trees = torch.Generator().manual_seed(seed), []
    for i in range(count):
        depth, width = (int(torch.randint(1, 4, (1,), generator=generator)) for _ in range(2))
        tree = grown_trees(seed + 7 * i, batch, depth, width, ties)
        tree.tokens[:] = torch.where(tree.parents < 0, 5, tree.tokens % 50)
        tree.tokens[:, 1 : 1 + width] = torch.arange(
            width
        )  # siblings of the root, shared by all trees
        budgets = torch.randint(1, tree.num_nodes + 1, (batch,), generator=generator)
        trees.append(best_nodes(tree, budgets.tolist()))
    return trees


def check_tree(tree: DraftTree) -> None:
    for b in range(len(tree.tokens)):
        count = int(tree.valid[b].sum())
        assert tree.valid[b].tolist() == [True] * count + [False] * (tree.num_nodes - count)
        parents, depths = tree.parents[b].tolist(), tree.depths[b].tolist()
        values, tokens = tree.log_values[b].tolist(), tree.tokens[b].tolist()
        assert (parents[0], depths[0], values[0]) == (-1, 0, 0.0)
        assert depths[:count] == sorted(depths[:count])
        siblings = set()
        for i in range(1, count):
            assert 0 <= parents[i] < i
            assert depths[i] == depths[parents[i]] + 1
            assert values[i] <= values[parents[i]]
            assert (parents[i], tokens[i]) not in siblings
            siblings.add((parents[i], tokens[i]))
        assert all(p == -1 for p in parents[count:]) and all(
            v == -torch.inf for v in values[count:]
        )


shapes = dict(
    seed=st.integers(0, 10**6),
    batch=st.integers(1, 4),
    depth=st.integers(1, 5),
    width=st.integers(1, 5),
    ties=st.booleans(),
)


@dataclass(eq=False)
class TokenSequence:
    """A sequence as far as it is known."""

    token_ids: list[int]

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    def token_ids_from(self, start: int) -> list[int]:
        return self.token_ids[start:]


def paths(draft: Draft, b: int) -> dict[tuple[int, ...], float]:
    """The paths of tree b from the root's child on, with their values."""
    tree, found = draft.tree, {}
    for node in range(1, tree.num_nodes):
        path, up = [], node
        while tree.valid[b, node] and up > 0:
            path.insert(0, int(tree.tokens[b, up]))
            up = int(tree.parents[b, up])
        if path:
            found[tuple(path)] = float(tree.log_values[b, node].exp())
    return found


def path(tree, b, node):
    """Tokens from the root's child down to node, and its conditional log-probability at each of them."""
    tokens, values = [], []
    while node > 0:
        parent = int(tree.parents[b, node])
        tokens.insert(0, int(tree.tokens[b, node]))
        values.insert(0, float(tree.log_values[b, node] - tree.log_values[b, parent]))
        node = parent
    return tokens, values


class RecordingPlanner(UniformPlanner):
    """Keeps every sequence's tokens at each draft, and its tree."""

    seen: tuple[tuple[list[int], object, int], ...] = ()

    def allocate(self, draft, plan, batch):
        self.seen += tuple(
            (list(s.token_ids), draft.tree, i) for i, s in enumerate(batch.sequences)
        )
        return super().allocate(draft, plan, batch)


PROMPTS = [[3 + (7 * i + k * k) % 90 for k in range(2 + i)] for i in range(9)]
