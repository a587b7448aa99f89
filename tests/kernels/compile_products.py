"""Compiles products of few rows for GPUs that need not be there; one line of JSON for each kernel.

TRITON_INTERPRET=0 python -m tests.kernels.compile_products [all]
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from eagle_ray.kernels import grouped_experts
from eagle_ray.kernels.fp8 import FP8, Fp8Stack, ScaledRows
from eagle_ray.kernels.skinny_product import ROW_TILES, skinny_product
from eagle_ray.kernels.stored_weight import StoredWeight, no_arrivals
from tests.support.kernel_compiler import resources

SHAPES = [(6144, 4096), (4096, 12288)]  # outputs and inputs of an 8B's q, k, v and of its down
CAPABILITIES = (80, 89, 90, 100)
QUICK = [("fp8 by output", 64, 90), ("fp8 in blocks", 16, 90), ("int4 of 128", 16, 80)]


def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def weight_of(form: str, num_out: int, num_in: int, capability: int) -> StoredWeight:
    if form == "bf16":
        return StoredWeight.dense(empty(num_out, num_in, dtype=torch.bfloat16))
    if form.startswith("int4"):
        group = int(form.split()[-1])
        words = empty(num_out // 8, num_in // 128, 32, 4, dtype=torch.int32)
        return StoredWeight.int4(words, empty(num_in // group, num_out, 2, dtype=torch.bfloat16))
    values = empty(num_out, num_in, dtype=FP8 if capability >= 89 else torch.uint8)
    if form == "fp8 in blocks":
        return StoredWeight.fp8(values, empty(num_out // 128, num_in // 128), (128, 128))
    return StoredWeight.fp8(values, empty(num_out, 1), (1, num_in))


FORMS = ("bf16", "fp8 by output", "fp8 in blocks", "int4 of 32", "int4 of 64", "int4 of 128")


def product(form: str, num_rows: int, capability: int, num_out: int, num_in: int) -> dict[str, Any]:
    weight = weight_of(form, num_out, num_in, capability)
    rows: Tensor | ScaledRows = empty(num_rows, num_in, dtype=torch.bfloat16)
    if form == "fp8 by output" and capability >= 89:
        scale = empty(num_rows, 1)
        rows = ScaledRows(empty(num_rows, num_in, dtype=FP8), scale, torch.bfloat16)
    arrivals = no_arrivals(weight)
    [found] = resources(lambda: skinny_product(rows, weight, None, arrivals), capability).values()
    return {"kernel": f"{form}, {num_rows} rows", "capability": capability, **asdict(found)}


def experts(num_pairs: int, capability: int) -> Iterator[dict[str, Any]]:
    """Compile both products of 128 experts of Qwen3-30B-A3B in FP8 by blocks."""
    dtype = FP8 if capability >= 89 else torch.uint8
    blocks = (128, 128)
    gate_up = Fp8Stack(empty(128, 1536, 2048, dtype=dtype), empty(128, 12, 16), blocks)
    down = Fp8Stack(empty(128, 2048, 768, dtype=dtype), empty(128, 16, 6), blocks)
    order, ends = (empty(size, dtype=torch.int32) for size in (num_pairs, 128))
    groups = grouped_experts.Groups(order, ends)
    rows = empty(num_pairs // 8, 2048, dtype=torch.bfloat16)
    inner = empty(num_pairs, 768, dtype=torch.bfloat16)
    calls = {
        "gate and up": lambda: grouped_experts.gated_products(rows, gate_up, groups, 8),
        "down": lambda: grouped_experts.products(inner, down, groups),
    }
    for name, call in calls.items():
        [found] = resources(call, capability).values()
        kernel = f"experts in fp8, {name}, {num_pairs} pairs"
        yield {"kernel": kernel, "capability": capability, **asdict(found)}


def compiled_resources(everything: bool) -> Iterator[dict[str, Any]]:
    asked = QUICK
    if everything:
        asked = [
            (form, num_rows, capability)
            for form in FORMS
            for num_rows in ROW_TILES
            for capability in CAPABILITIES
        ]
    for form, num_rows, capability in asked:
        for shape in SHAPES if everything else SHAPES[:1]:
            yield product(form, num_rows, capability, *shape)
    for capability in CAPABILITIES if everything else (90,):
        for num_pairs in (8, 32_768) if everything else (8,):
            yield from experts(num_pairs, capability)


if __name__ == "__main__":
    for each in compiled_resources("all" in sys.argv):
        print(json.dumps(each), flush=True)
