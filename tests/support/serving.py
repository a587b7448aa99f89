"""Clients of the endpoint, and servers of its application, in this process and in one of their own.

    answer = await post(app, "/v1/completions", {"prompt": "Hi"})
    answer.status, answer.json["choices"]
    with serving(app) as server, browser(profile) as chromium:
        chromium.get(server.url)

The client in this process talks to an ASGI application as a server would: it may read slowly, or
leave. The browser is Debian's chromium with its driver, or any others on the PATH, without a
window.
"""

from __future__ import annotations

import asyncio
import atexit
import http.client
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pyarrow as pa
import uvicorn

from eagle_ray.assembly.worker_plan import WorkerPlan
from eagle_ray.batch.driver.input_plan import plan_input, request_rows
from eagle_ray.batch.worker.worker import Worker
from eagle_ray.requests.row_schema import request_schema, table_of
from eagle_ray.runs.run import Run
from eagle_ray.storage.path import StoragePath
from tests.support.jobs import small_job
from tests.support.processes import descendants


@dataclass
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def events(self) -> list[Any]:
        return [parse_event(part) for part in self.body.decode().split("\n\n") if part]


@dataclass
class Exchange:
    """One request: what has been sent and what came back so far."""

    started: asyncio.Event = field(default_factory=asyncio.Event)
    parts: asyncio.Queue = field(default_factory=asyncio.Queue)
    left: asyncio.Event = field(default_factory=asyncio.Event)
    reads: asyncio.Event = field(default_factory=asyncio.Event)
    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)


def parse_event(event: str) -> Any:
    assert event.startswith("data: ")
    data = event.removeprefix("data: ").strip()
    return data if data == "[DONE]" else json.loads(data)


@asynccontextmanager
async def exchange(
    app: Any,
    method: str,
    path: str,
    body: bytes | list[bytes] = b"",
    headers: dict[str, str] | None = None,
) -> AsyncIterator[Exchange]:
    """Leaves when the block ends. body: in one part or in several."""
    talk, bodies = Exchange(), list(body) if isinstance(body, list) else [body]
    path, _, query = path.partition("?")
    talk.reads.set()

    async def receive() -> dict[str, Any]:
        if bodies:
            return {"type": "http.request", "body": bodies.pop(0), "more_body": bool(bodies)}
        await talk.left.wait()
        return {"type": "http.disconnect"}

    async def send(message: dict[str, Any]) -> None:
        if message["type"] == "http.response.start":
            talk.status = message["status"]
            talk.headers = {name.decode(): value.decode() for name, value in message["headers"]}
            talk.started.set()
            return
        await talk.reads.wait()
        talk.parts.put_nowait(message["body"])
        if not message.get("more_body"):
            talk.parts.put_nowait(None)

    scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "query_string": query.encode(),
        "headers": [
            (name.lower().encode(), value.encode()) for name, value in (headers or {}).items()
        ],
        "server": ("127.0.0.1", 8000),
        "client": ("127.0.0.1", 1),
    }
    task = asyncio.ensure_future(app(scope, receive, send))
    try:
        yield talk
    finally:
        talk.left.set()
        talk.reads.set()
        await task


async def request(
    app: Any, method: str, path: str, body: bytes = b"", headers: dict[str, str] | None = None
) -> Answer:
    async with exchange(app, method, path, body, headers) as talk:
        parts = []
        while (part := await talk.parts.get()) is not None:
            parts.append(part)
    return Answer(talk.status, talk.headers, b"".join(parts))


async def post(app: Any, path: str, body: Any, headers: dict[str, str] | None = None) -> Answer:
    return await request(app, "POST", path, json.dumps(body).encode(), headers)


async def get(app: Any, path: str, headers: dict[str, str] | None = None) -> Answer:
    return await request(app, "GET", path, headers=headers)


SETTINGS = {
    "model.device": "cpu",
    "speculative.method": "eagle2",  # whose drafts do not depend on what was answered before
    "speculative.max_nodes": 8,
    "speculative.max_depth": 3,
    "speculative.top_k": 4,
    "speculative.budget": "uniform",
    "sampling.max_tokens": 16,
    "serving.slots": 4,
    "serving.max_queued": 12,
    "serving.max_body_bytes": 100_000,
}
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
FRANCE = {"messages": [{"role": "user", "content": "What is the capital of France?"}]}


def ask(app, path, body, **headers):
    return asyncio.run(post(app, path, body, headers))


def batch_rows(tmp_path, rows):
    """What a batch job makes of the rows, with the same pair."""
    plan = plan_input(small_job(tmp_path, rows, **_pair_settings()))
    assert not plan.carried_fields
    requests = table_of(list(request_rows(plan)), request_schema([]))
    answers: pa.Table = asyncio.run(_worker().answer(requests))
    return answers.to_pylist()


