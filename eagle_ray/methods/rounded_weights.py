"""Head weights stored in 8 bits: integers and a scale for each group of inputs, in the layout of compressed-tensors.

    lm_head.weight        int8  [3840, 576]
    lm_head.weight_scale  fp16  [3840, 18]    # one for each 32 inputs

The heads in eagle_ray/assets are stored in this way. With a quantised target on a CPU, a head runs
with weights rounded to 8 bits in these groups anyway (quantize_linears). Rounding twice changes
nothing, so such a head drafts as from full weights.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from eagle_ray.models.quantized_linear import BLOCK, quantize

SCALE = "_scale"  # after a tensor's name
ROUNDED_ZERO = 128  # the zero of a QuantizedWeight's codes


def scales_of(names: Iterable[str]) -> set[str]:
    """Return the names of scale tensors whose scaled tensor is present, too."""
    known = set(names)
    return {name for name in known if name.endswith(SCALE) and name.removesuffix(SCALE) in known}


def round_weights(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors with each matrix whose inputs form whole groups rounded to 8 bits, and its scales added."""
    rounded: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if not tensor.is_floating_point() or tensor.dim() != 2 or tensor.shape[1] % BLOCK:
            rounded[name] = tensor
            continue
        weight = quantize(tensor)
        rounded[name] = (weight.codes.int() - ROUNDED_ZERO).to(torch.int8)
        rounded[name + SCALE] = weight.scale
    return rounded


def restore_weights(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors in fp32: 8-bit ones multiplied by their scales, without the scale tensors.

    Raises ValueError if a scale does not fit its tensor.
    """
    scales = scales_of(tensors)
    restored = {name: tensor for name, tensor in tensors.items() if name not in scales}
    for name in scales:
        weight = name.removesuffix(SCALE)
        restored[weight] = _multiplied(weight, tensors[weight], tensors[name])
    return restored


def _multiplied(name: str, codes: Tensor, scale: Tensor) -> Tensor:
    fits = (
        codes.dim() == scale.dim() == 2
        and len(codes) == len(scale)
        and codes.shape[1] % scale.shape[1] == 0
    )
    if codes.dtype is not torch.int8 or not scale.is_floating_point() or not fits:
        raise ValueError(
            f"{name} is {codes.dtype} {list(codes.shape)} and its scale {scale.dtype} {list(scale.shape)}: "
            "a head's weights are read as int8 with a scale for each group of inputs"
        )
    groups = codes.float().unflatten(1, (scale.shape[1], -1))
    return (groups * scale.float()[..., None]).flatten(1)
