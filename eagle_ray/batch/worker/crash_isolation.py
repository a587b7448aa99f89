"""Handle crashes of engines: classify the fault, decide whether to restart, and find the row that causes it.

A fault of a device or its memory is local, and so is a device that is too small for the model.
After such a fault the actor starts another engine on its device. If that fails, too, the actor
ends, and Ray starts it again, perhaps on another device. A failure that every worker would have,
such as a missing model, ends the job. Errors are recognized by name and text, so the driver can
classify them without torch.

    >>> classify_error(RuntimeError("CUDA error: an illegal memory access was encountered"))
    Fault(line='device fault (RuntimeError: CUDA error: ...): look at the device ...is_local=True...)

Isolation: run batches so that a row that crashes the engine takes few other rows with it.

A crash does not say which row in flight was at fault: a prompt that exhausts the device's memory,
tokens that a kernel cannot handle, or no row at all. So each row in flight is charged with it and
is a suspect from then on. Suspects wait until the engine is empty and run in ever smaller groups
(``max_group_size``), until the row at fault crashes the engine alone and the others are answered. A
row that was in flight in four crashes (MAX_CRASHES) becomes an error row with code ``worker_died``:
once with all rows, once in a small group and twice alone.

Nothing is recorded before the first crash. After it the CrashLog is saved before each group of
suspects, since a row may also end the actor's own process, as a lack of the node's memory does.

    isolation = Isolation(engine, CrashLog(), slots=16)
    table = await isolation.run_batch(batch)
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol

import pyarrow as pa
import pyarrow.compute as pc

from eagle_ray.core.errors import OUT_OF_MEMORY, ConfigError, EngineError, RankError, UnfitDevice
from eagle_ray.core.shared_lock import SharedExclusiveLock
from eagle_ray.requests.columns import location_text
from eagle_ray.runs.job_errors import ClusterError, ModelUnusable, outcome_of
from eagle_ray.storage.store import DISK_FULL, StorageError

WORKER_DIED = "worker_died"
MAX_CRASHES = 4  # with everything in flight, in a small group, and twice as the only row
KILLED = "the process was killed"  # reason of a worker that left none
LOCATION_COLUMNS = ("source_file", "row_index", "source_line")
FIX = "shorten the prompt, or set execution.slots or execution.kv_tokens to less"
SMALLER = (
    "set execution.kv_tokens, execution.slots, speculative.max_nodes or model.max_model_len to less"
)
LOOK = "look at the device (nvidia-smi, dmesg); its node can be taken out of the cluster while the job runs"
RANK_FAILED = " failed ("  # in the error of a rank that says what has ended it
# Pattern of an error of another rank of the engine.
RANK_UNFIT = re.compile(r"failed \((UnfitDevice|ConfigError|EngineError): (.*?)\)?$")
DEVICE = re.compile(
    r"AcceleratorError|\b(CUDA|HIP|cuDNN|cuBLAS|NCCL)\b.*(error|fail)|device-side assert",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True)
class CrashRecord:
    """Number of workers that crashed while one row was in flight, and the reason of the last crash."""

    num_crashes: int
    reason: str

    @property
    def is_final(self) -> bool:
        """Return whether the row has crashed engines MAX_CRASHES times, so that it becomes an error row."""
        return self.num_crashes >= MAX_CRASHES


@dataclass(slots=True)
class CrashLog:
    """The rows that one actor's crashes are charged to. A copy of it outlives the actor's process.

    Attributes:
        records: crashes of each row. Rows whose record is not final are suspects.
        in_flight: suspects that the engine has now, empty while it loads. None means that it has
            other rows, which are not listed.
        charges_all: whether each row that arrives is charged, because it may have been in flight
            without being listed.
    """

    records: dict[str, CrashRecord] = field(default_factory=dict)
    in_flight: list[str] | None = field(default_factory=list)
    charges_all: bool = False

    def charge(self, ids: Iterable[str], reason: str) -> None:
        """Add one crash to the records of rows, unless a record is final."""
        for id in ids:
            before = self.records.get(id, CrashRecord(0, reason))
            if not before.is_final:
                self.records[id] = CrashRecord(before.num_crashes + 1, reason)

    def clear(self, ids: Iterable[str]) -> None:
        """Delete the records of answered rows, unless a record is final."""
        for id in self.suspects(ids):
            del self.records[id]

    def suspects(self, ids: Iterable[str]) -> dict[str, int]:
        """Return the number of crashes of each suspect among these rows."""
        recorded = ((id, self.records[id]) for id in ids if id in self.records)
        return {id: record.num_crashes for id, record in recorded if not record.is_final}


class CrashingEngine(Protocol):
    """Protocol of an engine that an Isolation runs rows on."""

    async def answer(self, requests: pa.Table) -> pa.Table:
        """Answer a table with one or more rows per request, in order. Raises EngineError if the engine crashes."""
        ...

    async def restart(self, error: EngineError) -> None:
        """Replace the engine after it crashed with this error. No request is in flight."""
        ...

    async def save(self, log: CrashLog) -> None:
        """Store a copy of the log outside this process, which may end."""
        ...


class Isolation:
    """Runs batches of requests on one engine, and runs suspects apart from all other rows.

    If the actor's former process ended with rows in flight that its log does not list, Ray sends
    their batches again at once. So all rows that arrive before the first batch is answered are
    charged.

    Args:
        log: log that the actor's former process left.
        slots: slots of the engine.
    """

    def __init__(self, engine: CrashingEngine, log: CrashLog, slots: int):
        self._engine = engine
        self._log = log
        self._slots = slots
        log.charges_all |= log.in_flight is None
        log.charge(log.in_flight or (), KILLED)
        log.in_flight = []
        self._lock = SharedExclusiveLock()
        self._crash: EngineError | None = None  # error of the engine, until it is replaced

    async def run_batch(self, batch: pa.Table) -> pa.Table:
        """Return the output rows of the batch, in the batch's order."""
        ids: list[str] = batch["request_id"].to_pylist()
        if self._log.charges_all:
            self._log.charge((id for id in ids if id not in self._log.records), KILLED)
        left = ids
        parts: list[pa.Table] = []
        while left or not parts:
            if self._crash is not None:
                await self._restart()
            group = self._next_group(left)
            answers = await self._run_group(batch, group)
            if answers is not None:
                parts.append(answers)
                left = _without(left, group)
        self._log.charges_all = False
        return parts[0] if len(parts) == 1 else _in_order(pa.concat_tables(parts), ids)

    def _next_group(self, ids: list[str]) -> list[str]:
        """Return the rows to run next: first all that are not suspects, then suspects with the fewest crashes."""
        suspects = self._log.suspects(ids)
        if len(suspects) < len(ids) or not ids:
            return _without(ids, suspects)
        min_crashes = min(suspects.values())
        return [id for id, crashes in suspects.items() if crashes == min_crashes][
            : max_group_size(min_crashes, self._slots)
        ]

    async def _run_group(self, batch: pa.Table, ids: list[str]) -> pa.Table | None:
        """Return the answers, or None if the engine crashed, meanwhile or before."""
        is_suspect = bool(self._log.suspects(ids))
        async with self._lock.exclusive() if is_suspect else self._lock.shared():
            if self._crash is not None:
                return None
            await self._record(ids if is_suspect else None)
            try:
                answers = await self._engine.answer(
                    _with_error_rows(_select_rows(batch, ids), self._log.records)
                )
            except EngineError as error:
                self._log.charge(ids, classify_error(error).line)
                self._crash = error
                return None
            self._log.clear(ids)
            return answers

    async def _restart(self) -> None:
        async with self._lock.exclusive():
            if self._crash is not None:  # else another batch was first
                await self._record([])
                await self._engine.restart(self._crash)
                self._crash = None

    async def _record(self, in_flight: list[str] | None) -> None:
        """Note the rows that the engine has from now on, and save the log if that was not so before."""
        if in_flight != self._log.in_flight:
            self._log.in_flight = in_flight
            await self._engine.save(self._log)


