"""EAGLE-3: train a head on its own outputs (training-time test, arXiv 2503.01840, section 3.2).

The head is unrolled: in pass s, pair t reads the embedding of token t+1+s and, from the second pass on, the head's own
output of the pass before. It predicts token t+2+s. There is no feature loss:

    loss = sum over s of decay^s * CE(target's distribution, head's logits)

Both distributions are over the draft vocabulary. A position counts if its token is an answer's and the target's
preferred token is in the draft vocabulary.

The three features are inputs of layers, before any norm, and a few of their numbers may be hundreds of times larger
than the others. So fc is trained on features that are divided by about their root mean square, number by number, and
`save` folds the factors into its weight: the published layout has no such norm. A head to start from is unfolded first.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn

from eagle_ray.methods.eagle.checkpoint import head_config
from eagle_ray.methods.eagle.heads import Eagle3Head
from eagle_ray.methods.eagle.unrolled_passes import unroll
from eagle_ray.methods.head_files import save_head
from eagle_ray.training.feature_source import FeatureBatch
from eagle_ray.training.frozen_target import FrozenTarget
from eagle_ray.training.head_recipe import agreement_names, autocast, initialize_linears, mean_over
from eagle_ray.training.optimization import Losses


@dataclass(frozen=True, slots=True)
class UnrolledLoss:
    """num_passes: unrolled passes of the head. decay: weight of each pass relative to the one before."""

    num_passes: int = 7
    decay: float = 0.8


class Eagle3Recipe:
    """Trains an Eagle3Head over the target's draft vocabulary.

    Args:
        raw_config: the head's config.json.
        feature_scale: factor of each number of the target's concatenated features (see `feature_scale`).
        dtype: of matrix products.
        start: head to train further; None draws a new one.
    """

    def __init__(
        self,
        target: FrozenTarget,
        raw_config: dict[str, Any],
        feature_scale: Float[Tensor, " F"],
        loss: UnrolledLoss,
        dtype: torch.dtype,
        start: Eagle3Head | None = None,
    ):
        size, config = len(target.token_ids), head_config(raw_config)
        new = Eagle3Head(config, draft_vocab_size=size, feature_size=len(feature_scale), own_embedding=False)
        self.head = (start or new).to(target.device)
        self._feature_scale = feature_scale.to(target.device)
        self._target, self._raw_config, self._loss, self._dtype = target, raw_config, loss, dtype
        self.num_counts = loss.num_passes
        self.names = ("loss", "token_loss", *agreement_names(loss.num_passes))
        if start is None:
            initialize_eagle3(self.head, target)
        else:
            self._scale_inputs(self.head, 1 / self._feature_scale)  # a published head has its factors in fc

    def counts(self, batch: FeatureBatch) -> Float[Tensor, " S"]:
        """Return the positions of each pass's loss."""
        return torch.tensor(
            [int(self._counted(batch, s).sum()) for s in range(self._loss.num_passes)], dtype=torch.float64
        )

    def losses(self, batch: FeatureBatch, counts: Float[Tensor, " S"], seed: int) -> Losses:
        pairs, device = batch.packed.pairs, batch.packed.ids.device
        total = torch.zeros((), device=device)
        sums: dict[str, float] = {"loss": 0.0, "token_loss": 0.0}
        with autocast(device, self._dtype):
            projected = self.head.project_features(batch.features[pairs.rows].float() * self._feature_scale)
            for s, output in enumerate(unroll(self.head, self._target, batch, projected, self._loss.num_passes)):
                counted = self._counted(batch, s)
                wanted_rows = pairs.rows_after(1 + s)[counted]
                logits = self.head.logits(output[counted], self._target.logits).float()
                probabilities = self._target.probabilities(batch.hidden[wanted_rows])
                loss = mean_over(F.cross_entropy(logits, probabilities, reduction="sum"), counts[s])
                total = total + self._loss.decay**s * loss
                agreement = self._target.token_ids[logits.argmax(-1)] == batch.greedy_ids[wanted_rows]
                sums[f"agreement_{s + 1}"] = float(agreement.sum()) / max(1.0, float(counts[s]))
                sums["token_loss"] += float(loss.detach()) if s == 0 else 0.0
        return Losses(total, sums | {"loss": float(total.detach())})

    def matrices(self) -> list[nn.Parameter]:
        """Return all matrices but the lm_head, whose rows are classes."""
        return [p for name, p in self.head.named_parameters() if p.dim() == 2 and not name.startswith("lm_head")]

    def save(self, path: Path) -> None:
        head = copy.deepcopy(self.head)
        self._scale_inputs(head, self._feature_scale)
        if self._target.covers_all:  # vLLM refuses maps between equal vocabularies
            head.register_buffer("d2t", head.d2t, persistent=False)
            head.register_buffer("t2d", head.t2d, persistent=False)
        save_head(head, self._raw_config, path)

    @staticmethod
    def _scale_inputs(head: Eagle3Head, factors: Float[Tensor, " F"]) -> None:
        with torch.no_grad():
            head.fc.weight.mul_(factors)

    def _counted(self, batch: FeatureBatch, unrolled: int) -> Bool[Tensor, " P"]:
        pairs = batch.packed.pairs
        greedy_ids = batch.greedy_ids[pairs.rows_after(1 + unrolled)]
        return pairs.predicts_answer(2 + unrolled) & (self._target.draft_ids[greedy_ids] >= 0)


def feature_scale(features: Float[Tensor, "R F"]) -> Float[Tensor, " F"]:
    """Return the factors that give each number of these features a root mean square of about 1.

    They are powers of two, so that a published head's fc takes them in and gives them back without rounding.
    """
    return features.float().square().mean(0).clamp(min=1e-12).rsqrt().log2().round().exp2()


def initialize_eagle3(head: Eagle3Head, target: FrozenTarget) -> None:
    """Draw the weights; fc starts as the last of the three features, and the lm_head as the target's rows."""
    initialize_linears(head)
    offsets = target.token_ids - torch.arange(len(target.token_ids), device=target.device)
    with torch.no_grad():
        head.d2t.copy_(offsets)
        head.t2d.copy_(target.draft_ids >= 0)
        if target.lm_head.shape == head.lm_head.weight.shape:
            head.lm_head.weight.copy_(target.lm_head)
        hidden_size, feature_size = head.fc.weight.shape
        if feature_size % hidden_size == 0:
            head.fc.weight.mul_(0.1)
            head.fc.weight[:, -hidden_size:].add_(torch.eye(hidden_size, device=target.device))
