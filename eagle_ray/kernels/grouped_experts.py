"""The mixture-of-experts part of a decoder layer on a GPU, in five launches after the router's product.

    chosen = route(logits, num_experts, top_k, is_normalized, dtype)   # experts and weights of each row
    groups = group_pairs(chosen.experts, num_experts)                  # pairs (row, choice), by expert
    inner = gated_products(rows, gate_up, groups, top_k)               # SiLU(gate) * up, in the order of the groups
    outputs = products(inner, down, groups)                            # in the order of the pairs
    out = weighted_sum(outputs, chosen.weights)

Pair p is choice p % top_k of row p // top_k. A tile of a product is BLOCK_M pairs of one expert. A
launch has the maximum number of tiles, and surplus ones return at once. So nothing is read on the
host, and one capture serves every routing. Choices are added in their order, and a product's sum
runs over its inputs in one order: a row's result depends on its own numbers alone, as long as
passes have tiles of one shape (`ProductTile.of`).

FP8 weights are converted to 16 bits in registers. A scale for all inputs is applied at the end, a
block's scale after the block's sum.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int32
from torch import Tensor

from eagle_ray.kernels.availability import is_interpreting, launch
from eagle_ray.kernels.fp8 import Fp8Stack, readable
from eagle_ray.kernels.jit_functions import fp8_from_bytes

PAIRS_PER_PROGRAM = 1024  # that a program of `_group_pairs` reads at a time
SUM_SLICE = 1024  # numbers of a row that one program adds
# Pairs of an expert, on average: from there on tiles are tall, and read weights less often.
MANY_PAIRS = 16


@dataclass(frozen=True, slots=True)
class Choices:
    """The experts of each row, the likeliest first, and their weights."""

    experts: Int32[Tensor, "R k"]
    weights: Float[Tensor, "R k"]


@dataclass(frozen=True, slots=True)
class Groups:
    """The (row, expert) pairs of a pass, sorted by expert, so that each expert multiplies its pairs together.

    Attributes:
        order: indices of the pairs. Those of expert e are order[ends[e - 1] : ends[e]], ascending.
        ends: end of each expert's pairs in `order`.
    """

    order: Int32[Tensor, " P"]
    ends: Int32[Tensor, " E"]


@dataclass(frozen=True, slots=True)
class ProductTile:
    """The shape of a tile, and how its program is compiled.

    Attributes:
        pairs: pairs of a tile.
        outputs: outputs of each pair in a tile.
        inputs: number of inputs that are read at a time.
    """

    pairs: int
    outputs: int
    inputs: int
    warps: int
    stages: int

    @classmethod
    def of(cls, num_pairs: int, num_experts: int, dtype: torch.dtype) -> ProductTile:
        """Return the tile shape for a number of pairs. fp32 has no tensor cores and gets small tiles."""
        if dtype == torch.float32:
            return cls(16, 32, 32, 4, 3)
        if num_pairs <= MANY_PAIRS * num_experts:
            return cls(16, 64, 64, 4, 4)
        return cls(64, 64, 64, 4, 3)

    def max_tiles(self, num_pairs: int, num_experts: int) -> int:
        """Return the maximum number of tiles, over all ways in which pairs can be spread over experts."""
        used = min(num_pairs, num_experts)
        return used + (num_pairs - used) // self.pairs


def route(
    logits: Float[Tensor, "R L"],
    num_experts: int,
    top_k: int,
    is_normalized: bool,
    dtype: torch.dtype,
) -> Choices:
    """Choose the experts of each row by the softmax over its first num_experts logits; ties go to the lower expert.

    Args:
        is_normalized: whether the weights of the chosen experts are divided by their sum.
        dtype: dtype of the weights.
    """
    experts = torch.empty(len(logits), top_k, dtype=torch.int32, device=logits.device)
    weights = torch.empty(len(logits), top_k, dtype=dtype, device=logits.device)
    launch(_route, (len(logits),))(
        logits,
        experts,
        weights,
        logits.stride(0),
        NUM_EXPERTS=num_experts,
        TOP_K=top_k,
        IS_NORMALIZED=is_normalized,
        BLOCK=triton.next_power_of_2(num_experts),
        BLOCK_K=triton.next_power_of_2(top_k),
        num_warps=1,
    )
    return Choices(experts, weights)


def group_pairs(experts: Int32[Tensor, "R k"], num_experts: int) -> Groups:
    """Sort pairs by expert, and the pairs of one expert in ascending order."""
    order = torch.empty(experts.numel(), dtype=torch.int32, device=experts.device)
    ends = torch.empty(num_experts, dtype=torch.int32, device=experts.device)
    launch(_group_pairs, (num_experts,))(
        experts, order, ends, experts.numel(), BLOCK=PAIRS_PER_PROGRAM
    )
    return Groups(order, ends)


def gated_products(
    rows: Float[Tensor, "R H"],
    gate_up: Float[Tensor, "E 2I H"] | Fp8Stack,
    groups: Groups,
    top_k: int,
) -> Float[Tensor, "P I"]:
    """Return SiLU(gate) * up of each pair, in the order of the groups."""
    out = rows.new_empty(len(groups.order), gate_up.shape[1] // 2)
    _launch_products(rows, gate_up, out, groups, top_k)
    return out


def products(
    inner: Float[Tensor, "P I"], down: Float[Tensor, "E H I"] | Fp8Stack, groups: Groups
) -> Float[Tensor, "P H"]:
    """Return each pair's output, in the order of the pairs.

    Args:
        inner: inputs of the pairs, in the order of the groups.
    """
    out = inner.new_empty(len(inner), down.shape[1])
    _launch_products(inner, down, out, groups, None)
    return out


def _launch_products(
    inputs: Float[Tensor, "rows I"],
    weight: Float[Tensor, "E W I"] | Fp8Stack,
    out: Float[Tensor, "P O"],
    groups: Groups,
    top_k: int | None,
) -> None:
    """Launch one grouped product of contiguous tensors.

    Args:
        top_k: experts of a row in a gated product, which reads the rows of the pairs; None for the
            other.
    """
    num_experts = len(weight)
    num_pairs, num_outputs = out.shape
    shape = ProductTile.of(num_pairs, num_experts, inputs.dtype)
    values, scales, block = weight, None, (1, 1)
    if isinstance(weight, Fp8Stack):
        values, scales, block = readable(weight.values), weight.scale, weight.block
        assert block[1] >= inputs.shape[1] or block[1] % shape.inputs == 0, "`stack_of` sees to it"
    grid = shape.max_tiles(num_pairs, num_experts), triton.cdiv(num_outputs, shape.outputs)
    launch(_grouped_product, grid)(
        inputs,
        values,
        scales,
        out,
        groups.order,
        groups.ends,
        TOP_K=top_k,
        NUM_EXPERTS=num_experts,
        EXPERTS=triton.next_power_of_2(num_experts),
        INPUTS=inputs.shape[1],
        OUTPUTS=num_outputs,
        SCALED_OUTPUTS=block[0],
        SCALED_INPUTS=block[1],
        BLOCK_M=shape.pairs,
        BLOCK_N=shape.outputs,
        BLOCK_K=shape.inputs,
        WIDE=is_interpreting(),
        num_warps=shape.warps,
        num_stages=shape.stages,
    )


def weighted_sum(
    outputs: Float[Tensor, "P H"],
    weights: Float[Tensor, "R k"],
    shared: Float[Tensor, "R H"] | None = None,
    gate: Float[Tensor, " R"] | None = None,
) -> Float[Tensor, "R H"]:
    """Return the sum of each row's pairs by their weights, and of sigmoid(gate) * shared if there is a shared expert.

    Args:
        gate: the shared expert's gate of each row, of any stride.
    """
    num_rows, top_k = weights.shape
    width = outputs.shape[1]
    out = outputs.new_empty(num_rows, width)
    launch(_weighted_sum, (num_rows, triton.cdiv(width, SUM_SLICE)))(
        outputs,
        weights,
        shared,
        gate,
        out,
        0 if gate is None else gate.stride(0),
        WIDTH=width,
        TOP_K=top_k,
        BLOCK=SUM_SLICE,
    )
    return out


@triton.jit
def _route(
    logits,
    experts,  # this and the following one: [rows, TOP_K]
    weights,
    logits_row,
    NUM_EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    IS_NORMALIZED: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Choose the experts of one row and compute their weights."""
    row = tl.program_id(0).to(tl.int64)

    # The softmax over the experts.
    place = tl.arange(0, BLOCK)
    real = place < NUM_EXPERTS
    numbers = tl.load(logits + row * logits_row + place, mask=real, other=float("-inf"))
    numbers = numbers.to(tl.float32)
    powers = tl.exp(numbers - tl.max(numbers, 0))
    total = tl.sum(powers, 0)

    # Choose the TOP_K likeliest, one after another.
    left = tl.where(real, powers / total, -1.0)
    slot = tl.arange(0, BLOCK_K)
    chosen = tl.zeros((BLOCK_K,), tl.int32)
    best = tl.zeros((BLOCK_K,), tl.float32)
    for j in range(TOP_K):
        expert = tl.minimum(tl.argmax(left, 0), NUM_EXPERTS - 1)  # NaN may give any index
        chosen = tl.where(slot == j, expert, chosen)
        best = tl.where(slot == j, tl.max(left, 0), best)
        left = tl.where(place == expert, -1.0, left)

    if IS_NORMALIZED:
        best = best / tl.sum(best, 0)
    best = tl.where(total == total, best, total)  # a row with a NaN has no weights
    tl.store(experts + row * TOP_K + slot, chosen, mask=slot < TOP_K)
    tl.store(weights + row * TOP_K + slot, best.to(weights.dtype.element_ty), mask=slot < TOP_K)


