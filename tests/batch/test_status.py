"""Where a run stands, read from its files."""

import json
import subprocess
import sys
from dataclasses import asdict, replace
from datetime import datetime, timedelta, timezone

import pytest

from eagle_ray.batch.driver.job_manifest import open_run
from eagle_ray.batch.driver.status import status_of, status_text
from eagle_ray.cli import main as cli
from eagle_ray.core.errors import ConfigError
from eagle_ray.runs.job_errors import ClusterError
from eagle_ray.runs.process_identity import Process
from eagle_ray.runs.run import Run
from eagle_ray.storage.path import StoragePath, write_json
from tests.support.jobs import FACTS, token_rows

AGAIN = "run the same command again to resume."
LATER = timedelta(seconds=30)
MUCH_LATER = timedelta(hours=3)


HOLD = """
import dataclasses, json, time
from eagle_ray.runs.lease import Process
print(json.dumps(dataclasses.asdict(Process.current())), flush=True)
time.sleep(600)
"""


@pytest.fixture
def started(make_job):
    """An attempt that has just begun."""
    config = make_job(token_rows(3))
    output = StoragePath.of(config.output.path)
    output.make_directory()
    return open_run(config, {}), output


def now() -> datetime:
    return datetime.now(timezone.utc)


def write_progress(run, **facts) -> None:
    word = {
        "run_id": run.run_id,
        "attempt": run.attempt,
        "written_at": now().isoformat(timespec="seconds"),
    }
    write_json(run.output / "_progress.json", FACTS | word | facts)


def record_process(run, process) -> None:
    record = Run.inspect(run.output).manifest
    record["attempts"][-1]["process"] = process
    write_json(run.output / "_run.json", record)


def test_a_run_that_speaks_is_running(started):
    run, output = started
    assert status_of(output, now() + LATER).state == "running"
    write_progress(run)
    status = status_of(output, now() + LATER)
    assert status.state == "running" and 29 <= status.quiet_s <= 32
    assert "running, attempt 1" in status_text(
        status
    ) and "40 of 96 rows, 32 in files" in status_text(status)


def test_a_run_that_was_killed_falls_silent(started):
    run, output = started
    write_progress(run)
    text = status_text(status_of(output, now() + MUCH_LATER))
    assert "silent, attempt 1" in text and "Run the same command again" in text


def test_run_whose_local_process_is_gone_is_shown_as_killed(started):
    run, output = started
    driver = subprocess.Popen([sys.executable, "-c", HOLD], stdout=subprocess.PIPE, text=True)
    noted = json.loads(driver.stdout.readline())
    record_process(run, noted)
    write_progress(run)
    assert status_of(output).state == "running"
    driver.kill()
    driver.wait()
    text = status_text(status_of(output))
    assert (
        "killed, attempt 1" in text
        and f"process {driver.pid} is gone from" in text
        and "the same command" in text
    )


@pytest.mark.parametrize("other", [{"host": "elsewhere"}, {"pids": "pid:[1]"}])
def test_process_of_another_machine_is_judged_by_its_heartbeat(started, other):
    run, output = started
    record_process(run, asdict(Process.current()) | {"pid": 2**30} | other)
    assert status_of(output, now() + LATER).state == "running"
    assert "no sign of life for 10,8" in status_text(status_of(output, now() + MUCH_LATER))


def test_a_number_that_another_process_has_got_since_is_gone():
    this = Process.current()
    assert this.is_gone() is False and replace(this, started="1").is_gone() is True


def test_an_earlier_attempts_progress_says_nothing_of_this_one(started):
    run, output = started
    write_progress(run, attempt=0)
    assert status_of(output, now()).progress is None


@pytest.mark.parametrize(
    ("error", "says"),
    [(ClusterError("no GPU"), "ClusterError: no GPU"), (KeyboardInterrupt(), "interrupted")],
)
def test_a_run_that_stopped_says_why(started, error, says):
    run, output = started
    with pytest.raises(type(error)), run.recorded_outcome():
        raise error
    text = status_text(status_of(output))
    assert "stopped, attempt 1" in text and says in text and text.count("\n") == 1


def test_remedy_is_shown_once_and_stopped_run_has_no_heartbeat(started):
    run, output = started
    write_progress(run)
    error = ClusterError(
        "cannot write x: No space left on device. Free some space there, then " + AGAIN
    )
    with pytest.raises(ClusterError), run.recorded_outcome():
        raise error
    text = status_text(status_of(output))
    assert text.count("the same command") == 1 and "sign of life" not in text
    assert "its last progress: 40 of 96 rows, 32 in files" in text


def test_a_run_without_progress_says_so(started):
    assert status_text(status_of(started[1], now())).endswith(
        "\nthis attempt has recorded no progress yet"
    )


def test_a_run_that_is_done_counts_its_rows(started, capsys):
    run, output = started
    with run.recorded_outcome():
        write_json(
            output / "_summary.json", {"total": {"rows": 1096, "errors": 2, "output_tokens": 5000}}
        )
        (output / "_SUCCESS").write_atomic(b"")
    assert cli.main(["status", str(output)]) == 0
    assert (
        "done, " in (said := capsys.readouterr().out)
        and "1,096 rows, 2 errors, 5,000 tokens" in said
    )
    assert cli.main(["status", str(output), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["total"]["rows"] == 1096


@pytest.mark.parametrize("wrong", [{"planner_errors": -1.5}, {"fallbacks": {"worker": 3}}])
def test_progress_that_no_report_can_show_is_damage(started, messages, wrong):
    run, output = started
    write_progress(run, **wrong)
    assert status_of(output).progress is None
    assert f"_progress.json is damaged ({next(iter(wrong))}" in messages[-1]


@pytest.mark.parametrize("total", [{}, [], {"rows": "x", "errors": 2, "output_tokens": 5}])
def test_damaged_counts_and_progress_are_left_out_with_a_line(started, messages, total):
    run, output = started
    write_json(output / "_summary.json", {"total": total})
    (output / "_SUCCESS").write_atomic(b"")
    write_progress(run, rows_done="forty")
    status = status_of(output)
    assert status.state == "done" and status.total is None and status.progress is None
    assert (
        "_progress.json is damaged (rows_done: " in messages[0]
        and "_summary.json is damaged (total" in messages[1]
    )


def test_a_directory_without_a_run_is_a_usage_error(tmp_path, capsys):
    with pytest.raises(ConfigError):
        status_of(StoragePath.of(tmp_path))
    assert cli.main(["status", str(tmp_path)]) == 2
    assert f"{tmp_path} holds no run" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["status", "report"])
def test_a_run_without_its_record_is_told_of_repair(tmp_path, capsys, command):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "part-001-000000.parquet").touch()
    assert cli.main([command, str(tmp_path)]) == 2
    assert (
        "its _run.json is gone, and rows are there: adopt them with eagle-ray repair"
        in capsys.readouterr().err
    )


def test_a_damaged_record_is_named(started, capsys):
    _, output = started
    (output / "_run.json").write_atomic(b"{")
    assert cli.main(["status", str(output)]) == 6
    assert "is damaged" in capsys.readouterr().err
