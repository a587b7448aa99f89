"""Cases: ways of decoding compared at one batch size and context, and a job drained by each of them.

Ways take turns, in another order each round, over the same requests from the same start; a window is of as many tokens
as plain decoding commits in `seconds`, and only its decode steps count: prompts have their own time. A window in which
a graph was recorded is taken again.
"""

from __future__ import annotations

import random
import statistics
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from itertools import cycle, islice
from typing import Any

from torch import nn

from eagle_ray.core.sequence import Sequence
from eagle_ray.evaluation.method_comparison import Equivalence, compare, first_difference
from eagle_ray.evaluation.timing import RecordingPlanner, Sample, SteadyQueue, run_requests
from eagle_ray.report.intervals import ratio_interval
from eagle_ray.requests.parameters import SamplingParams
from jobs.bench.gpu.harness import Harness, Way
from jobs.bench.gpu.synthetic_context import in_context
from jobs.bench.workload import DRAIN_LENGTHS

MOST_TIMES_PLAIN = 3  # a window that takes this many times what plain decoding took is cut there
WARM_UP = 1.0  # of a window's seconds, before the first of each way
RETRIES = 3  # of a window in which graphs were recorded
MOST_JUDGED = 8  # outputs of a way whose difference is looked into
Parts = tuple[float, float, float]  # device seconds of draft, verify and rest


@dataclass(frozen=True, slots=True)
class Cell:
    """batch: sequences in flight. context: columns that each begins with. tokens: most of an output."""

    batch: int
    context: int
    tokens: int = 96


@dataclass(slots=True)
class Taken:
    """What one way did in a cell. outputs: by request, of all rounds. recorded: windows in which a graph was."""

    samples: list[Sample] = field(default_factory=list)
    outputs: dict[int, list[int]] = field(default_factory=dict)
    parts: list[Parts] = field(default_factory=list)
    recorded: int = 0


def steady(
    rig: Harness, ways: list[Way], cell: Cell, prompts: list[list[int]], rounds: int, seconds: float
) -> dict[str, Taken]:
    """plain must be among the ways, first. seconds: of a window of plain decoding."""
    planners = {way.name: rig.planner(way) for way in ways}
    num_tokens = 0
    for way in ways:
        _, sample, _ = _window(rig, way, planners[way.name], cell, prompts, 0, sys.maxsize, WARM_UP * seconds)
        num_tokens = num_tokens or max(cell.batch, sample.num_tokens)
    taken = {way.name: Taken() for way in ways}
    for turn, way in turns(ways, rounds):
        _take(taken[way.name], rig, way, planners[way.name], cell, prompts, turn, num_tokens, seconds)
    return taken


def _take(
    taken: Taken,
    rig: Harness,
    way: Way,
    planner: RecordingPlanner,
    cell: Cell,
    prompts: list[list[int]],
    turn: int,
    num_tokens: int,
    seconds: float,
) -> None:
    first = turn * cell.batch
    for _ in range(RETRIES):
        captured = rig.num_captured
        outputs, sample, parts = _window(
            rig, way, planner, cell, prompts, first, num_tokens, MOST_TIMES_PLAIN * seconds
        )
        if rig.num_captured == captured:
            break
        taken.recorded += 1
    taken.samples.append(sample)
    taken.parts.append(parts)
    taken.outputs |= {first + i: ids for i, ids in enumerate(outputs)}


def _window(
    rig: Harness,
    way: Way,
    planner: RecordingPlanner,
    cell: Cell,
    prompts: list[list[int]],
    first: int,
    num_tokens: int,
    most_seconds: float,
) -> tuple[list[list[int]], Sample, Parts]:
    """A window right after the slots were filled; what was generated for each request from the first one on."""
    engine = rig.engine(way, cell.context, cell.batch, planner)
    queue = SteadyQueue(engine, requests(prompts, first, [cell.tokens], cell.context), in_flight=cell.batch)
    try:
        queue.fill()
        before = planner.parts
        sample = queue.window(num_tokens, most_seconds)
    finally:
        queue.end()
    outputs = [sequence.output_ids for sequence in queue.sequences]
    return outputs, sample, tuple(b - a for a, b in zip(before, planner.parts, strict=True))


def drain(
    rig: Harness, ways: list[Way], cell: Cell, prompts: list[list[int]], num_rows: int
) -> dict[str, tuple[Sample, list[list[int]]]]:
    """The same rows of mixed lengths for each way, once, after a short job that is not counted."""
    done = {}
    for way in ways:
        engine = rig.engine(way, cell.context, cell.batch)
        short = islice(requests(prompts, 0, [16, 4, 12, 8], cell.context), cell.batch)
        run_requests(engine, list(short), in_flight=cell.batch)
        rows = list(islice(requests(prompts, 0, DRAIN_LENGTHS, cell.context), num_rows))
        done[way.name] = run_requests(engine, rows, in_flight=cell.batch), [s.output_ids for s in rows]
    return done


def requests(
    prompts: list[list[int]], first: int, lengths: tuple[int, ...] | list[int], context: int
) -> Iterator[Sequence]:
    stream = islice(zip(cycle(prompts), cycle(lengths), strict=False), first, None)
    for i, (ids, most) in enumerate(stream, first):
        yield Sequence(str(i), in_context(ids, context), SamplingParams(max_tokens=most))


def turns(ways: list[Way], rounds: int) -> Iterator[tuple[int, Way]]:
    """Yield (round, method): each method once a round in random order, so that none always follows the same one."""
    shuffle = random.Random(0)
    for turn in range(rounds):
        yield from ((turn, way) for way in shuffle.sample(ways, len(ways)))


def figures(taken: Taken, plain: Taken) -> dict[str, Any]:
    """Return a way's figures in a cell against plain decoding in the same rounds; seconds of a step are its mean."""
    mine, theirs = ([s.decoded_per_second for s in each.samples] for each in (taken, plain))
    total = sum(taken.samples[1:], taken.samples[0])
    steps = total.num_steps
    draft, verify, rest = (sum(part) / steps for part in zip(*taken.parts, strict=True))
    step = (total.seconds - total.prefill_s) / steps
    return {
        "tokens_per_second": statistics.median(mine),
        "over_plain": asdict(ratio_interval([a / b for a, b in zip(mine, theirs, strict=True)])),
        "tau": total.tau,
        "predicted_ratio": total.predicted_ratio,
        "rows_per_pass": total.num_verify_rows / steps,
        "off_share": total.num_plain_steps / steps,
        "probes": total.num_probes,
        "step_ms": 1e3 * step,
        "parts_ms": {
            "draft": 1e3 * draft,
            "verify": 1e3 * verify,
            "rest": 1e3 * rest,
            "host": 1e3 * max(step - draft - verify - rest, 0.0),
        },
        "recorded_again": taken.recorded,
        "windows": [asdict(sample) for sample in taken.samples],
    }


def judged(
    model: nn.Module, prompts: list[list[int]], outputs: dict[int, list[int]], plain: dict[int, list[int]], tie: float
) -> Equivalence:
    """Compare outputs with plain decoding's of the same requests; explain a few of those that differ.

    tie: a lead that is no lead in this dtype.
    """
    both = sorted(outputs.keys() & plain.keys())
    differ = [i for i in both if first_difference(outputs[i], plain[i]) is not None]
    asked = [i for i in both if i not in differ] + differ[:MOST_JUDGED]
    columns = ([prompts[i % len(prompts)] for i in asked], [outputs[i] for i in asked], [plain[i] for i in asked])
    return compare(model, *columns, near_tie=tie)
