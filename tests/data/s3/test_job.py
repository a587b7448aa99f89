"""Whole jobs in and out of a bucket, counted from outside."""

import time

import duckdb
import pyarrow as pa
import pyarrow.dataset
import pyarrow.parquet as pq
import pytest

from eagle_ray.data import record, zombies
from eagle_ray.data.lock import lock_output
from eagle_ray.data.stops import OutputBusy
from eagle_ray.data.storage import Location, json_bytes, read_json
from eagle_ray.job import complete, run_job
from eagle_ray.validate import validate
from tests.conftest import small_job, token_rows

CATEGORIES = ("a", "b c/d", None)


@pytest.fixture
def job(bucket, tmp_path):
    """24 rows in a JSONL file and a Parquet file, one of them bad, two samples each."""
    rows = [row | {"category": CATEGORIES[i % 3]} for i, row in enumerate(token_rows(24))]
    (bucket / "in/a.jsonl").write_whole(
        b"".join(json_bytes(row).replace(b"\n", b"") + b"\n" for row in rows[:12]) + b"{\n"
    )
    sink = pa.BufferOutputStream()
    pq.write_table(pa.Table.from_pylist(rows[12:]), sink, row_group_size=5)
    (bucket / "in/sub/b.parquet").write_whole(sink.getvalue().to_pybytes())
    settings = {
        "sampling.n": 2,
        "execution.rows_per_file": 8,
        "sampling.max_tokens": 6,
        "output.partition_by": "category",
    }
    paths = {"input.path": f"{bucket}/in", "output.path": f"{bucket}/out"}
    return small_job(tmp_path, None, **settings | paths)


IDS = sorted([f"q{i}" for i in range(24)] + ["a.jsonl:12"])


def counted(outside, output: Location) -> list[tuple[str, int]]:
    """Every id and its rows, by DuckDB over what pyarrow's own S3 client finds."""
    found = pyarrow.dataset.dataset(f"{output}/data".removeprefix("s3://"), filesystem=outside, partitioning="hive")
    rows = found.to_table(columns=["request_id", "sample_index"])  # noqa: F841, DuckDB reads it by its name
    return duckdb.sql("select request_id, count(distinct sample_index) from rows group by 1 order by 1").fetchall()


def test_a_job_in_a_bucket_is_validated_run_resumed_and_overwritten(ray_session, job, bucket, outside):
    output = bucket / "out"
    before = bucket.stamps()
    assert f"output   {output} can be written; a run would start it" in validate(job)
    assert bucket.stamps() == before
    assert complete(job)["total"]["rows"] == 50
    assert counted(outside, output) == [(id, 2) for id in IDS]
    assert {file.parent.name for file in (output / "data").glob("**/*.parquet")} == {
        "category=a",
        "category=b%20c%2Fd",
        "category=__HIVE_DEFAULT_PARTITION__",
    }
    assert read_json(output / "_summary.json")["groups"].keys() == {"", "a", "b c/d"}
    assert (output / "_SUCCESS").exists() and read_json(output / "_progress.json")["rows_in_files"] == 50
    assert read_json(output / "_run.json")["inputs"][f"{bucket}/in/a.jsonl"].keys() == {"size", "etag"}

    lost = (output / "data").glob("**/*.parquet")[0]
    lost.remove()
    kept = (output / "data").stamps()
    assert run_job(job) == 0
    assert counted(outside, output) == [(id, 2) for id in IDS]
    assert {file: (output / "data").stamps()[file] for file in kept} == kept  # nothing that was there is written again
    assert "a run would resume run" in validate(job)

    with lock_output(output), pytest.raises(OutputBusy, match="is being written by process"):
        complete(job)
    (bucket / "in/a.jsonl").write_whole(b"{}\n")
    assert run_job(job) == 6
    anew = job.model_copy(update={"output": job.output.model_copy(update={"if_exists": "overwrite"})})
    assert run_job(anew) == 0
    assert len(counted(outside, output)) == 13 and read_json(output / "_run.json")["attempt"] == 3


def test_a_zombies_late_files_are_written_down_or_deleted(job, bucket, outside, ray_session, monkeypatch):
    """What an attempt that is over may still publish, between its look at _run.json and the end of its PUT."""
    output = bucket / "out"
    complete(job)
    first = (output / "data").glob("**/*.parquet")[0]
    late = first.parent / "part-001-999999.parquet"
    late.write_whole(first.read_bytes())
    assert complete(job)["total"]["rows"] == 50 and counted(outside, output) == [(id, 2) for id in IDS]
    old = first.read_bytes()
    anew = job.model_copy(update={"output": job.output.model_copy(update={"if_exists": "overwrite"})})
    began = record._write_record

    def late_again(*args: object) -> None:
        monkeypatch.undo()
        began(*args)
        late.write_whole(old)  # a file of the run that was deleted a moment ago

    monkeypatch.setattr(record, "_write_record", late_again)
    assert complete(anew)["total"]["rows"] == 50
    assert not late.exists() and counted(outside, output) == [(id, 2) for id in IDS]


def test_counting_waits_for_the_writers_of_a_killed_attempt(bucket, job, monkeypatch):
    monkeypatch.setattr(zombies, "LONGEST_PUT_S", 3.0)
    with lock_output(bucket / "out"):
        record.open_run(job, [])  # and no outcome: killed
        run = record.open_run(job, [])
        began = time.monotonic()
        zombies.outlast_writers(run)
        assert time.monotonic() - began > 1  # of three, some of which have passed
        with record.noting_outcome(run):
            pass
