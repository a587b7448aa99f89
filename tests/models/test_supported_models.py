"""Every family of families.py: packed trees equal transformers' own forward of each path, and no other runs.

Issue 5's own list runs in every test run, the rest with the slow ones.
"""

from __future__ import annotations

import math

import pytest
import torch
from transformers import AutoConfig

from eagle_ray.assembly.placement import dispatch
from eagle_ray.core.decode_batch import DecodeSlots
from eagle_ray.core.errors import EngineError
from eagle_ray.families import FAMILIES as RECORDS
from eagle_ray.models.decoder import Angles
from eagle_ray.models.packed_linear import pack_linears
from eagle_ray.models.supported_models import (
    check_config,
    kv_elements_per_token,
    max_exact_position,
)
from eagle_ray.models.target import PromptBatch, TargetModel
from eagle_ray.tree.draft_tree import DraftTree
from tests.support.families import (
    CHUNKS,
    FAMILIES,
    OTHERS,
    PROMPTS,
    SLOTS,
    assert_trees_equal,
    config_of,
    path_to,
    plain_copy,
    prefill,
    random_model,
    random_trees,
    target_of,
)
from tests.support.operations import WatchCopies, WatchOperations

MIXED = [
    name for name in FAMILIES if "moe" in name or name in ("mixtral", "gpt_oss", "llama4_text")
]
SPREAD = [name for name, config in FAMILIES.items() if not RECORDS[config.model_type].why_own]


@pytest.mark.parametrize("name", FAMILIES)
@torch.inference_mode()
def test_trees_after_prompts_in_chunks_equal_plain_forwards(name):
    model = random_model(FAMILIES[name])
    assert_trees_equal(plain_copy(model), target_of(model), CHUNKS)


@pytest.mark.parametrize("name", MIXED)
@torch.inference_mode()
def test_row_is_independent_of_experts_chosen_by_other_rows(name):
    target = target_of(random_model(FAMILIES[name]))
    prefill(target, None)
    lengths = [len(ids) for ids in PROMPTS]
    roots = torch.tensor([5, 6, 7])
    together = _verify(target, roots, DecodeSlots.of(SLOTS, lengths))
    alone = [
        _verify(target, roots[[b]], DecodeSlots.of([SLOTS[b]], [lengths[b]])) for b in range(3)
    ]
    torch.testing.assert_close(together, torch.cat(alone), atol=2e-5, rtol=0)


@pytest.mark.parametrize("name", MIXED)
@torch.inference_mode()
def test_experts_are_chosen_without_a_look_at_the_device(name):
    """Otherwise every layer of a mixture would wait for the GPU."""
    target = target_of(random_model(FAMILIES[name]))
    prefill(target, None)
    batch = DecodeSlots.of(SLOTS, [len(ids) for ids in PROMPTS])
    with WatchOperations() as operations, WatchCopies() as copies:
        _verify(target, torch.tensor([5, 6, 7]), batch)
    assert operations.seen == [] and copies.seen == []


@pytest.mark.parametrize("name", ["mixtral", "gemma2", "gpt_oss", "llama4_text"])
@torch.inference_mode()
def test_taps_are_the_inputs_of_their_layers(name):
    model = random_model(FAMILIES[name])
    plain, target = plain_copy(model), target_of(model, feature_layers=(0, 1))
    features = target.prefill(PromptBatch.of(SLOTS, PROMPTS)).features.split(
        [len(ids) for ids in PROMPTS]
    )
    for ids, found in zip(PROMPTS, features, strict=True):
        own = plain(torch.tensor([ids]), output_hidden_states=True, use_cache=False).hidden_states
        torch.testing.assert_close(found, torch.cat([own[0][0], own[1][0]], -1), atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", SPREAD)
@torch.inference_mode()
def test_packed_and_spread_models_compute_what_they_did(name):
    model = random_model(FAMILIES[name])
    plain = plain_copy(model)
    dispatch(model, ["cpu", "cpu"], [0, 1])
    pack_linears(model, min_weights=1)
    own = [plain(torch.tensor([ids]), use_cache=False).logits[0, -1] for ids in PROMPTS]
    torch.testing.assert_close(prefill(target_of(model), None), torch.stack(own), atol=1e-4, rtol=0)


@torch.inference_mode()
def test_a_packed_model_computes_what_it_did_and_is_not_spread():
    model = random_model(FAMILIES["llama4_text"])
    plain = plain_copy(model)
    pack_linears(model, min_weights=1)
    own = [plain(torch.tensor([ids]), use_cache=False).logits[0, -1] for ids in PROMPTS]
    torch.testing.assert_close(prefill(target_of(model), None), torch.stack(own), atol=1e-4, rtol=0)
    dispatch(model, ["cpu", "cpu"], [0, 1])
    with pytest.raises(
        EngineError, match=r"^llama4_text: layers .* on several GPUs, .*gpus_per_actor: 1"
    ):
        target_of(model)


@pytest.mark.parametrize("name", FAMILIES)
def test_memory_is_known_before_weights_are(name):
    """kv_elements_per_token is what placement reserves; the cache is what it is for."""
    config = FAMILIES[name]
    cache = TargetModel(random_model(config), 1, 8).cache
    assert cache.keys[0, 0, 0].numel() + cache.values[0, 0, 0].numel() == kv_elements_per_token(
        config
    )


ROTATING = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * 4,
    "long_factor": [9.0] * 4,
}


