"""Isolation: who is answered with whom, in which order, and what becomes of a row that always kills."""

import asyncio
import pickle
from dataclasses import dataclass, field

import pyarrow as pa
import pytest

from eagle_ray.batch.worker.crash_isolation import (
    KILLED,
    MAX_CRASHES,
    WORKER_DIED,
    CrashLog,
    CrashRecord,
    Isolation,
    max_group_size,
)
from eagle_ray.core.errors import EngineError
from eagle_ray.core.shared_lock import SharedExclusiveLock
from eagle_ray.requests.row_schema import request_schema, table_of

KILLER = "k"
CRASH = "the engine's process was ended by signal 9"


class ActorKilled(Exception):
    """The actor's own process is gone, and its engine with it."""


@dataclass
class FragileEngine:
    """Two rows of output for each request, unless a killer is among those in flight, or more than fit."""

    killers: set = field(default_factory=set)  # of the engine
    actor_killers: set = field(default_factory=set)
    max_in_flight: int = 1000
    in_flight: list = field(default_factory=list)
    company: dict = field(default_factory=dict)  # the most others that each id was in flight with
    saved: list = field(default_factory=list)  # logs, pickled
    num_crashes: int = 0
    is_dead: bool = False
    is_actor_gone: bool = False  # nothing happens any more

    async def answer(self, rows: pa.Table) -> pa.Table:
        assert not self.is_dead, "no row is given to a dead engine"
        ids = [row["request_id"] for row in rows.to_pylist() if row["error_code"] is None]
        self.in_flight += ids
        for id in self.in_flight:
            self.company[id] = max(self.company.get(id, 0), len(self.in_flight) - 1)
        await asyncio.sleep(0.001)
        if self.actor_killers & set(self.in_flight):
            self.is_actor_gone = True
            raise ActorKilled
        if (
            self.is_dead
            or self.killers & set(self.in_flight)
            or len(self.in_flight) > self.max_in_flight
        ):
            self.is_dead = True
            raise EngineError(CRASH)
        for id in ids:
            self.in_flight.remove(id)
        codes = {row["request_id"]: row["error_code"] for row in rows.to_pylist()}
        return pa.Table.from_pylist(
            [{"request_id": id, "sample": j, "error": codes[id]} for id in codes for j in range(2)],
            pa.schema(
                [("request_id", pa.string()), ("sample", pa.int64()), ("error", pa.string())]
            ),
        )

    async def restart(self, error: EngineError) -> None:
        assert self.is_dead
        await asyncio.sleep(0.001)
        self.in_flight, self.is_dead, self.num_crashes = [], False, self.num_crashes + 1

    async def save(self, log: CrashLog) -> None:
        if self.is_actor_gone:
            await asyncio.Event().wait()
        self.saved.append(pickle.dumps(log))


def requests(ids) -> pa.Table:
    return table_of(
        [{"request_id": id, "row_index": i, "source_file": "f"} for i, id in enumerate(ids)], SCHEMA
    )


SCHEMA = request_schema([])


def run(
    batches: list[list[str]], engine: FragileEngine, log: CrashLog | None = None, slots: int = 8
) -> list[pa.Table]:
    """One process of an actor: all batches at once. Raises ActorKilled."""
    isolation = Isolation(engine, log or CrashLog(), slots)

    async def all_at_once():
        return await asyncio.gather(*(isolation.run_batch(requests(ids)) for ids in batches))

    return asyncio.run(all_at_once())


def run_again(batches: list[list[str]], actor_killers: set) -> tuple[list[pa.Table], int]:
    """As Ray does it: the batches again and again, until they are answered. Returns the actor's ends, too."""
    log = CrashLog()
    for num_ends in range(40):
        engine = FragileEngine(actor_killers=actor_killers)
        try:
            return run(batches, engine, log), num_ends
        except ActorKilled:
            log = pickle.loads(engine.saved[-1])
    raise AssertionError("no end of it")


def errors_of(tables: list[pa.Table]) -> set[str]:
    """The requests whose answers are error rows."""
    return {
        row["request_id"]
        for table in tables
        for row in table.to_pylist()
        if row["error"] == WORKER_DIED
    }


def ids_of(tables: list[pa.Table]) -> list[str]:
    return [row["request_id"] for table in tables for row in table.to_pylist()]


def test_batches_without_crashes_run_together_and_save_one_log():
    engine = FragileEngine()
    tables = run([["a", "b"], ["c", "d"]], engine)
    assert engine.company["d"] == 3 and ids_of(tables[:1]) == ["a", "a", "b", "b"]
    assert [pickle.loads(log) for log in engine.saved] == [CrashLog(in_flight=None)]


KILLERS = pytest.mark.parametrize(
    "killers", [{"k"}, {"k", "b"}, {"a", "b", "c", "d", "k", "e", "f"}]
)
BATCHES = [["a", "b", "c"], ["d", KILLER, "e"], ["f"]]


