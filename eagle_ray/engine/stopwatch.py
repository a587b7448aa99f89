"""Stopwatch: how long the parts of one step took, on the device that did them.

On a CPU the host's clock is the device's. On a GPU events are recorded up to the step's own copy to the host, and read
once that has arrived, so that nothing is waited for; from then on the host's clock goes on. What is launched behind the
copy, to learn from it, runs on meanwhile. Does not know what the parts are for.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Seconds:
    """draft: catching up and growing the trees. verify: the target's pass. rest: all else of the step."""

    draft: float
    verify: float
    rest: float

    @property
    def total(self) -> float:
        return self.draft + self.verify + self.rest


class Stopwatch:
    """Marks: start, drafted, allocated, verified, sent, in this order."""

    def __init__(self, device: torch.device | str):
        self._on_cuda = torch.device(device).type == "cuda"
        self._marks: list[float | torch.cuda.Event] = []
        self.mark()

    def mark(self) -> None:
        self._host = time.perf_counter()
        if not self._on_cuda:
            self._marks.append(self._host)
            return
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self._marks.append(event)

    def arrived(self) -> None:
        """What was sent is here."""
        if self._on_cuda:
            self._host = time.perf_counter()

    def read(self) -> Seconds:
        """After the last mark and `arrived`: the step ends now."""
        start, drafted, allocated, verified, sent = self._marks
        draft, verify = self._between(start, drafted), self._between(allocated, verified)
        total = self._between(start, sent) + time.perf_counter() - self._host
        return Seconds(draft, verify, total - draft - verify)

    def _between(self, a: float | torch.cuda.Event, b: float | torch.cuda.Event) -> float:
        if not self._on_cuda:
            return b - a
        b.synchronize()
        return a.elapsed_time(b) / 1000
