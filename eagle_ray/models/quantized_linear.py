"""QuantizedLinear: a frozen linear layer whose weight stays in 4 or 8 bits.

    weight = QuantizedWeight(codes, scale, offset, bits=4)      # of a checkpoint: see quantized_checkpoint
    layer = QuantizedLinear(weight, dtype=torch.bfloat16)
    outputs = layer(inputs)                                     # [*rows, I] -> [*rows, O]

A weight is scale * code + offset, with one scale and one offset for each group of inputs of an output. Q4_0, Q4_1, Q8_0,
Q4_K and Q6_K blocks, AWQ, GPTQ and compressed-tensors groups are all exactly that.

On a CPU, inputs are rounded to 8 bits in blocks of BLOCK of a row, as llama.cpp does, so that products are integers. Sums
of integers have no rounding, and blocks are added in the order of the inputs. Hence a row's result is the same bits in
any batch, on any number of threads and on any x86 processor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor, nn

BLOCK = 32  # inputs of a row that share a scale


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """The weight of a linear layer: scale * codes + offset.

    Attributes:
        codes: unsigned, below 2 ** bits, in the order of the inputs.
        scale, offset: of each group of I / G inputs of an output.
        bits: 4 or 8.
    """

    codes: UInt8[Tensor, "O I"]
    scale: Float[Tensor, "O G"]
    offset: Float[Tensor, "O G"]
    bits: int

    @property
    def group_size(self) -> int:
        """Return the number of inputs that share a scale."""
        return self.codes.shape[1] // self.scale.shape[1]

    def dequantize(self) -> Float[Tensor, "O I"]:
        """Return the weight in fp32."""
        groups = self.codes.unflatten(1, (-1, self.group_size)).float()
        return (groups * self.scale.float()[..., None] + self.offset.float()[..., None]).flatten(1)

    def rows(self, index: Int[Tensor, " D"]) -> QuantizedWeight:
        """Return some of the outputs, in the given order."""
        return QuantizedWeight(self.codes[index], self.scale[index], self.offset[index], self.bits)

    @classmethod
    def cat(cls, parts: Sequence[QuantizedWeight]) -> QuantizedWeight:
        """Return the outputs of several weights of one kind over the same inputs, one after the other."""
        joined = (torch.cat([getattr(part, name) for part in parts]) for name in ("codes", "scale", "offset"))
        return cls(*joined, parts[0].bits)


@dataclass(frozen=True, slots=True)
class Fp8Weight:
    """The weight of a linear layer in FP8: scale * values.

    Attributes:
        values: float8_e4m3fn.
        scale: fp32, of each output.
    """

    values: Float[Tensor, "O I"]
    scale: Float[Tensor, "O 1"]

    def dequantize(self) -> Float[Tensor, "O I"]:
        """Return the weight in fp32."""
        return self.values.float() * self.scale


class QuantizedLinear(nn.Module):
    """Computes inputs @ weight.T + bias over inputs that are rounded to 8 bits in blocks of BLOCK.

    Args:
        dtype: of inputs and outputs.
    """

    def __init__(self, weight: QuantizedWeight, bias: Float[Tensor, " O"] | None = None, dtype=torch.float32):
        super().__init__()
        self.out_features, self.in_features = weight.codes.shape
        self.quantized, self.bias, self.dtype = weight, bias, dtype

    def forward(self, inputs: Float[Tensor, "*rows I"]) -> Float[Tensor, "*rows O"]:
        raise NotImplementedError
