"""Quantised targets, for real where their libraries are installed: `pip install -e .[quantised]`,
torchao, compressed-tensors.

Their trees equal transformers' own forward of the same quantised weights, and nothing of ours
replaces their layers.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from eagle_ray.assembly.assemble import build_engine_from_config
from eagle_ray.assembly.costs import cost_key
from eagle_ray.assembly.engine_sizes import EngineArgs
from eagle_ray.config import ModelConfig, SpeculativeConfig
from eagle_ray.core.sequence import Sequence
from eagle_ray.models.loader import load_causal_lm
from eagle_ray.models.packed_linear import PackedLinear, pack_linears
from eagle_ray.requests.parameters import SamplingParams
from tests.support.families import CHUNKS, assert_trees_equal, target_of
from tests.support.toy_models import llama

pytest.importorskip("accelerate", reason="transformers loads quantised checkpoints with accelerate")
BLOCK = 128  # of FP8's scales


def bitsandbytes(bits: int, plain: Path, out: Path) -> None:
    pytest.importorskip("bitsandbytes")
    from transformers import BitsAndBytesConfig

    four = dict(load_in_4bit=True, bnb_4bit_compute_dtype=torch.float32)
    _quantise(
        plain,
        out,
        BitsAndBytesConfig(
            **four if bits == 4 else dict(load_in_8bit=True, llm_int8_threshold=0.0)
        ),
    )


def torchao(plain: Path, out: Path) -> None:
    quantization = pytest.importorskip("torchao.quantization")
    from transformers import TorchAoConfig

    _quantise(plain, out, TorchAoConfig(quantization.Int8WeightOnlyConfig()))


def fp8(plain: Path, out: Path) -> None:
    """DeepSeek's layout: 8-bit floats, and a scale for every block of 128 x 128."""
    tensors = load_file(plain / "model.safetensors")
    for key in [key for key in tensors if "_proj" in key]:
        weight = tensors[key]
        blocks = weight.unflatten(0, (-1, BLOCK)).unflatten(2, (-1, BLOCK))
        scales = blocks.abs().amax((1, 3)) / torch.finfo(torch.float8_e4m3fn).max
        tensors[key] = (blocks / scales[:, None, :, None]).view_as(weight).to(torch.float8_e4m3fn)
        tensors[f"{key}_scale_inv"] = scales
    out.mkdir()
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    said = {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [BLOCK, BLOCK],
    }
    config = json.loads((plain / "config.json").read_text()) | {"quantization_config": said}
    (out / "config.json").write_text(json.dumps(config))


def compressed_tensors(plain: Path, out: Path) -> None:
    """vLLM's layout: whole numbers packed into words, in layers that are linear by name alone."""
    quantization = pytest.importorskip("compressed_tensors.quantization")
    from compressed_tensors.compressors import ModelCompressor

    weights = quantization.QuantizationArgs(
        num_bits=8, type="int", symmetric=True, strategy="channel"
    )
    scheme = quantization.QuantizationScheme(targets=["Linear"], weights=weights)
    said = dict(ignore=["lm_head"], format="pack-quantized", quantization_status="compressed")
    config = quantization.QuantizationConfig(config_groups={"group_0": scheme}, **said)
    model = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32)
    quantization.apply_quantization_config(model, config)
    for module in model.modules():
        if hasattr(module, "weight_scale"):
            module.weight_scale.data = module.weight.detach().abs().amax(1, keepdim=True) / 127
    compressor = ModelCompressor(quantization_config=config)
    compressor.compress_model(model)
    model.config.save_pretrained(out)
    save_file(model.state_dict(), out / "model.safetensors", metadata={"format": "pt"})
    compressor.update_config(str(out))


def _quantise(plain: Path, out: Path, config: object) -> None:
    how = dict(dtype=torch.float32, device_map={"": "cpu"}, quantization_config=config)
    AutoModelForCausalLM.from_pretrained(plain, **how).save_pretrained(out)


# What makes a checkpoint, whether the CPU runs it quantised (else transformers restores its
# numbers), the tolerance.
QUANTISERS: dict[str, tuple[Callable[[Path, Path], None], bool, float]] = {
    "bitsandbytes-4": (lambda plain, out: bitsandbytes(4, plain, out), True, 1e-3),
    "bitsandbytes-8": (
        lambda plain, out: bitsandbytes(8, plain, out),
        True,
        2e-2,
    ),  # it rounds its inputs to 16 bits
    "torchao": (torchao, True, 1e-3),
    "compressed-tensors": (compressed_tensors, True, 1e-3),
    "fp8": (fp8, False, 1e-3),
}


@pytest.fixture(scope="module", params=QUANTISERS)
def checkpoint(request, tmp_path_factory) -> tuple[Path, bool, float]:
    make, stays, atol = QUANTISERS[request.param]
    directory = tmp_path_factory.mktemp(request.param)
    shape = dict(hidden_size=128, intermediate_size=256, head_dim=32, num_key_value_heads=4)
    llama(**shape).save_pretrained(directory / "plain")
    make(directory / "plain", directory / "quantised")
    return directory / "quantised", stays, atol


@torch.inference_mode()
def test_its_trees_equal_its_own_forward(checkpoint):
    path, stays, atol = checkpoint
    model, plain = load_causal_lm(path, "auto", "cpu"), load_causal_lm(path, "auto", "cpu")
    plain.set_attn_implementation("eager")
    pack_linears(model, min_weights=1)
    replaced = {
        name
        for name, module in model.named_modules()
        if isinstance(module, PackedLinear) and "_proj" in name
    }
    assert bool(replaced) != stays
    assert_trees_equal(plain, target_of(model), CHUNKS, atol)


def test_it_is_a_target_like_any_other(checkpoint):
    model = ModelConfig(target=str(checkpoint[0]), max_model_len=64)
    engine = build_engine_from_config(model, SpeculativeConfig(method="none"), EngineArgs(2)).engine
    json.dumps(
        cost_key(engine, SpeculativeConfig())
    )  # the name under which its steps' costs are kept
    sequence = Sequence("a", [5, 6, 7], SamplingParams(max_tokens=4, ignore_eos=True))
    engine.add(sequence)
    while engine.has_work:
        engine.step()
    plain = load_causal_lm(checkpoint[0], torch.float32, "cpu")
    generated = plain.generate(
        torch.tensor([[5, 6, 7]]), max_new_tokens=4, do_sample=False, eos_token_id=None
    )
    assert sequence.output_ids == generated[0, 3:].tolist()
