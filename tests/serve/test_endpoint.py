"""eagle-ray serve: what is refused before anything starts, how many replicas there are, and all of it for real."""

import asyncio
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest
import yaml
from ray.serve.schema import ServeDeploySchema

from eagle_ray.cli import main as cli
from eagle_ray.cli import serve_endpoint
from eagle_ray.cli.serve_endpoint import check_port
from eagle_ray.config import load_serve_config
from eagle_ray.core.errors import ConfigError
from eagle_ray.runs.job_errors import ClusterError
from eagle_ray.serve.endpoint_metrics import (
    STALE_S,
    MetricsAggregator,
    Snapshot,
    merged_snapshot,
)
from tests.support.clusters import cluster_of
from tests.support.processes import ListenerWatch, is_running, parent_of
from tests.support.ranks import followers_of
from tests.support.serving import ROOT, Server, replicas, wait_until


def config_of(**settings):
    return load_serve_config(
        None, env={}, overrides={name.replace("__", "."): v for name, v in settings.items()}
    )


def test_what_users_are_given_is_valid():
    demo = load_serve_config(ROOT / "configs" / "serve_demo.yaml", env={})
    assert demo.serving.host == "127.0.0.1" and demo.model_name == "embedded:tiny"
    deployed = yaml.safe_load((ROOT / "infra" / "serve" / "deploy.yaml").read_text())
    assert ServeDeploySchema.model_validate(deployed).http_options.host == "127.0.0.1"
    [application] = deployed["applications"]
    assert application["import_path"] == "eagle_ray.serve.deployment:application"
    assert load_serve_config(None, env={}, overrides=application["args"]).serving.replicas.max == 2
    assert demo.serving.max_queued_tokens == "auto" and demo.serving.api_keys_file is None


def test_wrong_keys_and_taken_ports_fail_before_model_checks(capsys, monkeypatch):
    monkeypatch.setattr("eagle_ray.assembly.hub.check_models", None)
    assert cli.main(["serve", "--set", "serving.prot=1"]) == 2
    assert "did you mean serving.port?" in capsys.readouterr().err
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert cli.main(["serve", "--port", str(port)]) == 2
        assert f"serving.port: 127.0.0.1:{port} cannot be had" in capsys.readouterr().err
    with pytest.raises(ConfigError, match=r"serving\.port"):
        check_port("203.0.113.1", 1234)


def test_a_proxy_that_is_slow_to_start_is_waited_for(monkeypatch):
    """serve.start gives up after a minute, while its controller goes on."""
    proxies = iter([{}, {"node": "STARTING"}, {"node": "HEALTHY"}])

    def start(**settings):
        raise TimeoutError("HTTP proxies not available after 60s.")

    monkeypatch.setattr("ray.serve.start", start)
    monkeypatch.setattr("ray.serve.status", lambda: SimpleNamespace(proxies=next(proxies)))
    monkeypatch.setattr(serve_endpoint, "ENDPOINT_POLL_S", 0.0)
    serve_endpoint.start_serve("127.0.0.1", 8000)
    assert next(proxies, None) is None
    monkeypatch.setattr("ray.serve.status", lambda: SimpleNamespace(proxies={"node": "UNHEALTHY"}))
    monkeypatch.setattr(serve_endpoint, "PROXY_START_S", 0.0)
    with pytest.raises(ClusterError, match=r"within 0 s \(proxies: UNHEALTHY\)"):
        serve_endpoint.start_serve("127.0.0.1", 8000)


def test_command_imports_no_ray_before_its_environment_is_set():
    """Otherwise a Ray of its own would listen beyond loopback, and the command would end."""
    code = "import sys; from eagle_ray.cli import serve_endpoint; sys.exit('ray' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_replicas_add_up_and_counters_never_go_back(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("eagle_ray.serve.endpoint_metrics.time.monotonic", lambda: now[0])

    def put(board, name, counters, known=None):
        told = asyncio.run(board.put(name, Snapshot(counters, {"running": 1}), known or {}))
        return told, merged_snapshot(told.values())

    board = MetricsAggregator()
    put(board, "a", {"x": 5, "y": 0})
    told, together = put(board, "b", {"x": 1})
    assert together == Snapshot({"x": 6, "y": 0}, {"running": 2})
    assert put(board, "b", {"x": 0})[1].counters["x"] == 6  # overtaken on its way
    assert (
        put(MetricsAggregator(), "b", {"x": 2}, told)[1].counters["x"] == 7
    )  # the first board is lost
    for now[0], ended in ((60.0, "a"), (2000.0, "")):  # "a" is silent, then it has ended
        told, together = put(board, "b", {"x": 2})
        assert together == Snapshot({"x": 7, "y": 0}, {"running": 1}) and set(told) == {ended, "b"}
    assert put(board, "c", {"x": 1})[1] == Snapshot({"x": 8, "y": 0}, {"running": 2})


