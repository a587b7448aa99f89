"""Read a Llama, Mistral, Qwen2 or Qwen3 target of a GGUF file by transformers' names.

    file = GGUFFile.open(path)
    config = llama_config(file)               # the content of config.json
    tensor_names(config)                      # [("blk.0.attn_q.weight", "model.layers.0.self_attn.q_proj.weight"), ...]
    write_checkpoint(file, directory)         # config.json, model.safetensors, tokenizer.json, ...

The package `gguf` reads the file. Here stand the names of tensors and the order of their rows. Mistral's files call
their architecture llama.

Weights are stored in fp16 and config.json names bf16 as the dtype to run in. Q4_1 and Q8_0 values are products and
sums of fp16 numbers: fp16, with 11 significant bits, keeps them eight times as precisely as bf16 with 8. The model was
trained in bf16, whose range its activations may need, so a GPU should run it in bf16.

GGUF stores the rows of a Llama's q_proj and k_proj so that a rotary pair is adjacent (0, 1), (2, 3), ...; transformers
pairs row i of a head with row i + head_dim / 2, and so do GGUF files of Qwen.

Llama 3.1 and later divide rotary frequencies by factors that the file holds as a tensor. The factors of LLAMA3_ROPES
are recognised by their values.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from gguf import GGUFReader, ReaderTensor, dequantize
from safetensors.numpy import save_file

from eagle_ray.core.json_text import dump_json
from eagle_ray.gguf.blocks import DENSE, BlockValues, GGUFError, read_blocks
from eagle_ray.gguf.byte_level_bpe import end_ids, tokenizer_config, tokenizer_json

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
QKV_BIASES = {"attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj"}
QK_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
ROPE_FACTORS = "rope_freqs.weight"
CLASSES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
ARCHITECTURE_OF = {"mistral": "llama"} | {name: name for name in CLASSES}  # by model_type
ADJACENT_PAIRS = ("llama", "mistral")  # model types whose q_proj and k_proj have other rows than in transformers
# keys of models that compute something else
UNSUPPORTED = ("rope.scaling.type", "expert_count", "attention.sliding_window", "logit_scale", "attention.scale")
BROKEN = (TypeError, ValueError, IndexError, AttributeError, ArithmeticError)  # of values that are no model's
DEFAULT_THETA = 10000.0  # of files that do not say it
LLAMA3_ROPES: list[dict[str, Any]] = [  # of Llama 3.1 and 3.3, and of Llama 3.2
    {"factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    for factor in (8.0, 32.0)
]


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
        except (ValueError, KeyError, GGUFError) as error:
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

    def is_dense(self, name: str) -> bool:
        """Return whether a tensor holds floating-point numbers and no blocks. Raises KeyError."""
        return self.tensors[name].tensor_type.name in DENSE

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
    """Write the target's files into an existing directory, with dequantised weights. Raises GGUFError if the file holds
    no target that can be converted.
    """
    write_metadata(file, directory)
    weights_path = directory / "model.safetensors"
    save_file(llama_weights(file, llama_config(file)), weights_path, {"format": "pt"})
    weights_path.chmod(0o644)  # save_file creates it for this user alone


def write_metadata(file: GGUFFile, directory: Path) -> None:
    """Write the config and the tokenizer into an existing directory. Raises GGUFError."""
    config = llama_config(file)
    generation = {name: config[name] for name in ("bos_token_id", "pad_token_id")}
    try:
        generation["eos_token_id"] = end_ids(file.metadata)
        tokenizer = tokenizer_json(file.metadata)
        tokenizer_settings = tokenizer_config(file.metadata, config["max_position_embeddings"])
    except KeyError as error:
        raise GGUFError(f"the metadata lacks {error}") from error
    except BROKEN as error:
        raise GGUFError(f"the tokenizer's metadata is broken: {error}. Download the file again") from error
    contents = {
        "config.json": config,
        "generation_config.json": generation,
        "tokenizer.json": tokenizer,
        "tokenizer_config.json": tokenizer_settings,
    }
    for name, content in contents.items():
        text = dump_json(content, indent=1, ensure_ascii=False)
        (directory / name).write_text(text + "\n", "utf-8")


def llama_config(file: GGUFFile) -> dict[str, Any]:
    """Return the content of config.json. Raises GGUFError if a key is missing, or the model is of another family or
    computes something else.
    """
    metadata = file.metadata
    architecture = metadata.get("general.architecture")
    if architecture not in CLASSES:
        raise GGUFError(f"general.architecture is {architecture!r}. Use a file of {', '.join(CLASSES)}")
    if unsupported := [key for key in UNSUPPORTED if f"{architecture}.{key}" in metadata]:
        raise GGUFError(f"{architecture}.{unsupported[0]} is set, which is not supported. Use a model without it")
    try:
        config = _config_of(file, architecture)
    except KeyError as error:
        raise GGUFError(f"the metadata lacks {error}") from error
    except BROKEN as error:
        raise GGUFError(f"the metadata is broken: {error}. Download the file again") from error
    check_names(file, config)
    return config


def _config_of(file: GGUFFile, architecture: str) -> dict[str, Any]:
    metadata = file.metadata
    heads = metadata[f"{architecture}.attention.head_count"]
    hidden_size = metadata[f"{architecture}.embedding_length"]
    head_dim = metadata.get(f"{architecture}.attention.key_length", hidden_size // heads)
    theta = _shortest(metadata.get(f"{architecture}.rope.freq_base", DEFAULT_THETA))
    return {
        "architectures": [CLASSES[architecture]],
        "model_type": architecture,
        "dtype": RUN_DTYPE,
        "attention_bias": False,
        "mlp_bias": False,
        "hidden_act": "silu",
        "hidden_size": hidden_size,
        "head_dim": head_dim,
        "intermediate_size": metadata[f"{architecture}.feed_forward_length"],
        "num_hidden_layers": metadata[f"{architecture}.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": metadata.get(f"{architecture}.attention.head_count_kv", heads),
        "max_position_embeddings": metadata[f"{architecture}.context_length"],
        "rms_norm_eps": _shortest(metadata[f"{architecture}.attention.layer_norm_rms_epsilon"]),
        "rope_parameters": _rope_parameters(file, head_dim, theta),
        "vocab_size": len(metadata["tokenizer.ggml.tokens"]),
        "tie_word_embeddings": LM_HEAD not in file.tensors,
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": metadata["tokenizer.ggml.eos_token_id"],
        "pad_token_id": metadata.get("tokenizer.ggml.padding_token_id"),
        "use_cache": True,
    }


def _rope_parameters(file: GGUFFile, head_dim: int, theta: float) -> dict[str, Any]:
    if ROPE_FACTORS not in file.tensors:
        return {"rope_type": "default", "rope_theta": theta}
    factors = file.tensor(ROPE_FACTORS)
    for rope in LLAMA3_ROPES:
        expected = llama3_factors(head_dim, theta, **rope)
        if factors.shape == expected.shape and np.allclose(factors, expected, rtol=1e-5, atol=0):
            return {"rope_type": "llama3", "rope_theta": theta, **rope}
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
    """Return what Llama 3 divides each rotary frequency by: 1 for short wavelengths, `factor` for long ones."""
    frequencies = theta ** (-np.arange(0, head_dim, 2) / head_dim)
    turns = original_max_position_embeddings * frequencies / (2 * np.pi)
    smooth = np.clip((turns - low_freq_factor) / (high_freq_factor - low_freq_factor), 0, 1)
    return 1 / ((1 - smooth) / factor + smooth)


def check_names(file: GGUFFile, config: dict[str, Any]) -> None:
    """Check that the file has the tensors of this config and no others. Raises GGUFError naming one.

    config: the content of config.json.
    """
    kind, architecture = config["model_type"], file.metadata.get("general.architecture")
    if kind not in ARCHITECTURE_OF:
        raise GGUFError(f"model_type {kind!r} is not read from GGUF files. Use one of {', '.join(ARCHITECTURE_OF)}")
    if architecture != ARCHITECTURE_OF[kind]:
        raise GGUFError(
            f"general.architecture is {architecture!r}, but model_type in config.json is {kind!r}. "
            "Use the config.json of the file's own model"
        )
    if (num_parts := file.metadata.get("split.count", 1)) > 1:
        raise GGUFError(f"the file is one of {num_parts} parts. Join them by `llama-gguf-split --merge`")
    expected = {source for source, _ in tensor_names(config)}
    if missing := sorted(expected - file.tensors.keys()):
        raise GGUFError(f"the file lacks tensor {missing[0]}. Download it again")
    rope_type = (config.get("rope_parameters") or {}).get("rope_type", "default")
    allowed = {ROPE_FACTORS} if rope_type == "llama3" else set()
    tied = {LM_HEAD} if config["tie_word_embeddings"] else set()
    if others := sorted(file.tensors.keys() - expected - allowed - tied):
        raise GGUFError(f"tensor {others[0]} is part of no {kind} that is supported. Use another model")


def _shortest(value: float) -> float:
    """Return the shortest decimal that rounds to this fp32 number: 1e-05, not 9.999999747378752e-06."""
    return float(str(np.float32(value)))


def llama_weights(file: GGUFFile, config: dict[str, Any]) -> dict[str, np.ndarray]:
    """Return all weights in fp16 by transformers' names. Raises GGUFError if one is missing or exceeds fp16."""
    try:
        return {name: _to_fp16(name, _weight(file, source, config)) for source, name in tensor_names(config)}
    except KeyError as error:
        raise GGUFError(f"the file lacks tensor {error}") from error


