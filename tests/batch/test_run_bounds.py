"""finish_by and max_dollars: what they name, what is foreseen, and a stop that loses nothing."""

import asyncio
import json
import threading
import time
import warnings
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pyarrow as pa
import pytest

from eagle_ray.batch.driver.auto_restart import deadline_flags
from eagle_ray.batch.driver.run_bounds import (
    DEADLINE,
    DOLLARS,
    LATE,
    NEARLY_SPENT,
    NO_BOUNDS,
    OVER_BUDGET,
    Pace,
    RunBounds,
)
from eagle_ray.batch.driver.status import format_progress
from eagle_ray.batch.driver.stopped import command_of
from eagle_ray.batch.worker.embedding_worker import make_worker
from eagle_ray.batch.worker.progress import Progress, ProgressActor, WorkerReport
from eagle_ray.batch.worker.worker import Worker
from eagle_ray.config import JobConfig
from eagle_ray.config.deadline import check_deadline, deadline_of
from eagle_ray.config.job import ExecutionConfig
from eagle_ray.core.errors import ConfigError
from eagle_ray.report.cost import bounds_lines
from tests.support.embedders import embedding_job, write_embedder
from tests.support.inputs import TINY
from tests.support.jobs import (
    FACTS,
    exit_code,
    ids_of,
    rows_of,
    small_job,
    token_rows,
    with_changes,
)
from tests.support.workers import answers, arguments_of, batches_of, outputs, wait_until

NOW = datetime(2026, 11, 29, 20, 30, tzinfo=timezone.utc)
PACE = Pace(seconds_left=3600, drain_s=60, worker_s=7200, num_workers=2, gpus_per_worker=0)


@pytest.mark.parametrize(
    ("text", "moment"),
    [
        ("4h", "2026-11-30T00:30:00+00:00"),
        ("1d2h30m5s", "2026-11-30T23:00:05+00:00"),
        ("90m", "2026-11-29T22:00:00+00:00"),
        ("06:00 UTC", "2026-11-30T06:00:00+00:00"),
        ("21:00 UTC", "2026-11-29T21:00:00+00:00"),
        ("6:00 America/New_York", "2026-11-30T06:00:00-05:00"),
        ("2026-12-24T18:00:00+01:00", "2026-12-24T18:00:00+01:00"),
        ("2026-12-24T18:00Z", "2026-12-24T18:00:00+00:00"),
    ],
)
def test_deadlines(text, moment):
    assert deadline_of(text, NOW).isoformat() == moment


def test_the_next_six_of_a_clock_that_is_set_back_meanwhile():
    """In Berlin, 2026-10-25 has 25 hours."""
    evening = datetime(2026, 10, 24, 20, 0, tzinfo=timezone.utc)
    assert deadline_of("06:00 Europe/Berlin", evening).isoformat() == "2026-10-25T06:00:00+01:00"


def test_a_clock_of_this_machine_that_is_set_back_meanwhile(monkeypatch):
    monkeypatch.setenv("TZ", "Europe/Berlin")
    time.tzset()
    try:
        evening = datetime(2026, 10, 24, 20, 0, tzinfo=timezone.utc)
        assert deadline_of("06:00", evening).isoformat() == "2026-10-25T06:00:00+01:00"
        assert deadline_of("23:00", evening).isoformat() == "2026-10-24T23:00:00+02:00"
    finally:
        monkeypatch.undo()
        time.tzset()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "is no time"),
        ("0h", "a duration of nothing"),
        ("25:00", "no time of day"),
        ("06:00 Mars/Olympus", "'Mars/Olympus' is no time zone"),
        ("06:00 ../../etc/passwd", "no time zone"),
        ("2026-12-24T18:00", "has no zone"),
        ("soon", "'soon' is no time"),
        ("9999999h", "is no time"),
        ("99999d", ""),
    ],
)
def test_what_names_no_moment_is_refused(text, words):
    if text == "99999d":
        assert check_deadline(text) == text
        return
    with pytest.raises(ValueError, match=words):
        check_deadline(text)


def test_dollars_need_a_price(make_job):
    with pytest.raises(ConfigError, match=r"execution\.max_dollars: .*price_per_hour is not set"):
        make_job(token_rows(1), **{"execution.max_dollars": 5})
    with pytest.raises(ConfigError, match=r"execution\.finish_by: .*such as 06:00"):
        make_job(token_rows(1), **{"execution.finish_by": "soon"})


