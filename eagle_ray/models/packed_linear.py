"""Projections: the linear layers that our own forward runs, dense, packed for a CPU, or quantised.

A projection is any module of Projection's attributes. PackedLinear is a frozen nn.Linear on a CPU with its weight in
the layout of oneDNN's kernels.

    pack_linears(model)             # once, before the model is used; layers that gain nothing stay as they are
    warm_up_kernels(model, 64)      # compile kernels for passes of up to 64 rows before requests wait for them

Compared with F.linear in fp32, 4 to 8 rows cost as much as one row, and many rows two thirds. A row's result does
not depend on the other rows, bit for bit, which F.linear does not guarantee. For this, one to three rows are padded to
MIN_PACKED_ROWS, though on some processors a kernel that sums in another order is faster for them: no measurement
chooses an order of summation, so all workers of a job and all starts have the same bits. A packed weight is not a
parameter, has no gradient and cannot be moved.
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
from eagle_ray.kernels.fp8 import ScaledRows
from eagle_ray.models.gpu_linears import GpuLinear, dense_linear
from eagle_ray.models.quantized_linear import QuantizedLinear, holds_quantized, quantize_linears
from eagle_ray.parallel.shard import GatheredHead, ReducedLinear

MIN_PACKED_ROWS = 4  # the oneDNN kernels for one to three rows sum in another order
TYPICAL_ROWS = 16  # the packing asks for a guess; its layout came out the same for 1 to 64
DTYPES = (torch.float32, torch.bfloat16)
MIN_WEIGHTS = {torch.float32: 1 << 18, torch.bfloat16: 1}  # in fp32, 256 x 256 loses by packing and 512 x 512 wins
WARM_ROWS, MAX_WARM_WEIGHTS = 96, 1 << 24  # kernels are made ahead up to these numbers of rows and of weights
MAX_WARM_S = 1.0  # seconds that making kernels may take for one model
LLAMA_FAMILIES = (
    "Llama",
    "Mistral",
    "Mixtral",
    "Olmoe",
    "Qwen2",
    "Qwen2Moe",
    "Qwen3",
    "Qwen3Moe",
)  # how transformers' classes begin
MERGED: dict[str, list[tuple[str, ...]]] = {
    **{f"{name}Attention": [("q_proj", "k_proj", "v_proj")] for name in LLAMA_FAMILIES},
    **{f"{name}MLP": [("gate_proj", "up_proj")] for name in LLAMA_FAMILIES},
}  # projections that read the same input, by the class of their module


@runtime_checkable
class Projection(Protocol):
    """A linear layer over the last dimension. Only one that has `reads_fp8` is given ScaledRows.

    Attributes:
        weight: its dtype and its device are those of inputs and outputs; its values may be elsewhere.
    """

    in_features: int
    out_features: int

    @property
    def weight(self) -> Tensor: ...

    def __call__(self, inputs: Float[Tensor, "*rows I"] | ScaledRows, /) -> Float[Tensor, "*rows O"]: ...


class PackedLinear(nn.Module):
    """Computes what `linear` does, within rounding.

    Args:
        linear: on a CPU, in one of DTYPES; it may be discarded.
    """

    def __init__(self, linear: nn.Linear):
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self._weight = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), TYPICAL_ROWS)
        self._bias = None if linear.bias is None else linear.bias.detach()

    @property
    def weight(self) -> Tensor:
        """Return a placeholder with a dtype and a device, which some models read from their routers."""
        return torch.empty(0, dtype=self._weight.dtype, device=self._weight.device)

    def forward(self, inputs: Float[Tensor, "*rows I"]) -> Float[Tensor, "*rows O"]:
        num_rows = inputs.numel() // self.in_features
        if num_rows >= MIN_PACKED_ROWS:
            return self._multiply(inputs)
        rows = inputs.reshape(num_rows, self.in_features)
        padded = torch.cat([rows] * MIN_PACKED_ROWS)[:MIN_PACKED_ROWS]
        return self._multiply(padded)[:num_rows].view(*inputs.shape[:-1], -1)

    def _multiply(self, rows: Float[Tensor, "*rows I"]) -> Float[Tensor, "*rows O"]:
        return torch.ops.mkldnn._linear_pointwise(rows, self._weight, self._bias, "none", [], "")

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self._bias is not None}"


class SideBySideLinear(nn.Module):
    """Several layers over the same input, with concatenated outputs."""

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
    """Outputs begin .. end - 1 of a merged layer: the outputs of one of its parts."""

    def __init__(self, whole: PackedLinear | QuantizedLinear, begin: int, end: int):
        super().__init__()
        self.whole, self._begin, self._end = whole, begin, end
        self.in_features, self.out_features = whole.in_features, end - begin

    @property
    def weight(self) -> Tensor:
        return self.whole.weight

    def forward(self, inputs: Float[Tensor, "*rows I"]) -> Float[Tensor, "*rows O"]:
        return self.whole(inputs)[..., self._begin : self._end]


def linear_layers(model: nn.Module) -> list[PackedLinear | QuantizedLinear | nn.Linear]:
    """Return the linear layers that a packed model's passes run, merged ones once."""
    return [module for module in model.modules() if isinstance(module, PackedLinear | QuantizedLinear | nn.Linear)]


