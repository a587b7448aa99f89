"""Read a target of a GGUF file by transformers' names: its config, its tensors and its tokenizer.

    file = GGUFFile.open(path)
    config = target_config(file)              # the content of config.json
    tensor_names(config)                      # [("blk.0.attn_q.weight", "model.layers.0.self_attn.q_proj.weight"), ...]
    write_checkpoint(file, directory)         # config.json, model.safetensors, tokenizer.json, ...

`architectures` has one record per architecture. This module has the order of rows, and all that
architectures share.

Weights are stored in fp16 and config.json names bf16 as the dtype to run in. Q4_1 and Q8_0 values
are products and sums of fp16 numbers: fp16, with 11 significant bits, keeps them eight times as
precisely as bf16 with 8. The model was trained in bf16, whose range its activations may need, so a
GPU should run it in bf16.

GGUF stores the rows of a Llama's q_proj and k_proj so that a rotary pair is adjacent (0, 1), (2,
3), ...; transformers pairs row i of a head with row i + head_dim / 2, and so do GGUF files of most
other families. Files of Gemma store 1 + w for the weight w of a norm.

Llama 3.1 and later divide rotary frequencies by factors that the file holds as a tensor. The
factors of LLAMA3_ROPES are recognised by their values.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from eagle_ray.core.json_text import dump_json
from eagle_ray.gguf.architectures import (
    ARCHITECTURES,
    DEFAULT_THETA,
    GGUF_LM_HEAD,
    OF_MODEL_TYPE,
    TOP_NAMES,
    Architecture,
    MetadataKeys,
    scaled_rope,
)
from eagle_ray.gguf.blocks import GGUFError
from eagle_ray.gguf.gguf_file import GGUFFile
from eagle_ray.gguf.token_roles import end_ids
from eagle_ray.gguf.tokenizer_files import tokenizer_config, tokenizer_json

RUN_DTYPE = "bfloat16"
ROPE_FACTORS = "rope_freqs.weight"
NORM = "norm.weight"  # how the names of norms' weights end in transformers
# Errors of values that are no model's.
BROKEN = (
    TypeError,
    ValueError,
    IndexError,
    AttributeError,
    ArithmeticError,
)
LLAMA3_ROPES: list[dict[str, Any]] = [  # Llama 3.1 and 3.3, then Llama 3.2
    {
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    for factor in (8.0, 32.0)
]


def write_checkpoint(file: GGUFFile, directory: Path) -> None:
    """Write the target's files into an existing directory, with dequantised weights.

    Raises GGUFError if the file holds no target that can be converted.
    """
    write_metadata(file, directory)
    weights_path = directory / "model.safetensors"
    save_file(target_weights(file, target_config(file)), weights_path, {"format": "pt"})
    weights_path.chmod(0o644)  # save_file creates it for this user alone


def write_metadata(file: GGUFFile, directory: Path) -> None:
    """Write the config and the tokenizer into an existing directory. Raises GGUFError."""
    config = target_config(file)
    generation = {name: config[name] for name in ("bos_token_id", "pad_token_id")}
    try:
        generation["eos_token_id"] = end_ids(file.metadata)
        tokenizer = tokenizer_json(file.metadata)
        tokenizer_settings = tokenizer_config(file.metadata, config["max_position_embeddings"])
    except KeyError as error:
        raise GGUFError(f"the metadata lacks {error}") from error
    except BROKEN as error:
        raise GGUFError(
            f"the tokenizer's metadata is broken: {error}. Download the file again"
        ) from error
    contents = {
        "config.json": config,
        "generation_config.json": generation,
        "tokenizer.json": tokenizer,
        "tokenizer_config.json": tokenizer_settings,
    }
    for name, content in contents.items():
        text = dump_json(content, indent=1, ensure_ascii=False)
        (directory / name).write_text(text + "\n", "utf-8")


def target_config(file: GGUFFile) -> dict[str, Any]:
    """Return the content of config.json for the file's target.

    Raises GGUFError if a key is missing, or if the model's family or one of its settings is not
    supported.
    """
    architecture = file.metadata.get("general.architecture")
    if architecture not in ARCHITECTURES:
        raise GGUFError(
            f"general.architecture is {architecture!r}. Use a file of {', '.join(ARCHITECTURES)}"
        )
    keys = MetadataKeys(file.metadata, architecture)
    record = ARCHITECTURES[architecture]
    try:
        config = _shared_config(file, keys, record)
        config |= record.config(keys, file, config)
        config["rope_parameters"] = _with_llama3_factors(file, config)
    except KeyError as error:
        raise GGUFError(f"the metadata lacks {error}") from error
    except BROKEN as error:
        raise GGUFError(f"the metadata is broken: {error}. Download the file again") from error
    if unread := keys.unread():
        raise GGUFError(f"{unread[0]} is set, which is not supported. Use a model without it")
    check_names(file, config)
    return config


def _shared_config(file: GGUFFile, keys: MetadataKeys, record: Architecture) -> dict[str, Any]:
    """Return the config keys that all architectures have."""
    heads = keys.require("attention.head_count")
    hidden_size = keys.require("embedding_length")
    head_dim = keys.get("attention.key_length", hidden_size // heads)
    if keys.get("attention.value_length", head_dim) != head_dim:
        raise GGUFError(
            f"{keys.architecture}.attention.value_length: values of another size than keys are not supported. "
            "Use another model"
        )
    if not record.partial_rotary and keys.get("rope.dimension_count", head_dim) != head_dim:
        raise GGUFError(
            f"{keys.architecture}.rope.dimension_count: only whole heads of {head_dim} are rotated here. "
            "Use another model"
        )
    return {
        "architectures": [record.class_name],
        "model_type": record.model_types[0],
        "dtype": RUN_DTYPE,
        **record.constants,
        "hidden_size": hidden_size,
        "head_dim": head_dim,
        "intermediate_size": keys.get("feed_forward_length"),
        "num_hidden_layers": keys.require("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": keys.get("attention.head_count_kv", heads),
        "max_position_embeddings": keys.require("context_length"),
        "rms_norm_eps": keys.require("attention.layer_norm_rms_epsilon"),
        "rope_parameters": scaled_rope(keys, keys.get("rope.freq_base", DEFAULT_THETA)),
        "vocab_size": len(file.metadata["tokenizer.ggml.tokens"]),
        "tie_word_embeddings": GGUF_LM_HEAD not in file.tensors,
        "bos_token_id": file.metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": file.metadata["tokenizer.ggml.eos_token_id"],
        "pad_token_id": file.metadata.get("tokenizer.ggml.padding_token_id"),
        "use_cache": True,
    }


def _with_llama3_factors(file: GGUFFile, config: dict[str, Any]) -> dict[str, Any]:
    """Return the rotary parameters, with the factors of Llama 3 if the file has them."""
    rope: dict[str, Any] = config["rope_parameters"]
    if ROPE_FACTORS not in file.tensors or rope.get("rope_type") != "default":
        return rope
    theta = rope["rope_theta"]
    factors = file.tensor(ROPE_FACTORS)
    for own in LLAMA3_ROPES:
        expected = llama3_factors(config["head_dim"], theta, **own)
        if factors.shape == expected.shape and np.allclose(factors, expected, rtol=1e-5, atol=0):
            return {"rope_type": "llama3", "rope_theta": theta, **own}
    raise GGUFError(
        f"tensor {ROPE_FACTORS}: these are not the factors of Llama 3.1, 3.2 or 3.3. "
        "Put the model's own config.json into the directory of the file"
    )


def llama3_factors(
    head_dim: int,
    theta: float,
    factor: float,
    low_freq_factor: float,
    high_freq_factor: float,
    original_max_position_embeddings: int,
) -> np.ndarray:
    """Return the divisor of each rotary frequency in Llama 3: 1 for short wavelengths, `factor` for long ones."""
    frequencies = theta ** (-np.arange(0, head_dim, 2) / head_dim)
    turns = original_max_position_embeddings * frequencies / (2 * np.pi)
    smooth = np.clip((turns - low_freq_factor) / (high_freq_factor - low_freq_factor), 0, 1)
    return 1 / ((1 - smooth) / factor + smooth)


def check_names(file: GGUFFile, config: dict[str, Any]) -> None:
    """Raise GGUFError, naming a tensor, unless the file has exactly the tensors of this config.

    Args:
        config: content of config.json.
    """
    kind = config["model_type"]
    architecture = file.metadata.get("general.architecture")
    if kind not in OF_MODEL_TYPE:
        raise GGUFError(
            f"model_type {kind!r} is not read from GGUF files. Use one of {', '.join(OF_MODEL_TYPE)}"
        )
    if architecture not in ARCHITECTURES or kind not in ARCHITECTURES[architecture].model_types:
        raise GGUFError(
            f"general.architecture is {architecture!r}, but model_type in config.json is {kind!r}. "
            "Use the config.json of the file's own model"
        )
    if (num_parts := file.metadata.get("split.count", 1)) > 1:
        raise GGUFError(
            f"the file is one of {num_parts} parts. Join them by `llama-gguf-split --merge`"
        )
    expected = {source for source, _ in tensor_names(config)}
    if missing := sorted(expected - file.tensors.keys()):
        raise GGUFError(f"the file lacks tensor {missing[0]}. Download it again")
    rope_type = (config.get("rope_parameters") or {}).get("rope_type", "default")
    allowed = {ROPE_FACTORS} if rope_type == "llama3" else set()
    if rope_type == "longrope":
        allowed = set(OF_MODEL_TYPE[kind].extra_tensors)
    tied = {GGUF_LM_HEAD} if config["tie_word_embeddings"] else set()
    if others := sorted(file.tensors.keys() - expected - allowed - tied):
        raise GGUFError(
            f"tensor {others[0]} is part of no {kind} that is supported. Use another model"
        )


def tensor_names(config: dict[str, Any]) -> list[tuple[str, str]]:
    """Return pairs of a tensor's name in the file and in transformers.

    Several tensors of the file may form one of transformers: the gate and up projections of
    experts.

    Args:
        config: content of config.json, with a model_type of OF_MODEL_TYPE.
    """
    record = OF_MODEL_TYPE[config["model_type"]]
    names = list(TOP_NAMES.items())
    if not config["tie_word_embeddings"]:
        names.append((GGUF_LM_HEAD, "lm_head.weight"))
    biases = record.biases if config.get("attention_bias") else {}
    layer_tensors = record.layer_tensors | biases
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        names += [(f"blk.{layer}.{a}", f"{prefix}.{b}") for a, b in layer_tensors.items()]
    return names


def sources_of(config: dict[str, Any]) -> dict[str, list[str]]:
    """Return, for each of transformers' names, the names of the file's tensors that form it.

    Args:
        config: content of config.json, as in `tensor_names`.
    """
    sources: dict[str, list[str]] = {}
    for source, name in tensor_names(config):
        sources.setdefault(name, []).append(source)
    return sources


def stored_tensor(
    file: GGUFFile, name: str, sources: Sequence[str], config: dict[str, Any]
) -> np.ndarray:
    """Return a tensor by transformers' name, dequantised to fp32. Raises KeyError, GGUFError.

    Args:
        name: name in transformers.
        sources: names of the file's tensors that form it.
        config: content of config.json, as in `tensor_names`.
    """
    record = OF_MODEL_TYPE[config["model_type"]]
    parts = [file.tensor(source) for source in sources]
    join = record.joins.get(name.removeprefix("model.layers.").partition(".")[2])
    if join is not None:
        return join(*parts)
    [values] = parts
    if record.norm_offset and name.endswith(NORM):
        return values + np.float32(record.norm_offset)
    order = row_order(sources[0], len(values), config)
    return values if order is None else values[order]


def target_weights(file: GGUFFile, config: dict[str, Any]) -> dict[str, np.ndarray]:
    """Return all weights in fp16 by transformers' names. Raises GGUFError if one is missing or exceeds fp16."""
    try:
        return {
            name: _to_fp16(name, stored_tensor(file, name, sources, config))
            for name, sources in sources_of(config).items()
        }
    except KeyError as error:
        raise GGUFError(f"the file lacks tensor {error}") from error