def bounds_of(**keys) -> RunBounds:
    return RunBounds.of(ExecutionConfig(**keys), NOW)


def test_forecast_of_a_run_within_its_bounds():
    bounds = bounds_of(price_per_hour=3.0, max_dollars=12.5, finish_by="2h", on_late="stop")
    forecast = bounds.forecast(PACE, NOW)
    assert forecast.ends_at == NOW + timedelta(hours=1)
    assert (forecast.spent, forecast.dollars) == (6.0, 12.0)
    assert forecast.drained == pytest.approx(6.1)
    assert bounds.warnings(forecast) == {} and bounds.reason_to_stop(forecast) is None
    assert forecast.as_json()["finish_by"] == "2026-11-29T22:30:00+00:00"


def test_a_late_run_is_announced_and_stops_only_if_asked():
    for on_late in ("warn", "stop"):
        bounds = bounds_of(finish_by="50m", on_late=on_late)
        assert "10.0 min after" in bounds.warnings(bounds.forecast(PACE, NOW))[LATE]
        assert bounds.reason_to_stop(bounds.forecast(PACE, NOW)) is None
        for seconds in (-1, 0, 1):  # rows in engines need the last minute
            near = NOW + timedelta(minutes=49, seconds=seconds)
            reason = bounds.reason_to_stop(bounds.forecast(PACE, near))
            assert reason == (DEADLINE if on_late == "stop" and seconds >= 0 else None)


def test_a_run_stops_before_rows_in_engines_would_cost_too_much():
    bounds = bounds_of(price_per_hour=3.0, max_dollars=6.1)
    assert "cost $12.00" in bounds.warnings(bounds.forecast(PACE, NOW))[OVER_BUDGET]
    assert bounds.reason_to_stop(bounds.forecast(PACE, NOW)) == DOLLARS
    cheaper = bounds_of(price_per_hour=3.0, max_dollars=6.2)
    assert cheaper.reason_to_stop(cheaper.forecast(PACE, NOW)) is None


def test_a_run_is_warned_once_nine_tenths_are_spent():
    def warned(max_dollars: float) -> bool:
        bounds = bounds_of(price_per_hour=3.0, max_dollars=max_dollars)
        return NEARLY_SPENT in bounds.warnings(bounds.forecast(PACE, NOW))

    assert warned(6.6) and not warned(6.8)  # six are spent


def test_spot_nodes_have_a_price_of_their_own():
    bounds = bounds_of(price_per_hour={"on_demand": 3.0, "spot": 1.0}, max_dollars=8.0)
    pace = replace(PACE, spot_s=3600.0, num_spot=1)
    assert bounds.forecast(pace, NOW).spent == 4.0
    assert bounds.forecast(pace, NOW).dollars == pytest.approx(8.0)
    usage = {"elapsed_s": 3600.0, "worker_s": 7200.0, "spot_s": 7200.0, "gpus_per_worker": 0}
    bounds.check_start(usage, NOW)
    with pytest.raises(ConfigError, match=r"is not more than the \$8.00"):
        bounds.check_start(usage | {"worker_s": 14_400.0}, NOW)


def test_nothing_is_foreseen_before_the_first_row():
    bounds = bounds_of(price_per_hour=3.0, max_dollars=1.0, finish_by="1s")
    forecast = bounds.forecast(Pace(None, 0.0, 10.0, 1, 0), NOW)
    assert (forecast.ends_at, forecast.dollars) == (None, None)
    assert bounds.warnings(forecast) == {} and bounds.reason_to_stop(forecast) is None
    assert RunBounds.of(ExecutionConfig(), NOW) == NO_BOUNDS


def test_starts_that_could_begin_no_row_are_refused():
    usage = {"elapsed_s": 3600.0, "worker_s": 7200.0, "gpus_per_worker": 0}
    with pytest.raises(ConfigError, match=r"execution\.finish_by: 2026-11-29T20:31.* is past"):
        bounds_of(finish_by="1m").check_start(None, NOW + timedelta(hours=1))
    bounds = bounds_of(price_per_hour=3.0, max_dollars=6.0)
    with pytest.raises(ConfigError, match=r"max_dollars: \$6.00 is not more than the \$6.00 that"):
        bounds.check_start(usage, NOW)
    bounds.check_start(None, NOW)
    with pytest.raises(ConfigError, match="what earlier attempts have spent is not known"):
        bounds.check_start(None, NOW, is_known=False)
    bounds_of(price_per_hour=3.0, max_dollars=6.01).check_start(usage, NOW)


