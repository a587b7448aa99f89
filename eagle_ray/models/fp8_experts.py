"""Fp8Experts: the experts of an FP8 checkpoint, kept in FP8 on a GPU.

    experts = read_experts(module, "model.layers.0.mlp.experts", checkpoint)      # Fp8Experts
    experts.gate_up                                                               # Fp8Stack of all experts

The checkpoint has separate tensors for each expert. Experts (models/experts.py) multiplies pairs of
rows and experts by stacks of them. On a device without such a product, the weights are restored to
full precision while they are read, one expert at a time (`restore_experts`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from eagle_ray.core.errors import EngineError
from eagle_ray.kernels.fp8 import FP8, Fp8Stack
from eagle_ray.kernels.stored_weight import BLOCK_INPUTS
from eagle_ray.models.fp8_blocks import Fp8BlockWeight
from eagle_ray.models.packed_layouts import Weight
from eagle_ray.models.quantized_linear import Fp8Weight

# Names of the tensors of all experts, with the projections of each expert that they join.
STACKS = {
    "gate_up_proj": ("gate_proj", "up_proj"),
    "down_proj": ("down_proj",),
}
Read = Callable[[str], Weight]  # reads the weight of a layer, by its name


class Fp8Experts(nn.Module):
    """The experts of a layer in FP8, in place of transformers' module and with the same forward.

    Args:
        activation: activation function of the gate.
    """

    def __init__(self, gate_up: Fp8Stack, down: Fp8Stack, activation: Callable[[Tensor], Tensor]):
        super().__init__()
        self.blocks = gate_up.block, down.block
        self.activation = activation
        self.register_buffer("gate_up_values", gate_up.values, persistent=False)
        self.register_buffer("gate_up_scale", gate_up.scale, persistent=False)
        self.register_buffer("down_values", down.values, persistent=False)
        self.register_buffer("down_scale", down.scale, persistent=False)

    @property
    def gate_up(self) -> Fp8Stack:
        """Return the stacked weights of the gate and up projections."""
        return Fp8Stack(
            cast(Tensor, self.gate_up_values), cast(Tensor, self.gate_up_scale), self.blocks[0]
        )

    @property
    def down(self) -> Fp8Stack:
        return Fp8Stack(
            cast(Tensor, self.down_values), cast(Tensor, self.down_scale), self.blocks[1]
        )

    def forward(
        self,
        hidden: Float[Tensor, "R H"],
        chosen: Int[Tensor, "R k"],
        weights: Float[Tensor, "R k"],
    ) -> Float[Tensor, "R H"]:
        gate_ups = self.gate_up.dequantize(hidden.dtype)
        downs = self.down.dequantize(hidden.dtype)
        out = torch.zeros_like(hidden)
        for expert in chosen.unique().tolist():
            rows, choices = torch.where(chosen == expert)
            gate, up = (hidden[rows] @ gate_ups[expert].T).chunk(2, -1)
            own = (self.activation(gate) * up) @ downs[expert].T
            out.index_add_(0, rows, (own * weights[rows, choices, None]).to(out.dtype))
        return out


def read_experts(module: Any, name: str, read: Read, device: str) -> Fp8Experts:
    """Read a layer's experts in FP8 to the device. Raises EngineError for a weight that is not in
    FP8, or of a wrong shape.

    Args:
        module: transformers' experts, on the meta device.
        name: name of the module in the model.
    """
    gate_up, down = (
        _stack(getattr(module, stack).shape, name, projections, read, device)
        for stack, projections in STACKS.items()
    )
    return Fp8Experts(gate_up, down, module.act_fn)


def restore_experts(module: Any, name: str, read: Read, dtype: torch.dtype, device: str) -> None:
    """Fill transformers' dense experts with the dequantised weights of an FP8 checkpoint."""
    for stack, projections in STACKS.items():
        shape = getattr(module, stack).shape
        whole = torch.empty(shape, dtype=dtype, device=device)
        for expert, own in enumerate(whole):
            weights = _weights_of(expert, shape, name, projections, read)
            own.copy_(torch.cat([weight.dequantize() for weight in weights]))
        setattr(module, stack, nn.Parameter(whole, requires_grad=False))


def _stack(
    shape: Sequence[int], name: str, projections: Sequence[str], read: Read, device: str
) -> Fp8Stack:
    values = torch.empty(*shape, dtype=torch.uint8, device=device)
    scales = []
    block = (0, 0)
    for expert, own in enumerate(values):
        weights = _weights_of(expert, shape, name, projections, read)
        outputs = math.gcd(
            *(weight.block[0] for weight in weights), *map(len, (w.values for w in weights))
        )
        inputs = weights[0].block[1]
        if inputs < shape[2] and inputs % BLOCK_INPUTS[1]:
            raise EngineError(
                f"tensor {name}.{expert}.{projections[0]}.weight: {inputs} inputs share a scale, and experts take "
                f"multiples of {BLOCK_INPUTS[1]}. Use a checkpoint with plain weights"
            )
        fine = [weight.in_blocks_of(outputs, inputs) for weight in weights]
        own.copy_(torch.cat([weight.values.view(torch.uint8) for weight in fine]))
        scales.append(torch.cat([weight.scale for weight in fine]))
        block = fine[0].block
    return Fp8Stack(values.view(FP8), torch.stack(scales).float().to(device), block)


def _weights_of(
    expert: int, shape: Sequence[int], name: str, projections: Sequence[str], read: Read
) -> list[Fp8BlockWeight]:
    """Return an expert's weights that are joined in a stack of this shape, in blocks."""
    weights = []
    for projection in projections:
        layer = f"{name}.{expert}.{projection}"
        weight = read(layer)
        wanted = (shape[1] // len(projections), shape[2])
        if not isinstance(weight, Fp8Weight | Fp8BlockWeight):
            raise EngineError(
                f"tensor {layer}.weight: is quantised, and quantised experts are read in FP8 alone. Use a checkpoint "
                "in FP8 or with plain weights"
            )
        if tuple(weight.shape) != wanted:
            raise EngineError(
                f"the target's {layer}.weight is {tuple(weight.shape)}, and its config wants {wanted}"
            )
        weights.append(weight if isinstance(weight, Fp8BlockWeight) else _in_one_block(weight))
    return weights


def _in_one_block(weight: Fp8Weight) -> Fp8BlockWeight:
    """Return a weight whose outputs have a scale each as one in blocks of an output."""
    num_outputs, num_inputs = weight.shape
    scale = weight.scale.float().expand(num_outputs, 1)
    return Fp8BlockWeight(weight.values, scale, (1, num_inputs))
