"""Tensor parallelism of Llama-shaped targets: each rank's slice of every weight, and layers that
join the ranks' results.

    check_shards(config, size=2)                      # ConfigError, with the sizes that would do
    shape = shard_config(config, size=2)              # the config of one rank's layers
    part = Shard(rank=0, size=2, vocab_size=1536, kv_heads=2).part_of("layers.0.mlp.down_proj.weight", (256, 384))

    weight                                  split                     a rank's part computes
    q_proj, k_proj, v_proj                  rows, by key/value heads  its heads; several ranks have one if it has fewer
    gate_proj, up_proj                      rows                      its slice of the MLP's width, of each expert's own
    qkv_proj, gate_up_proj                  rows, of each part        these two, of projections that are stored as one
    q_norm, k_norm of whole rows            elements                  a part of the squares that SharedNorm adds up
    o_proj, down_proj                       inputs                    a part of the sum that ReducedLinear adds up
    lm_head, tied to the embedding or not   rows, by vocabulary       logits that GatheredHead puts side by side
    embeddings, norms, routers              not at all                the same everywhere

So a layer takes two collectives, four with norms of whole rows, and the logits take one. A mixture
of experts takes one for all of its experts and the shared one: each rank first weighs and adds its
own parts (ReducedBlock). A rank's transformers modules are those of a smaller model, whose config
has the heads and widths of one rank. KV caches and memory plans follow from that config.
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
from eagle_ray.families import FAMILIES, LLAMA_LAYERS, USUAL_STACKS, LayerForm, StackForm, layers_of
from eagle_ray.parallel.rank_group import RankGroup

# Model types that ranks divide; of mixtures of experts, the keys of the widths of their experts.
MODEL_TYPES = tuple(name for name, family in FAMILIES.items() if family.is_divided)
MIXTURES: dict[str, tuple[str, ...]] = {
    name: family.mixture.widths
    for name, family in FAMILIES.items()
    if family.is_divided and family.mixture is not None
}
BY_ROWS = ("q_proj", "gate_proj", "up_proj")
OF_KEYS = ("k_proj", "v_proj")
OF_ROWS = ("q_norm", "k_norm")  # norms, if they have weights for all heads
QKV = "qkv_proj"
GATE_UP = "gate_up_proj"
SUMMED_BIAS = "down_proj_bias"  # of all experts
SINKS = "sinks"  # of heads
BY_INPUTS = ("o_proj", "down_proj")
LM_HEAD = "lm_head.weight"
DEALT_ROWS = 256  # rows of an lm_head that a rank sends at once: 256 x 8,192 in bf16 are 4 MiB
INPUT_BLOCK = 32  # inputs of a quantised layer that share a scale at least, or are rounded together


def check_shards(config: Any, size: int, group_size: int | None = None) -> None:
    """Raise ConfigError if a target with this config cannot be split over `size` ranks.

    Args:
        group_size: number of consecutive inputs of a quantised target that must stay on one rank.
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
        todo = what_would_do(fitting_sizes(config, group_size))
        raise ConfigError(
            f"tensor_parallel: {size} does not divide the target's {' and its '.join(faults)}. {todo}."
        )


def what_would_do(sizes: Sequence[int]) -> str:
    """Return advice that names the numbers of ranks that would work."""
    if len(sizes) > 1:
        return f"Set it to one of {', '.join(map(str, sizes))}"
    return "Set it to 1, the only one that does"


def fitting_sizes(config: Any, group_size: int | None = None) -> list[int]:
    """Return every number of ranks over which a target with this config can be split, including 1."""
    if config.model_type not in MODEL_TYPES or _has_quantized_experts(config, group_size):
        return [1]
    sizes = range(1, config.num_attention_heads + 1)
    return [size for size in sizes if not _faults(config, size, group_size)]


