"""Whole jobs in and out of a bucket, counted from outside."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from urllib.parse import urlsplit

import duckdb
import pyarrow as pa
import pyarrow.dataset
import pyarrow.parquet as pq
import pytest

from eagle_ray.batch.driver import job_manifest as manifest
from eagle_ray.batch.driver.claim import hold_output
from eagle_ray.batch.driver.job_run import complete_job
from eagle_ray.cli.validate import validate
from eagle_ray.config import JobConfig
from eagle_ray.runs import run as fencing
from eagle_ray.runs.job_errors import OutputLocked
from eagle_ray.runs.lease import LOCK
from eagle_ray.runs.recorded_inputs import read_inputs
from eagle_ray.storage.path import StoragePath, json_bytes, read_json
from tests.support.jobs import exit_code, small_job, token_rows
from tests.support.s3 import FaultProxy, RefusedRequest

CATEGORIES = ("a", "b c/d", None)


@pytest.fixture
def job(bucket, tmp_path):
    """24 rows in a JSONL file and a Parquet file, one of them bad, two samples each."""
    rows = [row | {"category": CATEGORIES[i % 3]} for i, row in enumerate(token_rows(24))]
    (bucket / "in/a.jsonl").write_atomic(
        b"".join(json_bytes(row).replace(b"\n", b"") + b"\n" for row in rows[:12]) + b"{\n"
    )
    sink = pa.BufferOutputStream()
    pq.write_table(pa.Table.from_pylist(rows[12:]), sink, row_group_size=5)
    (bucket / "in/sub/b.parquet").write_atomic(sink.getvalue().to_pybytes())
    settings = {
        "sampling.n": 2,
        "execution.rows_per_file": 8,
        "sampling.max_tokens": 6,
        "output.partition_by": "category",
    }
    paths = {"input.path": f"{bucket}/in", "output.path": f"{bucket}/out"}
    return small_job(tmp_path, None, **settings | paths)


IDS = sorted([f"q{i}" for i in range(24)] + ["a.jsonl:12"])


def rows_per_id(outside, output: StoragePath) -> list[tuple[str, int]]:
    """Every id and its rows, by DuckDB over what pyarrow's own S3 client finds."""
    found = pyarrow.dataset.dataset(
        f"{output}/data".removeprefix("s3://"), filesystem=outside, partitioning="hive"
    )
    rows = found.to_table(columns=["request_id", "sample_index"])  # noqa: F841, DuckDB reads it by its name
    return duckdb.sql(
        "select request_id, count(distinct sample_index) from rows group by 1 order by 1"
    ).fetchall()


def test_a_job_in_a_bucket_is_validated_run_and_resumed(ray_session, job, bucket, outside):
    output = bucket / "out"
    before = bucket.list_versions()
    assert f"output   {output} can be written; a run would start it" in validate(job)
    assert bucket.list_versions() == before
    assert complete_job(job)["total"]["rows"] == 50
    assert rows_per_id(outside, output) == [(id, 2) for id in IDS]
    assert {file.parent.name for file in (output / "data").glob("**/*.parquet")} == {
        "category=a",
        "category=b%20c%2Fd",
        "category=__HIVE_DEFAULT_PARTITION__",
    }
    assert read_json(output / "_summary.json")["groups"].keys() == {"", "a", "b c/d"}
    assert (output / "_SUCCESS").exists() and read_json(output / "_progress.json")[
        "rows_in_files"
    ] == 50
    inputs = read_inputs(output, read_json(output / "_run.json"))
    assert inputs[f"{bucket}/in/a.jsonl"].keys() == {"size", "etag"}

    twice, *kept = (output / "data").list_versions().items()
    (twice[0].parent / "part-001-999999.parquet").write_atomic(
        twice[0].read_bytes()
    )  # a zombie's, after the recount
    assert complete_job(job)["total"]["rows"] == 50
    assert rows_per_id(outside, output) == [(id, 2) for id in IDS] and not twice[0].exists()
    assert (output / "data").list_versions().items() >= dict(
        kept
    ).items()  # nothing else is written again
    assert "a run would resume run" in validate(job)

    with hold_output(output), pytest.raises(OutputLocked, match="is being written by process"):
        complete_job(job)
    changed = (
        (bucket / "in/a.jsonl")
        .read_bytes()
        .replace(b'"prompt_token_ids": [', b'"prompt_token_ids": [5, ', 1)
    )
    (bucket / "in/a.jsonl").write_atomic(changed)
    assert exit_code(job) == 6


@pytest.mark.slow
def test_missing_rows_are_made_and_late_files_are_deleted(
    ray_session, job, bucket, outside, monkeypatch
):
    output = bucket / "out"
    complete_job(job)
    lost, *kept = (output / "data").list_versions().items()
    lost[0].remove()
    assert complete_job(job)["total"]["rows"] == 50
    assert rows_per_id(outside, output) == [(id, 2) for id in IDS]
    assert (output / "data").list_versions().items() >= dict(kept).items()

    old = (output / "data").glob("**/*.parquet")[0]
    rows, begin = old.read_bytes(), fencing.write_manifest

    def published_late(*args: object) -> None:
        monkeypatch.undo()
        begin(*args)
        old.write_atomic(rows)

    monkeypatch.setattr(fencing, "write_manifest", published_late)
    anew = job.model_copy(
        update={"output": job.output.model_copy(update={"if_exists": "overwrite"})}
    )
    assert complete_job(anew)["total"]["rows"] == 50
    assert not old.exists() and rows_per_id(outside, output) == [(id, 2) for id in IDS]