@pytest.mark.parametrize(
    "program",
    ["tests.support.warm_endpoint", pytest.param("eagle_ray.cli", marks=pytest.mark.slow)],
)
@pytest.mark.usefixtures("warm_python")
def test_every_process_of_an_endpoint_listens_on_loopback_alone(tmp_path, monkeypatch, program):
    """The replicas' gRPC servers too, which Ray opens on [::]: they unpickle what they receive."""
    watched = ListenerWatch()
    monkeypatch.setenv(*watched.environment.popitem())
    server = Server(tmp_path, program=program, replicas=2)
    try:
        server.until_ready()
        wait_until(lambda: server.metric("replicas") == 2)
        watched.look(server.process.pid)
    finally:
        server.process.terminate()
        server.process.wait(timeout=90)
    assert watched.beyond_loopback() == {}
    for part in (
        "gcs_server",
        "raylet",
        "ServeController",
        "ProxyActor",
        "ServeReplica:eagle-ray:metrics",
    ):
        assert watched.listeners_of(part), part
    engines = watched.listeners_of("ServeReplica:eagle-ray:engine")
    assert len(engines) == 4  # of each replica the port of Ray's core and the gRPC server's


@pytest.mark.slow
def test_the_whole_of_it_over_a_socket(tmp_path):
    """Answers, who leaves, a full queue, a killed replica, and an end that drains."""
    server, long = (
        Server(tmp_path, max_queued=2),
        {"prompt": "Once", "max_tokens": 1500, "ignore_eos": True},
    )
    try:
        server.until_ready()
        short = {"prompt": "Once", "max_tokens": 20, "temperature": 0.8, "seed": 3}
        _, plain = server.ask("POST", "/v1/completions", short)
        _, events = server.ask("POST", "/v1/completions", short | {"stream": True})
        pieces = [
            json.loads(event[6:])["choices"][0]["text"] for event in events.split("\n\n")[:-2]
        ]
        assert "".join(pieces) == json.loads(plain)["choices"][0]["text"] and events.endswith(
            "data: [DONE]\n\n"
        )

        connection = http.client.HTTPConnection("127.0.0.1", server.port)
        connection.request("POST", "/v1/completions", json.dumps(long | {"n": 10}))
        while server.metric("num_requests_running") < 8:
            time.sleep(0.05)
        status, refused = server.ask("POST", "/v1/completions", short)
        assert status == 429 and json.loads(refused)["error"]["code"] == "queue_full"
        connection.close()
        while server.metric("num_requests_running"):
            time.sleep(0.05)
        assert server.metric("request_aborted_total") == 10

        heard = {}

        def listen(name, body):
            heard[name] = server.ask("POST", "/v1/completions", body)

        reading = [
            threading.Thread(target=listen, args=(more, long | {"stream": more}))
            for more in (True, False)
        ]
        for thread in reading:
            thread.start()
        while server.metric("num_requests_running") < 2:
            time.sleep(0.05)
        [replica] = replicas()
        os.kill(replica, signal.SIGKILL)
        for thread in reading:
            thread.join()
        assert (
            heard[False][0] == 503 and json.loads(heard[False][1])["error"]["code"] == "no_replica"
        )
        last = heard[True][1].strip().split("\n\n")[-1]
        assert (
            heard[True][0] == 200
            and json.loads(last.removeprefix("data: "))["error"]["code"] == "no_replica"
        )
        server.until_ready()
        assert (
            json.loads(server.ask("POST", "/v1/completions", short)[1])["choices"]
            == json.loads(plain)["choices"]
        )

        ending = threading.Thread(target=listen, args=("end", long | {"max_tokens": 200}))
        ending.start()
        while not server.metric("num_requests_running"):
            time.sleep(0.05)
        server.process.send_signal(signal.SIGTERM)
        ending.join()
        assert (
            heard["end"][0] == 200
            and json.loads(heard["end"][1])["usage"]["completion_tokens"] == 200
        )
        assert server.process.wait(timeout=60) == 0
    finally:
        server.process.terminate()
        server.process.wait(timeout=90)


@pytest.mark.slow
def test_endpoint_over_two_ranks_answers_as_one_and_recovers(tmp_path):
    bodies = [
        {"prompt": f"{i} is", "max_tokens": 20, "temperature": i % 2 * 0.8, "seed": i}
        for i in range(8)
    ]
    bodies.append({"prompt": "A", "max_tokens": 60, "json_schema": {"enum": ["x", "y"]}})
    answers = []
    for size in (1, 2):
        server = Server(tmp_path, tensor_parallel=size)
        try:
            server.until_ready()
            answers.append(answers_of(server, bodies))
            if size == 2:
                kill_rank(server, bodies[0])
                assert answers_of(server, bodies) == answers[0]
        finally:
            server.process.terminate()
            server.process.wait(timeout=90)
    assert answers[0] == answers[1]


