"""Keep the servers of a Serve replica on its node's address, and list the sockets that accept connections.

Ray 2.60 opens a gRPC server on [::]:0 in each replica, next to the actor calls that carry the requests, and unpickles
what it receives, so a client that reaches the port can run code there. A deployment class that derives from
``AtNodeAddress`` moves the server to the node's address (127.0.0.1 if Ray runs on one machine), where Serve looks for
it. If a later Ray opens the port in another way, the first health check finds it and Serve ends the replica.

    class Replica(AtNodeAddress): ...

    listeners({os.getpid()})      # {Listener(pid=4711, protocol='tcp', address='127.0.0.1', port=8000)}
"""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import psutil
import ray


@dataclass(frozen=True, slots=True)
class Listener:
    pid: int
    protocol: str  # tcp or udp
    address: str  # an IPv4 address where IPv6 maps one
    port: int

    @property
    def is_loopback(self) -> bool:
        return ipaddress.ip_address(self.address).is_loopback

    def __str__(self) -> str:
        host = f"[{self.address}]" if ":" in self.address else self.address
        return f"{self.protocol} {host}:{self.port}"


def listeners(pids: Collection[int]) -> set[Listener]:
    """Return the listeners of processes of this network namespace. Processes that have ended have none."""
    found = set()
    for pid in pids:
        with suppress(psutil.Error):
            sockets = psutil.Process(pid).net_connections("inet")
            found |= {_listener(pid, each) for each in sockets if each.laddr and _accepts(each)}
    return found


def _accepts(found: Any) -> bool:
    """Return whether a socket takes TCP connections, or is a UDP socket without a peer."""
    return found.status == psutil.CONN_LISTEN if found.type == socket.SOCK_STREAM else not found.raddr


def _listener(pid: int, found: Any) -> Listener:
    address = ipaddress.ip_address(found.laddr.ip)
    mapped = address.ipv4_mapped if address.version == 6 else None
    return Listener(pid, "tcp" if found.type == socket.SOCK_STREAM else "udp", str(mapped or address), found.laddr.port)


GRPC_METHODS = ("add_insecure_port", "add_secure_port")


class AtNodeAddress:
    """Base of a deployment class whose process opens servers on its node's address and on loopback only.

    Serve constructs it before it opens the replica's gRPC server, and checks its health before it sends requests.
    """

    def __init__(self) -> None:
        self._node_address = ray.util.get_node_ip_address()
        bind_grpc_servers(self._node_address)
        self._of_ray_core = exposed(self._node_address)  # on a cluster the worker's own port, see infra/README.md
        self._is_checked = False

    def check_health(self) -> None:
        """Raise RuntimeError if Serve opened a port beyond the node's address."""
        if self._is_checked:
            return
        opened = exposed(self._node_address) - self._of_ray_core
        if opened:
            ports = ", ".join(sorted(str(listener) for listener in opened))
            raise RuntimeError(
                f"Ray Serve {ray.__version__}: the replica listens on {ports}, beyond its node's address "
                f"{self._node_address}. Install the Ray of infra/constraints.txt, and unset Serve's variables for "
                "direct ingress and HAProxy."
            )
        self._is_checked = True


def bind_grpc_servers(node_address: str) -> None:
    """Make each grpc.aio server that this process opens from now on listen on the node's address or on loopback.

    Raises ImportError or KeyError if this grpcio has no such servers; the replica then does not start.
    """
    from grpc.aio._server import Server  # the class behind grpc.aio.server() and Serve's own servers

    for name in GRPC_METHODS:
        setattr(Server, name, _at_node(vars(Server)[name], node_address))


def _at_node(add_port: Callable[..., int], node_address: str) -> Callable[..., int]:
    def add_port_at_node(server: Any, address: str, *credentials: Any) -> int:
        return add_port(server, at_node_address(address, node_address), *credentials)

    return add_port_at_node


def at_node_address(address: str, node_address: str) -> str:
    """Return a gRPC address with its host replaced by the node's, unless it is reachable from this machine alone."""
    if address.startswith("unix"):
        return address
    host, _, port = address.rpartition(":")
    if host == "localhost" or _is_loopback(host.strip("[]")):
        return address
    return f"[{node_address}]:{port}" if ":" in node_address else f"{node_address}:{port}"


def exposed(node_address: str) -> frozenset[Listener]:
    """Return the TCP listeners of this process that are neither on loopback nor on the node's address."""
    return frozenset(
        listener
        for listener in listeners({os.getpid()})
        if listener.protocol == "tcp" and not listener.is_loopback and listener.address != node_address
    )


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name
        return False
