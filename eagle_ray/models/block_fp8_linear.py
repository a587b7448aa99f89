"""BlockFp8Linear: a GPU layer whose FP8 weight has a scale for each block of outputs and inputs.

    layer = BlockFp8Linear(weight, bias)          # an Fp8BlockWeight
    outputs = layer(inputs)                       # in bf16

Inputs stay in bf16, so nothing is rounded beyond the checkpoint's own weights. Up to SKINNY_ROWS
rows are multiplied by the FP8 weight directly. For more rows the weight is first restored to bf16,
which moves five bytes per weight instead of the two of a bf16 weight.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import cast

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from eagle_ray.kernels.availability import use_triton
from eagle_ray.kernels.stored_weight import StoredWeight, why_not_skinny
from eagle_ray.models.fp8_blocks import Fp8BlockWeight
from eagle_ray.models.gpu_layer import GpuLinear, joined_biases, joined_rows


class BlockFp8Linear(GpuLinear):
    """Computes inputs @ weight.T + bias with inputs in bf16. Valid only if `why_not_blocks` returns None."""

    values: Tensor
    scale: Tensor

    def __init__(self, weight: Fp8BlockWeight, bias: Float[Tensor, " O"] | None = None):
        num_out, num_in = weight.shape
        if bias is not None:
            bias = bias.to(torch.bfloat16)
        super().__init__(num_out, num_in, bias)
        self.block = weight.block
        # The kernels read scales in fp32, row by row.
        scale = weight.scale.float()
        self.register_buffer("values", weight.values, persistent=False)
        self.register_buffer("scale", scale.contiguous(), persistent=False)
        self.count_arrivals()

    @property
    def stored(self) -> StoredWeight:
        return StoredWeight.fp8(self.values, self.scale, self.block)

    def can_merge(self, parts: Sequence[nn.Module]) -> bool:
        if not super().can_merge(parts):
            return False
        # Outputs can be divided into smaller blocks, but the inputs of a block must agree.
        layers = cast(Sequence[BlockFp8Linear], parts)
        num_inputs = self.block[1]
        return all(layer.block[1] == num_inputs for layer in layers)

    def merged(self, parts: Sequence[GpuLinear]) -> BlockFp8Linear:
        layers = cast(Sequence[BlockFp8Linear], parts)
        # No block has outputs of two layers.
        sizes = [layer.block[0] for layer in layers]
        num_outs = [layer.out_features for layer in layers]
        num_outputs = math.gcd(*sizes, *num_outs)
        num_inputs = self.block[1]
        fine = [layer._blocks.in_blocks_of(num_outputs, num_inputs) for layer in layers]

        values = joined_rows([layer.values for layer in layers])
        scale = torch.cat([weight.scale for weight in fine])
        whole = Fp8BlockWeight(values, scale, (num_outputs, num_inputs))
        bias = joined_biases(layers)
        return BlockFp8Linear(whole, bias)

    def forward(self, inputs: Float[Tensor, "*rows I"]) -> Float[Tensor, "*rows O"]:
        rows = inputs.reshape(-1, self.in_features)
        outputs = self.multiply(rows.contiguous())
        return outputs.view(*inputs.shape[:-1], -1)

    def dequantize(self) -> Float[Tensor, "O I"]:
        if use_triton(self.values.device):
            from eagle_ray.kernels.restored_fp8 import restored_fp8

            return restored_fp8(self.values, self.scale, self.block, torch.bfloat16)
        return self._blocks.dequantize().to(torch.bfloat16)

    def multiply_many(self, rows: Float[Tensor, "R I"]) -> Float[Tensor, "R O"]:
        weight = self.dequantize()
        return F.linear(rows, weight, self.bias)

    @property
    def _blocks(self) -> Fp8BlockWeight:
        return Fp8BlockWeight(self.values, self.scale, self.block)


def why_not_blocks(weight: Fp8BlockWeight, device: torch.device) -> str | None:
    """Return why a layer on this device cannot keep an FP8 weight in blocks, or None if it can."""
    if not use_triton(device):
        return "weights in blocks of FP8 need Triton's kernels, which do not run here"
    stored = StoredWeight.fp8(weight.values, weight.scale, weight.block)
    return why_not_skinny(stored)
