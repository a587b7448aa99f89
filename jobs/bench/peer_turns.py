"""Turns: every engine answers the same prompts in each round, in another order each time.

Round 0 warms up and is not counted. Each round takes other prompts.
"""

from __future__ import annotations

import os
import random
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import cycle, islice
from typing import Any

import psutil

from jobs.bench.peer_engines import REFERENCE, Engine
from jobs.bench.peer_process import WorkerError, WorkerProcess

Outputs = list[list[int]]
Row = dict[str, Any]
NUM_PROMPTS = {1: 4, 8: 16, 32: 48}


def num_prompts(batch: int) -> int:
    """Return how many prompts a turn has: enough for several batches where batches are small."""
    return NUM_PROMPTS.get(batch, max(4, batch * 3 // 2))


@dataclass(frozen=True, slots=True)
class Plan:
    """What a turn asks for.

    Attributes:
        prompts: token ids; the rounds go through them in order, and start again at the end.
        eos_ids: the ids that end an output.
        rounds: timed rounds per batch size.
        max_tokens: per output.
        timeout_s: for one turn.
    """

    prompts: list[list[int]]
    eos_ids: list[int]
    rounds: int
    max_tokens: int
    timeout_s: float

    def prompts_of(self, batch: int, number: int) -> list[list[int]]:
        """Return a round's prompts; the round that warms up has fewer."""
        count = num_prompts(batch) if number else max(2, batch)
        start = number * count % len(self.prompts)
        return list(islice(cycle(self.prompts), start, start + count))


@dataclass(slots=True)
class Turn:
    """One engine's answer in one timed round."""

    tokens_per_s: float
    num_same: int | None
    num_prompts: int
    load: float
    extras: dict[str, Any]


@dataclass(slots=True)
class Bench:
    """The engines of one dtype at work.

    Attributes:
        workers: by engine; an engine that fails is taken out.
        versions: by engine, of its packages.
        failures: by engine, why it has no further figures.
        report: called with a line that shows progress.
    """

    plan: Plan
    workers: dict[Engine, WorkerProcess]
    versions: dict[Engine, dict[str, str]]
    failures: dict[Engine, str]
    report: Callable[[str], None]
    turns: dict[tuple[Engine, int], list[Turn]] = field(default_factory=lambda: defaultdict(list))

    @property
    def reference(self) -> Engine | None:
        """Return the engine whose outputs the others' are compared with: the first in REFERENCE that runs."""
        return next(
            (engine for engine in self.workers if (engine.name, engine.mode) == REFERENCE), None
        )

    def take_round(self, batch: int, number: int) -> None:
        """Ask every engine once at one batch size; round 0 is not counted."""
        order = list(self.workers)
        random.Random(number).shuffle(order)
        prompts = self.plan.prompts_of(batch, number)
        answers = {}
        loads = {}
        for engine in order:
            loads[engine] = os.getloadavg()[0]
            answer = self.ask(engine, batch, prompts)
            if answer is not None:
                answers[engine] = answer
        if number > 0:
            self._record(batch, answers, loads)

    def ask(self, engine: Engine, batch: int, prompts: Outputs) -> dict[str, Any] | None:
        """Return one engine's answer; None, and the engine is taken out, if it fails."""
        question = {"batch": batch, "prompts": prompts, "max_tokens": self.plan.max_tokens}
        busy = busy_seconds()
        started = time.perf_counter()
        try:
            answer = self.workers[engine].ask(question, self.plan.timeout_s)
        except WorkerError as error:
            self.failures[engine] = str(error)
            self.workers.pop(engine).kill()
            self.report(f"{engine.label}, {engine.dtype}: {error}")
            return None
        elsewhere = busy_seconds() - busy - answer["all_cpu_seconds"]
        answer["cores_elsewhere"] = max(0.0, elsewhere / (time.perf_counter() - started))
        answer["outputs"] = [self._without_eos(ids) for ids in answer["outputs"]]
        answer["num_tokens"] = self._num_tokens(answer["outputs"])
        answer["tokens_per_s"] = answer["num_tokens"] / answer["seconds"]
        self.report(
            f"batch {batch}: {engine.label}, {engine.dtype} {answer['tokens_per_s']:.1f} tokens/s"
        )
        return answer

    def _record(
        self, batch: int, answers: Mapping[Engine, Row], loads: Mapping[Engine, float]
    ) -> None:
        for engine, answer in answers.items():
            reference = answers.get(self.reference)
            outputs = answer["outputs"]
            same = None if reference is None else _num_same(outputs, reference["outputs"])
            extras = answer["extras"] | {
                "cores_used": answer["cpu_seconds"] / answer["seconds"],
                "cores_elsewhere": answer["cores_elsewhere"],
            }
            turn = Turn(answer["tokens_per_s"], same, len(outputs), loads[engine], extras)
            self.turns[engine, batch].append(turn)

    def _without_eos(self, ids: list[int]) -> list[int]:
        """Return an output up to its EOS: some engines return it, some do not, some pad behind it."""
        end = next(
            (place for place, token in enumerate(ids) if token in self.plan.eos_ids), len(ids)
        )
        return ids[:end]

    def _num_tokens(self, outputs: Outputs) -> int:
        """Count tokens, with the EOS of each output that is shorter than max_tokens."""
        return sum(len(ids) + (len(ids) < self.plan.max_tokens) for ids in outputs)


def busy_seconds() -> float:
    """Return how long the machine's cores have computed since it started, all together."""
    spent = psutil.cpu_times()
    return spent.user + spent.nice + spent.system + spent.irq + spent.softirq + spent.steal


def _num_same(outputs: Outputs, reference: Outputs) -> int:
    return sum(ids == expected for ids, expected in zip(outputs, reference, strict=True))


def row_of(bench: Bench, engine: Engine, batch: int, threads: int) -> Row:
    """Return an engine's line of the JSON file at one batch size."""
    row = {"engine": engine.name, "mode": engine.mode, "dtype": engine.dtype, "batch": batch}
    turns = bench.turns.get((engine, batch), [])
    if not turns:
        return row | {
            "tokens_per_s": None,
            "same": None,
            "reason": bench.failures.get(engine, "not measured"),
        }
    rates = [turn.tokens_per_s for turn in turns]
    known = [turn.num_same for turn in turns if turn.num_same is not None]
    row |= {
        "tokens_per_s": statistics.median(rates),
        "same": sum(known) if known else None,
        "of": sum(turn.num_prompts for turn in turns if turn.num_same is not None),
        "rates": rates,
        "rounds": len(turns),
        "threads": threads,
        "load": statistics.median(turn.load for turn in turns),
        "versions": bench.versions[engine],
    }
    for key in sorted({key for turn in turns for key in turn.extras}):
        values = [turn.extras[key] for turn in turns if turn.extras.get(key) is not None]
        row[key] = statistics.median(values) if values else None
    return row | ({"reason": bench.failures[engine]} if engine in bench.failures else {})
