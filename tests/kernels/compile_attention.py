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

from eagle_ray.kernels.flash_decoding import COMBINE_WARPS, TOGETHER, attend, combine, padded
from eagle_ray.kernels.tree_metadata import MAX_SPLITS, MIN_TILES, tile_shape
from tests.support.kernel_compiler import Resources, compiled

NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
INDICES = "lengths first words depths position_depths slots table seq starts counts tile_trees tile_begins"
SIZES = """window num_parts per_tree num_trees num_nodes num_rows num_words num_positions max_positions table_width
    depth_pitch position_pitch query_head query_row"""
ALIGNED = {"query", "keys", "values", "out", "parts", "tops", "query_head", "query_row"}
HEADS, KV_HEADS = 32, 8
STORED = {"": {}, "fp8": {"keys": "*fp8e4nv", "values": "*fp8e4nv"}}  # a cache's types if they are not the query's
ASKED = {"first": "*i64", "window": "i32", "softcap": "fp32", "sinks": "*bf16"}
QUICK = [(8, 128, 128, torch.bfloat16, ()), (64, 128, 128, torch.bfloat16, ())]
ALL = [
    *[(rows, dim, dim, torch.bfloat16, ()) for rows in (8, 32, 64, 200) for dim in (64, 96, 128, 256)],
    *[(rows, 128, 128, torch.bfloat16, tuple(ASKED)) for rows in (8, 32, 64, 200)],
    *[(rows, 256, 256, torch.bfloat16, ("window", "softcap")) for rows in (8, 200)],
    *[(rows, 128, 128, torch.bfloat16, ("first",)) for rows in (8, 200)],
    *[(rows, 192, 128, torch.float16, ()) for rows in (8, 200)],
    *[(8, dim, dim, torch.float32, asked) for dim in (64, 128, 256) for asked in ((), ("window", "softcap"))],
]


def types(dtype: torch.dtype) -> dict[str, str]:
    data = {name: f"*{NAMES[dtype]}" for name in ("query", "keys", "values", "out")}
    parts = {"parts": "*fp32", "tops": "*fp32", "scaling": "fp32", **ASKED}
    return dict.fromkeys(INDICES.split(), "*i64") | dict.fromkeys(SIZES.split(), "i32") | data | parts


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
    constants |= dict(HEADS=HEADS, KV_HEADS=KV_HEADS, DK=key_dim, DV=value_dim, BLOCK_SIZE=32, WIDE=False)
    constants |= dict(PAD_DK=padded(key_dim), PAD_DV=padded(value_dim), MIN_TILES=MIN_TILES)
    constants |= dict(BLOCK_M=shape.rows, BLOCK_N=shape.keys)
    options = dict(num_warps=shape.warps, num_stages=shape.stages)
    return compiled(attend, types(dtype) | STORED[stored], constants, capability, ALIGNED, **options)


def combination(dtype: torch.dtype, capability: int) -> Resources:
    constants: dict[str, Any] = dict(first=None, window=None, HEADS=HEADS, DV=128, PAD_DV=128, BLOCK_N=64)
    constants |= dict(MIN_TILES=MIN_TILES, MAX_PARTS=MAX_SPLITS, TOGETHER=TOGETHER)
    aligned = {"out", "parts", "tops"}
    return compiled(combine, types(dtype), constants, capability, aligned, num_warps=COMBINE_WARPS)


def found(everything: bool) -> Iterator[dict[str, Any]]:
    for capability in (80, 90):
        for rows, *dims, dtype, asked in ALL if everything else QUICK:
            resources = attention(rows, *dims, dtype, asked, capability)
            kernel = f"attend {rows} rows, {dims[0]}/{dims[1]} {NAMES[dtype]} {' '.join(asked)}".strip()
            yield {"kernel": kernel, "capability": capability, **asdict(resources)}
        if capability == 90:
            for rows in (8, 32, 64, 200) if everything else (8,):
                resources = attention(rows, 128, 128, torch.bfloat16, (), capability, "fp8")
                yield {"kernel": f"attend {rows} rows, fp8", "capability": capability, **asdict(resources)}
        yield {"kernel": "combine", "capability": capability, **asdict(combination(torch.bfloat16, capability))}


if __name__ == "__main__":
    for each in found("all" in sys.argv):
        print(json.dumps(each), flush=True)
