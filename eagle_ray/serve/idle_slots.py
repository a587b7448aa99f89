"""IdleSlots: batch lines get the slots that interactive requests leave free.

A line is let in if all requests that are admitted, and the line, fit into the replica's slots together. So an
interactive request waits at most until one of the lines that run already ends, and never behind lines that wait.

    >>> await idle_slots.wait(need)
    >>> await service.answer(asked)   # admits it at once
"""

from __future__ import annotations

import asyncio

from eagle_ray.serve.admission import Admission, Need

LOOK_EVERY_S = 0.02


class IdleSlots:
    """Use it on one event loop. num_slots: of the engine."""

    def __init__(self, admission: Admission, num_slots: int):
        self._admission, self._num_slots = admission, num_slots
        self._first = asyncio.Lock()  # lines in the order in which they came; only the first one looks

    async def wait(self, need: Need) -> None:
        """Return when the line fits. The caller admits it before it gives up control."""
        async with self._first:
            while not self._fits(need):
                await asyncio.sleep(LOOK_EVERY_S)

    def _fits(self, need: Need) -> bool:
        """Return whether slots are free for the line; a line of more sequences than slots needs an idle replica."""
        held = self._admission.held.sequences
        return held == 0 or held + need.sequences <= self._num_slots
