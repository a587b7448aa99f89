"""Log-probabilities of a row's best k tokens, or of given tokens, without a sort and without fp32 copies of the logits.

    scores, places, own = top_k(logits, 10)                   # EAGLE-2's ranking
    scores, places, own = top_k(logits, 10, push)             # coupled: see methods/coupling.py
    log_probs = log_probs_of(logits, tokens)                  # one logsumexp and one logit per row

Each part of a row finds its own k best, one after the other; a second launch merges them. Of equal
scores the lower index comes first. In a row with a NaN or an infinite logit every score is NaN, as
with log_softmax.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor

from eagle_ray.kernels.availability import launch
from eagle_ray.kernels.jit_functions import gumbel, noise_key, ranked, score_of, token_of
from eagle_ray.kernels.topk_topp import load_row

TOPK_PART_TOKENS = 2048  # tokens of a part
MAX_K = 32  # children of a node: they are found one after the other
_TAKEN: tl.constexpr = tl.constexpr(-(2**63))


@dataclass(frozen=True, slots=True)
class Push:
    """What coupling (methods/coupling.py) adds to the logits of sampled sequences. Rows of
    temperature 0 stay unchanged.

    Attributes:
        weights: weights of the logit, of the noise, of the noise above `large`, and of being below
            the floor.
        positions: positions of the tokens after these nodes.
        floors: lowest logit that the sampler's cuts would keep; None if nothing is cut.
        token_ids: token of each logit; None if its index is the token.
    """

    weights: Float[Tensor, " 4"]
    large: float
    temperature: Float[Tensor, " B"]
    seed: Int[Tensor, " B"]
    positions: Int[Tensor, " B"]
    floors: Float[Tensor, "B F"] | None
    token_ids: Int[Tensor, " V"] | None


def top_k(
    logits: Float[Tensor, "B F V"], k: int, push: Push | None = None
) -> tuple[Float[Tensor, "B F K"], Int[Tensor, "B F K"], Float[Tensor, "B F K"]]:
    """Return the best k tokens of each row: the log-probabilities they are ranked by, their
    indices, and their uncoupled ones.

    Args:
        k: number of tokens, at most MAX_K.
    """
    batch, num_nodes, vocab = logits.shape
    logits = logits.reshape(-1, vocab)
    num_rows = len(logits)
    num_parts = triton.cdiv(vocab, TOPK_PART_TOKENS)
    device = logits.device

    # The best k of each part of a row.
    sums = torch.empty(4, num_rows, num_parts, device=device)
    best = torch.empty(num_rows, num_parts, k, dtype=torch.int64, device=device)
    launch(best_of_parts, (num_rows, num_parts))(
        logits,
        vocab,
        *_pushed(push),
        num_nodes,
        sums,
        best,
        num_rows,
        num_parts,
        K=k,
        BLOCK=TOPK_PART_TOKENS,
    )

    # The best k of the parts' best.
    scores, own = torch.empty(2, num_rows, k, device=device).unbind()
    indices = torch.empty(num_rows, k, dtype=torch.int64, device=device)
    candidates = triton.next_power_of_2(num_parts * k)
    launch(merge, (num_rows,))(
        logits,
        vocab,
        sums,
        best,
        scores,
        indices,
        own,
        num_rows,
        num_parts,
        K=k,
        PARTS=triton.next_power_of_2(num_parts),
        CANDIDATES=candidates,
        PUSHED=push is not None,
    )
    shape = batch, num_nodes, k
    return scores.view(shape), indices.view(shape), own.view(shape)


def _pushed(push: Push | None) -> tuple:
    if push is None:
        return (None,) * 7
    return (
        push.weights,
        push.large,
        push.temperature,
        push.seed,
        push.positions,
        push.floors,
        push.token_ids,
    )


@triton.jit(do_not_specialize=["seeds"])
def best_of_parts(
    logits,
    vocab,
    weights,  # this and the six that follow: None where nothing is pushed
    large,
    temperatures,
    seeds,
    positions,
    floors,
    token_ids,
    num_nodes,
    sums,  # [4, R, parts]: of the ranking scores highest and sum, then of the logits
    best,  # [R, parts, K]
    num_rows,
    num_parts,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Triton kernel: the K best tokens of a part, best first, as keys of `ranked`."""
    row = tl.program_id(0)
    part = tl.program_id(1)
    indices, real, x = load_row(logits, vocab, row, part, vocab, BLOCK)
    at = row * num_parts + part
    size = num_rows * num_parts

    scores = x
    if weights is not None:
        own_top, own_sum = part_of_sum(x)
        tl.store(sums + 2 * size + at, own_top)
        tl.store(sums + 3 * size + at, own_sum)

        # Sampled sequences are ranked by the logit, the noise and the floor.
        i = row // num_nodes
        temperature = tl.load(temperatures + i)
        if temperature > 0:
            tokens = indices.to(tl.int64)
            if token_ids is not None:
                tokens = tl.load(token_ids + indices, mask=real, other=0)
            key = noise_key(tl.load(seeds + i), tl.load(positions + i))
            noise = gumbel(key, tokens)
            on_logit = tl.load(weights)
            on_noise = tl.load(weights + 1)
            on_large = tl.load(weights + 2)
            pushed = on_noise * noise + on_large * tl.maximum(noise - large, 0.0)
            scores = on_logit * x + temperature * pushed
            if floors is not None:
                scores += tl.where(x < tl.load(floors + row), tl.load(weights + 3), 0.0)
            scores = tl.where(real, scores, -float("inf"))

    top, total = part_of_sum(scores)
    tl.store(sums + at, top)
    tl.store(sums + size + at, total)

    # Name the K best, one after another.
    keys = ranked(scores, indices.to(tl.int64), real)
    for i in range(K):
        highest = tl.max(keys)
        tl.store(best + at.to(tl.int64) * K + i, highest)
        keys = tl.where(keys == highest, _TAKEN, keys)


