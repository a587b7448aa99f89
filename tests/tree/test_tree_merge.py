"""Merged trees against dictionaries of paths; the blend against what it is told."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle_ray.kernels import cpu_ops
from eagle_ray.methods.combine.calibration import EnsembleCalibration, children_on_path
from eagle_ray.tree.draft_tree import DraftTree
from eagle_ray.tree.tree_merge import merge_trees
from tests.support.trees import as_paths, check_tree, conditional_log_probs, some_trees


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 10**6), count=st.integers(1, 3), batch=st.integers(1, 3), ties=st.booleans()
)
def test_merged_tree_has_each_path_once_with_all_log_probs(seed, count, batch, ties):
    trees = some_trees(seed, count, batch, ties)
    merged = merge_trees([None, *trees, None], max_depth=3)
    assert (merged.log_probs_by_drafter[..., [0, -1]] == -torch.inf).all()
    merged = replace(merged, log_probs_by_drafter=merged.log_probs_by_drafter[..., 1:-1])
    valued = merged.with_log_probs(merged.log_probs_by_drafter.amax(-1), max_depth=3)
    check_tree(valued)
    check_tree(merged.tree)
    for b in range(batch):
        each = [as_paths(tree, b, conditional_log_probs(tree)) for tree in trees]
        wanted = {
            path: [paths.get(path, -torch.inf) for paths in each] for path in set().union(*each)
        }
        for i in range(count):
            said = as_paths(merged.tree, b, merged.log_probs_by_drafter[..., i])
            assert said.keys() == wanted.keys()
            assert all(said[path] == wanted[path][i] for path in said)
            own = as_paths(trees[i], b, trees[i].log_values)
            assert all(
                as_paths(merged.tree, b, merged.tree.log_values)[path] >= own[path] for path in own
            )
        for path, value in as_paths(valued, b, valued.log_values).items():
            along = [max(wanted[path[:end]]) for end in range(1, len(path) + 1)]
            torch.testing.assert_close(value, sum(along), atol=1e-5, rtol=0)


def test_blend_starts_with_a_lone_value_or_the_mean_of_several():
    said = torch.tensor([[[-0.1, -torch.inf], [-torch.inf, -0.5], [0.2, 0.8], [0.5, 0.5]]])
    said[0, 2:] = said[0, 2:].log()
    values = EnsembleCalibration(1, 2).apply(torch.ones(1, 4).long(), torch.zeros(1).long(), said)
    torch.testing.assert_close(
        values[0], torch.tensor([-0.1, -0.5, torch.tensor(0.5).log(), torch.tensor(0.5).log()])
    )


def test_blend_learns_weights_of_drafters_and_of_agreement():
    """Two drafters say one half of all they offer: both always rightly, the first alone at times, the second never."""
    blend, generator = EnsembleCalibration(2, 2), torch.Generator().manual_seed(0)
    half, none = float(torch.tensor(0.5).log()), -torch.inf
    said = torch.tensor([[0.0, 0.0], [half, half], [half, none], [none, half]])
    offered = torch.tensor([False, True, True, True])
    for _ in range(300):
        right = torch.stack(
            [torch.ones(8) > 0, torch.rand(8, generator=generator) < 0.5, torch.zeros(8) > 0], 1
        )
        picked = torch.nn.functional.pad(right, (1, 0))
        nothing = torch.zeros(8, 4).bool()
        levels = torch.stack([nothing, offered.expand(8, -1)]), torch.stack([nothing, picked])
        blend.update(torch.zeros(8).long(), said.expand(8, -1, -1), *levels)
    values = blend.apply(torch.full((1, 4), 2), torch.zeros(1).long(), said[None]).exp()[0, 1:]
    assert values[0] > 0.85 and abs(values[1] - 0.5) < 0.1 and values[2] < 0.15
    untold = blend.apply(torch.full((1, 4), 1), torch.zeros(1).long(), said[None]).exp()[0, 1:]
    torch.testing.assert_close(untold, torch.full((3,), 0.5))


def test_blend_learns_separately_for_steps_without_the_model():
    """A lookup's child that the model did not propose is always wrong; without the model it is always right."""
    blend, both = EnsembleCalibration(1, 2), torch.zeros(4).long()
    said = torch.tensor([[0.0, 0.0], [-0.7, -torch.inf], [-torch.inf, -0.7]]).expand(4, -1, -1)
    alone = said.clone()
    alone[..., 0] = -torch.inf
    offered = torch.tensor([False, True, True]).expand(4, -1)
    for _ in range(200):
        blend.update(blend.sets(both), said, offered[None], (offered & (said[..., 0] > -1))[None])
        found = (offered & (alone[..., 1] > -1))[None]
        blend.update(blend.sets(both, has_model=False), alone, found, found)
    depths = torch.ones(4, 3).long()
    assert blend.apply(depths, blend.sets(both), said).exp()[0, 2] < 0.1
    assert blend.apply(depths, blend.sets(both, has_model=False), alone).exp()[0, 2] > 0.9


