"""Integer seeds: splitmix64's finaliser, and the seed for each of several samples.

>>> sample_seed(7, sample_index=0)
7
"""

from __future__ import annotations

MIX_1 = 0xBF58476D1CE4E5B9
MIX_2 = 0x94D049BB133111EB


def as_int64(x: int) -> int:
    """Return the signed 64-bit integer with the same bits as x."""
    return (x + 2**63) % 2**64 - 2**63


def mix64(x: int) -> int:
    """Apply splitmix64's finaliser to one integer; the result is in [0, 2**64)."""
    x %= 2**64
    x ^= x >> 30
    x = x * MIX_1 % 2**64
    x ^= x >> 27
    x = x * MIX_2 % 2**64
    return x ^ (x >> 31)


def sample_seed(seed: int, sample_index: int) -> int:
    """Return the seed of one of n samples, as a signed 64-bit integer.

    Sample 0 has the given seed, and the others a mix of that seed and their index.
    """
    if sample_index == 0:
        return as_int64(seed)
    mixed = mix64(mix64(seed) + sample_index)
    return as_int64(mixed)
