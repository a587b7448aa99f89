"""Decide whether rounding explains a differing token: near-ties, and tokens at the edge of top-k, top-p or min-p.

A pass over many rows rounds differently from a pass over one row: fp32 logits differ by up to 2e-5.
So two exact engines may differ if the best two scores are closer than that, or if a filter keeps a
token in one pass and drops it in the other. Both are decided here from the logits of plain decoding
at the first token that differs.

    >>> scores = torch.tensor([2.0, 1.99999, 0.0])
    >>> rounding_cause(scores, SamplingSettings(), 7, 0, 1, tolerance=1e-4)
    'tie'
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from eagle_ray.core.sampling_batch import SamplingBatch
from eagle_ray.core.sampling_settings import SamplingSettings
from eagle_ray.sampling.noise import gumbel_noise

NEAR_TIE = {torch.float32: 1e-4, torch.bfloat16: 0.5, torch.float16: 0.1}
"""Logits: how far rounding moves the difference of two of them at most, with a margin. fp32 measured: 2 x 2e-5."""
SUM_ERROR = 1e-5  # error of a cumulative probability, which fp32 sums over a large vocabulary
Cause = Literal["tie", "cut"]


def rounding_cause(
    logits: Float[Tensor, " V"],
    params: SamplingSettings,
    position: int,
    plain: int,
    other: int,
    tolerance: float,
) -> Cause | None:
    """Return why rounding may have made the target sample `other` instead of plain decoding's
    `plain`; None if it cannot.

    "tie": the scores of both tokens, noise included, are nearly equal. "cut": a token crosses the
    edge of top-k, top-p or min-p.

    Args:
        logits: logits of plain decoding, for the token at `position`.
        position: index of that token in prompt + output.
        tolerance: maximum change of the difference of two logits by rounding.
    """
    if not reachable_tokens(logits, params, position, tolerance)[other]:
        return None
    scores = _scores(logits, params)
    noisy = scores + _noise(params, position, len(logits))
    difference = (noisy[plain] - noisy[other]).abs()
    is_near = difference <= _slack(params, tolerance)
    return "tie" if is_near else "cut"


def reachable_tokens(
    logits: Float[Tensor, " V"], params: SamplingSettings, position: int, tolerance: float
) -> Bool[Tensor, " V"]:
    """Return which tokens the target can sample if rounding moves the difference of any two logits by `tolerance`.

    A token is reachable if the filters may keep it, and no token that they certainly keep is ahead
    of it by more than the tolerance.
    """
    scores = _scores(logits, params)
    slack = _slack(params, tolerance)
    possible, certain = _retained(scores, params, slack)
    noisy = scores + _noise(params, position, len(scores))

    # The best token that is kept in any case may lose at most the slack.
    best = noisy.masked_fill(~certain, -math.inf).max()
    is_near = noisy >= best - slack
    return possible & is_near


def _scores(logits: Float[Tensor, " V"], params: SamplingSettings) -> Float[Tensor, " V"]:
    """Return logits over temperature, in fp64."""
    logits = logits.detach().double().cpu()
    return logits if params.is_greedy else logits / params.temperature


def _slack(params: SamplingSettings, tolerance: float) -> float:
    """Return the tolerance in scores. Temperature divides logits, and so the rounding in them."""
    return tolerance if params.is_greedy else tolerance / params.temperature


def _noise(params: SamplingSettings, position: int, vocab: int) -> Float[Tensor, " V"] | float:
    """Return the noise of the tokens at a position."""
    if params.is_greedy:
        return 0.0
    seed = SamplingBatch.of([params]).seed
    noise = gumbel_noise(seed, torch.tensor([position]), torch.arange(vocab))
    return noise[0].double()


def _retained(
    scores: Float[Tensor, " V"], params: SamplingSettings, slack: float
) -> tuple[Bool[Tensor, " V"], Bool[Tensor, " V"]]:
    """Return which tokens top-k, top-p and min-p may keep, and which they keep however rounding moves the scores."""
    possible = torch.ones_like(scores, dtype=torch.bool)
    certain = possible
    if params.is_greedy:
        return possible, certain

    # A filter takes from `possible` what it drops in any case, and from `certain` what it may drop.
    if 0 < params.top_k < len(scores):
        possible = _num_above(scores, slack) < params.top_k
        certain = _num_above(scores, -slack) - 1 < params.top_k  # less the token itself
    if params.top_p < 1:
        lower, upper = _mass_above(scores, possible, certain, slack)
        may_stay = lower < params.top_p + SUM_ERROR
        stays = upper < params.top_p - SUM_ERROR
        possible = possible & may_stay
        certain = certain & stays
    if params.min_p > 0:
        floor = scores.max() + math.log(params.min_p)
        may_stay = scores >= floor - slack
        stays = scores >= floor + slack
        possible = possible & may_stay
        certain = certain & stays

    # Top-p and min-p never drop the most probable token, which is certain if no other one is as near.
    is_best = scores.max() - scores == 0
    is_alone = _num_above(scores, -slack) == 1
    possible = possible | is_best
    certain = certain | (is_best & is_alone)
    return possible, certain


def _num_above(scores: Float[Tensor, " V"], slack: float) -> Tensor:
    """Return for each token how many tokens score more than slack above it; a negative slack counts near ones too."""
    ascending = scores.sort().values
    num_below = torch.searchsorted(ascending, scores + slack, right=slack > 0)
    return len(scores) - num_below


def _mass_above(
    scores: Float[Tensor, " V"],
    possible: Bool[Tensor, " V"],
    certain: Bool[Tensor, " V"],
    slack: float,
) -> tuple[Float[Tensor, " V"], Float[Tensor, " V"]]:
    """Return the least and the most probability that can stand above each token among the tokens that top-k keeps."""
    weights = (scores - scores.max()).exp()
    order = scores.argsort()
    ascending = scores[order]

    def above(retained: Bool[Tensor, " V"], shift: float, is_strict: bool) -> Float[Tensor, " V"]:
        """Return the weights of retained tokens that score more than `shift` above each token."""
        own = (weights * retained)[order]
        suffix = own.flip(0).cumsum(0).flip(0)
        none = suffix.new_zeros(1)
        place = torch.searchsorted(ascending, scores + shift, right=is_strict)
        return torch.cat([suffix, none])[place]

    # Least: the fewest tokens that may stand above it, of as much as may be kept in all.
    largest_total = weights[possible].sum()
    lower = above(certain, slack, True) / largest_total
    lower = lower * math.exp(-slack)

    # Most: every token that may stand above it, but not itself, of the least that is kept in all.
    others = above(possible, -slack, False) - weights * possible
    smallest_total = weights[certain].sum().clamp(min=1e-300)
    upper = others / smallest_total
    upper = upper * math.exp(slack)
    return lower, upper
