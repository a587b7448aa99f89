"""The tree laws, over random trees with many exact ties, against slow and obvious references."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle_ray.tree.ancestor_words import pack_ancestors, unpack_ancestors
from eagle_ray.tree.budget import ranks
from eagle_ray.tree.expand import TreeBuilder
from tests.support.toy_models import best_nodes, random_tree
from tests.support.trees import check_tree, grown_trees, shapes


@settings(max_examples=150, deadline=None)
@given(**shapes)
def test_grown_trees_are_lawful(seed, batch, depth, width, ties):
    tree = grown_trees(seed, batch, depth, width, ties)
    check_tree(tree)
    assert tree.num_nodes == 1 + width + (depth - 1) * width**2


@settings(max_examples=100, deadline=None)
@given(data=st.data(), **shapes)
def test_rows_are_packed_as_torch_packs_them(data, seed, batch, depth, width, ties):
    """A row for every node, for the valid ones, and for those and padding."""
    tree = grown_trees(seed, batch, depth, width, ties)
    sizes = data.draw(st.lists(st.integers(1, tree.num_nodes), min_size=batch, max_size=batch))
    keep = ranks(tree.log_values) < torch.tensor(sizes)[:, None]
    tree = tree.rerank(keep, max(sizes))
    lengths = torch.arange(3, 3 + batch)
    for num_rows in (batch * max(sizes), sum(sizes), sum(sizes) + 3):
        rows, by_torch = tree.pack(lengths, num_rows), tree.pack_portably(lengths, num_rows)
        assert all(map(torch.equal, rows.tensors, by_torch.tensors))


@settings(max_examples=150, deadline=None)
@given(data=st.data(), **shapes)
def test_rerank_keeps_the_best_nodes_and_their_ancestors(data, seed, batch, depth, width, ties):
    tree = grown_trees(seed, batch, depth, width, ties)
    num_nodes = data.draw(st.integers(1, tree.num_nodes))
    budgets = data.draw(st.lists(st.integers(1, tree.num_nodes), min_size=batch, max_size=batch))
    keep = ranks(tree.log_values) < torch.tensor(budgets).clamp(max=num_nodes)[:, None]
    kept, by_torch = tree.rerank(keep, num_nodes), tree.rerank_portably(keep, num_nodes)
    assert all(
        torch.equal(ours, theirs)
        for ours, theirs in zip(kept.tensors, by_torch.tensors, strict=True)
    )
    check_tree(kept)
    for b, budget in enumerate(budgets):
        best = sorted(
            range(tree.num_nodes), key=lambda i: (-tree.log_values[b, i].item(), i)
        )  # ties: the earlier
        wanted = sorted(best[: min(budget, num_nodes)])
        assert kept.tokens[b][kept.valid[b]].tolist() == tree.tokens[b, wanted].tolist()
        assert kept.log_values[b][kept.valid[b]].tolist() == tree.log_values[b, wanted].tolist()
        again = [
            wanted.index(p) if p >= 0 else -1 for p in tree.parents[b, wanted].tolist()
        ]  # raises on an orphan
        assert kept.parents[b][kept.valid[b]].tolist() == again


@settings(max_examples=60, deadline=None)
@given(data=st.data(), **shapes)
def test_ancestors_equal_a_walk_up(data, seed, batch, depth, width, ties):
    tree = best_nodes(
        grown_trees(seed, batch, depth, width, ties),
        data.draw(st.lists(st.integers(1, 30), min_size=batch, max_size=batch)),
    )
    reach = tree.ancestors(depth)
    assert torch.equal(reach, unpack_ancestors(tree.ancestor_words(depth), tree.num_nodes))
    for b in range(batch):
        for i in range(tree.num_nodes):
            walk, node = {i}, i
            while tree.parents[b, node] >= 0:
                node = int(tree.parents[b, node])
                walk.add(node)
            assert set(reach[b, i].nonzero().flatten().tolist()) == walk


@given(st.integers(1, 200), st.integers(0, 99))
def test_words_hold_what_is_seen(columns, seed):
    seen = torch.rand(2, 3, columns, generator=torch.Generator().manual_seed(seed)) < 0.5
    words = pack_ancestors(seen)
    assert words.shape[2] == -(-columns // 64) and torch.equal(
        unpack_ancestors(words, columns), seen
    )
    for column in (0, columns // 2, columns - 1):
        assert torch.equal(words[:, :, column // 64] >> column % 64 & 1, seen[:, :, column].long())


def test_more_nodes_than_a_word_have_their_ancestors_in_several():
    tree = random_tree(torch.Generator().manual_seed(3), 150)
    depth = int(tree.depths.max())
    assert tree.ancestor_words(depth).shape == (1, 150, 3)
    reach = tree.ancestors(depth)[0]
    assert torch.equal(reach.sum(1), tree.depths[0] + 1)
    assert all(reach[i, p] and torch.equal(reach[i] & (torch.arange(150) != i), reach[p])
               for i, p in enumerate(tree.parents[0].tolist()) if p >= 0)  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(data=st.data(), **shapes)
def test_packing_loses_no_node_and_pads_with_nobody(data, seed, batch, depth, width, ties):
    budgets = data.draw(st.lists(st.integers(1, 12), min_size=batch, max_size=batch))
    tree = best_nodes(grown_trees(seed, batch, depth, width, ties), budgets)
    count = int(tree.valid.sum())
    num_rows = count + data.draw(st.integers(0, 5))
    lengths = torch.arange(10, 10 + batch)
    rows = tree.pack(lengths, num_rows)
    assert len(rows.tokens) == num_rows and int((rows.seq < 0).sum()) == num_rows - count
    for b in range(batch):
        for i in range(int(tree.valid[b].sum())):
            row = int(rows.row_of[b, i])
            assert (rows.seq[row], rows.node[row]) == (b, i)
            assert rows.tokens[row] == tree.tokens[b, i]
            assert rows.positions[row] == lengths[b] + tree.depths[b, i]


def test_a_full_rectangle_is_packed_as_it_stands():
    tree = grown_trees(0, 3, 2, 2, False)
    rows = tree.pack(torch.tensor([4, 5, 6]), 3 * tree.num_nodes)
    assert rows.is_rectangle
    assert rows.tokens.tolist() == tree.tokens.flatten().tolist()


def test_half_precision_ties_would_orphan_nodes():
    """Why values are fp32 and the sort is stable: a certain child ties with its parent and must come after it."""
    builder = TreeBuilder(torch.tensor([1]), 1)
    for token in (5, 6, 7):
        if token > 5:
            builder.frontier()
        builder.grow(torch.zeros(1, 1, 1), torch.tensor([[[token]]]))
    kept = best_nodes(builder.build(), [3])
    assert kept.tokens.tolist() == [[1, 5, 6]]


def test_confidences_are_conditional_probabilities():
    builder = TreeBuilder(torch.tensor([1]), 2)
    builder.grow(torch.tensor([[[0.5, 0.25]]]).log(), torch.tensor([[[5, 6]]]))
    builder.frontier()
    builder.grow(torch.tensor([[[0.8, 0.1], [0.4, 0.2]]]).log(), torch.tensor([[[7, 8], [7, 8]]]))
    torch.testing.assert_close(
        builder.build().confidences(), torch.tensor([[1.0, 0.5, 0.25, 0.8, 0.1, 0.4, 0.2]])
    )


def test_ends_get_no_children_and_leave_their_places_to_others():
    ends = torch.tensor([[5, 9], [-1, -1]])
    builder = TreeBuilder(torch.tensor([9, 9]), 2, ends=ends)
    builder.grow(
        torch.tensor([[[0.5, 0.3, 0.2]]]).log().expand(2, 1, 3),
        torch.tensor([[[5, 6, 7]]]).expand(2, 1, 3),
    )
    assert builder.frontier().tokens.tolist() == [[6, 7], [5, 6]]
    builder.grow(torch.zeros(2, 2, 1), torch.tensor([[[9], [9]]]).expand(2, 2, 1))
    frontier = builder.frontier()
    assert frontier.tokens.tolist() == [[9, 9], [9, 9]]
    assert (frontier.log_values > -torch.inf).tolist() == [[False, False], [True, True]]
    assert builder.build().valid.all()  # an end is worth as much as any other token
