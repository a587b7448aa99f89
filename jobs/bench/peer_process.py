"""A worker process of one engine: start it, ask it, end it with everything that it started.

    with WorkerProcess([sys.executable, "run_vllm.py", "{...}"], Path("vllm.log")) as worker:
        worker.wait_until_ready(timeout_s=600)
        answer = worker.ask({"batch": 1, "prompts": [[1, 2]], "max_tokens": 4}, timeout_s=600)

A worker leads a process group of its own, and ends by itself once its stdin is closed.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

ENDS_WITHIN_S = 10.0
LONGEST_REASON = 300  # characters of a log line
Answer = dict[str, Any]


class WorkerError(Exception):
    """A worker that is not there, died, did not answer in time, or answered with an error."""


class WorkerProcess:
    """One engine's process.

    Args:
        command: the program and its arguments.
        log: where the worker's stderr goes.
        environment: variables in addition to the present ones.
    """

    def __init__(self, command: list[str], log: Path, environment: Mapping[str, str] | None = None):
        self._log = log
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        try:
            with log.open("w") as stderr:
                self._process = subprocess.Popen(
                    command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=stderr,
                    text=True,
                    env={**os.environ, **(environment or {})},
                    start_new_session=True,
                )
        except OSError as error:
            raise WorkerError(
                f"{command[0]}: cannot be run ({error.strerror}). Name a Python."
            ) from error
        threading.Thread(target=self._read, daemon=True).start()

    def __enter__(self) -> WorkerProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def wait_until_ready(self, timeout_s: float) -> Answer:
        """Return the worker's first message. Raises WorkerError."""
        return self._next(timeout_s)

    def ask(self, question: Mapping[str, Any], timeout_s: float) -> Answer:
        """Return the answer to a question. Raises WorkerError."""
        try:
            self._process.stdin.write(json.dumps(question) + "\n")
            self._process.stdin.flush()
        except OSError as error:
            raise WorkerError(self._why_ended()) from error
        return self._next(timeout_s)

    def wait_until_ended(self, timeout_s: float) -> None:
        """Wait for a process that ends by itself. Raises WorkerError if it fails or takes too long."""
        try:
            status = self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.kill()
            raise WorkerError(f"not done within {timeout_s:g} s; ended. See {self._log}.") from None
        if status != 0:
            raise WorkerError(self._why_ended())

    def close(self) -> None:
        """End the worker, first by closing its stdin, then by signals to its process group."""
        with suppress(OSError):
            self._process.stdin.close()
        for number in (None, signal.SIGTERM, signal.SIGKILL):
            if number is not None:
                self._signal(number)
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(ENDS_WITHIN_S)
                break
        self._signal(signal.SIGKILL)  # what the worker started and left

    def kill(self) -> None:
        """End a worker that may hang, at once."""
        self._signal(signal.SIGKILL)
        self._process.wait()

    def _signal(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, number)

    def _read(self) -> None:
        """Queue the worker's lines, and an empty one at the end."""
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put("")

    def _next(self, timeout_s: float) -> Answer:
        try:
            line = self._lines.get(timeout=timeout_s)
        except queue.Empty:
            self.kill()
            raise WorkerError(
                f"no answer within {timeout_s:g} s; ended. See {self._log}."
            ) from None
        if not line:
            raise WorkerError(self._why_ended())
        answer = json.loads(line)
        if "error" in answer:
            raise WorkerError(f"{answer['error']} See {self._log}.")
        return answer

    def _why_ended(self) -> str:
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(ENDS_WITHIN_S)
        lines = [
            line.strip()
            for line in self._log.read_text(errors="replace").splitlines()
            if line.strip()
        ]
        reason = lines[-1][:LONGEST_REASON] if lines else "no message"
        return f"ended with status {self._process.poll()}: {reason} See {self._log}."


def run_to_end(command: list[str], log: Path, timeout_s: float) -> None:
    """Run a command that answers nothing, such as a conversion. Raises WorkerError if it fails or takes too long."""
    with WorkerProcess(command, log) as worker:
        worker.wait_until_ended(timeout_s)