@triton.jit(do_not_specialize=["num_pairs"])
def _group_pairs(experts, order, ends, num_pairs, BLOCK: tl.constexpr):
    """Write the pairs of one expert after those of the experts before it."""
    expert = tl.program_id(0)

    # Count the pairs of the experts before this one, and its own.
    below = 0
    own = 0
    for begin in range(0, num_pairs, BLOCK):
        pairs = begin + tl.arange(0, BLOCK)
        ids = tl.load(experts + pairs, mask=pairs < num_pairs, other=2**30)
        below += tl.sum((ids < expert).to(tl.int32), 0)
        own += tl.sum((ids == expert).to(tl.int32), 0)
    tl.store(ends + expert, below + own)

    # Write its pairs in ascending order.
    for begin in range(0, num_pairs, BLOCK):
        pairs = begin + tl.arange(0, BLOCK)
        ids = tl.load(experts + pairs, mask=pairs < num_pairs, other=2**30)
        is_own = ids == expert
        counted = is_own.to(tl.int32)
        place = below + tl.cumsum(counted, 0) - 1
        tl.store(order + place, pairs, mask=is_own)
        below += tl.sum(counted, 0)


@triton.jit
def _grouped_product(
    inputs,
    weight,
    scales,  # [experts, blocks of outputs, blocks of inputs] of a weight in FP8, else None
    out,
    order,
    ends,
    TOP_K: tl.constexpr,  # choices of a row in a gated product, which gathers rows; else None
    NUM_EXPERTS: tl.constexpr,
    EXPERTS: tl.constexpr,
    INPUTS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    SCALED_OUTPUTS: tl.constexpr,
    SCALED_INPUTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Multiply one tile of an expert's pairs."""
    # Find the tile's expert, and the pairs [begin, stop) of the tile and those that follow it.
    tile = tl.program_id(0)
    index = tl.arange(0, EXPERTS)
    real = index < NUM_EXPERTS
    stops = tl.load(ends + index, mask=real, other=0)
    starts = tl.load(ends + index - 1, mask=real & (index > 0), other=0)
    tiles = tl.where(real, tl.cdiv(stops - starts, BLOCK_M), 0)
    if tile >= tl.sum(tiles, 0):
        return
    tiles_so_far = tl.cumsum(tiles, 0)
    expert = tl.sum((tiles_so_far <= tile).to(tl.int32), 0)
    is_own = index == expert
    tile_of_expert = tile - tiles_so_far + tiles
    begin = tl.sum(tl.where(is_own, starts + tile_of_expert * BLOCK_M, 0), 0)
    stop = tl.sum(tl.where(is_own, stops, 0), 0)

    # A gated product gathers the rows of its pairs; the other reads them in the groups' order.
    place = begin + tl.arange(0, BLOCK_M)
    there = place < stop
    pair = tl.load(order + place, mask=there, other=0)
    source = place if TOP_K is None else pair // TOP_K
    outputs = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_output = outputs < OUTPUTS
    steps = tl.arange(0, BLOCK_K)
    rows_at = inputs + source.to(tl.int64)[:, None] * INPUTS + steps[None, :]
    WIDTH: tl.constexpr = OUTPUTS if TOP_K is None else 2 * OUTPUTS
    weight += expert.to(tl.int64) * (WIDTH * INPUTS)
    weight_at = weight + outputs[:, None] * INPUTS + steps[None, :]

    HAS_BLOCKS: tl.constexpr = scales is not None and SCALED_INPUTS < INPUTS
    if scales is not None:
        SCALES_OF_ROW: tl.constexpr = (INPUTS + SCALED_INPUTS - 1) // SCALED_INPUTS
        SCALED_ROWS: tl.constexpr = (WIDTH + SCALED_OUTPUTS - 1) // SCALED_OUTPUTS
        scales += expert * (SCALED_ROWS * SCALES_OF_ROW)
        scale_at = scales + outputs // SCALED_OUTPUTS * SCALES_OF_ROW
        upper_scale_at = scales + (OUTPUTS + outputs) // SCALED_OUTPUTS * SCALES_OF_ROW

    # Sum over the inputs; `more` is the product with the upper half of a gated weight.
    IS_EVEN: tl.constexpr = INPUTS % BLOCK_K == 0
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    more = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for done in range(0, INPUTS, BLOCK_K):
        known = steps[None, :] < INPUTS - done
        rows = _loaded(rows_at + done, there[:, None], known, IS_EVEN, WIDE)
        part = _loaded(weight_at + done, is_output[:, None], known, IS_EVEN, WIDE)
        if HAS_BLOCKS:
            scale = tl.load(scale_at + done // SCALED_INPUTS, mask=is_output, other=0.0)
            total += _product(rows, part, None) * scale[None, :]
        else:
            total = _product(rows, part, total)
        if TOP_K is not None:
            upper_at = weight_at + OUTPUTS * INPUTS + done
            part = _loaded(upper_at, is_output[:, None], known, IS_EVEN, WIDE)
            if HAS_BLOCKS:
                scale = tl.load(upper_scale_at + done // SCALED_INPUTS, mask=is_output, other=0.0)
                more += _product(rows, part, None) * scale[None, :]
            else:
                more = _product(rows, part, more)
    if scales is not None and not HAS_BLOCKS:
        total *= tl.load(scale_at, mask=is_output, other=0.0)[None, :]
        if TOP_K is not None:
            more *= tl.load(upper_scale_at, mask=is_output, other=0.0)[None, :]

    dtype = out.dtype.element_ty
    target = pair
    if TOP_K is not None:  # rounded where torch rounds: after the product, after SiLU, at the end
        gate = total.to(dtype).to(tl.float32)
        silu = (gate / (1.0 + tl.exp(-gate))).to(dtype)
        total = silu.to(tl.float32) * more.to(dtype).to(tl.float32)
        target = place

    out_at = out + target.to(tl.int64)[:, None] * OUTPUTS + outputs[None, :]
    tl.store(out_at, total.to(dtype), mask=there[:, None] & is_output[None, :])


@triton.jit
def _product(rows, part, total):
    """Return rows @ part.T in fp32, added to total if there is one. Numbers in FP8 take the rows' dtype."""
    if part.dtype == tl.uint8:
        part = fp8_from_bytes(part)
    return tl.dot(rows, tl.trans(part.to(rows.dtype)), total, input_precision="ieee")


@triton.jit
def _loaded(numbers_at, there, known, IS_EVEN: tl.constexpr, WIDE: tl.constexpr):
    """Load numbers, zeros if masked; as fp32 if WIDE, since Triton's interpreter cannot multiply bf16."""
    mask = there if IS_EVEN else there & known
    numbers = tl.load(numbers_at, mask=mask, other=0.0)
    is_wide: tl.constexpr = WIDE and numbers.dtype != tl.uint8
    return numbers.to(tl.float32) if is_wide else numbers


@triton.jit
def _weighted_sum(
    outputs,  # [rows * TOP_K, WIDTH]
    weights,  # [rows, TOP_K]
    shared,  # this and the following one: None without a shared expert
    gate,
    out,
    gate_row,
    WIDTH: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Add a slice of one row's outputs, in the order of its choices."""
    row = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    real = place < WIDTH
    total = tl.zeros((BLOCK,), tl.float32)
    for j in range(TOP_K):
        pair = row * TOP_K + j
        output = tl.load(outputs + pair * WIDTH + place, mask=real, other=0.0)
        weight = tl.load(weights + pair)
        total += output.to(tl.float32) * weight.to(tl.float32)

    if shared is not None:
        logit = tl.load(gate + row * gate_row).to(tl.float32)
        share = 1.0 / (1.0 + tl.exp(-logit))
        output = tl.load(shared + row * WIDTH + place, mask=real, other=0.0)
        total += share * output.to(tl.float32)
    tl.store(out + row * WIDTH + place, total.to(out.dtype.element_ty), mask=real)
