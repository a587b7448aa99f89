"""Features of the target for packed batches, as the engine computes them.

    source = ComputedFeatures(causal_lm, feature_layers=(2, 15, 27), max_length=2048)
    batch = source.read(PackedBatch.of(documents, indices))
    batch.features, batch.hidden, batch.greedy_ids

The pass is the engine's own prefill: packed documents, without padding, in the target's dtype.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from jaxtyping import Float, Int
from torch import Tensor

from eagle_ray.models.loader import CausalLM
from eagle_ray.models.target import PromptBatch, TargetModel
from eagle_ray.training.packing import PackedBatch

PASS_TOKENS = 2048  # of one pass of the target: enough for its matrix products to be efficient
MAX_SLOTS = 64  # documents of one pass
LOGIT_ROWS = 512  # whose logits over the whole vocabulary are in memory at a time
UNKNOWN = -1  # greedy id of a row whose prediction no loss reads


@dataclass(frozen=True, slots=True)
class FeatureBatch:
    """A packed batch and what the target computes for it.

    Attributes:
        features: what the head reads; the concatenated inputs of the feature layers, or `hidden` itself.
        hidden: what the target's lm_head reads.
        greedy_ids: the token that the target prefers after each row; UNKNOWN unless that token is an answer's.
    """

    packed: PackedBatch
    features: Float[Tensor, "R F"]
    hidden: Float[Tensor, "R H"]
    greedy_ids: Int[Tensor, " R"]


class FeatureSource(Protocol):
    """Protocol of what reads or computes features."""

    def read(self, packed: PackedBatch) -> FeatureBatch:
        """Return the batch with the target's features."""


class ComputedFeatures:
    """Runs the target.

    Args:
        feature_layers: layers whose inputs are concatenated; None is what the lm_head reads.
        max_length: tokens of the longest document.
    """

    def __init__(self, causal_lm: CausalLM, feature_layers: tuple[int, ...] | None, max_length: int):
        slots = min(MAX_SLOTS, PASS_TOKENS)
        kv_tokens = max(PASS_TOKENS, max_length) + 64 * slots
        self._target = TargetModel(causal_lm, slots, max_length + 1, kv_tokens, feature_layers)
        self.shares_hidden = feature_layers is None
        self.feature_size = self._target.feature_size
        self.hidden_size = self._target.hidden_size
        self.dtype = self._target.dtype
        self.device = self._target.device

    def read(self, packed: PackedBatch) -> FeatureBatch:
        device = self._target.device
        with torch.inference_mode():
            parts = [self._run(documents) for documents in _passes(packed)]
            hidden = torch.cat([part[0] for part in parts])
            features = hidden if self.shares_hidden else torch.cat([part[1] for part in parts])
            greedy_ids = self._greedy_ids(hidden, packed.is_answer.to(device))
        hidden = hidden.clone()  # tensors of inference mode cannot be saved for a backward pass
        features = hidden if self.shares_hidden else features.clone()
        return FeatureBatch(packed, features, hidden, greedy_ids.clone())

    def _run(self, documents: list[list[int]]) -> tuple[Tensor, Tensor]:
        blocks, slots = self._target.cache.blocks, list(range(len(documents)))
        for slot, ids in zip(slots, documents, strict=True):
            if not blocks.reserve(slot, len(ids)):
                raise RuntimeError(f"the KV cache cannot hold a pass of {sum(map(len, documents))} tokens")
        out = self._target.prefill(PromptBatch.of(slots, documents, self._target.device))
        for slot in slots:
            blocks.free(slot)
        return out.hidden, out.features

    def _greedy_ids(self, hidden: Float[Tensor, "R H"], is_answer: Tensor) -> Int[Tensor, " R"]:
        greedy_ids = torch.full((len(hidden),), UNKNOWN, device=hidden.device)
        rows = is_answer[1:].nonzero()[:, 0]
        for part in rows.split(LOGIT_ROWS):
            greedy_ids[part] = self._target.logits(hidden[part]).argmax(-1)
        return greedy_ids


def _passes(packed: PackedBatch) -> Iterator[list[list[int]]]:
    """Yield the documents of each pass of the target, in order."""
    documents: list[list[int]] = []
    num_tokens = 0
    for ids in packed.ids.cpu().split(packed.lengths):
        if documents and (num_tokens + len(ids) > PASS_TOKENS or len(documents) == MAX_SLOTS):
            yield documents
            documents, num_tokens = [], 0
        documents.append(ids.tolist())
        num_tokens += len(ids)
    if documents:
        yield documents
