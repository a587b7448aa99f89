"""Load one rank's part of a target, reading only the weights that this rank computes with.

    model = load_shard(path, config, torch.float32, "cpu", ranks)       # a causal LM that computes with the other ranks

Plain weights are read slice by slice from safetensors files, and rounded to FP8 on the device if
requested. Quantised layers are read whole, one at a time, and cut. The host never holds two copies
of a rank's weights. Files may store a mixture of experts as one tensor per expert or as one stacked
tensor per layer; the model has stacked ones.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from eagle_ray.core.errors import EngineError
from eagle_ray.models.fp8_blocks import Fp8BlockWeight, part_of_blocks
from eagle_ray.models.fp8_experts import STACKS
from eagle_ray.models.gpu_linears import FP8_MULTIPLE
from eagle_ray.models.mxfp4_experts import BLOCKS, SCALES, restored, stacks_in
from eagle_ray.models.packed_layouts import EMBEDDING_WEIGHT, SafetensorFiles, Weight
from eagle_ray.models.quantized_checkpoint import has_scattered_groups, reads
from eagle_ray.models.quantized_linear import Fp8Weight, QuantizedWeight
from eagle_ray.models.quantized_model import (
    Checkpoint,
    build_model,
    check_shape,
    empty_model,
    has_mxfp4,
    quantization_of,
    quantized_checkpoint,
)
from eagle_ray.models.rounded_checkpoint import ROUNDS_PLAIN, RoundedCheckpoint
from eagle_ray.parallel.rank_group import RankGroup
from eagle_ray.parallel.shard import (
    LM_HEAD,
    QKV,
    SINKS,
    SUMMED_BIAS,
    Part,
    Shard,
    cut_out,
    fit_row_norms,
    group_size_of,
    joined,
    padded_rows,
    shard_config,
)
from eagle_ray.storage.model_files import gguf_in, pickle_in

TIED = {EMBEDDING_WEIGHT, LM_HEAD}
MIXTRAL_NAMES = {
    ".block_sparse_moe.": ".mlp.",
    ".w1.weight": ".gate_proj.weight",
    ".w3.weight": ".up_proj.weight",
    ".w2.weight": ".down_proj.weight",
}  # of its files, and what transformers' modules and the files of other mixtures have in their place
EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")  # a tensor of one expert


def why_unread(path: Path, config: PretrainedConfig, rounds: bool) -> str | None:
    """Return why load_shard cannot read a part of the target, with advice, or None. Weights are not read.

    Arguments are those of load_shard.
    """
    quantization = {} if gguf_in(path) is not None else quantization_of(config)
    if quantization is not None and rounds:
        return (
            "model.quantization: fp8 is for plain weights, and these are quantised: set it to none"
        )
    if quantization and not reads(quantization) and not has_mxfp4(config):
        method = quantization.get("quant_method")
        return f"the target is quantised by {method!r}, which ranks do not read: take AWQ, GPTQ or compressed-tensors"
    if quantization and has_scattered_groups(quantization):
        return "inputs that share a scale are apart (desc_act or actorder): take a checkpoint without that"
    if (pickle := pickle_in(path)) is not None:
        return f"the target is in {pickle}, and ranks read parts of safetensors files: save it as those"
    return None


def inputs_together(path: Path, config: PretrainedConfig, rounds: bool) -> int | None:
    """Return how many consecutive inputs of a quantised layer must stay on one rank, for
    check_shards; None for plain weights.

    Arguments are those of load_shard.
    """
    if rounds:
        return FP8_MULTIPLE
    if has_mxfp4(config):
        return None
    return group_size_of({} if gguf_in(path) is not None else quantization_of(config))


def load_shard(
    path: Path,
    config: PretrainedConfig,
    dtype: torch.dtype,
    device: str,
    ranks: RankGroup,
    dequantize: bool = False,
    rounds: bool = False,
) -> PreTrainedModel:
    """Return this rank's part of the causal LM in a directory, frozen, on the device. num_ranks
    must have accepted the model.

    Args:
        config: config of the whole target.
        dequantize: whether to dequantise all layers.
        rounds: whether plain weights of layers are rounded to FP8.

    Raises:
        EngineError: the files cannot be read, lack a tensor, or have one in another shape than the
            config's; or rounding was requested for weights that are already quantised.
    """
    shard = Shard.of(config, ranks.rank, ranks.size)
    quantized = quantized_checkpoint(path, config)
    is_read = quantized is not None or quantization_of(config) is None or has_mxfp4(config)
    assert is_read, "num_ranks lets no other quantisers pass"
    whole = quantized or PlainCheckpoint.open(path)
    if rounds and not isinstance(whole, PlainCheckpoint):
        raise EngineError(ROUNDS_PLAIN)
    shape = shard_config(config, ranks.size)
    model = empty_model(shape, dtype)
    fit_row_norms(model, shard)
    model.set_experts_implementation(
        "eager"
    )  # for the check of the model: the others refuse some widths
    with torch.device("meta"):
        model.set_submodule(
            "lm_head", nn.Linear(config.hidden_size, shard.num_logits, bias=False, dtype=dtype)
        )
    shapes = {
        name: tensor.shape
        for name, tensor in empty_model(config, dtype).named_parameters(remove_duplicate=False)
    }
    is_tied = config.tie_word_embeddings
    checkpoint: Checkpoint = ShardedCheckpoint(whole, shard, shapes, is_tied, ranks.check)
    if rounds:
        checkpoint = RoundedCheckpoint(checkpoint, device)
    build_model(shape, checkpoint, dtype, device, dequantize, model=model)
    return joined(model, ranks, shard).eval().requires_grad_(False)


@dataclass(frozen=True, slots=True)
class PlainCheckpoint:
    """A directory of safetensors files with dense weights. Built by `open`.

    Attributes:
        stored: name in the files of each tensor, by the name that transformers gives it.
        num_experts: number of experts of each stack that the files store as one tensor per expert,
            by the stack's name.
        packed: names of the stacks stored in MXFP4.
    """

    files: SafetensorFiles
    stored: dict[str, str]
    num_experts: dict[str, int]
    packed: frozenset[str] = frozenset()

    @classmethod
    def open(cls, directory: Path) -> PlainCheckpoint:
        files = SafetensorFiles.open(directory)
        stored = {_usual_name(name): name for name in files.file_of}
        num_experts: Counter[str] = Counter()
        for match in filter(None, map(EXPERT.fullmatch, stored)):
            block, number, projection = match.groups()
            stack = f"{block}.down_proj" if projection == "down" else f"{block}.gate_up_proj"
            num_experts[stack] = max(num_experts[stack], int(number) + 1)
        return cls(files, stored, dict(num_experts), stacks_in(stored))

    def names(self) -> list[str]:
        return []

    def tensor_names(self) -> set[str]:
        return self.stored.keys() | self.num_experts.keys() | self.packed

    def projection(self, name: str) -> Tensor:
        return self.tensor(f"{name}.weight")

    def tensor(self, name: str) -> Tensor:
        if name in self.packed:
            return restored(self.tensor(name + BLOCKS), self.tensor(name + SCALES))
        return self.files.tensor(self.stored.get(name, name))

    def has_own_head(self) -> bool:
        return self.files.has_own_head()

    def part(self, source: str, name: str, shard: Shard, shape: Sequence[int]) -> Tensor:
        """Read one rank's part of a tensor.

        Args:
            name: name of the parameter, which decides how it is cut.
            shape: shape of the whole parameter.
        """
        block, _, kind = name.rpartition(".")
        if name in self.num_experts:
            return self._joined_experts(block, STACKS[kind], self.num_experts[name], shard, shape)
        if name in self.packed:
            whole = self.tensor(name)
            check_shape(name, whole.shape, shape)
            return cut_out(whole, shard.part_of_stack(kind, whole.shape))
        stored = self.files.slice_of(self.stored.get(source, source))
        check_shape(name, stored.get_shape(), shape)
        if block.endswith(".experts"):
            return read_slice(stored, shard.part_of_stack(kind, stored.get_shape()))
        return read_slice(stored, shard.part_of(name, stored.get_shape()))

    def _joined_experts(
        self,
        block: str,
        projections: Sequence[str],
        num_experts: int,
        shard: Shard,
        shape: Sequence[int],
    ) -> Float[Tensor, "E O I"]:
        """Read a rank's part of every expert's own tensors.

        Args:
            shape: shape of the whole stack of all experts.
        """
        of_each = shape[1] // len(projections), shape[2]
        stack: Tensor | None = None
        for expert in range(num_experts):
            names = [f"{block}.{expert}.{projection}.weight" for projection in projections]
            own = torch.cat([self.part(name, name, shard, of_each) for name in names])
            stack = own.new_empty(num_experts, *own.shape) if stack is None else stack
            stack[expert] = own
        assert stack is not None, "a stack has experts"
        return stack


@dataclass(frozen=True, slots=True)
class ShardedCheckpoint:
    """Reads one rank's part of a checkpoint. Raises EngineError for missing or misshapen tensors.

    Attributes:
        shapes: shapes of the whole target's parameters.
        is_tied: whether embedding and lm_head are one tensor if only one of them is stored.
        check: callback before each tensor is read; it raises to cancel the loading.
    """

    whole: Checkpoint
    shard: Shard
    shapes: Mapping[str, Sequence[int]]
    is_tied: bool = False
    check: Callable[[], None] = lambda: None

    def names(self) -> list[str]:
        return self.whole.names()

    def tensor_names(self) -> set[str]:
        """Return the names of the tensors; of a tied embedding and lm_head both names."""
        stored = self.whole.tensor_names()
        return stored | TIED if self.is_tied and stored & TIED else stored

    def has_own_head(self) -> bool:
        return self.whole.has_own_head()

    def projection(self, name: str) -> Weight:
        self.check()
        weight = self.whole.projection(name)
        check_shape(f"{name}.weight", weight.shape, self.shapes[f"{name}.weight"])
        part = self.shard.part_of(f"{name}.weight", weight.shape)
        if part is None:
            return weight
        if isinstance(weight, QuantizedWeight):
            return _quantized_part(name, weight, part)
        if isinstance(weight, Fp8BlockWeight):
            return part_of_blocks(weight, part)
        return _fp8_part(weight, part) if isinstance(weight, Fp8Weight) else cut_out(weight, part)

    def tensor(self, name: str) -> Tensor:
        self.check()
        source = name
        if name in TIED and name not in self.whole.tensor_names():
            [source] = TIED - {name}
        if isinstance(self.whole, PlainCheckpoint):
            tensor = self.whole.part(source, name, self.shard, self.shapes[name])
        else:
            tensor = self.whole.tensor(source)
            check_shape(name, tensor.shape, self.shapes[name])
            tensor = cut_out(tensor, self.shard.part_of(name, tensor.shape))
        return (
            tensor
            if not name.endswith("bias") or self.shard.adds_bias(name)
            else torch.zeros_like(tensor)
        )


def _usual_name(stored: str) -> str:
    """Return the name that transformers would give to a tensor of a file."""
    for mixtrals, usual in MIXTRAL_NAMES.items():
        stored = stored.replace(mixtrals, usual)
    return stored


def share_of(stored: str, shard: Shard) -> float:
    """Return the fraction of a tensor's numbers that one rank has.

    Args:
        stored: name of the tensor in a file, of a quantised layer or not.
    """
    layer, _, kind = _usual_name(stored).rpartition(".")
    if kind == SUMMED_BIAS:
        return 1
    if layer.endswith(".experts") or kind == SINKS:
        return 1 / shard.size
    whole = 2 * shard.size * shard.kv_heads  # which ranks divide
    if f"{layer}.weight" == LM_HEAD:
        whole = shard.vocab_size
    if layer.endswith(QKV):
        whole = shard.heads + 2 * shard.kv_heads
    part = shard.part_of(f"{layer}.{'bias' if kind == 'bias' else 'weight'}", (whole, whole))
    return 1 if part is None else (part.size + part.padding) / whole


def read_slice(stored: Any, part: Part | None) -> Tensor:
    """Return a part of a tensor in a file, or all of it.

    Args:
        stored: safetensors' lazy slice of the tensor.
    """
    if part is None:
        return stored[:]
    before = (slice(None),) * part.dim
    runs = [stored[(*before, slice(begin, end))] for begin, end in part.ranges]
    rows = runs[0] if len(runs) == 1 else torch.cat(runs, part.dim)
    return padded_rows(rows, part.padding)


def _quantized_part(name: str, weight: QuantizedWeight, part: Part) -> QuantizedWeight:
    """Return some outputs of a weight, or some whole groups of its inputs, or some of the inputs of its only group."""
    if part.dim == 0:
        index = part.index
        return weight.rows(torch.cat([index, index[-1:].expand(part.padding)]))
    if weight.order is not None:
        raise EngineError(
            f"tensor {name}.qweight: its groups have inputs that are apart (desc_act), which ranks cannot share. Set "
            "tensor_parallel to 1, or take a checkpoint without desc_act."
        )
    [(begin, end)] = part.ranges
    codes = weight.codes[:, begin:end].contiguous()
    if weight.scale.shape[1] == 1:
        return QuantizedWeight(codes, weight.scale, weight.offset, weight.bits)
    size = weight.group_size
    if begin % size or end % size:
        raise EngineError(
            f"tensor {name}.qweight: groups of {size} inputs, and a rank's {end - begin} are no whole number "
            "of them. Set tensor_parallel to less."
        )
    groups = slice(begin // size, end // size)
    return QuantizedWeight(
        codes,
        weight.scale[:, groups].contiguous(),
        weight.offset[:, groups].contiguous(),
        weight.bits,
    )


def _fp8_part(weight: Fp8Weight, part: Part) -> Fp8Weight:
    """Return some outputs or some inputs of a weight; each output has one scale."""
    values = cut_out(weight.values.view(torch.uint8), part).view(torch.float8_e4m3fn)
    has_one_scale = part.dim == 1 or len(weight.scale) == 1
    return Fp8Weight(values, weight.scale if has_one_scale else cut_out(weight.scale, part))
