"""Isolated runs: each check or measurement in a process of its own, so that a crash ends nothing else.

    runs = [IsolatedRun("kernels bfloat16", [sys.executable, "-m", ...], limit_s=120)]
    run_all(runs, findings, TimeBudget(450), workers=4)

A run that crashes, or fails with a text that names Triton or CUDA, is repeated with
EAGLE_RAY_KERNELS=portable, and both outcomes are recorded. Other errors would come again there, and
one that takes too long would take longer. A run for which too little time is left is recorded as
skipped.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from eagle_ray.kernels.availability import CHOICE
from jobs.bench.gpu.findings import FINDING_PREFIX, ROOT, Findings

DEFAULT, PORTABLE = "default", "portable"
DETAIL_CHARACTERS = 600
NOT_ASKED = 77  # exit status of a check that this device cannot run
TIMED_OUT, CRASHED, FAILED = "timed out", "crashed", "failed"
KERNELS_AT_FAULT = re.compile("triton|cuda", re.IGNORECASE)
EXIT_OUTCOMES = {0: "ok", NOT_ASKED: "not asked"}


class TimeBudget:
    """Seconds of a whole call, counted from its start."""

    def __init__(self, seconds: float):
        self._ends_at = time.monotonic() + seconds

    @property
    def left_s(self) -> float:
        return max(self._ends_at - time.monotonic(), 0.0)


@dataclass(frozen=True, slots=True)
class IsolatedRun:
    """A command whose exit status says how it went.

    Attributes:
        limit_s: seconds after which it is killed.
        least_s: it is skipped if less time is left.
        environment: variables in addition to this process's own.
        detail: picks the recorded detail from the output. If there is none and the run failed, the
            output's end is.
    """

    name: str
    command: list[str]
    limit_s: float = 120.0
    least_s: float = 15.0
    environment: dict[str, str] = field(default_factory=dict)
    detail: Callable[[str], str] | None = None


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a run: ok, not asked, failed, crashed or timed out."""

    result: str
    seconds: float
    output: str

    @property
    def has_failed(self) -> bool:
        return self.result not in EXIT_OUTCOMES.values()

    @property
    def blames_kernels(self) -> bool:
        """Return whether the portable path may do better."""
        crashed = self.result.startswith(CRASHED)
        return crashed or (
            self.result.startswith(FAILED) and KERNELS_AT_FAULT.search(self.output) is not None
        )


def measurement_parser(description: str, names: Iterable[str]) -> argparse.ArgumentParser:
    """Return what reads the command of one measurement: its name, --out and --smoke."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("name", choices=list(names))
    parser.add_argument("--out", type=Path, required=True, help="directory of the findings")
    parser.add_argument("--smoke", action="store_true", help="tiny shapes on a CPU")
    return parser


def run_all(
    runs: list[IsolatedRun], findings: Findings, budget: TimeBudget, workers: int = 1
) -> None:
    """Run everything in order, `workers` processes at a time."""
    with ThreadPoolExecutor(workers) as pool:
        list(pool.map(lambda run: run_and_record(run, findings, budget), runs))


def run_and_record(run: IsolatedRun, findings: Findings, budget: TimeBudget) -> None:
    """Run it once, and once more on the portable path if it failed by the kernels."""
    outcome = record_run(run, findings, budget)
    if outcome is not None and outcome.blames_kernels:
        record_run(run, findings, budget, PORTABLE)


def record_run(
    run: IsolatedRun, findings: Findings, budget: TimeBudget, path: str = DEFAULT
) -> Outcome | None:
    """Run it on one path and record the outcome; return None if there is no time for it."""
    left = budget.left_s
    if left < run.least_s:
        reason = f"{left:.0f} s left, at least {run.least_s:.0f} s needed"
        findings.add("run", name=run.name, path=path, result="skipped", seconds=0.0, detail=reason)
        return None
    choice = {CHOICE: PORTABLE} if path == PORTABLE else {}
    outcome = execute(run, min(run.limit_s, left), choice)
    _echo_findings(outcome.output)
    detail = run.detail(outcome.output) if run.detail else ""
    if outcome.has_failed:
        detail = detail or last_lines(outcome.output)
    findings.add(
        "run",
        name=run.name,
        path=path,
        result=outcome.result,
        seconds=round(outcome.seconds, 1),
        detail=detail,
    )
    return outcome


def execute(run: IsolatedRun, limit_s: float, environment: dict[str, str]) -> Outcome:
    """Run the command in a process group of its own, which is killed after limit_s."""
    started = time.monotonic()
    process = subprocess.Popen(
        run.command,
        cwd=ROOT,
        env={**os.environ, "PYTHONUNBUFFERED": "1", **run.environment, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=limit_s)
        result = _result(process.returncode)
    except subprocess.TimeoutExpired:
        output, result = _kill(process), f"{TIMED_OUT} after {limit_s:.0f} s"
    return Outcome(result, time.monotonic() - started, output)


def _kill(process: subprocess.Popen[str]) -> str:
    """Kill the process group and return what it had printed."""
    os.killpg(process.pid, signal.SIGKILL)
    try:
        return process.communicate(timeout=10)[0]
    except subprocess.TimeoutExpired:  # a process in a system call of the driver cannot be killed
        _close(process.stdout)
        return "the process could not be killed"


def _close(stream: IO[str] | None) -> None:
    if stream is not None:
        stream.close()


def _result(returncode: int) -> str:
    if returncode < 0:
        return f"{CRASHED}: {signal.Signals(-returncode).name}"
    return EXIT_OUTCOMES.get(returncode, f"{FAILED}: exit status {returncode}")


def _echo_findings(output: str) -> None:
    """Print the findings that the run added by itself."""
    for line in output.splitlines():
        if line.startswith(FINDING_PREFIX):
            print(line, flush=True)


def last_lines(output: str) -> str:
    """Return the end of an output in one line."""
    return " / ".join(line.strip() for line in output.splitlines() if line.strip())[
        -DETAIL_CHARACTERS:
    ]
