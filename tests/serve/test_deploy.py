"""serve deploy: infra/serve/deploy.yaml on a real Ray head, changed under load, and taken away again."""

from __future__ import annotations

import http.client
import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import yaml

from tests.support.clusters import free_port, head_in, wait_for
from tests.support.processes import ListenerWatch

ROOT = Path(__file__).parent.parent.parent
PROXY = {"RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": "eagle_ray.serve.proxy_errors.middlewares"}
QUESTION = {"prompt": "Once", "max_tokens": 20, "temperature": 0.8, "seed": 3}


class Deployment:
    """The file with a port of its own, sent to a head whenever it has changed."""

    def __init__(self, head: str, directory: Path):
        self.document = yaml.safe_load((ROOT / "infra" / "serve" / "deploy.yaml").read_text())
        self.port = self.document["http_options"]["port"] = free_port()
        self._head, self._file = head, directory / "deploy.yaml"

    def send(self) -> None:
        self._file.write_text(yaml.safe_dump(self.document))
        command = [
            Path(sys.executable).with_name("serve"),
            "deploy",
            str(self._file),
            "--address",
            self._head,
        ]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stdout + done.stderr

    def ask(self, path: str, body: dict | None = None) -> tuple[int, dict]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        connection.request("POST" if body else "GET", path, json.dumps(body) if body else None)
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read())

    def is_ready(self) -> bool:
        try:
            return self.ask("/health")[0] == 200
        except OSError:
            return False

    def model(self) -> str | None:
        status, models = self.ask("/v1/models")
        return models["data"][0]["id"] if status == 200 else None


@pytest.mark.slow
def test_deployment_is_changed_without_lost_requests_and_deleted(tmp_path_factory):
    with head_in(tmp_path_factory.mktemp("r"), **PROXY) as head:
        deployed = Deployment(head, tmp_path_factory.mktemp("d"))
        deployed.send()
        wait_for(deployed.is_ready)
        status, first = deployed.ask("/v1/completions", QUESTION)
        assert status == 200 and first["usage"]["completion_tokens"] <= 20
        watched = ListenerWatch()
        watched.look(os.getpid())
        assert watched.beyond_loopback() == {}  # the head's node address is 127.0.0.1
        assert watched.listeners_of("ServeReplica:eagle-ray:engine")

        answers, over = [], threading.Event()

        def ask_on() -> None:
            while not over.is_set():
                answers.append(deployed.ask("/v1/completions", QUESTION))

        clients = [threading.Thread(target=ask_on) for _ in range(3)]
        for client in clients:
            client.start()
        deployed.document["applications"][0]["args"]["serving"]["model_name"] = "renamed"
        deployed.send()
        wait_for(lambda: deployed.model() == "renamed")
        num_before = len(answers)
        wait_for(lambda: len(answers) > num_before + 10)
        over.set()
        for client in clients:
            client.join()
        assert {status for status, _ in answers} == {200}
        assert {answer["choices"][0]["text"] for _, answer in answers} == {
            first["choices"][0]["text"]
        }
        assert {answer["model"] for _, answer in answers} == {"embedded:tiny", "renamed"}

        deployed.document["applications"] = []
        deployed.send()
        wait_for(lambda: deployed.ask("/v1/models")[0] == 503)
        assert deployed.ask("/v1/completions", QUESTION)[1]["error"]["code"] == "no_replica"
