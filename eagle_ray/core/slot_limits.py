"""The slots that `auto` gives an engine. What a worker's GPU holds is decided there, by assembly/memory_plan.py."""

from __future__ import annotations

from typing import Literal

CPU_SLOTS, MAX_SLOTS = 16, 256
Auto = Literal["auto"]


def usual_slots(slots: int | Auto, on_gpu: bool) -> int:
    """Return the slots to count on where the worker's card cannot be seen: the setting, or the most that auto gives."""
    return slots if slots != "auto" else MAX_SLOTS if on_gpu else CPU_SLOTS
