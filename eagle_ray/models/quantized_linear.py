"""QuantizedLinear: a frozen linear layer whose weight stays in 4 or 8 bits.

    weight = QuantizedWeight(codes, scale, offset, bits=4)      # of a checkpoint: see quantized_checkpoint
    layer = QuantizedLinear(weight, dtype=torch.bfloat16)
    outputs = layer(inputs)                                     # [*rows, I] -> [*rows, O]

A weight is scale * code + offset, with one scale and one offset for each group of inputs of an output. Q4_0, Q4_1,
Q8_0, Q4_K and Q6_K blocks, AWQ, GPTQ and compressed-tensors groups are all exactly that.

On a CPU, inputs are rounded to 8 bits in blocks of BLOCK of a row, as llama.cpp does, so that products are integers.
Sums of integers have no rounding, and blocks are added in the order of the inputs. Hence a row's result is the same
bits in any batch, on any number of threads and with AVX2 as with AVX-512.
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
        codes: unsigned, below 2 ** bits.
        scale, offset: scale and offset of each group of I / G inputs of an output.
        bits: 4 or 8.
        order: the input that each code belongs to, so that the layer reads inputs[..., order]; None if codes are in the
            order of the inputs. GPTQ with desc_act groups inputs by their activations.
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
        return self.codes.shape[1] // self.scale.shape[1]

    def dequantize(self) -> Float[Tensor, "O I"]:
        """Return the weight in fp32, in the order of the inputs."""
        groups = self.codes.unflatten(1, (-1, self.group_size)).float()
        weight = (groups * self.scale.float()[..., None] + self.offset.float()[..., None]).flatten(1)
        return weight if self.order is None else weight.index_select(1, self.order.argsort())

    def to(self, device: torch.device | str) -> QuantizedWeight:
        """Return the weight on a device."""
        order = None if self.order is None else self.order.to(device)
        return QuantizedWeight(self.codes.to(device), self.scale.to(device), self.offset.to(device), self.bits, order)

    def rows(self, index: Int[Tensor, " D"]) -> QuantizedWeight:
        """Return some of the outputs, in the given order."""
        codes, scale, offset = (part.index_select(0, index) for part in (self.codes, self.scale, self.offset))
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
        """Return the weight on a device."""
        return Fp8Weight(self.values.to(device), self.scale.to(device))

    def dequantize(self) -> Float[Tensor, "O I"]:
        """Return the weight in fp32."""
        return self.values.float() * self.scale


class QuantizedLinear(nn.Module):
    """Computes inputs @ weight.T + bias over inputs that are rounded to 8 bits in blocks of BLOCK.

    A frozen layer on a CPU. Its tensors are laid out for `cpu_ops.quantized_matmul`; they are neither parameters nor
    buffers, so that nothing converts or moves them.

    Args:
        weight: whose inputs are whole blocks, and whose groups are whole blocks or halves of one.
        dtype: dtype of inputs and outputs.
    """

    def __init__(
        self, weight: QuantizedWeight, bias: Float[Tensor, " O"] | None = None, dtype: torch.dtype = torch.float32
    ):
        super().__init__()
        self.out_features, self.in_features = weight.codes.shape
        self.packed = pack_weight(weight)
        self.order, self.dtype = weight.order, dtype
        self.bias = None if bias is None else bias.detach().to(dtype)

    @property
    def weight(self) -> Tensor:
        """Return a placeholder with the dtype of inputs, which some models read."""
        return torch.empty(0, dtype=self.dtype)

    @property
    def weight_bytes(self) -> int:
        """Return the bytes that a pass reads."""
        return self.packed.codes.nbytes + self.packed.scales.nbytes

    def forward(self, inputs: Float[Tensor, "*rows I"]) -> Float[Tensor, "*rows O"]:
        rows = inputs.reshape(-1, self.in_features)
        if self.order is not None:
            rows = rows[:, self.order]
        return self._multiply(rows.contiguous()).view(*inputs.shape[:-1], self.out_features)

    def _multiply(self, rows: Float[Tensor, "R I"]) -> Float[Tensor, "R O"]:
        if not cpu_ops.available(rows.device, torch.float32):
            return portable_matmul(rows, self.packed, self.bias)
        if rows.dtype in cpu_ops.DTYPES:
            return cpu_ops.quantized_matmul(rows, self.packed, self.bias)
        bias = None if self.bias is None else self.bias.float()
        return cpu_ops.quantized_matmul(rows.float(), self.packed, bias).to(rows.dtype)

    def rows(self, index: Int[Tensor, " D"]) -> QuantizedLinear:
        """Return a layer with some of the outputs, in the given order."""
        bias = None if self.bias is None else self.bias[index]
        return QuantizedLinear(self.quantized_weight().rows(index), bias, self.dtype)

    def quantized_weight(self) -> QuantizedWeight:
        """Return the weight as it was given."""
        return unpack_weight(self.packed, self.order)

    @classmethod
    def merged(cls, parts: Sequence[QuantizedLinear]) -> QuantizedLinear:
        """Return one layer with the outputs of several, one after the other. See `can_merge`."""
        layer = cls.__new__(cls)
        nn.Module.__init__(layer)
        first = parts[0]
        packs = [part.packed for part in parts]
        codes, scales = (torch.cat([getattr(pack, name) for pack in packs]) for name in ("codes", "scales"))
        layer.packed = PackedWeight(codes, scales, sum(pack.num_outputs for pack in packs))
        layer.in_features, layer.out_features = first.in_features, layer.packed.num_outputs
        layer.order, layer.dtype = first.order, first.dtype
        layer.bias = None if first.bias is None else torch.cat([cast(Tensor, part.bias) for part in parts])
        return layer

    @staticmethod
    def can_merge(parts: Sequence[nn.Module]) -> bool:
        """Return whether these are quantised layers alike that fill whole tiles, but for the last one."""
        layers = [part for part in parts if isinstance(part, QuantizedLinear)]
        if len(layers) < len(parts) or any(part.out_features % TILE for part in layers[:-1]):
            return False
        kinds = {(_kind(part.packed), part.dtype, part.bias is None) for part in layers}
        return len(kinds) == 1 and all(_is_same_order(part.order, layers[0].order) for part in layers)

    def extra_repr(self) -> str:
        weight = self.packed
        return f"in_features={self.in_features}, out_features={self.out_features}, bits={weight.bits}"


def quantize(weight: Float[Tensor, "O I"]) -> QuantizedWeight:
    """Round a dense weight to 8 bits in groups of BLOCK inputs, as GGUF's Q8_0 does."""
    groups = weight.detach().float().unflatten(1, (-1, BLOCK))
    scale = (groups.abs().amax(-1) / 127).half()
    inverse = torch.where(scale > 0, 1 / scale.float(), 0.0)
    codes = (groups * inverse[..., None]).round().clamp(-128, 127) + 128
    return QuantizedWeight(codes.flatten(1).to(torch.uint8), scale, -128 * scale, 8)


