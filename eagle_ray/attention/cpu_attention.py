"""CpuMetadata: ragged rows of many sequences that attend in one C++ call a layer (kernels/cpu_ops).

Each row sees a run of its sequence's positions and, of the tree positions after them, those of its ancestors. Rows of
trees, of prompts and of both in one pass are the same thing here: nothing is padded, gathered or split into groups.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from jaxtyping import Bool, Int, UInt8
from torch import Tensor

from eagle_ray.attention.metadata import AttentionParams, AttentionShape, Rotary
from eagle_ray.core.decode_batch import DecodeSlots
from eagle_ray.kernels import cpu_ops
from eagle_ray.kernels.cpu_ops import ScoreRule, SeenPositions
from eagle_ray.kv.kv_cache import KVCache


@dataclass(slots=True)
class CpuMetadata:
    """Rows over a cache; `of_trees` and `of_prompts` make them.

    Attributes:
        slot_mapping: where the cache stores each row.
        begin, end: positions begin .. end - 1 of its slot that each row sees.
        trunk: the position of each row's tree position 0.
        positions: positions of the rows, for sliding windows.
        mask: 1 for each of M tree positions that a row sees.
        position_depths: depths of the row's tree positions; position j is at position trunk + depth.
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
        """Return the layout of trees on top of what B slots hold, from what TreeMetadata is made of."""
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
    def of_prompts(
        cls, cache: KVCache, slots: list[int], firsts: list[int], starts: list[int], lengths: list[int]
    ) -> CpuMetadata:
        """Return the layout of chunks of prompts, from what PrefillMetadata is made of."""
        chunks = torch.tensor([slots, firsts]).repeat_interleave(torch.tensor(lengths), dim=1, output_size=sum(lengths))
        positions = torch.cat([torch.arange(start, start + n) for start, n in zip(starts, lengths, strict=True)])
        nothing = torch.zeros(len(positions), 0, dtype=torch.int64)
        return cls(
            cache=cache,
            slot_mapping=cache.slot_mapping(chunks[0], positions),
            slots=chunks[0].contiguous(),
            begin=chunks[1].contiguous(),
            end=positions + 1,
            trunk=positions,
            positions=positions,
            mask=nothing.to(torch.uint8),
            position_depths=nothing,
        )

    def followed_by(self, other: CpuMetadata) -> CpuMetadata:
        """Return these rows and then the other's, of the same cache."""
        width = max(self.mask.shape[1], other.mask.shape[1])
        names = ("slot_mapping", "slots", "begin", "end", "trunk", "positions")
        both = {name: torch.cat([getattr(self, name), getattr(other, name)]) for name in names}
        for name in ("mask", "position_depths"):
            parts = (getattr(layout, name) for layout in (self, other))
            both[name] = torch.cat([torch.nn.functional.pad(x, (0, width - x.shape[1])) for x in parts])
        return CpuMetadata(self.cache, **both)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, attention: AttentionParams) -> Tensor:
        self.cache.write(attention.layer, self.slot_mapping, key[0], value[0])
        sinks = None if attention.sinks is None else attention.sinks.float()
        rule = ScoreRule(attention.scaling, attention.softcap, sinks)
        out = self._attend(query[0].transpose(0, 1), attention.layer, attention.window, rule)
        return out.transpose(0, 1)[None]

    def attend_projected(self, qkv: Tensor, rotary: Rotary, shape: AttentionShape) -> Tensor:
        keys, values = self.cache.layer(shape.layer)
        norms = (shape.q_norm, shape.k_norm, shape.norm_eps)
        cpu_ops.rotate_and_write(qkv, keys, values, self.slot_mapping, rotary.cosine, rotary.sine, *norms)
        query = qkv.view(len(qkv), -1, shape.head_dim)[:, : shape.heads]
        return self._attend(query, shape.layer, shape.window, ScoreRule(shape.scaling)).flatten(1)

    def _attend(self, query: Tensor, layer: int, window: int | None, rule: ScoreRule) -> Tensor:
        return cpu_ops.attend(self.seen(window), query, *self.cache.layer(layer), rule)

    def seen(self, window: int | None) -> SeenPositions:
        """Return what the rows see through a sliding window, made once a pass; None sees all."""
        if window not in self._seen:
            self._seen[window] = self._seen_positions(window)
        return self._seen[window]

    def _seen_positions(self, window: int | None) -> SeenPositions:
        begin, mask = self.begin, self.mask
        if window is not None:
            begin = torch.maximum(begin, self.positions - window + 1)
            distance = self.positions[:, None] - self.trunk[:, None] - self.position_depths
            mask = mask * (distance < window).to(torch.uint8)
        blocks = self.cache.blocks
        return SeenPositions(blocks.block_table, blocks.size, self.slots, begin, self.end, self.trunk, mask)