def tensor_names(config: dict[str, Any]) -> list[tuple[str, str]]:
    """Return pairs of a tensor's name in the file and in transformers.

    config: the content of config.json; its model_type is llama, mistral, qwen2 or qwen3.
    """
    names = list(TOP_NAMES.items())
    if not config["tie_word_embeddings"]:
        names.append((LM_HEAD, "lm_head.weight"))
    kind = config["model_type"]
    weights = LAYER_NAMES | (QK_NORMS if kind == "qwen3" else {})
    biases = QKV_BIASES if kind == "qwen2" else {}
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        names += [(f"blk.{layer}.{a}.weight", f"{prefix}.{b}.weight") for a, b in weights.items()]
        names += [(f"blk.{layer}.{a}.bias", f"{prefix}.{b}.bias") for a, b in biases.items()]
    return names


def row_order(source: str, num_rows: int, config: dict[str, Any]) -> np.ndarray | None:
    """Return the file's row for each row of transformers; None if they are in one order. Raises GGUFError.

    source: the name of a weight in the file.
    """
    heads = {"attn_q.weight": "num_attention_heads", "attn_k.weight": "num_key_value_heads"}
    key = heads.get(source.rpartition("blk.")[2].partition(".")[2])
    if key is None or config["model_type"] not in ADJACENT_PAIRS:
        return None
    if num_rows % (2 * config[key]):
        raise GGUFError(
            f"tensor {source}: has {num_rows} rows, which are not {config[key]} heads. "
            "Use the config.json of the file's own model"
        )
    return unpermute(np.arange(num_rows)[:, None], config[key])[:, 0]


def _weight(file: GGUFFile, source: str, config: dict[str, Any]) -> np.ndarray:
    weight = file.tensor(source)
    order = row_order(source, len(weight), config)
    return weight if order is None else weight[order]


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
