"""A step's operations on trees before and after the target's pass, in one C++ call each on a CPU.

    if tree_ops.available(device):
        tensors = tree_ops.select_nodes(tree.tensors, keep, 8)        # tree/draft_tree.py
        seen = tree_ops.ancestors(parents)
        rows = tree_ops.pack_rows(tree.tensors, lengths, 8)
        layout = tree_ops.lay_out_rows(rows, tree.tensors, ...)       # attention/cpu_attention.py
        nodes, num_accepted, tokens = tree_ops.walk_paths(...)
        tree_ops.move_rows(numbers, ...)                              # kv/kv_cache.py
        tree_ops.queue_path(queue, ...)                               # methods/pair_drafter.py
        record = tree_ops.record_trees(...)                           # engine/step.py
        best = tree_ops.best_candidates(values, max_candidates)       # tree/budget.py

tree_ops.cpp has a function of each name. It computes what torch does in the named modules; tests
compare both.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import Structure, c_int64, c_void_p

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from eagle_ray.kernels import cpu_ops
from eagle_ray.kernels.availability import use_triton


def available(device: torch.device | str) -> bool:
    """Return whether these functions work for tensors of this device."""
    device = torch.device(device)
    return cpu_ops.available(device, torch.float32) and not use_triton(device)


class _Trees(Structure):
    _fields_ = [
        ("batch", c_int64),
        ("num_nodes", c_int64),
        ("tokens", c_void_p),
        ("parents", c_void_p),
        ("depths", c_void_p),
        ("log_values", c_void_p),
        ("draft_log_probs", c_void_p),
        ("valid", c_void_p),
    ]

    @classmethod
    def of(cls, tensors: Sequence[Tensor]) -> _Trees:
        """Return pointers to contiguous tensors, in the order of DraftTree's."""
        return cls(*tensors[0].shape, *(tensor.data_ptr() for tensor in tensors))


def select_nodes(
    tensors: tuple[Tensor, ...], keep: Bool[Tensor, "B N"], num_nodes: int
) -> tuple[Int[Tensor, "B M"], ...]:
    """Return the tensors of the trees reduced to the kept nodes, in the order of DraftTree's."""
    selected = [x.new_empty(len(x), num_nodes) for x in tensors]
    inputs = [x.contiguous() for x in tensors]
    keep = keep.contiguous()
    out = _Trees.of(selected)
    given = _Trees.of(inputs)
    cpu_ops.function_for("select_nodes")(
        ctypes.addressof(out), ctypes.addressof(given), keep.data_ptr()
    )
    return tuple(selected)


def ancestors(parents: Int[Tensor, "B N"]) -> Bool[Tensor, "B N N"]:
    """Return a mask [b, i, j] that is true if node j is node i or an ancestor of it. Parents must
    come before children."""
    parents = parents.contiguous()
    seen = torch.empty(*parents.shape, parents.shape[1], dtype=torch.bool)
    cpu_ops.function_for("ancestors")(seen.data_ptr(), parents.data_ptr(), *parents.shape)
    return seen


class _PackedRows(Structure):
    _fields_ = [("rows", c_int64)] + [
        (name, c_void_p) for name in ("tokens", "positions", "seq", "node", "row_of")
    ]


class _TreeLayout(Structure):
    _fields_ = [
        (name, c_void_p)
        for name in ("cells", "slots", "ends", "positions", "position_depths", "mask")
    ]


def pack_rows(
    tensors: tuple[Tensor, ...], lengths: Int[Tensor, " B"], num_rows: int
) -> tuple[
    Int[Tensor, " R"], Int[Tensor, " R"], Int[Tensor, " R"], Int[Tensor, " R"], Int[Tensor, "B N"]
]:
    """Return tokens, positions, seq, node and row_of of VerifyRows.

    Args:
        tensors: tensors of the trees, in the order of DraftTree's.
    """
    inputs = [x.contiguous() for x in tensors]
    tokens, positions, seq, node = torch.empty(4, num_rows, dtype=torch.int64).unbind()
    row_of = torch.empty_like(inputs[0])
    packed = tokens, positions, seq, node, row_of
    out = _PackedRows(num_rows, *(x.data_ptr() for x in packed))
    trees = _Trees.of(inputs)
    cpu_ops.function_for("pack_rows")(
        ctypes.addressof(out), ctypes.addressof(trees), lengths.contiguous().data_ptr()
    )
    return packed


