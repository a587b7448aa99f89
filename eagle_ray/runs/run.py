"""Run: one attempt of a process at one output directory; of a batch job, or of a batch of the endpoint.

``_run.json`` is the manifest. It says which run the directory holds, its attempts, and the facts
that the caller gives (configuration, inputs, versions). Each claim is an attempt with its own
number. A writer that finds another number in ``_run.json`` is fenced off and publishes nothing
more.

    with hold(output, on_loss=interrupt) as lease:                  # runs/lease.py
        with Run.claim(lease, Run.inspect(output), facts) as run:
            run.append("part-001-000000.parquet", data)             # by any process: a Run can be pickled
            run.settle()
            run.commit({"_summary.json": summary})                  # the counts of now; then _SUCCESS

**Stale writers** are those of an earlier attempt that live for seconds after their driver was killed. Every writer
reads ``_run.json`` right before it publishes, so a stale writer can only do harm between that read and the end of its
one rename or PUT. That harm is limited:
- It overwrites nothing. A part file is created only if it does not exist, under a name with its attempt and task;
  ``_run.json``, rewritten part files and the run's own records are replaced by compare-and-swap. So nothing of a newer
  attempt is lost.
- A late ``_SUCCESS`` may appear while the newer attempt works. That attempt removes it once such PUTs must be over, and
  writes its own after its count.
- A late file of the same run has ids that other files have too, with the same tokens, since sampling is keyed. The
  recount before ``_SUCCESS`` removes the duplicates. On S3 a PUT takes time, so ``settle`` waits until the PUTs that
  were under way when this attempt began must be over. A local rename takes no time.
- A late file of a run that was overwritten would have another configuration's output. Attempt numbers keep counting,
  so its name is below this run's first attempt, and ``remove_stale_files`` deletes it before each count. The files that
  were there when the run was overwritten go the same way, so a kill at any moment leaves the old run or the new one.
One case stays open: a writer that is frozen in that gap for longer than MAX_PUT_S and resumed after
``_SUCCESS`` may add a file. The next start of the same command removes its duplicates; no row is
lost or wrong.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime, timezone
from itertools import pairwise
from typing import Any
from uuid import uuid4

import pyarrow.compute as pc

from eagle_ray.config.records import JobRecord, RecordKind, RunIdentity, RunRecord
from eagle_ray.core.errors import ConfigError
from eagle_ray.runs.job_errors import (
    FencedError,
    JobError,
    OutputDamaged,
    OutputLocked,
    StorageUnavailable,
    outcome_of,
)
from eagle_ray.runs.layout import (
    PROGRESS,
    REPORT,
    RUN,
    STOPPED_FILE,
    SUCCESS,
    SUMMARY,
    data_of,
    read_record,
    read_record_with_version,
    root_of,
    wrap_os_errors,
)
from eagle_ray.runs.lease import Lease
from eagle_ray.runs.output_index import own_files, without_ids
from eagle_ray.runs.part_files import attempt_of, part_files, read_part
from eagle_ray.runs.process_identity import Process
from eagle_ray.runs.row_index import INDEX_DIRECTORY, Digests
from eagle_ray.storage.checked_parquet import parquet_bytes
from eagle_ray.storage.path import StoragePath, json_bytes, read_json_object
from eagle_ray.storage.store import StorageError, check_bucket, remedy_of

log = logging.getLogger("eagle_ray")
FORMAT_VERSION = 2  # version of _run.json
ERASED = "erased"  # files of an overwritten run whose names have no attempt, below data/
# Seconds of one try of one PUT: fifteen megabytes at one a second, less where the line is slower.
MAX_PUT_S = 30.0
RUN_REMEDY = (
    "adopt its rows with eagle-ray repair, put it back from a copy, or choose another output.path"
)


@dataclass(frozen=True, slots=True)
class RunState:
    """The state of a run directory, read without a lease.

    Attributes:
        output: directory of the run.
        version: version of ``_run.json`` when it was read; None if there is none.
        manifest: content of ``_run.json``, or None.
    """

    output: StoragePath
    version: int | str | None
    manifest: dict[str, Any] | None

    @property
    def last_attempt(self) -> dict[str, Any]:
        """Return the record of the last attempt of a run that has begun: number, start, and outcome
        once it has ended."""
        return self.record["attempts"][-1]

    @property
    def record(self) -> dict[str, Any]:
        """Return the manifest of a run that has begun."""
        assert self.manifest is not None
        return self.manifest

    @property
    def process(self) -> Process | None:
        """Return the process of the last attempt, or None if it is not recorded."""
        process = self.last_attempt.get("process")
        # Older records have a number here.
        return Process.of(process) if isinstance(process, dict) else None

    @property
    def is_complete(self) -> bool:
        """Return whether the run has ended with everything that was requested.

        A start that is killed right after recording its attempt leaves ``_SUCCESS`` and the summary
        of an earlier attempt. So an attempt without an outcome counts only if the summary is its
        own.
        """
        if not (self.output / SUCCESS).exists():
            return False
        if "outcome" in self.last_attempt:
            return True
        summary = read_json_object(self.output / SUMMARY) or {}
        return summary.get("attempt", self.last_attempt["attempt"]) == self.last_attempt["attempt"]


@dataclass(frozen=True, slots=True)
class Run:
    """One attempt at one output directory; pickled into every writer.

    Attributes:
        attempt: number of the attempt: 1 for the first start; each resume and each overwrite adds
            one.
        config_hash: hash of the requested configuration.
        check_lock: check of the lease before each publish, in the process that holds it. Writers in
            other processes have none (``runs/lease.py`` explains why that is enough).
    """

    output: StoragePath
    run_id: str
    attempt: int
    config_hash: str
    check_lock: Callable[[], None] | None = field(default=None, compare=False)

    def __reduce__(self) -> tuple[Any, ...]:
        return Run, (self.output, self.run_id, self.attempt, self.config_hash)

    @classmethod
    def inspect(cls, output: StoragePath, kind: RecordKind = JobRecord) -> RunState:
        """Read the manifest, without a lease. Raises OutputDamaged if it is damaged.

        Args:
            kind: kind of record that ``_run.json`` must hold; a batch of the endpoint has a
                RunRecord.
        """
        manifest, version = read_record_with_version(output / RUN, kind, RUN_REMEDY)
        return RunState(output, version, manifest)

    @classmethod
    @contextmanager
    def claim(
        cls, lease: Lease, state: RunState, facts: Mapping[str, Any], key: str = "output.path"
    ) -> Iterator[Run]:
        """Begin an attempt at the directory, and record its outcome when the context ends. Earlier
        writers can no longer publish.

        Args:
            lease: lease of the directory, which this process holds.
            state: state of the directory, read under the lease; without a manifest a new run
                begins.
            facts: further entries of the manifest.
            key: configuration key of the directory, for messages.

        Raises OutputLocked if another process has written the manifest since it was read,
        ConfigError if the directory cannot be written, StorageUnavailable if it cannot be written
        for now.
        """
        with wrap_os_errors(state.output, key):
            run = replace(begin_attempt(state, facts), check_lock=lease.check)
        with run.recorded_outcome():
            yield run

    @contextmanager
    def recorded_outcome(self) -> Iterator[None]:
        """Record how and when this attempt ended."""
        outcome = "done"
        try:
            yield
        except BaseException as error:
            outcome = f"{type(error).__name__}: {error}".rstrip(": ")
            raise
        finally:
            self.record({"finished_at": now_text(), "outcome": outcome})

    def record(self, facts: Mapping[str, str]) -> None:
        """Write facts about this attempt into the manifest. Ignored if the manifest is another
        attempt's or cannot be written."""
        with suppress(JobError, OSError):
            state = Run.inspect(self.output, RunRecord)
            # Does not wait for the lease: the write is conditional.
            replace(self, check_lock=None).check_current()
            assert state.manifest is not None
            state.last_attempt.update(facts)
            write_manifest(state)

    @property
    def data(self) -> StoragePath:
        """Return the directory of the part files."""
        return data_of(self.output)

    @property
    def index(self) -> StoragePath:
        """Return the directory of the run's index."""
        return self.output / INDEX_DIRECTORY

    @property
    def files(self) -> list[StoragePath]:
        """Return the part files in the order in which they were made."""
        return part_files(self.data)

    def check_current(self) -> None:
        """Check that ``_run.json`` still names this attempt. Waits while a lease is uncertain.

        Raises OutputDamaged if the file is gone, FencedError if it names another attempt.
        """
        if self.check_lock is not None:
            self.check_lock()
        manifest = read_record(self.output / RUN, RunIdentity, RUN_REMEDY)
        if manifest is None:
            raise OutputDamaged(
                f"{self.output}: {RUN} is gone: the output was deleted while the job ran. Nothing more is written; "
                "run the command again to start from the first row."
            )
        if (manifest["run_id"], manifest["attempt"]) != (self.run_id, self.attempt):
            other = f"run {manifest['run_id']} attempt {manifest['attempt']}"
            raise FencedError(
                f"{self.output}: {RUN} names {other}, not run {self.run_id} attempt {self.attempt}"
            )

    def append(self, name: str, data: bytes) -> bool:
        """Create a part file if this is the current attempt. Return False, and change nothing, if a file has this name.

        Raises as check_current does, and StorageUnavailable or ConfigError, which name the file, if
        it cannot be written for now or at all.
        """
        file = self.data / name
        self.check_current()  # before its directory is made: an output that was deleted stays deleted
        try:
            return file.create(data, self.check_current) is not None
        except StorageError:  # names its object
            raise
        except OSError as error:
            self.check_current()  # if the output was deleted, that is the reason
            kind = StorageUnavailable if outcome_of(error).is_transient else ConfigError
            raise kind(
                f"cannot write {file}: {error.strerror or error}. {remedy_of(error)}"
            ) from None

    def replace(self, file: StoragePath, version: int | str, data: bytes | None) -> None:
        """Replace a part file if it still has this version; None deletes it.

        Raises as check_current does, and FencedError if the file has another version.
        """
        if data is None:
            self.check_current()
            file.remove()
        elif file.replace(data, version, self.check_current) is None:
            raise FencedError(f"{file} was rewritten by another driver")

    def remove_rows(self, file: StoragePath, ids: Digests, compression: str) -> None:
        """Rewrite a part file without the rows of the given sorted ids. Raises as replace does."""
        version = file.stat().version
        rows = without_ids(file, ids)
        self.replace(file, version, parquet_bytes(rows, compression) if rows.num_rows else None)

    def publish(self, record: str | StoragePath, data: bytes) -> None:
        """Write one of the run's own records, if this is the current attempt.

        The write is a compare-and-swap on the version that was there before the check. So a write
        that an earlier attempt's process sends late replaces nothing that a later attempt has
        written since. Raises as check_current does.

        Args:
            record: name of the record file in `output`.
        """
        file = self.output / record if isinstance(record, str) else record
        written = None
        # Another process wrote in between: the next check says whether it is a later attempt.
        while written is None:
            version = version_of(file)
            self.check_current()  # first: an output that was deleted is not made again
            if version is None:
                written = file.create(data, self.check_current)
            else:
                written = file.replace(data, version, self.check_current)

    def settle(self) -> None:
        """Wait until no writer of a killed attempt can add a file, and delete the files of stale writers.

        Counts that are made afterwards stay true.
        """
        attempts = manifest_of(self.output)["attempts"]
        fenced = [
            later["started_at"] for killed, later in pairwise(attempts) if "outcome" not in killed
        ]
        if fenced and not self.output.is_local:
            age = datetime.now(timezone.utc) - datetime.fromisoformat(fenced[-1])
            remaining_s = min(MAX_PUT_S, MAX_PUT_S - age.total_seconds())
            if remaining_s > 0:
                log.info("waiting %.0f s for writers of a killed attempt to end", remaining_s)
                time.sleep(remaining_s)
        if fenced:
            (self.output / SUCCESS).remove()
        self.remove_stale_files()

    def commit(self, records: Mapping[str, bytes] | Mapping[StoragePath, bytes]) -> None:
        """Publish records of counts that were made after ``settle``, and then ``_SUCCESS``. Raises
        as check_current does."""
        for name, data in records.items():
            self.publish(name, data)
        self.publish(SUCCESS, b"")

    def remove_stale_files(self) -> None:
        """Delete the files of an overwritten run. Raises as stale_files does."""
        for file in stale_files(Run.inspect(self.output, RunRecord)):
            log.warning("%s is a late file of a run that was overwritten: deleted", file)
            file.remove()


