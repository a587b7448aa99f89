"""RowWorker: turns tables of requests into tables of output rows, by any engine client (`eagle_ray.port`).

A bad row becomes an error row; only an error of the engine raises. This module does not import
torch, because the engine may be in another process.

    worker = RowWorker(config, client, rows, output_schema([]), carried=[])
    table = await worker.answer(requests)
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pyarrow as pa

from eagle_ray.config import JobConfig
from eagle_ray.core.counters import EngineCounters
from eagle_ray.core.errors import EngineError, RequestError
from eagle_ray.port.engine_client import (
    AdmissionStopped,
    Call,
    EngineClient,
    as_row_error,
)
from eagle_ray.requests.request import Request
from eagle_ray.requests.request_rows import OutputRow, RequestRows
from eagle_ray.requests.row_schema import REQUEST, table_of
from eagle_ray.runs.job_errors import JobError

log = logging.getLogger("eagle_ray")


class RowWorker:
    """One engine of a job, with the requests that it is answering.

    Attributes:
        client: client of the engine.
        carried_of_requests: names of carried columns that answers are made from.
    """

    carried_of_requests: tuple[str, ...] = ()

    def __init__(
        self,
        config: JobConfig,
        client: EngineClient,
        rows: RequestRows,
        schema: pa.Schema,
        carried: list[str],
    ):
        """Take over an engine.

        Args:
            rows: makes the rows of errors.
            schema: the schema of the worker's own columns.
            carried: names of the output's further columns, which are columns of requests.
        """
        self.client = client
        self._config = config
        self._is_private = not config.output.store_prompt
        self._error_rows = rows
        self._schema = schema
        self._carried = carried
        self._num_in_flight = 0  # calls of `answer`
        self._is_admitting = True
        self._calls: set[Call] = set()

    async def answer(self, requests: pa.Table) -> pa.Table:
        """Return one row per sample and turn of each request, in order. Raises EngineError once the engine is dead."""
        with self._without_values():
            return await self._answer_all(requests)

    async def _answer_all(self, requests: pa.Table) -> pa.Table:
        read = [name for name in self._carried if name in self.carried_of_requests]
        columns = [*REQUEST.names, *read]
        parsed = [Request.of_row(row) for row in requests.select(columns).to_pylist()]
        self._num_in_flight += 1
        try:
            answers = await asyncio.gather(*(self._answer(request) for request in parsed))
        finally:
            self._num_in_flight -= 1
        await self._after_table()
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
        except (EngineError, JobError, MemoryError, OSError):
            raise
        except Exception as error:
            if not self._is_private:
                raise
            hidden = (
                f"{type(error).__name__}, whose text is not shown, as output.store_prompt is false"
            )
            raise RuntimeError(hidden).with_traceback(error.__traceback__) from None

    def stop_admission(self) -> None:
        """Start no further row. Requests are answered without rows that have no slot yet.

        Rows that have begun are finished, with all their samples and turns.
        """
        self._is_admitting = False
        for call in self._calls:
            if not call.has_begun:
                call.is_skipped = True
                call.cancel()

    def counters(self) -> EngineCounters:
        """Return the engine's counters of steps, tokens and seconds so far."""
        return self.client.counters()

    def close(self) -> None:
        """End the engine."""
        self.client.close()

    async def _after_table(self) -> None:
        """Do what is due after a table of requests is answered."""

    async def _answer(self, request: Request) -> list[OutputRow]:
        """Return the request's rows; none if the run begins no further row and this one has no slot yet."""
        if not self._is_admitting:
            return []
        call = Call()
        self._calls.add(call)
        try:
            return await self._answer_row(request, call)
        except asyncio.CancelledError:
            if call.is_skipped:
                return []
            raise
        except AdmissionStopped:
            return []
        finally:
            self._calls.discard(call)

    async def _answer_row(self, request: Request, call: Call) -> list[OutputRow]:
        if request.user_turns is not None:
            samples = range(request.num_samples(self._config))
            conversations = await asyncio.gather(
                *(self._converse(request, call, j) for j in samples)
            )
            return [row for rows in conversations for row in rows]
        try:
            samples = range(request.num_samples(self._config))
            return await self.client.answer(request, samples, call)
        except RequestError as error:
            return self._error_rows.of_error(request, error)

    async def _converse(self, request: Request, call: Call, sample_index: int) -> list[OutputRow]:
        """Return one sample's row for each turn, answered one after the other. An error ends the conversation."""
        rows: list[OutputRow] = []
        answers: list[str | None] = []
        failure: RequestError | None = None
        for _ in range(request.num_turns):
            turn = request.next_turn(answers)
            try:
                if failure is not None:
                    raise failure
                rows.append(await self._answer_turn(turn, call, sample_index))
            except RequestError as error:
                rows.append(self._error_rows.of_turn_error(turn, sample_index, error))
                failure = failure or _skipped(error, len(answers))
            answers = [*answers, rows[-1].get("text")]
        return rows

    async def _answer_turn(self, turn: Request, call: Call, sample_index: int) -> OutputRow:
        [answer] = await self.client.answer(turn, [sample_index], call)
        return answer | {"sample_index": sample_index}

    def _tables(self, requests: list[Request], answers: list[list[OutputRow]]) -> pa.Table:
        with suppress(pa.ArrowException, KeyError, TypeError, ValueError, OverflowError):
            return table_of([row for rows in answers for row in rows], self._schema)
        return pa.concat_tables(
            self._table(request, rows) for request, rows in zip(requests, answers, strict=True)
        )

    def _table(self, request: Request, rows: list[OutputRow]) -> pa.Table:
        """Return one request's rows, or its error row if they do not fit the schema."""
        try:
            with as_row_error(request, self._is_private):
                return table_of(rows, self._schema)
        except RequestError as error:
            return table_of(self._error_rows.of_error(request, error), self._schema)


def _skipped(error: RequestError, turn: int) -> RequestError:
    return RequestError(
        "earlier_turn_failed",
        f"turn {turn} of this conversation is an error ({error.code}), so this one was not asked",
    )
