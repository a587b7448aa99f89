"""Choose the dtype that `model.dtype: auto` stands for, and say why.

    dtype, reason = auto_dtype(config, path, "cpu")      # (torch.bfloat16, "the checkpoint's own; this CPU has ...")

On a GPU it is the checkpoint's own. On a CPU it is fp32, unless the checkpoint is plain bf16 already, the processor
multiplies bf16 matrices (AMX or AVX512-BF16) and reading the weights dominates a step.
"""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import PretrainedConfig

LEAST_BF16_BYTES = 192 << 20  # of bf16 weights; fewer may stay in a cache, where fp32 is as fast. 1.5x at 257 MiB


def auto_dtype(config: PretrainedConfig, path: Path, device: str) -> tuple[torch.dtype, str]:
    """Return the dtype and the reason in a few words.

    Args:
        config: of the causal LM.
        path: its directory; the sizes of its weight files are looked at.
        device: cpu or cuda.
    """
    own = checkpoint_dtype(config)
    if device != "cpu":
        return own, "the checkpoint's own"
    if own is not torch.bfloat16 or getattr(config, "quantization_config", None) is not None:
        return torch.float32, "the checkpoint is not plain bf16"
    unit = bf16_unit()
    if unit is None:
        return torch.float32, "this CPU has neither AMX nor AVX512-BF16"
    size = sum(file.stat().st_size for pattern in ("*.safetensors", "*.bin") for file in path.glob(pattern))
    if size < LEAST_BF16_BYTES:
        return torch.float32, f"{size >> 20} MiB of weights are too few for bf16 to be faster"
    return torch.bfloat16, f"the checkpoint's own, and this CPU has {unit}"


def checkpoint_dtype(config: PretrainedConfig) -> torch.dtype:
    """Return the dtype that the checkpoint says it is in; fp32 if it does not say."""
    own = getattr(config, "dtype", None)
    return own if isinstance(own, torch.dtype) else torch.float32


def bf16_unit() -> str | None:
    """Return what this CPU multiplies bf16 matrices with, or None."""
    for name, check in (("AMX", "_is_amx_tile_supported"), ("AVX512-BF16", "_is_avx512_bf16_supported")):
        if getattr(torch.cpu, check, lambda: False)():
            return name
    return None
