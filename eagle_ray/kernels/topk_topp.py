"""Top-k and top-p without a sort: find the lowest score that each keeps, four bits per launch.

A score is mapped to an integer that sorts alike. Each launch of `narrow` fixes some 4 bits of the
lowest kept one: every program counts what its part of a row has at or above each of 16 candidates,
and the next launch adds the parts up. It counts tokens for top-k and probability for top-p, in
integer units of 2**-44, so that sums do not depend on their order: a row's cuts do not depend on
the other rows.

    peak     the highest score of each row                                   for top_p and min_p
    narrow   4 bits more of the least score that is kept; `settle_limits` the last  once for top_k, then once for top_p
    ties     how many tokens have just that score                            for top_p, which may keep some of them

`cut_floor` finds in one launch the lowest logit of each row that a sampler's cuts would keep, like
`lowest_retained` of methods/coupling.py: one program per row, which ends at once if the row is
greedy or cuts nothing. It serves the ranking of drafts, so the cuts are computed on the best few
tokens alone.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor

from eagle_ray.kernels.availability import launch
from eagle_ray.kernels.jit_functions import ORDER_BITS, order

DIGIT: tl.constexpr = tl.constexpr(4)  # bits that one launch fixes
DIGITS: tl.constexpr = tl.constexpr(16)
MASS: tl.constexpr = tl.constexpr(2.0**44)  # mass of the likeliest token: 2**17 of them still fit
TOP_K = 0
TOP_P = 1
_TOP_K: tl.constexpr = tl.constexpr(TOP_K)
_ALL: tl.constexpr = tl.constexpr(-1)  # below every order


@triton.jit
def load_row(logits, stride, row, part, vocab, BLOCK: tl.constexpr):
    """Load a part's tokens, their mask, and their logits in fp32."""
    tokens = part * BLOCK + tl.arange(0, BLOCK)
    real = tokens < vocab
    x = tl.load(logits + row.to(tl.int64) * stride + tokens, mask=real, other=-float("inf"))
    return tokens, real, x.to(tl.float32)


@triton.jit
def scores_of(x, temperature):
    """Divide logits by the temperature with torch's rounding; a GPU's fast division rounds differently."""
    return tl.div_rn(x, tl.full(x.shape, temperature, tl.float32))


@triton.jit
def order_of(x, scores, ORDER_BITS: tl.constexpr):
    """Map scores to integers that sort alike. Half-precision logits need fewer bits, so the other bits are constant."""
    if ORDER_BITS < 32:
        return order(x) >> (32 - ORDER_BITS)
    else:
        return order(scores)


@triton.jit
def _mass(scores, peak, retained):
    """Return exp(score - peak) in whole units; the peak itself is 1 where it is infinite too."""
    share = tl.where(scores == peak, 1.0, tl.exp(scores - peak))
    units = (share * MASS).to(tl.int64)
    return tl.where(retained & (share == share), units, 0)


@triton.jit
def peak_of(peaks, row, num_parts, PARTS: tl.constexpr):
    """Return the highest score of a row from those of its parts."""
    parts = tl.arange(0, PARTS)
    peaks_at = peaks + row * num_parts + parts
    return tl.max(tl.load(peaks_at, mask=parts < num_parts, other=-float("inf")))


@triton.jit
def sum_of(sums, row, num_parts, PARTS: tl.constexpr):
    """Add up a number over the parts of a row, in integers."""
    parts = tl.arange(0, PARTS)
    sums_at = sums + row * num_parts + parts
    return tl.sum(tl.load(sums_at, mask=parts < num_parts, other=0))


@triton.jit
def peak(logits, stride, vocab, temperatures, seq, peaks, num_parts, BLOCK: tl.constexpr):
    """Triton kernel: the highest score of a part."""
    row = tl.program_id(0)
    part = tl.program_id(1)
    temperature = tl.load(temperatures + tl.load(seq + row))
    if temperature > 0:
        _, _, x = load_row(logits, stride, row, part, vocab, BLOCK)
        highest = tl.max(scores_of(x, temperature))
        tl.store(peaks + row * num_parts + part, highest)