def _faults(config: Any, size: int, group_size: int | None) -> list[str]:
    """Return the sizes of a target that this many ranks cannot divide, such as "8 key/value heads"."""
    kv_heads = kv_heads_of(config)
    heads = config.num_attention_heads
    kv_parts = kv_heads
    if size % kv_heads == 0:
        kv_parts = size  # each key/value head is on several ranks
    numbers = {f"{kv_heads} key/value heads": kv_parts, f"{heads} heads": heads}

    widths = {}
    for key in _widths(config):
        name = "MLP" if key == "intermediate_size" else key
        widths[name] = getattr(config, key)
    for name, width in widths.items():
        numbers[f"{name} of {width}"] = width

    # Groups of a quantised layer's inputs stay whole; a part of one cannot be divided.
    if group_size is not None:
        inputs = widths | {"heads": heads * head_dim(config)}
        for name, number in inputs.items():
            num_groups = number // group_size if number % group_size == 0 else 1
            numbers[f"{name} of {number} in groups of {group_size}"] = num_groups
    return [name for name, number in numbers.items() if number % size]


def _widths(config: Any) -> list[str]:
    """Return the keys of a config that are widths of its layers' MLPs and experts, which ranks share."""
    keys = list(MIXTURES.get(config.model_type, ()))
    if not keys or _has_dense_layer(config):
        keys.append("intermediate_size")
    return keys


def _has_dense_layer(config: Any) -> bool:
    """Return whether a layer of a Qwen mixture has an MLP in place of experts."""
    step = getattr(config, "decoder_sparse_step", None)
    if step is None:
        return False
    dense = config.mlp_only_layers
    return any(i in dense or (i + 1) % step for i in range(config.num_hidden_layers))


def _has_quantized_experts(config: Any, group_size: int | None) -> bool:
    return config.model_type in MIXTURES and group_size is not None


def kv_heads_of(config: Any) -> int:
    """Return the number of key/value heads per layer."""
    return getattr(config, "num_key_value_heads", None) or config.num_attention_heads


