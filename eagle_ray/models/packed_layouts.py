"""Read one linear layer's tensors in the layouts of AWQ, GPTQ, compressed-tensors and FP8.

    weight = read_awq(LayerTensors("model.layers.0.mlp.up_proj", files), group_size=128)

`I` inputs, `O` outputs, `G` groups of inputs. A word is an int32 of 8 codes of 4 bits or 4 of 8
bits, lowest bits first.

    layout           tensors                                         zero point of a code
    AWQ              qweight [I, O/8], qzeros [G, O/8],              qzeros
                     scales [G, O]; AWQ_ORDER in every word
    GPTQ             qweight [I/8, O], qzeros [G, O/8],              qzeros + 1, or qzeros (gptq_v2)
                     scales [G, O], g_idx [I]
    pack-quantized   weight_packed [O, I/8], weight_scale [O, G],    2 ** (bits - 1), or weight_zero_point
                     weight_zero_point [O/8, G], weight_shape
    int-quantized    weight [O, I] int8, weight_scale                the same for integers without a sign
    FP8              weight [O, I] float8_e4m3fn, weight_scale       none

    weight = scale * (code - zero point) = scale * code + offset

Scale and offset are fp16 if that is exact for both, else fp32. If scales are fp16 or bf16, the sum
in fp32 has no rounding. If they are fp32, its error is at most 3 * 2 ** (bits - 24) * |scale|.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Float8e4m3fn, Int, Int32, UInt8
from safetensors import SafetensorError, safe_open
from torch import Tensor

from eagle_ray.core.errors import EngineError, one_line
from eagle_ray.families import WRAPPERS, text_name
from eagle_ray.models.fp8_blocks import Fp8BlockWeight
from eagle_ray.models.quantized_linear import Fp8Weight, QuantizedWeight
from eagle_ray.parallel.shard import LM_HEAD
from eagle_ray.storage.model_files import CONFIG, check_no_pointers, read_object

EMBEDDING_WEIGHT = "model.embed_tokens.weight"
SHARD_INDEX = "model.safetensors.index.json"
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # the outputs of a word, lowest bits first
DOWNLOAD = "Download the model again"
NOT_FINITE = "holds a number that is not finite"
FP8_NAN = 0x7F  # a float8_e4m3fn without its sign; it has no infinity
Weight = QuantizedWeight | Fp8Weight | Fp8BlockWeight | Tensor


@dataclass(frozen=True, slots=True)
class SafetensorFiles:
    """The tensors of a directory's safetensors files, each read on demand. Built by `open`.

    For a multimodal wrapper (families.py) they are those of its text model, by a text model's
    names.

    Attributes:
        file_of: name of the file that holds each tensor.
        stored: name in the files of each tensor that is renamed here.
    """

    directory: Path
    file_of: dict[str, str]
    opened: dict[str, Any] = field(default_factory=dict)
    stored: dict[str, str] = field(default_factory=dict)

    @classmethod
    def open(cls, directory: Path) -> SafetensorFiles:
        """Read the names of tensors. Raises EngineError if the directory has no readable safetensors files."""
        index = read_object(directory, SHARD_INDEX)
        if index:
            weight_map = index.get("weight_map")
            if not isinstance(weight_map, dict) or not all(
                _is_file_name(name) for name in weight_map.values()
            ):
                raise EngineError(
                    f"{directory / SHARD_INDEX}: weight_map must name files of the directory. {DOWNLOAD}"
                )
            return cls(directory, weight_map)._of_text()
        files = cls(directory, {})
        paths = sorted(directory.glob("model*.safetensors")) or sorted(
            directory.glob("*.safetensors")
        )
        for path in paths:
            names = files.handle(path.name).keys()
            files.file_of.update(dict.fromkeys(names, path.name))
        if not files.file_of:
            raise EngineError(
                f"{directory}: holds no *.safetensors. Quantised weights are read from safetensors files"
            )
        return files._of_text()

    def _of_text(self) -> SafetensorFiles:
        """Return the text half of a wrapper's files; other files are returned unchanged."""
        if not wraps_text(self.directory):
            return self
        stored = {name: text_name(name) for name in self.file_of}
        own = {text: name for name, text in stored.items() if text is not None}
        file_of = {text: self.file_of[name] for text, name in own.items()}
        renamed = {text: name for text, name in own.items() if text != name}
        return SafetensorFiles(self.directory, file_of, self.opened, renamed)

    def layer_names(self) -> dict[str, str]:
        """Return the name in the files of each layer that is renamed here."""
        layers = {}
        for text, name in self.stored.items():
            layer, _, _ = text.rpartition(".")
            layers[layer], _, _ = name.rpartition(".")
        return layers

    def handle(self, name: str) -> Any:
        """Return an open file of the directory."""
        if name not in self.opened:
            path = self.directory / name
            check_no_pointers([path])
            try:
                self.opened[name] = safe_open(path, "pt")
            except (OSError, SafetensorError) as error:
                raise EngineError(
                    f"{path}: cannot be read: {one_line(error)}. {DOWNLOAD}"
                ) from error
        return self.opened[name]

    def tensor(self, name: str) -> Tensor:
        """Return a tensor. Raises EngineError if there is none of this name."""
        if name not in self.file_of:
            raise EngineError(f"tensor {name}: is missing in {self.directory}. {DOWNLOAD}")
        file = self.file_of[name]
        try:
            return self.handle(file).get_tensor(self.stored.get(name, name))
        except SafetensorError as error:
            raise EngineError(
                f"tensor {name}: cannot be read: {one_line(error)}. {DOWNLOAD}"
            ) from error

    def slice_of(self, name: str) -> Any:
        """Return safetensors' lazy slice of a tensor, to read a part of it. Raises EngineError as `tensor` does."""
        if name not in self.file_of:
            raise EngineError(f"tensor {name}: is missing in {self.directory}. {DOWNLOAD}")
        file = self.file_of[name]
        return self.handle(file).get_slice(self.stored.get(name, name))

    def has_own_head(self) -> bool:
        """Return whether the files have an embedding and an lm_head in plain weights that differ."""
        if not {EMBEDDING_WEIGHT, LM_HEAD} <= self.file_of.keys():
            return False
        return not torch.equal(self.tensor(EMBEDDING_WEIGHT), self.tensor(LM_HEAD))


