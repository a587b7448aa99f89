"""Quantised weights of checkpoints, against the values of slow readers."""

import itertools
import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFWriter, dequantize
from safetensors.torch import load_file, save_file

from eagle_ray.assembly.assemble import build_engine
from eagle_ray.assembly.engine_sizes import EngineArgs
from eagle_ray.config import SpeculativeConfig
from eagle_ray.core.errors import EngineError
from eagle_ray.gguf.blocks import READERS, GGUFError
from eagle_ray.gguf.gguf_file import GGUFFile
from eagle_ray.gguf.gguf_target import (
    target_config,
    tensor_names,
    write_checkpoint,
    write_metadata,
)
from eagle_ray.models.fp8_blocks import Fp8BlockWeight
from eagle_ray.models.loader import load_causal_lm, read_model_config
from eagle_ray.models.packed_linear import pack_linears
from eagle_ray.models.quantized_checkpoint import GGUFCheckpoint, QuantizedCheckpoint, reads
from eagle_ray.models.quantized_linear import Fp8Weight, QuantizedLinear, QuantizedWeight
from eagle_ray.requests.parameters import SamplingParams
from tests.support.families import MOE, config_of
from tests.support.gguf import F32, Q8_0, toy_metadata, toy_tensors, write_gguf
from tests.support.quantised_files import (
    STORED_LAYERS,
    PackedLayer,
    awq_layer,
    fp8_layer,
    gptq_layer,
    integer_layer,
    packed_layer,
    quantized_tensors,
    random_blocks,
    write_layers,
)
from tests.support.toy_models import llama, run

