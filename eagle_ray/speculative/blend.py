"""Blend: from what several drafters say of a child to how often the target picks it.

The surest of them is believed, more or less so by who else offers the child and who does not:

    P = sigmoid(a * max over drafters of logit(p) + sum of b over the drafters that lack the child + c)

on conditional probabilities, with weights for each level and kind of row that are fitted to the target's picks; it
begins as the maximum itself. At most 1, so values never rise along a path. Like Calibration it learns from every
offered child of a node that was reached, verified or not. Does not know trees or drafters.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import logsigmoid

from eagle_ray.speculative.calibration import KINDS, logit
from eagle_ray.speculative.online_fit import OnlineFit


class Blend:
    """For the children that A drafters offer on up to `levels` levels."""

    def __init__(self, levels: int, num_drafters: int, device: torch.device | str = "cpu"):
        others = num_drafters + 1
        self.fit = OnlineFit(
            [1.0] + [0.0] * others,
            [0.1] + [-12.0] * others,
            [6.0] + [12.0] * others,
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

    def learn(
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
    """The surest drafter's logit; for each drafter whether it lacks the child; 1."""
    surest = logit(said.amax(-1, keepdim=True))
    return torch.cat([surest, (said == -torch.inf).float(), torch.ones_like(surest)], -1)
