"""Coupling: how likely the target, reading the same noise, is to pick each token of a drafter's distribution.

The target picks ``argmax(target_logits + T * g)`` among the tokens its processors keep, with Gumbel noise g that is a
function of (seed, position, token). The drafter knows g and roughly knows the logits: the pick is a conditional logit,

    P(token) = softmax(w0 * draft_logit + T * (w1 * g + w2 * max(g - 4, 0)) + w3 * dropped)

whose four weights per level are fitted to the picks seen. 1 / w1 is the drafter's error in units of the noise; large
noise lifts tokens of the tail, about which that error is another one: hence w2. `dropped` marks what the *draft's*
top-k, top-p and min-p would drop: the target may still keep it, at odds that are fitted like the rest.

The weights are of logits, not of probabilities at T, so that rows of different temperatures share them. What is drafted
this way changes how much is accepted, never what is produced.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from eagle_ray.sampling.online_newton import OnlineFit
from eagle_ray.sampling.sampler import SamplingBatch, process

LARGE_NOISE = 4.0  # 1.8 % of tokens draw more
NUM_CUT = 64  # how many of the best tokens the draft's own top-k, top-p and min-p are worked out on


class Coupling:
    """Four weights per level. They start where a trained small pair ended, close to the draft's own ranking."""

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
        level: int,
        logits: Float[Tensor, "S F V"],
        sampling: SamplingBatch,
        rows: Int[Tensor, " S"],
        noise: Float[Tensor, "S V"],
    ) -> Float[Tensor, "S F V"]:
        """Log-probability that the target picks each token after each of F nodes.

        rows: the sequences, indices into sampling, all of them sampled. noise: `gumbel_noise` at the positions of the
        tokens that are chosen after these nodes.
        """
        on_logits, on_noise, on_large, on_dropped = self.fit.parameters[level, 0].unbind()
        push = sampling.temperature[rows, None] * (on_noise * noise + on_large * (noise - LARGE_NOISE).clamp(min=0))
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
        """What the target picked after one node of each sequence on each of the first L levels; nodes that were not
        reached say nothing.
        """
        levels, temperature = slice(len(logits)), sampling.temperature[rows, None]
        cut = torch.zeros_like(logits)
        if sampling.any_cut:
            cut = dropped(logits.transpose(0, 1), sampling, rows).transpose(0, 1).float()
        x = torch.stack([logits, temperature * noise, temperature * (noise - LARGE_NOISE).clamp(min=0), cut], 3)
        probs = (x @ self.fit.parameters[levels, 0, None, :, None])[..., 0].softmax(-1)
        x = x - probs[:, :, None] @ x  # less the expected features of the row
        seen = reached.float()[:, None]
        at_pick = x.take_along_dim(picks[:, :, None, None], 2)[:, :, 0]
        fisher = (x * (probs * reached[:, :, None])[..., None]).flatten(1, 2).transpose(1, 2) @ x.flatten(1, 2)
        self.fit.update(levels, seen @ at_pick, fisher[:, None], seen.sum(2))


def dropped(logits: Float[Tensor, "S F V"], sampling: SamplingBatch, rows: Int[Tensor, " S"]) -> Bool[Tensor, "S F V"]:
    """Tokens that top-k, top-p and min-p would drop from these logits, worked out on the NUM_CUT best of them."""
    return logits < least_kept(logits, sampling, rows)[:, :, None]


def least_kept(
    logits: Float[Tensor, "S F V"], sampling: SamplingBatch, rows: Int[Tensor, " S"]
) -> Float[Tensor, "S F"]:
    """The least of the NUM_CUT best logits that top-k, top-p and min-p would keep; -inf where they keep them all."""
    best = logits.topk(min(NUM_CUT, logits.shape[-1]), -1).values
    kept = process(best.flatten(0, 1), sampling, rows.repeat_interleave(logits.shape[1])).isfinite().view_as(best)
    least = best.masked_fill(~kept, torch.inf).amin(-1)
    return least.masked_fill(kept.all(-1), -torch.inf)
