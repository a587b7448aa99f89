"""Outcomes of commands: one table of outcomes, exit codes and the exceptions that lead to them.

A wrong configuration is a ConfigError; a row that cannot be answered is an error row and stops
nothing. The command line and the job both take their exit code from ``outcome_of``.

    >>> outcome_of(OutputLocked("runs/a is being written by process 7"))
    Outcome(code=7, name='busy', meaning='another live driver writes this output', is_transient=False)
"""

from __future__ import annotations

import errno
from dataclasses import dataclass
from typing import Any

from eagle_ray.core.errors import ConfigError
from eagle_ray.storage.store import FileDamaged, NotSupported


@dataclass(frozen=True, slots=True)
class Outcome:
    """One way for a command to end.

    Attributes:
        code: the exit code.
        name: one stable word for programs (EAGLE_RAY_OUTCOME).
        meaning: a description for people.
        is_transient: whether the command may succeed later without a change; ``--keep-going``
            restarts only then.
    """

    code: int
    name: str
    meaning: str
    is_transient: bool = False


DONE = Outcome(0, "done", "every row of the input is in the output, error rows included")
DEFECT = Outcome(1, "defect", "an unknown error; the log has its traceback")
CONFIGURATION = Outcome(
    2, "configuration", "usage or configuration, or an output that may not be written"
)
ROW_ERRORS = Outcome(3, "row_errors", "rows ended in errors, and --fail-on-row-errors was given")
TOO_MANY_ERRORS = Outcome(
    4, "too_many_errors", "more error rows than execution.max_error_rate, or only error rows"
)
TRANSIENT = Outcome(
    5, "transient", "storage, cluster, workers or a device failed for now", is_transient=True
)
MISMATCH = Outcome(
    6, "mismatch", "the output belongs to another job or is damaged, or the input changed"
)
BUSY = Outcome(7, "busy", "another live driver writes this output")
STOPPED = Outcome(
    8, "stopped", "execution.finish_by or execution.max_dollars was reached; rows are left"
)
INTERRUPTED = Outcome(130, "interrupted", "SIGINT, SIGTERM or SIGHUP; the same command resumes")
OUTCOMES = (
    DONE,
    DEFECT,
    CONFIGURATION,
    ROW_ERRORS,
    TOO_MANY_ERRORS,
    TRANSIENT,
    MISMATCH,
    BUSY,
    STOPPED,
    INTERRUPTED,
)

RESUME = "Run the same command again to resume."  # how most messages of a transient outcome end

# Another attempt of the same command would end in them again.
PERMANENT = frozenset({DEFECT, CONFIGURATION, ROW_ERRORS, TOO_MANY_ERRORS, MISMATCH, STOPPED})


class JobError(Exception):
    """A job ended before it was done. Only subclasses are raised; OUTCOME_BY_ERROR has their outcomes."""


class TooManyErrors(JobError):
    """There are more error rows than execution.max_error_rate allows, or no row without an error."""


class ClusterError(JobError):
    """The cluster, a device or a worker failed, or cannot start for now."""


class ClusterUnfit(ClusterError):
    """The cluster has no resource of the requested kind, such as a GPU."""


class ModelUnusable(ClusterError):
    """No worker can load or run the configured model."""


class WorkerDefect(ClusterError):
    """A worker raised an unexpected error, not caused by the device, the storage or the configuration."""


class StorageUnavailable(JobError):
    """The storage of the output does not respond or is full; a later start may succeed."""


class OutputLocked(JobError):
    """Another live driver holds the output directory: the same command works once it has ended."""


class FencedError(JobError):
    """A newer attempt owns the output directory now: this writer must publish nothing more."""


class Incomplete(JobError):
    """The files do not hold every id that the input has."""


class PublishError(JobError):
    """The publishing destination cannot be written now; the rows of the run are safe."""


class BoundReached(JobError):
    """The run has stopped at its deadline or its budget, with rows left."""


class EndpointRefused(JobError):
    """The endpoint refuses the key, the account or the model of the job."""


class EndpointGone(JobError):
    """The endpoint could not be connected to for too long."""


class OutputMismatch(JobError):
    """The output directory belongs to another configuration or input."""


class OutputDamaged(OutputMismatch):
    """A file of the output cannot be read back."""


class InputChanged(JobError):
    """An input file has changed since the job scanned it at its start."""


OUTCOME_BY_ERROR: dict[type[BaseException], Outcome] = {
    ConfigError: CONFIGURATION,
    TooManyErrors: TOO_MANY_ERRORS,
    ClusterError: TRANSIENT,
    ClusterUnfit: CONFIGURATION,
    ModelUnusable: CONFIGURATION,
    WorkerDefect: DEFECT,
    StorageUnavailable: TRANSIENT,
    OutputLocked: BUSY,
    FencedError: BUSY,
    Incomplete: TRANSIENT,
    BoundReached: STOPPED,
    EndpointRefused: CONFIGURATION,
    EndpointGone: TRANSIENT,
    PublishError: TRANSIENT,
    OutputMismatch: MISMATCH,
    OutputDamaged: MISMATCH,
    InputChanged: MISMATCH,
    FileDamaged: MISMATCH,
    PermissionError: CONFIGURATION,
    FileNotFoundError: CONFIGURATION,  # such as a bucket that does not exist
    NotADirectoryError: CONFIGURATION,
    IsADirectoryError: CONFIGURATION,
    FileExistsError: CONFIGURATION,  # a file where a directory is needed
    NotSupported: CONFIGURATION,
    OSError: TRANSIENT,
    KeyboardInterrupt: INTERRUPTED,
}
# Every other exception is a defect.
EXPECTED_ERRORS = (
    ConfigError,
    JobError,
    FileDamaged,
    OSError,
    KeyboardInterrupt,
)
# Numbers of OSErrors that have no class of their own.
PERMANENT_ERRNOS = {
    errno.EROFS,
    errno.ENAMETOOLONG,
    errno.ELOOP,
    errno.EINVAL,
}


def outcome_of(error: BaseException) -> Outcome:
    """Return the outcome of a command that raised this error."""
    if isinstance(error, OSError) and error.errno in PERMANENT_ERRNOS:
        return CONFIGURATION
    return next(
        (OUTCOME_BY_ERROR[cls] for cls in type(error).__mro__ if cls in OUTCOME_BY_ERROR), DEFECT
    )


def outcome_by_code(code: int) -> Outcome:
    """Return the outcome with this exit code; an unknown code is a defect."""
    return next((outcome for outcome in OUTCOMES if outcome.code == code), DEFECT)


@dataclass(frozen=True, slots=True)
class RunResult:
    """The result of one run.

    Attributes:
        outcome: way in which the run ended.
        reason: reason in one line; "" if the run is done.
        rows: output rows in files, None if they were not counted.
        errors: error rows among them, None if they were not counted.
        restarts: restarts by ``--keep-going``.
    """

    outcome: Outcome
    reason: str = ""
    rows: int | None = None
    errors: int | None = None
    restarts: int = 0

    @classmethod
    def of(cls, error: BaseException) -> RunResult:
        """Return the result of a run that raised this error."""
        outcome = outcome_of(error)
        text = " ".join(str(error).split()) or type(error).__name__
        return cls(outcome, outcome.name if outcome is INTERRUPTED else text)

    def as_json(self) -> dict[str, Any]:
        return {
            "exit_code": self.outcome.code,
            "outcome": self.outcome.name,
            "reason": self.reason,
            "rows": self.rows,
            "errors": self.errors,
            "restarts": self.restarts,
        }
