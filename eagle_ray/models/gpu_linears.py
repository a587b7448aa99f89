"""Frozen linear layers whose weights stay quantised on a GPU.

    layer = gpu_linear(weight, bias, torch.bfloat16, device)  # from a checkpoint's weight
    quantize_fp8(model.base_model.layers)                 # dense layers, rounded to FP8
    outputs = layer(rows)

Fp8Linear has a weight with a scale per output, and rounds its input with a scale per row, so a
row's results do not depend on the batch. The operation before it rounds the rows if it can:

    outputs = layer(layer_ops.add_rms_norm_fp8(...))      # one product, and no launch more

Up to SKINNY_ROWS rows are multiplied by a kernel of our own (kernels/few_rows.py says why): a row
has the same bits alone and among others. More rows are multiplied by torch's scaled_mm in FP8;
4-bit weights are restored to bf16 first. Without our kernel, torch's 4-bit kernel multiplies up to
INT4_ROWS rows; it also sums in a fixed order.

Both need rows in bf16, and FP8 needs compute capability FP8_CAPABILITY. Weights are buffers: they
move with the module, and count as its memory.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import cache
from typing import cast

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int32, UInt8
from torch import Tensor, nn
from torch.nn.functional import ScalingType, scaled_mm

from eagle_ray.core.errors import EngineError
from eagle_ray.kernels.availability import use_triton
from eagle_ray.kernels.fp8 import FP8_CAPABILITY, FP8_MAX, ScaledRows, to_fp8
from eagle_ray.kernels.layer_ops import scaled_rows
from eagle_ray.kernels.stored_weight import StoredWeight
from eagle_ray.models.block_fp8_linear import BlockFp8Linear, why_not_blocks
from eagle_ray.models.fp8_blocks import Fp8BlockWeight
from eagle_ray.models.gpu_layer import GpuLinear, dense_linear, joined_biases, joined_rows
from eagle_ray.models.quantized_linear import Fp8Weight, QuantizedWeight

log = logging.getLogger("eagle_ray")

FP8_MULTIPLE = 16  # torch's product needs in_features and out_features to be multiples of it
INT4_GROUPS = (256, 128, 64, 32)  # inputs of a scale that torch's kernel knows
INT4_OUTPUTS = 8  # outputs of a tile; the kernel multiplies one by 16 rows
INT4_INPUTS = (128, 64, 32)  # inputs of a run of tiles: 16 bytes of a lane, or 8, or 4
# An estimate: the kernel reads the rows again for each tile of outputs, so it is bound by them from
# 16 on.
INT4_ROWS = 32


class Fp8Linear(GpuLinear):
    """Computes inputs @ weight.T + bias with FP8 inputs. Inputs in bf16 are rounded here first, by a launch more."""

    reads_fp8 = True
    values: Tensor
    scale: Tensor

    def __init__(self, weight: Fp8Weight, bias: Float[Tensor, " O"] | None = None):
        num_out, num_in = weight.values.shape
        super().__init__(num_out, num_in, bias)
        scale = weight.scale.float().expand(self.out_features, 1).contiguous()
        self.register_buffer("values", weight.values, persistent=False)
        self.register_buffer("scale", scale, persistent=False)
        self.count_arrivals()

    @property
    def stored(self) -> StoredWeight:
        return StoredWeight.fp8(self.values, self.scale, (1, self.in_features))

    def merged(self, parts: Sequence[GpuLinear]) -> Fp8Linear:
        layers = cast(Sequence[Fp8Linear], parts)
        values = joined_rows([x.values for x in layers])
        scale = joined_rows([x.scale for x in layers])
        return Fp8Linear(Fp8Weight(values, scale), joined_biases(layers))

    def forward(self, inputs: Float[Tensor, "*rows I"] | ScaledRows) -> Float[Tensor, "*rows O"]:
        if isinstance(inputs, ScaledRows):
            return self.multiply(inputs)
        rows = scaled_rows(inputs.reshape(-1, self.in_features))
        return self.multiply(rows).view(*inputs.shape[:-1], -1)

    def dequantize(self) -> Float[Tensor, "O I"]:
        return (self.values.float() * self.scale).to(torch.bfloat16)

    def multiply_many(self, rows: ScaledRows) -> Float[Tensor, "R O"]:
        by_row = ScalingType.RowWise
        weight = self.values.t()
        scale = self.scale.t()
        return scaled_mm(
            rows.values,
            weight,
            rows.scale,
            by_row,
            scale,
            by_row,
            bias=self.bias,
            output_dtype=rows.dtype,
        )


class Int4Linear(GpuLinear):
    """Computes inputs @ weight.T + bias with a 4-bit weight, (code - 8) * scale + zero, and inputs in bf16.

    Raises ValueError for a weight that `why_not_int4` refuses.
    """

    packed: Tensor
    scales: Tensor
    order: Tensor | None

    def __init__(self, weight: QuantizedWeight, bias: Float[Tensor, " O"] | None = None):
        if (reason := why_not_int4(weight)) is not None:
            raise ValueError(reason)
        num_out, num_in = weight.codes.shape
        if bias is not None:
            bias = bias.to(torch.bfloat16)
        super().__init__(num_out, num_in, bias)
        packed = tile_packed(weight.codes)
        scales = _scales_and_zeros(weight)
        self.register_buffer("packed", packed, persistent=False)
        self.register_buffer("scales", scales, persistent=False)
        self.register_buffer("order", weight.order, persistent=False)
        self.count_arrivals()

    @property
    def stored(self) -> StoredWeight:
        return StoredWeight.int4(self.packed, self.scales)

    def can_merge(self, parts: Sequence[nn.Module]) -> bool:
        layers = cast(Sequence[Int4Linear], parts)
        return super().can_merge(parts) and all(
            x.packed.shape[1:] == self.packed.shape[1:]
            and len(x.scales) == len(self.scales)
            and x.order is self.order
            for x in layers
        )

    def merged(self, parts: Sequence[GpuLinear]) -> Int4Linear:
        layers = cast(Sequence[Int4Linear], parts)
        whole = Int4Linear.__new__(Int4Linear)
        num_outs = [layer.out_features for layer in layers]
        bias = joined_biases(layers)
        GpuLinear.__init__(whole, sum(num_outs), self.in_features, bias)

        # The outputs are the second dimension of scales, so joined_rows does not suit them.
        scales = torch.cat([layer.scales for layer in layers], 1)
        for layer, view in zip(layers, scales.split(num_outs, 1), strict=True):
            layer.scales.data = view
        packed = joined_rows([layer.packed for layer in layers])
        whole.register_buffer("packed", packed, persistent=False)
        whole.register_buffer("scales", scales, persistent=False)
        whole.register_buffer("order", self.order, persistent=False)
        whole.count_arrivals()
        return whole

    @property
    def group_size(self) -> int:
        """Return the number of inputs that share a scale."""
        return self.in_features // len(self.scales)

    def forward(self, inputs: Float[Tensor, "*rows I"]) -> Float[Tensor, "*rows O"]:
        rows = inputs.reshape(-1, self.in_features)
        ordered = rows.contiguous() if self.order is None else rows[:, self.order]
        return self.multiply(ordered).view(*inputs.shape[:-1], -1)

    def multiply_many(self, rows: Float[Tensor, "R I"]) -> Float[Tensor, "R O"]:
        if len(rows) > INT4_ROWS:
            return F.linear(rows, self._restored(), self.bias)
        outputs = int4_product(rows, self.packed, self.group_size, self.scales.contiguous())
        return outputs if self.bias is None else outputs + self.bias

    def dequantize(self) -> Float[Tensor, "O I"]:
        restored = self._restored()
        return restored if self.order is None else restored[:, self.order.argsort()]

    def _restored(self) -> Float[Tensor, "O I"]:
        """Return the weight in bf16, with inputs in the order of the codes, in one launch if Triton's kernels run."""
        if use_triton(self.packed.device):
            from eagle_ray.kernels.fused_layer import dequantize_int4

            return dequantize_int4(self.packed, self.scales)
        by_output = self.scales.float().transpose(0, 1)
        scale, zero = by_output.unbind(-1)
        codes = tile_unpacked(self.packed)
        codes = codes.unflatten(1, (-1, self.group_size)) - 8
        weight = codes * scale[..., None] + zero[..., None]
        return weight.flatten(1).to(torch.bfloat16)


