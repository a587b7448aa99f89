"""Set environment variables that Ray reads when it is imported. This module does not import Ray.

So the cluster's module, which imports Ray, is imported afterwards:

    address = prepare_ray_environment("auto")
    from eagle_ray.batch.driver.cluster import connect
    connect(address)
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

from eagle_ray.core.child_process import module_directories
from eagle_ray.core.errors import ConfigError

log = logging.getLogger("eagle_ray")
LOCAL = "local"
TMPDIR = "RAY_TMPDIR"
TOKEN = "RAY_AUTH_TOKEN"
QUIET_VARIABLES = {
    "RAY_USAGE_STATS_ENABLED": "0",  # no network at run time
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # else a warning at each start
    "RAY_BACKEND_LOG_LEVEL": "fatal",  # else Ray's core logs an error about Ray Data's own actors at each start
}
# Without these Ray takes 127.0.0.1 for the machine's own address.
LOOPBACK_VARIABLES = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
LOOPBACK_HOSTS = ("127.0.0.1", "localhost", "::1")
ELSEWHERE = ("10.255.255.255", 9)  # any address beyond this machine; nothing is sent to it
# Seconds of a connection, not of a cluster: Ray itself waits for minutes and then ends the process.
ANSWERS_WITHIN_S = 5.0
SOCKET = "/ray/session_2026-01-01_00-00-00_000000_4194304/sockets/plasma_store"  # below the temporary directory
MAX_SOCKET_BYTES = 103 if sys.platform == "darwin" else 107
MAX_TMPDIR_BYTES = MAX_SOCKET_BYTES - len(SOCKET)
SHORT_DIRECTORIES = ("/tmp", "/var/tmp")
MODULES = "PYTHONPATH"
MODE = "RAY_AUTH_MODE"  # Ray sets it when it starts a cluster
# The user's values of the variables that were set here.
variables_before: dict[str, str | None] = {}


def prepare_ray_environment(address: str) -> str:
    """Set the variables and return the address to connect to, from resolve_address.

    Variables of QUIET keep values that the user has set. Those of LOOPBACK replace them, to keep
    Ray on 127.0.0.1. Raises ConfigError if Ray cannot be started on this machine.
    """
    address = resolve_address(address)
    variables = {name: value for name, value in QUIET_VARIABLES.items() if name not in os.environ}
    if address == LOCAL:
        variables |= (
            LOOPBACK_VARIABLES | _directory_variable() | _token_variable() | _module_variable()
        )
    elif _is_on_loopback_alone(address):
        variables |= LOOPBACK_VARIABLES
    for name in (*variables, MODE):
        variables_before.setdefault(name, os.environ.get(name))
    os.environ.update(variables)
    return address


def user_environment() -> dict[str, str]:
    """Return the environment as the user set it, for commands of the user. Our Ray token would lock
    them out of their clusters."""
    environment = dict(os.environ) | {
        name: value for name, value in variables_before.items() if value is not None
    }
    return {
        name: value
        for name, value in environment.items()
        if variables_before.get(name, value) is not None
    }


def resolve_address(address: str) -> str:
    """Return the address that "auto" stands for; any other address is returned as it is."""
    return (os.environ.get("RAY_ADDRESS") or LOCAL) if address == "auto" else address


def temporary_directory(environ: Mapping[str, str] = os.environ) -> str:
    """Return the directory for the files of a Ray that is started on this machine.

    It is RAY_TMPDIR, or TMPDIR, or a short one if the names of Ray's sockets below TMPDIR would be
    too long. Raises ConfigError if it cannot be used.
    """
    name = TMPDIR if environ.get(TMPDIR) else "TMPDIR"
    wanted = environ.get(name) or SHORT_DIRECTORIES[0]
    if problem := _problem_of(wanted):
        others = (
            []
            if name == TMPDIR
            else [other for other in SHORT_DIRECTORIES if not _problem_of(other)]
        )
        if not others:
            raise ConfigError(
                f"{name}: {problem}. Set {TMPDIR} to another directory for Ray's files, such as /tmp."
            )
        return others[0]
    return wanted


def _problem_of(directory: str) -> str | None:
    """Return why Ray cannot keep its files in the directory, or None."""
    if (size := len(os.fsencode(directory))) > MAX_TMPDIR_BYTES:
        return f"{directory} has {size} bytes, and Ray's sockets leave room for {MAX_TMPDIR_BYTES}"
    return None if _can_be_written(Path(directory)) else f"{directory} cannot be written"


def _can_be_written(directory: Path) -> bool:
    """Return whether the directory, or the nearest parent that exists, can be written."""
    with suppress(OSError):  # such as a parent that may not be searched
        there = next(path for path in (directory, *directory.parents) if path.exists())
        return there.is_dir() and os.access(there, os.W_OK | os.X_OK)
    return False


def _directory_variable() -> dict[str, str]:
    """Return RAY_TMPDIR if Ray would take a directory that it cannot use."""
    directory = temporary_directory()
    wanted = os.environ.get(TMPDIR) or os.environ.get("TMPDIR") or directory
    if directory == wanted:
        return {}
    log.info("TMPDIR: %s. Ray keeps its files in %s/ray.", _problem_of(wanted), directory)
    return {TMPDIR: directory}


def _module_variable() -> dict[str, str]:
    """Return PYTHONPATH for Ray's workers if this process ignores its own (``python -I``), else nothing."""
    return {MODULES: os.pathsep.join(module_directories())} if sys.flags.ignore_environment else {}


def _token_variable() -> dict[str, str]:
    """Return a token for Ray's authentication if the user has none: Ray would leave one in the home directory.

    There, a `ray start` of this user takes it, and then refuses every driver that does not.
    """
    if any(name in os.environ for name in (TOKEN, f"{TOKEN}_PATH")):
        return {}
    with suppress(RuntimeError):  # no home directory at all
        if os.access(Path.home() / ".ray" / "auth_token", os.R_OK):
            return {}
    return {TOKEN: secrets.token_hex(32)}


def _is_on_loopback_alone(address: str) -> bool:
    """Return whether a cluster at a loopback address cannot be reached at this machine's own, which Ray would take."""
    with suppress(ValueError):
        url = urlsplit(address if "://" in address else f"//{address}")
        if url.hostname in LOOPBACK_HOSTS and url.port is not None:
            return answers(url.hostname, url.port) and not answers(own_host(), url.port)
    return False


def own_host() -> str:
    """Return the address of this machine in its network, or 127.0.0.1 without one."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(ELSEWHERE)
            return probe.getsockname()[0]
        except OSError:
            return LOOPBACK_HOSTS[0]


def answers(host: str, port: int) -> bool:
    """Return whether something listens at a host and port."""
    with suppress(OSError):
        socket.create_connection((host, port), timeout=ANSWERS_WITHIN_S).close()
        return True
    return False
