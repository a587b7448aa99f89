"""A job whose workers are several processes each: its rows, and what becomes of it if one of them is lost."""

import os
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import psutil
import pytest

from eagle_ray.config import JobConfig
from tests.support.clusters import MODEST, cluster_of, raylet_of, start_run
from tests.support.jobs import (
    exit_code,
    ids_of,
    rows_of,
    small_job,
    start_driver,
    token_rows,
    wait_for_another_file,
)
from tests.support.processes import ListenerWatch, is_running, title_of
from tests.support.ranks import followers_of, wait_until

SETTINGS = {
    "execution.slots": 4,
    "execution.actors": 1,
    "execution.rows_per_file": 8,
    "model.device": "cpu",
}


def texts_of(config) -> dict[str, list[int]]:
    return {row["request_id"]: row["output_token_ids"] for row in rows_of(config)}


def test_a_job_over_two_ranks_has_the_rows_of_one(ray_session, tmp_path):
    outputs = []
    for size in (1, 2):
        directory = tmp_path / str(size)
        directory.mkdir()
        config = small_job(
            directory, token_rows(24), **SETTINGS, **{"execution.tensor_parallel": size}
        )
        assert exit_code(config) == 0
        outputs.append(texts_of(config))
    assert outputs[0] == outputs[1]


LOSSES = [
    (signal.SIGKILL, False),
    (signal.SIGSTOP, True),
    (signal.SIGKILL, True),
    (signal.SIGSTOP, False),
]


@pytest.fixture
def listener_watch(monkeypatch) -> ListenerWatch:
    """Of all processes that the test starts: none of them is left at its end."""
    seen = ListenerWatch()
    monkeypatch.setenv(*next(iter(seen.environment.items())))
    yield seen
    assert wait_until(lambda: not seen.running(), 30), [title_of(pid) for pid in seen.running()]


def running_ranks() -> set[int]:
    """Return the engines' processes with ranks that this process's jobs have, and the ranks'."""
    followers = [each for each in followers_of(os.getpid()) if is_running(each.pid)]
    return {pid for each in followers for pid in (each.pid, each.ppid())}


def hurt_rank(config: JobConfig, number: int, hits_leader: bool) -> set[int]:
    """Send a signal to one of the two ranks after the first file, and return both."""
    wait_for_another_file(config)
    [follower] = [each for each in followers_of(os.getpid()) if is_running(each.pid)]
    found = {follower.pid, follower.ppid()}
    os.kill(follower.ppid() if hits_leader else follower.pid, number)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("number, hits_leader", LOSSES)
def test_every_row_is_there_once_after_the_loss_of_a_rank(
    ray_session, tmp_path, messages, number, hits_leader
):
    rows = [row | {"max_tokens": 40, "ignore_eos": True} for row in token_rows(32)]
    config = small_job(tmp_path, rows, **SETTINGS, **{"execution.tensor_parallel": 2})
    with ThreadPoolExecutor(1) as threads:
        ranks = threads.submit(hurt_rank, config, number, hits_leader)
        assert exit_code(config) == 0
    assert wait_until(lambda: not any(map(is_running, ranks.result())) and not running_ranks(), 30)
    errors = "\n".join(messages)
    assert ids_of(config) == sorted(row["id"] for row in rows)
    assert all(row["error_code"] is None for row in rows_of(config))
    is_named = number == signal.SIGKILL and not hits_leader
    words = (
        "rank 1 was ended by signal 9"
        if is_named
        else "rank 1 does not answer"
        if not hits_leader
        else "signal 9"
    )
    assert words in errors


def kill(follower: psutil.Process) -> None:
    follower.kill()


def without_memory(follower: psutil.Process) -> None:
    """Too little for torch's libraries."""
    follower.rlimit(psutil.RLIMIT_AS, (256 << 20, 256 << 20))


@pytest.mark.slow
@pytest.mark.parametrize("hurt", [kill, without_memory])
def test_every_row_is_there_once_after_a_rank_that_did_not_start(tmp_path, listener_watch, hurt):
    """The first two engines lose theirs as they start."""
    config = small_job(tmp_path, token_rows(24), **SETTINGS, **{"execution.tensor_parallel": 2})
    driver, lost = start_driver(config), set()
    try:
        while len(lost) < 2:
            for follower in followers_of(driver.pid):
                if follower.pid not in lost and is_running(follower.pid):
                    with suppress(psutil.NoSuchProcess):
                        hurt(follower)
                        lost.add(follower.pid)
            assert driver.poll() is None, driver.stderr.read()
            time.sleep(0.01)
        printed, errors = driver.communicate(timeout=400)
        assert printed.splitlines()[-1].startswith("0 "), errors
    finally:
        driver.kill()
    assert ids_of(config) == sorted(row["id"] for row in token_rows(24))
    assert all(row["error_code"] is None for row in rows_of(config))
    assert "rank 1" in errors


@pytest.mark.slow
def test_the_ranks_of_an_actor_have_the_gpus_of_one_node(tmp_path, listener_watch):
    """Of two nodes, one has a single (fake) GPU, so all actors are on the other."""
    settings = SETTINGS | {"execution.gpus_per_actor": 2, "execution.tensor_parallel": 2}
    with cluster_of(1) as cluster:
        node = cluster.add_node(**MODEST | {"num_gpus": 2})
        config = small_job(
            tmp_path, token_rows(24), **settings, **{"execution.ray_address": cluster.address}
        )
        driver = start_run(config, tmp_path)
        [follower] = wait_for_processes(lambda: followers_of(raylet_of(node)))
        leader = psutil.Process(follower.ppid())
        seen = {process.environ()["CUDA_VISIBLE_DEVICES"] for process in (leader, follower)}
        assert seen == {"0,1"} and leader.parent().ppid() == raylet_of(node)
        _, errors = driver.communicate(timeout=300)
        assert driver.returncode == 0, errors
    assert len(rows_of(config)) == 24


@pytest.mark.slow
def test_gpus_of_two_nodes_are_refused_with_what_would_do(tmp_path):
    with cluster_of(2) as cluster:
        address = {"execution.ray_address": cluster.address}
        for settings, key in (
            ({"gpus_per_actor": 2}, "gpus_per_actor"),
            ({"tensor_parallel": 2}, "tensor_parallel"),
        ):
            names = {f"execution.{name}": value for name, value in settings.items()} | {
                "execution.actors": 1
            }
            config = small_job(tmp_path, token_rows(4), **names, **address)
            driver = start_run(config, tmp_path)
            _, errors = driver.communicate(timeout=120)
            assert driver.returncode != 0 and "Traceback" not in errors
            assert (
                f"execution.{key}: 2 GPUs of one node, and no node has as many (GPUs by node: "
                in errors
            )
            assert "Set it to 1, or run it on nodes with 2 GPUs" in errors


def wait_for_processes(look: Callable[[], list[psutil.Process]]) -> list[psutil.Process]:
    assert wait_until(lambda: bool(look()), 120)
    return look()
