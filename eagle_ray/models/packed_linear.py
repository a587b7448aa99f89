"""Projections: the linear layers that our own forward runs, dense, packed for a CPU, or quantised.

A projection is any module of Projection's attributes. PackedLinear is a frozen nn.Linear on a CPU
whose weight lies as its product reads it (packed_products.py).

    pack_linears(model)             # once, before the model is used
    warm_up_kernels(model, 64)      # what oneDNN compiles, for passes of up to 64 rows, before requests wait for it

A row's result does not depend on the other rows, bit for bit, which F.linear does not guarantee.
The order of summation is never chosen by a measurement, so all workers of a job and all starts have
the same bits. A packed weight is not a parameter, has no gradient and cannot be moved.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from typing import Protocol, cast, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from eagle_ray.core.errors import EngineError
from eagle_ray.families import FAMILIES
from eagle_ray.kernels.fp8 import ScaledRows
from eagle_ray.models.gpu_layer import GpuLinear, dense_linear
from eagle_ray.models.packed_products import (
    MIN_ONEDNN_ROWS,
    TiledProduct,
    can_pack,
    is_tiled,
    packed_product,
)
from eagle_ray.models.quantized_linear import QuantizedLinear, holds_quantized, quantize_linears
from eagle_ray.parallel.shard import GatheredHead, ReducedLinear

# In fp32, 256 x 256 loses by oneDNN and 512 x 512 wins.
MIN_ONEDNN_WEIGHTS = {
    torch.float32: 1 << 18,
    torch.bfloat16: 1,
}
# Kernels are made ahead up to these numbers of rows and of weights.
WARM_ROWS = 96
MAX_WARM_WEIGHTS = 1 << 24
MAX_WARM_S = 1.0  # seconds that making kernels may take for one model
# Projections that read the same input, by the class of their module.
MERGED: dict[str, list[tuple[str, ...]]] = {}
for family in FAMILIES.values():
    if family.layer is not None:
        MERGED[f"{family.prefix}Attention"] = [family.layer.qkv]
        MERGED[f"{family.prefix}MLP"] = [family.layer.gate_up]
MERGED = {name: [names for names in groups if len(names) > 1] for name, groups in MERGED.items()}
MERGED["HeadAttention"] = MERGED["LlamaAttention"]  # attention of EAGLE heads


@runtime_checkable
class Projection(Protocol):
    """Protocol of a linear layer of our own forward. Only one with `reads_fp8` gets rows in FP8.

    Attributes:
        weight: tensor with the dtype and device of inputs and outputs. It may be an empty
            placeholder.
    """

    in_features: int
    out_features: int

    @property
    def weight(self) -> Tensor: ...

    def __call__(
        self, inputs: Float[Tensor, "*rows I"] | ScaledRows, /
    ) -> Float[Tensor, "*rows O"]: ...


class PackedLinear(nn.Module):
    """A frozen linear layer on a CPU whose weight is packed for its product. Equal to `linear` within rounding.

    Args:
        linear: layer on a CPU, in fp32 or bf16; it may be discarded.
    """

    def __init__(self, linear: nn.Linear):
        super().__init__()
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        self.product = packed_product(linear.weight, linear.bias)
        self._bias = None if linear.bias is None else linear.bias.detach()

    @property
    def weight(self) -> Tensor:
        """Return an empty placeholder with a dtype and a device, which some models read from their routers."""
        return torch.empty(0, dtype=self.product.dtype)

    def forward(self, inputs: Float[Tensor, "*rows I"]) -> Float[Tensor, "*rows O"]:
        return self.product(inputs)

    def rows(self, index: Int[Tensor, " D"]) -> PackedLinear:
        """Return a layer with some of the outputs, in the given order."""
        bias = None if self._bias is None else self._bias[index]
        return PackedLinear(dense_linear(self.product.dense()[index], bias))

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self._bias is not None}"


class SideBySideLinear(nn.Module):
    """Layers that read one input, with their outputs concatenated."""

    def __init__(self, parts: Sequence[nn.Module]):
        super().__init__()
        self.parts = nn.ModuleList(parts)
        self.in_features = cast(Projection, parts[0]).in_features
        self.out_features = sum(cast(Projection, part).out_features for part in parts)

    @property
    def weight(self) -> Tensor:
        return cast(Projection, self.parts[0]).weight

    def forward(self, inputs: Float[Tensor, "*rows I"]) -> Float[Tensor, "*rows O"]:
        return torch.cat([part(inputs) for part in self.parts], -1)


class OutputSlice(nn.Module):
    """One part of a merged layer, as a module: outputs begin .. end - 1."""

    def __init__(self, whole: PackedLinear | QuantizedLinear, begin: int, end: int):
        super().__init__()
        self.whole = whole
        self._begin = begin
        self._end = end
        self.in_features = whole.in_features
        self.out_features = end - begin

    @property
    def weight(self) -> Tensor:
        return self.whole.weight

    def forward(self, inputs: Float[Tensor, "*rows I"]) -> Float[Tensor, "*rows O"]:
        return self.whole(inputs)[..., self._begin : self._end]


def linear_layers(model: nn.Module) -> list[PackedLinear | QuantizedLinear | nn.Linear]:
    """Return the linear layers that a packed model's passes run, a merged layer once."""
    return [
        module
        for module in model.modules()
        if isinstance(module, PackedLinear | QuantizedLinear | nn.Linear)
    ]


