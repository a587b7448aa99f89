"""Tree attention in PyTorch: how the rows of one pass read and write a KVCache.

transformers models call one attention function for every layer. Ours is registered under
``ATTENTION_NAME`` and gets the pass's metadata through the model as ``rows=``. Without metadata it is
plain causal attention over the given tokens. Query heads that share a key/value head are folded
into the row axis, so keys and values are never repeated.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformers import AttentionInterface

from eagle_ray.attention.attention_groups import AttentionGroup, group_sequences
from eagle_ray.attention.gqa_packing import GQAPacking, fold_rectangle, unfold_rectangle
from eagle_ray.core.decode_batch import DecodeSlots
from eagle_ray.core.device import to_device
from eagle_ray.kernels.layer_ops import rms_norm, rotated
from eagle_ray.kv.kv_cache import KVCache

ATTENTION_NAME = "eagle_ray"
MAX_SCORES = 1 << 26  # scores of a slice of a prompt's rows, of all heads: 0.25 GB in fp32


@dataclass(frozen=True, slots=True)
class AttentionParams:
    """Parameters of one layer's attention.

    Attributes:
        window: sliding window: a key is visible to queries less than `window` positions after it;
            None is all. A negative number is chunked attention: with -8, chunks have 8 positions,
            and a key is visible to later queries of its chunk.
        softcap: bound of scores, which are squashed to (-softcap, softcap); None for none.
        sinks: extra logit per query head that takes probability and contributes no value.
    """

    layer: int
    scaling: float
    window: int | None = None
    softcap: float | None = None
    sinks: Float[Tensor, " heads"] | None = None


def window_begin(position: Int[Tensor, "*rows"], window: int) -> Int[Tensor, "*rows"]:
    """Return the first position that queries at these positions see through a window of AttentionParams."""
    if window < 0:
        return position.div(-window, rounding_mode="floor") * -window
    return position - window + 1


@dataclass(frozen=True, slots=True)
class Rotary:
    """The cosines and sines of each row's rotary angles, fp32; pair i of a head is (i, i + half).

    Attributes:
        query_scale: factor of each row's queries, for layers that scale them by position.
    """

    cosine: Float[Tensor, "R half"]
    sine: Float[Tensor, "R half"]
    query_scale: Float[Tensor, " R"] | None = None


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """Parameters of one layer's attention in our own forward, from the merged projection's output on.

    Attributes:
        window: sliding window, as in AttentionParams; so are softcap and sinks.
        q_norm: weights of an RMSNorm over each query head before rotation, or None. If they are
            fp32, the product is computed before the result is rounded.
        k_norm: weights for key heads, likewise; None if q_norm is.
    """

    layer: int
    heads: int
    kv_heads: int
    head_dim: int
    scaling: float
    window: int | None = None
    q_norm: Float[Tensor, " head_dim"] | None = None
    k_norm: Float[Tensor, " head_dim"] | None = None
    norm_eps: float = 0.0
    softcap: float | None = None
    sinks: Float[Tensor, " heads"] | None = None

    @property
    def rule(self) -> AttentionParams:
        return AttentionParams(self.layer, self.scaling, self.window, self.softcap, self.sinks)

    def split(
        self, qkv: Float[Tensor, "R width"], rotary: Rotary
    ) -> tuple[
        Float[Tensor, "R heads d"], Float[Tensor, "R kv_heads d"], Float[Tensor, "R kv_heads d"]
    ]:
        """Split a merged projection into queries and keys, normed and rotated, and values."""
        sizes = [self.heads, self.kv_heads, self.kv_heads]
        heads = qkv.view(len(qkv), -1, self.head_dim)
        query, key, value = heads.split(sizes, 1)
        if self.q_norm is not None and self.k_norm is not None:
            query = rms_norm(query, self.q_norm, self.norm_eps)
            key = rms_norm(key, self.k_norm, self.norm_eps)
        query = rotated(query, rotary.cosine, rotary.sine)
        key = rotated(key, rotary.cosine, rotary.sine)
        return query, key, value


@runtime_checkable
class AttentionMetadata(Protocol):
    """Protocol of the metadata of one pass: which cached positions and rows each row attends to."""

    @property
    def cache(self) -> KVCache:
        """Return the cache that the rows write and read."""

    def attend(
        self,
        query: Float[Tensor, "1 heads R head_dim"],
        key: Float[Tensor, "1 kv_heads R head_dim"],
        value: Float[Tensor, "1 kv_heads R value_dim"],
        attention: AttentionParams,
    ) -> Float[Tensor, "1 heads R value_dim"]:
        """Write keys and values to the cache and return the attention output of each row."""

    def attend_projected(
        self, qkv: Float[Tensor, "R width"], rotary: Rotary, shape: AttentionShape
    ) -> Float[Tensor, "R heads*d"]:
        """Normalize and rotate the heads of a merged projection, then `attend`."""


class Projected:
    """Mixin with `attend_projected` in PyTorch, for metadata that has `attend`."""

    __slots__ = ()

    def attend_projected(
        self: AttentionMetadata,
        qkv: Float[Tensor, "R width"],
        rotary: Rotary,
        shape: AttentionShape,
    ) -> Float[Tensor, "R heads*d"]:
        query, key, value = (x.transpose(0, 1)[None] for x in shape.split(qkv, rotary))
        out = self.attend(query, key, value, shape.rule)
        return out[0].transpose(0, 1).flatten(1)


@dataclass(slots=True)
class TreeMetadata(Projected):
    """Trees of up to N rows each, on top of the cached tokens of B slots.

    Row i of tree b attends to the first lengths[b] positions of its slot and, of the M tree
    positions after them, to those in ancestors[b, i]. Sequences of very different lengths or tree
    sizes attend in groups.

    Attributes:
        slot_mapping: index in the cache of each of the R rows.
        depths: depths of rows, for sliding windows: a row's position is length + depth.
        position_depths: depths of tree positions, likewise.
        row_of: packed row of (b, i); None if rows are the rectangle B x N.
        unpack: index b * N + i of each row, the inverse of row_of.
        first: first visible position of each sequence; None is 0.
        sizes: number of rows of each tree, if the host knows it; None is N for all.
    """

    cache: KVCache
    batch: DecodeSlots
    slot_mapping: Int[Tensor, " R"]
    ancestors: Bool[Tensor, "B N M"]
    depths: Int[Tensor, "B N"]
    position_depths: Int[Tensor, "B M"]
    row_of: Int[Tensor, "B N"] | None = None
    unpack: Int[Tensor, " R"] | None = None
    first: Int[Tensor, " B"] | None = None
    sizes: list[int] | None = None
    _attention_groups: list[AttentionGroup] = field(init=False)
    _groups: list[TreeGroup] = field(init=False)
    _packings: dict[tuple[int, int], GQAPacking] = field(default_factory=dict)

    def __post_init__(self) -> None:
        batch, num_nodes = self.depths.shape
        if self.batch.bound is None:
            lengths = self.batch.host_lengths
            sizes = self.sizes or [num_nodes] * batch
            self._attention_groups = group_sequences(lengths, sizes, self.cache.num_layers)
        else:  # their lengths are on the device alone
            self._attention_groups = [AttentionGroup(list(range(batch)), num_nodes)]
        self._groups = [self._group(group) for group in self._attention_groups]

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, attention: AttentionParams
    ) -> Tensor:
        self.cache.write(attention.layer, self.slot_mapping, key[0], value[0])
        heads = query.shape[1]
        kv_heads = key.shape[1]
        if self.row_of is None and len(self._groups) == 1:
            folded = fold_rectangle(query, len(self.ancestors), kv_heads)
            out = self._groups[0].attend(folded, attention)
            return unfold_rectangle(out, heads)

        packing = self._gqa_packing(heads, kv_heads)
        parts = zip(self._groups, packing.fold(query), strict=True)
        outs = [group.attend(rows, attention) for group, rows in parts]
        return packing.unfold(outs, heads)

    def _gqa_packing(self, heads: int, kv_heads: int) -> GQAPacking:
        """Return the packing of query heads, computed once per pass."""
        if (heads, kv_heads) not in self._packings:
            row_of = self.row_of
            unpack = self.unpack
            if row_of is None or unpack is None:
                unpack = torch.arange(self.depths.numel(), device=self.depths.device)
                row_of = unpack.view_as(self.depths)
            self._packings[heads, kv_heads] = GQAPacking.of(
                row_of, unpack, heads, kv_heads, self._attention_groups
            )
        return self._packings[heads, kv_heads]

    def _group(self, group: AttentionGroup) -> TreeGroup:
        """Return the trees of a group, cut to its largest tree."""
        batch = self.batch
        ancestors = self.ancestors
        depths = self.depths
        position_depths = self.position_depths
        first = self.first
        if len(self._attention_groups) > 1:
            index = to_device(group.members, self.depths.device)
            batch = batch.select(group.members)
            ancestors = ancestors.index_select(0, index)
            depths = depths.index_select(0, index)
            position_depths = position_depths.index_select(0, index)
            first = None if first is None else first.index_select(0, index)
        if self.sizes is not None:
            size = group.size
            ancestors = ancestors[:, :size, :size]
            depths = depths[:, :size]
            position_depths = position_depths[:, :size]
        return TreeGroup(self.cache, batch, ancestors, depths, position_depths, first)


@dataclass(frozen=True, slots=True)
class MixedMetadata(Projected):
    """Two metadata objects as one pass: the first num_first rows belong to the first object, the rest to the second."""

    first: AttentionMetadata
    second: AttentionMetadata
    num_first: int

    @property
    def cache(self) -> KVCache:
        return self.first.cache

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, attention: AttentionParams
    ) -> Tensor:
        cut = [self.num_first]
        first_query, second_query = query.tensor_split(cut, 2)
        first_key, second_key = key.tensor_split(cut, 2)
        first_value, second_value = value.tensor_split(cut, 2)
        first = self.first.attend(first_query, first_key, first_value, attention)
        second = self.second.attend(second_query, second_key, second_value, attention)
        return torch.cat([first, second], 2)


@dataclass(slots=True)
class TreeGroup:
    """Trees whose keys and values are gathered together, padded to the longest."""

    cache: KVCache
    batch: DecodeSlots
    ancestors: Bool[Tensor, "B N M"]
    depths: Int[Tensor, "B N"]
    position_depths: Int[Tensor, "B M"]
    first: Int[Tensor, " B"] | None
    num_positions: int = field(init=False)  # T: positions that any row may see, known on the host
    _where: slice | Tensor = field(init=False)
    _masks: dict[tuple[int, int | None], Tensor | None] = field(default_factory=dict)
    _unseen: dict[int | None, Bool[Tensor, "B 1 T 1"] | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        num_tree_positions = self.ancestors.shape[2]
        self.num_positions = self.cache.num_positions(self.batch, num_tree_positions)
        self._where = self.cache.block_index(self.batch, num_tree_positions)

    def attend(
        self, rows: Float[Tensor, "B kv_heads GN d"], attention: AttentionParams
    ) -> Float[Tensor, "B kv_heads GN dv"]:
        keys, values = self.cache.read(attention.layer, self._where, self.num_positions)
        groups = rows.shape[2] // self.ancestors.shape[1]
        mask = self._mask(groups, attention.window, rows.dtype)
        unseen = self._unseen[attention.window]
        if unseen is not None:
            # Unused positions may hold infinities: 0 times them, or a mask added to them, is NaN.
            keys = keys.masked_fill(unseen, 0.0)
            values = values.masked_fill(unseen, 0.0)
        return masked_attention(rows, keys, values, mask, attention)

    def _mask(
        self, groups: int, window: int | None, dtype: torch.dtype
    ) -> Float[Tensor, "B 1 GN T"] | None:
        """Return the additive mask of folded query heads, computed once per pass and window; None if all is visible."""
        if (groups, window) not in self._masks:
            if self._is_full(window):
                self._unseen[window] = None
                self._masks[groups, window] = None
            else:
                visible = self._visible(window)
                self._unseen[window] = ~visible.any(1)[:, None, :, None]
                self._masks[groups, window] = _folded_mask(visible, groups, dtype)
        return self._masks[groups, window]

    def _is_full(self, window: int | None) -> bool:
        """Return whether no mask is needed, as in plain decoding of sequences of one length."""
        is_one_node = self.ancestors.shape[2] == 1
        is_one_length = self.first is None and self.batch.min_length == self.batch.max_length
        is_in_window = window is None or self.batch.max_length < abs(window)
        return is_one_node and is_one_length and is_in_window

    def _visible(self, window: int | None) -> Bool[Tensor, "B N T"]:
        """Return which of the group's positions each row sees."""
        lengths = self.batch.lengths[:, None]
        position = torch.arange(self.num_positions, device=lengths.device)
        in_tree = position - lengths
        num_nodes, num_tree_positions = self.ancestors.shape[1:]

        # Committed positions, from the first visible one on.
        committed = in_tree < 0
        if self.first is not None:
            committed = committed & (position >= self.first[:, None])

        # Tree positions that are the row or its ancestors.
        last = num_tree_positions - 1
        index = in_tree.clamp(0, last)
        is_ancestor = self.ancestors.gather(2, index[:, None].expand(-1, num_nodes, -1))
        is_tree = (in_tree >= 0) & (in_tree <= last)
        seen = (is_ancestor & is_tree[:, None]) | committed[:, None]
        if window is None:
            return seen

        # A window counts by depth, where siblings are equally far away.
        tree_position = lengths + self.position_depths.gather(1, index)
        key_position = torch.where(in_tree < 0, position, tree_position)
        row_position = lengths + self.depths
        return seen & (key_position[:, None] >= window_begin(row_position, window)[:, :, None])