def test_missing_child_counts_only_if_its_drafter_has_others():
    """The second proposes nothing in the second row, so the first's child there keeps its own value."""
    blend, sets = EnsembleCalibration(1, 2), torch.zeros(2).long()
    said = (
        torch.tensor([[[0.0, 0.0], [-0.7, -torch.inf], [-torch.inf, -0.7]]])
        .expand(2, -1, -1)
        .clone()
    )
    said[1, :, 1] = -torch.inf
    offered = torch.tensor([[False, True, True], [False, True, False]])
    picked = torch.tensor([[False, False, True], [False, True, False]])
    for _ in range(200):
        blend.update(sets, said, offered[None], picked[None])
    values = blend.apply(torch.ones(2, 3).long(), sets, said).exp()
    assert values[0, 1] < 0.2 and values[1, 1] > 0.6


def test_nodes_that_were_not_reached_teach_a_blend_nothing():
    blend, nothing = EnsembleCalibration(1, 2), torch.zeros(1, 2, 3).bool()
    blend.update(torch.zeros(2).long(), torch.full((2, 3, 2), -1.0), nothing, nothing)
    assert torch.equal(blend.fit.parameters, EnsembleCalibration(1, 2).fit.parameters)


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    count=st.integers(1, 3),
    batch=st.integers(1, 5),
    ties=st.booleans(),
    model=st.sampled_from([None, 0]),
)
def test_the_kernel_of_the_cpu_merges_and_values_as_torch_does(seed, count, batch, ties, model):
    if not cpu_ops.has_function("merge_blended"):
        pytest.skip("no compiled library: install with a C++ compiler")
    generator = torch.Generator().manual_seed(seed)
    trees = [*some_trees(seed, count, batch, ties), None]
    blend = EnsembleCalibration(2, len(trees))  # deeper nodes have the last level's weights
    blend.fit.parameters += torch.randn(blend.fit.parameters.shape, generator=generator)
    sets = torch.randint(0, 4, (batch,), generator=generator)
    ours = blend.merge(trees, 3, sets, model)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu_ops, "has_function", lambda name: False)
        theirs = blend.merge(trees, 3, sets, model)
    num_nodes = ours.tree.num_nodes
    assert (
        not theirs.tree.valid[:, num_nodes:].any() and theirs.tree.valid[:, :num_nodes].any(0).all()
    )
    for name in ("tokens", "parents", "depths", "draft_log_probs", "valid"):
        assert torch.equal(getattr(ours.tree, name), getattr(theirs.tree, name)[:, :num_nodes]), (
            name
        )
    close = partial(torch.testing.assert_close, atol=1e-4, rtol=1e-5)
    close(ours.tree.log_values, theirs.tree.log_values[:, :num_nodes])
    close(ours.log_probs, theirs.log_probs[:, :num_nodes])
    close(ours.extra, theirs.extra[..., :num_nodes])


def path_of(
    tree: DraftTree, b: int, picks: list[int], num_accepted: int
) -> list[tuple[set[int], set[int]]]:
    """Slow and obvious: the children of each node that the target's path reached, and the one it went on to."""
    node, levels = 0, []
    for pick in picks[: num_accepted + 1]:
        children = {i for i in range(tree.num_nodes) if int(tree.parents[b, i]) == node}
        taken = {i for i in children if int(tree.tokens[b, i]) == pick}
        levels.append((children, taken))
        if not taken:
            break
        (node,) = taken
    return levels


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 10**6), batch=st.integers(1, 4))
def test_the_children_on_the_targets_path_are_observed(seed, batch):
    generator = torch.Generator().manual_seed(seed)
    tree = merge_trees(some_trees(seed, 2, batch, ties=False), 3).tree
    picks = torch.randint(0, 4, (batch, 4), generator=generator)
    num_accepted = torch.randint(0, 4, (batch,), generator=generator)
    offered, picked = children_on_path(tree, picks, num_accepted, 3)
    for b in range(batch):
        levels = path_of(tree, b, picks[b].tolist(), int(num_accepted[b]))[:3]
        levels += [(set(), set())] * (3 - len(levels))
        found = [
            (set(o[b].nonzero()[:, 0].tolist()), set(p[b].nonzero()[:, 0].tolist()))
            for o, p in zip(offered, picked, strict=True)
        ]
        assert found == levels