LAYER = "model.layers.0.self_attn.q_proj"
AWQ = STORED_LAYERS["awq"][1]
GPTQ = STORED_LAYERS["gptq"][1]
IN_ORDER = [i // 32 for i in range(96)]
MIXED = (torch.randperm(96, generator=torch.Generator().manual_seed(0)) // 32).tolist()


def compressed(
    layout: str, ignore: Sequence[str] = (), targets: Sequence[str] = ("Linear",), **weights: Any
) -> dict:
    group = {"targets": list(targets), "weights": weights, "input_activations": None}
    method = {"quant_method": "compressed-tensors", "quantization_status": "compressed"}
    return method | {"format": layout, "ignore": list(ignore), "config_groups": {"group_0": group}}


def packed(bits: int = 4, symmetric: bool = True, **options: Any) -> dict:
    weights = {
        "num_bits": bits,
        "type": "int",
        "symmetric": symmetric,
        "strategy": "group",
        "group_size": 32,
    }
    return compressed("pack-quantized", **(weights | options))


def channels(bits: int = 8, kind: str = "int", **options: Any) -> dict[str, Any]:
    return {"num_bits": bits, "type": kind, "symmetric": True, "strategy": "channel"} | options


def opened(
    directory, layer: PackedLayer | dict, quantization: dict, num_files: int = 1
) -> QuantizedCheckpoint:
    write_layers(
        directory, {LAYER: layer.tensors if isinstance(layer, PackedLayer) else layer}, num_files
    )
    return QuantizedCheckpoint.open(directory, quantization)


def weight(order: torch.Tensor | None = None) -> QuantizedWeight:
    codes = torch.arange(24, dtype=torch.uint8).reshape(3, 8) % 16
    scale = torch.tensor([[1.0, 100.0]]).repeat(3, 1)
    return QuantizedWeight(codes, scale, torch.zeros(3, 2), 4, order)


def test_an_order_says_which_input_each_code_belongs_to():
    order = torch.tensor([3, 1, 0, 2, 7, 6, 5, 4])
    inputs = torch.arange(8.0)
    found = weight(order)
    torch.testing.assert_close(found.dequantize() @ inputs, weight().dequantize() @ inputs[order])
    assert found.shape == (3, 8)
    assert torch.equal(found.rows(torch.tensor([2, 0])).dequantize(), found.dequantize()[[2, 0]])


def test_an_fp8_weight_is_scaled_by_output_or_as_a_whole():
    values = torch.tensor([[1.0, -2.0], [0.5, 448.0]]).to(torch.float8_e4m3fn)
    assert Fp8Weight(values, torch.tensor([[2.0], [4.0]])).dequantize().tolist() == [
        [2.0, -4.0],
        [2.0, 1792.0],
    ]
    assert Fp8Weight(values, torch.tensor([[2.0]])).dequantize().tolist() == [
        [2.0, -4.0],
        [1.0, 896.0],
    ]


GROUPED = {
    "awq": (lambda: awq_layer(16, 96, 32), AWQ),
    "awq of 64": (
        lambda: awq_layer(8, 128, 64),
        {"quant_method": "awq", "w_bit": 4, "q_group_size": 64},
    ),
    "awq symmetric": (lambda: awq_layer(8, 64, 32, zero_point=False), AWQ | {"zero_point": False}),
    "gptq": (
        lambda: gptq_layer(4, 16, IN_ORDER, 1),
        GPTQ | {"checkpoint_format": "gptq", "desc_act": False},
    ),
    "gptq of 8 bits": (lambda: gptq_layer(8, 12, IN_ORDER, 1), GPTQ | {"bits": 8}),
    "gptq of all inputs": (lambda: gptq_layer(4, 8, [0] * 64, 1), GPTQ | {"group_size": -1}),
    "gptq with desc_act": (lambda: gptq_layer(4, 16, MIXED, 1), GPTQ),
    "gptq_v2": (lambda: gptq_layer(4, 16, IN_ORDER, 0), GPTQ | {"checkpoint_format": "gptq_v2"}),
    "W4A16": (lambda: packed_layer(4, 10, IN_ORDER, True), packed()),
    "W4A16 in fp16": (lambda: packed_layer(4, 10, IN_ORDER, True, torch.float16), packed()),
    "W4A16 asymmetric": (lambda: packed_layer(4, 10, IN_ORDER, False), packed(symmetric=False)),
    "W4A16 with actorder": (
        lambda: packed_layer(4, 8, MIXED, False),
        packed(symmetric=False, actorder="group"),
    ),
    "W8A16": (lambda: packed_layer(8, 6, IN_ORDER, True), packed(8)),
    "W8A16 by output": (
        lambda: packed_layer(8, 6, [0] * 50, True),
        compressed("pack-quantized", **channels()),
    ),
    "W8A8": (lambda: integer_layer(6, 40, True), compressed("int-quantized", **channels())),
    "W8A8 asymmetric": (
        lambda: integer_layer(6, 40, False),
        compressed("int-quantized", **channels(symmetric=False)),
    ),
}


@pytest.mark.parametrize("kind", GROUPED)
def test_groups_have_the_values_of_a_slow_reader(tmp_path, kind):
    make, quantization = GROUPED[kind]
    layer = make()
    checkpoint = opened(tmp_path, layer, quantization)
    assert reads(quantization) and checkpoint.names() == [LAYER]
    found = checkpoint.projection(LAYER)
    assert found.codes.shape == layer.weight.shape and int(found.codes.max()) < 2**found.bits
    assert torch.equal(found.dequantize(), layer.weight)
    assert (found.order is not None) == (kind.endswith("desc_act") or kind.endswith("actorder"))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_scales_are_in_fp16_where_that_is_exact(tmp_path, dtype):
    layer = packed_layer(4, 10, IN_ORDER, True, dtype)
    found = opened(tmp_path, layer, packed()).projection(LAYER)
    assert found.scale.dtype is found.offset.dtype is torch.float16
    layer.tensors["weight_scale"][3, 1] = 1e5 if dtype is torch.bfloat16 else 6e4
    found = opened(tmp_path, layer, packed()).projection(LAYER)
    assert found.scale.dtype is found.offset.dtype is torch.float32


def test_a_scale_in_fp32_is_within_the_bound_that_is_said(tmp_path):
    layer = packed_layer(8, 6, IN_ORDER, False, torch.float32)
    layer.tensors["weight_scale"] *= 1 / 3
    found = opened(tmp_path, layer, packed(8, False)).projection(LAYER)
    scale = found.scale.double()
    zero = (found.offset.double() / -scale).round()
    scale, zero = (part.repeat_interleave(32, 1) for part in (scale, zero))
    exact = (found.codes.double() - zero) * scale
    assert ((found.dequantize().double() - exact).abs() <= 3 * 2.0**-16 * scale).all()


WHOLE = channels(kind="float", strategy="tensor")
FP8 = {
    "by output": (
        (8, 40),
        torch.rand(8, 1),
        (1, 40),
        compressed("float-quantized", **channels(kind="float")),
    ),
    "whole": (
        (8, 40),
        torch.rand(1),
        (8, 40),
        compressed("naive-quantized", **WHOLE),
    ),
    "whole, of AutoFP8": (
        (8, 40),
        torch.rand(1),
        (8, 40),
        {"quant_method": "fp8", "activation_scheme": "static"},
    ),
    "whole, of Model Optimizer": (
        (8, 40),
        torch.tensor(0.5),
        (8, 40),
        {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head"]},
    ),
    "by output, of Model Optimizer": (
        (8, 40),
        torch.rand(8, 1),
        (1, 40),
        {"quant_method": "modelopt", "quantization": {"quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"}},
    ),
}


@pytest.mark.parametrize("kind", FP8)
def test_fp8_has_its_values_and_static_scales_are_ignored(tmp_path, kind, caplog):
    shape, scale, block, quantization = FP8[kind]
    layer = fp8_layer(*shape, scale, block, "weight_scale")
    with caplog.at_level(logging.INFO, "eagle_ray"):
        found = opened(
            tmp_path, layer.tensors | {"input_scale": torch.ones(1)}, quantization
        ).projection(LAYER)
    assert isinstance(found, Fp8Weight) and torch.equal(found.dequantize(), layer.weight)
    assert "static activation scales are ignored" in caplog.text


@pytest.mark.parametrize(
    ("suffix", "quantization"),
    [
        ("weight_scale_inv", {"quant_method": "fp8", "weight_block_size": [16, 32]}),
        (
            "weight_scale",
            compressed(
                "float-quantized",
                **channels(kind="float", strategy="block", block_structure=[16, 32]),
            ),
        ),
    ],
)
def test_fp8_in_blocks_has_the_values_of_a_slow_reader(tmp_path, suffix, quantization):
    layer = fp8_layer(40, 80, torch.rand(3, 3), (16, 32), suffix)
    found = opened(tmp_path, layer, quantization).projection(LAYER)
    assert isinstance(found, Fp8BlockWeight) and found.block == (16, 32)
    assert torch.equal(found.dequantize(), layer.weight)


def test_model_optimizers_blocks_of_128_have_scales_of_four_axes(tmp_path):
    layer = fp8_layer(160, 300, torch.rand(2, 3), (128, 128), "weight_scale")
    tensors = layer.tensors | {"weight_scale": layer.tensors["weight_scale"].view(2, 1, 3, 1)}
    settings = {"quant_method": "modelopt", "quantization": {"quant_algo": "FP8_PB_WO"}}
    found = opened(tmp_path, tensors, settings).projection(LAYER)
    assert isinstance(found, Fp8BlockWeight) and torch.equal(found.dequantize(), layer.weight)


@pytest.mark.parametrize("entry", [LAYER, "model.layers.0.self_attn", "*.self_attn.*"])
def test_model_optimizer_leaves_modules_out_by_name_or_pattern(tmp_path, entry):
    dense = torch.randn(4, 8).half()
    settings = {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": [entry]}
    assert torch.equal(opened(tmp_path, {"weight": dense}, settings).projection(LAYER), dense)
    layer = fp8_layer(8, 40, torch.tensor(0.5), (8, 40), "weight_scale")
    with pytest.raises(EngineError, match="is quantised, but quantization_config leaves it out"):
        opened(tmp_path, layer, settings).projection(LAYER)


def test_model_optimizers_own_file_of_settings_is_read(tmp_path):
    model = llama()
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    name = "model.layers.0.mlp.up_proj"
    layer = fp8_layer(
        *tensors[f"{name}.weight"].shape, torch.tensor(0.5), (10**6, 10**6), "weight_scale"
    )
    tensors |= {f"{name}.{suffix}": tensor for suffix, tensor in layer.tensors.items()}
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    settings = {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head"]}
    written = {"producer": {"name": "modelopt"}, "quantization": settings}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(written))
    found = load_causal_lm(tmp_path, torch.float32, "cpu")
    assert torch.equal(found.get_parameter(f"{name}.weight"), layer.weight)

    written["quantization"] |= {"quant_algo": "NVFP4"}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(written))
    with pytest.raises(
        EngineError, match=r"quantization\.quant_algo: is NVFP4, .* in FP8, AWQ or GPTQ"
    ):
        read_model_config(tmp_path)


def test_files_with_an_index_and_dense_tensors(tmp_path):
    layer = awq_layer(16, 96, 32)
    dense = torch.randn(4, 8).half()
    write_layers(
        tmp_path,
        {LAYER: layer.tensors, "lm_head": {"weight": dense, "bias": dense[0]}},
        num_files=3,
    )
    checkpoint = QuantizedCheckpoint.open(tmp_path, AWQ)
    assert torch.equal(checkpoint.projection(LAYER).dequantize(), layer.weight)
    assert torch.equal(checkpoint.projection("lm_head"), dense)
    assert torch.equal(checkpoint.tensor("lm_head.bias"), dense[0])
    assert checkpoint.names() == [LAYER] and "lm_head.bias" in checkpoint.tensor_names()


@pytest.mark.parametrize("entry", [LAYER, "re:.*self_attn.*", "Linear"])
def test_ignore_lists_and_targets_are_read(tmp_path, entry):
    dense = torch.randn(4, 8).half()
    assert torch.equal(
        opened(tmp_path, {"weight": dense}, packed(ignore=[entry])).projection(LAYER), dense
    )
    layer = packed_layer(4, 10, IN_ORDER, True)
    targeted = opened(tmp_path, layer, packed(targets=[entry])).projection(LAYER)
    assert torch.equal(targeted.dequantize(), layer.weight)
    for quantization in (packed(targets=["re:.*mlp.*"]), packed(ignore=[entry])):
        with pytest.raises(
            EngineError,
            match=rf"{LAYER}\.weight: is quantised, but quantization_config leaves it out",
        ):
            opened(tmp_path, layer, quantization).projection(LAYER)


def test_a_group_has_a_format_of_its_own(tmp_path):
    layer = integer_layer(6, 40, True)
    quantization = packed(targets=["re:.*mlp.*"]) | {"format": "mixed-precision"}
    quantization["config_groups"]["group_0"]["format"] = "pack-quantized"
    quantization["config_groups"]["b"] = {
        "targets": ["Linear"],
        "format": "int-quantized",
        "weights": channels(),
    }
    assert torch.equal(
        opened(tmp_path, layer, quantization).projection(LAYER).dequantize(), layer.weight
    )


def changed_tensors(layer: PackedLayer, **tensors: torch.Tensor | None) -> dict[str, torch.Tensor]:
    return {
        name: tensor for name, tensor in (layer.tensors | tensors).items() if tensor is not None
    }


AWQ_LAYER, GPTQ_LAYER, CT_LAYER = (
    awq_layer(16, 96, 32),
    gptq_layer(4, 16, MIXED, 1),
    packed_layer(4, 8, MIXED, False),
)
BROKEN = [
    (
        changed_tensors(AWQ_LAYER, qzeros=None),
        AWQ,
        r"q_proj\.qzeros: is missing in .*Download the model again",
    ),
    (
        changed_tensors(AWQ_LAYER, scales=torch.ones(3, 15)),
        AWQ,
        r"q_proj\.scales: has shape \(3, 15\), wanted \(3, 16\)",
    ),
    (
        changed_tensors(AWQ_LAYER, scales=torch.full((3, 16), torch.inf)),
        AWQ,
        r"q_proj\.scales: holds a number that is not",
    ),
    (
        changed_tensors(AWQ_LAYER, qweight=torch.ones(96, 2)),
        AWQ,
        r"q_proj\.qweight: is float32, wanted int32",
    ),
    (
        changed_tensors(AWQ_LAYER),
        AWQ | {"group_size": 64},
        r"q_proj\.qweight: has 96 inputs, which groups of 64 do not divide",
    ),
    (changed_tensors(GPTQ_LAYER, g_idx=None), GPTQ, r"q_proj\.g_idx: is missing"),
    (
        changed_tensors(GPTQ_LAYER, g_idx=torch.zeros(96).int()),
        GPTQ,
        r"q_proj\.g_idx: must put 32 inputs into each of 3",
    ),
    (
        changed_tensors(GPTQ_LAYER, qzeros=torch.zeros(3, 3).int()),
        GPTQ,
        r"q_proj\.qzeros: has shape \(3, 3\)",
    ),
    (
        changed_tensors(GPTQ_LAYER),
        GPTQ | {"bits": 8},
        r"q_proj\.qweight: has 48 inputs, which groups of 32 do not divide",
    ),
    (
        changed_tensors(CT_LAYER, weight_shape=None),
        packed(symmetric=False),
        r"q_proj\.weight_shape: is missing",
    ),
    (
        changed_tensors(CT_LAYER, weight_zero_point=None),
        packed(symmetric=False),
        r"q_proj\.weight_zero_point: is missing",
    ),
    (
        changed_tensors(CT_LAYER, weight_shape=torch.tensor([8, 0])),
        packed(),
        r"q_proj\.weight_shape: is \[8, 0\]",
    ),
    (
        changed_tensors(integer_layer(6, 40, True), weight_scale=torch.ones(5, 1)),
        compressed("int-quantized", **channels()),
        r"q_proj\.weight_scale: has shape \(5, 1\), wanted \(6, 1\)",
    ),
    (
        changed_tensors(integer_layer(6, 40, True)),
        compressed("int-quantized", **channels(4)),
        r"q_proj\.weight: holds integers that do not fit into 4 bits",
    ),
    (
        {"weight": torch.ones(4, 4).to(torch.float8_e4m3fn)},
        {"quant_method": "fp8"},
        "is float8_e4m3fn, wanted",
    ),
    ({"bias": torch.ones(4)}, AWQ, r"q_proj\.qweight: is missing"),
]


@pytest.mark.parametrize(("tensors", "quantization", "says"), BROKEN)
def test_broken_tensors_are_named(tmp_path, tensors, quantization, says):
    checkpoint = opened(tmp_path, tensors, quantization)
    with pytest.raises(EngineError, match=says):
        checkpoint.projection(LAYER)


@pytest.mark.parametrize(
    ("quantization", "says"),
    [
        ({"quant_method": "bitsandbytes"}, "quantization_config.quant_method: is 'bitsandbytes'"),
        (
            AWQ | {"version": "gemv"},
            r"version: is 'gemv', which is not read\. Use a checkpoint with one of: gemm",
        ),
        (AWQ | {"bits": 3}, "quantization_config.bits: is 3"),
        (AWQ | {"group_size": 0}, "group_size: must be a positive integer or -1, got 0"),
        (GPTQ | {"bits": 2}, "quantization_config.bits: is 2, which is not read.* one of: 4, 8"),
        (GPTQ | {"checkpoint_format": "marlin"}, "checkpoint_format: is 'marlin'"),
        (
            {"quant_method": "fp8", "weight_block_size": [128]},
            r"weight_block_size: must be two .*got \[128\]",
        ),
        (
            {"quant_method": "modelopt"},
            "quantization_config.quant_algo: is None, which is not read",
        ),
        (
            {"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"},
            "quant_algo: is 'W4A8_AWQ', .* one of: FP8, FP8_PER_CHANNEL_PER_TOKEN, FP8_PB_WO",
        ),
        (
            compressed("nvfp4-pack-quantized", **channels(4, "float")),
            "format: is 'nvfp4-pack-quantized'",
        ),
        (packed(3), r"config_groups\.group_0\.weights\.num_bits: is 3"),
        (packed(strategy="token"), r"weights\.strategy: is 'token'"),
        (packed() | {"quantization_status": "frozen"}, "quantization_status: is 'frozen'"),
        (
            packed() | {"sparsity_config": {"format": "sparse-24-bitmask"}},
            "sparsity_config: is set",
        ),
        (packed() | {"transform_config": {"config_groups": {"u": {}}}}, "transform_config: is set"),
        (packed() | {"config_groups": {}}, "config_groups: must be a JSON object of groups"),
        (packed(ignore=["re:("]), "ignore: holds an invalid pattern"),
    ],
)
def test_what_is_not_read_is_named(tmp_path, quantization, says):
    assert reads(quantization) == (quantization["quant_method"] != "bitsandbytes")
    with pytest.raises(EngineError, match=says):
        opened(tmp_path, {"weight": torch.ones(2, 2)}, quantization)


def test_broken_files_are_named(tmp_path):
    with pytest.raises(EngineError, match=r"holds no \*\.safetensors"):
        QuantizedCheckpoint.open(tmp_path, AWQ)
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 64)
    with pytest.raises(
        EngineError, match=r"model\.safetensors: cannot be read: .*Download the model again"
    ):
        QuantizedCheckpoint.open(tmp_path, AWQ)
    (tmp_path / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"a": "../b"}})
    )
    with pytest.raises(
        EngineError, match=r"index\.json: weight_map must name files of the directory"
    ):
        QuantizedCheckpoint.open(tmp_path, AWQ)
    (tmp_path / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"a.weight": "b.safetensors"}})
    )
    save_file({"other": torch.ones(1)}, tmp_path / "b.safetensors")
    with pytest.raises(EngineError, match=r"tensor a\.weight: cannot be read"):
        QuantizedCheckpoint.open(tmp_path, AWQ).tensor("a.weight")


