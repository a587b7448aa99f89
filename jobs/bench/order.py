"""What the order of rows gains: python -m jobs.bench.order simulate | measure

    simulate   the engine's own scheduler and block manager with known output lengths, one token a step, where a prompt
               token costs 1/128 of a step; several workloads and numbers of workers, means over seeds
    measure    500 rows of mixed lengths that share documents of 64 to 160 tokens, through the engine of the embedded
               pair in this process, in turns by each order: steps, CPU time, prompt tokens reused, slots busy in the
               last quarter of the steps; and whether all outputs are equal

A worker has batches in flight and gets the next one when all rows of a batch are done, with the job's own sizes. Order
`auto, small` has as few batches in flight as order input.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

import torch

from eagle_ray.assembly.assemble import build_engine_from_config
from eagle_ray.assembly.engine_sizes import EngineArgs
from eagle_ray.batch.driver.execute import plan_batch_size, plan_calls
from eagle_ray.config import ModelConfig, SpeculativeConfig
from eagle_ray.core.sequence import Sequence, SequenceStatus
from eagle_ray.engine.engine import Engine
from eagle_ray.engine.scheduler import Scheduler
from eagle_ray.kv.block_manager import BlockManager
from eagle_ray.requests.parameters import SamplingParams
from eagle_ray.text.tokenizer import Tokenizer
from jobs.bench.prompts import prompt_rows

SLOTS = 16
PROMPT_TOKEN_COST = 1 / 128  # of a step
PREFILL_TOKENS = 512  # most of a step
BATCH_DELAY = 1  # steps until a finished batch is replaced
LENGTHS = {"chat": (120, 0.6), "code": (300, 0.5), "math": (180, 0.4), "summary": (80, 0.4), "essay": (700, 0.4)}
MAX_TOKENS = 1024
ORDERS = ("input", "auto, small", "auto")


class Steps(Protocol):
    """The part of an engine that the feed drives."""

    @property
    def has_work(self) -> bool: ...
    def add(self, sequence: Sequence) -> None: ...
    def step(self) -> list[Sequence]: ...


class SimulatedEngine:
    """A scheduler whose sequences get one token a step, until the length that their seed names.

    Attributes:
        clock: the time so far, in steps.
        busy: slots that decoded, by step.
    """

    def __init__(self, order: str, kv_tokens: int | None):
        blocks = BlockManager(SLOTS, 2048, num_blocks=None)
        if kv_tokens is not None:
            blocks = BlockManager(SLOTS, 2048, num_blocks=kv_tokens // blocks.size)
        self._scheduler = Scheduler(blocks, PREFILL_TOKENS, tree_positions=1)
        if order != "input":
            self._scheduler.order_for_throughput()
        self.clock = 0.0
        self.num_computed = self.num_reused = 0
        self.busy: list[tuple[float, int]] = []

    @property
    def has_work(self) -> bool:
        return self._scheduler.has_work

    def add(self, sequence: Sequence) -> None:
        sequence.max_tokens = sequence.sampling.max_tokens
        self._scheduler.add(sequence)

    def step(self) -> list[Sequence]:
        self._scheduler.reserve_or_preempt()
        chunks = self._scheduler.chunks()
        computed = sum(chunk.num_tokens for chunk in chunks)
        self.num_computed += computed
        self.num_reused += sum(chunk.num_reused for chunk in chunks)
        batch = self._scheduler.batch()
        sequences = [] if batch is None else batch.sequences
        self.clock += 1 + PROMPT_TOKEN_COST * computed
        self.busy.append((self.clock, len(sequences)))
        for sequence in sequences:
            sequence.output_ids.append(0)
            if len(sequence.output_ids) >= sequence.sampling.seed:
                sequence.status = SequenceStatus.FINISHED
        return self._scheduler.retire()


class MeasuredEngine:
    """A real engine, and the slots that were busy before each of its steps."""

    def __init__(self, engine: Engine):
        self.engine = engine
        self.clock = 0.0
        self.busy: list[tuple[float, int]] = []

    @property
    def has_work(self) -> bool:
        return self.engine.has_work

    def add(self, sequence: Sequence) -> None:
        self.engine.add(sequence)

    def step(self) -> list[Sequence]:
        finished = self.engine.step()
        self.clock += 1
        self.busy.append((self.clock, self.engine.scheduler.num_running + len(finished)))
        return finished


class Feed:
    """Batches for one engine: `calls` of them in flight, each replaced when all of its rows are done."""

    def __init__(self, engine: Steps, batches: Iterator[list[Sequence]], calls: int):
        self._engine, self._batches = engine, batches
        self._batch_of: dict[Sequence, int] = {}
        self._left: dict[int, int] = {}
        self._numbers = itertools.count()
        self._due = [0.0] * calls  # when the next batches come

    def advance(self) -> bool:
        """Add the batches that are due and take a step. Return False if all is done."""
        waiting = self._due
        self._due = [due for due in waiting if due > self._engine.clock]
        for _ in range(len(waiting) - len(self._due)):
            self._add(next(self._batches, []))
        if not self._engine.has_work:
            if self._due:
                self._engine.clock = min(self._due)
            return bool(self._due)
        for sequence in self._engine.step():
            number = self._batch_of.pop(sequence)
            self._left[number] -= 1
            if not self._left[number]:
                self._due.append(self._engine.clock + BATCH_DELAY)
        return True

    def _add(self, batch: list[Sequence]) -> None:
        if not batch:
            return
        number = next(self._numbers)
        self._left[number] = len(batch)
        for sequence in batch:
            self._batch_of[sequence] = number
            self._engine.add(sequence)


def run(engines: list, sequences: list[Sequence], order: str) -> float:
    """Answer all sequences on engines that share the batches. Return the makespan, in steps."""
    batch_size = plan_batch_size(SLOTS, len(engines), len(sequences))
    calls = plan_calls("auto" if order == "auto" else "input", SLOTS, batch_size, len(engines), len(sequences))
    batches = iter([sequences[i : i + batch_size] for i in range(0, len(sequences), batch_size)])
    feeds = [Feed(engine, batches, calls) for engine in engines]
    alive = list(zip(engines, feeds, strict=True))
    while alive:
        engine, feed = min(alive, key=lambda pair: pair[0].clock)
        if not feed.advance():
            alive.remove((engine, feed))
    return max(engine.clock for engine in engines)


def last_quarter_busy(engine: SimulatedEngine | MeasuredEngine, makespan: float) -> float:
    """Return the mean share of busy slots over the last quarter of the makespan. An engine that has ended is idle."""
    start, area, before = 0.75 * makespan, 0.0, 0.0
    for clock, slots in engine.busy:
        area += slots * max(0.0, clock - max(before, start))
        before = clock
    return area / (0.25 * makespan * SLOTS)


@dataclass(frozen=True, slots=True)
class Workload:
    """Rows with lengths around their category's, each with one of the documents before its own words."""

    name: str
    num_rows: int
    num_documents: int
    kv_tokens: int | None

    def sequences(self, seed: int) -> list[Sequence]:
        source = random.Random(seed)
        documents = [_tokens(source, source.randrange(200, 800)) for _ in range(self.num_documents)] or [[]]
        return [self._sequence(source, i, source.choice(documents)) for i in range(self.num_rows)]

    def _sequence(self, source: random.Random, i: int, document: list[int]) -> Sequence:
        category = source.choice(list(LENGTHS))
        median, spread = LENGTHS[category]
        length = int(min(MAX_TOKENS, max(4, median * source.lognormvariate(0, spread))))
        params = SamplingParams(max_tokens=MAX_TOKENS, seed=length)
        return Sequence(str(i), document + _tokens(source, source.randrange(10, 60)), params, category=category)


