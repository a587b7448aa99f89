"""CrashTracker: the rows in flight on each worker, and how many crashes each row was part of.

A worker can crash for many reasons, and a row is one of them: a prompt that exhausts the device's memory, or tokens
that a kernel cannot handle. The crash does not say which row in flight was at fault, so each one is charged with it.
Charged rows run in ever smaller groups (``max_group_size``) until the row at fault crashes the worker alone and the
others are cleared. After MAX_CRASHES a row is not run again.

    >>> tracker = CrashTracker()
    >>> tracker.begin("actor 1", ["a", "b"])
    {}
    >>> tracker.record_crash("actor 1", "out of memory")
    >>> tracker.begin("actor 1", ["b", "c"])
    {'b': CrashRecord(num_crashes=1, reason='out of memory')}
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

MAX_CRASHES = 4  # two in groups, two as the only row


@dataclass(frozen=True, slots=True)
class CrashRecord:
    """Number of workers that crashed while one row was in flight, and the reason of the last crash."""

    num_crashes: int
    reason: str

    @property
    def is_final(self) -> bool:
        return self.num_crashes >= MAX_CRASHES


@dataclass(slots=True)
class CrashTracker:
    """Crash records of one job, by worker name. The name outlives the process: the next process reports the crash."""

    _in_flight: dict[str, set[str]] = field(default_factory=dict)
    _records: dict[str, CrashRecord] = field(default_factory=dict)

    def begin(self, worker: str, ids: Iterable[str]) -> dict[str, CrashRecord]:
        """Mark the rows without a record as in flight on the worker; return the records of the others."""
        ids = list(ids)
        records = {id: self._records[id] for id in ids if id in self._records}
        self.begin_suspects(worker, (id for id in ids if id not in records))
        return records

    def begin_suspects(self, worker: str, ids: Iterable[str]) -> None:
        """Mark the rows as in flight on the worker, with or without a record."""
        self._in_flight.setdefault(worker, set()).update(ids)

    def finish(self, worker: str, ids: Iterable[str]) -> None:
        """Mark the rows as finished and delete their records, unless final."""
        for id in ids:
            self._in_flight.get(worker, set()).discard(id)
            if id in self._records and not self._records[id].is_final:
                del self._records[id]

    def record_crash(self, worker: str, reason: str) -> None:
        """Charge every row in flight on the worker with one crash."""
        for id in self._in_flight.pop(worker, ()):
            before = self._records.get(id)
            self._records[id] = CrashRecord(1 + (before.num_crashes if before else 0), reason)


def max_group_size(num_crashes: int, slots: int) -> int:
    """Return how many rows with this many crashes run together: a quarter of the slots after one crash, then one.

    A quarter, because most crashes are accidents, and a large group is cleared soon.
    """
    return max(1, slots // 4) if num_crashes == 1 else 1
