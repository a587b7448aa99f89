"""Choose by measurement which kernel multiplies few rows by a packed weight.

    kernels = choose_kernels(linears)        # {1: Kernel.FILLED, 2: Kernel.FILLED, 3: Kernel.FILLED}

From MIN_PACKED_ROWS rows on, oneDNN over prepacked weights is the fastest kernel in torch, and it sums a row in one
order whatever the other rows are. Below that, three kernels compete in fp32, and the fastest differs by processor:

    FILLED    rows padded to MIN_PACKED_ROWS, the same bits as in a larger pass; used unless another is faster
    PACKED    the packed weight and just these rows
    PLAIN     F.linear; the weights are then kept a second time, unpacked

Measured over enough of the model's layers that the weights come from memory, as they do in a pass. In bf16 a kernel
with another order of summation moves logits so far that outputs change, so only FILLED is used.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from enum import Enum

import torch
import torch.nn.functional as F
from torch import Tensor, nn

log = logging.getLogger("eagle_ray")
MIN_PACKED_ROWS = 4  # the oneDNN kernels for one to three rows are slower than that for four, and round apart
SAMPLE_BYTES = 256 << 20  # of weights that a trial reads; more than any cache holds
MAX_PLAIN_BYTES = 4 << 30  # of weights that may be kept twice
MIN_SPEEDUP = 1.1  # times faster than FILLED that another kernel must be
TURNS = 5
TYPICAL_ROWS = 16  # the packing asks for a guess; its layout came out the same for 1 to 64


class Kernel(Enum):
    """How to multiply fewer than MIN_PACKED_ROWS rows."""

    FILLED = "packed weights, filled up to 4 rows"
    PACKED = "packed weights"
    PLAIN = "F.linear"


FILLED_ONLY = dict.fromkeys(range(1, MIN_PACKED_ROWS), Kernel.FILLED)


def packed_weight(weight: Tensor) -> Tensor:
    """Return the weight [O, I] in the layout of oneDNN's kernels."""
    return torch.ops.mkldnn._reorder_linear_weight(weight.detach(), TYPICAL_ROWS)


def multiply(rows: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    """Return rows @ weight.T + bias for a packed weight; rows is [*rows, I]."""
    return torch.ops.mkldnn._linear_pointwise(rows, packed, bias, "none", [], "")


def pad_rows(rows: Tensor) -> Tensor:
    """Return fewer than MIN_PACKED_ROWS rows [R, I], padded with copies."""
    return torch.cat([rows] * MIN_PACKED_ROWS)[:MIN_PACKED_ROWS]


def choose_kernels(linears: Sequence[nn.Linear]) -> dict[int, Kernel]:
    """Return the kernel for each number of rows below MIN_PACKED_ROWS. linears: the model's layers, at least a sample.

    FILLED if the layers are not in fp32, or if the sample would fit into a cache: such models are not bound by memory,
    so a measurement would say nothing.
    """
    if any(linear.weight.dtype != torch.float32 for linear in linears):
        return FILLED_ONLY
    sample, size = [], 0
    for linear in linears:
        if size < SAMPLE_BYTES:
            sample.append((linear, packed_weight(linear.weight)))
            size += linear.weight.nbytes
    if size < SAMPLE_BYTES:
        return FILLED_ONLY
    kernels = [Kernel.FILLED, Kernel.PACKED]
    if sum(linear.weight.nbytes for linear in linears) <= MAX_PLAIN_BYTES:
        kernels.append(Kernel.PLAIN)
    chosen = {num_rows: _fastest(sample, num_rows, kernels) for num_rows in range(1, MIN_PACKED_ROWS)}
    named = ", ".join(f"{num_rows}: {kernel.value}" for num_rows, kernel in chosen.items())
    log.info("linear layers of %s, kernel by number of rows: %s", sample[0][0].weight.dtype, named)
    return chosen


@torch.inference_mode()
def _fastest(sample: list[tuple[nn.Linear, Tensor]], num_rows: int, kernels: list[Kernel]) -> Kernel:
    """Return FILLED, or the kernel that is at least MIN_SPEEDUP faster, by the best of a few passes in turn."""
    seconds = dict.fromkeys(kernels, float("inf"))
    inputs = [torch.ones(num_rows, linear.in_features, dtype=linear.weight.dtype) for linear, _ in sample]
    for _ in range(TURNS):
        for kernel in kernels:
            started = time.perf_counter()
            for rows, (linear, packed) in zip(inputs, sample, strict=True):
                _run(kernel, rows, linear, packed)
            seconds[kernel] = min(seconds[kernel], time.perf_counter() - started)
    best = min(kernels, key=seconds.__getitem__)
    return best if seconds[best] * MIN_SPEEDUP < seconds[Kernel.FILLED] else Kernel.FILLED


def _run(kernel: Kernel, rows: Tensor, linear: nn.Linear, packed: Tensor) -> Tensor:
    if kernel is Kernel.PLAIN:
        return F.linear(rows, linear.weight)
    return multiply(pad_rows(rows) if kernel is Kernel.FILLED else rows, packed, None)
