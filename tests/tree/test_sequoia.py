"""Sequoia's tree: as good as the paper's dynamic programming finds, and of the rates that were seen."""

from functools import cache
from math import prod

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle_ray.methods.eagle.published_trees import RankAcceptance
from eagle_ray.tree.best_tree import best_tree
from eagle_ray.tree.static_tree import StaticTree

RATES = [[0.6, 0.2, 0.1], [0.5, 0.3, 0.0], [0.7, 0.1, 0.05]]
rates = st.sampled_from([0.0, 0.05, 0.1, 0.25, 0.5, 0.75, 1.0])


def best_expectation(acceptance: list[list[float]], num_nodes: int) -> float:
    """Dynamic programming: the most that n nodes can yield as children number `rank` and later of a node at a depth."""

    @cache
    def best(depth: int, rank: int, n: int) -> float:
        if not n or depth == len(acceptance) or rank == len(acceptance[depth]):
            return 0.0
        rate = acceptance[depth][rank]
        with_child = (
            rate * (1 + best(depth + 1, 0, m - 1)) + best(depth, rank + 1, n - m)
            for m in range(1, n + 1)
        )
        return max(best(depth, rank + 1, n), *with_child)

    return best(0, 0, num_nodes)


def expectation(tree: StaticTree, acceptance: list[list[float]]) -> float:
    """Draft tokens that the tree yields in a step."""
    return sum(
        prod(acceptance[depth][rank] for depth, rank in enumerate(path)) for path in tree.paths
    )


@settings(max_examples=60, deadline=None)
@given(
    acceptance=st.lists(st.lists(rates, min_size=3, max_size=3), min_size=1, max_size=4),
    num_nodes=st.integers(1, 12),
)
def test_no_tree_of_its_size_yields_more(acceptance, num_nodes):
    tree = best_tree(acceptance, num_nodes)
    assert len(tree.paths) == min(
        num_nodes, sum(3**depth for depth in range(1, len(acceptance) + 1))
    )
    assert expectation(tree, acceptance) == pytest.approx(best_expectation(acceptance, num_nodes))


def test_depth_comes_before_width_where_it_pays():
    assert best_tree(RATES, 4).paths == ((0,), (1,), (0, 0), (0, 0, 0))
    assert best_tree([[0.9, 0.5], [0.1, 0.1]], 3).paths == ((0,), (1,), (0, 0))


def test_rates_are_of_seen_picks_and_rare_levels_copy_upper_ones():
    measured, generator = RankAcceptance(levels=3, width=3), torch.Generator().manual_seed(0)
    first = torch.tensor([0.6, 0.2, 0.1, 0.1])  # the last: none of the three
    for _ in range(40):
        rank = torch.multinomial(first, 50, replacement=True, generator=generator)
        picked = rank[:, None] == torch.arange(3)
        scores = torch.full((50, 3), 0.3).log()
        both = torch.stack([scores, scores]), torch.stack([picked, picked])
        measured.update(
            torch.zeros(50).long(), *both, torch.tensor([[True], [False]]).expand(2, 50)
        )
    seen = measured.rates()
    assert seen[0] == pytest.approx([0.6, 0.2, 0.1], abs=0.05)
    assert seen[1] == pytest.approx(seen[0]) and seen[2] == pytest.approx(seen[0])
    assert measured.fit.parameters[0, 0].tolist() != [
        1.0,
        0.0,
        0.0,
    ]  # and it calibrates all the while