def layer_bytes(layer: PackedLinear | QuantizedLinear | nn.Linear) -> int:
    """Return the bytes of a layer's weight, which a pass over few rows reads once."""
    if isinstance(layer, QuantizedLinear):
        return layer.weight_bytes
    return layer.in_features * layer.out_features * layer.weight.itemsize


def run_linears(model: nn.Module, num_rows: int) -> None:
    """Run each linear layer of a packed model once, over zeros: most of what a pass over num_rows tokens takes."""
    for layer in linear_layers(model):
        layer(torch.zeros(num_rows, layer.in_features, dtype=layer.weight.dtype, device=layer.weight.device))


def is_projection(module: nn.Module) -> bool:
    """Return whether our own forward runs this layer: a plain one, packed or not, or one of our quantised ones."""
    if isinstance(module, ReducedLinear):
        return is_projection(module.part)
    ours = PackedLinear | QuantizedLinear | GpuLinear | OutputSlice
    return isinstance(module, ours) or _plain_weight(module) is not None


def merge_linears(parts: Sequence[nn.Module]) -> Projection:
    """Return one layer with the concatenated outputs of its parts, in the parts' own memory.

    Plain parts become views into the weight of the whole, so nothing is kept twice. Packed parts must have been
    packed together (see pack_linears), or each separately, as quantised ones.
    """
    first = parts[0]
    if isinstance(first, OutputSlice) and all(
        isinstance(part, OutputSlice) and part.whole is first.whole for part in parts
    ):
        return first.whole
    on_gpu = [part for part in parts if isinstance(part, GpuLinear)]
    if len(on_gpu) == len(parts) and on_gpu[0].can_merge(on_gpu):
        return on_gpu[0].merged(on_gpu)
    plain = [part for part in parts if isinstance(part, nn.Linear) and _plain_weight(part) is not None]
    return _merge_plain(plain) if len(plain) == len(parts) else SideBySideLinear(parts)


def _merge_plain(parts: Sequence[nn.Linear]) -> nn.Linear:
    with torch.device("meta"):
        whole = nn.Linear(parts[0].in_features, sum(part.out_features for part in parts), parts[0].bias is not None)
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
    if begins[1:] == ends[:-1] and first.untyped_storage().nbytes() >= ends[-1] - first.untyped_storage().data_ptr():
        return first.as_strided((num_rows, *first.shape[1:]), first.stride())
    whole = torch.cat([part.data for part in parts])
    for part, rows in zip(parts, whole.split([len(part) for part in parts]), strict=True):
        part.data = rows
    return whole


def pack_draft(draft: nn.Module, target: nn.Module) -> None:
    """Pack a draft, of which no output needs to be exact: with a quantised target, it is rounded to 8 bits first."""
    if holds_quantized(target):
        quantize_linears(draft)
    pack_linears(draft)