def wraps_text(directory: Path) -> bool:
    """Return whether a directory holds a multimodal wrapper whose text model is read. Raises EngineError."""
    return read_object(directory, CONFIG).get("model_type") in WRAPPERS


def _is_file_name(name: object) -> bool:
    return isinstance(name, str) and Path(name).name == name


@dataclass(frozen=True, slots=True)
class LayerTensors:
    """The tensors of one linear layer in a checkpoint, with checks on their dtypes and shapes.

    Attributes:
        name: name of the layer, such as model.layers.0.mlp.up_proj.
    """

    name: str
    files: SafetensorFiles

    def has(self, suffix: str) -> bool:
        """Return whether the layer has a tensor with this suffix."""
        return f"{self.name}.{suffix}" in self.files.file_of

    def tensor(
        self,
        suffix: str,
        dtypes: Sequence[torch.dtype] = (),
        shape: Sequence[int | None] | None = None,
    ) -> Tensor:
        """Return a tensor that must have one of these dtypes and this shape; None in it is any
        size. Raises EngineError."""
        tensor = self.files.tensor(f"{self.name}.{suffix}")
        if dtypes and tensor.dtype not in dtypes:
            names = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
            raise self.fault(
                suffix, f"is {str(tensor.dtype).removeprefix('torch.')}, wanted {names}"
            )
        if shape is not None and not _fits(tensor.shape, shape):
            wanted = ", ".join("any" if size is None else str(size) for size in shape)
            raise self.fault(suffix, f"has shape {tuple(tensor.shape)}, wanted ({wanted})")
        return tensor

    def finite(
        self, suffix: str, shape: Sequence[int | None] | None = None
    ) -> Float[Tensor, "..."]:
        """Return a tensor of finite floating-point numbers. Raises EngineError."""
        values = self.tensor(suffix, FLOAT_DTYPES, shape)
        if not values.isfinite().all():
            raise self.fault(suffix, NOT_FINITE)
        return values

    def fp8(self, suffix: str) -> Float8e4m3fn[Tensor, "O I"]:
        """Return a matrix of 8-bit floats. Raises EngineError if it contains NaN."""
        values = self.tensor(suffix, (torch.float8_e4m3fn,), (None, None))
        if (values.view(torch.uint8) & FP8_NAN == FP8_NAN).any():
            raise self.fault(suffix, NOT_FINITE)
        return values

    def fault(self, suffix: str, message: str, remedy: str = DOWNLOAD) -> EngineError:
        """Return an EngineError that names one of the layer's tensors, the fault and the remedy."""
        return EngineError(f"tensor {self.name}.{suffix}: {message}. {remedy}")


FLOAT_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
WORDS = (torch.int32,)


def _fits(shape: Sequence[int], wanted: Sequence[int | None]) -> bool:
    return len(shape) == len(wanted) and all(
        size in (None, own) for own, size in zip(shape, wanted, strict=True)
    )


