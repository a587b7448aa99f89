"""Run directories that an earlier version made (tests/goldens/runs): this one reads, resumes and completes them."""

import csv
import json
import shutil
import tarfile
import zlib
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from eagle_ray.batch.driver.finish import finish_shards
from eagle_ray.batch.driver.repair import repair_output
from eagle_ray.batch.driver.status import sharded_statuses, status_of
from eagle_ray.cli.export_run import export
from eagle_ray.cli.report_run import load_summary, review
from eagle_ray.config import JobConfig, upgrade_config
from eagle_ray.core.errors import ConfigError
from eagle_ray.runs.job_errors import Incomplete
from eagle_ray.storage.path import StoragePath
from tests.support.jobs import TESTS, exit_code

RUNS = TESTS / "goldens" / "runs"
PLACE = "/tmp/old-runs"  # where they were made
WHOLE = ("finished", "partitioned", "errors")
NUM_ROWS = {"finished": 24, "partitioned": 8, "errors": 8}


def unpack(name: str, directory: Path) -> StoragePath:
    """Unpack a run with its input and return its output directory, with this place's paths in its records."""
    with tarfile.open(RUNS / f"{name}.tar.xz") as archive:
        archive.extractall(directory, filter="data")
    root = directory / name
    for file in root.rglob("*.json"):
        file.write_text(file.read_text().replace(PLACE, str(directory)))
    for file in root.rglob(
        "_run.json"
    ):  # it has the checksum of its list of input files, which is another now
        record = json.loads(file.read_text())
        record["inputs"]["checksum"] = zlib.crc32(
            (file.parent / record["inputs"]["list"]).read_bytes()
        )
        file.write_text(json.dumps(record))
    for file in root.glob("**/_index/input.json"):
        content = json.loads(file.read_text())
        file.write_text(
            json.dumps({name: value for name, value in content.items() if name != "checksum"})
        )
    return StoragePath.of(str(root / "out"))


def config_of(output: StoragePath) -> JobConfig:
    """Return the configuration that a user has now, with this release's keys."""
    return JobConfig.model_validate(
        upgrade_config(json.loads((output / "_run.json").read_bytes())["config"])
    )


def rows_of(output: StoragePath) -> dict[tuple[str, int], dict]:
    """Return every row by id and sample. A row that is there twice fails the test."""
    files = sorted(Path(output.text, "data").rglob("*.parquet"))
    rows = [row for file in files for row in pq.read_table(file, partitioning=None).to_pylist()]
    found = {(row["request_id"], row["sample_index"]): row for row in rows}
    assert len(found) == len(rows)
    return found


@pytest.mark.parametrize("name", WHOLE)
def test_a_finished_run_is_read(name, tmp_path):
    output = unpack(name, tmp_path)
    recorded = json.loads((output / "_summary.json").read_bytes())
    status = status_of(output)
    assert (status.state, status.attempt, status.total["rows"]) == ("done", 1, NUM_ROWS[name])
    assert load_summary(output) == recorded
    assert "report in" in review(output)
    (output / "_summary.json").remove()
    assert {key: load_summary(output)[key] for key in ("total", "groups")} == {
        key: recorded[key] for key in ("total", "groups")
    }


@pytest.mark.parametrize("name", WHOLE)
def test_a_finished_run_is_exported_whole(name, tmp_path):
    output = unpack(name, tmp_path)
    export(output, "csv", str(tmp_path / "rows.csv"), partial=False, overwrite=False)
    with (tmp_path / "rows.csv").open(newline="") as file:
        exported = {
            (row["request_id"], int(row["sample_index"])): row["text"]
            for row in csv.DictReader(file)
        }
    assert exported == {key: row["text"] or "" for key, row in rows_of(output).items()}
    assert len(exported) == NUM_ROWS[name]
    export(output, "openai-batch", str(tmp_path / "lines.jsonl"), partial=False, overwrite=False)
    lines = [json.loads(line) for line in (tmp_path / "lines.jsonl").read_text().splitlines()]
    assert sorted(line["custom_id"] for line in lines) == sorted({id for id, _ in rows_of(output)})


@pytest.mark.parametrize("name", WHOLE)
def test_a_finished_run_that_is_started_again_makes_nothing(name, tmp_path):
    output = unpack(name, tmp_path)
    before = {file: file.read_bytes() for file in Path(output.text, "data").rglob("*.parquet")}
    assert exit_code(config_of(output)) == 0
    assert {
        file: file.read_bytes() for file in Path(output.text, "data").rglob("*.parquet")
    } == before
    assert (output / "_SUCCESS").exists() and status_of(output).attempt == 2


def test_a_killed_run_goes_on_with_every_row_once(ray_session, tmp_path):
    output = unpack("killed", tmp_path)
    assert status_of(output).state in (
        "killed",
        "silent",
    )  # on the machine where it was made, and elsewhere
    with pytest.raises(ConfigError, match="is not finished"):
        export(output, "csv", str(tmp_path / "rows.csv"), partial=False, overwrite=False)
    before = rows_of(output)
    assert exit_code(config_of(output)) == 0
    after = rows_of(output)
    assert len(before) == 5 and {key: after[key] for key in before} == before
    assert sorted(after) == sorted((f"q{i}", 0) for i in range(16))


@pytest.mark.slow
def test_a_killed_shard_goes_on_and_all_are_finished(ray_session, tmp_path):
    output = unpack("shards", tmp_path)
    states = {shard: status.state for shard, status in sharded_statuses(output).items()}
    assert states.pop("2/3") in ("killed", "silent") and set(states.values()) == {"done"}
    with pytest.raises(Incomplete, match="shard 2/3 is not complete"):
        finish_shards(output)
    before = rows_of(output)
    assert exit_code(config_of(output / "_shards" / "0002-of-0003")) == 0
    summary = finish_shards(output)
    after = rows_of(output)
    assert {key: after[key] for key in before} == before and len(after) == 24 == summary["total"][
        "rows"
    ]
    assert [shard["attempts"] for shard in summary["shards"]] == [1, 2, 1] and (
        output / "_SUCCESS"
    ).exists()


def test_rows_of_a_lost_record_are_adopted(tmp_path):
    output = unpack("killed", tmp_path)
    config, here = config_of(output), str(tmp_path / "killed" / "in.jsonl")
    for file in Path(output.text, "data").glob(
        "*.parquet"
    ):  # rows name their input file by its place, too
        table = pq.read_table(file, partitioning=None)
        column = pc.replace_substring(
            table["source_file"].cast(pa.string()), f"{PLACE}/killed/in.jsonl", here
        )
        index, field = (
            table.schema.get_field_index("source_file"),
            table.schema.field("source_file"),
        )
        pq.write_table(table.set_column(index, field, column.cast(field.type)), file)
    (output / "_run.json").remove()
    assert "5 done, 11 to be made" in repair_output(config)
    assert status_of(output).attempt == 2


@pytest.mark.slow
def test_error_rows_are_made_again_on_demand(ray_session, tmp_path):
    output = unpack("errors", tmp_path)
    before = rows_of(output)
    wrong = {key for key, row in before.items() if row["status"] == "error"}
    shutil.rmtree(output.text + "/_index")
    assert exit_code(config_of(output), retry_errors=True) == 0
    after = rows_of(output)
    right = before.keys() - wrong
    assert {key: after[key] for key in right} == {key: before[key] for key in right}
    assert {key for key, row in after.items() if row["attempt"] == 2} == wrong and len(wrong) == 2
