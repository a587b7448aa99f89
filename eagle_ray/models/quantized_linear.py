"""QuantizedLinear: a frozen linear layer whose weight stays in 4 or 8 bits.

    weight = QuantizedWeight(codes, scale, offset, bits=4)      # as quantized_checkpoint reads them
    layer = QuantizedLinear(weight, dtype=torch.bfloat16)
    outputs = layer(inputs)                                     # [*rows, I] -> [*rows, O]

A weight is scale * code + offset, with one scale and one offset for each group of inputs of an
output. This form represents Q4_0, Q4_1, Q8_0, Q4_K and Q6_K blocks and the groups of AWQ, GPTQ and
compressed-tensors exactly.

On a CPU, inputs are rounded to 8 bits in blocks of BLOCK of a row, as llama.cpp does, so that
products are integers. Sums of integers have no rounding, and blocks are added in the order of the
inputs. Hence a row's result has equal bits in any batch, on any number of threads, with AVX2 and
with AVX-512.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
from jaxtyping import Float, Float8e4m3fn, Int, UInt8
from torch import Tensor, nn
from torch.nn.functional import pad

from eagle_ray.core.errors import EngineError
from eagle_ray.kernels import cpu_ops
from eagle_ray.kernels.cpu_ops import BLOCK, TILE, PackedWeight


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """The weight of a linear layer: scale * codes + offset.

    Attributes:
        codes: unsigned integers below 2 ** bits.
        scale, offset: scale and offset of each group of I / G inputs of an output.
        bits: 4 or 8.
        order: the input that each code belongs to, so that the layer reads inputs[..., order]; None
            if codes are in the order of the inputs. GPTQ with desc_act groups inputs by their
            activations.
    """

    codes: UInt8[Tensor, "O I"]
    scale: Float[Tensor, "O G"]
    offset: Float[Tensor, "O G"]
    bits: int
    order: Int[Tensor, " I"] | None = None

    @property
    def shape(self) -> torch.Size:
        """Return [O, I]."""
        return self.codes.shape

    @property
    def group_size(self) -> int:
        """Return the number of inputs that share a scale."""
        num_inputs = self.codes.shape[1]
        num_groups = self.scale.shape[1]
        return num_inputs // num_groups

    def dequantize(self) -> Float[Tensor, "O I"]:
        """Return the weight in fp32, in the order of the inputs."""
        groups = self.codes.unflatten(1, (-1, self.group_size)).float()
        scale = self.scale.float()[..., None]
        offset = self.offset.float()[..., None]
        weight = (groups * scale + offset).flatten(1)
        if self.order is None:
            return weight
        place_of_input = self.order.argsort()
        return weight.index_select(1, place_of_input)

    def to(self, device: torch.device | str) -> QuantizedWeight:
        """Return a copy of the weight on a device."""
        codes = self.codes.to(device)
        scale = self.scale.to(device)
        offset = self.offset.to(device)
        order = None if self.order is None else self.order.to(device)
        return QuantizedWeight(codes, scale, offset, self.bits, order)

    def rows(self, index: Int[Tensor, " D"]) -> QuantizedWeight:
        """Return the weight of some of the outputs, in the given order."""
        codes = self.codes.index_select(0, index)
        scale = self.scale.index_select(0, index)
        offset = self.offset.index_select(0, index)
        return QuantizedWeight(codes, scale, offset, self.bits, self.order)


def _is_same_order(order: Int[Tensor, " I"] | None, other: Int[Tensor, " I"] | None) -> bool:
    if order is None or other is None:
        return order is other
    return torch.equal(order, other)


@dataclass(frozen=True, slots=True)
class Fp8Weight:
    """The weight of a linear layer in 8-bit floats: scale * values.

    Attributes:
        scale: scale of each output, or one for all.
    """

    values: Float8e4m3fn[Tensor, "O I"]
    scale: Float[Tensor, "O 1"] | Float[Tensor, "1 1"]

    @property
    def shape(self) -> torch.Size:
        """Return [O, I]."""
        return self.values.shape

    def to(self, device: torch.device | str) -> Fp8Weight:
        """Return a copy of the weight on a device."""
        return Fp8Weight(self.values.to(device), self.scale.to(device))

    def dequantize(self) -> Float[Tensor, "O I"]:
        """Return the weight in fp32."""
        return self.values.float() * self.scale


class QuantizedLinear(nn.Module):
    """Computes inputs @ weight.T + bias over inputs that are rounded to 8 bits in blocks of BLOCK.

    A frozen layer on a CPU. Its tensors are laid out for `cpu_ops.quantized_matmul`; they are
    neither parameters nor buffers, so that nothing converts or moves them.

    Args:
        weight: weight to pack. Its inputs must be whole blocks, and its groups whole blocks or half
            blocks.
        dtype: dtype of inputs and outputs.
    """

    def __init__(
        self,
        weight: QuantizedWeight,
        bias: Float[Tensor, " O"] | None = None,
        dtype: torch.dtype = torch.float32,
    ):
        super().__init__()
        self.out_features, self.in_features = weight.codes.shape
        self.packed = pack_weight(weight)
        self.order = weight.order
        self.dtype = dtype
        self.bias = None if bias is None else bias.detach().to(dtype)

    @property
    def weight(self) -> Tensor:
        """Return an empty placeholder with the dtype of inputs, which some models read."""
        return torch.empty(0, dtype=self.dtype)

    @property
    def weight_bytes(self) -> int:
        """Return the bytes of the packed weight, all of which a pass reads."""
        return self.packed.codes.nbytes + self.packed.scales.nbytes

    def forward(self, inputs: Float[Tensor, "*rows I"]) -> Float[Tensor, "*rows O"]:
        rows = inputs.reshape(-1, self.in_features)
        if self.order is not None:
            rows = rows[:, self.order]
        outputs = self._multiply(rows.contiguous())
        return outputs.view(*inputs.shape[:-1], self.out_features)

    def _multiply(self, rows: Float[Tensor, "R I"]) -> Float[Tensor, "R O"]:
        if not cpu_ops.available(rows.device, torch.float32):
            return portable_matmul(rows, self.packed, self.bias)
        if rows.dtype in cpu_ops.CPU_DTYPES:
            return cpu_ops.quantized_matmul(rows, self.packed, self.bias)
        bias = None if self.bias is None else self.bias.float()
        outputs = cpu_ops.quantized_matmul(rows.float(), self.packed, bias)
        return outputs.to(rows.dtype)

    @property
    def finds_highest(self) -> bool:
        """Return whether this layer supports `argmax`."""
        if self.dtype is not torch.float32 or self.order is not None:
            return False
        return cpu_ops.has_function("quantized_argmax_float32")

    def argmax(self, inputs: Float[Tensor, "R I"]) -> Int[Tensor, " R"]:
        """Return the index of each row's highest output, ties to the lower index, without writing the outputs."""
        return cpu_ops.quantized_argmax(inputs.contiguous(), self.packed, self.bias)

    def rows(self, index: Int[Tensor, " D"]) -> QuantizedLinear:
        """Return a layer with some of the outputs, in the given order."""
        bias = None if self.bias is None else self.bias[index]
        weight = self.quantized_weight().rows(index)
        return QuantizedLinear(weight, bias, self.dtype)

    def quantized_weight(self) -> QuantizedWeight:
        """Return the weight in its original layout."""
        return unpack_weight(self.packed, self.order)

    @classmethod
    def merged(cls, parts: Sequence[QuantizedLinear]) -> QuantizedLinear:
        """Return one layer with the concatenated outputs of several. They must satisfy `can_merge`."""
        layer = cls.__new__(cls)
        nn.Module.__init__(layer)
        first = parts[0]
        packs = [part.packed for part in parts]
        codes = torch.cat([pack.codes for pack in packs])
        scales = torch.cat([pack.scales for pack in packs])
        num_outputs = sum(pack.num_outputs for pack in packs)
        layer.packed = PackedWeight(codes, scales, num_outputs)

        layer.in_features = first.in_features
        layer.out_features = num_outputs
        layer.order = first.order
        layer.dtype = first.dtype
        layer.bias = None
        if first.bias is not None:
            biases = [cast(Tensor, part.bias) for part in parts]
            layer.bias = torch.cat(biases)
        return layer

    @staticmethod
    def can_merge(parts: Sequence[nn.Module]) -> bool:
        """Return whether these layers are quantised in one way and all but the last fill whole tiles."""
        layers = [part for part in parts if isinstance(part, QuantizedLinear)]
        if len(layers) < len(parts):
            return False
        if any(part.out_features % TILE for part in layers[:-1]):
            return False
        kinds = {(_kind(part.packed), part.dtype, part.bias is None) for part in layers}
        if len(kinds) > 1:
            return False
        order = layers[0].order
        return all(_is_same_order(part.order, order) for part in layers)

    def extra_repr(self) -> str:
        sizes = f"in_features={self.in_features}, out_features={self.out_features}"
        return f"{sizes}, bits={self.packed.bits}"


