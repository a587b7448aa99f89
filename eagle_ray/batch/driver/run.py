"""Run a batch job: from a configuration to an output directory that holds every row, and an exit code.

A job is planned, claimed, executed and settled (``job_plan``, ``claim``, ``execute``, ``settle``). Ray is imported only
if rows are missing, and torch only in engines' processes, so a finished job ends in a second.

    run_to_end(load_config("configs/demo.yaml")).outcome.code      # 0

``keep_going`` runs the job in a child process, and restarts it while it ends for transient reasons. The parent never
touches Ray: a Ray that has died inside a process cannot be trusted there again, so each attempt is a new process that
runs the same command. Permanent outcomes end it at once, and so does a locked output: another driver is doing the work.
The wait before a restart doubles, is shortened at random, and is reset once files were added.

    keep_going(["-c", "job.yaml", "--keep-going"], config).outcome.name      # 'done'

``tell`` runs on_finish: a command or a web server gets how the run ended. Whatever fails there is one warning: it never
changes the exit code. A webhook's URL may hold secrets, so only its scheme and host are ever shown.
"""

from __future__ import annotations

import base64
import json
import logging
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import unquote, urlsplit, urlunsplit

from eagle_ray import __version__
from eagle_ray.batch.driver.claim import claim
from eagle_ray.batch.driver.job_plan import plan_job
from eagle_ray.batch.driver.ray_jobs import check_output_outlives_job
from eagle_ray.batch.driver.settle import settle
from eagle_ray.batch.driver.signals import accept_interrupt, check_not_interrupted, interruptible
from eagle_ray.batch.driver.status import counted_rows, log_error_rows
from eagle_ray.batch.worker.spare_engine import SpareEngine
from eagle_ray.config import JobConfig
from eagle_ray.config.job import RestartsConfig
from eagle_ray.core.errors import ConfigError
from eagle_ray.core.start_log import configure_logging, print_result
from eagle_ray.report.text import run_table
from eagle_ray.runs.job_errors import (
    DEFECT,
    DONE,
    EXPECTED_ERRORS,
    INTERRUPTED,
    RESUME,
    ROW_ERRORS,
    TOO_MANY_ERRORS,
    TRANSIENT,
    JobError,
    RunResult,
    outcome_by_code,
    outcome_of,
)
from eagle_ray.runs.layout import SUMMARY, JobShard, data_of, output_of, root_of
from eagle_ray.runs.part_files import part_files
from eagle_ray.runs.row_index import IndexDamaged, remove_index
from eagle_ray.runs.run import Run
from eagle_ray.storage.path import StoragePath

log = logging.getLogger("eagle_ray")
VARIABLE = "EAGLE_RAY_"  # before the name of each fact, in the command's environment
RESTARTED = "--restarted"  # resume what the previous attempt began, even if the command says --overwrite


def run_job(config: JobConfig, retry_errors: bool = False) -> dict[str, Any]:
    """Generate every missing row, count the rows in the files and return what ``_summary.json`` holds.

    Args:
        retry_errors: drop error rows first, so that they are generated again.

    Raises:
        ConfigError: before anything has started.
        JobError: the job cannot be completed.
    """
    try:
        return _run_attempt(config, retry_errors)
    except IndexDamaged as error:
        log.warning("the index of %s is built again: %s", config.output.path, error)
    remove_index(output_of(config))
    resumed = config.output.model_copy(update={"if_exists": "resume"})  # what the attempt has made stays
    return _run_attempt(config.model_copy(update={"output": resumed}), retry_errors)


def _run_attempt(config: JobConfig, retry_errors: bool) -> dict[str, Any]:
    """Do what run_job does. Raises IndexDamaged, too."""
    with SpareEngine() as spare, claim(plan_job(config, spare, retry_errors)) as claimed:
        if (missing := claimed.missing()) is not None:
            from eagle_ray.batch.driver.execute import execute  # imports Ray, whose environment is ready now

            execute(claimed, missing)
        return settle(claimed)


def run_to_end(config: JobConfig, retry_errors: bool = False, fail_on_row_errors: bool = False) -> RunResult:
    """Run the job to its end and print its table. fail_on_row_errors: a job with error rows ends with ROW_ERRORS."""
    began = datetime.now(timezone.utc)

    def work() -> str:
        check_output_outlives_job(config)
        summary, output = run_job(config, retry_errors), output_of(config)
        if num_errors := summary["total"]["errors"]:
            log_error_rows(output, num_errors)
        return f"{run_table(summary)}\n{_locations(config, output)}"

    ending = ending_of(work, config.logging.level)
    rows, errors = _counts(config, ending, began)
    if ending.outcome is DONE and fail_on_row_errors and errors:
        ending = RunResult(ROW_ERRORS, f"{errors} rows ended in errors (--fail-on-row-errors)")
        print(f"eagle-ray: {ending.reason}", file=sys.stderr)
    return replace(ending, rows=rows, errors=errors)


