"""Replicas' gRPC servers: on the node's address, and a replica that is reachable elsewhere does not come up."""

from __future__ import annotations

import asyncio
import os
import socket
from contextlib import contextmanager

import grpc.aio
import pytest
import ray
from ray import serve

from eagle_ray.serve.access import (
    GRPC_METHODS,
    AtNodeAddress,
    Listener,
    at_node_address,
    bind_grpc_servers,
    exposed,
    listeners,
)

[Server] = grpc.aio.Server.__subclasses__()  # of what grpc.aio.server() returns


@pytest.fixture(autouse=True)
def grpc_as_it_is(monkeypatch):
    """Undo at the end what a test changes in grpcio."""
    for name in GRPC_METHODS:
        monkeypatch.setattr(Server, name, getattr(Server, name))


@pytest.mark.parametrize(
    ("address", "node", "bound"),
    [
        ("[::]:0", "127.0.0.1", "127.0.0.1:0"),
        ("0.0.0.0:9000", "10.0.0.5", "10.0.0.5:9000"),
        ("*:9000", "10.0.0.5", "10.0.0.5:9000"),
        ("[::]:0", "fd00::5", "[fd00::5]:0"),
        ("203.0.113.1:80", "10.0.0.5", "10.0.0.5:80"),
        ("ipv4:0.0.0.0:80", "10.0.0.5", "10.0.0.5:80"),
        ("127.0.0.1:80", "10.0.0.5", "127.0.0.1:80"),
        ("[::1]:80", "10.0.0.5", "[::1]:80"),
        ("localhost:80", "10.0.0.5", "localhost:80"),
        ("unix:/tmp/socket", "10.0.0.5", "unix:/tmp/socket"),
    ],
)
def test_every_other_host_becomes_the_nodes_address(address, node, bound):
    assert at_node_address(address, node) == bound


def grpc_port(address: str) -> tuple[int, set[Listener]]:
    """The port that a server opened, and where the process listened meanwhile."""

    async def open_port() -> tuple[int, set[Listener]]:
        server = grpc.aio.server()
        port = server.add_insecure_port(address)
        await server.start()
        found = {one for one in listeners({os.getpid()}) if one.port == port}
        await server.stop(None)
        return port, found

    return asyncio.run(open_port())


@pytest.mark.parametrize("address", ["[::]:0", "0.0.0.0:0"])
def test_grpc_server_for_all_interfaces_listens_on_node_address(address):
    bind_grpc_servers("127.0.0.1")
    port, found = grpc_port(address)
    assert found == {Listener(os.getpid(), "tcp", "127.0.0.1", port)}


@contextmanager
def listening_on(host: str):
    with socket.create_server((host, 0)) as server:
        yield server.getsockname()[1]


def test_a_process_knows_which_of_its_ports_are_exposed():
    with listening_on("127.0.0.1") as mine, listening_on("0.0.0.0") as everyones:
        found = {one.port for one in exposed("127.0.0.1")}
        assert everyones in found and mine not in found


def test_a_health_check_names_what_was_opened_after_the_start(monkeypatch):
    monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: "127.0.0.1")
    with listening_on("0.0.0.0"):  # as a Ray worker's own port on a cluster
        AtNodeAddress().check_health()
        replica = AtNodeAddress()
        with (
            listening_on("0.0.0.0") as port,
            pytest.raises(
                RuntimeError, match=rf"listens on tcp 0\.0\.0\.0:{port}, beyond its node's address"
            ),
        ):
            replica.check_health()
        replica.check_health()


class UnboundReplica(AtNodeAddress):
    """A replica as it would be if Ray opened its port by other means."""

    def __init__(self) -> None:
        methods = {name: getattr(Server, name) for name in GRPC_METHODS}
        super().__init__()
        for name, method in methods.items():
            setattr(Server, name, method)


def test_grpcio_without_the_methods_costs_a_line_in_the_log(monkeypatch, messages):
    for name in GRPC_METHODS:
        monkeypatch.delattr(Server, name)
    bind_grpc_servers("127.0.0.1")
    assert len(messages) == 1 and "checks its ports" in messages[0]


@pytest.mark.ray
def test_a_replica_that_cannot_be_bound_does_not_come_up(ray_session):
    options = {"ray_actor_options": {"num_cpus": 0}, "max_constructor_retry_count": 1}
    serve.start(proxy_location="Disabled")
    try:
        with pytest.raises(RuntimeError, match="Deploying application unbound failed"):
            serve.run(
                serve.deployment(UnboundReplica, **options).bind(),
                name="unbound",
                route_prefix=None,
            )
        application = serve.status().applications["unbound"]
        deployment = application.deployments[UnboundReplica.__name__]
        assert "beyond its node's address 127.0.0.1" in deployment.message
        assert deployment.replica_states.get("RUNNING", 0) == 0
    finally:
        serve.shutdown()
