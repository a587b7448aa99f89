"""Worker: one engine that turns tables of requests into tables of output rows.

A bad row becomes an error row. A row that holds a slot longer than its timeout becomes an error row too; the clock
starts when the engine admits the sequence, so time in the queue does not count. Only a dead engine raises.

    worker = Worker(config, run, [], WorkerPlan(threads=2))
    table = await worker.answer(requests)
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pyarrow as pa

from eagle_ray.assembly.assemble import EngineBundle, build_in_thread
from eagle_ray.assembly.engine_sizes import EngineArgs
from eagle_ray.assembly.worker_plan import WorkerPlan
from eagle_ray.batch.worker.start_cache import start_cache
from eagle_ray.config import JobConfig
from eagle_ray.core.errors import EngineError, RequestError
from eagle_ray.core.sequence import Sequence
from eagle_ray.engine.async_engine import AsyncEngine
from eagle_ray.engine.counters import EngineCounters
from eagle_ray.requests.output_rows import OutputRow, OutputRows
from eagle_ray.requests.request import Request
from eagle_ray.requests.row_schema import REQUEST, output_schema, table_of
from eagle_ray.requests.sequences import CATEGORY, sequence_of, sequences_of
from eagle_ray.runs.lease import process_name
from eagle_ray.runs.run import Run


async def with_timeout(answer: Coroutine[Any, Any, Sequence], sequence: Sequence, timeout_s: float | None) -> Sequence:
    """Await the sequence's result. Raises RequestError("timeout") timeout_s seconds after its admission."""
    if timeout_s is None:
        return await answer
    task = asyncio.ensure_future(answer)
    try:
        while not task.done():
            if (left := _seconds_left(sequence, timeout_s)) <= 0:
                raise _timeout(sequence, timeout_s)
            await asyncio.wait([task], timeout=left)
        return task.result()
    finally:
        task.cancel()


def _seconds_left(sequence: Sequence, timeout_s: float) -> float:
    """Return a lower bound of the remaining time: all of it before the admission."""
    return timeout_s if sequence.admitted_at is None else sequence.admitted_at + timeout_s - time.monotonic()


def _timeout(sequence: Sequence, timeout_s: float) -> RequestError:
    return RequestError(
        "timeout",
        f"not done {timeout_s:g} s after it got a slot, {len(sequence.output_ids)} of {sequence.max_tokens} tokens "
        "made: raise execution.row_timeout_s or lower max_tokens",
    )


log = logging.getLogger("eagle_ray")


