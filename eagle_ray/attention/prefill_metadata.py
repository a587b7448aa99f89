"""PrefillMetadata: chunks of many prompts in one pass, each row over its sequence up to itself.

    rows      c0 c0 c0 | c1 c1          R rows of all chunks
    keys      k0 k0 k0 k0 k0 | k1 k1    T positions that the chunks see, gathered from the cache if any has a context

On a GPU all chunks attend in one launch per layer, by torch's variable-length flash attention; elsewhere, and where
that does not apply, one by one.
Triton's kernel of trees reads a context by block table. So with it short chunks that have a context attend as chains,
and so do all chunks where torch's flash attention does not apply: nothing of these is gathered.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cache
from itertools import accumulate
from typing import Any, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor

from eagle_ray.attention.metadata import AttentionParams, AttentionShape, Projected, Rotary, causal_attention
from eagle_ray.attention.triton_attention import CHAIN_ROWS, attend_trees, chain_trees, rotate_and_write, uses_triton
from eagle_ray.core.device import copy_to_device, to_device
from eagle_ray.kernels.tree_metadata import KernelTrees
from eagle_ray.kv.kv_cache import KVCache

MAX_GATHERED = 1 << 17  # positions that a layer gathers in a pass: 0.5 GB for 8 key heads of 128 numbers in bf16


def is_chained(cache: KVCache, context: int, num_rows: int, chain_rows: int = CHAIN_ROWS) -> bool:
    """Return whether a chunk behind `context` positions attends as chains, whatever else is in its pass."""
    is_short = num_rows <= chain_rows or context + num_rows > MAX_GATHERED
    return context > 0 and is_short and uses_triton(cache)


@dataclass(slots=True)
class PrefillMetadata(Projected):
    """Prompt chunks, concatenated; each row attends to its slot's positions from `first` up to its own.

    Attributes:
        firsts: first visible position of each chunk, on the host.
        starts: position of each chunk's first row, on the host.
        lengths: rows of each chunk, on the host.
        chain_rows: most rows of a chunk with a context that attends as chains.
        slot_mapping: where the cache stores each row.
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
    _trees: dict[tuple[int, ...], KernelTrees] = field(default_factory=dict, init=False)  # chains of these chunks

    def __post_init__(self) -> None:
        contexts = [start - first for start, first in zip(self.starts, self.firsts, strict=True)]
        members = range(len(self.slots))
        self._chained = tuple(
            i for i in members if is_chained(self.cache, contexts[i], self.lengths[i], self.chain_rows)
        )
        others = tuple(i for i in members if i not in set(self._chained))
        if others:
            gathered = GatheredChunks(self.cache, *self._select(others))
            self._gathered = gathered
            if not self._chained:
                self.slot_mapping = gathered.own
                return
        ends = [start + n for start, n in zip(self.starts, self.lengths, strict=True)]
        self.slot_mapping = _slot_mapping(self.cache, self.slots, self.starts, ends)
        if others:
            self._chained_rows, self._gathered_rows = self._rows_of(self._chained), self._rows_of(others)

    @property
    def num_gathered(self) -> int:
        """Return the positions that each layer gathers at once if torch's flash attention applies."""
        chunks = self._gathered
        return sum(chunks.num_seen) if chunks is not None and chunks.has_context else 0

    def attend(self, query: Tensor, key: Tensor, value: Tensor, attention: AttentionParams) -> Tensor:
        self.cache.write(attention.layer, self.slot_mapping, key[0], value[0])
        rows = (key[0].transpose(0, 1), value[0].transpose(0, 1))
        seen = None if self.cache.is_rounded else rows  # as later passes see them, whatever the chunks are
        return self._attend(query[0].transpose(0, 1), seen, attention).transpose(0, 1)[None]

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
        """rows: the chunks' own keys and values; None if they are in the cache alone."""
        if self._gathered is None or self._needs_chains(query, attention):
            return self._attend_chains(query, tuple(range(len(self.slots))), attention)
        if self._gathered_rows is None or self._chained_rows is None:
            return self._gathered.attend(query, rows, attention)

        others, chains = (query.index_select(0, index) for index in (self._gathered_rows, self._chained_rows))
        out = query.new_empty(*query.shape[:2], self.cache.values.shape[-1])
        out.index_copy_(0, self._gathered_rows, self._gathered.attend(others, None, attention))
        return out.index_copy_(0, self._chained_rows, self._attend_chains(chains, self._chained, attention))

    def _needs_chains(self, query: Float[Tensor, "R heads d"], attention: AttentionParams) -> bool:
        """Return whether all chunks attend as chains in this layer, because torch would make a mask or scores."""
        if not uses_triton(self.cache):
            return False
        if attention.softcap is not None or attention.sinks is not None:
            return True
        return query.dtype in DTYPES and not supports_varlen(query, self.cache.values.shape[-1], attention)

    def _attend_chains(
        self, query: Float[Tensor, "C heads d"], chunks: tuple[int, ...], attention: AttentionParams
    ) -> Float[Tensor, "C heads dv"]:
        """Return the attention of these chunks, whose rows are the query's."""
        if chunks not in self._trees:
            self._trees[chunks] = chain_trees(self.cache, *self._select(chunks))
        return attend_trees(self.cache, self._trees[chunks], query.transpose(0, 1), attention).transpose(0, 1)

    def _select(self, chunks: tuple[int, ...]) -> tuple[list[int], list[int], list[int], list[int]]:
        """Return slots, firsts, starts and lengths of these chunks."""
        slots, firsts, starts, lengths = (
            [values[i] for i in chunks] for values in (self.slots, self.firsts, self.starts, self.lengths)
        )
        return slots, firsts, starts, lengths

    def _rows_of(self, chunks: tuple[int, ...]) -> Int[Tensor, " N"]:
        """Return the rows of these chunks among those of the pass."""
        each = torch.arange(sum(self.lengths)).split(self.lengths)
        return copy_to_device(torch.cat([each[i] for i in chunks]), self.slot_mapping.device)


