"""PackedLinear: a frozen nn.Linear on a CPU, its weight in the order in which oneDNN's kernels read it.

    pack_linears(model)          # once, before the model is used; where there is nothing to gain it stays as it is
    make_kernels(model, 64)      # for passes of up to 64 rows, before anybody waits for them

Against F.linear in fp32, 4 to 8 rows cost what one row costs, and many rows two thirds. And a row's result does not
depend on how many rows go with it, bit for bit, which F.linear promises to nobody. Does not know models or training:
a packed weight is no parameter, takes no gradient and cannot be moved.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from eagle_ray.errors import EngineError

DTYPES = (torch.float32, torch.bfloat16)
FEWEST_WEIGHTS = 1 << 18  # below it the call costs one row more than the packing saves: 256 x 256 loses, 512 x 512 wins
READY_ROWS, MOST_WEIGHTS = 96, 1 << 24  # kernels are made ahead for so many rows, and for layers of so many weights
FEWEST_ROWS = 4  # fewer are filled up: the kernels for one to three rows are slower than that for four, and round apart
MERGED = {
    **{f"{name}Attention": [("q_proj", "k_proj", "v_proj")] for name in ("Llama", "Mistral", "Qwen2", "Qwen3")},
    **{f"{name}MLP": [("gate_proj", "up_proj")] for name in ("Llama", "Mistral", "Qwen2", "Qwen3")},
}  # projections that read the same input, by the class of their module
TYPICAL_ROWS = 16  # the packing asks for a guess; its layout came out the same for 1 to 64


class PackedLinear(nn.Module):
    """What `linear` computes, within rounding. linear: on a CPU, in one of DTYPES; it may be thrown away."""

    def __init__(self, linear: nn.Linear):
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self._weight = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), TYPICAL_ROWS)
        self._bias = None if linear.bias is None else linear.bias.detach()

    @property
    def weight(self) -> Tensor:
        """Nothing but a dtype and a device, which some models ask of their routers."""
        return torch.empty(0, dtype=self._weight.dtype, device=self._weight.device)

    def forward(self, inputs: Float[Tensor, "*rows I"]) -> Float[Tensor, "*rows O"]:
        num_rows = inputs.numel() // self.in_features
        if num_rows >= FEWEST_ROWS:
            return self._multiply(inputs)
        rows = torch.cat([inputs.reshape(num_rows, self.in_features)] * FEWEST_ROWS)[:FEWEST_ROWS]
        return self._multiply(rows)[:num_rows].view(*inputs.shape[:-1], self.out_features)

    def _multiply(self, rows: Float[Tensor, "*rows I"]) -> Float[Tensor, "*rows O"]:
        return torch.ops.mkldnn._linear_pointwise(rows, self._weight, self._bias, "none", [], "")

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self._bias is not None}"


class SideBySideLinear(nn.Module):
    """Several layers over the same input, their outputs one after the other."""

    def __init__(self, parts: Sequence[nn.Module]):
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def forward(self, inputs: Float[Tensor, "*rows I"]) -> Float[Tensor, "*rows O"]:
        return torch.cat([part(inputs) for part in self.parts], -1)


class OutputSlice(nn.Module):
    """Outputs begin .. end - 1 of a packed layer that several layers were merged into: what one of them computed."""

    def __init__(self, whole: PackedLinear, begin: int, end: int):
        super().__init__()
        self.whole, self._begin, self._end = whole, begin, end
        self.in_features, self.out_features = whole.in_features, end - begin

    def forward(self, inputs: Float[Tensor, "*rows I"]) -> Float[Tensor, "*rows O"]:
        return self.whole(inputs)[..., self._begin : self._end]


def is_dense(module: nn.Module) -> bool:
    """Return whether this is a linear layer of plain weights, packed or not, and nothing besides."""
    return isinstance(module, PackedLinear | OutputSlice) or _plain_weight(module) is not None


def joined(parts: Sequence[nn.Module]) -> nn.Module:
    """Return one layer whose outputs are those of the parts, one after the other, in the parts' own memory.

    Plain parts become views into the weights of the whole, unless they are that already, so nothing is kept twice.
    Packed parts must have been packed together (see pack_linears) or be each for itself.
    """
    if all(isinstance(part, OutputSlice) and part.whole is parts[0].whole for part in parts):
        return parts[0].whole
    if any(_plain_weight(part) is None for part in parts):
        return SideBySideLinear(parts)
    with torch.device("meta"):
        whole = nn.Linear(parts[0].in_features, sum(part.out_features for part in parts), parts[0].bias is not None)
    for name in ("weight", "bias") if parts[0].bias is not None else ("weight",):
        whole_data = _joined_data([getattr(part, name) for part in parts])
        setattr(whole, name, nn.Parameter(whole_data, requires_grad=False))
    return whole


def _joined_data(parts: list[nn.Parameter]) -> Tensor:
    """Return the parts' numbers as one tensor that the parts are views of from now on."""
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


