"""The small operations of a decoder layer on a GPU, one launch each: what kernels/layer_ops.py computes with torch.

    normed = add_rms_norm(residual, delta, weight, eps)             # residual += delta, in place
    rotate_and_write(qkv, keys, values, slot_mapping, cosine, sine)  # heads normed and rotated, keys and values cached
    out = silu_mul(gate_up)
    rows = add_rms_norm_fp8(...), silu_mul_fp8(...), scaled_rows(out)     # ScaledRows, for a projection in FP8
    commit(keys, values, table, slots, lengths, nodes)              # accepted paths to their final positions

Every row is computed by itself, in fp32, so its numbers do not depend on the batch. Results are
rounded to the rows' dtype where torch rounds them: after the sum, after the norm of a head, and at
the end.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int, Int32
from torch import Tensor

from eagle_ray.kernels.availability import launch
from eagle_ray.kernels.fp8 import FP8, FP8_MAX, ScaledRows

LARGEST = tl.constexpr(FP8_MAX)
MLP_SLICE = 1024  # numbers of a row of the MLP that one program computes
CACHE_SLICE = 1024  # numbers of a position's keys or values that one program moves
INT4_SLICE = 512  # inputs of a tile of outputs that one program dequantises
NUMBERS_PER_WARP = 512


def add_rms_norm(
    residual: Float[Tensor, "R H"],
    delta: Float[Tensor, "R H"] | None,
    weight: Float[Tensor, " H"],
    eps: float,
) -> Float[Tensor, "R H"]:
    """Add delta to residual in place and return the RMSNorm of the sum. Rows are contiguous."""
    out = torch.empty_like(residual)
    _launch_add_rms_norm(residual, delta, weight, out, None, eps)
    return out


def add_rms_norm_fp8(
    residual: Float[Tensor, "R H"],
    delta: Float[Tensor, "R H"] | None,
    weight: Float[Tensor, " H"],
    eps: float,
) -> ScaledRows:
    """Compute add_rms_norm and return the norm in FP8. It is rounded to the rows' dtype first, as in torch."""
    out = _empty_rows(residual, residual.shape[1])
    _launch_add_rms_norm(residual, delta, weight, out.values, out.scale, eps)
    return out