def write_model(directory: Path, method: str, **shape: Any) -> torch.nn.Module:
    """Write a checkpoint with quantised projections, and return the model of their dequantised weights."""
    make, quantization = STORED_LAYERS[method]
    model = llama(
        **dict(hidden_size=64, intermediate_size=96, head_dim=16, num_hidden_layers=1) | shape
    )
    state = model.state_dict()
    tensors = {name: tensor for name, tensor in state.items() if "_proj" not in name}
    for name in sorted(state.keys() - tensors.keys()):
        layer = make(tuple(state[name].shape))
        state[name] = layer.weight
        tensors |= {
            f"{name.removesuffix('.weight')}.{suffix}": tensor
            for suffix, tensor in layer.tensors.items()
        }
    model.load_state_dict(state)
    model.config.save_pretrained(directory)
    config = json.loads((directory / "config.json").read_text()) | {
        "quantization_config": quantization
    }
    (directory / "config.json").write_text(json.dumps(config))
    if model.config.tie_word_embeddings:
        del tensors["lm_head.weight"]
    save_file(
        {name: tensor.clone() for name, tensor in tensors.items()}, directory / "model.safetensors"
    )
    return model


@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize("method", STORED_LAYERS)
def test_a_model_is_the_one_of_the_dequantised_weights(tmp_path, method, is_tied):
    model = write_model(tmp_path, method, tie_word_embeddings=is_tied)
    loaded = load_causal_lm(tmp_path, torch.float32, "cpu", dequantize=True)
    ids = torch.tensor([[5, 6, 7, 8]])
    assert torch.equal(loaded(ids).logits, model(ids).logits)


