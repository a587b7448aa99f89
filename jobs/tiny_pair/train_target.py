"""Training of the embedded target: next-token prediction on packed rows, answers weighted above questions.

Takes any causal language model whose call gives an object with `.logits`; builds none and saves none.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional

from eagle_ray.training.optimization import Clipping, GradientDescent, Losses, Schedule, muon
from jobs.tiny_pair.training_rows import TrainingRows

LOGIT_PENALTY = 1e-4
WARMUP_STEPS = 40


def initialize(model: nn.Module, num_layers: int) -> None:
    """Normal weights by fan-in for the layers' matrices, smaller where they write to the residual stream."""
    for name, parameter in model.named_parameters():
        if parameter.dim() != 2:
            continue
        scale = 0.5 / math.sqrt(parameter.shape[1])
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            scale /= math.sqrt(2 * num_layers)
        nn.init.normal_(parameter, std=scale if "layers" in name else 0.02)


def target_losses(model: nn.Module, rows: TrainingRows, total_weight: float, num_answers: float) -> Losses:
    """Weighted cross-entropy, plus a little of the squared log-partition so that logits stay centred.

    total_weight, num_answers: summed weights and answer tokens of the whole step. Reported in addition to the loss: the
    plain cross-entropy of answer tokens ("nats").
    """
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = model(input_ids=rows.ids[:, :-1], use_cache=False).logits.float()
    weights, answers = rows.weights[:, 1:], rows.answer_mask[:, 1:]
    flat = functional.cross_entropy(logits.flatten(0, 1), rows.ids[:, 1:].flatten(), reduction="none")
    entropies = flat.view_as(weights)
    loss = (entropies * weights).sum() / total_weight
    penalty = (logits.logsumexp(-1).square() * (weights > 0)).sum() / total_weight
    nats = (entropies * answers).sum() / max(1.0, num_answers)
    return Losses(loss + LOGIT_PENALTY * penalty, {"loss": loss.item(), "nats": nats.item()})


def train_target(
    model: nn.Module,
    rows: TrainingRows,
    *,
    num_steps: int,
    num_threads: int,
    rate: float = 5e-3,
    on_step: Callable[[int, dict[str, float]], None],
) -> None:
    """Train in place, every row once: step s takes the s-th part of the rows, each thread a shard of it.

    rate: the peak learning rate of the layers' matrices, half of it for the rest. on_step: gets the finished steps and
    the step's means.
    """
    named = list(model.named_parameters())
    matrices = [parameter for name, parameter in named if parameter.dim() == 2 and "layers" in name]
    others = [parameter for name, parameter in named if not (parameter.dim() == 2 and "layers" in name)]
    descent = GradientDescent(
        muon(matrices, others, rate, 0.05),
        Schedule("plateau", num_steps, WARMUP_STEPS),
        Clipping(norm=1.0),
        threads=num_threads,
    )
    for step in range(num_steps):
        shards = rows.shards(step, num_steps, num_threads)
        total_weight = sum(shard.weights[:, 1:].sum().item() for shard in shards)
        num_answers = sum(shard.answer_mask[:, 1:].sum().item() for shard in shards)
        sums, _ = descent.step(
            step,
            shards,
            lambda shard: target_losses(model, shard, total_weight, num_answers),  # noqa: B023
        )
        on_step(step + 1, sums)
