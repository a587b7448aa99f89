"""Estimate a job's duration and cost: decode a sample of its rows here (`validate --estimate`).

The engine is the job's, with its slots kept full as in a long job: the sampled rows are decoded
among other rows until the last of them is done. A row costs the time that it occupies a slot, so a
job takes the sum over its rows, divided by all slots, plus the time in which its last rows drain.
Before the sample, an equal number of other rows warms the planner up. The interval is over draws of
the sample.

    estimate = estimate_job(config, num_sampled=32)
    estimate["seconds"]      # [412.0, 371.5, 460.2]: expected, low and high of 95 %

``_estimate.json`` in the output stores the estimate, and the run shows it next to the real numbers.
"""

from __future__ import annotations

import heapq
import logging
import math
import os
import random
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, cycle
from typing import Any

import torch

from eagle_ray.assembly.assemble import EngineBundle
from eagle_ray.assembly.model_memory import process_bytes
from eagle_ray.assembly.worker_plan import WorkerPlan, threads_wanted
from eagle_ray.batch.driver.input_plan import InputPlan, plan_input, requests_of
from eagle_ray.batch.worker.worker import build_engine_bundle
from eagle_ray.config import JobConfig, config_hash
from eagle_ray.config.job import ActorRange
from eagle_ray.core.errors import ConfigError, RequestError
from eagle_ray.core.sequence import Sequence as EngineSequence
from eagle_ray.core.sequence import check_length
from eagle_ray.doctor.devices import this_machine
from eagle_ray.engine.engine import Engine
from eagle_ray.models.runtime import run_in_temporary_thread
from eagle_ray.planner.budget_planner import BudgetPlanner
from eagle_ray.report.cost import estimate_words, money, priced_hours
from eagle_ray.requests.request import Request
from eagle_ray.requests.sequences import sequences_of
from eagle_ray.runs.layout import ESTIMATE, output_of, wrap_os_errors
from eagle_ray.storage.path import write_json

log = logging.getLogger("eagle_ray")
MIN_SAMPLED = 32  # rows
SAMPLED_PER_SLOT = 2  # rows
ESTIMATE_RESAMPLES = 200
Z_95 = 1.96  # standard errors on each side of a mean
MAX_SIMULATED = 5000  # rows of a worker; with more, how the last rows drain does not matter
PIPELINE_START_S = 10.0  # Ray Data and a worker's process, before models load: 8 to 11 s on 2 busy cores, 2026-11-25


@dataclass(frozen=True, slots=True)
class SampledRow:
    """A row of the sample.

    Attributes:
        slot_s: seconds that each of its samples occupied a slot.
        lengths: tokens of each of its outputs; empty if unknown.
        prompt_tokens: tokens of its prompt.
    """

    slot_s: list[float]
    lengths: list[int] = field(default_factory=list)
    prompt_tokens: int = 0

    @property
    def tokens(self) -> int:
        """Return the total tokens of its outputs."""
        return sum(self.lengths)


def estimate_job(config: JobConfig, num_sampled: int | None = None) -> dict[str, Any]:
    """Decode a sample and return what ``_estimate.json`` holds. Raises as build_engine_bundle does,
    and ConfigError if no row can be answered.

    Args:
        num_sampled: number of rows; None is two per slot, at least MIN_SAMPLED.
    """
    plan = plan_input(config)
    workers = _workers(config, plan.num_rows)
    log.info("loading the models for the estimate")
    process = process_bytes("cuda" if workers.num_gpus else "cpu")
    began = time.monotonic()
    bundle = build_engine_bundle(config, workers)
    load_s = time.monotonic() - began

    slots = bundle.engine.scheduler.num_slots
    wanted = max(MIN_SAMPLED, SAMPLED_PER_SLOT * slots) if num_sampled is None else num_sampled
    drawn = _drawn(plan, 2 * wanted, config.seed)
    rows = drawn[:wanted]
    others = drawn[wanted:] or drawn
    log.info(
        "decoding %d of %d rows, the first %d to warm up", len(drawn), plan.num_rows, len(others)
    )
    concurrent = max(
        1, min(slots, math.ceil(plan.num_rows * config.sampling.n / workers.max_workers))
    )
    began = time.monotonic()
    # It has the tuned threads.
    sampled = run_in_temporary_thread(partial(measure, rows, others, config, bundle, concurrent))
    sample_s = time.monotonic() - began
    if not any(row.slot_s for row in sampled):
        raise ConfigError(
            "no row of the sample can be answered: eagle-ray validate without --estimate says why"
        )

    start_s = PIPELINE_START_S + load_s
    seconds = [
        start_s + working
        for working in job_seconds(sampled, plan.num_rows, workers.max_workers, concurrent)
    ]
    prices = config.execution.prices
    price = None if prices is None else prices.on_demand
    per_second = (
        None if price is None else price * priced_hours(workers.max_workers, workers.num_gpus)
    )
    per_row = [len(row.slot_s) or config.sampling.n for row in sampled]
    return {
        "config_hash": config_hash(config),
        "rows": round(plan.num_rows * statistics.fmean(per_row)),
        "input_rows": plan.num_rows,
        "sampled_rows": len(rows),
        "slot_s": [row.slot_s for row in sampled],
        "lengths": [row.lengths for row in sampled],
        "prompt_tokens": [row.prompt_tokens for row in sampled],
        "acceptance": _acceptance(bundle.engine),
        "sample_s": sample_s,
        "workers": workers.max_workers,
        "gpus_per_worker": workers.num_gpus,
        "slots": slots,
        "threads": workers.threads,
        "memory": replace(bundle.memory, process=process).describe(),
        "start_s": start_s,
        "seconds": seconds,
        "tokens_per_s": tokens_per_s(sampled, concurrent),
        "output_tokens": scaled([row.tokens for row in sampled], plan.num_rows),
        "price_per_hour": price,
        "dollars": None if per_second is None else [per_second * value for value in seconds],
    }