def gpu_linear(
    weight: QuantizedWeight | Fp8Weight | Fp8BlockWeight,
    bias: Float[Tensor, " O"] | None,
    dtype: torch.dtype,
    device: torch.device,
) -> GpuLinear | nn.Linear:
    """Return a layer for a checkpoint's weight: quantised if a kernel of the device supports it, else dense in `dtype`.

    The layer is where the weight is; it may move to the device later. The reason for a dense layer
    is logged once.
    """
    reason = _why_not_here(weight, dtype, device)
    if reason is None:
        if isinstance(weight, Fp8Weight):
            return Fp8Linear(weight, bias)
        if isinstance(weight, Fp8BlockWeight):
            return BlockFp8Linear(weight, bias)
        return Int4Linear(weight, bias)
    log_dense(reason)
    dense = weight.dequantize().to(dtype)
    if bias is not None:
        bias = bias.to(dtype)
    return dense_linear(dense, bias)


def why_not_int4(weight: QuantizedWeight) -> str | None:
    """Return why torch's 4-bit kernel cannot multiply by this weight, or None if it can."""
    num_out, num_in = weight.codes.shape
    if weight.bits != 4:
        return f"codes have {weight.bits} bits, and the kernel reads 4"
    if num_out % INT4_OUTPUTS or num_in % INT4_INPUTS[-1]:
        return f"it is {num_out} x {num_in}, and the kernel takes multiples of {INT4_OUTPUTS} x {INT4_INPUTS[-1]}"
    if weight.group_size % INT4_GROUPS[-1]:
        return f"{weight.group_size} inputs share a scale, and the kernel takes multiples of {INT4_GROUPS[-1]}"
    return None


