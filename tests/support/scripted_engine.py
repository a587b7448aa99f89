"""ScriptedEngine: stands where an AsyncEngine does and gives every sequence the same output ids, some per step."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from typing import Any

from eagle_ray.core.counters import AcceptanceStats
from eagle_ray.core.sequence import Sequence


class ScriptedEngine:
    """ids: end with an EOS. engine: answers everything else."""

    def __init__(self, engine: Any, ids: list[int], eos_ids: frozenset[int], tokens_per_step: int = 3):
        self._engine, self._ids, self._eos_ids, self._size = engine, ids, eos_ids, tokens_per_step

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def generate(self, sequence: Sequence) -> Sequence:
        async for _ in self.stream(sequence):
            pass
        return sequence

    async def stream(self, sequence: Sequence) -> AsyncIterator[int]:
        sequence.max_tokens = sequence.sampling.max_tokens
        sequence.stats = AcceptanceStats.empty(0)
        sequence.arrived_at = sequence.admitted_at = sequence.first_token_at = time.monotonic()
        for start in range(0, len(self._ids), self._size):
            if sequence.finish_reason is None:
                sequence.append(self._ids[start : start + self._size], self._eos_ids)
                sequence.finished_at = time.monotonic()
                yield len(sequence.output_ids)
