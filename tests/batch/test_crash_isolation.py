"""Isolation: who is answered with whom, in which order, and what becomes of a row that always kills."""

import asyncio
from dataclasses import dataclass, field

import pyarrow as pa
import pytest

from eagle_ray.batch.worker.crash_isolation import WORKER_DIED, Isolation, SharedExclusiveLock
from eagle_ray.batch.worker.crash_tracker import MAX_CRASHES, CrashRecord, CrashTracker
from eagle_ray.requests.row_schema import request_schema, table_of

KILLER = "k"


class Died(Exception):
    """The process that the engine runs in."""


@dataclass
class Page:
    """A worker's part of the crash tracker, in this process."""

    tracker: CrashTracker

    async def begin(self, ids):
        return self.tracker.begin("w", ids)

    async def begin_suspects(self, ids):
        self.tracker.begin_suspects("w", ids)

    def finish(self, ids):
        self.tracker.finish("w", ids)


@dataclass
class FragileEngine:
    """Two rows of output for each request, unless a killer is among those in flight."""

    killers: set
    in_flight: list = field(default_factory=list)
    company: dict = field(default_factory=dict)  # the most others that each id was in flight with

    async def respond(self, rows: pa.Table) -> pa.Table:
        ids = [row["request_id"] for row in rows.to_pylist() if row["error_code"] is None]
        self.in_flight += ids
        for id in self.in_flight:
            self.company[id] = max(self.company.get(id, 0), len(self.in_flight) - 1)
        await asyncio.sleep(0.001)
        if self.killers & set(self.in_flight):
            raise Died
        for id in ids:
            self.in_flight.remove(id)
        codes = {row["request_id"]: row["error_code"] for row in rows.to_pylist()}
        return pa.Table.from_pylist(
            [{"request_id": id, "sample": j, "error": codes[id]} for id in codes for j in range(2)],
            pa.schema([("request_id", pa.string()), ("sample", pa.int64()), ("error", pa.string())]),
        )


def requests(ids) -> pa.Table:
    return table_of([{"request_id": id, "row_index": i, "source_file": "f"} for i, id in enumerate(ids)], SCHEMA)


SCHEMA = request_schema([])


def live(
    batches: list[list[str]], tracker: CrashTracker, killers: set, slots: int
) -> tuple[list[pa.Table], FragileEngine]:
    """One life of a worker: all batches at once. Raises Died."""
    engine = FragileEngine(killers)
    isolation = Isolation(engine.respond, Page(tracker), slots)

    async def all_at_once():
        return await asyncio.gather(*(isolation.run_batch(requests(ids)) for ids in batches))

    return asyncio.run(all_at_once()), engine


def lives(batches: list[list[str]], killers: set, slots: int = 8) -> tuple[list[pa.Table], FragileEngine, int]:
    """As Ray does it: the batches again and again, until they are answered. Returns the number of deaths, too."""
    tracker, count = CrashTracker(), 0
    while count < 40:
        try:
            return *live(batches, tracker, killers, slots), count
        except Died:
            tracker.record_crash("w", "killed")
            count += 1
    raise AssertionError("no end of deaths")


def test_without_deaths_all_go_together_and_in_order():
    tables, engine, count = lives([["a", "b"], ["c", "d"]], set())
    assert count == 0 and engine.company["d"] == 3
    assert [row["request_id"] for row in tables[0].to_pylist()] == ["a", "a", "b", "b"]


@pytest.mark.parametrize("killers", [{"k"}, {"k", "b"}, {"a", "b", "c", "d", "k", "e", "f"}])
def test_killers_become_error_rows_and_everyone_else_is_answered(killers):
    batches = [["a", "b", "c"], ["d", KILLER, "e"], ["f"]]
    tables, _, count = lives(batches, killers)
    rows = [row for table in tables for row in table.to_pylist()]
    assert [row["request_id"] for row in rows] == [id for batch in batches for id in batch for _ in range(2)]
    assert {row["request_id"] for row in rows if row["error"] == WORKER_DIED} == killers
    assert count <= 2 + 2 * len(killers)


def test_the_error_names_file_row_count_reason_and_fix():
    tracker = CrashTracker()
    for _ in range(MAX_CRASHES):
        tracker.begin_suspects("w", [KILLER])
        tracker.record_crash("w", "out of memory")
    seen = []

    async def respond(rows):
        seen.extend(rows.to_pylist())
        return rows

    asyncio.run(Isolation(respond, Page(tracker), 8).run_batch(requests(["a", KILLER])))
    assert seen[0]["error_code"] is None and seen[1]["error_code"] == WORKER_DIED
    message = seen[1]["error_message"]
    assert message.startswith(
        "f, row 1 (counted from 0): 4 workers died while they answered it (out of memory): shorten"
    )


def test_rows_with_blame_are_in_small_company_and_then_alone():
    tracker = CrashTracker()
    ids = [f"q{i}" for i in range(8)]
    tracker.begin_suspects("w", ids)
    tracker.record_crash("w", "killed")
    tracker.begin_suspects("w", ids[:2])
    tracker.record_crash("w", "killed")
    _, engine = live([ids[:4], ids[4:], ["new", "er"]], tracker, set(), slots=8)
    assert [engine.company[id] for id in ids] == [0, 0, 1, 1, 1, 1, 1, 1]
    assert tracker.begin("w", ids) == {}  # all cleared


def test_a_row_is_in_the_book_before_the_engine_sees_it():
    tracker = CrashTracker()

    async def respond(rows):
        ids = rows["request_id"].to_pylist()
        tracker.record_crash("w", "killed")
        assert all(id in tracker.begin("other", ids) for id in ids)
        return rows

    asyncio.run(Isolation(respond, Page(tracker), 8).run_batch(requests(["a", "b"])))


def test_who_wants_the_engine_alone_goes_before_those_who_come_later():
    order, engine = [], SharedExclusiveLock()

    async def together(name):
        async with engine.shared():
            order.append(name)
            await asyncio.sleep(0.01)
            order.append(name)

    async def alone(name):
        async with engine.exclusive():
            order.append(name)
            await asyncio.sleep(0.01)
            order.append(name)

    async def all_at_once():
        await asyncio.gather(together("a"), together("b"), alone("X"), alone("Y"), together("c"), together("d"))

    asyncio.run(all_at_once())
    assert sorted(order[:4]) == ["a", "a", "b", "b"] and order[4:8] in (list("XXYY"), list("YYXX"))
    assert order[8:] == ["c", "d", "c", "d"]


def test_blame_is_a_value_that_travels():
    assert CrashRecord(4, "x").is_final and not CrashRecord(3, "x").is_final