def lay_out_rows(
    rows: tuple[Int[Tensor, "..."], ...],
    tensors: tuple[Tensor, ...],
    slots: Int[Tensor, " B"],
    lengths: Int[Tensor, " B"],
    block_table: Int[Tensor, "S W"],
    block_size: int,
    null_position: int,
) -> tuple[Tensor, ...]:
    """Return slot_mapping, slots, end, positions, position_depths and mask of CpuMetadata.

    Args:
        rows: result of `pack_rows`.
        tensors: tensors of the trees, in the order of DraftTree's.
    """
    num_rows = len(rows[0])
    num_nodes = tensors[0].shape[1]
    integers = torch.empty(4, num_rows, dtype=torch.int64)
    slot_mapping, row_slots, ends, positions = integers.unbind()
    position_depths = torch.empty(num_rows, num_nodes, dtype=torch.int64)
    mask = torch.empty(num_rows, num_nodes, dtype=torch.uint8)
    written = (slot_mapping, row_slots, ends, positions, position_depths, mask)
    out = _TreeLayout(*(x.data_ptr() for x in written))
    read = [x.contiguous() for x in (*rows, *tensors, slots, lengths)]
    packed = _PackedRows(num_rows, *(x.data_ptr() for x in read[: len(rows)]))
    trees = _Trees.of(read[len(rows) : -2])
    cpu_ops.function_for("lay_out_rows")(
        *(ctypes.addressof(structure) for structure in (out, packed, trees)),
        *(x.data_ptr() for x in read[-2:]),
        block_table.data_ptr(),
        block_table.shape[1],
        block_size,
        null_position,
    )
    return written


def walk_paths(
    tokens: Int[Tensor, "B N"],
    parents: Int[Tensor, "B N"],
    depths: Int[Tensor, "B N"],
    valid: Bool[Tensor, "B N"],
    row_of: Int[Tensor, "B N"],
    picks: Int[Tensor, " R"],
    length: int,
) -> tuple[Int[Tensor, "B D1"], Int[Tensor, " B"], Int[Tensor, "B D1"]]:
    """Return the nodes of the accepted paths, their lengths and the sampled tokens, as in VerifyResult."""
    batch, num_nodes = tokens.shape
    nodes, out = torch.empty(2, batch, length, dtype=torch.int64)
    num_accepted = torch.empty(batch, dtype=torch.int64)
    inputs = [x.contiguous() for x in (tokens, parents, depths, valid, row_of, picks)]
    pointers = (x.data_ptr() for x in (nodes, num_accepted, out, *inputs))
    cpu_ops.function_for("walk_paths")(*pointers, batch, num_nodes, length)
    return nodes, num_accepted, out


def move_rows(
    numbers: Tensor,
    block_table: Int[Tensor, "S W"],
    block_size: int,
    slots: Int[Tensor, " B"],
    lengths: Int[Tensor, " B"],
    nodes: Int[Tensor, "B D1"],
) -> None:
    """Move the cache rows of each accepted path to their final positions, in every layer.

    Args:
        numbers: keys or values, [layers, indices, ...].
    """
    row_bytes = numbers[0, 0].nbytes
    inputs = [x.contiguous() for x in (slots, lengths, nodes)]
    pointers = (x.data_ptr() for x in inputs)
    table = block_table.data_ptr(), block_table.shape[1], block_size
    sizes = len(numbers), numbers.shape[1] * row_bytes, row_bytes
    cpu_ops.function_for("move_rows")(numbers.data_ptr(), *sizes, *table, *pointers, *nodes.shape)