def _launch_add_rms_norm(
    residual: Float[Tensor, "R H"],
    delta: Float[Tensor, "R H"] | None,
    weight: Float[Tensor, " H"],
    out: Float[Tensor, "R H"],
    scales: Float[Tensor, "R 1"] | None,
    eps: float,
) -> None:
    num_rows, width = residual.shape
    block = triton.next_power_of_2(width)
    delta_row = 0 if delta is None else delta.stride(0)
    num_warps = min(max(block // NUMBERS_PER_WARP, 1), 16)
    launch(_add_rms_norm, (num_rows,))(
        residual,
        delta,
        weight,
        out,
        scales,
        residual.stride(0),
        delta_row,
        out.stride(0),
        width,
        eps,
        BLOCK=block,
        num_warps=num_warps,
    )


def _empty_rows(like: Float[Tensor, "R W"], width: int) -> ScaledRows:
    values = torch.empty(len(like), width, dtype=FP8, device=like.device)
    scales = torch.empty(len(like), 1, dtype=torch.float32, device=like.device)
    return ScaledRows(values, scales, like.dtype)


def silu_mul(gate_up: Float[Tensor, "R 2I"]) -> Float[Tensor, "R I"]:
    """Return SiLU(gate) * up, where each row holds gate and then up."""
    num_rows = len(gate_up)
    width = gate_up.shape[1] // 2
    out = gate_up.new_empty(num_rows, width)
    launch(_silu_mul, (num_rows, triton.cdiv(width, MLP_SLICE)))(
        gate_up, out, gate_up.stride(0), width, BLOCK=MLP_SLICE
    )
    return out


def silu_mul_fp8(gate_up: Float[Tensor, "R 2I"]) -> ScaledRows:
    """Compute silu_mul and round the product to FP8. One program computes a whole row and its scale."""
    width = gate_up.shape[1] // 2
    out = _empty_rows(gate_up, width)
    block = triton.next_power_of_2(width)
    launch(_silu_mul_fp8, (len(gate_up),))(
        gate_up,
        out.values,
        out.scale,
        gate_up.stride(0),
        width,
        BLOCK=block,
        num_warps=_warps_of_row(block),
    )
    return out


def scaled_rows(rows: Float[Tensor, "R I"]) -> ScaledRows:
    """Return the rows in FP8; a row is contiguous."""
    width = rows.shape[1]
    out = _empty_rows(rows, width)
    block = triton.next_power_of_2(width)
    launch(_scaled_rows, (len(rows),))(
        rows,
        out.values,
        out.scale,
        rows.stride(0),
        width,
        BLOCK=block,
        num_warps=_warps_of_row(block),
    )
    return out


def _warps_of_row(block: int) -> int:
    return min(max(block // NUMBERS_PER_WARP, 1), 32)


def rotate_and_write(
    qkv: Float[Tensor, "R width"],
    keys: Float[Tensor, "indices kv_heads d"],
    values: Float[Tensor, "indices kv_heads d"],
    slot_mapping: Int[Tensor, " R"],
    cosine: Float[Tensor, "R half"],
    sine: Float[Tensor, "R half"],
    q_norm: Float[Tensor, " d"] | None = None,
    k_norm: Float[Tensor, " d"] | None = None,
    eps: float = 0.0,
) -> None:
    """Norm and rotate the query heads of each row in place; write its keys, normed and rotated, and values.

    Args:
        qkv: query heads, then key heads, then value heads.
        keys: cache of keys, in qkv's dtype or in FP8.
        values: cache of values, likewise.
        q_norm: weight of the queries' norm; None if heads are not normed.
        k_norm: weight of the keys' norm; None if q_norm is.
    """
    _, kv_heads, dim = keys.shape
    num_heads = qkv.shape[1] // dim
    launch(_rotate_and_write, (len(qkv), num_heads))(
        qkv,
        keys,
        values,
        slot_mapping,
        cosine,
        sine,
        q_norm,
        k_norm,
        eps,
        qkv.stride(0),
        HEADS=num_heads - 2 * kv_heads,
        KV_HEADS=kv_heads,
        HALF=dim // 2,
        BLOCK=triton.next_power_of_2(dim // 2),
        num_warps=1,
    )


def dequantize_int4(
    packed: Int32[Tensor, "tiles runs 32 words"], scales: Float[Tensor, "G O 2"]
) -> Float[Tensor, "O I"]:
    """Return the weight that models/gpu_linears.tile_packed packed, in the scales' dtype.

    Args:
        scales: scale and zero of each group of inputs of an output; the weight is (code - 8) *
            scale + zero.
    """
    num_tiles, num_runs, _, words = packed.shape
    num_outputs = 8 * num_tiles
    num_inputs = 32 * words * num_runs
    out = scales.new_empty(num_outputs, num_inputs)
    launch(_dequantize_int4, (num_tiles, triton.cdiv(num_inputs, INT4_SLICE)))(
        packed,
        scales,
        out,
        scales.stride(0),
        num_inputs,
        num_inputs // len(scales),
        WORDS=words,
        BLOCK=INT4_SLICE,
    )
    return out


@triton.jit
def _dequantize_int4(
    packed,  # [tiles, runs, 32, WORDS]
    scales,  # [groups, outputs, 2]
    out,  # [outputs, num_inputs]
    scale_row,
    num_inputs,
    group_size,
    WORDS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Dequantise BLOCK inputs of a tile's 8 outputs, from where models/gpu_linears.tile_packed puts their codes."""
    tile = tl.program_id(0).to(tl.int64)
    output = tl.arange(0, 8)[:, None]
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    real = place < num_inputs
    row = tile * 8 + output

    # A run is 32 * WORDS inputs: a word of each lane holds 8 codes of 32 of these inputs.
    run_inputs: tl.constexpr = 32 * WORDS
    run = tile * (num_inputs // run_inputs) + place // run_inputs
    lane = output * 4 + place % 8 // 2
    word_at = packed + (run * 32 + lane) * WORDS + place % run_inputs // 32
    word = tl.load(word_at, mask=real, other=0)
    shift = place % 32 // 8 * 4 + place % 2 * 16
    code = (word >> shift) & 15

    pair = scales + place // group_size * scale_row + row * 2
    scale = tl.load(pair, mask=real, other=0.0)
    zero = tl.load(pair + 1, mask=real, other=0.0)
    weight = (code - 8).to(tl.float32) * scale.to(tl.float32) + zero.to(tl.float32)
    tl.store(out + row * num_inputs + place, weight.to(out.dtype.element_ty), mask=real)


@triton.jit
def _add_rms_norm(
    residual,
    delta,
    weight,
    out,
    scales,  # None for rows in the residual's dtype
    residual_row,
    delta_row,
    out_row,
    width,
    eps,
    BLOCK: tl.constexpr,
):
    """Add delta to one row of the residual, and norm it."""
    row = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, BLOCK)
    real = place < width
    residual_at = residual + row * residual_row + place
    x = tl.load(residual_at, mask=real, other=0.0)
    if delta is not None:
        more = tl.load(delta + row * delta_row + place, mask=real, other=0.0)
        x = (x.to(tl.float32) + more.to(tl.float32)).to(residual.dtype.element_ty)
        tl.store(residual_at, x, mask=real)

    x = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x) / width + eps)
    factor = tl.load(weight + place, mask=real, other=0.0).to(tl.float32)
    normed = x * scale * factor

    out += row * out_row
    if scales is not None:
        rounded = normed.to(residual.dtype.element_ty).to(tl.float32)
        _store_scaled(rounded, out, scales + row, place, real)
    else:
        tl.store(out + place, normed.to(out.dtype.element_ty), mask=real)


@triton.jit
def _store_scaled(numbers, out, scale_at, place, real):
    """Store a row in FP8, and its scale. Masked numbers are zeros."""
    largest = tl.max(tl.abs(numbers))
    scale = tl.where(largest > 0, largest / LARGEST, 1.0)
    tl.store(scale_at, scale)
    tl.store(out + place, _to_fp8(numbers / scale), mask=real)


@triton.jit
def _to_fp8(numbers):
    """Round to FP8. Numbers outside its range become its largest ones."""
    return tl.minimum(tl.maximum(numbers, -LARGEST), LARGEST).to(tl.float8e4nv)


@triton.jit
def _scaled_rows(rows, out, scales, rows_row, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, BLOCK)
    real = place < width
    numbers = tl.load(rows + row * rows_row + place, mask=real, other=0.0).to(tl.float32)
    _store_scaled(numbers, out + row * width, scales + row, place, real)


@triton.jit
def _silu_mul_fp8(gate_up, out, scales, gate_row, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, BLOCK)
    real = place < width
    product = _gated(gate_up + row * gate_row, place, real, width).to(tl.float32)
    _store_scaled(product, out + row * width, scales + row, place, real)


@triton.jit
def _gated(gate_up, place, real, width):
    """Return SiLU(gate) * up of these numbers of a row, rounded as torch rounds them."""
    gate = tl.load(gate_up + place, mask=real, other=0.0).to(tl.float32)
    up = tl.load(gate_up + width + place, mask=real, other=0.0)
    silu = (gate / (1.0 + tl.exp(-gate))).to(up.dtype)
    return (silu.to(tl.float32) * up.to(tl.float32)).to(up.dtype)


@triton.jit
def _silu_mul(gate_up, out, gate_row, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    real = place < width
    product = _gated(gate_up + row * gate_row, place, real, width)
    tl.store(out + row * width + place, product, mask=real)


@triton.jit
def _rotate_and_write(
    qkv,  # [rows, query heads + key heads + value heads]
    keys,  # this and the following one: [indices, KV_HEADS, 2 * HALF]
    values,
    slot_mapping,
    cosine,  # this and the following one: [rows, HALF]
    sine,
    q_norm,
    k_norm,
    eps,
    qkv_row,
    HEADS: tl.constexpr,  # query heads
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Norm and rotate one head of a row, and write it: a query head in place, a key or value head to the cache."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    place = tl.arange(0, BLOCK)
    real = place < HALF
    source = qkv + row * qkv_row + head * (2 * HALF) + place
    lower = tl.load(source, mask=real, other=0.0)
    upper = tl.load(source + HALF, mask=real, other=0.0)

    if head < HEADS + KV_HEADS:
        a = lower.to(tl.float32)
        b = upper.to(tl.float32)
        if q_norm is not None:
            weight = q_norm if head < HEADS else k_norm
            scale = tl.rsqrt((tl.sum(a * a) + tl.sum(b * b)) / (2 * HALF) + eps)
            a *= scale * tl.load(weight + place, mask=real, other=0.0).to(tl.float32)
            b *= scale * tl.load(weight + HALF + place, mask=real, other=0.0).to(tl.float32)
            # Rounded as torch rounds the result of a norm.
            a = a.to(qkv.dtype.element_ty).to(tl.float32)
            b = b.to(qkv.dtype.element_ty).to(tl.float32)

        # Rotate pairs (i, i + HALF) by the row's angles.
        c = tl.load(cosine + row * HALF + place, mask=real, other=0.0)
        s = tl.load(sine + row * HALF + place, mask=real, other=0.0)
        lower = (a * c - b * s).to(qkv.dtype.element_ty)
        upper = (b * c + a * s).to(qkv.dtype.element_ty)

    if head < HEADS:
        tl.store(source, lower, mask=real)
        tl.store(source + HALF, upper, mask=real)
    else:
        is_value = head >= HEADS + KV_HEADS
        own = head - HEADS - KV_HEADS if is_value else head - HEADS
        index = tl.load(slot_mapping + row).to(tl.int64) * KV_HEADS + own
        cache = values if is_value else keys
        target = cache + index * (2 * HALF) + place
        tl.store(target, _as_stored(lower, keys.dtype.element_ty), mask=real)
        tl.store(target + HALF, _as_stored(upper, keys.dtype.element_ty), mask=real)


@triton.jit
def _as_stored(numbers, DTYPE: tl.constexpr):
    return _to_fp8(numbers.to(tl.float32)) if DTYPE.is_fp8e4nv() else numbers.to(DTYPE)


def commit(
    keys: Float[Tensor, "layers blocks size kv_heads dk"],
    values: Float[Tensor, "layers blocks size kv_heads dv"],
    table: Int[Tensor, "S W"],
    slots: Int[Tensor, " B"],
    lengths: Int[Tensor, " B"],
    nodes: Int[Tensor, "B D1"],
) -> None:
    """Move the keys and values of accepted paths to their final positions, for all layers, in one launch.

    Node i of a tree is at position length + i, and the j-th node of the accepted path belongs at
    length + j. Nodes rise along a path, so the j-th one is never left of its target: moved in path
    order, no position is written before it was read. A program moves one slice of a position's
    numbers along the whole path, and each of its threads reads and writes the same numbers of every
    position, so programs do not depend on each other's writes.

    Args:
        keys: cache of keys, contiguous.
        values: cache of values, contiguous.
        nodes: nodes of the accepted paths, as in VerifyResult.accepted_nodes.
    """
    num_layers, _, size = keys.shape[:3]
    key_width = keys[0, 0, 0].numel()
    value_width = values[0, 0, 0].numel()
    slices = triton.cdiv(max(key_width, value_width), CACHE_SLICE)
    nodes = nodes.contiguous()
    launch(move, (len(slots), num_layers, slices))(
        keys,
        values,
        keys.stride(0),
        values.stride(0),
        key_width,
        value_width,
        table,
        table.stride(0),
        slots,
        lengths,
        nodes,
        nodes.shape[1],
        SIZE=size,
        SLICE=CACHE_SLICE,
    )


@triton.jit(do_not_specialize=["path_length"])
def move(
    keys,
    values,
    key_layer,  # from one layer to the next
    value_layer,
    key_width,  # numbers of a position
    value_width,
    table,
    table_stride,
    slots,
    lengths,
    nodes,
    path_length,
    SIZE: tl.constexpr,
    SLICE: tl.constexpr,
):
    """Triton kernel: move one slice of the keys and values of one tree's accepted path, in one layer."""
    row = tl.program_id(0)
    layer = tl.program_id(1).to(tl.int64)
    numbers = tl.program_id(2) * SLICE + tl.arange(0, SLICE)
    blocks = table + tl.load(slots + row) * table_stride
    length = tl.load(lengths + row)
    keys += layer * key_layer + numbers
    values += layer * value_layer + numbers
    place = 1  # the root stands where it belongs
    while place < path_length:
        node = tl.load(nodes + row * path_length + place)
        if node > place:
            source = _cache_index(blocks, length + node, SIZE)
            target = _cache_index(blocks, length + place, SIZE)
            key = tl.load(keys + source * key_width, mask=numbers < key_width)
            tl.store(keys + target * key_width, key, mask=numbers < key_width)
            value = tl.load(values + source * value_width, mask=numbers < value_width)
            tl.store(values + target * value_width, value, mask=numbers < value_width)
        place += 1


@triton.jit
def _cache_index(blocks, position, SIZE: tl.constexpr):
    return tl.load(blocks + position // SIZE) * SIZE + position % SIZE
