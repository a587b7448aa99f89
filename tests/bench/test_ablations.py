"""The ablations judge nodes as they say, keep the ancestors of what they keep, and leave outputs as they are."""

import pytest
import torch

from eagle_ray.engine.reference import reference_decode
from eagle_ray.evaluation.ablations import ExpandedPlanner, OwnConfidence, expanded, num_expanded
from eagle_ray.methods.drafter import Draft
from eagle_ray.requests.parameters import SamplingParams
from eagle_ray.tree.budget import Budget, uniform
from eagle_ray.tree.expand import TreeBuilder
from tests.support.toy_models import llama, llama_engine, run

WIDTH = 3


def grown_trees(
    kind: type[TreeBuilder], seed: int, depth: int = 4, vocab: int = 20
) -> tuple[TreeBuilder, list]:
    """Two trees from random distributions, and the frontiers that were expanded, with their own log-probabilities."""
    generator = torch.Generator().manual_seed(seed)
    builder, frontiers = kind(torch.tensor([1, 2]), WIDTH), []
    for level in range(depth):
        parents = 1
        if level:
            frontier = builder.frontier()
            parents = frontier.tokens.shape[1]
            frontiers.append(frontier)
        scores = (
            (4 * torch.randn(2, parents, vocab, generator=generator))
            .log_softmax(-1)
            .topk(WIDTH, -1)
        )
        builder.grow(scores.values, scores.indices)
    return builder, frontiers


def has_all_parents(keep, parents):
    return bool((~keep | (parents < 0) | keep.gather(1, parents.clamp(min=0))).all())


@pytest.mark.parametrize("seed", range(5))
def test_without_value_the_surest_nodes_come_first(seed):
    """By hand: from the root on, take the surest node among those whose parents are taken."""
    tree = grown_trees(OwnConfidence, seed)[0].build()
    own, parents = tree.draft_log_probs, tree.parents
    for num_nodes in (2, 5, 9):
        keep = uniform(tree, Budget(2 * num_nodes, num_nodes))
        assert has_all_parents(keep, parents)
        for b in range(2):
            taken = {0}
            while len(taken) < num_nodes:
                open_ = [
                    i
                    for i in range(1, tree.num_nodes)
                    if i not in taken and int(parents[b, i]) in taken
                ]
                taken.add(max(open_, key=lambda i: own[b, i].item()))
            least = min(tree.log_values[b, i].item() for i in taken)
            assert min(tree.log_values[b][keep[b]].tolist()) == pytest.approx(least)


@pytest.mark.parametrize("seed", range(5))
def test_without_value_the_surest_of_a_level_are_expanded(seed):
    builder, frontiers = grown_trees(OwnConfidence, seed)
    tree = builder.build()
    for depth, frontier in enumerate(frontiers, 1):
        level = tree.depths[0] == depth
        best = tree.draft_log_probs[:, level].topk(WIDTH).indices
        assert torch.equal(frontier.tokens, tree.tokens[:, level].gather(1, best))
    assert any(
        (a.tokens != b.tokens).any()
        for a, b in zip(frontiers, grown_trees(TreeBuilder, seed)[1], strict=True)
    )


def test_without_reranking_what_was_expanded_is_verified():
    builder, frontiers = grown_trees(TreeBuilder, seed=3)
    tree = builder.build()
    keep = expanded(tree, WIDTH)
    assert has_all_parents(keep, tree.parents) and keep.sum(1).tolist() == [1 + 4 * WIDTH] * 2
    for depth, frontier in enumerate(frontiers, 1):
        mine = tree.tokens[0][keep[0] & (tree.depths[0] == depth)].tolist()
        assert sorted(mine) == sorted(frontier.tokens[0].tolist())
    planner, draft = ExpandedPlanner(5, WIDTH), Draft(tree, builder.levels, builder.depth, 0)
    assert planner.plan(None).max_depth == 4  # the last of five levels is for reranking alone
    allocation = planner.allocate(draft, planner.plan(None), None)
    assert allocation.num_rows == 2 * allocation.num_nodes == 2 * (1 + num_expanded(5, WIDTH)) == 26


@pytest.mark.parametrize("ablation", ["value", "reranking"])
def test_outputs_are_plain_decodings(ablation):
    engine = llama_engine(2, max_nodes=12, max_depth=4, top_k=3)
    engine.drafter.ranking.calibration = engine.drafter.ranking.coupling = None
    if ablation == "value":
        engine.drafter.builder = OwnConfidence
    else:
        engine.planner = ExpandedPlanner(4, 3)
    prompts = [[5 + i, 9, 23 + i] for i in range(4)]
    params = [SamplingParams(temperature=0.8 * (i % 2), seed=i, max_tokens=16) for i in range(4)]
    model = llama()
    model.set_attn_implementation("sdpa")
    plain = [
        reference_decode(model, ids, p, frozenset([2])).ids
        for ids, p in zip(prompts, params, strict=True)
    ]
    assert [s.output_ids for s in run(engine, prompts, params)] == plain
