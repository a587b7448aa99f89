"""EAGLE-1/2: predict the target's next feature, and through its lm_head the next token (arXiv 2401.15077, section 3).

For position i the head reads the embedding of token i+1 and the target's feature i. Its output is compared with feature
i+1:

    loss = feature_weight * SmoothL1(output, feature) + token_weight * CE(softmax(lm_head(feature)), lm_head(output))

Only positions whose predicted token, i+2, is an answer's count. Uniform noise on the features that it reads imitates
the head's own errors when it drafts. With a draft vocabulary, the cross-entropy is over its rows of the lm_head, and
only where the target's preferred token is among them.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn

from eagle_ray.models.eagle_heads import EagleHead
from eagle_ray.models.head_checkpoint import save_head
from eagle_ray.models.head_spec import head_config
from eagle_ray.training.feature_source import FeatureBatch
from eagle_ray.training.frozen_target import FrozenTarget
from eagle_ray.training.head_recipe import autocast, initialize_linears, mean_over
from eagle_ray.training.optimization import Losses
from eagle_ray.training.packed_attention import PackedCausalAttention

NOISE_LENGTH = 512  # the published noise is for documents of 512 tokens and shrinks with longer ones
EMBEDDING_SCALE = (
    0.5  # root mean square of the embedding's share in the first output of fc; that of features is about 1
)


@dataclass(frozen=True, slots=True)
class EagleLoss:
    """Weights of the loss. noise: width of the uniform noise, for documents of NOISE_LENGTH tokens."""

    feature_weight: float = 1.0
    token_weight: float = 0.1
    noise: float = 0.2


class EagleRecipe:
    """Trains an EagleHead. raw_config: the head's config.json. dtype: of matrix products."""

    num_counts = 2
    names = ("loss", "feature_loss", "token_loss", "agreement_1")

    def __init__(self, target: FrozenTarget, raw_config: dict[str, Any], loss: EagleLoss, dtype: torch.dtype):
        config = head_config(raw_config)
        self.head = EagleHead(config, bias=raw_config.get("bias", True), own_embedding=False).to(target.device)
        self._target, self._raw_config, self._loss, self._dtype = target, raw_config, loss, dtype
        initialize_eagle(self.head, target)

    def counts(self, batch: FeatureBatch) -> Float[Tensor, " 2"]:
        """Return the positions of the feature loss and of the token loss."""
        counted, known = self._counted(batch)
        return torch.tensor([int(counted.sum()), int((counted & known).sum())], dtype=torch.float64)

    def losses(self, batch: FeatureBatch, counts: Float[Tensor, " 2"], seed: int) -> Losses:
        pairs, ids = batch.packed.pairs, batch.packed.ids
        counted, known = self._counted(batch)
        with autocast(ids.device, self._dtype):
            embeddings = self._target.embed(ids[pairs.rows_after(1)])
            features = batch.features[pairs.rows].float() + self._noise(batch, seed)
            attention = PackedCausalAttention(pairs.lengths, ids.device)
            output = self.head(embeddings[None], features[None], pairs.positions[None], attention)[0]
            output, known = output[counted], known[counted]
            wanted_rows = pairs.rows_after(1)[counted]
            wanted = batch.hidden[wanted_rows]
            logits = self._target.logits(output)
            probabilities = self._target.probabilities(wanted)

        feature_loss = F.smooth_l1_loss(output.float(), wanted.float(), reduction="none").mean(-1).sum()
        token_loss = F.cross_entropy(logits[known], probabilities[known], reduction="sum")
        total = self._loss.feature_weight * mean_over(feature_loss, counts[0])
        total = total + self._loss.token_weight * mean_over(token_loss, counts[1])
        agreement = self._target.token_ids[logits.argmax(-1)] == batch.greedy_ids[wanted_rows]
        sums = {
            "loss": float(total.detach()),
            "feature_loss": float(feature_loss.detach()) / max(1.0, float(counts[0])),
            "token_loss": float(token_loss.detach()) / max(1.0, float(counts[1])),
            "agreement_1": float(agreement.sum()) / max(1.0, float(counts[0])),
        }
        return Losses(total, sums)

    def matrices(self) -> list[nn.Parameter]:
        return [parameter for parameter in self.head.parameters() if parameter.dim() == 2]

    def save(self, path: Path) -> None:
        save_head(self.head, self._raw_config, path)

    def _counted(self, batch: FeatureBatch) -> tuple[Bool[Tensor, " P"], Bool[Tensor, " P"]]:
        """Return which pairs count, and for which the target's preferred token is in the draft vocabulary."""
        pairs = batch.packed.pairs
        greedy_ids = batch.greedy_ids[pairs.rows_after(1)]
        return pairs.predicts_answer(2), self._target.draft_ids[greedy_ids] >= 0

    def _noise(self, batch: FeatureBatch, seed: int) -> Float[Tensor, "P H"]:
        """Return the noise of a shard, narrower for longer documents."""
        pairs = batch.packed.pairs
        generator = torch.Generator().manual_seed(seed)
        noise = torch.rand(len(pairs.rows), batch.hidden.shape[1], generator=generator) - 0.5
        widths = [self._loss.noise * NOISE_LENGTH / (length + 1) for length in pairs.lengths]
        width = torch.repeat_interleave(torch.tensor(widths), torch.tensor(pairs.lengths))
        return (noise * width[:, None]).to(batch.hidden.device)


def initialize_eagle(head: EagleHead, target: FrozenTarget) -> None:
    """Draw the weights; fc starts as a copy of the feature, plus a random projection of the embedding.

    The copy is a fair first guess. The projection is scaled up, since embeddings are many times smaller than features.
    """
    initialize_linears(head)
    hidden_size = head.config.hidden_size
    with torch.no_grad():
        sample = torch.arange(0, target.vocab_size, max(1, target.vocab_size // 4096), device=target.device)
        embedding_norm = target.embed(sample).norm(dim=1).mean()
        head.fc.weight[:, :hidden_size].normal_(std=float(EMBEDDING_SCALE / embedding_norm))
        head.fc.weight[:, hidden_size:].copy_(torch.eye(hidden_size))
        if head.fc.bias is not None:
            head.fc.bias.zero_()
