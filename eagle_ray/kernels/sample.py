"""Sample the target's token of each row, greedy or random, from its logits on a GPU.

    tokens = sample_rows(logits, temperature, top_k, top_p, min_p, seed, seq, positions)

A row is read by as many programs as it has parts of BLOCK tokens, so that one row of a large
vocabulary keeps a whole GPU busy; nothing of a row's length is written. Results equal those of
sampling/sampler.py except for rounding: noise differs by 1e-6, and a token whose cumulative
probability is within 1e-5 of top_p may be kept by one and cut by the other. Here only the
exponentials are rounded: e**-x is off by 2**-24 of itself for each unit of x, whose mean is at most
the entropy, so by 1e-6 over 2**17 tokens. There the sums in fp32 are rounded, too. Both are within
1e-6 of exact sums for 3,000 random logits (tests/kernels/test_sample.py);
tests/kernels/test_edges.py counts it on a device.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor

from eagle_ray.kernels.availability import launch
from eagle_ray.kernels.jit_functions import ORDER_BITS, gumbel, log, noise_key, ranked, token_of
from eagle_ray.kernels.topk_topp import (
    DIGIT,
    DIGITS,
    TOP_K,
    TOP_P,
    load_row,
    narrow,
    order_of,
    peak,
    peak_of,
    retained_ties,
    scores_of,
    settle_limits,
    ties,
)

TOKENS_PER_PART = 2048  # tokens of a part
_TOP_P: tl.constexpr = tl.constexpr(TOP_P)


def sample_rows(
    logits: Float[Tensor, "R V"],
    temperature: Float[Tensor, " B"],
    top_k: Int[Tensor, " B"] | None,
    top_p: Float[Tensor, " B"] | None,
    min_p: Float[Tensor, " B"] | None,
    seed: Int[Tensor, " B"],
    seq: Int[Tensor, " R"],
    positions: Int[Tensor, " R"],
) -> Int[Tensor, " R"]:
    """Sample a token from each row of logits, like sampling.sample.

    Args:
        temperature: temperature of each sequence; 0 is greedy.
        top_k: top-k of each sequence; None if no row uses it.
        top_p: top-p of each sequence; None if no row uses it.
        min_p: min-p of each sequence; None if no row uses it.
    """
    rows = SampleRows(logits, temperature, seq)

    # Find the least order that each filter keeps.
    peaks = rows.peaks() if top_p is not None or min_p is not None else None
    floors_k = None if top_k is None else rows.narrowed(TOP_K, top_k, peaks, None)[0]
    floors_p = None
    tied: tuple[Tensor | None, ...] = (None,) * 4
    if top_p is not None and peaks is not None:
        floors_p, tied = rows.with_ties(top_p, peaks, floors_k)

    # Draw from each part, then from the parts' tokens.
    best = rows.scratch(torch.int64)
    launch(draw, rows.grid)(
        *rows.input,
        seed,
        positions,
        top_p,
        min_p,
        peaks,
        floors_k,
        floors_p,
        *tied,
        best,
        rows.num_parts,
        **rows.sizes,
    )
    tokens = seq.new_empty(rows.num_rows, dtype=torch.int64)
    launch(winner, (rows.num_rows,))(best, tokens, rows.num_parts, PARTS=rows.sizes["PARTS"])
    return tokens


class SampleRows:
    """Launches of the sampling kernels over R rows, and their arguments."""

    def __init__(
        self, logits: Float[Tensor, "R V"], temperature: Float[Tensor, " B"], seq: Int[Tensor, " R"]
    ):
        if logits.stride(1) != 1:
            logits = logits.contiguous()
        self.num_rows, vocab = logits.shape
        self.num_parts = triton.cdiv(vocab, TOKENS_PER_PART)
        self.grid = (self.num_rows, self.num_parts)
        self.input = (logits, logits.stride(0), vocab, temperature, seq)
        self.sizes = dict(
            ORDER_BITS=ORDER_BITS[logits.dtype],
            BLOCK=TOKENS_PER_PART,
            PARTS=triton.next_power_of_2(self.num_parts),
        )

    def scratch(self, dtype: torch.dtype) -> Tensor:
        """Return a tensor with one number per part of each row."""
        return torch.empty(self.grid, dtype=dtype, device=self.input[0].device)

    def peaks(self) -> Float[Tensor, "R parts"]:
        """Return the highest score of each part."""
        peaks = self.scratch(torch.float32)
        launch(peak, self.grid)(*self.input, peaks, self.num_parts, BLOCK=TOKENS_PER_PART)
        return peaks

    def narrowed(
        self, kind: int, limits: Tensor, peaks: Tensor | None, floors_k: Int[Tensor, " R"] | None
    ) -> tuple[Int[Tensor, " R"], Int[Tensor, "R parts"]]:
        """Return for each row the order of the lowest kept score so far, and for each part the
        probability before it."""
        device = limits.device
        bases = torch.empty(2, self.num_rows, dtype=torch.int64, device=device)
        sums = torch.empty(2, *self.grid, DIGITS.value, dtype=torch.int64, device=device)
        totals = self.scratch(torch.int64)

        # Fix the digits of the least order, from the highest digit on.
        shifts = range(self.sizes["ORDER_BITS"] - DIGIT.value, -1, -DIGIT.value)
        for turn, shift in enumerate(shifts):
            launch(narrow, self.grid)(
                *self.input,
                limits,
                peaks,
                floors_k,
                bases,
                sums,
                totals,
                self.num_rows,
                self.num_parts,
                turn % 2,
                shift,
                KIND=kind,
                FIRST=turn == 0,
                **self.sizes,
            )

        floors = torch.empty(self.num_rows, dtype=torch.int64, device=device)
        last_turn = len(shifts) - 1
        launch(settle_limits, (self.num_rows,))(
            *self.input[2:],
            limits,
            bases,
            sums,
            totals,
            floors,
            self.num_rows,
            self.num_parts,
            last_turn % 2,
            KIND=kind,
            PARTS=self.sizes["PARTS"],
        )
        return floors, totals

    def with_ties(
        self, top_p: Float[Tensor, " B"], peaks: Tensor, floors_k: Int[Tensor, " R"] | None
    ) -> tuple[Int[Tensor, " R"], tuple[Tensor, Tensor, Tensor, Tensor]]:
        """Return for each row the order of top-p's lowest kept score, and for each part four numbers about it.

        They are the probability before the cut and above it, and the tokens and the probability at
        it.
        """
        floors, totals = self.narrowed(TOP_P, top_p, peaks, floors_k)
        above = self.scratch(torch.int64)
        counts = self.scratch(torch.int32)
        masses = self.scratch(torch.int64)
        launch(ties, self.grid)(
            *self.input, top_p, peaks, floors, above, counts, masses, self.num_parts, **self.sizes
        )
        return floors, (totals, above, counts, masses)


@triton.jit(do_not_specialize=["seeds", "top_p", "min_p"])
def draw(
    logits,
    stride,
    vocab,
    temperatures,
    seq,
    seeds,
    positions,
    top_p,  # this and the following: None where no row needs it
    min_p,
    peaks,
    floors_k,
    floors_p,
    totals,
    above,
    counts,
    masses,
    best,  # [R, parts]
    num_parts,
    ORDER_BITS: tl.constexpr,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Triton kernel: the best token of a part, by logit in greedy rows, else by score and noise among kept tokens."""
    row = tl.program_id(0)
    part = tl.program_id(1)
    i = tl.load(seq + row)
    temperature = tl.load(temperatures + i)
    tokens, retained, x = load_row(logits, stride, row, part, vocab, BLOCK)
    if temperature > 0:
        scores = scores_of(x, temperature)
        orders = order_of(x, scores, ORDER_BITS)

        # Drop the tokens that a filter does not keep.
        if floors_k is not None:
            retained &= orders >= tl.load(floors_k + row)
        if floors_p is not None:
            floor = tl.load(floors_p + row)
            if floor >= 0:
                tied = retained & (orders == floor)
                tied = retained_ties(
                    tied, top_p, i, totals, above, counts, masses, row, part, num_parts, vocab, _TOP_P, PARTS
                )  # fmt: skip
                retained = tied | (retained & (orders > floor))
        if min_p is not None:
            floor_share = tl.load(min_p + i)
            if floor_share > 0:
                retained &= scores >= peak_of(peaks, row, num_parts, PARTS) + log(floor_share)

        key = noise_key(tl.load(seeds + i), tl.load(positions + row))
        x = scores + gumbel(key, tokens.to(tl.int64))

    keys = ranked(x, tokens.to(tl.int64), retained)
    tl.store(best + row * num_parts + part, tl.max(keys))


@triton.jit
def winner(best, tokens, num_parts, PARTS: tl.constexpr):
    """Triton kernel: the best token of each row, from the best of its parts."""
    row = tl.program_id(0)
    parts = tl.arange(0, PARTS)
    keys = tl.load(best + row * num_parts + parts, mask=parts < num_parts, other=-(2**63))
    tl.store(tokens + row, token_of(tl.max(keys)))
