"""A cluster that answers or is lost, and how rows are shared out among its workers."""

import errno
import queue
import socket
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import ray
from ray._private import process_watcher
from ray.exceptions import RayError

from eagle_ray.batch.driver import cluster, cluster_watch
from eagle_ray.batch.driver.cluster import (
    RayMessages,
    check_answers,
    connect,
    start_error,
    take_ray_messages,
)
from eagle_ray.batch.driver.cluster_watch import GcsWatch, RayletWatch, check_alive
from eagle_ray.batch.driver.execute import CALLS_PER_ACTOR, plan_batch_size, plan_calls
from eagle_ray.batch.driver.signals import interruptible
from eagle_ray.batch.driver.stream_errors import describe_error
from eagle_ray.batch.worker.crash_isolation import SMALLER, as_config_error
from eagle_ray.core.errors import ConfigError
from eagle_ray.runs.job_errors import ClusterError, outcome_of


@pytest.mark.parametrize("slots", [1, 2, 16, 64])
def test_what_is_in_flight_fills_the_slots_several_times_over(slots):
    assert plan_batch_size(slots, actors=2, num_rows=10_000) * CALLS_PER_ACTOR >= 4 * slots


@pytest.mark.parametrize(
    ("order", "actors", "num_rows", "calls"),
    [
        ("input", 1, 500, CALLS_PER_ACTOR),
        ("auto", 1, 500, 63),  # all rows
        ("auto", 1, 4_000, 9),  # 32 rows per slot in batches of 62
        ("auto", 4, 2_000, 32),  # half of the rows, over 4 actors
        ("auto", 4, 40, CALLS_PER_ACTOR),
    ],
)
def test_an_actor_holds_a_window_of_rows_to_order(order, actors, num_rows, calls):
    batch_size = plan_batch_size(16, actors, num_rows)
    assert plan_calls(order, 16, batch_size, actors, num_rows) == calls


def test_few_rows_are_spread_over_all_actors():
    assert plan_batch_size(slots=16, actors=4, num_rows=16) == 2
    assert plan_batch_size(slots=16, actors=4, num_rows=1) == 1


class OwnNode:
    """A Ray that this process has started, as its files know it."""

    def __init__(self, directory: Path):
        self.session = directory / "session_1"
        (self.session / "logs").mkdir(parents=True)
        (directory / "session_latest").symlink_to(self.session)

    def is_head(self) -> bool:
        return True

    def get_session_dir_path(self) -> str:
        return str(self.session)

    def get_logs_dir_path(self) -> str:
        return str(self.session / "logs")


@pytest.fixture
def own_node(tmp_path, monkeypatch) -> OwnNode:
    node = OwnNode(tmp_path)
    monkeypatch.setattr(ray._private.worker, "_global_node", node)
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    return node


def test_agents_of_an_ended_raylet_do_not_wait_for_the_gcs(own_node, monkeypatch):
    published = []
    monkeypatch.setattr(
        ray._private.utils, "publish_error_to_driver", lambda *args, **named: published.append(args)
    )
    (own_node.session / "logs" / "raylet.out").write_text("")
    process_watcher.report_raylet_error_logs(own_node.get_logs_dir_path(), None)
    assert len(published) == 1  # which takes a minute without a GCS
    cluster.end_agents_with_raylet()
    process_watcher.report_raylet_error_logs(own_node.get_logs_dir_path(), None)
    assert len(published) == 1


def test_files_of_our_own_ray_go_with_it_unless_something_failed(own_node, tmp_path):
    cluster.end_ray(keeps_logs=True)
    assert own_node.session.exists()
    cluster.end_ray(keeps_logs=False)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("form", ["{}", "ray://{}"])
def test_an_address_where_nothing_listens_is_refused_at_once(form):
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = form.format(f"127.0.0.1:{server.getsockname()[1]}")
        check_answers(address)
    with pytest.raises(ClusterError, match=r"execution\.ray_address: nothing answers"):
        check_answers(address)


@pytest.mark.parametrize(
    ("gone", "says"), [("gcs_server", "gcs_server has ended"), ("raylet", "raylet has ended")]
)
def test_a_cluster_of_our_own_that_falls_apart_is_said(monkeypatch, gone, says):
    dead = [("monitor", None), (gone, None)]
    node = SimpleNamespace(
        dead_processes=lambda: dead[:1], get_logs_dir_path=lambda: "/tmp/ray/logs"
    )
    for there in (None, node):
        monkeypatch.setattr(ray._private.worker, "_global_node", there)
        check_alive()
    node.dead_processes = lambda: dead
    with pytest.raises(ClusterError, match=f"{says}.*/tmp/ray/logs.*Run the same command again"):
        check_alive()


def test_cluster_is_lost_after_its_gcs_stops_answering(monkeypatch):
    monkeypatch.setattr(cluster_watch, "ASK_GCS_EVERY_S", 0.0)
    monkeypatch.setattr(cluster_watch, "LOST_AFTER_S", 1.0)
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        watch = GcsWatch(address)
        time.sleep(1.1)
        watch.check()
    watch.check()  # it may come back
    time.sleep(1.1)
    with pytest.raises(
        ClusterError, match=f"the Ray cluster at {address} is lost: .*Run the same command again"
    ):
        watch.check()
    GcsWatch(None).check()