def _locations(config: JobConfig, output: StoragePath) -> str:
    """Return where the rows and the numbers of a finished run are, and for a shard what comes next."""
    files = "**/*.parquet" if config.output.partition_by else "*.parquet"
    locations = f"rows in {data_of(output).display_path}/{files}, these numbers in {output.display_path}/{SUMMARY}"
    if config.execution.shard is None:
        return locations
    shard = JobShard.of(config.execution.shard)
    root = root_of(output).display_path
    return f"{locations}\nshard {shard} is complete. Once all {shard.count} are: eagle-ray finish {root}"


def _counts(config: JobConfig, ending: RunResult, began: datetime) -> tuple[int | None, int | None]:
    """Return rows and error rows of the output, if this run has counted them and they can be read at once."""
    with suppress(ConfigError, OSError):
        output = output_of(config)
        if ending.outcome in (DONE, TOO_MANY_ERRORS):
            return counted_rows(output)
        if output.is_local or not ending.outcome.is_transient:
            return counted_rows(output, began)
    return None, None


def ending_of(work: Callable[[], str], log_level: str) -> RunResult:
    """Do the work and print its result. An error is logged in one line and becomes the ending."""
    configure_logging(log_level)
    try:
        with interruptible():
            result = work()
    except EXPECTED_ERRORS as error:
        log.error("eagle-ray: %s", _line_of(error))
        return RunResult.of(error)
    except Exception as error:
        log.exception("eagle-ray: the job ended with an unknown error; please report it")
        return RunResult.of(error)
    print_result(result)
    return RunResult(DONE)


def _line_of(error: BaseException) -> str:
    outcome = RunResult.of(error).outcome
    if isinstance(error, ConfigError):
        return str(error)
    if outcome is INTERRUPTED:
        return f"interrupted. {RESUME}"
    if isinstance(error, OSError) and outcome.is_transient:
        return f"stopped: {error}. {RESUME}"
    return f"stopped: {error}"


def tell(config: JobConfig, ending: RunResult) -> None:
    """Run on_finish.command and call on_finish.webhook, each within on_finish.timeout_s."""
    hooks, facts = config.on_finish, facts_of(config, ending)
    if hooks.command is not None:
        _attempt(f"command {hooks.command[0]!r}", partial(_run, hooks.command, facts, hooks.timeout_s))
    if hooks.webhook is not None:
        _attempt(f"webhook {shown(hooks.webhook)}", partial(_post, hooks.webhook, facts, hooks.timeout_s))


def facts_of(config: JobConfig, ending: RunResult) -> dict[str, Any]:
    """Return what is told. A fact that is not known is null, and empty in the environment."""
    return {"name": config.name, "output": config.output.path} | ending.as_json()


def shown(url: str) -> str:
    """Return the scheme and host of a URL: its user, path and query may be secrets."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.hostname}"


def _attempt(name: str, work: Callable[[], None]) -> None:
    try:
        work()
    except KeyboardInterrupt:
        accept_interrupt()
        log.warning("on_finish: the %s was interrupted", name)
    except Exception as error:  # of whatever kind: the run has ended as it has
        log.warning("on_finish: the %s failed: %s", name, _reason(error))


def _reason(error: Exception) -> str:
    """Return what went wrong, without parts that may repeat a URL or an argument."""
    if isinstance(error, HTTPError):
        return f"HTTP status {error.code}"
    if isinstance(error, URLError):
        return str(error.reason)
    if isinstance(error, HookError):
        return str(error)
    return getattr(error, "strerror", None) or type(error).__name__


class HookError(Exception):
    """A hook that ended badly or took too long."""


def _run(command: list[str], facts: dict[str, Any], timeout_s: float) -> None:
    """Run the command with the facts in its environment and on its stdin; its output goes to stderr."""
    variables = {VARIABLE + name.upper(): "" if value is None else str(value) for name, value in facts.items()}
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=2, env=os.environ | variables, text=True, start_new_session=True
    )
    try:
        process.communicate(json.dumps(facts), timeout=timeout_s)
    except subprocess.TimeoutExpired:
        raise HookError(f"it did not end within {timeout_s:g} s and was killed") from None
    finally:
        if process.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if process.returncode:
        raise HookError(f"exit code {process.returncode}")


def _post(url: str, facts: dict[str, Any], timeout_s: float) -> None:
    """POST the facts as JSON. A thread does it, since urllib's own timeout is for each read, not for all of it."""
    failed: list[Exception] = []

    def send() -> None:
        try:
            opener = urllib.request.build_opener(NoRedirect)
            opener.open(_request(url, facts), timeout=timeout_s).close()
        except Exception as error:
            failed.append(error)

    thread = threading.Thread(target=send, name="eagle-ray-webhook", daemon=True)
    thread.start()
    thread.join(timeout_s)
    if thread.is_alive() or any(_is_timeout(error) for error in failed):
        raise HookError(f"no answer within {timeout_s:g} s")
    if failed:
        raise failed[0]


