"""ServerChild: the server of another engine as a child of this process, on a loopback port.

A small process watches: if this process ends in any way, it ends the server and all that the server
has started.

    server = ServerChild(config.engine, on_line=print)
    target = server.wait_until_ready()
    ...
    server.close()
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import httpx2

from eagle_ray.config.engine_section import EngineConfig
from eagle_ray.core.child_process import PARENT_DEATH_SIGNAL, describe_exit
from eagle_ray.core.errors import ConfigError, EngineError
from eagle_ray.core.json_text import dump_json
from eagle_ray.port.endpoint import LOOK_S, look_at_server
from eagle_ray.port.http_target import Target
from eagle_ray.port.server_log import ServerLog

HOST = "127.0.0.1"
POLL_S = 0.5
END_S = 20.0  # seconds that a server has to end by itself
# Ends the server's process group once standard input is closed, which the end of its parent does. Ray
# kills a worker's children when it ends one, this process too: then the kernel ends the server.
WATCH = f"""
import ctypes, os, signal, subprocess, sys, threading
prctl = getattr(ctypes.CDLL(None), "prctl", None)
def end_with_me():
    if prctl is not None:
        prctl({PARENT_DEATH_SIGNAL}, signal.SIGTERM)
server = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL, preexec_fn=end_with_me)
def watch():
    while os.read(0, 1):
        pass
    server.terminate()
    try:
        server.wait({END_S})
    finally:
        os.killpg(0, signal.SIGKILL)
threading.Thread(target=watch, daemon=True).start()
code = server.wait()
signal.signal(signal.SIGTERM, signal.SIG_IGN)
os.killpg(0, signal.SIGTERM)
os._exit(128 - code if code < 0 else code)
"""
SERVER_PROGRAMS = {
    "vllm": ["vllm", "serve"],
    "sglang": [sys.executable, "-m", "sglang.launch_server"],
    "llama_server": ["llama-server"],
}
# Flags that come before those of engine.serve_args, by kind.
MODEL_FLAGS: Mapping[str, Callable[[str], list[str]]] = {
    "vllm": lambda model: [model, "--served-model-name", model],
    "sglang": lambda model: ["--model-path", model, "--served-model-name", model],
    "llama_server": lambda model: ["--model", model, "--alias", model],
}


def command_of_server(engine: EngineConfig) -> list[str]:
    """Return the program and its first arguments, without a model."""
    return list(engine.command or SERVER_PROGRAMS[engine.kind])


def arguments_of(engine: EngineConfig, port: int) -> list[str]:
    """Return the whole command line of a server."""
    assert engine.model is not None, "it is required"
    return [
        *command_of_server(engine),
        *MODEL_FLAGS[engine.kind](engine.model),
        "--host",
        HOST,
        "--port",
        str(port),
        *_flags(engine.serve_args),
    ]


def _flags(values: Mapping[str, Any]) -> list[str]:
    """Return flags with their values: true is a flag alone, false its --no- form, and an object is JSON."""
    flags: list[str] = []
    for name, value in values.items():
        if value is None:
            continue
        if isinstance(value, bool):
            flags.append(f"--{name}" if value else f"--no-{name}")
        elif isinstance(value, list):
            flags += [f"--{name}", *map(str, value)]
        else:
            flags += [f"--{name}", dump_json(value) if isinstance(value, dict) else str(value)]
    return flags


class ServerChild:
    """Another engine's server as a child process, running or loading its model."""

    def __init__(self, engine: EngineConfig, on_line: Callable[[str], None]):
        """Start the server.

        Args:
            on_line: called with each message that the server logs while it starts.
        """
        self._engine = engine
        self._on_line = on_line
        self._is_starting = True
        self._log = ServerLog()
        self.port = _free_port()
        self._process = subprocess.Popen(
            [sys.executable, "-c", WATCH, *arguments_of(engine, self.port)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=environment_of_server(),
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read, name="eagle-ray-server", daemon=True)
        self._reader.start()

    @property
    def url(self) -> str:
        """Return the base URL."""
        return f"http://{HOST}:{self.port}/v1"

    def wait_until_ready(self) -> Target:
        """Wait until the server answers. Raises ConfigError if it ends, EngineError if it takes too long."""
        deadline = time.monotonic() + self._engine.start_timeout_s
        while not self._answers():
            if self._process.poll() is not None:
                self._reader.join(POLL_S)
                raise ConfigError(f"engine.command: the server {self._end()}")
            if time.monotonic() > deadline:
                self.close()
                raise EngineError(f"the server did not answer in time: {self._log.summary()}")
            time.sleep(POLL_S)
        self._is_starting = False
        facts = look_at_server(self.url, self._engine)
        return Target(
            (self.url,),
            self._engine.kind,
            version=facts.version,
            max_model_len=facts.max_model_len,
        )

    def check(self) -> None:
        """Raise EngineError if the server has ended."""
        if self._process.poll() is not None:
            raise EngineError(f"the server {self._end()}")

    def close(self) -> None:
        """End the server and wait for its end."""
        assert self._process.stdin is not None, "it is a pipe"
        self._process.stdin.close()
        try:
            self._process.wait(2 * END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _answers(self) -> bool:
        try:
            return httpx2.get(f"{self.url}/models", timeout=LOOK_S).status_code == 200
        except httpx2.HTTPError:
            return False

    def _read(self) -> None:
        assert self._process.stdout is not None, "it is a pipe"
        for line in self._process.stdout:
            message = self._log.add(line.decode("utf-8", "replace"))
            if message and self._is_starting:
                self._on_line(message)

    def _end(self) -> str:
        return f"{describe_exit(self._process.returncode)}: {self._log.summary()}"


def _free_port() -> int:
    with socket.socket() as end:
        end.bind((HOST, 0))
        port: int = end.getsockname()[1]
        return port


def environment_of_server() -> dict[str, str]:
    """Return this process's environment without its module path, which must not reach the Python of
    another environment."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
