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
from jaxtyping import Float, Float8e4m3fn, Int, UInt8
from torch import Tensor, nn

BLOCK = 32  # inputs of a row that share a scale


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """The weight of a linear layer: scale * codes + offset.

    Attributes:
        codes: unsigned, below 2 ** bits.
        scale, offset: of each group of I / G inputs of an output.
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
    def group_size(self) -> int:
        """Return the number of inputs that share a scale."""
        return self.codes.shape[1] // self.scale.shape[1]

    def dequantize(self) -> Float[Tensor, "O I"]:
        """Return the weight in fp32, in the order of the inputs."""
        groups = self.codes.unflatten(1, (-1, self.group_size)).float()
        weight = (groups * self.scale.float()[..., None] + self.offset.float()[..., None]).flatten(1)
        return weight if self.order is None else weight[:, self.order.argsort()]

    def rows(self, index: Int[Tensor, " D"]) -> QuantizedWeight:
        """Return some of the outputs, in the given order."""
        return QuantizedWeight(self.codes[index], self.scale[index], self.offset[index], self.bits, self.order)

    @classmethod
    def cat(cls, parts: Sequence[QuantizedWeight]) -> QuantizedWeight:
        """Return the outputs of several weights of one kind over the same inputs, one after the other.

        Raises ValueError if their inputs are in different orders.
        """
        first = parts[0]
        if not all(_is_same_order(part.order, first.order) for part in parts):
            raise ValueError("weights whose inputs are in different orders have no common order. Compute them apart")
        joined = (torch.cat([getattr(part, name) for part in parts]) for name in ("codes", "scale", "offset"))
        return cls(*joined, first.bits, first.order)


def _is_same_order(order: Int[Tensor, " I"] | None, other: Int[Tensor, " I"] | None) -> bool:
    if order is None or other is None:
        return order is other
    return torch.equal(order, other)


@dataclass(frozen=True, slots=True)
class Fp8Weight:
    """The weight of a linear layer in 8-bit floats: scale * values.

    Attributes:
        scale: of each output, or one of all.
    """

    values: Float8e4m3fn[Tensor, "O I"]
    scale: Float[Tensor, "O 1"] | Float[Tensor, "1 1"]

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
