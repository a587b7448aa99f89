"""The sum of what workers report, whether a failing one ends the job, and when to give up."""

import asyncio
import json
import logging
import os
import signal
import time
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import ray
from ray.exceptions import RayActorError

from eagle_ray.assembly.worker_plan import WorkerPlan
from eagle_ray.batch.driver import progress_monitor
from eagle_ray.batch.driver.cluster import RayMessages
from eagle_ray.batch.driver.progress_monitor import (
    STALL_LIMITS_S,
    Limits,
    ProgressMonitor,
    UsageMeter,
    count_rows,
    stall_error,
    waited_for,
)
from eagle_ray.batch.driver.signals import interruptible
from eagle_ray.batch.worker import actor, engine_process
from eagle_ray.batch.worker.crash_isolation import CrashLog
from eagle_ray.batch.worker.progress import (
    JobMetrics,
    Progress,
    ProgressActor,
    WorkerReport,
    start_progress,
)
from eagle_ray.core.counters import EngineCounters
from eagle_ray.runs.job_errors import ClusterError, TooManyErrors, outcome_of
from eagle_ray.storage.path import StoragePath
from tests.support import workers
from tests.support.jobs import token_rows
from tests.support.workers import LAST_WORD, LASTS, arguments_of, batches_of, pid_of, wait_until


def test_a_report_replaces_the_one_before():
    progress = Progress()
    progress.add(WorkerReport("a", 1, 2, 1.0, rows=3, output_tokens=30))
    progress.add(WorkerReport("a", 2, 4, 5.0, rows=5, output_tokens=50))
    progress.add(WorkerReport("b", 2, 2, 2.0, rows=1, output_tokens=10))
    assert (progress.rows, progress.output_tokens, progress.busy_slots) == (6, 60, 4 / 6)
    assert progress.engine_s == (5 + 2) / 2 and Progress().engine_s == 0


def test_tokens_of_rows_in_flight_are_work_and_not_answers():
    counters = EngineCounters(num_slots=4, num_output_tokens=500)
    answered = pa.table(
        {
            "status": ["ok"],
            "completion_tokens": [9],
            "num_spec_steps": [4],
            "num_accepted_draft_tokens": [5],
        }
    )
    progress, report = Progress(), WorkerReport.of("a", counters).with_batch(answered, counters)
    progress.add(report)
    assert (progress.output_tokens, progress.made_tokens) == (9, 500)
    counters.num_output_tokens = 700
    progress.add(report.with_counters(counters))
    assert (progress.rows, progress.output_tokens, progress.made_tokens) == (1, 9, 700)
    assert progress.mean_acceptance_length == 1 + 5 / 4


def test_a_planners_failure_stands_by_worker_and_is_counted():
    progress, counters = Progress(), EngineCounters(num_slots=4)
    progress.add(WorkerReport.of("a", counters))
    assert progress.planner_errors == {} and progress.work["num_planner_failures"] == 0
    counters.planner_error = "ZeroDivisionError: no seconds"
    progress.add(WorkerReport.of("b", counters))
    assert progress.planner_errors == {"b": "ZeroDivisionError: no seconds"}
    assert progress.work["num_planner_failures"] == 1


def test_what_does_not_run_on_a_gpu_stands_by_worker():
    progress, counters = Progress(), EngineCounters(num_slots=4)
    progress.add(WorkerReport.of("a", counters))
    assert progress.fallbacks == {}
    counters.fallbacks = {"kernels": "there is no C compiler"}
    progress.add(WorkerReport.of("b", counters))
    assert progress.fallbacks == {"b": {"kernels": "there is no C compiler"}}


def test_only_a_good_row_resets_the_consecutive_starts():
    progress = Progress()
    for _ in range(3):
        progress.add_start()
    progress.add(WorkerReport("a", 0, 0))
    progress.add(WorkerReport("a", 0, 0, rows=2, errors=2))
    assert progress.consecutive_starts == 3
    progress.add(WorkerReport("a", 0, 0, rows=3, errors=2))
    assert (progress.consecutive_starts, progress.starts) == (0, 3)


def test_files_are_counted_once_and_opened_only_if_unreported(tmp_path):
    book = ProgressActor(num_workers=1)
    for _ in range(2):
        book.add_file("part-002-000000.parquet", 5)
    assert book.snapshot().rows_in_files == 5
    book.report(WorkerReport("w", 0, 0, rows=2))
    assert book.snapshot().rows == 5  # the worker's report comes after the file's
    book.report(WorkerReport("w", 0, 0, rows=8))
    assert book.snapshot().rows == 8
    (tmp_path / "part-002-000000.parquet").write_bytes(b"not opened")
    (tmp_path / "a=1").mkdir()
    pq.write_table(pa.table({"x": [1, 2]}), tmp_path / "a=1" / "part-002-000001.parquet")
    pq.write_table(pa.table({"x": [1]}), tmp_path / "part-001-000000.parquet")  # of another attempt
    assert count_rows(StoragePath.of(tmp_path), 2, book.files()) == 7