def _pair_settings():
    pair = {
        name: SETTINGS[name]
        for name in SETTINGS
        if name.startswith(("model", "speculative", "sampling"))
    }
    return pair | {
        "model.target": "embedded:tiny",
        "model.draft": "embedded:tiny",
        "sampling.logprobs": True,
    }


@cache
def _worker() -> Worker:
    """Return one worker for all tests of this process: its engine takes seconds to build."""
    run = Run(StoragePath.of("out"), "run", 1, "hash")
    worker = Worker(small_job(Path("nowhere"), **_pair_settings()), run, [], WorkerPlan())
    atexit.register(worker.close)
    return worker


def texts(events):
    """Of each choice of a stream, by index; what every stream must keep to is checked on the way."""
    assert events[-1] == "[DONE]"
    found, ended = {}, {}
    for choice in (choice for event in events[:-1] for choice in event["choices"]):
        piece = choice["delta"].get("content", "") if "delta" in choice else choice["text"]
        assert choice["index"] not in ended and "\ufffd" not in piece
        found[choice["index"]] = found.get(choice["index"], "") + piece
        if choice["finish_reason"]:
            ended[choice["index"]] = choice["finish_reason"]
    assert ended.keys() == found.keys()
    return [found[index] for index in sorted(found)]


ROOT = Path(__file__).parent.parent.parent


class Server:
    """`eagle-ray serve` in a process of its own; program: the module that is run; config: its file."""

    def __init__(
        self,
        tmp_path,
        address="local",
        program="eagle_ray.cli",
        config="configs/serve_demo.yaml",
        **settings,
    ):
        with socket.socket() as found:
            found.bind(("127.0.0.1", 0))
            self.port = found.getsockname()[1]
        self.log = tmp_path / "log"
        command = [sys.executable, "-m", program, "serve", "-c", str(config)]
        command += ["--port", str(self.port), "--set", f"serving.ray_address={address}"]
        command += [
            part for key, value in settings.items() for part in ("--set", f"serving.{key}={value}")
        ]
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        self.process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stderr=self.log.open("w")
        )

    def ask(self, method, path, body=None, headers=None):
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        connection.request(method, path, None if body is None else json.dumps(body), headers or {})
        answer = connection.getresponse()
        return answer.status, answer.read().decode()

    def metric(self, name):
        lines = self.ask("GET", "/metrics")[1].splitlines()
        return sum(
            float(line.split()[-1]) for line in lines if line.startswith(f"eagle_ray_{name}")
        )

    def until_ready(self, seconds=400):
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            assert self.process.poll() is None, self.log.read_text()
            try:
                if self.ask("GET", "/health")[0] == 200:
                    return
            except OSError:
                pass
            time.sleep(0.2)
        raise AssertionError(self.log.read_text())


def replicas():
    """Their pids, of all descendants of this process."""
    return [
        pid
        for pid in descendants(os.getpid())
        if b"ServeReplica:eagle-ray:engine" in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]


def wait_until(condition, seconds=240):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come to pass"
        time.sleep(0.2)


ASK = [{"role": "user", "content": "Add 1 and 2."}]
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {"type": "object", "properties": {"a": {}, "b": {"default": None}}},
    },
}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": [2, "<é>"]}}\n</tool_call>'
ARGUMENTS = '{"a": 1, "b": [2, "<é>"]}'
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
DRIVER = shutil.which("chromedriver")
FLAGS = (
    "headless",
    "no-sandbox",
    "disable-gpu",
    "disable-quic",
    "no-first-run",
    "disable-background-networking",
    "disable-component-update",
    "disable-sync",
    "hide-scrollbars",
)


@dataclass
class Serving:
    url: str
    server: uvicorn.Server
    loop: asyncio.AbstractEventLoop

    def cut(self) -> None:
        """Break off every connection, in the middle of whatever it carries."""
        for connection in list(self.server.server_state.connections):
            self.loop.call_soon_threadsafe(connection.transport.abort)


@contextmanager
def serving(app: Any) -> Iterator[Serving]:
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=1))
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_until_complete, args=(server.serve([listener]),))
    thread.start()
    try:
        yield Serving(f"http://127.0.0.1:{listener.getsockname()[1]}/", server, loop)
    finally:
        server.should_exit = True
        thread.join()
        loop.close()


@contextmanager
def browser(
    profile: Any, width: int = 900, height: int = 1000, dark: bool = False
) -> Iterator[Any]:
    """profile: an empty directory of its own."""
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for flag in (*FLAGS, f"user-data-dir={profile}", f"window-size={width},{height}"):
        options.add_argument(f"--{flag}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    try:
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        yield driver
    finally:
        driver.quit()
