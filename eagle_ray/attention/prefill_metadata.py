"""PrefillMetadata: chunks of many prompts in one pass, each row over its sequence up to itself.

    rows      c0 c0 c0 | c1 c1          R rows of all chunks
    keys      k0 k0 k0 k0 k0 | k1 k1    T positions that the chunks see, gathered from the cache if any has a context

On a GPU all chunks attend in one launch per layer (`varlen.py`); elsewhere, and where that does not apply, one by one.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from jaxtyping import Float, Int
from torch import Tensor

from eagle_ray.async_copy import copy_to_device
from eagle_ray.attention.metadata import AttentionParams, AttentionShape, Projected, Rotary, causal_attention
from eagle_ray.attention.triton_attention import rotate_and_write, uses_triton
from eagle_ray.attention.varlen import PackedLengths, supports_varlen, varlen_attention
from eagle_ray.kv.kv_cache import KVCache


@dataclass(slots=True)
class PrefillMetadata(Projected):
    """Prompt chunks, concatenated; each row attends to its slot's positions from `first` up to its own.

    Attributes:
        firsts: first visible position of each chunk, on the host.
        starts: position of each chunk's first row, on the host.
        lengths: rows of each chunk, on the host.
        cells: where the cache stores each row.
    """

    cache: KVCache
    slots: list[int]
    firsts: list[int]
    starts: list[int]
    lengths: list[int]
    cells: Int[Tensor, " R"] = field(init=False)
    _seen: Int[Tensor, " T"] = field(init=False)  # cells of the positions that the chunks see
    _packed: PackedLengths = field(init=False)

    def __post_init__(self) -> None:
        self.cells = self._cells(self.starts)
        self._seen = self._cells(self.firsts) if self._has_context else self.cells
        self._packed = PackedLengths.of(self.lengths, self._num_seen, self.cells.device)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, attention: AttentionParams) -> Tensor:
        self.cache.write(attention.layer, self.cells, key[0], value[0])
        rows = (key[0].transpose(0, 1), value[0].transpose(0, 1))
        return self._attend(query[0].transpose(0, 1), rows, attention).transpose(0, 1)[None]

    def attend_projected(
        self, qkv: Float[Tensor, "R width"], rotary: Rotary, shape: AttentionShape
    ) -> Float[Tensor, "R heads*d"]:
        if not uses_triton(self.cache):
            return Projected.attend_projected(self, qkv, rotary, shape)
        query = rotate_and_write(self.cache, self.cells, qkv, rotary, shape)
        return self._attend(query, None, shape.rule).flatten(1)

    def _attend(
        self,
        query: Float[Tensor, "R heads d"],
        rows: tuple[Float[Tensor, "R kv_heads d"], Float[Tensor, "R kv_heads dv"]] | None,
        attention: AttentionParams,
    ) -> Float[Tensor, "R heads dv"]:
        """rows: the chunks' own keys and values; None if they are in the cache alone."""
        if rows is None or self._has_context:
            rows = tuple(flat.index_select(0, self._seen) for flat in self.cache.layer(attention.layer))
        together = None
        if supports_varlen(query, rows[1].shape[2], attention):
            together = varlen_attention(query, *rows, self._packed, attention)
        if together is not None:
            return together
        parts = zip(query.split(self.lengths), *(x.split(self._num_seen) for x in rows), strict=True)
        return torch.cat([_one_by_one(*part, attention) for part in parts])

    @property
    def _has_context(self) -> bool:
        return self.starts != self.firsts

    @property
    def _num_seen(self) -> list[int]:
        """Return the positions that each chunk's last row sees."""
        return [end - first for end, first in zip(self._ends, self.firsts, strict=True)]

    @property
    def _ends(self) -> list[int]:
        return [start + n for start, n in zip(self.starts, self.lengths, strict=True)]

    def _cells(self, starts: list[int]) -> Int[Tensor, " N"]:
        """Return the cells of each slot's positions from its start up to its chunk's end."""
        device = self.cache.keys.device
        counts = [end - start for start, end in zip(starts, self._ends, strict=True)]
        columns = [torch.arange(start, end) for start, end in zip(starts, self._ends, strict=True)]
        slots = torch.tensor(self.slots).repeat_interleave(torch.tensor(counts), output_size=sum(counts))
        return self.cache.slot_mapping(copy_to_device(slots, device), copy_to_device(torch.cat(columns), device))


def _one_by_one(
    query: Float[Tensor, "N heads d"],
    keys: Float[Tensor, "T kv_heads d"],
    values: Float[Tensor, "T kv_heads dv"],
    attention: AttentionParams,
) -> Float[Tensor, "N heads dv"]:
    out = causal_attention(*(x.transpose(0, 1)[None] for x in (query, keys, values)), attention)
    return out[0].transpose(0, 1)
