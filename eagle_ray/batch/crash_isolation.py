"""Isolation: a batch answered so that a row over which workers died takes few others with it.

Rows without blame are answered together with whatever else is in flight. Those with blame wait until the engine is
empty and go in small groups, in the end alone; a row whose blame is final becomes the error ``worker_died``. Every row
is in the book before the engine sees it.

    isolation = Isolation(worker.answer, book, slots=16)
    table = await isolation.answer(batch)
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Protocol

import pyarrow as pa

from eagle_ray.batch.crash_tracker import CrashRecord, room_for
from eagle_ray.batch.input.row_location import place_of

DIED = "worker_died"
FIX = "shorten the prompt, or set execution.slots or execution.kv_tokens to less"


class CrashLog(Protocol):
    """One worker's page of ``Deaths``. take and risk return once it is written down."""

    async def take(self, ids: list[str]) -> dict[str, CrashRecord]: ...
    async def risk(self, ids: list[str]) -> None: ...
    def answered(self, ids: list[str]) -> None: ...


@dataclass(slots=True)
class Isolation:
    """respond: answers a table of requests, some rows for each of them, in order. slots: of its engine."""

    respond: Callable[[pa.Table], Awaitable[pa.Table]]
    book: CrashLog
    slots: int
    _engine: SharedExclusiveLock = field(default_factory=lambda: SharedExclusiveLock())

    async def answer(self, batch: pa.Table) -> pa.Table:
        """What `respond` gives for the batch, in the batch's order."""
        ids = batch["request_id"].to_pylist()
        async with self._engine.together():
            blamed = await self.book.take(ids)
            batch = _condemned(batch, blamed)
            suspects = {id: blame.deaths for id, blame in blamed.items() if not blame.is_final}
            parts = [await self._answer(batch, [id for id in ids if id not in suspects])]
        for group in _groups(suspects, self.slots):
            async with self._engine.alone():
                await self.book.risk(group)
                parts.append(await self._answer(batch, group))
        return parts[0] if len(parts) == 1 else _in_order(pa.concat_tables(parts), ids)

    async def _answer(self, batch: pa.Table, ids: list[str]) -> pa.Table:
        rows = batch if len(ids) == len(batch) else _rows_of(batch, ids)
        answers = await self.respond(rows)
        if ids:
            self.book.answered(ids)
        return answers


@dataclass(slots=True)
class SharedExclusiveLock:
    """A lock that many hold together or one alone. A waiting exclusive request goes before later shared ones."""

    _together: int = 0
    _alone: int = 0  # exclusive holders, at most one, and requests that wait for that
    _changed: asyncio.Condition = field(default_factory=asyncio.Condition)
    _turn: asyncio.Lock = field(default_factory=asyncio.Lock)

    @asynccontextmanager
    async def together(self) -> AsyncIterator[None]:
        async with self._changed:
            await self._changed.wait_for(lambda: self._alone == 0)
            self._together += 1
        try:
            yield
        finally:
            async with self._changed:
                self._together -= 1
                self._changed.notify_all()

    @asynccontextmanager
    async def alone(self) -> AsyncIterator[None]:
        self._alone += 1
        try:
            async with self._turn:
                async with self._changed:
                    await self._changed.wait_for(lambda: self._together == 0)
                yield
        finally:
            self._alone -= 1
            async with self._changed:
                self._changed.notify_all()


def _groups(deaths: dict[str, int], slots: int) -> Iterator[list[str]]:
    """Ids to be answered together; those with more deaths behind them in smaller groups, and last."""
    for count in sorted(set(deaths.values())):
        ids, size = [id for id, behind in deaths.items() if behind == count], room_for(count, slots)
        yield from (ids[i : i + size] for i in range(0, len(ids), size))


def _condemned(batch: pa.Table, blamed: dict[str, CrashRecord]) -> pa.Table:
    """The batch with the rows whose blame is final made bad ones, as the source does with rows it cannot read."""
    final = {id: blame for id, blame in blamed.items() if blame.is_final}
    if not final:
        return batch
    rows = batch.to_pylist()
    for row in rows:
        if row["request_id"] in final:
            blame = final[row["request_id"]]
            row["error_code"] = DIED
            row["error_message"] = (
                f"{place_of(row)}: {blame.deaths} workers died while they answered it ({blame.reason}): {FIX}"
            )
    return pa.Table.from_pylist(rows, batch.schema)


def _rows_of(batch: pa.Table, ids: list[str]) -> pa.Table:
    wanted = set(ids)
    return batch.filter(pa.array([id in wanted for id in batch["request_id"].to_pylist()], pa.bool_()))


def _in_order(answers: pa.Table, ids: list[str]) -> pa.Table:
    """The rows of each request where it stood in the batch; samples stay in order."""
    place = {id: i for i, id in enumerate(ids)}
    places = [place[id] for id in answers["request_id"].to_pylist()]
    return answers.take(pa.array(sorted(range(len(places)), key=places.__getitem__), pa.int64())).combine_chunks()