def test_seconds_of_a_row_are_those_of_the_slots_that_it_held():
    progress = Progress()
    assert progress.row_s == 0.0
    work = {"num_steps": 100}
    progress.add(WorkerReport("a", 400, 800, engine_s=10.0, work=work, rows=4))  # 0.1 s a step
    progress.add(WorkerReport("b", 400, 800, engine_s=10.0, work=work, rows=12))
    assert progress.row_s == pytest.approx(0.1 * 800 / 16)


def test_workers_hear_of_a_stop():
    actor = ProgressActor(num_workers=1)
    assert actor.is_admitting()
    actor.stop_admission()
    assert not actor.is_admitting()


@pytest.mark.parametrize("turns", [False, True], ids=["samples", "turns"])
def test_rows_that_have_begun_end_whole_and_others_do_not_begin(make_job, turns):
    """Two slots, and three samples of a row or three turns of a conversation."""
    rows = token_rows(6)
    settings = {"execution.slots": 2, "sampling.max_tokens": 60, "sampling.ignore_eos": True}
    settings |= {"execution.order": "input", "speculative.method": "none"}
    if turns:
        rows = [{"id": row["id"], "turns": ["Hello.", "Really?", "Go on."]} for row in rows]
        settings |= {"input.columns.turns": "turns", "sampling.max_tokens": 30}
        settings |= {"model.target": "embedded:tiny", "model.draft": "embedded:tiny"}
    else:
        settings["sampling.n"] = 3
    config = make_job(rows, **settings)
    whole = outputs(answers(config)) if not turns else None
    worker = Worker(*arguments_of(config))
    [batch] = batches_of(config)
    tables = []

    def answer() -> None:
        tables.append(loop.run_until_complete(worker.answer(batch)))

    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=answer)
    thread.start()
    wait_until(lambda: worker.engine.occupancy().num_running == 2)
    loop.call_soon_threadsafe(worker.stop_admission)
    thread.join(60)
    later = loop.run_until_complete(worker.answer(batch))
    worker.close()
    [table] = tables
    found, columns = table.to_pylist(), table.column_names
    assert len(later) == 0 and later.column_names == columns
    ids = {row["request_id"] for row in found}
    assert 0 < len(ids) < 6 and all(row["status"] == "ok" for row in found)
    assert len(found) == 3 * len(ids)
    if whole is not None:
        assert outputs(found).items() <= whole.items()


def rows_of_kind(kind: str, make_job, tmp_path) -> JobConfig:
    """A job of four rows of turns, of continuations or of embeddings."""
    if kind == "embeddings":
        rows = [{"id": str(i), "prompt": "hello"} for i in range(4)]
        return embedding_job(tmp_path, write_embedder(tmp_path / "t"), rows)
    if kind == "scores":
        rows = [{"id": str(i), "prompt": "The", "continuations": [" fox", "s"]} for i in range(4)]
        return make_job(rows, **TINY)
    rows = [{"id": str(i), "turns": ["Hello.", "Really?"]} for i in range(4)]
    return make_job(rows, **TINY, **{"input.columns.turns": "turns"})


@pytest.mark.parametrize("ticks", [1, 2, 3, 5])
@pytest.mark.parametrize("kind", ["turns", "scores", "embeddings"])
def test_a_row_taken_back_before_it_has_a_slot_never_begins(make_job, tmp_path, kind, ticks):
    """The engine waits, so that no row gets a slot, and the stop comes after some turns of the event loop."""
    config = rows_of_kind(kind, make_job, tmp_path)
    worker = make_worker(*arguments_of(config))
    [batch] = batches_of(config)
    go_on = threading.Event()

    async def stop_early() -> pa.Table:
        waiting = asyncio.create_task(worker.engine.call(lambda engine: go_on.wait(60)))
        await asyncio.sleep(0)
        answer = asyncio.create_task(worker.answer(batch))
        for _ in range(ticks):
            await asyncio.sleep(0)
        worker.stop_admission()
        go_on.set()
        await waiting
        return await answer

    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            assert len(asyncio.run(stop_early())) == 0
    finally:
        worker.close()
    assert not [each for each in caught if "never awaited" in str(each.message)]


