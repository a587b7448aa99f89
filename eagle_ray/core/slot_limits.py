"""What `auto` gives an engine: its slots, and the prompt tokens of a step.

What a worker's GPU holds is decided there, by assembly/memory_plan.py.
"""

from __future__ import annotations

from typing import Literal

CPU_SLOTS, MAX_SLOTS = 16, 256
PREFILL_TOKENS = {"cpu": 512, "cuda": 4096}  # prompt tokens per step; on a CPU twice as many are hardly faster
SERVE_PREFILL_TOKENS = {"cpu": 512, "cuda": 1024}  # of an endpoint: running streams wait for them
Auto = Literal["auto"]


def usual_slots(slots: int | Auto, on_gpu: bool) -> int:
    """Return the slots to count on where the worker's card cannot be seen: the setting, or the most that auto gives."""
    return slots if slots != "auto" else MAX_SLOTS if on_gpu else CPU_SLOTS