BASE = {"bits": 4, "group_size": 32}
LEFT_OUT = None
DYNAMIC: dict[
    str, tuple[dict[str, Any], dict[str, Any]]
] = {  # the key, and the settings of layers by parts of their names
    "bits": ({"+:.*down_proj": {"bits": 8}}, {"down_proj": BASE | {"bits": 8}}),
    "group_size": ({r".*\.o_proj": {"group_size": 64}}, {"o_proj": BASE | {"group_size": 64}}),
    "both of a layer": (
        {r"+:.*\.0\..*": {"bits": 8, "group_size": -1}},
        {".0.": {"bits": 8, "group_size": -1}},
    ),
    "left out": ({r"-:.*\.q_proj": {}}, {"q_proj": LEFT_OUT}),
    "left out, then set": (
        {"-:.*q_proj": {}, "+:.*_proj": {"bits": 8}},
        {"q_proj": LEFT_OUT, "": BASE | {"bits": 8}},
    ),
    "set, then left out": (
        {r".*self_attn": {"bits": 8}, "-:.*q_proj": {}},
        {"self_attn": BASE | {"bits": 8}},
    ),
    "in the middle of a name": ({"down_proj": {"bits": 8}}, {}),
    "only whole settings": (
        {"model.layers.1": {"desc_act": False}, ".*": {"bits": 8}},
        {".0.": BASE | {"bits": 8}},
    ),
}


