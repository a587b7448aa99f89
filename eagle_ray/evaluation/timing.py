"""Time engines by turns: on equal requests, on a queue that is always full, or on a job to its end.

    timing = Timing({"eagle2": drafting, "plain": plain})
    timing.warm_up(lambda name: [question()])
    turn = timing.round(lambda name: [question()], "code")
    turn.samples["eagle2"].tokens_per_second / turn.samples["plain"].tokens_per_second

All engines of a Timing share a process and a machine, and each answers from an empty prefix cache.
The order changes from round to round, so that another program's load slows all of them.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import astuple, dataclass, replace
from itertools import islice

from torch import nn

from eagle_ray.core.sequence import Sequence
from eagle_ray.engine.engine import Engine
from eagle_ray.planner.planner import Planner

AHEAD = 2  # requests that wait while the slots are full
# Returns the requests of a round as new sequences, for the engine of this name.
Ask = Callable[[str], list[Sequence]]


class ForwardTimer:
    """Measures the host's seconds inside the forward passes of some modules, which must not be nested.

    Our own forward calls the linear layers of a model and not the modules around them. On a GPU
    passes are only enqueued in that time: the number says nothing there.

        meter = ForwardTimer(*linear_layers(model), *linear_layers(head))
    """

    def __init__(self, *modules: nn.Module):
        self.seconds = 0.0
        self._started = 0.0
        for module in modules:
            module.register_forward_pre_hook(self._enter)
            module.register_forward_hook(self._leave)

    def _enter(self, *_: object) -> None:
        self._started = time.perf_counter()

    def _leave(self, *_: object) -> None:
        self.seconds += time.perf_counter() - self._started


@dataclass(frozen=True, slots=True)
class Sample:
    """Measurements of an engine over a period.

    Everything is counted here, because a sequence's own statistics may include a step only while
    the next one runs, which may be another method's.

    Attributes:
        seconds: seconds of all steps.
        forward_s: seconds inside forward passes; 0 without a meter.
        prefill_s: seconds spent on prompts.
        num_tokens: committed tokens.
        num_decoded: tokens of decode steps, without those right after prompts.
        num_steps: steps of the engine.
        num_plain_steps: steps that drafted nothing.
        num_passes: target passes, summed over sequences.
        predicted_s: seconds of these steps by the planner's costs; 0 without costs.
        predicted_plain_s: seconds of as many plain steps, likewise.
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
        """Return tokens and seconds of the decode steps alone, without prompts and their first tokens."""
        return self.num_decoded, self.seconds - self.prefill_s

    @property
    def decoded_per_second(self) -> float:
        tokens, seconds = self.decoded
        return tokens / seconds

    @property
    def tau(self) -> float:
        """Return tokens per sequence and step, without tokens past its end."""
        return self.num_decoded / max(self.num_passes, 1)

    @property
    def predicted_ratio(self) -> float | None:
        """Return the speed over plain decoding by tau and the costs alone, without prompts; None without costs."""
        if self.predicted_s == 0:
            return None
        return self.tau * self.predicted_plain_s / self.predicted_s

    def __add__(self, other: Sample) -> Sample:
        return Sample(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))

    def __sub__(self, other: Sample) -> Sample:
        return Sample(*(a - b for a, b in zip(astuple(self), astuple(other), strict=True)))


class SteadyQueue:
    """Keeps all slots of an engine in use: a finished sequence is replaced at once, and its prompt is part of the time.

    Prompts get separate passes until `end`, so that their time can be separated.

    One queue goes on from window to window. Queues over the same requests stay side by side as long
    as their windows are of the same number of tokens.

    Args:
        in_flight: number of sequences at once, if it is less than the engine's slots.
    """

    def __init__(
        self,
        engine: Engine,
        requests: Iterator[Sequence],
        meter: ForwardTimer | None = None,
        in_flight: int | None = None,
    ):
        self._engine = engine
        self._requests = requests
        self._meter = meter
        self._size = in_flight or engine.counters.num_slots
        self._max_unfinished = in_flight or engine.counters.num_slots + AHEAD
        self._added: list[Sequence] = []
        self._unfinished = 0
        self._mixed = engine.mixed_prefill
        engine.mixed_prefill = False

    @property
    def sequences(self) -> list[Sequence]:
        """Return all sequences so far in order. The last ones are unfinished."""
        return list(self._added)

    def fill(self) -> None:
        """Run steps until every slot has had a sequence."""
        while sum(bool(s.output_ids) for s in self._added) < self._size:
            self._step()

    def window(self, num_tokens: int, max_seconds: float, first: Planner | None = None) -> Sample:
        """Run steps until num_tokens more are committed or max_seconds are over, at least one step.

        Args:
            first: planner for one step before the window, whose tokens are among num_tokens but not
                in the sample.
        """
        wanted = self._num_tokens + num_tokens
        if first is not None:
            self._step_as(first)
        before = self._totals()
        while True:
            self._step()
            if self._num_tokens >= wanted or time.perf_counter() >= before.seconds + max_seconds:
                return self._totals() - before

    def end(self) -> None:
        """Abort unfinished sequences, so that the engine is idle."""
        for sequence in self._added:
            self._engine.abort(sequence)
        self._engine.mixed_prefill = self._mixed

    def _step(self) -> None:
        while self._unfinished < self._max_unfinished:
            request = next(self._requests)
            self._added.append(request)
            self._engine.add(request)
            self._unfinished += 1
        self._unfinished -= len(self._engine.step())

    def _step_as(self, planner: Planner) -> None:
        """Run a step that another planner plans."""
        own = self._engine.planner
        self._engine.planner = planner
        self._step()
        self._engine.planner = own

    @property
    def _num_tokens(self) -> int:
        return sum(len(s.output_ids) for s in self._added)

    def _totals(self) -> Sample:
        return _totals(self._engine, self._added, self._meter)


