"""PrefillMetadata: causal attention of prompt chunks of many sequences in one pass.

    rows      c0 c0 c0 | c1 c1          R rows of all chunks
    keys      k0 k0 k0 k0 k0 | k1 k1    T positions that the chunks see, gathered from the cache if any has a context

On a GPU all chunks attend in one launch per layer, by torch's variable-length flash attention;
otherwise one by one. Triton's tree kernel reads a context by its block table, without gathering it.
So where it runs, short chunks that have a context attend as chains (trees without branches), and so
do all chunks to which torch's flash attention does not apply.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from jaxtyping import Float, Int
from torch import Tensor

from eagle_ray.attention.metadata import (
    AttentionParams,
    AttentionShape,
    Projected,
    Rotary,
    causal_attention,
)
from eagle_ray.attention.triton_attention import (
    CHAIN_ROWS,
    attend_trees,
    chain_trees,
    rotate_and_write,
    uses_triton,
)
from eagle_ray.attention.varlen import (
    VARLEN_DTYPES,
    PackedLengths,
    supports_varlen,
    varlen_attention,
)
from eagle_ray.core.device import copy_to_device
from eagle_ray.kernels.tree_metadata import KernelTrees
from eagle_ray.kv.kv_cache import KVCache

# Positions that a layer gathers in a pass: 0.5 GB for 8 key heads of 128 numbers in bf16.
MAX_GATHERED = 1 << 17


def is_chained(cache: KVCache, context: int, num_rows: int, chain_rows: int = CHAIN_ROWS) -> bool:
    """Return whether a chunk behind `context` positions attends as a chain: a tree without branches."""
    is_short = num_rows <= chain_rows or context + num_rows > MAX_GATHERED
    return context > 0 and is_short and uses_triton(cache)


@dataclass(slots=True)
class PrefillMetadata(Projected):
    """Prompt chunks, concatenated; each row attends to its slot's positions from `first` up to its own.

    Attributes:
        firsts: first visible position of each chunk, on the host.
        starts: position of each chunk's first row, on the host.
        lengths: rows of each chunk, on the host.
        chain_rows: maximum rows of a chunk with a context that attends as a chain.
        slot_mapping: index in the cache of each row.
    """

    cache: KVCache
    slots: list[int]
    firsts: list[int]
    starts: list[int]
    lengths: list[int]
    chain_rows: int = CHAIN_ROWS
    slot_mapping: Int[Tensor, " R"] = field(init=False)
    _chained: tuple[int, ...] = field(init=False)  # chunks that attend as chains
    _chained_rows: Int[Tensor, " C"] | None = field(default=None, init=False)  # None is all
    _gathered: GatheredChunks | None = field(default=None, init=False)  # the other chunks
    _gathered_rows: Int[Tensor, " G"] | None = field(default=None, init=False)
    # Chains of these chunks.
    _trees: dict[tuple[int, ...], KernelTrees] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        contexts = [start - first for start, first in zip(self.starts, self.firsts, strict=True)]
        chained = []
        gathered_chunks = []
        for i, context in enumerate(contexts):
            if is_chained(self.cache, context, self.lengths[i], self.chain_rows):
                chained.append(i)
            else:
                gathered_chunks.append(i)
        self._chained = tuple(chained)
        others = tuple(gathered_chunks)
        if others:
            gathered = GatheredChunks(self.cache, *self._select(others))
            self._gathered = gathered
            if not self._chained:
                self.slot_mapping = gathered.own
                return
        ends = [start + n for start, n in zip(self.starts, self.lengths, strict=True)]
        self.slot_mapping = _slot_mapping(self.cache, self.slots, self.starts, ends)
        if others:
            self._chained_rows = self._rows_of(self._chained)
            self._gathered_rows = self._rows_of(others)

    @property
    def num_gathered(self) -> int:
        """Return how many positions each layer gathers at once if torch's flash attention is used."""
        chunks = self._gathered
        return sum(chunks.num_seen) if chunks is not None and chunks.has_context else 0

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, attention: AttentionParams
    ) -> Tensor:
        self.cache.write(attention.layer, self.slot_mapping, key[0], value[0])
        by_row = query[0].transpose(0, 1)
        rows = None
        if not self.cache.is_rounded:  # else rows attend to what later passes see: the cache's
            keys = key[0].transpose(0, 1)
            values = value[0].transpose(0, 1)
            rows = (keys, values)
        out = self._attend(by_row, rows, attention)
        return out.transpose(0, 1)[None]

    def attend_projected(
        self, qkv: Float[Tensor, "R width"], rotary: Rotary, shape: AttentionShape
    ) -> Float[Tensor, "R heads*d"]:
        if not uses_triton(self.cache):
            return Projected.attend_projected(self, qkv, rotary, shape)
        query = rotate_and_write(self.cache, self.slot_mapping, qkv, rotary, shape)
        return self._attend(query, None, shape.rule).flatten(1)

    def _attend(
        self,
        query: Float[Tensor, "R heads d"],
        rows: tuple[Float[Tensor, "R kv_heads d"], Float[Tensor, "R kv_heads dv"]] | None,
        attention: AttentionParams,
    ) -> Float[Tensor, "R heads dv"]:
        """Return the attention of the pass's rows.

        Args:
            rows: the chunks' own keys and values; None if they are in the cache alone.
        """
        if self._gathered is None or self._needs_chains(query, attention):
            return self._attend_chains(query, tuple(range(len(self.slots))), attention)
        if self._gathered_rows is None or self._chained_rows is None:
            return self._gathered.attend(query, rows, attention)

        # Some chunks attend as chains, and the others are gathered.
        num_rows, heads, _ = query.shape
        out = query.new_empty(num_rows, heads, self.cache.values.shape[-1])
        others = query.index_select(0, self._gathered_rows)
        chains = query.index_select(0, self._chained_rows)
        of_others = self._gathered.attend(others, None, attention)
        out.index_copy_(0, self._gathered_rows, of_others)
        of_chains = self._attend_chains(chains, self._chained, attention)
        return out.index_copy_(0, self._chained_rows, of_chains)

    def _needs_chains(self, query: Float[Tensor, "R heads d"], attention: AttentionParams) -> bool:
        """Return whether all chunks attend as chains in this layer, because torch would make a mask or scores."""
        if not uses_triton(self.cache):
            return False
        if attention.softcap is not None or attention.sinks is not None:
            return True
        value_dim = self.cache.values.shape[-1]
        return query.dtype in VARLEN_DTYPES and not supports_varlen(query, value_dim, attention)

    def _attend_chains(
        self, query: Float[Tensor, "C heads d"], chunks: tuple[int, ...], attention: AttentionParams
    ) -> Float[Tensor, "C heads dv"]:
        """Return the attention of these chunks, whose rows are the query's."""
        if chunks not in self._trees:
            self._trees[chunks] = chain_trees(self.cache, *self._select(chunks))
        by_head = query.transpose(0, 1)
        return attend_trees(self.cache, self._trees[chunks], by_head, attention).transpose(0, 1)

    def _select(self, chunks: tuple[int, ...]) -> tuple[list[int], list[int], list[int], list[int]]:
        """Return slots, firsts, starts and lengths of these chunks."""
        slots = [self.slots[i] for i in chunks]
        firsts = [self.firsts[i] for i in chunks]
        starts = [self.starts[i] for i in chunks]
        lengths = [self.lengths[i] for i in chunks]
        return slots, firsts, starts, lengths

    def _rows_of(self, chunks: tuple[int, ...]) -> Int[Tensor, " N"]:
        """Return the indices of these chunks' rows in the pass."""
        each = torch.arange(sum(self.lengths)).split(self.lengths)
        rows = torch.cat([each[i] for i in chunks])
        return copy_to_device(rows, self.slot_mapping.device)