@torch.inference_mode()
def _acceptance(engine: Engine) -> dict[str, Any] | None:
    """Return how often drafts were accepted, as lists of numbers, or None if nothing was drafted."""
    planner = engine.planner
    if not isinstance(planner, BudgetPlanner) or not planner.num_offers:
        return None
    return {name: tensor.tolist() for name, tensor in planner.acceptance_state().items()}


def store_estimate(config: JobConfig, estimate: dict[str, Any]) -> None:
    """Write ``_estimate.json``. Raises ConfigError if the output cannot be written."""
    output = output_of(config)
    with wrap_os_errors(output):
        output.make_directory()
        write_json(output / ESTIMATE, estimate)


def estimate_text(estimate: dict[str, Any]) -> str:
    """Return the estimate in the form of validate's report."""
    number = estimate["workers"]
    plan = WorkerPlan(number, number, estimate["gpus_per_worker"], estimate["threads"])
    expected, low, high = estimate["output_tokens"]
    price = estimate["price_per_hour"]
    unit = "GPU" if estimate["gpus_per_worker"] else "worker"
    priced = (
        f"at {money(price)} for a {unit} hour"
        if price
        else "execution.price_per_hour is not set, so no cost"
    )
    return (
        f"estimate {estimate_words(estimate)}, of which {estimate['start_s']:.0f} s are the start; {priced}\n"
        f"         {estimate['rows']:,} rows, {expected:,.0f} tokens [{low:,.0f}, {high:,.0f}], as if by "
        f"{plan.describe()} of this machine, {estimate['slots']} slots each\n"
        f"         from {estimate['sampled_rows']} rows, decoded in {estimate['sample_s']:.0f} s; 95 % intervals "
        "over the rows drawn, not over how busy machines are\n"
        f"memory   {estimate['memory']}"
    )


def measure(
    rows: Sequence[Request],
    others: Sequence[Request],
    config: JobConfig,
    bundle: EngineBundle,
    concurrent: int,
) -> list[SampledRow]:
    """Decode the sampled rows, `concurrent` sequences at a time, and return each row's slot seconds and tokens.

    Other rows are decoded before them, because a new planner first tries drafts out, and after
    them, so that slots stay full until the last sampled row is done. A row that cannot be answered
    takes no time.
    """
    engine = bundle.engine
    wanted = [list(_sequences(row, config, bundle)) for row in rows]
    missing = {sequence for of_row in wanted for sequence in of_row}
    warm_up = [sequence for row in others for sequence in _sequences(row, config, bundle)]
    fillers = (sequence for row in cycle(others) for sequence in _sequences(row, config, bundle))
    waiting = chain(warm_up, (sequence for of_row in wanted for sequence in of_row), fillers)
    running: set[EngineSequence] = set()
    while missing:
        while len(running) < concurrent and (sequence := next(waiting, None)) is not None:
            engine.add(sequence)
            running.add(sequence)
        finished = engine.step()
        running.difference_update(finished)
        missing.difference_update(finished)
    for sequence in running:
        engine.abort(sequence)
    return [
        SampledRow(
            [(s.finished_at or 0.0) - (s.admitted_at or 0.0) for s in of_row],
            [len(s.output_ids) for s in of_row],
            max((len(s.prompt_ids) for s in of_row), default=0),
        )
        for of_row in wanted
    ]


