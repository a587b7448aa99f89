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


def to_fp8(numbers: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    """Round numbers to FP8. Numbers outside its range become its largest ones."""
    return numbers.clamp(-FP8_MAX, FP8_MAX).to(FP8)
