"""Targets of LongRoPE: one list of factors for all positions, with transformers' logits on its side of the length."""

from __future__ import annotations

import json
import logging

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from eagle_ray import SamplingParams
from eagle_ray.assembly.assemble import build_engine
from eagle_ray.assembly.engine_sizes import EngineArgs
from eagle_ray.assembly.hub import model_limits
from eagle_ray.assembly.load_models import load_target
from eagle_ray.config import ModelConfig, SpeculativeConfig
from eagle_ray.core.errors import ConfigError
from eagle_ray.core.sequence import Sequence
from eagle_ray.gguf.gguf_file import GGUFFile
from eagle_ray.gguf.gguf_target import write_metadata
from eagle_ray.models.loader import load_causal_lm, read_model_config
from eagle_ray.models.longrope import choose_factors, original_length
from eagle_ray.models.supported_models import max_exact_position
from tests.support.families import (
    CHUNKS,
    assert_trees_equal,
    config_of,
    plain_copy,
    random_model,
    target_of,
)
from tests.support.gguf_families import VOCAB_SIZE, write_family

SHORT, LONG = [1.0, 1.5, 3.0, 7.0], [2.0, 9.0, 4.0, 40.0]
# As config.json of Phi-3 and Phi-4-mini has it; the first position turns by nothing.
SCALING = {
    "type": "longrope",
    "short_factor": SHORT,
    "long_factor": LONG,
    "attention_factor": 1.25,
}


def checkpoint(path, original, scaling=SCALING, **own):
    model = random_model(
        config_of("phi3", rope_scaling=dict(SCALING), original_max_position_embeddings=original)
    )
    model.save_pretrained(path)
    file = path / "config.json"
    config = json.loads(file.read_text())
    config.pop("rope_parameters")
    file.write_text(json.dumps(config | {"rope_scaling": scaling, "rope_theta": 10000.0} | own))
    return path


def plain(path):
    config = read_model_config(path)
    model = AutoModelForCausalLM.from_pretrained(path, config=config, attn_implementation="eager")
    return model.eval().requires_grad_(False)


@pytest.mark.parametrize(
    ("original", "kind", "factors"),
    [(1, "longrope", "long"), (1, "su", "long"), (64, "longrope", "short")],
)
@torch.inference_mode()
def test_trees_have_the_logits_of_sequences_of_that_length(
    original, kind, factors, tmp_path, caplog
):
    caplog.set_level(logging.INFO)
    path = checkpoint(tmp_path, original, SCALING | {"type": kind})
    model = load_causal_lm(path, torch.float32, "cpu", max_model_len=64)
    target = target_of(model)
    assert target.has_own_forward
    assert_trees_equal(plain(path), target, CHUNKS)
    assert f"by the {factors} factors of LongRoPE" in caplog.text


@torch.inference_mode()
def test_a_short_sequence_has_long_factors_beside_longer_ones(tmp_path):
    """Here transformers differs: its rotation of a sequence changes with its length."""
    path = checkpoint(tmp_path, original=40)
    target = target_of(load_causal_lm(path, torch.float32, "cpu", max_model_len=64))
    only_long = checkpoint(tmp_path / "long", 40, SCALING | {"short_factor": LONG})
    assert_trees_equal(plain(only_long), target, CHUNKS)
    with pytest.raises(AssertionError, match="not close"):
        assert_trees_equal(plain(path), target, CHUNKS)


def test_an_engine_crosses_the_original_length_as_generate_does(tmp_path):
    """generate computes its cache again there; prompts past it never have the short factors."""
    path = checkpoint(tmp_path, original=5)
    model = ModelConfig(target=str(path), max_model_len=64, device="cpu", dtype="float32")
    drafts = SpeculativeConfig(method="ngram", max_nodes=8)
    engine = build_engine(load_target(model), None, drafts, EngineArgs(2, 64, kv_tokens=None))
    prompts = [[7, 8, 9, 7, 8, 9, 7], [5, 6, 5, 6, 5, 6, 5, 6, 5]]
    sampling = SamplingParams(max_tokens=24, ignore_eos=True)
    sequences = [Sequence(str(b), ids, sampling) for b, ids in enumerate(prompts)]
    for sequence in sequences:
        engine.add(sequence)
    while engine.has_work:
        engine.step()
    own = plain(path)
    for sequence in sequences:
        ids = torch.tensor([sequence.prompt_ids])
        made = own.generate(ids, min_new_tokens=24, max_new_tokens=24, do_sample=False)
        assert sequence.output_ids == made[0, ids.shape[1] :].tolist()
    assert engine.counters.num_steps < 2 * 24


def test_max_model_len_may_be_what_the_long_factors_reach(tmp_path):
    model = ModelConfig(target=str(checkpoint(tmp_path, 100, max_position_embeddings=400)))
    assert model_limits(model).max_model_len == 100
    assert model_limits(model.model_copy(update={"max_model_len": 400})).max_model_len == 400
    with pytest.raises(ConfigError, match=r"max_model_len: 401 is more than the 400 positions"):
        model_limits(model.model_copy(update={"max_model_len": 401}))


@torch.inference_mode()
def test_a_gguf_file_has_the_long_factors_too(tmp_path):
    rope = dict(SCALING, rope_type="longrope", original_max_position_embeddings=1)
    del rope["attention_factor"]
    sizes = dict(vocab_size=VOCAB_SIZE, bos_token_id=1, eos_token_id=2, pad_token_id=2)
    model = random_model(
        config_of("phi3", **sizes, rope_parameters=rope, original_max_position_embeddings=8)
    )
    write_family(tmp_path / "model.gguf", "phi3", model)
    write_metadata(GGUFFile.open(tmp_path / "model.gguf"), tmp_path)
    found = load_causal_lm(tmp_path, torch.float32, "cpu", dequantize=True, max_model_len=9)
    ids = torch.tensor([list(range(3, 40))])
    torch.testing.assert_close(found(ids).logits, model(ids).logits, atol=2e-5, rtol=1e-4)
    short = torch.tensor([[3, 4, 5]])
    assert not torch.allclose(found(short).logits, model(short).logits, atol=1e-3)


@torch.inference_mode()
def test_phimoe_turns_and_scales_by_one_list():
    """transformers itself turns by the short factors whatever the length, and scales by the longer ones."""
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": SHORT,
        "long_factor": LONG,
        "short_mscale": 1.1,
        "long_mscale": 1.4,
        "original_max_position_embeddings": 12,
    }
    experts = dict(num_local_experts=4, num_experts_per_tok=2)
    config = config_of("phimoe", rope_parameters=rope, **experts)
    assert (original_length(config), max_exact_position(config)) == (12, 12)
    assert choose_factors(config, 13) == "long"
    assert max_exact_position(config) is None
    model = random_model(config)
    turned = model.model.rotary_emb(torch.zeros(1), torch.arange(4)[None])[0][0, :, : len(LONG)]
    expected = (
        1.4
        * (torch.arange(4)[:, None] / (torch.tensor(LONG) * 10000.0 ** (torch.arange(4) / 4))).cos()
    )
    torch.testing.assert_close(turned, expected, atol=1e-5, rtol=0)
    assert_trees_equal(plain_copy(model), target_of(model), CHUNKS)


def test_a_config_without_longrope_is_left_as_it_is():
    config = AutoConfig.for_model("llama")
    before = config.to_dict()
    assert choose_factors(config, 1_000_000) is None
    assert config.to_dict() == before
