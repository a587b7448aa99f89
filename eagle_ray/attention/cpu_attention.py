"""CpuMetadata: ragged rows of many sequences that attend in one C++ call a layer (kernels/cpu_ops).

Each row sees a run of its sequence's positions and, of the tree positions after them, those of its
ancestors. Rows of trees and of prompts are treated alike: nothing is padded, gathered or split into
groups.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Int, UInt8
from torch import Tensor

from eagle_ray.attention.metadata import (
    AttentionParams,
    AttentionShape,
    Rotary,
    window_begin,
)
from eagle_ray.core.decode_batch import DecodeSlots
from eagle_ray.kernels import cpu_ops, tree_ops
from eagle_ray.kernels.cpu_ops import ScoreRule, SeenPositions
from eagle_ray.kernels.layer_ops import rms_norm
from eagle_ray.kv.kv_cache import KVCache
from eagle_ray.tree.draft_tree import DraftTree, VerifyRows


@dataclass(slots=True)
class CpuMetadata:
    """Metadata of rows for attention in C++. Built by `of_rows`, `of_trees` or `of_prompts`.

    Attributes:
        slot_mapping: index in the cache of each row.
        begin: first position of its slot that each row sees.
        end: the position after the last one that each row sees.
        trunk: the position of each row's tree position 0.
        positions: positions of the rows, for sliding windows.
        mask: 1 for each of the M tree positions that a row sees, else 0.
        position_depths: depths of the row's tree positions; position j is at position trunk +
            depth.
    """

    cache: KVCache
    slot_mapping: Int[Tensor, " R"]
    slots: Int[Tensor, " R"]
    begin: Int[Tensor, " R"]
    end: Int[Tensor, " R"]
    trunk: Int[Tensor, " R"]
    positions: Int[Tensor, " R"]
    mask: UInt8[Tensor, "R M"]
    position_depths: Int[Tensor, "R M"]
    _seen: dict[int | None, SeenPositions] = field(default_factory=dict, init=False)

    @classmethod
    def of_trees(
        cls,
        cache: KVCache,
        batch: DecodeSlots,
        slot_mapping: Int[Tensor, " R"],
        ancestors: Bool[Tensor, "B N M"],
        depths: Int[Tensor, "B N"],
        position_depths: Int[Tensor, "B M"],
        unpack: Int[Tensor, " R"] | None,
        first: Int[Tensor, " B"] | None,
    ) -> CpuMetadata:
        """Build the metadata of trees whose contexts are in B slots; arguments are TreeMetadata's."""
        batch_size, num_nodes = depths.shape
        node = torch.arange(batch_size * num_nodes) if unpack is None else unpack
        tree = torch.div(node, num_nodes, rounding_mode="floor")
        lengths = batch.lengths[tree]
        return cls(
            cache=cache,
            slot_mapping=slot_mapping,
            slots=batch.slots[tree],
            begin=torch.zeros_like(lengths) if first is None else first[tree],
            end=lengths,
            trunk=lengths,
            positions=lengths + depths.flatten()[node],
            mask=ancestors.flatten(0, 1)[node].to(torch.uint8),
            position_depths=position_depths[tree],
        )

    @classmethod
    def of_rows(
        cls, cache: KVCache, batch: DecodeSlots, tree: DraftTree, rows: VerifyRows
    ) -> CpuMetadata:
        """Build the metadata that `of_trees` gives from packed rows of draft trees, in one C++ call."""
        blocks = cache.blocks
        slot_mapping, slots, end, positions, position_depths, mask = tree_ops.lay_out_rows(
            rows.tensors,
            tree.tensors,
            batch.slots,
            batch.lengths,
            blocks.block_table,
            blocks.size,
            blocks.null_position,
        )
        return cls(
            cache=cache,
            slot_mapping=slot_mapping,
            slots=slots,
            begin=torch.zeros_like(end),
            end=end,
            trunk=end,
            positions=positions,
            mask=mask,
            position_depths=position_depths,
        )

    @classmethod
    def of_prompts(
        cls,
        cache: KVCache,
        slots: list[int],
        firsts: list[int],
        starts: list[int],
        lengths: list[int],
    ) -> CpuMetadata:
        """Build the metadata of prompt chunks; arguments are PrefillMetadata's."""
        counts = torch.tensor(lengths)
        chunks = torch.tensor([slots, firsts])
        row_slots, row_firsts = chunks.repeat_interleave(counts, dim=1, output_size=sum(lengths))
        chunk_positions = [
            torch.arange(start, start + n) for start, n in zip(starts, lengths, strict=True)
        ]
        positions = torch.cat(chunk_positions)
        nothing = torch.zeros(len(positions), 0, dtype=torch.int64)  # there are no trees
        return cls(
            cache=cache,
            slot_mapping=cache.slot_mapping(row_slots, positions),
            slots=row_slots.contiguous(),
            begin=row_firsts.contiguous(),
            end=positions + 1,
            trunk=positions,
            positions=positions,
            mask=nothing.to(torch.uint8),
            position_depths=nothing,
        )

    def followed_by(self, other: CpuMetadata) -> CpuMetadata:
        """Return these rows followed by another metadata's rows, over one cache."""
        return CpuMetadata(
            cache=self.cache,
            slot_mapping=torch.cat([self.slot_mapping, other.slot_mapping]),
            slots=torch.cat([self.slots, other.slots]),
            begin=torch.cat([self.begin, other.begin]),
            end=torch.cat([self.end, other.end]),
            trunk=torch.cat([self.trunk, other.trunk]),
            positions=torch.cat([self.positions, other.positions]),
            mask=_stack_padded(self.mask, other.mask),
            position_depths=_stack_padded(self.position_depths, other.position_depths),
        )

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, attention: AttentionParams
    ) -> Tensor:
        self.cache.write(attention.layer, self.slot_mapping, key[0], value[0])
        rule = _score_rule(attention)
        out = self._attend(query[0].transpose(0, 1), attention.layer, attention.window, rule)
        return out.transpose(0, 1)[None]

    def attend_projected(self, qkv: Tensor, rotary: Rotary, shape: AttentionShape) -> Tensor:
        keys, values = self.cache.layer(shape.layer)
        norms = (shape.q_norm, shape.k_norm, shape.norm_eps)
        if shape.q_norm is not None and shape.q_norm.dtype is not qkv.dtype:
            _norm_heads(qkv, shape)  # the C++ rounds before it multiplies
            norms = (None, None, 0.0)
        cpu_ops.rotate_and_write(
            qkv, keys, values, self.slot_mapping, rotary.cosine, rotary.sine, *norms
        )
        query = qkv.view(len(qkv), -1, shape.head_dim)[:, : shape.heads]
        out = self._attend(query, shape.layer, shape.window, _score_rule(shape.rule))
        return out.flatten(1)

    def _attend(self, query: Tensor, layer: int, window: int | None, rule: ScoreRule) -> Tensor:
        keys, values = self.cache.layer(layer)
        return cpu_ops.attend(self.seen(window), query, keys, values, rule)

    def seen(self, window: int | None) -> SeenPositions:
        """Return the positions that each row sees through a layer's window, cached for the pass."""
        if window not in self._seen:
            self._seen[window] = self._seen_positions(window)
        return self._seen[window]

    def _seen_positions(self, window: int | None) -> SeenPositions:
        begin = self.begin
        mask = self.mask
        if window is not None:
            first = window_begin(self.positions, window)
            begin = torch.maximum(begin, first)
            tree_positions = self.trunk[:, None] + self.position_depths
            mask = mask * (tree_positions >= first[:, None]).to(torch.uint8)
        blocks = self.cache.blocks
        return SeenPositions(
            blocks.block_table, blocks.size, self.slots, begin, self.end, self.trunk, mask
        )


def _score_rule(attention: AttentionParams) -> ScoreRule:
    sinks = None if attention.sinks is None else attention.sinks.float()
    return ScoreRule(attention.scaling, attention.softcap, sinks)


def _norm_heads(qkv: Tensor, shape: AttentionShape) -> None:
    """Norm the query and key heads of each row in place."""
    assert shape.q_norm is not None and shape.k_norm is not None, "both are normed, or neither"
    heads = qkv.view(len(qkv), -1, shape.head_dim)
    query = heads[:, : shape.heads]
    key = heads[:, shape.heads : shape.heads + shape.kv_heads]
    query.copy_(rms_norm(query, shape.q_norm, shape.norm_eps))
    key.copy_(rms_norm(key, shape.k_norm, shape.norm_eps))


def _stack_padded(above: Tensor, below: Tensor) -> Tensor:
    """Stack two matrices; rows of the narrower one are padded with zeros."""
    width = max(above.shape[1], below.shape[1])
    above = F.pad(above, (0, width - above.shape[1]))
    below = F.pad(below, (0, width - below.shape[1]))
    return torch.cat([above, below])
