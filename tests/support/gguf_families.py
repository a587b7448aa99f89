"""Random models of transformers written as GGUF files, as llama.cpp's converters write them, one tensor at a time.

    write_family(path, "gemma3", random_model(config))

Names of tensors are those of the package gguf. Keys, the order of rows and the rest follow the
description of each family; nothing here is shared with eagle_ray.gguf.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from gguf import MODEL_ARCH_NAMES, GGUFWriter, get_tensor_name_map
from transformers import PreTrainedModel

from tests.support.gguf import toy_metadata

VOCAB_SIZE = len(toy_metadata()["tokenizer.ggml.tokens"])
PAIRED = ("llama", "mistral3", "granite", "smollm3")  # architectures with paired rows
SHIFTED = ("gemma", "gemma2", "gemma3")  # architectures that store 1 + w of norms
Rows = np.ndarray


def write_family(path: Path, architecture: str, model: PreTrainedModel) -> None:
    """Write a model's file with its weights in fp32 and the toy tokenizer."""
    writer = GGUFWriter(path, architecture)
    config = model.config.to_dict()
    for key, value in keys_of(architecture, config).items():
        add_key(writer, f"{architecture}.{key}", value)
    for key, value in toy_metadata().items():
        if key.startswith("tokenizer."):
            add_key(writer, key, value)
    for name, values in tensors_of(architecture, config, model):
        writer.add_tensor(name, np.ascontiguousarray(values, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_key(writer: GGUFWriter, key: str, value: Any) -> None:
    """Write a key of the metadata in the type of its value."""
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, list):
        writer.add_array(key, value)
    else:
        writer.add_string(key, value)


def keys_of(architecture: str, config: dict[str, Any]) -> dict[str, Any]:
    """Return the metadata of a model, without the name of its architecture before the keys."""
    rope = config["rope_parameters"]
    full = rope.get("full_attention", rope)
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    keys = {
        "block_count": config["num_hidden_layers"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": heads,
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "rope.freq_base": full["rope_theta"],
    }
    rotated = int(head_dim * rope.get("partial_rotary_factor", 1.0))
    if architecture in PAIRED or rotated != head_dim:
        keys["rope.dimension_count"] = rotated
    if full["rope_type"] in ("linear", "yarn"):
        keys |= {"rope.scaling.type": full["rope_type"], "rope.scaling.factor": full["factor"]}
    if full["rope_type"] == "yarn":
        keys["rope.scaling.original_context_length"] = full["original_max_position_embeddings"]
    if "sliding_attention" in rope:
        keys["rope.freq_base_swa"] = rope["sliding_attention"]["rope_theta"]
    return keys | EXTRA_KEYS.get(architecture, lambda config: {})(config)


def _windowed(config: dict[str, Any]) -> dict[str, Any]:
    return {"attention.sliding_window": config["sliding_window"]}


def _layer_by_layer(config: dict[str, Any]) -> dict[str, Any]:
    """OLMo 3 says of each layer whether it has a window."""
    if config["model_type"] != "olmo3":
        return {}
    kinds = [kind == "sliding_attention" for kind in config["layer_types"]]
    return _windowed(config) | {"attention.sliding_window_pattern": kinds}


def _granite(config: dict[str, Any]) -> dict[str, Any]:
    return {
        "attention.scale": config["attention_multiplier"],
        "embedding_scale": config["embedding_multiplier"],
        "residual_scale": config["residual_multiplier"],
        "logit_scale": config["logits_scaling"],
    }


def _gemma2(config: dict[str, Any]) -> dict[str, Any]:
    return _windowed(config) | {
        "attn_logit_softcapping": config["attn_logit_softcapping"],
        "final_logit_softcapping": config["final_logit_softcapping"],
    }


def _phi3(config: dict[str, Any]) -> dict[str, Any]:
    rope = config["rope_parameters"]
    keys = {
        "rope.scaling.original_context_length": config["original_max_position_embeddings"],
        "attention.sliding_window": config["sliding_window"] or 0,
    }
    return (
        keys if rope["rope_type"] == "default" else keys | {"rope.scaling.attn_factor": 1.1547005}
    )


def _mistral3(config: dict[str, Any]) -> dict[str, Any]:
    rope = config["rope_parameters"]
    if config["model_type"] != "ministral3":
        return {}
    return {
        "rope.scaling.yarn_beta_fast": rope["beta_fast"],
        "rope.scaling.yarn_beta_slow": rope["beta_slow"],
        "rope.scaling.yarn_log_multiplier": rope["mscale_all_dim"],
        "attention.temperature_scale": rope["llama_4_scaling_beta"],
    }


def _experts(config: dict[str, Any]) -> dict[str, Any]:
    return {
        "expert_count": config.get("num_experts") or config["num_local_experts"],
        "expert_used_count": config["num_experts_per_tok"],
        "expert_feed_forward_length": config.get("moe_intermediate_size")
        or config["intermediate_size"],
    }


EXTRA_KEYS = {
    "gemma2": _gemma2,
    "gemma3": _windowed,
    "olmo2": _layer_by_layer,
    "granite": _granite,
    "phi3": _phi3,
    "mistral3": _mistral3,
    "qwen3moe": _experts,
    "gpt-oss": lambda config: (
        _experts(config | {"moe_intermediate_size": None}) | _windowed(config)
    ),
}


def tensors_of(
    architecture: str, config: dict[str, Any], model: PreTrainedModel
) -> Iterator[tuple[str, Rows]]:
    """Yield the file's tensors by their names there."""
    [arch] = [arch for arch, name in MODEL_ARCH_NAMES.items() if name == architecture]
    names = get_tensor_name_map(arch, config["num_hidden_layers"])
    for name, parameter in model.named_parameters():
        values = parameter.detach().numpy()
        if ".experts." in name:
            yield from _expert_tensors(architecture, name, values)
            continue
        if name.endswith(".sinks"):
            name += ".weight"
        stored = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert stored is not None, name
        if architecture in PAIRED and ".q_proj." in name:
            values = _paired(values, config["num_attention_heads"])
        if architecture in PAIRED and ".k_proj." in name:
            values = _paired(values, config["num_key_value_heads"])
        if architecture in SHIFTED and name.endswith("norm.weight"):
            values = values + 1
        yield stored, values
    rope = config["rope_parameters"]
    for length in ("long", "short"):
        if rope.get("rope_type") == "longrope":
            yield f"rope_factors_{length}.weight", np.array(rope[f"{length}_factor"], np.float32)


def _paired(values: Rows, num_heads: int) -> Rows:
    """Return the rows of each head so that those of a rotary pair, i and i + half a head, are side by side."""
    size = len(values) // num_heads
    rows = []
    for head in range(num_heads):
        for i in range(size // 2):
            rows += [values[head * size + i], values[head * size + size // 2 + i]]
    return np.stack(rows)


def _expert_tensors(architecture: str, name: str, values: Rows) -> Iterator[tuple[str, Rows]]:
    """Yield the tensors of all experts of a layer: gate and up are apart, and outputs come before inputs."""
    layer, kind = name.split(".")[2], name.rpartition(".")[2]
    suffix = "bias" if kind.endswith("_bias") else "weight"
    if architecture == "gpt-oss":  # [E, H, 2 I], of which gate and up have every second one
        values = values if suffix == "bias" else values.transpose(0, 2, 1)
        gate, up = values[:, 0::2], values[:, 1::2]
    else:  # [E, 2 I, H]
        gate, up = np.array_split(values, 2, axis=1)
    if kind.startswith("down"):
        yield f"blk.{layer}.ffn_down_exps.{suffix}", values
    else:
        yield f"blk.{layer}.ffn_gate_exps.{suffix}", gate
        yield f"blk.{layer}.ffn_up_exps.{suffix}", up