def job_seconds(
    sampled: Sequence[SampledRow], num_rows: int, workers: int, slots: int
) -> list[float]:
    """Return the seconds of decoding num_rows rows like the sample: expected value, and the ends of
    the 95 % interval."""
    rows_per_worker = max(1, round(num_rows / workers))
    if rows_per_worker > MAX_SIMULATED:
        return scaled([sum(row.slot_s) for row in sampled], rows_per_worker / slots)
    seconds = drawn_seconds(sampled, num_rows, workers, slots)
    return [statistics.fmean(seconds), quantile(seconds, 0.025), quantile(seconds, 0.975)]


def drawn_seconds(
    sampled: Sequence[SampledRow], num_rows: int, workers: int, slots: int
) -> list[float]:
    """Return the seconds of decoding num_rows rows in ESTIMATE_RESAMPLES bootstrap draws of the sample, sorted.

    For a long job the draws come from a normal distribution, which a sum over many rows follows.
    """
    rows_per_worker = max(1, math.ceil(num_rows / workers))
    if rows_per_worker > MAX_SIMULATED:
        expected, _, high = scaled([sum(row.slot_s) for row in sampled], rows_per_worker / slots)
        spread = statistics.NormalDist(expected, max((high - expected) / Z_95, 1e-9))
        shares = ((i + 0.5) / ESTIMATE_RESAMPLES for i in range(ESTIMATE_RESAMPLES))
        return [max(0.0, spread.inv_cdf(share)) for share in shares]
    draw = random.Random(0)
    seconds = []
    for _ in range(ESTIMATE_RESAMPLES):
        pool = draw.choices(sampled, k=len(sampled))
        rows = draw.choices(pool, k=rows_per_worker)
        seconds.append(drain_time([s for row in rows for s in row.slot_s], slots))
    return sorted(seconds)


def tokens_per_s(sampled: Sequence[SampledRow], slots: int) -> float | None:
    """Return the output tokens per second of one worker with full slots."""
    slot_s = sum(sum(row.slot_s) for row in sampled)
    return slots * sum(row.tokens for row in sampled) / slot_s if slot_s else None


def quantile(ordered: Sequence[float], share: float) -> float:
    """Return a quantile of sorted values."""
    return ordered[round(share * (len(ordered) - 1))]


def drain_time(slot_s: Sequence[float], slots: int) -> float:
    """Return the time until all of these durations are over, if each in order takes the first free slot."""
    free_at = [0.0] * slots
    for seconds in slot_s:
        heapq.heapreplace(free_at, free_at[0] + seconds)
    return max(free_at)


def scaled(values: Sequence[float], factor: float) -> list[float]:
    """Return the rows' mean times a factor, with the ends of its 95 % interval."""
    mean = statistics.fmean(values)
    error = 0.0
    if len(values) > 1:
        error = Z_95 * statistics.stdev(values) / math.sqrt(len(values))
    low = max(mean - error, 0.0)
    high = mean + error
    return [factor * mean, factor * low, factor * high]


def _drawn(plan: InputPlan, number: int, seed: int) -> list[Request]:
    """Return this many rows, or all, in random order."""
    draw = random.Random(seed)
    drawn = set(draw.sample(range(plan.num_rows), min(number, plan.num_rows)))
    rows = [row for i, row in enumerate(requests_of(plan)) if i in drawn]
    draw.shuffle(rows)
    return rows


def _sequences(row: Request, config: JobConfig, bundle: EngineBundle) -> Iterator[EngineSequence]:
    """Yield the row's samples, or nothing if it would be an error row."""
    try:
        sequences = sequences_of(
            row, config, bundle.tokenizer, max_model_len=bundle.engine.max_model_len
        )
        for sequence in sequences:
            check_length(sequence, bundle.engine.max_model_len, bundle.engine.target.vocab_size)
    except RequestError:
        return
    yield from sequences


def _workers(config: JobConfig, num_rows: int) -> WorkerPlan:
    """Return the workers of a job on this machine, or as many such workers as the configuration names."""
    # One worker as it would be on this machine.
    actors = config.execution.actors
    changes: dict[str, Any] = {"accelerator_type": None}
    if actors != "auto":
        changes["actors"] = 1
    execution = config.execution.model_copy(update=changes)
    max_threads = threads_wanted(os.environ)
    plan = WorkerPlan.of_job(
        execution, config.model.device, [this_machine()], num_rows, max_threads
    )

    # As many as are named, and no more than there are rows.
    named = actors.max if isinstance(actors, ActorRange) else actors
    number = plan.min_workers if named == "auto" else max(1, min(named, num_rows))
    return replace(plan, min_workers=number, max_workers=number)
