"""Policies against slow and obvious references, on trees with many exact ties."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle_ray.tree.budget import Budget, Candidates, best_of_batch, static, uniform
from eagle_ray.tree.draft_tree import DraftTree
from eagle_ray.tree.expand import TreeBuilder
from tests.support.trees import check_tree, grown_trees, shapes


def one_node_at_a_time(tree: DraftTree, budget: Budget) -> list[set[int]]:
    """One node after the other: always the most valuable of the whole batch that its tree still has room for."""
    batch = tree.tokens.shape[0]
    kept = [{0} for _ in range(batch)]
    worth = tree.log_values.tolist()
    for b in range(batch):
        weight = 0.0 if budget.log_weights is None else budget.log_weights[b]
        deepest = math.inf if budget.max_depths is None else budget.max_depths[b]
        worth[b] = [
            float(torch.tensor(v) + weight) if d <= deepest else -math.inf
            for v, d in zip(worth[b], tree.depths[b].tolist(), strict=True)
        ]
    order = sorted(
        (-worth[b][i], b, i)
        for b in range(batch)
        for i in range(1, tree.num_nodes)
        if worth[b][i] > -math.inf
    )
    for _, b, i in order:
        if sum(map(len, kept)) < budget.num_rows and len(kept[b]) < budget.num_nodes:
            kept[b].add(i)
    return kept


@settings(max_examples=150, deadline=None)
@given(data=st.data(), **shapes)
def test_global_budget_takes_the_best_nodes_and_their_ancestors(
    data, seed, batch, depth, width, ties
):
    tree = grown_trees(seed, batch, depth, width, ties)
    limits = st.none() | st.lists(st.integers(0, depth), min_size=batch, max_size=batch).map(
        torch.tensor
    )
    weights = st.none() | st.lists(
        st.sampled_from([-1.0, 0.0, 0.5]), min_size=batch, max_size=batch
    ).map(torch.tensor)
    budget = Budget(
        num_rows=batch + data.draw(st.integers(0, batch * tree.num_nodes)),
        num_nodes=data.draw(st.integers(1, tree.num_nodes)),
        max_depths=data.draw(limits),
        log_weights=data.draw(weights),
    )
    keep = best_of_batch(tree, budget)
    wanted = one_node_at_a_time(tree, budget)
    assert [set(row.nonzero().flatten().tolist()) for row in keep] == wanted
    kept = tree.rerank(keep, budget.num_nodes)
    check_tree(kept)  # every kept node's ancestors are kept
    assert int(kept.valid.sum()) == sum(map(len, wanted)) <= budget.num_rows


@pytest.mark.parametrize("num_nodes", [1, 4, 9, 100])
@pytest.mark.parametrize("ties", [False, True])
def test_candidates_are_those_of_torch(num_nodes, ties):
    tree = grown_trees(3, 4, 3, 3, ties)
    max_depths = torch.tensor([1, 2, 3, 0])
    for limits in (None, max_depths):
        budget = Budget(num_rows=0, num_nodes=num_nodes, max_depths=limits)
        ours, theirs = Candidates.of(tree, budget), Candidates.of_portably(tree, budget)
        for name in ("log_values", "owners", "nodes"):
            assert torch.equal(getattr(ours, name), getattr(theirs, name))
        sizes = list(range(len(ours.nodes) + 1))
        assert ours.expected(sizes) == pytest.approx(theirs.expected(sizes), rel=1e-5)
        for num_rows in (4, 5, 9, 500):
            keep, counts = ours.keep_and_count(num_rows)
            assert torch.equal(keep, theirs.keep(num_rows))
            assert counts == keep.sum(1).tolist()


def test_expected_tokens_are_the_sums_of_the_best_values():
    tree = grown_trees(5, 3, 3, 3, False)
    candidates = Candidates.of(tree, Budget(num_rows=0, num_nodes=tree.num_nodes))
    best = tree.log_values[:, 1:].exp().flatten().sort(descending=True).values
    sizes = [0, 1, 5, best.numel()]
    torch.testing.assert_close(
        torch.tensor(candidates.expected(sizes)), torch.stack([best[:m].sum() for m in sizes])
    )


@pytest.mark.parametrize("max_nodes", [1, 5, 60])
def test_uniform_gives_every_sequence_the_same_rows(max_nodes):
    tree = grown_trees(3, 4, 3, 2, False)
    num_nodes = min(max_nodes + 1, tree.num_nodes)
    assert uniform(tree, Budget(4 * num_nodes, num_nodes)).sum(1).tolist() == [num_nodes] * 4


def test_static_keeps_the_paths_by_rank_and_what_leads_to_them():
    tree = grown_trees(7, 2, 3, 3, False)
    keep = static([(0, 0, 1), (2,)])(tree, Budget(100, 100))
    for b in range(2):
        children = [i for i in range(tree.num_nodes) if tree.parents[b, i] == 0]
        first = [i for i in range(tree.num_nodes) if tree.parents[b, i] == children[0]]
        last = [i for i in range(tree.num_nodes) if first and tree.parents[b, i] == first[0]]
        assert set(keep[b].nonzero().flatten().tolist()) == {
            0,
            children[0],
            children[2],
            *first[:1],
            *last[1:2],
        }
    check_tree(tree.rerank(keep, 100))


def test_trees_spread_over_a_batch_leave_the_others_alone():
    tree = grown_trees(7, 2, 2, 3, False)
    spread = tree.spread(torch.tensor([1, 3]), torch.tensor([90, 91, 92, 93]))
    check_tree(spread)
    assert spread.valid.sum(1).tolist() == [1, tree.num_nodes, 1, tree.num_nodes]
    assert spread.tokens[0, 0] == 90 and spread.tokens[2, 0] == 92
    assert spread.tokens[1].tolist() == tree.tokens[0].tolist()


def test_static_paths_may_be_long_and_wide():
    """More of them than a number of 64 bits could tell apart by its digits."""
    deep = (0,) * 30
    builder = TreeBuilder(torch.tensor([1]), width=1)
    for _ in deep:
        builder.grow(torch.zeros(1, 1, 1), torch.ones(1, 1, 1, dtype=torch.int64))
        builder.frontier()
    tree = builder.build()
    assert static([deep, (99,)])(tree, Budget(100, 100)).all()
    assert static([deep[:7], (99,)])(tree, Budget(100, 100)).sum() == 8
    assert static([])(tree, Budget(100, 100)).sum() == 1
