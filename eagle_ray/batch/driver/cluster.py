"""Connect to a Ray cluster or start one, plan a job's workers on it, and disconnect.

    connect("local")
    plan_workers(config, num_rows=1000).describe()      # "4 workers with up to 2 CPU threads each"

`cluster_watch.py` notices its loss.
"""

from __future__ import annotations

import logging
import math
import os
import re
import shutil
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any
from urllib.parse import urlsplit

import ray

from eagle_ray.assembly.worker_plan import WorkerPlan, threads_wanted
from eagle_ray.batch.driver.ray_environment import ANSWERS_WITHIN_S, LOCAL
from eagle_ray.batch.driver.ray_internals import log_missing, node_part, ray_part, replaced
from eagle_ray.batch.driver.signals import check_not_interrupted, time_limit
from eagle_ray.config import JobConfig
from eagle_ray.core.child_process import module_directories
from eagle_ray.core.errors import ConfigError, one_line
from eagle_ray.core.start_log import Stderr, log_while_waiting
from eagle_ray.runs.job_errors import ClusterError, ClusterUnfit

log = logging.getLogger("eagle_ray")
# Seconds. Ray takes 5 s, and a minute on a machine with 20 times as many processes as cores.
START_WITHIN_S = 180.0
JOIN_WITHIN_S = 90.0
# Ray says how many workers it has ended for lack of memory: 0 if others crashed. Then it lists what
# may be the cause of a crash, with "the process was killed by the OOM killer" in it.
MEMORY_KILLS = re.compile(
    r"\b[1-9]\d* Workers? \(tasks / actors\) killed due to memory pressure", re.IGNORECASE
)
NO_MEMORY = "Ray ends workers because a node's memory is nearly full: end other programs there. Waiting for memory"
TELL_MEMORY_EVERY_S = 60.0
MEMORY_KILL_IS_RECENT_S = 60.0  # Ray ends workers every 20 s while memory is short
# Ray's process_watcher looks for this line.
SIGTERM_LINE = "Raylet received SIGTERM: it may be ended at any time\n"
LATEST = "session_latest"  # Ray's link to the directory of its latest session
LOOPBACK_ADDRESS = "127.0.0.1"
DRIVER_PATH = "_py_driver_sys_path"  # key of a JobConfig
# Methods of Ray's Node.
UNUSED_PROCESSES = (
    "start_monitor",
    "start_log_monitor",
    "start_api_server",
)
LOCAL_OPTIONS: dict[str, Any] = {
    "include_dashboard": False,
    "object_store_memory": 256 << 20,  # rows of text and counts: what is in flight is small
    "_node_ip_address": LOOPBACK_ADDRESS,  # Ray's servers listen there alone
}


def connect(address: str) -> None:
    """Join the cluster at the address; LOCAL starts one on this machine.

    An open session is used as it is. Raises ClusterError if no cluster responds.
    """
    check_not_interrupted()
    if ray.is_initialized():
        return
    check_answers(address)
    options = LOCAL_OPTIONS if address == LOCAL else {}
    limit_s = START_WITHIN_S if address == LOCAL else JOIN_WITHIN_S
    waiting = "starting Ray" if address == LOCAL else f"joining the Ray cluster at {address}"
    logging.getLogger("ray").setLevel(logging.CRITICAL)
    take_ray_messages()
    try:
        with (
            silence_stderr(),
            _preserve_sigterm(),
            _without_unused_processes(),
            log_while_waiting(waiting),
            time_limit(limit_s),
        ):
            if "://" not in address:
                options = options | {"job_config": driver_config()}
            ray.init(
                address=address, log_to_driver=False, logging_level=logging.CRITICAL, **options
            )
    except Exception as error:  # Ray raises many kinds, bare ones among them
        raise (
            start_error(error, limit_s)
            if address == LOCAL
            else _join_error(error, address, limit_s)
        ) from error
    if address == LOCAL:
        check_loopback(ray.util.get_node_ip_address())
        end_agents_with_raylet()
    check_not_interrupted()


def end_agents_with_raylet() -> None:
    """Make the agents of our raylet end with it, by writing to its log that it was asked to end.

    Without that line they report to the GCS first. After a driver was killed the GCS is gone, too,
    and they would try for a minute.
    """
    logs = node_part(
        "get_logs_dir_path", without="Ray's agents outlive a killed driver for a minute"
    )
    if logs is None:
        return
    with suppress(OSError), open(os.path.join(logs, "raylet.out"), "a") as log_file:
        log_file.write(SIGTERM_LINE)


