"""Shards of a Llama-shaped target: which numbers of each weight a rank has, and the layers that join ranks again.

    check_shards(config, size=2)                      # ConfigError, with the sizes that would do
    shape = shard_config(config, size=2)              # the config of one rank's layers
    part = Shard(rank=0, size=2, vocab_size=1536, kv_heads=2).part_of("layers.0.mlp.down_proj.weight", (256, 384))

    weight                                  split                     a rank's part computes
    q_proj, k_proj, v_proj                  rows, by key/value heads  its heads; several ranks have one if it has fewer
    gate_proj, up_proj                      rows                      its numbers of the MLP, of each expert's own
    o_proj, down_proj                       inputs                    a part of the sum that ReducedLinear adds up
    lm_head, tied to the embedding or not   rows, by vocabulary       logits that GatheredHead puts side by side
    embeddings, norms, routers              not at all                the same everywhere

So a layer takes two collectives, and the logits take one. A mixture of experts takes one for all of its experts and
the shared one: their parts are weighed on each rank and added up there first, by ReducedBlock. The transformers modules
of a rank are those of a smaller model: its config has the heads and the widths of one rank, so KV caches and plans of
memory are those of a rank, too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from eagle_ray.core.errors import ConfigError
from eagle_ray.parallel.rank_group import RankGroup

DENSE = ("llama", "mistral", "qwen2", "qwen3")
MIXTURES: dict[str, tuple[str, ...]] = {
    "mixtral": (),  # the width of its experts is intermediate_size
    "qwen2_moe": ("moe_intermediate_size", "shared_expert_intermediate_size"),
    "qwen3_moe": ("moe_intermediate_size",),
}  # and the keys of the widths of their experts
MODEL_TYPES = (*DENSE, *MIXTURES)  # whose layers our own forward runs
BY_ROWS = ("q_proj", "gate_proj", "up_proj")
OF_KEYS = ("k_proj", "v_proj")
BY_INPUTS = ("o_proj", "down_proj")
LM_HEAD = "lm_head.weight"
DEALT_ROWS = 256  # of an lm_head that a rank sends at once, to all: 256 x 8,192 in bf16 are 4 MiB
INPUT_BLOCK = 32  # inputs of a quantised layer that share a scale at least, or are rounded together


def check_shards(config: Any, size: int, group_size: int | None = None) -> None:
    """Raise ConfigError if a target of this config cannot be split over `size` ranks.

    Args:
        group_size: inputs that ranks cannot take apart, of a quantised target.
    """
    if config.model_type not in MODEL_TYPES:
        raise ConfigError(
            f"tensor_parallel: {size}, and the target is {config.model_type!r}. Targets of "
            f"{', '.join(MODEL_TYPES)} are split; set it to 1 for others."
        )
    if _has_quantized_experts(config, group_size):
        raise ConfigError(
            f"tensor_parallel: {size}, and the experts of {config.model_type!r} are quantised, or are to be. Experts "
            "are split in plain weights: take those, and set model.quantization to none; or set tensor_parallel to 1."
        )
    faults = _faults(config, size, group_size)
    if faults:
        raise ConfigError(
            f"tensor_parallel: {size} does not divide the target's {' and its '.join(faults)}. "
            f"{what_would_do(fitting_sizes(config, group_size))}."
        )


def what_would_do(sizes: Sequence[int]) -> str:
    """Return what to do about a number of ranks, if these would do."""
    return f"Set it to one of {', '.join(map(str, sizes))}" if len(sizes) > 1 else "Set it to 1, the only one that does"


def fitting_sizes(config: Any, group_size: int | None = None) -> list[int]:
    """Return every number of ranks over which a target of this config can be split, 1 among them."""
    if config.model_type not in MODEL_TYPES or _has_quantized_experts(config, group_size):
        return [1]
    return [size for size in range(1, config.num_attention_heads + 1) if not _faults(config, size, group_size)]


def _faults(config: Any, size: int, group_size: int | None) -> list[str]:
    kv_heads, heads = kv_heads_of(config), config.num_attention_heads
    copied = size if size % kv_heads == 0 else kv_heads  # each of them is on several ranks
    numbers = {f"{kv_heads} key/value heads": copied, f"{heads} heads": heads}
    widths = {"MLP" if key == "intermediate_size" else key: getattr(config, key) for key in _widths(config)}
    numbers |= {f"{name} of {width}": width for name, width in widths.items()}
    if group_size is not None:
        inputs = widths | {"heads": heads * head_dim(config)}
        numbers |= {
            f"{name} of {number} in groups of {group_size}": number // group_size if number % group_size == 0 else 1
            for name, number in inputs.items()
        }
    return [name for name, number in numbers.items() if number % size]


def _widths(config: Any) -> list[str]:
    """Return the keys of a config that are widths of its layers' MLPs and experts, which ranks share."""
    keys = MIXTURES.get(config.model_type, ())
    return [*keys, "intermediate_size"] if not keys or _has_dense_layer(config) else list(keys)


