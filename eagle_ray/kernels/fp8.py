"""Numbers of 8 bits: float8_e4m3fn, with three bits of mantissa and a largest number of FP8_MAX.

    rows = layer_ops.scaled_rows(inputs)          # ScaledRows: a scale for each row, for a product in FP8
    cache = to_fp8(keys)                          # without a scale: keys and values of a cache

GPUs round to FP8 and back in one instruction from compute capability FP8_CAPABILITY on.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
FP8_CAPABILITY = (8, 9)


@dataclass(frozen=True, slots=True)
class ScaledRows:
    """Rows in FP8: row r is values[r] * scale[r]. A row's scale maps its largest number to FP8_MAX.

    Attributes:
        dtype: dtype of the rows before they were rounded, and of a projection's output.
    """

    values: Float[Tensor, "R I"]
    scale: Float[Tensor, "R 1"]
    dtype: torch.dtype

    def __len__(self) -> int:
        return len(self.values)

    def dequantize(self) -> Float[Tensor, "R I"]:
        """Return the rows in fp32."""
        return self.values.float() * self.scale


@dataclass(frozen=True, slots=True)
class Fp8Stack:
    """The weights of all experts of a layer in FP8: values times the scale of their block.

    Attributes:
        scale: in fp32, contiguous.
        block: outputs and inputs that share a scale.
    """

    values: Float[Tensor, "E W I"]
    scale: Float[Tensor, "E BW BI"]
    block: tuple[int, int]

    @property
    def shape(self) -> torch.Size:
        """Return [E, W, I]."""
        return self.values.shape

    @property
    def device(self) -> torch.device:
        return self.values.device

    def __len__(self) -> int:
        return len(self.values)

    def dequantize(self, dtype: torch.dtype) -> Float[Tensor, "E W I"]:
        """Return the weights in a dtype, computed in fp32, one expert at a time."""
        stack = torch.empty(self.shape, dtype=dtype, device=self.device)
        for own, values, scale in zip(stack, self.values, self.scale, strict=True):
            own.copy_(restored_blocks(values, scale, self.block))
        return stack


def restored_blocks(
    values: Float[Tensor, "O I"], scale: Float[Tensor, "BO BI"], block: tuple[int, int]
) -> Float[Tensor, "O I"]:
    """Return values times the scales of their blocks, in fp32.

    Args:
        block: outputs and inputs that share a scale; the last blocks may be smaller.
    """
    outputs, inputs = block
    scale_of_inputs = scale.float().repeat_interleave(inputs, 1)[:, : values.shape[1]]
    restored = values.float()
    for rows, row_scale in zip(restored.split(outputs), scale_of_inputs, strict=True):
        rows.mul_(row_scale)
    return restored


def readable(numbers: Tensor) -> Tensor:
    """Return FP8 numbers in the form that the device can load: as bytes if it cannot convert FP8."""
    if numbers.dtype != FP8 or knows_fp8(numbers.device):
        return numbers
    return numbers.view(torch.uint8)


def knows_fp8(device: torch.device) -> bool:
    """Return whether a device has instructions that convert FP8."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= FP8_CAPABILITY


def to_fp8(numbers: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    """Round numbers to FP8. Numbers outside its range become its largest ones."""
    return numbers.clamp(-FP8_MAX, FP8_MAX).to(FP8)
