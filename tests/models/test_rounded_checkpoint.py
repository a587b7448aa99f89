"""Plain weights rounded to FP8 as they are read: a rounded model's numbers, one weight on the host at a time."""

import weakref

import pytest
import torch
from safetensors.torch import load_file, save_file

from eagle_ray.core.errors import EngineError
from eagle_ray.models import gpu_linears
from eagle_ray.models.gpu_linears import Fp8Linear, quantize_fp8
from eagle_ray.models.loader import load_causal_lm, read_model_config
from eagle_ray.models.rounded_checkpoint import why_not_rounded
from eagle_ray.models.sharded_checkpoint import PlainCheckpoint
from tests.support.families import FAMILIES, plain_copy, random_model
from tests.support.toy_models import llama


@pytest.fixture
def for_gpu(monkeypatch):
    """Layers are those of a GPU, and stay where the weights are."""
    monkeypatch.setattr(gpu_linears, "why_no_fp8", lambda device: None)


@pytest.fixture
def checkpoint(tmp_path):
    """Return a directory with a random Llama in bf16, and that model."""
    model = llama(hidden_size=64, intermediate_size=96, head_dim=16, num_hidden_layers=6).bfloat16()
    model.save_pretrained(tmp_path)
    return tmp_path, model


def rounded(path):
    return load_causal_lm(path, torch.bfloat16, "cpu", runs_on="cuda", rounds=True)


def test_a_model_has_the_numbers_of_one_rounded_later(checkpoint, for_gpu):
    path, model = checkpoint
    found, expected = rounded(path), plain_copy(model)
    quantize_fp8(expected.base_model.layers)
    layers = {name: x for name, x in found.named_modules() if isinstance(x, Fp8Linear)}
    assert len(layers) == 7 * 6
    for name, layer in layers.items():
        own = expected.get_submodule(name)
        assert torch.equal(layer.dequantize(), own.dequantize())
        assert torch.equal(layer.scale, own.scale)
    for name, parameter in found.named_parameters():
        assert torch.equal(parameter, expected.get_parameter(name))


def test_one_weight_in_16_bits_is_on_the_host_at_a_time(checkpoint, for_gpu, monkeypatch):
    path, _ = checkpoint
    alive, most = weakref.WeakSet(), []
    read = PlainCheckpoint.tensor

    def counted(self, name):
        tensor = read(self, name)
        if name.endswith("_proj.weight"):
            alive.add(tensor)
            most.append(len(alive))
        return tensor

    monkeypatch.setattr(PlainCheckpoint, "tensor", counted)
    rounded(path)
    assert len(most) == 7 * 6 and max(most) <= 2  # the one before is freed as the next one is read


def test_a_weight_that_is_no_number_is_named(checkpoint, for_gpu):
    path, _ = checkpoint
    name = "model.layers.3.mlp.up_proj.weight"
    tensors = load_file(path / "model.safetensors")
    tensors[name][1, 2] = torch.nan
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    with pytest.raises(EngineError, match=rf"^tensor {name}: holds a number that is not finite"):
        rounded(path)


def test_a_size_that_no_product_takes_is_named_before_reading(tmp_path):
    llama(intermediate_size=40).save_pretrained(tmp_path)
    reason = why_not_rounded(tmp_path, read_model_config(tmp_path))
    assert reason.startswith("sizes that 16 divides, and model.layers.0.mlp.gate_proj is 40 x ")


@pytest.mark.parametrize("family", ["gemma2", "qwen3_moe"])
def test_other_families_are_refused_before_weights_are_read(family, tmp_path):
    model = random_model(FAMILIES[family])
    model.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"\x08" + bytes(7) + b"{}      ")
    reason = why_not_rounded(tmp_path, read_model_config(tmp_path))
    assert reason.startswith("plain weights of LlamaForCausalLM, ")
    assert f"and the target is {type(model).__name__}" in reason


def test_weights_in_pickles_are_refused_by_their_file(checkpoint):
    path, _ = checkpoint
    assert why_not_rounded(path, read_model_config(path)) is None
    config = read_model_config(path)
    (path / "model.safetensors").unlink()
    (path / "pytorch_model.bin").write_bytes(b"")
    assert "the target is in pytorch_model.bin" in why_not_rounded(path, config)
