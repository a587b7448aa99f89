"""on_finish: notify a command or a webhook when a run has ended.

Whatever fails here is one warning: it never changes the exit code. A webhook's URL may hold
secrets, so only its scheme and host are ever shown.

    tell(config, ending)      # the RunResult of complete_job
"""

from __future__ import annotations

import base64
import logging
import os
import signal
import subprocess
import threading
import urllib.request
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import unquote, urlsplit, urlunsplit

from eagle_ray import __version__
from eagle_ray.batch.driver.ray_environment import user_environment
from eagle_ray.batch.driver.signals import accept_interrupt
from eagle_ray.config import JobConfig
from eagle_ray.core.json_text import dump_json
from eagle_ray.core.start_log import has_reader
from eagle_ray.runs.job_errors import RunResult

log = logging.getLogger("eagle_ray")
STDERR = 2  # the number of the file
VARIABLE_PREFIX = "EAGLE_RAY_"  # prefix of the name of each fact in the command's environment


def tell(config: JobConfig, ending: RunResult) -> None:
    """Notify the user of a run's end: run on_finish.command and call on_finish.webhook, each within
    on_finish.timeout_s."""
    _tell(config, facts_of(config, ending))


def _tell(config: JobConfig, facts: dict[str, Any]) -> None:
    hooks = config.on_finish
    if hooks.command is not None:
        _attempt(
            f"command {hooks.command[0]!r}", partial(_run, hooks.command, facts, hooks.timeout_s)
        )
    if hooks.webhook is not None:
        _attempt(
            f"webhook {shown(hooks.webhook)}", partial(_post, hooks.webhook, facts, hooks.timeout_s)
        )


def tell_warning(config: JobConfig, warning: str, line: str) -> None:
    """Notify the user of a warning about a running job, in a thread, if on_finish.warnings is set.

    Args:
        warning: late, over or nearly_spent; it takes the place of the outcome.
    """
    if not config.on_finish.warnings:
        return
    nothing = dict.fromkeys(("exit_code", "rows", "errors", "restarts"))
    facts = {"name": config.name, "output": config.output.path, **nothing}
    facts |= {"outcome": warning, "reason": line}
    threading.Thread(
        target=_tell, args=(config, facts), name="eagle-ray-warning", daemon=True
    ).start()


def facts_of(config: JobConfig, ending: RunResult) -> dict[str, Any]:
    """Return the facts for the notification. Unknown facts are null, and empty in the environment."""
    return {"name": config.name, "output": config.output.path} | ending.as_json()


def shown(url: str) -> str:
    """Return only the scheme and host of a URL, since its user, path and query may be secrets."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.hostname}"


def _attempt(name: str, work: Callable[[], None]) -> None:
    try:
        work()
    except KeyboardInterrupt:
        accept_interrupt()
        log.warning("on_finish: the %s was interrupted", name)
    except Exception as error:  # any kind: it cannot change how the run has ended
        log.warning("on_finish: the %s failed: %s", name, _reason(error))


def _reason(error: Exception) -> str:
    """Return the error's message without the parts that may repeat a URL or an argument."""
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
    variables = {
        VARIABLE_PREFIX + name.upper(): "" if value is None else str(value)
        for name, value in facts.items()
    }
    output = STDERR if has_reader(STDERR) else subprocess.DEVNULL  # SIGPIPE would end the command
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=output,
        stderr=output,
        env=user_environment() | variables,
        text=True,
        start_new_session=True,
    )
    try:
        process.communicate(dump_json(facts), timeout=timeout_s)
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
    """Send the facts as JSON by POST, in a thread: urllib's timeout limits each read and not the request."""
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
    """Return whether urllib timed out. It wraps the error if it was still connecting."""
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
        urlunsplit(parts._replace(netloc=host)), dump_json(facts).encode(), headers, method="POST"
    )
