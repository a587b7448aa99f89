"""Bytes that a model's stored weights take in memory, by the headers of its files: no weight is read.

target_bytes_of(directory, config, torch.bfloat16, "cuda", model)
loaded_bytes(draft_directory, torch.bfloat16)
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from eagle_ray.config import ModelConfig
from eagle_ray.gguf.blocks import READERS, BlockType
from eagle_ray.kernels.stored_weight import BLOCK_INPUTS
from eagle_ray.methods.head_files import TensorHeader, read_headers, restored_headers, text_headers
from eagle_ray.models.gpu_linears import INT4_GROUPS
from eagle_ray.models.packed_linear import min_weights_of
from eagle_ray.models.quantized_checkpoint import GGUFCheckpoint
from eagle_ray.models.quantized_model import has_mxfp4, quantization_of, quantized_checkpoint
from eagle_ray.models.rounded_checkpoint import PROJECTION
from eagle_ray.models.sharded_checkpoint import BLOCKS, EMBEDDING_WEIGHT, SCALES, share_of
from eagle_ray.parallel.shard import LM_HEAD, Shard
from eagle_ray.storage.model_files import gguf_in

# Ends of the names of tensors that are loaded in the model's dtype if they are floats.
DENSE_SUFFIXES = (".weight", ".bias")


def target_bytes_of(
    target: Path,
    shape: Any,
    dtype: torch.dtype,
    device: str,
    model: ModelConfig,
    num_ranks: int = 1,
) -> int | None:
    """Return the bytes of a target's tensors in memory, or of one rank's part; None if it has no weights.

    Args:
        shape: the target's config.
        model: configuration whose dtype and quantization are used.
        num_ranks: number of ranks. A rank has its part of shared tensors, and all others whole.
    """
    sizes = _tensor_bytes(target, shape, dtype, device, model)
    if sizes is None or num_ranks == 1:
        return None if sizes is None else int(sum(sizes.values()))
    shard = Shard.of(shape, 0, num_ranks)
    sizes = {
        LM_HEAD: sizes.get(EMBEDDING_WEIGHT, 0)
    } | sizes  # a rank has rows of its own of a tied one
    return math.ceil(sum(size * share_of(name, shard) for name, size in sizes.items()))


def _tensor_bytes(
    target: Path, shape: Any, dtype: torch.dtype, device: str, model: ModelConfig
) -> dict[str, float] | None:
    """Return the bytes of each tensor by its name; None if there are no weights.

    Layers in FP8 take a byte for each weight and a scale for each output. Weights that a checkpoint
    has quantised take what they take in its files, unless no kernel of the device reads them: then
    they are restored to `dtype`.
    """
    if gguf_in(target) is not None:
        return _gguf_bytes(target, shape, dtype, device, model.dtype == "float32")
    headers = text_headers(target)
    if headers is None:
        return None
    quantized = quantization_of(shape)
    if quantized is None:
        is_rounded = model.quantization == "fp8"
        return {
            name: 4 * h.shape[0] + h.numel
            if is_rounded and name.endswith(PROJECTION)
            else _loaded(h, dtype)
            for name, h in headers.items()
        }
    if has_mxfp4(shape):
        return {name: _restored_bytes(name, header, dtype) for name, header in headers.items()}
    factor = dtype.itemsize if is_restored(quantized, device) else 1
    return {name: _quantized_bytes(name, header, dtype, factor) for name, header in headers.items()}


def _restored_bytes(name: str, header: TensorHeader, dtype: torch.dtype) -> int:
    """Return the bytes of a tensor of a checkpoint whose experts in MXFP4 become dense: a byte has two numbers."""
    if name.endswith(BLOCKS):
        return 2 * header.num_bytes * dtype.itemsize
    return 0 if name.endswith(SCALES) else _loaded(header, dtype)


def _quantized_bytes(name: str, header: TensorHeader, dtype: torch.dtype, factor: int) -> int:
    """Return the bytes of a tensor of a quantised checkpoint.

    Args:
        factor: growth of the codes in memory.
    """
    if not header.is_float:
        return header.num_bytes * factor
    return (
        _loaded(header, dtype) if name.endswith(DENSE_SUFFIXES) else header.num_bytes
    )  # the others are scales


def _gguf_bytes(
    target: Path, shape: Any, dtype: torch.dtype, device: str, dequantize: bool
) -> dict[str, float]:
    """Return about the bytes of a GGUF file's tensors in memory: codes of 4 or 8 bits with their scales, or dense."""
    checkpoint = quantized_checkpoint(target, shape)
    assert isinstance(checkpoint, GGUFCheckpoint), "the directory has a GGUF file"
    quantized = (
        set()
        if dequantize
        else {f"{name}.weight" for name in checkpoint.names()} - {EMBEDDING_WEIGHT}
    )
    sizes = {}
    for name, sources in checkpoint.sources.items():
        tensors = [checkpoint.file.tensors[source] for source in sources]
        kind = tensors[0].tensor_type.name
        block_type = READERS.get(kind) if name in quantized else None
        if block_type is None or (device == "cuda" and _is_restored_block(block_type)):
            each: float = dtype.itemsize
        else:
            each = block_type.bytes_per_weight
        sizes[name] = sum(int(tensor.n_elements) for tensor in tensors) * each
    return sizes


def _is_restored_block(block_type: BlockType) -> bool:
    """Return whether a GPU has no kernel for the type's blocks: for codes of 8 bits, and for small groups."""
    return block_type.bits == 8 or block_type.group % INT4_GROUPS[-1] != 0


def is_restored(quantized: Mapping[str, Any], device: str) -> bool:
    """Return whether a checkpoint's 8-bit weights are dequantised in memory because the device has no kernel for them.

    A GPU has no kernel for 8-bit codes, nor for FP8 with some block sizes, and a CPU has none for
    FP8.

    Args:
        quantized: the checkpoint's quantization_config.
    """
    groups = quantized.get("config_groups") or {}
    weights = next((group.get("weights") or {} for group in groups.values()), {})
    if quantized.get("quant_method") in ("fp8", "modelopt") or weights.get("type") == "float":
        block = quantized.get("weight_block_size") or weights.get("block_structure")
        return device == "cpu" or (block is not None and block[1] % BLOCK_INPUTS[-1] != 0)
    bits = quantized.get("bits"), quantized.get("w_bit"), weights.get("num_bits")
    return device == "cuda" and 8 in bits


def loaded_bytes(path: Path, dtype: torch.dtype | None) -> int | None:
    """Return the bytes of a draft's tensors in memory, or None if it has no weights.

    Raises EngineError naming a damaged file.

    Args:
        dtype: dtype of the model; None keeps stored dtypes.
    """
    headers = read_headers(path)
    if headers is None:
        return None
    return sum(_loaded(header, dtype) for header in restored_headers(headers).values())


def _loaded(header: TensorHeader, dtype: torch.dtype | None) -> int:
    return (
        header.numel * dtype.itemsize if dtype is not None and header.is_float else header.num_bytes
    )


def packed_copy_bytes(target: Path, shape: Any, dtype: torch.dtype) -> int:
    """Return the bytes of a packed lm_head: if it is tied to the embedding, packing makes a second copy."""
    size = shape.vocab_size * shape.hidden_size
    is_tied = LM_HEAD not in (text_headers(target) or {})
    return size * dtype.itemsize if is_tied and size >= min_weights_of(dtype) else 0
