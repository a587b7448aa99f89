"""RoundedCheckpoint: round the layers of a plain checkpoint to FP8 while they are read.

    checkpoint = RoundedCheckpoint(PlainCheckpoint.open(path), "cuda")
    model = build_model(config, checkpoint, torch.bfloat16, "cuda")

Each 16-bit weight is copied to the device, rounded there and freed before the next one is read. So
the host holds one weight at a time, whatever the size of the model.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from eagle_ray.families import FAMILIES
from eagle_ray.models.gpu_linears import FP8_MULTIPLE, fp8_weight
from eagle_ray.models.packed_layouts import Weight
from eagle_ray.models.quantized_model import Checkpoint, empty_model, quantization_of, read_finite
from eagle_ray.storage.model_files import gguf_in, pickle_in

PROJECTION = "_proj.weight"  # the end of the names of layers that are rounded
ROUNDS_PLAIN = (
    "model.quantization: fp8 is for plain weights, and these are quantised. Set it to none."
)


def why_not_rounded(path: Path, config: PretrainedConfig) -> str | None:
    """Return why this target cannot be rounded to FP8, with advice; None if it can. Weights are not read."""
    own = FAMILIES[config.model_type]
    is_quantised = gguf_in(path) is not None or quantization_of(config) is not None
    if is_quantised or not own.rounds_to_fp8:
        others = [family.causal_lm for family in FAMILIES.values() if family.rounds_to_fp8]
        return (
            f"plain weights of {', '.join(others)}, and the target is {own.causal_lm} as its checkpoint quantises it "
            "or of another family. Set it to none"
        )
    if (pickle := pickle_in(path)) is not None:
        return f"safetensors files, which are read a tensor at a time, and the target is in {pickle}. Save it as those"
    for name, module in empty_model(config, torch.bfloat16).named_modules():
        if isinstance(module, nn.Linear) and f"{name}.weight".endswith(PROJECTION):
            sizes = module.out_features, module.in_features
            if any(size % FP8_MULTIPLE for size in sizes):
                return f"sizes that {FP8_MULTIPLE} divides, and {name} is {sizes[0]} x {sizes[1]}. Set it to none"
    return None


@dataclass(frozen=True, slots=True)
class RoundedCheckpoint:
    """A checkpoint whose projections are rounded to FP8.

    Attributes:
        plain: checkpoint with the dense weights.
        device: device on which weights are rounded.
    """

    plain: Checkpoint
    device: str

    def tensor_names(self) -> set[str]:
        return self.plain.tensor_names()

    def names(self) -> list[str]:
        names = self.plain.tensor_names()
        return [name.removesuffix(".weight") for name in names if name.endswith(PROJECTION)]

    def projection(self, name: str) -> Weight:
        """Return a layer's weight in FP8, on the device. Raises EngineError if a number is not finite."""
        weight = read_finite(self.plain, f"{name}.weight")
        return fp8_weight(weight.to(self.device, torch.bfloat16))

    def tensor(self, name: str) -> Tensor:
        return self.plain.tensor(name)

    def has_own_head(self) -> bool:
        return self.plain.has_own_head()