@runtime_checkable
class NumberedLayer(Protocol):
    """Protocol of an attention layer of a transformers model: it has its index among the layers."""

    layer_idx: int


def attention_function(
    module: NumberedLayer,
    query: Float[Tensor, "B heads R head_dim"],
    key: Float[Tensor, "B kv_heads R head_dim"],
    value: Float[Tensor, "B kv_heads R value_dim"],
    attention_mask: Tensor | None,
    *,
    scaling: float,
    rows: AttentionMetadata | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: object,
) -> tuple[Float[Tensor, "B R heads value_dim"], None]:
    """Compute attention for a layer of a transformers model, which passes our metadata through as
    the keyword `rows`."""
    home = query.device if rows is None else rows.cache.keys.device
    sinks = None if s_aux is None else s_aux.to(home)
    attention = AttentionParams(module.layer_idx, scaling, sliding_window, softcap, sinks)
    if rows is None:
        out = causal_attention(query, key, value, attention)
        return out.transpose(1, 2).contiguous(), None

    # A layer on another device sends its rows to the cache's.
    out = rows.attend(query.to(home), key.to(home), value.to(home), attention)
    return out.transpose(1, 2).contiguous().to(query.device), None


AttentionInterface.register(ATTENTION_NAME, attention_function)


def causal_attention(
    query: Float[Tensor, "B heads N d"],
    key: Float[Tensor, "B kv_heads T d"],
    value: Float[Tensor, "B kv_heads T dv"],
    attention: AttentionParams,
) -> Float[Tensor, "B heads N dv"]:
    """Return causal attention of queries at the last N of T positions."""
    batch, heads, num_rows, head_dim = query.shape
    kv_heads, length = key.shape[1:3]

    # Torch's own causal attention, where it does all that this layer asks for.
    is_plain = attention.softcap is None and attention.sinks is None
    is_in_window = attention.window is None or length <= abs(attention.window)
    if num_rows == length and is_plain and is_in_window:
        return F.scaled_dot_product_attention(
            query,
            key,
            value,
            is_causal=True,
            scale=attention.scaling,
            enable_gqa=heads != kv_heads,
        )

    # Bound the scores that exist at once.
    max_rows = max(MAX_SCORES // (batch * heads * length), 1)
    if num_rows > max_rows:
        starts = range(0, num_rows, max_rows)
        slices = [_causal_slice(query, key, value, attention, i, max_rows) for i in starts]
        return torch.cat(slices, 2)

    position = torch.arange(length, device=query.device)
    own = position[length - num_rows :, None]
    seen = position <= own
    if attention.window is not None:
        seen = seen & (position >= window_begin(own, attention.window))
    mask = _additive_mask(seen, query.dtype).repeat(heads // kv_heads, 1)
    folded = query.reshape(batch, kv_heads, -1, head_dim)
    out = masked_attention(folded, key, value, mask[None, None], attention)
    return out.reshape(batch, heads, num_rows, value.shape[3])


def _causal_slice(
    query: Float[Tensor, "B heads N d"],
    key: Float[Tensor, "B kv_heads T d"],
    value: Float[Tensor, "B kv_heads T dv"],
    attention: AttentionParams,
    start: int,
    num_rows: int,
) -> Float[Tensor, "B heads n dv"]:
    """Return `causal_attention` of num_rows of the queries, or of as many as there are, from `start` on."""
    context = key.shape[2] - query.shape[2]
    rows = query[:, :, start : start + num_rows]
    first = 0
    if attention.window is not None:  # the first of a chunk, from which chunks are counted again
        begin = window_begin(torch.tensor(context + start), attention.window)
        first = max(int(begin), 0)
    seen = slice(first, context + start + rows.shape[2])
    return causal_attention(rows, key[:, :, seen], value[:, :, seen], attention)


def _folded_mask(
    seen: Bool[Tensor, "B N T"], groups: int, dtype: torch.dtype
) -> Float[Tensor, "B 1 GN T"]:
    """Return the additive mask of `groups` query heads that share a key/value head."""
    return _additive_mask(seen, dtype).repeat(1, groups, 1)[:, None]


def _additive_mask(seen: Bool[Tensor, "..."], dtype: torch.dtype) -> Float[Tensor, "..."]:
    """Return 0 where visible and the lowest finite value elsewhere."""
    zero = torch.zeros((), dtype=dtype, device=seen.device)
    return zero.where(seen, torch.finfo(dtype).min)


def masked_attention(
    folded: Float[Tensor, "B kv_heads GN d"],
    keys: Float[Tensor, "B kv_heads T d"],
    values: Float[Tensor, "B kv_heads T dv"],
    mask: Float[Tensor, "b 1 GN T"] | None,
    attention: AttentionParams,
) -> Float[Tensor, "B kv_heads GN dv"]:
    """Return attention under an additive mask (None: all visible), with query heads folded onto
    their key/value head.
    """
    if attention.softcap is not None or attention.sinks is not None:
        return _explicit_attention(folded, keys, values, mask, attention)
    rows = _pad_single_row(folded)
    out = F.scaled_dot_product_attention(
        rows, keys, values, attn_mask=mask, scale=attention.scaling
    )
    return out[:, :, : folded.shape[2]]


def _pad_single_row(query: Float[Tensor, "B kv_heads N d"]) -> Float[Tensor, "B kv_heads N2 d"]:
    """Repeat a single bf16 row: on a CPU torch's attention is five to ten times slower for one row than for two."""
    is_single = query.shape[2] == 1
    if is_single and query.dtype == torch.bfloat16 and query.device.type == "cpu":
        return query.expand(-1, -1, 2, -1)
    return query


def _explicit_attention(
    query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, attention: AttentionParams
) -> Tensor:
    """Return attention with soft-cap and sinks, in the order Gemma-2 and GPT-OSS apply them."""
    batch, kv_heads, num_rows, _ = query.shape
    scores = query @ keys.transpose(2, 3) * attention.scaling
    if attention.softcap is not None:
        scores = torch.tanh(scores / attention.softcap) * attention.softcap
    if mask is not None:
        scores = scores + mask
    if attention.sinks is None:
        probs = scores.softmax(-1, dtype=torch.float32)
        return probs.to(query.dtype) @ values

    # A sink is one more score of each row: the folded rows of a key/value head are its query heads' in turn.
    group = attention.sinks.numel() // kv_heads
    per_row = attention.sinks.view(kv_heads, -1).repeat_interleave(num_rows // group, 1)
    sinks = per_row[None, :, :, None].expand(batch, -1, -1, 1).to(scores.dtype)
    probs = torch.cat([scores, sinks], -1).softmax(-1, dtype=torch.float32)
    return probs[..., :-1].to(query.dtype) @ values