@triton.jit
def merge(
    logits,
    vocab,
    sums,
    best,
    scores,
    indices,
    own,
    num_rows,
    num_parts,
    K: tl.constexpr,
    PARTS: tl.constexpr,
    CANDIDATES: tl.constexpr,
    PUSHED: tl.constexpr,
):
    """Triton kernel: the K best tokens of all parts, their scores, and their logits minus the row's logsumexp."""
    row = tl.program_id(0)
    parts = tl.arange(0, PARTS)
    at = row * num_parts + parts
    size = num_rows * num_parts
    real = parts < num_parts

    # The logarithms of the sums, of the ranking scores and of the logits.
    tops = tl.load(sums + at, mask=real, other=-float("inf"))
    totals = tl.load(sums + size + at, mask=real, other=0.0)
    total = log_of_sums(tops, totals)
    own_total = total
    if PUSHED:
        own_tops = tl.load(sums + 2 * size + at, mask=real, other=-float("inf"))
        own_totals = tl.load(sums + 3 * size + at, mask=real, other=0.0)
        own_total = log_of_sums(own_tops, own_totals)

    # Name the K best of the parts' candidates, one after another.
    candidates = tl.arange(0, CANDIDATES)
    first = row.to(tl.int64) * num_parts * K
    keys = tl.load(best + first + candidates, mask=candidates < num_parts * K, other=_TAKEN)
    for i in range(K):
        highest = tl.max(keys)
        place = token_of(highest)
        x = tl.load(logits + row.to(tl.int64) * vocab + place).to(tl.float32)
        tl.store(scores + row * K + i, score_of(highest) - total)
        tl.store(indices + row * K + i, place)
        tl.store(own + row * K + i, x - own_total)
        keys = tl.where(keys == highest, _TAKEN, keys)


@triton.jit
def part_of_sum(x):
    """Return a part's maximum and its sum relative to that; -inf and 0 if it has nothing above -inf."""
    highest = tl.max(x)
    powers = tl.where(highest == -float("inf"), tl.exp(x), tl.exp(x - highest))
    return highest, tl.sum(powers)


@triton.jit
def log_of_sums(highest, sums):
    """Combine the parts; absent parts have -inf and 0."""
    top = tl.max(highest)
    relative = tl.where(highest == -float("inf"), sums, sums * tl.exp(highest - top))
    return top + tl.log(tl.sum(relative))


PART_OF_SUM = 4096  # tokens


def log_probs_of(logits: Float[Tensor, "R V"], tokens: Int[Tensor, " R"]) -> Float[Tensor, " R"]:
    """Return the log-probability of a given token of each row, equal to sampling.log_probs_of within fp32's rounding.

    Several programs read parts of one row; each returns (maximum, sum of exp(x - maximum)), which
    are then combined. NaN or +inf anywhere makes the row's result NaN, as in log_softmax; so does a
    row of nothing but -inf.
    """
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    num_rows, vocab = logits.shape
    out = torch.empty(num_rows, device=logits.device)
    if num_rows == 0:
        return out

    num_parts = triton.cdiv(vocab, PART_OF_SUM)
    stride = logits.stride(0)
    highest, sums = torch.empty(2, num_rows, num_parts, device=logits.device).unbind()
    launch(sum_parts, (num_rows, num_parts))(
        logits, stride, vocab, highest, sums, num_parts, BLOCK=PART_OF_SUM
    )
    parts = triton.next_power_of_2(num_parts)
    launch(gather, (num_rows,))(logits, stride, tokens, highest, sums, out, num_parts, PARTS=parts)
    return out


@triton.jit
def sum_parts(logits, stride, vocab, highest, sums, num_parts, BLOCK: tl.constexpr):
    """Triton kernel: each part's maximum logit and sum of exponentials."""
    row = tl.program_id(0)
    part = tl.program_id(1)
    _, _, x = load_row(logits, stride, row, part, vocab, BLOCK)
    top, total = part_of_sum(x)
    tl.store(highest + row * num_parts + part, top)
    tl.store(sums + row * num_parts + part, total)


@triton.jit
def gather(logits, stride, tokens, highest, sums, out, num_parts, PARTS: tl.constexpr):
    """Triton kernel: a given token's logit minus the row's logsumexp."""
    row = tl.program_id(0)
    parts = tl.arange(0, PARTS)
    at = row * num_parts + parts
    real = parts < num_parts
    tops = tl.load(highest + at, mask=real, other=-float("inf"))
    totals = tl.load(sums + at, mask=real, other=0.0)
    total = log_of_sums(tops, totals)

    token = tl.load(tokens + row)
    x = tl.load(logits + row.to(tl.int64) * stride + token).to(tl.float32)
    tl.store(out + row, x - total)
