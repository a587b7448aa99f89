"""Isolation: run batches so that a row that crashes the engine takes few other rows with it.

Rows without a crash record run together with everything else in flight. Rows with one wait until the engine is empty
and run in small groups, finally one at a time. A row whose record is final becomes the error ``worker_died``. Every row
is in the crash log before the engine gets it.

    isolation = Isolation(worker.answer, crash_log, slots=16)
    table = await isolation.run_batch(batch)
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Protocol

import pyarrow as pa

from eagle_ray.batch.worker.crash_tracker import CrashRecord, max_group_size
from eagle_ray.requests.columns import location_text

WORKER_DIED = "worker_died"
LOCATION = ("source_file", "row_index", "source_line")
FIX = "shorten the prompt, or set execution.slots or execution.kv_tokens to less"


class CrashLog(Protocol):
    """The part of ``CrashTracker`` that one worker writes. ``begin`` and ``begin_suspects`` return after the write."""

    async def begin(self, ids: list[str]) -> dict[str, CrashRecord]: ...
    async def begin_suspects(self, ids: list[str]) -> None: ...
    def finish(self, ids: list[str]) -> None: ...


@dataclass(slots=True)
class Isolation:
    """Run batches of requests on one engine, suspects apart from all other rows.

    Attributes:
        generate: answers a table of requests with one or more rows per request, in order.
        crash_log: records which rows are in flight.
        slots: the engine's batch size.
    """

    generate: Callable[[pa.Table], Awaitable[pa.Table]]
    crash_log: CrashLog
    slots: int
    _engine: SharedExclusiveLock = field(default_factory=lambda: SharedExclusiveLock())

    async def run_batch(self, batch: pa.Table) -> pa.Table:
        """Return the output rows of the batch, in the batch's order."""
        ids = batch["request_id"].to_pylist()
        async with self._engine.shared():
            records = await self.crash_log.begin(ids)
            batch = _as_error_rows(batch, records)
            suspects = {id: record.num_crashes for id, record in records.items() if not record.is_final}
            parts = [await self._run_rows(batch, [id for id in ids if id not in suspects])]
        for group in _groups(suspects, self.slots):
            async with self._engine.exclusive():
                await self.crash_log.begin_suspects(group)
                parts.append(await self._run_rows(batch, group))
        return parts[0] if len(parts) == 1 else _in_order(pa.concat_tables(parts), ids)

    async def _run_rows(self, batch: pa.Table, ids: list[str]) -> pa.Table:
        rows = batch if len(ids) == len(batch) else _select_rows(batch, ids)
        answers = await self.generate(rows)
        if ids:
            self.crash_log.finish(ids)
        return answers


@dataclass(slots=True)
class SharedExclusiveLock:
    """A readers-writer lock. A waiting exclusive holder goes before shared ones that come later."""

    _num_shared: int = 0
    _num_exclusive: int = 0  # exclusive holders, at most one, and requests that wait for that
    _changed: asyncio.Condition = field(default_factory=asyncio.Condition)
    _exclusive_lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    @asynccontextmanager
    async def shared(self) -> AsyncIterator[None]:
        async with self._changed:
            await self._changed.wait_for(lambda: self._num_exclusive == 0)
            self._num_shared += 1
        try:
            yield
        finally:
            async with self._changed:
                self._num_shared -= 1
                self._changed.notify_all()

    @asynccontextmanager
    async def exclusive(self) -> AsyncIterator[None]:
        self._num_exclusive += 1
        try:
            async with self._exclusive_lock:
                async with self._changed:
                    await self._changed.wait_for(lambda: self._num_shared == 0)
                yield
        finally:
            self._num_exclusive -= 1
            async with self._changed:
                self._changed.notify_all()


def _groups(crashes: dict[str, int], slots: int) -> Iterator[list[str]]:
    """Yield groups of ids to run together. Rows with more crashes come later and in smaller groups."""
    for count in sorted(set(crashes.values())):
        ids, size = [id for id, behind in crashes.items() if behind == count], max_group_size(count, slots)
        yield from (ids[i : i + size] for i in range(0, len(ids), size))


def _as_error_rows(batch: pa.Table, records: dict[str, CrashRecord]) -> pa.Table:
    """Return the batch with rows of a final record turned into error rows, as the reader does with unreadable rows."""
    final = {id: record for id, record in records.items() if record.is_final}
    if not final:
        return batch
    rows = batch.select(["request_id", *LOCATION, "error_code", "error_message"]).to_pylist()
    for row in rows:
        if row["request_id"] in final:
            record = final[row["request_id"]]
            row["error_code"] = WORKER_DIED
            row["error_message"] = (
                f"{location_text(row)}: {record.num_crashes} workers died while they answered it "
                f"({record.reason}): {FIX}"
            )
    for name in ("error_code", "error_message"):
        field = batch.schema.field(name)
        values = pa.array([row[name] for row in rows], field.type)
        batch = batch.set_column(batch.schema.get_field_index(name), field, values)
    return batch


def _select_rows(batch: pa.Table, ids: list[str]) -> pa.Table:
    wanted = set(ids)
    return batch.filter(pa.array([id in wanted for id in batch["request_id"].to_pylist()], pa.bool_()))


def _in_order(answers: pa.Table, ids: list[str]) -> pa.Table:
    """Sort rows into the order of the batch; the samples of a request keep their order."""
    place = {id: i for i, id in enumerate(ids)}
    places = [place[id] for id in answers["request_id"].to_pylist()]
    return answers.take(pa.array(sorted(range(len(places)), key=places.__getitem__), pa.int64())).combine_chunks()
