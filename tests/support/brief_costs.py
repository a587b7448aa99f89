"""Costs of steps that are measured for a moment: a start measures for up to five seconds, and tests start many engines.

The plans of such an engine are worse, and its tokens are the same.
"""

from __future__ import annotations

BRIEF_S = (
    0.5  # five seconds differ by 5 % in what is planned; steps of toy models take milliseconds
)


def measure_briefly() -> None:
    """Let engines of this process, and of what is forked from it, measure for BRIEF_S on a CPU."""
    from eagle_ray.engine.calibrate import BUDGET_S

    BUDGET_S["cpu"] = BRIEF_S
