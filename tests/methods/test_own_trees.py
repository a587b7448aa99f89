"""DDD's and OPT-Tree's rules on trees of known values, and in an engine: the same tokens, and drafts that end early."""

from __future__ import annotations

import math

import pytest
import torch

from eagle_ray.assembly.assemble import build_engine
from eagle_ray.assembly.engine_sizes import EngineArgs
from eagle_ray.config import SpeculativeConfig
from eagle_ray.methods.eagle import published_trees
from eagle_ray.methods.eagle.published_trees import ddd_stops, opt_tree_stops
from eagle_ray.requests.parameters import SamplingParams
from eagle_ray.tree.expand import TreeBuilder
from tests.support.engines import some_prompts
from tests.support.toy_models import head, llama, run


def grown_trees(*levels: list[list[float]]) -> TreeBuilder:
    """Return trees of two paths, one list of probabilities per tree and level, each given its parent's path."""
    builder = TreeBuilder(torch.zeros(len(levels[0]), dtype=torch.int64), width=2)
    for depth, level in enumerate(levels):
        if depth:
            builder.frontier()
        values = torch.tensor(level).log().view(len(level), 1 if depth == 0 else 2, 2)
        builder.grow(values, torch.arange(values.numel()).view(values.shape))
    return builder


def test_ddd_stops_where_the_beam_is_improbable():
    builder = grown_trees([[0.8, 0.1], [0.2, 0.05]])
    assert ddd_stops(builder).tolist() == [False, True]
    # 0.9 of the beam's 0.8 goes on; of 0.2 nothing can
    builder = grown_trees([[0.8, 0.1], [0.8, 0.1]], [[0.9, 0.05, 0.5, 0.5], [0.2, 0.1, 0.5, 0.5]])
    assert ddd_stops(builder).tolist() == [False, True]


def test_opt_tree_stops_where_a_level_adds_little():
    first, second = [[0.9, 0.05]], [[0.5, 0.1, 0.5, 0.5]]
    assert opt_tree_stops(10)(grown_trees(first)).tolist() == [False]
    assert opt_tree_stops(10)(grown_trees(first, second)).tolist() == [
        False
    ]  # adds 0.45 + 0.09 + 0.05
    assert opt_tree_stops(10)(grown_trees(first, [[0.1, 0.05, 0.5, 0.5]])).tolist() == [
        True
    ]  # adds 0.185
    assert opt_tree_stops(1)(grown_trees(first, second)).tolist() == [
        True
    ]  # a tree of one node stays as it is
    assert opt_tree_stops(2)(grown_trees(first, second)).tolist() == [
        False
    ]  # 0.45 takes the place of 0.05


@pytest.mark.parametrize(
    ("method", "threshold"), [("ddd", "MIN_BEAM_PROBABILITY"), ("opt_tree", "MIN_GAIN")]
)
def test_outputs_are_plain_decodings_and_drafts_end_by_the_rule(monkeypatch, method, threshold):
    prompts = some_prompts(3)
    params = [
        SamplingParams(max_tokens=10, ignore_eos=True, temperature=t, seed=7)
        for t in (0.0, 0.0, 1.0)
    ]
    plain = outputs("none", prompts, params)[0]
    depths = {}
    for value in (0.0, 1e-9, math.inf):
        monkeypatch.setattr(published_trees, threshold, value)
        ids, depths[value] = outputs(method, prompts, params)
        assert ids == plain
    assert depths[math.inf] == 1 < depths[0.0] == 4


def outputs(
    method: str, prompts: list[list[int]], params: list[SamplingParams]
) -> tuple[list[list[int]], int]:
    """Return the output ids, and the deepest draft of any step."""
    speculative = SpeculativeConfig(
        method=method, max_nodes=20, max_depth=4, top_k=4, budget="uniform"
    )
    engine = build_engine(
        llama(), None if method == "none" else head(), speculative, EngineArgs(4, 128)
    )
    depths = [0]
    observe = engine.planner.observe
    engine.planner.observe = lambda outcome: (depths.append(outcome.depth), observe(outcome))
    sequences = run(engine, prompts, params)
    return [list(s.output_ids) for s in sequences], max(depths)


def test_a_rule_cannot_be_merged():
    with pytest.raises(ValueError, match="ddd decides its tree alone"):
        SpeculativeConfig(method="ddd+suffix")