@triton.jit
def _wanted(limits, i, totals, row, num_parts, vocab, KIND: tl.constexpr, PARTS: tl.constexpr):
    """Return how many tokens, or how much probability, the kept ones must reach. Top-p keeps at least one token."""
    limit = tl.load(limits + i)
    if KIND == _TOP_K:
        return tl.minimum(limit, vocab).to(tl.int64)
    else:
        total = sum_of(totals, row, num_parts, PARTS)
        dropped = ((1 - limit).to(tl.float64) * total.to(tl.float64)).to(tl.int64)
        return tl.maximum(total - dropped, 1)


@triton.jit
def _is_cut(limits, i, temperature, KIND: tl.constexpr):
    limit = tl.load(limits + i)
    return (temperature > 0) & ((limit > 0) if KIND == _TOP_K else (limit < 1))


@triton.jit
def _fixed(base, sums, wanted, row, num_parts, shift, PARTS: tl.constexpr):
    """Return the base with the digit that the sums of all parts decide: the highest that reaches the wanted amount."""
    parts = tl.arange(0, PARTS)[:, None]
    digits = tl.arange(0, DIGITS)[None, :]
    at = (row * num_parts + parts).to(tl.int64) * DIGITS + digits
    reached = tl.sum(tl.load(sums + at, mask=parts < num_parts, other=0), 0)

    # Sums fall from digit to digit, so the digit is the number of those that reach it. Digit 0 always does.
    is_reached = (reached >= wanted) & (tl.arange(0, DIGITS) > 0)
    digit = tl.sum(is_reached.to(tl.int64))
    return base + (digit << shift)