def begin_attempt(state: RunState, facts: Mapping[str, Any]) -> Run:
    """Write an attempt into the manifest, as Run.claim does. Raises OutputLocked, and OSError of the storage.

    The write of the manifest decides. After it ``_SUCCESS`` is deleted. If either fails, the
    manifest is unchanged.
    """
    output = state.output
    manifest = {**(state.manifest or new_manifest()), **facts}
    manifest["format_version"] = FORMAT_VERSION
    manifest["attempt"] += 1
    this_attempt = {
        "attempt": manifest["attempt"],
        "started_at": now_text(),
        "process": asdict(Process.current()),
        "driver": uuid4().hex[:12],  # no two drivers ever write the same bytes
    }
    manifest["attempts"] = [*manifest["attempts"], this_attempt]

    data = data_of(output)
    erased = [name for name in manifest.pop(ERASED, ()) if (data / name).exists()]
    if erased:
        manifest[ERASED] = erased

    with _put_back_on_error(output / RUN):
        write_manifest(replace(state, manifest=manifest))
        for directory in (root_of(output), output):  # the whole output's, and the shard's
            (directory / SUCCESS).remove()

    data.make_directory()
    for directory in (output, data):
        directory.remove_temporary()
    return Run(output, manifest["run_id"], manifest["attempt"], manifest.get("config_hash", ""))


