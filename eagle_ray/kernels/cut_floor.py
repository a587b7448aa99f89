"""The least logit of each row that a sampler's cuts would keep: what methods/coupling.py's `least_kept` computes.

    floors = retained_floor(logits, temperature, top_k, top_p, min_p)      # one launch, without a sort

One program per row, which ends at once if the row is greedy or cuts nothing. It is for ranking drafts, so the cuts are
worked out on the best few tokens alone. The least that is kept is found by four bits of its order at a time, as in
topk_topp.py.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor

from eagle_ray.kernels.availability import launch
from eagle_ray.kernels.jit_functions import ORDER_BITS
from eagle_ray.kernels.topk_topp import DIGIT, DIGITS, MASS, order_of, scores_of

BLOCK = 4096  # tokens that are read at once


def retained_floor(
    logits: Float[Tensor, "B F V"],
    temperature: Float[Tensor, " B"],
    top_k: Int[Tensor, " B"],
    top_p: Float[Tensor, " B"],
    min_p: Float[Tensor, " B"],
    num_best: int,
) -> Float[Tensor, "B F"]:
    """Return the lowest of the best num_best logits that all three cuts keep; -inf if they keep all of these.

    top_k 0, top_p 1 and min_p 0 cut nothing; rows of temperature 0 are not cut.
    """
    batch, num_nodes, vocab = logits.shape
    logits = logits.contiguous()
    floors = torch.empty(batch, num_nodes, device=logits.device)
    launch(_retained_floor, (batch * num_nodes,))(
        logits, vocab, num_nodes, temperature, top_k, top_p, min_p, floors,
        NUM_BEST=min(num_best, vocab), ORDER_BITS=ORDER_BITS[logits.dtype],
        BLOCK=min(BLOCK, triton.next_power_of_2(vocab)), num_warps=8,
    )  # fmt: skip
    return floors


@triton.jit(do_not_specialize=["top_ks", "top_ps", "min_ps"])
def _retained_floor(
    logits, vocab, num_nodes, temperatures, top_ks, top_ps, min_ps, floors,
    NUM_BEST: tl.constexpr, ORDER_BITS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    i = row // num_nodes
    temperature, k, p, min_p = (
        tl.load(temperatures + i), tl.load(top_ks + i), tl.load(top_ps + i), tl.load(min_ps + i)
    )  # fmt: skip
    floor = tl.full((), -float("inf"), tl.float32)
    if (temperature > 0) & ((k > 0) | (p < 1) | (min_p > 0)):
        source = logits + row.to(tl.int64) * vocab
        wanted = tl.where(k > 0, tl.minimum(k, NUM_BEST), NUM_BEST).to(tl.int64)
        highest = _highest(source, vocab, temperature, BLOCK)
        base = _min_order(source, vocab, temperature, highest, 0, wanted, False, ORDER_BITS, BLOCK)
        if p < 1:
            total = _amount(source, vocab, temperature, highest, base, ORDER_BITS, BLOCK)
            dropped = ((1 - p).to(tl.float64) * total.to(tl.float64)).to(tl.int64)
            enough = tl.maximum(total - dropped, 1)
            base = _min_order(source, vocab, temperature, highest, base, enough, True, ORDER_BITS, BLOCK)
        floor = _min_logit(source, vocab, temperature, highest, base, min_p, NUM_BEST, ORDER_BITS, BLOCK)
    tl.store(floors + row, floor)


@triton.jit
def _block(source, vocab, start, BLOCK: tl.constexpr):
    tokens = start + tl.arange(0, BLOCK)
    real = tokens < vocab
    return real, tl.load(source + tokens, mask=real, other=-float("inf")).to(tl.float32)


@triton.jit
def _units(x, temperature, highest, retained):
    """exp(score - highest) in whole units, so that no sum depends on the order it is made in."""
    share = tl.exp(scores_of(x, temperature) - highest)
    return tl.where(retained & (share == share), (share * MASS).to(tl.int64), 0)


@triton.jit
def _highest(source, vocab, temperature, BLOCK: tl.constexpr):
    highest = tl.full((), -float("inf"), tl.float32)
    for start in range(0, vocab, BLOCK):
        _, x = _block(source, vocab, start, BLOCK)
        highest = tl.maximum(highest, tl.max(scores_of(x, temperature)))
    return highest


@triton.jit
def _amount(source, vocab, temperature, highest, base, ORDER_BITS: tl.constexpr, BLOCK: tl.constexpr):
    """Return the probability of the tokens from the base on."""
    total = tl.full((), 0, tl.int64)
    for start in range(0, vocab, BLOCK):
        real, x = _block(source, vocab, start, BLOCK)
        total += tl.sum(_units(x, temperature, highest, real & (order_of(x, x, ORDER_BITS) >= base)))
    return total


@triton.jit
def _min_order(
    source, vocab, temperature, highest, lowest, wanted,
    IS_MASS: tl.constexpr, ORDER_BITS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Return the highest order from which on there are `wanted` tokens, or units of probability, of `least` or more."""
    digits = tl.arange(0, DIGITS)
    base = tl.full((), 0, tl.int64)
    for turn in tl.static_range(ORDER_BITS // DIGIT):
        shift = ORDER_BITS - DIGIT * (turn + 1)
        reached = tl.full((DIGITS,), 0, tl.int64)
        for start in range(0, vocab, BLOCK):
            real, x = _block(source, vocab, start, BLOCK)
            orders = order_of(x, x, ORDER_BITS)
            real &= orders >= lowest
            weights = _units(x, temperature, highest, real) if IS_MASS else real.to(tl.int64)
            place = tl.minimum(tl.maximum(orders - base, 0) >> shift, DIGITS - 1)
            for digit in tl.static_range(1, DIGITS):
                reached += tl.where(digits == digit, tl.sum(tl.where(place >= digit, weights, 0)), 0)
        base += tl.sum(((reached >= wanted) & (digits > 0)).to(tl.int64)) << shift
    return base


@triton.jit
def _min_logit(
    source, vocab, temperature, highest, base, min_p,
    NUM_BEST: tl.constexpr, ORDER_BITS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Return the least logit from the base on that min_p keeps too, or -inf if that keeps NUM_BEST tokens or more."""
    floor, count = tl.full((), float("inf"), tl.float32), tl.full((), 0, tl.int32)
    for start in range(0, vocab, BLOCK):
        real, x = _block(source, vocab, start, BLOCK)
        retained = real & (order_of(x, x, ORDER_BITS) >= base)
        retained &= tl.exp(scores_of(x, temperature) - highest) >= min_p
        count += tl.sum(retained.to(tl.int32))
        floor = tl.minimum(floor, tl.min(tl.where(retained, x, float("inf"))))
    return tl.where(count >= NUM_BEST, -float("inf"), floor)
