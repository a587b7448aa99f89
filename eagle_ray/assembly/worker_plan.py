"""WorkerPlan: how many workers a cluster runs, with the GPUs and CPU threads of each.

A worker of a job and a replica of an endpoint are one engine each, so both are planned by one rule.
Its GPUs are those of one node. Jobs, the endpoint, `doctor` and `validate --estimate` show the plan
in the same words.

    >>> from eagle_ray.config import ExecutionConfig
    >>> plan = WorkerPlan.of_job(ExecutionConfig(), "auto", [{"CPU": 8, "GPU": 4}, {"CPU": 8, "GPU": 4}])
    >>> plan.describe()
    '8 workers with 1 GPU each, 64 at most'
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from eagle_ray.config import ExecutionConfig
from eagle_ray.config.job import ActorRange, EnginesConfig
from eagle_ray.config.serve import ServingConfig
from eagle_ray.report.text import counted
from eagle_ray.runs.job_errors import ClusterError, ClusterUnfit

MAX_CPU_WORKERS = 8  # maximum if execution.actors is auto: each loads the models
# Execution.actors auto: how many times the GPUs of the start are used, should nodes join.
MAX_GROWTH = 8
ROUNDING = 1e-6  # three thirds of a GPU are one
ACCELERATOR = "accelerator_type:"  # how the resource that names a node's kind of GPU begins
RAY_JOB_VARIABLE = "RAY_JOB_CONFIG_JSON_ENV_VAR"  # set for the driver of a Ray job

# Slots that `auto` gives an engine: on a CPU, and at most on a GPU.
CPU_SLOTS = 16
MAX_SLOTS = 256
PREFILL_TOKENS = EnginesConfig.AUTO_PREFILL_TOKENS
Auto = Literal["auto"]
Node = Mapping[str, float]  # a node's resources by Ray's names, such as CPU and GPU


@dataclass(frozen=True, slots=True)
class WorkerPlan:
    """The workers of a job, or the replicas of an endpoint.

    Attributes:
        min_workers, max_workers: number of workers at the start, and maximum number.
        num_gpus: GPUs of each worker, all on one node; a share of one GPU, or whole ones.
        threads: CPU threads of each worker.
        accelerator_type: kind of the GPUs, or None for any.
    """

    min_workers: int = 1
    max_workers: int = 1
    num_gpus: float = 0
    threads: int = 1
    accelerator_type: str | None = None

    @classmethod
    def of_job(
        cls,
        execution: ExecutionConfig,
        device: str,
        nodes: Sequence[Node],
        num_rows: int | None = None,
        max_threads: int | None = None,
    ) -> WorkerPlan:
        """Return the workers of a job.

        Args:
            device: value of model.device.
            nodes: resources of each node.
            num_rows: number of rows, since more workers would be idle; None if unknown.
            max_threads: maximum threads of one worker, if the user set it.

        Raises:
            ClusterUnfit: no node has enough such GPUs.
            ClusterError: there are too few at the moment; a lost node may come back.
        """
        number: Any = execution.actors
        if execution.is_elastic and execution.workers is not None:
            # None has to be there at the start: nodes are added for those that wait.
            number = ActorRange.model_construct(min=0, max=execution.workers.max)
        settings = _Settings(
            "execution.actors", "execution.gpus_per_actor", number, execution.gpus_per_actor,
            execution.accelerator_type, MAX_CPU_WORKERS, MAX_GROWTH, num_ranks=execution.tensor_parallel,
        )  # fmt: skip
        return _plan(settings, device, nodes, num_rows, max_threads)

    @classmethod
    def of_endpoint(
        cls,
        serving: ServingConfig,
        device: str,
        nodes: Sequence[Node],
        max_threads: int | None = None,
    ) -> WorkerPlan:
        """Return the plan of an endpoint's replicas. Takes the arguments of `of_job` and raises its errors.

        Replicas that have no GPU yet are no error: Serve starts them as nodes join.
        """
        settings = _Settings(
            "serving.replicas", "serving.gpus_per_replica", serving.replicas, serving.gpus_per_replica, can_wait=True,
            num_ranks=serving.tensor_parallel,
        )  # fmt: skip
        return _plan(settings, device, nodes, None, max_threads)

    @property
    def ray_options(self) -> dict[str, Any]:
        """Return Ray's options for a worker. They reserve CPUs for reading and writing; engines
        divide CPUs by threads."""
        kind = {"accelerator_type": self.accelerator_type} if self.accelerator_type else {}
        return {"num_gpus": self.num_gpus, "num_cpus": 0} | kind

    def describe(self) -> str:
        """Return text such as "2 workers with 1 GPU each, 4 at most"."""
        device = (
            counted(self.num_gpus, "GPU")
            if self.num_gpus
            else f"up to {counted(self.threads, 'CPU thread')}"
        )
        each = " each" if self.min_workers > 1 else ""
        limit = f", {self.max_workers} at most" if self.max_workers > self.min_workers else ""
        return f"{counted(self.min_workers, 'worker')} with {device}{each}{limit}"


def threads_wanted(environ: Mapping[str, str]) -> int | None:
    """Return OMP_NUM_THREADS if the user set it, else None. In the driver of a Ray job it is always
    1, which Ray has set."""
    wanted = environ.get("OMP_NUM_THREADS", "")
    return (
        int(wanted)
        if wanted.isdigit() and int(wanted) and RAY_JOB_VARIABLE not in environ
        else None
    )


@dataclass(frozen=True, slots=True)
class _Settings:
    """The settings that decide the number of workers, in a job and in an endpoint.

    Attributes:
        number_key, gpus_key: names of the two settings.
        number, num_gpus: their values.
        accelerator_type: the kind of GPU that is asked for.
        max_on_cpu: workers without GPUs if their number is auto, if there are two cores for each.
        growth: how many times the GPUs that are there may be used if the number is auto.
        can_wait: workers may wait for GPUs that are not there yet.
        num_ranks: number of ranks of each worker, which takes a GPU for each if their number is
            auto.
    """

    number_key: str
    gpus_key: str
    number: Literal["auto"] | int | ActorRange
    num_gpus: Literal["auto"] | float
    accelerator_type: str | None = None
    max_on_cpu: int = 1
    growth: int = 1
    can_wait: bool = False
    num_ranks: Literal["auto"] | int = "auto"


def _plan(
    settings: _Settings,
    device: str,
    nodes: Sequence[Node],
    num_rows: int | None,
    max_threads: int | None,
) -> WorkerPlan:
    kind = settings.accelerator_type
    if kind is not None:
        nodes = _nodes_with(kind, nodes)
    cpus = max(1, int(sum(node.get("CPU", 0) for node in nodes)))
    gpus = [node.get("GPU", 0) for node in nodes]
    num_gpus = _gpus_per_worker(settings, device, sum(gpus))
    if kind is not None and not num_gpus:
        raise ClusterUnfit(
            f"execution.accelerator_type: {kind}, and workers of this job get no GPU. Leave it out, or change "
            "model.device or execution.gpus_per_actor."
        )
    room = sum(math.floor(of_node / num_gpus + ROUNDING) for of_node in gpus) if num_gpus else None
    min_workers, max_workers = _range_of(settings, room, cpus)
    if (
        room is not None
        and min_workers > room
        and not (settings.can_wait and (room or not sum(gpus)))
    ):
        raise (ClusterError if room else ClusterUnfit)(
            _too_few_gpus(settings, gpus, num_gpus, room, min_workers)
        )
    sharing = min_workers if settings.number == "auto" else max_workers
    if num_rows is not None:
        max_workers = max(1, min(max_workers, num_rows))
        sharing = min(sharing, num_rows)
    share = max(1, cpus // sharing)
    return WorkerPlan(
        min(min_workers, max_workers), max_workers, num_gpus, min(share, max_threads or share), kind
    )


def _nodes_with(kind: str, nodes: Sequence[Node]) -> list[Node]:
    """Return the nodes with this kind of GPU. Raises ClusterUnfit that names the kinds that the cluster has."""
    matching = [node for node in nodes if ACCELERATOR + kind in node]
    if matching:
        return matching
    kinds = sorted(
        {
            name.removeprefix(ACCELERATOR)
            for node in nodes
            for name in node
            if name.startswith(ACCELERATOR)
        }
    )
    there = f"it has {', '.join(kinds)}" if kinds else "no node names one"
    raise ClusterUnfit(
        f"execution.accelerator_type: no node of the cluster has {kind!r}; {there}. Set it to one of them, or to null."
    )


def _gpus_per_worker(settings: _Settings, device: str, gpus: float) -> float:
    """Return the GPUs per worker. auto: one for each rank, or an equal share if there are to be more workers than GPUs.

    Args:
        gpus: GPUs of the whole cluster.
    """
    if device == "cuda" and not (gpus and settings.num_gpus):
        where = f"{settings.gpus_key} is 0" if gpus else "the cluster has no GPU"
        raise ClusterUnfit(
            f"model.device: cuda, and {where}. Run it on a machine with a GPU, or set model.device to auto."
        )
    if settings.num_gpus != "auto":
        return settings.num_gpus
    if not gpus or device == "cpu":
        return 0
    if settings.num_ranks != "auto" and settings.num_ranks > 1:
        return settings.num_ranks
    return 1 / math.ceil(max(1, settings.number / gpus)) if isinstance(settings.number, int) else 1


def _range_of(settings: _Settings, room: int | None, cpus: int) -> tuple[int, int]:
    """Return the minimum and maximum number of workers.

    Args:
        room: how many the GPUs carry, or None without GPUs.
    """
    if isinstance(settings.number, ActorRange):
        return settings.number.min, settings.number.max
    if settings.number != "auto":
        return settings.number, settings.number
    if room is None:
        return (min(max(1, cpus // 2), settings.max_on_cpu),) * 2
    return max(1, room), settings.growth * max(1, room)


def _too_few_gpus(
    settings: _Settings, gpus: Sequence[float], num_gpus: float, room: int, min_workers: int
) -> str:
    """Describe the GPUs wanted and available, and the settings or the machine that would work.

    Ranks share by heads and widths what more of them do, so a divisor of their number is named.
    """
    if not sum(gpus):
        return (
            f"{settings.gpus_key}: {num_gpus:g}, and the cluster has no GPU. Run it on a machine with a GPU, or set "
            "it to 0 to run on CPUs."
        )
    by_node = f"GPUs by node: {', '.join(f'{of_node:g}' for of_node in gpus)}"
    if room:
        is_range = isinstance(settings.number, ActorRange)
        key = f"{settings.number_key}.min" if is_range else settings.number_key
        each = f"{counted(num_gpus, 'GPU')} of one node each"
        return f"{key}: {min_workers} with {each}, and there is room for {room} ({by_node}). Set it to {room}."
    largest = math.floor(max(gpus)) or max(gpus)
    ranks = settings.num_ranks
    keys = [settings.gpus_key]
    if ranks != "auto" and ranks > 1:
        largest = max(
            size for size in range(1, ranks + 1) if ranks % size == 0 and size <= max(largest, 1)
        )
        of_ranks = f"{settings.gpus_key.partition('.')[0]}.tensor_parallel"
        keys = [of_ranks] if settings.num_gpus == "auto" else [*keys, of_ranks]
    return (
        f"{' and '.join(keys)}: {num_gpus:g} GPUs of one node, and no node has as many ({by_node}). Set "
        f"{'both' if len(keys) > 1 else 'it'} to {largest:g}, or run it on nodes with {num_gpus:g} GPUs."
    )


def usual_slots(slots: int | Auto, on_gpu: bool) -> int:
    """Return the slots to expect of a worker whose GPU is not visible here: the setting, or the
    maximum that auto gives."""
    if slots != "auto":
        return slots
    return MAX_SLOTS if on_gpu else CPU_SLOTS
