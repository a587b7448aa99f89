"""Check the cluster of a job: whether it responds, its resources, and the workers that the job would get.

A local job starts Ray itself, so Ray is not started for the check.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from eagle_ray.assembly.worker_plan import ACCELERATOR, WorkerPlan, counted, threads_wanted
from eagle_ray.batch.driver.ray_environment import LOCAL, prepare_ray_environment, resolve_address
from eagle_ray.config import ExecutionConfig
from eagle_ray.core.errors import ConfigError
from eagle_ray.doctor.check_result import Finding
from eagle_ray.doctor.system import num_cores
from eagle_ray.runs.job_errors import ClusterError


@dataclass(frozen=True, slots=True)
class PlannedWorkers:
    """The workers that a job would start with, and where.

    Attributes:
        num_nodes: of the cluster.
        is_here: on this machine only.
        memory: bytes that Ray counts on the smallest node, None if unknown.
    """

    plan: WorkerPlan
    num_nodes: int
    is_here: bool
    memory: int | None


def workers(execution: ExecutionConfig, device: str) -> tuple[Finding, PlannedWorkers | None]:
    """Return the workers, or None if the job would not start. device: model.device."""
    address = resolve_address(execution.ray_address)
    is_here = address == LOCAL
    try:
        prepare_ray_environment(address)
        nodes = [this_machine()] if is_here else _there(address)
        plan = WorkerPlan.of_job(execution, device, nodes, max_threads=threads_wanted(os.environ))
    except (ClusterError, ConfigError) as error:
        return Finding("ray", f"no workers at {address!r}", {"address": address}, problem=str(error)), None
    memory = None if is_here else int(min(node.get("memory", 0) for node in nodes))
    cpus, gpus = (sum(node.get(kind, 0) for node in nodes) for kind in ("CPU", "GPU"))
    where = "a job starts Ray on this machine" if is_here else f"{counted(len(nodes), 'node')} at {address}"
    says = f"{where}: {counted(cpus, 'CPU')}, {counted(gpus, 'GPU')}; {plan.describe()}"
    facts = {"address": address, "nodes": len(nodes), "cpus": cpus, "gpus": gpus, "workers": plan.min_workers}
    return Finding("ray", says, facts), PlannedWorkers(plan, len(nodes), is_here, memory)


def this_machine() -> Mapping[str, float]:
    """Return the resources of a Ray node on this machine."""
    node: dict[str, float] = {"CPU": num_cores(), "GPU": torch.cuda.device_count()}
    if node["GPU"]:
        from ray._private.accelerators import get_accelerator_manager_for_resource

        manager = get_accelerator_manager_for_resource("GPU")
        kind = None if manager is None else manager.get_current_node_accelerator_type()
        node |= {ACCELERATOR + kind: 1} if kind else {}
    return node


def _there(address: str) -> list[Mapping[str, float]]:
    """Join the cluster for a moment."""
    import ray

    from eagle_ray.batch.driver.cluster import connect, nodes

    connect(address)
    try:
        return nodes()
    finally:
        ray.shutdown()
