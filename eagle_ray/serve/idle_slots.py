"""IdleSlots: batch lines get the slots that interactive requests leave free.

An eighth of the slots, at least one of several, is never given to lines, so that an interactive request finds one at
once: a line may run for minutes. A line is let in if all requests that are admitted, and the line, fit into the others
together. So lines wait while interactive requests fill the slots, and no interactive request waits behind them.

    await idle_slots.wait(need)
    await service.answer(asked)   # admits it at once
"""

from __future__ import annotations

import asyncio
from collections import deque

from eagle_ray.serve.admission import Admission, Need

LOOK_EVERY_S = 0.02
RESERVED_PART = 8  # one slot of eight is for interactive requests alone


class IdleSlots:
    """Use it on one event loop. num_slots: of the engine."""

    def __init__(self, admission: Admission, num_slots: int):
        reserved = max(1, num_slots // RESERVED_PART) if num_slots > 1 else 0
        self._admission, self._num_slots = admission, num_slots - reserved
        self._waiting: deque[object] = deque()  # lines in the order in which they came

    async def wait(self, need: Need) -> None:
        """Return when the line fits. The caller admits it before it gives up control."""
        line = object()
        self._waiting.append(line)
        try:
            while self._waiting[0] is not line or not self._fits(need):
                await asyncio.sleep(LOOK_EVERY_S)
        finally:
            self._waiting.remove(line)

    def _fits(self, need: Need) -> bool:
        """Return whether slots are free for the line; a line of more sequences than slots needs an idle replica."""
        held = self._admission.held.sequences
        return held == 0 or held + need.sequences <= self._num_slots
