"""Calibration: map a drafter's probability of a child to the rate at which the target samples it.

A logistic map per level, ``sigmoid(a * logit(p) + b)``, on *conditional* probabilities (of a child, given that its
parent is accepted), plus c for the first child of a node: targets sample the drafter's first choice more often than
a second choice with equal p (measured: rates of 0.35 and 0.13 for p = 0.16). The result is at most 1, rises in p,
and c is at least 0. So siblings keep their order, and products along paths never rise. Sampled rows have maps of
their own, since p means something else there.

The budget does not bias the labels: once a node is reached, the target's sample tells for *all* its drafted children
which one it was, whether they were verified or not. Only children of nodes that were never reached stay unobserved.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import logsigmoid

from eagle_ray.methods.online_newton import OnlineFit

LARGEST_LOGIT = 16.0
KINDS = 2  # 0: greedy rows, 1: sampled rows


class Calibration:
    """Slope, offset and first-child term per level and kind of row; the identity at first."""

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

    def apply(
        self, level: int | Int[Tensor, " 1"], kinds: Int[Tensor, " B"], log_probs: Float[Tensor, "B F K"]
    ) -> Float[Tensor, "B F K"]:
        """Return calibrated conditional log-probabilities; padding (-inf) stays. kinds: 1 for sampled rows, else 0."""
        slope, offset, first = self.fit.at(level)[kinds][:, :, None, None].unbind(1)
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
        """Observe the target's sample after one node of each row on each of the first L levels.

        log_probs: as passed to `apply`. picked: the child with the target's token. reached: whether the node was
        reached; other rows are ignored.
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
    """Return log(p / (1 - p)) from log p, clamped to +-LARGEST_LOGIT."""
    log_probs = log_probs.clamp(max=-1e-7)
    return (log_probs - torch.log(-torch.expm1(log_probs))).clamp(-LARGEST_LOGIT, LARGEST_LOGIT)
