"""on_finish: a command and a web server hear how a run ended, and neither changes that."""

import json
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from eagle_ray.batch.driver.on_finish import tell, tell_warning
from eagle_ray.cli import main as cli
from eagle_ray.config import JobConfig, load_config
from eagle_ray.runs.job_errors import BUSY, DONE, RunResult

RECORD = """
import json, os, sys
facts = {name: value for name, value in os.environ.items() if name.startswith("EAGLE_RAY_")}
open(sys.argv[1], "a").write(json.dumps([json.load(sys.stdin), facts]) + "\\n")
"""


class Server(ThreadingHTTPServer):
    """Notes every POST; answers with `status` after `delay_s`."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.seen: list[tuple[str, dict, dict]] = []
        self.status, self.delay_s = 200, 0.0
        self.over = threading.Event()


class Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.seen.append((self.path, dict(self.headers), body))
        self.server.over.wait(self.server.delay_s)
        self.send_response(self.server.status)
        if self.server.status == 301:
            self.send_header(
                "Location", f"http://localhost:{self.server.server_address[1]}/elsewhere"
            )
        self.end_headers()

    def do_GET(self) -> None:
        self.server.seen.append((self.path, dict(self.headers), {}))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *args: object) -> None:
        """Quiet."""


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.over.set()
        server.shutdown()


@pytest.fixture
def notes(tmp_path):
    """The command's arguments, and a function that returns what it noted."""
    (tmp_path / "record.py").write_text(RECORD)
    file = tmp_path / "notes.jsonl"
    command = [sys.executable, f"{tmp_path}/record.py", str(file)]
    return (
        command,
        lambda: (
            [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
        ),
    )


def config_with(**on_finish: object) -> JobConfig:
    settings = {f"on_finish.{key}": value for key, value in on_finish.items()}
    return load_config(
        None,
        env={},
        overrides={"input.path": "a", "output.path": "/out", "name": "nightly"} | settings,
    )


def test_command_gets_run_facts_in_environment_and_on_stdin(notes):
    command, noted = notes
    tell(config_with(command=command), RunResult(BUSY, "process 7 writes it", restarts=2))
    [(facts, environment)] = noted()
    assert facts == {
        "name": "nightly",
        "output": "/out",
        "exit_code": 7,
        "outcome": "busy",
        "reason": "process 7 writes it",
        "rows": None,
        "errors": None,
        "restarts": 2,
    }
    assert environment["EAGLE_RAY_EXIT_CODE"] == "7" and environment["EAGLE_RAY_OUTCOME"] == "busy"
    assert environment["EAGLE_RAY_OUTPUT"] == "/out" and environment["EAGLE_RAY_ROWS"] == ""


def test_a_webhook_gets_the_same_by_post(server):
    url = f"http://me:p%40ss@127.0.0.1:{server.server_address[1]}/hook?token=x"
    tell(config_with(webhook=url), RunResult(DONE, rows=9, errors=1))
    [(path, headers, body)] = server.seen
    assert path == "/hook?token=x" and headers["Content-Type"] == "application/json"
    assert headers["Authorization"] == "Basic bWU6cEBzcw=="
    assert (body["exit_code"], body["outcome"], body["rows"], body["errors"]) == (0, "done", 9, 1)


def test_hooks_that_fail_are_a_warning_each_without_secrets(server, messages):
    server.status = 500
    url = f"http://me:hunter2@127.0.0.1:{server.server_address[1]}/hunter2"
    tell(config_with(webhook=url, command="/nowhere/tell hunter2"), RunResult(DONE))
    tell(config_with(command=[sys.executable, "-c", "raise SystemExit(3)"]), RunResult(DONE))
    assert len(messages) == 3 and "hunter2" not in "".join(messages)
    assert "on_finish: the command '/nowhere/tell' failed: No such file" in messages[0]
    assert messages[1] == "on_finish: the webhook http://127.0.0.1 failed: HTTP status 500"
    assert messages[2].endswith("failed: exit code 3")


def test_a_redirect_is_a_warning_and_not_followed(server, messages):
    server.status = 301
    tell(
        config_with(webhook=f"http://me:hunter2@127.0.0.1:{server.server_address[1]}/hook"),
        RunResult(DONE),
    )
    assert [path for path, *_ in server.seen] == ["/hook"]
    assert messages == ["on_finish: the webhook http://127.0.0.1 failed: HTTP status 301"]


def test_hooks_that_hang_are_left_in_time(server, messages):
    server.delay_s = 60
    url = f"http://127.0.0.1:{server.server_address[1]}/"
    tell(config_with(webhook=url, command=["sleep", "60"], timeout_s=1.0), RunResult(DONE))
    assert (
        "did not end within 1 s and was killed" in messages[0]
        and "no answer within 1 s" in messages[1]
    )


@pytest.fixture
def flags(tmp_path, notes):
    (tmp_path / "rows.jsonl").write_text("")
    command = json.dumps(notes[0])
    return [
        "-i",
        f"{tmp_path}/rows.jsonl",
        "-o",
        f"{tmp_path}/out",
        "--set",
        f"on_finish.command={command}",
    ]


def test_a_run_tells_how_it_ended_whatever_the_code(flags, notes, tmp_path, capsys):
    codes = [
        cli.main(["run", *flags, *more])
        for more in ([], ["--allow-empty"], ["--allow-empty", "--set", "seed=4"])
    ]
    assert codes == [2, 0, 6]
    told = [facts for facts, _ in notes[1]()]
    assert [facts["exit_code"] for facts in told] == codes
    assert [facts["outcome"] for facts in told] == ["configuration", "done", "mismatch"]
    assert (told[1]["rows"], told[1]["errors"]) == (0, 0) and "was 0, now 4" in told[2]["reason"]
    assert "record.py" not in (tmp_path / "out" / "_run.json").read_text()
    assert cli.main(["run", *flags, "--set", "seed=x"]) == 2
    assert len(notes[1]()) == 3  # an invalid configuration says nothing that could be relied on


def test_a_job_that_runs_tells_what_it_is_warned_of_if_asked(tmp_path, server):
    address = f"http://127.0.0.1:{server.server_address[1]}/hook"
    keys = {"input.path": "in.jsonl", "output.path": str(tmp_path), "on_finish.webhook": address}
    tell_warning(load_config(None, env={}, overrides=keys), "late", "an hour late")
    config = load_config(None, env={}, overrides=keys | {"on_finish.warnings": True})
    tell_warning(config, "nearly_spent", "$36.00 are spent")
    for thread in threading.enumerate():
        if thread.name == "eagle-ray-warning":
            thread.join(30)
    [(_, _, facts)] = server.seen
    assert facts["outcome"] == "nearly_spent" and facts["reason"] == "$36.00 are spent"
    assert facts["exit_code"] is None
