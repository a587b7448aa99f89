"""Choose the kernel for few rows times a 4-bit or 8-bit weight on a GPU: our own, or torch's.

    if multiplies(len(rows), device):
        return product(rows, weight, bias, arrivals)

EAGLE_RAY_PRODUCTS=torch selects torch's kernels for any number of rows. Ours is chosen up to
SKINNY_ROWS by calculation, since it was not timed on a card:

    FP8, 4,096 outputs of 12,288 inputs       50 MB. torch's scaled_mm was measured at 53 us on an H100, as slow as
                                              bf16: its 32 tiles leave 100 of 132 multiprocessors
                                                  idle. Ours has 320
                                              programs; at the 2.4 TB/s of bf16's products it takes 21 us. Its parts
                                              are 1.3 MB at 16 rows, written and read in the L2 cache.
    4 bits, 51,200 outputs of 5,120 inputs    0.14 GB. torch restores them from 33 rows on, which moves 1.2 GB. Below,
                                              its kernel reads the rows for each 8 outputs: 2.1 GB of the L2 cache at
                                              32 rows, where ours reads them for each 64, 0.26 GB.

Above SKINNY_ROWS the products are bound by arithmetic more and more, in which torch's are better.
"""

from __future__ import annotations

import os

import torch
from jaxtyping import Float, Int32
from torch import Tensor

from eagle_ray.kernels.availability import use_triton
from eagle_ray.kernels.fp8 import ScaledRows
from eagle_ray.kernels.stored_weight import SKINNY_ROWS, StoredWeight

PRODUCTS = "EAGLE_RAY_PRODUCTS"
TORCHS = "torch"


def multiplies(num_rows: int, device: torch.device) -> bool:
    """Return whether our own kernel is chosen for this number of rows on a device."""
    is_ours = os.environ.get(PRODUCTS) != TORCHS
    return is_ours and num_rows <= SKINNY_ROWS and use_triton(device)


def product(
    rows: Float[Tensor, "R I"] | ScaledRows,
    weight: StoredWeight,
    bias: Float[Tensor, " O"] | None,
    arrivals: Int32[Tensor, " tiles"],
) -> Float[Tensor, "R O"]:
    """Return rows @ weight.T + bias by our own kernel. `multiplies` must have returned True."""
    from eagle_ray.kernels.skinny_product import skinny_product

    return skinny_product(rows, weight, bias, arrivals)