@dataclass(slots=True)
class GatheredChunks:
    """Chunks whose keys and values are gathered from the cache for attention. Other fields are PrefillMetadata's.

    Attributes:
        num_seen: number of positions that each chunk's last row sees.
        own: index in the cache of each row.
        seen: index in the cache of each position that the chunks see.
    """

    cache: KVCache
    slots: list[int]
    firsts: list[int]
    starts: list[int]
    lengths: list[int]
    num_seen: list[int] = field(init=False)
    own: Int[Tensor, " R"] = field(init=False)
    seen: Int[Tensor, " T"] = field(init=False)
    _packed: PackedLengths = field(init=False)

    def __post_init__(self) -> None:
        ends = [start + n for start, n in zip(self.starts, self.lengths, strict=True)]
        self.num_seen = [end - first for end, first in zip(ends, self.firsts, strict=True)]
        self.own = _slot_mapping(self.cache, self.slots, self.starts, ends)
        self.seen = self.own
        if self.has_context:
            self.seen = _slot_mapping(self.cache, self.slots, self.firsts, ends)
        self._packed = PackedLengths.of(self.lengths, self.num_seen, self.own.device)

    @property
    def has_context(self) -> bool:
        return self.starts != self.firsts

    def attend(
        self,
        query: Float[Tensor, "R heads d"],
        rows: tuple[Float[Tensor, "R kv_heads d"], Float[Tensor, "R kv_heads dv"]] | None,
        attention: AttentionParams,
    ) -> Float[Tensor, "R heads dv"]:
        """Return the attention of the chunks' rows.

        Args:
            rows: keys and values of the chunks' own rows; None if they are only in the cache.
        """
        if self.has_context:
            rows = None
        if supports_varlen(query, self.cache.values.shape[-1], attention):
            parts = self.cache.gather(attention.layer, self.seen) if rows is None else rows
            together = varlen_attention(query, *parts, self._packed, attention)
            if together is not None:
                return together

        # One by one, so that the keys and values of one chunk alone are gathered at a time.
        seen: Iterable[tuple[Tensor, Tensor]]
        if rows is None:
            slot_mapping = self.seen.split(self.num_seen)
            seen = (self.cache.gather(attention.layer, indices) for indices in slot_mapping)
        else:
            keys, values = rows
            seen = zip(keys.split(self.num_seen), values.split(self.num_seen), strict=True)
        chunks = zip(query.split(self.lengths), seen, strict=True)
        return torch.cat([_one_by_one(part, *both, attention) for part, both in chunks])


def _slot_mapping(
    cache: KVCache, slots: list[int], starts: list[int], ends: list[int]
) -> Int[Tensor, " N"]:
    """Return where the cache stores each slot's positions, from its start up to its end."""
    device = cache.keys.device
    spans = list(zip(starts, ends, strict=True))
    positions = torch.cat([torch.arange(start, end) for start, end in spans])

    # The slot of each of these positions.
    counts = [end - start for start, end in spans]
    repeats = torch.tensor(counts)
    each = torch.tensor(slots).repeat_interleave(repeats, output_size=sum(counts))

    positions = copy_to_device(positions, device)
    each = copy_to_device(each, device)
    return cache.slot_mapping(each, positions)


def _one_by_one(
    query: Float[Tensor, "N heads d"],
    keys: Float[Tensor, "T kv_heads d"],
    values: Float[Tensor, "T kv_heads dv"],
    attention: AttentionParams,
) -> Float[Tensor, "N heads dv"]:
    """Return the attention of one chunk's rows."""
    query = query.transpose(0, 1)[None]
    keys = keys.transpose(0, 1)[None]
    values = values.transpose(0, 1)[None]
    out = causal_attention(query, keys, values, attention)
    return out[0].transpose(0, 1)
