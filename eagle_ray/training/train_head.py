"""Training of an EAGLE-1/2 head for a frozen target: predict the next feature, and through it the next token.

For position i the head reads the embedding of token i+1 and the target's feature i, and is asked for feature i+1. The
loss is EAGLE-1's (section 3): SmoothL1 between the features, plus a tenth of the cross-entropy between the token
distributions that the target's lm_head makes of them, on answer tokens. Uniform noise on the features it reads stands
in for its own errors while drafting. Features come from the target as they are needed; none are stored.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional

from eagle_ray.models.eagle_heads import EagleHead
from eagle_ray.training.optimization import GradientDescent, Losses, StepReport
from eagle_ray.training.packing import TrainingRows

TOKEN_LOSS_WEIGHT = 0.1
NOISE_WIDTH = 0.2  # of the uniform noise, at NOISE_LENGTH tokens; the published recipe scales it by the length
NOISE_LENGTH = 512
EMBEDDING_SCALE = 0.5  # root mean square of the embedding's share in what fc first gives, next to features of about 1


@dataclass(frozen=True, slots=True)
class FrozenTarget:
    """What the head needs of its target: a way to features [B, T, H], the embedding [V, H] and the lm_head [V, H]."""

    features_of: Callable[[Int[Tensor, "B T"]], Float[Tensor, "B T H"]]
    embedding: Float[Tensor, "V H"]
    lm_head: Float[Tensor, "V H"]


@dataclass(frozen=True, slots=True)
class FeatureShard:
    """One thread's part of a step."""

    rows: TrainingRows
    noise: Float[Tensor, "B T H"]


def initialize_head(head: EagleHead, embedding: Float[Tensor, "V H"]) -> None:
    """Normal weights by fan-in. fc starts as a copy of the feature, which is already a fair guess, plus a random
    projection of the embedding: scaled up, as embeddings are many times smaller than features."""
    for parameter in head.parameters():
        if parameter.dim() == 2:
            nn.init.normal_(parameter, std=0.5 / parameter.shape[1] ** 0.5)
    hidden_size = head.fc.weight.shape[0]
    with torch.no_grad():
        embedding_norm = embedding.float().norm(dim=1).mean()
        head.fc.weight[:, :hidden_size].normal_(std=EMBEDDING_SCALE / embedding_norm)
        head.fc.weight[:, hidden_size:].copy_(torch.eye(hidden_size))


def head_losses(head: EagleHead, target: FrozenTarget, shard: FeatureShard) -> Losses:
    """Summed losses over the positions whose predicted token belongs to an answer."""
    ids = shard.rows.ids
    num_pairs = ids.shape[1] - 1
    with torch.no_grad():
        features = target.features_of(ids)
        wanted = features[:, 1:].float()
        wanted_probabilities = (features[:, 1:] @ target.lm_head.T).float().softmax(-1)
    positions = torch.arange(num_pairs).expand(len(shard.rows), num_pairs)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        noisy = features[:, :-1].float() + shard.noise
        predicted = head(functional.embedding(ids[:, 1:], target.embedding).float(), noisy, positions)
        logits = (predicted @ target.lm_head.T).float()
    # Feature i+1 decides token i+2, so a pair counts where token i+2 is an answer's; the last pair has none.
    mask = functional.pad(shard.rows.answer_mask[:, 2:], (0, 1))
    distances = functional.smooth_l1_loss(predicted.float(), wanted, reduction="none").mean(-1)
    cross_entropies = -(wanted_probabilities * logits.log_softmax(-1)).sum(-1)
    agreement = (logits.argmax(-1) == wanted_probabilities.argmax(-1)).float()
    shown = {"feature": distances, "token": cross_entropies, "agreement": agreement}
    total = ((distances + TOKEN_LOSS_WEIGHT * cross_entropies) * mask).sum()
    return Losses(total, mask.sum().item(), {name: (values * mask).sum().item() for name, values in shown.items()})


def train_head(
    head: EagleHead,
    target: FrozenTarget,
    rows: TrainingRows,
    *,
    seed: int,
    num_steps: int,
    num_threads: int,
    rate: float = 4e-3,
    on_step: Callable[[StepReport], None],
) -> None:
    """Train in place, every row once. Reports the mean feature loss, token loss and agreement of the top tokens.

    rate: the peak learning rate of the matrices, half of it for the rest.
    """
    matrices = [parameter for parameter in head.parameters() if parameter.dim() == 2]
    others = [parameter for parameter in head.parameters() if parameter.dim() != 2]
    descent = GradientDescent(
        matrices, others, num_steps=num_steps, matrix_rate=rate, other_rate=rate / 2, max_norm=0.5
    )
    generator = torch.Generator().manual_seed(seed)
    length, hidden_size = rows.ids.shape[1], target.embedding.shape[1]
    width = NOISE_WIDTH * NOISE_LENGTH / length
    for step in range(num_steps):
        shards = []
        for part in rows.shards(step, num_steps, num_threads):
            noise = torch.rand(len(part), length - 1, hidden_size, generator=generator) - 0.5
            shards.append(FeatureShard(part, noise * width))
        on_step(descent.step(step, shards, lambda shard: head_losses(head, target, shard)))
