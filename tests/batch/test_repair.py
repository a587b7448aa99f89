"""Adopting rows whose manifest is lost: what is recorded, and what is refused."""

import json
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pyarrow as pa
import pytest

from eagle_ray.batch.driver.claim import hold_output
from eagle_ray.batch.driver.input_plan import plan_input
from eagle_ray.batch.driver.job_manifest import open_run
from eagle_ray.batch.driver.repair import DAMAGED_COPY, repair_output
from eagle_ray.batch.driver.status import status_of, status_text
from eagle_ray.config import JobConfig, config_hash
from eagle_ray.core.errors import ConfigError
from eagle_ray.requests.row_schema import output_schema
from eagle_ray.runs.job_errors import OutputDamaged, OutputLocked, OutputMismatch
from eagle_ray.runs.layout import RUN, SHARD_PLAN, claim_output, output_of
from eagle_ray.runs.part_files import part_name
from eagle_ray.runs.recorded_inputs import input_lists, read_inputs
from eagle_ray.runs.run import Run
from eagle_ray.storage.checked_parquet import parquet_bytes
from eagle_ray.storage.path import StoragePath
from tests.support.jobs import PAIR, token_rows

SCHEMA = output_schema([])
BEGAN = datetime(2026, 11, 1, tzinfo=timezone.utc)


def write_rows(config: JobConfig, ids: list[str], attempt: int, **columns: str) -> Path:
    """Write a part file of one attempt, with the columns that a worker would give it."""
    output = output_of(config)
    common = {
        "row_index": 0,
        "sample_index": 0,
        "source_file": config.input.path,
        "run_id": Run.inspect(output).manifest["run_id"],
        "attempt": attempt,
        "status": "ok",
        "config_hash": config_hash(config),
        "target_model": config.model.target,
        "draft_model": config.model.draft,
        "method": config.method_name,
        "started_at": BEGAN + timedelta(hours=attempt),
        "finished_at": BEGAN + timedelta(hours=attempt, minutes=len(ids)),
    }
    rows = [common | {"request_id": id} | columns for id in ids]
    file = open_run(config, plan_input(config).fingerprints).data / part_name(attempt, 0)
    file.create(parquet_bytes(pa.Table.from_pylist(rows, SCHEMA), "zstd"))
    return Path(file.text)


def two_attempts(config: JobConfig) -> JobConfig:
    claim_output(config)
    open_run(config, plan_input(config).fingerprints)
    write_rows(config, ["q0", "q1"], attempt=2)
    write_rows(config, ["q2"], attempt=3)
    return config


@pytest.fixture
def job(make_job) -> JobConfig:
    """A run of five rows, three of them made by attempts 2 and 3."""
    return two_attempts(make_job(token_rows(5)))


def record(config: JobConfig) -> Path:
    return Path((output_of(config) / RUN).text)


def test_a_record_whose_configuration_was_damaged_is_repaired(job):
    text = record(job).read_text()
    record(job).write_text(text.replace('"tool_choice"', '"tool_choic%"', 1))
    with pytest.raises(OutputDamaged, match="eagle-ray repair"):
        open_run(job, plan_input(job).fingerprints)
    assert "adopted run" in repair_output(job)
    assert open_run(job, plan_input(job).fingerprints).attempt == 5


def test_a_refused_repair_changes_nothing(job):
    record(job).unlink()
    output = Path(output_of(job).text)
    before = {file: file.read_bytes() for file in output.rglob("*") if file.is_file()}
    other = job.model_copy(update={"seed": 9})
    with pytest.raises(OutputMismatch, match="made with configuration"):
        repair_output(other)
    assert {file: file.read_bytes() for file in output.rglob("*") if file.is_file()} == before


def test_a_lost_manifest_is_written_from_the_rows(job):
    before = Run.inspect(output_of(job)).manifest
    record(job).unlink()
    report = repair_output(job)
    assert (
        f"adopted run {before['run_id']}: 3 rows (0 errors) in 2 files, of attempts 2, 3" in report
    )
    assert "the input has 5 ids: 3 done, 2 to be made, and 0 in the files" in report
    after = Run.inspect(output_of(job)).manifest
    assert after["run_id"] == before["run_id"] and after["config_hash"] == before["config_hash"]
    assert [attempt["attempt"] for attempt in after["attempts"]] == [2, 3, 4]
    assert (
        after["attempts"][0]["started_at"] == "2026-11-01T02:00:00+00:00"
        and "outcome" not in after["attempts"][0]
    )
    assert (
        "stopped, attempt 4" in (status := status_text(status_of(output_of(job))))
        and "repaired" in status
    )


def test_the_next_run_resumes_and_keeps_every_file(job):
    record(job).unlink()
    repair_output(job)
    files = sorted(Path(job.output.path, "data").iterdir())
    run = open_run(job, plan_input(job).fingerprints)
    run.remove_stale_files()
    assert run.attempt == 5 and sorted(Path(job.output.path, "data").iterdir()) == files


def test_a_damaged_manifest_is_kept_and_a_good_one_is_left_alone(job):
    assert "there is nothing to repair" in repair_output(job)
    record(job).write_text('{"run_id": "abc", "att')
    assert "is damaged" in (report := repair_output(job)) and DAMAGED_COPY in report
    assert Path(job.output.path, DAMAGED_COPY).read_text() == '{"run_id": "abc", "att'
    assert "there is nothing to repair" in repair_output(job)


