"""Every way to end has one exit code, and the command line and the job agree on it."""

import errno

import pytest

from eagle_ray.batch.driver import job_run
from eagle_ray.cli import arguments
from eagle_ray.cli import main as cli
from eagle_ray.core.errors import ConfigError
from eagle_ray.runs.job_errors import (
    EXPECTED_ERRORS,
    OUTCOME_BY_ERROR,
    OUTCOMES,
    JobError,
    RunResult,
    outcome_by_code,
    outcome_of,
)
from eagle_ray.storage import store
from eagle_ray.storage.store import StorageError

CODES = {
    "ConfigError": 2,
    "TooManyErrors": 4,
    "ClusterError": 5,
    "ClusterUnfit": 2,
    "ModelUnusable": 2,
    "WorkerDefect": 1,
    "StorageUnavailable": 5,
    "OutputLocked": 7,
    "FencedError": 7,
    "Incomplete": 5,
    "BoundReached": 8,
    "EndpointRefused": 2,
    "EndpointGone": 5,
    "PublishError": 5,
    "OutputMismatch": 6,
    "OutputDamaged": 6,
    "InputChanged": 6,
    "KeyboardInterrupt": 130,
    "StorageError": 5,
    "StorageTimeout": 5,
    "ConditionFailed": 5,
    "ObjectChanged": 5,
    "NotFound": 2,
    "NotAllowed": 2,
    "NotSupported": 2,
}


def subclasses(of: type) -> list[type]:
    return [found for cls in of.__subclasses__() for found in (cls, *subclasses(cls))]


STOPPED = [cls for cls in subclasses(JobError) if cls.__module__ == JobError.__module__]
STORAGE = [
    StorageError,
    *(cls for cls in subclasses(StorageError) if cls.__module__ == store.__name__),
]
ALL = [ConfigError, *STOPPED, *STORAGE, KeyboardInterrupt]


def test_every_class_has_a_code_of_its_own_choice():
    assert {cls.__name__ for cls in ALL} == CODES.keys()
    assert all(cls in OUTCOME_BY_ERROR for cls in STOPPED)


@pytest.mark.parametrize("cls", ALL, ids=lambda cls: cls.__name__)
def test_the_job_and_the_command_line_give_the_same_code(cls, monkeypatch, capsys):
    error = cls("because of this")

    def fail(*_: object, **__: object) -> str:
        raise error

    assert outcome_of(error).code == CODES[cls.__name__]
    assert job_run.ending_of(fail, "info").outcome.code == CODES[cls.__name__]
    monkeypatch.setattr(arguments, "load_config", fail)
    assert cli.main(["run", "-c", "any.yaml"]) == CODES[cls.__name__]
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 2 and all(line.startswith("eagle-ray: ") for line in said)


@pytest.mark.parametrize(
    ("number", "code"),
    [
        (errno.EACCES, 2),
        (errno.EROFS, 2),
        (errno.ENOTDIR, 2),
        (errno.ENOSPC, 5),
        (errno.EDQUOT, 5),
        (errno.EIO, 5),
        (errno.ESTALE, 5),
        (errno.ECONNREFUSED, 5),
        (errno.ETIMEDOUT, 5),
    ],
    ids=lambda value: errno.errorcode.get(value, str(value)) if value > 7 else str(value),
)
def test_what_the_system_refuses_is_permanent_or_not(number, code):
    assert outcome_of(OSError(number, "refused")).code == code


def test_only_exit_5_is_worth_a_restart():
    assert [outcome.code for outcome in OUTCOMES if outcome.is_transient] == [5]
    assert (
        len({outcome.code for outcome in OUTCOMES})
        == len({outcome.name for outcome in OUTCOMES})
        == len(OUTCOMES)
    )
    assert all(outcome_by_code(outcome.code) is outcome for outcome in OUTCOMES)


def test_what_is_no_stop_is_a_defect_with_its_traceback(capsys):
    def fail() -> str:
        return {}["missing"]

    assert job_run.ending_of(fail, "info").outcome.code == 1
    assert "KeyError: 'missing'" in capsys.readouterr().err
    assert (
        not isinstance(KeyError(), EXPECTED_ERRORS)
        and RunResult.of(KeyError("missing")).outcome.name == "defect"
    )