def multiplies_quantized(*models: nn.Module | None) -> bool:
    """Return whether all linear layers of these models are this engine's quantised layers on a CPU."""
    layers = [layer for model in models if model is not None for layer in linear_layers(model)]
    return bool(layers) and all(isinstance(layer, QuantizedLinear) for layer in layers)


def multiplies_here(*models: nn.Module | None) -> bool:
    """Return whether all linear layers of these models run on this engine's own CPU kernels. None
    stands for no model."""
    layers = [layer for model in models if model is not None for layer in linear_layers(model)]
    return bool(layers) and all(
        isinstance(layer, QuantizedLinear)
        or (isinstance(layer, PackedLinear) and isinstance(layer.product, TiledProduct))
        for layer in layers
    )


def layer_bytes(layer: PackedLinear | QuantizedLinear | nn.Linear) -> int:
    """Return the bytes of a layer's weight, all of which a pass over few rows reads once."""
    if isinstance(layer, QuantizedLinear):
        return layer.weight_bytes
    return layer.in_features * layer.out_features * layer.weight.itemsize


def run_linears(model: nn.Module, num_rows: int) -> None:
    """Run each linear layer of a packed model once on zeros, to time most of what a pass over num_rows tokens costs."""
    for layer in linear_layers(model):
        layer(
            torch.zeros(
                num_rows, layer.in_features, dtype=layer.weight.dtype, device=layer.weight.device
            )
        )


def is_projection(module: nn.Module) -> bool:
    """Return whether our own forward can run this layer: dense, packed, or quantised by this engine."""
    if isinstance(module, ReducedLinear):
        return is_projection(module.part)
    ours = PackedLinear | QuantizedLinear | GpuLinear | OutputSlice
    return isinstance(module, ours) or _plain_weight(module) is not None


def merge_linears(parts: Sequence[nn.Module]) -> Projection:
    """Return one layer with the concatenated outputs of its parts, in the parts' own memory.

    Plain parts become views into the weight of the whole, so nothing is kept twice. Packed parts
    must have been packed together (see pack_linears), or each separately, as quantised ones.
    """
    first = parts[0]
    if len(parts) == 1:
        return cast(Projection, first)
    if isinstance(first, OutputSlice) and all(
        isinstance(part, OutputSlice) and part.whole is first.whole for part in parts
    ):
        return first.whole
    on_gpu = [part for part in parts if isinstance(part, GpuLinear)]
    if len(on_gpu) == len(parts) and on_gpu[0].can_merge(on_gpu):
        return on_gpu[0].merged(on_gpu)
    plain = [
        part for part in parts if isinstance(part, nn.Linear) and _plain_weight(part) is not None
    ]
    return _merge_plain(plain) if len(plain) == len(parts) else SideBySideLinear(parts)


