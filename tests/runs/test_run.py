"""A Run whose process is killed at any of its writes, again and again: each id once, nothing of a later one lost."""

from __future__ import annotations

import itertools
import json
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

import pyarrow as pa
import pytest

from eagle_ray.config.records import RunRecord
from eagle_ray.core.errors import ConfigError
from eagle_ray.runs import lease as leases
from eagle_ray.runs import run as runs
from eagle_ray.runs.job_errors import FencedError, OutputLocked
from eagle_ray.runs.layout import RUN, SUCCESS, SUMMARY
from eagle_ray.runs.lease import LOCK, hold
from eagle_ray.runs.part_files import part_files, part_name, read_part
from eagle_ray.runs.process_identity import Process
from eagle_ray.runs.run import Run, RunState
from eagle_ray.storage.checked_parquet import parquet_bytes
from eagle_ray.storage.path import StoragePath, json_bytes

IDS = [f"id-{i}" for i in range(9)]
IDS_PER_PART = 2
WRITES = ("create", "replace", "write_atomic", "remove")


class ProcessKilled(BaseException):
    """The process is gone: no handler of an error writes anything more."""


@dataclass(frozen=True)
class Kill:
    """When a process is killed, and what becomes of the write that it was at.

    Attributes:
        after: writes that it has done.
        end: of the next write: "lost", "done", or "late" if it has been sent and arrives later.
        late_by: writes of the next processes before it arrives.
    """

    after: int
    end: str
    late_by: int = 0


@dataclass(frozen=True)
class LateWrite:
    path: StoragePath
    name: str
    due: int
    arrive: Callable[[], Any]


