"""The roofline of plain decoding: the bytes that a step must read, over the bandwidth that a plain copy achieves."""

from __future__ import annotations

import torch

from jobs.bench.embedding_map import ModelShape
from jobs.bench.gpu.device import seconds_of

REPEATS = 20


def copy_bandwidth(device: torch.device, num_bytes: int) -> float:
    """Bytes a second of a copy on the device, read and written ones counted. num_bytes: of each of the two buffers."""
    source = torch.randn(num_bytes // 4, device=device)
    target = torch.empty_like(source)
    return 2 * num_bytes / seconds_of(lambda: target.copy_(source), device, REPEATS)


def step_bytes(shape: ModelShape, dtype: torch.dtype, batch: int, cached: float) -> float:
    """Read by a plain step: every weight once, and the keys and values of `cached` tokens of each sequence."""
    return dtype.itemsize * (shape.pass_weights + batch * cached * shape.kv_numbers)