def pack_linears(model: nn.Module, fewest_weights: int = FEWEST_WEIGHTS) -> None:
    """Replace the model's linear layers, in place, where that pays and this machine's torch can.

    The projections of a Llama-shaped layer that read the same input are packed as one, which our own forward runs;
    each part stays in the module tree as a slice of its outputs.

    fewest_weights: smaller layers stay, and quantised ones. A weight that is tied to an embedding stays there too.
    """
    can_pack = cache(_can_pack)  # tried once, not for every layer
    for module in list(model.modules()):
        for names in MERGED.get(type(module).__name__, ()):
            _pack_together(module, names, fewest_weights, can_pack)
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            weight = _plain_weight(child)
            if weight is not None and weight.numel() >= fewest_weights and can_pack(weight.device.type, weight.dtype):
                setattr(module, name, PackedLinear(child))


def _pack_together(
    module: nn.Module, names: Sequence[str], fewest_weights: int, can_pack: Callable[[str, torch.dtype], bool]
) -> None:
    parts = [getattr(module, name) for name in names]
    if any(_plain_weight(part) is None for part in parts):
        return
    weight, total = parts[0].weight, sum(part.weight.numel() for part in parts)
    if total < fewest_weights or not can_pack(weight.device.type, weight.dtype):
        return
    packed = PackedLinear(joined(parts))
    begin = 0
    for name, part in zip(names, parts, strict=True):
        setattr(module, name, OutputSlice(packed, begin, begin + part.out_features))
        begin += part.out_features


def make_kernels(model: nn.Module, most_rows: int) -> None:
    """Run a packed layer of every shape once for each number of rows, up to READY_ROWS: oneDNN compiles one for each.

    In a model of 230M parameters the first pass of a number of rows takes 6 ms longer in fp32, and 9 in bf16. A kernel
    takes half a megabyte. Layers of more than MOST_WEIGHTS are left out: beside what they take that is nothing.
    """
    most_rows = max(min(most_rows, READY_ROWS), FEWEST_ROWS)
    packed = (module for module in model.modules() if isinstance(module, PackedLinear))
    shapes = {(x.in_features, x.out_features): x for x in packed if x.in_features * x.out_features <= MOST_WEIGHTS}
    with torch.inference_mode():
        for layer in shapes.values():
            rows = torch.zeros(most_rows, layer.in_features, dtype=layer.weight.dtype)
            for num_rows in range(FEWEST_ROWS, most_rows + 1):
                layer(rows[:num_rows])


def rows_of(linear: nn.Module, rows: Int[Tensor, " D"]) -> nn.Module:
    """A layer of some of the outputs alone, in the given order, packed where the whole is.

    Raises EngineError for a quantised layer, whose rows are not to be had one by one.
    """
    if isinstance(linear, PackedLinear):
        weight, bias = linear._weight.to_dense(), linear._bias
    elif (weight := _plain_weight(linear)) is not None:
        bias = linear.bias
    else:
        raise EngineError(f"no rows can be taken from the target's lm_head, which is a {type(linear).__name__}")
    with torch.device("meta"):
        part = nn.Linear(linear.in_features, len(rows), bias=bias is not None)
    part.weight = nn.Parameter(weight.detach()[rows], requires_grad=False)
    part.bias = None if bias is None else nn.Parameter(bias.detach()[rows], requires_grad=False)
    return PackedLinear(part) if isinstance(linear, PackedLinear) else part


def _plain_weight(module: nn.Module) -> nn.Parameter | None:
    """Of a linear layer that is just that: quantisers change its class, its forward, or its weight in kind or name."""
    if type(module) is not nn.Linear or "forward" in vars(module):
        return None
    weight = module._parameters.get("weight")
    return weight if type(weight) is nn.Parameter else None


def _can_pack(device: str, dtype: torch.dtype) -> bool:
    """Found out by trying: the operators have no public name, and bf16 wants a CPU that has it."""
    if device != "cpu" or dtype not in DTYPES or not torch.backends.mkldnn.is_available():
        return False
    try:
        PackedLinear(nn.Linear(16, 16, dtype=dtype))(torch.zeros(1, 16, dtype=dtype))
    except (AttributeError, RuntimeError):
        return False
    return True