def pack_linears(model: nn.Module, min_weights: int | None = None) -> None:
    """Replace the model's linear layers in place where that pays and this machine's torch supports it.

    The projections of a Llama-shaped layer that read the same input are packed as one, which our own forward runs;
    each part stays in the module tree as a slice of its outputs. So do quantised projections that are alike.

    Args:
        min_weights: smaller layers stay, as do those of other quantisers; None is MIN_WEIGHTS of their dtype. With
            quantised layers none stays: their inputs are rounded to 8 bits, so one bit more or less may become another
            token. A weight tied to an embedding stays, too.
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
    """Plain linear layers of one module that read the same input: one, or several of a group in MERGED."""

    module: nn.Module
    names: Sequence[str]

    @property
    def parts(self) -> list[nn.Linear]:
        return [getattr(self.module, name) for name in self.names]

    def is_worth(self, min_weights: int | None) -> bool:
        """Return whether the layer has at least this many weights; None is MIN_WEIGHTS of its dtype."""
        smallest = MIN_WEIGHTS.get(self.kind[1], math.inf) if min_weights is None else min_weights
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


def _slice_outputs(module: nn.Module, names: Sequence[str], whole: PackedLinear | QuantizedLinear) -> None:
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
        plain = [name for name, child in module.named_children() if _plain_weight(child) is not None]
        for names in MERGED.get(type(module).__name__, ()):
            if all(name in plain for name in names):
                yield Site(module, names)
                plain = [name for name in plain if name not in names]
        for name in plain:
            yield Site(module, [name])


def warm_up_kernels(model: nn.Module, max_rows: int) -> None:
    """Run a packed layer of every shape once for each number of rows, up to WARM_ROWS: oneDNN compiles one for each.

    In a model of 230M parameters the first pass of a number of rows takes 6 ms longer in fp32, and 9 in bf16. A kernel
    takes half a megabyte. Layers of more than MAX_WARM_WEIGHTS are left out: their first pass takes long anyway.
    After MAX_WARM_S the rest is left to the first passes.
    """
    max_rows = max(min(max_rows, WARM_ROWS), MIN_PACKED_ROWS)
    packed = (module for module in model.modules() if isinstance(module, PackedLinear))
    shapes = {(x.in_features, x.out_features): x for x in packed if x.in_features * x.out_features <= MAX_WARM_WEIGHTS}
    ends_at = time.perf_counter() + MAX_WARM_S
    with torch.inference_mode():
        for num_rows in range(MIN_PACKED_ROWS, max_rows + 1):
            for layer in shapes.values():
                layer(torch.zeros(num_rows, layer.in_features, dtype=layer.weight.dtype))
            if time.perf_counter() > ends_at:
                return


def slice_rows(linear: nn.Module | Projection, rows: Int[Tensor, " D"]) -> nn.Module:
    """Return a layer with some of the outputs, in the given order, packed if the whole is.

    Raises EngineError for a layer of another library's quantiser, whose rows cannot be read one by one.
    """
    if isinstance(linear, GatheredHead):
        return linear.rows(rows, slice_rows)
    if isinstance(linear, QuantizedLinear | GpuLinear):
        return linear.rows(rows)
    if isinstance(linear, PackedLinear):
        weight, bias = linear._weight.to_dense(), linear._bias
    elif isinstance(linear, nn.Linear) and _plain_weight(linear) is not None:
        weight, bias = linear.weight, linear.bias
    else:
        raise EngineError(f"no rows can be taken from the target's lm_head, which is a {type(linear).__name__}")
    part = dense_linear(weight.detach()[rows], None if bias is None else bias.detach()[rows])
    return PackedLinear(part) if isinstance(linear, PackedLinear) else part


def _plain_weight(module: nn.Module) -> nn.Parameter | None:
    """Return the weight of a plain linear layer; quantisers change its class, its forward, or its weight."""
    if type(module) is not nn.Linear or "forward" in vars(module):
        return None
    weight = module._parameters.get("weight")
    return weight if type(weight) is nn.Parameter else None


def can_pack(device: str, dtype: torch.dtype) -> bool:
    """Return whether layers are packed: found out by trying, as the operators have no public name, and bf16 wants a CPU
    that has it.
    """
    if device != "cpu" or dtype not in DTYPES or not torch.backends.mkldnn.is_available():
        return False
    try:
        PackedLinear(nn.Linear(16, 16, dtype=dtype))(torch.zeros(1, 16, dtype=dtype))
    except (AttributeError, RuntimeError):
        return False
    return True