def test_a_hopeless_job_is_given_up():
    limits, progress = Limits(max_error_rate=0.1, max_starts=4), Progress()
    for i in range(4):
        progress.add(WorkerReport(f"worker {i}", 0, 0, rows=24, errors=12))
    assert limits.exceeded_by(progress) is None  # 96 rows say little
    progress.add(WorkerReport("worker 4", 0, 0, rows=24))
    assert isinstance(limits.exceeded_by(progress), TooManyErrors)
    assert Limits(1.0, max_starts=4).exceeded_by(progress) is None
    progress.notes.append("worker a:1 ends: device fault")
    for _ in range(5):
        progress.add_start()
    reason = Limits(1.0, max_starts=4).exceeded_by(progress)
    assert isinstance(reason, ClusterError) and "device fault" in str(reason)


@pytest.mark.parametrize(
    ("starts", "lacks_memory", "waiting_for", "words"),
    [
        (0, False, "workers to start", "`ray status`"),
        (3, True, "memory", "memory is nearly full"),
        (3, False, None, ""),
    ],
)
def test_what_a_job_waits_for_is_known_and_has_an_end(starts, lacks_memory, waiting_for, words):
    progress = Progress(starts=starts)
    assert waited_for(progress, lacks_memory) == waiting_for
    assert stall_error(waiting_for, 1.0) is None
    if waiting_for is None:
        assert stall_error(waiting_for, 1e9) is None
        return
    error = stall_error(waiting_for, STALL_LIMITS_S[waiting_for] + 1)
    assert (
        outcome_of(error).is_transient
        and words in str(error)
        and str(error).endswith("again to resume.")
    )


def test_job_whose_workers_cannot_report_ends_with_the_reason(monkeypatch, tmp_path, messages):
    """Ray ends them, and the actor that counts, as long as memory is short."""
    logging.getLogger("eagle_ray").setLevel(logging.INFO)

    def get(*_: object, **__: object) -> None:
        raise RayActorError

    received = RayMessages()
    received.memory_kill_at = time.monotonic()
    monkeypatch.setattr(progress_monitor, "ray_messages", received)
    monkeypatch.setattr(progress_monitor, "STALL_LIMITS_S", {"memory": 0.5})
    monkeypatch.setattr(ray, "get", get)
    output = StoragePath.of(tmp_path)
    run = SimpleNamespace(
        output=output, run_id="a", attempt=1, check_current=lambda: None, publish=lambda *_: None
    )
    actor = SimpleNamespace(snapshot=SimpleNamespace(remote=lambda: None))
    monitor = ProgressMonitor(actor, run, 8, 0.1, Limits(0.1, 9), WorkerPlan(1, 1, 0, 1))
    words = r"no row was answered for \d+ s: .* memory is nearly full"
    with pytest.raises(ClusterError, match=words), interruptible(), monitor:
        time.sleep(60)
    assert any(line.endswith("waiting for memory") for line in messages)


def test_the_rate_of_a_job_that_ended_is_that_of_its_answers(monkeypatch, tmp_path):
    """While it runs, tokens of rows in flight count, and those of rows that are made again."""
    progress, written = Progress(ready_at=time.monotonic() - 100), []
    progress.add(WorkerReport("a", 0, 0, work={"num_output_tokens": 900}, rows=8, output_tokens=90))
    monkeypatch.setattr(ray, "get", lambda answer, timeout: answer)
    output = StoragePath.of(tmp_path)
    run = SimpleNamespace(
        output=output,
        data=output,
        run_id="a",
        attempt=1,
        check_current=lambda: None,
        publish=lambda name, text: written.append(json.loads(text)),
    )
    actor = SimpleNamespace(
        snapshot=SimpleNamespace(remote=lambda: progress),
        files=SimpleNamespace(remote=lambda: {"part": 8}),
    )
    monitor = ProgressMonitor(actor, run, 8, 0.05, Limits(0.1, 9), WorkerPlan(1, 1, 0, 1))
    with interruptible(), monitor:
        wait_until(lambda: written)
    first, last = written[0], written[-1]
    assert first["tokens_per_s"] == pytest.approx(9, rel=0.1) and last[
        "tokens_per_s"
    ] == pytest.approx(0.9, rel=0.1)
    assert first["output_tokens"] == last["output_tokens"] == 90