def _tokens(source: random.Random, number: int) -> list[int]:
    return [source.randrange(6000) for _ in range(number)]


WORKLOADS = (
    Workload("500 rows, no documents", 500, 0, None),
    Workload("500 rows, 60 documents, 16k KV tokens", 500, 60, 16_384),
    Workload("500 rows, 60 documents, KV for all", 500, 60, None),
    Workload("2,000 rows, 250 documents, 16k KV tokens", 2000, 250, 16_384),
)


def simulate(args: argparse.Namespace) -> None:
    print("| workload | workers | order | makespan | gain | prompt tokens reused | last quarter busy |")
    print("|---" * 7 + "|")
    for workload, workers in itertools.product(WORKLOADS, args.workers):
        base = None
        for order in ORDERS:
            row = _simulated(workload, workers, order, args.seeds)
            base = base or row[0]
            gain = statistics.mean(b / m for b, m in zip(base, row[0], strict=True))
            cells = [f"{statistics.mean(row[0]):,.0f}", f"{gain:.3f}x", f"{row[1]:.1%}", f"{row[2]:.1%}"]
            print(f"| {workload.name} | {workers} | {order} | {' | '.join(cells)} |", flush=True)


def _simulated(workload: Workload, workers: int, order: str, seeds: int) -> tuple[list, float, float]:
    """Return the makespans, the share of prompt tokens reused and the last quarter's busy slots."""
    makespans, reused, busy = [], [], []
    for seed in range(seeds):
        engines = [SimulatedEngine(order, workload.kv_tokens) for _ in range(workers)]
        makespans.append(run(engines, workload.sequences(seed), order))
        num_reused, num_computed = sum(e.num_reused for e in engines), sum(e.num_computed for e in engines)
        reused.append(num_reused / (num_reused + num_computed))
        busy.append(statistics.mean(last_quarter_busy(engine, makespans[-1]) for engine in engines))
    return makespans, statistics.mean(reused), statistics.mean(busy)