@contextmanager
def _put_back_on_error(file: StoragePath) -> Iterator[None]:
    """Put back what the file held if the storage fails, as where files may be written and not deleted."""
    before = file.read_bytes() if file.exists() else None
    try:
        yield
    except OSError:
        with suppress(OSError):
            if before is not None and file.read_bytes() != before:
                file.write_atomic(before)
        raise


def is_current(state: RunState) -> bool:
    """Return whether ``_run.json`` is unchanged since the state was read."""
    return version_of(state.output / RUN) == state.version


def new_manifest(attempt: int = 0) -> dict[str, Any]:
    """Return the manifest of a run before its first attempt.

    Args:
        attempt: last attempt number that was used in the directory.
    """
    return {
        "run_id": uuid4().hex[:12],
        "created_at": now_text(),
        "attempt": attempt,
        "attempts": [],
    }


def write_manifest(state: RunState) -> None:
    """Write the manifest. Raises OutputLocked if another process has written it since the state was read."""
    file = state.output / RUN
    data = json_bytes(state.manifest)
    if (file.create(data) if state.version is None else file.replace(data, state.version)) is None:
        raise OutputLocked(f"{file} is being written by another driver: wait for it to end")


def overwritten(output: StoragePath) -> tuple[RunState, list[StoragePath]]:
    """Return the state for a claim that overwrites the directory's run, and the part files that it will delete.

    Nothing is deleted here. The claim's manifest names a new run, whose attempt numbers continue.
    From then on `stale_files` recognises the old files by their attempts, or because the manifest
    names them. Raises OutputMismatch for files of other programs.
    """
    version = version_of(output / RUN)
    try:
        manifest = read_record(output / RUN, JobRecord, RUN_REMEDY)
    except OutputDamaged:
        manifest = None
    data = data_of(output)
    files = own_files(data)
    attempts = [attempt_of(file) or 0 for file in files]
    number = max([manifest["attempt"] if manifest else 0, *attempts])
    unnumbered = [_name_below(data, file) for file in files if attempt_of(file) is None]
    return RunState(output, version, new_manifest(number) | {ERASED: unnumbered}), files


