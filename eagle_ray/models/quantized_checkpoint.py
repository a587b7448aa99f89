"""Quantised checkpoints: which weights load without being dequantised, and how a loader reads them.

    if reads(quantization):                                       # quantization_config of config.json
        checkpoint = QuantizedCheckpoint.open(directory, quantization)
        checkpoint.projection("model.layers.0.mlp.up_proj")       # QuantizedWeight, Fp8Weight, or a dense Tensor
        checkpoint.tensor("model.norm.weight")                    # biases, norms, the embedding

    GGUFCheckpoint(GGUFFile.open(path), config)                   # the same of a GGUF file, by transformers' names

    checkpoint                         weights that load                                    as
    GGUF                               Q4_0, Q4_1, Q2_K, Q3_K, Q4_K                         4 bits in groups
                                       Q5_0, Q5_1, Q5_K, Q6_K, Q8_0, IQ4_NL, IQ4_XS,        8 bits in groups
                                       IQ3_XXS, IQ3_S, IQ2_XXS, IQ2_XS, IQ2_S, MXFP4
    awq                                version gemm, 4 bits                                 4 bits in groups
    gptq                               gptq and gptq_v2, 4 and 8 bits, desc_act and         4 or 8 bits in groups
                                       dynamic too
    compressed-tensors                 pack-quantized (W4A16, W8A16)                        4 or 8 bits in groups
                                       int-quantized (W8A8)                                 8 bits in groups
                                       float-quantized (FP8) by output or whole             FP8
                                       float-quantized (FP8) in blocks                      FP8 in blocks
    fp8                                one scale for a weight                               FP8
                                       weight_block_size                                    FP8 in blocks
    modelopt                           FP8, FP8_PER_CHANNEL_PER_TOKEN                       FP8
                                       FP8_PB_WO                                            FP8 in blocks

Only weights decide what is loaded. Activations are rounded by the layer that runs a weight, on a
CPU in blocks of a row, even if the checkpoint was made for activations with one scale for each
token. Static activation scales (input_scale) are ignored and named in the log: scales of each row
fit it at least as closely, and vLLM's users expect such a checkpoint to run. Scales of a quantised
KV cache are ignored too: the cache has the run's own dtype.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from eagle_ray.core.errors import EngineError
from eagle_ray.gguf.architectures import GGUF_LM_HEAD
from eagle_ray.gguf.blocks import GGUFError
from eagle_ray.gguf.gguf_file import GGUFFile
from eagle_ray.gguf.gguf_target import check_names, row_order, sources_of, stored_tensor
from eagle_ray.models.packed_layouts import (
    EMBEDDING_WEIGHT,
    LayerTensors,
    SafetensorFiles,
    Weight,
    read_awq,
    read_fp8,
    read_fp8_blocks,
    read_fp8_in_blocks_of_128,
    read_gptq,
    read_integers,
    read_packed,
)
from eagle_ray.models.quantized_linear import QuantizedWeight

log = logging.getLogger("eagle_ray")

QUANTIZATION_KEY = "quantization_config"
# Tensors of a quantised layer.
LAYER_MARKERS = (
    "qweight",
    "weight_packed",
    "weight_scale",
    "weight_scale_inv",
)
GPTQ_ZERO_SHIFTS = {"gptq": 1, "gptq_v2": 0}  # by checkpoint_format
# Prefixes of patterns in GPTQ's `dynamic`.
LEFT_OUT = "-:"
OVERRIDDEN = "+:"
# Config_groups may have a class or a pattern's prefix in place of a name.
LINEAR = "Linear"
PATTERN = "re:"
LayerReader = Callable[[LayerTensors], Weight]
ReaderOf = Callable[[str], LayerReader | None]  # by a layer's name; None if it is dense


def reads(quantization: dict[str, Any]) -> bool:
    """Return whether this engine reads checkpoints of this quant_method itself. Others are loaded by transformers.

    Args:
        quantization: content of quantization_config in config.json.
    """
    method = quantization.get("quant_method")
    return isinstance(method, str) and method in QUANT_METHODS


def check_settings(quantization: dict[str, Any]) -> None:
    """Raise EngineError naming a setting that is not supported. The format itself must be one that `reads` accepts.

    Args:
        quantization: content of quantization_config in config.json.
    """
    QUANT_METHODS[quantization["quant_method"]](quantization)


def is_fp8(quantization: dict[str, Any]) -> bool:
    """Return whether all quantised weights are 8-bit floats.

    Args:
        quantization: content of quantization_config, already checked by `check_settings`.
    """
    groups = (quantization.get("config_groups") or {}).values()
    kinds = {(group.get("weights") or {}).get("type") for group in groups}
    return quantization.get("quant_method") in ("fp8", "modelopt") or kinds == {"float"}


def has_scattered_groups(quantization: dict[str, Any]) -> bool:
    """Return whether inputs that share a scale are not adjacent, as with GPTQ's desc_act and
    compressed-tensors' actorder.

    These group inputs by their activations.

    Args:
        quantization: content of quantization_config in config.json.
    """
    if quantization.get("quant_method") == "gptq":
        kinds = [quantization, *(quantization | own for own in _dynamic(quantization).values())]
        return any(
            kind.get("desc_act") is True and not _has_groups_in_order(kind) for kind in kinds
        )
    groups = quantization.get("config_groups") or {}
    weights = [group.get("weights") or {} for group in groups.values()]
    return any(
        own.get("strategy") == "group" and own.get("actorder") in GROUPED_ACTORDERS
        for own in weights
    )


def _has_groups_in_order(gptq: dict[str, Any]) -> bool:
    return gptq.get("static_groups") is True or gptq.get("group_size", -1) == -1


@dataclass(frozen=True, slots=True)
class QuantizedCheckpoint:
    """A directory of safetensors files with quantised layers. Built by `open`."""

    files: SafetensorFiles
    reader_of: ReaderOf

    @classmethod
    def open(cls, path: Path, quantization: dict[str, Any]) -> QuantizedCheckpoint:
        """Check the quantization_config and read the names of tensors. Raises EngineError naming a key or a file."""
        method = _choice(quantization, "quant_method", QUANT_METHODS)
        files = SafetensorFiles.open(path)
        reader_of = _by_either_name(QUANT_METHODS[method](quantization), files.layer_names())
        if any(name.endswith(".input_scale") for name in files.file_of):
            log.info(
                "%s: static activation scales are ignored; each row has scales of its own", path
            )
        return cls(files, reader_of)

    def names(self) -> list[str]:
        """Return the layers with a quantised weight."""
        layers = {name.rpartition(".") for name in self.files.file_of}
        return sorted({layer for layer, _, suffix in layers if suffix in LAYER_MARKERS})

    def projection(self, name: str) -> Weight:
        """Return the weight of a linear layer such as model.layers.0.mlp.up_proj; a dense weight keeps its own dtype.

        Raises EngineError naming a tensor that is missing, of a wrong shape, or broken.
        """
        layer = LayerTensors(name, self.files)
        reader = self.reader_of(name)
        if reader is not None and not (layer.has("weight") and not _is_quantized(layer)):
            return reader(layer)
        if _is_quantized(layer):
            raise layer.fault(
                "weight",
                f"is quantised, but {QUANTIZATION_KEY} leaves it out",
                f"Mend {QUANTIZATION_KEY} in config.json",
            )
        return layer.finite("weight")

    def tensor(self, name: str) -> Tensor:
        """Return a tensor as it is stored. Raises EngineError if it does not exist."""
        return self.files.tensor(name)

    def tensor_names(self) -> set[str]:
        """Return the names of all stored tensors."""
        return set(self.files.file_of)

    def has_own_head(self) -> bool:
        """Return whether the files have an lm_head that differs from the embedding."""
        return "lm_head" in self.names() or self.files.has_own_head()


def _by_either_name(reader_of: ReaderOf, stored: dict[str, str]) -> ReaderOf:
    """Return readers of a wrapper's layers, which settings may leave out by their names in the files.

    Args:
        stored: those of layers that have another name here.
    """
    if not stored:
        return reader_of

    def reader(name: str) -> LayerReader | None:
        readers = [reader_of(each) for each in {name, stored.get(name, name)}]
        return None if None in readers else readers[0]

    return reader


def _is_quantized(layer: LayerTensors) -> bool:
    return any(layer.has(marker) for marker in LAYER_MARKERS)


def _fault(key: str, message: str, remedy: str) -> EngineError:
    return EngineError(f"{QUANTIZATION_KEY}.{key}: {message}. {remedy}")


def _choice(
    settings: dict[str, Any], key: str, choices: Any, default: Any = None, prefix: str = ""
) -> Any:
    """Return a setting that is one of some values. Raises EngineError.

    Args:
        prefix: text before the key in messages.
    """
    value = settings.get(key, default)
    value = value.lower() if isinstance(value, str) else value
    if value not in choices:
        allowed = ", ".join(map(str, choices))
        raise _fault(
            prefix + key,
            f"is {value!r}, which is not read",
            f"Use a checkpoint with one of: {allowed}",
        )
    return value


def _group_size(settings: dict[str, Any], key: str, prefix: str = "") -> int:
    """Return a number of inputs, or -1 for all."""
    size = settings.get(key, -1)
    if type(size) is not int or (size < 1 and size != -1):
        raise _fault(
            prefix + key, f"must be a positive integer or -1, got {size!r}", "Mend config.json"
        )
    return size


def _awq(quantization: dict[str, Any]) -> ReaderOf:
    _choice(quantization, "version", ["gemm"], "gemm")
    _choice(quantization, _first_key(quantization, "bits", "w_bit"), [4])
    group_size = _group_size(quantization, _first_key(quantization, "group_size", "q_group_size"))
    zero_point = _choice(quantization, "zero_point", [True, False], True)
    reader = partial(read_awq, group_size=group_size, zero_point=zero_point)
    return lambda name: reader


def _first_key(settings: dict[str, Any], *keys: str) -> str:
    """Return the first key that is set, or else the first."""
    return next((key for key in keys if key in settings), keys[0])


def _gptq(quantization: dict[str, Any]) -> ReaderOf:
    """Return readers by the first pattern of `dynamic` that matches the beginning of a layer's name.

    A pattern after `-:` leaves layers out. Any other, with `+:` before it or not, has settings in
    place of the base ones, which hold for layers that no pattern matches. GPTQModel, transformers,
    vLLM and SGLang read it so.
    """
    base = _gptq_reader(quantization)
    rules: list[tuple[re.Pattern[str], LayerReader | None]] = []
    for key, own in _dynamic(quantization).items():
        pattern = _pattern(key.removeprefix(LEFT_OUT).removeprefix(OVERRIDDEN), "dynamic")
        is_left_out = key.startswith(LEFT_OUT)
        rules.append(
            (pattern, None if is_left_out else _gptq_reader(quantization | own, f"dynamic.{key}: "))
        )
    return lambda name: next((reader for pattern, reader in rules if pattern.match(name)), base)


def _gptq_reader(settings: dict[str, Any], prefix: str = "") -> LayerReader:
    """Return the reader for these settings. Raises EngineError for settings that are not supported.

    Args:
        prefix: text before keys in messages.
    """
    _choice(settings, _first_key(settings, "method", "quant_method"), ["gptq"], prefix=prefix)
    bits = _choice(settings, "bits", [4, 8], prefix=prefix)
    layout = _choice(settings, "checkpoint_format", GPTQ_ZERO_SHIFTS, "gptq", prefix)
    group_size = _group_size(settings, "group_size", prefix)
    desc_act = _choice(settings, "desc_act", [True, False], False, prefix)
    zero_shift = GPTQ_ZERO_SHIFTS[layout]
    return partial(
        read_gptq, bits=bits, group_size=group_size, zero_shift=zero_shift, desc_act=desc_act
    )


def _dynamic(quantization: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return GPTQ's settings of some layers by pattern, in the file's order."""
    dynamic = quantization.get("dynamic") or {}
    if not isinstance(dynamic, dict):
        raise _fault(
            "dynamic", f"must be a JSON object of patterns, got {dynamic!r}", "Mend config.json"
        )
    for key, own in dynamic.items():
        if not isinstance(own or {}, dict):
            raise _fault(
                f"dynamic.{key}",
                f"must be a JSON object of settings, got {own!r}",
                "Mend config.json",
            )
    return {key: own or {} for key, own in dynamic.items()}


