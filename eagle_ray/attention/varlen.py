"""Variable-length attention: prompts of any lengths in one launch, by torch's flash attention on a GPU.

    packed = PackedLengths.of([3, 2], [5, 2], "cuda")           # 3 rows over 5 positions, 2 rows over 2
    out = varlen_attention(query, keys, values, packed, attention)

Row i of N over T positions sees the first T - N + i + 1 of them (causal, aligned at the end). Not by block table:
torch's flash attention wants blocks of 256 positions, ours have 32. Source: torch.nn.attention.varlen.
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
from eagle_ray.core.async_copy import to_device

log = logging.getLogger("eagle_ray")
DTYPES = (torch.bfloat16, torch.float16)
LARGEST_DIM = 256
OPTIONS = {"enable_gqa": True, "num_splits": 1}  # one split: a sequence's numbers do not depend on the batch
_failure: list[str] = []  # what torch refused, if it did


@dataclass(frozen=True, slots=True)
class PackedLengths:
    """How B sequences lie in packed rows and packed positions.

    Attributes:
        row_ends, key_ends: int32, cumulative numbers, from 0 on.
        max_rows, max_keys: of one sequence.
    """

    row_ends: Int[Tensor, " B1"]
    key_ends: Int[Tensor, " B1"]
    max_rows: int
    max_keys: int

    @classmethod
    def of(cls, num_rows: list[int], num_keys: list[int], device: torch.device | str) -> PackedLengths:
        ends = [list(accumulate(counts, initial=0)) for counts in (num_rows, num_keys)]
        row_ends, key_ends = to_device(ends, device, torch.int32)
        return cls(row_ends, key_ends, max(num_rows), max(num_keys))


def supports_varlen(query: Float[Tensor, "R heads d"], value_dim: int, attention: AttentionParams) -> bool:
    """Return whether this layer's rows can attend in one launch."""
    if _failure or query.device.type != "cuda" or query.dtype not in DTYPES:
        return False
    if not query.shape[2] == value_dim <= LARGEST_DIM:
        return False
    return attention.softcap is None and attention.sinks is None and _options(attention.window) is not None


def varlen_attention(
    query: Float[Tensor, "R heads d"],
    keys: Float[Tensor, "T kv_heads d"],
    values: Float[Tensor, "T kv_heads d"],
    packed: PackedLengths,
    attention: AttentionParams,
) -> Float[Tensor, "R heads d"] | None:
    """Return causal attention of each sequence's rows to its own positions, or None if this torch refuses it.

    torch's releases differ in what they take: a head size, fewer key heads. From the first refusal on prompts attend
    one by one, which is logged once.
    """
    from torch.nn.attention.varlen import varlen_attn

    options = _options(attention.window)
    if options is None:
        return None
    ends = packed.row_ends, packed.key_ends, packed.max_rows, packed.max_keys
    try:
        out = varlen_attn(query, keys, values, *ends, scale=attention.scaling, **options)
        return cast(Tensor, out)  # a pair only if one asks for log-sums
    except (RuntimeError, TypeError, ValueError) as error:
        if isinstance(error, torch.OutOfMemoryError) or "CUDA error" in str(error):
            raise
        _failure.append((str(error).strip() or type(error).__name__).splitlines()[0])
        log.warning("prompts attend one by one from now on, not in one launch: %s", _failure[0])
        return None


@cache
def _options(window: int | None) -> dict[str, Any] | None:
    """Return what this torch's varlen_attn has to be told of a causal window, or None if it cannot do it."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    known = inspect.signature(varlen_attn).parameters
    options: dict[str, Any] = {name: value for name, value in OPTIONS.items() if name in known}
    if "window_size" in known:
        return options | {"window_size": (-1 if window is None else window - 1, 0)}
    return options | {"is_causal": True} if window is None and "is_causal" in known and "scale" in known else None
