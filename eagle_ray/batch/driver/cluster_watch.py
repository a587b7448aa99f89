"""Notice within seconds that the Ray cluster is lost: Ray's own processes, a remote GCS or this node's raylet.

Ray itself reports each of them after a minute, and then ends the driver with exit code 1.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress

import ray

from eagle_ray.batch.driver.cluster import is_own_cluster
from eagle_ray.batch.driver.ray_environment import ANSWERS_WITHIN_S
from eagle_ray.batch.driver.ray_internals import node_part
from eagle_ray.runs.job_errors import RESUME, ClusterError

log = logging.getLogger("eagle_ray")
ASK_GCS_EVERY_S = 5.0
RESUME_ANYWHERE = f"{RESUME[:-1]}, on this cluster or another."
LOST_AFTER_S = 20.0  # well before the 60 s after which Ray ends the process
RECONNECT_AFTER_S = 0.01
# Ray's processes on the driver's machine that a job cannot do without.
ESSENTIAL = (
    "gcs_server",
    "raylet",
)


def check_alive() -> None:
    """Raise ClusterError if a process of our own local cluster is gone.

    Ray reports that only after a minute, and then ends this process at once.
    """
    without = "the end of a process of Ray's own is noticed after a minute"
    gone = {name for name, _ in node_part("dead_processes", without) or ()}
    for name in ESSENTIAL:
        if name in gone:
            logs = node_part("get_logs_dir_path", without)
            raise ClusterError(
                f"Ray's own process {name} has ended (was it killed, or out of memory?); its logs are in "
                f"{logs}. {RESUME}"
            )


def gcs_address() -> str | None:
    """Return the address of the connected cluster's GCS; None for a Ray Client, which cannot see it."""
    with suppress(Exception):  # a Ray Client has no such attribute, and says so in its own way
        return ray.get_runtime_context().gcs_address
    return None


class GcsWatch:
    """Detects the loss of a remote cluster: its GCS no longer responds.

    Ray reports nothing for a minute, and then ends this process with exit code 1.
    """

    def __init__(self, address: str | None):
        self._address = address
        self._answered_at = self._checked_at = time.monotonic()

    def check(self) -> None:
        """Raise ClusterError after LOST_AFTER_S without a response. Asks every ASK_GCS_EVERY_S."""
        if self._address is None or time.monotonic() - self._checked_at < ASK_GCS_EVERY_S:
            return
        self._checked_at = time.monotonic()
        host, _, port = self._address.rpartition(":")
        try:
            socket.create_connection(
                (host.strip("[]"), int(port)), timeout=ANSWERS_WITHIN_S
            ).close()
            self._answered_at = time.monotonic()
        except OSError as error:
            if time.monotonic() - self._answered_at > LOST_AFTER_S:
                raise ClusterError(
                    f"the Ray cluster at {self._address} is lost: its GCS has not answered for {LOST_AFTER_S:.0f} s "
                    f"({error}). {RESUME_ANYWHERE}"
                ) from None


def raylet_socket() -> str | None:
    """Return the path of the socket of the raylet of a cluster that this driver joined.

    None for a Ray Client, which has none, and for our own local cluster, whose processes
    check_alive sees.
    """
    without = "the end of this node's raylet is noticed after a minute"
    return None if is_own_cluster() else node_part("raylet_socket_name", without)


class RayletWatch:
    """Reports at once that the raylet of the driver's node has ended. It holds a connection and waits for its end.

    Ray's core ends a driver without a raylet with exit code 1, at its next use of the object store.

    Args:
        path: path of the raylet's Unix socket; None watches nothing.
        on_loss: called with a ClusterError, from a thread of the watch.
    """

    def __init__(self, path: str | None, on_loss: Callable[[ClusterError], None]):
        self._on_loss = on_loss
        self._closing = threading.Event()
        self._connection = socket.socket(socket.AF_UNIX)
        if path is not None:
            threading.Thread(
                target=self._watch, args=(path,), name="eagle-ray-raylet", daemon=True
            ).start()

    def close(self) -> None:
        self._closing.set()
        with suppress(OSError):  # not connected, or closed already
            self._connection.shutdown(socket.SHUT_RDWR)

    def _watch(self, path: str) -> None:
        """Wait until nothing listens at the path. A raylet that only dropped the connection is connected again."""
        try:
            while not self._closing.wait(RECONNECT_AFTER_S):
                with self._connection as connection, suppress(ConnectionResetError):
                    connection.connect(path)
                    while connection.recv(1024):
                        pass
                self._connection = socket.socket(socket.AF_UNIX)
        except (ConnectionRefusedError, FileNotFoundError):
            self._on_loss(
                ClusterError(
                    f"the raylet of this driver's Ray node has ended ({path}; was the node lost, or out of memory?). "
                    f"{RESUME_ANYWHERE}"
                )
            )
        except OSError as error:  # such as a socket of another user
            log.debug("the raylet at %s is not watched: %s", path, error)