def _fp8(quantization: dict[str, Any]) -> ReaderOf:
    if quantization.get("weight_block_size") is None:
        return lambda name: read_fp8
    block = _block(quantization, "weight_block_size")
    return lambda name: partial(read_fp8_blocks, suffix="weight_scale_inv", block=block)


def _block(settings: dict[str, Any], key: str, prefix: str = "") -> tuple[int, int]:
    block = settings.get(key)
    if not (
        isinstance(block, list)
        and len(block) == 2
        and all(type(size) is int and size > 0 for size in block)
    ):
        raise _fault(
            prefix + key, f"must be two positive integers, got {block!r}", "Mend config.json"
        )
    return block[0], block[1]


def _compressed_tensors(quantization: dict[str, Any]) -> ReaderOf:
    """Return readers by the first group of config_groups that targets a layer which is not in the ignore list.

    A name matches an entry that equals it, that is its class (Linear), or that is `re:` and a
    pattern of its beginning.
    """
    _choice(quantization, "quantization_status", ["compressed"], "compressed")
    for key, inner in (("sparsity_config", "format"), ("transform_config", "config_groups")):
        if (quantization.get(key) or {}).get(inner) not in (None, "dense", {}):
            raise _fault(key, "is set, which is not read", "Use a checkpoint without it")
    if quantization.get("kv_cache_scheme") is not None:
        log.info(
            "%s.kv_cache_scheme is ignored: the KV cache has the run's own dtype", QUANTIZATION_KEY
        )
    groups = quantization.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        raise _fault(
            "config_groups", f"must be a JSON object of groups, got {groups!r}", "Mend config.json"
        )
    is_ignored = _matcher(quantization.get("ignore") or [], "ignore")
    readers = [_group_reader(quantization, key, group) for key, group in groups.items()]

    def reader_of(name: str) -> LayerReader | None:
        if is_ignored(name):
            return None
        return next((reader for is_targeted, reader in readers if is_targeted(name)), None)

    return reader_of


