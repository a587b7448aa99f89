"""The walk, against one that follows the definition node by node."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle_ray.tree.accepted_path import accept_path, accept_path_portably
from eagle_ray.tree.draft_tree import DraftTree, VerifyResult
from tests.support.toy_models import random_tree


def walk(tree: DraftTree, picks: list[int]) -> tuple[list[int], list[int]]:
    """Accepted nodes, root included, and the tokens they yield, bonus included; picks by node of a single tree."""
    nodes = [0]
    while True:
        children = [
            i
            for i in range(1, tree.num_nodes)
            if tree.valid[0, i] and tree.parents[0, i] == nodes[-1]
        ]
        chosen = [i for i in children if tree.tokens[0, i] == picks[nodes[-1]]]
        if not chosen:
            return nodes, [picks[i] for i in nodes]
        nodes.append(chosen[0])


@settings(max_examples=200, deadline=None)
@given(seed=st.integers(0, 10**6), num_nodes=st.integers(1, 20), agreement=st.floats(0, 1))
def test_accept_path_is_the_walk(seed, num_nodes, agreement):
    generator = torch.Generator().manual_seed(seed)
    tree = random_tree(generator, num_nodes, vocab=6)
    max_depth = int(tree.depths.max())
    picks = torch.randint(0, 6, (num_nodes,), generator=generator)
    for i in range(1, num_nodes):  # let the target agree with some of the drafts
        if torch.rand((), generator=generator) < agreement:
            picks[tree.parents[0, i]] = tree.tokens[0, i]
    rows = tree.pack(torch.tensor([7]), num_nodes)
    result = accept_path(tree, rows, picks, max_depth)
    nodes, tokens = walk(tree, picks.tolist())
    assert int(result.num_accepted) == len(nodes) - 1
    assert result.accepted_nodes[0].tolist() == nodes + [-1] * (max_depth + 1 - len(nodes))
    assert result.tokens[0, : len(nodes)].tolist() == tokens
    by_torch = accept_path_portably(tree, rows, picks, max_depth)
    assert all(
        torch.equal(getattr(result, name), getattr(by_torch, name))
        for name in VerifyResult.__slots__
    )


def test_each_tree_of_a_batch_is_walked_alone():
    trees = [random_tree(torch.Generator().manual_seed(s), 9, vocab=6) for s in range(8)]
    both = DraftTree(*(torch.cat([getattr(t, f) for t in trees]) for f in DraftTree.__slots__))
    depth = int(both.depths.max())
    picks = torch.randint(0, 6, (8, 9), generator=torch.Generator().manual_seed(3))
    rows = both.pack(torch.zeros(8, dtype=torch.int64), 72)
    result = accept_path(both, rows, picks.flatten(), depth)
    assert [int(n) for n in result.num_accepted] == [
        len(walk(tree, picks[b].tolist())[0]) - 1 for b, tree in enumerate(trees)
    ]


def test_a_root_alone_yields_its_bonus_token():
    tree = DraftTree.of_roots(torch.tensor([3, 4]))
    result = accept_path(tree, tree.pack(torch.tensor([1, 1]), 2), torch.tensor([8, 9]), 0)
    assert result.tokens.tolist() == [[8], [9]] and result.num_accepted.tolist() == [0, 0]


def test_result_of_roots_alone_is_as_wide_as_the_dropped_drafts():
    tree = DraftTree.of_roots(torch.tensor([3, 4]))
    rows = tree.pack(torch.tensor([7, 9]), 2)
    result = accept_path(tree, rows, torch.tensor([11, 12]), max_depth=3)
    assert result.accepted_nodes.tolist() == [[0, -1, -1, -1]] * 2
    assert result.num_accepted.tolist() == [0, 0]
    assert result.tokens.shape == (2, 4) and result.tokens[:, 0].tolist() == [11, 12]