@dataclass(slots=True)
class GatheredChunks:
    """Chunks whose keys and values lie one after another while they attend; the fields are PrefillMetadata's.

    Attributes:
        own: where the cache stores each row.
        seen: likewise of the positions that the chunks see.
        num_seen: those of each chunk's last row.
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
        self.seen = _slot_mapping(self.cache, self.slots, self.firsts, ends) if self.has_context else self.own
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
        """rows: the chunks' own keys and values; None if they are in the cache alone."""
        if self.has_context:
            rows = None
        if supports_varlen(query, self.cache.values.shape[-1], attention):
            parts = self.cache.gather(attention.layer, self.seen) if rows is None else rows
            together = varlen_attention(query, *parts, self._packed, attention)
            if together is not None:
                return together
        queries, slot_mapping = query.split(self.lengths), self.seen.split(self.num_seen)
        seen: Iterable[tuple[Tensor, Tensor]]
        if rows is None:
            seen = (self.cache.gather(attention.layer, indices) for indices in slot_mapping)  # one at a time
        else:
            keys, values = rows
            seen = zip(keys.split(self.num_seen), values.split(self.num_seen), strict=True)
        return torch.cat([_one_by_one(part, *both, attention) for part, both in zip(queries, seen, strict=True)])


def _slot_mapping(cache: KVCache, slots: list[int], starts: list[int], ends: list[int]) -> Int[Tensor, " N"]:
    """Return where the cache stores each slot's positions, from its start up to its end."""
    device = cache.keys.device
    counts = [end - start for start, end in zip(starts, ends, strict=True)]
    positions = [torch.arange(start, end) for start, end in zip(starts, ends, strict=True)]
    each = torch.tensor(slots).repeat_interleave(torch.tensor(counts), output_size=sum(counts))
    return cache.slot_mapping(copy_to_device(each, device), copy_to_device(torch.cat(positions), device))