def _matcher(entries: object, key: str) -> Callable[[str], bool]:
    """Return whether one of the entries matches the name of a linear layer."""
    if not (isinstance(entries, list) and all(isinstance(entry, str) for entry in entries)):
        raise _fault(key, f"must be a list of names, got {entries!r}", "Mend config.json")
    names = {entry for entry in entries if not entry.startswith(PATTERN)}
    patterns = [
        _pattern(entry.removeprefix(PATTERN), key) for entry in entries if entry.startswith(PATTERN)
    ]
    return lambda name: (
        not names.isdisjoint((name, LINEAR)) or any(pattern.match(name) for pattern in patterns)
    )


def _pattern(text: str, key: str) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except re.error as error:
        raise _fault(key, f"holds an invalid pattern: {error}", "Mend config.json") from error


def _group_reader(
    quantization: dict[str, Any], key: str, group: object
) -> tuple[Callable[[str], bool], LayerReader]:
    """Return two functions: whether a group of config_groups targets a layer of this name, and their reader."""
    if not isinstance(group, dict):
        raise _fault(
            f"config_groups.{key}", f"must be a JSON object, got {group!r}", "Mend config.json"
        )
    prefix = f"config_groups.{key}."
    is_targeted = _matcher(group.get("targets"), f"{prefix}targets")
    own = group.get("format")
    layout = _choice(
        group if own else quantization, "format", CT_FORMATS, prefix=prefix if own else ""
    )
    weights = group.get("weights")
    if not isinstance(weights, dict):
        raise _fault(
            f"{prefix}weights",
            f"must be a JSON object, got {weights!r}",
            "Use a checkpoint with weights",
        )
    prefix += "weights."
    if layout == "float-quantized" or (
        layout == "naive-quantized" and weights.get("type") == "float"
    ):
        return is_targeted, _float_reader(weights, prefix)
    read = read_packed if layout == "pack-quantized" else read_integers
    return is_targeted, _integer_reader(weights, prefix, read)


