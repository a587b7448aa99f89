"""Weights of 8-bit floats with a scale for each block of outputs and inputs, as Qwen3, GLM and DeepSeek publish them.

weight = Fp8BlockWeight(values, scale, (128, 128))
weight.dequantize()                       # in fp32
part_of_blocks(weight, part)              # one rank's part
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float, Float8e4m3fn
from torch import Tensor

from eagle_ray.parallel.shard import Part, cut_out


@dataclass(frozen=True, slots=True)
class Fp8BlockWeight:
    """The weight of a linear layer in 8-bit floats: values times the scale of their block.

    Attributes:
        scale: scale of each block; the last blocks may be smaller.
        block: outputs and inputs of a block.
    """

    values: Float8e4m3fn[Tensor, "O I"]
    scale: Float[Tensor, "BO BI"]
    block: tuple[int, int]

    @property
    def shape(self) -> torch.Size:
        """Return [O, I]."""
        return self.values.shape

    def to(self, device: torch.device | str) -> Fp8BlockWeight:
        """Return the weight on a device."""
        return Fp8BlockWeight(self.values.to(device), self.scale.to(device), self.block)

    def dequantize(self) -> Float[Tensor, "O I"]:
        """Return the weight in fp32."""
        outputs, inputs = self.block
        scale = self.scale.float().repeat_interleave(inputs, 1)[:, : self.shape[1]]
        weight = self.values.float()
        for rows, row_scale in zip(weight.split(outputs), scale, strict=True):
            rows.mul_(row_scale)
        return weight

    def in_blocks_of(self, outputs: int, inputs: int) -> Fp8BlockWeight:
        """Return the weight in smaller blocks, whose sizes divide its own."""
        scale = self.scale.repeat_interleave(self.block[0] // outputs, 0)
        scale = scale.repeat_interleave(self.block[1] // inputs, 1)
        num_blocks = (
            -(-size // step) for size, step in zip(self.shape, (outputs, inputs), strict=True)
        )
        num_outputs, num_inputs = num_blocks
        return Fp8BlockWeight(self.values, scale[:num_outputs, :num_inputs], (outputs, inputs))


def part_of_blocks(weight: Fp8BlockWeight, part: Part) -> Fp8BlockWeight:
    """Return some outputs or some inputs of a weight, in blocks that the part does not cut."""
    sizes = list(weight.block)
    ends = [end for both in part.ranges for end in both]
    sizes[part.dim] = math.gcd(sizes[part.dim], *ends)
    fine = weight.in_blocks_of(*sizes)
    size = sizes[part.dim]
    of_blocks = Part(
        part.dim,
        tuple((begin // size, -(-end // size)) for begin, end in part.ranges),
    )
    values = cut_out(fine.values.view(torch.uint8), part).view(torch.float8_e4m3fn)
    scale = cut_out(fine.scale, of_blocks)
    if missing := -(-len(values) // fine.block[0]) - len(
        scale
    ):  # of rows that a part is padded with
        scale = torch.cat([scale, scale.new_ones(missing, scale.shape[1])])
    return Fp8BlockWeight(values, scale, fine.block)
