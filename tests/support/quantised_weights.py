"""Random quantised weights, and rows that are worth several threads to multiply."""

import torch

from eagle_ray.kernels.cpu_ops import PackedWeight
from eagle_ray.models.quantized_linear import QuantizedWeight, pack_weight

ROWS = torch.randn(64, 512, generator=torch.Generator().manual_seed(1))


def weight_of(outputs, inputs, group_size, bits, dtype=torch.float32, seed=0):
    random = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 1 << bits, (outputs, inputs), dtype=torch.uint8, generator=random)
    scale, offset = (
        torch.randn(outputs, inputs // group_size, generator=random).to(dtype) for _ in range(2)
    )
    return QuantizedWeight(codes, scale, offset, bits)


def large_weight() -> PackedWeight:
    return pack_weight(weight_of(1024, 512, 32, 4))