GROUPED_ACTORDERS = ("group", "dynamic", True)  # whose groups hold inputs that are apart
ACTORDERS = (None, False, "weight", "static", *GROUPED_ACTORDERS)
CT_FORMATS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized")


def _float_reader(weights: dict[str, Any], prefix: str) -> LayerReader:
    _choice(weights, "type", ["float"], prefix=prefix)
    _choice(weights, "num_bits", [8], prefix=prefix)
    strategy = _choice(weights, "strategy", ["channel", "tensor", "block"], prefix=prefix)
    if strategy != "block":
        return read_fp8
    return partial(
        read_fp8_blocks, suffix="weight_scale", block=_block(weights, "block_structure", prefix)
    )


def _integer_reader(
    weights: dict[str, Any], prefix: str, read: Callable[..., QuantizedWeight]
) -> LayerReader:
    _choice(weights, "type", ["int"], "int", prefix=prefix)
    bits = _choice(weights, "num_bits", [4, 8], prefix=prefix)
    strategy = _choice(weights, "strategy", ["channel", "group", "tensor"], prefix=prefix)
    symmetric = _choice(weights, "symmetric", [True, False], True, prefix=prefix)
    group_size = _group_size(weights, "group_size", prefix) if strategy == "group" else -1
    actorder = _choice(weights, "actorder", ACTORDERS, prefix=prefix)
    options = {"bits": bits, "group_size": group_size, "symmetric": symmetric}
    return partial(read, **options, actorder=actorder in GROUPED_ACTORDERS)


