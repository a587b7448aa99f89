"""Quantised checkpoints of a family's base class, such as Qwen3Model, by the names of its causal LM.

with_prefix(checkpoint).projection("model.layers.0.mlp.up_proj")       # stored as layers.0.mlp.up_proj
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from eagle_ray.models.packed_layouts import Weight
from eagle_ray.models.quantized_model import Checkpoint

MODEL_PREFIX = "model."


@dataclass(frozen=True, slots=True)
class BaseClassCheckpoint:
    """Reads a checkpoint whose tensor names lack the prefix of a causal LM (model.), by names with it."""

    stored: Checkpoint

    def tensor_names(self) -> set[str]:
        return {MODEL_PREFIX + name for name in self.stored.tensor_names()}

    def names(self) -> list[str]:
        return [MODEL_PREFIX + name for name in self.stored.names()]

    def projection(self, name: str) -> Weight:
        return self.stored.projection(name.removeprefix(MODEL_PREFIX))

    def tensor(self, name: str) -> Tensor:
        return self.stored.tensor(name.removeprefix(MODEL_PREFIX))

    def has_own_head(self) -> bool:
        return False


def with_prefix(checkpoint: Checkpoint) -> Checkpoint:
    """Wrap a checkpoint so that it is read by the tensor names of a causal LM."""
    names = checkpoint.tensor_names()
    if any(name.startswith(MODEL_PREFIX) for name in names):
        return checkpoint
    return BaseClassCheckpoint(checkpoint)
