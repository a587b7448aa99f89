"""Compiles tree attention for GPUs that need not be there; one line of JSON for each kernel.

TRITON_INTERPRET=0 python -m tests.kernels.compile_attention [all]
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import torch

from eagle_ray.kernels.flash_decoding import attend, fold_rows, padded
from eagle_ray.kernels.tree_metadata import Reading, tile_shape
from eagle_ray.kernels.work_list import SHARES, TREES_PER_PROGRAM, list_work
from tests.support.kernel_compiler import Resources, compiled

NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
INDICES = "lengths first words depths position_depths slots table seq starts row_counts"
COUNTS = "items counts arrivals"
SIZES = """window num_nodes num_rows num_words num_positions max_positions table_width depth_pitch position_pitch
    query_head query_row num_trees own room at_once"""
ALIGNED = {"query", "keys", "values", "out", "parts", "tops", "totals", "query_head", "query_row"}
HEADS, KV_HEADS = 32, 8
STORED = {
    "": {},
    "fp8": {"keys": "*fp8e4nv", "values": "*fp8e4nv"},
}  # a cache's types if they are not the query's
ASKED = {"first": "*i64", "window": "i32", "softcap": "fp32", "sinks": "*bf16"}
QUICK = {80: [(8, 128, 128, torch.bfloat16, ())], 90: [(64, 128, 128, torch.bfloat16, ())]}
ALL = [
    *[
        (rows, dim, dim, torch.bfloat16, ())
        for rows in (8, 32, 64, 200)
        for dim in (64, 96, 128, 256)
    ],
    *[(rows, 128, 128, torch.bfloat16, tuple(ASKED)) for rows in (8, 32, 64, 200)],
    *[(rows, 256, 256, torch.bfloat16, ("window", "softcap")) for rows in (8, 200)],
    *[(rows, 128, 128, torch.bfloat16, ("first",)) for rows in (8, 200)],
    *[(rows, 192, 128, torch.float16, ()) for rows in (8, 200)],
    *[
        (8, dim, dim, torch.float32, asked)
        for dim in (64, 128, 256)
        for asked in ((), ("window", "softcap"))
    ],
]


def types(dtype: torch.dtype) -> dict[str, str]:
    data = {name: f"*{NAMES[dtype]}" for name in ("query", "keys", "values", "out")}
    sums = {"parts": "*fp32", "tops": "*fp32", "totals": "*fp32", "scaling": "fp32", **ASKED}
    whole = dict.fromkeys(INDICES.split(), "*i64") | dict.fromkeys(COUNTS.split(), "*i32")
    return whole | dict.fromkeys(SIZES.split(), "i32") | data | sums


def attention(
    rows: int,
    key_dim: int,
    value_dim: int,
    dtype: torch.dtype,
    asked: tuple[str, ...],
    capability: int,
    stored: str = "",
) -> Resources:
    """The kernel that `tree_attention` would launch. asked: of ASKED, the others are None. stored: of STORED."""
    shape = tile_shape(rows, key_dim, value_dim, dtype, divmod(capability, 10))
    constants: dict[str, Any] = dict.fromkeys(ASKED.keys() - set(asked))
    reading = Reading(rows, HEADS, KV_HEADS, value_dim, None, shape, 1)
    constants |= dict(
        HEADS=HEADS, KV_HEADS=KV_HEADS, DK=key_dim, DV=value_dim, BLOCK_SIZE=32, WIDE=False
    )
    constants |= dict(
        PAD_DK=padded(key_dim), PAD_DV=padded(value_dim), BLOCK_M=shape.rows, BLOCK_N=shape.keys
    )
    constants |= dict(PART_TILES=reading.part_tiles, PARTS=shape.parts)
    constants |= dict(FOLD=shape.fold, FOLD_ROWS=fold_rows(shape, value_dim))
    options = dict(num_warps=shape.warps, num_stages=shape.stages)
    return compiled(
        attend, types(dtype) | STORED[stored], constants, capability, ALIGNED, **options
    )


def listing(capability: int) -> Resources:
    constants: dict[str, Any] = dict(
        GROUP=4, KV_HEADS=8, BLOCK_M=64, BLOCK_N=64, PART_TILES=4, PARTS=16
    )
    constants |= dict(SHARES=SHARES, TREES=TREES_PER_PROGRAM)
    given = types(torch.bfloat16) | {"totals": "*i32", "counts": "*i64"}
    return compiled(list_work, given, constants, capability, set())


def compiled_resources(everything: bool) -> Iterator[dict[str, Any]]:
    for capability in (80, 90):
        for rows, *dims, dtype, asked in ALL if everything else QUICK[capability]:
            resources = attention(rows, *dims, dtype, asked, capability)
            kernel = (
                f"attend {rows} rows, {dims[0]}/{dims[1]} {NAMES[dtype]} {' '.join(asked)}".strip()
            )
            yield {"kernel": kernel, "capability": capability, **asdict(resources)}
        if capability == 90:
            for rows in (8, 32, 64, 200) if everything else (8,):
                resources = attention(rows, 128, 128, torch.bfloat16, (), capability, "fp8")
                yield {
                    "kernel": f"attend {rows} rows, fp8",
                    "capability": capability,
                    **asdict(resources),
                }
        yield {"kernel": "list_work", "capability": capability, **asdict(listing(capability))}


if __name__ == "__main__":
    for each in compiled_resources("all" in sys.argv):
        print(json.dumps(each), flush=True)
