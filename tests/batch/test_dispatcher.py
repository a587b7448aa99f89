"""Batches of engines that come and go: which engine gets one, and what waits."""

from __future__ import annotations

import asyncio

import pyarrow as pa

from eagle_ray.batch.driver.foresight import Foresight
from eagle_ray.batch.worker import dispatcher as module
from eagle_ray.batch.worker.dispatcher import Dispatcher, without
from eagle_ray.batch.worker.progress import Progress, WorkerReport, done_lengths
from eagle_ray.scaling.lengths import LengthCounts, bins_of


def test_the_engine_with_the_fewest_batches_gets_one():
    async def work() -> None:
        pool = Dispatcher(max_batches=2)
        await pool.register("a", "A")
        await pool.register("b", "B")
        got = [(await pool.acquire())[0] for _ in range(4)]
        assert sorted(got) == ["a", "a", "b", "b"] and got[:2] == ["a", "b"]
        waiting = asyncio.create_task(pool.acquire())
        await asyncio.sleep(0.01)
        assert not waiting.done() and (await pool.state()).num_waiting == 1
        await pool.release("b", is_lost=False)
        assert await waiting == ("b", "B")

    asyncio.run(work())


def test_an_engine_that_is_lost_or_let_go_gets_no_batch(monkeypatch):
    monkeypatch.setattr(module, "ENGINE_WAIT_S", 0.02)

    async def work() -> None:
        pool = Dispatcher(max_batches=2)
        await pool.place("a", "node")
        await pool.register("a", "A")
        assert (await pool.acquire())[0] == "a"
        await pool.release("a", is_lost=True)
        assert await pool.acquire() is None and not await pool.is_stopped()
        await pool.register("a", "A")  # its process was started again
        assert (await pool.acquire())[0] == "a"
        await pool.remove("a")
        await pool.release("a", is_lost=False)
        assert await pool.acquire() is None
        assert (await pool.state()).nodes == {"a": "node"}
        await pool.unregister("a")
        assert (await pool.state()).nodes == {}

    asyncio.run(work())


def test_a_run_that_stops_lets_batches_end_without_an_engine():
    async def work() -> None:
        pool = Dispatcher(max_batches=1)
        waiting = asyncio.create_task(pool.acquire())
        await asyncio.sleep(0)
        await pool.stop()
        assert await waiting is None and await pool.is_stopped()

    asyncio.run(work())


def test_rows_that_an_engine_has_not_begun_are_left():
    batch = pa.table({"request_id": ["a", "b", "c"]})
    answers = pa.table({"request_id": ["b", "b"]})
    assert without(batch, answers)["request_id"].to_pylist() == ["a", "c"]
    assert len(without(batch, pa.table({"request_id": ["a", "b", "c"]}))) == 0


def test_lengths_are_counted_by_category():
    answers = pa.table({"completion_tokens": [5, 7, None], "category": ["x", None, "x"]})
    lengths = done_lengths(answers)
    assert {name: (each.num_done, each.tokens) for name, each in lengths.items()} == {
        "x": (2, 5.0),
        "None": (1, 7.0),
    }
    assert done_lengths(answers.drop_columns(["category"]))["None"].num_done == 3


def report(rows: int, running: list[int]) -> Progress:
    counts = LengthCounts(running=bins_of(running))
    counts.add_done([10] * rows)
    work = {"num_steps": 10 * rows, "num_output_tokens": 10 * rows}
    progress = Progress()
    offered = 4 * work["num_steps"]
    progress.add(
        WorkerReport("w", offered, offered, work=work, rows=rows, lengths={"None": counts})
    )
    return progress


def test_a_run_is_foreseen_from_the_reports_of_its_workers():
    """Ten tokens a second in four slots: ten rows of ten tokens are ten seconds."""
    foresight = Foresight(num_rows=30, max_tokens=10)
    foresight.observe(report(0, [1] * 4), num_ready=1, now=0.0)
    foresight.observe(report(10, [1] * 4), num_ready=1, now=10.0)
    assert foresight.num_waiting == 16
    seconds = foresight.outlook.seconds_left(1)
    assert 18 < seconds.expected < 24 <= 1.3 * seconds.expected
    assert foresight.outlook.done_share < 0.4


def test_classes_that_were_counted_wait_by_themselves():
    foresight = Foresight(num_rows=30, max_tokens=100)
    done = []
    foresight.count_classes(lambda: done.append(1) or {"None": 20, "long": 10})
    while not done or len(foresight.classes_of(report(10, []))) == 1:
        pass
    classes = foresight.classes_of(report(10, []))
    assert {name: each.waiting for name, each in classes.items()} == {"None": 10, "long": 10}
