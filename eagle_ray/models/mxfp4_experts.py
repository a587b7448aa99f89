"""Restore experts stored in MXFP4, as gpt-oss publishes them, to bf16 while they are read.

    stacks_in(names)                   # {'model.layers.0.mlp.experts.down_proj', ...}
    restored(blocks, scales)           # [E, I, O] in bf16, which has each of these numbers exactly

A stack of experts is two tensors. `_blocks` has a byte for two numbers, the lower half first, and
32 numbers of one output per block. `_scales` has each block's exponent to base 2, plus 127.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from jaxtyping import BFloat16, UInt8
from torch import Tensor

BLOCKS = "_blocks"
SCALES = "_scales"
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # of the codes 0 to 7; 8 to 15 are negative
EXPONENT_BIAS = 127


def stacks_in(names: Iterable[str]) -> frozenset[str]:
    """Return the expert stacks stored in MXFP4, from the names of a checkpoint's tensors."""
    return frozenset(
        name.removesuffix(BLOCKS) for name in names if name.endswith(BLOCKS) and ".experts." in name
    )


def restored(
    blocks: UInt8[Tensor, "E O G half"], scales: UInt8[Tensor, "E O G"]
) -> BFloat16[Tensor, "E I O"]:
    """Return a stack in bf16, with the inputs' dimension before the outputs'."""
    values = torch.tensor([*MAGNITUDES, *(-each for each in MAGNITUDES)])
    num_experts, num_outputs, num_blocks, half = blocks.shape
    stack = torch.empty(
        num_experts, num_blocks * half * 2, num_outputs, dtype=torch.bfloat16, device=blocks.device
    )
    # One expert at a time bounds the memory of what is computed in fp32.
    for expert in range(num_experts):
        codes = torch.stack([blocks[expert] & 15, blocks[expert] >> 4], -1).flatten(2)
        exponents = scales[expert].int() - EXPONENT_BIAS
        numbers = torch.ldexp(values[codes.int()], exponents[..., None])
        stack[expert] = numbers.flatten(1).T
    return stack
