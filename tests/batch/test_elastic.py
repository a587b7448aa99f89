"""Workers that come and go: spot nodes first, on demand under the line, and rows of lost nodes."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest

from tests.support.clusters import MODEST, ON_FAKE_GPUS, cluster_of, start_run
from tests.support.jobs import ids_of, rows_of, token_rows
from tests.support.processes import parent_of

pytestmark = pytest.mark.slow
SPOT = {"ray.io/market-type": "spot"}
PATIENCE_S = 240


def add_node(cluster, labels: dict[str, str] | None = None):
    return cluster.add_node(**MODEST | {"num_gpus": 1, "labels": labels or {}})


def elastic_job(make_job, cluster, rows, **settings):
    defaults = {
        "sampling.max_tokens": 60,
        "sampling.ignore_eos": True,
        "speculative.method": "none",
        "execution.slots": 2,
        "execution.rows_per_file": 4,
        "execution.ray_address": cluster.address,
        "execution.on_late": "on_demand",
        "execution.price_per_hour": {"on_demand": 3.0, "spot": 1.0},
        "execution.finish_by": "1h",
        "execution.workers": {"min": 0, "max": 2},
    }
    return make_job(rows, **ON_FAKE_GPUS | defaults | settings)


def wait_until(condition, driver) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert driver.poll() is None, driver.stderr.read()
        assert time.monotonic() < deadline, "it did not come to pass"
        time.sleep(0.2)


def progress_of(config) -> dict:
    return json.loads((Path(config.output.path) / "_progress.json").read_text())


def test_spot_nodes_do_it_alone_and_a_lost_one_loses_no_row(make_job, tmp_path):
    rows = token_rows(150)  # many are left when the node goes
    with cluster_of(0) as cluster:
        add_node(cluster)
        first = add_node(cluster, SPOT)
        config = elastic_job(make_job, cluster, rows)
        driver = start_run(config, tmp_path)
        wait_until(lambda: len(rows_of(config)) > 4, driver)
        cluster.remove_node(first, allow_graceful=False)
        add_node(cluster, SPOT)
        _, err = driver.communicate(timeout=PATIENCE_S)
    assert driver.returncode == 0, err
    assert ids_of(config) == sorted(row["id"] for row in rows)
    assert "is gone: its rows are answered by others" in err and "Traceback" not in err
    usage = progress_of(config)["usage"]
    assert usage["spot_s"] > 0.9 * usage["worker_s"] > 0


def test_workers_on_demand_replace_spot_nodes_that_do_not_come(make_job, tmp_path):
    rows = token_rows(60)
    with cluster_of(0) as cluster:
        add_node(cluster)
        settings = {"execution.finish_by": "40s", "logging.level": "info"}
        config = elastic_job(make_job, cluster, rows, **settings)
        driver = start_run(config, tmp_path)
        _, err = driver.communicate(timeout=PATIENCE_S)
    assert driver.returncode == 0, err
    assert ids_of(config) == sorted(row["id"] for row in rows)
    usage = progress_of(config)["usage"]
    assert "spot_s" not in usage and usage["worker_s"] > 0


def test_a_worker_that_gets_sigterm_lets_go_of_its_rows_at_once(make_job, tmp_path):
    rows = token_rows(80)
    with cluster_of(0) as cluster:
        add_node(cluster), add_node(cluster)
        settings = {"execution.on_late": "scale", "execution.workers": {"min": 2, "max": 2}}
        config = elastic_job(make_job, cluster, rows, **settings)
        driver = start_run(config, tmp_path)
        wait_until(lambda: len({row["worker_id"] for row in rows_of(config)}) == 2, driver)
        engine = rows_of(config)[-1]["worker_id"]
        os.kill(parent_of(int(engine.rpartition(":")[2])), signal.SIGTERM)
        _, err = driver.communicate(timeout=PATIENCE_S)
    assert driver.returncode == 0, err
    assert ids_of(config) == sorted(row["id"] for row in rows)
    assert "Traceback" not in err
