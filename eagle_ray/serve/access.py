"""Restrict access to the endpoint: API keys, allowed host names, and addresses that replicas listen on.

API keys are read from a file and from the environment, stored as salted digests, and compared in
constant time. The command that starts the endpoint reads them. Replicas get only the digests, so no
command line, log, deployment or process of Ray contains a key.

    >>> keys = ApiKeys.of(["one", "two"])
    >>> keys.find(b"two")
    1

Ray 2.60 opens a gRPC server on [::]:0 in each replica, besides the actor calls that carry the
requests. It unpickles what it receives, so a client that reaches the port can run code in the
replica. A deployment class that derives from ``AtNodeAddress`` moves the server to the node's
address (127.0.0.1 if Ray runs on one machine), where Serve looks for it. If a later version of Ray
opens the port differently, the first health check finds the open port and Serve ends the replica.

    class Replica(AtNodeAddress): ...

    listeners({os.getpid()})      # {Listener(pid=4711, protocol='tcp', address='127.0.0.1', port=8000)}
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import logging
import os
import re
import secrets
import socket
from collections.abc import Callable, Collection, Iterable, MutableMapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from eagle_ray.core.errors import ConfigError

log = logging.getLogger("eagle_ray")

ENV_NAME = "EAGLE_RAY_API_KEYS"
PRIVATE_DOMAINS = ("localhost", "local", "internal")  # top-level names that cannot be registered


class AllowedHosts:
    """Host names by which clients may call an endpoint without keys.

    A hostile web page can let its own name resolve to this machine's address (DNS rebinding). The
    browser then treats the endpoint as a part of the page, and sends the page's host name in each
    request.

    Args:
        address: address that the endpoint listens on. On a loopback address, only loopback names
            are allowed. Otherwise IP addresses and names that cannot be registered are allowed,
            too.
        names: further allowed names.

    >>> "127.0.0.1:8000" in AllowedHosts("127.0.0.1"), "evil.example:8000" in AllowedHosts("127.0.0.1")
    (True, False)
    """

    def __init__(self, address: str, names: Iterable[str] = ()):
        self._names = {address.lower(), *(_host_name(name) for name in names)}
        self._is_on_loopback = is_loopback(address)

    def __contains__(self, host: str) -> bool:
        """Return whether the value of a request's Host header is allowed.

        Args:
            host: value of the header, with or without a port.
        """
        name = _host_name(host)
        if name in self._names or is_loopback(name):
            return True
        if self._is_on_loopback:
            return False
        return _is_address(name) or (
            bool(name) and ("." not in name or name.rpartition(".")[2] in PRIVATE_DOMAINS)
        )


def is_loopback(host: str) -> bool:
    """Return whether a host name or address is reachable from this machine alone."""
    return ipaddress.ip_address(host).is_loopback if _is_address(host) else host == "localhost"


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _host_name(host: str) -> str:
    """Return a host without its port, brackets and final dot."""
    name = host.strip().lower()
    if name.startswith("["):
        return name[1:].partition("]")[0]
    return (name.partition(":")[0] if name.count(":") == 1 else name).removesuffix(".")


@dataclass(frozen=True, slots=True)
class ApiKeys:
    """Digests of the API keys. A client's number is the index of its key; without keys it is 0."""

    salt: bytes = b""
    digests: tuple[bytes, ...] = ()

    @classmethod
    def of(cls, keys: Iterable[str], salt: bytes | None = None) -> ApiKeys:
        """Return the digests of keys, in order and without duplicates.

        Args:
            keys: keys in plain text.
            salt: salt of an earlier start, so that owners keep their names; None for a new one.
        """
        salt = salt or secrets.token_bytes(16)
        return cls(salt, tuple(_digest(salt, key.encode()) for key in dict.fromkeys(keys)))

    def __len__(self) -> int:
        return len(self.digests)

    def owner(self, client: int) -> str:
        """Return the name of a client's directory of files and batches. Without keys, all clients share one."""
        return (
            f"key-{hashlib.blake2b(self.digests[client], digest_size=16).hexdigest()}"
            if self.digests
            else "all"
        )

    def client_of(self, owner: str) -> int | None:
        """Return the number of the client with this owner name; None if its key is no longer accepted."""
        owners = [self.owner(client) for client in range(max(1, len(self)))]
        return owners.index(owner) if owner in owners else None

    def find(self, *spellings: bytes) -> int | None:
        """Return the number of the client whose key is one of the spellings; None if no key matches.

        All keys are compared, also after a match, so that the time reveals nothing.
        """
        index = None
        for spelling in spellings:
            given = _digest(self.salt, spelling)
            for i, digest in enumerate(self.digests):
                if hmac.compare_digest(given, digest):
                    index = i
        return index


def read_keys(
    path: str | None, env: MutableMapping[str, str] = os.environ, salt: bytes | None = None
) -> ApiKeys:
    """Read the keys of a file and of EAGLE_RAY_API_KEYS, and delete the variable.

    Child processes inherit the environment, so the variable must not stay there. Raises ConfigError
    if a source is given and cannot be read, or has no key: the endpoint must not start without keys
    by mistake.

    Args:
        path: file with one key per line; None for no file.
        env: environment variables.
        salt: salt of an earlier start; None for a new one.
    """
    keys = [] if path is None else _from_file(Path(path).expanduser())
    if ENV_NAME in env:
        keys += _from_env(env.pop(ENV_NAME))
    return ApiKeys.of(keys, salt)


