"""Three shards of a job as separate drivers, one of them killed and resumed, then finished: every id once."""

import signal
import subprocess
import time
from pathlib import Path

import duckdb
import pytest

from eagle_ray.batch.driver.finish import finish_shards
from eagle_ray.batch.driver.status import sharded_status_text
from eagle_ray.runs.job_errors import Incomplete, OutputLocked
from eagle_ray.storage.path import StoragePath, read_json
from tests.support.jobs import exit_code, start_driver, token_rows, with_changes


def wait_for_a_file(directory: Path, driver: subprocess.Popen) -> None:
    deadline = time.monotonic() + 300
    while not list(directory.glob("*.parquet")):
        if driver.poll() is not None or time.monotonic() > deadline:
            driver.kill()
            out, err = driver.communicate()
            pytest.fail(f"the driver wrote nothing: {out}{err}")
        time.sleep(0.02)


@pytest.mark.slow
def test_three_shards_one_killed_and_resumed_make_every_id_once(ray_session, make_job, messages):
    rows = token_rows(45)
    config = make_job(
        rows, **{"execution.slots": 1, "execution.rows_per_file": 1, "sampling.max_tokens": 40}
    )
    first, second, third = (with_changes(config, execution={"shard": f"{i}/3"}) for i in (1, 2, 3))
    output, root = Path(config.output.path), StoragePath.of(config.output.path)

    driver = start_driver(second)
    wait_for_a_file(output / "data" / "shard-0002-of-0003", driver)
    driver.send_signal(signal.SIGSTOP)  # alive, with its lock, and without another row
    assert exit_code(third) == 0  # they share no lock
    with pytest.raises(
        OutputLocked, match=r"shard 1/3 has not started; shard 2/3 is running: .* by process \d+ on"
    ):
        finish_shards(root)
    driver.send_signal(signal.SIGKILL)
    driver.communicate(timeout=60)
    assert exit_code(first) == 0
    with pytest.raises(Incomplete, match=r"shard 2/3 is not complete: it is killed"):
        finish_shards(root)
    assert "2/3    killed" in sharded_status_text(root)

    assert exit_code(second) == 0
    summary = finish_shards(root)
    assert (output / "_SUCCESS").exists() and (output / "report.html").exists()
    assert summary["total"]["rows"] == 45 == sum(shard["ids"] for shard in summary["shards"])
    assert [shard["attempts"] for shard in summary["shards"]] == [1, 2, 1]
    assert read_json(root / "_summary.json") == summary
    found = duckdb.sql(f"select request_id from '{output}/data/**/*.parquet'").fetchall()
    assert sorted(found) == sorted((row["id"],) for row in rows)

    assert exit_code(config) == 6
    assert "is written in 3 shards. Give this run one of them with --shard i/3" in messages[-1]
    assert exit_code(with_changes(config, execution={"shard": "1/4"})) == 6
    assert "is written in 3 shards, and --shard 1/4 has 4" in messages[-1]
