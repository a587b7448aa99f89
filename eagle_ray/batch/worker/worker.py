"""Worker: one engine that turns tables of requests into tables of output rows.

A bad row becomes an error row. A row that holds a slot longer than its timeout becomes an error row too; the clock
starts when the engine admits the sequence, so time in the queue does not count. Only a dead engine raises.

    worker = Worker(config, run, [], WorkerPlan(threads=2))
    table = await worker.answer(requests)

A StartCache keeps what a worker's start measured and compiled in the run's directory for the run's other starts:

    OUT/_cache/costs-1f0c2a91d3b7aa05.json       costs of steps, by everything that they depend on
    OUT/_cache/kernels-5b3c77e0f1d2a401.tar.gz   Triton's kernels, by device and versions

A worker reads them before it loads its models, and adds what it had to make itself. So later starts, workers on nodes
that join, and those that replace lost ones measure and compile nothing that a worker of the run has done before. It is
a cache: a damaged or foreign file, or storage that does not answer, costs time and a line in the log.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import os
import time
import traceback
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any

import pyarrow as pa
import torch

import eagle_ray
from eagle_ray.assembly.assemble import EngineBundle, build_in_thread
from eagle_ray.assembly.engine_sizes import EngineArgs
from eagle_ray.assembly.worker_plan import WorkerPlan
from eagle_ray.batch.worker.learned_state import LearnedState
from eagle_ray.config import JobConfig
from eagle_ray.core.counters import EngineCounters
from eagle_ray.core.errors import EngineError, RequestError, one_line
from eagle_ray.core.sequence import Sequence
from eagle_ray.engine.async_engine import AsyncEngine
from eagle_ray.kernels.triton_cache import cache_directory, entries, pack, unpack
from eagle_ray.planner.cost_cache import adopt_costs, used_costs
from eagle_ray.requests.output_rows import OutputRow, OutputRows
from eagle_ray.requests.request import Request
from eagle_ray.requests.row_schema import REQUEST, output_schema, table_of
from eagle_ray.requests.sequences import CATEGORY, sequence_of, sequences_of
from eagle_ray.runs.job_errors import JobError
from eagle_ray.runs.layout import CACHE, root_of
from eagle_ray.runs.lease import process_name
from eagle_ray.runs.run import Run
from eagle_ray.storage.path import StoragePath

COSTS, KERNELS = "costs-", "kernels-"  # how the names of files begin
MAX_BYTES = 256 << 20  # of a file; the kernels of one model take about 15 MB


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
            bundle = build_engine_bundle(config, plan, owns_process=True)
        self.worker_id = process_name(os.getpid())
        self._is_private = not config.output.store_prompt
        self._config, self.tokenizer = config, bundle.tokenizer
        self._learned = LearnedState(run, _models(config, bundle), self._is_private)
        self._learned.load(bundle.engine)
        self._num_in_flight = 0  # calls of `answer`
        self.engine = AsyncEngine(bundle.engine)
        self._schema = output_schema([])
        self._carried = [field.name for field in carried]
        constants = _constants(config, run, bundle) | {"worker_id": self.worker_id}
        self._rows = OutputRows(config, bundle.tokenizer, constants, time.time() - time.monotonic())

    async def answer(self, requests: pa.Table) -> pa.Table:
        """Return one row per sample and turn of each request, in order. Raises EngineError once the engine is dead."""
        with self._without_values():
            return await self._answer_all(requests)

    async def _answer_all(self, requests: pa.Table) -> pa.Table:
        columns = [*REQUEST.names, *(name for name in self._carried if name == CATEGORY)]
        parsed = [Request.of_row(row) for row in requests.select(columns).to_pylist()]
        self._num_in_flight += 1
        try:
            answers = await asyncio.gather(*(self._answer(request) for request in parsed))
        finally:
            self._num_in_flight -= 1
        await self._store_learned()
        table = self._tables(parsed, answers)
        request_of_row = [i for i, rows in enumerate(answers) for _ in rows]
        carried = requests.select(self._carried).take(pa.array(request_of_row, pa.int64()))
        for name in self._carried:
            table = table.append_column(name, carried[name])
        return table.combine_chunks()

    @contextmanager
    def _without_values(self) -> Iterator[None]:
        """Let an unknown error pass without its words, which may quote a prompt, if prompts are not to be stored."""
        try:
            yield
        except (EngineError, MemoryError, OSError):
            raise
        except Exception as error:
            if not self._is_private:
                raise
            hidden = f"{type(error).__name__}, whose text is not shown, as output.store_prompt is false"
            raise RuntimeError(hidden).with_traceback(error.__traceback__) from None

    def counters(self) -> EngineCounters:
        return self.engine.counters()

    def close(self) -> None:
        self.engine.close()

    async def _store_learned(self) -> None:
        """Write what the drafter has learned, if that is due. No error stops the job."""
        if not self._learned.start_write(self._num_in_flight):
            return
        try:
            state = await self.engine.call(lambda engine: engine.learned_state())
            await asyncio.to_thread(self._learned.store, state)
        except EngineError:
            pass  # reported where rows are answered
        except Exception:
            log.exception("what the drafter has learned cannot be written; the job goes on")
        finally:
            self._learned.end_write()

    async def _answer(self, request: Request) -> list[OutputRow]:
        if request.user_turns is not None:
            samples = range(request.num_samples(self._config))
            conversations = await asyncio.gather(*(self._converse(request, j) for j in samples))
            return [row for rows in conversations for row in rows]
        try:
            with self._as_row_error(request):
                sequences = sequences_of(request, self._config, self.tokenizer)
            await self._generate(sequences)
            with self._as_row_error(request):
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
        with self._as_row_error(turn):
            sequence = sequence_of(turn, self._config, self.tokenizer, sample_index)
        await self._generate([sequence])
        with self._as_row_error(turn):
            [row] = self._rows.of(turn, [sequence])
        return row | {"sample_index": sample_index}

    @contextmanager
    def _as_row_error(self, request: Request) -> Iterator[None]:
        """Return any error that one row's content causes as that row's error.

        The only broad catch: tokenizers and templates run on arbitrary text, and one row must never end the job.
        """
        try:
            yield
        except (RequestError, EngineError):
            raise
        except Exception as error:
            if self._is_private:  # the error's own words may quote the row
                frames = "".join(traceback.format_tb(error.__traceback__))
                log.error("row %s: internal error: %s\n%s", request.id, type(error).__name__, frames)
            else:
                log.exception("row %s: internal error", request.id)
            raise RequestError("internal_error", f"{type(error).__name__}: {error}; please report it") from error

    def _tables(self, requests: list[Request], answers: list[list[OutputRow]]) -> pa.Table:
        with suppress(pa.ArrowException, KeyError, TypeError, ValueError, OverflowError):
            return table_of([row for rows in answers for row in rows], self._schema)
        return pa.concat_tables(self._table(request, rows) for request, rows in zip(requests, answers, strict=True))

    def _table(self, request: Request, rows: list[OutputRow]) -> pa.Table:
        """Return one request's rows, or its error row if they do not fit the schema."""
        try:
            with self._as_row_error(request):
                return table_of(rows, self._schema)
        except RequestError as error:
            return table_of(self._rows.of_error(request, error), self._schema)

    async def _generate(self, sequences: list[Sequence]) -> None:
        """Run all samples of a row. If one fails or times out, the others are aborted."""
        limit = self._config.execution.row_timeout_s
        tasks = [asyncio.ensure_future(with_timeout(self.engine.generate(s), s, limit)) for s in sequences]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()


