"""Convert a Llama target from GGUF to transformers' layout.

    write_checkpoint(GGUFFile.open(path), directory)    # config.json, model.safetensors, tokenizer.json, ...

Weights are stored in fp16 and config.json names bf16 as the dtype to run in. Q4_1 and Q8_0 values are products and
sums of fp16 numbers: fp16, with 11 significant bits, keeps them eight times as precisely as bf16 with 8. The model was
trained in bf16, whose range its activations may need, so a GPU should run it in bf16.

GGUF stores the rows of q_proj and k_proj so that a rotary pair is adjacent (0, 1), (2, 3), ...; transformers pairs
row i of a head with row i + head_dim / 2.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from eagle_ray.gguf.bpe_tokenizer import tokenizer_config, tokenizer_json
from eagle_ray.gguf.gguf_file import GGUFError, GGUFFile

RUN_DTYPE = "bfloat16"
TOP_NAMES = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
LM_HEAD = "output.weight"  # missing if the lm_head is tied to the embedding
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
UNSUPPORTED = ("llama.rope.scaling.type", "llama.expert_count")  # keys of models that compute something else


def write_checkpoint(file: GGUFFile, directory: Path) -> None:
    """Write the target's files into an existing directory. Raises GGUFError if the file is no plain Llama."""
    config = llama_config(file)
    generation = {name: config[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    contents = {
        "config.json": config,
        "generation_config.json": generation,
        "tokenizer.json": tokenizer_json(file.metadata),
        "tokenizer_config.json": tokenizer_config(file.metadata, config["max_position_embeddings"]),
    }
    for name, content in contents.items():
        text = json.dumps(content, indent=1, ensure_ascii=False)
        (directory / name).write_text(text + "\n", "utf-8")
    weights_path = directory / "model.safetensors"
    save_file(llama_weights(file, config), weights_path, {"format": "pt"})
    weights_path.chmod(0o644)  # save_file creates it for this user alone


def llama_config(file: GGUFFile) -> dict[str, Any]:
    """Return the content of config.json. Raises GGUFError if a key is missing or the model is no plain Llama."""
    metadata = file.metadata
    architecture = metadata.get("general.architecture")
    if architecture != "llama":
        raise GGUFError(f"general.architecture is {architecture!r}. Only 'llama' can be converted")
    if found := [key for key in UNSUPPORTED if key in metadata]:
        raise GGUFError(f"{found[0]} is set, which the conversion does not support")
    try:
        return _config_of(metadata, tied=LM_HEAD not in file.tensors)
    except KeyError as error:
        raise GGUFError(f"the metadata lacks {error}") from error


def _config_of(metadata: dict[str, Any], tied: bool) -> dict[str, Any]:
    heads = metadata["llama.attention.head_count"]
    hidden_size = metadata["llama.embedding_length"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": RUN_DTYPE,
        "attention_bias": False,
        "mlp_bias": False,
        "hidden_act": "silu",
        "hidden_size": hidden_size,
        "head_dim": hidden_size // heads,
        "intermediate_size": metadata["llama.feed_forward_length"],
        "num_hidden_layers": metadata["llama.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": metadata.get("llama.attention.head_count_kv", heads),
        "max_position_embeddings": metadata["llama.context_length"],
        "rms_norm_eps": _shortest(metadata["llama.attention.layer_norm_rms_epsilon"]),
        "rope_parameters": {"rope_type": "default", "rope_theta": _shortest(metadata["llama.rope.freq_base"])},
        "vocab_size": len(metadata["tokenizer.ggml.tokens"]),
        "tie_word_embeddings": tied,
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": metadata["tokenizer.ggml.eos_token_id"],
        "pad_token_id": metadata.get("tokenizer.ggml.padding_token_id"),
        "use_cache": True,
    }


def _shortest(value: float) -> float:
    """Return the shortest decimal that rounds to this fp32 number: 1e-05, not 9.999999747378752e-06."""
    return float(str(np.float32(value)))


def llama_weights(file: GGUFFile, config: dict[str, Any]) -> dict[str, np.ndarray]:
    """Return all weights in fp16 by transformers' names. Raises GGUFError if one is missing or exceeds fp16."""
    try:
        return {name: _to_fp16(name, _weight(file, source, config)) for source, name in _names(config)}
    except KeyError as error:
        raise GGUFError(f"the file lacks tensor {error}") from error


def _names(config: dict[str, Any]) -> list[tuple[str, str]]:
    """Return pairs of a tensor's name in the file and in transformers."""
    names = list(TOP_NAMES.items())
    if not config["tie_word_embeddings"]:
        names.append((LM_HEAD, "lm_head.weight"))
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        names += [(f"blk.{layer}.{a}.weight", f"{prefix}.{b}.weight") for a, b in LAYER_NAMES.items()]
    return names


def _weight(file: GGUFFile, source: str, config: dict[str, Any]) -> np.ndarray:
    weight = file.tensor(source)
    if source.endswith("attn_q.weight"):
        return unpermute(weight, config["num_attention_heads"])
    if source.endswith("attn_k.weight"):
        return unpermute(weight, config["num_key_value_heads"])
    return weight


def unpermute(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Reorder the rows of every head from adjacent rotary pairs to transformers' two halves.

    weight: [num_heads * head_dim, hidden_size].
    """
    rows, columns = weight.shape
    pairs = weight.reshape(num_heads, rows // num_heads // 2, 2, columns)
    return pairs.swapaxes(1, 2).reshape(rows, columns)


def _to_fp16(name: str, weight: np.ndarray) -> np.ndarray:
    if np.abs(weight).max() > np.finfo(np.float16).max:
        raise GGUFError(f"{name} has values that fp16 cannot hold")
    return np.ascontiguousarray(weight, np.float16)
