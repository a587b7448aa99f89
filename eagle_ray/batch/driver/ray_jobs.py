"""Ray jobs: submit a job to a Ray cluster over HTTP and follow it to its end.

The cluster gets a working directory with the resolved configuration and this package: its nodes
need our dependencies only. The job's exit code is the exit code of the process.

    code = submit(config, "http://127.0.0.1:8265", follow=True)
    # submitted as raysubmit_6vHbeXjhHnwpBVpe
    # reading the input
    # ...
"""

from __future__ import annotations

import asyncio
import os
import shlex
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import yaml

import eagle_ray
from eagle_ray.assembly.worker_plan import RAY_JOB_VARIABLE
from eagle_ray.batch.driver.ray_environment import LOOPBACK_HOSTS, QUIET_VARIABLES
from eagle_ray.batch.driver.signals import accept_interrupt
from eagle_ray.batch.reader.files import RUN_PREFIX, is_run
from eagle_ray.config import JobConfig
from eagle_ray.core.errors import ConfigError
from eagle_ray.runs.job_errors import RESUME, ClusterError

CONFIG_FILE = "job.yaml"
JOB_POLL_S = 1.0
MAX_TRIES = 5  # to reach a cluster that answered before
FALLBACK_EXIT_CODE = 5  # the exit code of a job whose process left none
INTERRUPTED_EXIT_CODE = 130
DASHBOARD_REMEDY = "give the dashboard's address, such as http://127.0.0.1:8265"
TOKEN_REMEDY = "set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN_PATH to a file with the cluster's token"
EXCLUDED_FILES = ["**/__pycache__/**"]


def submit(config: JobConfig, address: str | None, flags: list[str], follow: bool) -> int:
    """Submit the job and return its exit code, or 0 at once if it is not followed.

    Raises ClusterError if no cluster responds, ConfigError if the address is invalid or the cluster
    refuses the token.

    Args:
        address: http://host:port of the cluster's dashboard; None reads RAY_API_SERVER_ADDRESS or
            RAY_ADDRESS.
        flags: flags of ``eagle-ray run``, besides the configuration.
    """
    os.environ.update(
        {name: value for name, value in QUIET_VARIABLES.items() if name not in os.environ}
    )
    client = _client(address)
    with _working_directory(config) as directory:
        package = str(Path(eagle_ray.__file__).parent)
        environment = {
            "working_dir": directory,
            "py_modules": [package],
            "excludes": EXCLUDED_FILES,
        }
        entrypoint = shlex.join(
            [_python_executable(client), "-m", "eagle_ray.cli", "run", "-c", CONFIG_FILE, *flags]
        )
        with _wrap_client_errors(address):
            job = client.submit_job(
                entrypoint=entrypoint, runtime_env=environment, metadata={"name": config.name}
            )
    print(f"submitted as {job}", flush=True)
    if not follow:
        return 0
    try:
        asyncio.run(_print_log(client, job))
        return _exit_code(client, job)
    except KeyboardInterrupt:
        accept_interrupt()
        print(f"no longer followed; the job goes on: ray job stop {job}", flush=True)
        return INTERRUPTED_EXIT_CODE


def with_absolute_paths(config: JobConfig) -> JobConfig:
    """Return the configuration for running on another machine: absolute paths, and the cluster that
    it is submitted to."""
    paths = config.input.path
    absolute = [_absolute(path) for path in ([paths] if isinstance(paths, str) else paths)]
    return config.model_copy(
        update={
            "input": config.input.model_copy(
                update={"path": absolute[0] if isinstance(paths, str) else absolute}
            ),
            "output": config.output.model_copy(update={"path": _absolute(config.output.path)}),
            "execution": config.execution.model_copy(update={"ray_address": "auto"}),
        }
    )


def check_output_outlives_job(config: JobConfig, environ: Mapping[str, str] = os.environ) -> None:
    """Raise ConfigError if a Ray job would write into its working directory, a copy that is deleted with the job."""
    path = config.output.path
    if (
        RAY_JOB_VARIABLE in environ
        and path == _relative(path)
        and "runtime_resources" in os.getcwd()
    ):
        raise ConfigError(
            f"output.path: {path!r} is relative, and this job runs in a copy of its working directory, which Ray "
            "deletes: give an absolute path that every node sees, or s3://"
        )


def _absolute(path: str) -> str:
    if path.startswith("embedded:") or "://" in path:
        return path
    prefix = RUN_PREFIX if is_run(path) else ""
    return prefix + str(Path(path.removeprefix(prefix)).expanduser().absolute())


def _relative(path: str) -> str | None:
    return None if "://" in path or Path(path).expanduser().is_absolute() else path


@contextmanager
def _working_directory(config: JobConfig) -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="eagle-ray-") as directory:
        settings = with_absolute_paths(config).model_dump(mode="json")
        (Path(directory) / CONFIG_FILE).write_text(
            yaml.safe_dump(settings, allow_unicode=True), "utf-8"
        )
        yield directory


def _client(address: str | None) -> Any:
    # These imports take seconds, so they are made only if there is a job to submit.
    from ray.job_submission import (
        JobSubmissionClient,
    )

    with _wrap_client_errors(address):
        return JobSubmissionClient(address)


def _python_executable(client: Any) -> str:
    """Return this interpreter for a cluster on this machine, since it may not be on its PATH; else
    the cluster's own.
    """
    return sys.executable if urlsplit(client.get_address()).hostname in LOOPBACK_HOSTS else "python"


@contextmanager
def _wrap_client_errors(address: str | None) -> Iterator[None]:
    """Turn errors of Ray's client into errors with the address; a ConfigError if a retry would not help."""
    from ray.exceptions import AuthenticationError

    try:
        yield
    except (AuthenticationError, RuntimeError, ValueError, OSError) as error:
        kind = ConfigError if isinstance(error, (AuthenticationError, ValueError)) else ClusterError
        where = (
            address
            or os.environ.get("RAY_API_SERVER_ADDRESS")
            or os.environ.get("RAY_ADDRESS")
            or "no address"
        )
        first = str(error).strip().partition("\n")[0]
        remedy = TOKEN_REMEDY if isinstance(error, AuthenticationError) else DASHBOARD_REMEDY
        raise kind(
            f"--address {where}: no Ray cluster takes the job there ({first}): {remedy}"
        ) from None


async def _print_log(client: Any, job: str) -> None:
    """Print the job's log lines until it ends or the connection fails."""
    from aiohttp import ClientError

    try:
        async for lines in client.tail_job_logs(job):
            print(lines, end="", flush=True)
    except (ClientError, RuntimeError, OSError) as error:
        print(
            f"{job}: its log cannot be followed any more ({error}); waiting for its end", flush=True
        )


def _exit_code(client: Any, job: str) -> int:
    """Return the exit code of the job's process once it has ended."""
    while not (info := _job_info(client, job)).status.is_terminal():
        time.sleep(JOB_POLL_S)
    if info.status == "STOPPED":
        print(f"{job} was stopped. {RESUME}", flush=True)
        return INTERRUPTED_EXIT_CODE
    if info.status == "SUCCEEDED":
        return 0
    if not info.driver_exit_code:
        print(f"{job} failed: {(info.message or '').strip()}", flush=True)
    return info.driver_exit_code or FALLBACK_EXIT_CODE


def _job_info(client: Any, job: str) -> Any:
    for _ in range(MAX_TRIES - 1):
        try:
            return client.get_job_info(job)
        except (ConnectionError, RuntimeError):  # a head that is busy: it answers later
            time.sleep(JOB_POLL_S)
    with _wrap_client_errors(None):
        return client.get_job_info(job)
