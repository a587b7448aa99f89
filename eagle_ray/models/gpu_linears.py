"""Frozen linear layers whose weights stay quantised on a GPU.

    layer = Fp8Linear(fp8_weight(linear.weight), linear.bias)
    outputs = layer(rows)                                     # one launch to round the rows, one product
    outputs = layer(layer_ops.add_rms_norm_fp8(...))          # the norm has rounded them: one product

In FP8 both the weight and the rows are rounded, the weight with a scale for each output and the rows with a scale for
each row, so a row's numbers do not depend on the batch. torch multiplies them with tensor cores of compute capability
8.9 or later. Weights are buffers: they move with the module, and count as its memory.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import ScalingType, scaled_mm

from eagle_ray.core.errors import EngineError
from eagle_ray.kernels.fp8 import FP8_MAX, ScaledRows, to_fp8
from eagle_ray.kernels.layer_ops import scaled_rows
from eagle_ray.models.quantized_linear import Fp8Weight

FP8_MULTIPLE = 16  # of in_features and out_features, which torch's product by rows asks for


class Fp8Linear(nn.Module):
    """Computes inputs @ weight.T + bias with inputs in FP8.

    reads_fp8: tells the operation before it to return ScaledRows; other inputs are rounded here, in a launch more.
    """

    reads_fp8 = True
    values: Tensor
    scale: Tensor
    bias: Tensor | None

    def __init__(self, weight: Fp8Weight, bias: Float[Tensor, " O"] | None = None):
        super().__init__()
        self.out_features, self.in_features = weight.values.shape
        self.register_buffer("values", weight.values, persistent=False)
        self.register_buffer("scale", weight.scale, persistent=False)
        self.register_buffer("bias", bias, persistent=False)

    @classmethod
    def merged(cls, parts: Sequence[Fp8Linear]) -> Fp8Linear:
        """Return one layer with the outputs of its parts one after the other; the parts become views of its memory."""
        values, scale = (_joined([getattr(part, name) for part in parts]) for name in ("values", "scale"))
        biases = [part.bias for part in parts if part.bias is not None]
        return cls(Fp8Weight(values, scale), _joined(biases) if biases else None)

    def forward(self, inputs: Float[Tensor, "*rows I"] | ScaledRows) -> Float[Tensor, "*rows O"]:
        if isinstance(inputs, ScaledRows):
            return self._multiply(inputs)
        rows = scaled_rows(inputs.reshape(-1, self.in_features))
        return self._multiply(rows).view(*inputs.shape[:-1], -1)

    def _multiply(self, rows: ScaledRows) -> Float[Tensor, "R O"]:
        by_row = ScalingType.RowWise
        weight, scale = self.values.t(), self.scale.t()
        return scaled_mm(
            rows.values, weight, rows.scale, by_row, scale, by_row, bias=self.bias, output_dtype=rows.dtype
        )

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"


def fp8_weight(weight: Float[Tensor, "O I"]) -> Fp8Weight:
    """Return a weight in FP8. The scale of an output maps its largest weight to the largest number of FP8."""
    largest = weight.abs().amax(1, keepdim=True).float()
    scale = torch.where(largest > 0, largest / FP8_MAX, 1.0)
    return Fp8Weight(to_fp8(weight.float() / scale), scale)


def quantize_linears(module: nn.Module, device: torch.device | str | None = None) -> None:
    """Replace every linear layer of a module by one in FP8, in place and one by one.

    Args:
        device: where the weights are quantised and stay; None is where they are.

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
        weight, bias = linear.weight.detach().to(device), linear.bias
        parent, _, own = name.rpartition(".")
        quantised = Fp8Linear(fp8_weight(weight), None if bias is None else bias.detach().to(device))
        setattr(module.get_submodule(parent), own, quantised)


def _joined(parts: Sequence[Tensor]) -> Tensor:
    """Return the parts' rows as one tensor, of which the parts become views; without a copy if they are views of it."""
    ends = [part.data_ptr() + part.nbytes for part in parts]
    begins = [part.data_ptr() for part in parts]
    num_rows, first = sum(map(len, parts)), parts[0]
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
