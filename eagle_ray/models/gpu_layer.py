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
        self.register_buffer("bias", None if bias is None else bias.detach(), persistent=False)

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
        self.register_buffer("arrivals", no_arrivals(self.stored), persistent=False)

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
        return all(
            type(part) is type(self) and (part.bias is None) == (self.bias is None)
            for part in parts
        )

    def merged(self, parts: Sequence[GpuLinear]) -> GpuLinear:
        """Return one layer with the concatenated outputs of its parts. The parts become views of its memory."""
        raise NotImplementedError

    def dequantize(self) -> Float[Tensor, "O I"]:
        """Return the weight in bf16."""
        raise NotImplementedError

    def rows(self, index: Int[Tensor, " D"]) -> nn.Linear:
        """Return a dense layer with some of this layer's outputs, in the given order."""
        return dense_linear(
            self.dequantize()[index], None if self.bias is None else self.bias[index]
        )

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"


def dense_linear(weight: Float[Tensor, "O I"], bias: Float[Tensor, " O"] | None) -> nn.Linear:
    """Return a frozen dense layer over these tensors."""
    with torch.device("meta"):
        layer = nn.Linear(weight.shape[1], weight.shape[0], bias is not None)
    layer.weight = nn.Parameter(weight, requires_grad=False)
    layer.register_parameter(
        "bias", None if bias is None else nn.Parameter(bias, requires_grad=False)
    )
    return layer


def joined_biases(parts: Sequence[GpuLinear]) -> Tensor | None:
    biases = [part.bias for part in parts if part.bias is not None]
    return joined_rows(biases) if biases else None


def joined_rows(parts: Sequence[Tensor]) -> Tensor:
    """Return the concatenated rows of the parts as one tensor, and make the parts views of it.

    Nothing is copied if they are adjacent views already.
    """
    ends = [part.data_ptr() + part.nbytes for part in parts]
    begins = [part.data_ptr() for part in parts]
    num_rows = sum(map(len, parts))
    first = parts[0]
    if begins[1:] == ends[:-1] and _bytes_from(first) >= sum(part.nbytes for part in parts):
        return first.as_strided((num_rows, *first.shape[1:]), first.stride())
    whole = torch.cat([part.view(torch.uint8) for part in parts]).view(first.dtype)
    for part, rows in zip(parts, whole.split([len(part) for part in parts]), strict=True):
        part.data = rows
    return whole


def _bytes_from(part: Tensor) -> int:
    """Return the bytes of the part's storage from its first number on."""
    storage = part.untyped_storage()
    return storage.nbytes() - (part.data_ptr() - storage.data_ptr())
