"""Writers of an attempt that is over publish nothing that matters, in a bucket as locally."""

from types import SimpleNamespace

import pyarrow as pa
import pytest

from eagle_ray.batch.driver.claim import hold_output
from eagle_ray.batch.driver.input_plan import plan_input
from eagle_ray.batch.driver.job_manifest import open_run
from eagle_ray.batch.worker.sink import AtomicParquetSink, nest
from eagle_ray.core.errors import ConfigError
from eagle_ray.requests.row_schema import output_schema, table_of
from eagle_ray.runs import run as fencing
from eagle_ray.runs.job_errors import FencedError, OutputDamaged, OutputLocked
from eagle_ray.runs.layout import PROGRESS, RUN, SUCCESS, SUMMARY
from eagle_ray.runs.run import Run
from tests.support.jobs import small_job, token_rows
from tests.support.s3 import RefusedRequest

SCHEMA = output_schema([])
COMMON = {
    "sample_index": 0,
    "row_index": 0,
    "source_file": "a",
    "run_id": "run",
    "attempt": 1,
    "status": "ok",
}
TASK = SimpleNamespace(task_idx=7)


@pytest.fixture(params=["local", "s3"])
def job(request, tmp_path):
    small_job(tmp_path, token_rows(2))
    output = (
        str(tmp_path / "out")
        if request.param == "local"
        else f"{request.getfixturevalue('bucket')}/out"
    )
    return lambda **settings: small_job(tmp_path, None, **{"output.path": output} | settings)


def start(config):
    return open_run(config, plan_input(config).fingerprints)


def sink(run) -> AtomicParquetSink:
    return AtomicParquetSink(run, SCHEMA, ids_per_file=10, compression="zstd")


def block(*ids: str) -> pa.Table:
    return nest(table_of([COMMON | {"request_id": id} for id in ids], SCHEMA))


def test_an_overtaken_writer_publishes_nothing(job):
    first = start(job())
    start(job())
    with pytest.raises(FencedError):
        sink(first).write([block("a")], TASK)
    assert first.data.glob("**/*.parquet") == []


def test_an_output_that_was_emptied_stays_empty(job):
    run = start(job())
    for file in run.output.list_versions():
        file.remove()
    with pytest.raises(OutputDamaged, match="the output was deleted while the job ran"):
        sink(run).write([block("a")], TASK)
    assert not run.output.list_versions()


def test_a_repeated_task_leaves_what_its_first_try_published(job):
    run = start(job())
    sink(run).write([block("a")], TASK)
    before = run.data.list_versions()
    sink(run).write([block("a")], TASK)
    assert run.data.list_versions() == before


def test_of_two_drivers_at_once_one_gets_the_attempt(job, monkeypatch):
    first = start(job())
    second = None

    def slip_in(*args: object) -> dict:
        """Another driver begins between this one's look and its write."""
        nonlocal second
        monkeypatch.setattr("eagle_ray.batch.driver.job_manifest.library_versions", dict)
        second = start(job())
        return {}

    monkeypatch.setattr("eagle_ray.batch.driver.job_manifest.library_versions", slip_in)
    with pytest.raises(OutputLocked, match="is being written by another driver"):
        start(job())
    assert second.attempt == first.attempt + 1 == Run.inspect(first.output).manifest["attempt"]
    second.check_current()


def test_an_outcome_is_not_noted_over_a_newer_attempts_record(job, monkeypatch):
    first = start(job())
    checked = type(first).check_current

    def slip_in(run) -> None:
        checked(run)
        monkeypatch.setattr(type(first), "check_current", checked)
        start(job())

    monkeypatch.setattr(type(first), "check_current", slip_in)
    with first.recorded_outcome():
        pass
    found = Run.inspect(first.output).manifest
    assert found["attempt"] == 2 and "outcome" not in found["attempts"][0]


def test_damaged_record_is_an_attempt_and_late_files_are_deleted(job):
    first = start(job())
    sink(first).write([block("a")], TASK)
    (first.output / RUN).write_atomic(b"{")
    second = start(job(**{"output.if_exists": "overwrite"}))
    assert second.attempt == 2 and second.data.glob("**/*.parquet") == []
    (second.data / "part-001-000003.parquet").write_atomic(b"late")
    sink(second).write([block("a")], TASK)
    second.remove_stale_files()
    assert [file.name for file in second.data.glob("**/*.parquet")] == ["part-002-000007.parquet"]


@pytest.mark.parametrize("name", [SUCCESS, SUMMARY, PROGRESS])
@pytest.mark.parametrize("was_there", [False, True])
def test_late_record_of_an_overtaken_driver_replaces_nothing(job, monkeypatch, name, was_there):
    first = start(job())
    if was_there:
        first.publish(name, b"of the first, earlier")
    checked, looks = type(first).check_current, iter(range(9))

    def overtake_after(run) -> None:
        """The first driver is frozen between its last check and its write, and another finishes meanwhile."""
        checked(run)
        if next(looks) == 1:
            monkeypatch.setattr(type(first), "check_current", checked)
            second = start(job())
            second.publish(name, b"of the second")

    monkeypatch.setattr(type(first), "check_current", overtake_after)
    with pytest.raises(FencedError):
        first.publish(name, b"of the first")
    assert (first.output / name).read_bytes() == b"of the second"


def test_late_success_of_a_killed_attempt_is_removed_by_settle(job, monkeypatch):
    monkeypatch.setattr(fencing, "MAX_PUT_S", 0.0)
    first = start(job())
    second = start(job())
    (first.output / SUCCESS).write_atomic(b"")
    second.settle()
    assert not (first.output / SUCCESS).exists()


def test_the_lock_holds_on_both(job):
    run = start(job())
    with hold_output(run.output), pytest.raises(OutputLocked), hold_output(run.output):
        pass


def test_failed_start_leaves_no_untrue_success_marker(bucket, proxy, tmp_path):
    output = {"output.path": f"{bucket}/out"}
    run = start(small_job(tmp_path, token_rows(2), **output))
    sink(run).write([block("a")], TASK)
    (run.output / SUCCESS).write_atomic(b"")
    record = Run.inspect(run.output).manifest
    proxy.fail("DELETE", RefusedRequest(403, "AccessDenied"), path=SUCCESS)
    with pytest.raises(ConfigError, match="AccessDenied"):
        start(small_job(tmp_path, None, **output))
    assert Run.inspect(run.output).manifest == record  # what it is true of
    proxy.fail("DELETE", RefusedRequest(403, "AccessDenied"), path="part-")
    with pytest.raises(ConfigError, match="AccessDenied"):
        start(small_job(tmp_path, None, **output, **{"output.if_exists": "overwrite"}))
    assert not (run.output / SUCCESS).exists()
