"""Unwrap the error of a Ray Data stream: Ray wraps a worker's error several times."""

from __future__ import annotations

import re

from ray.exceptions import RayError

from eagle_ray.core.errors import ConfigError
from eagle_ray.runs.job_errors import ClusterError, JobError, WorkerDefect, outcome_of

# Pattern of a traceback's last line.
EXCEPTION_LINE = re.compile(r"[A-Za-z_][\w.]*(Error|Exception|Interrupt)(:|$)")


def reason_of(error: RayError) -> Exception:
    """Return why a stream failed, as one line; or the worker's own error, if that is one that ends a job."""
    reason = _root_cause(error)
    if isinstance(reason, (JobError, ConfigError)):
        return type(reason)(str(reason).partition("\n")[0])
    return _error_class(reason)(f"a worker failed: {describe_error(reason)}")


def _error_class(error: Exception) -> type[Exception]:
    """Return the exception class for what a task raised. A RayError itself is a lost worker, node or object."""
    if isinstance(error, OSError) and not outcome_of(error).is_transient:
        return ConfigError
    return ClusterError if isinstance(error, (RayError, OSError)) else WorkerDefect


def _root_cause(error: Exception) -> Exception:
    """Return the innermost exception of those that Ray has wrapped around each other."""
    while isinstance(cause := getattr(error, "cause", None), Exception):
        error = cause
    return error


def describe_error(error: Exception) -> str:
    """Return the line with the exception itself from Ray's text: a traceback, often followed by advice."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [
        type(error).__name__
    ]
    if not isinstance(error, RayError):
        return f"{type(error).__name__}: {lines[0]}"
    raised = [line for line in lines if EXCEPTION_LINE.match(line)]
    return raised[-1] if raised else lines[0]
