"""Triton functions that kernels call: keyed Gumbel noise, and numbers mapped to integers that sort alike.

The noise is that of sampling/noise.py. The hash is equal bit for bit. Logarithms are computed by a
series, within 1e-6 of torch's noise, because the GPU's fast logarithm has large relative errors
near 1, and Triton's interpreter lacks the accurate one.

    order(-1.5) < order(-0.0) == order(0.0) < order(2.0) < order(inf) < order(nan)
    ranked(score, token): the higher score is larger, of equal scores the lower token
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_GOLDEN: tl.constexpr = tl.constexpr(0x9E3779B97F4A7C15)
MIX_1: tl.constexpr = tl.constexpr(0xBF58476D1CE4E5B9)
MIX_2: tl.constexpr = tl.constexpr(0x94D049BB133111EB)
_LN_2: tl.constexpr = tl.constexpr(0.6931471805599453)
_BITS_OF_SQRT_HALF: tl.constexpr = tl.constexpr(0x3F3504F3)
_BITS_OF_ONE: tl.constexpr = tl.constexpr(0x3F800000)
_LARGEST_BELOW_1: tl.constexpr = tl.constexpr(1 - 2.0**-24)


@triton.jit
def gumbel(key, tokens):
    """Return the Gumbel noise of tokens (int64) under a key from `noise_key`, in fp32."""
    # A hash's upper 32 bits are a uniform number between 0 and 1.
    hashed = _mix64(key + tokens.to(tl.uint64) * _GOLDEN) >> 32
    v = (hashed.to(tl.uint32).to(tl.float32) + 0.5) * 2.0**-32
    v = tl.minimum(v, _LARGEST_BELOW_1)
    return -log(-log_1_minus(v))


@triton.jit
def noise_key(seed, position):
    """Return the key of the noise at a position, as uint64.

    Args:
        seed, position: int64.
    """
    return _mix64(_mix64(seed.to(tl.uint64)) + position.to(tl.uint64))


@triton.jit
def _mix64(x):
    x = (x ^ (x >> 30)) * MIX_1
    x = (x ^ (x >> 27)) * MIX_2
    return x ^ (x >> 31)


@triton.jit
def log(x):
    """Return the logarithm of a normal fp32 number above 0."""
    exponent, fraction = _parts(x)
    return _log_of_parts(exponent, fraction)


@triton.jit
def log_1_minus(v):
    """Return log(1 - v) of 0 < v < 1 without computing 1 - v, which would lose the low bits of v."""
    is_small = v < 0.25
    exponent, fraction = _parts(1 - v)
    exponent = tl.where(is_small, 0.0, exponent)
    fraction = tl.where(is_small, -v, fraction)
    return _log_of_parts(exponent, fraction)


@triton.jit
def _parts(x):
    """Return exponent and fraction of x = 2**exponent * (1 + fraction).

    1 + fraction is between sqrt(1/2) and sqrt(2).
    """
    bits = x.to(tl.int32, bitcast=True)
    exponent = (bits - _BITS_OF_SQRT_HALF) >> 23
    scaled = (bits - (exponent << 23)).to(tl.float32, bitcast=True)
    return exponent.to(tl.float32), scaled - 1


@triton.jit
def _log_of_parts(exponent, fraction):
    """Return the logarithm of such a number: log(1 + f) = 2 artanh(f / (2 + f)).

    The argument is below 0.172, so five terms are enough.
    """
    s = fraction / (2 + fraction)
    z = s * s
    series = 1 + z * (1 / 3 + z * (1 / 5 + z * (1 / 7 + z * (1 / 9))))
    return exponent * _LN_2 + 2 * s * series


# The upper bits of fp32's order that numbers of a dtype need.
ORDER_BITS = {torch.float32: 32, torch.float16: 20, torch.bfloat16: 16}
_LOWEST: tl.constexpr = tl.constexpr(-(2**63))
_NAN: tl.constexpr = tl.constexpr(2**32 - 1)
_LOW: tl.constexpr = tl.constexpr(2**32 - 1)


@triton.jit
def order(x):
    """Map fp32 numbers to integers (int64 in [0, 2**32)) that sort alike. NaN is the largest, and -0 equals 0."""
    bits = tl.where(x == 0, 0.0, x).to(tl.int32, bitcast=True)
    signed = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64)
    return tl.where(x != x, _NAN, signed + 2**31)


@triton.jit
def ranked(score, tokens, is_valid):
    """Return int64 keys that sort by score, then by the lower token (below 2**32).

    Keys of invalid entries are below all others.
    """
    lower = tokens ^ _LOW
    upper = (order(score) - 2**31) << 32
    return tl.where(is_valid, upper | lower, lower + _LOWEST)


@triton.jit
def token_of(key):
    """Return the token of a key that `ranked` has made."""
    return (key & _LOW) ^ _LOW


@triton.jit
def score_of(key):
    """Return the score of a key that `ranked` has made; all NaNs are one."""
    signed = (key >> 32).to(tl.int32)
    bits = tl.where(signed < 0, signed ^ 0x7FFFFFFF, signed)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def double(numbers, SIZE: tl.constexpr):
    """Double numbers in place: the smallest kernel, which shows whether Triton works."""
    index = tl.arange(0, SIZE)
    tl.store(numbers + index, tl.load(numbers + index) * 2)


@triton.jit
def fp8_from_bytes(octets):
    """Convert FP8 numbers given as bytes to fp32.

    Exponent and mantissa go to the lower bits of fp32's fields, which gives a number 2 ** 120 too
    small.
    """
    bits = octets.to(tl.int32)
    moved = ((bits & 128) << 24) | ((bits & 127) << 20)
    return moved.to(tl.float32, bitcast=True) * 1.329227995784916e36
