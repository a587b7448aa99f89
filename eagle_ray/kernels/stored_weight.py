"""StoredWeight and ProductCut: a weight's stored form on a GPU, and how a product of few rows splits it over programs.

weight = StoredWeight.fp8(values, scale, (128, 128))
ProductCut.of(weight)                  # tiles and parts, by the weight's shape and form alone

form    numbers                               scales
dense   [O, I] in the rows' dtype             none
fp8     [O, I] in FP8                         one of each block of outputs and inputs, such as
                                              1 x I, O x I and 128 x 128
int4    words of models/gpu_linears           [G, O, 2] scale and zero of each group of inputs:
        .tile_packed                          (code - 8) * scale + zero
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float, Int32
from torch import Tensor

SKINNY_ROWS = 64
BLOCK_INPUTS = (128, 64, 32)  # inputs that a program reads at a time
PROGRAMS = 264  # about two for each multiprocessor of an H100
# From this number of outputs on, tiles have 64 of them, which Hopper multiplies by four warps at once.
WIDE_OUTPUTS = 1024
MIN_STEPS = 4  # tiles of inputs in a part: shorter parts would mostly wait for memory
MAX_PARTS = 16

Form = Literal["dense", "fp8", "int4"]


@dataclass(frozen=True, slots=True)
class StoredWeight:
    """A weight of num_outputs x num_inputs numbers in one of the forms above.

    Attributes:
        scales: scales of the weight; None for dense weights.
        block: outputs and inputs that share a scale in FP8; (1, inputs of a group) in 4 bits.
    """

    form: Form
    numbers: Tensor
    scales: Tensor | None
    block: tuple[int, int]
    num_outputs: int
    num_inputs: int

    @classmethod
    def dense(cls, weight: Float[Tensor, "O I"]) -> StoredWeight:
        num_outputs, num_inputs = weight.shape
        return cls("dense", weight, None, (1, num_inputs), num_outputs, num_inputs)

    @classmethod
    def fp8(
        cls, values: Float[Tensor, "O I"], scales: Float[Tensor, "BO BI"], block: tuple[int, int]
    ) -> StoredWeight:
        num_outputs, num_inputs = values.shape
        return cls("fp8", values, scales, block, num_outputs, num_inputs)

    @classmethod
    def int4(
        cls, packed: Int32[Tensor, "tiles runs 32 words"], scales: Float[Tensor, "G O 2"]
    ) -> StoredWeight:
        num_tiles, num_runs, _, words = packed.shape
        num_inputs = 32 * words * num_runs
        return cls(
            "int4", packed, scales, (1, num_inputs // len(scales)), 8 * num_tiles, num_inputs
        )


@dataclass(frozen=True, slots=True)
class ProductCut:
    """How a product splits a weight over programs.

    Attributes:
        outputs, inputs: size of a tile; a program reads several tiles along the inputs.
        steps: tiles per part.
        parts: number of parts that the inputs are split into.
    """

    outputs: int
    inputs: int
    steps: int
    parts: int

    @classmethod
    def of(cls, weight: StoredWeight) -> ProductCut:
        """Return the cut of a weight, by its shape and its form."""
        inputs = _inputs_of_a_tile(weight)
        outputs = 64 if weight.num_outputs >= WIDE_OUTPUTS else 32
        num_tiles = ceil_div(weight.num_outputs, outputs)
        num_steps = ceil_div(weight.num_inputs, inputs)
        wanted = ceil_div(PROGRAMS, num_tiles)
        parts = max(min(wanted, num_steps // MIN_STEPS, MAX_PARTS), 1)
        steps = ceil_div(num_steps, parts)
        return cls(outputs, inputs, steps, ceil_div(num_steps, steps))

    def num_tiles(self, num_outputs: int) -> int:
        """Return the number of tiles along the outputs; each has a counter of arrivals."""
        return ceil_div(num_outputs, self.outputs)


def _inputs_of_a_tile(weight: StoredWeight) -> int:
    """Return the inputs of a tile: a run of words in 4 bits, else the most that divide a block."""
    if weight.form == "int4":
        return 32 * weight.numbers.shape[3]
    if weight.block[1] >= weight.num_inputs:
        return BLOCK_INPUTS[0] if weight.form == "fp8" else BLOCK_INPUTS[1]
    return next(size for size in BLOCK_INPUTS if weight.block[1] % size == 0)


def why_not_skinny(weight: StoredWeight) -> str | None:
    """Return why the kernel for few rows cannot multiply by a weight, or None if it can."""
    block = weight.block[1]
    if weight.form == "fp8" and block < weight.num_inputs and block % BLOCK_INPUTS[-1]:
        return f"{block} inputs share a scale, and the kernel takes multiples of {BLOCK_INPUTS[-1]}"
    return None


def no_arrivals(weight: StoredWeight) -> Int32[Tensor, " tiles"]:
    """Return zeroed arrival counters for a weight's products, which must run one after the other."""
    num_tiles = ProductCut.of(weight).num_tiles(weight.num_outputs)
    return torch.zeros(num_tiles, dtype=torch.int32, device=weight.numbers.device)


def ceil_div(number: int, size: int) -> int:
    """Return how many pieces of a given size are needed for a number of things, rounded up."""
    return -(-number // size)