def _has_dense_layer(config: Any) -> bool:
    """Return whether a layer of a Qwen mixture has an MLP in place of experts."""
    step, without = config.decoder_sparse_step, config.mlp_only_layers
    return any(i in without or (i + 1) % step for i in range(config.num_hidden_layers))


def _has_quantized_experts(config: Any, group_size: int | None) -> bool:
    return config.model_type in MIXTURES and group_size is not None


def kv_heads_of(config: Any) -> int:
    """Return the key/value heads of a layer."""
    return getattr(config, "num_key_value_heads", None) or config.num_attention_heads


def head_dim(config: Any) -> int:
    """Return the numbers of one head."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def shard_config(config: Any, size: int) -> Any:
    """Return the config of one rank's layers. Its lm_head is not tied: a rank has some of its rows only."""
    shape = deepcopy(config)
    shape.head_dim = head_dim(config)
    shape.num_attention_heads = config.num_attention_heads // size
    shape.num_key_value_heads = max(kv_heads_of(config) // size, 1)
    for key in _widths(config):
        setattr(shape, key, getattr(config, key) // size)
    shape.tie_word_embeddings = False
    return shape


@dataclass(frozen=True, slots=True)
class Part:
    """The numbers of a tensor that one rank has: `begin` to `end` of dimension `dim`.

    Attributes:
        padding: rows of zeros after them, so that all ranks have as many.
    """

    dim: int
    begin: int
    end: int
    padding: int = 0


@dataclass(frozen=True, slots=True)
class Shard:
    """One rank's part of a target.

    Attributes:
        vocab_size: vocabulary size of its lm_head.
        kv_heads: key/value heads of a whole layer; each is on several ranks if there are more ranks.
    """

    rank: int
    size: int
    vocab_size: int
    kv_heads: int

    @property
    def num_logits(self) -> int:
        """Return the rows of one rank's lm_head; the last rank's may be padded."""
        return -(-self.vocab_size // self.size)

    def part_of(self, name: str, shape: Sequence[int]) -> Part | None:
        """Return this rank's part of a tensor, or None for all of it. name: as checkpoints have it."""
        layer, _, kind = name.rpartition(".")
        layer = layer.rpartition(".")[2]
        if layer == "lm_head":
            begin = min(self.rank * self.num_logits, self.vocab_size)
            end = min(begin + self.num_logits, self.vocab_size)
            return Part(0, begin, end, self.num_logits - (end - begin))
        if layer in OF_KEYS:
            copies = max(self.size // self.kv_heads, 1)
            return replace(self, rank=self.rank // copies, size=self.size // copies).equal_part(0, shape[0])
        if layer in BY_ROWS:
            return self.equal_part(0, shape[0])
        return self.equal_part(1, shape[1]) if layer in BY_INPUTS and kind == "weight" else None

    def adds_bias(self, name: str) -> bool:
        """Return whether this rank adds a bias to what it computes; that of a sum is added once."""
        layer = name.rpartition(".")[0].rpartition(".")[2]
        return layer not in BY_INPUTS or self.rank == 0

    def equal_part(self, dim: int, number: int) -> Part:
        """Return this rank's part of `number` rows, or of another dimension, of which each rank has as many."""
        each = number // self.size
        return Part(dim, self.rank * each, (self.rank + 1) * each)


def cut_out(tensor: Tensor, part: Part | None) -> Tensor:
    """Return the part's numbers of a whole tensor, in memory of their own."""
    if part is None:
        return tensor
    rows = tensor.narrow(part.dim, part.begin, part.end - part.begin)
    return padded_rows(rows, part.padding).clone(memory_format=torch.contiguous_format)


def padded_rows(rows: Tensor, padding: int) -> Tensor:
    """Return the rows with `padding` rows of zeros after them."""
    return torch.cat([rows, rows.new_zeros(padding, *rows.shape[1:])]) if padding else rows


class ReducedLinear(nn.Module):
    """A linear layer of which each rank has some inputs: the ranks' outputs are added up.

    Args:
        part: the layer over this rank's inputs.
    """

    def __init__(self, part: nn.Module, ranks: RankGroup):
        super().__init__()
        self.part, self.ranks = part, ranks
        self.in_features: int = cast(Any, part).in_features
        self.out_features: int = cast(Any, part).out_features

    @property
    def weight(self) -> Tensor:
        return cast(Any, self.part).weight

    @property
    def reads_fp8(self) -> bool:
        """Return whether the part reads ScaledRows."""
        return getattr(self.part, "reads_fp8", False)

    def forward(self, inputs: Any) -> Float[Tensor, "*rows O"]:
        return self.ranks.reduce(self.part(inputs))


class ReducedBlock(nn.Module):
    """A mixture of experts of which each rank has some numbers of every expert: the ranks' outputs are added up.

    Args:
        part: the block of transformers over this rank's numbers.
    """

    def __init__(self, part: nn.Module, ranks: RankGroup):
        super().__init__()
        self.part, self.ranks = part, ranks

    def forward(self, hidden: Float[Tensor, "*rows H"]) -> Float[Tensor, "*rows H"]:
        return self.ranks.reduce(self.part(hidden))


class GatheredHead(nn.Module):
    """An lm_head of which each rank has some rows: the ranks' logits are put side by side.

    Args:
        part: the layer of this rank's rows, as many as every rank has.
        shard: which rows they are.
        order: the output of all ranks, side by side, that each logit is; None for the first ones in order.
        num_logits: number of logits of the whole head.
    """

    def __init__(
        self, part: nn.Module, ranks: RankGroup, shard: Shard, num_logits: int, order: Int[Tensor, " D"] | None = None
    ):
        super().__init__()
        self.part, self.ranks, self.shard = part, ranks, shard
        self.in_features: int = cast(Any, part).in_features
        self.out_features, self._order = num_logits, order

    @property
    def weight(self) -> Tensor:
        return cast(Any, self.part).weight

    def forward(self, hidden: Float[Tensor, "*rows H"]) -> Float[Tensor, "*rows V"]:
        outputs = self.ranks.gather(self.part(hidden))
        return outputs[..., : self.out_features] if self._order is None else outputs.index_select(-1, self._order)

    def rows(
        self, token_ids: Int[Tensor, " D"], slice_rows: Callable[[nn.Module, Int[Tensor, " N"]], nn.Module]
    ) -> GatheredHead:
        """Return a head of these tokens, in the given order.

        Plain rows are dealt out, as many to each rank. Frequent tokens have low ids, so their rows may all be the first
        rank's, and all ranks wait for the one with most. Of other layers every rank has the rows that it has here.

        Args:
            slice_rows: returns some rows of a rank's part.
        """
        if type(self.part) is nn.Linear and self.part.bias is None:
            return self._dealt_out(token_ids, self.part.weight)
        each = self.shard.num_logits
        owner, row = token_ids // each, token_ids % each
        counts = torch.bincount(owner, minlength=self.shard.size)
        num_rows = int(counts.max())
        by_owner = torch.argsort(owner, stable=True)
        place = torch.empty_like(by_owner)
        first = counts.cumsum(0) - counts
        place[by_owner] = torch.arange(len(token_ids), device=owner.device) - first[owner[by_owner]]
        own = row[owner == self.shard.rank]
        own = torch.cat([own, own.new_zeros(num_rows - len(own))])
        part = slice_rows(self.part, own)
        return GatheredHead(part, self.ranks, self.shard, len(token_ids), owner * num_rows + place)

    def _dealt_out(self, token_ids: Int[Tensor, " D"], weight: Float[Tensor, "N H"]) -> GatheredHead:
        """Return a head of these tokens of which each rank has as many rows, which others send to it."""
        shard = replace(self.shard, vocab_size=len(token_ids))
        padding = token_ids.new_zeros(shard.size * shard.num_logits - len(token_ids))
        wanted = torch.cat([token_ids, padding]).view(shard.size, -1)  # by the rank that gets them
        at_once = max(DEALT_ROWS // shard.size, 1)  # for each rank; every rank gets what all of them get
        rows = torch.cat([self._fetched(ids, weight) for ids in wanted.split(at_once, 1)])
        with torch.device("meta"):
            part = nn.Linear(self.in_features, shard.num_logits, bias=False)
        part.weight = nn.Parameter(rows, requires_grad=False)
        return GatheredHead(part, self.ranks, shard, len(token_ids))

    def _fetched(self, token_ids: Int[Tensor, "size N"], weight: Float[Tensor, "_ H"]) -> Float[Tensor, "N H"]:
        """Return the rows that this rank wants. token_ids: by the rank that wants them."""
        owner, row = token_ids // self.shard.num_logits, token_ids % self.shard.num_logits
        rows = torch.where((owner == self.shard.rank)[..., None], weight.detach()[row], 0)
        of_all = self.ranks.gather(rows).unflatten(-1, (self.shard.size, -1))[self.shard.rank]
        return of_all[torch.arange(len(of_all), device=owner.device), owner[self.shard.rank]]


def joined(model: Any, ranks: RankGroup, shard: Shard) -> Any:
    """Let the model of one rank's parts compute with the others: wrap what adds up parts, and the lm_head."""
    for layer in model.base_model.layers:
        layer.self_attn.o_proj = ReducedLinear(layer.self_attn.o_proj, ranks)
        if hasattr(layer.mlp, "experts"):
            layer.mlp = ReducedBlock(layer.mlp, ranks)
        else:
            layer.mlp.down_proj = ReducedLinear(layer.mlp.down_proj, ranks)
    model.lm_head = GatheredHead(model.lm_head, ranks, shard, shard.vocab_size)
    return model


def group_size_of(quantization: Mapping[str, Any] | None) -> int | None:
    """Return the inputs that ranks cannot take apart, by a checkpoint's quantization_config; None for plain weights."""
    if quantization is None:
        return None
    groups = quantization.get("config_groups") or {}
    of_layers = [group.get("weights") or {} for group in groups.values()]
    of_layers += [own or {} for own in (quantization.get("dynamic") or {}).values()]  # GPTQ's, by pattern
    sizes = [quantization.get("q_group_size"), *(own.get("group_size") for own in (quantization, *of_layers))]
    return math.lcm(*(size for size in sizes if isinstance(size, int) and size > 0), INPUT_BLOCK)