def test_raylet_end_is_reported_but_a_dropped_connection_is_not(tmp_path):
    path, lost = str(tmp_path / "raylet"), queue.Queue()
    server = socket.socket(socket.AF_UNIX)
    server.bind(path)
    server.listen()
    RayletWatch(path, lost.put)
    server.accept()[0].close()  # as a raylet drops an idle client
    connection, _ = server.accept()
    assert lost.empty()
    server.close()
    connection.close()
    error = lost.get(timeout=10)
    assert isinstance(error, ClusterError) and outcome_of(error).code == 5
    assert f"raylet of this driver's Ray node has ended ({path}" in str(error)
    assert "Run the same command again to resume" in str(error)


def test_a_closed_watch_of_a_raylet_reports_nothing(tmp_path):
    lost = queue.Queue()
    RayletWatch(None, lost.put).close()
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "raylet"))
        server.listen()
        watch = RayletWatch(str(tmp_path / "raylet"), lost.put)
        connection, _ = server.accept()
        watch.close()
        assert connection.recv(1) == b""
    connection.close()
    with pytest.raises(queue.Empty):
        lost.get(timeout=0.1)


@pytest.mark.parametrize("address", ["auto", "local"])
def test_words_are_no_addresses(address):
    check_answers(address)


TRACEBACK = """ray::Map(EngineActor)() (pid=7)
  File "worker.py", line 3, in answer
    raise ValueError("no")
ValueError: no room for 3 rows
This task will not be retried: set max_retries to let Ray retry it."""


def test_described_error_is_the_exception_line_without_advice():
    assert describe_error(RayError(TRACEBACK)) == "ValueError: no room for 3 rows"
    assert (
        describe_error(RayError("The actor died unexpectedly.\n\tclass_name: X"))
        == "The actor died unexpectedly."
    )
    assert describe_error(KeyError()) == "KeyError: KeyError"


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (MemoryError(), SMALLER),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried\nmore"), SMALLER),
        (
            IndexError("list index out of range"),
            "a worker cannot start: IndexError: list index out of range",
        ),
    ],
)
def test_whatever_keeps_a_worker_from_starting_is_said(error, says):
    told = as_config_error(error)
    assert isinstance(told, ClusterError) and says in str(told) and "\n" not in str(told)
    refused = ConfigError("model.target: no")
    assert as_config_error(refused) is refused


def test_batches_of_a_long_job_are_larger():
    assert plan_batch_size(slots=16, actors=2, num_rows=1_000) == 8
    assert plan_batch_size(slots=16, actors=2, num_rows=4_000) == 31
    assert plan_batch_size(slots=16, actors=2, num_rows=10_000_000) == 64


def test_ray_output_is_suppressed_and_out_of_memory_is_one_line(capsys, monkeypatch, messages):
    worker, received = ray._private.worker, RayMessages()
    for name in ("print_to_stdstream", "_unhandled_error_handler"):
        monkeypatch.setattr(worker, name, getattr(worker, name))  # put back at the end
    monkeypatch.setattr(cluster, "ray_messages", received)
    take_ray_messages()
    worker._unhandled_error_handler(KeyError("dataset_1"))
    worker.print_to_stdstream(
        {"lines": ["Raylet is terminated."], "pid": "raylet", "is_err": False}, False
    )
    assert not received.lacks_memory(time.monotonic()) and messages == []
    for _ in range(3):
        text = "2 Workers (tasks / actors) killed due to memory pressure (OOM), 0 Workers crashed\nRefer to the advice"
        worker.print_to_stdstream(
            {"lines": [text], "pid": "raylet", "is_err": False}, ignore_prefix=False
        )
    assert received.lacks_memory(time.monotonic()) and not received.lacks_memory(
        time.monotonic() + 1000
    )
    assert messages == [cluster.NO_MEMORY] and capsys.readouterr() == ("", "")


def test_killed_worker_is_not_called_lack_of_memory(messages):
    """Ray's message lists the OOM killer among the possible causes of any crash."""
    received = RayMessages()
    crash = (
        "0 Workers (tasks / actors) killed due to memory pressure (OOM), 1 Workers crashed due to other reasons at "
        "node (ID: 4f, IP: 127.0.0.1). Some common causes include: (1) the process was killed by the OOM killer due to "
        "high memory usage, (2) ray stop --force was called, or (3) the worker crashed unexpectedly due to SIGSEGV"
    )
    received.receive({"lines": [crash]})
    assert not received.lacks_memory(time.monotonic()) and messages == []
    received.receive({"lines": [crash.replace("0 Workers", "10 Workers")]})
    assert received.lacks_memory(time.monotonic()) and messages == [cluster.NO_MEMORY]


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (TimeoutError(), 5, "the machine is overloaded or has no memory left"),
        (
            Exception("The current node timed out during startup."),
            5,
            "the machine is overloaded or has no memory left",
        ),
        (
            PermissionError(errno.EACCES, "Permission denied", "/x/ray"),
            2,
            "Set RAY_TMPDIR to a directory",
        ),
        (RuntimeError("no\nluck"), 5, "Ray did not start on this machine: no luck."),
    ],
)
def test_why_ray_does_not_start_is_one_line(error, code, words):
    found = start_error(error, 3.0)
    assert outcome_of(found).code == code and words in str(found) and "\n" not in str(found)


def test_a_cluster_that_cannot_be_joined_is_given_up(monkeypatch):
    """Ray itself tries for minutes, without a word."""
    monkeypatch.setattr(cluster, "JOIN_WITHIN_S", 0.1)
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", lambda **options: time.sleep(60))
    for name in ("print_to_stdstream", "_unhandled_error_handler"):
        monkeypatch.setattr(ray._private.worker, name, getattr(ray._private.worker, name))
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        with (
            pytest.raises(
                ClusterError, match=f"cluster at '{address}' could not be joined within 0 s"
            ),
            interruptible(),
        ):
            connect(address)