class Worker:
    """carried: fields of the carried columns. plan: the GPUs and CPU threads that the worker has.

    Raises ConfigError if a model is missing, EngineError if target and head do not fit.
    """

    def __init__(self, config: JobConfig, run: Run, carried: list[pa.Field], plan: WorkerPlan):
        with start_cache(run):
            bundle = build_engine_bundle(config, plan)
        self.worker_id = process_name(os.getpid())
        self._config, self._tokenizer = config, bundle.tokenizer
        self._engine = AsyncEngine(bundle.engine)
        self._schema = output_schema([])
        self._carried = [field.name for field in carried]
        constants = _constants(config, run, bundle) | {"worker_id": self.worker_id}
        self._rows = OutputRows(config, bundle.tokenizer, constants, time.time() - time.monotonic())

    async def answer(self, requests: pa.Table) -> pa.Table:
        """Return one row per sample and turn of each request, in order. Raises EngineError once the engine is dead."""
        columns = [*REQUEST.names, *(name for name in self._carried if name == CATEGORY)]
        asked = [Request.of_row(row) for row in requests.select(columns).to_pylist()]
        answers = await asyncio.gather(*(self._answer(request) for request in asked))
        table = self._tables(asked, answers)
        request_of_row = [i for i, rows in enumerate(answers) for _ in rows]
        carried = requests.select(self._carried).take(pa.array(request_of_row, pa.int64()))
        for name in self._carried:
            table = table.append_column(name, carried[name])
        return table.combine_chunks()

    def counters(self) -> EngineCounters:
        return self._engine.counters()

    def close(self) -> None:
        self._engine.close()

    async def _answer(self, request: Request) -> list[OutputRow]:
        if request.user_turns is not None:
            samples = range(request.num_samples(self._config))
            conversations = await asyncio.gather(*(self._converse(request, j) for j in samples))
            return [row for rows in conversations for row in rows]
        try:
            with _as_row_error(request):
                sequences = sequences_of(request, self._config, self._tokenizer)
            await self._generate(sequences)
            with _as_row_error(request):
                return self._rows.of(request, sequences)
        except RequestError as error:
            return self._rows.of_error(request, error)

    async def _converse(self, request: Request, sample_index: int) -> list[OutputRow]:
        """Return one sample's row for each turn, answered one after the other. An error ends the conversation."""
        rows: list[OutputRow] = []
        answers: list[str | None] = []
        failure: RequestError | None = None
        for _ in range(request.num_turns):
            turn = request.next_turn(answers)
            try:
                if failure is not None:
                    raise failure
                rows.append(await self._answer_turn(turn, sample_index))
            except RequestError as error:
                rows.append(self._rows.of_turn_error(turn, sample_index, error))
                failure = failure or _skipped(error, len(answers))
            answers = [*answers, rows[-1].get("text")]
        return rows

    async def _answer_turn(self, turn: Request, sample_index: int) -> OutputRow:
        with _as_row_error(turn):
            sequence = sequence_of(turn, self._config, self._tokenizer, sample_index)
        await self._generate([sequence])
        with _as_row_error(turn):
            [row] = self._rows.of(turn, [sequence])
        return row | {"sample_index": sample_index}

    def _tables(self, requests: list[Request], answers: list[list[OutputRow]]) -> pa.Table:
        with suppress(pa.ArrowException, KeyError, TypeError, ValueError, OverflowError):
            return table_of([row for rows in answers for row in rows], self._schema)
        return pa.concat_tables(self._table(request, rows) for request, rows in zip(requests, answers, strict=True))

    def _table(self, request: Request, rows: list[OutputRow]) -> pa.Table:
        """Return one request's rows, or its error row if they do not fit the schema."""
        try:
            with _as_row_error(request):
                return table_of(rows, self._schema)
        except RequestError as error:
            return table_of(self._rows.of_error(request, error), self._schema)

    async def _generate(self, sequences: list[Sequence]) -> None:
        """Return all samples of a row. If one fails or times out, the others are aborted."""
        limit = self._config.execution.row_timeout_s
        tasks = [asyncio.ensure_future(with_timeout(self._engine.generate(s), s, limit)) for s in sequences]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()


def _skipped(error: RequestError, turn: int) -> RequestError:
    return RequestError(
        "earlier_turn_failed", f"turn {turn} of this conversation is an error ({error.code}), so this one was not asked"
    )


@contextmanager
def _as_row_error(request: Request) -> Iterator[None]:
    """Return any error that one row's content causes as that row's error.

    The only broad catch: tokenizers and templates run on arbitrary text, and one row must never end the job.
    """
    try:
        yield
    except (RequestError, EngineError):
        raise
    except Exception as error:
        log.exception("row %s: internal error", request.id)
        raise RequestError("internal_error", f"{type(error).__name__}: {error}; please report it") from error


def build_engine_bundle(config: JobConfig, plan: WorkerPlan) -> EngineBundle:
    """Build the worker's engine, which orders rows as execution.order says. Raises as build_in_thread does."""
    execution = config.execution
    args = EngineArgs.of_worker(execution, plan.num_gpus)
    bundle = build_in_thread(config.model, config.speculative, args, plan.threads, execution.require_kernels)
    if execution.order == "auto":
        bundle.engine.order_for_throughput()
    return bundle


def _constants(config: JobConfig, run: Run, bundle: EngineBundle) -> dict[str, Any]:
    return {
        "run_id": run.run_id,
        "attempt": run.attempt,
        "config_hash": run.config_hash,
        "target_model": bundle.target_name,
        "draft_model": bundle.draft_name,
        "method": config.speculative.method,
    }
