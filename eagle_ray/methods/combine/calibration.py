"""EnsembleCalibration: map the probabilities of several drafters for a child to the rate at which the target samples
it.

A child that only one drafter proposes has that drafter's probability; probabilities of several drafters are
combined:

    P = sigmoid(sum over drafters that propose it of a * logit(p) + sum over the others of b + c)

on conditional probabilities, with weights per level and kind of row, fitted to the target's samples, separately for
drafters that propose a child alone and together. The start is the mean of the logits. P is at most 1, so values
never rise along a path. As in Calibration, all proposed children of a reached node are observed, verified or not.

That a drafter lacks a child counts only if it proposes something else for that sequence. Steps in which no model drafts
have weights of their own: there a lookup's child is also one that the model would have proposed.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import logsigmoid

from eagle_ray.methods.calibration import KINDS, OnlineFit, logit


class EnsembleCalibration:
    """Weights for children that A drafters propose on up to `levels` levels."""

    def __init__(self, levels: int, num_drafters: int, device: torch.device | str = "cpu"):
        alone, together, lacks = [1.0] * num_drafters, [1 / num_drafters] * num_drafters, [0.0] * num_drafters
        slopes, offsets = 2 * num_drafters, num_drafters + 1
        self.fit = OnlineFit(
            [*alone, *together, *lacks, 0.0],
            [*[0.0] * slopes, *[-12.0] * offsets],
            [*[6.0] * slopes, *[12.0] * offsets],
            levels=levels,
            sets=2 * KINDS,
            precision=10.0,
            device=device,
        )

    @staticmethod
    def sets(kinds: Int[Tensor, " B"], has_model: bool = True) -> Int[Tensor, " B"]:
        """Return the weights of each row. kinds: 1 for sampled rows, 0 for greedy ones. has_model: a model drafted."""
        return kinds if has_model else kinds + KINDS

    def apply(
        self, depths: Int[Tensor, "B N"], sets: Int[Tensor, " B"], log_probs: Float[Tensor, "B N A"]
    ) -> Float[Tensor, "B N"]:
        """Return conditional log-probabilities of nodes.

        depths: 1 for the roots' children; roots may have any value.
        log_probs: calibrated log-probabilities by drafter, -inf if a drafter lacks the node; the root comes first.
        """
        weights = self.fit.parameters[(depths - 1).clamp(min=0), sets[:, None]]
        return logsigmoid((_features(log_probs) * weights).sum(-1))

    def update(
        self,
        level: int,
        sets: Int[Tensor, " B"],
        log_probs: Float[Tensor, "B N A"],
        offered: Bool[Tensor, "B N"],
        picked: Bool[Tensor, "B N"],
    ) -> None:
        """Observe the target's sample after one node of each row.

        offered: the proposed children, none if the node was not reached. picked: the child with the target's token.
        """
        x = _features(log_probs)
        predicted = torch.sigmoid((x * self.fit.parameters[level][sets][:, None]).sum(2))
        of_set = torch.stack([sets == number for number in range(2 * KINDS)]).float()
        gradient = torch.einsum("bn,bnp->bp", offered * (picked.float() - predicted), x)
        fisher = torch.einsum("bn,bnp,bnq->bpq", offered * predicted * (1 - predicted), x, x)
        reached = of_set @ offered.any(1).float()
        self.fit.update(level, of_set @ gradient, torch.einsum("sb,bpq->spq", of_set, fisher), reached)


def _features(log_probs: Float[Tensor, "B N A"]) -> Float[Tensor, "B N P"]:
    """Return the logits of drafters that propose alone, of those that propose together, which drafters lack the child
    although they propose others, and 1.
    """
    offers = log_probs > -torch.inf
    lacks = ~offers & offers[:, 1:].any(1, keepdim=True)
    logits = torch.where(offers, logit(log_probs), 0.0)
    alone = offers.sum(-1, keepdim=True) == 1
    one = torch.ones_like(logits[..., :1])
    return torch.cat([logits * alone, logits * ~alone, lacks.float(), one], -1)