def _why_not_here(
    weight: QuantizedWeight | Fp8Weight | Fp8BlockWeight, dtype: torch.dtype, device: torch.device
) -> str | None:
    """Return why no layer of this device keeps a weight as it is stored, or None."""
    if isinstance(weight, Fp8Weight):
        reason = _why_not_fp8(weight)
    elif isinstance(weight, QuantizedWeight):
        reason = why_not_int4(weight)
    else:
        reason = None
    if reason is not None:
        return reason
    if dtype is not torch.bfloat16:
        return f"rows are {str(dtype).removeprefix('torch.')}, and the kernels take bfloat16"
    if isinstance(weight, Fp8Weight):
        return why_no_fp8(device)
    if isinstance(weight, Fp8BlockWeight):
        return why_not_blocks(weight, device)
    if not knows_layout(device):
        return "this torch packs weights of 4 bits in a layout that is not known here"
    return None


def _why_not_fp8(weight: Fp8Weight) -> str | None:
    num_out, num_in = weight.values.shape
    if num_out % FP8_MULTIPLE or num_in % FP8_MULTIPLE:
        return f"it is {num_out} x {num_in}, and products in FP8 take multiples of {FP8_MULTIPLE}"
    return None


def why_no_fp8(device: torch.device) -> str | None:
    """Return why a device cannot compute in FP8, or None if it can."""
    if device.type != "cuda":
        return f"{device.type} is no GPU"
    capability = torch.cuda.get_device_capability(device)
    if capability >= FP8_CAPABILITY:
        return None
    return f"compute capability {capability[0]}.{capability[1]} is under {FP8_CAPABILITY[0]}.{FP8_CAPABILITY[1]}"


@cache
def log_dense(reason: str) -> None:
    log.warning("a quantised weight is restored to 16 bits, which takes more memory: %s", reason)


def fp8_weight(weight: Float[Tensor, "O I"]) -> Fp8Weight:
    """Round a weight to FP8, with a scale per output that maps its largest weight to FP8's largest number."""
    largest = weight.abs().amax(1, keepdim=True).float()
    scale = torch.where(largest > 0, largest / FP8_MAX, 1.0)
    return Fp8Weight(to_fp8(weight.float() / scale), scale)