def _skipped(error: RequestError, turn: int) -> RequestError:
    return RequestError(
        "earlier_turn_failed", f"turn {turn} of this conversation is an error ({error.code}), so this one was not asked"
    )


def build_engine_bundle(config: JobConfig, plan: WorkerPlan, owns_process: bool = False) -> EngineBundle:
    """Build the worker's engine, which orders rows as execution.order says. Raises as build_in_thread does.

    owns_process: as in EngineArgs.
    """
    execution = config.execution
    args = replace(EngineArgs.of_worker(execution, plan.num_gpus), owns_process=owns_process)
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
        "method": config.method_name,
    }


def _models(config: JobConfig, bundle: EngineBundle) -> dict[str, Any]:
    """Return what a drafter's state depends on."""
    speculative = config.speculative
    names = {"target": bundle.target_name, "draft": bundle.draft_name, "vocab": bundle.engine.target.vocab_size}
    names |= {"draft_versions": bundle.draft_versions}
    return names | {"methods": speculative.merged_methods, "max_depth": speculative.max_depth}


def kernels_name() -> str | None:
    """Return the name of the file with the kernels of this machine's device and versions, or None without a GPU."""
    if not torch.cuda.is_available() or find_spec("triton") is None:
        return None
    device = torch.cuda.get_device_name(), torch.cuda.get_device_capability()
    parts = [*device, torch.__version__, version("triton"), eagle_ray.__version__]
    return f"{KERNELS}{hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]}.tar.gz"


