"""Log-probabilities of given tokens from logits of any width: one logsumexp and one logit per row.

Equal to `sampling.log_probs_of` within fp32's rounding. Several programs read parts of one row; each returns
(maximum, sum of exp(x - maximum)), which are then combined. NaN or +inf anywhere makes the row's result NaN, as in
log_softmax; so does a row of nothing but -inf.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor

from eagle_ray.kernels.launch import launch
from eagle_ray.kernels.topk_topp import load_row


@triton.jit
def part_of_sum(x):
    """Return a part's maximum and its sum relative to that; -inf and 0 if it has nothing above -inf."""
    highest = tl.max(x)
    return highest, tl.sum(tl.where(highest == -float("inf"), tl.exp(x), tl.exp(x - highest)))


@triton.jit
def log_of_sums(highest, sums):
    """Combine the parts; absent parts have -inf and 0."""
    top = tl.max(highest)
    return top + tl.log(tl.sum(tl.where(highest == -float("inf"), sums, sums * tl.exp(highest - top))))


BLOCK = 4096  # tokens of a part


def log_probs_of(logits: Float[Tensor, "R V"], tokens: Int[Tensor, " R"]) -> Float[Tensor, " R"]:
    """Return the log-probability of each token, as sampling.log_probs_of."""
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    num_rows, vocab = logits.shape
    num_parts = triton.cdiv(vocab, BLOCK)
    highest, sums = torch.empty(2, num_rows, num_parts, device=logits.device).unbind()
    out = torch.empty(num_rows, device=logits.device)
    if num_rows:
        launch(sum_parts, (num_rows, num_parts))(logits, logits.stride(0), vocab, highest, sums, num_parts, BLOCK=BLOCK)
        parts = triton.next_power_of_2(num_parts)
        launch(gather, (num_rows,))(logits, logits.stride(0), tokens, highest, sums, out, num_parts, PARTS=parts)
    return out


@triton.jit
def sum_parts(logits, stride, vocab, highest, sums, num_parts, BLOCK: tl.constexpr):
    """Compute each part's maximum logit and sum of exponentials."""
    row, part = tl.program_id(0), tl.program_id(1)
    _, _, x = load_row(logits, stride, row, part, vocab, BLOCK)
    top, total = part_of_sum(x)
    tl.store(highest + row * num_parts + part, top)
    tl.store(sums + row * num_parts + part, total)


@triton.jit
def gather(logits, stride, tokens, highest, sums, out, num_parts, PARTS: tl.constexpr):
    """Compute the token's logit minus the row's logsumexp."""
    row, parts = tl.program_id(0), tl.arange(0, PARTS)
    at, real = row * num_parts + parts, parts < num_parts
    tops = tl.load(highest + at, mask=real, other=-float("inf"))
    total = log_of_sums(tops, tl.load(sums + at, mask=real, other=0.0))
    x = tl.load(logits + row.to(tl.int64) * stride + tl.load(tokens + row)).to(tl.float32)
    tl.store(out + row, x - total)
