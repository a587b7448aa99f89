"""StepTimer: how long the parts of one step took, on the device that did them.

On a CPU the host's clock is the device's. On a GPU events are recorded up to the step's own copy to the host, and read
once that has arrived, so that nothing is waited for; from then on the host's clock goes on. What is launched behind the
copy, to learn from it, runs on meanwhile. A step that is launched behind another one begins where that one's copy was
sent; while it runs, what the host does about the other does not count.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class StepTimes:
    """draft: catching up and growing the trees. verify: the target's pass. rest: all else of the step."""

    draft: float
    verify: float
    rest: float

    @property
    def total(self) -> float:
        return self.draft + self.verify + self.rest


class StepTimer:
    """Marks: start, drafted, allocated, verified, sent, in this order. behind: the step that was launched before it."""

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
        """So long the host has been at work for others since the last mark."""
        self._host += seconds

    def arrived(self) -> None:
        """What was sent is here."""
        if self._on_cuda:
            self._host = time.perf_counter()

    def read(self, followed: bool = False) -> StepTimes:
        """After the last mark and `arrived`: the step ends now; where another one followed, it ended when sent."""
        start, drafted, allocated, verified, sent = self._marks
        draft, verify = self._between(start, drafted), self._between(allocated, verified)
        total = self._between(self._begin, sent)
        if not followed:
            total += time.perf_counter() - self._host
        return StepTimes(draft, verify, total - draft - verify)

    def _between(self, a: float | torch.cuda.Event, b: float | torch.cuda.Event) -> float:
        if not self._on_cuda:
            return b - a
        b.synchronize()
        return a.elapsed_time(b) / 1000