@contextmanager
def start_cache(run: Run) -> Iterator[None]:
    """Build an engine with what the run's earlier starts have left, and leave what this one makes."""
    cache = StartCache(run, kernels_name())
    cache.load()
    yield
    cache.store()


class StartCache:
    """One worker's view of the files of its run. kernels: the name of its file of kernels; None keeps no kernels.

    Outside of a run, or once a later attempt has begun, nothing is read or written.
    """

    def __init__(self, run: Run, kernels: str | None = None):
        self._run, self._kernels = run, kernels
        self._directory = root_of(run.output) / CACHE
        self._versions: dict[str, int | str] = {}  # of the files as they were found
        self._taken: set[str] = set()  # names of files that were read and are whole
        self._old_entries: set[str] = set()  # of Triton's cache before this start
        self._read_entries: set[str] = set()  # those that came from the run's directory

    def load(self) -> None:
        """Add the run's costs and kernels to this machine's."""
        with self._ignoring_errors():
            self._run.check_current()
            for file, stamp in self._directory.list_versions("*").items():
                self._versions[file.name] = stamp.version
                if file.name == self._kernels or file.name.startswith(COSTS):
                    self._take(file, stamp.size)
        if self._taken:
            names = ", ".join(sorted(self._taken))
            log.info("what earlier starts measured or compiled is read from %s: %s", self._directory, names)
        self._old_entries = entries(cache_directory()) if self._kernels else set()

    def _take(self, file: StoragePath, size: int) -> None:
        try:
            if size > MAX_BYTES:
                raise ValueError(f"it has more than {MAX_BYTES >> 20} MiB")
            if file.name == self._kernels:
                self._read_entries = unpack(file.read_bytes(), cache_directory())
            else:
                adopt_costs(file.name.removeprefix(COSTS), file.read_bytes())
            self._taken.add(file.name)
        except ValueError as error:
            log.warning("%s is ignored: %s", file, error)

    def store(self) -> None:
        """Add the costs that this worker uses, and the kernels that it had to compile, to the run's."""
        with self._ignoring_errors():
            self._run.check_current()  # first: an output that is not there is not made
            for path in used_costs():
                self._put(COSTS + path.name, path.read_bytes())
            if self._kernels and (compiled := entries(cache_directory()) - self._old_entries):
                self._taken.discard(self._kernels)
                self._put(self._kernels, pack(cache_directory(), compiled | self._read_entries))

    def _put(self, name: str, data: bytes) -> None:
        """Write a file whole, unless another worker has written it since."""
        if name in self._taken or not 0 < len(data) <= MAX_BYTES:
            return
        file, stamp = self._directory / name, self._versions.get(name)
        if stamp is not None:
            file.replace(data, stamp, self._run.check_current)
        elif not file.exists():
            file.create(data, self._run.check_current)

    @contextmanager
    def _ignoring_errors(self) -> Iterator[None]:
        try:
            yield
        except JobError as error:  # which ends the attempt, and is said there
            log.debug("%s: nothing is kept there: %s", self._directory, one_line(error))
        except OSError as error:
            log.warning("%s: nothing is kept there: %s", self._directory, one_line(error))