def head_dim(config: Any) -> int:
    """Return the size of one attention head."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def shard_config(config: Any, size: int) -> Any:
    """Return the config of one rank's layers. Its lm_head is not tied to the embedding, since a
    rank has only some of its rows."""
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
    """The slice of a tensor that one rank has.

    Attributes:
        dim: dimension that is split.
        ranges: begin and end of each run of the rank's indices in that dimension.
        padding: number of rows of zeros behind them, so that all ranks have equally many rows.
    """

    dim: int
    ranges: tuple[tuple[int, int], ...]
    padding: int = 0

    @property
    def size(self) -> int:
        """Return the number of indices, without padding."""
        return sum(end - begin for begin, end in self.ranges)

    @property
    def index(self) -> Int[Tensor, " N"]:
        """Return the indices, without padding."""
        return torch.cat([torch.arange(begin, end) for begin, end in self.ranges])


@dataclass(frozen=True, slots=True)
class Shard:
    """The position of one rank among those that share a target, from which the slice of each weight follows.

    Attributes:
        rank: number of the rank, from 0.
        size: number of ranks.
        vocab_size: vocabulary size of the whole lm_head.
        kv_heads: key/value heads of a whole layer; if there are more ranks than heads, several
            ranks have each head.
        heads: query heads of a whole layer.
        form: form of the target's layers.
        stacks: layout of a layer's stacked experts in the checkpoint's tensors.
    """

    rank: int
    size: int
    vocab_size: int
    kv_heads: int
    heads: int = 0
    form: LayerForm = LLAMA_LAYERS
    stacks: StackForm = USUAL_STACKS

    @classmethod
    def of(cls, config: Any, rank: int, size: int) -> Shard:
        """Return the position of a rank for a target with this config."""
        family = FAMILIES[config.model_type]
        assert family.layer is not None, "check_shards lets no others pass"
        return cls(
            rank,
            size,
            config.vocab_size,
            kv_heads_of(config),
            config.num_attention_heads,
            family.layer,
            family.stacks,
        )

    @property
    def num_logits(self) -> int:
        """Return the number of rows in one rank's lm_head; the last rank's may be padded."""
        return -(-self.vocab_size // self.size)

    def part_of(self, name: str, shape: Sequence[int]) -> Part | None:
        """Return this rank's part of a tensor, or None for all of it.

        Args:
            name: name of the tensor in checkpoints.
        """
        path, _, kind = name.rpartition(".")
        layer = path.rpartition(".")[2]
        if layer == "lm_head":
            return self._vocabulary_part()
        if layer in OF_KEYS:
            return self._keys_part(0, shape[0])
        if layer in OF_ROWS and self.form.has_row_norms:
            is_query = layer == OF_ROWS[0]
            return self.equal_part(0, shape[0]) if is_query else self._keys_part(0, shape[0])
        if layer == QKV:
            return self._qkv_part(shape[0])
        if layer == GATE_UP:
            return self._halves_part(0, shape[0])
        if kind == SINKS:
            return self.equal_part(0, shape[0])
        if layer in BY_ROWS:
            return self.equal_part(0, shape[0])
        if layer in BY_INPUTS and kind == "weight":
            return self.equal_part(1, shape[1])
        return None

    def _vocabulary_part(self) -> Part:
        begin = min(self.rank * self.num_logits, self.vocab_size)
        end = min(begin + self.num_logits, self.vocab_size)
        padding = self.num_logits - (end - begin)
        return Part(0, ((begin, end),), padding)

    def _keys_part(self, dim: int, number: int) -> Part:
        """Return the part of keys or values: ranks that have the same heads of them count as one."""
        copies = max(self.size // self.kv_heads, 1)
        group = replace(self, rank=self.rank // copies, size=self.size // copies)
        return group.equal_part(dim, number)

    def _qkv_part(self, width: int) -> Part:
        """Return the rows of queries, keys and values of a projection that has them one after the other."""
        head = width // (self.heads + 2 * self.kv_heads)
        num_queries = self.heads * head
        num_keys = self.kv_heads * head
        [queries] = self.equal_part(0, num_queries).ranges
        [(begin, end)] = self._keys_part(0, num_keys).ranges
        values_at = num_queries + num_keys
        keys = (num_queries + begin, num_queries + end)
        values = (values_at + begin, values_at + end)
        return Part(0, (queries, keys, values))

    def _halves_part(self, dim: int, number: int) -> Part:
        """Return the part of a gate, and that of what follows it."""
        half = number // 2
        [(begin, end)] = self.equal_part(dim, half).ranges
        return Part(dim, ((begin, end), (half + begin, half + end)))

    def part_of_stack(self, kind: str, shape: Sequence[int]) -> Part | None:
        """Return this rank's part of a stacked tensor of all experts of a layer, or None for all of it.

        Args:
            kind: last part of the tensor's name, such as gate_up_proj or down_proj_bias.
        """
        is_bias = kind.endswith("_bias")
        if kind == SUMMED_BIAS:
            return None
        is_down = kind.startswith("down_proj")
        dim = 1 if is_bias or is_down == self.stacks.has_inputs_first else 2
        if is_down or self.stacks.has_pairs:
            return self.equal_part(dim, shape[dim])
        return self._halves_part(dim, shape[dim])

    def adds_bias(self, name: str) -> bool:
        """Return whether this rank adds a layer's bias, which must be added to a sum only once."""
        path, _, kind = name.rpartition(".")
        is_summed = path.rpartition(".")[2] in BY_INPUTS or kind == SUMMED_BIAS
        return self.rank == 0 or not is_summed

    def equal_part(self, dim: int, number: int) -> Part:
        """Return this rank's part of a dimension of `number` indices that is divided equally."""
        each = number // self.size
        begin = self.rank * each
        return Part(dim, ((begin, begin + each),))


def cut_out(tensor: Tensor, part: Part | None) -> Tensor:
    """Return a copy of a part of a whole tensor, or the tensor itself if the part is None."""
    if part is None:
        return tensor
    runs = [tensor.narrow(part.dim, begin, end - begin) for begin, end in part.ranges]
    rows = padded_rows(torch.cat(runs, part.dim), part.padding)
    return rows.clone(memory_format=torch.contiguous_format)


def padded_rows(rows: Tensor, padding: int) -> Tensor:
    """Return the rows with `padding` rows of zeros after them."""
    if not padding:
        return rows
    zeros = rows.new_zeros(padding, *rows.shape[1:])
    return torch.cat([rows, zeros])


class ReducedLinear(nn.Module):
    """A linear layer whose inputs are split over ranks: the ranks' outputs are added up.

    Args:
        part: layer over this rank's inputs.
    """

    def __init__(self, part: nn.Module, ranks: RankGroup):
        super().__init__()
        self.part = part
        self.ranks = ranks
        self.in_features: int = cast(Any, part).in_features
        self.out_features: int = cast(Any, part).out_features

    @property
    def weight(self) -> Tensor:
        return cast(Any, self.part).weight

    @property
    def reads_fp8(self) -> bool:
        """Return whether this rank's layer takes FP8 inputs (ScaledRows)."""
        return getattr(self.part, "reads_fp8", False)

    def forward(self, inputs: Any) -> Float[Tensor, "*rows O"]:
        return self.ranks.reduce(self.part(inputs))


