"""Quantised checkpoints of families whose layers are not Llama's, in our own forward."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoConfig, PreTrainedConfig

from eagle_ray.core.decode_batch import DecodeSlots
from eagle_ray.core.errors import EngineError
from eagle_ray.families import FAMILIES as RECORDS
from eagle_ray.kernels import cpu_ops
from eagle_ray.models.decoder import Decoder, is_llama_shaped
from eagle_ray.models.loader import load_causal_lm
from eagle_ray.models.packed_linear import pack_linears
from eagle_ray.models.quantized_linear import QuantizedLinear
from eagle_ray.tree.draft_tree import DraftTree
from tests.support.families import (
    CHUNKS,
    DENSE,
    FAMILIES,
    OF_OTHER_FORMS,
    OTHERS,
    PROMPTS,
    SLOTS,
    assert_trees_equal,
    config_of,
    plain_copy,
    prefill,
    random_model,
    random_trees,
    target_of,
)
from tests.support.quantised_files import STORED_LAYERS, store_layers

INT8 = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True},
        }
    },
}
SIZES = dict(hidden_size=64, intermediate_size=96, head_dim=16)  # blocks of 32 inputs


@pytest.fixture
def checkpoint(tmp_path):
    """Return what writes a random model of a family, its projections as a byte for each weight."""

    def write(config: PreTrainedConfig):
        model = random_model(config)
        model.save_pretrained(tmp_path)
        linears = [name for name, module in model.named_modules() if type(module) is nn.Linear]
        tensors = load_file(tmp_path / "model.safetensors")
        for key in [f"{name}.weight" for name in linears if name != "lm_head"]:
            if key not in tensors:
                continue
            weight = tensors.pop(key)
            scale = weight.abs().amax(1, keepdim=True) / 127
            tensors[key] = (weight / scale).round().to(torch.int8)
            tensors[f"{key}_scale"] = scale
        save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
        settings = json.loads((tmp_path / "config.json").read_text())
        (tmp_path / "config.json").write_text(json.dumps(settings | {"quantization_config": INT8}))
        return tmp_path

    return write


def with_format(kinds: list[str]) -> list:
    """Return every family with every kind of stored layers: the fast tests have one kind of each family."""
    pairs = []
    for number, name in enumerate(OF_OTHER_FORMS):
        for i, kind in enumerate(kinds):
            marks = [] if i == number % len(kinds) else pytest.mark.slow
            pairs.append(pytest.param(name, kind, marks=marks))
    return pairs


@pytest.mark.parametrize("name, kind", with_format([k for k in STORED_LAYERS if k != "W8A8"]))
@torch.inference_mode()
def test_every_format_stands_for_its_dense_weights(tmp_path, name, kind):
    """AWQ, GPTQ, compressed-tensors and FP8: equal to transformers with the weights of a slow reader."""
    model = random_model(wide(name))
    model.save_pretrained(tmp_path)
    linears = [name for name, module in model.named_modules() if type(module) is nn.Linear]
    tensors = load_file(tmp_path / "model.safetensors")
    stored = [f"{name}.weight" for name in linears if name != "lm_head"]
    weights = store_layers(tensors, kind, stored)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    settings = json.loads((tmp_path / "config.json").read_text())
    quantized = settings | {"quantization_config": STORED_LAYERS[kind][1]}
    (tmp_path / "config.json").write_text(json.dumps(quantized))
    for key, weight in weights.items():
        model.get_parameter(key).copy_(weight)
    plain = plain_copy(model)

    restored = load_causal_lm(tmp_path, torch.float32, "cpu", dequantize=True)
    assert is_llama_shaped(restored)
    largest = float(plain(torch.tensor([PROMPTS[1]])).logits.abs().max())
    assert_trees_equal(plain, target_of(restored), CHUNKS, atol=1e-4 * largest)

    # As it is stored, inputs are rounded to 8 bits.
    kept = load_causal_lm(tmp_path, torch.float32, "cpu")
    pack_linears(kept)
    is_stored = isinstance(Decoder.of(kept).layers[0].attention.output, QuantizedLinear)
    assert is_stored == (cpu_ops.quantized_path() != 0 and not kind.startswith("fp8"))
    own = plain(torch.tensor([PROMPTS[2]])).logits[0, -1]
    found = prefill(target_of(kept), None)[2]
    torch.testing.assert_close(found, own, atol=0.2 * float(own.abs().max()), rtol=0)


def wide(name: str) -> PreTrainedConfig:
    """Return the config of a family whose projections read whole blocks of inputs."""
    small = DENSE[name].to_dict() | SIZES
    return AutoConfig.for_model(small.pop("model_type"), **small)


@pytest.mark.slow
@pytest.mark.parametrize("name", RECORDS)
@torch.inference_mode()
def test_a_record_says_whether_quantised_layers_are_read(checkpoint, name):
    """Refused by the family's name, or equal to transformers' own forward with what the weights stand for."""
    config = FAMILIES[name] if name in FAMILIES else config_of(name, **OTHERS.get(name, {}))
    path = checkpoint(config)
    if RECORDS[name].why_dense:
        with pytest.raises(EngineError, match=f"^a quantised checkpoint of {name!r} is not read: "):
            load_causal_lm(path, torch.float32, "cpu")
        return
    model = load_causal_lm(path, torch.float32, "cpu", dequantize=True)
    assert_trees_equal(plain_copy(model), target_of(model), CHUNKS, atol=1e-3)
    prefill(target_of(load_causal_lm(path, torch.float32, "cpu")), None)


@pytest.mark.parametrize("name", OF_OTHER_FORMS)
@torch.inference_mode()
def test_restored_weights_are_run_as_transformers_runs_them(checkpoint, name):
    model = load_causal_lm(checkpoint(wide(name)), torch.float32, "cpu", dequantize=True)
    plain = plain_copy(model)
    pack_linears(model, min_weights=1)
    assert is_llama_shaped(model)
    assert_trees_equal(plain, target_of(model), CHUNKS, atol=1e-3)


@pytest.mark.skipif(cpu_ops.quantized_path() == 0, reason="nothing multiplies these weights here")
@pytest.mark.parametrize("name", OF_OTHER_FORMS)
@torch.inference_mode()
def test_stored_weights_have_one_output_in_any_tree(checkpoint, name):
    """Inputs are rounded to 8 bits, so the oracle is plain decoding with the same weights, to the bit."""
    path = checkpoint(wide(name))
    model = load_causal_lm(path, torch.float32, "cpu")
    own = load_causal_lm(path, torch.float32, "cpu")
    pack_linears(model)
    layers = Decoder.of(model).layers
    assert all(isinstance(layer.attention.output, QuantizedLinear) for layer in layers)

    target, tree = target_of(model), random_trees([9, 2, 6])
    logits = prefill(target, None)
    restored = plain_copy(load_causal_lm(path, torch.float32, "cpu", dequantize=True))
    close = [restored(torch.tensor([ids])).logits[0, -1] for ids in ([88],)]
    torch.testing.assert_close(logits[2], close[0], atol=0.2 * close[0].abs().max(), rtol=0)

    lengths = [7, 20, 1]
    rows = tree.pack(torch.tensor(lengths), 20)
    together = target.verify(tree, rows, DecodeSlots.of(SLOTS, lengths), max_depth=8).logits
    pack_linears(own)
    alone = target_of(own)
    prefill(alone, CHUNKS)
    for b, slot in enumerate(SLOTS):
        root = DraftTree.of_roots(tree.tokens[b, 0][None])
        batch = DecodeSlots.of([slot], [lengths[b]])
        logits = alone.verify(root, root.pack(batch.lengths, 1), batch, max_depth=0).logits
        assert torch.equal(logits[0], together[rows.row_of[b, 0]])
