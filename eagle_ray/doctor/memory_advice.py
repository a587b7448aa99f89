"""Memory advice: whether a worker fits into its memory, and settings with which it would.

remedy(footprint, Room((20 << 30,), num_sharing=1, on_gpu=True), settings)
# 'set execution.slots to 5, or execution.kv_tokens to 41,600'
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from math import ceil

from eagle_ray.build import GPU_SHARE, KV_MARGIN
from eagle_ray.doctor.check_result import gib
from eagle_ray.doctor.memory_estimate import Footprint


@dataclass(frozen=True, slots=True)
class Room:
    """Memory available to a worker.

    Attributes:
        devices: free bytes on each of its GPUs, or one entry, its share of the machine's memory.
        num_sharing: workers that share the first of them.
        on_gpu: whether these are GPUs.
    """

    devices: tuple[int, ...]
    num_sharing: int
    on_gpu: bool

    @property
    def total(self) -> int:
        """Return the bytes for weights and cache; of several GPUs a tenth is kept for a pass's own tensors."""
        return self.devices[0] if len(self.devices) == 1 else int(GPU_SHARE * sum(self.devices))

    def holds(self, footprint: Footprint) -> bool:
        """Return whether weights and cache fit; the KV caches and the draft head are on the first device."""
        if len(self.devices) == 1:
            return footprint.total <= self.total
        margin = 1.0 if footprint.is_planned else KV_MARGIN
        first = margin * footprint.pool + footprint.draft + footprint.logits
        return footprint.total <= self.total and first <= GPU_SHARE * self.devices[0]


@dataclass(frozen=True, slots=True)
class MemorySettings:
    """Settings that a remedy can change. itemsize: bytes of the model's dtype. max_model_len: the effective one."""

    max_model_len: int
    itemsize: int
    num_gpus: float


def remedy(footprint: Footprint, room: Room, settings: MemorySettings) -> str:
    """Return the smallest change with which the worker would fit, if one is known."""
    if slots := most_slots(footprint, room):
        tokens = _tokens(footprint, room, settings) // 100 * 100
        return f"set execution.slots to {slots}" + (f", or execution.kv_tokens to {tokens:,}" if tokens else "")
    if length := _tokens(footprint.with_slots(1), room, settings) // 64 * 64:
        return f"set execution.slots to 1 and model.max_model_len to {length}"
    return _for_weights(footprint, room, settings)


def most_slots(footprint: Footprint, room: Room) -> int:
    """Return how many full slots fit, or 0."""
    return bisect_left(range(1, footprint.slots + 1), True, key=lambda n: not room.holds(footprint.with_slots(n)))


def _tokens(footprint: Footprint, room: Room, settings: MemorySettings) -> int:
    """Return the tokens whose keys and values fit into the remaining memory of the first device and of all devices."""
    margin, first = (1.0, room.total) if len(room.devices) == 1 else (KV_MARGIN, int(GPU_SHARE * room.devices[0]))
    others = footprint.total - footprint.pool
    free = min(room.total - others, (first - footprint.draft - footprint.logits) / margin)
    return max(int(free / (footprint.per_slot / settings.max_model_len)), 0)


def _for_weights(footprint: Footprint, room: Room, settings: MemorySettings) -> str:
    """Return the remedy if the weights alone are too large."""
    need = footprint.with_slots(1).total
    if room.num_sharing > 1 and need <= room.total * room.num_sharing:
        fewer = max(room.total * room.num_sharing // need, 1)
        return f"set execution.actors to {fewer}: each worker loads its own copy of the weights"
    if settings.itemsize == 4 and need - (footprint.target + footprint.draft) // 2 <= room.total:
        return "set model.dtype to bfloat16: its weights are half as large"
    if room.on_gpu:
        gpus = ceil(need / (GPU_SHARE * room.devices[0]))
        return (
            f"set execution.gpus_per_actor to {max(gpus, int(settings.num_gpus) + 1)}: the layers are spread over them"
        )
    return f"use a machine with {gib(need)} free, or a smaller model"
