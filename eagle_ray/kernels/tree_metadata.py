"""KernelTrees: what attention's kernels know of B trees and of where their rows lie. All of it stands on the device.

Nothing here depends on how long the sequences are or on how many rows each of them has: a CUDA graph can hold it.

    rows     r0 r1 r2 | r3 | r4 r5 | .. ..     packed: the nodes of each tree follow those of the tree before it
    seq       0  0  0    1    2  2   -1 -1     padding rows belong to none
    programs  each takes BLOCK_M of one tree's nodes x query heads of one key/value head
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from jaxtyping import Int
from torch import Tensor


@dataclass(frozen=True, slots=True)
class PackedRows:
    """Where the rows of each tree lie among R.

    seq: the tree of each row, -1 for padding. starts, counts: of each tree; its rows are neighbours, in their order.
    """

    seq: Int[Tensor, " R"]
    starts: Int[Tensor, " B"]
    counts: Int[Tensor, " B"]

    @property
    def columns(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.seq, self.starts, self.counts

    @classmethod
    def of(cls, seq: Int[Tensor, " R"], batch: int, pitch: int | None = None) -> PackedRows:
        """pitch: row b * pitch is the first of tree b; None where trees follow one another without gaps."""
        counts = seq.new_zeros(batch + 1).scatter_add_(0, seq + 1, torch.ones_like(seq))[1:]
        starts = counts.cumsum(0) - counts if pitch is None else torch.arange(batch, device=seq.device) * pitch
        return cls(seq, starts, counts)


@dataclass(frozen=True, slots=True)
class KernelTrees:
    """Trees of up to N rows each, over M tree columns after what each of B slots holds.

    lengths: tokens that slots hold. table: the block of each of a slot's columns, by BLOCK_SIZE of them.
    words: bit j % 64 of word j // 64 is set where a row sees tree column j. first: the first column that is seen.
    depths, column_depths: of rows and tree columns, read by windows alone.
    rows: None is the rectangle B x N without padding. most_columns: of a slot. longest: a bound on the lengths, known
    on the host, which decides into how many parts they are split.
    """

    slots: Int[Tensor, " B"]
    lengths: Int[Tensor, " B"]
    table: Int[Tensor, "S W"]
    words: Int[Tensor, "B N words"]
    depths: Int[Tensor, "B N"]
    column_depths: Int[Tensor, "B M"]
    rows: PackedRows | None
    first: Int[Tensor, " B"] | None
    most_columns: int
    longest: int
    _schedules: dict[tuple[int, int, int], TileSchedule] = field(default_factory=dict, repr=False, compare=False)

    def schedule(self, num_rows: int, group: int, size: int) -> TileSchedule:
        """Return the schedule of a layer's programs, computed once a pass; see TileSchedule.of."""
        key = num_rows, group, size
        if key not in self._schedules:
            self._schedules[key] = TileSchedule.of(self, *key)
        return self._schedules[key]

    @property
    def num_trees(self) -> int:
        return self.words.shape[0]

    @property
    def num_nodes(self) -> int:
        """N, padding included."""
        return self.words.shape[1]

    @property
    def num_columns(self) -> int:
        """M"""
        return self.column_depths.shape[1]


@dataclass(frozen=True, slots=True)
class TileSchedule:
    """The tree of each of T programs and which of its nodes x heads it begins with; tree B where there is no work.

    trees: None for a rectangle, whose every tree has per_tree programs.
    """

    count: int
    per_tree: int = 0
    trees: Int[Tensor, " T"] | None = None
    begins: Int[Tensor, " T"] | None = None

    @classmethod
    def of(cls, trees: KernelTrees, num_rows: int, group: int, size: int) -> TileSchedule:
        """group: query heads of one key/value head. size: nodes x heads of one program."""
        if trees.rows is None:
            per_tree = -(-trees.num_nodes * group // size)
            return cls(trees.num_trees * per_tree, per_tree)
        count = min(trees.num_trees + num_rows * group // size, -(-group // size) * num_rows)
        tiles = (trees.rows.counts * group + size - 1) // size
        ends = tiles.cumsum(0)
        program = torch.arange(count, device=ends.device)
        tree = torch.searchsorted(ends, program, right=True)
        begins = (ends - tiles).gather(0, tree.clamp(max=trees.num_trees - 1))
        return cls(count, 0, tree, (program - begins) * size)