class ModulePath(list[str]):
    """The list of directories that Ray puts first in a worker's module path, limited to those that the driver uses.

    Ray adds the driver's script directory and its working directory. A driver itself imports
    modules from its working directory only if it was started with `-m` or `-c`; otherwise its
    workers do not either.
    """

    def extend(self, directories: Iterable[str]) -> None:
        there = module_directories()
        super().extend(directory for directory in directories if directory in there)


def driver_config() -> ray.job_config.JobConfig:
    """Return Ray's job configuration under which workers import modules from the driver's directories only."""
    config = ray.job_config.JobConfig()
    if hasattr(config, DRIVER_PATH):
        setattr(config, DRIVER_PATH, ModulePath())
    else:
        log_missing(
            f"job_config.JobConfig.{DRIVER_PATH}",
            "workers look for modules in the driver's directory, too",
        )
    return config


def start_error(error: Exception, limit_s: float) -> ClusterError:
    """Return why Ray did not start on this machine, as ClusterUnfit if a retry would not help."""
    logs = os.path.join(os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR", "/tmp"), "ray")
    where = f" Its logs are in {logs}." if os.path.isdir(logs) else ""
    if isinstance(error, TimeoutError) or "timed out" in str(error):
        return ClusterError(
            f"Ray did not start on this machine in time ({limit_s:.0f} s at most): the machine is overloaded or has no "
            f"memory left.{where} Run the same command again once it has."
        )
    if isinstance(error, (PermissionError, NotADirectoryError)):
        return ClusterUnfit(
            f"Ray cannot start on this machine: {one_line(error)}. Set RAY_TMPDIR to a directory that can be written."
        )
    return ClusterError(f"Ray did not start on this machine: {one_line(error)}.{where}")


def _join_error(error: Exception, address: str, limit_s: float) -> ClusterError:
    """Return why the cluster at the address could not be joined."""
    if isinstance(error, TimeoutError):
        return ClusterError(
            f"execution.ray_address: the Ray cluster at {address!r} could not be joined within {limit_s:.0f} s. Give "
            "the address that its head was started with (ray start --node-ip-address), and check its Ray's version."
        )
    return ClusterError(
        f"no Ray cluster at {address!r} (execution.ray_address): {one_line(error)}; "
        "a cluster with token authentication wants RAY_AUTH_MODE=token here too"
    )


def check_loopback(node_address: str) -> None:
    """Raise ClusterError, and stop the Ray just started, if it listens on an address that other machines can reach."""
    if node_address != LOOPBACK_ADDRESS:
        ray.shutdown()
        raise ClusterError(
            f"execution.ray_address: Ray listens on {node_address} instead of {LOOPBACK_ADDRESS}, because it was "
            "imported before its environment was prepared. Set RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER=0 and start again."
        )


def check_answers(address: str) -> None:
    """Raise ClusterError if nothing listens at an address that has a port, ConfigError if it is not an address.

    Addresses without a port are left to Ray.
    """
    try:
        url = urlsplit(address if "://" in address else f"//{address}")
        host = url.hostname
        port = url.port
    except ValueError as error:
        raise ConfigError(
            f"execution.ray_address: {address!r} is not an address: {error}"
        ) from None
    if host is None or port is None:
        return
    try:
        socket.create_connection((host, port), timeout=ANSWERS_WITHIN_S).close()
    except OSError as error:
        raise ClusterError(
            f"execution.ray_address: nothing answers at {address!r} ({error}): start the cluster there, or set it to "
            "local"
        ) from error


class RayMessages:
    """Collects the messages that Ray would print in this process: raylets' messages and actors' errors.

    Attributes:
        memory_kill_at: when Ray last ended workers for lack of memory, on the monotonic clock, or
            None.
    """

    def __init__(self) -> None:
        self.memory_kill_at: float | None = None
        self._warned_at = -math.inf

    def receive(self, data: Mapping[str, Any], ignore_prefix: bool = False) -> None:
        """Log a raylet's message for debugging, and a lack of memory for the user."""
        text = "\n".join(data["lines"])
        log.debug("Ray: %s", text)
        if MEMORY_KILLS.search(text):
            self.memory_kill_at = time.monotonic()
            if self.memory_kill_at - self._warned_at > TELL_MEMORY_EVERY_S:
                self._warned_at = self.memory_kill_at
                log.warning("%s", NO_MEMORY)

    def lacks_memory(self, now: float) -> bool:
        """Return whether Ray ended workers for lack of memory a short time ago."""
        return (
            self.memory_kill_at is not None and now - self.memory_kill_at < MEMORY_KILL_IS_RECENT_S
        )


ray_messages = RayMessages()


def take_ray_messages() -> None:
    """Redirect what Ray would print to a RayMessages: advice and tracebacks that would clutter the job's log."""
    without = "Ray's advice and tracebacks are printed, and a lack of memory is not named"
    worker = ray_part("_private.worker", without)
    if worker is None:
        return
    receivers = {
        "print_to_stdstream": ray_messages.receive,
        "_unhandled_error_handler": lambda e: log.debug("Ray: unhandled error: %s", e),
    }
    for name, receiver in receivers.items():
        if hasattr(worker, name):
            setattr(worker, name, receiver)
        else:
            log_missing(f"_private.worker.{name}", without)


@contextmanager
def _preserve_sigterm() -> Iterator[None]:
    """Keep SIGTERM for the job, which reports before it ends. Ray handles it twice and would end the process at once.

    Its Python handler is replaced by a function that does nothing; its core takes the signal from
    the system.
    """
    handler = signal.getsignal(signal.SIGTERM)
    without = "SIGTERM while Ray starts ends this process at once"
    try:
        with replaced("_private.utils", {"set_sigterm_handler": lambda handler: None}, without):
            yield
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, handler)  # reinstall Python's handler in the system