def test_worker_reports_tokens_before_row_end_and_after_an_error(
    ray_session, make_job, monkeypatch, warm_python
):
    """The metrics fail once while the row is in flight, and are told of it again and again after that."""
    counts, count = [], JobMetrics.count

    def count_or_fail(metrics: JobMetrics, report: WorkerReport, answers: pa.Table | None) -> None:
        counts.append(report)
        if len(counts) == 3:
            raise OSError("the agent does not answer")
        count(metrics, report, answers)

    monkeypatch.setattr(JobMetrics, "count", count_or_fail)
    monkeypatch.setattr(actor, "COUNTERS_EVERY_S", 0.02)
    monkeypatch.setattr(actor, "REPORT_EVERY_S", 0.02)
    monkeypatch.setattr(engine_process, "WORKER", workers.CLASS)
    config, totals, seen = make_job(token_rows(1), name=LASTS), start_progress(num_workers=1), set()
    engine_actor = actor.EngineActor(*arguments_of(config), totals)

    def snapshot() -> Progress:
        return ray.get(totals.snapshot.remote())

    def has_grown() -> bool:
        now = snapshot()
        assert now.rows == now.output_tokens == 0
        seen.add(now.made_tokens)
        return len(seen) > 3 and len(counts) > 5

    async def answer() -> list[pa.Table]:
        batch = asyncio.ensure_future(anext(engine_actor(batches_of(config)[0])))
        await asyncio.to_thread(wait_until, has_grown)
        (StoragePath.of(config.output.path) / LAST_WORD).write_atomic(b"")
        return [await batch]

    try:
        assert [len(table) for table in asyncio.run(answer())] == [1]
        wait_until(lambda: snapshot().rows == 1)
    finally:
        os.kill(pid_of(counts[0].worker_id), signal.SIGKILL)
        ray.kill(totals)


def test_next_process_of_an_actor_gets_the_saved_crash_log():
    book = ProgressActor(num_workers=2)
    assert book.start("one") == CrashLog()
    log = CrashLog(in_flight=["a"])
    book.save("one", log)
    book.report_exit("host:1", "out of memory")
    assert book.start("one") == log and book.start("two") == CrashLog()
    assert book.snapshot().starts == 3 and book.snapshot().notes == [
        "worker host:1 ends: out of memory"
    ]


@pytest.mark.parametrize(
    ("is_local", "ready", "fatal"), [(False, 0, True), (True, 0, False), (False, 1, False)]
)
def test_failed_worker_start_is_fatal_unless_another_may_start(is_local, ready, fatal):
    book = ProgressActor(num_workers=2)
    for i in range(ready):
        book.report(WorkerReport(f"host:{i}", 0, 0))
    assert book.fail("one", ClusterError("no"), is_local) == fatal
    assert (book.snapshot().fatal is not None) == fatal
    if is_local:
        assert book.fail("one", ClusterError("no"), is_local) is False  # the same one again
        assert book.fail("two", ClusterError("no"), is_local) is True


def test_last_start_line_is_shown_until_a_worker_is_ready():
    book = ProgressActor(num_workers=2)
    assert book.snapshot().starting is None
    for line in (
        "reading the target's weights: 0.9 GB from here",
        "measuring the cost of steps: for up to 5 s",
    ):
        book.log(logging.INFO, line)
        book.log(logging.INFO, line)  # of the other worker
    assert len(book.snapshot().start_lines) == 2
    assert book.snapshot().starting == "measuring the cost of steps"
    book.report(WorkerReport("a", 0, 0))
    assert book.snapshot().starting is None


def test_worker_seconds_count_between_minimum_and_maximum():
    meter = UsageMeter(2, 4, 0.5, None, now=100.0)
    meter.update(0, 110.0)
    meter.update(3, 120.0)
    meter.update(9, 130.0)  # restarted ones
    assert meter.usage() == {
        "elapsed_s": 30.0,
        "worker_s": 20.0 + 30.0 + 40.0,
        "gpus_per_worker": 0.5,
    }


def test_workers_of_a_fleet_count_by_their_market():
    meter = UsageMeter(0, 4, 1, {"usage": {"elapsed_s": 1.0, "worker_s": 9.0, "spot_s": 2.0}}, 0.0)
    meter.update(3, 10.0, fleet=(2, 1))
    assert meter.usage()["worker_s"] == 29.0 and meter.usage()["spot_s"] == 12.0


def test_earlier_attempts_count_and_unknown_ones_make_it_unknown():
    earlier = {"usage": {"elapsed_s": 5.0, "worker_s": 7.0, "gpus_per_worker": 1}}
    meter = UsageMeter(1, 1, 1, earlier, now=0.0)
    meter.update(1, 2.0)
    assert meter.usage() == {"elapsed_s": 7.0, "worker_s": 9.0, "gpus_per_worker": 1}
    assert UsageMeter(1, 1, 1, {"elapsed_s": 3.0}, now=0.0).usage() is None
    assert UsageMeter(1, 1, 1, {"usage": None}, now=0.0).usage() is None
