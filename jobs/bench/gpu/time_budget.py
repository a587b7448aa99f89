"""Agenda: what a run does within its time, section by section, whatever fails on the way.

    agenda = Agenda(results, device, minutes=9, keep=write)
    with agenda.section("8b: ours", share=0.25):                 # of all the time, at most
        agenda.do("8b: batch 1, context 1024", 6, measure)      # about 6 seconds

What would not end within its section's time is skipped, with a line that says so; what fails, memory that runs out
included, is a line among the results, and the run goes on unless the device itself is lost. Everything known is kept
after each. A function at work is not interrupted.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from jobs.bench.gpu.device import release
from jobs.bench.gpu.settings import Results

LOST = ("CUDA error", "device-side assert", "illegal memory access")
MOST_SAID = 800  # characters of an error


class DeviceLost(Exception):
    """Nothing more can run on it in this process."""


class Agenda:
    """keep(results) is called after everything that is done. only: words of titles; empty is everything."""

    def __init__(
        self,
        results: Results,
        device: torch.device,
        minutes: float,
        keep: Callable[[Results], None],
        only: tuple[str, ...] = (),
    ):
        self.results, self._device, self._keep, self._only = results, device, keep, only
        self._started, self._seconds = time.monotonic(), 60 * minutes
        self._section, self._until = "the run", self._started + self._seconds

    @property
    def left_s(self) -> float:
        """Of the section, or of everything where that is less."""
        return max(self._until - time.monotonic(), 0.0)

    @property
    def minutes(self) -> float:
        """Since it began."""
        return (time.monotonic() - self._started) / 60

    @contextmanager
    def section(self, title: str, share: float) -> Iterator[None]:
        """share: of all the time, that this section may take; what it leaves over is the others'."""
        whole = self._section, self._until
        self._section, self._until = title, min(self._until, time.monotonic() + share * self._seconds)
        try:
            yield
        finally:
            self._section, self._until = whole

    def do(self, title: str, guess_s: float, function: Callable[[], Any]) -> Any:
        """Run it, if it was asked for and there is time; what it returns, True where that is nothing, else None."""
        if self._only and not any(word in title for word in self._only):
            return None
        if self.left_s < guess_s:
            self.skip(title, f"about {guess_s:.0f} s, {self.left_s:.0f} s left of {self._section}")
            return None
        self.say(f"== {title}")
        started = time.monotonic()
        found, error = self._tried(title, function)
        self._keep(self.results)
        if error is not None:
            release(self._device)  # only now: the error held on to what the function had made
            if any(word in error for word in LOST):
                raise DeviceLost(error)
            return None
        self.say(f"   {time.monotonic() - started:.1f} s")
        return True if found is None else found

    def _tried(self, title: str, function: Callable[[], Any]) -> tuple[Any, str | None]:
        """What it returns, and in words what it raised."""
        try:
            return function(), None
        except Exception as error:
            said = f"{title}: {type(error).__name__}: {error}"[:MOST_SAID]
        self.results.failed.append(said)
        self.say(f"!! FAILED {said}")
        return None, said

    def skip(self, title: str, why: str) -> None:
        self.results.skipped.append(title)
        self.say(f"-- skipped: {title} ({why})")

    def say(self, line: str) -> None:
        print(f"[{time.monotonic() - self._started:6.1f}] {line}", flush=True)

    def keep(self) -> None:
        self._keep(self.results)
