"""Several nodes with fake GPUs: engines spread, a node dies, another joins, the pool grows."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

import pytest

from tests.support.clusters import ON_FAKE_GPUS, add_node, cluster_of, raylet_of, start_run
from tests.support.jobs import ids_of, rows_of, token_rows
from tests.support.processes import parent_of

pytestmark = pytest.mark.slow
PATIENCE_S = 180


def wait_until(condition: Callable[[], bool], driver) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert driver.poll() is None, driver.stderr.read()
        assert time.monotonic() < deadline, "it did not come to pass"
        time.sleep(0.2)


def nodes_used(config, nodes) -> set[int]:
    """Which of the living nodes have written rows, by their place in the list."""
    raylets, used = [raylet_of(node) for node in nodes], set()
    for worker_id in {row["worker_id"] for row in rows_of(config)}:
        try:
            actor = parent_of(int(worker_id.rpartition(":")[2]))
            used.add(raylets.index(parent_of(actor)))
        except (FileNotFoundError, ValueError):  # a worker, or its node, that is gone
            continue
    return used


@pytest.mark.parametrize("actors", ["auto", {"min": 1, "max": 2}])
def test_job_uses_a_joined_node_and_survives_a_lost_node(make_job, tmp_path, actors):
    rows = token_rows(1200)
    with cluster_of(1) as cluster:
        settings = {
            "sampling.max_tokens": 60,
            "execution.rows_per_file": 8,
            "execution.ray_address": cluster.address,
        }
        config = make_job(rows, **ON_FAKE_GPUS | settings | {"execution.actors": actors})
        (first,) = cluster.worker_nodes
        driver = start_run(config, tmp_path)
        wait_until(lambda: nodes_used(config, [first]) == {0}, driver)
        second = add_node(cluster)
        wait_until(lambda: nodes_used(config, [first, second]) == {0, 1}, driver)
        cluster.remove_node(first, allow_graceful=False)
        _, err = driver.communicate(timeout=PATIENCE_S)
    assert driver.returncode == 0, err
    assert ids_of(config) == sorted(row["id"] for row in rows)
    assert "Traceback" not in err


def test_lost_node_without_replacement_loses_no_row(make_job, tmp_path):
    rows = token_rows(200)
    with cluster_of(2) as cluster:
        settings = {
            "sampling.max_tokens": 60,
            "execution.rows_per_file": 8,
            "execution.ray_address": cluster.address,
        }
        config = make_job(rows, **ON_FAKE_GPUS | settings)
        nodes = sorted(cluster.worker_nodes, key=raylet_of)
        driver = start_run(config, tmp_path)
        wait_until(lambda: nodes_used(config, nodes) == {0, 1}, driver)  # they spread
        cluster.remove_node(nodes[0], allow_graceful=False)
        _, err = driver.communicate(timeout=PATIENCE_S)
    assert driver.returncode == 0, err
    assert ids_of(config) == sorted(row["id"] for row in rows)


def test_workers_are_placed_on_the_wanted_kind_of_gpu(make_job, tmp_path):
    with cluster_of(0) as cluster:
        nodes = [add_node(cluster, kind) for kind in ("L40S", "H100")]
        settings = {"execution.ray_address": cluster.address, "execution.accelerator_type": "H100"}
        config = make_job(token_rows(20), **ON_FAKE_GPUS | settings)
        driver = start_run(config, tmp_path)
        wait_until(lambda: nodes_used(config, nodes) == {1}, driver)
        _, err = driver.communicate(timeout=PATIENCE_S)
        assert driver.returncode == 0, err
        refused = start_run(
            config, tmp_path, "--overwrite", "--set", "execution.accelerator_type=A100"
        )
        _, err = refused.communicate(timeout=PATIENCE_S)
    assert refused.returncode == 2 and "no node of the cluster has 'A100'; it has H100, L40S" in err


def test_a_cluster_that_is_lost_is_exit_5_in_one_line(make_job, tmp_path):
    """Ray itself would end the process after a minute, with exit code 1 and without a word."""
    settings = {
        "sampling.max_tokens": 200,
        "sampling.ignore_eos": True,
        "execution.rows_per_file": 1,
    }
    with cluster_of(1) as cluster:
        config = make_job(
            token_rows(60), **ON_FAKE_GPUS | settings | {"execution.ray_address": cluster.address}
        )
        driver = start_run(config, tmp_path, "--set", "execution.slots=1")
        wait_until(lambda: len(rows_of(config)) > 1, driver)
        cluster.head_node.all_processes["gcs_server"][0].process.kill()
        _, err = driver.communicate(timeout=PATIENCE_S)
    assert driver.returncode == 5, err
    assert (
        f"the Ray cluster at {config.execution.ray_address} is lost" in err.splitlines()[-1]
        and "Traceback" not in err
    )


def test_a_driver_that_loses_its_own_node_is_exit_5_and_names_it(make_job, tmp_path):
    """Ray itself would end the process at its next use of the object store, with exit code 1 and without a word."""
    settings = {
        "sampling.max_tokens": 200,
        "sampling.ignore_eos": True,
        "execution.rows_per_file": 1,
    }
    with cluster_of(1) as cluster:
        config = make_job(
            token_rows(60), **ON_FAKE_GPUS | settings | {"execution.ray_address": cluster.address}
        )
        driver = start_run(config, tmp_path, "--set", "execution.slots=1")
        wait_until(lambda: len(rows_of(config)) > 1, driver)
        os.kill(
            raylet_of(cluster.head_node), signal.SIGKILL
        )  # the driver's, and its engine runs on the other node
        _, err = driver.communicate(timeout=PATIENCE_S)
    assert driver.returncode == 5, err
    assert (
        "stopped: the raylet of this driver's Ray node has ended" in err and "Traceback" not in err
    )
    assert "Run the same command again to resume" in err
