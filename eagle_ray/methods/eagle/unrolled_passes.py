"""unroll: the passes in which a head in training reads its own outputs, as it does when it drafts.

In pass s, pair t reads the embedding of token t+1+s and, from the second pass on, the head's output of the pass before
(EAGLE-3's training-time test, arXiv 2503.01840, section 3.2; HASS, arXiv 2408.15766).
"""

from __future__ import annotations

from collections.abc import Iterator

from jaxtyping import Float
from torch import Tensor

from eagle_ray.methods.eagle.heads import Eagle3Head, EagleHead
from eagle_ray.methods.eagle.packed_attention import UnrolledAttention
from eagle_ray.training.feature_source import FeatureBatch
from eagle_ray.training.frozen_target import FrozenTarget


def unroll(
    head: EagleHead | Eagle3Head,
    target: FrozenTarget,
    batch: FeatureBatch,
    hidden: Float[Tensor, "P H"],
    num_passes: int,
) -> Iterator[Float[Tensor, "P H"]]:
    """Yield the head's output of each pass for all P pairs. hidden: what the first pass reads."""
    pairs, ids = batch.packed.pairs, batch.packed.ids
    attention = UnrolledAttention(pairs.lengths, ids.device)
    for s in range(num_passes):
        embeddings = target.embed(ids[pairs.rows_after(1 + s)])
        hidden = head(embeddings[None], hidden[None], pairs.positions[None] + s, attention)[0]
        yield hidden
