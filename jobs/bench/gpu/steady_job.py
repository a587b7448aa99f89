"""SteadyJob: an engine that is fed as a job feeds it, timed in windows with its prompts.

    job = SteadyJob(engine, requests(prompts, max_tokens=200))
    job.run(5.0)                                   # not counted
    job.window(10.0)                               # {"tokens_per_second": 41230.0, "share_ahead": 0.93, ...}
    job.end()

Rows wait for slots at every moment, in the order of a job's queue. So a window has prompts and
answers in the proportion of the whole job, and its tokens per second are a job's, without reading
and writing of files.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from cProfile import Profile
from dataclasses import dataclass, field
from functools import reduce
from itertools import count as numbers
from pathlib import Path
from pstats import Stats
from random import Random
from typing import Any

from eagle_ray.core.counters import AcceptanceStats
from eagle_ray.core.sequence import Sequence
from eagle_ray.engine.engine import Engine
from eagle_ray.requests.parameters import SamplingParams
from jobs.bench.gpu.device import peak_gib, synchronize
from jobs.bench.gpu.kernel_counts import KernelCounts, count_kernels

WAITING_PER_SLOT = (
    2  # rows that wait at every moment; a job keeps 32, and none of them costs time until admitted
)
PROFILED_STEPS = 8
COUNTED = (
    "num_steps",
    "num_slot_steps",
    "num_ahead",
    "num_verify_rows",
    "num_prefill_tokens",
    "num_plain_steps",
)  # of EngineCounters
Totals = dict[str, float]


@dataclass(slots=True)
class SteadyJob:
    """in_flight: sequences at once; None is as many as the engine has slots, with others waiting behind them."""

    engine: Engine
    requests: Iterator[Sequence]
    in_flight: int | None = None
    _unfinished: int = 0
    _num_prompt_passes: int = 0
    _added: list[Sequence] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.in_flight is None:
            self.engine.order_for_throughput()

    def run(self, seconds: float) -> None:
        """Take steps for so long; at least one."""
        ends_at = time.perf_counter() + seconds
        while True:
            self._step()
            if time.perf_counter() >= ends_at:
                return

    def window(self, seconds: float) -> dict[str, Any]:
        """Run for so long and return what the engine did, by name."""
        synchronize(self.engine.target.device)
        before = self._totals()
        self.run(seconds)
        synchronize(self.engine.target.device)
        return _figures(
            self.engine, {name: after - before[name] for name, after in self._totals().items()}
        )

    def host_profile(self, num_steps: int, count: int) -> list[tuple[str, float, float]]:
        """Return the functions with most of the host's own time: place, calls and milliseconds, each a step's."""
        profile = Profile()
        profile.runcall(self._steps, num_steps)
        found = []
        for (file, line, name), (_, calls, own_s, _, _) in Stats(profile).stats.items():  # type: ignore[attr-defined]
            found.append((f"{Path(file).name}:{line} {name}", calls, own_s))
        found.sort(key=lambda row: -row[2])
        return [
            (place, round(calls / num_steps, 1), round(1e3 * s / num_steps, 3))
            for place, calls, s in found[:count]
        ]

    def busy_share(self) -> dict[str, float]:
        """Return the share of the time in which the device computes, by a profile of a few steps that is not timed."""
        device = self.engine.target.device
        started = time.perf_counter()
        self._steps(PROFILED_STEPS)
        synchronize(device)
        seconds = (time.perf_counter() - started) / PROFILED_STEPS
        counts = self.kernels()
        busy = counts.seconds / PROFILED_STEPS
        return {
            "profiled_step_ms": 1e3 * seconds,
            "kernels_ms": 1e3 * busy,
            "device_busy": busy / seconds,
        }

    def kernels(self) -> KernelCounts:
        """Return the kernels of a few steps."""
        return count_kernels(lambda: self._steps(PROFILED_STEPS), self.engine.target.device)

    @property
    def acceptance(self) -> dict[str, list[int]]:
        """Return nodes that were verified, and steps in which a path was accepted so far, by depth."""
        stats = reduce(
            AcceptanceStats.merge, (s.stats for s in self._added), AcceptanceStats.empty(0)
        )
        return {
            "verified_by_depth": stats.proposed_by_depth,
            "accepted_by_depth": stats.accepted_by_depth,
        }

    def end(self) -> None:
        """Drop what is not finished; the engine is idle."""
        for sequence in self._added:
            if sequence.finish_reason is None:
                self.engine.abort(sequence)
        while self.engine.has_work:
            self.engine.step()

    def _steps(self, number: int) -> None:
        for _ in range(number):
            self._step()

    def _step(self) -> None:
        most = self.in_flight or (1 + WAITING_PER_SLOT) * self.engine.counters.num_slots
        while self._unfinished < most:
            self._added.append(next(self.requests))
            self.engine.add(self._added[-1])
            self._unfinished += 1
        before = self.engine.counters.num_prefill_tokens
        self._unfinished -= len(self.engine.step())
        self._num_prompt_passes += self.engine.counters.num_prefill_tokens > before

    def _totals(self) -> Totals:
        counters = self.engine.counters
        counted = {name: float(getattr(counters, name)) for name in COUNTED}
        tokens = float(
            sum(len(sequence.output_ids) for sequence in self._added)
        )  # the engine counts finished ones
        passes = float(self._num_prompt_passes)
        return counted | {
            "seconds": time.perf_counter(),
            "prompt_passes": passes,
            "output_tokens": tokens,
        }


def _figures(engine: Engine, done: Totals) -> dict[str, Any]:
    steps, seconds = max(done["num_steps"], 1.0), done["seconds"]
    return {
        "tokens_per_second": done["output_tokens"] / seconds,
        "prompt_tokens_per_second": done["num_prefill_tokens"] / seconds,
        "step_ms": 1e3 * seconds / steps,
        "tau": done["output_tokens"] / max(done["num_slot_steps"], 1.0),
        "rows_per_step": done["num_verify_rows"] / steps,
        "share_plain": done["num_plain_steps"] / steps,
        "share_ahead": done["num_ahead"] / steps,
        "prompt_passes_per_step": done["prompt_passes"] / steps,
        "slots_busy": done["num_slot_steps"] / steps / engine.counters.num_slots,
        "num_steps": int(done["num_steps"]),
        "seconds": seconds,
        "peak_gib": peak_gib(engine.target.device),
    }


def requests(
    prompts: list[list[int]], max_tokens: int, ignore_eos: bool = False
) -> Iterator[Sequence]:
    """Yield sequences of these prompts, over and over; a prompt that comes again differs in its seed alone."""
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=ignore_eos)
    for number in numbers():
        yield Sequence(str(number), list(prompts[number % len(prompts)]), params)


def aged_requests(
    vocab_size: int, prompt: int, output: int, num_first: int, seed: int = 0
) -> Iterator[Sequence]:
    """Yield random prompts of fixed lengths. The first ones have part of their output behind them, as in mid-job."""
    draw = Random(seed)
    for number in numbers():
        age = draw.randrange(output) if number < num_first else 0
        ids = [draw.randrange(vocab_size) for _ in range(prompt + age)]
        yield Sequence(str(number), ids, SamplingParams(max_tokens=output - age, ignore_eos=True))


def cut_prompts(prompts: list[list[int]], length: int) -> list[list[int]]:
    """Return prompts of exactly this many tokens, each the given one and, where it is too short, those after it."""
    stream = [ids + prompts[(i + 1) % len(prompts)] for i, ids in enumerate(prompts)]
    return [(ids * (1 + length // len(ids)))[:length] for ids in stream]