def row_order(source: str, num_rows: int, config: dict[str, Any]) -> np.ndarray | None:
    """Return the file's row for each row of transformers; None if the orders are equal. Raises GGUFError.

    Args:
        source: name of a weight in the file.
    """
    heads = {"attn_q.weight": "num_attention_heads", "attn_k.weight": "num_key_value_heads"}
    key = heads.get(source.rpartition("blk.")[2].partition(".")[2])
    if key is None or not OF_MODEL_TYPE[config["model_type"]].adjacent_pairs:
        return None
    if num_rows % (2 * config[key]):
        raise GGUFError(
            f"tensor {source}: has {num_rows} rows, which are not {config[key]} heads. "
            "Use the config.json of the file's own model"
        )
    return unpermute(np.arange(num_rows)[:, None], config[key])[:, 0]


def unpermute(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Reorder the rows of every head from adjacent rotary pairs to transformers' two halves.

    Args:
        weight: [num_heads * head_dim, hidden_size].
    """
    rows, columns = weight.shape
    pairs = weight.reshape(num_heads, rows // num_heads // 2, 2, columns)
    return pairs.swapaxes(1, 2).reshape(rows, columns)


def _to_fp16(name: str, weight: np.ndarray) -> np.ndarray:
    try:
        with np.errstate(over="raise"):
            return np.ascontiguousarray(weight, np.float16)
    except FloatingPointError as error:
        raise GGUFError(f"{name} has values that fp16 cannot hold") from error