@contextmanager
def _without_unused_processes() -> Iterator[None]:
    """Let Ray start no autoscaler, no log monitor and no API server in a cluster of one node and one driver.

    No option of ray.init leaves them out. They take 1.4 s of CPU to start, and the autoscaler a
    second to end.
    """
    unused = dict.fromkeys(UNUSED_PROCESSES, _start_nothing)
    with replaced(
        "_private.node.Node", unused, without="Ray starts processes that a job does not use"
    ):
        yield


def _start_nothing(node: Any, **options: Any) -> None:
    pass


@contextmanager
def silence_stderr() -> Iterator[None]:
    """Suppress what Ray's core prints to file descriptor 2 while Ray starts, whatever its log level.

    Errors are raised anyway, and log lines of this package still appear.
    """
    stderr = os.dup(2)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    handlers = [
        h for h in log.handlers if isinstance(h, logging.StreamHandler) and h.stream is sys.stderr
    ]
    with Stderr.of(stderr) as stream:
        os.dup2(nowhere, 2)
        try:
            for handler in handlers:
                handler.setStream(stream)
            yield
        finally:
            os.dup2(stderr, 2)
            for handler in handlers:
                handler.setStream(sys.stderr)
            os.close(nowhere)


def nodes() -> list[Mapping[str, float]]:
    """Return the resources of each live node of the connected cluster."""
    return [node["Resources"] for node in ray.nodes() if node["Alive"]]


def plan_workers(config: JobConfig, num_rows: int | None = None) -> WorkerPlan:
    """Return the workers of a job on the connected cluster. Arguments and errors as of WorkerPlan.of_job."""
    return WorkerPlan.of_job(
        config.execution, config.model.device, nodes(), num_rows, threads_wanted(os.environ)
    )


def is_own_cluster() -> bool:
    """Return whether this process has started the cluster, which then has one node."""
    return bool(
        node_part(
            "is_head", without="a job on this machine is run as on a cluster, which starts later"
        )
    )


def end_ray(keeps_logs: bool) -> None:
    """End the cluster that this process has started, with its files, or leave the cluster that it has joined.

    Args:
        keeps_logs: whether to leave the session's files, which include its logs.
    """
    without = "the files of Ray's session are left"
    session = node_part("get_session_dir_path", without) if is_own_cluster() else None
    ray.shutdown()
    if session is None or keeps_logs:
        return
    latest = os.path.join(os.path.dirname(session), LATEST)
    with suppress(OSError):
        if os.readlink(latest) == session:
            os.unlink(latest)
    shutil.rmtree(session, ignore_errors=True)
