"""EngineCounters: what an engine has done, in numbers. Needs no torch, so that any process can be told."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(slots=True)
class EngineCounters:
    """Since the engine was made. num_slot_steps: running sequences, summed over steps.

    num_plain_steps: steps in which nothing was drafted. num_probes: steps taken in order to learn. num_ahead: steps
    launched before the one before them was read. num_verify_rows: rows of all decode passes, padding included.
    num_prefill_passes: passes over prompt chunks alone.
    busy_s: seconds spent inside step(); prefill_s of them on prompts, which have their share of a pass by its rows.
    planner_error: why the planner failed, if it has: nothing is drafted from then on.
    method: what `speculative.method: auto` chose, once it has. method_rates: decoded tokens per second of the methods
    that it tried.
    fallbacks: why Triton's kernels or CUDA graphs do not run on a CUDA device, by "kernels" and "graphs".
    """

    num_slots: int
    num_steps: int = 0
    num_slot_steps: int = 0
    num_plain_steps: int = 0
    num_probes: int = 0
    num_ahead: int = 0
    num_verify_rows: int = 0
    num_prefill_passes: int = 0
    num_output_tokens: int = 0
    num_prefill_tokens: int = 0
    num_reused_tokens: int = 0
    num_preemptions: int = 0
    busy_s: float = 0.0
    prefill_s: float = 0.0
    planner_error: str | None = None
    method: str | None = None
    method_rates: dict[str, float] = field(default_factory=dict)
    fallbacks: dict[str, str] = field(default_factory=dict)

    @property
    def num_planner_failures(self) -> int:
        """Return 1 if the planner failed, otherwise 0."""
        return int(self.planner_error is not None)


def choice_text(method: str, rates: Mapping[str, float]) -> str:
    """Return the choice as a line of text."""
    listed = ", ".join(f"{name} {rate:,.0f}" for name, rate in sorted(rates.items(), key=lambda item: -item[1]))
    return f"speculative.method auto: {method} (decoded tokens per second: {listed})"