def queue_path(
    queue: tuple[Int[Tensor, " Q"], Float[Tensor, "Q F"]],
    window: int,
    slots: Int[Tensor, " B"],
    lengths: Int[Tensor, " B"],
    path: tuple[Int[Tensor, "B D1"], Int[Tensor, " B"], Int[Tensor, "B D1"]],
    row_of: Int[Tensor, "B N"],
    features: Float[Tensor, "R F"],
) -> None:
    """Store the tokens of the accepted paths in their slots' queues, each with the feature of the row before it.

    Args:
        queue: tokens and features of the pair queue, `window` per slot.
        path: result of `walk_paths`.
    """
    tokens, queued = queue
    assert queued.dtype is features.dtype
    inputs = [x.contiguous() for x in (slots, lengths, *path, row_of, features)]
    pointers = (x.data_ptr() for x in inputs)
    sizes = *row_of.shape, path[0].shape[1]
    cpu_ops.function_for("queue_path")(
        tokens.data_ptr(), queued.data_ptr(), window, queued[0].nbytes, *pointers, *sizes
    )


def record_trees(
    tensors: tuple[Tensor, ...],
    path: tuple[Int[Tensor, "B D1"], Int[Tensor, " B"], Int[Tensor, "B D1"]],
    num_bins: int,
    unit: float,
    token_step: int,
) -> Int[Tensor, "B X"]:
    """Return the record of a step with drafts, without log-probabilities.

    Args:
        tensors: tensors of the trees, in the order of DraftTree's.
        path: result of `walk_paths`.
        unit: unit of the summed confidences.
        token_step: factor between two tokens in the trees' checksums.
    """
    length = path[0].shape[1]
    inputs = [x.contiguous() for x in tensors]
    nodes, num_accepted, tokens = (x.contiguous() for x in path)
    record = torch.empty(len(nodes), 1 + 2 * length + 6 * num_bins, dtype=torch.int64)
    trees = _Trees.of(inputs)
    cpu_ops.function_for("record_trees")(
        record.data_ptr(),
        record.shape[1],
        ctypes.addressof(trees),
        *(x.data_ptr() for x in (num_accepted, tokens, nodes)),
        length,
        num_bins,
        unit,
        token_step,
    )
    return record


def best_candidates(
    values: Float[Tensor, "B W"], max_candidates: int
) -> tuple[Float[Tensor, " C"], Int[Tensor, " C"], Int[Tensor, " C"], Float[Tensor, " C1"]]:
    """Return log values, trees and nodes of the best candidates, and the expected accepted tokens
    of the first 0, 1, ... of them.

    Args:
        values: log values of each tree's nodes, without its root.
        max_candidates: maximum number of candidates of a tree.
    """
    values = values.contiguous()
    batch, width = values.shape
    count = batch * min(max_candidates, width)
    best = values.new_empty(count)
    owners, nodes = torch.empty(2, count, dtype=torch.int64)
    totals = values.new_empty(count + 1)
    pointers = (x.data_ptr() for x in (best, owners, nodes, totals, values))
    cpu_ops.function_for("best_candidates")(*pointers, batch, width, max_candidates)
    return best, owners, nodes, totals


def keep_candidates(
    log_values: Float[Tensor, " C"],
    owners: Int[Tensor, " C"],
    nodes: Int[Tensor, " C"],
    count: int,
    shape: torch.Size,
) -> tuple[Bool[Tensor, "B N"], list[int]]:
    """Return a mask of the kept nodes (roots and the first `count` candidates), and the number of
    kept nodes per tree."""
    keep = torch.empty(shape, dtype=torch.bool)
    sizes = (c_int64 * len(keep))()
    cpu_ops.function_for("keep_candidates")(
        keep.data_ptr(),
        ctypes.addressof(sizes),
        *(x.data_ptr() for x in (log_values, owners, nodes)),
        min(max(count, 0), len(log_values)),
        *shape,
    )
    return keep, list(sizes)
