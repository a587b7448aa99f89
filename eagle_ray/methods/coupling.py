"""Coupling: the probability that the target, given the noise, samples each token of a drafter's distribution.

The target samples ``argmax(target_logits + T * g)`` among the tokens that its filters keep, with
Gumbel noise g that is a function of (seed, position, token). The drafter knows g and approximately
the logits, so the sample is a conditional logit:

    P(token) = softmax(w0 * draft_logit + T * (w1 * g + w2 * max(g - 4, 0)) + w3 * dropped)

Its four weights per level are fitted to observed samples. 1 / w1 is the drafter's error in units of
the noise. Large noise lifts tokens of the tail, where that error is different: hence w2. `dropped`
marks tokens that the *draft's* top-k, top-p and min-p would drop: the target may still keep them,
with fitted odds.

The weights apply to logits, not to probabilities at T, so rows of different temperatures share
them. Coupling changes how many drafts are accepted, never the output.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from eagle_ray.core.sampling_batch import SamplingBatch
from eagle_ray.methods.calibration import OnlineFit
from eagle_ray.sampling.sampler import process

LARGE_NOISE = 4.0  # 1.8 % of tokens draw more
NUM_CUT = 64  # how many of the best tokens the draft's own top-k, top-p and min-p are worked out on


class Coupling:
    """Probabilities of drafted tokens given the target's sampling noise, with four fitted weights per level.

    The start values come from a trained small pair and are close to the draft's own ranking.
    """

    def __init__(self, levels: int, device: torch.device | str = "cpu"):
        self.fit = OnlineFit(
            [1.2, 0.3, 0.3, 0.0],
            [0.1, 0.0, 0.0, -20.0],
            [20.0, 20.0, 20.0, 5.0],
            levels=levels,
            sets=1,
            precision=20.0,
            device=device,
        )

    def log_probs(
        self,
        level: int | Int[Tensor, " 1"],
        logits: Float[Tensor, "S F V"],
        sampling: SamplingBatch,
        rows: Int[Tensor, " S"],
        noise: Float[Tensor, "S V"],
    ) -> Float[Tensor, "S F V"]:
        """Return the log-probability that the target samples each token after each of F nodes.

        Args:
            rows: indices of sampled sequences into sampling.
            noise: `gumbel_noise` at the positions of the tokens to be sampled.
        """
        on_logits, on_noise, on_large, on_dropped = self.fit.at(level)[0].unbind()
        large = (noise - LARGE_NOISE).clamp(min=0)
        push = sampling.temperature[rows, None] * (on_noise * noise + on_large * large)
        scores = on_logits * logits + push[:, None]
        if sampling.any_cut:
            scores = scores + on_dropped * dropped(logits, sampling, rows)
        return scores.log_softmax(-1)

    def update(
        self,
        logits: Float[Tensor, "L S V"],
        sampling: SamplingBatch,
        rows: Int[Tensor, " S"],
        noise: Float[Tensor, "L S V"],
        picks: Int[Tensor, "L S"],
        reached: Bool[Tensor, "L S"],
    ) -> None:
        """Fit to what the target sampled after one node per sequence on each of the first L levels.

        Nodes that were not reached are ignored.
        """
        # What each weight multiplies.
        temperature = sampling.temperature[rows, None]
        large = (noise - LARGE_NOISE).clamp(min=0)
        cut = torch.zeros_like(logits)
        if sampling.any_cut:
            cut = dropped(logits.transpose(0, 1), sampling, rows).transpose(0, 1).float()
        x = torch.stack([logits, temperature * noise, temperature * large, cut], 3)

        # The gradient of a conditional logit: the features of the sampled token, less the expected ones.
        weights = self.fit.parameters[: len(logits), 0]
        probs = (x @ weights[:, None, :, None])[..., 0].softmax(-1)
        x = x - probs[:, :, None] @ x
        seen = reached.float()[:, None]
        at_token = x.take_along_dim(picks[:, :, None, None], 2)[:, :, 0]
        gradient = seen @ at_token

        # Its Fisher information: the features' covariance, summed over the rows that were reached.
        seen_probs = probs * reached[:, :, None]
        weighted = (x * seen_probs[..., None]).flatten(1, 2)
        fisher = weighted.transpose(1, 2) @ x.flatten(1, 2)
        self.fit.update(gradient, fisher[:, None], seen.sum(2))


def dropped(
    logits: Float[Tensor, "S F V"], sampling: SamplingBatch, rows: Int[Tensor, " S"]
) -> Bool[Tensor, "S F V"]:
    """Return which tokens top-k, top-p and min-p would drop from these logits, computed on the best NUM_CUT of them."""
    floor = lowest_retained(logits, sampling, rows)
    return logits < floor[:, :, None]


def lowest_retained(
    logits: Float[Tensor, "S F V"], sampling: SamplingBatch, rows: Int[Tensor, " S"]
) -> Float[Tensor, "S F"]:
    """Return the lowest of the best NUM_CUT logits that top-k, top-p and min-p keep; -inf if they keep all."""
    best = logits.topk(min(NUM_CUT, logits.shape[-1]), -1).values
    repeated = rows.repeat_interleave(logits.shape[1])
    processed = process(best.flatten(0, 1), sampling, repeated)
    is_retained = processed.isfinite().view_as(best)
    floor = best.masked_fill(~is_retained, torch.inf).amin(-1)
    return floor.masked_fill(is_retained.all(-1), -torch.inf)
