"""eagle-ray serve: what is refused before anything starts, how many replicas there are, and all of it for real."""

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import yaml
from ray.serve.schema import ServeDeploySchema

from eagle_ray import cli
from eagle_ray.config import ConfigError, load_serve_config
from eagle_ray.endpoint import _check_free
from eagle_ray.serve.board import Board
from eagle_ray.serve.deployment import Shape, shape_of
from eagle_ray.serve.snapshot import Snapshot

ROOT = Path(__file__).parent.parent.parent


def config_of(**settings):
    return load_serve_config(None, env={}, overrides={name.replace("__", "."): v for name, v in settings.items()})


@pytest.mark.parametrize(
    ("settings", "gpus", "shape"),
    [
        ({}, 0, Shape(1, 1, 0, 8)),
        ({}, 4, Shape(4, 4, 1, 2)),
        ({"model.device": "cpu"}, 4, Shape(1, 1, 0, 8)),
        ({"serving.gpus_per_replica": 2}, 4, Shape(2, 2, 2, 4)),
        ({"serving.replicas": 2}, 0, Shape(2, 2, 0, 4)),
        ({"serving.replicas.min": 1, "serving.replicas.max": 4}, 4, Shape(1, 4, 1, 2)),
    ],
)
def test_one_replica_for_each_gpu_or_as_many_as_are_asked_for(settings, gpus, shape):
    assert shape_of(config_of(**settings), gpus, cpus=8) == shape


def test_what_users_are_given_is_valid():
    demo = load_serve_config(ROOT / "configs" / "serve_demo.yaml", env={})
    assert demo.serving.host == "127.0.0.1" and demo.model_name == "embedded:tiny"
    deployed = yaml.safe_load((ROOT / "infra" / "serve" / "deploy.yaml").read_text())
    assert ServeDeploySchema.model_validate(deployed).http_options.host == "127.0.0.1"
    [application] = deployed["applications"]
    assert application["import_path"] == "eagle_ray.serve.deployment:application"
    assert load_serve_config(None, env={}, overrides=application["args"]).serving.replicas.max == 2


def test_wrong_keys_and_taken_ports_end_before_ray_starts(capsys):
    assert cli.main(["serve", "--set", "serving.prot=1"]) == 2
    assert "did you mean serving.port?" in capsys.readouterr().err
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert cli.main(["serve", "--port", str(port)]) == 2
        assert f"serving.port: 127.0.0.1:{port} cannot be had" in capsys.readouterr().err
    with pytest.raises(ConfigError, match=r"serving\.port"):
        _check_free("203.0.113.1", 1234)


def test_replicas_add_up_and_counters_never_go_back(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("eagle_ray.serve.board.time.monotonic", lambda: now[0])
    board = Board()
    board.put("a", Snapshot({"x": 5}, {"running": 2}))
    assert board.put("b", Snapshot({"x": 1}, {"running": 1})) == Snapshot({"x": 6}, {"running": 3})
    now[0] = 60.0
    assert board.put("b", Snapshot({"x": 2}, {"running": 1})) == Snapshot({"x": 7}, {"running": 1})


class Server:
    """`eagle-ray serve` in a process of its own."""

    def __init__(self, tmp_path):
        with socket.socket() as found:
            found.bind(("127.0.0.1", 0))
            self.port = found.getsockname()[1]
        self.log = tmp_path / "log"
        command = [sys.executable, "-m", "eagle_ray.cli", "serve", "-c", "configs/serve_demo.yaml"]
        command += ["--port", str(self.port), "--set", "serving.max_queued=2", "--set", "serving.ray_address=local"]
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        self.process = subprocess.Popen(command, cwd=ROOT, env=environment, stderr=self.log.open("w"))

    def ask(self, method, path, body=None):
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        connection.request(method, path, None if body is None else json.dumps(body))
        answer = connection.getresponse()
        return answer.status, answer.read().decode()

    def metric(self, name):
        lines = self.ask("GET", "/metrics")[1].splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith(f"eagle_ray_{name}"))

    def until_ready(self, seconds=120):
        for _ in range(seconds * 5):
            assert self.process.poll() is None, self.log.read_text()
            try:
                if self.ask("GET", "/health")[0] == 200:
                    return
            except OSError:
                pass
            time.sleep(0.2)
        raise AssertionError(self.log.read_text())

    def replica(self):
        """The pid of the replica, of all descendants of this server's."""
        for pid in descendants(self.process.pid):
            if b"ServeReplica:eagle-ray:engine" in Path(f"/proc/{pid}/cmdline").read_bytes():
                return pid
        raise AssertionError("no replica")


def descendants(pid):
    children = [
        int(child) for task in Path(f"/proc/{pid}/task").iterdir() for child in (task / "children").read_text().split()
    ]
    return [*children, *(pid for child in children for pid in descendants(child))]


@pytest.mark.slow
def test_the_whole_of_it_over_a_socket(tmp_path):
    """Answers, who leaves, a full queue, a killed replica, and an end that drains."""
    server, long = Server(tmp_path), {"prompt": "Once", "max_tokens": 1500, "ignore_eos": True}
    try:
        server.until_ready()
        short = {"prompt": "Once", "max_tokens": 20, "temperature": 0.8, "seed": 3}
        _, plain = server.ask("POST", "/v1/completions", short)
        _, events = server.ask("POST", "/v1/completions", short | {"stream": True})
        pieces = [json.loads(event[6:])["choices"][0]["text"] for event in events.split("\n\n")[:-2]]
        assert "".join(pieces) == json.loads(plain)["choices"][0]["text"] and events.endswith("data: [DONE]\n\n")

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

        reading = [threading.Thread(target=listen, args=(more, long | {"stream": more})) for more in (True, False)]
        for thread in reading:
            thread.start()
        while server.metric("num_requests_running") < 2:
            time.sleep(0.05)
        os.kill(server.replica(), signal.SIGKILL)
        for thread in reading:
            thread.join()
        assert heard[False][0] == 503 and json.loads(heard[False][1])["error"]["code"] == "no_replica"
        last = heard[True][1].strip().split("\n\n")[-1]
        assert heard[True][0] == 200 and json.loads(last.removeprefix("data: "))["error"]["code"] == "no_replica"
        server.until_ready()
        assert json.loads(server.ask("POST", "/v1/completions", short)[1])["choices"] == json.loads(plain)["choices"]

        ending = threading.Thread(target=listen, args=("end", long | {"max_tokens": 200}))
        ending.start()
        while not server.metric("num_requests_running"):
            time.sleep(0.05)
        server.process.send_signal(signal.SIGTERM)
        ending.join()
        assert heard["end"][0] == 200 and json.loads(heard["end"][1])["usage"]["completion_tokens"] == 200
        assert server.process.wait(timeout=60) == 0
    finally:
        server.process.terminate()
        server.process.wait(timeout=90)
