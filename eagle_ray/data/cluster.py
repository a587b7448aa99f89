"""The Ray cluster: joining one or starting one here, and how many engines it carries.

Does not know rows, models or files.

    >>> connect(prepare("local"))
    >>> plan_workers(config.execution, config.model.device, ray.cluster_resources(), num_rows=1000)
    Workers(fewest=4, most=4, num_gpus=0, threads=2)
"""

from __future__ import annotations

import logging
import math
import os
import signal
import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from urllib.parse import urlsplit

import ray

from eagle_ray.config import ExecutionConfig
from eagle_ray.config.job import ActorRange
from eagle_ray.data.ray_environment import LOCAL
from eagle_ray.data.stops import ClusterError

MOST_CPU_WORKERS = 8  # each loads a copy of the models
RAY_JOB = "RAY_JOB_CONFIG_JSON_ENV_VAR"  # set for the driver of a Ray job
ANSWERS_WITHIN_S = 5.0  # a connection, not a cluster: Ray itself waits for minutes and then ends the process
LOCAL_OPTIONS = {
    "include_dashboard": False,
    "object_store_memory": 256 << 20,  # rows of text and counts: what is in flight is small
    "_node_ip_address": "127.0.0.1",  # reachable from nowhere else
}


@dataclass(frozen=True, slots=True)
class Workers:
    """How many engine actors, between fewest and most; GPUs and CPU threads of each."""

    fewest: int
    most: int
    num_gpus: float
    threads: int


def connect(address: str) -> None:
    """Join the cluster at address; LOCAL starts one on this machine alone.

    A session that is open already is used as it is. Raises ClusterError where no cluster answers.
    """
    if ray.is_initialized():
        return
    _check_answers(address)
    options = LOCAL_OPTIONS if address == LOCAL else {}
    logging.getLogger("ray").setLevel(logging.ERROR)
    try:
        with _core_unheard(), _sigterm_kept():
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, **options)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise ClusterError(
            f"no Ray cluster at {address!r} (execution.ray_address): {error}; "
            "a cluster with token authentication wants RAY_AUTH_MODE=token here too"
        ) from error


def _check_answers(address: str) -> None:
    """Raises ClusterError where nothing listens at an address that names a port; Ray looks for the others itself."""
    try:
        url = urlsplit(address if "://" in address else f"//{address}")
        host, port = url.hostname, url.port
    except ValueError as error:
        raise ClusterError(f"execution.ray_address: {address!r} is not an address: {error}") from None
    if host is None or port is None:
        return
    try:
        socket.create_connection((host, port), timeout=ANSWERS_WITHIN_S).close()
    except OSError as error:
        raise ClusterError(
            f"execution.ray_address: nothing answers at {address!r} ({error}): start the cluster there, or set it to "
            "local"
        ) from error


@contextmanager
def _sigterm_kept() -> Iterator[None]:
    """Ray takes SIGTERM for itself, to end the process there and then; the job has words to say before it ends."""
    handler = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, handler)


@contextmanager
def _core_unheard() -> Iterator[None]:
    """Ray's core announces its log level on file descriptor 2; what goes wrong is raised all the same."""
    stderr, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)
        os.close(nowhere)


def plan_workers(
    execution: ExecutionConfig,
    device: str,
    resources: Mapping[str, float],
    num_rows: int,
    most_threads: int | None = None,
) -> Workers:
    """The cores are shared out among the workers.

    resources: the cluster's, as Ray counts them. num_rows: more actors than rows would be idle. most_threads: of one
    worker, where the user set it. Raises ClusterError where the job wants GPUs that are not there.
    """
    cpus, gpus = max(1, int(resources.get("CPU", 1))), resources.get("GPU", 0)
    num_gpus = _gpus_per_worker(execution, device, gpus)
    if isinstance(execution.actors, ActorRange):
        fewest, most = execution.actors.min, execution.actors.max
    elif execution.actors != "auto":
        fewest = most = execution.actors
    else:
        fewest = most = max(1, math.floor(gpus / num_gpus) if num_gpus else min(cpus // 2, MOST_CPU_WORKERS))
    if num_gpus * fewest > gpus:
        raise ClusterError(
            f"the cluster has {gpus:g} GPUs, not enough for {fewest} actors with {num_gpus:g} each "
            "(execution.actors, execution.gpus_per_actor)"
        )
    most = max(1, min(most, num_rows))
    share = max(1, cpus // most)
    return Workers(min(fewest, most), most, num_gpus, threads=min(share, most_threads or share))


def threads_wanted(environ: Mapping[str, str]) -> int | None:
    """OMP_NUM_THREADS where the user set it; a Ray job's driver finds Ray's own 1 there, whatever was wanted."""
    wanted = environ.get("OMP_NUM_THREADS", "")
    return int(wanted) if wanted.isdigit() and int(wanted) and RAY_JOB not in environ else None


def _gpus_per_worker(execution: ExecutionConfig, device: str, gpus: float) -> float:
    """auto: one, or an equal share of one where the job names more actors than there are GPUs."""
    if device == "cuda" and not gpus:
        raise ClusterError("model.device is cuda, but the cluster has no GPU: set it to cpu or auto")
    if execution.gpus_per_actor != "auto":
        return execution.gpus_per_actor
    if not gpus or device == "cpu":
        return 0
    return 1 / math.ceil(max(1, execution.actors / gpus)) if isinstance(execution.actors, int) else 1