def max_group_size(num_crashes: int, slots: int) -> int:
    """Return how many rows with this many crashes run together: a quarter of the slots after one crash, then one.

    A quarter, because most crashes are accidents, and a large group clears many rows at once.
    """
    return max(1, slots // 4) if num_crashes == 1 else 1


def _with_error_rows(batch: pa.Table, records: dict[str, CrashRecord]) -> pa.Table:
    """Return the batch with rows of a final record turned into error rows, as the reader does with unreadable rows."""
    final = {id: record for id, record in records.items() if record.is_final}
    if not final:
        return batch
    rows = batch.select(
        ["request_id", *LOCATION_COLUMNS, "error_code", "error_message"]
    ).to_pylist()
    for row in rows:
        record = final.get(row["request_id"])
        if record is not None:
            row["error_code"] = WORKER_DIED
            row["error_message"] = (
                f"{location_text(row)}: {record.num_crashes} workers died while they answered it "
                f"({record.reason}): {FIX}"
            )
    for name in ("error_code", "error_message"):
        field = batch.schema.field(name)
        values = pa.array([row[name] for row in rows], field.type)
        batch = batch.set_column(batch.schema.get_field_index(name), field, values)
    return batch


def _select_rows(batch: pa.Table, ids: list[str]) -> pa.Table:
    if len(ids) == len(batch):
        return batch
    column = batch["request_id"]
    return batch.filter(pc.is_in(column, pa.array(ids, column.type)))


def _without(ids: list[str], others: Iterable[str]) -> list[str]:
    others = set(others)
    return [id for id in ids if id not in others]


def _in_order(answers: pa.Table, ids: list[str]) -> pa.Table:
    """Sort rows into the order of the batch; the samples of a request keep their order."""
    place = {id: i for i, id in enumerate(ids)}
    order = [place[id] for id in answers["request_id"].to_pylist()]
    return answers.take(
        pa.array(sorted(range(len(order)), key=order.__getitem__), pa.int64())
    ).combine_chunks()


@dataclass(frozen=True, slots=True)
class Fault:
    """The cause of a worker's failure.

    Attributes:
        line: description of the fault, with a remedy if one is known.
        is_local: another worker may run without this error.
        is_transient: the same command may succeed later.
        is_end: a process of the engine has ended or hangs.
    """

    line: str
    is_local: bool
    is_transient: bool = False
    is_end: bool = False


class WorkerError(EngineError):
    """A fault classified in the worker's own process, which saw its cause."""

    def __init__(self, fault: Fault):
        super().__init__(fault.line)
        self.fault = fault

    def __reduce__(self):
        return type(self), (self.fault,)


def classify_error(error: Exception) -> Fault:
    """Return the fault behind an error of a worker's start or of its engine, by the device's error that caused it."""
    if isinstance(error, WorkerError):
        return error.fault
    cause: BaseException = error
    if isinstance(error, EngineError) and error.__cause__ is not None:
        cause = error.__cause__
    if isinstance(cause, UnfitDevice):
        return Fault(str(cause), is_local=True)

    message = _message_of(cause)
    is_out_of_memory = OUT_OF_MEMORY.search(message) is not None
    if isinstance(cause, RankError):
        unfit = RANK_UNFIT.search(message)
        if unfit is not None:
            return Fault(unfit[2], is_local=unfit[1] == "UnfitDevice")
        if not is_out_of_memory:
            is_end = RANK_FAILED not in message
            return Fault(message, is_local=True, is_transient=True, is_end=is_end)

    if is_out_of_memory:
        text = f"its memory is too small ({message}): {SMALLER}"
        return Fault(text, is_local=True, is_transient=True)
    if DEVICE.search(message):
        return Fault(f"device fault ({message}): {LOOK}", is_local=True, is_transient=True)
    is_disk_full = isinstance(cause, OSError) and cause.errno in DISK_FULL
    return Fault(_message_of(error), is_local=is_disk_full, is_transient=_may_pass(cause))


def as_config_error(error: Exception) -> Exception:
    """Return the error that the driver raises for a worker's failed start: one line, and a class
    that needs no torch."""
    if isinstance(error, ConfigError):
        return error
    fault = classify_error(error)
    kind = ClusterError if fault.is_transient else ModelUnusable
    return kind(f"a worker cannot start: {fault.line}")


def _may_pass(error: BaseException) -> bool:
    """Return whether storage or network failed temporarily. A bare OSError, as of a missing model, has no errno."""
    if isinstance(error, (ConnectionError, TimeoutError, StorageError)):
        return outcome_of(error).is_transient
    return isinstance(error, OSError) and error.errno is not None and outcome_of(error).is_transient


def _message_of(error: BaseException) -> str:
    """Return the first line, with the class name for errors of other libraries."""
    reason = str(error).strip().partition("\n")[0]
    return (
        reason
        if isinstance(error, EngineError)
        else f"{type(error).__name__}: {reason}".rstrip(": ")
    )
