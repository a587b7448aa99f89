"""EnsembleCalibration: from what several drafters say of a child to how often the target picks it.

A drafter that is alone with a child is taken at its word; those that offer it together are weighed against each other:

    P = sigmoid(sum over drafters that propose it of a * logit(p) + sum over the others of b + c)

on conditional probabilities, with weights for each level and kind of row that are fitted to the target's picks, those
of drafters alone and in company apart; it begins as the mean of the logits. At most 1, so values never rise along a
path. Like Calibration it learns from every offered child of a node that was reached, verified or not.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import logsigmoid

from eagle_ray.sampling.calibration import KINDS, logit
from eagle_ray.sampling.online_newton import OnlineFit


class EnsembleCalibration:
    """For the children that A drafters offer on up to `levels` levels."""

    def __init__(self, levels: int, num_drafters: int, device: torch.device | str = "cpu"):
        alone, together, lacks = [1.0] * num_drafters, [1 / num_drafters] * num_drafters, [0.0] * num_drafters
        slopes, offsets = 2 * num_drafters, num_drafters + 1
        self.fit = OnlineFit(
            [*alone, *together, *lacks, 0.0],
            [*[0.0] * slopes, *[-12.0] * offsets],
            [*[6.0] * slopes, *[12.0] * offsets],
            levels=levels,
            sets=KINDS,
            precision=10.0,
            device=device,
        )

    def apply(
        self, depths: Int[Tensor, "B N"], kinds: Int[Tensor, " B"], said: Float[Tensor, "B N A"]
    ) -> Float[Tensor, "B N"]:
        """Log-probabilities of nodes given their parents. depths: 1 for the roots' children; of roots, anything.

        kinds: 1 for sampled rows, 0 for greedy ones. said: calibrated, -inf where a drafter lacks the node.
        """
        weights = self.fit.parameters[(depths - 1).clamp(min=0), kinds[:, None]]
        return logsigmoid((_features(said) * weights).sum(-1))

    def update(
        self,
        level: int,
        kinds: Int[Tensor, " B"],
        said: Float[Tensor, "B N A"],
        offered: Bool[Tensor, "B N"],
        picked: Bool[Tensor, "B N"],
    ) -> None:
        """What the target did with the children of one node of each row.

        offered: the children, none where the node was not reached. picked: the one that carries the target's pick.
        """
        x = _features(said)
        predicted = torch.sigmoid((x * self.fit.parameters[level][kinds][:, None]).sum(2))
        of_kind = torch.stack([kinds == kind for kind in range(KINDS)]).float()
        gradient = torch.einsum("bn,bnp->bp", offered * (picked.float() - predicted), x)
        fisher = torch.einsum("bn,bnp,bnq->bpq", offered * predicted * (1 - predicted), x, x)
        reached = of_kind @ offered.any(1).float()
        self.fit.update(level, of_kind @ gradient, torch.einsum("sb,bpq->spq", of_kind, fisher), reached)


def _features(said: Float[Tensor, "B N A"]) -> Float[Tensor, "B N P"]:
    """The logits of drafters that are alone, of those in company; for each drafter whether it lacks the child; 1."""
    offers = said > -torch.inf
    logits = torch.where(offers, logit(said), 0.0)
    alone = offers.sum(-1, keepdim=True) == 1
    one = torch.ones_like(logits[..., :1])
    return torch.cat([logits * alone, logits * ~alone, (~offers).float(), one], -1)