def _modelopt(quantization: dict[str, Any]) -> ReaderOf:
    """Return readers of NVIDIA's Model Optimizer, whose settings are in hf_quant_config.json or in config.json.

    Modules that are left out are named, or matched by a pattern with `*`.
    """
    settings = quantization | (quantization.get("quantization") or {})
    prefix = "quantization." if "quantization" in quantization else ""
    algorithm = settings.get("quant_algo")
    if algorithm == NVFP4:
        raise _fault(
            f"{prefix}quant_algo",
            f"is {NVFP4}, 4-bit floats that only Blackwell GPUs multiply, which are not read",
            "Use the model's checkpoint in FP8, AWQ or GPTQ",
        )
    if algorithm not in MODELOPT:
        raise _fault(
            f"{prefix}quant_algo",
            f"is {algorithm!r}, which is not read",
            f"Use a checkpoint with one of: {', '.join(MODELOPT)}",
        )
    patterns = settings.get("exclude_modules") or settings.get("ignore") or []
    reader = MODELOPT[algorithm]

    def reader_of(name: str) -> LayerReader | None:
        is_left_out = any(fnmatch(name, each) or fnmatch(name, f"{each}.*") for each in patterns)
        return None if is_left_out else reader

    return reader_of


NVFP4 = "NVFP4"
MODELOPT: dict[str, LayerReader] = {
    "FP8": read_fp8,
    "FP8_PER_CHANNEL_PER_TOKEN": read_fp8,
    "FP8_PB_WO": read_fp8_in_blocks_of_128,
}
QUANT_METHODS: dict[str, Callable[[dict[str, Any]], ReaderOf]] = {
    "awq": _awq,
    "gptq": _gptq,
    "compressed-tensors": _compressed_tensors,
    "fp8": _fp8,
    "modelopt": _modelopt,
}


class GGUFCheckpoint:
    """The tensors of a GGUF file, by transformers' names and with rows in transformers' order.

    A tied lm_head has the embedding's tensor. Raises GGUFError if the file's tensors are not those
    of the config.

    Args:
        config: content of config.json; `target_config` makes it from the file's own metadata.
    """

    def __init__(self, file: GGUFFile, config: dict[str, Any]):
        check_names(file, config)
        self.file = file
        self.config = config
        self.sources = sources_of(config)
        if config["tie_word_embeddings"]:
            own = GGUF_LM_HEAD in file.tensors
            self.sources["lm_head.weight"] = (
                [GGUF_LM_HEAD] if own else self.sources[EMBEDDING_WEIGHT]
            )

    def names(self) -> list[str]:
        """Return the layers with a quantised weight, including the embedding."""
        quantized = [
            name
            for name, sources in self.sources.items()
            if name.endswith(".weight") and not self.file.is_dense(sources[0])
        ]
        return sorted(name.removesuffix(".weight") for name in quantized)

    def projection(self, name: str) -> QuantizedWeight | Tensor:
        """Return the weight of a layer such as model.layers.0.mlp.up_proj, or model.embed_tokens; a
        dense weight in fp32.

        Raises GGUFError naming a tensor of a type that is not read, or with broken blocks.
        """
        [source] = self._sources(f"{name}.weight")
        if self.file.is_dense(source):
            return self.tensor(f"{name}.weight")
        blocks = self.file.blocks(source)
        codes, scale, offset = (
            torch.from_numpy(array) for array in (blocks.codes, blocks.scale, blocks.offset)
        )
        weight = QuantizedWeight(codes, scale, offset, blocks.bits)
        order = row_order(source, len(blocks.codes), self.config)
        return weight if order is None else weight.rows(torch.from_numpy(order))

    def tensor(self, name: str) -> Tensor:
        """Return a tensor in fp32, dequantised if it is quantised. Raises GGUFError."""
        values = stored_tensor(self.file, name, self._sources(name), self.config)
        return torch.from_numpy(np.require(values, requirements=["C", "W"]))

    def tensor_names(self) -> set[str]:
        """Return the names of all tensors."""
        return set(self.sources)

    def has_own_head(self) -> bool:
        """Return whether the file has an lm_head that differs from the embedding."""
        if GGUF_LM_HEAD not in self.file.tensors:
            return False
        head, embedding = (
            self.file.tensors[self._sources(name)[0]]
            for name in ("lm_head.weight", EMBEDDING_WEIGHT)
        )
        return head.tensor_type != embedding.tensor_type or not np.array_equal(
            head.data, embedding.data
        )

    def _sources(self, name: str) -> list[str]:
        if name not in self.sources:
            raise GGUFError(
                f"tensor {name}: the file has none that stands for it. Use another model"
            )
        return self.sources[name]
