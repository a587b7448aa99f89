"""The engine over targets of other families: outputs are transformers' own, token for token, drafts and all."""

from __future__ import annotations

import pytest

from eagle_ray.core.tree_bounds import TreeBounds
from eagle_ray.engine.engine import Engine
from eagle_ray.engine.reference import reference_decode
from eagle_ray.methods.calibration import Calibration
from eagle_ray.methods.coupling import Coupling
from eagle_ray.methods.eagle.drafter import EagleDrafter
from eagle_ray.models.graphs import CudaGraphRunner
from eagle_ray.models.target import TargetModel
from eagle_ray.planner.planner import UniformPlanner
from tests.support.engines import differing_rows, some_params, some_prompts
from tests.support.families import COVERED, FAMILIES, plain_copy, random_model
from tests.support.toy_models import head, run

TREE = TreeBounds(12, 4, 4)
OFTEN = (
    "gemma3_text",
    "gpt_oss",
    "olmo3",
    "mixtral",
    "qwen3_moe",
)  # norms and windows, sinks, experts; the rest with the slow tests


@pytest.mark.parametrize(
    "name", [n if n in OFTEN else pytest.param(n, marks=pytest.mark.slow) for n in FAMILIES]
)
def test_every_family_equals_plain_decoding(name):
    """Four slots and too few blocks for them, so that some are put back; half of the prompts begin alike."""
    model = random_model(FAMILIES[name])
    plain = plain_copy(model)
    target = TargetModel(model, 4, 128 + TREE.num_positions, kv_tokens=288)
    drafter = EagleDrafter(
        head(), target, calibration=Calibration(TREE.max_depth), coupling=Coupling(TREE.max_depth)
    )
    engine = Engine(target, drafter, UniformPlanner(TREE), 128, TREE, prefill_tokens=24)
    begin = list(range(3, 39))
    prompts = [begin + ids if i % 2 else ids for i, ids in enumerate(some_prompts(10))]
    params = some_params(10, max_tokens=14)
    sequences = run(engine, prompts, params)
    own = [
        reference_decode(plain, ids, p, frozenset([2]))
        for ids, p in zip(prompts, params, strict=True)
    ]
    assert differing_rows([s.output_ids for s in sequences], own) == []
    assert sum(s.output_ids == o.ids for s, o in zip(sequences, own, strict=True)) >= 9
    assert sum(s.stats.num_accepted_draft_tokens for s in sequences) > 0


@pytest.mark.parametrize("name", ["qwen3_moe", "one of three experts", "gemma3_text", "glm4"])
def test_replayed_steps_equal_plain_decoding(name):
    """Graphs pad their rows, which are routed like any other: emulated, they give what plain decoding does."""
    model = random_model(COVERED[name])
    plain = plain_copy(model)
    target = TargetModel(model, 4, 128 + TREE.num_positions)
    drafter = EagleDrafter(
        head(), target, calibration=Calibration(TREE.max_depth), coupling=Coupling(TREE.max_depth)
    )
    engine = Engine(
        target, drafter, UniformPlanner(TREE), 128, TREE, 64, CudaGraphRunner.of(target)
    )
    prompts, params = some_prompts(8), some_params(8, max_tokens=14)
    sequences = run(engine, prompts, params)
    own = [
        reference_decode(plain, ids, p, frozenset([2]))
        for ids, p in zip(prompts, params, strict=True)
    ]
    assert differing_rows([s.output_ids for s in sequences], own) == []
    assert sum(s.output_ids == o.ids for s, o in zip(sequences, own, strict=True)) >= 7
    assert engine.graphs.num_replayed > 10 and not engine.graphs.failures
