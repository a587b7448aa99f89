"""Training of Medusa's and Hydra's heads for a frozen target: each head says what comes after its own number of tokens.

Medusa-1's recipe (arXiv 2401.10774, section 2.2.1): cross-entropy with the text's own tokens, the head of level k
weighted by 0.8^k, every head starting as the target's lm_head on the unchanged feature. Hydra's read the text's tokens
in place of drafted ones (arXiv 2402.05109, section 3). Only answer tokens count.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional

from eagle_ray.models.medusa_heads import HydraHeads, MedusaHeads, PathHeads
from eagle_ray.training.optimization import GradientDescent, Losses, StepReport
from eagle_ray.training.packing import TrainingRows
from eagle_ray.training.train_head import FrozenTarget

LEVEL_WEIGHT = 0.8


def start_as_lm_head(heads: MedusaHeads | HydraHeads, target: FrozenTarget) -> None:
    """Initialize the heads: every residual block passes its first input on, and every lm_head is the target's."""
    lm_heads = heads.hydra_lm_head if isinstance(heads, HydraHeads) else [head[-1] for head in heads]
    with torch.no_grad():
        for parameter in heads.parameters():
            parameter.zero_()
        for lm_head in lm_heads:
            lm_head.weight.copy_(target.lm_head)
        for name, parameter in heads.named_parameters():
            if name.endswith("res_connection.weight"):
                parameter[:, : len(parameter)].copy_(torch.eye(len(parameter)))


def path_losses(heads: PathHeads, target: FrozenTarget, rows: TrainingRows) -> Losses:
    """Summed over the answer tokens that the first head says; shown: how often each head's best token is the text's."""
    ids, length = rows.ids, rows.ids.shape[1]
    with torch.no_grad():
        features = target.features_of(ids).float()
        embedded = functional.embedding(ids, target.embedding).float()
    total, shown = torch.zeros(()), {}
    for level in range(heads.num_levels):
        count = length - level - 2  # places whose token after the root and `level` more is in the row
        path = torch.stack([embedded[:, 1 + i : 1 + i + count] for i in range(level + 1)], 2).flatten(0, 1)[:, None]
        logits = heads.logits(level, features[:, :count].flatten(0, 1), path, lambda hidden: hidden @ target.lm_head.T)
        wanted, mask = ids[:, level + 2 :].flatten(), rows.answer_mask[:, level + 2 :].flatten()
        entropies = functional.cross_entropy(logits[:, 0], wanted, reduction="none")
        total = total + LEVEL_WEIGHT**level * (entropies * mask).sum()
        shown[f"level {level + 1}"] = ((logits[:, 0].argmax(-1) == wanted) * mask).sum().item()
    return Losses(total, rows.answer_mask[:, 2:].sum().item(), shown)


def train_path_heads(
    heads: nn.Module,
    target: FrozenTarget,
    rows: TrainingRows,
    *,
    num_steps: int,
    num_threads: int,
    rate: float = 4e-3,
    on_step: Callable[[StepReport], None],
) -> None:
    """Train in place, every row once. rate: the peak of the residual blocks' matrices, half of it for the rest."""
    blocks = [p for name, p in heads.named_parameters() if name.endswith(("linear.weight", "res_connection.weight"))]
    others = [p for p in heads.parameters() if not any(p is block for block in blocks)]
    descent = GradientDescent(blocks, others, num_steps=num_steps, matrix_rate=rate, other_rate=rate / 2, max_norm=0.5)
    for step in range(num_steps):
        shards = rows.shards(step, num_steps, num_threads)
        on_step(descent.step(step, shards, lambda shard: path_losses(heads, target, shard)))