def write_dynamic(directory: Path, dynamic: object, settings: dict[str, Any]) -> torch.nn.Module:
    """Write a GPTQ checkpoint whose layers have the first settings of which the key is in their names, else BASE."""
    model = llama(hidden_size=64, intermediate_size=96, head_dim=16, num_hidden_layers=2)
    state = model.state_dict()
    tensors = {name: tensor for name, tensor in state.items() if "_proj" not in name}
    for name in sorted(state.keys() - tensors.keys()):
        own = next((own for part, own in settings.items() if part in name), BASE)
        if own is LEFT_OUT:
            tensors[name] = state[name]
            continue
        outputs, inputs = state[name].shape
        size = (
            own["group_size"]
            if own["group_size"] > 0 and inputs % own["group_size"] == 0
            else inputs
        )
        layer = gptq_layer(own["bits"], outputs, [i // size for i in range(inputs)], 1)
        state[name] = layer.weight
        tensors |= {
            f"{name.removesuffix('.weight')}.{suffix}": tensor
            for suffix, tensor in layer.tensors.items()
        }
    model.load_state_dict(state)
    model.config.save_pretrained(directory)
    quantization = {**GPTQ, **BASE, "desc_act": False, "dynamic": dynamic}
    config = json.loads((directory / "config.json").read_text()) | {
        "quantization_config": quantization
    }
    (directory / "config.json").write_text(json.dumps(config))
    save_file(
        {name: tensor.clone() for name, tensor in tensors.items()}, directory / "model.safetensors"
    )
    return model


@pytest.mark.parametrize("kind", DYNAMIC)
def test_gptq_layers_have_the_settings_of_the_first_pattern(tmp_path, kind):
    model = write_dynamic(tmp_path, *DYNAMIC[kind])
    loaded = load_causal_lm(tmp_path, torch.float32, "cpu", dequantize=True)
    ids = torch.tensor([[5, 6, 7, 8]])
    assert torch.equal(loaded(ids).logits, model(ids).logits)


@pytest.mark.parametrize(
    ("dynamic", "says"),
    [
        (
            {"+:.*down_proj": {"bits": 3}},
            r"dynamic\.\+:\.\*down_proj: bits: is 3, which is not read",
        ),
        (
            {".*down_proj": {"method": "awq"}},
            r"dynamic\.\.\*down_proj: method: is 'awq', which is not read",
        ),
        ({"-:(": {}}, r"dynamic: holds an invalid pattern"),
        ([".*"], r"dynamic: must be a JSON object of patterns"),
        ({".*": 8}, r"dynamic\.\.\*: must be a JSON object of settings, got 8"),
        (
            {"-:.*q_proj": {}},
            r"q_proj\.weight: is quantised, but quantization_config leaves it out",
        ),
    ],
)
def test_gptq_settings_that_are_not_read_are_named(tmp_path, dynamic, says):
    write_dynamic(tmp_path, dynamic, {})
    with pytest.raises(EngineError, match=says):
        load_causal_lm(tmp_path, torch.float32, "cpu")


@pytest.mark.parametrize(
    ("family", "says"),
    [("mixtral", "quantised experts are not read"), ("apertus", "its modules hold tables")],
)
def test_families_whose_quantised_layers_are_not_read_are_named(tmp_path, family, says):
    config = config_of(family, **(MOE if family == "mixtral" else {}))
    config.save_pretrained(tmp_path)
    content = json.loads((tmp_path / "config.json").read_text()) | {"quantization_config": AWQ}
    (tmp_path / "config.json").write_text(json.dumps(content))
    tensors = {
        f"model.layers.{i}.input_layernorm.weight": torch.ones(config.hidden_size) for i in range(2)
    }
    layer = STORED_LAYERS["awq"][0]((config.hidden_size, config.hidden_size))
    tensors |= {
        f"model.layers.0.mlp.experts.0.w1.{suffix}": tensor
        for suffix, tensor in layer.tensors.items()
    }
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(EngineError, match=f"{family!r} is not read: {says}"):
        load_causal_lm(tmp_path, torch.float32, "cpu")


@pytest.mark.parametrize("stored", ["both", "lm_head"])
@pytest.mark.parametrize("method", STORED_LAYERS)
def test_a_stored_lm_head_counts_under_a_tied_config(tmp_path, method, stored, caplog):
    """Names of a tied pair stand for each other, and if both are stored and differ, neither is ignored."""
    write_model(tmp_path, method, tie_word_embeddings=True)
    tensors = load_file(tmp_path / "model.safetensors")
    embedding = tensors.pop("model.embed_tokens.weight")
    tensors["lm_head.weight"] = embedding.flip(0) if stored == "both" else embedding
    if stored == "both":
        tensors["model.embed_tokens.weight"] = embedding
    save_file(tensors, tmp_path / "model.safetensors")
    loaded = load_causal_lm(tmp_path, torch.float32, "cpu")
    assert torch.equal(loaded.get_output_embeddings().weight, tensors["lm_head.weight"])
    assert torch.equal(loaded.get_input_embeddings().weight, embedding)
    assert ("the lm_head that is stored is used" in caplog.text) == (stored == "both")


def test_equal_copies_of_a_tied_embedding_are_kept_once(tmp_path, caplog):
    write_model(tmp_path, "awq", tie_word_embeddings=True)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, tmp_path / "model.safetensors")
    loaded = load_causal_lm(tmp_path, torch.float32, "cpu")
    assert (
        loaded.get_output_embeddings().weight is loaded.get_input_embeddings().weight
        and not caplog.records
    )


@pytest.mark.parametrize("kind", [F32, Q8_0])
@pytest.mark.parametrize("dequantize", [False, True])
def test_a_gguf_lm_head_counts_under_a_tied_config(tmp_path, kind, dequantize):
    metadata = toy_metadata()
    tensors = toy_tensors(metadata)
    tensors["output.weight"] = (kind, tensors["token_embd.weight"][1][::-1].copy())
    write_gguf(tmp_path / "toy.gguf", metadata, tensors)
    file = GGUFFile.open(tmp_path / "toy.gguf")
    (tmp_path / "config.json").write_text(
        json.dumps(target_config(file) | {"tie_word_embeddings": True})
    )
    head = load_causal_lm(tmp_path, torch.float32, "cpu", dequantize).get_output_embeddings()
    weight = (
        head.quantized_weight().dequantize() if isinstance(head, QuantizedLinear) else head.weight
    )
    assert torch.equal(weight, torch.from_numpy(file.tensor("output.weight").copy()))


BROKEN_TENSORS = {
    "fp8": "model.layers.0.mlp.up_proj.weight",
    "awq": "model.layers.0.mlp.up_proj.scales",
    "gptq": "model.norm.weight",
    "compressed-tensors": "lm_head.weight",
}


@pytest.mark.parametrize("method", BROKEN_TENSORS)
def test_a_tensor_with_what_is_no_number_is_named(tmp_path, method):
    write_model(tmp_path, method)
    tensors = load_file(tmp_path / "model.safetensors")
    name = BROKEN_TENSORS[method]
    tensors[name].flatten()[-1:].copy_(torch.tensor([torch.nan]))
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(
        EngineError, match=rf"tensor {name}: holds a number that is not finite\. Download"
    ):
        load_causal_lm(tmp_path, torch.float32, "cpu")


@pytest.mark.parametrize(
    "name", ["token_embd.weight", "blk.1.attn_norm.weight", "blk.0.attn_output.weight"]
)
def test_a_gguf_tensor_with_what_is_no_number_is_named(tmp_path, name):
    metadata = toy_metadata()
    tensors = toy_tensors(metadata)
    tensors[name] = (F32, tensors[name][1])
    tensors[name][1].flat[-1] = np.nan
    write_gguf(tmp_path / "toy.gguf", metadata, tensors)
    write_metadata(GGUFFile.open(tmp_path / "toy.gguf"), tmp_path)
    with pytest.raises(EngineError, match="holds a number that is not finite"):
        load_causal_lm(tmp_path, torch.float32, "cpu")


def test_plain_weights_with_what_is_no_number_are_named(tmp_path):
    model = llama(num_hidden_layers=1)
    model.model.embed_tokens.weight.data[50, 3] = torch.inf  # of a token that no trial pass has
    model.save_pretrained(tmp_path)
    with pytest.raises(
        EngineError, match=r"tensor model\.embed_tokens\.weight: holds a number that is not finite"
    ):
        load_causal_lm(tmp_path, torch.float32, "cpu")


def test_a_method_that_is_no_text_is_not_read():
    assert not reads(AWQ | {"quant_method": ["awq"]})


def test_missing_tensors_of_a_model_are_named(tmp_path):
    write_model(tmp_path, "awq")
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["lm_head.weight"], tensors["model.norm.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(
        EngineError, match=r"not whole: missing model\.norm\.weight, lm_head\.weight"
    ):
        load_causal_lm(tmp_path, torch.float32, "cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_trees_over_a_quantised_target_equal_plain_decoding(tmp_path, dtype):
    write_model(tmp_path, "awq", vocab_size=104, tie_word_embeddings=True)
    outputs = []
    for method, slots in (("none", 1), ("ngram", 3)):
        target = load_causal_lm(tmp_path, dtype, "cpu")
        pack_linears(target)
        settings = SpeculativeConfig(method=method, budget="uniform")
        engine = build_engine(target, None, settings, EngineArgs(slots, 96, prefill_tokens=8))
        params = [
            SamplingParams(max_tokens=16, ignore_eos=True, temperature=t, seed=5)
            for t in (0.0, 0.9, 0.0)
        ]
        sequences = run(engine, [[5, 6, 5, 6, 5], list(range(3, 40)), [9]], params)
        outputs.append([sequence.output_ids for sequence in sequences])
    assert outputs[0] == outputs[1]


def test_target_runs_in_fp16_without_fp16_library_operations(tmp_path):
    write_model(tmp_path, "awq")
    target = load_causal_lm(tmp_path, torch.float16, "cpu")
    engine = build_engine(target, None, SpeculativeConfig(method="none"), EngineArgs(2, 64))
    assert engine.target.cache.keys.dtype is torch.float16
    [sequence] = run(engine, [[5, 6, 7]], [SamplingParams(max_tokens=4, ignore_eos=True)])
    assert len(sequence.output_ids) == 4
    layer = target.get_submodule(LAYER)
    inputs = torch.randn(3, layer.in_features).half()
    wide = QuantizedLinear(layer.quantized_weight())
    assert torch.equal(layer(inputs), wide(inputs.float()).half())


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    """A GGUF file of every type that the support file quantises, and the directory that it converts to."""
    directory = tmp_path_factory.mktemp("toy")
    write_gguf(directory / "toy.gguf", toy_metadata(), toy_tensors(toy_metadata()))
    file = GGUFFile.open(directory / "toy.gguf")
    write_checkpoint(file, directory)
    return file, directory


def test_gguf_tensors_are_those_of_the_converted_model(toy):
    file, directory = toy
    model = load_causal_lm(directory, torch.float32, "cpu")
    found = quantized_tensors(file, target_config(file))
    assert found.keys() == model.state_dict().keys()
    for name, tensor in model.state_dict().items():
        own = found[name]
        values = own.dequantize() if isinstance(own, QuantizedWeight) else own
        torch.testing.assert_close(
            values, tensor, atol=0, rtol=2**-11
        )  # the conversion rounds to fp16
    assert found["model.layers.0.self_attn.q_proj.weight"].bits == 4
    assert found["lm_head.weight"].bits == 8


def test_every_block_type_is_read_from_a_file_of_the_gguf_writer(tmp_path):
    metadata = toy_metadata() | {"llama.embedding_length": 256, "llama.feed_forward_length": 512}
    writer = GGUFWriter(tmp_path / "x.gguf", "llama")
    stored, kinds = {}, itertools.cycle(READERS)
    for name, (_, values) in toy_tensors(metadata).items():
        kind = GGMLQuantizationType["F32" if values.ndim == 1 else next(kinds)]
        size = GGML_QUANT_SIZES[kind][0]
        data = (
            values
            if values.ndim == 1
            else random_blocks(kind.name, len(values), values.shape[1] // size)
        )
        writer.add_tensor(name, data, raw_dtype=kind)
        stored[name] = dequantize(data, kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = GGUFFile(metadata, GGUFFile.open(tmp_path / "x.gguf").tensors)
    found = quantized_tensors(file, target_config(file))
    assert {found[name].bits for name in found if name.endswith("proj.weight")} == {4, 8}
    for source, name in tensor_names(target_config(file)):
        if stored[source].ndim == 2 and "attn_q" not in source and "attn_k" not in source:
            np.testing.assert_array_equal(found[name].dequantize().numpy(), stored[source])
    query = found[
        "model.layers.0.self_attn.q_proj.weight"
    ].dequantize()  # 4 heads of 64: pairs become halves
    for row in range(256):
        head, i = divmod(row, 64)
        source = head * 64 + (2 * i if i < 32 else 2 * (i - 32) + 1)
        np.testing.assert_array_equal(query[row].numpy(), stored["blk.0.attn_q.weight"][source])


def test_gguf_layers_are_read_one_at_a_time(toy):
    file, _ = toy
    checkpoint = GGUFCheckpoint(file, target_config(file))
    assert "model.layers.0.self_attn.o_proj" not in checkpoint.names()  # it is F16
    assert checkpoint.projection("model.layers.0.self_attn.o_proj").dtype is torch.float32
    assert "lm_head" in checkpoint.names() and "lm_head.weight" in checkpoint.tensor_names()
    embedding = checkpoint.projection("model.embed_tokens").dequantize()
    assert torch.equal(embedding, checkpoint.tensor("model.embed_tokens.weight"))
    with pytest.raises(
        GGUFError, match=r"tensor model\.layers\.9\.mlp\.up_proj\.weight: the file has none"
    ):
        checkpoint.projection("model.layers.9.mlp.up_proj")


@pytest.mark.parametrize(
    ("model_type", "says"),
    [
        ("gpt2", "model_type 'gpt2' is not read from GGUF"),
        ("qwen3", "architecture is 'llama', but model_type"),
    ],
)
def test_a_config_of_another_model_is_refused(toy, model_type, says):
    file, _ = toy
    with pytest.raises(GGUFError, match=says):
        GGUFCheckpoint(file, target_config(file) | {"model_type": model_type})


def test_a_config_of_mistral_reads_a_llama_file(toy):
    file, _ = toy
    name = "model.layers.0.self_attn.q_proj"
    config = target_config(file)
    mistral = GGUFCheckpoint(file, config | {"model_type": "mistral"}).projection(name)
    assert torch.equal(mistral.codes, GGUFCheckpoint(file, config).projection(name).codes)


@pytest.mark.parametrize("architecture", ["qwen2", "qwen3"])
def test_qwen_rows_keep_the_files_order(tmp_path, architecture):
    llama = toy_metadata()
    metadata = {key.replace("llama.", f"{architecture}."): value for key, value in llama.items()}
    metadata |= {"general.architecture": architecture, "tokenizer.ggml.pre": "qwen2"}
    tensors = toy_tensors(llama)
    rng = np.random.default_rng(0)
    own = {
        "qwen2": [f"attn_{part}.bias" for part in "qkv"],
        "qwen3": [f"attn_{part}_norm.weight" for part in "qk"],
    }
    for layer in range(2):
        for name in own[architecture]:
            size = 16 if "norm" in name else 64 if "_q." in name else 32
            tensors[f"blk.{layer}.{name}"] = F32, rng.normal(0, 1, size).astype(np.float32)
    write_gguf(tmp_path / "x.gguf", metadata, tensors)
    file = GGUFFile.open(tmp_path / "x.gguf")
    config = target_config(file)
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = quantized_tensors(file, config)
    state = {
        name: own.dequantize() if isinstance(own, QuantizedWeight) else own
        for name, own in found.items()
    }
    stored = torch.tensor(file.tensor("blk.1.attn_q.weight"))
    assert torch.equal(state["model.layers.1.self_attn.q_proj.weight"], stored)
    contents = {name: tensor.clone() for name, tensor in state.items()}
    save_file(contents, tmp_path / "model.safetensors", {"format": "pt"})
    model = load_causal_lm(
        tmp_path, torch.float32, "cpu"
    )  # which refuses missing and misshapen tensors
    assert model.config.model_type == architecture
