"""Medusa-1 and Hydra: each head predicts the token at its own distance (arXiv 2401.10774, section 2.2.1).

Cross-entropy with the text's own tokens, the head of level k weighted by decay^k; every head starts
as the target's lm_head on the unchanged feature. Hydra's heads read the text's tokens in place of
drafted ones (arXiv 2402.05109, section 3). Only positions whose predicted token is an answer's
count.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from eagle_ray.config.head_training import TrainConfig
from eagle_ray.core.errors import ConfigError
from eagle_ray.methods.medusa.checkpoint import save_path_heads
from eagle_ray.methods.medusa.heads import HydraHeads, MedusaHeads
from eagle_ray.training.frozen_target import FeatureBatch, FrozenTarget
from eagle_ray.training.head_recipe import (
    HeadRecipe,
    Losses,
    StartHead,
    agreement_names,
    autocast,
    mean_over,
)

BLOCK_WEIGHTS = ("linear.weight", "res_connection.weight")


class MedusaRecipe(HeadRecipe):
    """Trains Medusa or Hydra heads.

    Args:
        decay: weight of each level relative to the one before.
    """

    head: MedusaHeads | HydraHeads

    def __init__(
        self,
        target: FrozenTarget,
        heads: MedusaHeads | HydraHeads,
        decay: float,
        dtype: torch.dtype,
    ):
        self.head = heads.to(target.device)
        self.num_counts = heads.num_levels
        self.names = ("loss", *agreement_names(heads.num_levels))
        self._target = target
        self._decay = decay
        self._dtype = dtype
        start_as_lm_head(heads, target)

    @classmethod
    def draft_vocab_size(cls, config: TrainConfig, vocab_size: int) -> int:
        if (config.head.draft_vocab_size or vocab_size) < vocab_size:
            raise ConfigError(
                f"head.draft_vocab_size: of no use for {config.head.method}, which drafts every token"
            )
        return vocab_size

    @classmethod
    def make(
        cls,
        config: TrainConfig,
        target_config: Any,
        target: FrozenTarget,
        feature_scale: Float[Tensor, " F"] | None,
        dtype: torch.dtype,
        start: StartHead | None,
    ) -> MedusaRecipe:
        sizes = config.head.num_levels, 1, target_config.hidden_size, target_config.vocab_size
        is_medusa = config.head.method == "medusa"
        heads = MedusaHeads(*sizes, own_lm_head=True) if is_medusa else HydraHeads(*sizes)
        return cls(target, heads, config.loss.decay, dtype)

    def counts(self, batch: FeatureBatch) -> Float[Tensor, " L"]:
        """Return the positions of each level's loss."""
        pairs = batch.packed.pairs
        counts = [int(pairs.predicts_answer(k + 2).sum()) for k in range(self.num_counts)]
        return torch.tensor(counts, dtype=torch.float64)

    def losses(self, batch: FeatureBatch, counts: Float[Tensor, " L"], seed: int) -> Losses:
        pairs = batch.packed.pairs
        ids = batch.packed.ids
        total = torch.zeros((), device=ids.device)
        sums: dict[str, float] = {}
        with autocast(ids.device, self._dtype):
            for level in range(self.num_counts):
                # The features, and the true tokens between them and the predicted ones.
                counted = pairs.predicts_answer(level + 2)
                feature = batch.hidden[pairs.rows[counted]].float()
                path = []
                for distance in range(1, level + 2):
                    path_ids = ids[pairs.rows_after(distance)[counted]]
                    path.append(self._target.embed(path_ids))
                path_embeddings = torch.stack(path, 1)[:, None]

                logits = self.head.logits(level, feature, path_embeddings, self._target.logits)
                logits = logits[:, 0].float()
                wanted = ids[pairs.rows_after(level + 2)[counted]]
                loss = mean_over(F.cross_entropy(logits, wanted, reduction="sum"), counts[level])
                total = total + self._decay**level * loss
                agreement = (logits.argmax(-1) == wanted).sum()
                sums[f"agreement_{level + 1}"] = float(agreement) / max(1.0, float(counts[level]))
        return Losses(total, {"loss": float(total.detach()), **sums})

    def matrices(self) -> list[nn.Parameter]:
        """Return the residual blocks' matrices, which Muon updates."""
        return [p for name, p in self.head.named_parameters() if name.endswith(BLOCK_WEIGHTS)]

    def save(self, path: Path) -> None:
        save_path_heads(self.head, path)


def start_as_lm_head(heads: MedusaHeads | HydraHeads, target: FrozenTarget) -> None:
    """Initialize the heads: every residual block passes its first input on, and every lm_head is the target's."""
    if isinstance(heads, HydraHeads):
        lm_heads = list(heads.hydra_lm_head)
    else:
        lm_heads = [cast(nn.Sequential, head)[-1] for head in heads]
    with torch.no_grad():
        for parameter in heads.parameters():
            parameter.zero_()
        for lm_head in lm_heads:
            cast(nn.Linear, lm_head).weight.copy_(target.lm_head)
        for name, parameter in heads.named_parameters():
            if name.endswith("res_connection.weight"):
                parameter[:, : len(parameter)].copy_(torch.eye(len(parameter)))
