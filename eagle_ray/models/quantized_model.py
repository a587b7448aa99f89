"""Build a causal LM whose projections stay quantised as in its checkpoint.

    checkpoint = quantized_checkpoint(path, config)         # None for plain weights, and for other libraries' formats
    model = build_model(config, checkpoint, torch.bfloat16, "cpu")

The module tree stays transformers', which the rest of this engine expects. Each quantised nn.Linear
in it is replaced by a layer that computes with the stored codes. Weights are read one at a time:
the host never holds a dense copy.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path
from typing import Protocol, cast, runtime_checkable

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from eagle_ray.core.errors import EngineError
from eagle_ray.families import FAMILIES, MXFP4
from eagle_ray.gguf.gguf_file import GGUFFile
from eagle_ray.kernels import cpu_ops
from eagle_ray.kernels.availability import use_triton
from eagle_ray.models.fp8_experts import read_experts, restore_experts
from eagle_ray.models.gpu_layer import GpuLinear, dense_linear
from eagle_ray.models.gpu_linears import gpu_linear
from eagle_ray.models.packed_layouts import (
    DOWNLOAD,
    EMBEDDING_WEIGHT,
    FLOAT_DTYPES,
    NOT_FINITE,
    Weight,
)
from eagle_ray.models.quantized_checkpoint import GGUFCheckpoint, QuantizedCheckpoint, reads
from eagle_ray.models.quantized_linear import QuantizedLinear, QuantizedWeight, fits_kernel
from eagle_ray.parallel.shard import LM_HEAD
from eagle_ray.storage.model_files import gguf_in

log = logging.getLogger("eagle_ray")

RESTORED = "its experts in MXFP4 are restored to 16 bits, or to model.dtype: four times the bytes of its files"
OTHER_LAYERS = "Use a checkpoint that leaves it out"
EMBED_SCALE = "embed_scale"  # buffer of Gemma's embeddings, which multiply their output


@runtime_checkable
class Checkpoint(Protocol):
    """Protocol of a checkpoint that a model can be built from. Tensors have the names that transformers gives them."""

    def tensor_names(self) -> set[str]: ...

    def names(self) -> list[str]:
        """Return the layers with a quantised weight."""
        ...

    def projection(self, name: str) -> Weight: ...

    def tensor(self, name: str) -> Tensor: ...

    def has_own_head(self) -> bool:
        """Return whether a stored lm_head differs from the embedding."""
        ...


def quantized_checkpoint(path: Path, config: PretrainedConfig) -> Checkpoint | None:
    """Return the checkpoint in a directory if this engine reads its quantised weights itself. Raises EngineError."""
    file = gguf_in(path)
    if file is not None:
        return GGUFCheckpoint(GGUFFile.open(file), config.to_dict())
    quantization = quantization_of(config)
    return (
        QuantizedCheckpoint.open(path, quantization)
        if quantization is not None and reads(quantization)
        else None
    )


def quantization_of(config: PretrainedConfig) -> dict[str, object] | None:
    """Return the checkpoint's quantization_config, or None."""
    quantization = getattr(config, "quantization_config", None)
    return (
        quantization
        if quantization is None or isinstance(quantization, dict)
        else quantization.to_dict()
    )


def has_mxfp4(config: PretrainedConfig) -> bool:
    """Return whether the checkpoint's experts are in MXFP4, as in gpt-oss; PlainCheckpoint restores them."""
    quantization = quantization_of(config) or {}
    return (
        quantization.get("quant_method") == "mxfp4"
        and FAMILIES[config.model_type].why_dense == MXFP4
    )


def build_model(
    config: PretrainedConfig,
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    device: str,
    dequantize: bool = False,
    runs_on: str | None = None,
    model: PreTrainedModel | None = None,
) -> PreTrainedModel:
    """Return a frozen model on the device. Raises EngineError naming a tensor that is missing or of a wrong shape.

    Args:
        dtype: dtype of activations and of all tensors that are not quantised.
        dequantize: whether to dequantise all layers.
        runs_on: device that layers are made for, if they move there later; None is `device`.
        model: model on the meta device; None builds it from the config.
    """
    model = empty_model(config, dtype) if model is None else model
    if model.config.tie_word_embeddings and checkpoint.has_own_head():
        _untie(model)
    quantized = set(checkpoint.names())
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.Linear) and name in quantized:
            weight = checkpoint.projection(name)
            check_shape(f"{name}.weight", weight.shape, (module.out_features, module.in_features))
            bias = (
                read_finite(checkpoint, f"{name}.bias").to(device, dtype)
                if module.bias is not None
                else None
            )
            model.set_submodule(
                name, _layer(weight, bias, dtype, device, dequantize, runs_on or device)
            )
        elif f"{name}.0.gate_proj" in quantized:
            keeps = not dequantize and keeps_experts(dtype, torch.device(runs_on or device))
            if keeps:
                own = read_experts(module, name, checkpoint.projection, device)
                model.set_submodule(name, own)
            else:
                restore_experts(module, name, checkpoint.projection, dtype, device)
    _fill(model, checkpoint, dtype, device)
    return model.eval().requires_grad_(False)


