"""keep_going: run a job in a child process, and start it again after each transient failure.

The parent never touches Ray: a Ray that has died inside a process cannot be trusted there again, so
each attempt is a new process that runs the same command. Permanent outcomes end it at once, and so
does a locked output: another driver is doing the work. The wait before a restart doubles, is
shortened at random, and is reset once files were added.

    keep_going(["-c", "job.yaml", "--keep-going"], config).outcome.name      # 'done'
"""

from __future__ import annotations

import json
import logging
import os
import random
import signal
import subprocess
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path

from eagle_ray.batch.driver.signals import accept_interrupt, check_not_interrupted
from eagle_ray.config import JobConfig
from eagle_ray.config.deadline import deadline_of
from eagle_ray.config.job import RestartsConfig
from eagle_ray.core.child_process import child_environment, python_command
from eagle_ray.core.json_text import dump_json
from eagle_ray.runs.job_errors import (
    DEFECT,
    INTERRUPTED,
    TRANSIENT,
    JobError,
    RunResult,
    outcome_by_code,
    outcome_of,
)
from eagle_ray.runs.layout import data_of, output_of
from eagle_ray.runs.part_files import part_files
from eagle_ray.runs.run import Run
from eagle_ray.storage.path import StoragePath

log = logging.getLogger("eagle_ray")
RUN_CODE = "from eagle_ray.cli.__main__ import command; raise SystemExit(command())"
# Resume what the previous attempt began, even if the command says --overwrite.
RESTARTED = "--restarted"


@dataclass(frozen=True, slots=True)
class OutputState:
    """The content of the output directory at one moment.

    Attributes:
        driver: id of the last driver that began an attempt, or None.
        files: the names of the part files.
    """

    driver: str | None
    files: frozenset[str]


def keep_going(arguments: Sequence[str], config: JobConfig) -> RunResult:
    """Run the job until it is done or a restart would not help.

    Args:
        arguments: arguments of ``eagle-ray run``.
    """
    output = output_of(config)
    restarts = config.execution.restarts
    arguments = [*arguments, *deadline_flags(config)]
    num_restarts = num_in_a_row = 0
    try:
        first = state = _state_or_none(output)
        while True:
            if state is None:
                ending = RunResult(TRANSIENT, f"{output}: the storage does not answer")
            else:
                first = first or state
                has_begun = state.driver != first.driver
                ending = _run_child([*arguments, *([RESTARTED] if has_begun else [])])
            if not ending.outcome.is_transient:
                break

            now = _state_or_none(output)
            if now is not None and state is not None and now.files - state.files:
                num_in_a_row = 0
            if num_in_a_row >= restarts.limit:
                log.error(
                    "eagle-ray: giving up after %d restarts in a row that added no file",
                    num_in_a_row,
                )
                break

            wait_before_restart(ending, restarts, num_in_a_row)
            num_restarts += 1
            num_in_a_row += 1
            state = now or _state_or_none(output)
    except KeyboardInterrupt:
        accept_interrupt()
        ending = RunResult(INTERRUPTED, "interrupted between two attempts")
    return replace(ending, restarts=num_restarts)


def deadline_flags(config: JobConfig) -> list[str]:
    """Return the flag --finish-by with the deadline as a point in time, so that a restart does not
    extend a duration."""
    finish_by = config.execution.finish_by
    if finish_by is None:
        return []
    return ["--finish-by", deadline_of(finish_by, datetime.now(timezone.utc)).isoformat()]


def write_ending(path: str, ending: RunResult) -> None:
    """Write the child's result for the parent, which uses the exit code if this fails."""
    with suppress(OSError):
        Path(path).write_text(dump_json(ending.as_json()), "utf-8")


def delay_s(restarts: RestartsConfig, num_in_a_row: int) -> float:
    """Return the seconds before the next restart: doubled each time, and shortened by up to a half at random."""
    longest = min(restarts.max_backoff_s, restarts.backoff_s * 2.0 ** min(num_in_a_row, 60))
    return longest * random.uniform(0.5, 1.0)


def wait_before_restart(ending: RunResult, restarts: RestartsConfig, num_in_a_row: int) -> None:
    seconds = delay_s(restarts, num_in_a_row)
    number = f"{num_in_a_row + 1} of {restarts.limit}"
    log.warning("eagle-ray: restart %s in %.0f s, because of: %s", number, seconds, ending.reason)
    check_not_interrupted()  # logging may swallow what a signal raises in it, and the wait is long
    time.sleep(seconds)


def _state_or_none(output: StoragePath) -> OutputState | None:
    """Return the state, or None if the storage does not respond for now. The child reports other faults."""
    try:
        return OutputState(
            _last_driver(output), frozenset(str(file) for file in part_files(data_of(output)))
        )
    except OSError as error:
        return None if outcome_of(error).is_transient else OutputState(None, frozenset())


def _last_driver(output: StoragePath) -> str | None:
    try:
        record = Run.inspect(output).manifest
    except JobError as error:  # damaged
        return str(error)
    return record["attempts"][-1].get("driver") if record and record["attempts"] else None


def _run_child(arguments: Sequence[str]) -> RunResult:
    """Run one attempt to its end. An interrupt is passed on, and the child's end is awaited."""
    with tempfile.TemporaryDirectory(prefix="eagle-ray-") as directory:
        path = Path(directory) / "ending.json"
        flags = [
            "--no-keep-going",
            "--no-exit-zero-if-permanent",
            "--parent",
            str(os.getpid()),
            "--ending",
            str(path),
        ]
        child = subprocess.Popen(
            python_command(RUN_CODE, "run", *arguments, *flags), env=child_environment()
        )
        is_interrupted = False
        try:
            code = child.wait()
        except KeyboardInterrupt:
            accept_interrupt()
            is_interrupted = True
            # The terminal may have sent it as well; a second signal is ignored.
            child.send_signal(signal.SIGTERM)
            code = child.wait()
        ending = _ending_of(path, code)
    if ending.outcome.is_transient and is_interrupted:
        return RunResult(INTERRUPTED, ending.reason)
    return ending


def _ending_of(path: Path, code: int) -> RunResult:
    """Return the child's result; a child that was killed, or ended by Ray's core, has none and may be restarted."""
    try:
        left = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError):
        outcome = outcome_by_code(code)
        ended = f"ended by signal {-code}" if code < 0 else f"ended with exit code {code}"
        return RunResult(
            TRANSIENT if outcome is DEFECT else outcome, f"the driver was {ended} without a reason"
        )
    return RunResult(
        outcome_by_code(left["exit_code"]), left["reason"], left["rows"], left["errors"]
    )
