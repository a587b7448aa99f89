"""Contexts that cost no prefill: positions that every sequence begins with, whose keys get attention weight 0.

    blocks = ContextBlocks.in_place_of(target)             # before a drafter or an engine is made
    ...
    blocks.set_aside(256 * 1024)                           # columns in all, once nothing is at work
    fill(target.cache, ...); fill(drafter.cache, ...)
    begin(engine, blocks, 1024, 256)                       # 256 slots whose sequences begin with 1,024 columns each
    engine.add(Sequence("a", in_context(ids, 1024), params))

A widened pair's queries carry a positive number in their anchor (`jobs/bench/embedding_map.py`); a key with a large
negative number there gets the probability exp(-hundreds), which is 0. So what is generated, and how much of it the head
foresees, is the prompt's alone, while every pass reads the whole context at its full cost. Values are 0: heads that no
number of the small model uses attend evenly. A synthetic pair's picks depend on no key at all.
"""

from __future__ import annotations

import torch

from eagle_ray.core.decode_batch import PromptChunk
from eagle_ray.core.errors import EngineError
from eagle_ray.core.sequence import Sequence
from eagle_ray.engine.engine import Engine
from eagle_ray.kv.block_manager import BlockManager
from eagle_ray.kv.kv_cache import KVCache
from eagle_ray.models.target import TargetModel
from eagle_ray.requests.parameters import SamplingParams

UNSEEN = 3e4  # of a key in its anchor; queries have some tenths to some tens there
FILLER = 0  # the token id that stands for a column of a context


class ContextBlocks(BlockManager):
    """Blocks of which the first num_aside can be set aside: each slot then begins with its own share of them."""

    num_aside = _width = 0

    @classmethod
    def in_place_of(cls, target: TargetModel) -> ContextBlocks:
        """The target's cache reads these from now on; nothing else may know its blocks yet."""
        old = target.cache.blocks
        target.cache.blocks = cls(old.num_slots, old.capacity, old.num_blocks, target.device, old.size)
        return target.cache.blocks

    def set_aside(self, columns: int) -> None:
        """Keep the pool's first blocks for contexts with this many positions in total. Every slot must be empty."""
        self.reset_prefix_cache()
        self.num_aside = self.blocks_for(columns)
        self._references[: self.num_aside] = [1] * self.num_aside  # of ours, so that they are never free
        self.free_blocks = list(range(self.num_aside, self.num_blocks))

    def begin_with(self, columns: int, num_slots: int) -> None:
        """What the first num_slots slots begin with; whole blocks, 0 for nothing. Raises EngineError without room."""
        width = self.blocks_for(columns)
        if width * num_slots > self.num_aside:
            raise EngineError(f"{num_slots} contexts of {columns} columns do not fit into {self.num_aside} blocks")
        self._width = width

    def attach_prefix(self, slot: int, tokens: list[int]) -> int:
        if not self._width:
            return super().attach_prefix(slot, tokens)
        blocks = list(range(slot * self._width, (slot + 1) * self._width))
        for block in blocks:
            self._ref(block)
        self._extend(slot, blocks)
        return len(blocks) * self.size

    def cache_full_blocks(self, slot: int, tokens: list[int]) -> None:
        """Contexts are told apart by their slots, not by their tokens."""
        if not self._width:
            super().cache_full_blocks(slot, tokens)


@torch.no_grad()
def fill(cache: KVCache, num_blocks: int, frequency: float, longest: int) -> None:
    """Random keys that no anchored query sees, and values of 0, in a cache's first blocks.

    frequency: of the anchor, in radians a position. longest: the last position that queries may have.
    """
    half = cache.keys.shape[-1] // 2
    angle = torch.tensor(frequency * longest / 2)  # where the queries' own, between 0 and twice this, are all near it
    if angle > torch.pi / 4 * 1.5:
        raise EngineError(f"{longest} positions turn an anchor of frequency {frequency} too far")
    for keys, values in zip(cache.keys[:, :num_blocks], cache.values[:, :num_blocks], strict=True):
        keys.normal_()
        keys[..., half - 1] = -UNSEEN * angle.cos()
        keys[..., -1] = -UNSEEN * angle.sin()
        values.zero_()


@torch.inference_mode()
def begin(engine: Engine, blocks: ContextBlocks, columns: int, num_slots: int) -> None:
    """Make the idle engine's next sequences begin with this many positions, read by its drafter too; 0: none."""
    blocks.begin_with(columns, num_slots)
    if not columns:
        return
    feature = torch.zeros(1, engine.target.feature_size, dtype=engine.target.dtype, device=engine.target.device)
    for slot in range(num_slots):
        filler = Sequence("context", [FILLER] * columns, SamplingParams(), slot=slot)
        length = blocks.attach_prefix(slot, filler.prompt_ids)
        engine.prefiller.mark_prefilled([PromptChunk(filler, 0, length, 0, True)], feature.expand(length, -1))
        blocks.free(slot)


def in_context(prompt_ids: list[int], columns: int) -> list[int]:
    """Return a prompt after this many positions, with which the engine's sequences must begin."""
    return [FILLER] * columns + prompt_ids
