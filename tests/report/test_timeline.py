"""Tokens and busy slots over time: nothing is lost in the bins, and attempts stand one after the other."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone

import pytest

from eagle_ray.report.summary import ReadColumns, budgets
from eagle_ray.report.timeline import MAX_BINS, MAX_SHOWN_WORKERS, OTHER_WORKERS, Bins, timeline
from eagle_ray.requests.row_schema import output_schema, table_of

NOON = datetime(2026, 11, 21, 12, tzinfo=timezone.utc)
KEYS = {"request_id": "a", "sample_index": 0, "row_index": 0, "source_file": "f", "run_id": "r"}


def row(
    start: float, end: float, tokens: int, worker: str = "w", attempt: int = 1, queue_s: float = 0.0
) -> dict:
    """An answer that arrived `start` seconds after noon; its first token came as soon as it had its slot."""
    times = {
        "started_at": NOON + timedelta(seconds=start),
        "finished_at": NOON + timedelta(seconds=end),
    }
    counts = {"completion_tokens": tokens, "queue_s": queue_s, "ttft_s": queue_s}
    return KEYS | times | counts | {"status": "ok", "worker_id": worker, "attempt": attempt}


def error() -> dict:
    return KEYS | {
        "status": "error",
        "error_code": "no",
        "error_message": "no",
        "worker_id": "w",
        "attempt": 1,
    }


def columns_of(*files: list[dict]) -> ReadColumns:
    """Files of these rows, as a run's are read."""
    made = [table_of(rows, output_schema([])) for rows in files]
    return lambda columns: (table.select(columns) for table in made)


def test_a_rows_tokens_and_slot_are_spread_over_its_time():
    found = timeline(columns_of([row(0, 4, 40), row(1, 3, 10, queue_s=1), error()]))
    assert (found["bin_s"], found["num_bins"]) == (0.1, 40)
    worker = found["workers"]["w"]
    assert worker["tokens_per_s"][:20] == [10] * 20 and worker["tokens_per_s"][20:30] == [20] * 10
    assert worker["busy_slots"] == [1] * 20 + [2] * 10 + [1] * 10
    assert (worker["rows"], worker["output_tokens"]) == (2, 50)
    assert worker["mean_tokens_per_s"] == pytest.approx(12.5) and worker[
        "mean_busy_slots"
    ] == pytest.approx(1.25)


def test_nothing_is_lost_in_the_bins_of_many_files():
    files = [
        [row(i + j / 7, i + j + 3, 1 + i * j, worker=f"w{j % 3}") for j in range(9)]
        for i in range(40)
    ]
    found = timeline(columns_of(*files))
    assert found["num_bins"] <= MAX_BINS and sorted(found["workers"]) == ["w0", "w1", "w2"]
    rows = [entry for file in files for entry in file]
    for name, worker in found["workers"].items():
        tokens = sum(entry["completion_tokens"] for entry in rows if entry["worker_id"] == name)
        assert worker["output_tokens"] == tokens
        assert sum(worker["tokens_per_s"]) * found["bin_s"] == pytest.approx(tokens, abs=1)


def test_the_time_between_attempts_is_left_out():
    found = timeline(columns_of([row(0, 10, 5)], [row(80_000, 80_005, 5, "x", attempt=3)]))
    assert [(a["attempt"], a["offset_s"]) for a in found["attempts"]] == [(1, 0), (3, 10)]
    assert found["bin_s"] * found["num_bins"] == pytest.approx(15)
    assert found["workers"]["x"]["busy_slots"][: round(10 / found["bin_s"])] == [0] * round(
        10 / found["bin_s"]
    )


def test_workers_beyond_a_page_are_added_up():
    rows = [row(0, 1, 100 - i, worker=f"w{i:02d}") for i in range(MAX_SHOWN_WORKERS + 3)]
    workers = timeline(columns_of(rows))["workers"]
    assert len(workers) == MAX_SHOWN_WORKERS + 1
    assert (
        workers[OTHER_WORKERS]["rows"] == 3
        and workers[OTHER_WORKERS]["output_tokens"] == 68 + 67 + 66
    )


def test_without_answers_there_is_no_time():
    assert timeline(columns_of()) is None
    assert timeline(columns_of([error()])) is None


@pytest.mark.parametrize("seconds", [0.01, 0.5, 12, 13, 700, 86_400, 1e7])
def test_bins_cover_the_time_and_are_not_too_many(seconds):
    bins = Bins.over(seconds)
    assert 1 <= bins.num <= MAX_BINS and bins.num * bins.width >= seconds


def test_steps_are_counted_by_their_budget():
    first = row(0, 1, 5) | {"per_step_budget": [1, 4, 4], "per_step_accepted": [0, 2, 1]}
    second = row(0, 1, 5) | {"per_step_budget": [4], "per_step_accepted": [3]}
    found = budgets(columns_of([first, error()], [second]))
    assert found == {"budget": [1, 4], "steps": [1, 3], "accepted": [0, 6]}


def test_a_job_that_stored_no_budgets_has_none():
    assert budgets(columns_of([row(0, 1, 5)])) is None