def quantize_fp8(module: nn.Module, device: torch.device | str | None = None) -> None:
    """Replace every linear layer of a module by one in FP8, in place and one by one.

    Args:
        device: device on which the weights are quantised and stay; None is their present one.

    Raises:
        EngineError: the size of a layer is no multiple of FP8_MULTIPLE.
    """
    for name, linear in list(module.named_modules()):
        if not isinstance(linear, nn.Linear):
            continue
        if linear.in_features % FP8_MULTIPLE or linear.out_features % FP8_MULTIPLE:
            raise EngineError(
                f"model.quantization: {name} is {linear.out_features} x {linear.in_features}, and FP8 needs multiples "
                f"of {FP8_MULTIPLE}. Set it to none."
            )
        weight = linear.weight.detach().to(device)
        bias = linear.bias
        parent, _, own = name.rpartition(".")
        quantised = Fp8Linear(
            fp8_weight(weight), None if bias is None else bias.detach().to(device)
        )
        setattr(module.get_submodule(parent), own, quantised)


def int4_product(
    rows: Float[Tensor, "R I"],
    packed: Int32[Tensor, "tiles runs 32 words"],
    group_size: int,
    scales: Float[Tensor, "G O 2"],
) -> Float[Tensor, "R O"]:
    """Return rows @ weight.T by torch's 4-bit kernel, which exists for CUDA alone."""
    return torch.ops.aten._weight_int4pack_mm(rows, packed, group_size, scales)


@cache
def knows_layout(device: torch.device) -> bool:
    """Return whether torch on this device packs 4-bit weights in the layout that `tile_packed` writes."""
    if device.type != "cuda":
        return True
    codes = torch.arange(64 * 128, device=device).mul(7).remainder(16).to(torch.uint8).view(64, 128)
    pairs = (codes[:, ::2] << 4) | codes[:, 1::2]
    packed = torch.ops.aten._convert_weight_to_int4pack(
        pairs.contiguous(), _run_inputs(codes.shape[1]) // 16
    )
    return torch.equal(packed, tile_packed(codes))


def tile_packed(codes: UInt8[Tensor, "O I"]) -> Int32[Tensor, "tiles runs 32 words"]:
    """Pack 4-bit codes into the layout of torch's kernel: eight outputs in a tile, 32 lanes in a run of its inputs.

    A word holds eight codes of one output, of 32 inputs of which four lanes hold a pair in each
    quarter. Lane 4 * output + pair has them in its bits from the lowest on: the even inputs of the
    four quarters, then the odd ones.
    """
    run = _run_inputs(codes.shape[1])
    # Tile, output, run, word, quarter, pair, odd.
    tiles = codes.view(len(codes) // 8, 8, -1, run // 32, 4, 4, 2)
    # Tile, run, output, pair, word, (odd, quarter).
    nibbles = tiles.permute(0, 2, 1, 5, 3, 6, 4).flatten(5).long()
    words = (nibbles << torch.arange(0, 32, 4, device=codes.device)).sum(-1)
    signed = torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)
    return signed.flatten(2, 3).contiguous()


def tile_unpacked(packed: Int32[Tensor, "tiles runs 32 words"]) -> Int32[Tensor, "O I"]:
    """Undo `tile_packed`: return the codes."""
    shifts = torch.arange(0, 32, 4, dtype=torch.int32, device=packed.device)
    nibbles = (packed[..., None] >> shifts) & 15
    # Tile, run, output, pair, word, odd, quarter.
    parts = nibbles.unflatten(-1, (2, 4)).unflatten(2, (8, 4))
    return parts.permute(0, 2, 1, 4, 6, 3, 5).flatten(2).flatten(0, 1)


def _run_inputs(num_inputs: int) -> int:
    """Return the inputs of a run of tiles: the most that divide a row."""
    return next(run for run in INT4_INPUTS if num_inputs % run == 0)


def _scales_and_zeros(weight: QuantizedWeight) -> Float[Tensor, "G O 2"]:
    """Return bf16 scales and zeros: scale * code + offset is scale * (code - 8) + zero. Large groups are divided."""
    size = next(size for size in INT4_GROUPS if weight.group_size % size == 0)
    scale = weight.scale.float()
    zero = weight.offset.float() + 8 * scale
    both = torch.stack([scale, zero], -1).to(torch.bfloat16)
    both = both.repeat_interleave(weight.group_size // size, 1)
    return both.transpose(0, 1).contiguous()