@triton.jit(do_not_specialize=["limits", "num_rows", "turn", "shift"])
def narrow(
    logits,
    stride,
    vocab,
    temperatures,
    seq,
    limits,
    peaks,
    floors,  # least order that top-k keeps, for top-p; None where it keeps all
    bases,  # [2, R]: what the launches before fixed, this launch's own after the last one's
    sums,  # [2, R, parts, 16]
    totals,  # [R, parts]: probability before the cut
    num_rows,
    num_parts,
    turn,
    shift,
    KIND: tl.constexpr,
    FIRST: tl.constexpr,
    ORDER_BITS: tl.constexpr,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Triton kernel: a part's counts at and above each candidate digit at `shift`; earlier launches
    fixed the higher digits."""
    row = tl.program_id(0)
    part = tl.program_id(1)
    i = tl.load(seq + row)
    temperature = tl.load(temperatures + i)
    if _is_cut(limits, i, temperature, KIND):
        # Launches take turns with two sets of bases and sums, since each reads those of the one before.
        base = tl.full((), 0, tl.int64)
        before = (1 - turn) * num_rows
        now = turn * num_rows
        if not FIRST:
            wanted = _wanted(limits, i, totals, row, num_parts, vocab, KIND, PARTS)
            base = tl.load(bases + before + row)
            base = _fixed(base, sums, wanted, before + row, num_parts, shift + DIGIT, PARTS)

        # Count tokens for top-k, and probability for top-p.
        _, real, x = load_row(logits, stride, row, part, vocab, BLOCK)
        scores = scores_of(x, temperature)
        orders = order_of(x, scores, ORDER_BITS)
        if KIND == _TOP_K:
            weights = real.to(tl.int32)
        else:
            if floors is not None:
                real &= orders >= tl.load(floors + row)
            weights = _mass(scores, peak_of(peaks, row, num_parts, PARTS), real)
            if FIRST:
                tl.store(totals + row * num_parts + part, tl.sum(weights))

        if part == 0:
            tl.store(bases + now + row, base)
        at = sums + ((now + row) * num_parts + part).to(tl.int64) * DIGITS
        reached = tl.minimum(tl.maximum(orders - base, 0) >> shift, DIGITS - 1).to(tl.int32)
        for digit in tl.static_range(1, DIGITS):
            total = tl.sum(tl.where(reached >= digit, weights, 0))
            tl.store(at + digit, total)


@triton.jit(do_not_specialize=["limits", "num_rows", "turn"])
def settle_limits(
    vocab,
    temperatures,
    seq,
    limits,
    bases,
    sums,
    totals,
    floors,
    num_rows,
    num_parts,
    turn,
    KIND: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Triton kernel: write the lowest kept score's order into floors. Rows without this filter keep everything."""
    row = tl.program_id(0)
    i = tl.load(seq + row)
    floor = tl.full((), _ALL, tl.int64)
    if _is_cut(limits, i, tl.load(temperatures + i), KIND):
        wanted = _wanted(limits, i, totals, row, num_parts, vocab, KIND, PARTS)
        last = turn * num_rows + row
        base = tl.load(bases + last)
        floor = _fixed(base, sums, wanted, last, num_parts, 0, PARTS)
    tl.store(floors + row, floor)


@triton.jit(do_not_specialize=["top_p"])
def ties(
    logits,
    stride,
    vocab,
    temperatures,
    seq,
    top_p,
    peaks,
    floors,
    above,  # [R, parts]: probability of the tokens above the floor
    counts,  # [R, parts]: tokens at the floor
    masses,  # [R, parts]: their probability
    num_parts,
    ORDER_BITS: tl.constexpr,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Triton kernel: a part's probability above the floor and at it."""
    row = tl.program_id(0)
    part = tl.program_id(1)
    i = tl.load(seq + row)
    temperature = tl.load(temperatures + i)
    if (temperature > 0) & (tl.load(top_p + i) < 1):
        _, real, x = load_row(logits, stride, row, part, vocab, BLOCK)
        scores = scores_of(x, temperature)
        orders = order_of(x, scores, ORDER_BITS)
        floor = tl.load(floors + row)
        highest = peak_of(peaks, row, num_parts, PARTS)
        at = row * num_parts + part

        is_above = real & (orders > floor)
        tl.store(above + at, tl.sum(_mass(scores, highest, is_above)))
        tied = real & (orders == floor)
        tl.store(counts + at, tl.sum(tied.to(tl.int32)))
        tl.store(masses + at, tl.sum(_mass(scores, highest, tied)))


@triton.jit
def retained_ties(
    tied,
    top_p,
    i,
    totals,
    above,
    counts,
    masses,
    row,
    part,
    num_parts,
    vocab,
    KIND: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Return which tokens exactly at the floor top-p keeps: the highest ids, as in a stable ascending sort."""
    wanted = _wanted(top_p, i, totals, row, num_parts, vocab, KIND, PARTS)
    missing = wanted - sum_of(above, row, num_parts, PARTS)

    # Tied tokens have equal mass.
    parts = tl.arange(0, PARTS)
    count = tl.load(counts + row * num_parts + parts, mask=parts < num_parts, other=0)
    tied_mass = sum_of(masses, row, num_parts, PARTS)
    mass = tl.maximum(tied_mass // tl.maximum(tl.sum(count), 1), 1)

    # Keep as many of them as fill what is missing.
    later = tl.sum(tl.where(parts > part, count, 0))
    rank = tl.cumsum(tied.to(tl.int32), reverse=True) + later  # 1 for the highest id
    return tied & ((rank - 1).to(tl.int64) * mass < missing)


ROW_BLOCK = 4096  # tokens that one program reads at once


def cut_floor(
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
    launch(_cut_floor, (batch * num_nodes,))(
        logits,
        vocab,
        num_nodes,
        temperature,
        top_k,
        top_p,
        min_p,
        floors,
        NUM_BEST=min(num_best, vocab),
        ORDER_BITS=ORDER_BITS[logits.dtype],
        BLOCK=min(ROW_BLOCK, triton.next_power_of_2(vocab)),
        num_warps=8,
    )
    return floors


@triton.jit(do_not_specialize=["top_ks", "top_ps", "min_ps"])
def _cut_floor(
    logits,
    vocab,
    num_nodes,
    temperatures,
    top_ks,
    top_ps,
    min_ps,
    floors,
    NUM_BEST: tl.constexpr,
    ORDER_BITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Find the least logit of one row that all cuts keep."""
    row = tl.program_id(0)
    i = row // num_nodes
    temperature = tl.load(temperatures + i)
    k = tl.load(top_ks + i)
    p = tl.load(top_ps + i)
    min_p = tl.load(min_ps + i)
    floor = tl.full((), -float("inf"), tl.float32)
    if (temperature > 0) & ((k > 0) | (p < 1) | (min_p > 0)):
        # The order from which on top-k, or the best few without it, keep tokens.
        source = logits + row.to(tl.int64) * vocab
        wanted = tl.where(k > 0, tl.minimum(k, NUM_BEST), NUM_BEST).to(tl.int64)
        highest = _highest(source, vocab, temperature, BLOCK)
        base = _min_order(source, vocab, temperature, highest, 0, wanted, False, ORDER_BITS, BLOCK)

        # The order from which on top-p keeps tokens of those.
        if p < 1:
            total = _amount(source, vocab, temperature, highest, base, ORDER_BITS, BLOCK)
            dropped = ((1 - p).to(tl.float64) * total.to(tl.float64)).to(tl.int64)
            enough = tl.maximum(total - dropped, 1)
            base = _min_order(
                source, vocab, temperature, highest, base, enough, True, ORDER_BITS, BLOCK
            )

        floor = _min_logit(
            source, vocab, temperature, highest, base, min_p, NUM_BEST, ORDER_BITS, BLOCK
        )
    tl.store(floors + row, floor)


@triton.jit
def _block(source, vocab, start, BLOCK: tl.constexpr):
    """Return the mask of a block of a row, and its logits in fp32."""
    tokens = start + tl.arange(0, BLOCK)
    real = tokens < vocab
    x = tl.load(source + tokens, mask=real, other=-float("inf"))
    return real, x.to(tl.float32)


@triton.jit
def _units(x, temperature, highest, retained):
    """Return exp(score - highest) in whole units, so that no sum depends on the order it is made in."""
    share = tl.exp(scores_of(x, temperature) - highest)
    units = (share * MASS).to(tl.int64)
    return tl.where(retained & (share == share), units, 0)


@triton.jit
def _highest(source, vocab, temperature, BLOCK: tl.constexpr):
    highest = tl.full((), -float("inf"), tl.float32)
    for start in range(0, vocab, BLOCK):
        _, x = _block(source, vocab, start, BLOCK)
        highest = tl.maximum(highest, tl.max(scores_of(x, temperature)))
    return highest


@triton.jit
def _amount(
    source, vocab, temperature, highest, base, ORDER_BITS: tl.constexpr, BLOCK: tl.constexpr
):
    """Return the total probability of the tokens whose order is `base` or higher."""
    total = tl.full((), 0, tl.int64)
    for start in range(0, vocab, BLOCK):
        real, x = _block(source, vocab, start, BLOCK)
        retained = real & (order_of(x, x, ORDER_BITS) >= base)
        total += tl.sum(_units(x, temperature, highest, retained))
    return total


@triton.jit
def _min_order(
    source,
    vocab,
    temperature,
    highest,
    lowest,
    wanted,
    IS_MASS: tl.constexpr,
    ORDER_BITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Return the highest order from which on there are `wanted` tokens, or units of probability.

    Only tokens whose order is `lowest` or higher count.
    """
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

            # Add up what has each digit at this place or a higher one.
            place = tl.minimum(tl.maximum(orders - base, 0) >> shift, DIGITS - 1)
            for digit in tl.static_range(1, DIGITS):
                more = tl.sum(tl.where(place >= digit, weights, 0))
                reached += tl.where(digits == digit, more, 0)

        is_reached = (reached >= wanted) & (digits > 0)
        base += tl.sum(is_reached.to(tl.int64)) << shift
    return base


@triton.jit
def _min_logit(
    source,
    vocab,
    temperature,
    highest,
    base,
    min_p,
    NUM_BEST: tl.constexpr,
    ORDER_BITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Return the least logit from the base on that min_p keeps too, or -inf if that keeps NUM_BEST tokens or more."""
    floor = tl.full((), float("inf"), tl.float32)
    count = tl.full((), 0, tl.int32)
    for start in range(0, vocab, BLOCK):
        real, x = _block(source, vocab, start, BLOCK)
        retained = real & (order_of(x, x, ORDER_BITS) >= base)
        share = tl.exp(scores_of(x, temperature) - highest)
        retained &= share >= min_p
        count += tl.sum(retained.to(tl.int32))
        lowest = tl.min(tl.where(retained, x, float("inf")))
        floor = tl.minimum(floor, lowest)
    return tl.where(count >= NUM_BEST, -float("inf"), floor)
