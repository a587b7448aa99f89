"""Convert a Llama-shaped checkpoint to GGUF, without its tokenizer: python to_gguf.py TARGET FILE fp32|bf16"""

import json
import sys
from pathlib import Path

import gguf
import numpy

# transformers' model_type -> llama.cpp's architecture. llama.cpp pairs neighbouring rotary
# dimensions in "llama" alone.
ARCHITECTURES = {
    "llama": gguf.MODEL_ARCH.LLAMA,
    "mistral": gguf.MODEL_ARCH.LLAMA,
    "qwen2": gguf.MODEL_ARCH.QWEN2,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
}
TYPES = {"fp32": gguf.GGMLQuantizationType.F32, "bf16": gguf.GGMLQuantizationType.BF16}
FILE_TYPES = {"fp32": gguf.LlamaFileType.ALL_F32, "bf16": gguf.LlamaFileType.MOSTLY_BF16}
NUMPY = {"F32": numpy.float32, "F16": numpy.float16, "BF16": numpy.uint16}


def main():
    source, file, dtype = sys.argv[1:]
    config = json.loads((Path(source) / "config.json").read_text())
    architecture = ARCHITECTURES.get(config["model_type"])
    if architecture is None:
        sys.exit(
            f"model_type: no conversion of {config['model_type']!r} to GGUF. Take one of {', '.join(ARCHITECTURES)}."
        )

    writer = gguf.GGUFWriter(file, gguf.MODEL_ARCH_NAMES[architecture])
    add_config(writer, config)
    writer.add_file_type(FILE_TYPES[dtype])
    for name, tensor in converted(Path(source), config, architecture):
        add_tensor(writer, name, tensor, TYPES[dtype])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_config(writer, config):
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config.get("num_key_value_heads") or heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_dimension_count(head_dim)
    rope = rope_parameters(config)
    writer.add_rope_freq_base(rope["rope_theta"])
    divisors = rotary_divisors(rope, head_dim)
    if divisors is not None:
        writer.add_tensor("rope_freqs.weight", divisors)
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("none")


def rope_parameters(config):
    """Return rope_theta, rope_type and what the type needs, also from configs older than transformers 5."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    return {"rope_theta": config.get("rope_theta", 10000.0), **rope, "rope_type": kind}


def rotary_divisors(rope, head_dim):
    """Return what Llama 3.1 and later divide the frequency of each rotary pair by; None where there is no scaling."""
    if rope["rope_type"] == "default":
        return None
    if rope["rope_type"] != "llama3":
        sys.exit(
            f"rope_type: no conversion of {rope['rope_type']!r} to GGUF. Take a checkpoint without it."
        )
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    wavelengths = 2 * numpy.pi * rope["rope_theta"] ** (numpy.arange(0, head_dim, 2) / head_dim)
    turns = rope["original_max_position_embeddings"] / wavelengths
    kept = numpy.clip(
        (turns - low) / (high - low), 0, 1
    )  # the share of the frequency that is not divided
    return (1 / (kept + (1 - kept) / rope["factor"])).astype(numpy.float32)


def converted(source, config, architecture):
    """Yield each tensor in fp32 under llama.cpp's name."""
    names = gguf.get_tensor_name_map(architecture, config["num_hidden_layers"])
    heads = config["num_attention_heads"]
    key_heads = config.get("num_key_value_heads") or heads
    pairs_neighbours = architecture == gguf.MODEL_ARCH.LLAMA
    for file in sorted(source.glob("*.safetensors")):
        for key, tensor in read_safetensors(file):
            name = names.get_name(key, try_suffixes=(".weight", ".bias"))
            if name is None:
                sys.exit(
                    f"{file}: tensor {key!r} has no name in GGUF. Take a checkpoint without it."
                )
            if pairs_neighbours and ".q_proj." in key:
                tensor = interleave(tensor, heads)
            if pairs_neighbours and ".k_proj." in key:
                tensor = interleave(tensor, key_heads)
            yield name, tensor


def interleave(tensor, heads):
    """Put the two halves of each head's rotary dimensions side by side."""
    halves = tensor.reshape(heads, 2, tensor.shape[0] // heads // 2, *tensor.shape[1:])
    return halves.swapaxes(1, 2).reshape(tensor.shape)


def add_tensor(writer, name, tensor, kind):
    if tensor.ndim == 1 or kind == gguf.GGMLQuantizationType.F32:
        writer.add_tensor(name, numpy.ascontiguousarray(tensor))
    else:
        writer.add_tensor(name, gguf.quants.quantize(tensor, kind), raw_dtype=kind)


def read_safetensors(file):
    """Yield the tensors of a file in fp32. numpy has no bf16, which safetensors' own reader would need."""
    with file.open("rb") as opened:
        size = int.from_bytes(opened.read(8), "little")
        header = json.loads(opened.read(size))
    data = numpy.memmap(file, dtype=numpy.uint8, mode="r", offset=8 + size)
    header.pop("__metadata__", None)
    for key, entry in header.items():
        start, end = entry["data_offsets"]
        values = data[start:end].view(NUMPY[entry["dtype"]]).reshape(entry["shape"])
        yield key, from_bf16(values) if entry["dtype"] == "BF16" else values.astype(numpy.float32)


def from_bf16(bits):
    return (bits.astype(numpy.uint32) << 16).view(numpy.float32)


if __name__ == "__main__":
    main()
