"""Two shards in a bucket: each with its own lease and index there, and finished together. A toy engine answers."""

from __future__ import annotations

import pyarrow.dataset
import pytest

from eagle_ray.batch.driver.claim import hold_output
from eagle_ray.batch.driver.finish import finish_shards
from eagle_ray.batch.driver.job_run import complete_job
from eagle_ray.config import JobConfig
from eagle_ray.runs.job_errors import Incomplete, OutputLocked, OutputMismatch
from eagle_ray.runs.layout import SUCCESS, output_of
from eagle_ray.runs.row_index import INDEX_DIRECTORY
from eagle_ray.storage.path import StoragePath, json_bytes
from tests.support.jobs import small_job
from tests.support.starts import DriverKilled, rows

NAMES = [f"id{i}" for i in range(10)]
ADDED = [f"new{i}" for i in range(4)]


def write_input(bucket: StoragePath, lines: list[dict[str, str]]) -> None:
    (bucket / "in.jsonl").write_atomic(
        b"".join(json_bytes(line).replace(b"\n", b"") + b"\n" for line in lines)
    )


@pytest.fixture
def shards(bucket, tmp_path, engine) -> list[JobConfig]:
    write_input(bucket, rows(*NAMES))
    paths = {"input.path": f"{bucket}/in.jsonl", "output.path": f"{bucket}/out"}
    return [small_job(tmp_path, None, **paths | {"execution.shard": f"{i}/2"}) for i in (1, 2)]


def prompts(outside, output: StoragePath) -> dict[str, str]:
    """The prompt that each id's answer is to, by another library; an id that stands twice fails."""
    data = pyarrow.dataset.dataset(f"{output}/data".removeprefix("s3://"), filesystem=outside)
    found = data.to_table(columns=["request_id", "prompt"]).to_pylist()
    assert len({row["request_id"] for row in found}) == len(found)
    return {row["request_id"]: row["prompt"] for row in found}


def test_two_shards_in_a_bucket_lock_resume_grow_and_finish(
    bucket, shards, engine, scans, reads, outside
):
    first, second = shards
    output = bucket / "out"
    engine.max_files = 1
    with pytest.raises(DriverKilled):
        complete_job(first)
    engine.max_files = None
    with hold_output(output_of(first)):
        complete_job(second)  # they share no lock
        with pytest.raises(OutputLocked):
            complete_job(first)
        with pytest.raises(OutputLocked, match="shard 1/2 is running"):
            finish_shards(output)
    with pytest.raises(Incomplete, match="shard 1/2 is not complete"):
        finish_shards(output)
    complete_job(first)
    assert sorted(engine.made) == sorted(NAMES)  # nothing twice
    assert finish_shards(output)["total"]["rows"] == len(NAMES) and (output / SUCCESS).exists()
    assert prompts(outside, output) == {name: f"Hi {name}" for name in NAMES}
    assert all((output_of(config) / INDEX_DIRECTORY / "input.json").exists() for config in shards)

    made, read, scanned = len(engine.made), len(reads), len(scans)
    assert complete_job(first)["attempt"] == 3
    assert (made, read, scanned) == (len(engine.made), len(reads), len(scans))
    assert not (output / SUCCESS).exists()  # until it is finished again

    write_input(bucket, rows(*NAMES, *ADDED))  # an object is replaced: its rows are compared
    complete_job(first)
    with pytest.raises(OutputMismatch, match="since shard 2/2 read it"):
        finish_shards(output)
    complete_job(second)
    assert sorted(engine.made) == sorted(NAMES + ADDED)
    assert (
        finish_shards(output)["total"]["rows"] == len(NAMES + ADDED) and (output / SUCCESS).exists()
    )
    assert prompts(outside, output) == {name: f"Hi {name}" for name in NAMES + ADDED}
