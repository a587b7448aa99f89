"""A job whose workers are several processes each: its rows, and what becomes of it if one of them is lost."""

import os
import signal

import psutil
import pytest

from tests.support.jobs import ids_of, rows_of, small_job, start_driver, token_rows, wait_for_another_file
from tests.support.ranks import followers_of, wait_until

SETTINGS = {"execution.slots": 4, "execution.actors": 1, "execution.rows_per_file": 8, "model.device": "cpu"}


def texts_of(config) -> dict[str, list[int]]:
    return {row["request_id"]: row["output_token_ids"] for row in rows_of(config)}


def test_a_job_over_two_ranks_has_the_rows_of_one(tmp_path):
    outputs = []
    for size in (1, 2):
        directory = tmp_path / str(size)
        directory.mkdir()
        config = small_job(directory, token_rows(24), **SETTINGS, **{"execution.tensor_parallel": size})
        printed, errors = start_driver(config).communicate(timeout=400)
        assert printed.splitlines()[-1].startswith("0 "), errors
        outputs.append(texts_of(config))
    assert outputs[0] == outputs[1]


@pytest.mark.parametrize("number, hits_leader", [(signal.SIGKILL, False), (signal.SIGSTOP, True)])
def test_every_row_is_there_once_after_the_loss_of_a_rank(tmp_path, number, hits_leader):
    rows = [row | {"max_tokens": 60, "ignore_eos": True} for row in token_rows(48)]
    config = small_job(tmp_path, rows, **SETTINGS, **{"execution.tensor_parallel": 2})
    driver = start_driver(config)
    try:
        wait_for_another_file(config)
        [follower] = [each for each in followers_of(driver.pid) if each.status() != psutil.STATUS_ZOMBIE]
        os.kill(follower.ppid() if hits_leader else follower.pid, number)
        printed, errors = driver.communicate(timeout=400)
        assert printed.splitlines()[-1].startswith("0 "), errors
    finally:
        driver.kill()
    assert ids_of(config) == sorted(row["id"] for row in rows)
    assert all(row["error_code"] is None for row in rows_of(config))
    assert ("was ended by signal 9" if hits_leader else "rank 1 was ended by signal 9") in errors
    assert wait_until(lambda: not psutil.pid_exists(follower.pid), 20)
