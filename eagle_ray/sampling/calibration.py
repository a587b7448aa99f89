"""Calibration: from what a drafter says of a child to how often the target picks it.

A logistic map for each level, ``sigmoid(a * logit(p) + b)``, on *conditional* probabilities (of a child, its parent
being accepted), with c more for the first child of a node: targets pick what a drafter thinks likeliest more often than
a second choice of the same p (measured: 0.35 and 0.13 of the time where both were said to be 0.16). Never above 1,
rising in p and c never below 0: so it keeps the order of siblings, which are sorted, likeliest first, and products
along paths still never rise. Rows that are sampled have maps of their own: there p means something else.

The labels are free of the budget's choice: once a node is reached, the target's pick tells of *all* its drafted
children which one it was, whether or not they were given a verify row. What stays unseen is only what follows nodes
that were never reached.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import logsigmoid

from eagle_ray.sampling.online_newton import OnlineFit

LARGEST_LOGIT = 16.0
KINDS = 2  # 0: greedy rows, 1: sampled rows


class Calibration:
    """A slope, an offset and a first child's own per level and kind of row; the identity until picks say otherwise."""

    def __init__(self, levels: int, device: torch.device | str = "cpu"):
        self.fit = OnlineFit(
            [1.0, 0.0, 0.0],
            [0.1, -12.0, 0.0],
            [6.0, 12.0, 6.0],
            levels=levels,
            sets=KINDS,
            precision=10.0,
            device=device,
        )

    def apply(self, level: int, kinds: Int[Tensor, " B"], log_probs: Float[Tensor, "B F K"]) -> Float[Tensor, "B F K"]:
        """Calibrated conditional log-probabilities; padding (-inf) stays. kinds: 1 for sampled rows, else 0."""
        slope, offset, first = self.fit.parameters[level][kinds][:, :, None, None].unbind(1)
        mapped = slope * logit(log_probs) + offset
        mapped[..., :1] += first
        return logsigmoid(mapped).masked_fill(log_probs == -torch.inf, -torch.inf)

    def update(
        self,
        kinds: Int[Tensor, " B"],
        log_probs: Float[Tensor, "L B K"],
        picked: Bool[Tensor, "L B K"],
        reached: Bool[Tensor, "L B"],
    ) -> None:
        """What the target did with the children of one node of each row on each of the first L levels.

        log_probs: as `apply` was given them. picked: the child that carries the target's pick. reached: whether the
        node was; other rows say nothing.
        """
        levels = slice(len(log_probs))
        one, first = torch.ones_like(log_probs), torch.zeros_like(log_probs)
        first[..., :1] = 1.0
        x = torch.stack([logit(log_probs), one, first], 3)
        predicted = torch.sigmoid((x * self.fit.parameters[levels, kinds][:, :, None]).sum(3))
        of_kind = torch.stack([reached & (kinds == kind) for kind in range(KINDS)], 1).float()
        real = (log_probs > -torch.inf).float()
        gradient = torch.einsum("lbk,lbkp->lbp", real * (picked.float() - predicted), x)
        fisher = torch.einsum("lbk,lbkp,lbkq->lbpq", real * predicted * (1 - predicted), x, x)
        self.fit.update(levels, of_kind @ gradient, torch.einsum("lsb,lbpq->lspq", of_kind, fisher), of_kind.sum(2))


def logit(log_probs: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    """log(p / (1 - p)) from log p, cut off at +-LARGEST_LOGIT."""
    log_probs = log_probs.clamp(max=-1e-7)
    return (log_probs - torch.log(-torch.expm1(log_probs))).clamp(-LARGEST_LOGIT, LARGEST_LOGIT)
