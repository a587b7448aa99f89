"""Fp8BlockWeight: an 8-bit float weight with a scale per block, as Qwen3, GLM and DeepSeek publish them.

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

from eagle_ray.kernels.fp8 import restored_blocks
from eagle_ray.kernels.stored_weight import ceil_div
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
        """Return a copy of the weight on a device."""
        values = self.values.to(device)
        scale = self.scale.to(device)
        return Fp8BlockWeight(values, scale, self.block)

    def dequantize(self) -> Float[Tensor, "O I"]:
        """Return the weight in fp32."""
        return restored_blocks(self.values, self.scale, self.block)

    def in_blocks_of(self, outputs: int, inputs: int) -> Fp8BlockWeight:
        """Return the weight with smaller blocks; each scale is repeated. The sizes must divide the present ones."""
        block_outputs, block_inputs = self.block
        scale = self.scale.repeat_interleave(block_outputs // outputs, 0)
        scale = scale.repeat_interleave(block_inputs // inputs, 1)
        # The last of its blocks may be smaller, and has fewer of the new ones.
        num_outputs, num_inputs = self.shape
        scale = scale[: ceil_div(num_outputs, outputs)]
        scale = scale[:, : ceil_div(num_inputs, inputs)]
        return Fp8BlockWeight(self.values, scale, (outputs, inputs))


def part_of_blocks(weight: Fp8BlockWeight, part: Part) -> Fp8BlockWeight:
    """Return some outputs or some inputs of a weight, with blocks small enough that the part cuts none."""
    # A size that divides each begin and end puts every one of them between two blocks.
    ends = [end for both in part.ranges for end in both]
    size = math.gcd(weight.block[part.dim], *ends)
    sizes = list(weight.block)
    sizes[part.dim] = size
    fine = weight.in_blocks_of(*sizes)

    # Cut out as bytes: not every operation of torch takes 8-bit floats.
    octets = cut_out(fine.values.view(torch.uint8), part)
    values = octets.view(torch.float8_e4m3fn)
    ranges_of_blocks = []
    for begin, end in part.ranges:
        ranges_of_blocks.append((begin // size, ceil_div(end, size)))
    scale = cut_out(fine.scale, Part(part.dim, tuple(ranges_of_blocks)))

    # Rows that a part is padded with have scales, too.
    num_missing = ceil_div(len(values), fine.block[0]) - len(scale)
    if num_missing:
        padding = scale.new_ones(num_missing, scale.shape[1])
        scale = torch.cat([scale, padding])
    return Fp8BlockWeight(values, scale, fine.block)