def answers_of(server, bodies):
    """Return the choices, which streams have, too."""
    plain = [
        json.loads(server.ask("POST", "/v1/completions", body)[1])["choices"] for body in bodies
    ]
    for body, [choice] in zip(bodies, plain, strict=True):
        events = server.ask("POST", "/v1/completions", body | {"stream": True})[1]
        assert (
            "".join(json.loads(e[6:])["choices"][0]["text"] for e in events.split("\n\n")[:-2])
            == choice["text"]
        )
    return plain


def kill_rank(server, short):
    """Requests in flight fail, and the replica is replaced."""
    heard, long = {}, {"prompt": "Once", "max_tokens": 1500, "ignore_eos": True}

    def listen(streams):
        heard[streams] = server.ask("POST", "/v1/completions", long | {"stream": streams})

    reading = [threading.Thread(target=listen, args=[streams]) for streams in (True, False)]
    for thread in reading:
        thread.start()
    wait_until(lambda: server.metric("num_requests_running") == 2)
    [replica] = replicas()
    [follower] = followers_of(replica)
    follower.kill()
    for thread in reading:
        thread.join()
    status, body = heard[False]
    assert status == 503 and json.loads(body)["error"]["code"] == "engine_dead"
    last = json.loads(heard[True][1].strip().split("\n\n")[-1].removeprefix("data: "))
    assert (
        heard[True][0] == 200
        and last["error"]["code"] == "engine_dead"
        and "ask again" in last["error"]["message"]
    )
    wait_until(lambda: replica not in replicas())
    server.until_ready()
    assert not is_running(follower.pid)


class StreamClients:
    """Clients that ask for one stream after another, and who looks at a counter meanwhile."""

    def __init__(self, server, number):
        self.ends, self.counted, self._over, self._server = [], [0.0], threading.Event(), server
        self._threads = [threading.Thread(target=self._ask_on) for _ in range(number)]
        self._threads.append(threading.Thread(target=self._look))
        for thread in self._threads:
            thread.start()

    def leave(self):
        self._over.set()
        for thread in self._threads:
            thread.join()

    def _ask_on(self):
        body = {"prompt": "Once", "max_tokens": 400, "ignore_eos": True, "stream": True}
        while not self._over.is_set():
            status, said = self._server.ask("POST", "/v1/completions", body)
            self.ends.append((status, said.strip().split("\n\n")[-1].removeprefix("data: ")))

    def _look(self):
        while not self._over.wait(0.2):
            if (number := self._server.metric("generation_tokens_total")) > 0:
                self.counted.append(number)


@pytest.mark.slow
def test_replicas_come_with_the_load_die_come_back_and_go(tmp_path, monkeypatch):
    """One engine for each (fake) GPU, on a node of its own; who is killed costs nothing but its own streams."""
    monkeypatch.setenv(
        "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH", "eagle_ray.serve.proxy_errors.middlewares"
    )
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    settings = {"replicas.min": 1, "replicas.max": 2, "gpus_per_replica": 1, "slots": 2}
    settings |= {"scale_up_after_s": 1, "scale_down_after_s": 10}
    with cluster_of(2) as cluster:
        server = Server(tmp_path, cluster.address, **settings)
        crowd = None
        try:
            server.until_ready()
            assert server.metric("replicas") == 1
            crowd = StreamClients(server, 8)
            wait_until(lambda: server.metric("replicas") == 2)
            one, other = replicas()
            assert parent_of(one) != parent_of(other)
            wait_until(lambda: server.metric("num_requests_running") == 4)  # the slots of both
            os.kill(one, signal.SIGKILL)
            silent_since = time.monotonic()
            wait_until(lambda: len(set(replicas()) - {one, other}) == 1)
            assert server.ask("GET", "/health")[0] == 200
            wait_until(
                lambda: (
                    time.monotonic() > silent_since + STALE_S
                    and server.metric("num_requests_running") == 4
                )
            )
            assert server.metric("replicas") == 2  # the new one counts, the dead one no more
            crowd.leave()
            wait_until(lambda: server.metric("replicas") == 1)
            last = server.metric("generation_tokens_total")
            assert sorted([*crowd.counted, last]) == [*crowd.counted, last]
            broken = [
                (status, json.loads(end)["error"]["code"])
                for status, end in crowd.ends
                if end != "[DONE]"
            ]
            assert 1 <= len(broken) <= 8  # those whom the dead one answered, or was about to
            assert set(broken) <= {(200, "no_replica"), (503, "no_replica")}

            stream = {"prompt": "Once", "max_tokens": 600, "ignore_eos": True, "stream": True}
            heard = []
            reading = threading.Thread(
                target=lambda: heard.append(server.ask("POST", "/v1/completions", stream)[1])
            )
            reading.start()
            wait_until(lambda: server.metric("num_requests_running"))
            server.process.send_signal(signal.SIGTERM)
            reading.join()
            assert heard[0].endswith("data: [DONE]\n\n") and server.process.wait(timeout=60) == 0
        finally:
            if crowd is not None:
                crowd.leave()
            server.process.terminate()
            server.process.wait(timeout=90)
