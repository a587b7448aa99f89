"""Update a calibration on a CPU in one C++ call, from the children that a step's drafts proposed (calibration_ops.cpp).

    if calibration_ops.available(device):
        calibration_ops.update(fit, levels, kinds, picks, num_accepted)

`Calibration.observe` of methods/calibration.py is the reference, and a test compares both.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import Structure, c_float, c_int64, c_void_p
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from eagle_ray.kernels import cpu_ops, tree_ops


@dataclass(frozen=True, slots=True)
class FitTensors:
    """The tensors and numbers of an OnlineFit with three parameters. The call changes the first two tensors."""

    parameters: Float[Tensor, "L S 3"]
    information: Float[Tensor, "L S 3 3"]
    prior: Float[Tensor, "S L 3 L 3"]
    low: Float[Tensor, " 3"]
    high: Float[Tensor, " 3"]
    memory: float
    largest_step: float


@dataclass(frozen=True, slots=True)
class OfferedChildren:
    """The children that were proposed on one level. For the roots' children, two of the tensors are None."""

    tokens: Int[Tensor, "B F K"]
    scores: Float[Tensor, "B F K"]
    frontier_tokens: Int[Tensor, "B F"] | None
    parent_rows: Int[Tensor, "B F"] | None


class _Fit(Structure):
    _fields_ = [
        *((name, c_int64) for name in ("levels", "kinds")),
        *((name, c_void_p) for name in ("parameters", "information", "prior", "low", "high")),
        *((name, c_float) for name in ("memory", "largest_step")),
    ]


class _OfferedLevel(Structure):
    _fields_ = [("width", c_int64)] + [
        (name, c_void_p) for name in ("tokens", "frontier_tokens", "parent_rows", "scores")
    ]


class _Samples(Structure):
    _fields_ = [
        *((name, c_int64) for name in ("batch", "length", "children")),
        *((name, c_void_p) for name in ("tokens", "num_accepted", "kinds")),
    ]


def available(device: torch.device) -> bool:
    """Return whether `update` works for tensors of this device."""
    return tree_ops.available(device) and cpu_ops.has_function("update_calibration")


def update(
    fit: FitTensors,
    levels: Sequence[OfferedChildren],
    kinds: Int[Tensor, " B"],
    picks: Int[Tensor, "B D"],
    num_accepted: Int[Tensor, " B"],
) -> None:
    """Update the fit from the target's tokens on the first levels of a batch's drafts, at most as
    many as there are tokens."""
    owned: list[Tensor] = []  # tensors that the structures point to

    def pointer(tensor: Tensor | None) -> int | None:
        if tensor is None:
            return None
        owned.append(tensor.contiguous())
        return owned[-1].data_ptr()

    parts = (fit.parameters, fit.information, fit.prior, fit.low, fit.high)
    assert all(part.is_contiguous() for part in parts)
    pointers = (part.data_ptr() for part in parts)
    structure = _Fit(*fit.parameters.shape[:2], *pointers, fit.memory, fit.largest_step)
    offered = (_OfferedLevel * len(levels))()
    for own, level in zip(offered, levels, strict=True):
        own.width = level.tokens.shape[1]
        for name in ("tokens", "frontier_tokens", "parent_rows", "scores"):
            setattr(own, name, pointer(getattr(level, name)))
    tokens, accepted, sets = (pointer(tensor) for tensor in (picks, num_accepted, kinds))
    samples = _Samples(*picks.shape, levels[0].tokens.shape[2], tokens, accepted, sets)
    cpu_ops.function_for("update_calibration")(
        ctypes.addressof(structure),
        ctypes.addressof(offered),
        len(levels),
        ctypes.addressof(samples),
    )
