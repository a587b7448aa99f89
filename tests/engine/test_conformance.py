"""The reference implementation's greedy traces: same outputs, same accepted length at every step, same trees."""

import json
from pathlib import Path

import pytest
import torch

from eagle_ray.drafting.eagle import EagleDrafter, tree_columns
from eagle_ray.engine.engine import Engine
from eagle_ray.engine.planner import UniformPlanner
from eagle_ray.models.checkpoint import load_head
from eagle_ray.models.kv_cache import BatchSlots
from eagle_ray.models.loading import load_target
from eagle_ray.models.target import Prompts, Target
from eagle_ray.speculative.plan import Plan
from eagle_ray.speculative.sampling import BatchSampling, SamplingParams
from tests.toy import best, run

GOLDENS = Path(__file__).parent.parent / "goldens"
TRACE = json.loads((GOLDENS / "pair_fit_t16_d3_k4.json").read_text())
MAX_NODES, MAX_DEPTH, TOP_K = 15, 4, 4  # the reference's total_token 16 counts the root, its depth 3 the later forwards


def fit_engine(num_slots: int) -> Engine:
    model = load_target(GOLDENS / "pair_fit" / "target", torch.float32, "cpu")
    target = Target(model, num_slots, 256 + tree_columns(MAX_NODES, MAX_DEPTH, TOP_K))
    head = load_head(GOLDENS / "pair_fit" / "draft", target.hidden_size, target.vocab_size)
    drafter = EagleDrafter(head, target)
    return Engine(target, drafter, UniformPlanner(MAX_NODES, MAX_DEPTH, TOP_K), 256, MAX_DEPTH)


@pytest.mark.parametrize("num_slots", [1, 4, 6])
def test_outputs_and_accepted_lengths_are_the_references(num_slots):
    prompts = TRACE["prompts"]
    params = [SamplingParams(max_tokens=len(p["output_ids"]) + 1) for p in prompts]
    for sequence, wanted in zip(
        run(fit_engine(num_slots), [p["prompt"] for p in prompts], params), prompts, strict=True
    ):
        accepted = [step["accept_length"] for step in wanted["steps"]]
        if wanted["stop"] == "eos":  # the reference looks for EOS only after the step that follows a bonus EOS
            assert sequence.output_ids == wanted["vanilla_ids"]
            assert sequence.stats.per_step_accepted == accepted[: sequence.stats.num_steps]
            assert len(accepted) - sequence.stats.num_steps <= 1
        else:  # the last bonus token is not in the reference's output
            assert sequence.output_ids[:-1] == wanted["output_ids"]
            assert sequence.stats.per_step_accepted == accepted


@torch.inference_mode()
def test_trees_are_the_references():
    """Tokens, parents, depths and scores of the first tree of each prompt, where no score gap is a near-tie."""
    engine, compared = fit_engine(1), 0
    for prompt in TRACE["prompts"]:
        step = prompt["steps"][0]
        if min(step["gaps"].values()) < 1e-4:
            continue
        engine.target.cache.blocks.reserve(0, engine.target.cache.capacity)
        prompts = Prompts.of([0], [prompt["prompt"]])
        logits, features = engine.target.prefill(prompts)
        roots = logits.argmax(-1)
        next_tokens = prompts.tokens.roll(-1).index_copy(0, prompts.last, roots)
        engine.drafter.prefill(prompts, next_tokens, features)
        sampling = BatchSampling.of([SamplingParams()])
        plan = Plan(MAX_DEPTH, TOP_K)
        tree = engine.drafter.draft(BatchSlots.of([0], [step["prefix_len"]]), roots, plan, sampling, ()).tree
        tree = best(tree, [1 + MAX_NODES])
        assert tree.tokens[0].tolist() == step["tokens"]
        assert tree.parents[0].tolist() == step["parents"]
        assert tree.depths[0].tolist() == step["depths"]
        torch.testing.assert_close(tree.log_values[0, 1:], torch.tensor(step["scores"]), atol=2e-5, rtol=0)
        compared += 1
    assert compared >= 4
