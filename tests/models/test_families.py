"""Every family that families.EXACT names: packed trees equal transformers' own forward of each path, and no other runs.

Issue 5's own list runs in every test run, the rest with the slow ones.
"""

from __future__ import annotations

import pytest
import torch

from eagle_ray.models.families import EXACT, exact_positions, numbers_per_token
from eagle_ray.models.kv_cache import BatchSlots
from eagle_ray.models.linear import pack_linears
from eagle_ray.models.placement import spread
from eagle_ray.models.target import Prompts, Target
from eagle_ray.speculative.tree import DraftTree
from tests.models.families import (
    CHUNKS,
    LLAMA3_ROPE,
    MOE,
    PROMPTS,
    SLOTS,
    WINDOW,
    YARN_ROPE,
    assert_trees_equal,
    config_of,
    path_to,
    plain_copy,
    prefill,
    random_model,
    random_trees,
    target_of,
)

FAMILIES = {
    "llama and vicuna": config_of("llama"),
    "deepseek distilled llama": config_of("llama", rope_parameters=LLAMA3_ROPE, head_dim=16),
    "mistral": config_of("mistral", sliding_window=WINDOW),
    "mixtral": config_of("mixtral", **MOE, sliding_window=WINDOW),
    "qwen2": config_of("qwen2", use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1),
    "deepseek distilled qwen": config_of("qwen2", rope_parameters=YARN_ROPE),
    "qwen2_moe": config_of("qwen2_moe", **MOE, shared_expert_intermediate_size=24),
    "qwen3": config_of("qwen3", head_dim=16),
    "qwen3_moe": config_of("qwen3_moe", **MOE, head_dim=16),
    "phi3": config_of("phi3", partial_rotary_factor=0.5, sliding_window=WINDOW),
    "gemma2": config_of("gemma2", head_dim=16, sliding_window=WINDOW, query_pre_attn_scalar=24),
    "gpt_oss": config_of("gpt_oss", **MOE, head_dim=16, sliding_window=WINDOW, rope_parameters=YARN_ROPE),
}
MIXED = [name for name in FAMILIES if "moe" in name or name in ("mixtral", "gpt_oss")]


@pytest.mark.parametrize("name", FAMILIES)
@torch.inference_mode()
def test_trees_after_prompts_in_chunks_equal_plain_forwards(name):
    model = random_model(FAMILIES[name])
    assert_trees_equal(plain_copy(model), target_of(model), CHUNKS)


@pytest.mark.parametrize("name", MIXED)
@torch.inference_mode()
def test_a_row_does_not_depend_on_which_experts_its_company_needs(name):
    target = target_of(random_model(FAMILIES[name]))
    prefill(target, None)
    lengths = [len(ids) for ids in PROMPTS]
    roots = torch.tensor([5, 6, 7])
    together = _verify(target, roots, BatchSlots.of(SLOTS, lengths))
    alone = [_verify(target, roots[[b]], BatchSlots.of([SLOTS[b]], [lengths[b]])) for b in range(3)]
    torch.testing.assert_close(together, torch.cat(alone), atol=2e-5, rtol=0)


@pytest.mark.parametrize("name", ["mixtral", "gemma2", "gpt_oss"])
@torch.inference_mode()
def test_taps_are_the_inputs_of_their_layers(name):
    model = random_model(FAMILIES[name])
    plain, target = plain_copy(model), target_of(model, feature_layers=(0, 1))
    features = target.prefill(Prompts.of(SLOTS, PROMPTS))[1].split([len(ids) for ids in PROMPTS])
    for ids, found in zip(PROMPTS, features, strict=True):
        own = plain(torch.tensor([ids]), output_hidden_states=True, use_cache=False).hidden_states
        torch.testing.assert_close(found, torch.cat([own[0][0], own[1][0]], -1), atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", FAMILIES)
@torch.inference_mode()
def test_packed_and_spread_models_compute_what_they_did(name):
    model = random_model(FAMILIES[name])
    plain = plain_copy(model)
    spread(model, ["cpu", "cpu"], [0, 1])
    pack_linears(model, fewest_weights=1)
    own = [plain(torch.tensor([ids]), use_cache=False).logits[0, -1] for ids in PROMPTS]
    torch.testing.assert_close(prefill(target_of(model), None), torch.stack(own), atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", FAMILIES)
def test_memory_is_known_before_weights_are(name):
    """numbers_per_token is what placement reserves; the cache is what it is for."""
    config = FAMILIES[name]
    cache = Target(random_model(config), 1, 8).cache
    assert cache.keys[0, 0, 0].numel() + cache.values[0, 0, 0].numel() == numbers_per_token(config)


ROTATING = {"rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0] * 4, "long_factor": [9.0] * 4}


@pytest.mark.parametrize(
    "config",
    [
        config_of("phi3", rope_parameters=ROTATING, original_max_position_embeddings=21),
        config_of("llama", rope_parameters={"rope_type": "dynamic", "factor": 4.0}, max_position_embeddings=21),
    ],
    ids=["longrope", "dynamic"],
)
@torch.inference_mode()
def test_drafts_past_the_original_positions_change_nothing_before_them(config):
    """A tree may reach further than any output: transformers would then turn every row of the pass otherwise."""
    assert exact_positions(config) == 21
    model = random_model(config)
    plain, target = plain_copy(model), target_of(model)
    prefill(target, None)
    tree, lengths = random_trees([9, 9, 9]), [len(ids) for ids in PROMPTS]
    batch = BatchSlots.of(SLOTS, lengths)
    rows = tree.pack(batch.lengths, 27)
    assert rows.positions.max() > 21
    logits, _ = target.verify(tree, rows, batch, max_depth=8)
    for row in (rows.positions < 21).nonzero().flatten().tolist():
        b = int(rows.seq[row])
        ids = PROMPTS[b] + tree.tokens[b, path_to(tree, b, int(rows.node[row]))].tolist()
        own = plain(torch.tensor([ids]), use_cache=False).logits[0, -1]
        torch.testing.assert_close(logits[row], own, atol=1e-4, rtol=0)


def test_every_family_that_is_let_through_is_tested_here():
    tested = {config.model_type for config in FAMILIES.values()}
    assert tested == EXACT


def _verify(target: Target, roots: torch.Tensor, batch: BatchSlots) -> torch.Tensor:
    tree = DraftTree.of_roots(roots)
    return target.verify(tree, tree.pack(batch.lengths, len(roots)), batch, max_depth=0)[0]
