"""StepTimer: the seconds of the parts of one step, on the device that ran them.

On a CPU the host's clock is used. On a GPU events are recorded up to the step's copy to the host and read once that has
arrived, so that nothing waits for them. A step that is launched ahead begins when the previous step's copy was started;
what the host does about that step meanwhile does not count.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Seconds of a step. draft: catching up and drafting. verify: the target's pass. overhead: everything else."""

    draft: float
    verify: float
    overhead: float

    @property
    def total(self) -> float:
        return self.draft + self.verify + self.overhead


class StepTimer:
    """Marks in this order: start, drafted, allocated, verified, sent. behind: the timer of the step before it."""

    def __init__(self, device: torch.device | str, behind: StepTimer | None = None):
        self._on_cuda = torch.device(device).type == "cuda"
        self._marks: list[float | torch.cuda.Event] = []
        self.mark()
        self._begin = self._marks[0] if behind is None else behind._marks[-1]

    def mark(self) -> None:
        self._host = time.perf_counter()
        if not self._on_cuda:
            self._marks.append(self._host)
            return
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self._marks.append(event)

    def leave_out(self, seconds: float) -> None:
        """Exclude seconds that the host spent on other work since the last mark."""
        self._host += seconds

    def arrived(self) -> None:
        """Note that the step's copy has arrived."""
        if self._on_cuda:
            self._host = time.perf_counter()

    def read(self, followed: bool = False) -> StepTimes:
        """Return the seconds, after the last mark and `arrived`. followed: another step was launched after this one."""
        start, drafted, allocated = self._marks[:3]
        verified, sent = self._marks[-2:]  # a verify pass that was run again has left more between them
        draft, verify = self._between(start, drafted), self._between(allocated, verified)
        total = self._between(self._begin, sent)
        if not followed:
            total += time.perf_counter() - self._host
        return StepTimes(draft, verify, total - draft - verify)

    def _between(self, a: Any, b: Any) -> float:
        """Return the seconds between two marks: host times, or CUDA events."""
        if not self._on_cuda:
            return b - a
        b.synchronize()
        return a.elapsed_time(b) / 1000