def keeps_experts(dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether a device can run experts in FP8 as they are stored."""
    return dtype is torch.bfloat16 and device.type == "cuda" and use_triton(device)


def empty_model(config: PretrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """Return the model on the meta device, without memory for its parameters."""
    plain = deepcopy(config)
    if hasattr(plain, "quantization_config"):
        del plain.quantization_config
    with torch.device("meta"):
        model = cast(PreTrainedModel, AutoModelForCausalLM.from_config(plain, dtype=dtype))
    for name, module in list(model.named_modules()):
        buffers = [key for key, buffer in module._buffers.items() if buffer is not None]
        if not any(module.get_buffer(key).is_meta for key in buffers):
            continue
        if name.endswith("rotary_emb"):
            model.set_submodule(name, type(module)(config=plain))
        elif buffers == [EMBED_SCALE]:
            scale = getattr(module, f"scalar_{EMBED_SCALE}")
            module.register_buffer(EMBED_SCALE, torch.tensor(scale), persistent=False)
        else:
            raise EngineError(
                f"{type(model).__name__}: a quantised checkpoint of this family is not read here"
            )
    return model


def _layer(
    weight: Weight,
    bias: Tensor | None,
    dtype: torch.dtype,
    device: str,
    dequantize: bool,
    runs_on: str,
) -> QuantizedLinear | GpuLinear | nn.Linear:
    """Return the layer that multiplies with the weight on this device; a dense one without a quantised kernel."""
    if not dequantize and not isinstance(weight, Tensor) and torch.device(runs_on).type == "cuda":
        return gpu_linear(weight.to(device), bias, dtype, torch.device(runs_on))
    # Without one, a dense layer is faster.
    has_kernel = runs_on == "cpu" and cpu_ops.quantized_path() > 0
    if (
        has_kernel
        and isinstance(weight, QuantizedWeight)
        and not dequantize
        and fits_kernel(weight)
    ):
        return QuantizedLinear(weight, bias, dtype)
    dense = weight if isinstance(weight, Tensor) else weight.dequantize()
    return dense_linear(dense.to(device, dtype), bias)


def _untie(model: PreTrainedModel) -> None:
    """Give the lm_head a weight of its own, as transformers does if a checkpoint stores another one."""
    log.warning(
        "the lm_head that is stored is used: it is not the embedding, though config.json ties the two"
    )
    head = cast(nn.Linear, model.get_output_embeddings())
    head.weight = nn.Parameter(torch.empty_like(head.weight), requires_grad=False)
    model.config.tie_word_embeddings = False


def read_finite(checkpoint: Checkpoint, name: str) -> Tensor:
    """Return a tensor. Raises EngineError if a number in it is not finite."""
    value = checkpoint.tensor(name)
    if value.dtype in FLOAT_DTYPES and not value.isfinite().all():
        raise EngineError(f"tensor {name}: {NOT_FINITE}. {DOWNLOAD}")
    return value


def check_shape(name: str, shape: Sequence[int], wanted: Sequence[int]) -> None:
    """Raise EngineError naming a tensor if its shape is not the one that the config implies."""
    if tuple(shape) != tuple(wanted):
        raise EngineError(
            f"the target's {name} is {tuple(shape)}, and its config wants {tuple(wanted)}"
        )


def _fill(model: PreTrainedModel, checkpoint: Checkpoint, dtype: torch.dtype, device: str) -> None:
    """Read every parameter that is still on the meta device. Tied weights are read once."""
    stored = checkpoint.tensor_names()
    quantized = set(checkpoint.names())
    is_tied = model.config.tie_word_embeddings
    missing = []
    for name, parameter in list(model.named_parameters()):
        if not parameter.is_meta:
            continue
        source = LM_HEAD if is_tied and name == EMBEDDING_WEIGHT and name not in stored else name
        if source not in stored:
            missing.append(name)
            continue
        value = read_finite(checkpoint, source)
        if value.dtype not in FLOAT_DTYPES:
            raise EngineError(
                f"tensor {source}: is quantised, and is read in plain numbers alone. {OTHER_LAYERS}"
            )
        check_shape(name, value.shape, parameter.shape)
        owner, _, attribute = name.rpartition(".")
        own = nn.Parameter(value.to(device, dtype), requires_grad=False)
        setattr(model.get_submodule(owner), attribute, own)
    if is_tied and isinstance(model.get_output_embeddings(), nn.Linear):
        model.tie_weights()
    missing = [name for name in missing if model.get_parameter(name).is_meta]
    if quantized and any(".experts." in name for name in missing):
        raise EngineError(
            f"{type(model).__name__}: quantised experts are not read here. Use a checkpoint with plain weights"
        )
    if missing:
        raise EngineError(f"the target is not whole: missing {', '.join(missing)}")
    model.to(device)  # type: ignore[arg-type]  # transformers' wrapper of Module.to loses its self