@KILLERS
def test_killers_become_error_rows_and_everyone_else_is_answered(killers):
    engine = FragileEngine(killers)
    tables = run(BATCHES, engine)
    assert ids_of(tables) == [id for batch in BATCHES for id in batch for _ in range(2)]
    assert errors_of(tables) == killers
    assert engine.num_crashes <= 1 + 3 * len(killers)


@KILLERS
def test_so_do_those_that_end_the_actor_itself(killers):
    tables, num_ends = run_again(BATCHES, killers)
    assert ids_of(tables) == [id for batch in BATCHES for id in batch for _ in range(2)]
    assert errors_of(tables) == killers
    assert num_ends <= 1 + 3 * len(killers)


def test_only_one_killer_takes_four_crashes():
    engine = FragileEngine({KILLER})
    run([["a", "b", "c"], ["d", KILLER, "e"], [f"q{i}" for i in range(40)]], engine)
    assert engine.num_crashes == MAX_CRASHES


def test_rows_that_crash_in_large_groups_run_in_smaller_groups():
    engine = FragileEngine(max_in_flight=4)
    tables = run([[f"q{i}" for i in range(10)], ["a", "b"]], engine, slots=16)
    assert not errors_of(tables) and len(ids_of(tables)) == 24 and engine.num_crashes == 1


def test_the_error_names_file_row_count_reason_and_fix():
    log, seen = CrashLog(), []
    for _ in range(MAX_CRASHES):
        log.charge([KILLER], "out of memory")

    class RowRecordingEngine(FragileEngine):
        async def answer(self, rows: pa.Table) -> pa.Table:
            seen.extend(rows.to_pylist())
            return rows

    run([["a", KILLER]], RowRecordingEngine(), log)
    assert seen[0]["error_code"] is None and seen[1]["error_code"] == WORKER_DIED
    message = seen[1]["error_message"]
    assert message.startswith(
        "f, row 1 (counted from 0): 4 workers died while they answered it (out of memory): shorten"
    )


def test_suspects_run_in_small_groups_then_alone_and_are_cleared():
    log, engine = CrashLog(), FragileEngine()
    ids = [f"q{i}" for i in range(8)]
    log.charge(ids, "killed")
    log.charge(ids[:2], "killed")
    run([ids[:4], ids[4:], ["new", "er"]], engine, log)
    assert [engine.company[id] for id in ids] == [0, 0, 1, 1, 1, 1, 1, 1]
    assert log.records == {}


def test_suspects_are_on_record_before_the_engine_has_them():
    log = CrashLog()
    log.charge(["a", "b"], "killed")
    engine = FragileEngine(actor_killers={"b"})
    with pytest.raises(ActorKilled):
        run([["a", "b", "c"]], engine, log)
    left = pickle.loads(engine.saved[-1])
    assert left.in_flight == ["a", "b"]
    log.charge(["a", "b"], KILLED)
    Isolation(engine, left, slots=8)  # the next process
    assert left.records == log.records


def test_resent_batches_are_suspects_if_nothing_was_recorded():
    engine = FragileEngine()
    isolation = Isolation(engine, CrashLog(in_flight=None), slots=8)

    async def twice():
        await asyncio.gather(
            *(isolation.run_batch(requests(ids)) for ids in (["a", "b", "c"], ["d"]))
        )
        await isolation.run_batch(requests(["e", "f", "g", "h"]))

    asyncio.run(twice())
    assert engine.company == {"a": 1, "b": 1, "c": 0, "d": 0, "e": 3, "f": 3, "g": 3, "h": 3}


def test_an_actor_that_ended_while_it_loaded_leaves_no_suspect():
    log = CrashLog()
    log.charge(["a"], CRASH)
    Isolation(FragileEngine(), log, slots=8)
    assert log.records == {"a": CrashRecord(1, CRASH)}


def test_an_answer_clears_a_row_but_a_final_verdict_stands():
    log = CrashLog()
    for _ in range(MAX_CRASHES + 1):
        log.charge([KILLER], CRASH)
    log.charge(["accident"], CRASH)
    log.clear([KILLER, "accident", "new"])
    assert log.records == {KILLER: CrashRecord(MAX_CRASHES, CRASH)} and log.records[KILLER].is_final
    assert not log.suspects([KILLER, "accident"])


def test_the_company_shrinks_to_nobody():
    assert [max_group_size(crashes, slots=16) for crashes in (1, 2, 3)] == [4, 1, 1]
    assert max_group_size(1, slots=2) == 1


def test_a_batch_without_rows_is_answered():
    assert ids_of(run([[]], FragileEngine())) == []


def test_waiting_exclusive_lock_precedes_later_shared_locks():
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
        await asyncio.gather(
            together("a"), together("b"), alone("X"), alone("Y"), together("c"), together("d")
        )

    asyncio.run(all_at_once())
    assert sorted(order[:4]) == ["a", "a", "b", "b"] and order[4:8] in (list("XXYY"), list("YYXX"))
    assert order[8:] == ["c", "d", "c", "d"]
