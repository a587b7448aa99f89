"""validate --estimate with a deadline: how many workers would do, and what they cost."""

import json
from datetime import datetime, timedelta, timezone

import pytest

from eagle_ray.batch.driver.run_bounds import RunBounds
from eagle_ray.cli import main as cli
from eagle_ray.cli.estimate import SampledRow
from eagle_ray.cli.worker_counts import WorkerCounts, counts_text
from tests.support.jobs import PAIR, token_rows

NOW = datetime(2026, 11, 29, 20, 0, tzinfo=timezone.utc)
# 1,000 rows of two seconds in ten slots: 200 s of work for a worker, after a start of 40 s.
JOB = WorkerCounts(lambda workers: [SampledRow([2.0], [9])] * 8, 1000, 10, 40.0, 3.6, NOW)


def in_time(seconds: float, dollars: float | None = None) -> RunBounds:
    return RunBounds(NOW + timedelta(seconds=seconds), dollars, 3.6)


def test_end_and_price_by_number_of_workers():
    for workers, seconds in ((1, 240), (2, 140), (4, 90)):
        count = JOB.with_workers(workers)
        assert count.ends_at == count.surely_at == NOW + timedelta(seconds=seconds)
        assert count.dollars == pytest.approx(workers * seconds * 3.6 / 3600)


def test_the_fewest_workers_that_are_in_time_are_the_cheapest():
    assert JOB.cheapest(in_time(240)).workers == 1
    assert JOB.cheapest(in_time(239)).workers == 2
    assert JOB.cheapest(in_time(108)).workers == 3
    assert JOB.cheapest(in_time(108, dollars=0.32)) is None  # three workers cost $0.324
    assert JOB.cheapest(in_time(41)) is None
    assert JOB.cheapest(RunBounds(max_dollars=0.25, price_per_hour=3.6)).workers == 1


def test_long_rows_are_surely_done_later_than_likely():
    rows = [SampledRow([s], [9]) for s in (1.0, 9.0)] * 16
    mixed = WorkerCounts(lambda workers: rows, 10**6, 10, 40.0, None, NOW).with_workers(4)
    assert mixed.ends_at < mixed.likely_at < mixed.surely_at and mixed.dollars is None


def test_the_table_marks_what_holds():
    text = counts_text(JOB, in_time(108, 40), "from 8 rows")
    lines = text.splitlines()
    assert lines[0].split()[:2] == ["workers", "ends"]
    assert [line.lstrip("* ").split()[0] for line in lines[1:6]] == ["1", "2", "3", "4", "8"]
    assert [line.startswith("* 3") for line in lines[1:6]].index(True) == 2
    assert lines[-1].startswith("* 3 workers hold until ") and "for at most $40.00" in lines[-1]
    assert "no number of workers up to 256 holds" in counts_text(JOB, in_time(41), "")


def test_validate_prints_the_table_and_refuses_what_is_past(tmp_path, capsys):
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in token_rows(8)))
    flags = ["-i", str(tmp_path / "in.jsonl"), "-o", str(tmp_path / "out")]
    flags += ["--set", f"model.target={PAIR / 'target'}", "--set", "speculative.method=none"]
    flags += ["--set", "execution.price_per_hour=3.6", "--set", "sampling.max_tokens=4"]
    done = cli.main(["validate", *flags, "--estimate", "4", "--finish-by", "10h"])
    text = capsys.readouterr().out
    assert done == 0 and "* 1 worker holds until" in text
    assert "from 4 rows decoded here" in text
    assert cli.main(["validate", *flags, "--finish-by", "2020-01-01T00:00Z"]) == 2
    assert "execution.finish_by: 2020-01-01T00:00+00:00 is past" in capsys.readouterr().err
