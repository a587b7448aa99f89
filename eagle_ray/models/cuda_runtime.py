"""Process-wide settings of torch on a GPU, made once when the target is.

cuDNN's scaled-dot-product attention builds a plan for every prompt length, 23 to 37 ms each; flash and
memory-efficient attention build none. Reduced-precision reductions of bf16 and fp16 products would make a row's sum
depend on how the product was split, and so on the batch.
"""

from __future__ import annotations

import torch


def pin_cuda_numerics(device: torch.device) -> None:
    """Choose flash or memory-efficient attention, and fp32 sums in 16-bit products. A CPU has no such settings."""
    if device.type != "cuda":
        return
    torch.backends.cuda.enable_cudnn_sdp(False)
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
