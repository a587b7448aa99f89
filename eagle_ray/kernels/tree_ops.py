"""Run on a CPU in one call each what a step does with trees before and after the target's pass.

    if tree_ops.available(device):
        tensors = tree_ops.select_nodes(tree.tensors, keep, 8)        # tree/draft_tree.py
        seen = tree_ops.ancestors(parents)
        nodes, num_accepted, tokens = tree_ops.walk_paths(...)
        tree_ops.move_rows(numbers, ...)                              # kv/kv_cache.py
        tree_ops.queue_path(queue, ...)                               # methods/pair_drafter.py
        counts = tree_ops.count_nodes(...)                            # engine/step.py

The functions of the same names in tree_ops.cpp do what torch does at these places, which tests hold equal.
"""

from __future__ import annotations

import ctypes
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
    _fields_ = [(name, c_int64) for name in ("batch", "num_nodes")] + [
        (name, c_void_p) for name in ("tokens", "parents", "depths", "log_values", "draft_log_probs", "valid")
    ]


def select_nodes(
    tensors: tuple[Tensor, ...], keep: Bool[Tensor, "B N"], num_nodes: int
) -> tuple[Int[Tensor, "B M"], ...]:
    """Return the tensors of the kept nodes' trees, in the order of DraftTree's."""
    selected = [x.new_empty(len(x), num_nodes) for x in tensors]
    inputs = [x.contiguous() for x in (*tensors, keep)]
    trees = [_Trees(*x[0].shape, *(part.data_ptr() for part in x)) for x in (selected, inputs[:-1])]
    cpu_ops.function_for("select_nodes")(*map(ctypes.addressof, trees), inputs[-1].data_ptr())
    return tuple(selected)


def ancestors(parents: Int[Tensor, "B N"]) -> Bool[Tensor, "B N N"]:
    """Return a mask [b, i, j]: node j is node i or an ancestor of it. Parents come before their children."""
    parents = parents.contiguous()
    seen = torch.empty(*parents.shape, parents.shape[1], dtype=torch.bool)
    cpu_ops.function_for("ancestors")(seen.data_ptr(), parents.data_ptr(), *parents.shape)
    return seen


def walk_paths(
    tokens: Int[Tensor, "B N"],
    parents: Int[Tensor, "B N"],
    depths: Int[Tensor, "B N"],
    valid: Bool[Tensor, "B N"],
    row_of: Int[Tensor, "B N"],
    picks: Int[Tensor, " R"],
    length: int,
) -> tuple[Int[Tensor, "B D1"], Int[Tensor, " B"], Int[Tensor, "B D1"]]:
    """Return the nodes of the accepted paths, their numbers and the sampled tokens, as in VerifyResult."""
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
    """Move the rows of each path's nodes to where they belong, in every layer. numbers: [layers, indices, ...]."""
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
        queue: tokens and features, `window` of each slot.
        path: as `walk_paths` returns it.
    """
    tokens, queued = queue
    assert queued.dtype is features.dtype
    inputs = [x.contiguous() for x in (slots, lengths, *path, row_of, features)]
    pointers = (x.data_ptr() for x in inputs)
    sizes = *row_of.shape, path[0].shape[1]
    cpu_ops.function_for("queue_path")(
        tokens.data_ptr(), queued.data_ptr(), window, queued[0].nbytes, *pointers, *sizes
    )


def count_nodes(
    parents: Int[Tensor, "B N"],
    depths: Int[Tensor, "B N"],
    log_values: Float[Tensor, "B N"],
    draft_log_probs: Float[Tensor, "B N"],
    valid: Bool[Tensor, "B N"],
    path: Int[Tensor, "B D1"],
    num_bins: int,
    unit: float,
) -> Int[Tensor, "B X"]:
    """Return the columns of a step's record that count nodes. unit: of the summed confidences."""
    batch, num_nodes = parents.shape
    length = path.shape[1]
    record = torch.empty(batch, length - 1 + 6 * num_bins, dtype=torch.int64)
    inputs = [x.contiguous() for x in (parents, depths, log_values, draft_log_probs, valid, path)]
    pointers = (x.data_ptr() for x in inputs)
    sizes = batch, num_nodes, length, num_bins, unit
    cpu_ops.function_for("count_nodes")(record.data_ptr(), record.shape[1], *pointers, *sizes)
    return record