def _is_timeout(error: Exception) -> bool:
    """Return whether urllib gave up waiting: it wraps what happened while it connects."""
    return isinstance(error.reason if isinstance(error, URLError) else error, TimeoutError)


class NoRedirect(urllib.request.HTTPRedirectHandler):
    """Refuses redirects: urllib would send the credentials to the other host, and a GET without the facts."""

    def redirect_request(self, *_: Any) -> None:
        return None


def _request(url: str, facts: dict[str, Any]) -> urllib.request.Request:
    """Return the request, with user and password of the URL as a header, since urllib does not read them."""
    parts = urlsplit(url)
    user_info, _, host = parts.netloc.rpartition("@")
    headers = {"Content-Type": "application/json", "User-Agent": f"eagle-ray/{__version__}"}
    if user_info:
        headers["Authorization"] = f"Basic {base64.b64encode(unquote(user_info).encode()).decode()}"
    return urllib.request.Request(
        urlunsplit(parts._replace(netloc=host)), json.dumps(facts).encode(), headers, method="POST"
    )


@dataclass(frozen=True, slots=True)
class OutputState:
    """The content of the output directory at one moment.

    Attributes:
        driver: the id of the last driver that began an attempt, or None.
        files: the names of the part files.
    """

    driver: str | None
    files: frozenset[str]


def keep_going(arguments: Sequence[str], config: JobConfig) -> RunResult:
    """Run the job until it is done or a restart would not help. arguments: of ``eagle-ray run``."""
    output, restarts = output_of(config), config.execution.restarts
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
                log.error("eagle-ray: giving up after %d restarts in a row that added no file", num_in_a_row)
                break

            wait_before_restart(ending, restarts, num_in_a_row)
            num_restarts += 1
            num_in_a_row += 1
            state = now or _state_or_none(output)
    except KeyboardInterrupt:
        accept_interrupt()
        ending = RunResult(INTERRUPTED, "interrupted between two attempts")
    return replace(ending, restarts=num_restarts)


def write_ending(path: str, ending: RunResult) -> None:
    """Write the child's result for the parent, which uses the exit code if this fails."""
    with suppress(OSError):
        Path(path).write_text(json.dumps(ending.as_json()), "utf-8")


def delay_s(restarts: RestartsConfig, num_in_a_row: int) -> float:
    """Return the seconds before the next restart: doubled each time, and shortened by up to a half at random."""
    longest = min(restarts.max_backoff_s, restarts.backoff_s * 2.0 ** min(num_in_a_row, 60))
    return longest * random.uniform(0.5, 1.0)


def wait_before_restart(ending: RunResult, restarts: RestartsConfig, num_in_a_row: int) -> None:
    seconds, number = delay_s(restarts, num_in_a_row), f"{num_in_a_row + 1} of {restarts.limit}"
    log.warning("eagle-ray: restart %s in %.0f s, because of: %s", number, seconds, ending.reason)
    check_not_interrupted()  # logging may swallow what a signal raises in it, and the wait is long
    time.sleep(seconds)


def _state_or_none(output: StoragePath) -> OutputState | None:
    """Return the state, or None if the storage does not respond for now. The child reports other faults."""
    try:
        return OutputState(_last_driver(output), frozenset(str(file) for file in part_files(data_of(output))))
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
        flags = ["--no-keep-going", "--no-exit-zero-if-permanent", "--parent", str(os.getpid()), "--ending", str(path)]
        command = [sys.executable, "-m", "eagle_ray.cli", "run", *arguments, *flags]
        child = subprocess.Popen(command, env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)})
        is_interrupted = False
        try:
            code = child.wait()
        except KeyboardInterrupt:
            accept_interrupt()
            is_interrupted = True
            child.send_signal(signal.SIGTERM)  # the terminal may have sent it as well; a second signal is ignored
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
        return RunResult(TRANSIENT if outcome is DEFECT else outcome, f"the driver was {ended} without a reason")
    return RunResult(outcome_by_code(left["exit_code"]), left["reason"], left["rows"], left["errors"])
