"""A Ray without its private parts: a feature less and a line in the log for each, and jobs run."""

import logging
import signal
from importlib import import_module

import pytest
import ray

from eagle_ray.batch.driver import cluster, cluster_watch, execute, ray_internals
from eagle_ray.batch.driver.ray_internals import log_missing, node_part, ray_part, replaced
from tests.support.jobs import exit_code, ids_of, token_rows


def import_public_parts(name: str):
    """Import a module, unless it is a private one of Ray."""
    if name.startswith("ray.") and any(part.startswith("_") for part in name.split(".")):
        raise ImportError(f"No module named {name!r}")
    return import_module(name)


@pytest.fixture(autouse=True)
def lines(messages):
    """What is logged, by a process that has not logged a missing part yet."""
    log_missing.cache_clear()
    logging.getLogger("eagle_ray").setLevel(logging.INFO)
    yield messages
    log_missing.cache_clear()


@pytest.fixture
def public_ray(monkeypatch):
    """Let our code find no private part of Ray. Ray itself still has them."""
    monkeypatch.setattr(ray_internals, "import_module", import_public_parts)
    monkeypatch.setattr(execute, "import_module", import_public_parts)


def test_a_job_runs_without_private_parts_of_ray(ray_session, public_ray, make_job, lines):
    config = make_job(token_rows(4))
    assert exit_code(config) == 0
    assert sorted(ids_of(config)) == ["q0", "q1", "q2", "q3"]
    assert any("has no _private.worker._global_node" in line for line in lines)


def test_a_start_keeps_the_sigterm_handler_by_public_means(public_ray, monkeypatch, lines):
    def init(**options):
        signal.signal(signal.SIGTERM, lambda number, frame: None)  # as Ray's own

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: cluster.LOOPBACK_ADDRESS)
    before = signal.getsignal(signal.SIGTERM)
    cluster.connect("local")
    assert signal.getsignal(signal.SIGTERM) is before
    assert len([line for line in lines if " has no _private." in line]) == 4


def test_the_end_of_a_job_leaves_what_it_cannot_find(public_ray, monkeypatch):
    ended = []
    monkeypatch.setattr(ray, "shutdown", lambda: ended.append(True))
    cluster.end_ray(keeps_logs=False)
    cluster_watch.check_alive()
    assert (
        ended == [True] and cluster_watch.raylet_socket() is None and not cluster.is_own_cluster()
    )


def test_a_part_that_is_missing_is_named_once(lines):
    for _ in range(2):
        assert ray_part("_private.worker.no_such_part", without="nothing works") is None
    assert lines == [f"Ray {ray.__version__} has no _private.worker.no_such_part: nothing works"]


def test_only_parts_that_are_there_are_replaced_and_put_back(lines):
    parts = {"get_num_cpus": len, "no_such_part": 1}
    before = ray_part("_private.utils.get_num_cpus", without="")
    with replaced("_private.utils", parts, without="a test"):
        assert ray_part("_private.utils.get_num_cpus", without="") is len
    assert ray_part("_private.utils.get_num_cpus", without="") is before
    assert lines == [f"Ray {ray.__version__} has no _private.utils.no_such_part: a test"]


def test_a_node_without_a_part_has_none(monkeypatch, lines):
    monkeypatch.setattr(ray_internals, "ray_part", lambda path, without: object())
    assert node_part("dead_processes", without="a test") is None
    assert len(lines) == 1
