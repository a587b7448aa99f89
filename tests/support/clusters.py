"""A Ray cluster of several nodes on this machine, with fake GPUs, and jobs on it in processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import yaml

from eagle_ray.batch.driver.ray_environment import LOCAL, prepare_ray_environment
from eagle_ray.config import JobConfig

MODEST = {"num_cpus": 1, "object_store_memory": 100 << 20, "node_ip_address": "127.0.0.1", "include_dashboard": False}
ON_FAKE_GPUS = {"model.device": "cpu", "execution.gpus_per_actor": 1}


@contextmanager
def cluster_of(num_workers: int) -> Iterator:
    """A head without a GPU and workers with one each; what was started is ended."""
    prepare_ray_environment(LOCAL)
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args=MODEST | {"dashboard_agent_listen_port": 0})
    try:
        for _ in range(num_workers):
            add_node(cluster)
        yield cluster
    finally:
        cluster.shutdown()


def add_node(cluster, kind: str | None = None):
    resources = {"resources": {f"accelerator_type:{kind}": 1}} if kind else {}
    return cluster.add_node(**MODEST | {"num_gpus": 1} | resources)


def start_run(config: JobConfig, directory: Path, *flags: str) -> subprocess.Popen:
    """``eagle-ray run`` in a process of its own."""
    (directory / "job.yaml").write_text(yaml.safe_dump(config.model_dump(mode="json")))
    command = [sys.executable, "-m", "eagle_ray.cli", "run", "-c", str(directory / "job.yaml"), *flags]
    environment = os.environ | {"PYTHONPATH": os.getcwd()}
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def raylet_of(node) -> int:
    return node.all_processes["raylet"][0].process.pid
