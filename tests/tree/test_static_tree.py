"""StaticTree: paths by rank, closed and in order, and the nodes that are to have children."""

import torch

from eagle_ray.core.tree_bounds import TreeBounds
from eagle_ray.tree.budget import Budget, static
from eagle_ray.tree.expand import TreeBuilder
from eagle_ray.tree.static_tree import MC_SIM_7B_63, StaticTree
from tests.support.trees import check_tree

EAGLE1 = [
    *[[0], [1], [2], [3], [0, 0], [0, 1], [0, 2], [1, 0], [1, 1], [2, 0], [2, 1], [3, 0]],
    *[[0, 0, 0], [0, 0, 1], [0, 0, 2], [0, 1, 0], [0, 1, 1], [0, 2, 0], [0, 2, 1], [1, 0, 0]],
    *[[0, 0, 0, 0], [0, 0, 0, 1], [0, 0, 0, 2], [0, 0, 0, 0, 0], [0, 0, 0, 0, 1]],
]


def test_eagle1s_tree_is_the_published_one():
    assert [list(path) for path in MC_SIM_7B_63.paths] == EAGLE1
    assert (len(MC_SIM_7B_63.paths), MC_SIM_7B_63.depth, MC_SIM_7B_63.width) == (25, 5, 4)


def test_its_draft_runs_four_four_one_and_one_rows():
    """As the reference's: of level 1 all four nodes, of level 2 three children of the first and one of the second."""
    expanded = [MC_SIM_7B_63.parents_at(level) for level in range(1, 6)]
    assert expanded == [
        [(0, 0), (0, 1), (0, 2), (0, 3)],
        [(0, 0), (0, 1), (0, 2), (1, 0)],
        [(0, 0)],
        [(0, 0)],
        [],
    ]


def test_a_tree_within_bounds_is_still_closed():
    tree = MC_SIM_7B_63.truncate(TreeBounds(max_nodes=9, max_depth=3, top_k=2))
    assert tree.paths == (
        (0,),
        (1,),
        (0, 0),
        (0, 1),
        (1, 0),
        (1, 1),
        (0, 0, 0),
        (0, 0, 1),
        (0, 1, 0),
    )
    assert StaticTree.of(tree.paths) == tree
    assert StaticTree.of([]).depth == StaticTree.of([]).width == 0


def test_builder_with_a_shape_grows_exactly_its_paths():
    shape, generator = StaticTree.of([(0, 2, 1), (2, 0), (1,)]), torch.Generator().manual_seed(0)
    builder, frontiers = TreeBuilder(torch.tensor([5, 6]), width=3, shape=shape), []
    for level in range(shape.depth):
        frontiers += [builder.frontier()] if level else []
        nodes = frontiers[-1].tokens.shape[1] if level else 1
        best = torch.randn(2, nodes, 20, generator=generator).log_softmax(-1).topk(3, -1)
        builder.grow(best.values, best.indices)
    assert [frontier.tokens.shape[1] for frontier in frontiers] == [2, 1]
    assert frontiers[1].parent_rows.tolist() == [[0], [0]]
    tree = builder.build()
    keep = static(shape.paths)(tree, Budget(100, 100))
    assert keep.sum(1).tolist() == [1 + len(shape.paths)] * 2
    kept = tree.rerank(keep, 1 + len(shape.paths))
    check_tree(kept)
    assert kept.depths[0].tolist() == [0, 1, 1, 1, 2, 2, 3]
    assert kept.parents[0].tolist() == [-1, 0, 0, 0, 1, 3, 4]
