"""Training of the embedded target: next-token prediction on packed rows, answers weighted above questions.

Takes any causal language model whose call gives an object with `.logits`; builds none and saves none.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional

from eagle_ray.training.optimization import GradientDescent, Losses, StepReport
from eagle_ray.training.packing import TrainingRows

LOGIT_PENALTY = 1e-4


def initialize(model: nn.Module, num_layers: int) -> None:
    """Normal weights by fan-in for the layers' matrices, smaller where they write to the residual stream."""
    for name, parameter in model.named_parameters():
        if parameter.dim() != 2:
            continue
        scale = 0.5 / math.sqrt(parameter.shape[1])
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            scale /= math.sqrt(2 * num_layers)
        nn.init.normal_(parameter, std=scale if "layers" in name else 0.02)


def target_losses(model: nn.Module, rows: TrainingRows) -> Losses:
    """Weighted cross-entropy, plus a little of the squared log-partition so that logits stay centred.

    Both are divided by the summed weights. Shown in addition to the loss: the plain cross-entropy of answer tokens
    ("nats") and their number ("answers"), both over that same denominator.
    """
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = model(input_ids=rows.ids[:, :-1], use_cache=False).logits.float()
    weights, answers = rows.weights[:, 1:], rows.answer_mask[:, 1:]
    flat = functional.cross_entropy(logits.flatten(0, 1), rows.ids[:, 1:].flatten(), reduction="none")
    entropies = flat.view_as(weights)
    loss = (entropies * weights).sum()
    penalty = (logits.logsumexp(-1).square() * (weights > 0)).sum()
    shown = {"loss": loss, "nats": (entropies * answers).sum(), "answers": answers.sum()}
    return Losses(
        loss + LOGIT_PENALTY * penalty, weights.sum().item(), {name: value.item() for name, value in shown.items()}
    )


def train_target(
    model: nn.Module,
    rows: TrainingRows,
    *,
    num_steps: int,
    num_threads: int,
    rate: float = 5e-3,
    on_step: Callable[[StepReport], None],
) -> None:
    """Train in place, every row once: step s takes the s-th part of the rows, each thread a shard of it.

    rate: the peak learning rate of the layers' matrices, four fifths of it for the rest.
    The mean cross-entropy of answer tokens is `means["nats"] / means["answers"]` of a report.
    """
    named = list(model.named_parameters())
    matrices = [parameter for name, parameter in named if parameter.dim() == 2 and "layers" in name]
    others = [parameter for name, parameter in named if not (parameter.dim() == 2 and "layers" in name)]
    descent = GradientDescent(
        matrices, others, num_steps=num_steps, matrix_rate=rate, other_rate=0.8 * rate, max_norm=1.0, weight_decay=0.05
    )
    for step in range(num_steps):
        shards = rows.shards(step, num_steps, num_threads)
        on_step(descent.step(step, shards, lambda shard: target_losses(model, shard)))