def remove_overwritten(output: StoragePath, files: Iterable[StoragePath]) -> None:
    """Delete the records and these files of a run that was overwritten."""
    for file in [*(output / name for name in (SUMMARY, PROGRESS, REPORT, STOPPED_FILE)), *files]:
        file.remove()


def _name_below(data: StoragePath, file: StoragePath) -> str:
    return file.text.removeprefix(data.text + "/")


def stale_files(state: RunState) -> list[StoragePath]:
    """Return the files of an overwritten run, including those that its writers published afterwards.

    Raises OutputDamaged if such a file has rows of this run: then ``_run.json`` lacks attempts and
    cannot be trusted.
    """
    output = state.output
    record = state.record
    first = record["attempts"][0]["attempt"] if record["attempts"] else record["attempt"] + 1
    data = data_of(output)
    stale = []
    for file in part_files(data):
        attempt = attempt_of(file)
        if _name_below(data, file) in record.get(ERASED, ()):
            stale.append(file)
        elif attempt is not None and attempt < first:
            if _has_rows_of(file, record["run_id"]):
                raise OutputDamaged(
                    f"{output / RUN} is damaged (it lacks attempt {attempt}, which made {file.name}): put it "
                    "back from a copy, or delete it and adopt the rows with eagle-ray repair"
                )
            stale.append(file)
    return stale


def _has_rows_of(file: StoragePath, run_id: str) -> bool:
    """Return whether a row names this run. A file that cannot be read has none that could be kept."""
    try:
        return run_id in pc.unique(read_part(file, ["run_id"])["run_id"]).to_pylist()
    except OutputDamaged:
        return False


def manifest_of(output: StoragePath) -> dict[str, Any]:
    """Return the manifest of a run that has begun. Raises OutputDamaged if it is gone or damaged."""
    manifest = Run.inspect(output, RunRecord).manifest
    if manifest is None:
        raise OutputDamaged(
            f"{output / RUN} is gone: put it back from a copy, or start the job again"
        )
    return manifest


def version_of(file: StoragePath) -> int | str | None:
    try:
        return file.stat().version
    except FileNotFoundError as error:
        check_bucket(error)
        return None


def now_text() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")