def _merge_plain(parts: Sequence[nn.Linear]) -> nn.Linear:
    with torch.device("meta"):
        whole = nn.Linear(
            parts[0].in_features,
            sum(part.out_features for part in parts),
            parts[0].bias is not None,
        )
    for name in ("weight", "bias") if parts[0].bias is not None else ("weight",):
        whole_data = _joined_data([getattr(part, name) for part in parts])
        setattr(whole, name, nn.Parameter(whole_data, requires_grad=False))
    return whole


def _joined_data(parts: list[nn.Parameter]) -> Tensor:
    """Return the parts' weights as one tensor, of which the parts become views."""
    ends = [part.data_ptr() + part.numel() * part.element_size() for part in parts]
    begins = [part.data_ptr() for part in parts]
    num_rows = sum(len(part) for part in parts)
    first = parts[0].data
    if (
        begins[1:] == ends[:-1]
        and first.untyped_storage().nbytes() >= ends[-1] - first.untyped_storage().data_ptr()
    ):
        return first.as_strided((num_rows, *first.shape[1:]), first.stride())
    whole = torch.cat([part.data for part in parts])
    for part, rows in zip(parts, whole.split([len(part) for part in parts]), strict=True):
        part.data = rows
    return whole


def pack_draft(draft: nn.Module, target: nn.Module) -> None:
    """Pack a draft's linear layers. With a quantised target they are first rounded to 8 bits, since
    drafts need not be exact."""
    if holds_quantized(target):
        quantize_linears(draft)
    pack_linears(draft)


def pack_linears(model: nn.Module, min_weights: int | None = None) -> None:
    """Replace the model's linear layers in place where that pays and this machine's torch supports it.

    The projections of a Llama-shaped layer that read one input are packed together, and our own
    forward runs them as one. Each part stays in the module tree as a slice of the outputs.
    Quantised projections of one kind are merged likewise.

    Args:
        min_weights: minimum number of weights of a packed layer; None is min_weights_of its dtype.
            Layers of other quantisers and weights tied to an embedding are never packed. In a model
            with quantised layers even small ones are packed: quantised layers round their inputs to
            8 bits, so one bit of difference could become another token.
    """
    _merge_quantized(model)
    if holds_quantized(model):
        min_weights = 1
    packs = cache(can_pack)  # tried once, not for every layer
    for site in list(_sites(model)):
        if site.is_worth(min_weights) and packs(*site.kind):
            site.pack()


@dataclass(frozen=True, slots=True)
class Site:
    """A place in a module where dense layers read one input: a single layer, or a group in MERGED."""

    module: nn.Module
    names: Sequence[str]

    @property
    def parts(self) -> list[nn.Linear]:
        return [getattr(self.module, name) for name in self.names]

    def is_worth(self, min_weights: int | None) -> bool:
        """Return whether the layers have at least this many weights; None is min_weights_of their dtype."""
        smallest = min_weights_of(self.kind[1]) if min_weights is None else min_weights
        return sum(part.weight.numel() for part in self.parts) >= smallest

    @property
    def kind(self) -> tuple[str, torch.dtype]:
        """Return the device type and dtype of the weights."""
        weight = self.parts[0].weight
        return weight.device.type, weight.dtype

    @property
    def whole(self) -> nn.Linear:
        return _merge_plain(self.parts) if len(self.names) > 1 else self.parts[0]

    def pack(self) -> None:
        packed = PackedLinear(self.whole)
        if len(self.names) == 1:
            setattr(self.module, self.names[0], packed)
        else:
            _slice_outputs(self.module, self.names, packed)


