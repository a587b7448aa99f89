"""Causal attention of packed sequences in one launch per layer, by torch's variable-length flash attention.

    packed = PackedLengths.of([3, 2], [5, 2], "cuda")           # 3 rows over 5 positions, 2 rows over 2
    out = varlen_attention(query, keys, values, packed, attention)

It needs a CUDA device, and torch's releases differ in the arguments that they support. After one
refusal this process does not try again.
"""

from __future__ import annotations

import inspect
import logging
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from typing import Any, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor

from eagle_ray.attention.metadata import AttentionParams
from eagle_ray.core.device import to_device

log = logging.getLogger("eagle_ray")
VARLEN_DTYPES = (torch.bfloat16, torch.float16)
LARGEST_VARLEN_DIM = 256
# One split: a sequence's numbers do not depend on the batch.
OPTIONS = {
    "enable_gqa": True,
    "num_splits": 1,
}
failures: list[str] = []  # reasons for which torch has refused to run


@dataclass(frozen=True, slots=True)
class PackedLengths:
    """The boundaries of B sequences in packed rows and in packed positions.

    Attributes:
        row_ends: int32, cumulative numbers of rows, from 0 on.
        key_ends: int32, cumulative numbers of positions, from 0 on.
        max_rows: maximum rows of one sequence.
        max_keys: maximum positions of one sequence.
    """

    row_ends: Int[Tensor, " B1"]
    key_ends: Int[Tensor, " B1"]
    max_rows: int
    max_keys: int

    @classmethod
    def of(
        cls, num_rows: list[int], num_keys: list[int], device: torch.device | str
    ) -> PackedLengths:
        ends = [list(accumulate(counts, initial=0)) for counts in (num_rows, num_keys)]
        row_ends, key_ends = to_device(ends, device, torch.int32)
        return cls(row_ends, key_ends, max(num_rows), max(num_keys))


def supports_varlen(
    query: Float[Tensor, "R heads d"], value_dim: int, attention: AttentionParams
) -> bool:
    """Return whether this layer's rows can attend in one launch."""
    if failures or query.device.type != "cuda" or query.dtype not in VARLEN_DTYPES:
        return False
    if not query.shape[2] == value_dim <= LARGEST_VARLEN_DIM:
        return False
    if attention.softcap is not None or attention.sinks is not None:
        return False
    return launch_options(attention.window) is not None


def varlen_attention(
    query: Float[Tensor, "R heads d"],
    keys: Float[Tensor, "T kv_heads d"],
    values: Float[Tensor, "T kv_heads d"],
    packed: PackedLengths,
    attention: AttentionParams,
) -> Float[Tensor, "R heads d"] | None:
    """Return causal attention of each sequence's rows to its own positions, or None if this torch refuses it.

        packed = PackedLengths.of([3, 2], [5, 2], "cuda")           # 3 rows over 5 positions, 2 rows over 2
        out = varlen_attention(query, keys, values, packed, attention)

    Row i of N over T positions sees the first T - N + i + 1 of them (causal, aligned at the end).
    Not by block table: torch's flash attention wants blocks of 256 positions, ours have 32. Source:
    torch.nn.attention.varlen. torch's releases differ in what they take: a head size, fewer key
    heads. From the first refusal on prompts attend one by one, which is logged once.
    """
    from torch.nn.attention.varlen import varlen_attn

    options = launch_options(attention.window)
    if options is None:
        return None
    ends = packed.row_ends, packed.key_ends, packed.max_rows, packed.max_keys
    try:
        out = varlen_attn(query, keys, values, *ends, scale=attention.scaling, **options)
        return cast(Tensor, out)  # a pair only if one asks for log-sums
    except (RuntimeError, TypeError, ValueError) as error:
        if isinstance(error, torch.OutOfMemoryError) or "CUDA error" in str(error):
            raise
        text = str(error).strip() or type(error).__name__
        failures.append(text.splitlines()[0])
        log.warning("prompts attend one by one from now on, not in one launch: %s", failures[0])
        return None


@cache
def launch_options(window: int | None) -> dict[str, Any] | None:
    """Return the arguments that make this torch's varlen_attn causal with a window, or None if it has no such mode."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    if window is not None and window < 0:
        return None  # chunked attention
    known = inspect.signature(varlen_attn).parameters
    options: dict[str, Any] = {name: value for name, value in OPTIONS.items() if name in known}
    if "window_size" in known:
        num_before = -1 if window is None else window - 1  # -1 is all of them
        return options | {"window_size": (num_before, 0)}
    if window is None and "is_causal" in known and "scale" in known:
        return options | {"is_causal": True}
    return None
