"""log(sum(exp(x))) of a row that several programs read, each a part: as (highest, sum of exp(x - highest)).

NaN and +inf anywhere make it NaN, as log_softmax does; so does a row of nothing but -inf, in what is made of it.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def part_of_sum(x):
    """A part's highest and its sum relative to that; -inf and 0 where it holds nothing above -inf."""
    highest = tl.max(x)
    return highest, tl.sum(tl.where(highest == -float("inf"), tl.exp(x), tl.exp(x - highest)))


@triton.jit
def log_of_sums(highest, sums):
    """Over the parts; parts that do not exist have -inf and 0."""
    top = tl.max(highest)
    return top + tl.log(tl.sum(tl.where(highest == -float("inf"), sums, sums * tl.exp(highest - top))))