@pytest.mark.parametrize(
    "config",
    [
        config_of("phi3", rope_parameters=ROTATING, original_max_position_embeddings=21),
        config_of(
            "llama",
            rope_parameters={"rope_type": "dynamic", "factor": 4.0},
            max_position_embeddings=21,
        ),
    ],
    ids=["longrope", "dynamic"],
)
@torch.inference_mode()
def test_drafts_past_original_positions_change_no_earlier_logits(config):
    """A tree may reach further than any output: transformers would then turn every row of the pass otherwise."""
    assert max_exact_position(config) == 21
    model = random_model(config)
    plain, target = plain_copy(model), target_of(model)
    prefill(target, None)
    tree, lengths = random_trees([9, 9, 9]), [len(ids) for ids in PROMPTS]
    batch = DecodeSlots.of(SLOTS, lengths)
    rows = tree.pack(batch.lengths, 27)
    assert rows.positions.max() > 21
    logits = target.verify(tree, rows, batch, max_depth=8).logits
    for row in (rows.positions < 21).nonzero().flatten().tolist():
        b = int(rows.seq[row])
        ids = PROMPTS[b] + tree.tokens[b, path_to(tree, b, int(rows.node[row]))].tolist()
        own = plain(torch.tensor([ids]), use_cache=False).logits[0, -1]
        torch.testing.assert_close(logits[row], own, atol=1e-4, rtol=0)


@torch.inference_mode()
def test_longrope_is_the_papers_rule_for_every_row_alone():
    """Up to the original positions: transformers chooses the factors by the longest row of a pass, which is refused."""
    short = [1.0, 1.5, 3.0, 7.0]
    config = config_of(
        "phi3",
        rope_parameters=ROTATING | {"short_factor": short},
        original_max_position_embeddings=21,
    )
    model = random_model(config)
    positions = torch.arange(21)
    rotary = Angles(model.model.rotary_emb)(positions)

    # Each pair turns by its own factor more slowly, and all grow with the ratio of lengths.
    factors = torch.tensor(short)
    pairs = torch.arange(len(short))
    turns = positions[:, None] / (factors * ROTATING["rope_theta"] ** (pairs / len(short)))
    ratio = config.max_position_embeddings / 21
    growth = math.sqrt(1 + math.log(ratio) / math.log(21))
    torch.testing.assert_close(rotary.cosine, growth * turns.cos(), atol=1e-5, rtol=0)
    torch.testing.assert_close(rotary.sine, growth * turns.sin(), atol=1e-5, rtol=0)

    target = target_of(model)
    together = prefill(target, None)
    for b, ids in enumerate(PROMPTS):
        alone = target_of(model).prefill(PromptBatch.of([SLOTS[b]], [ids])).logits[0]
        torch.testing.assert_close(together[b], alone, atol=1e-5, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("family", OTHERS)
@torch.inference_mode()
def test_the_other_families_too(family):
    config = config_of(family, **OTHERS[family])
    model = random_model(config)
    plain, target = plain_copy(model), target_of(model)
    assert_trees_equal(plain, target, CHUNKS)
    assert target.cache.keys[0, 0, 0].numel() + target.cache.values[
        0, 0, 0
    ].numel() == kv_elements_per_token(config)
    pack_linears(model, min_weights=1)
    assert_trees_equal(plain, target_of(model))


def test_every_family_that_is_let_through_is_tested_here():
    assert {config.model_type for config in FAMILIES.values()} | OTHERS.keys() == RECORDS.keys()


@pytest.mark.parametrize(
    "family", ["gemma4_text", "qwen3_next", "lfm2", "diffllama", "bert", "mamba"]
)
def test_any_other_family_is_refused_by_its_name(family):
    with pytest.raises(
        EngineError, match=rf"^unsupported model_type {family!r}. Supported: afmoe, "
    ):
        check_config(AutoConfig.for_model(family))


def test_a_model_of_more_than_text_is_refused():
    with pytest.raises(
        EngineError, match=r"^unsupported model_type 'gemma3': it reads more than text"
    ):
        check_config(AutoConfig.for_model("gemma3"))


def _verify(target: TargetModel, roots: torch.Tensor, batch: DecodeSlots) -> torch.Tensor:
    tree = DraftTree.of_roots(roots)
    return target.verify(tree, tree.pack(batch.lengths, len(roots)), batch, max_depth=0).logits
