"""KernelTrees: attention metadata of B trees for the Triton kernels, all of it on the device.

No shape depends on the sequences' lengths or on their numbers of rows, so a CUDA graph can hold it.

    rows     r0 r1 r2 | r3 | r4 r5 | .. ..     packed: the nodes of each tree follow those of the tree before it
    seq       0  0  0    1    2  2   -1 -1     padding rows belong to none
    programs  each takes BLOCK_M of one tree's nodes x query heads of one key/value head

TileShape is the work of one program, Reading is how a layer's programs share a pass. Both are used
to compute the memory of partial sums, for a launch and for a memory plan.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from eagle_ray.kernels.fp8 import FP8


@dataclass(frozen=True, slots=True)
class PackedRows:
    """Which of R packed rows belong to each tree. A tree's rows are adjacent and in the order of its nodes.

    Attributes:
        seq: index of each row's tree, -1 for padding.
        starts: index of each tree's first row.
        counts: number of each tree's rows.
    """

    seq: Int[Tensor, " R"]
    starts: Int[Tensor, " B"]
    counts: Int[Tensor, " B"]

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.seq, self.starts, self.counts

    @classmethod
    def of(cls, seq: Int[Tensor, " R"], batch: int, pitch: int | None = None) -> PackedRows:
        """Find the rows of `batch` trees.

        Args:
            pitch: distance between the first rows of trees; None if trees follow one another
                without gaps.
        """
        counts = seq.new_zeros(batch + 1)  # padding rows are counted first, and dropped
        counts = counts.scatter_add_(0, seq + 1, torch.ones_like(seq))[1:]
        if pitch is None:
            return cls(seq, counts.cumsum(0) - counts, counts)
        return cls(seq, torch.arange(batch, device=seq.device) * pitch, counts)


@dataclass(frozen=True, slots=True)
class KernelTrees:
    """Trees of up to N rows each, over M tree positions after the cached tokens of each of B slots.

    Attributes:
        lengths: cached tokens of each slot.
        table: block number of every BLOCK_SIZE positions of a slot.
        words: ancestor masks: bit j % 64 of word j // 64 is set if a row sees tree position j.
        depths, position_depths: depths of rows and of tree positions, used only for sliding
            windows.
        rows: packing of the rows; None is the rectangle B x N without padding.
        first: first visible position of each slot.
        max_positions: maximum positions of a slot.
        work_lists: work lists that layers of this pass have made; see kernels/work_list.py.
    """

    slots: Int[Tensor, " B"]
    lengths: Int[Tensor, " B"]
    table: Int[Tensor, "S W"]
    words: Int[Tensor, "B N words"]
    depths: Int[Tensor, "B N"]
    position_depths: Int[Tensor, "B M"]
    rows: PackedRows | None
    first: Int[Tensor, " B"] | None
    max_positions: int
    work_lists: dict[Any, Any] = field(default_factory=dict, repr=False, compare=False)

    @property
    def num_trees(self) -> int:
        return self.words.shape[0]

    @property
    def num_nodes(self) -> int:
        """Return N, the nodes of a tree, padding included."""
        return self.words.shape[1]

    @property
    def num_positions(self) -> int:
        """Return M, the tree positions of a slot."""
        return self.position_depths.shape[1]


# Positions of the shortest part: 128 KB of an 8B's keys and values, whose fp32 sums have 2 KB a row.
PART_POSITIONS = 256
# Bytes of the sums of cut contexts in a launch; contexts past that are read whole.
MAX_SUMS_BYTES = 1 << 27
H100 = (9, 0), 132  # compute capability and multiprocessors
INTERPRETED = (9, 0), 8  # few programs in all, and contexts in parts nevertheless
TREE_DTYPES = (torch.bfloat16, torch.float16, torch.float32, FP8)
LARGEST_TREE_DIM = 256


@dataclass(frozen=True, slots=True)
class TileShape:
    """The work of one program of tree attention, chosen from sizes that the host knows.

    These are the model's sizes and bounds on rows and lengths. tests/kernels/test_compiled.py
    checks shared memory and registers of each shape, compiled ahead of time for sm_80 and sm_90.

    Attributes:
        rows: nodes x heads per program.
        keys: number of keys (with values) per tile; they may lie in two ancestor words.
        per_core: programs that a multiprocessor runs at a time, or that suffice to keep its memory
            busy.
        parts: maximum parts of a context, over all programs for a tree's rows. One program adds up
            the parts of its rows: 64 parts of 16 rows x 128 fp32 numbers are 0.5 MB, and so are 16
            parts of 64 rows.
        fold: number of parts that are added at a time.
    """

    rows: int
    keys: int
    warps: int
    stages: int
    per_core: int
    parts: int
    fold: int


def unsupported_heads(dtype: torch.dtype, key_dim: int, value_dim: int) -> str | None:
    """Return why tree attention does not support keys and values of these sizes, or None if it does."""
    if dtype not in TREE_DTYPES:
        return f"keys and values are {dtype}"
    if max(key_dim, value_dim) > LARGEST_TREE_DIM:
        return f"heads of {max(key_dim, value_dim)} numbers are larger than {LARGEST_TREE_DIM}"
    return None


def tile_shape(
    rows_per_tree: int,
    key_dim: int,
    value_dim: int,
    dtype: torch.dtype,
    capability: tuple[int, int],
) -> TileShape:
    """Choose the shape of a pass's programs.

    A block's number must arrive before the tile that it names: each tile under way takes two stages
    after the first.

    Args:
        rows_per_tree: nodes x query heads per key/value head in a typical tree.
    """
    is_large = max(key_dim, value_dim) > 128
    is_hopper = capability[0] == 9
    if dtype is torch.float32:  # multiplied without tensor cores, so that nothing is rounded
        stages = 1 if is_large else 2
        return TileShape(16, 16, warps=8, stages=stages, per_core=2, parts=64, fold=8)

    keys = 32 if is_large else 64
    if rows_per_tree <= 16:
        return TileShape(16, keys, warps=4, stages=3, per_core=3, parts=64, fold=8)
    if rows_per_tree <= 32 or is_large:
        warps = 8 if is_large else 4
        return TileShape(32, keys, warps=warps, stages=5, per_core=2, parts=32, fold=4)
    if not is_hopper:
        return TileShape(64, 64, warps=8, stages=3, per_core=2, parts=16, fold=4)
    if rows_per_tree <= 64:
        # Four warps multiply 64 rows at once.
        return TileShape(64, 64, warps=4, stages=3, per_core=2, parts=16, fold=4)
    return TileShape(128, 64, warps=8, stages=3, per_core=1, parts=16, fold=4)


TILE_ROWS = (16, 32, 64, 128)  # one for each tile


@dataclass(frozen=True, slots=True)
class Reading:
    """How the programs of a layer share a pass: all that a work list depends on besides the trees.

    Attributes:
        num_rows: number of rows of the pass, padding included.
        window: attention window of the layer.
        at_once: programs that the GPU runs at a time.
    """

    num_rows: int
    heads: int
    kv_heads: int
    value_dim: int
    window: int | None
    tile: TileShape
    at_once: int

    @property
    def group(self) -> int:
        return self.heads // self.kv_heads

    @property
    def part_tiles(self) -> int:
        """Return the number of tiles in the shortest part of a context."""
        return max(PART_POSITIONS // self.tile.keys, 1)

    @property
    def row_bytes(self) -> int:
        """Return the bytes of one row's partial attention results over one part: per head, fp32
        values, a maximum and a total."""
        return self.heads * (self.value_dim + 2) * torch.float32.itemsize

    def tail_parts(self, num_positions: int) -> int:
        """Return an upper bound on the parts that the tree positions add to a context's own."""
        return num_positions // (self.tile.keys * self.part_tiles) + 2

    def max_parts(self, num_positions: int, max_positions: int) -> int:
        """Return an upper bound on the number of parts of any context.

        Args:
            num_positions: positions of a tree.
            max_positions: positions of a slot.
        """
        size = self.tile.keys * self.part_tiles
        by_tile = self.tile.parts + 1 + self.tail_parts(num_positions)
        return min(by_tile, max_positions // size + 1)

    def sum_rows(self, num_parts: int, programs: int) -> tuple[int, int]:
        """Return the buffer rows for partial sums: those of contexts that one program reads whole,
        and those of all contexts."""
        own = -(-programs * self.tile.fold * self.tile.rows // self.heads)
        cut = min(self.num_rows * num_parts, MAX_SUMS_BYTES // self.row_bytes)
        return own, own + cut

    def max_sum_bytes(self, num_positions: int, max_positions: int) -> int:
        """Return the maximum bytes of partial sums that a launch allocates. Arguments as for `max_parts`."""
        num_parts = self.max_parts(num_positions, max_positions)
        _, rows = self.sum_rows(num_parts, self.at_once)
        return rows * self.row_bytes


def possible_readings(
    num_rows: int,
    heads: int,
    kv_heads: int,
    key_dim: int,
    value_dim: int,
    dtype: torch.dtype,
    device: torch.device,
) -> list[Reading]:
    """Return every Reading that layers without a window may have in a pass of num_rows, over all
    ways of spreading the rows."""
    capability, cores = multiprocessors(device)
    tiles = {tile_shape(rows, key_dim, value_dim, dtype, capability) for rows in TILE_ROWS}
    return [
        Reading(num_rows, heads, kv_heads, value_dim, None, tile, cores * tile.per_core)
        for tile in tiles
    ]


@cache
def multiprocessors(device: torch.device) -> tuple[tuple[int, int], int]:
    """Return the GPU's compute capability and number of multiprocessors; an H100's if no GPU is visible here."""
    if device.type != "cuda":
        return INTERPRETED
    if not torch.cuda.is_available():
        return H100
    properties = torch.cuda.get_device_properties(device)
    return (properties.major, properties.minor), properties.multi_processor_count