@pytest.mark.parametrize("kind", ["scores", "embeddings"])
def test_rows_without_outputs_that_have_begun_end_whole(make_job, tmp_path, kind, monkeypatch):
    """The stop comes when the engine has computed the first row's prompt."""
    config = rows_of_kind(kind, make_job, tmp_path)
    settings = {"slots": 1, "order": "input"}
    config = with_changes(config, execution=settings)
    worker = make_worker(*arguments_of(config))
    [batch] = batches_of(config)
    began, go_on = threading.Event(), threading.Event()
    step = worker.engine.step_loop.engine.step

    def held_step() -> list:
        finished = step()
        began.set()
        go_on.wait(60)
        return finished

    monkeypatch.setattr(worker.engine.step_loop.engine, "step", held_step)

    async def stop_later() -> pa.Table:
        answer = asyncio.create_task(worker.answer(batch))
        await asyncio.to_thread(began.wait, 60)
        worker.stop_admission()
        go_on.set()
        return await answer

    try:
        found = asyncio.run(stop_later()).to_pylist()
    finally:
        worker.close()
    assert [(row["request_id"], row["status"]) for row in found] == [("0", "ok")]


def test_commands_are_recorded_without_secrets():
    assert command_of(["/x/eagle-ray", "run", "-c", "a b.yaml"]) == "eagle-ray run -c 'a b.yaml'"
    assert command_of(["/x/pytest", "-q"]) is None
    assert command_of(["eagle-ray", "run", "--set", "on_finish.webhook=https://secret"]) is None


def test_a_restart_gets_the_moment_and_not_the_duration(make_job):
    flag, text = deadline_flags(make_job(token_rows(1), **{"execution.finish_by": "4h"}))
    left = datetime.fromisoformat(text) - datetime.now(timezone.utc)
    assert flag == "--finish-by" and timedelta(hours=3, minutes=59) < left <= timedelta(hours=4)
    assert deadline_flags(make_job(token_rows(1))) == []


def test_what_a_run_says_of_its_bounds():
    record = {"finish_by": "2026-11-30T06:00:00+01:00", "finished_at": "2026-11-30T04:30:00+00:00"}
    lines = bounds_lines(record | {"max_dollars": 40.0, "dollars": 38.2})
    assert lines == [
        "deadline: 2026-11-30T06:00+01:00; the last row was done 30.0 min before it",
        "limit: $40.00; $38.20 were spent",
    ]
    late = record | {"finished_at": "2026-11-30T05:00:30+00:00", "max_dollars": None}
    assert bounds_lines(late)[0].endswith("was done 30 s after it") and bounds_lines(None) == []
    forecast = {"finish_by": "2026-11-30T06:00:00+01:00", "ends_at": "2026-11-30T05:10:00+01:00"}
    facts = FACTS | {"forecast": forecast | {"max_dollars": 40.0, "spent": 3.5, "dollars": 31.0}}
    *_, end, money = format_progress(facts)
    assert end.startswith("ends 11-30 ") and money == "$3.50 of $40.00 spent"


@pytest.mark.slow
def test_a_job_stops_at_its_dollars_and_goes_on_with_more(ray_session, tmp_path):
    settings = {"execution.slots": 1, "sampling.max_tokens": 400, "sampling.ignore_eos": True}
    settings |= {"speculative.method": "none", "execution.price_per_hour": 3600.0}
    settings |= {"execution.rows_per_file": 4, "execution.ray_address": "auto"}
    config = small_job(tmp_path, token_rows(60), **settings | {"execution.max_dollars": 12.0})
    output = Path(config.output.path)
    assert exit_code(config) == 8
    record = json.loads((output / "_STOPPED.json").read_text())
    begun = len(set(ids_of(config)))
    assert 0 < begun < 60 and record["rows_left"] == 60 - begun
    assert record["reason"] == "max_dollars" and 10 < record["spent"] < 18
    assert not (output / "_SUCCESS").exists()
    assert exit_code(config) == 2  # it would begin no row
    more = with_changes(config, execution={"max_dollars": None, "finish_by": "10h"})
    assert exit_code(more) == 0
    assert len(rows_of(more)) == len(set(ids_of(more))) == 60
    assert (output / "_SUCCESS").exists() and not (output / "_STOPPED.json").exists()