@pytest.mark.parametrize("content", [None, "{"])
def test_record_without_its_input_list_is_rebuilt_from_the_rows(job, content):
    before = Run.inspect(output_of(job)).manifest
    [file] = input_lists(output_of(job))
    file.remove() if content is None else file.write_atomic(content.encode())
    record(job).write_text(json.dumps(before | {"attempt": 7}))
    report = repair_output(job)
    assert f"{file} is damaged" in report and f"is kept in {DAMAGED_COPY}" in report
    after = Run.inspect(output_of(job)).manifest
    assert after["attempt"] == 8 and [each["attempt"] for each in after["attempts"]] == [2, 3, 8]
    assert (
        json.loads(Path(job.output.path, DAMAGED_COPY).read_text())["attempts"]
        == before["attempts"]
    )
    assert read_inputs(output_of(job), after).keys() == {job.input.path}
    assert "there is nothing to repair" in repair_output(job)


def test_a_record_with_values_of_another_type_is_repaired(job):
    before = Run.inspect(output_of(job)).manifest
    for wrong in ({"config": None}, {"attempts": []}):
        record(job).write_text(json.dumps(before | wrong))
        assert f"adopted run {before['run_id']}: 3 rows" in repair_output(job)
        assert "there is nothing to repair" in repair_output(job)


def test_rows_of_this_run_are_never_deleted_as_stale_ones(job):
    """Whatever the record says of its attempts."""
    before, files = (
        Run.inspect(output_of(job)).manifest,
        sorted(Path(job.output.path, "data").iterdir()),
    )
    record(job).write_text(json.dumps(before | {"attempts": before["attempts"][-1:]}))
    run = open_run(job, plan_input(job).fingerprints)
    with pytest.raises(
        OutputDamaged, match=r"_run\.json is damaged \(it lacks attempt 2, which made part-002"
    ):
        run.remove_stale_files()
    assert sorted(Path(job.output.path, "data").iterdir()) == files
    stale = write_rows(job, ["q4"], attempt=1, run_id="overwritten")
    record(job).write_text(json.dumps(before | {"attempts": before["attempts"][1:]}))
    open_run(job, plan_input(job).fingerprints).remove_stale_files()
    assert not stale.exists() and sorted(Path(job.output.path, "data").iterdir()) == files


def test_configuration_that_did_not_make_the_rows_is_refused(job, make_job):
    record(job).unlink()
    other = make_job(**{"sampling.max_tokens": 7})
    with pytest.raises(
        OutputMismatch,
        match=r"were made with configuration \w{16}, and .* method head\+suffix\+ngram\. Give",
    ):
        repair_output(other)
    assert not record(job).exists()
    assert "adopted run" in repair_output(other, trust_config=True)


def test_even_a_trusted_configuration_has_the_models_of_the_rows(job, make_job):
    record(job).unlink()
    with pytest.raises(
        OutputMismatch, match="the given configuration has another draft_model than its rows"
    ):
        repair_output(make_job(**{"model.draft": str(PAIR / "target")}), trust_config=True)


def test_rows_of_two_runs_are_not_mixed(job):
    file = write_rows(job, ["q3"], attempt=1, run_id="older")
    record(job).unlink()
    with pytest.raises(
        OutputMismatch,
        match=r"has rows of 2 runs: older \(such as part-001-000000.parquet\), \w{12} ",
    ):
        repair_output(job)
    file.unlink()
    assert "adopted run" in repair_output(job)


def test_rows_from_a_file_that_is_not_in_the_input_are_refused(job, make_job):
    record(job).unlink()
    moved = Path(job.input.path).rename(Path(job.input.path).with_name("moved.jsonl"))
    with pytest.raises(
        OutputMismatch, match=r"answer to the id 'q0' from .*/in\.jsonl, which is not in this input"
    ):
        repair_output(make_job(**{"input.path": str(moved)}))


def test_a_damaged_part_file_is_named(job):
    record(job).unlink()
    Path(job.output.path, "data", part_name(3, 0)).write_bytes(b"PAR1")
    with pytest.raises(OutputDamaged, match=r"part-003-000000\.parquet is damaged .* delete it"):
        repair_output(job)


def test_repair_without_rows_is_refused_and_creates_nothing(make_job, tmp_path):
    with pytest.raises(ConfigError, match=r"nothing to adopt\. Run the job"):
        repair_output(make_job(token_rows(1)))
    assert not (tmp_path / "out").exists()


def test_a_running_job_is_not_repaired(job):
    with hold_output(output_of(job)), pytest.raises(OutputLocked):
        repair_output(job)


def test_a_shard_is_repaired_alone_and_so_is_the_lost_plan(make_job):
    make_job(token_rows(5))
    shard = two_attempts(make_job(**{"execution.shard": "2/3"}))
    record(shard).unlink()
    with pytest.raises(OutputMismatch, match=r"Give this run one of them with --shard i/3"):
        repair_output(make_job())
    plan = StoragePath.of(shard.output.path) / SHARD_PLAN
    plan.remove()
    with pytest.raises(
        OutputMismatch, match=r"is a shard's. Repair each shard with its --shard i/n"
    ):
        repair_output(make_job())
    assert "3 rows (0 errors) in 2 files" in repair_output(shard)
    assert plan.exists() and record(shard).exists()
