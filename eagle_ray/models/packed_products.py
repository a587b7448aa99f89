"""The matrix product of a packed linear layer: our own kernel, or oneDNN where ours is not built or slower.

    product = packed_product(weight, bias)      # of a frozen weight on a CPU
    outputs = product(rows)                     # [*rows, I] -> [*rows, O]
    product.dense()                             # the weight as it was given

TiledProduct sums each output in the order of the inputs (kernels/dense_matmul.cpp): a row has the
same bits whatever the other rows, the number of threads, AVX2 or AVX-512. A row of OneDnnProduct
does not depend on the other rows either, except for bf16 on a processor with AMX. It is used on
processors without fused multiply-add, and in bf16 on those with AVX512-BF16 and without AMX, where
oneDNN multiplies bf16 numbers directly.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from eagle_ray.kernels import cpu_ops
from eagle_ray.kernels.cpu_ops import TiledWeight

MIN_ONEDNN_ROWS = 4  # the oneDNN kernels for one to three rows sum in another order
TYPICAL_ROWS = 16  # the packing asks for a guess; its layout came out the same for 1 to 64
PACKED_DTYPES = (torch.float32, torch.bfloat16)


class TiledProduct:
    """A product by our own kernel."""

    needs_warm_up = False  # its code is there, for any number of rows

    def __init__(self, weight: Float[Tensor, "O I"], bias: Float[Tensor, " O"] | None):
        self.dtype = weight.dtype
        self._weight = TiledWeight.of(weight)
        self._bias = bias

    def __call__(self, inputs: Float[Tensor, "*rows I"]) -> Float[Tensor, "*rows O"]:
        rows = inputs.reshape(-1, inputs.shape[-1]).contiguous()
        outputs = cpu_ops.dense_matmul(rows, self._weight, self._bias)
        return outputs.view(*inputs.shape[:-1], -1)

    def dense(self) -> Float[Tensor, "O I"]:
        """Return the weight in its original layout."""
        return self._weight.dense()


class OneDnnProduct:
    """A product by oneDNN. One to three rows are padded, because its kernels for so few rows sum in another order."""

    needs_warm_up = True  # oneDNN compiles a kernel for each number of rows

    def __init__(self, weight: Float[Tensor, "O I"], bias: Float[Tensor, " O"] | None):
        self.dtype = weight.dtype
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight, TYPICAL_ROWS)
        self._bias = bias

    def __call__(self, inputs: Float[Tensor, "*rows I"]) -> Float[Tensor, "*rows O"]:
        num_inputs = inputs.shape[-1]
        num_rows = inputs.numel() // num_inputs
        if num_rows >= MIN_ONEDNN_ROWS:
            return self._multiply(inputs)
        rows = inputs.reshape(num_rows, num_inputs)
        padded = torch.cat([rows] * MIN_ONEDNN_ROWS)[:MIN_ONEDNN_ROWS]
        return self._multiply(padded)[:num_rows].view(*inputs.shape[:-1], -1)

    def _multiply(self, rows: Float[Tensor, "*rows I"]) -> Float[Tensor, "*rows O"]:
        return torch.ops.mkldnn._linear_pointwise(rows, self._weight, self._bias, "none", [], "")

    def dense(self) -> Float[Tensor, "O I"]:
        """Return the weight in its original layout."""
        return self._weight.to_dense()


def packed_product(
    weight: Float[Tensor, "O I"], bias: Float[Tensor, " O"] | None
) -> TiledProduct | OneDnnProduct:
    """Return the product with a weight on a CPU; the weight's dtype must be one of PACKED_DTYPES."""
    kind = TiledProduct if is_tiled(weight.dtype) else OneDnnProduct
    return kind(weight.detach(), None if bias is None else bias.detach())


def is_tiled(dtype: torch.dtype) -> bool:
    """Return whether weights of this dtype are multiplied by our own kernel on this CPU."""
    if dtype not in PACKED_DTYPES or not cpu_ops.available(torch.device("cpu"), dtype):
        return False
    is_faster = dtype is torch.float32 or bf16_unit() != "AVX512-BF16"
    return is_faster and cpu_ops.dense_path() > 0


def can_pack(device: str, dtype: torch.dtype) -> bool:
    """Return whether layers of this dtype can be packed on this CPU.

    For oneDNN this is tried out, because its operators have no public name, and bf16 needs a CPU
    with bf16 instructions.
    """
    if device != "cpu" or dtype not in PACKED_DTYPES:
        return False
    if is_tiled(dtype):
        return True
    if not torch.backends.mkldnn.is_available():
        return False
    try:
        OneDnnProduct(torch.zeros(16, 16, dtype=dtype), None)(torch.zeros(1, 16, dtype=dtype))
    except (AttributeError, RuntimeError):
        return False
    return True


def bf16_unit() -> str | None:
    """Return the name of this CPU's unit for bf16 matrix products, or None."""
    for name, check in (
        ("AMX", "_is_amx_tile_supported"),
        ("AVX512-BF16", "_is_avx512_bf16_supported"),
    ):
        if getattr(torch.cpu, check, lambda: False)():
            return name
    return None