class SharedNorm(nn.Module):
    """An RMSNorm over all heads of a row when the heads are split over ranks: the ranks' sums of squares are added up.

    Args:
        part: transformers' norm with the weights of this rank's heads. If several ranks have a key
            head, each head is counted equally often, so the mean stays right.
    """

    def __init__(self, part: nn.Module, ranks: RankGroup):
        super().__init__()
        self.part = part
        self.ranks = ranks
        self.variance_epsilon: float = cast(Any, part).variance_epsilon

    @property
    def weight(self) -> Tensor:
        return cast(Any, self.part).weight

    def forward(self, rows: Float[Tensor, "*rows W"]) -> Float[Tensor, "*rows W"]:
        squares = rows.float().pow(2).sum(-1, keepdim=True)
        mean = self.ranks.reduce(squares) / (rows.shape[-1] * self.ranks.size)
        normed = rows.float() * torch.rsqrt(mean + self.variance_epsilon)
        return (normed * self.weight).to(rows.dtype)


class ReducedBlock(nn.Module):
    """A mixture of experts whose experts are all split over ranks. The ranks' outputs are added up.

    Args:
        part: transformers' block over this rank's slices.
        ranks: the ranks that share the block.
    """

    def __init__(self, part: nn.Module, ranks: RankGroup):
        super().__init__()
        self.part = part
        self.ranks = ranks

    def forward(self, hidden: Float[Tensor, "*rows H"]) -> Any:
        out = self.part(hidden)
        if isinstance(out, tuple):  # and the router's scores
            return (self.ranks.reduce(out[0]), *out[1:])
        return self.ranks.reduce(out)


