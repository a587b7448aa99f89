"""A stretch of an engine's work, with a clock beside it: a window of a queue that is always full, or a job to its end.

    sample = steady(engine, requests, num_tokens=500, most_seconds=20, meter=meter)
    sample.tokens_per_second, sample.tau

Leaves the engine idle. Does not know models, or how samples compare.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

from eagle_ray.benchmark.forward_meter import ForwardMeter
from eagle_ray.engine.engine import Engine
from eagle_ray.engine.sequence import Sequence

AHEAD = 2  # requests that wait while the slots are full


@dataclass(frozen=True, slots=True)
class Sample:
    """num_tokens: committed in `seconds`, first tokens after prompts included. forward_s: inside forward passes.

    tau: tokens of a sequence per target pass. outputs: of every request so far, in order.
    """

    seconds: float
    num_tokens: int
    forward_s: float
    num_steps: int
    num_plain_steps: int
    num_verify_rows: int
    tau: float
    outputs: list[list[int]]

    @property
    def tokens_per_second(self) -> float:
        return self.num_tokens / self.seconds


def steady(
    engine: Engine, requests: Iterator[Sequence], num_tokens: int, most_seconds: float, meter: ForwardMeter
) -> Sample:
    """From when every slot is taken until num_tokens more are committed, or most_seconds are over.

    What finishes is replaced at once; the replacements' prompts are part of the time.
    """
    added: list[Sequence] = []
    unfinished = 0
    clock = _Clock(engine, meter, added)
    while True:
        while unfinished < engine.counters.num_slots + AHEAD:
            added.append(next(requests))
            engine.add(added[-1])
            unfinished += 1
        unfinished -= len(engine.step())
        if not clock.running:
            clock.start(ready=sum(bool(s.output_ids) for s in added) >= engine.counters.num_slots)
        elif clock.num_tokens >= num_tokens or clock.seconds >= most_seconds:
            break
    sample = clock.read()
    for sequence in added:
        engine.abort(sequence)
    return sample


def drained(engine: Engine, requests: list[Sequence], meter: ForwardMeter) -> Sample:
    """All of them, to the last one's end."""
    clock = _Clock(engine, meter, requests)
    clock.start(ready=True)
    for sequence in requests:
        engine.add(sequence)
    while engine.has_work:
        engine.step()
    return clock.read()


class _Clock:
    """Counts from `start` to `read`. sequences: those whose tokens count; the list may grow."""

    def __init__(self, engine: Engine, meter: ForwardMeter, sequences: list[Sequence]):
        self._engine, self._meter, self._sequences = engine, meter, sequences
        self.running = False

    def start(self, ready: bool) -> None:
        self.running = ready
        self._counters = replace(self._engine.counters)
        self._tokens, self._forward_s = self._committed(), self._meter.seconds
        self._started = time.perf_counter()

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self._started

    @property
    def num_tokens(self) -> int:
        return self._committed() - self._tokens

    def read(self) -> Sample:
        seconds, now, before = self.seconds, self._engine.counters, self._counters
        stats = [s.stats for s in self._sequences if s.stats is not None]
        num_passes = sum(s.num_steps for s in stats)
        return Sample(
            seconds,
            self.num_tokens,
            self._meter.seconds - self._forward_s,
            now.num_steps - before.num_steps,
            now.num_plain_steps - before.num_plain_steps,
            now.num_verify_rows - before.num_verify_rows,
            1 + sum(s.num_accepted_draft_tokens for s in stats) / max(num_passes, 1),
            [list(s.output_ids) for s in self._sequences],
        )

    def _committed(self) -> int:
        return sum(len(s.output_ids) for s in self._sequences)
