"""Base class and helpers of the linear layers on a GPU: frozen, with weights as buffers, and merged without copies.

gpu_linears.py has the layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from eagle_ray.kernels import few_rows
from eagle_ray.kernels.fp8 import ScaledRows
from eagle_ray.kernels.stored_weight import StoredWeight, no_arrivals


class GpuLinear(nn.Module):
    """Base of a frozen linear layer on a GPU.

    reads_fp8: whether it takes FP8 inputs (ScaledRows), which the operation before it then
    produces.
    """

    reads_fp8 = False
    bias: Tensor | None
    arrivals: Tensor

    def __init__(self, out_features: int, in_features: int, bias: Float[Tensor, " O"] | None):
        super().__init__()
        self.out_features = out_features
        self.in_features = in_features
        if bias is not None:
            bias = bias.detach()
        self.register_buffer("bias", bias, persistent=False)

    @property
    def weight(self) -> Tensor:
        """Return an empty placeholder with the dtype and device of the inputs."""
        return torch.empty(0, dtype=torch.bfloat16, device=self.arrivals.device)

    @property
    def stored(self) -> StoredWeight:
        """Return the stored weight in the form that the kernel for few rows reads."""
        raise NotImplementedError

    def count_arrivals(self) -> None:
        """Allocate the arrival counters of the kernel for few rows. Called once the weight is set."""
        arrivals = no_arrivals(self.stored)
        self.register_buffer("arrivals", arrivals, persistent=False)

    def multiply(self, rows: Float[Tensor, "R I"] | ScaledRows) -> Float[Tensor, "R O"]:
        """Return rows @ weight.T + bias: few rows by our own kernel, if it is chosen on this device, more by torch."""
        if few_rows.multiplies(len(rows), self.arrivals.device):
            return few_rows.product(rows, self.stored, self.bias, self.arrivals)
        return self.multiply_many(rows)

    def multiply_many(self, rows: Any) -> Float[Tensor, "R O"]:
        """Return rows @ weight.T + bias for any number of rows, by torch."""
        raise NotImplementedError

    def can_merge(self, parts: Sequence[nn.Module]) -> bool:
        """Return whether `merged` can join these layers."""
        has_bias = self.bias is not None
        for part in parts:
            if type(part) is not type(self):
                return False
            if (part.bias is not None) != has_bias:
                return False
        return True

    def merged(self, parts: Sequence[GpuLinear]) -> GpuLinear:
        """Return one layer with the concatenated outputs of its parts. The parts become views of its memory."""
        raise NotImplementedError

    def dequantize(self) -> Float[Tensor, "O I"]:
        """Return the weight in bf16."""
        raise NotImplementedError

    def rows(self, index: Int[Tensor, " D"]) -> nn.Linear:
        """Return a dense layer with some of this layer's outputs, in the given order."""
        weight = self.dequantize()[index]
        bias = None if self.bias is None else self.bias[index]
        return dense_linear(weight, bias)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"


def dense_linear(weight: Float[Tensor, "O I"], bias: Float[Tensor, " O"] | None) -> nn.Linear:
    """Return a frozen dense layer over these tensors."""
    num_out, num_in = weight.shape
    with torch.device("meta"):
        layer = nn.Linear(num_in, num_out, bias is not None)
    # The layer on "meta" has no memory: both its tensors are replaced.
    layer.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        layer.bias = nn.Parameter(bias, requires_grad=False)
    return layer


def joined_biases(parts: Sequence[GpuLinear]) -> Tensor | None:
    biases = [part.bias for part in parts if part.bias is not None]
    return joined_rows(biases) if biases else None


def joined_rows(parts: Sequence[Tensor]) -> Tensor:
    """Return the concatenated rows of the parts as one tensor, and make the parts views of it.

    Nothing is copied if they are adjacent views already.
    """
    first = parts[0]
    counts = [len(part) for part in parts]

    # Each part begins where the one before ends, in one storage that holds them all.
    begins = [part.data_ptr() for part in parts]
    ends = [part.data_ptr() + part.nbytes for part in parts]
    num_bytes = sum(part.nbytes for part in parts)
    if begins[1:] == ends[:-1] and _bytes_from(first) >= num_bytes:
        shape = (sum(counts), *first.shape[1:])
        return first.as_strided(shape, first.stride())

    # Joined as bytes: not every operation of torch takes 8-bit floats.
    octets = torch.cat([part.view(torch.uint8) for part in parts])
    whole = octets.view(first.dtype)
    for part, rows in zip(parts, whole.split(counts), strict=True):
        part.data = rows
    return whole


def _bytes_from(part: Tensor) -> int:
    """Return the bytes of the part's storage from its first number on."""
    storage = part.untyped_storage()
    skipped = part.data_ptr() - storage.data_ptr()
    return storage.nbytes() - skipped
