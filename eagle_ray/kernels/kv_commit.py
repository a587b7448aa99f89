"""Move the keys and values of accepted paths to their final positions, for all layers, in one launch.

Node i of a tree is at position length + i, and the j-th node of the accepted path belongs at length + j. Nodes rise
along a path, so the j-th one is never left of its target: moved in path order, no position is written before it was
read. A program moves one slice of a position's numbers along the whole path, and each of its threads reads and
writes the same numbers of every position, so programs do not depend on each other's writes.
"""

from __future__ import annotations

import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor

from eagle_ray.kernels.launch import launch

SLICE = 1024  # numbers of a cell that one program moves


def commit(
    keys: Float[Tensor, "layers blocks size kv_heads dk"],
    values: Float[Tensor, "layers blocks size kv_heads dv"],
    table: Int[Tensor, "S W"],
    slots: Int[Tensor, " B"],
    lengths: Int[Tensor, " B"],
    nodes: Int[Tensor, "B D1"],
) -> None:
    """Move the accepted nodes. keys, values: contiguous. nodes: as VerifyResult.accepted_nodes."""
    num_layers, _, size = keys.shape[:3]
    widths = [part[0, 0, 0].numel() for part in (keys, values)]
    slices = triton.cdiv(max(widths), SLICE)
    nodes = nodes.contiguous()
    launch(move, (len(slots), num_layers, slices))(
        keys, values, keys.stride(0), values.stride(0), *widths, table, table.stride(0), slots, lengths, nodes,
        nodes.shape[1], SIZE=size, SLICE=SLICE,
    )  # fmt: skip


@triton.jit(do_not_specialize=["path_length"])
def move(
    keys,
    values,
    key_layer,  # from one layer to the next
    value_layer,
    key_width,  # numbers of a cell
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
    row, layer = tl.program_id(0), tl.program_id(1).to(tl.int64)
    numbers = tl.program_id(2) * SLICE + tl.arange(0, SLICE)
    blocks, length = table + tl.load(slots + row) * table_stride, tl.load(lengths + row)
    keys += layer * key_layer + numbers
    values += layer * value_layer + numbers
    place = 1  # the root stands where it belongs
    while place < path_length:
        node = tl.load(nodes + row * path_length + place)
        if node > place:
            source, target = _cell(blocks, length + node, SIZE), _cell(blocks, length + place, SIZE)
            key = tl.load(keys + source * key_width, mask=numbers < key_width)
            tl.store(keys + target * key_width, key, mask=numbers < key_width)
            value = tl.load(values + source * value_width, mask=numbers < value_width)
            tl.store(values + target * value_width, value, mask=numbers < value_width)
        place += 1


@triton.jit
def _cell(blocks, column, SIZE: tl.constexpr):
    return tl.load(blocks + column // SIZE) * SIZE + column % SIZE
