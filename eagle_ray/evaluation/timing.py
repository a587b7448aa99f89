"""Timed work of an engine: a window of a queue that is always full, or a job to its end.

queue = SteadyQueue(engine, requests, meter)
sample = queue.window(num_tokens=500, most_seconds=20)
sample.tokens_per_second, sample.tau
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import astuple, dataclass
from itertools import islice

from eagle_ray.core.sequence import Sequence
from eagle_ray.engine.engine import Engine
from eagle_ray.evaluation.forward_timer import ForwardTimer
from eagle_ray.planner.planner import Planner

AHEAD = 2  # requests that wait while the slots are full


@dataclass(frozen=True, slots=True)
class Sample:
    """What an engine did in `seconds`: forward_s of them inside forward passes, prefill_s on prompts.

    num_tokens: committed; num_decoded of them by decode steps and not right after prompts. num_steps: of the engine;
    num_plain_steps of them drafted nothing. num_passes: target passes, summed over sequences. All this is counted here:
    sequences' own statistics hear of a step while the next one runs, which may be another way's.
    predicted_s, predicted_plain_s: of these steps and of as many plain ones, by the planner's costs; 0 without costs.
    """

    seconds: float
    forward_s: float
    prefill_s: float
    num_tokens: int
    num_decoded: int
    num_steps: int
    num_plain_steps: int
    num_probes: int
    num_verify_rows: int
    num_passes: int
    predicted_s: float
    predicted_plain_s: float

    @property
    def tokens_per_second(self) -> float:
        return self.num_tokens / self.seconds

    @property
    def decoded(self) -> tuple[int, float]:
        """Tokens and seconds of the decode steps alone: prompts, and their first tokens, left out."""
        return self.num_decoded, self.seconds - self.prefill_s

    @property
    def decoded_per_second(self) -> float:
        tokens, seconds = self.decoded
        return tokens / seconds

    @property
    def tau(self) -> float:
        """Tokens of a sequence in a step, those past its end left out."""
        return self.num_decoded / max(self.num_passes, 1)

    @property
    def predicted_ratio(self) -> float | None:
        """Speed over plain decoding by tau and the costs alone, prompts left out; None without costs."""
        return self.tau * self.predicted_plain_s / self.predicted_s if self.predicted_s else None

    def __add__(self, other: Sample) -> Sample:
        return Sample(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))

    def __sub__(self, other: Sample) -> Sample:
        return Sample(*(a - b for a, b in zip(astuple(self), astuple(other), strict=True)))


class SteadyQueue:
    """An engine whose slots are always taken: what finishes is replaced at once, and its prompt is part of the time.

    Until its end prompts have passes of their own, so that what they take can be told from the rest.

    One queue goes on from window to window. Queues over the same requests stay side by side as long as their windows
    are of the same number of tokens. in_flight: sequences at once, where the engine has more slots than that.
    """

    def __init__(self, engine: Engine, requests: Iterator[Sequence], meter: ForwardTimer, in_flight: int | None = None):
        self._engine, self._requests, self._meter = engine, requests, meter
        self._size = in_flight or engine.counters.num_slots
        self._most = in_flight or engine.counters.num_slots + AHEAD
        self._added: list[Sequence] = []
        self._unfinished = 0
        self._mixed, engine.mixed_prefill = engine.mixed_prefill, False

    @property
    def sequences(self) -> list[Sequence]:
        """Return every request so far, in order; the last ones are unfinished."""
        return list(self._added)

    def fill(self) -> None:
        """Until every slot has had a sequence."""
        while sum(bool(s.output_ids) for s in self._added) < self._size:
            self._step()

    def window(self, num_tokens: int, most_seconds: float, first: Planner | None = None) -> Sample:
        """Until num_tokens more are committed, or most_seconds are over; at least a step.

        first: plans a step before it, whose tokens are among num_tokens but not in the sample.
        """
        wanted = self._num_tokens + num_tokens
        if first is not None:
            self._step_as(first)
        before = self._totals()
        while True:
            self._step()
            if self._num_tokens >= wanted or time.perf_counter() >= before.seconds + most_seconds:
                return self._totals() - before

    def end(self) -> None:
        """Drop what is not finished; the engine is idle."""
        for sequence in self._added:
            self._engine.abort(sequence)
        self._engine.mixed_prefill = self._mixed

    def _step(self) -> None:
        while self._unfinished < self._most:
            self._added.append(next(self._requests))
            self._engine.add(self._added[-1])
            self._unfinished += 1
        self._unfinished -= len(self._engine.step())

    def _step_as(self, planner: Planner) -> None:
        self._engine.planner, own = planner, self._engine.planner
        self._step()
        self._engine.planner = own

    @property
    def _num_tokens(self) -> int:
        return sum(len(s.output_ids) for s in self._added)

    def _totals(self) -> Sample:
        return _totals(self._engine, self._added, self._meter)


def run_to_completion(
    engine: Engine, requests: list[Sequence], meter: ForwardTimer, in_flight: int | None = None
) -> Sample:
    """Run all requests and return the sample from the first prompt to the last end. in_flight: requests at a time."""
    before = _totals(engine, [], meter)
    waiting, running = iter(requests), 0
    while True:
        for sequence in islice(waiting, (in_flight or len(requests)) - running):
            engine.add(sequence)
            running += 1
        if not running:
            break
        running -= len(engine.step())
    return _totals(engine, requests, meter) - before


def _totals(engine: Engine, sequences: list[Sequence], meter: ForwardTimer) -> Sample:
    """Sums since the engine was made, of these sequences; only differences mean anything."""
    lengths = [len(s.output_ids) for s in sequences]
    return Sample(
        time.perf_counter(),
        meter.seconds,
        engine.counters.prefill_s,
        sum(lengths),
        sum(lengths) - sum(map(bool, lengths)),
        engine.counters.num_steps,
        engine.counters.num_plain_steps,
        engine.counters.num_probes,
        engine.counters.num_verify_rows,
        engine.counters.num_slot_steps,
        getattr(engine.planner, "predicted_s", 0.0),
        getattr(engine.planner, "predicted_plain_s", 0.0),
    )
