"""The sink on its own: one file a task, whole, in the one schema, and none once overtaken."""

import errno
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import ray.data

from eagle_ray.batch.driver.execute import write_dataset
from eagle_ray.batch.worker.sink import AtomicParquetSink, nest
from eagle_ray.core.errors import ConfigError
from eagle_ray.requests.row_schema import SCHEMA_VERSION, VERSION_KEY, output_schema, table_of
from eagle_ray.runs.job_errors import FencedError, OutputDamaged, StorageUnavailable
from eagle_ray.runs.layout import RUN
from eagle_ray.runs.run import Run
from eagle_ray.storage.path import StoragePath, write_json

SCHEMA = output_schema([pa.field("category", pa.string())])


def make_sink(output: Path, attempt: int = 1) -> AtomicParquetSink:
    (output / "data").mkdir(exist_ok=True)
    return AtomicParquetSink(
        Run(StoragePath.of(output), "run", attempt, "hash"),
        SCHEMA,
        ids_per_file=10,
        compression="zstd",
    )


def write_record(output: Path, attempt: int) -> None:
    """The parts of _run.json that a writer needs to find."""
    record = {"run_id": "run", "attempt": attempt, "config": {}, "inputs": {}, "attempts": []}
    write_json(StoragePath.of(output) / RUN, record)


def block(*ids: str) -> pa.Table:
    common = {
        "sample_index": 0,
        "row_index": 0,
        "source_file": "a",
        "run_id": "run",
        "attempt": 1,
        "status": "ok",
    }
    return nest(table_of([common | {"request_id": id} for id in ids], SCHEMA))


def test_repeated_task_writes_the_same_single_file_of_its_blocks(tmp_path):
    write_record(tmp_path, attempt=1)
    sink, task = make_sink(tmp_path), SimpleNamespace(task_idx=7)
    for _ in range(2):
        sink.write([block("a", "b"), block(), block("c")], task)
    (file,) = (tmp_path / "data").iterdir()
    assert file.name == "part-001-000007.parquet"
    assert pq.read_table(file)["request_id"].to_pylist() == ["a", "b", "c"]
    schema = pq.read_schema(file)
    assert schema.equals(SCHEMA) and schema.metadata[VERSION_KEY] == SCHEMA_VERSION


def test_a_task_without_rows_writes_no_file(tmp_path):
    write_record(tmp_path, attempt=1)
    make_sink(tmp_path).write([block()], SimpleNamespace(task_idx=0))
    assert not list((tmp_path / "data").iterdir())


def test_an_overtaken_writer_publishes_nothing(tmp_path):
    write_record(tmp_path, attempt=2)
    with pytest.raises(FencedError):
        make_sink(tmp_path, attempt=1).write([block("a")], SimpleNamespace(task_idx=0))
    assert not list((tmp_path / "data").iterdir())


def test_what_the_system_refuses_is_one_line_with_the_file(ray_session, tmp_path):
    write_record(tmp_path, attempt=1)
    sink = make_sink(tmp_path)
    (tmp_path / "data").rmdir()
    (tmp_path / "data").touch()
    with pytest.raises(
        ConfigError, match=r"^cannot write .*/data/part-001-000000\.parquet: .* again to resume\.$"
    ):
        write_dataset(ray.data.from_arrow(block("a")), sink, None)


def test_full_disk_is_one_line_with_needed_bytes_and_the_remedy(tmp_path, monkeypatch):
    def refuse(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    write_record(tmp_path, attempt=1)
    sink = make_sink(tmp_path)
    monkeypatch.setattr(os, "fsync", refuse)
    says = r"part-001-000000\.parquet: No space left on device \([\d,]+ bytes needed, [\d,]+ free\)\. Free some space "
    with pytest.raises(StorageUnavailable, match=says) as raised:
        sink.write([block("a")], SimpleNamespace(task_idx=0))
    assert str(raised.value).count("the same command") == 1
    assert not list((tmp_path / "data").iterdir())


def test_an_output_that_was_deleted_is_not_made_again(tmp_path):
    output = tmp_path / "out"
    output.mkdir()
    write_record(output, attempt=1)
    sink = make_sink(output)
    shutil.rmtree(output)
    with pytest.raises(OutputDamaged, match="the output was deleted while the job ran"):
        sink.write([block("a")], SimpleNamespace(task_idx=0))
    assert not output.exists()