def _from_file(path: Path) -> list[str]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise ConfigError(
            f"serving.api_keys_file: cannot read {path} ({reason}). Name a file with one key a line."
        ) from None
    keys = {
        i: line.strip()
        for i, line in enumerate(lines, 1)
        if line.strip() and not line.strip().startswith("#")
    }
    for i, key in keys.items():
        _check(key, f"serving.api_keys_file: line {i} of {path}")
    if not keys:
        raise ConfigError(
            f"serving.api_keys_file: {path} holds no key. Write one key a line, or remove the setting."
        )
    return list(keys.values())


def _from_env(value: str) -> list[str]:
    keys = [key for key in re.split(r"[,\s]+", value) if key]
    for i, key in enumerate(keys, 1):
        _check(key, f"{ENV_NAME}: key {i}")
    if not keys:
        raise ConfigError(
            f"{ENV_NAME}: it is set but holds no key. Set it to keys separated by commas, or unset it."
        )
    return keys


def _check(key: str, where: str) -> None:
    """Raise ConfigError if no client could send the key in a header. The message does not contain the key."""
    if not key.isprintable() or " " in key:
        raise ConfigError(f"{where} has a space or a control character in it. A key is one word.")


def _digest(salt: bytes, key: bytes) -> bytes:
    return hashlib.blake2b(key, key=salt, digest_size=32).digest()


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
    """Return the sockets that processes listen on. Processes that have ended have none.

    Args:
        pids: processes in this network namespace.
    """
    result = set()
    for pid in pids:
        with suppress(psutil.Error):
            sockets = psutil.Process(pid).net_connections("inet")
            result |= {_listener(pid, each) for each in sockets if each.laddr and _accepts(each)}
    return result


def _accepts(connection: Any) -> bool:
    """Return whether a socket accepts TCP connections, or is a UDP socket without a peer."""
    return (
        connection.status == psutil.CONN_LISTEN
        if connection.type == socket.SOCK_STREAM
        else not connection.raddr
    )


def _listener(pid: int, connection: Any) -> Listener:
    address = ipaddress.ip_address(connection.laddr.ip)
    mapped = address.ipv4_mapped if address.version == 6 else None
    return Listener(
        pid,
        "tcp" if connection.type == socket.SOCK_STREAM else "udp",
        str(mapped or address),
        connection.laddr.port,
    )


GRPC_METHODS = ("add_insecure_port", "add_secure_port")


class AtNodeAddress:
    """Base class of deployments whose process listens only on its node's address and on loopback.

    Serve constructs the object before it opens the replica's gRPC server, and checks its health
    before it sends requests.
    """

    def __init__(self) -> None:
        import ray  # here: the command reads keys before Ray's environment is prepared

        self._node_address = ray.util.get_node_ip_address()
        bind_grpc_servers(self._node_address)
        # On a cluster it is the worker's own port, see infra/README.md.
        self._of_ray_core = exposed(self._node_address)
        self._is_checked = False

    def check_health(self) -> None:
        """Raise RuntimeError if a port is open on another address than the node's."""
        if self._is_checked:
            return
        opened = exposed(self._node_address) - self._of_ray_core
        if opened:
            from ray import __version__

            ports = ", ".join(sorted(str(listener) for listener in opened))
            raise RuntimeError(
                f"Ray Serve {__version__}: the replica listens on {ports}, beyond its node's address "
                f"{self._node_address}. Install the Ray of infra/constraints.txt, and unset Serve's variables for "
                "direct ingress and HAProxy."
            )
        self._is_checked = True


def bind_grpc_servers(node_address: str) -> None:
    """Let the grpc.aio servers that this process opens later listen on the node's address or on loopback.

    If this version of grpcio has no such servers, they listen where Serve opens them, and
    `check_health` raises if that is too public.
    """
    # This is the base class of what grpc.aio.server() returns, and so of Serve's own servers.
    from grpc.aio import (
        Server,
    )

    methods = [
        (kind, name)
        for kind in Server.__subclasses__()
        for name in GRPC_METHODS
        if name in vars(kind)
    ]
    if not methods:
        log.warning(
            "this grpcio has no servers that can be bound to the node's address: the replica checks its ports"
        )
    for kind, name in methods:
        setattr(kind, name, _at_node(vars(kind)[name], node_address))


def _at_node(add_port: Callable[..., int], node_address: str) -> Callable[..., int]:
    def add_port_at_node(server: Any, address: str, *credentials: Any) -> int:
        return add_port(server, at_node_address(address, node_address), *credentials)

    return add_port_at_node


def at_node_address(address: str, node_address: str) -> str:
    """Return a gRPC address with the node's host. An address on loopback is returned unchanged."""
    if address.startswith("unix"):
        return address
    host, _, port = address.rpartition(":")
    if is_loopback(host.strip("[]")):
        return address
    return f"[{node_address}]:{port}" if ":" in node_address else f"{node_address}:{port}"


def exposed(node_address: str) -> frozenset[Listener]:
    """Return this process's TCP listeners that are neither on loopback nor on the node's address."""
    return frozenset(
        listener
        for listener in listeners({os.getpid()})
        if listener.protocol == "tcp"
        and not listener.is_loopback
        and listener.address != node_address
    )
