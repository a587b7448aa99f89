"""Check the cluster of a job: whether it responds, its resources, and the workers that the job would get.

A local job starts Ray itself, so Ray is not started for the check.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from eagle_ray.batch.driver.ray_environment import LOCAL, prepare_ray_environment, resolve_address
from eagle_ray.config import ExecutionConfig
from eagle_ray.core.errors import ConfigError
from eagle_ray.doctor.check_result import Finding, counted
from eagle_ray.doctor.system import num_cores
from eagle_ray.runs.job_errors import ClusterError

MANY_ROWS = 1 << 30  # so that no worker is left out for want of rows


@dataclass(frozen=True, slots=True)
class Workers:
    """The workers that a job would start with, and the GPUs and CPU threads of each.

    is_here: on this machine only. memory: bytes that Ray counts on the smallest node, None if unknown.
    """

    number: int
    num_gpus: float
    threads: int
    num_nodes: int
    is_here: bool
    memory: int | None


def workers(execution: ExecutionConfig, device: str) -> tuple[Finding, Workers | None]:
    """Return the workers, or None if the job would not start. device: model.device."""
    address = resolve_address(execution.ray_address)
    try:
        prepare_ray_environment(address)
        nodes = _here() if address == LOCAL else _there(address)
        found = _planned(execution, device, nodes, address == LOCAL)
    except (ClusterError, ConfigError) as error:
        return Finding("ray", f"no workers at {address!r}", {"address": address}, problem=str(error)), None
    cpus, gpus = (sum(node.get(kind, 0) for node in nodes) for kind in ("CPU", "GPU"))
    where = "a job starts Ray on this machine" if found.is_here else f"{counted(len(nodes), 'node')} at {address}"
    each = counted(found.num_gpus, "GPU") if found.num_gpus else counted(found.threads, "CPU thread")
    has = f"{counted(cpus, 'CPU')}, {counted(gpus, 'GPU')}; {counted(found.number, 'worker')}"
    says = f"{where}: {has} with {each}{'' if found.number == 1 else ' each'}"
    facts = {"address": address, "nodes": len(nodes), "cpus": cpus, "gpus": gpus, "workers": found.number}
    return Finding("ray", says, facts), found


def _here() -> list[Mapping[str, float]]:
    node: dict[str, float] = {"CPU": num_cores(), "GPU": torch.cuda.device_count()}
    if node["GPU"]:
        from ray._private.accelerators import get_accelerator_manager_for_resource

        from eagle_ray.batch.driver.cluster import ACCELERATOR

        manager = get_accelerator_manager_for_resource("GPU")
        kind = None if manager is None else manager.get_current_node_accelerator_type()
        node |= {ACCELERATOR + kind: 1} if kind else {}
    return [node]


def _there(address: str) -> list[Mapping[str, float]]:
    """Join the cluster for a moment."""
    import ray

    from eagle_ray.batch.driver.cluster import connect, nodes

    connect(address)
    try:
        return nodes()
    finally:
        ray.shutdown()


def _planned(execution: ExecutionConfig, device: str, nodes: Sequence[Mapping[str, float]], is_here: bool) -> Workers:
    from eagle_ray.batch.driver.cluster import (  # Ray reads its environment as it is imported
        plan_workers,
        threads_wanted,
    )

    plan = plan_workers(execution, device, nodes, MANY_ROWS, threads_wanted(os.environ))
    memory = None if is_here else int(min(node.get("memory", 0) for node in nodes))
    return Workers(plan.fewest, plan.num_gpus, plan.threads, len(nodes), is_here, memory)