class GatheredHead(nn.Module):
    """An lm_head whose rows are split over ranks: the ranks' logits are concatenated.

    Args:
        part: layer with this rank's rows; every rank has equally many.
        shard: position of this rank among those that share the head.
        num_logits: number of logits of the whole head.
        order: index of each logit in the concatenated outputs; None if they are the first ones in
            order.
    """

    def __init__(
        self,
        part: nn.Module,
        ranks: RankGroup,
        shard: Shard,
        num_logits: int,
        order: Int[Tensor, " D"] | None = None,
    ):
        super().__init__()
        self.part = part
        self.ranks = ranks
        self.shard = shard
        self.in_features: int = cast(Any, part).in_features
        self.out_features = num_logits
        self._order = order

    @property
    def weight(self) -> Tensor:
        return cast(Any, self.part).weight

    def forward(self, hidden: Float[Tensor, "*rows H"]) -> Float[Tensor, "*rows V"]:
        outputs = self.ranks.gather(self.part(hidden))
        if self._order is None:
            return outputs[..., : self.out_features]
        return outputs.index_select(-1, self._order)

    def rows(
        self,
        token_ids: Int[Tensor, " D"],
        slice_rows: Callable[[nn.Module, Int[Tensor, " N"]], nn.Module],
    ) -> GatheredHead:
        """Return a head for these tokens only, in the given order.

        Rows of a plain layer are redistributed, equally many to each rank. Otherwise the first rank
        might have all of them, since frequent tokens have low ids, and the others would wait for
        it. In other layers every rank keeps its own rows.

        Args:
            slice_rows: returns some rows of a rank's part.
        """
        if type(self.part) is nn.Linear and self.part.bias is None:
            return self._dealt_out(token_ids, self.part.weight)

        owner = token_ids // self.shard.num_logits
        row = token_ids % self.shard.num_logits
        counts = torch.bincount(owner, minlength=self.shard.size)
        num_rows = int(counts.max())  # every rank has as many, some of them padding

        # Place of each token among those of its rank, in the given order.
        by_owner = torch.argsort(owner, stable=True)
        first = counts.cumsum(0) - counts
        index = torch.arange(len(token_ids), device=owner.device)
        place = torch.empty_like(by_owner)
        place[by_owner] = index - first[owner[by_owner]]
        order = owner * num_rows + place

        own = row[owner == self.shard.rank]
        padding = own.new_zeros(num_rows - len(own))
        part = slice_rows(self.part, torch.cat([own, padding]))
        return GatheredHead(part, self.ranks, self.shard, len(token_ids), order)

    def _dealt_out(
        self, token_ids: Int[Tensor, " D"], weight: Float[Tensor, "N H"]
    ) -> GatheredHead:
        """Return a head of these tokens of which each rank has equally many rows, sent by the ranks that have them."""
        shard = replace(self.shard, vocab_size=len(token_ids))
        num_padding = shard.size * shard.num_logits - len(token_ids)
        padding = token_ids.new_zeros(num_padding)
        wanted = torch.cat([token_ids, padding]).view(shard.size, -1)  # by the rank that gets them

        # Slices bound the memory: every rank gets the rows of all ranks.
        num_at_once = max(DEALT_ROWS // shard.size, 1)
        slices = wanted.split(num_at_once, 1)
        rows = torch.cat([self._fetched(ids, weight) for ids in slices])

        with torch.device("meta"):
            part = nn.Linear(self.in_features, shard.num_logits, bias=False)
        part.weight = nn.Parameter(rows, requires_grad=False)
        return GatheredHead(part, self.ranks, shard, len(token_ids))

    def _fetched(
        self, token_ids: Int[Tensor, "size N"], weight: Float[Tensor, "_ H"]
    ) -> Float[Tensor, "N H"]:
        """Return the rows that this rank wants.

        Args:
            token_ids: tokens that each rank wants.
        """
        rank = self.shard.rank
        owner = token_ids // self.shard.num_logits
        row = token_ids % self.shard.num_logits

        # Every rank sends what it has of the rows that all ranks want.
        is_own = (owner == rank)[..., None]
        sent = torch.where(is_own, weight.detach()[row], 0)
        by_sender = self.ranks.gather(sent).unflatten(-1, (self.shard.size, -1))

        # Each row that this rank wants comes from its owner.
        received = by_sender[rank]
        indices = torch.arange(len(received), device=owner.device)
        return received[indices, owner[rank]]


def joined(model: Any, ranks: RankGroup, shard: Shard) -> Any:
    """Wrap one rank's model so that it computes with the other ranks: the layers that sum parts, and the lm_head."""
    form = shard.form
    for layer in layers_of(model).layers:
        attention = layer.self_attn
        attention.o_proj = ReducedLinear(attention.o_proj, ranks)
        if form.has_row_norms:
            for name in OF_ROWS:
                setattr(attention, name, SharedNorm(getattr(attention, name), ranks))
        mlp = getattr(layer, form.mlp)
        if hasattr(mlp, "experts"):
            setattr(layer, form.mlp, ReducedBlock(mlp, ranks))
        else:
            mlp.down_proj = ReducedLinear(mlp.down_proj, ranks)
    model.lm_head = GatheredHead(model.lm_head, ranks, shard, shard.vocab_size)
    return model


def fit_row_norms(model: Any, shard: Shard) -> None:
    """Resize norms of whole rows to a rank's weights, since OLMoE's class derives their size from the hidden size."""
    if not shard.form.has_row_norms:
        return
    for layer in layers_of(model).layers:
        attention = layer.self_attn
        linears = (attention.q_proj, attention.k_proj)
        for name, linear in zip(OF_ROWS, linears, strict=True):
            norm = getattr(attention, name)
            weight = norm.weight.new_empty(linear.out_features)
            norm.weight = nn.Parameter(weight, requires_grad=False)


def group_size_of(quantization: Mapping[str, Any] | None) -> int | None:
    """Return the number of consecutive inputs that must stay on one rank, from a
    quantization_config; None for plain weights."""
    if quantization is None:
        return None

    # Layers may have settings of their own: compressed-tensors' groups, and GPTQ's patterns.
    settings: list[Mapping[str, Any]] = [quantization]
    for group in (quantization.get("config_groups") or {}).values():
        settings.append(group.get("weights") or {})
    for own in (quantization.get("dynamic") or {}).values():
        settings.append(own or {})

    sizes = [quantization.get("q_group_size")]
    sizes += [each.get("group_size") for each in settings]
    known = [size for size in sizes if isinstance(size, int) and size > 0]
    return math.lcm(*known, INPUT_BLOCK)