def read_awq(layer: LayerTensors, group_size: int, zero_point: bool) -> QuantizedWeight:
    """Return a weight of AutoAWQ's version "gemm".

    Args:
        zero_point: whether qzeros must be there; without them the zero point is 8.
    """
    words = layer.tensor("qweight", WORDS, (None, None))
    codes = _awq_codes(words)
    num_outputs, num_inputs = codes.shape
    num_groups = _num_groups(layer, "qweight", num_inputs, group_size)
    scale = layer.finite("scales", (num_groups, num_outputs))
    zero = torch.full_like(scale.T, 8)
    if zero_point or layer.has("qzeros"):
        packed_zeros = layer.tensor("qzeros", WORDS, (num_groups, words.shape[1]))
        zero = _awq_codes(packed_zeros)
    return _grouped(codes, scale.T, zero, 4)


def _awq_codes(words: Int32[Tensor, "R W"]) -> UInt8[Tensor, "O R"]:
    """Return the codes of each output."""
    turned = words.T.contiguous()
    codes = torch.empty(len(turned), len(AWQ_ORDER), len(words), dtype=torch.uint8)
    for i, output in enumerate(AWQ_ORDER):
        codes[:, output] = turned >> 4 * i & 15
    return codes.flatten(0, 1)


def read_gptq(
    layer: LayerTensors, bits: int, group_size: int, zero_shift: int, desc_act: bool
) -> QuantizedWeight:
    """Return a weight of AutoGPTQ or GPTQModel.

    The zero point is the stored one plus zero_shift, which may be 2 ** bits, as in vLLM. If the
    inputs of a group are not adjacent, the codes are sorted by group, and the weight's `order` says
    which inputs they belong to.

    Args:
        desc_act: whether g_idx must be there; it is read if it is.
        zero_shift: 1 for checkpoint_format gptq, 0 for gptq_v2.
    """
    words = layer.tensor("qweight", WORDS, (None, None))
    codes = _codes(words.T, bits)
    num_outputs, num_inputs = codes.shape
    num_groups = _num_groups(layer, "qweight", num_inputs, group_size)
    scale = layer.finite("scales", (num_groups, num_outputs))
    zero_words = layer.tensor("qzeros", WORDS, (num_groups, -(-num_outputs * bits // 32)))
    zero = _codes(zero_words, bits)[:, :num_outputs].int() + zero_shift
    order = _input_order(layer, "g_idx", num_inputs, num_groups, desc_act)
    return _grouped(codes, scale.T, zero.T, bits, order)


def read_packed(
    layer: LayerTensors, bits: int, group_size: int, symmetric: bool, actorder: bool
) -> QuantizedWeight:
    """Return a weight of compressed-tensors' format pack-quantized.

    Args:
        group_size: -1 for all inputs.
        actorder: whether weight_g_idx must be there; it is read if it is.
    """
    num_outputs, num_inputs = _stored_shape(layer)
    words = layer.tensor("weight_packed", WORDS, (num_outputs, -(-num_inputs * bits // 32)))
    codes = _codes(words, bits)[:, :num_inputs]
    num_groups = _num_groups(layer, "weight_packed", num_inputs, group_size)
    scale = _by_output(layer, "weight_scale", layer.finite("weight_scale"), num_outputs, num_groups)
    zero = torch.full_like(scale, 1 << bits - 1)
    if not symmetric:
        packed = layer.tensor(
            "weight_zero_point", WORDS, (-(-num_outputs * bits // 32), num_groups)
        )
        zero = _codes(packed.T, bits)[:, :num_outputs].T
    order = _input_order(layer, "weight_g_idx", num_inputs, num_groups, actorder)
    return _grouped(codes, scale, zero, bits, order)


def _stored_shape(layer: LayerTensors) -> tuple[int, int]:
    shape = layer.tensor("weight_shape", (torch.int32, torch.int64), (2,)).tolist()
    if min(shape) < 1:
        raise layer.fault("weight_shape", f"is {shape}, wanted two positive sizes")
    return shape[0], shape[1]


def read_integers(
    layer: LayerTensors, bits: int, group_size: int, symmetric: bool, actorder: bool
) -> QuantizedWeight:
    """Return a weight of compressed-tensors' format int-quantized, whose codes have a sign and a byte each.

    Arguments are those of read_packed.
    """
    values = layer.tensor("weight", (torch.int8,), (None, None))
    num_outputs, num_inputs = values.shape
    half = 1 << bits - 1
    if int(values.min()) < -half or int(values.max()) >= half:
        raise layer.fault("weight", f"holds integers that do not fit into {bits} bits")
    num_groups = _num_groups(layer, "weight", num_inputs, group_size)
    scale = _by_output(layer, "weight_scale", layer.finite("weight_scale"), num_outputs, num_groups)
    zero = torch.full_like(scale, half)
    if not symmetric:
        own = layer.tensor(
            "weight_zero_point", (torch.int8, torch.int32, torch.int64, *FLOAT_DTYPES)
        )
        zero = _by_output(layer, "weight_zero_point", own.float(), num_outputs, num_groups) + half
    order = _input_order(layer, "weight_g_idx", num_inputs, num_groups, actorder)
    return _grouped((values.short() + half).to(torch.uint8), scale, zero, bits, order)


def _by_output(
    layer: LayerTensors, suffix: str, values: Tensor, num_outputs: int, num_groups: int
) -> Float[Tensor, "O G"]:
    """Return values of each output and group from those, or from one of each output, or from one of all."""
    if values.numel() == 1:
        return values.reshape(1, 1).expand(num_outputs, num_groups)
    if values.ndim == 1:
        values = values[:, None]
    if values.shape != (num_outputs, num_groups):
        raise layer.fault(
            suffix, f"has shape {tuple(values.shape)}, wanted ({num_outputs}, {num_groups})"
        )
    return values


def read_fp8(layer: LayerTensors) -> Fp8Weight:
    """Return a weight of 8-bit floats with one scale per output, or one for the whole weight."""
    values = layer.fp8("weight")
    scale = layer.finite("weight_scale").float()
    if scale.numel() == 1:
        return Fp8Weight(values, scale.reshape(1, 1))
    return Fp8Weight(values, _by_output(layer, "weight_scale", scale, len(values), 1))


def read_fp8_blocks(layer: LayerTensors, suffix: str, block: tuple[int, int]) -> Fp8BlockWeight:
    """Return a weight of 8-bit floats with one scale per block.

    Args:
        suffix: suffix of the scales' name.
        block: outputs and inputs that share a scale; the last blocks may be smaller.
    """
    values = layer.fp8("weight")
    shape = [-(-size // step) for size, step in zip(values.shape, block, strict=True)]
    return Fp8BlockWeight(values, layer.finite(suffix, shape).float(), block)


def read_fp8_in_blocks_of_128(layer: LayerTensors) -> Fp8BlockWeight:
    """Return an FP8 weight of Model Optimizer, whose scales have the shape [O/128, 1, I/128, 1]."""
    values = layer.fp8("weight")
    num_outputs, num_inputs = (-(-size // 128) for size in values.shape)
    scale = layer.finite("weight_scale", (num_outputs, 1, num_inputs, 1))
    return Fp8BlockWeight(values, scale.float().view(num_outputs, num_inputs), (128, 128))


def _codes(words: Int32[Tensor, "R W"], bits: int) -> UInt8[Tensor, "R C"]:
    """Return the codes of each row of words, lowest bits first."""
    octets = words.flatten().view(torch.uint8)
    if bits == 4:
        pairs = octets.short()
        # The low half goes into the first byte of two, the high half into the second.
        low = pairs & 15
        high = pairs >> 4
        octets = low.add_(high.mul_(256)).view(torch.uint8)
    return octets.unflatten(0, (len(words), -1))


def _num_groups(layer: LayerTensors, suffix: str, num_inputs: int, group_size: int) -> int:
    size = num_inputs if group_size == -1 else group_size
    if num_inputs % size:
        raise layer.fault(
            suffix, f"has {num_inputs} inputs, which groups of {size} do not divide", OTHER_GROUPS
        )
    return num_inputs // size


OTHER_GROUPS = "Use a checkpoint with another group_size"


def _input_order(
    layer: LayerTensors, suffix: str, num_inputs: int, num_groups: int, required: bool
) -> Int[Tensor, " I"] | None:
    """Return the inputs by their groups; None if groups are in the order of the inputs or not used.

    Args:
        required: whether the tensor must be there.
    """
    if not (required or layer.has(suffix)):
        return None
    groups = layer.tensor(suffix, (torch.int32, torch.int64), (num_inputs,)).long()
    expected = torch.arange(num_groups).repeat_interleave(num_inputs // num_groups)
    if torch.equal(groups, expected) or (groups == -1).all():
        return None
    order = groups.argsort(stable=True)
    if not torch.equal(groups[order], expected):
        raise layer.fault(
            suffix, f"must put {num_inputs // num_groups} inputs into each of {num_groups} groups"
        )
    return order


def _grouped(
    codes: UInt8[Tensor, "O I"],
    scale: Float[Tensor, "O G"],
    zero: Tensor,
    bits: int,
    order: Int[Tensor, " I"] | None = None,
) -> QuantizedWeight:
    """Return scale * (codes - zero), with codes in the given order of the inputs."""
    codes = codes.contiguous() if order is None else codes.index_select(1, order)
    # scale * (codes - zero) is scale * codes + offset.
    offset = -(zero.float() * scale.float())
    is_exact = _is_exact_in_fp16(scale) and _is_exact_in_fp16(offset)
    dtype = torch.float16 if is_exact else torch.float32
    scale = scale.to(dtype).contiguous()
    offset = offset.to(dtype).contiguous()
    return QuantizedWeight(codes, scale, offset, bits, order)


def _is_exact_in_fp16(values: Float[Tensor, "O G"]) -> bool:
    return torch.equal(values.half().float(), values.float())