def measure(args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    print("| order | steps | CPU | prompt tokens reused | last quarter busy |")
    print("|---" * 5 + "|")
    outputs: dict[str, list[int]] = {}
    for _, order in itertools.product(range(args.rounds), args.orders):
        settings = SpeculativeConfig(method=args.method)
        bundle = build_engine_from_config(ModelConfig(), settings, EngineArgs(SLOTS, kv_tokens=args.kv_tokens))
        if order != "input":
            bundle.engine.scheduler.order_for_throughput()
        sequences = list(measured_rows(bundle.tokenizer, args.rows))
        engine = MeasuredEngine(bundle.engine)
        started = time.process_time()
        makespan = run([engine], sequences, order)
        seconds = time.process_time() - started
        counters = bundle.engine.counters
        total = counters.num_reused_tokens + counters.num_prefill_tokens
        busy = last_quarter_busy(engine, makespan)
        reused = f"{counters.num_reused_tokens:,} of {total:,}"
        print(f"| {order} | {makespan:,.0f} | {seconds:.1f} s | {reused} | {busy:.1%} |", flush=True)
        for sequence in sequences:
            known = outputs.setdefault(sequence.request_id, sequence.output_ids)
            if known != sequence.output_ids:
                print(f"row {sequence.request_id} differs", flush=True)
    print(f"{len(outputs)} rows compared over all turns")


def measured_rows(tokenizer: Tokenizer, number: int) -> Iterator[Sequence]:
    """Yield rows in a random order: the bundled categories, a sixteenth of the rows long, after one of 60 documents."""
    source = random.Random(0)
    rows = list(prompt_rows(per_category=42, seed=7))
    texts = [message["content"] for row in rows for message in row["messages"]]
    documents = [_document(source, tokenizer, texts) for _ in range(60)]
    for i in range(number):
        row = source.choice(rows)
        is_long = source.random() < 1 / 16
        limit = source.randrange(150, 300)
        params = SamplingParams(temperature=source.choice([0.0, 1.0]), seed=i, max_tokens=limit, ignore_eos=is_long)
        ids = source.choice(documents) + tokenizer.encode_chat(row["messages"])
        yield Sequence(str(i), ids, params, category=row["category"])


def _document(source: random.Random, tokenizer: Tokenizer, texts: Iterable[str]) -> list[int]:
    """Return 64 to 160 tokens of random messages."""
    size, ids = source.randrange(64, 160), []
    texts = list(texts)
    while len(ids) < size:
        ids += tokenizer.encode(source.choice(texts))
    return ids[:size]


def main() -> None:
    args = parse_arguments()
    command: Callable[[argparse.Namespace], None] = args.command
    command(args)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(required=True)
    first = commands.add_parser("simulate")
    first.add_argument("--workers", type=int, nargs="+", default=[1, 4])
    first.add_argument("--seeds", type=int, default=4)
    first.set_defaults(command=simulate)
    second = commands.add_parser("measure")
    second.add_argument("--rows", type=int, default=500)
    second.add_argument("--rounds", type=int, default=3)
    second.add_argument("--method", default="none")
    second.add_argument("--kv-tokens", type=int, default=4096)
    second.add_argument("--orders", nargs="+", choices=ORDERS, default=["input", "auto"])
    second.set_defaults(command=measure)
    return parser.parse_args()


if __name__ == "__main__":
    os.environ.setdefault("EAGLE_RAY_CACHE", tempfile.mkdtemp())
    main()
