"""Which tokens rounding can make the target sample: near-ties, and tokens at the edge of top-k, top-p or min-p.

A pass over many rows rounds differently from a pass over one row: fp32 logits differ by up to 2e-5. So two exact
engines may differ if the best two scores are closer than that, or if a filter keeps a token in one pass and drops it
in the other. Both are decided here from the logits of plain decoding at the first token that differs.

    >>> scores = torch.tensor([2.0, 1.99999, 0.0])
    >>> rounding_cause(scores, SamplingParams(), 7, 0, 1, tolerance=1e-4)
    'tie'
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from eagle_ray.core.sampling_batch import SamplingBatch
from eagle_ray.requests.parameters import SamplingParams
from eagle_ray.sampling.sampler import gumbel_noise

NEAR_TIE = {torch.float32: 1e-4, torch.bfloat16: 0.5, torch.float16: 0.1}
"""Logits: how far rounding moves the difference of two of them at most, with a margin. fp32 measured: 2 x 2e-5."""
SUM_ERROR = 1e-5  # of a cumulative probability, which fp32 sums over a large vocabulary
Cause = Literal["tie", "cut"]


def rounding_cause(
    logits: Float[Tensor, " V"], params: SamplingParams, position: int, plain: int, other: int, tolerance: float
) -> Cause | None:
    """Return why rounding can make the target sample `other` where plain decoding sampled `plain`; None if it cannot.

    "tie": the scores of both tokens, noise included, are nearly equal. "cut": a token crosses the edge of top-k, top-p
    or min-p.

    Args:
        logits: logits of plain decoding, for the token at `position`.
        position: index of that token in prompt + output.
        tolerance: how far rounding moves the difference of two logits, in logits.
    """
    if not reachable_tokens(logits, params, position, tolerance)[other]:
        return None
    noisy = _scores(logits, params) + _noise(params, position, len(logits))
    return "tie" if (noisy[plain] - noisy[other]).abs() <= _slack(params, tolerance) else "cut"


def reachable_tokens(
    logits: Float[Tensor, " V"], params: SamplingParams, position: int, tolerance: float
) -> Bool[Tensor, " V"]:
    """Return which tokens the target can sample if rounding moves the difference of any two logits by `tolerance`.

    A token is reachable if the filters may keep it and no token that they keep in any case leads it by more than that.
    """
    scores, slack = _scores(logits, params), _slack(params, tolerance)
    possible, certain = _retained(scores, params, slack)
    noisy = scores + _noise(params, position, len(scores))
    lower = noisy.masked_fill(~certain, -math.inf).max() - slack
    return possible & (noisy >= lower)


def _scores(logits: Float[Tensor, " V"], params: SamplingParams) -> Float[Tensor, " V"]:
    logits = logits.detach().double().cpu()
    return logits if params.is_greedy else logits / params.temperature


def _slack(params: SamplingParams, tolerance: float) -> float:
    """Return the tolerance in scores: temperature divides logits, and what rounding does to them."""
    return tolerance if params.is_greedy else tolerance / params.temperature


def _noise(params: SamplingParams, position: int, vocab: int) -> Float[Tensor, " V"] | float:
    if params.is_greedy:
        return 0.0
    seed = SamplingBatch.of([params]).seed
    return gumbel_noise(seed, torch.tensor([position]), torch.arange(vocab))[0].double()


def _retained(
    scores: Float[Tensor, " V"], params: SamplingParams, slack: float
) -> tuple[Bool[Tensor, " V"], Bool[Tensor, " V"]]:
    """Return which tokens top-k, top-p and min-p may keep, and which they keep however rounding moves the scores."""
    possible = certain = torch.ones_like(scores, dtype=torch.bool)
    if params.is_greedy:
        return possible, certain
    if 0 < params.top_k < len(scores):
        possible = _num_above(scores, slack) < params.top_k
        certain = _num_above(scores, -slack) - 1 < params.top_k  # less the token itself
    if params.top_p < 1:
        lower, upper = _mass_above(scores, possible, certain, slack)
        possible = possible & (lower < params.top_p + SUM_ERROR)
        certain = certain & (upper < params.top_p - SUM_ERROR)
    if params.min_p > 0:
        floor = scores.max() + math.log(params.min_p)
        possible = possible & (scores >= floor - slack)
        certain = certain & (scores >= floor + slack)
    leads = scores.max() - scores  # top-p and min-p never drop the most probable token
    return possible | (leads == 0), certain | ((leads == 0) & (_num_above(scores, -slack) == 1))


def _num_above(scores: Float[Tensor, " V"], slack: float) -> Tensor:
    """Return for each token how many tokens score more than slack above it; a negative slack counts near ones too."""
    ascending = scores.sort().values
    return len(scores) - torch.searchsorted(ascending, scores + slack, right=slack > 0)


def _mass_above(
    scores: Float[Tensor, " V"], possible: Bool[Tensor, " V"], certain: Bool[Tensor, " V"], slack: float
) -> tuple[Float[Tensor, " V"], Float[Tensor, " V"]]:
    """Return the least and the most probability that can stand above each token among the tokens that top-k keeps."""
    weights = (scores - scores.max()).exp()
    order = scores.argsort()
    ascending = scores[order]

    def above(retained: Bool[Tensor, " V"], shift: float, is_strict: bool) -> Float[Tensor, " V"]:
        suffix = (weights * retained)[order].flip(0).cumsum(0).flip(0)
        place = torch.searchsorted(ascending, scores + shift, right=is_strict)
        return torch.cat([suffix, suffix.new_zeros(1)])[place]

    lower = above(certain, slack, True) / weights[possible].sum()
    own = weights * possible
    upper = (above(possible, -slack, False) - own) / weights[certain].sum().clamp(min=1e-300)
    return lower * math.exp(-slack), upper * math.exp(slack)