def _slice_outputs(
    module: nn.Module, names: Sequence[str], whole: PackedLinear | QuantizedLinear
) -> None:
    """Replace a module's projections by slices of the outputs of their merged layer."""
    sizes = [getattr(module, name).out_features for name in names]
    for name, size, end in zip(names, sizes, accumulate(sizes), strict=True):
        setattr(module, name, OutputSlice(whole, end - size, end))


def _merge_quantized(model: nn.Module) -> None:
    for module in list(model.modules()):
        for names in MERGED.get(type(module).__name__, ()):
            parts = [getattr(module, name) for name in names]
            if QuantizedLinear.can_merge(parts):
                _slice_outputs(module, names, QuantizedLinear.merged(parts))


def _sites(model: nn.Module) -> Iterator[Site]:
    """Yield every plain linear layer of the model once."""
    for module in model.modules():
        plain = [
            name for name, child in module.named_children() if _plain_weight(child) is not None
        ]
        for names in MERGED.get(type(module).__name__, ()):
            if all(name in plain for name in names):
                yield Site(module, names)
                plain = [name for name in plain if name not in names]
        for name in plain:
            yield Site(module, [name])


def min_weights_of(dtype: torch.dtype) -> float:
    """Return the minimum number of weights from which packing a layer of this dtype pays."""
    return 1 if is_tiled(dtype) else MIN_ONEDNN_WEIGHTS.get(dtype, math.inf)


def warm_up_kernels(model: nn.Module, max_rows: int) -> None:
    """Run one layer of every shape that oneDNN multiplies for each number of rows up to WARM_ROWS,
    so that kernels are compiled.

    In a model of 230M parameters the first pass of a number of rows takes 6 ms longer in fp32, and
    9 in bf16. A kernel takes half a megabyte. Layers of more than MAX_WARM_WEIGHTS are left out:
    their first pass takes long anyway. After MAX_WARM_S the rest is left to the first passes.
    """
    max_rows = max(min(max_rows, WARM_ROWS), MIN_ONEDNN_ROWS)
    packed = (module for module in model.modules() if isinstance(module, PackedLinear))
    shapes = {
        (x.in_features, x.out_features): x
        for x in packed
        if x.product.needs_warm_up and x.in_features * x.out_features <= MAX_WARM_WEIGHTS
    }
    if not shapes:
        return
    ends_at = time.perf_counter() + MAX_WARM_S
    with torch.inference_mode():
        for num_rows in range(MIN_ONEDNN_ROWS, max_rows + 1):
            for layer in shapes.values():
                layer(torch.zeros(num_rows, layer.in_features, dtype=layer.weight.dtype))
            if time.perf_counter() > ends_at:
                return


def slice_rows(linear: nn.Module | Projection, rows: Int[Tensor, " D"]) -> nn.Module:
    """Return a layer with some of the outputs, in the given order, packed if the whole is.

    Raises EngineError for a layer of another library's quantiser, whose rows cannot be read one by
    one.
    """
    if isinstance(linear, GatheredHead):
        return linear.rows(rows, slice_rows)
    if isinstance(linear, QuantizedLinear | GpuLinear | PackedLinear):
        return linear.rows(rows)
    if not isinstance(linear, nn.Linear) or _plain_weight(linear) is None:
        raise EngineError(
            f"no rows can be taken from the target's lm_head, which is a {type(linear).__name__}"
        )
    bias = None if linear.bias is None else linear.bias[rows]
    return dense_linear(linear.weight.detach()[rows], bias)


def _plain_weight(module: nn.Module) -> nn.Parameter | None:
    """Return the weight of a dense layer, or None. Quantisers change a layer's class, forward or weight."""
    if type(module) is not nn.Linear or "forward" in vars(module):
        return None
    weight = module._parameters.get("weight")
    return weight if type(weight) is nn.Parameter else None
