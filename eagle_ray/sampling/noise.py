"""Noise of sampling, keyed by (seed, position, token id): splitmix64's hash and standard Gumbel noise from it.

The noise is a function of these three alone, so a sample does not depend on the tree, the batch,
the order of requests, a retry or a resume. `kernels/sample.py` and `kernels/sample.cpp` compute
equal hashes.
"""

from __future__ import annotations

from jaxtyping import Float, Int
from torch import Tensor

from eagle_ray.core.seeds import MIX_1, MIX_2, as_int64

GOLDEN = 0x9E3779B97F4A7C15  # splitmix64's increment: spreads token ids over the 64-bit circle


def gumbel_noise(
    seed: Int[Tensor, " R"], positions: Int[Tensor, " R"], token_ids: Int[Tensor, " V"]
) -> Float[Tensor, "R V"]:
    """Return standard Gumbel noise keyed by (seed, position, token id), in fp32.

    The upper half of a splitmix64 hash is the uniform v; it stays below 1, so every value is
    finite.
    """
    # The middle of the hash's interval in (0, 1), as a number that fp32 has below 1.
    v = keyed_hash(seed, positions, token_ids).float()
    v = v.add_(0.5)
    v = v.mul_(2.0**-32)
    v = v.clamp_(max=1 - 2.0**-24)

    # -log(-log(1 - v)), in place.
    exponential = v.neg_().log1p_().neg_()
    return exponential.log_().neg_()


def keyed_hash(
    seed: Int[Tensor, " R"], positions: Int[Tensor, " R"], token_ids: Int[Tensor, " V"]
) -> Int[Tensor, "R V"]:
    """Return 32 well-mixed bits for each (seed, position, token id), as int64 in [0, 2**32)."""
    key = mix64_tensor(seed) + positions
    key = mix64_tensor(key)

    # One number for each token of each row, as splitmix64 counts on from a key.
    counters = key[:, None] + token_ids * as_int64(GOLDEN)
    hashed = mix64_tensor(counters)

    # The upper half; the shift copies the sign, which the mask takes away.
    upper = hashed.bitwise_right_shift_(32)
    return upper.bitwise_and_(2**32 - 1)


def mix64_tensor(x: Int[Tensor, "..."]) -> Int[Tensor, "..."]:
    """Apply splitmix64's finaliser to int64 bit patterns (multiplication wraps, shifts are logical).

    In place where possible: over a vocabulary, allocating takes longer than the arithmetic.
    """
    x = _xor_shifted(x, 30).mul_(as_int64(MIX_1))
    x = _xor_shifted(x, 27).mul_(as_int64(MIX_2))
    return _xor_shifted(x, 31)


def _xor_shifted(x: Int[Tensor, "..."], bits: int) -> Int[Tensor, "..."]:
    """Return x ^ (x >> bits), where torch's shift copies the sign and ours does not."""
    unsigned = (1 << (64 - bits)) - 1
    shifted = x >> bits
    return shifted.bitwise_and_(unsigned).bitwise_xor_(x)
