"""Numbers as integers of the same order, and the best token of many as one integer.

order(-1.5) < order(-0.0) == order(0.0) < order(2.0) < order(inf) < order(nan)
ranked(score, token): the higher score is larger, of equal scores the lower token
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

ORDER_BITS = {torch.float32: 32, torch.float16: 20, torch.bfloat16: 16}  # of fp32's order, as its upper ones
_LEAST: tl.constexpr = tl.constexpr(-(2**63))
_NAN: tl.constexpr = tl.constexpr(2**32 - 1)
_LOW: tl.constexpr = tl.constexpr(2**32 - 1)


@triton.jit
def order(x):
    """Return fp32 numbers as int64 in [0, 2**32) of equal order; NaN is the largest, as in torch.argmax; -0
    equals 0.
    """
    bits = tl.where(x == 0, 0.0, x).to(tl.int32, bitcast=True)
    signed = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64)
    return tl.where(x != x, _NAN, signed + 2**31)


@triton.jit
def ranked(score, tokens, kept):
    """int64 that order by score, then by the lower token (below 2**32). What is not kept is below everything else."""
    lower = tokens ^ _LOW
    return tl.where(kept, ((order(score) - 2**31) << 32) | lower, lower + _LEAST)


@triton.jit
def token_of(key):
    """Return the token of a packed key."""
    return (key & _LOW) ^ _LOW


@triton.jit
def score_of(key):
    """Return the score of a packed key; all NaN are one."""
    signed = (key >> 32).to(tl.int32)
    return tl.where(signed < 0, signed ^ 0x7FFFFFFF, signed).to(tl.float32, bitcast=True)