def quantize_linears(model: nn.Module) -> None:
    """Round the linear layers of a model to 8 bits in place: of a head, say, whose drafts need not be exact."""
    for name, module in list(model.named_modules()):
        if type(module) is nn.Linear and module.in_features % BLOCK == 0:
            layer = QuantizedLinear(quantize(module.weight), module.bias, module.weight.dtype)
            model.set_submodule(name, layer)


def holds_quantized(model: nn.Module) -> bool:
    """Return whether some of the model's layers are quantised ones of this engine on a CPU."""
    return any(isinstance(module, QuantizedLinear) for module in model.modules())


def _kind(weight: PackedWeight) -> tuple[torch.Size, torch.Size, torch.dtype]:
    """Return what weights must have in common that one product computes."""
    return weight.codes.shape[1:], weight.scales.shape[1:], weight.scales.dtype


def fits_kernel(weight: QuantizedWeight) -> bool:
    """Return whether the CPU's kernel takes the weight's inputs and groups: whole blocks, or groups of half a block."""
    return weight.shape[1] % BLOCK == 0 and (weight.group_size % BLOCK == 0 or weight.group_size == BLOCK // 2)


def pack_weight(weight: QuantizedWeight) -> PackedWeight:
    """Return the weight in the layout of the CPU's kernel. Raises EngineError for inputs or groups of other sizes."""
    num_outputs, num_inputs = weight.codes.shape
    if not fits_kernel(weight):
        raise EngineError(
            f"a quantised weight of {num_inputs} inputs in groups of {weight.group_size}: inputs must be a multiple of "
            f"{BLOCK}, and so must be groups, or {BLOCK // 2}. Use a checkpoint with other groups"
        )
    missing = -num_outputs % TILE
    tiles = pad(weight.codes, (0, 0, 0, missing)).view(-1, TILE, num_inputs // BLOCK, BLOCK // 4, 4)
    codes = tiles.permute(0, 2, 3, 1, 4)  # tile, block, vector, output, input
    if weight.bits == 4:
        codes = codes[:, :, :4] | (codes[:, :, 4:] << 4)
    is_half = weight.scale.dtype == weight.offset.dtype == torch.float16
    parts = [x.to(torch.float16 if is_half else torch.float32) for x in (weight.scale, weight.offset)]
    scales = torch.stack([pad(x, (0, 0, 0, missing)).view(-1, TILE, x.shape[1]) for x in parts], 1)
    return PackedWeight(codes.flatten(3).contiguous(), scales.permute(0, 3, 1, 2).contiguous(), num_outputs)


def unpack_weight(packed: PackedWeight, order: Int[Tensor, " I"] | None = None) -> QuantizedWeight:
    """Return what was packed."""
    codes = packed.codes.unflatten(3, (TILE, 4))
    if packed.bits == 4:
        codes = torch.cat([codes & 15, codes >> 4], 2)
    outputs = codes.permute(0, 3, 1, 2, 4).flatten(2).flatten(0, 1)[: packed.num_outputs]
    scale, offset = packed.scales.permute(2, 0, 3, 1).flatten(1, 2)[:, : packed.num_outputs]
    return QuantizedWeight(outputs, scale, offset, packed.bits, order)


def portable_matmul(
    rows: Float[Tensor, "R I"], weight: PackedWeight, bias: Float[Tensor, " O"] | None
) -> Float[Tensor, "R O"]:
    """Return what `cpu_ops.quantized_matmul` does, within fp32 rounding, by PyTorch's operations."""
    blocks = rows.float().unflatten(1, (-1, BLOCK))
    largest = blocks.abs().amax(-1, keepdim=True)
    rounded = (blocks * torch.where(largest > 0, 127 / largest, 0)).round() * (largest / 127)
    outputs = rounded.flatten(1) @ unpack_weight(weight).dequantize().T
    return (outputs if bias is None else outputs + bias.float()).to(rows.dtype)
