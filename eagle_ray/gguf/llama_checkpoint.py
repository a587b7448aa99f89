"""Convert a Llama target from GGUF to transformers' layout.

    write_checkpoint(GGUFFile.open(path), directory)    # config.json, model.safetensors, tokenizer.json, ...

The package `gguf` reads the file. Here stand the names of Llama's tensors, the order of their rows, and the byte-level
BPE tokenizer.

Weights are stored in fp16 and config.json names bf16 as the dtype to run in. Q4_1 and Q8_0 values are products and
sums of fp16 numbers: fp16, with 11 significant bits, keeps them eight times as precisely as bf16 with 8. The model was
trained in bf16, whose range its activations may need, so a GPU should run it in bf16.

GGUF stores the rows of q_proj and k_proj so that a rotary pair is adjacent (0, 1), (2, 3), ...; transformers pairs
row i of a head with row i + head_dim / 2.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from gguf import GGUFReader, ReaderTensor, TokenType, dequantize
from safetensors.numpy import save_file

from eagle_ray.gguf.blocks import BlockValues, GGUFError, read_blocks

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

PRE_TOKENIZERS: dict[str, list[dict[str, Any]]] = {
    "smollm": [
        {"type": "Digits", "individual_digits": True},
        {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
    ]
}
ROLES = {
    "bos_token": "tokenizer.ggml.bos_token_id",
    "eos_token": "tokenizer.ggml.eos_token_id",
    "unk_token": "tokenizer.ggml.unknown_token_id",
    "pad_token": "tokenizer.ggml.padding_token_id",
}


class GGUFFile:
    """An open file. Use `open` to build it.

    Attributes:
        metadata: values by key: numbers, strings, booleans and lists of them.
        tensors: by name; `data` holds a tensor's blocks as they lie in the file, mapped into memory.
    """

    def __init__(self, metadata: dict[str, Any], tensors: dict[str, ReaderTensor]):
        self.metadata = metadata
        self.tensors = tensors

    @classmethod
    def open(cls, path: Path) -> GGUFFile:
        """Read the header of a file. Raises GGUFError, OSError."""
        try:
            reader = _BoundedReader(path)
            metadata = {key: field.contents() for key, field in reader.fields.items() if not key.startswith("GGUF.")}
        except (ValueError, KeyError) as error:
            raise GGUFError(f"{path}: not a readable GGUF file: {error}") from error
        return cls(metadata, {tensor.name: tensor for tensor in reader.tensors})

    def tensor(self, name: str) -> np.ndarray:
        """Return a tensor as float32. Raises KeyError if there is none of this name, GGUFError if its type is not
        supported.
        """
        tensor = self.tensors[name]
        try:
            return dequantize(tensor.data, tensor.tensor_type)
        except NotImplementedError as error:
            raise GGUFError(f"tensor {name} cannot be read: {error}") from error

    def blocks(self, name: str) -> BlockValues:
        """Return a quantised matrix without dequantising it. Raises KeyError, GGUFError if it is of another type."""
        return read_blocks(self.tensors[name])


class _BoundedReader(GGUFReader):
    """A reader that refuses to read past the end of the file. It also opens SmolLM2 four times as fast as its base,
    which slices a memmap for each of 150,000 tokens and merges (0.39 s and 1.59 s on 2 CPU cores).
    """

    def _get(
        self, offset: int, dtype: npt.DTypeLike, count: int = 1, override_order: Literal["I", "S", "<"] | None = None
    ) -> np.ndarray:
        ordered = np.dtype(dtype).newbyteorder(override_order or self.byte_order)
        if offset + int(count) * ordered.itemsize > self.data.size:
            raise GGUFError("the file ends early")
        return np.frombuffer(self.data, ordered, int(count), offset)


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
    if unsupported := [key for key in UNSUPPORTED if key in metadata]:
        raise GGUFError(f"{unsupported[0]} is set, which the conversion does not support")
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
    try:
        with np.errstate(over="raise"):
            return np.ascontiguousarray(weight, np.float16)
    except FloatingPointError as error:
        raise GGUFError(f"{name} has values that fp16 cannot hold") from error


def tokenizer_json(metadata: dict[str, Any]) -> dict[str, Any]:
    """Return the content of tokenizer.json. Raises GGUFError if the tokenizer is not a known byte-level BPE."""
    tokens, merges = _vocabulary(metadata)
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [_added_token(id, tokens[id]) for id in special_ids(metadata)],
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": _pre_tokenizers(metadata)},
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {token: id for id, token in enumerate(tokens)},
            "merges": [merge.split(" ") for merge in merges],
        },
    }


def tokenizer_config(metadata: dict[str, Any], max_length: int) -> dict[str, Any]:
    """Return the content of tokenizer_config.json. max_length: of a sequence, in tokens."""
    tokens = metadata["tokenizer.ggml.tokens"]
    roles = {role: tokens[metadata[key]] for role, key in ROLES.items() if key in metadata}
    extra = [tokens[id] for id in special_ids(metadata) if tokens[id] not in roles.values()]
    config = {
        "backend": "tokenizers",
        "tokenizer_class": "TokenizersBackend",
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_length,
        **roles,
        "extra_special_tokens": extra,
    }
    template = metadata.get("tokenizer.chat_template")
    return config if template is None else config | {"chat_template": template}


def special_ids(metadata: dict[str, Any]) -> list[int]:
    """Return the ids of special tokens."""
    return [id for id, kind in enumerate(metadata["tokenizer.ggml.token_type"]) if kind == TokenType.CONTROL]


def _vocabulary(metadata: dict[str, Any]) -> tuple[list[str], list[str]]:
    kind = metadata.get("tokenizer.ggml.model")
    if kind != "gpt2":
        raise GGUFError(f"tokenizer.ggml.model is {kind!r}. Only 'gpt2' (byte-level BPE) can be converted")
    return metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.merges"]


def _pre_tokenizers(metadata: dict[str, Any]) -> list[dict[str, Any]]:
    name = metadata.get("tokenizer.ggml.pre")
    if name not in PRE_TOKENIZERS:
        raise GGUFError(f"tokenizer.ggml.pre is {name!r}. Known: {', '.join(PRE_TOKENIZERS)}")
    return PRE_TOKENIZERS[name]


def _added_token(id: int, content: str) -> dict[str, Any]:
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {"id": id, "content": content, **flags}