def _one_by_one(
    query: Float[Tensor, "N heads d"],
    keys: Float[Tensor, "T kv_heads d"],
    values: Float[Tensor, "T kv_heads dv"],
    attention: AttentionParams,
) -> Float[Tensor, "N heads dv"]:
    query, keys, values = (x.transpose(0, 1)[None] for x in (query, keys, values))
    return causal_attention(query, keys, values, attention)[0].transpose(0, 1)


log = logging.getLogger("eagle_ray")
DTYPES = (torch.bfloat16, torch.float16)
LARGEST_DIM = 256
OPTIONS = {"enable_gqa": True, "num_splits": 1}  # one split: a sequence's numbers do not depend on the batch
failures: list[str] = []  # what torch refused, if it did


@dataclass(frozen=True, slots=True)
class PackedLengths:
    """How B sequences lie in packed rows and packed positions.

    Attributes:
        row_ends, key_ends: int32, cumulative numbers, from 0 on.
        max_rows, max_keys: most rows and keys of one sequence.
    """

    row_ends: Int[Tensor, " B1"]
    key_ends: Int[Tensor, " B1"]
    max_rows: int
    max_keys: int

    @classmethod
    def of(cls, num_rows: list[int], num_keys: list[int], device: torch.device | str) -> PackedLengths:
        ends = [list(accumulate(counts, initial=0)) for counts in (num_rows, num_keys)]
        row_ends, key_ends = to_device(ends, device, torch.int32)
        return cls(row_ends, key_ends, max(num_rows), max(num_keys))


def supports_varlen(query: Float[Tensor, "R heads d"], value_dim: int, attention: AttentionParams) -> bool:
    """Return whether this layer's rows can attend in one launch."""
    if failures or query.device.type != "cuda" or query.dtype not in DTYPES:
        return False
    if not query.shape[2] == value_dim <= LARGEST_DIM:
        return False
    return attention.softcap is None and attention.sinks is None and launch_options(attention.window) is not None


def varlen_attention(
    query: Float[Tensor, "R heads d"],
    keys: Float[Tensor, "T kv_heads d"],
    values: Float[Tensor, "T kv_heads d"],
    packed: PackedLengths,
    attention: AttentionParams,
) -> Float[Tensor, "R heads d"] | None:
    """Return causal attention of each sequence's rows to its own positions, or None if this torch refuses it.

        packed = PackedLengths.of([3, 2], [5, 2], "cuda")           # 3 rows over 5 positions, 2 rows over 2
        out = varlen_attention(query, keys, values, packed, attention)

    Row i of N over T positions sees the first T - N + i + 1 of them (causal, aligned at the end). Not by block table:
    torch's flash attention wants blocks of 256 positions, ours have 32. Source: torch.nn.attention.varlen.
    torch's releases differ in what they take: a head size, fewer key heads. From the first refusal on prompts attend
    one by one, which is logged once.
    """
    from torch.nn.attention.varlen import varlen_attn

    options = launch_options(attention.window)
    if options is None:
        return None
    ends = packed.row_ends, packed.key_ends, packed.max_rows, packed.max_keys
    try:
        out = varlen_attn(query, keys, values, *ends, scale=attention.scaling, **options)
        return cast(Tensor, out)  # a pair only if one asks for log-sums
    except (RuntimeError, TypeError, ValueError) as error:
        if isinstance(error, torch.OutOfMemoryError) or "CUDA error" in str(error):
            raise
        failures.append((str(error).strip() or type(error).__name__).splitlines()[0])
        log.warning("prompts attend one by one from now on, not in one launch: %s", failures[0])
        return None


@cache
def launch_options(window: int | None) -> dict[str, Any] | None:
    """Return what this torch's varlen_attn has to be told of a causal window, or None if it cannot do it."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    known = inspect.signature(varlen_attn).parameters
    options: dict[str, Any] = {name: value for name, value in OPTIONS.items() if name in known}
    if "window_size" in known:
        return options | {"window_size": (-1 if window is None else window - 1, 0)}
    return options | {"is_causal": True} if window is None and "is_causal" in known and "scale" in known else None
