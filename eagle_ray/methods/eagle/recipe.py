"""EAGLE-1/2: predict the target's next feature, and through its lm_head the next token (arXiv 2401.15077, section 3).

For position i the head reads the embedding of token i+1 and the target's feature i. Its output is compared with feature
i+1:

    loss = feature_weight * SmoothL1(output, feature) + token_weight * CE(softmax(lm_head(feature)), lm_head(output))

Only positions whose predicted token, i+2, is an answer's count. Uniform noise on the features that it reads imitates
the head's own errors when it drafts. With a draft vocabulary, the cross-entropy is over its rows of the lm_head, and
only where the target's preferred token is among them.

With several passes the head also reads its own outputs, as it does when it drafts (HASS, arXiv 2408.15766): in pass s
it reads the embedding of token i+1+s and its output of the pass before, and predicts feature i+1+s. Pass s weighs
decay^s.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn

from eagle_ray.methods.eagle.checkpoint import head_config
from eagle_ray.methods.eagle.heads import EagleHead
from eagle_ray.methods.eagle.unrolled_passes import unroll
from eagle_ray.methods.head_files import save_head
from eagle_ray.training.feature_source import FeatureBatch
from eagle_ray.training.frozen_target import FrozenTarget
from eagle_ray.training.head_recipe import agreement_names, autocast, initialize_linears, mean_over
from eagle_ray.training.optimization import Losses

NOISE_LENGTH = 512  # the published noise is for documents of 512 tokens and shrinks with longer ones
EMBEDDING_SCALE = (
    0.5  # root mean square of the embedding's share in the first output of fc; that of features is about 1
)


@dataclass(frozen=True, slots=True)
class EagleLoss:
    """Weights of the loss, and its passes.

    noise: width of the uniform noise, for documents of NOISE_LENGTH tokens.
    decay: weight of each pass relative to the one before.
    """

    feature_weight: float = 1.0
    token_weight: float = 0.1
    noise: float = 0.2
    num_passes: int = 1
    decay: float = 0.8


class EagleRecipe:
    """Trains an EagleHead.

    Args:
        raw_config: the head's config.json.
        dtype: of matrix products.
        start: head to train further; None draws a new one.
    """

    def __init__(
        self,
        target: FrozenTarget,
        raw_config: dict[str, Any],
        loss: EagleLoss,
        dtype: torch.dtype,
        start: EagleHead | None = None,
    ):
        bias = raw_config.get("bias", True)
        self.head = (start or EagleHead(head_config(raw_config), bias=bias, own_embedding=False)).to(target.device)
        self._target, self._raw_config, self._loss, self._dtype = target, raw_config, loss, dtype
        self.num_counts = 2 * loss.num_passes
        self.names = ("loss", "feature_loss", "token_loss", *agreement_names(loss.num_passes))
        if start is None:
            initialize_eagle(self.head, target)

    def counts(self, batch: FeatureBatch) -> Float[Tensor, " C"]:
        """Return the positions of each pass's feature loss and token loss."""
        masks = (self._counted(batch, s) for s in range(self._loss.num_passes))
        counts = [(int(counted.sum()), int((counted & known).sum())) for counted, known in masks]
        return torch.tensor(counts, dtype=torch.float64).flatten()

    def losses(self, batch: FeatureBatch, counts: Float[Tensor, " C"], seed: int) -> Losses:
        device = batch.packed.ids.device
        total = torch.zeros((), device=device)
        sums: dict[str, float] = {}
        with autocast(device, self._dtype):
            features = batch.features[batch.packed.pairs.rows].float() + self._noise(batch, seed)
            for s, output in enumerate(unroll(self.head, self._target, batch, features, self._loss.num_passes)):
                loss, parts = self._pass_loss(batch, output, s, counts[2 * s : 2 * s + 2])
                total = total + self._loss.decay**s * loss
                sums = parts | sums  # the losses that are reported are the first pass's
        return Losses(total, sums | {"loss": float(total.detach())})

    def _pass_loss(
        self, batch: FeatureBatch, output: Float[Tensor, "P H"], unrolled: int, counts: Float[Tensor, " 2"]
    ) -> tuple[Tensor, dict[str, float]]:
        """Return the loss of one pass, and what is reported of it. counts: of the whole step."""
        counted, known = self._counted(batch, unrolled)
        output, known = output[counted], known[counted]
        wanted_rows = batch.packed.pairs.rows_after(1 + unrolled)[counted]
        wanted = batch.hidden[wanted_rows]
        logits = self._target.logits(output)
        probabilities = self._target.probabilities(wanted)
        feature_loss = F.smooth_l1_loss(output.float(), wanted.float(), reduction="none").mean(-1).sum()
        token_loss = F.cross_entropy(logits[known], probabilities[known], reduction="sum")
        feature_loss, token_loss = mean_over(feature_loss, counts[0]), mean_over(token_loss, counts[1])
        agreement = self._target.token_ids[logits.argmax(-1)] == batch.greedy_ids[wanted_rows]
        parts = {
            "feature_loss": float(feature_loss.detach()),
            "token_loss": float(token_loss.detach()),
            f"agreement_{unrolled + 1}": float(agreement.sum()) / max(1.0, float(counts[0])),
        }
        return self._loss.feature_weight * feature_loss + self._loss.token_weight * token_loss, parts

    def matrices(self) -> list[nn.Parameter]:
        return [parameter for parameter in self.head.parameters() if parameter.dim() == 2]

    def save(self, path: Path) -> None:
        save_head(self.head, self._raw_config, path)

    def _counted(self, batch: FeatureBatch, unrolled: int) -> tuple[Bool[Tensor, " P"], Bool[Tensor, " P"]]:
        """Return which pairs count in a pass, and where the target's preferred token is in the draft vocabulary."""
        pairs = batch.packed.pairs
        greedy_ids = batch.greedy_ids[pairs.rows_after(1 + unrolled)]
        return pairs.predicts_answer(2 + unrolled), self._target.draft_ids[greedy_ids] >= 0

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
