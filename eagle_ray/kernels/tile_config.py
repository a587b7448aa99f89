"""TileShape: the work of one program of tree attention, and the number of parts into which contexts are split.

Chosen from what the host knows: the model's sizes and bounds on rows and lengths. tests/kernels/test_compiled.py
checks shared memory and registers of each shape, compiled ahead of time for sm_80 and sm_90.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
LARGEST_DIM = 256
LEAST_TILES = 2  # of a part: fewer cost more to put together than they save
MOST_SPLITS = 64
MANY_WAVES = 8  # with as many, a last one that is nearly empty hardly counts
ENOUGH = 0.9  # of the best share of busy places: more parts cost more to put together


@dataclass(frozen=True, slots=True)
class TileShape:
    """rows: nodes x heads of a program. columns: keys and values of one tile, which may lie in two ancestor words.

    per_core: programs that a multiprocessor runs at a time, or as many as keep its memory busy.
    """

    rows: int
    columns: int
    warps: int
    stages: int
    per_core: int


def why_not(dtype: torch.dtype, key_dim: int, value_dim: int) -> str | None:
    """Return why tree attention does not support such keys and values, or None."""
    if dtype not in DTYPES:
        return f"keys and values are {dtype}"
    if max(key_dim, value_dim) > LARGEST_DIM:
        return f"heads of {max(key_dim, value_dim)} numbers are larger than {LARGEST_DIM}"
    return None


def tile_shape(
    rows_per_tree: int, key_dim: int, value_dim: int, dtype: torch.dtype, capability: tuple[int, int]
) -> TileShape:
    """rows_per_tree: nodes x heads that a typical tree has of one key/value head.

    A block's number must arrive before the tile that it names: each tile under way takes two stages after the first.
    """
    large, hopper = max(key_dim, value_dim) > 128, capability[0] == 9
    if dtype is torch.float32:  # multiplied without tensor cores, so that nothing is rounded
        return TileShape(16, 16, warps=8, stages=1 if large else 2, per_core=2)
    if rows_per_tree <= 16:
        return TileShape(16, 32 if large else 64, warps=4, stages=3, per_core=3)
    if rows_per_tree <= 32 or large:
        return TileShape(32, 32 if large else 64, warps=8 if large else 4, stages=5, per_core=2)
    if not hopper:
        return TileShape(64, 64, warps=8, stages=3, per_core=2)
    if rows_per_tree <= 64:
        return TileShape(64, 64, warps=4, stages=3, per_core=2)  # four warps multiply 64 rows at once
    return TileShape(128, 64, warps=8, stages=3, per_core=1)


def num_splits(programs: int, columns: int, shape: TileShape, cores: int) -> int:
    """Return the parts per context: the fewest with which the GPU is about as busy as with any number.

    A GPU runs cores x per_core programs at a time. 512 programs on 396 of these places take two waves, the second of
    them mostly empty; in three parts each they take four waves, of which the last is nearly full.
    """
    places = cores * shape.per_core
    most = max(min(columns // (shape.columns * LEAST_TILES), MOST_SPLITS), 1)
    if programs >= MANY_WAVES * places:
        return 1
    busy = [busy_share(programs * splits, places) for splits in range(1, most + 1)]
    return next(i for i, share in enumerate(busy, 1) if share >= ENOUGH * max(busy))


def busy_share(programs: int, places: int) -> float:
    """Return the share of places that hold a program, over all waves."""
    return programs / (-(-programs // places) * places)