def quantize(weight: Float[Tensor, "O I"]) -> QuantizedWeight:
    """Round a dense weight to 8 bits in groups of BLOCK inputs, as GGUF's Q8_0 does."""
    groups = weight.detach().float().unflatten(1, (-1, BLOCK))
    scale = (groups.abs().amax(-1) / 127).half()
    inverse = torch.where(scale > 0, 1 / scale.float(), 0.0)
    rounded = (groups * inverse[..., None]).round()
    codes = rounded.clamp(-128, 127) + 128
    unsigned = codes.flatten(1).to(torch.uint8)
    return QuantizedWeight(unsigned, scale, -128 * scale, 8)


def quantize_linears(model: nn.Module) -> None:
    """Round the linear layers of a model to 8 bits in place, for example of a head, whose drafts need not be exact."""
    for name, module in list(model.named_modules()):
        if type(module) is nn.Linear and module.in_features % BLOCK == 0:
            layer = QuantizedLinear(quantize(module.weight), module.bias, module.weight.dtype)
            model.set_submodule(name, layer)


def holds_quantized(model: nn.Module) -> bool:
    """Return whether the model has layers that this engine runs quantised on a CPU."""
    return any(isinstance(module, QuantizedLinear) for module in model.modules())


def _kind(weight: PackedWeight) -> tuple[torch.Size, torch.Size, torch.dtype]:
    """Return the shapes and the dtype that must be equal for weights to be multiplied in one product."""
    return weight.codes.shape[1:], weight.scales.shape[1:], weight.scales.dtype


