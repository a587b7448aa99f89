"""Mixtures of experts of our own forward, on the paths that torch has: which are equal, and which one is taken."""

import pytest
import torch

from eagle_ray.assembly.model_memory import weight_bytes
from eagle_ray.assembly.stored_bytes import loaded_bytes
from eagle_ray.models import experts as experts_module
from eagle_ray.models.decoder import Decoder, is_llama_shaped
from eagle_ray.models.experts import Experts, is_moe_block
from eagle_ray.models.loader import load_causal_lm
from tests.support.families import MIXED, MOE, OTHERS, config_of, plain_copy, random_model
from tests.support.operations import WatchOperations


def mixture(name: str, dtype: torch.dtype = torch.float32) -> tuple[torch.nn.Module, Experts]:
    """Return the last layer's block of transformers and what our forward has in its place."""
    model = random_model(MIXED[name]).to(dtype)
    return block_of(plain_copy(model)), Decoder.of(model).layers[-1].mlp


def block_of(model: torch.nn.Module) -> torch.nn.Module:
    """Return the last layer's block of experts."""
    layer = model.model.layers[-1]
    return layer.mlp if hasattr(layer, "mlp") else layer.feed_forward


def failing_grouped_mm(*_: object, **__: object) -> torch.Tensor:
    raise AssertionError("grouped_mm is not for these sizes")


@pytest.mark.parametrize("together", [1, 1 << 26], ids=["one expert at a time", "all at once"])
@pytest.mark.parametrize("name", MIXED)
@torch.inference_mode()
def test_every_expert_multiplies_every_row_without_grouped_mm(name, together, monkeypatch):
    """As on an A100 without Triton, where torch's grouped_mm copies to the host; here for widths it does not read."""
    block, ours = mixture(name)
    rows = torch.randn(11, 32)
    grouped = ours(rows)
    monkeypatch.setattr(experts_module, "ALIGNED", 1 << 20)
    monkeypatch.setattr(experts_module, "MAX_NUMBERS", together)
    monkeypatch.setattr(experts_module, "grouped_mm", failing_grouped_mm)
    with WatchOperations() as operations:
        found = ours(rows)
    assert operations.seen == []
    own = block(rows[None])[0]
    torch.testing.assert_close(found, own, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(grouped, own, atol=1e-5, rtol=1e-5)


@torch.inference_mode()
def test_an_expert_that_overflows_harms_only_rows_that_chose_it(monkeypatch):
    """One of five experts gives infinity to all rows, and is weighed by 0 in those that others compute."""
    _, ours = mixture("one of five experts")
    rows = torch.randn(30, 32)
    chosen = ours.reader(rows).argmax(-1)
    monkeypatch.setattr(experts_module, "ALIGNED", 1 << 20)
    ours.down[0] = torch.inf
    finite = ours(rows).isfinite().all(1)
    assert 0 < finite.sum() < 30 and torch.equal(finite, chosen != 0)


@torch.inference_mode()
def test_rows_and_their_padding_do_not_touch_each_other():
    _, ours = mixture("qwen2_moe")
    rows = torch.randn(9, 32)
    padded = ours(torch.cat([rows, rows[:1].repeat(20, 1)]))
    torch.testing.assert_close(padded[:9], ours(rows), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", ["mixtral", "olmoe", "qwen2_moe", "qwen3_moe"])
@torch.inference_mode()
def test_bf16_is_within_its_rounding(name):
    block, ours = mixture(name, torch.bfloat16)
    rows = torch.randn(16, 32).bfloat16()
    own = block(rows[None])[0].float()
    assert (ours(rows).float() - own).abs().max() < 0.02 * own.abs().max()


@pytest.mark.parametrize("name", MIXED)
def test_no_weight_is_held_twice(name):
    """Experts and router are the modules' own memory; a router joined with a shared expert's gate moves into one."""
    model = random_model(MIXED[name])
    ours, block = Decoder.of(model).layers[-1].mlp, block_of(model)
    router = block.gate if hasattr(block, "gate") else block.router
    assert ours.gate_up.data_ptr() == block.experts.gate_up_proj.data_ptr()
    assert ours.down.data_ptr() == block.experts.down_proj.data_ptr()
    assert ours.reader.weight.data_ptr() == router.weight.data_ptr()


@pytest.mark.parametrize("name", ["mixtral", "olmoe", "qwen2_moe", "qwen3_moe"])
def test_checkpoint_bytes_equal_model_bytes_with_all_experts(name, tmp_path):
    """Its files have a tensor for each expert, which the loader joins; doctor counts those."""
    random_model(MIXED[name]).save_pretrained(tmp_path)
    loaded = load_causal_lm(tmp_path, torch.float32, "cpu")
    assert is_llama_shaped(loaded)
    assert loaded_bytes(tmp_path, torch.float32) == weight_bytes(loaded)
    assert weight_bytes(loaded) > 2 * loaded.model.layers[0].mlp.experts.gate_up_proj.nbytes


def test_other_mixtures_are_left_to_transformers():
    models = [random_model(config_of(name, **OTHERS[name])) for name in ("phimoe", "granitemoe")]
    models += [random_model(config_of("mixtral", hidden_act="gelu"))]
    models += [random_model(config_of("olmoe", **MOE, clip_qkv=1.0))]
    assert not any(map(is_llama_shaped, models))
    biased = random_model(MIXED["mixtral"])
    experts = biased.model.layers[0].mlp.experts
    experts.gate_up_proj_bias = torch.nn.Parameter(torch.zeros(1), requires_grad=False)
    assert not is_moe_block(biased.model.layers[0].mlp)