def test_counting_waits_for_the_writers_of_a_killed_attempt(bucket, job, monkeypatch):
    monkeypatch.setattr(fencing, "MAX_PUT_S", 3.0)
    with hold_output(bucket / "out"):
        manifest.open_run(job, {})  # and no outcome: killed
        run = manifest.open_run(job, {})
        began = time.monotonic()
        run.settle()
        assert time.monotonic() - began > 1  # of three, some of which have passed
        with run.recorded_outcome():
            pass


@pytest.mark.slow
def test_a_killed_driver_is_taken_over_and_a_live_one_is_not(bucket, job, outside):
    """Real drivers with a Ray of their own, through a server that throttles and breaks all the while."""
    output, job = bucket / "out", slow(job)
    address = urlsplit(os.environ["AWS_ENDPOINT_URL"])
    with FaultProxy(address.hostname, address.port) as proxy:
        proxy.fail("PUT", RefusedRequest(503, "SlowDown"), 3, path="part-")
        proxy.fail("GET", RefusedRequest(500, "InternalError"), 3, path="in/")
        first = start_driver(job, proxy.url)
        wait_for_files(output, first, 3)
        second = start_driver(job, proxy.url)
        _, said = second.communicate(timeout=120)
        assert (
            second.returncode == 7
            and f"{output} is being written by process {first.pid} on " in said
        )
        first.send_signal(signal.SIGKILL)
        first.communicate(timeout=30)
        made = (output / "data").list_versions()
        assert len(made) >= 3 and not (output / "_SUCCESS").exists()
        late = json.loads((output / LOCK).read_bytes())
        LatePut(output / LOCK, json_bytes(late | {"beat": late["beat"] + 1}), proxy).start()
        third = start_driver(job, proxy.url)
        _, said = third.communicate(timeout=240)
        assert third.returncode == 0, said
        assert (
            f"is held by process {first.pid} on" in said and "no sign of life: taken over" in said
        )
        assert (
            output / "data"
        ).list_versions().items() >= made.items()  # rows already written are kept as they are
    assert (
        rows_per_id(outside, output) == [(id, 2) for id in IDS] and (output / "_SUCCESS").exists()
    )


@pytest.mark.slow
def test_job_survives_a_storage_outage_of_50_seconds(bucket, job, outside):
    """Without a restart: requests are tried for longer, and the lease waits to be renewed."""
    output, job = bucket / "out", slow(job)
    address = urlsplit(os.environ["AWS_ENDPOINT_URL"])
    with FaultProxy(address.hostname, address.port) as proxy:
        driver = start_driver(job, proxy.url)
        wait_for_files(output, driver, 3)
        for method in ("GET", "PUT", "HEAD", "DELETE"):
            proxy.fail(method, RefusedRequest(503, "ServiceUnavailable"), 1_000_000)
        time.sleep(50)  # longer than SELF_FENCE_S and LEASE_S
        proxy.reset()
        _, said = driver.communicate(timeout=240)
        assert driver.returncode == 0, said
        assert "could not be written for 22 s: waiting up to 600 s" in said and "is renewed" in said
    assert (
        rows_per_id(outside, output) == [(id, 2) for id in IDS] and (output / "_SUCCESS").exists()
    )


def slow(job: JobConfig) -> JobConfig:
    """The same job, at work for long enough to meet what happens to it."""
    changes = {
        "execution": {"slots": 1, "rows_per_file": 1},
        "sampling": {"max_tokens": 200, "ignore_eos": True},
    }
    return job.model_copy(
        update={name: getattr(job, name).model_copy(update=new) for name, new in changes.items()}
    )


class LatePut(threading.Thread):
    """A PUT that a driver sent before it was killed, and that arrives once the next driver watches the lease."""

    def __init__(self, file: StoragePath, data: bytes, proxy: FaultProxy):
        super().__init__(daemon=True)
        self._file, self._data, self._proxy, self._num_seen = file, data, proxy, len(proxy.seen)

    def run(self) -> None:
        while not any(
            seen.method == "GET" and LOCK in seen.path
            for seen in self._proxy.seen[self._num_seen :]
        ):
            time.sleep(0.1)
        time.sleep(3)
        self._file.write_atomic(self._data)


def start_driver(job, endpoint: str) -> subprocess.Popen:
    """The installed command, in a process of its own."""
    settings = job.model_copy(
        update={"execution": job.execution.model_copy(update={"ray_address": "local"})}
    )
    file = Path(tempfile.mkdtemp()) / "job.yaml"
    file.write_text(json.dumps(settings.model_dump(mode="json")))
    environment = os.environ | {"PYTHONPATH": os.getcwd(), "AWS_ENDPOINT_URL": endpoint}
    command = [sys.executable, "-m", "eagle_ray.cli", "run", "-c", str(file)]
    return subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def wait_for_files(output: StoragePath, driver: subprocess.Popen, count: int) -> None:
    deadline = time.monotonic() + 180
    while len((output / "data").glob("**/*.parquet")) < count:
        assert time.monotonic() < deadline and driver.poll() is None, (
            "the driver ended, or wrote nothing for minutes"
        )
        time.sleep(0.1)
