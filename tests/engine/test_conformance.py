"""The reference implementation's greedy traces: same outputs, same accepted length at every step, same trees."""

import json
from pathlib import Path

import pytest
import torch

from eagle_ray.core.decode_batch import DecodeSlots
from eagle_ray.core.sampling_batch import SamplingBatch
from eagle_ray.core.tree_bounds import TreeBounds
from eagle_ray.engine.engine import Engine
from eagle_ray.methods.eagle.checkpoint import load_head
from eagle_ray.methods.eagle.drafter import EagleDrafter
from eagle_ray.models.loader import load_causal_lm
from eagle_ray.models.target import PromptBatch, TargetModel
from eagle_ray.planner.planner import UniformPlanner
from eagle_ray.requests.parameters import SamplingParams
from eagle_ray.tree.expand import DraftPlan
from tests.support.toy_models import best_nodes, run

GOLDENS = Path(__file__).parent.parent / "goldens"
TRACES = {
    pair: json.loads((GOLDENS / f"{pair}_t16_d3_k4.json").read_text())
    for pair in ("pair_fit", "pair_e3")
}
MAX_NODES, MAX_DEPTH, TOP_K = (
    15,
    4,
    4,
)  # the reference's total_token 16 counts the root, its depth 3 the later forwards


def golden_engine(pair: str, num_slots: int) -> Engine:
    model = load_causal_lm(GOLDENS / pair / "target", torch.float32, "cpu")
    head = load_head(GOLDENS / pair / "draft", model.config)
    bounds = TreeBounds(MAX_NODES, MAX_DEPTH, TOP_K)
    columns, layers = bounds.num_positions, head.feature_layers(model.config.num_hidden_layers)
    target = TargetModel(model, num_slots, 256 + columns, feature_layers=layers)
    drafter = EagleDrafter(head, target)
    return Engine(target, drafter, UniformPlanner(bounds), 256, bounds)


@pytest.mark.parametrize(
    ("pair", "num_slots"), [("pair_fit", 1), ("pair_fit", 4), ("pair_fit", 6), ("pair_e3", 6)]
)
def test_outputs_and_accepted_lengths_are_the_references(pair, num_slots):
    prompts = TRACES[pair]["prompts"]
    params = [SamplingParams(max_tokens=len(p["output_ids"]) + 1) for p in prompts]
    sequences = run(golden_engine(pair, num_slots), [p["prompt"] for p in prompts], params)
    for sequence, wanted in zip(sequences, prompts, strict=True):
        accepted = [step["accept_length"] for step in wanted["steps"]]
        if (
            wanted["stop"] == "eos"
        ):  # the reference looks for EOS only after the step that follows a bonus EOS
            assert sequence.output_ids == wanted["vanilla_ids"]
            assert sequence.stats.per_step_accepted == accepted[: sequence.stats.num_steps]
            assert len(accepted) - sequence.stats.num_steps <= 1
        else:  # the last bonus token is not in the reference's output
            assert sequence.output_ids[:-1] == wanted["output_ids"]
            assert sequence.stats.per_step_accepted == accepted


@pytest.mark.parametrize("pair", TRACES)
@torch.inference_mode()
def test_trees_are_the_references(pair):
    """Tokens, parents, depths and scores of the first tree of each prompt, where no score gap is a near-tie."""
    engine, compared = golden_engine(pair, 1), 0
    for prompt in TRACES[pair]["prompts"]:
        step = prompt["steps"][0]
        if min(step["gaps"].values()) < 1e-4:
            continue
        engine.target.cache.blocks.reserve(0, engine.target.cache.capacity)
        prompts = PromptBatch.of([0], [prompt["prompt"]])
        passed = engine.target.prefill(prompts)
        roots = passed.logits.argmax(-1)
        next_tokens = prompts.tokens.roll(-1).index_copy(0, prompts.last, roots)
        engine.drafter.prefill(prompts, next_tokens, passed.features)
        sampling = SamplingBatch.of([SamplingParams()])
        plan = DraftPlan(MAX_DEPTH, TOP_K)
        tree = engine.drafter.draft(
            DecodeSlots.of([0], [step["prefix_len"]]), roots, plan, sampling, ()
        ).tree
        tree = best_nodes(tree, [1 + MAX_NODES])
        assert tree.tokens[0].tolist() == step["tokens"]
        assert tree.parents[0].tolist() == step["parents"]
        assert tree.depths[0].tolist() == step["depths"]
        torch.testing.assert_close(
            tree.log_values[0, 1:], torch.tensor(step["scores"]), atol=2e-5, rtol=0
        )
        compared += 1
    assert compared >= 4