def run_requests(
    engine: Engine,
    requests: list[Sequence],
    meter: ForwardTimer | None = None,
    in_flight: int | None = None,
) -> Sample:
    """Run all requests and return the sample from the first prompt to the last end.

    Args:
        in_flight: requests at a time; None is all.
    """
    before = _totals(engine, [], meter)
    max_running = in_flight or len(requests)
    waiting = iter(requests)
    running = 0
    while True:
        for sequence in islice(waiting, max_running - running):
            engine.add(sequence)
            running += 1
        if running == 0:
            return _totals(engine, requests, meter) - before
        running -= len(engine.step())


@dataclass(frozen=True, slots=True)
class Round:
    """The results of each engine for the same requests.

    Attributes:
        group: group of the requests, such as a task.
    """

    group: str
    samples: Mapping[str, Sample]
    answers: Mapping[str, list[Sequence]]

    def speed_up(self, name: str, plain: str) -> float:
        """Return an engine's speed divided by the plain engine's, prompts included."""
        return self.samples[name].tokens_per_second / self.samples[plain].tokens_per_second


class Timing:
    """Engines that answer in turns.

    Args:
        engines: idle engines by name.
        seed: seed of the random order in each round; None reverses the order from round to round.
    """

    def __init__(self, engines: Mapping[str, Engine], seed: int | None = None):
        self._engines = engines
        self._order = list(engines)
        self._shuffle = None if seed is None else random.Random(seed)

    def warm_up(self, ask: Ask) -> None:
        """Run some requests on each engine, so that one-time work is not measured."""
        for name in self._engines:
            self._run(name, ask(name))

    def round(self, ask: Ask, group: str = "") -> Round:
        """Run equal requests on each engine, one engine after the other."""
        samples = {}
        answers = {}
        for name in self._next_order():
            answers[name] = ask(name)
            samples[name] = self._run(name, answers[name])
        return Round(group, samples, answers)

    def _next_order(self) -> list[str]:
        if self._shuffle is not None:
            return self._shuffle.sample(self._order, len(self._order))
        order = list(self._order)
        self._order.reverse()
        return order

    def _run(self, name: str, sequences: list[Sequence]) -> Sample:
        engine = self._engines[name]
        engine.target.cache.blocks.reset_prefix_cache()
        return run_requests(engine, sequences)


def limited(sequence: Sequence, max_tokens: int) -> Sequence:
    """Return a new sequence with a lower limit of tokens, for a warm-up."""
    sequence.sampling = replace(sequence.sampling, max_tokens=max_tokens)
    return sequence


def total(rounds: Iterable[Round], name: str) -> Sample:
    """Return the sum of an engine's samples over one or more rounds."""
    first, *others = (each.samples[name] for each in rounds)
    return sum(others, first)


def _totals(engine: Engine, sequences: list[Sequence], meter: ForwardTimer | None) -> Sample:
    """Return running totals of an engine. Only differences between two of them are meaningful."""
    seconds = time.perf_counter()
    lengths = [len(s.output_ids) for s in sequences]
    num_started = sum(length > 0 for length in lengths)
    counters = engine.counters
    return Sample(
        seconds=seconds,
        forward_s=0.0 if meter is None else meter.seconds,
        prefill_s=counters.prefill_s,
        num_tokens=sum(lengths),
        num_decoded=sum(lengths) - num_started,
        num_steps=counters.num_steps,
        num_plain_steps=counters.num_plain_steps,
        num_probes=counters.num_probes,
        num_verify_rows=counters.num_verify_rows,
        num_passes=counters.num_slot_steps,
        predicted_s=getattr(engine.planner, "predicted_s", 0.0),
        predicted_plain_s=getattr(engine.planner, "predicted_plain_s", 0.0),
    )