class Storage:
    """The storage as processes see it of which some are killed.

    Attributes:
        num_writes: that were done or begun.
        kill: of the process that runs now.
        late: what killed processes have sent and has not arrived.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.num_writes = 0
        self.kill: Kill | None = None
        self.late: list[LateWrite] = []
        self._killed_at: int | None = None
        for name in WRITES:
            monkeypatch.setattr(StoragePath, name, self._watched(name, getattr(StoragePath, name)))

    def survives(self, work: Callable[[], None], kill: Kill | None) -> bool:
        """Run a process; return whether it ends by itself, and is not refused because a killed one's claim is late."""
        self.kill, self._killed_at = kill, None if kill is None else self.num_writes + kill.after
        try:
            work()
        except (ProcessKilled, OutputLocked):
            return False
        finally:
            self.kill = self._killed_at = None
        return True

    def wait(self) -> None:
        """Let new files of killed processes arrive, as the next process waits for them, and not for other writes."""
        self.arrive(lambda late: late.name == "create" and late.path.name not in (SUMMARY, RUN))

    def arrive(self, is_due: Callable[[LateWrite], bool] = lambda late: True) -> None:
        due = [each for each in self.late if is_due(each)]
        self.late = [each for each in self.late if each not in due]
        for each in due:
            each.arrive()

    def _watched(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def write(path: StoragePath, *arguments: Any, **options: Any) -> Any:
            if path.name == LOCK and (
                self._killed_at is None or self.num_writes <= self._killed_at
            ):
                return real(path, *arguments, **options)
            self.num_writes += 1
            self.arrive(lambda late: late.due < self.num_writes)
            if self._killed_at is None or self.num_writes <= self._killed_at:
                return real(path, *arguments, **options)
            if self.num_writes == self._killed_at + 1:
                self._end(self.kill, path, name, real, arguments)
            raise ProcessKilled

        return write

    def _end(
        self, kill: Kill, path: StoragePath, name: str, real: Callable[..., Any], arguments: Any
    ) -> None:
        if kill.end == "done":
            real(path, *arguments)
        elif kill.end == "late" and name != "remove":
            if callable(arguments[-1]):
                arguments[-1]()  # its last look is before it sends
                arguments = arguments[:-1]
            due = self.num_writes + kill.late_by
            self.late.append(LateWrite(path, name, due, lambda: real(path, *arguments)))


def part(ids: list[str], run_id: str) -> bytes:
    return parquet_bytes(pa.table({"request_id": ids, "run_id": [run_id] * len(ids)}), "none")


def ids_in(run: Run) -> dict[StoragePath, list[str]]:
    return {
        file: read_part(file, ["request_id"])["request_id"].to_pylist()
        for file in part_files(run.data)
    }


def run_driver(output: StoragePath, storage: Storage, ids: list[str]) -> None:
    """Do what a driver does: claim, append what is missing, count, commit."""
    with (
        hold(output) as lease,
        Run.claim(lease, Run.inspect(output, RunRecord), {"name": "toy"}) as run,
    ):
        run.remove_stale_files()
        there = {id for ids in ids_in(run).values() for id in ids}
        missing = [id for id in ids if id not in there]
        for task, start in enumerate(range(0, len(missing), IDS_PER_PART)):
            name = part_name(run.attempt, task)
            assert run.append(name, part(missing[start : start + IDS_PER_PART], run.run_id))
            assert not run.append(name, b"of a task that is tried again")
        storage.wait()
        run.settle()
        assert not (output / SUCCESS).exists()
        seen: set[str] = set()
        for file, found in ids_in(run).items():
            kept = [id for id in found if id not in seen]
            seen.update(kept)
            if kept != found:
                run.replace(file, file.stat().version, part(kept, run.run_id) if kept else None)
        check_each_once(run, ids)
        run.commit({SUMMARY: json_bytes({"attempt": run.attempt, "rows": len(seen)})})


def check_each_once(run: Run, ids: list[str]) -> None:
    assert Counter(id for found in ids_in(run).values() for id in found) == dict.fromkeys(ids, 1)


def check_schedule(output: StoragePath, storage: Storage, kills: list[Kill]) -> bool:
    """Run a job whose first process ends, and whose input then grows; return whether every kill has come."""
    assert storage.survives(lambda: run_driver(output, storage, IDS[:3]), None)
    have_come = [
        not storage.survives(lambda: run_driver(output, storage, IDS), kill) for kill in kills
    ]
    while not storage.survives(lambda: run_driver(output, storage, IDS), None):
        pass
    state = Run.inspect(output, RunRecord)
    before = {file: file.read_bytes() for file in output.list_versions() if file.name != LOCK}
    storage.arrive()
    assert before == {
        file: file.read_bytes() for file in output.list_versions() if file.name != LOCK
    }
    assert state.is_complete
    assert state.last_attempt["outcome"] == "done"
    attempts = [each["attempt"] for each in state.manifest["attempts"]]
    assert attempts == list(range(1, len(attempts) + 1))
    assert json.loads((output / SUMMARY).read_bytes()) == {
        "attempt": attempts[-1],
        "rows": len(IDS),
    }
    check_each_once(Run(output, "", 0, ""), IDS)
    return all(have_come)


@pytest.fixture
def storage(monkeypatch) -> Storage:
    monkeypatch.setattr(runs, "MAX_PUT_S", 0.0)
    monkeypatch.setattr(
        Process, "is_gone", lambda self: True
    )  # of the holders of leases that are found here
    monkeypatch.setattr(leases, "boot_id", lambda: "this start of the machine")
    return Storage(monkeypatch)


ENDS = [("lost", 0), ("done", 0), *(("late", late_by) for late_by in (1, 4, 1000))]


def test_each_id_is_there_once_wherever_a_process_is_killed(tmp_path, storage):
    root = StoragePath.of(tmp_path)
    for end, late_by in ENDS:
        after = itertools.count()
        while check_schedule(root / uuid4().hex, storage, [Kill(next(after), end, late_by)]):
            pass
        assert next(after) > 10  # every write has been the last one


@pytest.mark.parametrize(
    ("place", "num_schedules"),
    [
        ("local", 15),
        ("s3", 1),
        *(pytest.param(*more, marks=pytest.mark.slow) for more in (("local", 40), ("s3", 3))),
    ],
)
def test_each_id_is_there_once_however_often_runs_are_killed(
    place, num_schedules, request, tmp_path, storage
):
    root = StoragePath.of(tmp_path) if place == "local" else request.getfixturevalue("bucket")
    choice = random.Random(0)
    for _ in range(num_schedules):
        kills = [
            Kill(choice.randrange(25), *choice.choice(ENDS)) for _ in range(choice.randrange(2, 5))
        ]
        check_schedule(root / uuid4().hex, storage, kills)


def test_unwritable_directory_is_named_by_its_configuration_key(tmp_path):
    (tmp_path / "file").write_text("")
    state = RunState(StoragePath.of(tmp_path / "file" / "batch"), None, None)
    with hold(StoragePath.of(tmp_path / "other")) as lease:
        with pytest.raises(ConfigError, match=r"^serving\.batches\.path: cannot write to "):
            Run.claim(lease, state, {}, key="serving.batches.path").__enter__()
        with pytest.raises(ConfigError, match=r"^output\.path: cannot write to "):
            Run.claim(lease, state, {}).__enter__()


def test_a_part_that_was_rewritten_meanwhile_is_not_rewritten(tmp_path):
    output = StoragePath.of(tmp_path)
    with hold(output) as lease, Run.claim(lease, Run.inspect(output), {}) as run:
        assert run.append("part", b"1")
        version = (run.data / "part").stat().version
        run.replace(run.data / "part", version, b"2")
        with pytest.raises(FencedError, match="was rewritten by another driver"):
            run.replace(run.data / "part", version, b"3")
        run.replace(run.data / "part", 0, None)
    assert run.data.list_versions() == {}


def test_success_is_written_after_all_records(tmp_path, monkeypatch):
    output = StoragePath.of(tmp_path)
    published = []
    with hold(output) as lease, Run.claim(lease, Run.inspect(output), {}) as run:
        monkeypatch.setattr(Run, "publish", lambda self, record, data: published.append(record))
        run.commit({SUMMARY: b"{}"})
    assert published == [SUMMARY, SUCCESS]