def fits_kernel(weight: QuantizedWeight) -> bool:
    """Return whether the CPU kernel supports the weight's sizes: inputs in whole blocks, groups in
    whole or half blocks."""
    if weight.shape[1] % BLOCK:
        return False
    is_half = weight.group_size == BLOCK // 2
    return is_half or weight.group_size % BLOCK == 0


def pack_weight(weight: QuantizedWeight) -> PackedWeight:
    """Return the weight in the layout of the CPU's kernel. Raises EngineError for inputs or groups of other sizes."""
    num_outputs, num_inputs = weight.codes.shape
    if not fits_kernel(weight):
        raise EngineError(
            f"a quantised weight of {num_inputs} inputs in groups of {weight.group_size}: inputs must be a multiple of "
            f"{BLOCK}, and so must be groups, or {BLOCK // 2}. Use a checkpoint with other groups"
        )
    padding = (0, 0, 0, -num_outputs % TILE)
    padded = pad(weight.codes, padding)
    tiles = padded.view(-1, TILE, num_inputs // BLOCK, BLOCK // 4, 4)
    codes = tiles.permute(0, 2, 3, 1, 4)  # tile, block, vector, output, input
    if weight.bits == 4:
        low = codes[:, :, :4]
        high = codes[:, :, 4:] << 4
        codes = low | high

    # Both are fp16, or both are fp32.
    is_half = weight.scale.dtype == weight.offset.dtype == torch.float16
    dtype = torch.float16 if is_half else torch.float32
    parts = []
    for part in (weight.scale, weight.offset):
        rows = pad(part.to(dtype), padding)
        parts.append(rows.view(-1, TILE, part.shape[1]))
    scales = torch.stack(parts, 1).permute(0, 3, 1, 2)
    packed_codes = codes.flatten(3).contiguous()
    return PackedWeight(packed_codes, scales.contiguous(), num_outputs)


def unpack_weight(packed: PackedWeight, order: Int[Tensor, " I"] | None = None) -> QuantizedWeight:
    """Undo `pack_weight`: return the original weight."""
    codes = packed.codes.unflatten(3, (TILE, 4))
    if packed.bits == 4:
        low = codes & 15
        high = codes >> 4
        codes = torch.cat([low, high], 2)
    rows = codes.permute(0, 3, 1, 2, 4).flatten(2).flatten(0, 1)
    outputs = rows[: packed.num_outputs]

    scales = packed.scales.permute(2, 0, 3, 1).flatten(1, 2)
    scale, offset = scales[:, : packed.num_outputs]
    return QuantizedWeight(outputs, scale, offset, packed.bits, order)


def portable_matmul(
    rows: Float[Tensor, "R I"], weight: PackedWeight, bias: Float[Tensor, " O"] | None
) -> Float[Tensor, "R O"]:
    """Compute `cpu_ops.quantized_matmul` by PyTorch's operations, equal within fp32 rounding."""
    blocks = rows.float().unflatten(1, (-1, BLOCK))
    largest = blocks.abs().amax(-1, keepdim=True)
    inverse = torch.where(largest > 0, 127 / largest, 0)
    rounded = (blocks * inverse).round() * (largest / 127)
    dense = unpack_weight(weight).dequantize()
    outputs = rounded.flatten(1) @ dense.T
    if bias is not None:
        outputs = outputs + bias.float()
    return outputs.to(rows.dtype)
